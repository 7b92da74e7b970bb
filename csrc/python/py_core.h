/* py_core.h - what the files of the binding share. Only csrc/python includes Python.h, only py_numpy.c NumPy.
 *
 * Shape of every method: convert the arguments (GIL held), enter the object, make the library call (GIL released, but
 * for look-ups of a few microseconds), leave, turn the status into a result or an exception. Errors leave through
 * hkv_py_raise() alone.
 */
#ifndef HKV_PY_CORE_H
#define HKV_PY_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "hkv.h"

/* ------------------------------------------------------------------------------------------------ exception classes */

typedef enum hkv_py_error_kind {
    HKV_PY_ERROR, /* base of the others */
    HKV_PY_CONFIG_ERROR,
    HKV_PY_ARGUMENT_ERROR,
    HKV_PY_DTYPE_ERROR,
    HKV_PY_CACHE_FULL_ERROR,
    HKV_PY_OUT_OF_MEMORY_ERROR,
    HKV_PY_STEP_ERROR,
    HKV_PY_BUSY_ERROR,
    HKV_PY_STALE_HANDLE_ERROR,
    HKV_PY_NO_DEVICE_ERROR,
    HKV_PY_DEVICE_ERROR,
    HKV_PY_N_ERRORS
} hkv_py_error_kind;

/* ----------------------------------------------------------------------------------------------------- module state */

/* The workers that caches and stores share. Counted, because an exported view may outlive the module. */
typedef struct hkv_py_pool {
    atomic_int n_refs;
    hkv_threads *threads;
} hkv_py_pool;

typedef struct hkv_py_state {
    PyObject *errors[HKV_PY_N_ERRORS];
    PyTypeObject *cache_type, *store_type, *view_type;
    PyObject *dlpack_name, *dlpack_device_name, *exchange_api_name, *requires_grad_name; /* interned */
    PyObject *dlpack_kwnames, *dlpack_old_kwnames; /* ("stream", "max_version"), ("stream",) */
    PyObject *dlpack_version;                      /* (1, 3) */
    pthread_mutex_t pool_mutex;                    /* guards the two below; no Python call is made while it is held */
    hkv_py_pool *pool;                             /* NULL until the first cache or store */
    int32_t n_threads;                             /* asked for; 0 = the cores this process may use */
} hkv_py_state;

/* State of the module that defines the type of `self`; the types cannot be subclassed. */
hkv_py_state *hkv_py_state_of(PyObject *self);

/* A new reference to the pool, made on first use; NULL with an exception. */
hkv_py_pool *hkv_py_pool_acquire(hkv_py_state *state);
void hkv_py_pool_release(hkv_py_pool *pool);

/* ----------------------------------------------------------------------------------------------------------- places */

/* Where a call computes: what its tensors must lie on, and the stream that their producers' work has to precede. */
typedef struct hkv_py_place {
    int32_t device_type, device_id; /* HKV_DL_CPU and 0, or HKV_DL_CUDA and which one */
    void *stream;                   /* CUDA stream; NULL = the default one */
} hkv_py_place;

/* ----------------------------------------------------------------------------------------------- errors: py_error.c */

int hkv_py_errors_init(hkv_py_state *state, PyObject *module);

/* Raise what a failed library call reported. Returns NULL. */
PyObject *hkv_py_raise(hkv_py_state *state, const hkv_error *error);
/* The same where the arguments are configuration fields: ConfigError for every caller's mistake. */
PyObject *hkv_py_raise_config(hkv_py_state *state, const hkv_error *error);
/* Raise an error of the binding's own. Returns -1. */
int hkv_py_fail(hkv_py_state *state, hkv_status status, const char *argument, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The same, "what: text of the exception that is set now", which becomes its cause. */
int hkv_py_fail_from_current(hkv_py_state *state, hkv_status status, const char *argument, const char *what);

/* -------------------------------------------------------------------------------------- library objects: py_owner.c */

/* A library object that a Python object and its exported views share. Freed with the last reference, on whatever
 * thread that happens, with or without the GIL. */
typedef struct hkv_py_owner {
    atomic_int n_refs;
    void *handle;
    void (*destroy)(void *handle);
    hkv_py_pool *pool;
    struct hkv_py_tensor *memory; /* in which the library object lies; NULL = none */
} hkv_py_owner;

/* Takes over the handle, the reference to the pool, and the content of memory (which may be NULL or empty); NULL with
 * MemoryError, then all are freed. */
hkv_py_owner *hkv_py_owner_create(void *handle, void (*destroy)(void *handle), hkv_py_pool *pool,
                                  struct hkv_py_tensor *memory);
hkv_py_owner *hkv_py_owner_acquire(hkv_py_owner *owner);
void hkv_py_owner_release(hkv_py_owner *owner);

/* Head of Cache and Store. A method holds the object from enter to leave, so that what it checked (the size of the open
 * step, say) still holds when the library runs without the GIL. */
typedef struct hkv_py_object {
    PyObject_HEAD atomic_int in_use;
    hkv_py_owner *owner; /* NULL once closed; touched only between enter and leave */
} hkv_py_object;

/* -1 with BusyError if another thread is inside, or StepError if the object is closed. */
int hkv_py_enter(hkv_py_state *state, hkv_py_object *object);
void hkv_py_leave(hkv_py_object *object);
/* close(): drop the library object now. Harmless when closed; BusyError if another thread is inside. */
PyObject *hkv_py_close(PyObject *self, PyObject *unused);
void hkv_py_dealloc(PyObject *self);

/* --------------------------------------------------------------------------------------- configuration: py_config.c */

/* Fill config from a mapping of field names to numbers, on the defaults, and check it. */
int hkv_py_config_from_dict(hkv_py_state *state, PyObject *values, hkv_config *config);
/* "float16", "bfloat16" or "float32". */
int hkv_py_dtype_from_name(hkv_py_state *state, const char *name, hkv_dtype *dtype);

/* --------------------------------------------------------------------------------------------- devices: py_device.c */

/* The backend of "cpu", "cuda" or "cuda:N" (NULL for the CPU), or an exception that says what is missing. */
int hkv_py_device_find(hkv_py_state *state, const char *name, const hkv_backend **backend, int32_t *device_index);

/* --------------------------------------------------------------------------------------------- results: py_result.c */

/* Add value (stolen) to dict under name; -1 with an exception, also if value is NULL. */
int hkv_py_set_item(PyObject *dict, const char *name, PyObject *value);
PyObject *hkv_py_counters_to_dict(const hkv_counters *counters);

/* --------------------------------------------------------------------------- functions and types of the other files */

extern PyMethodDef hkv_py_config_methods[];
extern PyMethodDef hkv_py_record_methods[];
extern PyMethodDef hkv_py_device_methods[];
extern PyType_Spec hkv_py_cache_spec;
extern PyType_Spec hkv_py_store_spec;
extern PyType_Spec hkv_py_view_spec;

/* A read-only view of a cache's pages, [n_blocks, Hkv, record_bytes] bytes; takes its own reference to the owner. */
PyObject *hkv_py_view_create(hkv_py_state *state, hkv_py_owner *owner, int32_t layer_idx, const hkv_cache_pages *pages,
                             const hkv_py_place *place);

#define HKV_PY_FUNCTION(f) ((PyCFunction)(void (*)(void))(f))

#endif
