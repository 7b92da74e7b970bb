/* py_cache.c - _core.Cache: one hkv_cache. hybridkv.Cache is the face of it. */
#include "py_tensor.h"

#include <string.h>

typedef struct hkv_py_cache {
    hkv_py_object object;
    hkv_py_attend_rule rule; /* n_tokens, n_rows, max_blocks: of the open step */
    int32_t block_size;
} hkv_py_cache;

static hkv_cache *handle_of(hkv_py_cache *self)
{
    return self->object.owner->handle;
}

/* --------------------------------------------------------------------------------------------------------- creation */

/* Layer windows as a list, or None. */
static int windows_from_object(hkv_py_state *state, PyObject *obj, int32_t n_layers, hkv_py_ints *windows)
{
    const hkv_py_ints_rule rule = {"layer_windows", 1, 0, INT32_MAX, 4, n_layers, "[num_layers]"};
    memset(windows, 0, sizeof *windows);
    return obj == Py_None ? 0 : hkv_py_ints_import(state, obj, &rule, &hkv_py_host, windows);
}

/* One number among the arguments of Cache and where it goes. */
typedef struct number_arg {
    const char *name;
    PyObject *obj;
    int32_t *int32; /* one of these three */
    int64_t *int64;
    size_t *size;
} number_arg;

static int number_from_arg(hkv_py_state *state, const number_arg *arg)
{
    int64_t value;
    if (arg->int32) return hkv_py_int32_from_object(state, arg->obj, arg->name, arg->int32);
    if (arg->int64) return hkv_py_int_from_object(state, arg->obj, arg->name, 0, INT64_MAX, arg->int64);
    if (hkv_py_int_from_object(state, arg->obj, arg->name, 0, INT64_MAX, &value) < 0) return -1;
    *arg->size = (size_t)value;
    return 0;
}

static void cache_destroy(void *handle)
{
    hkv_cache_destroy(handle);
}

/* No step: any number of tokens passes here, and the library says that no step is open. */
static void forget_step(hkv_py_cache *self)
{
    self->rule.n_tokens = -1;
    self->rule.n_rows = -1;
    self->rule.max_blocks = 0;
}

/* The tensor is options->memory; its content is taken over. */
static int cache_open(hkv_py_state *state, hkv_py_cache *self, hkv_cache_options *options, hkv_py_tensor *memory)
{
    hkv_cache *cache = NULL;
    hkv_error error;
    hkv_status status;
    hkv_py_pool *pool = hkv_py_pool_acquire(state);
    if (!pool) return -1;
    options->threads = pool->threads;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_cache_create(options, &cache, &error);
    Py_END_ALLOW_THREADS
    if (status != HKV_OK) {
        hkv_py_pool_release(pool);
        hkv_py_raise(state, &error);
        return -1;
    }
    self->object.owner = hkv_py_owner_create(cache, cache_destroy, pool, memory);
    self->block_size = options->config.block_size;
    self->rule = (hkv_py_attend_rule){.n_layers = options->model.n_layers,
                                      .n_kv_heads = options->model.n_kv_heads,
                                      .head_dim = options->model.head_dim,
                                      .dtype = options->model.dtype,
                                      .place = hkv_py_place_of(options->backend, options->device_index)};
    forget_step(self);
    return self->object.owner ? 0 : -1;
}

static int hash_key_from_buffer(hkv_py_state *state, const Py_buffer *key, hkv_cache_options *options)
{
    if (key->len != (Py_ssize_t)sizeof options->hash_key)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "hash_key", "expected %zu bytes, got %zd", sizeof options->hash_key,
                           key->len);
    memcpy(options->hash_key, key->buf, sizeof options->hash_key);
    return 0;
}

