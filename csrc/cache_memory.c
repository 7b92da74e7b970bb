/* cache_memory.c - how many blocks fit, and where everything lies.
 *
 * lay_out() is the only list of what a cache allocates. It runs without a base to count and with one to place, so the
 * bound is kept by construction: the number of blocks is the largest for which counting stays below it.
 */
#include "cache.h"

#include <inttypes.h>

#include "plan.h"

#define ARENA_ALIGNMENT 512 /* HKV_HOT_ALIGN, also for pages at bits 0 */
#define TABLE_ALIGNMENT 64
/* Large arenas lie on huge pages and are whole numbers of them. */
#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_FROM ((size_t)8 << 20)

/* ------------------------------------------------------------------------------------------------------ the arena */

/* n elements; NULL while counting. Once it overflows an arena stays at SIZE_MAX. */
static void *take(hkv_cache *c, hkv_arena *arena, hkv_memory_kind kind, size_t n, size_t element_bytes,
                  size_t alignment)
{
    size_t start, n_bytes, end;
    if (arena->used == SIZE_MAX || !hkv_size_multiply(n, element_bytes, &n_bytes) ||
        !hkv_size_align(arena->used, alignment, &start) || !hkv_size_add(start, n_bytes, &end)) {
        arena->used = SIZE_MAX;
        return NULL;
    }
    c->bytes_of[HKV_MEMORY_UNUSED] += start - arena->used;
    c->bytes_of[kind] += n_bytes;
    arena->used = end;
    return arena->base == NULL ? NULL : arena->base + start;
}

/* Shorthands for lay_out: n elements of pointer's type. */
#define TAKE_AT(arena, pointer, kind, n)                                                                               \
    ((pointer) = take(c, arena, kind, (size_t)(n), sizeof *(pointer), TABLE_ALIGNMENT))
#define TAKE(pointer, kind, n) TAKE_AT(&c->host_arena, pointer, kind, n)

/* Does the arena lie in memory of the caller? */
static bool is_in_memory(const hkv_cache *c, const hkv_arena *arena)
{
    return c->options.memory.base != NULL && (arena == &c->device_arena) == c->is_device;
}

/* The allocator of a store on the CPU: its share of the arena, front to back. hkv_store_required_bytes counts on at
 * most ARENA_ALIGNMENT; what asks for more only wishes for huge pages. */
static void *store_alloc(void *ctx, size_t n_bytes, size_t alignment)
{
    hkv_arena *arena = ctx;
    size_t start, end;
    if (alignment > ARENA_ALIGNMENT) alignment = ARENA_ALIGNMENT;
    if (!hkv_size_align(arena->used, alignment, &start) || !hkv_size_add(start, n_bytes, &end) || end > arena->size)
        return NULL;
    arena->used = end;
    return arena->base + start;
}

static void store_release(void *ctx, void *ptr, size_t n_bytes)
{
    (void)ctx, (void)ptr, (void)n_bytes; /* goes with the arena */
}

/* --------------------------------------------------------------------------------------------------------- layout */

static void lay_out_pool(hkv_cache *c, hkv_block_pool *pool)
{
    TAKE(pool->n_refs, HKV_MEMORY_TABLE, pool->n_blocks);
    TAKE(pool->next, HKV_MEMORY_TABLE, pool->n_blocks);
    TAKE(pool->prev, HKV_MEMORY_TABLE, pool->n_blocks);
    TAKE(pool->node, HKV_MEMORY_TABLE, pool->n_blocks);
}

static void lay_out_prefix(hkv_cache *c)
{
    hkv_prefix *p = &c->prefix;
    size_t block_tokens = (size_t)c->block_tokens, n_trunk_blocks = (size_t)c->pools[0].n_blocks;
    TAKE(p->nodes, HKV_MEMORY_PREFIX, p->n_nodes);
    TAKE(p->buckets, HKV_MEMORY_PREFIX, p->n_buckets);
    TAKE(p->companions, HKV_MEMORY_PREFIX, (size_t)(c->n_groups - 1) * (size_t)p->n_nodes);
    TAKE(p->n_known, HKV_MEMORY_PREFIX, n_trunk_blocks);
    TAKE(p->next_same, HKV_MEMORY_PREFIX, n_trunk_blocks);
    p->tokens =
        take(c, &c->host_arena, HKV_MEMORY_PREFIX, n_trunk_blocks, block_tokens * sizeof *p->tokens, TABLE_ALIGNMENT);
    c->pending_tokens = take(c, &c->host_arena, HKV_MEMORY_PREFIX, (size_t)c->table_width,
                             block_tokens * sizeof *c->pending_tokens, TABLE_ALIGNMENT);
    TAKE(c->pending_next, HKV_MEMORY_PREFIX, c->table_width);
}

