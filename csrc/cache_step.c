/* cache_step.c - one step: reserve blocks, describe them to the stores, attend, and close.
 *
 * A row writes its new tokens at positions n_old .. n_old+n_new-1. Only the first written block can hold older tokens,
 * so a row copies from at most one block per group.
 */
#include "cache.h"

#include <inttypes.h>
#include <string.h>

/* Above this a block table is uploaded row by row. */
#define UPLOAD_WHOLE_BYTES ((size_t)1 << 20)

/* ------------------------------------------------------------------------------------------------ what a row does */

static int64_t row_length(const hkv_cache_row *row)
{
    return row->n_old + row->n_new;
}

/* The block with older tokens that the row writes into first; -1 = none. */
static int64_t row_partial_block(const hkv_cache *c, const hkv_cache_row *row)
{
    return row->n_new > 0 && row->n_old % c->block_tokens != 0 ? row->n_old / c->block_tokens : -1;
}

/* The first logical block that a row adds to a group: blocks that end outside the window afterwards are never made. The
 * partial block is always written: its older tokens may have no record yet, and this step's queries read them. */
static int64_t row_first_added(const hkv_cache *c, int32_t group, const hkv_cache_row *row)
{
    return hkv_max_i64(hkv_cache_n_blocks(c, row->n_old), hkv_cache_first_kept(c, group, row_length(row)));
}

/* Must the row leave `block` as it is from `offset` on and write into a copy? Blocks that can be found again are kept
 * if there is room for that. */
static bool must_copy(const hkv_cache *c, int32_t group, int32_t block, int32_t offset, bool keeps_findable)
{
    if (c->pools[group].n_refs[block] > 1) return true;
    return keeps_findable && hkv_prefix_n_findable(&c->prefix, group, block) > offset;
}

/* ------------------------------------------------------------------------------------------------------ reserving */

static int64_t row_demand(const hkv_cache *c, int32_t group, const hkv_cache_row *row, bool keeps_findable)
{
    int64_t partial = row_partial_block(c, row);
    int64_t n_added = hkv_cache_n_blocks(c, row_length(row)) - row_first_added(c, group, row);
    if (row->n_new == 0) return 0;
    if (partial >= 0 && must_copy(c, group, hkv_cache_table(c, group, row->sequence)[partial],
                                  (int32_t)(row->n_old % c->block_tokens), keeps_findable))
        n_added++;
    return n_added;
}

static int64_t group_demand(const hkv_cache *c, int32_t group, bool keeps_findable)
{
    int64_t n_blocks = 0;
    for (int32_t r = 0; r < c->step.n_rows; r++) n_blocks += row_demand(c, group, &c->step.rows[r], keeps_findable);
    return n_blocks;
}

static void reserve_partial_block(hkv_cache *c, int32_t group, int32_t r, bool keeps_findable)
{
    const hkv_cache_row *row = &c->step.rows[r];
    int32_t *entry = &hkv_cache_table(c, group, row->sequence)[row_partial_block(c, row)], old = *entry;
    int32_t offset = (int32_t)(row->n_old % c->block_tokens);
    if (!must_copy(c, group, old, offset, keeps_findable)) {
        if (hkv_prefix_n_findable(&c->prefix, group, old) > offset) hkv_prefix_forget_block(&c->prefix, group, old);
        return;
    }
    *entry = hkv_prefix_take_block(&c->prefix, group);
    c->groups[group].host.copy_sources[r] = old; /* has the reference that was the table's */
    if (group == 0) hkv_prefix_copy_tokens(&c->prefix, *entry, old, offset);
}

static void reserve_row(hkv_cache *c, int32_t group, int32_t r, bool keeps_findable)
{
    const hkv_cache_row *row = &c->step.rows[r];
    int32_t *table = hkv_cache_table(c, group, row->sequence);
    int64_t end = hkv_cache_n_blocks(c, row_length(row)), first = row_first_added(c, group, row);
    c->groups[group].host.copy_sources[r] = 0;
    if (row->n_new == 0) return;
    if (row_partial_block(c, row) >= 0) reserve_partial_block(c, group, r, keeps_findable);
    for (int64_t block = hkv_cache_n_blocks(c, row->n_old); block < end; block++)
        table[block] = block < first ? 0 : hkv_prefix_take_block(&c->prefix, group);
}

