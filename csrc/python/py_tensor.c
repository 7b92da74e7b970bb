/* py_tensor.c - look into a tensor of any library without copying it, and say exactly what is wrong with it. */
#include "py_tensor.h"

#include <stdio.h>
#include <string.h>

/* --------------------------------------------------------------------------------------------------------- messages */

static const char *dtype_family(uint8_t code)
{
    switch (code) {
    case HKV_DL_INT:
        return "int";
    case HKV_DL_UINT:
        return "uint";
    case HKV_DL_FLOAT:
        return "float";
    case HKV_DL_BFLOAT:
        return "bfloat";
    case HKV_DL_BOOL:
        return "bool";
    default:
        return "other";
    }
}

/* "cpu", "cuda:0", "DLPack device 8:0" */
static hkv_py_text describe_device(int32_t type, int32_t id)
{
    hkv_py_text text;
    if (type == HKV_DL_CPU || type == HKV_DL_CUDA_HOST)
        snprintf(text.chars, sizeof text.chars, "cpu");
    else if (type == HKV_DL_CUDA || type == HKV_DL_CUDA_MANAGED)
        snprintf(text.chars, sizeof text.chars, "cuda:%d", (int)id);
    else
        snprintf(text.chars, sizeof text.chars, "DLPack device %d:%d", (int)type, (int)id);
    return text;
}

hkv_py_text hkv_py_tensor_describe(const hkv_py_tensor *t)
{
    hkv_py_text text;
    size_t size = sizeof text.chars;
    size_t n = (size_t)snprintf(text.chars, size, "%s%d [", dtype_family(t->dtype_code), t->dtype_bits);
    for (int32_t i = 0; i < t->ndim && n < size; i++)
        n += (size_t)snprintf(text.chars + n, size - n, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    if (n < size) snprintf(text.chars + n, size - n, "]");
    return text;
}

/* ----------------------------------------------------------------------------------------------------------- places */

const hkv_py_place hkv_py_host = {.device_type = HKV_DL_CPU};

hkv_py_place hkv_py_place_of(const hkv_backend *backend, int32_t device_index)
{
    return backend ? (hkv_py_place){.device_type = HKV_DL_CUDA, .device_id = device_index} : hkv_py_host;
}

static int is_host(const hkv_py_place *place)
{
    return place->device_type == HKV_DL_CPU;
}

int hkv_py_place_for_call(hkv_py_state *state, const hkv_py_place *object_place, PyObject *stream,
                          hkv_py_place *call_place)
{
    int64_t address;
    if (hkv_py_int_from_object(state, stream, "stream", 0, INT64_MAX, &address) < 0) return -1;
    if (is_host(object_place) && address != 0)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "stream", "there are no streams on the CPU, got %#llx",
                           (unsigned long long)address);
    *call_place = *object_place;
    call_place->stream = (void *)(uintptr_t)address;
    return 0;
}

static int check_device(hkv_py_state *state, const char *argument, int32_t type, int32_t id, const hkv_py_place *place)
{
    int fits = is_host(place) ? type == HKV_DL_CPU || type == HKV_DL_CUDA_HOST
                              : (type == HKV_DL_CUDA || type == HKV_DL_CUDA_MANAGED) && id == place->device_id;
    if (fits) return 0;
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, argument, "expected a tensor on %s, got one on %s",
                       describe_device(place->device_type, place->device_id).chars, describe_device(type, id).chars);
}

/* ----------------------------------------------------------------------------------------------------------- import */

/* Copy the fields; the rules that hold for every tensor argument are here. */
static int tensor_from_dl(hkv_py_state *state, const hkv_dl_tensor *dl, hkv_py_tensor *t)
{
    if (dl->dtype_lanes != 1)
        return hkv_py_fail(state, HKV_ERR_TYPE, t->argument, "vector dtypes (lanes %d) are not supported",
                           dl->dtype_lanes);
    if (dl->ndim < 0 || dl->ndim > HKV_PY_MAX_DIMS)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "at most %d dimensions, got %d", HKV_PY_MAX_DIMS,
                           (int)dl->ndim);
    t->data = dl->data ? (char *)dl->data + dl->byte_offset : NULL;
    t->ndim = dl->ndim;
    t->device_type = dl->device_type;
    t->device_id = dl->device_id;
    t->dtype_code = dl->dtype_code;
    t->dtype_bits = dl->dtype_bits;
    int64_t compact = 1;
    for (int32_t i = dl->ndim - 1; i >= 0; i--) {
        t->shape[i] = dl->shape[i];
        /* Producers leave anything in the stride of a dimension of size 1. */
        t->strides[i] = dl->strides && dl->shape[i] != 1 ? dl->strides[i] : compact;
        compact = t->strides[i] * t->shape[i];
    }
    return 0;
}

