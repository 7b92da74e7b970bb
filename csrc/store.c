/* store.c - attached mode: memory of one layer group, argument checks, and the order of calls.
 *
 * What a step decides is plan.h's, what it computes the backend's; nothing here knows what is hot.
 */
#include "backend.h"
#include "internal.h"
#include "store.h"

#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum { TABLE_ALIGN = 64 };

/* Bytes of the allocations of a store, as they are asked for. */
typedef struct store_sizes {
    size_t host;      /* hkv_store, its layers and their steps */
    size_t hot;       /* hot pages */
    size_t tables;    /* directory, plan, counters */
    size_t workspace; /* the backend's scratch */
    size_t state;     /* the backend's own */
} store_sizes;

struct hkv_store {
    atomic_flag busy;
    const hkv_backend *backend;
    int32_t device_index;
    bool has_allocator;
    hkv_allocator allocator;
    bool has_memory; /* of the caller */
    store_sizes sizes;
    void *tables;
    hkv_group group;
    uint64_t *layer_step; /* [n_layers] step in which a layer was attended last */
    /* the open step */
    uint64_t step; /* number of successful and failed begins */
    bool is_open;
    hkv_batch batch;
    int64_t max_row_blocks; /* blocks of its longest row; 0 where lengths are on a device */
};

static const hkv_allocator *store_allocator(const hkv_store *store)
{
    return store->has_allocator ? &store->allocator : NULL;
}

/* ---------------------------------------------------------------------------------------------------- one at a time */

static hkv_status enter(hkv_store *store, hkv_error *error)
{
    if (!atomic_flag_test_and_set_explicit(&store->busy, memory_order_acquire)) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_BUSY, "store", "another thread is using this store");
}

static hkv_status leave(hkv_store *store, hkv_status status)
{
    atomic_flag_clear_explicit(&store->busy, memory_order_release);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- options */

static hkv_status check_range(const char *name, int64_t value, int64_t lowest, int64_t highest, hkv_error *error)
{
    if (value >= lowest && value <= highest) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_ARGUMENT, name, "%s must be %" PRId64 "..%" PRId64 ", got %" PRId64, name,
                         lowest, highest, value);
}

static hkv_status check_format(const hkv_config *config, int32_t head_dim, hkv_dtype dtype, hkv_error *error)
{
    HKV_TRY(hkv_config_check(config, error));
    if (head_dim < 16 || head_dim > HKV_MAX_HEAD_DIM || head_dim % 16 != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "head_dim", "head_dim must be 16..%d in steps of 16, got %d",
                             HKV_MAX_HEAD_DIM, head_dim);
    if (hkv_dtype_bytes(dtype) == 0)
        return hkv_error_set(error, HKV_ERR_TYPE, "dtype", "dtype must be float16, bfloat16 or float32, got %d",
                             (int)dtype);
    return HKV_OK;
}

static hkv_status check_backend(const hkv_backend *backend, int32_t device_index, hkv_error *error)
{
    const char *reason = NULL;
    int32_t n_devices;
    if (backend->abi_version != HKV_BACKEND_ABI || backend->struct_size != sizeof(hkv_backend))
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "backend",
                             "the backend was built for interface %u of %zu bytes, this library has %d of %zu",
                             (unsigned)backend->abi_version, backend->struct_size, HKV_BACKEND_ABI,
                             sizeof(hkv_backend));
    n_devices = backend->count_devices(&reason);
    if (n_devices == 0)
        return hkv_error_set(error, HKV_ERR_NO_DEVICE, "backend", "backend %s has no device: %s", backend->name,
                             reason ? reason : "unknown reason");
    if (device_index < 0 || device_index >= n_devices)
        return hkv_error_set(error, HKV_ERR_NO_DEVICE, "device_index",
                             "device_index must be below the %d devices of backend %s, got %d", n_devices,
                             backend->name, device_index);
    return HKV_OK;
}

static hkv_status check_options(const hkv_store_options *options, hkv_error *error)
{
    HKV_TRY(check_format(&options->config, options->head_dim, options->dtype, error));
    HKV_TRY(check_range("n_layers", options->n_layers, 1, 1 << 16, error));
    HKV_TRY(check_range("n_kv_heads", options->n_kv_heads, 1, 1 << 16, error));
    HKV_TRY(check_range("window_tokens", options->window_tokens, 0, INT32_MAX, error));
    HKV_TRY(check_range("n_blocks", options->n_blocks, 2, INT32_MAX, error));
    HKV_TRY(check_range("max_rows", options->max_rows, 1, 1 << 20, error));
    HKV_TRY(check_range("max_new_tokens", options->max_new_tokens, 1, 1 << 30, error));
    HKV_TRY(check_range("max_sequence_tokens", options->max_sequence_tokens, 0, INT32_MAX, error));
    return check_range("n_hot_pages", options->n_hot_pages, 0, INT32_MAX, error);
}

