/* cache.c - a cache's life, and what can be read from it. */
#include "cache.h"

#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "plan.h"

/* Far above any model; keeps products of a few counts inside 64 bits. */
#define MAX_COUNT 65536

/* ------------------------------------------------------------------------------------------------------ arguments */

static hkv_status check_range(const char *name, int64_t value, int64_t lowest, int64_t highest, hkv_error *error)
{
    if (value >= lowest && value <= highest) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_ARGUMENT, name, "%s must be %" PRId64 " to %" PRId64 ", not %" PRId64, name,
                         lowest, highest, value);
}

static hkv_status check_model(const hkv_model *model, hkv_error *error)
{
    HKV_TRY(check_range("model.n_layers", model->n_layers, 1, MAX_COUNT, error));
    HKV_TRY(check_range("model.n_kv_heads", model->n_kv_heads, 1, MAX_COUNT, error));
    HKV_TRY(check_range("model.head_dim", model->head_dim, 16, HKV_MAX_HEAD_DIM, error));
    if (model->head_dim % 16 != 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "model.head_dim",
                             "model.head_dim must be a multiple of 16, not %" PRId32, model->head_dim);
    if (hkv_dtype_bytes(model->dtype) == 0)
        return hkv_error_set(error, HKV_ERR_TYPE, "model.dtype", "model.dtype is not an hkv_dtype: %d",
                             (int)model->dtype);
    for (int32_t layer = 0; model->layer_windows != NULL && layer < model->n_layers; layer++)
        HKV_TRY(check_range("model.layer_windows", model->layer_windows[layer], 0, INT32_MAX, error));
    return HKV_OK;
}

static hkv_status check_options(const hkv_cache_options *options, hkv_error *error)
{
    HKV_TRY(hkv_config_check(&options->config, error));
    HKV_TRY(check_model(&options->model, error));
    HKV_TRY(check_range("max_sequences", options->max_sequences, 1, 1 << 20, error));
    HKV_TRY(check_range("max_tokens", options->max_tokens, 0, INT32_MAX, error));
    if (options->max_step_tokens != 0)
        HKV_TRY(check_range("max_step_tokens", options->max_step_tokens, options->max_sequences, 1 << 30, error));
    HKV_TRY(check_range("prefix_reuse", options->prefix_reuse, 0, 1, error));
    HKV_TRY(check_range("test_hash_bits", options->test_hash_bits, 0, 63, error));
    if (options->memory_bytes == 0 && options->max_tokens == 0 && options->memory.base == NULL)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "memory_bytes",
                             "memory_bytes and max_tokens are both 0 and there is no memory; one of them must bound "
                             "the cache");
    if (options->memory.base != NULL && options->memory_bytes > options->memory.n_bytes)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "memory_bytes",
                             "memory_bytes must be at most the size of memory, %zu bytes, got %zu",
                             options->memory.n_bytes, options->memory_bytes);
    return HKV_OK;
}

/* ------------------------------------------------------------------------------------------------------- creation */

static int32_t layer_window(const hkv_model *model, int32_t layer)
{
    return model->layer_windows == NULL ? 0 : model->layer_windows[layer];
}

static int32_t find_group(const hkv_cache *c, int32_t window_tokens)
{
    int32_t group = 0;
    while (group < c->n_groups && c->groups[group].window_tokens != window_tokens) group++;
    return group;
}

/* Group 0 is the trunk, the others come in the order of their first layer. */
static hkv_status make_groups(hkv_cache *c, hkv_error *error)
{
    const hkv_model *model = &c->options.model;
    c->n_groups = 1;
    for (int32_t layer = 0; layer < model->n_layers; layer++) {
        int32_t window_tokens = layer_window(model, layer), group = find_group(c, window_tokens);
        if (group == HKV_MAX_LAYER_GROUPS)
            return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "model.layer_windows",
                                 "layers may have at most %d different windows", HKV_MAX_LAYER_GROUPS - 1);
        hkv_cache_group *g = &c->groups[group];
        if (group == c->n_groups) {
            g->window_tokens = c->windows[group] = window_tokens;
            g->kept_tokens = (int32_t)hkv_min_i64((int64_t)window_tokens + c->block_tokens, INT32_MAX);
            c->n_groups++;
        }
        g->n_layers++;
    }
    return HKV_OK;
}