/* The C exchange API of obj's type, NULL without an exception if it has none that we can use. */
static const hkv_dl_api *exchange_api_of(hkv_py_state *state, PyObject *obj)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)Py_TYPE(obj), state->exchange_api_name);
    const hkv_dl_api_header *header = NULL;
    if (capsule && PyCapsule_IsValid(capsule, HKV_DL_CAPSULE_EXCHANGE_API))
        header = PyCapsule_GetPointer(capsule, HKV_DL_CAPSULE_EXCHANGE_API);
    Py_XDECREF(capsule); /* the type keeps it */
    if (!capsule) PyErr_Clear();
    while (header && header->version.major != HKV_DL_VERSION_MAJOR) header = header->previous;
    return (const hkv_dl_api *)header;
}

/* Autograd would not see what happens to the data, so both DLPack paths refuse such tensors in the same words. */
static int check_requires_grad(hkv_py_state *state, PyObject *obj, const char *argument)
{
    PyObject *flag = PyObject_GetAttr(obj, state->requires_grad_name);
    int is_set = flag == Py_True;
    Py_XDECREF(flag);
    if (!flag) PyErr_Clear();
    if (!is_set) return 0;
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, argument,
                       "must not require grad: the cache takes no part in autograd; pass tensor.detach()");
}

static int import_failed(hkv_py_state *state, PyObject *obj, const char *argument)
{
    char what[128];
    snprintf(what, sizeof what, "a %.80s could not be shared", Py_TYPE(obj)->tp_name);
    return hkv_py_fail_from_current(state, HKV_ERR_ARGUMENT, argument, what);
}

static int import_by_api(hkv_py_state *state, const hkv_dl_api *api, PyObject *obj, int retain, hkv_py_tensor *t)
{
    hkv_dl_tensor borrowed;
    if (!retain && api->tensor_from_object) {
        if (api->tensor_from_object(obj, &borrowed) < 0) return import_failed(state, obj, t->argument);
        return tensor_from_dl(state, &borrowed, t);
    }
    if (api->managed_from_object(obj, &t->managed_versioned) < 0) {
        t->managed_versioned = NULL;
        return import_failed(state, obj, t->argument);
    }
    t->read_only = (t->managed_versioned->flags & HKV_DL_FLAG_READ_ONLY) != 0;
    return tensor_from_dl(state, &t->managed_versioned->tensor, t);
}

/* A capsule is taken over (renamed, its deleter ours to call) only when its content can be used; before that it frees
 * itself. */
static int import_capsule(hkv_py_state *state, PyObject *capsule, hkv_py_tensor *t)
{
    if (PyCapsule_IsValid(capsule, HKV_DL_CAPSULE_VERSIONED)) {
        hkv_dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, HKV_DL_CAPSULE_VERSIONED);
        if (managed->version.major != HKV_DL_VERSION_MAJOR)
            return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "DLPack version %u.%u is not supported, only %d.x",
                               managed->version.major, managed->version.minor, HKV_DL_VERSION_MAJOR);
        if (tensor_from_dl(state, &managed->tensor, t) < 0) return -1;
        if (PyCapsule_SetName(capsule, HKV_DL_CAPSULE_VERSIONED_USED) < 0) return -1;
        t->read_only = (managed->flags & HKV_DL_FLAG_READ_ONLY) != 0;
        t->managed_versioned = managed;
        return 0;
    }
    if (PyCapsule_IsValid(capsule, HKV_DL_CAPSULE)) {
        hkv_dl_managed *managed = PyCapsule_GetPointer(capsule, HKV_DL_CAPSULE);
        if (tensor_from_dl(state, &managed->tensor, t) < 0) return -1;
        if (PyCapsule_SetName(capsule, HKV_DL_CAPSULE_USED) < 0) return -1;
        t->managed = managed;
        return 0;
    }
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument,
                       "__dlpack__ did not return an unused DLPack capsule but a %.80s", Py_TYPE(capsule)->tp_name);
}

/* The stream as __dlpack__ wants it: None on the CPU, and no 0, which could mean two streams. */
static PyObject *stream_for_producer(const hkv_py_place *place)
{
    if (is_host(place)) return Py_NewRef(Py_None);
    return place->stream ? PyLong_FromVoidPtr(place->stream) : PyLong_FromLong(HKV_DL_STREAM_LEGACY);
}

