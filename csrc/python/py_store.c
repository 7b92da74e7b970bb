/* py_store.c - _core.Store: one hkv_store on an engine's pages. hybridkv.Store is the face of it. */
#include "py_tensor.h"

#include <string.h>

/* Arrays of the open step; the library keeps pointers to them until the next begin. */
typedef struct store_batch {
    hkv_py_ints cu_new_tokens, seq_lens, block_table, slot_mapping, copy_sources;
    hkv_py_ints clock;   /* on a device */
    int64_t clock_value; /* on the CPU */
    hkv_batch batch;
} store_batch;

typedef struct hkv_py_store {
    hkv_py_object object;
    hkv_py_attend_rule rule; /* n_tokens, n_rows, max_blocks: of the open step */
    int32_t block_size, n_blocks;
    size_t record_bytes;
    hkv_py_tensor *pages; /* [n_layers] what keeps bound pages alive */
    store_batch *step;    /* NULL before the first begin */
} hkv_py_store;

static hkv_store *handle_of(hkv_py_store *self)
{
    return self->object.owner->handle;
}

static void store_destroy(void *handle)
{
    hkv_store_destroy(handle);
}

static void batch_destroy(store_batch *b)
{
    if (!b) return;
    hkv_py_ints_release(&b->cu_new_tokens);
    hkv_py_ints_release(&b->seq_lens);
    hkv_py_ints_release(&b->block_table);
    hkv_py_ints_release(&b->slot_mapping);
    hkv_py_ints_release(&b->copy_sources);
    hkv_py_ints_release(&b->clock);
    PyMem_RawFree(b);
}

/* --------------------------------------------------------------------------------------------------------- creation */

/* The tensor is options->memory; its content is taken over. */
static int store_open(hkv_py_state *state, hkv_py_store *self, hkv_store_options *options, hkv_py_tensor *memory)
{
    hkv_store *store = NULL;
    hkv_error error;
    hkv_status status;
    hkv_py_pool *pool = hkv_py_pool_acquire(state);
    if (!pool) return -1;
    options->threads = pool->threads;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_page_bytes(&options->config, options->head_dim, options->dtype, &self->record_bytes, &error);
    if (status == HKV_OK) status = hkv_store_create(options, &store, &error);
    Py_END_ALLOW_THREADS
    if (status != HKV_OK) {
        hkv_py_pool_release(pool);
        hkv_py_raise(state, &error);
        return -1;
    }
    self->object.owner = hkv_py_owner_create(store, store_destroy, pool, memory);
    self->pages = PyMem_Calloc((size_t)options->n_layers, sizeof *self->pages);
    if (!self->pages) PyErr_NoMemory();
    self->block_size = options->config.block_size;
    self->n_blocks = options->n_blocks;
    self->rule = (hkv_py_attend_rule){.n_layers = options->n_layers,
                                      .n_kv_heads = options->n_kv_heads,
                                      .head_dim = options->head_dim,
                                      .dtype = options->dtype,
                                      .place = hkv_py_place_of(options->backend, options->device_index),
                                      .n_tokens = -1,
                                      .n_rows = -1};
    return self->object.owner && self->pages ? 0 : -1;
}

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "config",        "dtype",      "device",        "num_layers",     "num_kv_heads",        "head_dim", "max_rows",
        "window_tokens", "num_blocks", "num_hot_pages", "max_new_tokens", "max_sequence_tokens", "memory",   NULL};
    hkv_py_state *state = PyType_GetModuleState(type);
    hkv_store_options o = {0};
    int32_t *const targets[] = {&o.n_layers,      &o.n_kv_heads, &o.head_dim,   &o.max_rows,
                                &o.window_tokens, &o.n_blocks,   &o.n_hot_pages};
    PyObject *config, *memory, *numbers[9];
    const char *dtype, *device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$ssOOOOOOOOOO:Store", names, &config, &dtype, &device, &numbers[0],
                                     &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5], &numbers[6],
                                     &numbers[7], &numbers[8], &memory))
        return NULL;
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (hkv_py_int32_from_object(state, numbers[i], names[i + 3], targets[i]) < 0) return NULL;
    if (hkv_py_int_from_object(state, numbers[7], "max_new_tokens", 0, INT64_MAX, &o.max_new_tokens) < 0 ||
        hkv_py_int_from_object(state, numbers[8], "max_sequence_tokens", 0, INT64_MAX, &o.max_sequence_tokens) < 0 ||
        hkv_py_config_from_dict(state, config, &o.config) < 0 || hkv_py_dtype_from_name(state, dtype, &o.dtype) < 0 ||
        hkv_py_device_find(state, device, &o.backend, &o.device_index) < 0)
        return NULL;
    const hkv_py_place place = hkv_py_place_of(o.backend, o.device_index);
    hkv_py_tensor tensor;
    PyObject *self = NULL;
    if (hkv_py_memory_import(state, memory, &place, &tensor, &o.memory) == 0) self = type->tp_alloc(type, 0);
    if (self && store_open(state, (hkv_py_store *)self, &o, &tensor) < 0) Py_CLEAR(self);
    hkv_py_tensor_release(&tensor);
    return self;
}