/* Give every row its blocks, or change nothing. */
static hkv_status reserve_blocks(hkv_cache *c, hkv_error *error)
{
    bool keeps_findable[HKV_MAX_LAYER_GROUPS];
    for (int32_t group = 0; group < c->n_groups; group++) {
        int64_t n_available = hkv_block_pool_n_available(&c->pools[group]);
        keeps_findable[group] = group_demand(c, group, true) <= n_available;
        int64_t n_needed = group_demand(c, group, keeps_findable[group]);
        if (n_needed > n_available)
            return hkv_error_set(error, HKV_ERR_CACHE_FULL, "sequences",
                                 "the step needs %" PRId64 " blocks of %" PRId32 " tokens, %" PRId64 " of %" PRId32
                                 " are left; free or truncate sequences and retry",
                                 n_needed, c->block_tokens, n_available, c->pools[group].n_blocks - 1);
    }
    for (int32_t group = 0; group < c->n_groups; group++)
        for (int32_t r = 0; r < c->step.n_rows; r++) reserve_row(c, group, r, keeps_findable[group]);
    return HKV_OK;
}

/* --------------------------------------------------------------------------------------- describing it to a store */

static void fill_shared_arrays(hkv_cache *c, int64_t clock)
{
    hkv_cache_shared_arrays *arrays = &c->host_arrays;
    *arrays->clock = clock;
    arrays->cu_new_tokens[0] = 0;
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        arrays->cu_new_tokens[r + 1] = arrays->cu_new_tokens[r] + c->step.rows[r].n_new;
        arrays->seq_lens[r] = (int32_t)row_length(&c->step.rows[r]);
    }
}

/* Slots of a row's new tokens in a group; -1 where the block is not kept. */
static void fill_slots(const hkv_cache *c, int32_t group, const hkv_cache_row *row, int64_t *slots)
{
    const int32_t *table = hkv_cache_table(c, group, row->sequence);
    for (int64_t position = row->n_old; position < row_length(row); position++) {
        int64_t block = table[position / c->block_tokens];
        *slots++ = block == 0 ? -1 : block * c->block_tokens + position % c->block_tokens;
    }
}

static void fill_arrays(hkv_cache *c, int32_t group)
{
    hkv_cache_arrays *arrays = &c->groups[group].host;
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        const hkv_cache_row *row = &c->step.rows[r];
        memcpy(arrays->block_table + (size_t)r * (size_t)c->table_width, hkv_cache_table(c, group, row->sequence),
               (size_t)hkv_cache_n_blocks(c, row_length(row)) * sizeof(int32_t));
        fill_slots(c, group, row, arrays->slot_mapping + c->host_arrays.cu_new_tokens[r]);
    }
}

static void describe_step(hkv_cache *c, int32_t group)
{
    hkv_cache_group *g = &c->groups[group];
    g->batch = (hkv_batch){
        .n_rows = c->step.n_rows,
        .n_new_tokens = (int32_t)c->step.n_tokens,
        .max_row_tokens = c->step.max_row_tokens,
        .cu_new_tokens = c->device_arrays.cu_new_tokens,
        .seq_lens = c->device_arrays.seq_lens,
        .block_table = g->device.block_table,
        .block_table_stride = c->table_width,
        .slot_mapping = g->device.slot_mapping,
        .copy_sources = g->device.copy_sources,
        .clock = c->device_arrays.clock,
        .stream = c->step.stream,
    };
}

static hkv_status upload(hkv_cache *c, int32_t group, void *device, const void *host, size_t n_bytes, hkv_error *error)
{
    return c->backend->upload(hkv_store_group(c->groups[group].store), device, host, n_bytes, c->step.stream, error);
}

