/* py_error.c - exception classes, and the one place where an hkv_status becomes one of them. */
#include "py_core.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct hkv_py_error_class {
    const char *name;      /* qualified */
    PyObject **builtin[2]; /* the built-in exceptions it also is */
    const char *doc;
} hkv_py_error_class;

static const hkv_py_error_class error_classes[HKV_PY_N_ERRORS] = {
    [HKV_PY_ERROR] = {"hybridkv.Error",
                      {&PyExc_Exception},
                      "Base of all errors of hybridkv.\n\n"
                      "argument : the argument or configuration field that broke a rule, '' if there is none\n"
                      "status : short name of the kind of error ('argument', 'cache full', ...)"},
    [HKV_PY_CONFIG_ERROR] = {"hybridkv.ConfigError", {&PyExc_ValueError}, "A configuration field breaks a rule."},
    [HKV_PY_ARGUMENT_ERROR] = {"hybridkv.ArgumentError", {&PyExc_ValueError}, "An argument breaks a rule."},
    [HKV_PY_DTYPE_ERROR] = {"hybridkv.DtypeError", {&PyExc_TypeError}, "A tensor's dtype or an argument's type."},
    [HKV_PY_CACHE_FULL_ERROR] = {"hybridkv.CacheFullError",
                                 {&PyExc_RuntimeError, &PyExc_MemoryError},
                                 "No block, sequence slot or hot page is left. Nothing changed; the call can be "
                                 "repeated after sequences were freed."},
    [HKV_PY_OUT_OF_MEMORY_ERROR] = {"hybridkv.OutOfMemoryError", {&PyExc_MemoryError}, "An allocation failed."},
    [HKV_PY_STEP_ERROR] = {"hybridkv.StepError",
                           {&PyExc_RuntimeError},
                           "The call does not fit the order of calls: no step is open, or one is; a layer was "
                           "attended already; the object is closed."},
    [HKV_PY_BUSY_ERROR] = {"hybridkv.BusyError", {&PyExc_RuntimeError}, "Another thread is inside this object."},
    [HKV_PY_STALE_HANDLE_ERROR] = {"hybridkv.StaleHandleError",
                                   {&PyExc_ValueError},
                                   "A sequence that was freed, or that belongs to another cache."},
    [HKV_PY_NO_DEVICE_ERROR] = {"hybridkv.NoDeviceError",
                                {&PyExc_RuntimeError},
                                "No such device, driver or backend library."},
    [HKV_PY_DEVICE_ERROR] = {"hybridkv.DeviceError", {&PyExc_RuntimeError}, "A call to the device failed."},
};

/* (Error, builtins...) or, for the base itself, (Exception,). */
static PyObject *error_bases(const hkv_py_state *state, const hkv_py_error_class *class)
{
    PyObject *first = class->builtin[0] ? *class->builtin[0] : NULL;
    PyObject *second = class->builtin[1] ? *class->builtin[1] : NULL;
    if (!state->errors[HKV_PY_ERROR]) return PyTuple_Pack(1, first);
    if (!second) return PyTuple_Pack(2, state->errors[HKV_PY_ERROR], first);
    return PyTuple_Pack(3, state->errors[HKV_PY_ERROR], first, second);
}

int hkv_py_errors_init(hkv_py_state *state, PyObject *module)
{
    for (int i = 0; i < HKV_PY_N_ERRORS; i++) {
        const hkv_py_error_class *class = &error_classes[i];
        /* Class attributes, so that an instance made in Python has both too. */
        PyObject *bases = error_bases(state, class);
        PyObject *attributes = i == HKV_PY_ERROR ? Py_BuildValue("{ssss}", "argument", "", "status", "") : NULL;
        if (bases && (attributes || i != HKV_PY_ERROR))
            state->errors[i] = PyErr_NewExceptionWithDoc(class->name, class->doc, bases, attributes);
        Py_XDECREF(bases);
        Py_XDECREF(attributes);
        if (!state->errors[i]) return -1;
        if (PyModule_AddObjectRef(module, strchr(class->name, '.') + 1, state->errors[i]) < 0) return -1;
    }
    return 0;
}