/* Pages and batch are released after the library object that points to them. */
static void store_dealloc(PyObject *op)
{
    hkv_py_store *self = (hkv_py_store *)op;
    hkv_py_owner_release(self->object.owner);
    self->object.owner = NULL;
    for (int32_t i = 0; self->pages && i < self->rule.n_layers; i++) hkv_py_tensor_release(&self->pages[i]);
    PyMem_Free(self->pages);
    batch_destroy(self->step);
    hkv_py_dealloc(op);
}

/* ------------------------------------------------------------------------------------------------------------ pages */

static int fail_pages(hkv_py_state *state, const hkv_py_tensor *t, const char *rule, int64_t value)
{
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, "pages",
                       "expected [blocks, Hkv, bytes] or [blocks, bytes] with %s "
                       "at least %lld, got %s",
                       rule, (long long)value, hkv_py_tensor_describe(t).chars);
}

/* Where records are in a tensor of pages: [B, Hkv, bytes of a record], or [B, bytes] with the heads one after the
 * other. Elements of any dtype; they are only bytes here. */
static int pages_layout(hkv_py_state *state, const hkv_py_store *self, const hkv_py_tensor *t, size_t *block_stride,
                        size_t *head_stride)
{
    size_t element_bytes = t->dtype_bits / 8;
    if (hkv_py_tensor_check_layout(state, t, 1) < 0) return -1;
    if (t->ndim != 2 && t->ndim != 3)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "pages", "expected [blocks, Hkv, bytes] or [blocks, bytes], got %s",
                           hkv_py_tensor_describe(t).chars);
    if (t->shape[0] < self->n_blocks) return fail_pages(state, t, "blocks", self->n_blocks);
    int64_t n_heads = self->rule.n_kv_heads;
    size_t row_bytes = (size_t)t->shape[t->ndim - 1] * element_bytes;
    size_t needed = t->ndim == 3 ? self->record_bytes : self->record_bytes * (size_t)n_heads;
    if (t->ndim == 3 && t->shape[1] < n_heads) return fail_pages(state, t, "Hkv", n_heads);
    if (row_bytes < needed) return fail_pages(state, t, "bytes", (int64_t)needed);
    *block_stride = (size_t)t->strides[0] * element_bytes;
    *head_stride = t->ndim == 3 ? (size_t)t->strides[1] * element_bytes : self->record_bytes;
    return 0;
}

/* The object is held. */
static int bind_tensor(hkv_py_state *state, hkv_py_store *self, int32_t layer_idx, hkv_py_tensor *pages)
{
    size_t block_stride = 0, head_stride = 0;
    hkv_error error;
    hkv_status status;
    if (pages_layout(state, self, pages, &block_stride, &head_stride) < 0) return -1;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_bind_layer(handle_of(self), layer_idx, pages->data, block_stride, head_stride, &error);
    Py_END_ALLOW_THREADS
    if (status == HKV_OK) return 0;
    hkv_py_raise(state, &error);
    return -1;
}

