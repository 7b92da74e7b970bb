/* cache.h - what the files of managed mode share: cache.c (creation, reading), cache_memory.c (who gets how much),
 * cache_sequence.c (sequences), cache_step.c (steps), cache_check.c (invariants).
 *
 * Layers with the same window form a group: one store, one pool of blocks, one block table per sequence. Group 0, the
 * trunk, is that of the layers without a window and has a block for every logical block of every sequence. A model that
 * has only windowed layers gets a trunk without store and pages: it still carries tokens and prefixes.
 *
 * Block tables are indexed by logical block. Between steps, entries first_block .. n_blocks-1 of a sequence are blocks
 * and all others of a windowed group are 0; first_block follows the window, one block late, so that a few tokens can be
 * taken back (hkv_cache_truncate). Every entry holds a reference. A step adds references to the blocks that it copies
 * from.
 *
 * All memory is one arena:
 *   [hkv_cache | sequences | tables, pools | prefix | arrays of a step | per group: store, pages]
 * On a device, pages and a second copy of the step's arrays are one allocation there, and stores allocate for
 * themselves.
 */
#ifndef HKV_CACHE_H
#define HKV_CACHE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "backend.h"
#include "block_pool.h"
#include "hkv.h"
#include "internal.h"
#include "prefix.h"
#include "store.h"

/* What memory is for; hkv_cache_stats has a field for each. */
typedef enum hkv_memory_kind {
    HKV_MEMORY_RECORD,
    HKV_MEMORY_HOT,
    HKV_MEMORY_DIRECTORY,
    HKV_MEMORY_TABLE,
    HKV_MEMORY_PREFIX,
    HKV_MEMORY_WORKSPACE,
    HKV_MEMORY_UNUSED,
    HKV_MEMORY_N_KINDS
} hkv_memory_kind;

/* Memory handed out front to back. base = NULL only counts. */
typedef struct hkv_arena {
    uint8_t *base;
    size_t size, used;
} hkv_arena;

typedef struct hkv_cache_sequence {
    int64_t n_tokens;
    uint32_t generation; /* high half of the handle */
    bool is_live;
    int32_t next_free;
    int32_t row;  /* scratch of hkv_cache_find_rows, -1 between calls */
    int32_t root; /* of the prefix tree */
    int32_t first_block[HKV_MAX_LAYER_GROUPS];
    /* Tokens that add_sequence named and that are still to come: a list of pages of T tokens, one per logical block. */
    int32_t pending_page;
    int64_t pending_first_block; /* of the list's first page: n_tokens / T between steps */
    int64_t pending_end;         /* the tokens end before this position; 0 = there are none */
} hkv_cache_sequence;

/* A group's arrays of a step, the same on host and device. */
typedef struct hkv_cache_arrays {
    int32_t *block_table;  /* [max_sequences, table_width] */
    int64_t *slot_mapping; /* [max_step_tokens] */
    int32_t *copy_sources; /* [max_sequences] */
} hkv_cache_arrays;

/* Those that all groups share: one piece of memory. */
typedef struct hkv_cache_shared_arrays {
    int64_t *clock;         /* [1] */
    int32_t *cu_new_tokens; /* [max_sequences + 1] */
    int32_t *seq_lens;      /* [max_sequences] */
} hkv_cache_shared_arrays;

typedef struct hkv_cache_group {
    int32_t window_tokens; /* 0 = none */
    int32_t kept_tokens;   /* window and what can be taken back; 0 = all */
    int32_t n_layers;      /* 0: the trunk of a model without full layers */
    int32_t n_blocks;      /* null block included */
    int32_t n_hot_pages;
    int32_t *tables; /* [max_sequences, table_width] */
    uint8_t *pages;  /* [n_layers, n_blocks, Hkv, record_bytes] */
    hkv_store *store;
    hkv_allocator store_allocator; /* hands out store_arena */
    hkv_arena store_arena;
    size_t store_bytes;      /* of the store, but for store_memory */
    size_t hot_bytes;        /* of either its hot pages */
    hkv_memory store_memory; /* on a device: the store's part of options.memory; base NULL: it allocates */
    hkv_cache_arrays host, device;
    hkv_batch batch; /* of the open step */
    bool has_begun;  /* the store knows the open step */
} hkv_cache_group;

typedef struct hkv_cache_row {
    int32_t sequence; /* index */
    int32_t n_new;
    int64_t n_old; /* length before the step */
} hkv_cache_row;

typedef struct hkv_cache_step {
    bool is_open;
    bool has_token_ids;
    int32_t n_rows;
    int64_t n_tokens, max_length;
    int32_t max_row_tokens;
    int32_t n_attended;
    bool *is_attended;   /* [n_layers] */
    hkv_cache_row *rows; /* [max_sequences] */
    void *stream;        /* of the step's begin, then of its last attend */
} hkv_cache_step;

typedef struct hkv_cache_layer {
    int32_t group;
    int32_t idx; /* in its group's store */
} hkv_cache_layer;

struct hkv_cache {
    hkv_cache_options options; /* as given; its pointers are kept where hkv.h says so */
    const hkv_backend *backend;
    bool is_device; /* memory of the backend is not host memory */
    hkv_format format;
    int32_t block_tokens; /* T */
    int32_t n_layers, max_sequences;
    int64_t max_step_tokens;
    int32_t table_width; /* logical blocks of the longest sequence */
    int64_t max_length;  /* tokens of the longest sequence */

