/* py_owner.c - lifetime of library objects, and one caller at a time inside each. */
#include "py_core.h"
#include "py_tensor.h"

#include <stdlib.h>
#include <string.h>

hkv_py_owner *hkv_py_owner_create(void *handle, void (*destroy)(void *handle), hkv_py_pool *pool, hkv_py_tensor *memory)
{
    const int has_memory = memory && memory->data;
    hkv_py_owner *owner = malloc(sizeof *owner);
    hkv_py_tensor *kept = has_memory ? malloc(sizeof *kept) : NULL;
    if (!owner || (has_memory && !kept)) {
        free(owner);
        free(kept);
        destroy(handle);
        hkv_py_pool_release(pool);
        if (memory) hkv_py_tensor_release(memory);
        PyErr_NoMemory();
        return NULL;
    }
    if (has_memory) {
        *kept = *memory;
        memset(memory, 0, sizeof *memory);
    }
    owner->memory = kept;
    atomic_init(&owner->n_refs, 1);
    owner->handle = handle;
    owner->destroy = destroy;
    owner->pool = pool;
    return owner;
}

hkv_py_owner *hkv_py_owner_acquire(hkv_py_owner *owner)
{
    atomic_fetch_add_explicit(&owner->n_refs, 1, memory_order_relaxed);
    return owner;
}

void hkv_py_owner_release(hkv_py_owner *owner)
{
    if (!owner || atomic_fetch_sub_explicit(&owner->n_refs, 1, memory_order_acq_rel) != 1) return;
    owner->destroy(owner->handle);
    hkv_py_pool_release(owner->pool);
    if (owner->memory && Py_IsInitialized()) { /* its producer may be Python, which a view may outlive */
        const PyGILState_STATE gil = PyGILState_Ensure();
        hkv_py_tensor_release(owner->memory);
        PyGILState_Release(gil);
    }
    free(owner->memory);
    free(owner);
}

static int object_try_hold(hkv_py_state *state, hkv_py_object *object)
{
    if (atomic_exchange_explicit(&object->in_use, 1, memory_order_acquire) == 0) return 0;
    return hkv_py_fail(state, HKV_ERR_BUSY, "", "another thread is inside this object; use it from one at a time");
}

int hkv_py_enter(hkv_py_state *state, hkv_py_object *object)
{
    if (object_try_hold(state, object) < 0) return -1;
    if (object->owner) return 0;
    hkv_py_leave(object);
    return hkv_py_fail(state, HKV_ERR_STATE, "", "the %s is closed", strrchr(Py_TYPE(object)->tp_name, '.') + 1);
}

void hkv_py_leave(hkv_py_object *object)
{
    atomic_store_explicit(&object->in_use, 0, memory_order_release);
}

PyObject *hkv_py_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    hkv_py_object *object = (hkv_py_object *)self;
    hkv_py_owner *owner;
    if (object_try_hold(hkv_py_state_of(self), object) < 0) return NULL;
    owner = object->owner;
    object->owner = NULL;
    hkv_py_leave(object);
    Py_BEGIN_ALLOW_THREADS
    hkv_py_owner_release(owner);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

void hkv_py_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    hkv_py_owner_release(((hkv_py_object *)self)->owner);
    type->tp_free(self);
    Py_DECREF(type);
}