static hkv_status upload_block_table(hkv_cache *c, int32_t group, hkv_error *error)
{
    const hkv_cache_group *g = &c->groups[group];
    size_t row_bytes = (size_t)c->table_width * sizeof(int32_t), n_bytes = (size_t)c->step.n_rows * row_bytes;
    if (n_bytes <= UPLOAD_WHOLE_BYTES)
        return upload(c, group, g->device.block_table, g->host.block_table, n_bytes, error);
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        size_t first = (size_t)r * (size_t)c->table_width;
        n_bytes = (size_t)hkv_cache_n_blocks(c, row_length(&c->step.rows[r])) * sizeof(int32_t);
        HKV_TRY(upload(c, group, g->device.block_table + first, g->host.block_table + first, n_bytes, error));
    }
    return HKV_OK;
}

/* Arrays that all groups share go with the first group that has a store. */
static hkv_status upload_arrays(hkv_cache *c, int32_t group, bool with_shared, hkv_error *error)
{
    const hkv_cache_group *g = &c->groups[group];
    if (with_shared)
        HKV_TRY(upload(c, group, c->device_arrays.clock, c->host_arrays.clock, c->shared_array_bytes, error));
    HKV_TRY(upload_block_table(c, group, error));
    HKV_TRY(upload(c, group, g->device.slot_mapping, g->host.slot_mapping, (size_t)c->step.n_tokens * sizeof(int64_t),
                   error));
    return upload(c, group, g->device.copy_sources, g->host.copy_sources, (size_t)c->step.n_rows * sizeof(int32_t),
                  error);
}

static hkv_status begin_stores(hkv_cache *c, hkv_error *error)
{
    bool is_first = true;
    for (int32_t group = 0; group < c->n_groups; group++) {
        hkv_cache_group *g = &c->groups[group];
        if (g->store == NULL) continue;
        fill_arrays(c, group);
        describe_step(c, group);
        if (c->is_device) HKV_TRY(upload_arrays(c, group, is_first, error));
        HKV_TRY(hkv_store_begin(g->store, &g->batch, error));
        g->has_begun = true;
        is_first = false;
    }
    return HKV_OK;
}

/* -------------------------------------------------------------------------------------------------------- closing */

static void close_step(hkv_cache *c)
{
    for (int32_t group = 0; group < c->n_groups; group++) c->groups[group].has_begun = false;
    c->step = (hkv_cache_step){.rows = c->step.rows, .is_attended = c->step.is_attended};
}

static void release_copy_sources(hkv_cache *c, int32_t r)
{
    for (int32_t group = 0; group < c->n_groups; group++) {
        int32_t *source = &c->groups[group].host.copy_sources[r];
        if (*source != 0) hkv_prefix_release_block(&c->prefix, group, *source);
        *source = 0;
    }
}

static void commit_row(hkv_cache *c, int32_t r)
{
    const hkv_cache_row *row = &c->step.rows[r];
    int64_t n_tokens = row_length(row);
    release_copy_sources(c, r);
    hkv_cache_register_blocks(c, row->sequence, row->n_old / c->block_tokens, n_tokens / c->block_tokens);
    hkv_cache_slide_windows(c, row->sequence);
    if (row->n_new == 0) return;
    /* who names a step's tokens itself knows better than what was announced */
    if (c->step.has_token_ids)
        hkv_cache_drop_pending(c, row->sequence);
    else
        hkv_cache_consume_pending(c, row->sequence, n_tokens);
}

/* The row's blocks in a group as they were before the step. */
static void take_back_blocks(hkv_cache *c, int32_t group, int32_t r)
{
    const hkv_cache_row *row = &c->step.rows[r];
    int32_t *table = hkv_cache_table(c, group, row->sequence), *source = &c->groups[group].host.copy_sources[r];
    int64_t partial = row_partial_block(c, row);
    for (int64_t block = hkv_cache_n_blocks(c, row_length(row)) - 1; block >= hkv_cache_n_blocks(c, row->n_old);
         block--) {
        if (table[block] != 0) hkv_prefix_release_block(&c->prefix, group, table[block]);
        table[block] = 0;
    }
    if (*source != 0) {
        hkv_prefix_release_block(&c->prefix, group, table[partial]);
        table[partial] = *source;
        *source = 0;
    } else if (group == 0 && partial >= 0) {
        hkv_prefix_write_tokens(&c->prefix, table[partial], (int32_t)(row->n_old % c->block_tokens), NULL, 0);
    }
}

