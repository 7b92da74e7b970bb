/* py_view.c - DLPack out: a read-only view of a layer's pages, for dumps. */
#include "py_core.h"
#include "py_dlpack.h"

#include <stdlib.h>
#include <string.h>

#define VIEW_NDIM 3 /* [n_blocks, Hkv, record_bytes] */

typedef struct hkv_py_view {
    PyObject_HEAD hkv_py_owner *owner;
    int32_t layer_idx;
    hkv_cache_pages pages;
    hkv_py_place place;
} hkv_py_view;

PyObject *hkv_py_view_create(hkv_py_state *state, hkv_py_owner *owner, int32_t layer_idx, const hkv_cache_pages *pages,
                             const hkv_py_place *place)
{
    hkv_py_view *view = PyObject_New(hkv_py_view, state->view_type);
    if (!view) return NULL;
    view->owner = hkv_py_owner_acquire(owner);
    view->layer_idx = layer_idx;
    view->pages = *pages;
    view->place = *place;
    return (PyObject *)view;
}

static void view_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    hkv_py_owner_release(((hkv_py_view *)self)->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ----------------------------------------------------------------------------------------------------------- export */

/* What a capsule hands out, in one allocation. The consumer may call the deleter on any thread, without the GIL and
 * after the interpreter is gone: it touches nothing but the owner's count. */
typedef struct export_block {
    hkv_dl_managed_versioned versioned;
    hkv_dl_managed plain;
    hkv_py_owner *owner;
    int64_t shape[VIEW_NDIM], strides[VIEW_NDIM];
} export_block;

static void export_delete(export_block *block)
{
    hkv_py_owner_release(block->owner);
    free(block);
}

static void delete_versioned(hkv_dl_managed_versioned *self)
{
    export_delete(self->context);
}

static void delete_plain(hkv_dl_managed *self)
{
    export_delete(self->context);
}

static export_block *export_create(const hkv_py_view *view)
{
    export_block *block = calloc(1, sizeof *block);
    if (!block) return NULL;
    block->owner = hkv_py_owner_acquire(view->owner);
    block->shape[0] = view->pages.n_blocks;
    block->shape[1] = view->pages.n_kv_heads;
    block->shape[2] = (int64_t)view->pages.record_bytes;
    block->strides[0] = (int64_t)view->pages.block_stride_bytes;
    block->strides[1] = (int64_t)view->pages.head_stride_bytes;
    block->strides[2] = 1;
    block->plain.tensor = (hkv_dl_tensor){
        .data = (void *)(uintptr_t)view->pages.base, /* the interface has no const */
        .device_type = view->place.device_type,
        .device_id = view->place.device_id,
        .ndim = VIEW_NDIM,
        .dtype_code = HKV_DL_UINT,
        .dtype_bits = 8,
        .dtype_lanes = 1,
        .shape = block->shape,
        .strides = block->strides,
    };
    block->plain.context = block;
    block->plain.deleter = delete_plain;
    block->versioned.version = (hkv_dl_version){HKV_DL_VERSION_MAJOR, HKV_DL_VERSION_MINOR};
    block->versioned.context = block;
    block->versioned.deleter = delete_versioned;
    block->versioned.flags = HKV_DL_FLAG_READ_ONLY;
    block->versioned.tensor = block->plain.tensor;
    return block;
}

/* A capsule that nobody consumed still owns its content. */
static void capsule_destroy(PyObject *capsule)
{
    export_block *block = NULL;
    if (PyCapsule_IsValid(capsule, HKV_DL_CAPSULE_VERSIONED)) {
        hkv_dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, HKV_DL_CAPSULE_VERSIONED);
        block = managed->context;
    } else if (PyCapsule_IsValid(capsule, HKV_DL_CAPSULE)) {
        hkv_dl_managed *managed = PyCapsule_GetPointer(capsule, HKV_DL_CAPSULE);
        block = managed->context;
    }
    if (block) export_delete(block);
}

static PyObject *export_capsule(const hkv_py_view *view, int is_versioned)
{
    export_block *block = export_create(view);
    if (!block) return PyErr_NoMemory();
    PyObject *capsule = is_versioned ? PyCapsule_New(&block->versioned, HKV_DL_CAPSULE_VERSIONED, capsule_destroy)
                                     : PyCapsule_New(&block->plain, HKV_DL_CAPSULE, capsule_destroy);
    if (!capsule) export_delete(block);
    return capsule;
}

/* ---------------------------------------------------------------------------------------------------------- methods */