static void lay_out_shared_arrays(hkv_cache *c, hkv_arena *arena, hkv_cache_shared_arrays *arrays)
{
    size_t n_rows = (size_t)c->max_sequences;
    c->shared_array_bytes = sizeof *arrays->clock + (2 * n_rows + 1) * sizeof *arrays->seq_lens;
    arrays->clock = take(c, arena, HKV_MEMORY_WORKSPACE, c->shared_array_bytes, 1, TABLE_ALIGNMENT);
    if (arrays->clock == NULL) return;
    arrays->cu_new_tokens = (int32_t *)(arrays->clock + 1);
    arrays->seq_lens = arrays->cu_new_tokens + n_rows + 1;
}

static void lay_out_arrays(hkv_cache *c, hkv_arena *arena, hkv_cache_arrays *arrays)
{
    arrays->block_table = take(c, arena, HKV_MEMORY_WORKSPACE, (size_t)c->max_sequences,
                               (size_t)c->table_width * sizeof *arrays->block_table, TABLE_ALIGNMENT);
    TAKE_AT(arena, arrays->slot_mapping, HKV_MEMORY_WORKSPACE, c->max_step_tokens);
    TAKE_AT(arena, arrays->copy_sources, HKV_MEMORY_WORKSPACE, c->max_sequences);
}

static void lay_out_group(hkv_cache *c, int32_t group_idx)
{
    hkv_cache_group *g = &c->groups[group_idx];
    hkv_arena *device = c->is_device ? &c->device_arena : &c->host_arena;
    g->tables = take(c, &c->host_arena, HKV_MEMORY_TABLE, (size_t)c->max_sequences,
                     (size_t)c->table_width * sizeof *g->tables, TABLE_ALIGNMENT);
    lay_out_pool(c, &c->pools[group_idx]);
    lay_out_arrays(c, &c->host_arena, &g->host);
    if (g->n_layers == 0) return;
    if (c->is_device) { /* where the store allocates for itself what has no place in the caller's memory */
        lay_out_arrays(c, device, &g->device);
        if (is_in_memory(c, device))
            g->store_memory.base = take(c, device, HKV_MEMORY_DIRECTORY, g->store_memory.n_bytes, 1, ARENA_ALIGNMENT);
        c->bytes_of[HKV_MEMORY_DIRECTORY] += g->store_bytes;
    } else {
        g->store_arena.size = g->store_bytes;
        g->store_arena.base = take(c, &c->host_arena, HKV_MEMORY_DIRECTORY, g->store_bytes, 1, ARENA_ALIGNMENT);
        g->device = g->host;
    }
    c->bytes_of[HKV_MEMORY_DIRECTORY] -= g->hot_bytes;
    c->bytes_of[HKV_MEMORY_HOT] += g->hot_bytes;
    g->pages = take(c, device, HKV_MEMORY_RECORD, (size_t)g->n_layers * (size_t)g->n_blocks,
                    (size_t)c->options.model.n_kv_heads * c->format.record_bytes, ARENA_ALIGNMENT);
}

