/* py_tensor.h - tensors that come in: DLPack (C exchange API, __dlpack__) and NumPy arrays behind one struct. */
#ifndef HKV_PY_TENSOR_H
#define HKV_PY_TENSOR_H

#include "py_core.h"
#include "py_dlpack.h"

#define HKV_PY_MAX_DIMS 8

typedef struct hkv_py_tensor {
    const char *argument; /* name for messages */
    void *data;           /* of element 0; NULL if empty */
    int32_t ndim;
    int64_t shape[HKV_PY_MAX_DIMS];
    int64_t strides[HKV_PY_MAX_DIMS]; /* elements; of a dimension of size 1 what compact storage would have */
    int32_t device_type, device_id;   /* HKV_DL_CPU, ... */
    uint8_t dtype_code, dtype_bits;   /* HKV_DL_FLOAT, ... */
    int read_only;
    /* At most one of these keeps the memory alive until hkv_py_tensor_release. */
    PyObject *holder;
    hkv_dl_managed *managed;
    hkv_dl_managed_versioned *managed_versioned;
} hkv_py_tensor;

/* The CPU. */
extern const hkv_py_place hkv_py_host;
/* Where an object of this backend (NULL = CPU) computes. */
hkv_py_place hkv_py_place_of(const hkv_backend *backend, int32_t device_index);
/* The place of an object for one call on `stream`, a CUDA stream by its address as frameworks give it; 0 is the default
 * stream, and all there is on the CPU. */
int hkv_py_place_for_call(hkv_py_state *state, const hkv_py_place *object_place, PyObject *stream,
                          hkv_py_place *call_place);

/* Look into obj, which must lie on place, without copying it; what its producer queued comes before what place->stream
 * gets from now on. With retain = 0 the tensor is valid only until control returns to Python (the caller's reference to
 * obj keeps it alive); with retain = 1 until hkv_py_tensor_release. ArgumentError or DtypeError name the argument. A
 * tensor that was zeroed or failed may be released too. */
int hkv_py_tensor_import(hkv_py_state *state, PyObject *obj, const char *argument, const hkv_py_place *place,
                         int retain, hkv_py_tensor *t);
void hkv_py_tensor_release(hkv_py_tensor *t);

/* Checks, each naming argument, rule and value. */
int hkv_py_tensor_check_dtype(hkv_py_state *state, const hkv_py_tensor *t, hkv_dtype dtype);
/* ndim and every shape[i] >= 0; letters describe the dimensions: "[N, Hq, D]". */
int hkv_py_tensor_check_shape(hkv_py_state *state, const hkv_py_tensor *t, int32_t ndim, const int64_t *shape,
                              const char *letters);
/* Last dimension contiguous, no negative strides, data aligned to its elements; with writable = 1 also not read-only
 * and no two elements in one place. */
int hkv_py_tensor_check_layout(hkv_py_state *state, const hkv_py_tensor *t, int writable);

/* The same for a tensor that is read, and no gaps anywhere. */
int hkv_py_tensor_check_compact(hkv_py_state *state, const hkv_py_tensor *t);

/* obj as memory for an object at place, to be released, or handed on to its owner; None is none. Any dtype and shape,
 * writable, compact, not empty. */
int hkv_py_memory_import(hkv_py_state *state, PyObject *obj, const hkv_py_place *place, hkv_py_tensor *t,
                         hkv_memory *memory);

/* Whether there is no element; strides mean nothing then. */
int hkv_py_tensor_is_empty(const hkv_py_tensor *t);

/* "float32 [2, 3]", for messages. */
typedef struct hkv_py_text {
    char chars[160];
} hkv_py_text;
hkv_py_text hkv_py_tensor_describe(const hkv_py_tensor *t);

/* Element i of an integer tensor's flat memory at offset elements from its start; *too_large for uint64 beyond int64.
 */
int64_t hkv_py_tensor_read_int(const hkv_py_tensor *t, int64_t offset, int *too_large);

/* py_numpy.c. import: 1 if obj is an array and t was filled, 0 if it is none, -1 with an exception. */
int hkv_py_numpy_init(void);
int hkv_py_numpy_import(hkv_py_state *state, PyObject *obj, hkv_py_tensor *t);
/* A new array [shape] of float32 or uint8 elements and where its data is. */
PyObject *hkv_py_numpy_create_f32(int32_t ndim, const int64_t *shape, float **data);

/* ----------------------------------------------------------------------------------------- index arrays: py_index.c */

/* Integers, int32 or int64 as asked for: on the CPU a converted copy, on a device the caller's own. */
typedef struct hkv_py_ints {
    void *values;         /* [shape[0]] or [shape[0], shape[1]] compact; NULL if empty */
    int64_t shape[2];     /* shape[1] = 1 for one dimension */
    hkv_py_tensor tensor; /* keeps values on a device alive */
} hkv_py_ints;

/* What an index argument must be. */
typedef struct hkv_py_ints_rule {
    const char *argument;
    int32_t ndim;        /* 1 or 2 */
    int64_t lowest;      /* allowed values, both included */
    int64_t highest;     /* ... of int32 if width is 4 */
    size_t width;        /* 4 or 8: bytes of an element of values */
    int64_t n_expected;  /* shape[0], -1 = any */
    const char *letters; /* "[R]" */
} hkv_py_ints_rule;

/* On the CPU accepts lists and tuples of integers, NumPy arrays and DLPack tensors of any integer width and strides. On
 * a device nothing is copied and no value looked at: a compact tensor of the width asked for must lie there. */
int hkv_py_ints_import(hkv_py_state *state, PyObject *obj, const hkv_py_ints_rule *rule, const hkv_py_place *place,
                       hkv_py_ints *ints);
void hkv_py_ints_release(hkv_py_ints *ints);

/* One Python integer in lowest..highest; bools and reals are refused. */
int hkv_py_int_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int64_t lowest, int64_t highest,
                           int64_t *value);
/* An index of one of n things. */
int hkv_py_index_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int32_t n, int32_t *value);
/* Any int32; what it means is checked by the library. */
int hkv_py_int32_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int32_t *value);

/* --------------------------------------------------------------------------------- arguments of attend: py_attend.c */

#define HKV_PY_N_ATTEND_ARGS 11 /* layer, q, k, v, out, scale, soft_cap, sinks, lse, mass, stream */

/* What the open step and the object expect. */
typedef struct hkv_py_attend_rule {
    int32_t n_layers, n_kv_heads, head_dim;
    hkv_dtype dtype;
    hkv_py_place place; /* of the object; its stream is NULL */
    int64_t n_tokens;   /* N of the open step */
    int64_t n_rows;     /* R */
    int64_t max_blocks; /* logical blocks of the longest row */
} hkv_py_attend_rule;

typedef struct hkv_py_attend {
    int32_t layer_idx;
    hkv_attend args;
    hkv_py_tensor q, k, v, out, sinks, lse, mass;
} hkv_py_attend;

/* Convert and check the positional arguments. The result is to be released also after a failure. */
int hkv_py_attend_parse(hkv_py_state *state, PyObject *const *args, Py_ssize_t n_args, const hkv_py_attend_rule *rule,
                        hkv_py_attend *attend);
void hkv_py_attend_release(hkv_py_attend *attend);

/* k_out, v_out [n_tokens, Hkv, D] of read_tokens: compact tensors to be written. */
int hkv_py_token_output_import(hkv_py_state *state, PyObject *obj, const char *argument, int64_t n_tokens,
                               const hkv_py_attend_rule *rule, hkv_py_tensor *t);

#endif