/* The object, once all but the layer windows and the memory is converted. */
static PyObject *cache_create(hkv_py_state *state, PyTypeObject *type, PyObject *layer_windows, PyObject *memory,
                              hkv_cache_options *options)
{
    const hkv_py_place place = hkv_py_place_of(options->backend, options->device_index);
    PyObject *self = NULL;
    hkv_py_ints windows;
    hkv_py_tensor tensor;
    if (windows_from_object(state, layer_windows, options->model.n_layers, &windows) < 0) return NULL;
    options->model.layer_windows = windows.values;
    if (hkv_py_memory_import(state, memory, &place, &tensor, &options->memory) == 0) self = type->tp_alloc(type, 0);
    if (self && cache_open(state, (hkv_py_cache *)self, options, &tensor) < 0) Py_CLEAR(self);
    hkv_py_tensor_release(&tensor);
    hkv_py_ints_release(&windows);
    return self;
}

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"config",       "dtype",      "device",          "layer_windows",    "hash_key",
                            "prefix_reuse", "num_layers", "num_kv_heads",    "head_dim",         "max_sequences",
                            "memory_bytes", "max_tokens", "max_step_tokens", "hot_memory_bytes", "test_hash_bits",
                            "memory",       NULL};
    hkv_py_state *state = PyType_GetModuleState(type);
    hkv_cache_options o = {0};
    number_arg numbers[] = {
        {.name = "num_layers", .int32 = &o.model.n_layers},
        {.name = "num_kv_heads", .int32 = &o.model.n_kv_heads},
        {.name = "head_dim", .int32 = &o.model.head_dim},
        {.name = "max_sequences", .int32 = &o.max_sequences},
        {.name = "memory_bytes", .size = &o.memory_bytes},
        {.name = "max_tokens", .int64 = &o.max_tokens},
        {.name = "max_step_tokens", .int64 = &o.max_step_tokens},
        {.name = "hot_memory_bytes", .size = &o.hot_memory_bytes},
        {.name = "test_hash_bits", .int32 = &o.test_hash_bits},
    };
    PyObject *config, *layer_windows, *memory;
    const char *dtype, *device;
    Py_buffer hash_key;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$ssOy*pOOOOOOOOOO:Cache", names, &config, &dtype, &device,
                                     &layer_windows, &hash_key, &o.prefix_reuse, &numbers[0].obj, &numbers[1].obj,
                                     &numbers[2].obj, &numbers[3].obj, &numbers[4].obj, &numbers[5].obj,
                                     &numbers[6].obj, &numbers[7].obj, &numbers[8].obj, &memory))
        return NULL;
    int result = hash_key_from_buffer(state, &hash_key, &o);
    PyBuffer_Release(&hash_key);
    if (result < 0 || hkv_py_config_from_dict(state, config, &o.config) < 0 ||
        hkv_py_dtype_from_name(state, dtype, &o.model.dtype) < 0 ||
        hkv_py_device_find(state, device, &o.backend, &o.device_index) < 0)
        return NULL;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (number_from_arg(state, &numbers[i]) < 0) return NULL;
    return cache_create(state, type, layer_windows, memory, &o);
}

/* -------------------------------------------------------------------------------------------------------- sequences */

/* Run one library call between enter and leave, without the GIL; `call` sets status. The rest of every method is
 * conversion, so this is where the binding's rule "one call, no GIL" lives. */
#define CACHE_CALL(self, status, call)                                                                                 \
    do {                                                                                                               \
        Py_BEGIN_ALLOW_THREADS(status)                                                                                 \
        = (call);                                                                                                      \
        Py_END_ALLOW_THREADS                                                                                           \
        hkv_py_leave(&(self)->object);                                                                                 \
    } while (0)

static PyObject *none_or_raise(hkv_py_state *state, hkv_status status, const hkv_error *error)
{
    if (status != HKV_OK) return hkv_py_raise(state, error);
    Py_RETURN_NONE;
}

static PyObject *cache_add_sequence(PyObject *op, PyObject *args)
{
    const hkv_py_ints_rule rule = {"token_ids", 1, 0, INT64_MAX, 8, -1, "[n]"};
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    PyObject *token_ids, *result = NULL;
    Py_buffer salt;
    hkv_py_ints tokens = {0};
    hkv_sequence sequence = 0;
    int64_t n_cached = 0;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "Oy*:add_sequence", &token_ids, &salt)) return NULL;
    if ((token_ids == Py_None || hkv_py_ints_import(state, token_ids, &rule, &hkv_py_host, &tokens) == 0) &&
        hkv_py_enter(state, &self->object) == 0) {
        CACHE_CALL(self, status,
                   hkv_cache_add_sequence(handle_of(self), tokens.values, tokens.shape[0], salt.buf, (size_t)salt.len,
                                          &sequence, &n_cached, &error));
        result = status == HKV_OK ? Py_BuildValue("(KL)", (unsigned long long)sequence, (long long)n_cached)
                                  : hkv_py_raise(state, &error);
    }
    hkv_py_ints_release(&tokens);
    PyBuffer_Release(&salt);
    return result;
}