static void lay_out(hkv_cache *c)
{
    hkv_arena *device = c->is_device ? &c->device_arena : &c->host_arena;
    for (int kind = 0; kind < HKV_MEMORY_N_KINDS; kind++) c->bytes_of[kind] = 0;
    c->host_arena.used = 0;
    c->device_arena.used = 0;
    take(c, &c->host_arena, HKV_MEMORY_TABLE, 1, sizeof *c, ARENA_ALIGNMENT);
    TAKE(c->layers, HKV_MEMORY_TABLE, c->n_layers);
    TAKE(c->sequences, HKV_MEMORY_TABLE, c->max_sequences);
    TAKE(c->moved, HKV_MEMORY_TABLE, c->max_sequences);
    TAKE(c->step.rows, HKV_MEMORY_WORKSPACE, c->max_sequences);
    TAKE(c->step.is_attended, HKV_MEMORY_WORKSPACE, c->n_layers);
    lay_out_shared_arrays(c, &c->host_arena, &c->host_arrays);
    c->device_arrays = c->host_arrays;
    if (c->is_device) lay_out_shared_arrays(c, device, &c->device_arrays);
    c->zeros = take(c, device, HKV_MEMORY_WORKSPACE, (size_t)c->options.model.n_kv_heads * (size_t)c->format.head_dim,
                    (size_t)c->format.element_bytes, TABLE_ALIGNMENT);
    if (c->options.prefix_reuse) lay_out_prefix(c);
    for (int32_t group = 0; group < c->n_groups; group++) lay_out_group(c, group);
    if (c->host_arena.used >= HUGE_FROM && !is_in_memory(c, &c->host_arena))
        take(c, &c->host_arena, HKV_MEMORY_UNUSED, 0, 1, HUGE_PAGE);
}

/* ----------------------------------------------------------------------------------------------------------- size */

hkv_store_options hkv_cache_store_options(const hkv_cache *c, int32_t group_idx)
{
    const hkv_cache_group *g = &c->groups[group_idx];
    return (hkv_store_options){
        .config = c->options.config,
        .n_layers = g->n_layers,
        .n_kv_heads = c->options.model.n_kv_heads,
        .head_dim = c->options.model.head_dim,
        .dtype = c->options.model.dtype,
        .window_tokens = g->window_tokens,
        .n_blocks = g->n_blocks,
        .max_rows = c->max_sequences,
        .max_new_tokens = c->max_step_tokens,
        .max_sequence_tokens = c->max_length,
        .n_hot_pages = g->n_hot_pages,
        .backend = c->options.backend,
        .device_index = c->options.device_index,
        .threads = c->options.threads,
        .cpu_path = c->options.cpu_path,
        .allocator = c->is_device ? c->options.allocator : &g->store_allocator,
        .memory = g->store_memory,
    };
}

/* Blocks that n consecutive tokens can reach into. */
static int64_t blocks_reached(int64_t n_tokens, int32_t block_tokens)
{
    return n_tokens <= 0 ? 0 : (n_tokens - 1 + block_tokens - 1) / block_tokens + 1;
}

/* Blocks with which a windowed group never runs out before the trunk does: what every sequence keeps, and what a step
 * adds before it lets go of anything (of a row at most what it keeps, and a copied block). */
static int64_t window_blocks(const hkv_cache *c, const hkv_cache_group *g)
{
    int64_t n_rows = c->max_sequences;
    int64_t kept = blocks_reached((int64_t)g->kept_tokens - 1, c->block_tokens);
    int64_t step = hkv_min_i64(n_rows * (kept + 1), c->max_step_tokens / c->block_tokens + 2 * n_rows);
    return n_rows * kept + step;
}

/* Does the group get as many blocks as the trunk? Without a full layer and a bound in tokens the widest window takes
 * the memory, as blocks to find again. */
static bool is_widest(const hkv_cache *c, const hkv_cache_group *g)
{
    if (c->groups[0].n_layers > 0 || c->options.max_tokens > 0) return g->window_tokens == 0;
    for (int32_t i = 0; i < c->n_groups; i++)
        if (c->groups[i].window_tokens > g->window_tokens) return false;
    return true;
}

static double hot_page_bytes(const hkv_cache *c, const hkv_cache_group *g)
{
    return (double)g->n_layers * c->options.model.n_kv_heads * c->format.row_page_bytes;
}

static int32_t choose_hot_pages(const hkv_cache *c, const hkv_cache_group *g)
{
    const hkv_config *config = &c->options.config;
    int64_t n_pages = hkv_plan_guaranteed_pages(c->max_sequences, c->max_step_tokens, config->hot_tokens,
                                                config->block_size, config->sink_blocks);
    if (config->quantization_bits == 0) return 0;
    if (c->options.hot_memory_bytes > 0) { /* every group the same number */
        double bytes_per_page = 0;
        for (int32_t i = 0; i < c->n_groups; i++) bytes_per_page += hot_page_bytes(c, &c->groups[i]);
        double n_fit = (double)c->options.hot_memory_bytes / bytes_per_page;
        n_pages = n_fit < 1 ? 1 : n_fit < INT32_MAX ? (int64_t)n_fit : INT32_MAX;
    }
    return (int32_t)hkv_min_i64(n_pages, g->n_blocks - 1);
}

