/* py_dlpack.h - the parts of the DLPack 1.3 binary interface that the binding uses.
 *
 * Layouts as published at https://dmlc.github.io/dlpack/latest/c_api.html; the names there in brackets.
 */
#ifndef HKV_PY_DLPACK_H
#define HKV_PY_DLPACK_H

#include <stdint.h>

#define HKV_DL_VERSION_MAJOR 1
#define HKV_DL_VERSION_MINOR 3

enum { HKV_DL_INT = 0, HKV_DL_UINT = 1, HKV_DL_FLOAT = 2, HKV_DL_BFLOAT = 4, HKV_DL_BOOL = 6 };
enum { HKV_DL_CPU = 1, HKV_DL_CUDA = 2, HKV_DL_CUDA_HOST = 3, HKV_DL_CUDA_MANAGED = 13 };
enum { HKV_DL_STREAM_LEGACY = 1, HKV_DL_STREAM_NO_SYNC = -1 }; /* arguments of __dlpack__ */
enum { HKV_DL_FLAG_READ_ONLY = 1 };

#define HKV_DL_CAPSULE                "dltensor"
#define HKV_DL_CAPSULE_USED           "used_dltensor"
#define HKV_DL_CAPSULE_VERSIONED      "dltensor_versioned"
#define HKV_DL_CAPSULE_VERSIONED_USED "used_dltensor_versioned"
#define HKV_DL_CAPSULE_EXCHANGE_API   "dlpack_exchange_api"

typedef struct hkv_dl_version { /* DLPackVersion */
    uint32_t major, minor;
} hkv_dl_version;

typedef struct hkv_dl_tensor { /* DLTensor */
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape;   /* [ndim] */
    int64_t *strides; /* [ndim] in elements; NULL (before 1.2) = compact */
    uint64_t byte_offset;
} hkv_dl_tensor;

typedef struct hkv_dl_managed { /* DLManagedTensor */
    hkv_dl_tensor tensor;
    void *context;
    void (*deleter)(struct hkv_dl_managed *self); /* may be NULL */
} hkv_dl_managed;

typedef struct hkv_dl_managed_versioned { /* DLManagedTensorVersioned */
    hkv_dl_version version;               /* a consumer looks at this before anything below flags */
    void *context;
    void (*deleter)(struct hkv_dl_managed_versioned *self); /* may be NULL */
    uint64_t flags;
    hkv_dl_tensor tensor;
} hkv_dl_managed_versioned;

typedef struct hkv_dl_api_header { /* DLPackExchangeAPIHeader */
    hkv_dl_version version;
    const struct hkv_dl_api_header *previous;
} hkv_dl_api_header;

typedef struct hkv_dl_api { /* DLPackExchangeAPI; functions that are not called here have no type */
    hkv_dl_api_header header;
    void (*allocate)(void);
    int (*managed_from_object)(void *object, hkv_dl_managed_versioned **managed); /* owning; -1 with an exception */
    void (*object_from_managed)(void);
    int (*tensor_from_object)(void *object, hkv_dl_tensor *tensor); /* borrowed until control returns; may be NULL */
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
} hkv_dl_api;

#endif