static int32_t choose_hot_pages(const hkv_store_options *options)
{
    const hkv_config *config = &options->config;
    int64_t n = options->n_hot_pages;
    if (config->quantization_bits == 0) return 0;
    if (n == 0)
        n = hkv_plan_guaranteed_pages(options->max_rows, options->max_new_tokens, config->hot_tokens,
                                      config->block_size, config->sink_blocks);
    return n < options->n_blocks ? (int32_t)n : options->n_blocks - 1; /* a block has at most one page */
}

static int64_t choose_max_sequence(const hkv_store_options *options)
{
    int64_t n = (int64_t)options->n_blocks * options->config.block_size;
    if (options->max_sequence_tokens > 0) return options->max_sequence_tokens;
    return n < INT32_MAX ? n : INT32_MAX;
}

static void init_group(const hkv_store_options *options, hkv_group *g)
{
    const hkv_config *config = &options->config;
    memset(g, 0, sizeof *g);
    g->config = *config;
    hkv_format_init(&g->format, config->quantization_bits, config->block_size, options->head_dim,
                    (int32_t)options->dtype);
    g->n_layers = options->n_layers;
    g->n_kv_heads = options->n_kv_heads;
    g->window_tokens = options->window_tokens;
    g->n_blocks = options->n_blocks;
    g->n_hot_pages = choose_hot_pages(options);
    g->max_rows = options->max_rows;
    g->max_new_tokens = options->max_new_tokens;
    g->max_sequence_tokens = choose_max_sequence(options);
    g->plan.hot_stride = config->sink_blocks + hkv_plan_max_window(config->hot_tokens, config->block_size);
    g->plan.max_segments =
        (int32_t)hkv_plan_max_segments(options->max_rows, options->max_new_tokens, config->block_size);
}

/* ----------------------------------------------------------------------------------------------------------- memory */

/* Hands out pieces of one allocation; without a base it only counts. */
typedef struct carver {
    uint8_t *base;
    size_t used;
    bool overflows;
} carver;

static void *carve(carver *c, size_t n, size_t element_bytes)
{
    size_t start = c->used, n_bytes;
    if (!hkv_size_multiply(n, element_bytes, &n_bytes) || !hkv_size_align(n_bytes, TABLE_ALIGN, &n_bytes) ||
        !hkv_size_add(start, n_bytes, &c->used))
        c->overflows = true;
    return c->base && !c->overflows ? c->base + start : NULL;
}

#define CARVE(pointer, n) ((pointer) = carve(c, (size_t)(n), sizeof *(pointer)))

/* The one list of what the tables hold. */
static void carve_tables(carver *c, hkv_group *g)
{
    hkv_directory *dir = &g->directory;
    hkv_plan *plan = &g->plan;
    CARVE(dir->block_page, g->n_blocks);
    CARVE(dir->block_step, g->n_blocks);
    CARVE(dir->page_block, g->n_hot_pages);
    CARVE(dir->page_stamp, g->n_hot_pages);
    CARVE(dir->page_n_tokens, g->n_hot_pages);
    CARVE(dir->page_sealed, g->n_hot_pages);
    CARVE(dir->page_last_use, g->n_hot_pages);
    CARVE(dir->page_role, g->n_hot_pages);
    CARVE(dir->page_saved, g->n_hot_pages);
    CARVE(dir->next_stamp, 1);
    CARVE(dir->step, 1);
    CARVE(plan->rows, g->max_rows);
    CARVE(plan->segments, plan->max_segments);
    CARVE(plan->victims, g->n_hot_pages);
    CARVE(plan->claims, plan->max_segments);
    CARVE(plan->hot_pages, (size_t)g->max_rows * (size_t)plan->hot_stride);
    CARVE(plan->n_segments, 1);
    CARVE(plan->n_victims, 1);
    CARVE(plan->is_appended, 1);
    CARVE(plan->failure, 1);
    CARVE(plan->failure_value, 4);
    CARVE(g->counters, 1);
}

static bool measure_hot(const hkv_group *g, size_t *n_bytes)
{
    return hkv_size_multiply((size_t)g->n_layers, (size_t)g->n_hot_pages, n_bytes) &&
           hkv_size_multiply(*n_bytes, (size_t)g->n_kv_heads, n_bytes) &&
           hkv_size_multiply(*n_bytes, g->format.row_page_bytes, n_bytes);
}