/* 1 if the consumer understands versioned capsules, 0 if not, -1 with an exception. */
static int wants_versioned(PyObject *max_version)
{
    int major, minor;
    if (max_version == Py_None) return 0;
    if (!PyTuple_Check(max_version)) {
        PyErr_SetString(PyExc_TypeError, "max_version: expected a tuple (major, minor) or None");
        return -1;
    }
    if (!PyArg_ParseTuple(max_version, "ii:max_version", &major, &minor)) return -1;
    return major >= HKV_DL_VERSION_MAJOR;
}

static int check_device(const hkv_py_view *view, PyObject *dl_device)
{
    int type, index;
    if (dl_device == Py_None) return 0;
    if (!PyTuple_Check(dl_device) || !PyArg_ParseTuple(dl_device, "ii:dl_device", &type, &index)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "dl_device: expected a tuple (type, index) or None");
        return -1;
    }
    if (type == view->place.device_type && index == view->place.device_id) return 0;
    PyErr_Format(PyExc_BufferError, "dl_device: pages lie on (%d, %d), and are not copied to (%d, %d)",
                 (int)view->place.device_type, (int)view->place.device_id, type, index);
    return -1;
}

/* Whatever stream the consumer works on finds the pages complete: the library waits for the device. */
static int wait_for_pages(const hkv_py_view *view)
{
    hkv_cache_pages pages;
    hkv_error error;
    hkv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_cache_read_pages(view->owner->handle, view->layer_idx, &pages, &error);
    Py_END_ALLOW_THREADS
    if (status == HKV_OK) return 0;
    PyErr_Format(PyExc_BufferError, "%s", error.message);
    return -1;
}

/* The stream argument of __dlpack__: None on the CPU; on CUDA None, 1, 2, an address, or -1 for no waiting. */
static int order_for_consumer(const hkv_py_view *view, PyObject *stream)
{
    long long address = HKV_DL_STREAM_LEGACY;
    if (view->place.device_type == HKV_DL_CPU) {
        if (stream == Py_None) return 0;
        PyErr_SetString(PyExc_BufferError, "stream: must be None for memory on the CPU");
        return -1;
    }
    if (stream != Py_None) address = PyLong_AsLongLong(stream);
    if (PyErr_Occurred()) return -1;
    if (address == 0 || address < HKV_DL_STREAM_NO_SYNC) {
        PyErr_Format(PyExc_BufferError, "stream: expected None, -1, 1, 2 or a stream's address, got %lld", address);
        return -1;
    }
    return address == HKV_DL_STREAM_NO_SYNC ? 0 : wait_for_pages(view);
}

static PyObject *view_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *dl_device = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream, &max_version, &dl_device,
                                     &copy))
        return NULL;
    const hkv_py_view *view = (const hkv_py_view *)self;
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "copy: pages are shared, not copied; copy the imported array");
        return NULL;
    }
    int is_versioned = wants_versioned(max_version);
    if (is_versioned < 0 || check_device(view, dl_device) < 0 || order_for_consumer(view, stream) < 0) return NULL;
    return export_capsule(view, is_versioned);
}

static PyObject *view_dlpack_device(PyObject *self, PyObject *Py_UNUSED(unused))
{
    const hkv_py_place *place = &((hkv_py_view *)self)->place;
    return Py_BuildValue("(ii)", (int)place->device_type, (int)place->device_id);
}

static PyObject *view_shape(PyObject *self, void *Py_UNUSED(closure))
{
    const hkv_cache_pages *pages = &((hkv_py_view *)self)->pages;
    return Py_BuildValue("(iin)", (int)pages->n_blocks, (int)pages->n_kv_heads, (Py_ssize_t)pages->record_bytes);
}

static PyMethodDef view_methods[] = {
    {"__dlpack__", HKV_PY_FUNCTION(view_dlpack), METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A read-only DLPack capsule that keeps the memory alive, also after the cache is closed."},
    {"__dlpack_device__", view_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self)\n--\n\n(1, 0) for the CPU, (2, N) for cuda:N."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef view_getset[] = {
    {"shape", view_shape, NULL, "(n_blocks, num_kv_heads, record_bytes)", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_doc, "Read-only bytes of a layer's pages, for numpy.from_dlpack and the like."},
    {Py_tp_dealloc, view_dealloc},
    {Py_tp_methods, view_methods},
    {Py_tp_getset, view_getset},
    {0, NULL},
};

PyType_Spec hkv_py_view_spec = {
    .name = "hybridkv._core.PagesView",
    .basicsize = sizeof(hkv_py_view),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = view_slots,
};
