/* py_result.c - structs that go out become dicts. */
#include "py_core.h"

int hkv_py_set_item(PyObject *dict, const char *name, PyObject *value)
{
    int result = value ? PyDict_SetItemString(dict, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

PyObject *hkv_py_counters_to_dict(const hkv_counters *c)
{
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {
        {"n_steps", c->n_steps},
        {"n_tokens_appended", c->n_tokens_appended},
        {"n_blocks_sealed", c->n_blocks_sealed},
        {"n_blocks_sealed_direct", c->n_blocks_sealed_direct},
        {"n_pages_claimed", c->n_pages_claimed},
        {"n_pages_restored", c->n_pages_restored},
        {"n_pages_evicted", c->n_pages_evicted},
        {"n_partial_evicted", c->n_partial_evicted},
        {"n_hot_blocks_read", c->n_hot_blocks_read},
        {"n_hot_blocks_wanted", c->n_hot_blocks_wanted},
        {"n_records_read", c->n_records_read},
        {"n_records_skipped", c->n_records_skipped},
        {"n_records_refined", c->n_records_refined},
        {"n_records_unselected", c->n_records_unselected},
        {"n_bytes_read", c->n_bytes_read},
        {"n_nonfinite_inputs", c->n_nonfinite_inputs},
        {"n_skipped_mass_terms", c->n_skipped_mass_terms},
    };
    PyObject *dict = PyDict_New();
    if (!dict) return NULL;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (hkv_py_set_item(dict, counts[i].name, PyLong_FromUnsignedLongLong(counts[i].value)) < 0) {
            Py_DECREF(dict);
            return NULL;
        }
    }
    if (hkv_py_set_item(dict, "skipped_mass", PyFloat_FromDouble(c->skipped_mass)) < 0) Py_CLEAR(dict);
    return dict;
}