static PyObject *store_bind_layer(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    PyObject *layer_obj, *pages_obj;
    int32_t layer_idx;
    hkv_py_tensor pages = {0};
    if (!PyArg_ParseTuple(args, "OO:bind_layer", &layer_obj, &pages_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0 ||
        hkv_py_enter(state, &self->object) < 0)
        return NULL;
    int result = hkv_py_tensor_import(state, pages_obj, "pages", &self->rule.place, 1, &pages);
    if (result == 0) result = bind_tensor(state, self, layer_idx, &pages);
    if (result == 0) { /* keep the new ones, let go of what was bound before */
        hkv_py_tensor previous = self->pages[layer_idx];
        self->pages[layer_idx] = pages;
        pages = previous;
    }
    hkv_py_leave(&self->object);
    hkv_py_tensor_release(&pages);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------ steps */

/* The arguments of begin as Python says them. */
typedef struct batch_args {
    PyObject *cu_new_tokens, *seq_lens, *block_table, *slot_mapping, *copy_sources, *clock, *max_row_tokens, *stream;
} batch_args;

/* The arrays that have an entry for every row. */
static int parse_rows(hkv_py_state *state, const batch_args *args, const hkv_py_place *place, store_batch *b)
{
    const hkv_py_ints_rule lens_rule = {"seq_lens", 1, 0, INT32_MAX, 4, -1, "[R]"};
    if (hkv_py_ints_import(state, args->seq_lens, &lens_rule, place, &b->seq_lens) < 0) return -1;
    int64_t n_rows = b->seq_lens.shape[0];
    if (n_rows >= INT32_MAX)
        return hkv_py_fail(state, HKV_ERR_RANGE, "seq_lens", "too many rows: %lld", (long long)n_rows);
    const hkv_py_ints_rule cu_rule = {"cu_new_tokens", 1, 0, INT32_MAX, 4, n_rows + 1, "[R + 1]"};
    const hkv_py_ints_rule table_rule = {"block_table", 2, INT32_MIN, INT32_MAX, 4, n_rows, "[R, blocks]"};
    const hkv_py_ints_rule copy_rule = {"copy_sources", 1, INT32_MIN, INT32_MAX, 4, n_rows, "[R]"};
    if (hkv_py_ints_import(state, args->cu_new_tokens, &cu_rule, place, &b->cu_new_tokens) < 0 ||
        hkv_py_ints_import(state, args->block_table, &table_rule, place, &b->block_table) < 0)
        return -1;
    if (args->copy_sources == Py_None) return 0;
    return hkv_py_ints_import(state, args->copy_sources, &copy_rule, place, &b->copy_sources);
}

/* N is known from cu_new_tokens; on a device, whose values are not looked at, from the number of slots. */
static int parse_slots(hkv_py_state *state, const batch_args *args, const hkv_py_place *place, store_batch *b)
{
    int64_t n_rows = b->seq_lens.shape[0], n_tokens = -1;
    if (place->device_type == HKV_DL_CPU) n_tokens = ((const int32_t *)b->cu_new_tokens.values)[n_rows];
    const hkv_py_ints_rule rule = {"slot_mapping", 1, INT64_MIN, INT64_MAX, 8, n_tokens, "[N]"};
    if (hkv_py_ints_import(state, args->slot_mapping, &rule, place, &b->slot_mapping) < 0) return -1;
    if (b->slot_mapping.shape[0] <= INT32_MAX) return 0;
    return hkv_py_fail(state, HKV_ERR_RANGE, "slot_mapping", "too many tokens: %lld",
                       (long long)b->slot_mapping.shape[0]);
}

/* A number on the CPU, [1] on a device; *clock points to it, NULL if there is none. */
static int parse_clock(hkv_py_state *state, const batch_args *args, const hkv_py_place *place, store_batch *b,
                       const int64_t **clock)
{
    const hkv_py_ints_rule rule = {"clock", 1, INT64_MIN, INT64_MAX, 8, 1, "[1]"};
    *clock = NULL;
    if (args->clock == Py_None) return 0;
    if (place->device_type == HKV_DL_CPU) {
        *clock = &b->clock_value;
        return hkv_py_int_from_object(state, args->clock, "clock", INT64_MIN, INT64_MAX, &b->clock_value);
    }
    if (hkv_py_ints_import(state, args->clock, &rule, place, &b->clock) < 0) return -1;
    *clock = b->clock.values;
    return 0;
}

/* Take over the arrays of a step; the library checks what they say. */
static int batch_parse(hkv_py_state *state, const hkv_py_store *self, PyObject *tuple, store_batch *b)
{
    batch_args args;
    hkv_py_place place;
    const int64_t *clock;
    int32_t max_row_tokens;
    if (!PyArg_ParseTuple(tuple, "OOOOOOOO:begin", &args.cu_new_tokens, &args.seq_lens, &args.block_table,
                          &args.slot_mapping, &args.copy_sources, &args.clock, &args.max_row_tokens, &args.stream) ||
        hkv_py_place_for_call(state, &self->rule.place, args.stream, &place) < 0 ||
        parse_rows(state, &args, &place, b) < 0 || parse_slots(state, &args, &place, b) < 0 ||
        parse_clock(state, &args, &place, b, &clock) < 0 ||
        hkv_py_int32_from_object(state, args.max_row_tokens, "max_row_tokens", &max_row_tokens) < 0)
        return -1;
    b->batch = (hkv_batch){
        .n_rows = (int32_t)b->seq_lens.shape[0],
        .n_new_tokens = (int32_t)b->slot_mapping.shape[0],
        .max_row_tokens = max_row_tokens,
        .cu_new_tokens = b->cu_new_tokens.values,
        .seq_lens = b->seq_lens.values,
        .block_table = b->block_table.values,
        .block_table_stride = b->block_table.shape[1],
        .slot_mapping = b->slot_mapping.values,
        .copy_sources = b->copy_sources.values,
        .clock = clock,
        .stream = place.stream,
    };
    return 0;
}

/* Blocks of the longest row; on a device, as many as a row can have. */
static int64_t max_blocks_of(const hkv_py_store *self, const hkv_batch *batch)
{
    int64_t longest = 0;
    if (self->rule.place.device_type != HKV_DL_CPU) return batch->block_table_stride;
    for (int32_t i = 0; i < batch->n_rows; i++)
        if (batch->seq_lens[i] > longest) longest = batch->seq_lens[i];
    return (longest + self->block_size - 1) / self->block_size;
}

/* The object is held. On success the store owns b and the previous arrays are gone. */
static int batch_begin(hkv_py_state *state, hkv_py_store *self, store_batch *b)
{
    hkv_error error;
    hkv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_begin(handle_of(self), &b->batch, &error);
    Py_END_ALLOW_THREADS
    if (status != HKV_OK) {
        hkv_py_raise(state, &error);
        return -1;
    }
    batch_destroy(self->step);
    self->step = b;
    self->rule.n_tokens = b->batch.n_new_tokens;
    self->rule.n_rows = b->batch.n_rows;
    self->rule.max_blocks = max_blocks_of(self, &b->batch);
    return 0;
}

static PyObject *store_begin(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    store_batch *b = PyMem_RawCalloc(1, sizeof *b);
    if (!b) return PyErr_NoMemory();
    int result = batch_parse(state, self, args, b);
    if (result == 0) result = hkv_py_enter(state, &self->object);
    if (result == 0) {
        result = batch_begin(state, self, b);
        hkv_py_leave(&self->object);
    }
    if (result < 0) {
        batch_destroy(b);
        return NULL;
    }
    return Py_BuildValue("(LLL)", (long long)self->rule.n_rows, (long long)self->rule.n_tokens,
                         (long long)self->rule.max_blocks);
}

static PyObject *store_attend(PyObject *op, PyObject *const *args, Py_ssize_t n_args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    hkv_py_attend attend;
    hkv_error error = {0};
    hkv_status status;
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    int result = hkv_py_attend_parse(state, args, n_args, &self->rule, &attend);
    if (result == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = hkv_store_attend(handle_of(self), attend.layer_idx, &attend.args, &error);
        Py_END_ALLOW_THREADS
        if (status != HKV_OK) {
            hkv_py_raise(state, &error);
            result = -1;
        }
    }
    hkv_py_leave(&self->object);
    hkv_py_attend_release(&attend);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *store_prefetch_hot(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
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
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_prefetch_hot(handle_of(self), layer_idx, place.stream, &error);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    if (status != HKV_OK) return hkv_py_raise(state, &error);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------ content and tiers */

/* The rest of read_tokens once k, v and the table are converted. */
static PyObject *read_row(hkv_py_state *state, hkv_py_store *self, int32_t layer_idx, const hkv_py_ints *table,
                          int64_t seq_len, int64_t first, int64_t n, const hkv_py_tensor *k, const hkv_py_tensor *v)
{
    hkv_error error;
    hkv_status status;
    if (seq_len < 0 || seq_len > table->shape[0] * self->block_size) {
        hkv_py_fail(state, HKV_ERR_RANGE, "seq_len", "expected 0..%lld, what block_table holds, got %lld",
                    (long long)(table->shape[0] * self->block_size), (long long)seq_len);
        return NULL;
    }
    if (hkv_py_enter(state, &self->object) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status =
        hkv_store_read_tokens(handle_of(self), layer_idx, table->values, seq_len, first, n, k->data, v->data, &error);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    if (status != HKV_OK) return hkv_py_raise(state, &error);
    Py_RETURN_NONE;
}

static PyObject *store_read_tokens(PyObject *op, PyObject *args)
{
    const hkv_py_ints_rule rule = {"block_table", 1, INT32_MIN, INT32_MAX, 4, -1, "[blocks]"};
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    int32_t layer_idx;
    long long seq_len, first, n;
    PyObject *layer_obj, *table_obj, *k_obj, *v_obj, *result = NULL;
    hkv_py_tensor k = {0}, v = {0};
    hkv_py_ints table = {0};
    if (!PyArg_ParseTuple(args, "OOLLLOO:read_tokens", &layer_obj, &table_obj, &seq_len, &first, &n, &k_obj, &v_obj) ||
        hkv_py_index_from_object(state, layer_obj, "layer", self->rule.n_layers, &layer_idx) < 0)
        return NULL;
    if (hkv_py_token_output_import(state, k_obj, "k_out", n, &self->rule, &k) == 0 &&
        hkv_py_token_output_import(state, v_obj, "v_out", n, &self->rule, &v) == 0 &&
        hkv_py_ints_import(state, table_obj, &rule, &hkv_py_host, &table) == 0)
        result = read_row(state, self, layer_idx, &table, seq_len, first, n, &k, &v);
    hkv_py_ints_release(&table);
    hkv_py_tensor_release(&k);
    hkv_py_tensor_release(&v);
    return result;
}

/* Which record: as Python says it, and converted. */
typedef struct record_place {
    PyObject *layer, *head, *block_obj;
    int32_t layer_idx, kv_head, block;
} record_place;

static int record_place_convert(hkv_py_state *state, const hkv_py_store *self, record_place *p)
{
    if (hkv_py_index_from_object(state, p->layer, "layer", self->rule.n_layers, &p->layer_idx) < 0 ||
        hkv_py_index_from_object(state, p->head, "kv_head", self->rule.n_kv_heads, &p->kv_head) < 0)
        return -1;
    return hkv_py_int32_from_object(state, p->block_obj, "block", &p->block);
}

static PyObject *store_set_tier(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    record_place place;
    int tier;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "OOOi:set_tier", &place.layer, &place.head, &place.block_obj, &tier) ||
        record_place_convert(state, self, &place) < 0 || hkv_py_enter(state, &self->object) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_set_tier(handle_of(self), place.layer_idx, place.kv_head, place.block, (hkv_tier)tier, &error);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    if (status != HKV_OK) return hkv_py_raise(state, &error);
    Py_RETURN_NONE;
}

static PyObject *store_tier(PyObject *op, PyObject *args)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    record_place place;
    int32_t tier = 0;
    hkv_error error;
    hkv_status status;
    if (!PyArg_ParseTuple(args, "OOO:tier", &place.layer, &place.head, &place.block_obj) ||
        record_place_convert(state, self, &place) < 0 || hkv_py_enter(state, &self->object) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_get_tier(handle_of(self), place.layer_idx, place.kv_head, place.block, &tier, &error);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    return status == HKV_OK ? PyLong_FromLong(tier) : hkv_py_raise(state, &error);
}

static PyObject *store_block_info(PyObject *op, PyObject *block_obj)
{
    hkv_py_state *state = hkv_py_state_of(op);
    hkv_py_store *self = (hkv_py_store *)op;
    int32_t block;
    hkv_block_info info;
    hkv_error error;
    hkv_status status;
    if (hkv_py_int32_from_object(state, block_obj, "block", &block) < 0 || hkv_py_enter(state, &self->object) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = hkv_store_read_block(handle_of(self), block, &info, &error);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    if (status != HKV_OK) return hkv_py_raise(state, &error);
    return Py_BuildValue("{sisisOsI}", "hot_page", (int)info.hot_page, "n_hot_tokens", (int)info.n_hot_tokens, "sealed",
                         info.sealed ? Py_True : Py_False, "stamp", (unsigned int)info.stamp);
}

static PyObject *store_counters(PyObject *op, PyObject *Py_UNUSED(unused))
{
    hkv_py_store *self = (hkv_py_store *)op;
    hkv_counters counters;
    if (hkv_py_enter(hkv_py_state_of(op), &self->object) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    hkv_store_read_counters(handle_of(self), &counters);
    Py_END_ALLOW_THREADS
    hkv_py_leave(&self->object);
    return hkv_py_counters_to_dict(&counters);
}

static PyObject *store_record_bytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((hkv_py_store *)op)->record_bytes);
}

/* ------------------------------------------------------------------------------------------------------------- type */

static PyMethodDef store_methods[] = {
    {"bind_layer", store_bind_layer, METH_VARARGS,
     "bind_layer($self, layer, pages, /)\n--\n\n"
     "Say where a layer's pages are: [blocks, Hkv, bytes] or [blocks, bytes] of any dtype; kept alive by the store."},
    {"begin", store_begin, METH_VARARGS,
     "begin($self, cu_new_tokens, seq_lens, block_table, slot_mapping, copy_sources, clock, max_row_tokens, "
     "stream, /)\n--\n\n"
     "Decide a step: (R, N, blocks of the longest row)."},
    {"attend", HKV_PY_FUNCTION(store_attend), METH_FASTCALL,
     "attend($self, layer, q, k, v, out, scale, soft_cap, sinks, lse, mass, stream, /)\n--\n\nAppend to one layer, "
     "then "
     "attend."},
    {"prefetch_hot", store_prefetch_hot, METH_VARARGS,
     "prefetch_hot($self, layer, stream, /)\n--\n\nStart bringing a layer's hot pages into a GPU's L2 cache."},
    {"read_tokens", store_read_tokens, METH_VARARGS,
     "read_tokens($self, layer, block_table, seq_len, first, num_tokens, k_out, v_out, /)\n--\n\n"
     "Dequantise into k_out, v_out."},
    {"set_tier", store_set_tier, METH_VARARGS,
     "set_tier($self, layer, kv_head, block, tier, /)\n--\n\nPlace one record by hand."},
    {"tier", store_tier, METH_VARARGS, "tier($self, layer, kv_head, block, /)\n--\n\n1, 2, or 0 if not sealed."},
    {"block_info", store_block_info, METH_O, "block_info($self, block, /)\n--\n\nDirectory entry of a block."},
    {"counters", store_counters, METH_NOARGS, "counters($self)\n--\n\nCounters since creation."},
    {"close", hkv_py_close, METH_NOARGS, "close($self)\n--\n\nGive the memory back now."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef store_getset[] = {
    {"record_bytes", store_record_bytes, NULL, "Bytes of one block of one layer and KV head in a page.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_doc,
     "Hot and cold state on an engine's pages. Arguments are those of hybridkv.Store, all of them required."},
    {Py_tp_new, store_new},
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},
    {Py_tp_getset, store_getset},
    {0, NULL},
};

PyType_Spec hkv_py_store_spec = {
    .name = "hybridkv._core.Store",
    .basicsize = sizeof(hkv_py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};