static PyObject *cache_fork(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    hkv_sequence forked = 0;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "K:fork", &sequence) || hkv_py_enter(state, &self->object) < 0) return NULL;
    CACHE_CALL(self, status, hkv_cache_fork(handle_of(self), sequence, &forked, &error));
    return status == HKV_OK ? PyLong_FromUnsignedLongLong(forked) : hkv_py_raise(state, &error);
}

static PyObject *cache_truncate(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    PyObject *n_obj;
    int64_t n_tokens;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "KO:truncate", &sequence, &n_obj) ||
        hkv_py_int_from_object(state, n_obj, "num_tokens", 0, INT64_MAX, &n_tokens) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    CACHE_CALL(self, status, hkv_cache_truncate(handle_of(self), sequence, n_tokens, &error));
    return none_or_raise(state, status, &error);
}

static PyObject *cache_free(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "K:free", &sequence) || hkv_py_enter(state, &self->object) < 0) return NULL;
    CACHE_CALL(self, status, hkv_cache_free(handle_of(self), sequence, &error));
    return none_or_raise(state, status, &error);
}

static PyObject *cache_sequence_length(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    int64_t n_tokens = 0;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "K:sequence_length", &sequence) || hkv_py_enter(state, &self->object) < 0) return NULL;
    CACHE_CALL(self, status, hkv_cache_sequence_length(handle_of(self), sequence, &n_tokens, &error));
    return status == HKV_OK ? PyLong_FromLongLong(n_tokens) : hkv_py_raise(state, &error);
}

/* Handles of a list of sequences, PyMem_RawFree'd by the caller; NULL with an exception. Never of size 0. */
static hkv_sequence *sequences_from_list(PyObject *list)
{
    Py_ssize_t n = PyTuple_GET_SIZE(list);
    hkv_sequence *sequences = PyMem_RawMalloc(((size_t)n + 1) * sizeof *sequences);
    if (!sequences) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        sequences[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(list, i));
        if (PyErr_Occurred()) {
            PyMem_RawFree(sequences);
            return NULL;
        }
    }
    return sequences;
}

static PyObject *cache_reorder(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    PyObject *list, *indices, *result = NULL;
    hkv_py_ints source = {0};
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "O!O:reorder", &PyTuple_Type, &list, &indices)) return NULL;
    int32_t n = (int32_t)PyTuple_GET_SIZE(list);
    const hkv_py_ints_rule rule = {"source_indices", 1, 0, n - 1, 4, n, "[len(sequences)]"};
    hkv_sequence *sequences = sequences_from_list(list);
    if (sequences && hkv_py_ints_import(state, indices, &rule, &hkv_py_host, &source) == 0 &&
        hkv_py_enter(state, &self->object) == 0) {
        CACHE_CALL(self, status, hkv_cache_reorder(handle_of(self), sequences, source.values, n, &error));
        result = none_or_raise(state, status, &error);
    }
    hkv_py_ints_release(&source);
    PyMem_RawFree(sequences);
    return result;
}

/* ------------------------------------------------------------------------------------------------------------ steps */

/* The converted arguments of begin. */
typedef struct step_args {
    hkv_sequence *sequences; /* [n_rows] */
    int32_t n_rows;
    hkv_py_ints n_tokens;  /* [n_rows] */
    hkv_py_ints token_ids; /* [sum of n_tokens], values NULL if not given */
} step_args;

static void step_args_release(step_args *s)
{
    PyMem_RawFree(s->sequences);
    hkv_py_ints_release(&s->n_tokens);
    hkv_py_ints_release(&s->token_ids);
}

