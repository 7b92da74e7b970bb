/* py_device.c - which devices there are. A backend other than the CPU is found here and nowhere else.
 *
 * CUDA is a library of its own beside this module, loaded when it is first asked for and never unloaded: objects keep
 * pointers into it. Importing hybridkv needs neither it nor a driver.
 */
#define _GNU_SOURCE /* dladdr */

#include "py_core.h"

#include <dlfcn.h>
#include <string.h>

#include "backend.h"
#include "cpu_dispatch.h"

#define CUDA_LIBRARY "_cuda.so"

/* Why something cannot be had, for messages. */
typedef struct reason_text {
    char chars[512];
} reason_text;

/* Path of a file in the directory of this module; 0 if it is too long. */
static int path_beside_module(const char *name, char *path, size_t n_bytes)
{
    Dl_info self;
    const char *slash;
    if (!dladdr((const void *)hkv_py_device_find, &self) || !self.dli_fname) return 0;
    slash = strrchr(self.dli_fname, '/');
    int n = snprintf(path, n_bytes, "%.*s%s", slash ? (int)(slash + 1 - self.dli_fname) : 0, self.dli_fname, name);
    return n > 0 && (size_t)n < n_bytes;
}

/* Open the CUDA library. NULL with the reason why not. */
static void *open_cuda(reason_text *reason)
{
    char path[4096];
    void *library;
    if (!path_beside_module(CUDA_LIBRARY, path, sizeof path)) {
        snprintf(reason->chars, sizeof reason->chars, "the directory of hybridkv is not known");
        return NULL;
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
    FILE *file = fopen(path, "rb");
    if (file) {
        fclose(file);
        snprintf(reason->chars, sizeof reason->chars, "the CUDA backend could not be loaded: %s", dlerror());
    } else {
        snprintf(reason->chars, sizeof reason->chars,
                 "this build has no CUDA backend; build hybridkv where nvcc is found (CUDA_HOME, /usr/local/cuda or "
                 "PATH), or use device=\"cpu\"");
    }
    return NULL;
}

/* The CUDA backend and how many devices it has; 0 with the reason. *backend is NULL if it could not be loaded. */
static int32_t find_cuda(const hkv_backend **backend, reason_text *reason)
{
    const hkv_backend *(*get)(void);
    const char *why = NULL;
    void *library = open_cuda(reason);
    *backend = NULL;
    if (!library) return 0;
    *(void **)&get = dlsym(library, "hkv_backend_cuda");
    if (!get || get()->abi_version != HKV_BACKEND_ABI || get()->struct_size != sizeof(hkv_backend)) {
        snprintf(reason->chars, sizeof reason->chars, "%s is not of this build of hybridkv; install it anew",
                 CUDA_LIBRARY);
        return 0;
    }
    *backend = get();
    int32_t n_devices = (*backend)->count_devices(&why);
    snprintf(reason->chars, sizeof reason->chars, "%s", n_devices ? "" : why);
    return n_devices;
}

/* N of "cuda:N", 0 of "cuda"; -1 if it is neither. */
static int32_t cuda_index(const char *name)
{
    int32_t index = 0;
    if (strncmp(name, "cuda", 4) != 0) return -1;
    if (name[4] == '\0') return 0;
    if (name[4] != ':' || name[5] == '\0') return -1;
    for (const char *c = name + 5; *c; c++) {
        if (*c < '0' || *c > '9' || index > 9999) return -1;
        index = 10 * index + (*c - '0');
    }
    return index;
}

int hkv_py_device_find(hkv_py_state *state, const char *name, const hkv_backend **backend, int32_t *device_index)
{
    reason_text reason;
    *backend = NULL;
    *device_index = 0;
    if (strcmp(name, "cpu") == 0) return 0;
    *device_index = cuda_index(name);
    if (*device_index < 0)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "device", "expected \"cpu\", \"cuda\" or \"cuda:N\", got '%s'",
                           name);
    int32_t n_devices = find_cuda(backend, &reason);
    if (n_devices == 0) return hkv_py_fail(state, HKV_ERR_NO_DEVICE, "device", "'%s': %s", name, reason.chars);
    if (*device_index >= n_devices)
        return hkv_py_fail(state, HKV_ERR_NO_DEVICE, "device", "'%s': there are %d CUDA devices", name, (int)n_devices);
    return 0;
}

static PyObject *devices(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const hkv_backend *backend;
    const char *why = "";
    reason_text reason;
    int n_cpus = (int)hkv_backend_cpu()->count_devices(&why), n_gpus;
    Py_BEGIN_ALLOW_THREADS
    n_gpus = (int)find_cuda(&backend, &reason);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("[(sis)(sis)]", "cpu", n_cpus, n_cpus ? "" : why, "cuda", n_gpus, reason.chars);
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
