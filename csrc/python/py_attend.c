/* py_attend.c - the arguments of attend, the same for caches and stores. */
#include "py_tensor.h"

#include <math.h>
#include <string.h>

/* Rows of heads: [N, n_heads, D] in the model's dtype; n_heads < 0 = any. */
static int import_heads(hkv_py_state *state, PyObject *obj, const char *argument, const char *letters, int64_t n_heads,
                        int writable, const hkv_py_attend_rule *rule, hkv_py_tensor *t)
{
    int64_t shape[3] = {rule->n_tokens, n_heads, rule->head_dim};
    if (hkv_py_tensor_import(state, obj, argument, &rule->place, 0, t) < 0 ||
        hkv_py_tensor_check_dtype(state, t, rule->dtype) < 0 ||
        hkv_py_tensor_check_shape(state, t, 3, shape, letters) < 0)
        return -1;
    return hkv_py_tensor_check_layout(state, t, writable);
}

/* A compact float32 tensor; None = absent. */
static int import_floats(hkv_py_state *state, PyObject *obj, const char *argument, int32_t ndim, const int64_t *shape,
                         const char *letters, int writable, const hkv_py_place *place, hkv_py_tensor *t)
{
    if (obj == Py_None) return 0;
    if (hkv_py_tensor_import(state, obj, argument, place, 0, t) < 0 ||
        hkv_py_tensor_check_dtype(state, t, HKV_F32) < 0 ||
        hkv_py_tensor_check_shape(state, t, ndim, shape, letters) < 0 ||
        hkv_py_tensor_check_layout(state, t, writable) < 0)
        return -1;
    return hkv_py_tensor_check_compact(state, t);
}

static int real_from_object(hkv_py_state *state, PyObject *obj, const char *argument, double fallback, float *value)
{
    double x = fallback;
    if (obj != Py_None) {
        if (PyBool_Check(obj) || (!PyFloat_Check(obj) && !PyLong_Check(obj)))
            return hkv_py_fail(state, HKV_ERR_TYPE, argument, "expected a real number, got %.80s",
                               Py_TYPE(obj)->tp_name);
        x = PyFloat_AsDouble(obj);
        if (x == -1.0 && PyErr_Occurred()) return -1;
    }
    *value = (float)x;
    return 0;
}

static int parse_heads(hkv_py_state *state, PyObject *const *args, const hkv_py_attend_rule *rule, hkv_py_attend *a)
{
    if (import_heads(state, args[1], "q", "[N, Hq, D]", -1, 0, rule, &a->q) < 0) return -1;
    int64_t n_q_heads = a->q.shape[1];
    if (n_q_heads <= 0 || n_q_heads > INT32_MAX || n_q_heads % rule->n_kv_heads != 0)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "q",
                           "the number of heads must be a multiple of the %d KV heads, "
                           "got %lld",
                           (int)rule->n_kv_heads, (long long)n_q_heads);
    if (import_heads(state, args[2], "k", "[N, Hkv, D]", rule->n_kv_heads, 0, rule, &a->k) < 0 ||
        import_heads(state, args[3], "v", "[N, Hkv, D]", rule->n_kv_heads, 0, rule, &a->v) < 0 ||
        import_heads(state, args[4], "out", "[N, Hq, D]", n_q_heads, 1, rule, &a->out) < 0)
        return -1;
    a->args.n_q_heads = (int32_t)n_q_heads;
    a->args.q = a->q.data;
    a->args.k = a->k.data;
    a->args.v = a->v.data;
    a->args.out = a->out.data;
    a->args.q_stride_token = a->q.strides[0];
    a->args.q_stride_head = a->q.strides[1];
    a->args.k_stride_token = a->k.strides[0];
    a->args.k_stride_head = a->k.strides[1];
    a->args.v_stride_token = a->v.strides[0];
    a->args.v_stride_head = a->v.strides[1];
    a->args.out_stride_token = a->out.strides[0];
    a->args.out_stride_head = a->out.strides[1];
    return 0;
}

static int parse_extras(hkv_py_state *state, PyObject *const *args, const hkv_py_attend_rule *rule, hkv_py_attend *a)
{
    int64_t n_q_heads = a->args.n_q_heads;
    int64_t sinks_shape[1] = {n_q_heads};
    int64_t lse_shape[2] = {rule->n_tokens, n_q_heads};
    int64_t mass_shape[3] = {rule->n_rows, rule->n_kv_heads, -1};
    if (real_from_object(state, args[5], "scale", 1.0 / sqrt((double)rule->head_dim), &a->args.softmax_scale) < 0 ||
        real_from_object(state, args[6], "soft_cap", 0.0, &a->args.logits_soft_cap) < 0 ||
        import_floats(state, args[7], "sinks", 1, sinks_shape, "[Hq]", 0, &rule->place, &a->sinks) < 0 ||
        import_floats(state, args[8], "lse", 2, lse_shape, "[N, Hq]", 1, &rule->place, &a->lse) < 0 ||
        import_floats(state, args[9], "mass", 3, mass_shape, "[R, Hkv, blocks]", 1, &rule->place, &a->mass) < 0)
        return -1;
    if (args[9] != Py_None && a->mass.shape[2] < rule->max_blocks)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "mass",
                           "the last dimension must hold the %lld blocks of the "
                           "longest sequence, got %lld",
                           (long long)rule->max_blocks, (long long)a->mass.shape[2]);
    a->args.sink_logits = a->sinks.data;
    a->args.lse = a->lse.data;
    a->args.mass = a->mass.data;
    a->args.mass_stride = args[9] == Py_None ? 0 : a->mass.shape[2];
    return 0;
}

int hkv_py_attend_parse(hkv_py_state *state, PyObject *const *args, Py_ssize_t n_args, const hkv_py_attend_rule *rule,
                        hkv_py_attend *attend)
{
    memset(attend, 0, sizeof *attend);
    if (n_args != HKV_PY_N_ATTEND_ARGS) {
        PyErr_Format(PyExc_TypeError, "attend expected %d arguments, got %zd", HKV_PY_N_ATTEND_ARGS, n_args);
        return -1;
    }
    if (hkv_py_index_from_object(state, args[0], "layer", rule->n_layers, &attend->layer_idx) < 0) return -1;
    hkv_py_attend_rule call = *rule;
    if (hkv_py_place_for_call(state, &rule->place, args[10], &call.place) < 0) return -1;
    attend->args.stream = call.place.stream;
    if (parse_heads(state, args, &call, attend) < 0) return -1;
    return parse_extras(state, args, &call, attend);
}

void hkv_py_attend_release(hkv_py_attend *attend)
{
    hkv_py_tensor *tensors[] = {&attend->q,     &attend->k,   &attend->v,   &attend->out,
                                &attend->sinks, &attend->lse, &attend->mass};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) hkv_py_tensor_release(tensors[i]);
}

int hkv_py_token_output_import(hkv_py_state *state, PyObject *obj, const char *argument, int64_t n_tokens,
                               const hkv_py_attend_rule *rule, hkv_py_tensor *t)
{
    hkv_py_attend_rule tokens = *rule;
    tokens.n_tokens = n_tokens;
    if (import_heads(state, obj, argument, "[n, Hkv, D]", rule->n_kv_heads, 1, &tokens, t) < 0) return -1;
    if (n_tokens > 1 &&
        (t->strides[1] != rule->head_dim || t->strides[0] != (int64_t)rule->n_kv_heads * rule->head_dim))
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, argument, "must be contiguous");
    return 0;
}
