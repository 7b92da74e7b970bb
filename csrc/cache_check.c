/* cache_check.c - what holds between calls, and while a step is open. */
#include "cache.h"

#include <inttypes.h>

static hkv_status broken(hkv_error *error, const char *what, int64_t where, int64_t value)
{
    return hkv_error_set(error, HKV_ERR_STATE, "", "%s: %" PRId64 " has %" PRId64, what, where, value);
}

/* ---------------------------------------------------------------------------------------------------------- pools */

static hkv_status check_stack(const hkv_block_pool *pool, hkv_error *error)
{
    int32_t block = pool->free_head;
    for (int32_t i = 0; i < pool->n_free; i++, block = pool->next[block])
        if (block <= 0 || block >= pool->n_blocks || pool->n_refs[block] != 0 || pool->node[block] != 0)
            return broken(error, "free stack entry is no free block", i, block);
    return block == 0 ? HKV_OK : broken(error, "free stack is longer than its count", pool->n_free, block);
}

static hkv_status check_list(const hkv_block_pool *pool, hkv_error *error)
{
    int32_t block = pool->next[0], previous = 0;
    for (int32_t i = 0; i < pool->n_cached; i++, previous = block, block = pool->next[block]) {
        if (block <= 0 || block >= pool->n_blocks || pool->n_refs[block] != 0 || pool->node[block] == 0)
            return broken(error, "cached list entry is no cached block", i, block);
        if (pool->prev[block] != previous) return broken(error, "cached list is not linked back", block, previous);
    }
    if (block != 0 || pool->prev[0] != previous)
        return broken(error, "cached list does not end at its count", pool->n_cached, block);
    return HKV_OK;
}

static hkv_status check_pool(const hkv_block_pool *pool, hkv_error *error)
{
    int32_t n_free = 0, n_cached = 0;
    HKV_TRY(check_stack(pool, error));
    HKV_TRY(check_list(pool, error));
    for (int32_t block = 1; block < pool->n_blocks; block++) {
        n_free += pool->n_refs[block] == 0 && pool->node[block] == 0;
        n_cached += pool->n_refs[block] == 0 && pool->node[block] != 0;
    }
    if (n_free != pool->n_free) return broken(error, "free blocks are not all on the stack", pool->n_free, n_free);
    if (n_cached != pool->n_cached) return broken(error, "cached blocks are not all listed", pool->n_cached, n_cached);
    if (pool->n_refs[0] != 0 || pool->node[0] != 0)
        return broken(error, "the null block is in use", pool->n_refs[0], pool->node[0]);
    return HKV_OK;
}

/* ----------------------------------------------------------------------------------------------------- references */

/* Add `change` to the count of every block that a table or a copy of the open step refers to. */
static void count_references(const hkv_cache *c, int32_t group, int32_t change)
{
    int32_t *n_refs = c->pools[group].n_refs;
    for (int32_t idx = 0; idx < c->max_sequences; idx++) {
        const hkv_cache_sequence *s = &c->sequences[idx];
        const int32_t *table = hkv_cache_table(c, group, idx);
        for (int64_t block = 0; s->is_live && block < hkv_cache_n_blocks(c, s->n_tokens); block++)
            if (table[block] != 0) n_refs[table[block]] += change;
    }
    for (int32_t r = 0; r < c->step.n_rows; r++) {
        int32_t source = c->groups[group].host.copy_sources[r];
        if (source != 0) n_refs[source] += change;
    }
}

/* Subtract what is known to refer to blocks: nothing may be left. Done in place, since there is no room for a second
 * table of counts; the caller holds the cache. */