/* Layers that were not attended still write what the step displaced (partial pages of others) and restored, so that all
 * layers agree on what a page holds. */
static hkv_status finish_layers(hkv_cache *c, hkv_error *error)
{
    const hkv_attend append_only = {.n_q_heads = c->options.model.n_kv_heads,
                                    .k = c->zeros,
                                    .v = c->zeros,
                                    .k_stride_head = c->format.head_dim,
                                    .v_stride_head = c->format.head_dim,
                                    .softmax_scale = 1.0f,
                                    .stream = c->step.stream};
    hkv_status first_failure = HKV_OK;
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        const hkv_cache_group *g = &c->groups[c->layers[layer].group];
        if (c->step.is_attended[layer] || !g->has_begun) continue;
        hkv_status status = hkv_store_attend(g->store, c->layers[layer].idx, &append_only, error);
        if (first_failure == HKV_OK) first_failure = status;
    }
    return first_failure;
}

static hkv_status roll_back(hkv_cache *c, hkv_error *error)
{
    hkv_status status = finish_layers(c, error);
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        for (int32_t group = 0; group < c->n_groups; group++) take_back_blocks(c, group, r);
        c->sequences[c->step.rows[r].sequence].n_tokens = c->step.rows[r].n_old;
    }
    close_step(c);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- begin */

static hkv_status check_row(hkv_cache *c, int32_t r, int64_t n_new, hkv_error *error)
{
    hkv_cache_row *row = &c->step.rows[r];
    row->n_old = c->sequences[row->sequence].n_tokens;
    if (n_new < 0 || n_new > c->max_step_tokens - c->step.n_tokens)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_tokens",
                             "n_tokens must be at least 0 and add up to at most max_step_tokens = %" PRId64
                             "; n_tokens[%" PRId32 "] is %" PRId64 " after %" PRId64,
                             c->max_step_tokens, r, n_new, c->step.n_tokens);
    if (n_new > c->max_length - row->n_old)
        return hkv_error_set(error, HKV_ERR_CACHE_FULL, "n_tokens",
                             "sequences[%" PRId32 "] would have %" PRId64 " tokens; the cache holds %" PRId64, r,
                             row->n_old + n_new, c->max_length);
    row->n_new = (int32_t)n_new;
    c->step.n_tokens += n_new;
    c->step.max_row_tokens = hkv_max_i32(c->step.max_row_tokens, row->n_new);
    c->step.max_length = hkv_max_i64(c->step.max_length, row_length(row));
    return HKV_OK;
}

static hkv_status check_rows(hkv_cache *c, const hkv_sequence *sequences, const int64_t *n_tokens, int32_t n_rows,
                             const int64_t *token_ids, hkv_error *error)
{
    HKV_TRY(hkv_cache_find_rows(c, sequences, n_rows, error));
    if (n_rows > 0 && n_tokens == NULL)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_tokens", "n_tokens must not be NULL");
    for (int32_t r = 0; r < n_rows; r++) HKV_TRY(check_row(c, r, n_tokens[r], error));
    return token_ids == NULL ? HKV_OK : hkv_cache_check_token_ids(token_ids, c->step.n_tokens, error);
}

/* The rows' blocks are reserved: write down what follows from that, and begin in the stores. */
static hkv_status open_step(hkv_cache *c, const int64_t *token_ids, int64_t clock, hkv_error *error)
{
    fill_shared_arrays(c, clock);
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        const hkv_cache_row *row = &c->step.rows[r];
        const int64_t *row_ids = token_ids == NULL ? NULL : token_ids + c->host_arrays.cu_new_tokens[r];
        hkv_cache_write_tokens(c, row->sequence, row->n_old, row->n_new, row_ids);
        c->sequences[row->sequence].n_tokens = row_length(row);
    }
    memset(c->step.is_attended, 0, (size_t)c->n_layers * sizeof *c->step.is_attended);
    hkv_status status = c->step.n_tokens == 0 ? HKV_OK : begin_stores(c, error);
    if (status != HKV_OK) (void)roll_back(c, NULL); /* the first failure is what counts */
    return status;
}

