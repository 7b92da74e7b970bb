/* py_device.c - which devices there are. A backend other than the CPU is found here and nowhere else. */
#include "py_core.h"

#include <string.h>

#include "backend.h"
#include "cpu_dispatch.h"

static const char cuda_missing[] = "this build has no CUDA backend; use device=\"cpu\"";

static int is_cuda(const char *name)
{
    return strncmp(name, "cuda", 4) == 0 && (name[4] == '\0' || name[4] == ':');
}

int hkv_py_device_find(hkv_py_state *state, const char *name, const hkv_backend **backend, int32_t *device_index)
{
    *backend = NULL;
    *device_index = 0;
    if (strcmp(name, "cpu") == 0) return 0;
    if (is_cuda(name)) return hkv_py_fail(state, HKV_ERR_NO_DEVICE, "device", "'%s': %s", name, cuda_missing);
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, "device", "expected \"cpu\", \"cuda\" or \"cuda:N\", got '%s'", name);
}

static PyObject *devices(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const char *reason = "";
    int n_cpus = (int)hkv_backend_cpu()->count_devices(&reason);
    return Py_BuildValue("[(sis)(sis)]", "cpu", n_cpus, n_cpus ? "" : reason, "cuda", 0, cuda_missing);
}

static PyObject *cpu_paths(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *paths = PyTuple_New(hkv_cpu_n_paths());
    for (int32_t i = 0; paths && i < hkv_cpu_n_paths(); i++) {
        PyObject *path = Py_BuildValue("(sN)", hkv_cpu_path_name(i), PyBool_FromLong(hkv_cpu_path_supported(i)));
        if (!path) {
            Py_CLEAR(paths);
            break;
        }
        PyTuple_SET_ITEM(paths, i, path);
    }
    return paths;
}

static PyObject *cpu_path(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const hkv_cpu_kernels *kernels;
    hkv_error error;
    if (hkv_cpu_find_path(NULL, &kernels, &error) != HKV_OK) return hkv_py_raise(PyModule_GetState(module), &error);
    return PyUnicode_FromString(kernels->name);
}

PyMethodDef hkv_py_device_methods[] = {
    {"devices", devices, METH_NOARGS,
     "devices()\n--\n\n(name, number, reason) of every kind of device; reason says why there is none."},
    {"cpu_paths", cpu_paths, METH_NOARGS,
     "cpu_paths()\n--\n\n(name, supported) of every CPU code path, the preferred one last."},
    {"cpu_path", cpu_path, METH_NOARGS,
     "cpu_path()\n--\n\nThe path that new caches and stores take: the best one, or what HYBRIDKV_CPU names."},
    {NULL, NULL, 0, NULL},
};
