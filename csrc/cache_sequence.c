/* cache_sequence.c - sequences: their handles, blocks and named tokens. */
#include "cache.h"

#include <inttypes.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------------------- handles */

static hkv_sequence handle_of(const hkv_cache *c, int32_t idx)
{
    return (hkv_sequence)c->sequences[idx].generation << 32 | (hkv_sequence)(idx + 1);
}

hkv_status hkv_cache_find(const hkv_cache *c, hkv_sequence sequence, const char *argument, int32_t *idx,
                          hkv_error *error)
{
    int64_t slot = (int64_t)(sequence & UINT32_MAX) - 1;
    *idx = -1; /* defined on failure too, which compilers cannot know of HKV_TRY */
    if (slot < 0 || slot >= c->max_sequences || !c->sequences[slot].is_live ||
        c->sequences[slot].generation != (uint32_t)(sequence >> 32))
        return hkv_error_set(error, HKV_ERR_STALE, argument,
                             "%s: 0x%" PRIx64 " is no sequence of this cache; it may have been freed", argument,
                             sequence);
    *idx = (int32_t)slot;
    return HKV_OK;
}

static void free_slot(hkv_cache *c, int32_t idx)
{
    hkv_cache_sequence *s = &c->sequences[idx];
    *s = (hkv_cache_sequence){.generation = s->generation + 1, .row = -1, .next_free = c->free_sequence};
    c->free_sequence = idx;
}

void hkv_cache_reset_sequences(hkv_cache *c)
{
    c->n_sequences = 0;
    c->free_sequence = -1;
    for (int32_t idx = c->max_sequences - 1; idx >= 0; idx--) free_slot(c, idx);
    c->pending_free = -1;
    for (int32_t page = c->table_width - 1; c->pending_next != NULL && page >= 0; page--) {
        c->pending_next[page] = c->pending_free;
        c->pending_free = page;
    }
}

/* A live sequence without content. */
static hkv_status take_slot(hkv_cache *c, int32_t *idx, hkv_error *error)
{
    *idx = c->free_sequence;
    if (*idx < 0)
        return hkv_error_set(error, HKV_ERR_CACHE_FULL, "max_sequences", "all %" PRId32 " sequences are in use",
                             c->max_sequences);
    c->free_sequence = c->sequences[*idx].next_free;
    c->sequences[*idx].is_live = true;
    c->n_sequences++;
    return HKV_OK;
}

/* ---------------------------------------------------------------------------------------- tokens named in advance */

static int64_t *pending_page(const hkv_cache *c, int32_t page)
{
    return c->pending_tokens + (size_t)page * (size_t)c->block_tokens;
}

/* Note tokens [n_tokens], of which the first n_cached are in the sequence. What finds no page stays unknown. */
static void name_tokens(hkv_cache *c, int32_t idx, const int64_t *tokens, int64_t n_tokens, int64_t n_cached)
{
    hkv_cache_sequence *s = &c->sequences[idx];
    int32_t *link = &s->pending_page;
    int64_t block_tokens = c->block_tokens;
    for (int64_t first = n_cached / block_tokens * block_tokens; first < n_tokens && c->pending_free >= 0;
         first += block_tokens) {
        int64_t n = hkv_min_i64(n_tokens - first, block_tokens);
        *link = c->pending_free;
        c->pending_free = c->pending_next[*link];
        memcpy(pending_page(c, *link), tokens + first, (size_t)n * sizeof *tokens);
        s->pending_end = first + n;
        link = &c->pending_next[*link];
        *link = -1;
    }
}

void hkv_cache_write_tokens(hkv_cache *c, int32_t idx, int64_t first, int64_t n_tokens, const int64_t *token_ids)
{
    const hkv_cache_sequence *s = &c->sequences[idx];
    const int32_t *table = hkv_cache_table(c, 0, idx);
    int32_t page = s->pending_page;
    for (int64_t position = first, end; position < first + n_tokens; position = end) {
        int64_t block = position / c->block_tokens;
        int32_t offset = (int32_t)(position % c->block_tokens);
        const int64_t *tokens = token_ids == NULL ? NULL : token_ids + (position - first);
        end = hkv_min_i64((block + 1) * c->block_tokens, first + n_tokens);
        int64_t known_end = end;
        if (tokens == NULL && position < s->pending_end) {
            tokens = pending_page(c, page) + offset;
            known_end = hkv_min_i64(end, s->pending_end);
            page = c->pending_next[page];
        }
        hkv_prefix_write_tokens(&c->prefix, table[block], offset, tokens, (int32_t)(known_end - position));
    }
}