static hkv_py_error_kind error_kind_of_status(hkv_status status)
{
    switch (status) {
    case HKV_ERR_UNKNOWN_KEY:
        return HKV_PY_CONFIG_ERROR;
    case HKV_ERR_ARGUMENT:
    case HKV_ERR_RANGE:
    case HKV_ERR_UNSUPPORTED:
    case HKV_ERR_BUDGET_SMALL:
        return HKV_PY_ARGUMENT_ERROR;
    case HKV_ERR_TYPE:
        return HKV_PY_DTYPE_ERROR;
    case HKV_ERR_STATE:
        return HKV_PY_STEP_ERROR;
    case HKV_ERR_BUSY:
        return HKV_PY_BUSY_ERROR;
    case HKV_ERR_STALE:
        return HKV_PY_STALE_HANDLE_ERROR;
    case HKV_ERR_NO_MEMORY:
        return HKV_PY_OUT_OF_MEMORY_ERROR;
    case HKV_ERR_CACHE_FULL:
        return HKV_PY_CACHE_FULL_ERROR;
    case HKV_ERR_NO_DEVICE:
        return HKV_PY_NO_DEVICE_ERROR;
    case HKV_ERR_DEVICE:
        return HKV_PY_DEVICE_ERROR;
    case HKV_OK:
        break;
    }
    return HKV_PY_ERROR;
}

/* What Python calls an argument that the library calls `name`. */
static const char *python_name_of(const char *name)
{
    static const char *const names[][2] = {
        {"n_layers", "num_layers"},       {"n_kv_heads", "num_kv_heads"},
        {"n_blocks", "num_blocks"},       {"n_hot_pages", "num_hot_pages"},
        {"n_tokens", "num_tokens"},       {"layer_idx", "layer"},
        {"logical_block", "block"},       {"first_token", "start"},
        {"source_idx", "source_indices"}, {"softmax_scale", "scale"},
        {"logits_soft_cap", "soft_cap"},  {"sink_logits", "sinks"},
        {"n_threads", "num_threads"},     {"gpu_name", "name"},
    };
    if (strncmp(name, "model.", 6) == 0) name += 6; /* a struct there, keywords here */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i][0]) == 0) return names[i][1];
    return name;
}

static PyObject *raise_kind(hkv_py_state *state, hkv_py_error_kind kind, const hkv_error *error)
{
    /* The text starts with the argument, whoever wrote it. */
    const char *name = python_name_of(error->argument);
    size_t n = strlen(error->argument);
    int is_named = n > 0 && strncmp(error->message, error->argument, n) == 0;
    const char *rule = is_named ? error->message + n : error->message;
    PyObject *text = PyUnicode_FromFormat(n > 0 && !is_named ? "%s: %s" : "%s%s", name, rule);
    PyObject *argument = PyUnicode_FromString(name);
    PyObject *status = PyUnicode_FromString(hkv_status_string(error->status));
    PyObject *exception = text ? PyObject_CallOneArg(state->errors[kind], text) : NULL;
    if (argument && status && exception && PyObject_SetAttrString(exception, "argument", argument) == 0 &&
        PyObject_SetAttrString(exception, "status", status) == 0)
        PyErr_SetObject(state->errors[kind], exception);
    Py_XDECREF(text);
    Py_XDECREF(argument);
    Py_XDECREF(status);
    Py_XDECREF(exception);
    return NULL;
}

PyObject *hkv_py_raise(hkv_py_state *state, const hkv_error *error)
{
    return raise_kind(state, error_kind_of_status(error->status), error);
}

PyObject *hkv_py_raise_config(hkv_py_state *state, const hkv_error *error)
{
    hkv_py_error_kind kind = error_kind_of_status(error->status);
    if (kind == HKV_PY_ARGUMENT_ERROR || kind == HKV_PY_DTYPE_ERROR) kind = HKV_PY_CONFIG_ERROR;
    return raise_kind(state, kind, error);
}

static void error_init(hkv_error *error, hkv_status status, const char *argument)
{
    error->status = status;
    snprintf(error->argument, sizeof error->argument, "%s", argument);
}

int hkv_py_fail(hkv_py_state *state, hkv_status status, const char *argument, const char *format, ...)
{
    hkv_error error;
    va_list values;
    error_init(&error, status, argument);
    va_start(values, format);
    vsnprintf(error.message, sizeof error.message, format, values);
    va_end(values);
    hkv_py_raise(state, &error);
    return -1;
}

/* Take the exception that is set, as an instance. */
static PyObject *exception_take(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

int hkv_py_fail_from_current(hkv_py_state *state, hkv_status status, const char *argument, const char *what)
{
    PyObject *cause = exception_take();
    PyObject *text = PyObject_Str(cause);
    const char *utf8 = text ? PyUnicode_AsUTF8(text) : NULL;
    PyObject *raised;
    if (!utf8) PyErr_Clear();
    hkv_py_fail(state, status, argument, "%s: %s", what, utf8 ? utf8 : Py_TYPE(cause)->tp_name);
    Py_XDECREF(text);
    raised = exception_take();
    PyException_SetCause(raised, cause); /* steals the reference */
    PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
    Py_DECREF(raised);
    return -1;
}