/* Asked again without max_version where the producer does not know it. */
static PyObject *call_dlpack(hkv_py_state *state, PyObject *obj, const hkv_py_place *place)
{
    PyObject *stream = stream_for_producer(place);
    if (!stream) return NULL;
    PyObject *args[3] = {obj, stream, state->dlpack_version};
    PyObject *capsule = PyObject_VectorcallMethod(state->dlpack_name, args, 1, state->dlpack_kwnames);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = PyObject_VectorcallMethod(state->dlpack_name, args, 1, state->dlpack_old_kwnames);
    }
    Py_DECREF(stream);
    return capsule;
}

/* A stream means something only to a producer on the same device. */
static int ask_device(hkv_py_state *state, PyObject *obj, const char *argument, const hkv_py_place *place)
{
    int type, id;
    PyObject *answer = PyObject_CallMethodNoArgs(obj, state->dlpack_device_name);
    if (!answer) return import_failed(state, obj, argument);
    int is_pair = PyTuple_Check(answer) && PyArg_ParseTuple(answer, "ii", &type, &id);
    Py_DECREF(answer);
    if (is_pair) return check_device(state, argument, type, id, place);
    PyErr_Clear();
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, argument, "__dlpack_device__ did not return (type, index)");
}

static int import_by_method(hkv_py_state *state, PyObject *obj, const hkv_py_place *place, hkv_py_tensor *t)
{
    if (!is_host(place) && ask_device(state, obj, t->argument, place) < 0) return -1;
    PyObject *capsule = call_dlpack(state, obj, place);
    if (!capsule) return import_failed(state, obj, t->argument);
    int result = import_capsule(state, capsule, t);
    Py_DECREF(capsule);
    return result;
}

/* The C API orders nothing: it serves where the producer works on our stream anyway. */
static int is_in_order(const hkv_dl_api *api, const hkv_py_place *place)
{
    void *stream = NULL;
    if (is_host(place)) return 1;
    if (!api->current_work_stream) return 0;
    if (api->current_work_stream(place->device_type, place->device_id, &stream) == 0) return stream == place->stream;
    PyErr_Clear();
    return 0;
}

static int import_from(hkv_py_state *state, PyObject *obj, const hkv_py_place *place, int retain, hkv_py_tensor *t)
{
    int is_array = hkv_py_numpy_import(state, obj, t);
    if (is_array < 0) return -1;
    if (is_array) {
        if (retain) t->holder = Py_NewRef(obj);
        return 0;
    }
    const hkv_dl_api *api = exchange_api_of(state, obj);
    if (!api && !PyObject_HasAttr((PyObject *)Py_TYPE(obj), state->dlpack_name))
        return hkv_py_fail(state, HKV_ERR_TYPE, t->argument,
                           "expected a NumPy array or a tensor with __dlpack__, got %.80s", Py_TYPE(obj)->tp_name);
    if (check_requires_grad(state, obj, t->argument) < 0) return -1;
    if (api && is_in_order(api, place)) return import_by_api(state, api, obj, retain, t);
    return import_by_method(state, obj, place, t);
}

int hkv_py_tensor_import(hkv_py_state *state, PyObject *obj, const char *argument, const hkv_py_place *place,
                         int retain, hkv_py_tensor *t)
{
    memset(t, 0, sizeof *t);
    t->argument = argument;
    if (import_from(state, obj, place, retain, t) < 0) return -1;
    return check_device(state, argument, t->device_type, t->device_id, place);
}

void hkv_py_tensor_release(hkv_py_tensor *t)
{
    if (t->managed && t->managed->deleter) t->managed->deleter(t->managed);
    if (t->managed_versioned && t->managed_versioned->deleter) t->managed_versioned->deleter(t->managed_versioned);
    t->managed = NULL;
    t->managed_versioned = NULL;
    Py_CLEAR(t->holder);
}

/* ----------------------------------------------------------------------------------------------------------- checks */

int hkv_py_tensor_check_dtype(hkv_py_state *state, const hkv_py_tensor *t, hkv_dtype dtype)
{
    uint8_t code = dtype == HKV_BF16 ? HKV_DL_BFLOAT : HKV_DL_FLOAT;
    if (t->dtype_code == code && t->dtype_bits == 8 * hkv_dtype_bytes(dtype)) return 0;
    return hkv_py_fail(state, HKV_ERR_TYPE, t->argument, "expected dtype %s, got %s", hkv_dtype_name(dtype),
                       hkv_py_tensor_describe(t).chars);
}

