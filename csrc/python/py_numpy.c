/* py_numpy.c - the only file that sees NumPy. */
#include "py_tensor.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION    NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

int hkv_py_numpy_init(void)
{
    import_array1(-1);
    return 0;
}

/* DLPack's code of an array dtype, -1 if it has none. */
static int dtype_code_of(PyArrayObject *array)
{
    switch (PyArray_DESCR(array)->kind) {
    case 'i':
        return HKV_DL_INT;
    case 'u':
        return HKV_DL_UINT;
    case 'f':
        return HKV_DL_FLOAT;
    case 'b':
        return HKV_DL_BOOL;
    default:
        return -1;
    }
}

int hkv_py_numpy_import(hkv_py_state *state, PyObject *obj, hkv_py_tensor *t)
{
    if (!PyArray_Check(obj)) return 0;
    PyArrayObject *array = (PyArrayObject *)obj;
    npy_intp item_bytes = PyArray_ITEMSIZE(array);
    int code = dtype_code_of(array);
    if (code < 0 || item_bytes > 8)
        return hkv_py_fail(state, HKV_ERR_TYPE, t->argument, "NumPy dtype %c%d is not supported",
                           PyArray_DESCR(array)->kind, (int)item_bytes);
    if (!PyArray_ISNOTSWAPPED(array))
        return hkv_py_fail(state, HKV_ERR_TYPE, t->argument, "expected native byte order");
    if (PyArray_NDIM(array) > HKV_PY_MAX_DIMS)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument, "at most %d dimensions, got %d", HKV_PY_MAX_DIMS,
                           PyArray_NDIM(array));
    t->data = PyArray_DATA(array);
    t->ndim = PyArray_NDIM(array);
    t->device_type = HKV_DL_CPU;
    t->dtype_code = (uint8_t)code;
    t->dtype_bits = (uint8_t)(8 * item_bytes);
    t->read_only = !PyArray_ISWRITEABLE(array);
    int64_t compact = 1;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        npy_intp stride_bytes = PyArray_STRIDE(array, i);
        t->shape[i] = PyArray_DIM(array, i);
        if (t->shape[i] > 1 && stride_bytes % item_bytes != 0)
            return hkv_py_fail(state, HKV_ERR_ARGUMENT, t->argument,
                               "stride of dimension %d is %lld bytes, which is no multiple of the element's %d", (int)i,
                               (long long)stride_bytes, (int)item_bytes);
        t->strides[i] = t->shape[i] > 1 ? stride_bytes / item_bytes : compact;
        compact = t->strides[i] * t->shape[i];
    }
    return 1;
}

PyObject *hkv_py_numpy_create_f32(int32_t ndim, const int64_t *shape, float **data)
{
    npy_intp dims[HKV_PY_MAX_DIMS];
    for (int32_t i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    PyObject *array = PyArray_SimpleNew(ndim, dims, NPY_FLOAT32);
    if (array) *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}