void hkv_cache_consume_pending(hkv_cache *c, int32_t idx, int64_t n_tokens)
{
    hkv_cache_sequence *s = &c->sequences[idx];
    int64_t end = n_tokens >= s->pending_end ? hkv_cache_n_blocks(c, s->pending_end) : n_tokens / c->block_tokens;
    if (s->pending_end == 0) return;
    for (; s->pending_first_block < end; s->pending_first_block++) {
        int32_t page = s->pending_page;
        s->pending_page = c->pending_next[page];
        c->pending_next[page] = c->pending_free;
        c->pending_free = page;
    }
    if (n_tokens >= s->pending_end) s->pending_end = 0;
}

void hkv_cache_drop_pending(hkv_cache *c, int32_t idx)
{
    hkv_cache_consume_pending(c, idx, INT64_MAX);
}

/* --------------------------------------------------------------------------------------------------- registration */

/* The node below which logical block `block` belongs; 0 if what comes before it is not findable. */
static int32_t parent_of(const hkv_cache *c, int32_t idx, int64_t block)
{
    if (block == 0) return c->sequences[idx].root;
    int32_t previous = hkv_cache_table(c, 0, idx)[block - 1];
    bool is_full = hkv_prefix_n_findable(&c->prefix, 0, previous) == c->block_tokens;
    return is_full ? c->pools[0].node[previous] : 0;
}

static void add_companions(hkv_cache *c, int32_t idx, int64_t block, int32_t node)
{
    for (int32_t group = 1; group < c->n_groups; group++) {
        int32_t companion = hkv_cache_table(c, group, idx)[block];
        if (companion != 0) hkv_prefix_add_companion(&c->prefix, group, node, companion);
    }
}

void hkv_cache_register_blocks(hkv_cache *c, int32_t idx, int64_t first, int64_t end)
{
    const int32_t *table = hkv_cache_table(c, 0, idx);
    for (int64_t block = first; block < end; block++) {
        int32_t parent = parent_of(c, idx, block), n_tokens = c->block_tokens;
        if (parent == 0 || c->prefix.n_known[table[block]] < n_tokens) return;
        hkv_prefix_forget_block(&c->prefix, 0, table[block]); /* it may be findable as a partial tail */
        add_companions(c, idx, block, hkv_prefix_add_block(&c->prefix, parent, table[block], n_tokens));
    }
}

/* Can the tail of a sequence that ends, `n_tokens` of its last block, be made findable in every group? */
static bool tail_is_ours(const hkv_cache *c, int32_t idx, int64_t block, int32_t n_tokens)
{
    for (int32_t group = 0; group < c->n_groups; group++) {
        int32_t physical = hkv_cache_table(c, group, idx)[block];
        if (c->pools[group].n_refs[physical] > 1) return false;
        if (hkv_prefix_n_findable(&c->prefix, group, physical) >= n_tokens) return false;
    }
    return true;
}

static void register_tail(hkv_cache *c, int32_t idx)
{
    int64_t block = c->sequences[idx].n_tokens / c->block_tokens;
    int32_t n_tokens = (int32_t)(c->sequences[idx].n_tokens % c->block_tokens), parent, node;
    if (n_tokens == 0 || (parent = parent_of(c, idx, block)) == 0) return;
    int32_t tail = hkv_cache_table(c, 0, idx)[block];
    n_tokens = hkv_min_i32(n_tokens, c->prefix.n_known[tail]);
    if (n_tokens == 0 || !tail_is_ours(c, idx, block, n_tokens)) return;
    for (int32_t group = 0; group < c->n_groups; group++)
        hkv_prefix_forget_block(&c->prefix, group, hkv_cache_table(c, group, idx)[block]);
    node = hkv_prefix_add_block(&c->prefix, parent, tail, n_tokens);
    if (node != 0) add_companions(c, idx, block, node);
}

/* --------------------------------------------------------------------------------------------------------- blocks */

/* Let go of logical blocks first .. end-1 of a group, the last first (prefix.h says why). */
static void release_blocks(hkv_cache *c, int32_t group, int32_t idx, int64_t first, int64_t end)
{
    int32_t *table = hkv_cache_table(c, group, idx);
    for (int64_t block = end - 1; block >= first; block--) {
        if (table[block] != 0) hkv_prefix_release_block(&c->prefix, group, table[block]);
        table[block] = 0;
    }
}