int hkv_py_tensor_check_shape(hkv_py_state *state, const hkv_py_tensor *t, int32_t ndim, const int64_t *shape,
                              const char *letters)
{
    char expected[96] = "";
    size_t n = 0;
    int equal = t->ndim == ndim;
    for (int32_t i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            n += (size_t)snprintf(expected + n, sizeof expected - n, "%sany", i ? ", " : "");
        else
            n += (size_t)snprintf(expected + n, sizeof expected - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
        equal = equal && (shape[i] < 0 || t->shape[i] == shape[i]);
    }
    if (equal) return 0;
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "expected shape %s = [%s], got %s", letters, expected,
                       hkv_py_tensor_describe(t).chars);
}

int hkv_py_tensor_is_empty(const hkv_py_tensor *t)
{
    for (int32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 1;
    return 0;
}

/* Elements that the dimensions of smaller stride than dimension i span. */
static int64_t inner_span(const hkv_py_tensor *t, int32_t i)
{
    int64_t span = 1;
    for (int32_t j = 0; j < t->ndim; j++)
        if (t->strides[j] < t->strides[i] || (t->strides[j] == t->strides[i] && j > i))
            span += t->strides[j] * (t->shape[j] - 1);
    return span;
}

int hkv_py_tensor_check_layout(hkv_py_state *state, const hkv_py_tensor *t, int writable)
{
    if (writable && t->read_only)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "is written to, but the tensor is read-only");
    if (hkv_py_tensor_is_empty(t)) return 0;
    if ((uintptr_t)t->data % (t->dtype_bits / 8u) != 0)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "data must be aligned to its %d-byte elements",
                           t->dtype_bits / 8);
    if (t->ndim > 0 && t->strides[t->ndim - 1] != 1)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument,
                           "the last dimension must be contiguous, got stride %lld; pass a contiguous copy",
                           (long long)t->strides[t->ndim - 1]);
    for (int32_t i = 0; i < t->ndim; i++) {
        int64_t stride = t->strides[i];
        if (stride < 0 || stride > INT64_MAX / 64 / t->shape[i])
            return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "stride %lld of dimension %d is out of range",
                               (long long)stride, (int)i);
    }
    for (int32_t i = 0; i < t->ndim && writable; i++)
        if (t->shape[i] > 1 && t->strides[i] < inner_span(t, i))
            return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument,
                               "is written to, but elements overlap along dimension %d (stride %lld)", (int)i,
                               (long long)t->strides[i]);
    return 0;
}

int hkv_py_tensor_check_compact(hkv_py_state *state, const hkv_py_tensor *t)
{
    int64_t compact = 1;
    if (hkv_py_tensor_check_layout(state, t, 0) < 0) return -1;
    for (int32_t i = t->ndim - 1; i >= 0 && !hkv_py_tensor_is_empty(t); i--) {
        if (t->shape[i] > 1 && t->strides[i] != compact)
            return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument,
                               "must be contiguous, got stride %lld in dimension %d", (long long)t->strides[i], (int)i);
        compact *= t->shape[i];
    }
    return 0;
}

int hkv_py_memory_import(hkv_py_state *state, PyObject *obj, const hkv_py_place *place, hkv_py_tensor *t,
                         hkv_memory *memory)
{
    memset(t, 0, sizeof *t);
    *memory = (hkv_memory){0};
    if (obj == Py_None) return 0;
    if (hkv_py_tensor_import(state, obj, "memory", place, 1, t) < 0 || hkv_py_tensor_check_layout(state, t, 1) < 0 ||
        hkv_py_tensor_check_compact(state, t) < 0)
        return -1;
    if (hkv_py_tensor_is_empty(t))
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "memory", "expected a tensor with elements, got %s",
                           hkv_py_tensor_describe(t).chars);
    memory->base = t->data;
    memory->n_bytes = t->dtype_bits / 8u;
    for (int32_t i = 0; i < t->ndim; i++) memory->n_bytes *= (size_t)t->shape[i];
    return 0;
}

/* --------------------------------------------------------------------------------------------------------- integers */

int64_t hkv_py_tensor_read_int(const hkv_py_tensor *t, int64_t offset, int *too_large)
{
    const char *p = (const char *)t->data + offset * (t->dtype_bits / 8);
    int is_signed = t->dtype_code == HKV_DL_INT;
    *too_large = 0;
    switch (t->dtype_bits) {
    case 8:
        return is_signed ? *(const int8_t *)p : *(const uint8_t *)p;
    case 16: {
        int16_t x;
        memcpy(&x, p, sizeof x);
        return is_signed ? x : (uint16_t)x;
    }
    case 32: {
        int32_t x;
        memcpy(&x, p, sizeof x);
        return is_signed ? (int64_t)x : (int64_t)(uint32_t)x;
    }
    default: {
        int64_t x;
        memcpy(&x, p, sizeof x);
        *too_large = !is_signed && x < 0;
        return x;
    }
    }
}