static hkv_status measure(const hkv_backend *backend, int32_t device_index, hkv_group *g, store_sizes *sizes,
                          hkv_error *error)
{
    carver tables = {0};
    carve_tables(&tables, g);
    if (!measure_hot(g, &sizes->hot) || tables.overflows)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_hot_pages",
                             "%d hot pages of %d layers and %d KV heads are more bytes than can be addressed",
                             g->n_hot_pages, g->n_layers, g->n_kv_heads);
    sizes->tables = tables.used;
    sizes->host =
        sizeof(hkv_store) + (size_t)g->n_layers * (sizeof(hkv_layer_pages) + sizeof(uint64_t)); /* at most 2^16 */
    sizes->state = backend->state_bytes;
    return backend->measure_workspace(g, device_index, &sizes->workspace, error);
}

/* As they lie in the caller's memory, or where an arena hands them out: one after the other, at HKV_HOT_ALIGN. */
static bool add_device_bytes(const store_sizes *sizes, size_t *total)
{
    const size_t each[] = {sizes->hot, sizes->tables, sizes->workspace};
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++)
        if (!hkv_size_align(*total, each[i] ? HKV_HOT_ALIGN : 1, total) || !hkv_size_add(*total, each[i], total))
            return false;
    return true;
}

static bool add_up(const store_sizes *sizes, size_t *total)
{
    *total = sizes->host;
    return add_device_bytes(sizes, total) && hkv_size_align(*total, _Alignof(max_align_t), total) &&
           hkv_size_add(*total, sizes->state, total);
}

static hkv_status check_memory(const hkv_memory *memory, const store_sizes *sizes, hkv_error *error)
{
    size_t n_bytes = 0;
    if (memory->base == NULL) return HKV_OK;
    if (add_device_bytes(sizes, &n_bytes) && n_bytes <= hkv_memory_align(*memory).n_bytes) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_BUDGET_SMALL, "memory",
                         "memory of %zu bytes is too small: the store takes %zu bytes" HKV_MEMORY_LOST, memory->n_bytes,
                         n_bytes);
}

hkv_status hkv_store_page_bytes(const hkv_config *config, int32_t head_dim, hkv_dtype dtype, size_t *record_bytes,
                                hkv_error *error)
{
    hkv_format format;
    HKV_TRY(check_format(config, head_dim, dtype, error));
    hkv_format_init(&format, config->quantization_bits, config->block_size, head_dim, (int32_t)dtype);
    *record_bytes = format.record_bytes;
    return HKV_OK;
}

/* What a store of these options is: its group, without memory yet, and its sizes. */
static hkv_status prepare(const hkv_store_options *options, hkv_group *group, store_sizes *sizes, hkv_error *error)
{
    const hkv_backend *backend = options->backend ? options->backend : hkv_backend_cpu();
    HKV_TRY(check_options(options, error));
    HKV_TRY(check_backend(backend, options->device_index, error));
    init_group(options, group);
    return measure(backend, options->device_index, group, sizes, error);
}

static hkv_status fail_size(hkv_error *error)
{
    return hkv_error_set(error, HKV_ERR_ARGUMENT, "options", "the store's bytes are more than can be addressed");
}

hkv_status hkv_store_required_bytes(const hkv_store_options *options, size_t *n_bytes, hkv_error *error)
{
    store_sizes sizes;
    hkv_group group;
    size_t total;
    HKV_TRY(prepare(options, &group, &sizes, error));
    if (!add_up(&sizes, &total)) return fail_size(error);
    *n_bytes = total;
    return HKV_OK;
}

hkv_status hkv_store_memory_bytes(const hkv_store_options *options, size_t *n_bytes, hkv_error *error)
{
    store_sizes sizes;
    hkv_group group;
    size_t total = 0;
    HKV_TRY(prepare(options, &group, &sizes, error));
    if (!add_device_bytes(&sizes, &total)) return fail_size(error);
    *n_bytes = total;
    return HKV_OK;
}

/* -------------------------------------------------------------------------------------------------- create, destroy */

/* Stamps of different stores, also of other processes, are far apart: a page that was copied from one to the other must
 * not look like one of our own. */
static uint32_t draw_stamp(const hkv_store *store)
{
    struct timespec now;
    uint64_t x;
    timespec_get(&now, TIME_UTC);
    x = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + ((uint64_t)(uintptr_t)store << 20);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(x >> 32) | 1u; /* never 0 */
}

/* From the front of memory, which is large enough, if there is one. */
static hkv_status alloc_device(hkv_store *store, hkv_memory *memory, size_t n_bytes, void **ptr, hkv_error *error)
{
    size_t n_taken;
    if (n_bytes == 0) return HKV_OK;
    if (!store->has_memory)
        return store->backend->alloc(store->device_index, store_allocator(store), n_bytes, ptr, error);
    *ptr = memory->base;
    if (!hkv_size_align(n_bytes, HKV_HOT_ALIGN, &n_taken) || n_taken > memory->n_bytes) n_taken = memory->n_bytes;
    memory->base = (uint8_t *)memory->base + n_taken;
    memory->n_bytes -= n_taken;
    return HKV_OK;
}