static void release_all_blocks(hkv_cache *c, int32_t idx)
{
    const hkv_cache_sequence *s = &c->sequences[idx];
    int64_t n_blocks = hkv_cache_n_blocks(c, s->n_tokens);
    for (int32_t group = 0; group < c->n_groups; group++)
        release_blocks(c, group, idx, s->first_block[group], n_blocks);
}

void hkv_cache_slide_windows(hkv_cache *c, int32_t idx)
{
    hkv_cache_sequence *s = &c->sequences[idx];
    for (int32_t group = 1; group < c->n_groups; group++) {
        int32_t first = (int32_t)hkv_cache_first_kept(c, group, s->n_tokens);
        if (first <= s->first_block[group]) continue;
        release_blocks(c, group, idx, s->first_block[group], first);
        s->first_block[group] = first;
    }
}

/* target [table_width] shares blocks first .. end-1 of `source`. */
static void share_blocks(hkv_cache *c, int32_t group, int32_t *target, const int32_t *source, int64_t first,
                         int64_t end)
{
    if (first > 0) memset(target, 0, (size_t)first * sizeof *target);
    for (int64_t block = first; block < end; block++) {
        target[block] = source[block];
        hkv_block_pool_retain(&c->pools[group], source[block]);
    }
}

/* ------------------------------------------------------------------------------------------------------------ add */

/* The new sequence idx takes over blocks that the cache holds. Returns its length. */
static int64_t adopt_prefix(hkv_cache *c, int32_t idx, const int64_t *tokens, int64_t n_tokens)
{
    hkv_cache_sequence *s = &c->sequences[idx];
    int32_t *path = c->groups[0].host.block_table; /* free between steps */
    if (c->prefix.nodes == NULL || n_tokens < 2) return 0;
    int64_t n_most = hkv_min_i64(n_tokens - 1, c->max_length);
    hkv_prefix_hit hit = hkv_prefix_match(&c->prefix, s->root, tokens, n_most, path);
    for (int32_t group = 0; group < c->n_groups; group++) {
        int32_t *table = hkv_cache_table(c, group, idx);
        int64_t first = hkv_window_first_block(c->windows[group], hit.n_tokens, c->block_tokens);
        s->first_block[group] = (int32_t)first;
        for (int32_t block = 0; block < hit.n_path; block++) {
            table[block] = block < first ? 0 : hkv_prefix_block_of(&c->prefix, group, path[block]);
            if (block >= first) hkv_block_pool_retain(&c->pools[group], table[block]);
        }
    }
    return hit.n_tokens;
}

static hkv_status check_token_ids(const int64_t *token_ids, int64_t n_tokens, hkv_error *error)
{
    if (n_tokens < 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_tokens", "n_tokens must not be negative, but is %" PRId64,
                             n_tokens);
    if (n_tokens > 0 && token_ids == NULL)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "token_ids", "token_ids is NULL for %" PRId64 " tokens",
                             n_tokens);
    return hkv_cache_check_token_ids(token_ids, n_tokens, error);
}

hkv_status hkv_cache_check_token_ids(const int64_t *token_ids, int64_t n_tokens, hkv_error *error)
{
    for (int64_t i = 0; i < n_tokens; i++)
        if (token_ids[i] < 0)
            return hkv_error_set(error, HKV_ERR_ARGUMENT, "token_ids",
                                 "token_ids[%" PRId64 "] = %" PRId64 " is negative", i, token_ids[i]);
    return HKV_OK;
}

static hkv_status add_sequence(hkv_cache *c, const int64_t *token_ids, int64_t n_tokens, const void *salt,
                               size_t salt_bytes, hkv_sequence *sequence, int64_t *n_cached, hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_check_closed(c, error));
    HKV_TRY(check_token_ids(token_ids, n_tokens, error));
    if (salt == NULL && salt_bytes > 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "salt", "salt is NULL for %zu bytes", salt_bytes);
    HKV_TRY(take_slot(c, &idx, error));
    hkv_cache_sequence *s = &c->sequences[idx];
    s->root = hkv_prefix_acquire_root(&c->prefix, salt, salt_bytes);
    s->n_tokens = adopt_prefix(c, idx, token_ids, n_tokens);
    s->pending_first_block = s->n_tokens / c->block_tokens;
    if (s->root != 0) name_tokens(c, idx, token_ids, n_tokens, s->n_tokens);
    c->n_prefix_queries += n_tokens;
    c->n_prefix_hits += s->n_tokens;
    *sequence = handle_of(c, idx);
    *n_cached = s->n_tokens;
    return HKV_OK;
}