static int token_ids_from_object(hkv_py_state *state, PyObject *obj, step_args *s)
{
    int64_t total = 0;
    const int64_t *n_tokens = s->n_tokens.values;
    for (int32_t i = 0; i < s->n_rows; i++) total += n_tokens[i]; /* each below 2^31 */
    const hkv_py_ints_rule rule = {"token_ids", 1, 0, INT64_MAX, 8, total, "[sum of num_tokens]"};
    return obj == Py_None ? 0 : hkv_py_ints_import(state, obj, &rule, &hkv_py_host, &s->token_ids);
}

static int step_args_parse(hkv_py_state *state, PyObject *list, PyObject *n_tokens, PyObject *token_ids, step_args *s)
{
    memset(s, 0, sizeof *s);
    s->n_rows = (int32_t)PyTuple_GET_SIZE(list);
    const hkv_py_ints_rule rule = {"num_tokens", 1, 0, INT32_MAX, 8, s->n_rows, "[len(sequences)]"};
    s->sequences = sequences_from_list(list);
    if (!s->sequences || hkv_py_ints_import(state, n_tokens, &rule, &hkv_py_host, &s->n_tokens) < 0) return -1;
    return token_ids_from_object(state, token_ids, s);
}

static PyObject *cache_begin(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    PyObject *list, *n_tokens, *token_ids, *clock_obj, *stream_obj, *result = NULL;
    int64_t clock;
    hkv_py_place place;
    step_args s;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "O!OOOO:begin", &PyTuple_Type, &list, &n_tokens, &token_ids, &clock_obj, &stream_obj) ||
        hkv_py_int_from_object(state, clock_obj, "clock", INT64_MIN, INT64_MAX, &clock) < 0 ||
        hkv_py_place_for_call(state, &self->rule.place, stream_obj, &place) < 0)
        return NULL;
    if (step_args_parse(state, list, n_tokens, token_ids, &s) == 0 && hkv_py_enter(state, &self->object) == 0) {
        hkv_cache *cache = handle_of(self);
        Py_BEGIN_ALLOW_THREADS
        status = hkv_cache_begin(cache, s.sequences, s.n_tokens.values, s.n_rows, s.token_ids.values, clock,
                                 place.stream, &error);
        Py_END_ALLOW_THREADS
        if (status == HKV_OK) {
            int64_t max_length = hkv_cache_step_max_length(cache);
            self->rule.n_rows = s.n_rows;
            self->rule.n_tokens = hkv_cache_step_tokens(cache);
            self->rule.max_blocks = (max_length + self->block_size - 1) / self->block_size;
            result = Py_BuildValue("(LL)", (long long)self->rule.n_tokens, (long long)self->rule.max_blocks);
        } else {
            hkv_py_raise(state, &error);
        }
        hkv_py_leave(&self->object);
    }
    step_args_release(&s);
    return result;
}

static PyObject *cache_attend(PyObject *op, PyObject *const *args, Py_ssize_t n_args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_py_attend attend;
    hkv_error error;
    hkv_status status;
    PyObject *result = NULL;
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    if (hkv_py_attend_parse(state, args, n_args, &self->rule, &attend) == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = hkv_cache_attend(handle_of(self), attend.layer_idx, &attend.args, &error);
        Py_END_ALLOW_THREADS
        result = none_or_raise(state, status, &error);
    }
    hkv_py_leave(&self->object);
    hkv_py_attend_release(&attend);
    return result;
}

static PyObject *cache_mark_attended(PyObject *op, PyObject *Py_UNUSED(unused))
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_error error;
    hkv_status status;
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    CACHE_CALL(self, status, hkv_cache_mark_attended(handle_of(self), &error));
    return none_or_raise(state, status, &error);
}

static PyObject *cache_prefetch_hot(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    PyObject *layer_obj, *stream_obj;
    int32_t layer_idx;
    hkv_py_place place;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "OO:prefetch_hot", &layer_obj, &stream_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_place_for_call(state, &self->rule.place, stream_obj, &place) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    CACHE_CALL(self, status, hkv_cache_prefetch_hot(handle_of(self), layer_idx, place.stream, &error));
    return none_or_raise(state, status, &error);
}