static void release_device(hkv_store *store, void *ptr, size_t n_bytes)
{
    if (ptr && !store->has_memory) store->backend->release(store->device_index, store_allocator(store), ptr, n_bytes);
}

static hkv_status alloc_group(hkv_store *store, hkv_memory memory, hkv_error *error)
{
    hkv_group *g = &store->group;
    carver tables = {0};
    void *hot = NULL;
    HKV_TRY(alloc_device(store, &memory, store->sizes.hot, &hot, error));
    g->hot = hot;
    HKV_TRY(alloc_device(store, &memory, store->sizes.tables, &store->tables, error));
    HKV_TRY(alloc_device(store, &memory, store->sizes.workspace, &g->workspace, error));
    g->workspace_bytes = store->sizes.workspace;
    tables.base = store->tables;
    carve_tables(&tables, g);
    return HKV_OK;
}

/* No block has a page, no page a block, no step was ever made. */
static hkv_status init_tables(hkv_store *store, uint32_t first_stamp, hkv_error *error)
{
    const hkv_backend *backend = store->backend;
    const hkv_group *g = &store->group;
    const hkv_directory *dir = &g->directory;
    int32_t device = store->device_index;
    HKV_TRY(backend->fill(device, store->tables, 0, store->sizes.tables, error));
    HKV_TRY(backend->fill(device, dir->block_page, 0xff, (size_t)g->n_blocks * sizeof(int32_t), error));
    HKV_TRY(backend->fill(device, dir->page_block, 0xff, (size_t)g->n_hot_pages * sizeof(int32_t), error));
    return backend->write(device, dir->next_stamp, &first_stamp, sizeof first_stamp, error);
}

static hkv_status start(hkv_store *store, const hkv_store_options *options, hkv_error *error)
{
    uint32_t first_stamp = options->first_stamp ? options->first_stamp : draw_stamp(store);
    HKV_TRY(alloc_group(store, hkv_memory_align(options->memory), error));
    HKV_TRY(init_tables(store, first_stamp, error));
    return store->backend->group_init(&store->group, store->device_index, options->threads, options->cpu_path,
                                      store_allocator(store), error);
}

hkv_status hkv_store_create(const hkv_store_options *options, hkv_store **store, hkv_error *error)
{
    store_sizes sizes;
    hkv_group group;
    hkv_store *s;
    hkv_status status;
    HKV_TRY(prepare(options, &group, &sizes, error));
    HKV_TRY(check_memory(&options->memory, &sizes, error));
    s = hkv_allocate(options->allocator, sizes.host, TABLE_ALIGN);
    if (!s) return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for %zu bytes of a store", sizes.host);
    memset(s, 0, sizes.host);
    atomic_flag_clear(&s->busy);
    s->backend = options->backend ? options->backend : hkv_backend_cpu();
    s->device_index = options->device_index;
    s->has_allocator = options->allocator != NULL;
    if (options->allocator) s->allocator = *options->allocator;
    s->has_memory = options->memory.base != NULL;
    s->sizes = sizes;
    s->group = group;
    s->group.layers = (hkv_layer_pages *)(s + 1);
    s->layer_step = (uint64_t *)(s->group.layers + group.n_layers);
    status = start(s, options, error);
    if (status != HKV_OK) {
        hkv_store_destroy(s);
        return status;
    }
    *store = s;
    return HKV_OK;
}

void hkv_store_destroy(hkv_store *store)
{
    hkv_allocator allocator;
    bool has_allocator;
    if (!store) return;
    allocator = store->allocator;
    has_allocator = store->has_allocator;
    if (store->group.backend_state) store->backend->group_deinit(&store->group, store_allocator(store));
    release_device(store, store->group.workspace, store->sizes.workspace);
    release_device(store, store->tables, store->sizes.tables);
    release_device(store, store->group.hot, store->sizes.hot);
    hkv_release(has_allocator ? &allocator : NULL, store, store->sizes.host);
}

/* ----------------------------------------------------------------------------------------------------------- layers */

static hkv_status check_index(const char *name, int64_t value, int64_t n, hkv_error *error)
{
    if (value >= 0 && value < n) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_RANGE, name, "%s must be 0..%" PRId64 ", got %" PRId64, name, n - 1, value);
}