static hkv_status set_group_size(hkv_cache *c, int32_t group_idx, int32_t n_trunk_blocks, hkv_error *error)
{
    hkv_cache_group *g = &c->groups[group_idx];
    int64_t n_blocks = n_trunk_blocks;
    if (g->window_tokens > 0 && !is_widest(c, g)) n_blocks = hkv_min_i64(n_blocks, window_blocks(c, g));
    g->n_blocks = (int32_t)n_blocks + 1;
    c->pools[group_idx].n_blocks = g->n_blocks;
    if (g->n_layers == 0) return HKV_OK;
    g->n_hot_pages = choose_hot_pages(c, g);
    g->hot_bytes = (size_t)hot_page_bytes(c, g) * (size_t)g->n_hot_pages;
    hkv_store_options options = hkv_cache_store_options(c, group_idx);
    HKV_TRY(hkv_store_required_bytes(&options, &g->store_bytes, error));
    if (!is_in_memory(c, &c->device_arena)) return HKV_OK;
    HKV_TRY(hkv_store_memory_bytes(&options, &g->store_memory.n_bytes, error));
    g->store_bytes -= g->store_memory.n_bytes; /* of the arena now */
    return HKV_OK;
}

/* Everything that follows from the number of trunk blocks (without the null block); *n_bytes is what all takes. */
static hkv_status set_size(hkv_cache *c, int32_t n_trunk_blocks, size_t *n_bytes, hkv_error *error)
{
    c->table_width = n_trunk_blocks;
    c->max_length = hkv_min_i64((int64_t)n_trunk_blocks * c->block_tokens, INT32_MAX);
    for (int32_t group = 0; group < c->n_groups; group++) HKV_TRY(set_group_size(c, group, n_trunk_blocks, error));
    if (c->options.prefix_reuse) {
        size_t n_nodes = hkv_prefix_n_nodes(n_trunk_blocks + 1, c->max_sequences);
        if (n_nodes > INT32_MAX) return hkv_error_set(error, HKV_ERR_ARGUMENT, "max_tokens", "too many blocks");
        c->prefix.n_nodes = (int32_t)n_nodes;
        for (c->prefix.n_buckets = 1; c->prefix.n_buckets < n_trunk_blocks;) c->prefix.n_buckets *= 2;
    }
    lay_out(c);
    if (!hkv_size_add(c->host_arena.used, c->device_arena.used, n_bytes))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "max_tokens", "more memory than this machine can address");
    for (int32_t group = 0; c->is_device && group < c->n_groups; group++)
        if (!hkv_size_add(*n_bytes, c->groups[group].store_bytes, n_bytes))
            return hkv_error_set(error, HKV_ERR_ARGUMENT, "max_tokens", "more memory than this machine can address");
    return HKV_OK;
}

/* Blocks for max_tokens over max_sequences: every sequence may have a block that is not full, and every two that share
 * one need another while a step copies it. */
static int64_t blocks_for_tokens(const hkv_cache *c)
{
    int64_t n_tokens = c->options.max_tokens, n_sequences = c->max_sequences;
    int64_t n_partial = hkv_min_i64(n_tokens, n_sequences);
    return n_partial + (n_tokens - n_partial) / c->block_tokens + n_sequences / 2;
}

/* What lies in the caller's memory if there is one. */
static size_t device_bytes(const hkv_cache *c)
{
    return c->is_device ? c->device_arena.used : c->host_arena.used;
}

static bool fits_memory(const hkv_cache *c)
{
    return c->options.memory.base == NULL || device_bytes(c) <= hkv_memory_align(c->options.memory).n_bytes;
}

static bool fits(hkv_cache *c, int32_t n_trunk_blocks, size_t bound)
{
    size_t n_bytes;
    return set_size(c, n_trunk_blocks, &n_bytes, NULL) == HKV_OK && n_bytes <= bound && fits_memory(c);
}

static hkv_status fail_small(const hkv_cache *c, const char *what, size_t bound, size_t n_bytes, const char *more,
                             hkv_error *error)
{
    return hkv_error_set(error, HKV_ERR_BUDGET_SMALL, what,
                         "%s = %zu is too small: a cache of one block of %" PRId32
                         " tokens for max_sequences = %" PRId32 " takes %zu bytes%s",
                         what, bound, c->block_tokens, c->max_sequences, n_bytes, more);
}