static void place_layers(hkv_cache *c, const hkv_model *model)
{
    int32_t n_placed[HKV_MAX_LAYER_GROUPS] = {0};
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        int32_t group = find_group(c, layer_window(model, layer));
        c->layers[layer] = (hkv_cache_layer){group, n_placed[group]++};
    }
}

static hkv_status make_store(hkv_cache *c, int32_t group_idx, hkv_error *error)
{
    hkv_cache_group *g = &c->groups[group_idx];
    size_t head_stride = c->format.record_bytes, block_stride = (size_t)c->options.model.n_kv_heads * head_stride;
    if (g->n_layers == 0) return HKV_OK;
    hkv_store_options options = hkv_cache_store_options(c, group_idx);
    HKV_TRY(hkv_store_create(&options, &g->store, error));
    for (int32_t layer = 0; layer < g->n_layers; layer++) {
        uint8_t *base = g->pages + (size_t)layer * (size_t)g->n_blocks * block_stride;
        HKV_TRY(hkv_store_bind_layer(g->store, layer, base, block_stride, head_stride, error));
    }
    return HKV_OK;
}

/* Zeros for hkv_cache_abort. */
static hkv_status clear_zeros(hkv_cache *c, hkv_error *error)
{
    size_t n_bytes = (size_t)c->options.model.n_kv_heads * (size_t)c->format.head_dim * (size_t)c->format.element_bytes;
    return c->backend->fill(c->options.device_index, c->zeros, 0, n_bytes, error);
}

/* Different for every cache, so that the handles of another one are not taken for ours. */
static uint32_t first_generation(const hkv_cache *c)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    uint64_t words[] = {(uint64_t)(uintptr_t)c, (uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)getpid()};
    return (uint32_t)hkv_siphash(c->options.hash_key, words, sizeof words / sizeof *words);
}

static void clear_contents(hkv_cache *c)
{
    for (int32_t group = 0; group < c->n_groups; group++) hkv_block_pool_reset(&c->pools[group]);
    hkv_prefix_reset(&c->prefix);
    hkv_cache_reset_sequences(c);
}

static void init_draft(hkv_cache *c, const hkv_cache_options *options)
{
    int64_t default_step_tokens = hkv_max_i64(8192, options->max_sequences);
    c->options = *options;
    c->backend = options->backend == NULL ? hkv_backend_cpu() : options->backend;
    c->is_device = c->backend->upload != NULL;
    hkv_format_init(&c->format, options->config.quantization_bits, options->config.block_size, options->model.head_dim,
                    (int32_t)options->model.dtype);
    c->block_tokens = options->config.block_size;
    c->n_layers = options->model.n_layers;
    c->max_sequences = options->max_sequences;
    c->max_step_tokens = options->max_step_tokens == 0 ? default_step_tokens : options->max_step_tokens;
    c->process_id = (int64_t)getpid();
}

static void init_prefix(hkv_cache *c)
{
    hkv_prefix *p = &c->prefix;
    p->block_tokens = c->block_tokens;
    p->n_groups = c->n_groups;
    memcpy(p->key, c->options.hash_key, sizeof p->key);
    p->hash_mask = c->options.test_hash_bits == 0 ? UINT64_MAX : (UINT64_C(1) << c->options.test_hash_bits) - 1;
    p->format_id = (uint64_t)HKV_FORMAT_VERSION << 48 | (uint64_t)c->format.dtype << 40 |
                   (uint64_t)c->format.bits << 32 | (uint64_t)c->block_tokens;
}