static hkv_status check_pages(const hkv_group *g, const void *base, size_t block_stride_bytes, size_t head_stride_bytes,
                              hkv_error *error)
{
    size_t record = g->format.record_bytes, block_span, head_span;
    if (!base || (uintptr_t)base % 16 != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "base", "base must be 16-byte aligned and not NULL, got %p",
                             base);
    if (block_stride_bytes % 16 != 0 || head_stride_bytes % 16 != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "block_stride_bytes",
                             "strides must be multiples of 16 bytes, got %zu between blocks and %zu between heads",
                             block_stride_bytes, head_stride_bytes);
    if (!hkv_size_multiply((size_t)g->n_kv_heads - 1, head_stride_bytes, &block_span) ||
        !hkv_size_multiply((size_t)g->n_blocks - 1, block_stride_bytes, &head_span) ||
        !hkv_size_add(block_span, head_span, &(size_t){0}))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "block_stride_bytes", "the pages end beyond the address space");
    if ((g->n_kv_heads > 1 && head_stride_bytes < record) || block_stride_bytes < record ||
        (block_stride_bytes < block_span + record && (g->n_kv_heads == 1 || head_stride_bytes < head_span + record)))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "block_stride_bytes",
                             "records of %zu bytes overlap with strides of %zu between blocks and %zu between heads",
                             record, block_stride_bytes, head_stride_bytes);
    return HKV_OK;
}

static hkv_status bind_layer(hkv_store *store, int32_t layer_idx, void *base, size_t block_stride_bytes,
                             size_t head_stride_bytes, hkv_error *error)
{
    HKV_TRY(check_index("layer_idx", layer_idx, store->group.n_layers, error));
    HKV_TRY(check_pages(&store->group, base, block_stride_bytes, head_stride_bytes, error));
    store->group.layers[layer_idx] = (hkv_layer_pages){base, block_stride_bytes, head_stride_bytes};
    store->is_open = false; /* the plan of an open step was made on the pages of before */
    return HKV_OK;
}

hkv_status hkv_store_bind_layer(hkv_store *store, int32_t layer_idx, void *base, size_t block_stride_bytes,
                                size_t head_stride_bytes, hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, bind_layer(store, layer_idx, base, block_stride_bytes, head_stride_bytes, error));
}

static hkv_status check_bound(const hkv_store *store, int32_t layer_idx, hkv_error *error)
{
    HKV_TRY(check_index("layer_idx", layer_idx, store->group.n_layers, error));
    if (store->group.layers[layer_idx].base) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_STATE, "layer_idx", "layer %d has no pages; call hkv_store_bind_layer first",
                         layer_idx);
}

/* ------------------------------------------------------------------------------------------------------------ begin */

static hkv_status check_pointer(const char *name, const void *pointer, hkv_error *error)
{
    if (pointer) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_ARGUMENT, name, "%s must not be NULL", name);
}

/* What can be told without reading the arrays, which may be on a device. plan.h checks what they hold. */
static hkv_status check_batch(const hkv_store *store, const hkv_batch *batch, hkv_error *error)
{
    HKV_TRY(check_pointer("batch", batch, error));
    HKV_TRY(check_range("n_rows", batch->n_rows, 0, store->group.max_rows, error));
    HKV_TRY(check_range("n_new_tokens", batch->n_new_tokens, 0, store->group.max_new_tokens, error));
    HKV_TRY(check_range("max_row_tokens", batch->max_row_tokens, 0, INT32_MAX, error));
    if (batch->n_rows == 0)
        return check_range("n_new_tokens", batch->n_new_tokens, 0, 0, error); /* no rows, no tokens */
    HKV_TRY(check_pointer("cu_new_tokens", batch->cu_new_tokens, error));
    HKV_TRY(check_pointer("seq_lens", batch->seq_lens, error));
    HKV_TRY(check_range("block_table_stride", batch->block_table_stride, 0, INT32_MAX, error));
    if (batch->block_table_stride > 0) HKV_TRY(check_pointer("block_table", batch->block_table, error));
    return batch->n_new_tokens == 0 ? HKV_OK : check_pointer("slot_mapping", batch->slot_mapping, error);
}

static int64_t longest_row_blocks(const hkv_store *store, const hkv_batch *batch)
{
    int32_t longest = 0;
    if (store->backend->upload) return 0; /* lengths are on a device */
    for (int32_t r = 0; r < batch->n_rows; r++)
        if (batch->seq_lens[r] > longest) longest = batch->seq_lens[r];
    return ((int64_t)longest + store->group.format.block_tokens - 1) / store->group.format.block_tokens;
}