/* end, abort and reset: after each of them no step is open. */
static PyObject *close_step(PyObject *op, hkv_status (*close)(hkv_cache *cache, hkv_error *error))
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_error error;
    hkv_status status;
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = close(handle_of(self), &error);
    Py_END_ALLOW_THREADS
    if (status == HKV_OK) forget_step(self);
    hkv_py_leave(&self->object);
    return none_or_raise(state, status, &error);
}

static PyObject *cache_end(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return close_step(op, hkv_cache_end);
}

static PyObject *cache_abort(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return close_step(op, hkv_cache_abort);
}

static PyObject *cache_reset(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return close_step(op, hkv_cache_reset);
}

/* ------------------------------------------------------------------------------------------------ content and tiers */

static PyObject *cache_read_tokens(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    long long first, n;
    int32_t layer_idx;
    PyObject *layer_obj, *k_obj, *v_obj, *result = NULL;
    hkv_py_tensor k = {0}, v = {0};
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "KOLLOO:read_tokens", &sequence, &layer_obj, &first, &n, &k_obj, &v_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0)
        return NULL;
    if (hkv_py_token_output_import(state, k_obj, "k_out", n, &self->rule, &k) == 0 &&
        hkv_py_token_output_import(state, v_obj, "v_out", n, &self->rule, &v) == 0 &&
        hkv_py_enter(state, &self->object) == 0) {
        CACHE_CALL(self, status,
                   hkv_cache_read_tokens(handle_of(self), sequence, layer_idx, first, n, k.data, v.data, &error));
        result = none_or_raise(state, status, &error);
    }
    hkv_py_tensor_release(&k);
    hkv_py_tensor_release(&v);
    return result;
}

/* Logical blocks of a sequence, or -1 with an exception. The object is held. */
static int64_t count_blocks(hkv_py_state *state, hkv_py_cache *self, hkv_sequence sequence)
{
    int64_t n_tokens = 0;
    hkv_error error;
    if (hkv_cache_sequence_length(handle_of(self), sequence, &n_tokens, &error) == HKV_OK)
        return (n_tokens + self->block_size - 1) / self->block_size;
    hkv_py_raise(state, &error);
    return -1;
}

static PyObject *tiers_of(hkv_py_state *state, hkv_py_cache *self, hkv_sequence sequence, int32_t layer_idx,
                          int32_t kv_head)
{
    hkv_error error;
    int64_t n_blocks = count_blocks(state, self, sequence);
    if (n_blocks < 0) return NULL;
    PyObject *tiers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n_blocks);
    if (tiers && hkv_cache_read_tiers(handle_of(self), sequence, layer_idx, kv_head,
                                      (uint8_t *)PyBytes_AS_STRING(tiers), &n_blocks, &error) != HKV_OK) {
        hkv_py_raise(state, &error);
        Py_CLEAR(tiers);
    }
    return tiers;
}

