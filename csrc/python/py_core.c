/* py_core.c - the module hybridkv._core: its state, its functions, its start and end. */
#include "py_tensor.h"

#include <stdlib.h>

/* ------------------------------------------------------------------------------------------------------ thread pool */

hkv_py_state *hkv_py_state_of(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self)); /* no subclasses, so the type is always ours */
}

/* With pool_mutex held: make the pool if there is none. */
static hkv_status pool_ensure_lock_held(hkv_py_state *state, hkv_error *error)
{
    if (state->pool) return HKV_OK;
    hkv_py_pool *pool = malloc(sizeof *pool);
    if (!pool) {
        *error = (hkv_error){.status = HKV_ERR_NO_MEMORY, .message = "no memory for the thread pool"};
        return HKV_ERR_NO_MEMORY;
    }
    hkv_status status = hkv_threads_create(state->n_threads, &pool->threads, error);
    if (status != HKV_OK) {
        free(pool);
        return status;
    }
    atomic_init(&pool->n_refs, 1);
    state->pool = pool;
    return HKV_OK;
}

hkv_py_pool *hkv_py_pool_acquire(hkv_py_state *state)
{
    hkv_error error;
    pthread_mutex_lock(&state->pool_mutex);
    hkv_status status = pool_ensure_lock_held(state, &error);
    hkv_py_pool *pool = status == HKV_OK ? state->pool : NULL;
    if (pool) atomic_fetch_add_explicit(&pool->n_refs, 1, memory_order_relaxed);
    pthread_mutex_unlock(&state->pool_mutex);
    if (!pool) hkv_py_raise(state, &error);
    return pool;
}

void hkv_py_pool_release(hkv_py_pool *pool)
{
    if (!pool || atomic_fetch_sub_explicit(&pool->n_refs, 1, memory_order_acq_rel) != 1) return;
    hkv_threads_destroy(pool->threads);
    free(pool);
}

static PyObject *set_num_threads(PyObject *module, PyObject *n_obj)
{
    hkv_py_state *state = PyModule_GetState(module);
    hkv_error error;
    hkv_status status = HKV_OK;
    int64_t n;
    if (hkv_py_int_from_object(state, n_obj, "num_threads", 1, 4096, &n) < 0) return NULL;
    pthread_mutex_lock(&state->pool_mutex);
    if (state->pool) status = hkv_threads_resize(state->pool->threads, (int32_t)n, &error);
    if (status == HKV_OK) state->n_threads = (int32_t)n;
    pthread_mutex_unlock(&state->pool_mutex);
    if (status != HKV_OK) return hkv_py_raise(state, &error);
    Py_RETURN_NONE;
}

static PyObject *get_num_threads(PyObject *module, PyObject *Py_UNUSED(unused))
{
    hkv_py_state *state = PyModule_GetState(module);
    hkv_py_pool *pool = hkv_py_pool_acquire(state);
    if (!pool) return NULL;
    long n = hkv_threads_count(pool->threads);
    hkv_py_pool_release(pool);
    return PyLong_FromLong(n);
}

static PyMethodDef thread_methods[] = {
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(num_threads, /)\n--\n\nWorkers that all caches and stores share, the calling thread included."},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "get_num_threads()\n--\n\nWorkers in use; the default is the cores that this process may run on."},
    {NULL, NULL, 0, NULL},
};

/* ----------------------------------------------------------------------------------------------------------- module */

static int names_init(hkv_py_state *state)
{
    state->dlpack_name = PyUnicode_InternFromString("__dlpack__");
    state->dlpack_device_name = PyUnicode_InternFromString("__dlpack_device__");
    state->exchange_api_name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    state->requires_grad_name = PyUnicode_InternFromString("requires_grad");
    state->dlpack_kwnames = Py_BuildValue("(ss)", "stream", "max_version");
    state->dlpack_old_kwnames = Py_BuildValue("(s)", "stream");
    state->dlpack_version = Py_BuildValue("(ii)", HKV_DL_VERSION_MAJOR, HKV_DL_VERSION_MINOR);
    return state->dlpack_name && state->dlpack_device_name && state->exchange_api_name && state->requires_grad_name &&
                   state->dlpack_kwnames && state->dlpack_old_kwnames && state->dlpack_version
               ? 0
               : -1;
}

static PyTypeObject *type_init(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

static int types_init(hkv_py_state *state, PyObject *module)
{
    state->cache_type = type_init(module, &hkv_py_cache_spec);
    state->store_type = type_init(module, &hkv_py_store_spec);
    state->view_type = type_init(module, &hkv_py_view_spec);
    return state->cache_type && state->store_type && state->view_type ? 0 : -1;
}

static int version_init(PyObject *module)
{
    PyObject *version = PyUnicode_FromFormat("%d.%d.%d", HKV_VERSION_MAJOR, HKV_VERSION_MINOR, HKV_VERSION_PATCH);
    int result = version ? PyModule_AddObjectRef(module, "__version__", version) : -1;
    Py_XDECREF(version);
    return result;
}

static int core_exec(PyObject *module)
{
    hkv_py_state *state = PyModule_GetState(module);
    if (pthread_mutex_init(&state->pool_mutex, NULL) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (hkv_py_numpy_init() < 0 || names_init(state) < 0 || hkv_py_errors_init(state, module) < 0 ||
        types_init(state, module) < 0 || version_init(module) < 0 ||
        PyModule_AddFunctions(module, hkv_py_config_methods) < 0 ||
        PyModule_AddFunctions(module, hkv_py_record_methods) < 0 ||
        PyModule_AddFunctions(module, hkv_py_device_methods) < 0 || PyModule_AddFunctions(module, thread_methods) < 0)
        return -1;
    return 0;
}

static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    hkv_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < HKV_PY_N_ERRORS; i++) Py_VISIT(state->errors[i]);
    Py_VISIT(state->cache_type);
    Py_VISIT(state->store_type);
    Py_VISIT(state->view_type);
    return 0;
}

static int core_clear(PyObject *module)
{
    hkv_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < HKV_PY_N_ERRORS; i++) Py_CLEAR(state->errors[i]);
    Py_CLEAR(state->cache_type);
    Py_CLEAR(state->store_type);
    Py_CLEAR(state->view_type);
    Py_CLEAR(state->dlpack_name);
    Py_CLEAR(state->dlpack_device_name);
    Py_CLEAR(state->exchange_api_name);
    Py_CLEAR(state->requires_grad_name);
    Py_CLEAR(state->dlpack_kwnames);
    Py_CLEAR(state->dlpack_old_kwnames);
    Py_CLEAR(state->dlpack_version);
    return 0;
}

static void core_free(void *module)
{
    hkv_py_state *state = PyModule_GetState(module);
    core_clear(module);
    hkv_py_pool_release(state->pool);
    pthread_mutex_destroy(&state->pool_mutex);
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* NumPy does not support them */
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hybridkv._core",
    .m_doc = "The C core of hybridkv. Use the classes of hybridkv instead.",
    .m_size = sizeof(hkv_py_state),
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