static hkv_status begin(hkv_store *store, const hkv_batch *batch, hkv_error *error)
{
    HKV_TRY(check_batch(store, batch, error));
    HKV_TRY(check_bound(store, 0, error));
    store->is_open = false; /* a refused step leaves none open */
    HKV_TRY(store->backend->begin(&store->group, batch, batch->stream, error));
    store->step++;
    store->is_open = true;
    store->batch = *batch;
    store->max_row_blocks = longest_row_blocks(store, batch);
    return HKV_OK;
}

hkv_status hkv_store_begin(hkv_store *store, const hkv_batch *batch, hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, begin(store, batch, error));
}

/* ----------------------------------------------------------------------------------------------------------- attend */

/* [N, H, D] elements at a pointer, with strides. */
typedef struct tensor {
    const char *name;
    const void *data;
    int64_t stride_token, stride_head;
    int32_t n_heads;
} tensor;

/* Bytes from the first element to the end of the last; N > 0 and no negative strides. 0 if that is beyond SIZE_MAX. */
static size_t tensor_span(const hkv_format *f, const tensor *t, int32_t n_tokens)
{
    size_t tokens, heads, n;
    bool fits = hkv_size_multiply((size_t)n_tokens - 1, (size_t)t->stride_token, &tokens) &&
                hkv_size_multiply((size_t)t->n_heads - 1, (size_t)t->stride_head, &heads) &&
                hkv_size_add(tokens, heads, &n) && hkv_size_add(n, (size_t)f->head_dim, &n) &&
                hkv_size_multiply(n, (size_t)f->element_bytes, &n) && hkv_size_add(n, (uintptr_t)t->data, &tokens);
    return fits ? n : 0;
}

static hkv_status check_tensor(const hkv_store *store, const tensor *t, hkv_error *error)
{
    const hkv_format *f = &store->group.format;
    HKV_TRY(check_pointer(t->name, t->data, error));
    if ((uintptr_t)t->data % (uintptr_t)f->element_bytes != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, t->name, "%s must be aligned to its elements of %d bytes, got %p",
                             t->name, f->element_bytes, t->data);
    if (t->stride_token < 0 || t->stride_head < 0 || tensor_span(f, t, store->batch.n_new_tokens) == 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, t->name,
                             "strides of %s must not be negative or beyond the address space, got %" PRId64
                             " between tokens and %" PRId64 " between heads",
                             t->name, t->stride_token, t->stride_head);
    return HKV_OK;
}

static bool overlaps(const hkv_format *f, const tensor *a, const tensor *b, int32_t n_tokens)
{
    uintptr_t a_first = (uintptr_t)a->data, b_first = (uintptr_t)b->data;
    return a_first < b_first + tensor_span(f, b, n_tokens) && b_first < a_first + tensor_span(f, a, n_tokens);
}

/* Does every element have a place of its own: heads within a token, or tokens within a head? */
static bool is_injective(const hkv_format *f, const tensor *t, int32_t n_tokens)
{
    int64_t token_end = (n_tokens - 1) * t->stride_token + f->head_dim;
    int64_t head_end = (t->n_heads - 1) * t->stride_head + f->head_dim;
    if (n_tokens > 1 && t->stride_token < f->head_dim) return false;
    if (t->n_heads > 1 && t->stride_head < f->head_dim) return false;
    return n_tokens == 1 || t->n_heads == 1 || t->stride_token >= head_end || t->stride_head >= token_end;
}

static hkv_status check_output(const hkv_store *store, const tensor *out, const tensor *inputs, int32_t n_inputs,
                               hkv_error *error)
{
    const hkv_format *f = &store->group.format;
    int32_t n_tokens = store->batch.n_new_tokens;
    if (!is_injective(f, out, n_tokens))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "out",
                             "out must not overlap itself; strides of %" PRId64 " between tokens and %" PRId64
                             " between heads are too small",
                             out->stride_token, out->stride_head);
    for (int32_t i = 0; i < n_inputs; i++)
        if (overlaps(f, out, &inputs[i], n_tokens))
            return hkv_error_set(error, HKV_ERR_ARGUMENT, "out", "out must not overlap %s", inputs[i].name);
    return HKV_OK;
}

static hkv_status check_scores(const hkv_store *store, const hkv_attend *args, hkv_error *error)
{
    int32_t n_kv_heads = store->group.n_kv_heads;
    if (args->n_q_heads < n_kv_heads || args->n_q_heads % n_kv_heads != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_q_heads",
                             "n_q_heads must be a multiple of the %d KV heads, got %d", n_kv_heads, args->n_q_heads);
    if (!(args->softmax_scale > 0.0f && isfinite(args->softmax_scale)))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "softmax_scale",
                             "softmax_scale must be finite and above 0, got %g", (double)args->softmax_scale);
    if (!(args->logits_soft_cap >= 0.0f && isfinite(args->logits_soft_cap)))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "logits_soft_cap",
                             "logits_soft_cap must be finite and at least 0, got %g", (double)args->logits_soft_cap);
    if (args->mass && args->mass_stride < store->max_row_blocks)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "mass_stride",
                             "mass_stride must be at least the %" PRId64 " blocks of the longest row, got %" PRId64,
                             store->max_row_blocks, args->mass_stride);
    return HKV_OK;
}