static hkv_status finish(hkv_cache *c, const hkv_model *model, hkv_error *error)
{
    place_layers(c, model);
    c->options.model.layer_windows = NULL; /* the caller's; the groups have it all */
    uint32_t generation = first_generation(c);
    for (int32_t i = 0; i < c->max_sequences; i++) c->sequences[i] = (hkv_cache_sequence){.generation = generation};
    clear_contents(c);
    HKV_TRY(clear_zeros(c, error));
    for (int32_t group = 0; group < c->n_groups; group++) HKV_TRY(make_store(c, group, error));
    return HKV_OK;
}

hkv_status hkv_cache_create(const hkv_cache_options *options, hkv_cache **cache, hkv_error *error)
{
    if (cache == NULL) return hkv_error_set(error, HKV_ERR_ARGUMENT, "cache", "cache must not be NULL");
    *cache = NULL;
    if (options == NULL) return hkv_error_set(error, HKV_ERR_ARGUMENT, "options", "options must not be NULL");
    HKV_TRY(check_options(options, error));
    hkv_cache draft, *c;
    memset(&draft, 0, sizeof draft);
    init_draft(&draft, options);
    HKV_TRY(make_groups(&draft, error));
    init_prefix(&draft);
    HKV_TRY(hkv_cache_choose_size(&draft, error));
    HKV_TRY(hkv_cache_place(&draft, &c, error));
    hkv_status status = finish(c, &options->model, error);
    if (status != HKV_OK) {
        hkv_cache_destroy(c);
        return status;
    }
    *cache = c;
    return HKV_OK;
}

void hkv_cache_destroy(hkv_cache *c)
{
    if (c == NULL) return;
    if (c->process_id != (int64_t)getpid()) return; /* a child of fork(): threads and device are the parent's */
    for (int32_t group = 0; group < c->n_groups; group++) hkv_store_destroy(c->groups[group].store);
    hkv_cache_release_memory(c);
}

hkv_status hkv_cache_reset(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = hkv_cache_check_closed(c, error);
    if (status == HKV_OK) clear_contents(c);
    hkv_cache_leave(c);
    return status;
}

/* ------------------------------------------------------------------------------------------------------- entering */

hkv_status hkv_cache_enter(hkv_cache *c, hkv_error *error)
{
    if (c == NULL) return hkv_error_set(error, HKV_ERR_ARGUMENT, "cache", "cache must not be NULL");
    if (c->process_id != (int64_t)getpid())
        return hkv_error_set(error, HKV_ERR_STALE, "cache", "the cache was made before this process was forked");
    if (atomic_exchange_explicit(&c->is_busy, true, memory_order_acquire))
        return hkv_error_set(error, HKV_ERR_BUSY, "cache", "another thread is inside this cache");
    return HKV_OK;
}

void hkv_cache_leave(hkv_cache *c)
{
    atomic_store_explicit(&c->is_busy, false, memory_order_release);
}

hkv_status hkv_cache_check_closed(const hkv_cache *c, hkv_error *error)
{
    if (!c->step.is_open) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_STATE, "cache", "a step is open; end or abort it first");
}

hkv_status hkv_cache_check_layer(const hkv_cache *c, int32_t layer_idx, hkv_error *error)
{
    if (layer_idx >= 0 && layer_idx < c->n_layers) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_RANGE, "layer_idx", "layer_idx = %" PRId32 " is outside 0..%" PRId32, layer_idx,
                         c->n_layers - 1);
}

/* --------------------------------------------------------------------------------------------- reading a sequence */

/* A sequence as one layer sees it. */
typedef struct layer_view {
    hkv_cache_group *group;
    hkv_cache_layer layer;
    const int32_t *table;
    int64_t n_tokens, n_blocks;
    int32_t first_block;
} layer_view;

