/* py_index.c - lengths, tables and token ids: any integers become int32 or int64, or an error names the argument. */
#include "py_tensor.h"

#include <string.h>

static int fail_range(hkv_py_state *state, const char *argument, int64_t lowest, int64_t highest, const char *value)
{
    return hkv_py_fail(state, HKV_ERR_RANGE, argument, "expected integers in %lld..%lld, got %s", (long long)lowest,
                       (long long)highest, value);
}

int hkv_py_int_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int64_t lowest, int64_t highest,
                           int64_t *value)
{
    /* Reals have no __index__; bools have one, but are no numbers here. */
    if (PyBool_Check(obj) || !PyIndex_Check(obj))
        return hkv_py_fail(state, HKV_ERR_TYPE, argument, "expected an integer, got %.80s", Py_TYPE(obj)->tp_name);
    PyObject *number = PyNumber_Index(obj);
    if (!number && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1; /* of the caller's own code */
    if (!number) {
        char what[128];
        PyOS_snprintf(what, sizeof what, "expected an integer, got %.80s", Py_TYPE(obj)->tp_name);
        return hkv_py_fail_from_current(state, HKV_ERR_TYPE, argument, what);
    }
    int overflow;
    long long x = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (x == -1 && PyErr_Occurred()) return -1;
    if (overflow || x < lowest || x > highest) {
        char text[32];
        PyOS_snprintf(text, sizeof text, overflow ? "one beyond 64 bits" : "%lld", x);
        return fail_range(state, argument, lowest, highest, text);
    }
    *value = x;
    return 0;
}

int hkv_py_int32_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int32_t *value)
{
    int64_t x;
    if (hkv_py_int_from_object(state, obj, argument, INT32_MIN, INT32_MAX, &x) < 0) return -1;
    *value = (int32_t)x;
    return 0;
}

int hkv_py_index_from_object(hkv_py_state *state, PyObject *obj, const char *argument, int32_t n, int32_t *value)
{
    int64_t x;
    if (hkv_py_int_from_object(state, obj, argument, 0, n - 1, &x) < 0) return -1;
    *value = (int32_t)x;
    return 0;
}

static int check_length(hkv_py_state *state, const hkv_py_ints_rule *rule, const hkv_py_ints *ints)
{
    if (rule->n_expected < 0 || ints->shape[0] == rule->n_expected) return 0;
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, rule->argument, "expected %s with %lld entries, got %lld",
                       rule->letters, (long long)rule->n_expected, (long long)ints->shape[0]);
}

static int ints_allocate(hkv_py_state *state, const hkv_py_ints_rule *rule, hkv_py_ints *ints)
{
    if (check_length(state, rule, ints) < 0) return -1;
    if (ints->shape[0] == 0 || ints->shape[1] == 0) return 0;
    ints->values = PyMem_RawCalloc((size_t)ints->shape[0] * (size_t)ints->shape[1], rule->width);
    if (ints->values) return 0;
    PyErr_NoMemory();
    return -1;
}

static void ints_store(const hkv_py_ints_rule *rule, hkv_py_ints *ints, int64_t i, int64_t value)
{
    if (rule->width == 4)
        ((int32_t *)ints->values)[i] = (int32_t)value;
    else
        ((int64_t *)ints->values)[i] = value;
}

static int ints_take_shape(hkv_py_state *state, const hkv_py_tensor *t, const hkv_py_ints_rule *rule, hkv_py_ints *ints)
{
    if (t->ndim != rule->ndim)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, rule->argument, "expected shape %s, got %s", rule->letters,
                           hkv_py_tensor_describe(t).chars);
    ints->shape[0] = t->shape[0];
    ints->shape[1] = t->ndim == 2 ? t->shape[1] : 1;
    return 0;
}

static int ints_from_tensor(hkv_py_state *state, const hkv_py_tensor *t, const hkv_py_ints_rule *rule,
                            hkv_py_ints *ints)
{
    if (t->dtype_code != HKV_DL_INT && t->dtype_code != HKV_DL_UINT)
        return hkv_py_fail(state, HKV_ERR_TYPE, rule->argument, "expected integers, got %s",
                           hkv_py_tensor_describe(t).chars);
    if (ints_take_shape(state, t, rule, ints) < 0 || ints_allocate(state, rule, ints) < 0) return -1;
    int64_t inner_stride = t->ndim == 2 ? t->strides[1] : 0;
    for (int64_t i = 0; i < ints->shape[0]; i++) {
        for (int64_t j = 0; j < ints->shape[1]; j++) {
            int too_large;
            int64_t value = hkv_py_tensor_read_int(t, i * t->strides[0] + j * inner_stride, &too_large);
            if (too_large || value < rule->lowest || value > rule->highest) {
                char text[64];
                PyOS_snprintf(text, sizeof text, too_large ? "one beyond 63 bits at index %lld" : "%lld at index %lld",
                              too_large ? (long long)i : (long long)value, (long long)i);
                return fail_range(state, rule->argument, rule->lowest, rule->highest, text);
            }
            ints_store(rule, ints, i * ints->shape[1] + j, value);
        }
    }
    return 0;
}