static hkv_status check_attend(const hkv_store *store, const hkv_attend *args, hkv_error *error)
{
    int32_t n_kv_heads = store->group.n_kv_heads;
    const tensor inputs[] = {{"k", args->k, args->k_stride_token, args->k_stride_head, n_kv_heads},
                             {"v", args->v, args->v_stride_token, args->v_stride_head, n_kv_heads},
                             {"q", args->q, args->q_stride_token, args->q_stride_head, args->n_q_heads}};
    const tensor out = {"out", args->out, args->out_stride_token, args->out_stride_head, args->n_q_heads};
    bool appends_only = !args->q;
    if (!appends_only) HKV_TRY(check_scores(store, args, error));
    if (store->batch.n_new_tokens == 0) return HKV_OK;
    HKV_TRY(check_tensor(store, &inputs[0], error));
    HKV_TRY(check_tensor(store, &inputs[1], error));
    if (appends_only) return HKV_OK;
    HKV_TRY(check_tensor(store, &inputs[2], error));
    HKV_TRY(check_tensor(store, &out, error));
    return check_output(store, &out, inputs, 3, error);
}

static hkv_status check_open(const hkv_store *store, hkv_error *error)
{
    if (store->is_open) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_STATE, "store", "no step is open; call hkv_store_begin first");
}

static hkv_status attend(hkv_store *store, int32_t layer_idx, const hkv_attend *args, hkv_error *error)
{
    HKV_TRY(check_bound(store, layer_idx, error));
    HKV_TRY(check_open(store, error));
    if (store->layer_step[layer_idx] == store->step)
        return hkv_error_set(error, HKV_ERR_STATE, "layer_idx", "layer %d was attended in this step already",
                             layer_idx);
    HKV_TRY(check_pointer("args", args, error));
    HKV_TRY(check_attend(store, args, error));
    HKV_TRY(store->backend->attend(&store->group, &store->batch, layer_idx, args, error));
    store->layer_step[layer_idx] = store->step;
    return HKV_OK;
}

hkv_status hkv_store_attend(hkv_store *store, int32_t layer_idx, const hkv_attend *args, hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, attend(store, layer_idx, args, error));
}

static hkv_status prefetch_hot(hkv_store *store, int32_t layer_idx, void *stream, hkv_error *error)
{
    HKV_TRY(check_bound(store, layer_idx, error));
    HKV_TRY(check_open(store, error));
    if (!store->backend->prefetch_hot) return HKV_OK;
    return store->backend->prefetch_hot(&store->group, &store->batch, layer_idx, stream, error);
}

hkv_status hkv_store_prefetch_hot(hkv_store *store, int32_t layer_idx, void *stream, hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, prefetch_hot(store, layer_idx, stream, error));
}

/* ------------------------------------------------------------------------------------------------------- looking in */

static hkv_status read_tokens(hkv_store *store, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                              int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    const hkv_group *g = &store->group;
    int64_t first_block, end_block;
    HKV_TRY(check_bound(store, layer_idx, error));
    HKV_TRY(check_bound(store, 0, error)); /* whose headers tell which pages are valid */
    HKV_TRY(check_range("seq_len", seq_len, 0, INT32_MAX, error));
    HKV_TRY(check_range("first_token", first_token, 0, seq_len, error));
    HKV_TRY(check_range("n_tokens", n_tokens, 0, seq_len - first_token, error));
    if (n_tokens == 0) return HKV_OK;
    HKV_TRY(check_pointer("block_table", block_table, error));
    HKV_TRY(check_pointer("k_out", k_out, error));
    HKV_TRY(check_pointer("v_out", v_out, error));
    first_block = first_token / g->format.block_tokens;
    end_block = (first_token + n_tokens - 1) / g->format.block_tokens + 1;
    for (int64_t i = first_block; i < end_block; i++)
        HKV_TRY(check_index("block_table", block_table[i], g->n_blocks, error));
    return store->backend->read_tokens(&store->group, layer_idx, block_table, seq_len, first_token, n_tokens, k_out,
                                       v_out, error);
}

hkv_status hkv_store_read_tokens(hkv_store *store, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                                 int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store,
                 read_tokens(store, layer_idx, block_table, seq_len, first_token, n_tokens, k_out, v_out, error));
}