static hkv_status begin(hkv_cache *c, const hkv_sequence *sequences, const int64_t *n_tokens, int32_t n_rows,
                        const int64_t *token_ids, int64_t clock, void *stream, hkv_error *error)
{
    HKV_TRY(hkv_cache_check_closed(c, error));
    hkv_status status = check_rows(c, sequences, n_tokens, n_rows, token_ids, error);
    if (status == HKV_OK) {
        c->step.n_rows = n_rows;
        c->step.stream = stream;
        c->step.has_token_ids = token_ids != NULL;
        status = reserve_blocks(c, error);
    }
    if (status != HKV_OK) {
        close_step(c);
        return status;
    }
    HKV_TRY(open_step(c, token_ids, clock, error));
    c->step.is_open = true;
    return HKV_OK;
}

hkv_status hkv_cache_begin(hkv_cache *c, const hkv_sequence *sequences, const int64_t *n_tokens, int32_t n_rows,
                           const int64_t *token_ids, int64_t clock, void *stream, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = begin(c, sequences, n_tokens, n_rows, token_ids, clock, stream, error);
    hkv_cache_leave(c);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- attend, end */

static hkv_status check_open(const hkv_cache *c, hkv_error *error)
{
    if (c->step.is_open) return HKV_OK;
    return hkv_error_set(error, HKV_ERR_STATE, "cache", "no step is open");
}

static hkv_status attend(hkv_cache *c, int32_t layer_idx, const hkv_attend *args, hkv_error *error)
{
    HKV_TRY(check_open(c, error));
    HKV_TRY(hkv_cache_check_layer(c, layer_idx, error));
    if (args == NULL) return hkv_error_set(error, HKV_ERR_ARGUMENT, "args", "args must not be NULL");
    if (c->step.is_attended[layer_idx])
        return hkv_error_set(error, HKV_ERR_STATE, "layer_idx", "layer %" PRId32 " was attended in this step already",
                             layer_idx);
    const hkv_cache_layer *layer = &c->layers[layer_idx];
    const hkv_cache_group *g = &c->groups[layer->group];
    if (g->has_begun) HKV_TRY(hkv_store_attend(g->store, layer->idx, args, error));
    c->step.is_attended[layer_idx] = true;
    c->step.n_attended++;
    c->step.stream = args->stream;
    return HKV_OK;
}

hkv_status hkv_cache_attend(hkv_cache *c, int32_t layer_idx, const hkv_attend *args, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = attend(c, layer_idx, args, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status prefetch_hot(hkv_cache *c, int32_t layer_idx, void *stream, hkv_error *error)
{
    HKV_TRY(check_open(c, error));
    HKV_TRY(hkv_cache_check_layer(c, layer_idx, error));
    const hkv_cache_layer *layer = &c->layers[layer_idx];
    const hkv_cache_group *g = &c->groups[layer->group];
    return g->has_begun ? hkv_store_prefetch_hot(g->store, layer->idx, stream, error) : HKV_OK;
}

hkv_status hkv_cache_prefetch_hot(hkv_cache *c, int32_t layer_idx, void *stream, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = prefetch_hot(c, layer_idx, stream, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status mark_attended(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(check_open(c, error));
    for (int32_t layer = 0; layer < c->n_layers; layer++) c->step.is_attended[layer] = true;
    c->step.n_attended = c->n_layers;
    return HKV_OK;
}

hkv_status hkv_cache_mark_attended(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = mark_attended(c, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status end(hkv_cache *c, bool has_failed, hkv_error *error)
{
    HKV_TRY(check_open(c, error));
    if (has_failed || c->step.n_attended < c->n_layers) return roll_back(c, error);
    for (int32_t r = 0; r < c->step.n_rows; r++) commit_row(c, r);
    close_step(c);
    return HKV_OK;
}

hkv_status hkv_cache_end(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = end(c, false, error);
    hkv_cache_leave(c);
    return status;
}

hkv_status hkv_cache_abort(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = end(c, true, error);
    hkv_cache_leave(c);
    return status;
}

int64_t hkv_cache_step_tokens(const hkv_cache *c)
{
    return c->step.is_open ? c->step.n_tokens : 0;
}

int64_t hkv_cache_step_max_length(const hkv_cache *c)
{
    return c->step.is_open ? c->step.max_length : 0;
}