hkv_status hkv_cache_add_sequence(hkv_cache *c, const int64_t *token_ids, int64_t n_tokens, const void *salt,
                                  size_t salt_bytes, hkv_sequence *sequence, int64_t *n_cached, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = add_sequence(c, token_ids, n_tokens, salt, salt_bytes, sequence, n_cached, error);
    hkv_cache_leave(c);
    return status;
}

/* ---------------------------------------------------------------------------------- fork, truncate, reorder, free */

static hkv_status fork_sequence(hkv_cache *c, hkv_sequence sequence, hkv_sequence *forked, hkv_error *error)
{
    int32_t source, target;
    HKV_TRY(hkv_cache_check_closed(c, error));
    HKV_TRY(hkv_cache_find(c, sequence, "sequence", &source, error));
    HKV_TRY(take_slot(c, &target, error));
    const hkv_cache_sequence *from = &c->sequences[source];
    hkv_cache_sequence *to = &c->sequences[target];
    to->n_tokens = from->n_tokens;
    to->root = from->root;
    hkv_prefix_retain_root(&c->prefix, to->root);
    for (int32_t group = 0; group < c->n_groups; group++) {
        to->first_block[group] = from->first_block[group];
        share_blocks(c, group, hkv_cache_table(c, group, target), hkv_cache_table(c, group, source),
                     from->first_block[group], hkv_cache_n_blocks(c, from->n_tokens));
    }
    *forked = handle_of(c, target);
    return HKV_OK;
}

hkv_status hkv_cache_fork(hkv_cache *c, hkv_sequence sequence, hkv_sequence *forked, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = fork_sequence(c, sequence, forked, error);
    hkv_cache_leave(c);
    return status;
}

/* Windowed groups must still have what the next query reads. */
static hkv_status check_windows_reach(const hkv_cache *c, int32_t idx, int64_t n_tokens, hkv_error *error)
{
    const hkv_cache_sequence *s = &c->sequences[idx];
    for (int32_t group = 1; group < c->n_groups; group++) {
        int64_t first_read = hkv_window_first_block(c->windows[group], n_tokens, c->block_tokens);
        if (first_read >= s->first_block[group] || n_tokens == 0) continue;
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_tokens",
                             "n_tokens = %" PRId64 " is too few: layers with a window of %" PRId32
                             " tokens have dropped those before %" PRId64 " (0 is always possible)",
                             n_tokens, c->windows[group], (int64_t)s->first_block[group] * c->block_tokens);
    }
    return HKV_OK;
}

static hkv_status truncate_sequence(hkv_cache *c, hkv_sequence sequence, int64_t n_tokens, hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_check_closed(c, error));
    HKV_TRY(hkv_cache_find(c, sequence, "sequence", &idx, error));
    hkv_cache_sequence *s = &c->sequences[idx];
    if (n_tokens < 0 || n_tokens > s->n_tokens)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_tokens",
                             "n_tokens must be 0 to the sequence's %" PRId64 ", not %" PRId64, s->n_tokens, n_tokens);
    HKV_TRY(check_windows_reach(c, idx, n_tokens, error));
    if (n_tokens == s->n_tokens) return HKV_OK;
    int64_t n_left = hkv_cache_n_blocks(c, n_tokens), n_blocks = hkv_cache_n_blocks(c, s->n_tokens);
    for (int32_t group = 0; group < c->n_groups; group++) {
        int64_t first_kept = s->first_block[group];
        release_blocks(c, group, idx, hkv_max_i64(n_left, first_kept), n_blocks);
        s->first_block[group] = (int32_t)hkv_min_i64(first_kept, n_left);
    }
    hkv_cache_drop_pending(c, idx);
    s->n_tokens = n_tokens;
    return HKV_OK;
}

hkv_status hkv_cache_truncate(hkv_cache *c, hkv_sequence sequence, int64_t n_tokens, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = truncate_sequence(c, sequence, n_tokens, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status find_row(hkv_cache *c, const hkv_sequence *sequences, int32_t row, hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_find(c, sequences[row], "sequences", &idx, error));
    if (c->sequences[idx].row >= 0)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "sequences",
                             "sequences[%" PRId32 "] and sequences[%" PRId32 "] are the same", c->sequences[idx].row,
                             row);
    c->sequences[idx].row = row;
    c->step.rows[row].sequence = idx;
    return HKV_OK;
}