static int fail_kind(hkv_py_state *state, const hkv_py_ints_rule *rule, PyObject *obj)
{
    return hkv_py_fail(state, HKV_ERR_TYPE, rule->argument,
                       "expected %s integers as a list, array or tensor, got %.80s", rule->letters,
                       Py_TYPE(obj)->tp_name);
}

/* A private tuple of a list's items: __index__ of an item may run code that changes the list. */
static PyObject *items_of(hkv_py_state *state, PyObject *obj, const hkv_py_ints_rule *rule)
{
    if (PyList_Check(obj) || PyTuple_Check(obj)) return PySequence_Tuple(obj);
    fail_kind(state, rule, obj);
    return NULL;
}

/* values[first ...] from the items of one row. */
static int ints_from_items(hkv_py_state *state, PyObject *items, const hkv_py_ints_rule *rule, hkv_py_ints *ints,
                           int64_t first)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        int64_t value;
        if (hkv_py_int_from_object(state, PyTuple_GET_ITEM(items, i), rule->argument, rule->lowest, rule->highest,
                                   &value) < 0)
            return -1;
        ints_store(rule, ints, first + i, value);
    }
    return 0;
}

/* Row i of a list of lists. The first row makes the memory, since it says how long all rows are. */
static int ints_from_row(hkv_py_state *state, PyObject *row, const hkv_py_ints_rule *rule, hkv_py_ints *ints, int64_t i)
{
    PyObject *items = items_of(state, row, rule);
    if (!items) return -1;
    int result = 0;
    if (i == 0) {
        ints->shape[1] = PyTuple_GET_SIZE(items);
        result = ints_allocate(state, rule, ints);
    } else if (PyTuple_GET_SIZE(items) != ints->shape[1]) {
        result = hkv_py_fail(state, HKV_ERR_ARGUMENT, rule->argument,
                             "expected %s, but row %lld has %lld entries and row 0 has %lld", rule->letters,
                             (long long)i, (long long)PyTuple_GET_SIZE(items), (long long)ints->shape[1]);
    }
    if (result == 0) result = ints_from_items(state, items, rule, ints, i * ints->shape[1]);
    Py_DECREF(items);
    return result;
}

static int ints_from_list(hkv_py_state *state, PyObject *items, const hkv_py_ints_rule *rule, hkv_py_ints *ints)
{
    ints->shape[0] = PyTuple_GET_SIZE(items);
    ints->shape[1] = 1;
    if (rule->ndim == 1 || ints->shape[0] == 0) {
        if (ints_allocate(state, rule, ints) < 0) return -1;
        return ints_from_items(state, items, rule, ints, 0);
    }
    for (int64_t i = 0; i < ints->shape[0]; i++)
        if (ints_from_row(state, PyTuple_GET_ITEM(items, i), rule, ints, i) < 0) return -1;
    return 0;
}

/* Values stay where they are. */
static int ints_from_device(hkv_py_state *state, PyObject *obj, const hkv_py_ints_rule *rule, const hkv_py_place *place,
                            hkv_py_ints *ints)
{
    hkv_py_tensor *t = &ints->tensor;
    if (hkv_py_tensor_import(state, obj, rule->argument, place, 1, t) < 0) return -1;
    if (t->dtype_code != HKV_DL_INT || t->dtype_bits != 8 * rule->width)
        return hkv_py_fail(state, HKV_ERR_TYPE, rule->argument, "expected dtype int%d on a device, got %s",
                           (int)(8 * rule->width), hkv_py_tensor_describe(t).chars);
    if (ints_take_shape(state, t, rule, ints) < 0 || check_length(state, rule, ints) < 0 ||
        hkv_py_tensor_check_compact(state, t) < 0)
        return -1;
    ints->values = t->data;
    return 0;
}

int hkv_py_ints_import(hkv_py_state *state, PyObject *obj, const hkv_py_ints_rule *rule, const hkv_py_place *place,
                       hkv_py_ints *ints)
{
    int result;
    memset(ints, 0, sizeof *ints);
    if (place->device_type != HKV_DL_CPU) {
        result = ints_from_device(state, obj, rule, place, ints);
    } else if (PyObject_HasAttr((PyObject *)Py_TYPE(obj), state->dlpack_name)) { /* NumPy arrays have it too */
        hkv_py_tensor t;
        result = hkv_py_tensor_import(state, obj, rule->argument, &hkv_py_host, 0, &t);
        if (result == 0) result = ints_from_tensor(state, &t, rule, ints);
        hkv_py_tensor_release(&t);
    } else {
        PyObject *items = items_of(state, obj, rule);
        result = items ? ints_from_list(state, items, rule, ints) : -1;
        Py_XDECREF(items);
    }
    if (result < 0) hkv_py_ints_release(ints);
    return result;
}

void hkv_py_ints_release(hkv_py_ints *ints)
{
    if (ints->values != ints->tensor.data) PyMem_RawFree(ints->values);
    ints->values = NULL;
    hkv_py_tensor_release(&ints->tensor);
}