static hkv_status view_layer(const hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, layer_view *view,
                             hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_find(c, sequence, "sequence", &idx, error));
    HKV_TRY(hkv_cache_check_layer(c, layer_idx, error));
    hkv_cache_layer layer = c->layers[layer_idx];
    const hkv_cache_sequence *s = &c->sequences[idx];
    *view = (layer_view){
        .group = (hkv_cache_group *)&c->groups[layer.group],
        .layer = layer,
        .table = hkv_cache_table(c, layer.group, idx),
        .n_tokens = s->n_tokens,
        .n_blocks = hkv_cache_n_blocks(c, s->n_tokens),
        .first_block = s->first_block[layer.group],
    };
    return HKV_OK;
}

static hkv_status check_room(int64_t *n_blocks, int64_t n_needed, hkv_error *error)
{
    int64_t n_given = *n_blocks;
    *n_blocks = n_needed;
    if (n_given >= n_needed) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_blocks",
                         "n_blocks = %" PRId64 " entries are too few for the sequence's %" PRId64 " blocks", n_given,
                         n_needed);
}

static hkv_status read_length(const hkv_cache *c, hkv_sequence sequence, int64_t *n_tokens, hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_find(c, sequence, "sequence", &idx, error));
    *n_tokens = c->sequences[idx].n_tokens;
    return HKV_OK;
}

hkv_status hkv_cache_sequence_length(const hkv_cache *c, hkv_sequence sequence, int64_t *n_tokens, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter((hkv_cache *)c, error));
    hkv_status status = read_length(c, sequence, n_tokens, error);
    hkv_cache_leave((hkv_cache *)c);
    return status;
}

static hkv_status read_tokens(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int64_t first_token,
                              int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    layer_view view;
    HKV_TRY(view_layer(c, sequence, layer_idx, &view, error));
    if (first_token < 0 || n_tokens < 0 || n_tokens > view.n_tokens || first_token > view.n_tokens - n_tokens)
        return hkv_error_set(error, HKV_ERR_RANGE, "n_tokens",
                             "tokens %" PRId64 " to %" PRId64 " are outside the sequence of %" PRId64 " tokens",
                             first_token, first_token + n_tokens, view.n_tokens);
    if (n_tokens == 0) return HKV_OK;
    for (int64_t block = first_token / c->block_tokens; block <= (first_token + n_tokens - 1) / c->block_tokens;
         block++)
        if (view.table[block] == 0)
            return hkv_error_set(error, HKV_ERR_RANGE, "first_token",
                                 "tokens %" PRId64 " to %" PRId64 " left the layer's window of %" PRId32 " tokens",
                                 block * c->block_tokens, (block + 1) * c->block_tokens, view.group->window_tokens);
    return hkv_store_read_tokens(view.group->store, view.layer.idx, view.table, view.n_tokens, first_token, n_tokens,
                                 k_out, v_out, error);
}