/* Header of a record on the device, copied; *is_sealed if it holds a full block. */
static hkv_status read_header(const hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block,
                              hkv_record_header *header, bool *is_sealed, hkv_error *error)
{
    const hkv_group *g = &store->group;
    HKV_TRY(store->backend->read(store->device_index, header, hkv_layer_record(&g->layers[layer_idx], block, kv_head),
                                 sizeof *header, error));
    *is_sealed = hkv_header_n_tokens(header, g->format.block_tokens) == g->format.block_tokens;
    return HKV_OK;
}

static hkv_status check_record(const hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block,
                               hkv_error *error)
{
    if (store->group.format.bits == 0)
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "store",
                             "there are no records and tiers at quantization_bits 0");
    HKV_TRY(check_bound(store, layer_idx, error));
    HKV_TRY(check_index("kv_head", kv_head, store->group.n_kv_heads, error));
    return check_index("block", block, store->group.n_blocks, error);
}

static hkv_status set_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, hkv_tier tier,
                           hkv_error *error)
{
    hkv_record_header header;
    bool is_sealed;
    HKV_TRY(check_record(store, layer_idx, kv_head, block, error));
    if (tier != HKV_TIER_L1 && tier != HKV_TIER_L2)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "tier", "tier must be 1 (L1) or 2 (L2), got %d", (int)tier);
    HKV_TRY(read_header(store, layer_idx, kv_head, block, &header, &is_sealed, error));
    if (!is_sealed)
        return hkv_error_set(error, HKV_ERR_STATE, "block", "block %d is not sealed and has no tier", block);
    header.tier = (uint8_t)tier;
    if (tier == HKV_TIER_L2) store->group.may_have_l2 = 1;
    return store->backend->write(store->device_index, hkv_layer_record(&store->group.layers[layer_idx], block, kv_head),
                                 &header, sizeof header, error);
}

hkv_status hkv_store_set_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, hkv_tier tier,
                              hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, set_tier(store, layer_idx, kv_head, block, tier, error));
}

static hkv_status get_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, int32_t *tier,
                           hkv_error *error)
{
    hkv_record_header header;
    bool is_sealed;
    HKV_TRY(check_record(store, layer_idx, kv_head, block, error));
    HKV_TRY(read_header(store, layer_idx, kv_head, block, &header, &is_sealed, error));
    *tier = is_sealed ? header.tier : 0;
    return HKV_OK;
}

hkv_status hkv_store_get_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, int32_t *tier,
                              hkv_error *error)
{
    HKV_TRY(enter(store, error));
    return leave(store, get_tier(store, layer_idx, kv_head, block, tier, error));
}

/* It cannot fail, so it waits for the call that is under way. */
void hkv_store_read_counters(const hkv_store *store, hkv_counters *counters)
{
    hkv_store *s = (hkv_store *)store; /* `busy` guards the object and is no part of its value */
    while (enter(s, NULL) != HKV_OK) sched_yield();
    memset(counters, 0, sizeof *counters);
    (void)s->backend->read(s->device_index, counters, s->group.counters, sizeof *counters, NULL);
    (void)leave(s, HKV_OK);
}

static hkv_status read_block(const hkv_store *store, int32_t block, hkv_block_info *info, hkv_error *error)
{
    const hkv_backend *backend = store->backend;
    const hkv_directory *dir = &store->group.directory;
    int32_t device = store->device_index, page;
    hkv_record_header header;
    bool is_sealed;
    HKV_TRY(check_index("block", block, store->group.n_blocks, error));
    HKV_TRY(backend->read(device, &page, &dir->block_page[block], sizeof page, error));
    *info = (hkv_block_info){.hot_page = page};
    if (page >= 0) {
        HKV_TRY(
            backend->read(device, &info->n_hot_tokens, &dir->page_n_tokens[page], sizeof info->n_hot_tokens, error));
        HKV_TRY(backend->read(device, &info->sealed, &dir->page_sealed[page], sizeof info->sealed, error));
        return backend->read(device, &info->stamp, &dir->page_stamp[page], sizeof info->stamp, error);
    }
    if (store->group.format.bits == 0 || !store->group.layers[0].base) return HKV_OK;
    HKV_TRY(read_header(store, 0, 0, block, &header, &is_sealed, error));
    info->sealed = is_sealed;
    info->stamp = header.stamp;
    return HKV_OK;
}

hkv_status hkv_store_read_block(const hkv_store *store, int32_t block, hkv_block_info *info, hkv_error *error)
{
    hkv_store *s = (hkv_store *)store; /* as in hkv_store_read_counters */
    HKV_TRY(enter(s, error));
    return leave(s, read_block(s, block, info, error));
}

hkv_group *hkv_store_group(hkv_store *store)
{
    return &store->group;
}