    int32_t n_groups;
    hkv_cache_group groups[HKV_MAX_LAYER_GROUPS];
    hkv_block_pool pools[HKV_MAX_LAYER_GROUPS];
    int32_t windows[HKV_MAX_LAYER_GROUPS];
    hkv_cache_layer *layers; /* [n_layers] */

    hkv_cache_sequence *sequences; /* [max_sequences] */
    hkv_cache_sequence *moved;     /* [max_sequences] scratch of reorder */
    int32_t free_sequence;         /* -1 = none */
    int32_t n_sequences;

    hkv_prefix prefix;
    int64_t *pending_tokens; /* [table_width, T] */
    int32_t *pending_next;   /* [table_width], -1 = end */
    int32_t pending_free;    /* -1 = none */
    int64_t n_prefix_queries, n_prefix_hits;

    hkv_cache_step step;
    hkv_cache_shared_arrays host_arrays, device_arrays;
    size_t shared_array_bytes;
    uint8_t *zeros; /* one token of K or V, in the backend's memory */

    size_t bytes_of[HKV_MEMORY_N_KINDS];
    hkv_arena host_arena, device_arena;
    hkv_allocator allocator; /* options.allocator points here if one was given */
    int64_t process_id;
    atomic_bool is_busy;
};

/* ------------------------------------------------------------------------------------------------------- entering */

/* Public functions run between enter and leave. enter: HKV_ERR_BUSY, or HKV_ERR_STALE in a child of fork(). */
hkv_status hkv_cache_enter(hkv_cache *cache, hkv_error *error);
void hkv_cache_leave(hkv_cache *cache);
/* HKV_ERR_STATE while a step is open; HKV_ERR_RANGE for a layer that does not exist. */
hkv_status hkv_cache_check_closed(const hkv_cache *cache, hkv_error *error);
hkv_status hkv_cache_check_layer(const hkv_cache *cache, int32_t layer_idx, hkv_error *error);

/* ------------------------------------------------------------------------------------------------ small questions */

static inline int32_t *hkv_cache_table(const hkv_cache *cache, int32_t group, int32_t sequence)
{
    return cache->groups[group].tables + (size_t)sequence * (size_t)cache->table_width;
}
static inline int64_t hkv_cache_n_blocks(const hkv_cache *cache, int64_t n_tokens)
{
    return (n_tokens + cache->block_tokens - 1) / cache->block_tokens;
}
/* First logical block that a group keeps for a sequence of n_tokens. */
static inline int64_t hkv_cache_first_kept(const hkv_cache *cache, int32_t group, int64_t n_tokens)
{
    return hkv_window_first_block(cache->groups[group].kept_tokens, n_tokens, cache->block_tokens);
}
static inline int32_t hkv_min_i32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}
static inline int32_t hkv_max_i32(int32_t a, int32_t b)
{
    return a > b ? a : b;
}
static inline int64_t hkv_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t hkv_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ------------------------------------------------------------------------------------------------- cache_memory.c */

/* Choose the number of blocks: as many as the bounds in options allow. Sets everything that depends on it, with
 * pointers still NULL. HKV_ERR_BUDGET_SMALL says how many bytes one block needs. */
hkv_status hkv_cache_choose_size(hkv_cache *cache, hkv_error *error);
/* Allocate, and point everything into it. *placed is the cache in its own arena. */
hkv_status hkv_cache_place(const hkv_cache *draft, hkv_cache **placed, hkv_error *error);
/* Give the memory back, the cache itself included. */
void hkv_cache_release_memory(hkv_cache *cache);
/* What the store of a group is made with. */
hkv_store_options hkv_cache_store_options(const hkv_cache *cache, int32_t group);

/* ----------------------------------------------------------------------------------------------- cache_sequence.c */

/* All slots free, with new generations. */
void hkv_cache_reset_sequences(hkv_cache *cache);
/* The index of a live sequence, or HKV_ERR_STALE naming `argument`. */
hkv_status hkv_cache_find(const hkv_cache *cache, hkv_sequence sequence, const char *argument, int32_t *idx,
                          hkv_error *error);
/* Find n different sequences; step.rows gets their indices. */
hkv_status hkv_cache_find_rows(hkv_cache *cache, const hkv_sequence *sequences, int32_t n, hkv_error *error);
hkv_status hkv_cache_check_token_ids(const int64_t *token_ids, int64_t n_tokens, hkv_error *error);
/* Make the full blocks among logical blocks first .. end-1 findable, as far as their tokens are known. */
void hkv_cache_register_blocks(hkv_cache *cache, int32_t sequence, int64_t first, int64_t end);
/* Let go of blocks that fell out of the windows. */
void hkv_cache_slide_windows(hkv_cache *cache, int32_t sequence);
/* Note the tokens written at positions first .. first+n-1: token_ids, or where NULL those that add_sequence named. */
void hkv_cache_write_tokens(hkv_cache *cache, int32_t sequence, int64_t first, int64_t n_tokens,
                            const int64_t *token_ids);
/* Drop the pages of named tokens before position n_tokens, or all. */
void hkv_cache_consume_pending(hkv_cache *cache, int32_t sequence, int64_t n_tokens);
void hkv_cache_drop_pending(hkv_cache *cache, int32_t sequence);

#endif