hkv_status hkv_cache_find_rows(hkv_cache *c, const hkv_sequence *sequences, int32_t n, hkv_error *error)
{
    hkv_status status = HKV_OK;
    int32_t n_found = 0;
    if (n < 0 || n > c->max_sequences || (n > 0 && sequences == NULL))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "sequences",
                             "sequences must be an array of 0 to max_sequences = %" PRId32 " handles, not of %" PRId32,
                             c->max_sequences, n);
    while (n_found < n && (status = find_row(c, sequences, n_found, error)) == HKV_OK) n_found++;
    for (int32_t row = 0; row < n_found; row++) c->sequences[c->step.rows[row].sequence].row = -1;
    return status;
}

/* Row i of the tables becomes what row source_idx[i] was; in two passes, since a source may itself be replaced. */
static void move_contents(hkv_cache *c, const int32_t *source_idx, int32_t n)
{
    const hkv_cache_row *rows = c->step.rows;
    for (int32_t i = 0; i < n; i++) {
        int32_t source = rows[source_idx[i]].sequence;
        if (source_idx[i] == i) continue;
        c->moved[i] = c->sequences[source];
        hkv_prefix_retain_root(&c->prefix, c->moved[i].root);
        for (int32_t group = 0; group < c->n_groups; group++)
            share_blocks(c, group, c->groups[group].host.block_table + (size_t)i * (size_t)c->table_width,
                         hkv_cache_table(c, group, source), c->moved[i].first_block[group],
                         hkv_cache_n_blocks(c, c->moved[i].n_tokens));
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t target = rows[i].sequence;
        hkv_cache_sequence *s = &c->sequences[target];
        if (source_idx[i] == i) continue;
        release_all_blocks(c, target);
        hkv_cache_drop_pending(c, target);
        hkv_prefix_release_root(&c->prefix, s->root);
        s->n_tokens = c->moved[i].n_tokens;
        s->root = c->moved[i].root;
        memcpy(s->first_block, c->moved[i].first_block, sizeof s->first_block);
        for (int32_t group = 0; group < c->n_groups; group++)
            memcpy(hkv_cache_table(c, group, target),
                   c->groups[group].host.block_table + (size_t)i * (size_t)c->table_width,
                   (size_t)hkv_cache_n_blocks(c, s->n_tokens) * sizeof(int32_t));
    }
}

static hkv_status reorder(hkv_cache *c, const hkv_sequence *sequences, const int32_t *source_idx, int32_t n,
                          hkv_error *error)
{
    HKV_TRY(hkv_cache_check_closed(c, error));
    HKV_TRY(hkv_cache_find_rows(c, sequences, n, error));
    if (n > 0 && source_idx == NULL)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "source_idx", "source_idx must not be NULL");
    for (int32_t i = 0; i < n; i++)
        if (source_idx[i] < 0 || source_idx[i] >= n)
            return hkv_error_set(error, HKV_ERR_RANGE, "source_idx",
                                 "source_idx[%" PRId32 "] = %" PRId32 " is outside 0..%" PRId32, i, source_idx[i],
                                 n - 1);
    move_contents(c, source_idx, n);
    return HKV_OK;
}

hkv_status hkv_cache_reorder(hkv_cache *c, const hkv_sequence *sequences, const int32_t *source_idx, int32_t n,
                             hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = reorder(c, sequences, source_idx, n, error);
    hkv_cache_leave(c);
    return status;
}

static hkv_status free_sequence(hkv_cache *c, hkv_sequence sequence, hkv_error *error)
{
    int32_t idx;
    HKV_TRY(hkv_cache_check_closed(c, error));
    HKV_TRY(hkv_cache_find(c, sequence, "sequence", &idx, error));
    register_tail(c, idx);
    release_all_blocks(c, idx);
    hkv_cache_drop_pending(c, idx);
    hkv_prefix_release_root(&c->prefix, c->sequences[idx].root);
    free_slot(c, idx);
    c->n_sequences--;
    return HKV_OK;
}

hkv_status hkv_cache_free(hkv_cache *c, hkv_sequence sequence, hkv_error *error)
{
    HKV_TRY(hkv_cache_enter(c, error));
    hkv_status status = free_sequence(c, sequence, error);
    hkv_cache_leave(c);
    return status;
}