static PyObject *cache_tiers(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    int32_t layer_idx, kv_head;
    PyObject *layer_obj, *head_obj;
    if (!PyArg_ParseTuple(args, "KOO:tiers", &sequence, &layer_obj, &head_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_index_from_object(state, head_obj, "kv_head", self->rule.n_kv_heads, &kv_head) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    PyObject *tiers = tiers_of(state, self, sequence, layer_idx, kv_head);
    hkv_py_leave(&self->object);
    return tiers;
}

static PyObject *cache_set_tier(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    int tier;
    int32_t layer_idx, kv_head;
    int64_t block;
    PyObject *layer_obj, *head_obj, *block_obj;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "KOOOi:set_tier", &sequence, &layer_obj, &head_obj, &block_obj, &tier) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_index_from_object(state, head_obj, "kv_head", self->rule.n_kv_heads, &kv_head) < 0 ||
        hkv_py_int_from_object(state, block_obj, "block", INT64_MIN, INT64_MAX, &block) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    CACHE_CALL(self, status,
               hkv_cache_set_tier(handle_of(self), sequence, layer_idx, kv_head, block, (hkv_tier)tier, &error));
    return none_or_raise(state, status, &error);
}

static PyObject *block_table_of(hkv_py_state *state, hkv_py_cache *self, hkv_sequence sequence, int32_t layer_idx)
{
    hkv_error error;
    PyObject *table = NULL;
    int64_t n_blocks = count_blocks(state, self, sequence);
    int32_t *blocks = n_blocks < 0 ? NULL : PyMem_RawCalloc((size_t)n_blocks + 1, sizeof *blocks);
    if (n_blocks < 0) return NULL;
    if (!blocks) return PyErr_NoMemory();
    if (hkv_cache_read_table(handle_of(self), sequence, layer_idx, blocks, &n_blocks, &error) == HKV_OK) {
        table = PyList_New((Py_ssize_t)n_blocks);
        for (Py_ssize_t i = 0; table && i < (Py_ssize_t)n_blocks; i++) {
            PyObject *block = PyLong_FromLong(blocks[i]);
            if (block)
                PyList_SET_ITEM(table, i, block);
            else
                Py_CLEAR(table);
        }
    } else {
        hkv_py_raise(state, &error);
    }
    PyMem_RawFree(blocks);
    return table;
}

static PyObject *cache_block_table(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    unsigned long long sequence;
    int32_t layer_idx;
    PyObject *layer_obj;
    if (!PyArg_ParseTuple(args, "KO:block_table", &sequence, &layer_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    PyObject *table = block_table_of(state, self, sequence, layer_idx);
    hkv_py_leave(&self->object);
    return table;
}

static PyObject *cache_export_pages(PyObject *op, PyObject *layer_obj)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_cache_pages pages;
    hkv_error error;
    int32_t layer_idx;
    PyObject *view = NULL;
    if (hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    if (hkv_cache_read_pages(handle_of(self), layer_idx, &pages, &error) == HKV_OK)
        view = hkv_py_view_create(state, self->object.owner, layer_idx, &pages, &self->rule.place);
    else
        hkv_py_raise(state, &error);
    hkv_py_leave(&self->object);
    return view;
}

/* ------------------------------------------------------------------------------------------------------- statistics */

static PyObject *stats_to_dict(const hkv_cache_stats *s)
{
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {
        {"memory_bytes", (int64_t)s->memory_bytes},
        {"allocated_bytes", (int64_t)s->allocated_bytes},
        {"record_bytes", (int64_t)s->record_bytes},
        {"hot_bytes", (int64_t)s->hot_bytes},
        {"directory_bytes", (int64_t)s->directory_bytes},
        {"table_bytes", (int64_t)s->table_bytes},
        {"prefix_bytes", (int64_t)s->prefix_bytes},
        {"workspace_bytes", (int64_t)s->workspace_bytes},
        {"unused_bytes", (int64_t)s->unused_bytes},
        {"n_blocks_total", s->n_blocks_total},
        {"n_blocks_live", s->n_blocks_live},
        {"n_blocks_cached", s->n_blocks_cached},
        {"n_blocks_free", s->n_blocks_free},
        {"n_hot_pages_total", s->n_hot_pages_total},
        {"n_hot_pages_used", s->n_hot_pages_used},
        {"max_tokens", s->max_tokens},
        {"n_sequences", s->n_sequences},
        {"n_tokens", s->n_tokens},
        {"n_prefix_queries", s->n_prefix_queries},
        {"n_prefix_hits", s->n_prefix_hits},
        {"n_prefix_evictions", s->n_prefix_evictions},
        {"bytes_in_use", (int64_t)s->bytes_in_use},
    };
    PyObject *dict = hkv_py_counters_to_dict(&s->counters);
    for (size_t i = 0; dict && i < sizeof fields / sizeof *fields; i++)
        if (hkv_py_set_item(dict, fields[i].name, PyLong_FromLongLong(fields[i].value)) < 0) Py_CLEAR(dict);
    return dict;
}

static PyObject *cache_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_cache_stats stats;
    if (hkv_py_enter(hkv_py_state_of(op), &self->object) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    hkv_cache_read_stats(handle_of(self), &stats);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    return stats_to_dict(&stats);
}

static PyObject *cache_check(PyObject *op, PyObject *Py_UNUSED(unused))
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_cache *self = (hkv_py_cache *)op;
    hkv_error error;
    hkv_status status;
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    CACHE_CALL(self, status, hkv_cache_check(handle_of(self), &error));
    return none_or_raise(state, status, &error);
}

/* ------------------------------------------------------------------------------------------------------------- type */

static PyMethodDef cache_methods[] = {
    {"add_sequence", cache_add_sequence, METH_VARARGS,
     "add_sequence($self, token_ids, salt, /)\n--\n\nStart a sequence: (handle, number of cached tokens)."},
    {"fork", cache_fork, METH_VARARGS, "fork($self, sequence, /)\n--\n\nHandle of a second sequence, same content."},
    {"truncate", cache_truncate, METH_VARARGS,
     "truncate($self, sequence, num_tokens, /)\n--\n\nKeep the first tokens."},
    {"reorder", cache_reorder, METH_VARARGS,
     "reorder($self, sequences, source_indices, /)\n--\n\nsequences[i] takes the content of sequences[indices[i]]."},
    {"free", cache_free, METH_VARARGS, "free($self, sequence, /)\n--\n\nEnd a sequence."},
    {"sequence_length", cache_sequence_length, METH_VARARGS, "sequence_length($self, sequence, /)\n--\n\nIts tokens."},
    {"reset", cache_reset, METH_NOARGS, "reset($self)\n--\n\nForget all sequences and reusable blocks."},
    {"begin", cache_begin, METH_VARARGS,
     "begin($self, sequences, num_tokens, token_ids, clock, stream, /)\n--\n\nOpen a step: (N, blocks of the longest "
     "row)."},
    {"attend", HKV_PY_FUNCTION(cache_attend), METH_FASTCALL,
     "attend($self, layer, q, k, v, out, scale, soft_cap, sinks, lse, mass, stream, /)\n--\n\nAppend to one layer, "
     "then "
     "attend."},
    {"prefetch_hot", cache_prefetch_hot, METH_VARARGS,
     "prefetch_hot($self, layer, stream, /)\n--\n\nStart bringing a layer's hot pages into a GPU's L2 cache."},
    {"mark_attended", cache_mark_attended, METH_NOARGS,
     "mark_attended($self)\n--\n\nCount every layer of the open step as attended: a graph of their attends ran."},
    {"end", cache_end, METH_NOARGS, "end($self)\n--\n\nClose the step."},
    {"abort", cache_abort, METH_NOARGS, "abort($self)\n--\n\nClose the step and go back to the lengths before it."},
    {"read_tokens", cache_read_tokens, METH_VARARGS,
     "read_tokens($self, sequence, layer, first, num_tokens, k_out, v_out, /)\n--\n\nDequantise into k_out, v_out."},
    {"tiers", cache_tiers, METH_VARARGS,
     "tiers($self, sequence, layer, kv_head, /)\n--\n\nOne byte per logical block: 1, 2, or 0 if not sealed."},
    {"set_tier", cache_set_tier, METH_VARARGS,
     "set_tier($self, sequence, layer, kv_head, block, tier, /)\n--\n\nPlace one record by hand."},
    {"block_table", cache_block_table, METH_VARARGS,
     "block_table($self, sequence, layer, /)\n--\n\nPhysical block of every logical block."},
    {"export_pages", cache_export_pages, METH_O,
     "export_pages($self, layer, /)\n--\n\nRead-only bytes [n_blocks, Hkv, record_bytes] of a layer."},
    {"stats", cache_stats, METH_NOARGS, "stats($self)\n--\n\nWhere every byte is, and the counters."},
    {"check", cache_check, METH_NOARGS, "check($self)\n--\n\nWalk all invariants."},
    {"close", hkv_py_close, METH_NOARGS, "close($self)\n--\n\nGive the memory back now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot cache_slots[] = {
    {Py_tp_doc, "One managed cache. Arguments are those of hybridkv.Cache, all of them required."},
    {Py_tp_new, cache_new},
    {Py_tp_dealloc, hkv_py_dealloc},
    {Py_tp_methods, cache_methods},
    {0, NULL},
};

PyType_Spec hkv_py_cache_spec = {
    .name = "hybridkv._core.Cache",
    .basicsize = sizeof(hkv_py_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = cache_slots,
};