hkv_status hkv_cache_choose_size(hkv_cache *c, hkv_error *error)
{
    const bool has_memory = c->options.memory.base != NULL;
    size_t n_bytes, bound = c->options.memory_bytes > 0 || !has_memory ? c->options.memory_bytes : SIZE_MAX;
    int64_t most = INT32_MAX / c->block_tokens;
    if (c->options.max_tokens > 0) most = hkv_min_i64(most, blocks_for_tokens(c));
    if (bound == 0) return set_size(c, (int32_t)most, &n_bytes, error);
    HKV_TRY(set_size(c, 1, &n_bytes, error));
    if (n_bytes > bound) return fail_small(c, "memory_bytes", bound, n_bytes, "", error);
    if (!fits_memory(c))
        return fail_small(c, "memory", c->options.memory.n_bytes, device_bytes(c), HKV_MEMORY_LOST, error);
    int32_t lowest = 1, highest = (int32_t)most; /* lowest fits */
    while (lowest < highest) {
        int32_t middle = lowest + (highest - lowest + 1) / 2;
        if (fits(c, middle, bound))
            lowest = middle;
        else
            highest = middle - 1;
    }
    return set_size(c, lowest, &n_bytes, error);
}

/* ------------------------------------------------------------------------------------------------------ placement */

static hkv_status alloc_arena(const hkv_cache *c, hkv_arena *arena, const hkv_backend *backend, int32_t device_index,
                              hkv_error *error)
{
    void *base = hkv_memory_align(c->options.memory).base;
    if (!is_in_memory(c, arena)) HKV_TRY(backend->alloc(device_index, c->options.allocator, arena->size, &base, error));
    arena->base = base;
    return HKV_OK;
}

static void release_arena(const hkv_arena *arena, const hkv_backend *backend, int32_t device_index,
                          const hkv_allocator *allocator, bool is_in_memory)
{
    if (arena->base != NULL && !is_in_memory) backend->release(device_index, allocator, arena->base, arena->size);
}

/* Host memory of the CPU comes from its backend too, which knows about huge pages. */
static hkv_status alloc_arenas(hkv_cache *c, hkv_error *error)
{
    HKV_TRY(alloc_arena(c, &c->host_arena, hkv_backend_cpu(), 0, error));
    if (c->is_device) {
        hkv_status status = alloc_arena(c, &c->device_arena, c->backend, c->options.device_index, error);
        if (status != HKV_OK) {
            release_arena(&c->host_arena, hkv_backend_cpu(), 0, c->options.allocator, is_in_memory(c, &c->host_arena));
            return status;
        }
    }
    return HKV_OK;
}

/* What points into the cache itself. */
static void adjust_pointers(hkv_cache *c)
{
    c->prefix.pools = c->pools;
    c->prefix.windows = c->windows;
    if (c->options.allocator != NULL) {
        c->allocator = *c->options.allocator;
        c->options.allocator = &c->allocator;
    }
    for (int32_t group = 0; group < c->n_groups; group++) {
        hkv_cache_group *g = &c->groups[group];
        g->store_allocator = (hkv_allocator){store_alloc, store_release, &g->store_arena};
    }
}

hkv_status hkv_cache_place(const hkv_cache *draft, hkv_cache **placed, hkv_error *error)
{
    hkv_cache copy = *draft;
    copy.host_arena.size = copy.host_arena.used;
    copy.device_arena.size = copy.device_arena.used;
    HKV_TRY(alloc_arenas(&copy, error));
    lay_out(&copy);
    *placed = (hkv_cache *)copy.host_arena.base;
    **placed = copy;
    adjust_pointers(*placed);
    return HKV_OK;
}

void hkv_cache_release_memory(hkv_cache *c)
{
    const hkv_allocator allocator = c->allocator;
    const hkv_allocator *used = c->options.allocator == NULL ? NULL : &allocator;
    const hkv_arena host_arena = c->host_arena; /* in which the cache itself lies */
    const bool is_lent = is_in_memory(c, &c->host_arena);
    release_arena(&c->device_arena, c->backend, c->options.device_index, used, is_in_memory(c, &c->device_arena));
    release_arena(&host_arena, hkv_backend_cpu(), 0, used, is_lent);
}