static hkv_status check_references(const hkv_cache *c, int32_t group, hkv_error *error)
{
    const hkv_block_pool *pool = &c->pools[group];
    hkv_status status = HKV_OK;
    count_references(c, group, -1);
    for (int32_t block = 1; status == HKV_OK && block < pool->n_blocks; block++)
        if (pool->n_refs[block] != 0)
            status = broken(error, "block is not referred to as often as it counts", block, pool->n_refs[block]);
    count_references(c, group, 1);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ sequences */

static hkv_status check_table(const hkv_cache *c, int32_t group, int32_t idx, hkv_error *error)
{
    const hkv_cache_sequence *s = &c->sequences[idx];
    const int32_t *table = hkv_cache_table(c, group, idx);
    int64_t n_blocks = hkv_cache_n_blocks(c, s->n_tokens);
    int64_t first_read = hkv_window_first_block(c->windows[group], s->n_tokens, c->block_tokens);
    if (s->first_block[group] < 0 || s->first_block[group] > first_read)
        return broken(error, "sequence dropped blocks that its window reads", idx, s->first_block[group]);
    for (int64_t block = 0; block < n_blocks; block++) {
        bool must_exist = !c->step.is_open && block >= s->first_block[group];
        if (table[block] < 0 || table[block] >= c->pools[group].n_blocks || (must_exist && table[block] == 0) ||
            (block < s->first_block[group] && table[block] != 0))
            return broken(error, "block table entry is wrong", block, table[block]);
    }
    return HKV_OK;
}

static hkv_status check_sequences(const hkv_cache *c, hkv_error *error)
{
    int32_t n_live = 0, n_free = 0;
    for (int32_t idx = 0; idx < c->max_sequences; idx++) {
        const hkv_cache_sequence *s = &c->sequences[idx];
        if (s->row != -1) return broken(error, "sequence is marked as a row", idx, s->row);
        if (!s->is_live) continue;
        n_live++;
        if (s->n_tokens < 0 || s->n_tokens > c->max_length)
            return broken(error, "sequence length is out of range", idx, s->n_tokens);
        if ((s->root == 0) != (c->prefix.nodes == NULL)) return broken(error, "sequence root is wrong", idx, s->root);
        for (int32_t group = 0; group < c->n_groups; group++) HKV_TRY(check_table(c, group, idx, error));
    }
    if (n_live != c->n_sequences) return broken(error, "live sequences are miscounted", c->n_sequences, n_live);
    for (int32_t idx = c->free_sequence; idx >= 0 && n_free <= c->max_sequences; idx = c->sequences[idx].next_free)
        n_free++;
    if (n_free + n_live != c->max_sequences) return broken(error, "sequence slots are lost", n_live, n_free);
    return HKV_OK;
}

/* Every page of named tokens is in one list. */
static hkv_status check_pending(const hkv_cache *c, hkv_error *error)
{
    int64_t n_pages = 0;
    if (c->pending_next == NULL) return HKV_OK;
    for (int32_t page = c->pending_free; page >= 0 && n_pages <= c->table_width; page = c->pending_next[page])
        n_pages++;
    for (int32_t idx = 0; idx < c->max_sequences; idx++) {
        const hkv_cache_sequence *s = &c->sequences[idx];
        int32_t page = s->pending_page;
        if (!s->is_live || s->pending_end == 0) continue;
        if (!c->step.is_open &&
            (s->pending_end <= s->n_tokens || s->pending_first_block != s->n_tokens / c->block_tokens))
            return broken(error, "named tokens are not those that come next", idx, s->pending_first_block);
        for (int64_t block = s->pending_first_block; block < hkv_cache_n_blocks(c, s->pending_end); block++) {
            if (page < 0) return broken(error, "named tokens end early", idx, block);
            page = c->pending_next[page];
            n_pages++;
        }
    }
    return n_pages == c->table_width ? HKV_OK
                                     : broken(error, "pages of named tokens are lost", c->table_width, n_pages);
}

/* ----------------------------------------------------------------------------------------- prefix tree and stores */

/* The prefix tree counts its sequences on its roots. */
static hkv_status check_roots(const hkv_cache *c, hkv_error *error)
{
    hkv_status status = HKV_OK;
    if (c->prefix.nodes == NULL) return HKV_OK;
    for (int32_t idx = 0; idx < c->max_sequences; idx++)
        if (c->sequences[idx].is_live) c->prefix.nodes[c->sequences[idx].root].n_users--;
    for (int32_t node = 0; node < c->prefix.n_nodes && status == HKV_OK; node++)
        if (c->prefix.nodes[node].n_users != 0)
            status = broken(error, "root has another number of sequences", node, c->prefix.nodes[node].n_users);
    for (int32_t idx = 0; idx < c->max_sequences; idx++)
        if (c->sequences[idx].is_live) c->prefix.nodes[c->sequences[idx].root].n_users++;
    return status;
}

static hkv_status check_directory(const hkv_cache *c, int32_t group, hkv_error *error)
{
    const hkv_cache_group *g = &c->groups[group];
    int32_t n_pages = 0;
    for (int32_t block = 0; g->store != NULL && block < g->n_blocks; block++) {
        hkv_block_info info;
        HKV_TRY(hkv_store_read_block(g->store, block, &info, error));
        if (info.hot_page >= g->n_hot_pages || info.n_hot_tokens > c->block_tokens ||
            (block == 0 && info.hot_page >= 0))
            return broken(error, "directory entry of a block is wrong", block, info.hot_page);
        n_pages += info.hot_page >= 0;
    }
    return n_pages <= g->n_hot_pages ? HKV_OK : broken(error, "hot pages are used twice", g->n_hot_pages, n_pages);
}

static hkv_status check(const hkv_cache *c, hkv_error *error)
{
    HKV_TRY(check_sequences(c, error));
    HKV_TRY(check_pending(c, error));
    for (int32_t group = 0; group < c->n_groups; group++) {
        HKV_TRY(check_pool(&c->pools[group], error));
        HKV_TRY(check_references(c, group, error));
        HKV_TRY(check_directory(c, group, error));
    }
    HKV_TRY(check_roots(c, error));
    return hkv_prefix_check(&c->prefix, error);
}

hkv_status hkv_cache_check(const hkv_cache *c, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter((hkv_cache *)c, error));
    hkv_status status = check(c, error);
    hkv_cache_leave((hkv_cache *)c);
    return status;
}