hkv_status hkv_cache_read_tokens(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int64_t first_token,
                                 int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = read_tokens(c, sequence, layer_idx, first_token, n_tokens, k_out, v_out, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status read_tiers(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head, uint8_t *tiers,
                             int64_t *n_blocks, hkv_error *error)
{
    layer_view view;
    HKV_TRY(view_layer(c, sequence, layer_idx, &view, error));
    HKV_TRY(check_room(n_blocks, view.n_blocks, error));
    for (int64_t block = 0; block < view.n_blocks; block++) {
        int32_t tier = 0;
        if (view.table[block] != 0)
            HKV_TRY(hkv_store_get_tier(view.group->store, view.layer.idx, kv_head, view.table[block], &tier, error));
        tiers[block] = (uint8_t)tier;
    }
    return HKV_OK;
}

hkv_status hkv_cache_read_tiers(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head, uint8_t *tiers,
                                int64_t *n_blocks, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = read_tiers(c, sequence, layer_idx, kv_head, tiers, n_blocks, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status set_tier(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head,
                           int64_t logical_block, hkv_tier tier, hkv_error *error)
{
    layer_view view;
    HKV_TRY(view_layer(c, sequence, layer_idx, &view, error));
    if (logical_block < 0 || logical_block >= view.n_blocks || view.table[logical_block] == 0)
        return hkv_error_set(error, HKV_ERR_RANGE, "logical_block",
                             "logical_block = %" PRId64 " is not a block that the layer holds: %" PRId32 "..%" PRId64,
                             logical_block, view.first_block, view.n_blocks - 1);
    return hkv_store_set_tier(view.group->store, view.layer.idx, kv_head, view.table[logical_block], tier, error);
}

hkv_status hkv_cache_set_tier(hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head,
                              int64_t logical_block, hkv_tier tier, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = set_tier(c, sequence, layer_idx, kv_head, logical_block, tier, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status read_pages(const hkv_cache *c, int32_t layer_idx, hkv_cache_pages *pages, hkv_error *error)
{
    HKV_TRY(hkv_cache_check_layer(c, layer_idx, error));
    hkv_cache_layer layer = c->layers[layer_idx];
    const hkv_cache_group *g = &c->groups[layer.group];
    size_t record_bytes = c->format.record_bytes, block_stride = record_bytes * (size_t)c->options.model.n_kv_heads;
    *pages = (hkv_cache_pages){
        .base = g->pages + (size_t)layer.idx * (size_t)g->n_blocks * block_stride,
        .block_stride_bytes = block_stride,
        .head_stride_bytes = record_bytes,
        .record_bytes = record_bytes,
        .n_blocks = g->n_blocks,
        .n_kv_heads = c->options.model.n_kv_heads,
    };
    uint8_t first_byte; /* reading it waits for all work on the device */
    return c->backend->read(c->options.device_index, &first_byte, pages->base, 1, error);
}

hkv_status hkv_cache_read_pages(const hkv_cache *c, int32_t layer_idx, hkv_cache_pages *pages, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter((hkv_cache *)c, error));
    hkv_status status = read_pages(c, layer_idx, pages, error);
    hkv_cache_leave((hkv_cache *)c);
    return status;
}

static hkv_status read_table(const hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t *blocks,
                             int64_t *n_blocks, hkv_error *error)
{
    layer_view view;
    HKV_TRY(view_layer(c, sequence, layer_idx, &view, error));
    HKV_TRY(check_room(n_blocks, view.n_blocks, error));
    if (view.n_blocks > 0) memcpy(blocks, view.table, (size_t)view.n_blocks * sizeof *blocks);
    return HKV_OK;
}

hkv_status hkv_cache_read_table(const hkv_cache *c, hkv_sequence sequence, int32_t layer_idx, int32_t *blocks,
                                int64_t *n_blocks, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter((hkv_cache *)c, error));
    hkv_status status = read_table(c, sequence, layer_idx, blocks, n_blocks, error);
    hkv_cache_leave((hkv_cache *)c);
    return status;
}

/* ----------------------------------------------------------------------------------------------------- statistics */

static void add_counters(hkv_counters *sum, const hkv_counters *part)
{
    sum->n_steps += part->n_steps;
    sum->n_tokens_appended += part->n_tokens_appended;
    sum->n_blocks_sealed += part->n_blocks_sealed;
    sum->n_blocks_sealed_direct += part->n_blocks_sealed_direct;
    sum->n_pages_claimed += part->n_pages_claimed;
    sum->n_pages_restored += part->n_pages_restored;
    sum->n_pages_evicted += part->n_pages_evicted;
    sum->n_partial_evicted += part->n_partial_evicted;
    sum->n_hot_blocks_read += part->n_hot_blocks_read;
    sum->n_hot_blocks_wanted += part->n_hot_blocks_wanted;
    sum->n_records_read += part->n_records_read;
    sum->n_records_skipped += part->n_records_skipped;
    sum->n_records_refined += part->n_records_refined;
    sum->n_records_unselected += part->n_records_unselected;
    sum->n_bytes_read += part->n_bytes_read;
    sum->n_nonfinite_inputs += part->n_nonfinite_inputs;
    sum->skipped_mass += part->skipped_mass;
    sum->n_skipped_mass_terms += part->n_skipped_mass_terms;
}

/* Hot pages of a group, and bytes of live blocks. The directory may be on a device, so it is read piece by piece. */
static void add_hot_pages(const hkv_cache *c, int32_t group_idx, hkv_cache_stats *stats)
{
    enum { PIECE = 256 };
    const hkv_cache_group *g = &c->groups[group_idx];
    const hkv_block_pool *pool = &c->pools[group_idx];
    const int32_t *page_block = hkv_store_group(g->store)->directory.page_block;
    size_t n_page_heads = (size_t)g->n_layers * (size_t)c->options.model.n_kv_heads;
    for (int32_t first = 0; first < g->n_hot_pages; first += PIECE) {
        int32_t blocks[PIECE], n = hkv_min_i32(g->n_hot_pages - first, PIECE);
        if (c->backend->read(c->options.device_index, blocks, page_block + first, (size_t)n * sizeof *blocks, NULL) !=
            HKV_OK)
            break; /* a lost device: what is counted so far has to do */
        for (int32_t i = 0; i < n; i++) {
            stats->n_hot_pages_used += blocks[i] >= 0;
            if (blocks[i] >= 0 && pool->n_refs[blocks[i]] > 0)
                stats->bytes_in_use += n_page_heads * c->format.row_page_bytes;
        }
    }
    stats->n_hot_pages_total += g->n_hot_pages;
    stats->bytes_in_use += (size_t)hkv_block_pool_n_live(pool) * n_page_heads * c->format.record_bytes;
}

static void add_group(const hkv_cache *c, int32_t group_idx, hkv_cache_stats *stats)
{
    const hkv_cache_group *g = &c->groups[group_idx];
    const hkv_block_pool *pool = &c->pools[group_idx];
    hkv_counters counters;
    if (g->store == NULL) return;
    stats->n_blocks_total += pool->n_blocks - 1;
    stats->n_blocks_live += hkv_block_pool_n_live(pool);
    stats->n_blocks_cached += pool->n_cached;
    stats->n_blocks_free += pool->n_free;
    add_hot_pages(c, group_idx, stats);
    hkv_store_read_counters(g->store, &counters);
    add_counters(&stats->counters, &counters);
}

void hkv_cache_read_stats(const hkv_cache *c, hkv_cache_stats *stats)
{
    while (hkv_cache_enter((hkv_cache *)c, NULL) == HKV_ERR_BUSY) sched_yield();
    *stats = (hkv_cache_stats){
        .record_bytes = c->bytes_of[HKV_MEMORY_RECORD],
        .hot_bytes = c->bytes_of[HKV_MEMORY_HOT],
        .directory_bytes = c->bytes_of[HKV_MEMORY_DIRECTORY],
        .table_bytes = c->bytes_of[HKV_MEMORY_TABLE],
        .prefix_bytes = c->bytes_of[HKV_MEMORY_PREFIX],
        .workspace_bytes = c->bytes_of[HKV_MEMORY_WORKSPACE],
        .unused_bytes = c->bytes_of[HKV_MEMORY_UNUSED],
        .allocated_bytes = c->host_arena.size + c->device_arena.size,
        .max_tokens = c->max_length,
        .n_sequences = c->n_sequences,
        .n_prefix_queries = c->n_prefix_queries,
        .n_prefix_hits = c->n_prefix_hits,
        .n_prefix_evictions = c->prefix.n_evicted,
    };
    for (int32_t group = 0; group < c->n_groups; group++) {
        add_group(c, group, stats);
        if (c->is_device) stats->allocated_bytes += c->groups[group].store_bytes;
    }
    stats->memory_bytes = c->options.memory_bytes == 0 ? stats->allocated_bytes : c->options.memory_bytes;
    for (int32_t i = 0; i < c->max_sequences; i++)
        if (c->sequences[i].is_live) stats->n_tokens += c->sequences[i].n_tokens;
    hkv_cache_leave((hkv_cache *)c);
}
