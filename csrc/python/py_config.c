/* py_config.c - the configuration rules of the library, field by field, for HybridConfig. */
#include "py_core.h"

#include <string.h>

/* The kind of a field, 0 if there is none of that name. */
static char field_kind(const char *name)
{
    for (int32_t i = 0; i < hkv_config_n_fields(); i++)
        if (strcmp(name, hkv_config_field_name(i)) == 0) return hkv_config_field_kind(i);
    return 0;
}

static int fail_field(hkv_py_state *state, const char *name, const char *expected, PyObject *value)
{
    hkv_error error = {.status = HKV_ERR_TYPE};
    PyOS_snprintf(error.argument, sizeof error.argument, "%s", name);
    PyOS_snprintf(error.message, sizeof error.message, "expected %s, got %.80s", expected, Py_TYPE(value)->tp_name);
    hkv_py_raise_config(state, &error);
    return -1;
}

/* A field's value as the library takes it; what is no number of the field's kind is refused here. */
static int number_from_object(hkv_py_state *state, const char *name, PyObject *value, double *number)
{
    char kind = field_kind(name);
    int is_real = PyFloat_Check(value);
    *number = 0.0;
    if (!kind) return 0; /* hkv_config_set_number says that there is no such field, and names the nearest */
    if (kind == 'i' && (PyBool_Check(value) || is_real || !PyIndex_Check(value)))
        return fail_field(state, name, "an integer", value);
    if (kind == 'b' && (is_real || !PyIndex_Check(value))) return fail_field(state, name, "True or False", value);
    if (kind == 'f' && (PyBool_Check(value) || (!is_real && !PyIndex_Check(value))))
        return fail_field(state, name, "a real number", value);
    PyObject *real = PyNumber_Float(value);
    if (!real && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return fail_field(state, name, "a number of at most 64 bits", value);
    }
    if (!real) return -1;
    *number = PyFloat_AS_DOUBLE(real);
    Py_DECREF(real);
    return 0;
}

static int config_set(hkv_py_state *state, hkv_config *config, PyObject *key, PyObject *value)
{
    hkv_error error;
    double number;
    const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;
    if (!name) {
        if (!PyErr_Occurred()) fail_field(state, "config", "names of fields as str", key);
        return -1;
    }
    if (number_from_object(state, name, value, &number) < 0) return -1;
    if (hkv_config_set_number(config, name, number, &error) == HKV_OK) return 0;
    hkv_py_raise_config(state, &error);
    return -1;
}

static int config_apply(hkv_py_state *state, hkv_config *config, PyObject *values)
{
    hkv_error error;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(values, &position, &key, &value))
        if (config_set(state, config, key, value) < 0) return -1;
    if (hkv_config_check(config, &error) == HKV_OK) return 0;
    hkv_py_raise_config(state, &error);
    return -1;
}

int hkv_py_config_from_dict(hkv_py_state *state, PyObject *values, hkv_config *config)
{
    hkv_config_init(config);
    if (!PyDict_Check(values)) return fail_field(state, "config", "a dict", values);
    return config_apply(state, config, values);
}

int hkv_py_dtype_from_name(hkv_py_state *state, const char *name, hkv_dtype *dtype)
{
    for (int i = HKV_F16; i <= HKV_F32; i++) {
        if (strcmp(name, hkv_dtype_name((hkv_dtype)i)) == 0) {
            *dtype = (hkv_dtype)i;
            return 0;
        }
    }
    return hkv_py_fail(state, HKV_ERR_TYPE, "dtype", "expected float16, bfloat16 or float32, got '%s'", name);
}

static PyObject *config_to_dict(const hkv_config *config)
{
    PyObject *values = PyDict_New();
    for (int32_t i = 0; values && i < hkv_config_n_fields(); i++) {
        hkv_error error;
        double number = 0.0;
        const char *name = hkv_config_field_name(i);
        char kind = hkv_config_field_kind(i);
        hkv_config_get_number(config, name, &number, &error);
        PyObject *value = kind == 'b'   ? PyBool_FromLong(number != 0.0)
                          : kind == 'i' ? PyLong_FromDouble(number)
                                        : PyFloat_FromDouble(number);
        if (hkv_py_set_item(values, name, value) < 0) Py_CLEAR(values);
    }
    return values;
}

/* ------------------------------------------------------------------------------------------------- module functions */

static PyObject *config_fields(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *fields = PyTuple_New(hkv_config_n_fields());
    for (int32_t i = 0; fields && i < hkv_config_n_fields(); i++) {
        PyObject *field = Py_BuildValue("(sC)", hkv_config_field_name(i), hkv_config_field_kind(i));
        if (!field) {
            Py_CLEAR(fields);
            break;
        }
        PyTuple_SET_ITEM(fields, i, field);
    }
    return fields;
}

static PyObject *config_build(PyObject *module, PyObject *args)
{
    hkv_py_state *state = PyModule_GetState(module);
    hkv_config config;
    hkv_error error;
    PyObject *values;
    const char *preset = NULL;
    if (!PyArg_ParseTuple(args, "O!|z:config_build", &PyDict_Type, &values, &preset)) return NULL;
    hkv_config_init(&config);
    if (preset && hkv_config_init_preset(&config, preset, &error) != HKV_OK) return hkv_py_raise_config(state, &error);
    if (config_apply(state, &config, values) < 0) return NULL;
    return config_to_dict(&config);
}

static PyObject *config_warnings(PyObject *module, PyObject *values)
{
    hkv_config config;
    char text[2048];
    if (hkv_py_config_from_dict(PyModule_GetState(module), values, &config) < 0) return NULL;
    hkv_config_warnings(&config, text, sizeof text);
    PyObject *all = PyUnicode_FromString(text);
    PyObject *lines = all ? PyUnicode_Splitlines(all, 0) : NULL;
    Py_XDECREF(all);
    return lines;
}

PyMethodDef hkv_py_config_methods[] = {
    {"config_fields", config_fields, METH_NOARGS,
     "config_fields()\n--\n\nName and kind ('i' integer, 'b' bool, 'f' real) of every field."},
    {"config_build", config_build, METH_VARARGS,
     "config_build(values, preset=None, /)\n--\n\nAll fields: the defaults (or a preset's), changed by values, "
     "checked."},
    {"config_warnings", config_warnings, METH_O,
     "config_warnings(values, /)\n--\n\nWhat is allowed but deserves a word, one sentence each."},
    {NULL, NULL, 0, NULL},
};
