/* prefix.h - finds blocks again by their tokens.
 *
 * A tree of nodes, one per different content: a node stands for the tokens of one block after the tokens of its parent.
 * Below a root (one per salt) a path spells the beginning of a sequence.
 *
 *   root(salt) ── node(t0..t63) ── node(t64..t127) ── node(t128..t140)    the last one is a partial tail: no children
 *                      │
 *            trunk blocks with this content (first_block, next_same), and one companion block per windowed group
 *
 * The trunk is the pool in which every logical block of every sequence has a block (group 0). Blocks of the other
 * groups are found through the node of the trunk's block, so that one walk decides for all groups.
 *
 * A node is found by a keyed hash that chains over its parent, and is taken only if parent and tokens are equal: a
 * collision costs time, never shares. It lives as long as a trunk block has its content. Sequences let go of their
 * blocks from the last to the first, so that in the order of eviction children come before parents and a node that goes
 * has none.
 */
#ifndef HKV_PREFIX_H
#define HKV_PREFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "block_pool.h"
#include "hkv.h"

/* Layer groups of one cache. */
#define HKV_MAX_LAYER_GROUPS 8
/* Children that a search for part of a block looks at, newest first. */
#define HKV_PREFIX_MAX_SIBLINGS 64

typedef struct hkv_prefix_node {
    uint64_t hash;
    uint64_t salt[2];    /* root: keyed digest of its salt */
    int32_t parent;      /* 0 for a root */
    int32_t n_tokens;    /* T; less for a partial tail; 0 for a root */
    int32_t first_child; /* newest */
    int32_t next_sibling;
    int32_t prev_sibling;
    int32_t next_in_bucket; /* or the next free node */
    int32_t first_block;    /* trunk block; others through next_same */
    int32_t n_users;        /* root: sequences that grow below it */
} hkv_prefix_node;

/* Memory belongs to the caller (hkv_cache's arena); nodes == NULL: reuse is off and every function does nothing. */
typedef struct hkv_prefix {
    int32_t block_tokens; /* T */
    int32_t n_groups;     /* trunk included */
    int32_t n_nodes;      /* capacity, node 0 (none) included: hkv_prefix_n_nodes */
    int32_t n_buckets;    /* a power of two */
    uint64_t key[2];
    uint64_t hash_mask;     /* all ones but in tests */
    uint64_t format_id;     /* what makes payload incompatible: part of every root's digest */
    const int32_t *windows; /* [n_groups] sliding window, 0 = none */
    hkv_block_pool *pools;  /* [n_groups] */
    hkv_prefix_node *nodes; /* [n_nodes] */
    int32_t *buckets;       /* [n_buckets] first node */
    int32_t *companions;    /* [n_groups - 1, n_nodes] block of a windowed group, 0 = none */
    int64_t *tokens;        /* [trunk blocks, T] */
    int32_t *n_known;       /* [trunk blocks] leading tokens of the block that are known */
    int32_t *next_same;     /* [trunk blocks] next trunk block of the same node */
    int32_t free_node;
    int64_t n_evicted; /* blocks */
} hkv_prefix;

/* Nodes for any content of a trunk of n_blocks (null block included) and max_sequences salts in use. */
size_t hkv_prefix_n_nodes(int32_t n_blocks, int32_t max_sequences);
/* Forget everything; the pools are reset by their owner. */
void hkv_prefix_reset(hkv_prefix *prefix);

/* The root of a salt, made if there is none, with one more user. 0 if reuse is off. */
int32_t hkv_prefix_acquire_root(hkv_prefix *prefix, const void *salt, size_t salt_bytes);
void hkv_prefix_retain_root(hkv_prefix *prefix, int32_t root);
void hkv_prefix_release_root(hkv_prefix *prefix, int32_t root);

/* What hkv_prefix_match found: n_tokens leading tokens are cached; path[i] is the node of logical block i. */
typedef struct hkv_prefix_hit {
    int64_t n_tokens;
    int32_t n_path; /* blocks, the last of which may be reused in part */
} hkv_prefix_hit;
/* The longest beginning of tokens [n_tokens] that every group holds. path: room for ceil(n_tokens / T) nodes. */
hkv_prefix_hit hkv_prefix_match(const hkv_prefix *prefix, int32_t root, const int64_t *tokens, int64_t n_tokens,
                                int32_t *path);
/* A block of a group with the content of a node; 0 if a windowed group has none. */
int32_t hkv_prefix_block_of(const hkv_prefix *prefix, int32_t group, int32_t node);

/* Note tokens [n_tokens] written to a trunk block from `offset` on; NULL = unknown. */
void hkv_prefix_write_tokens(hkv_prefix *prefix, int32_t block, int32_t offset, const int64_t *tokens,
                             int32_t n_tokens);
/* `target` starts with the first n_tokens of `source`. */
void hkv_prefix_copy_tokens(hkv_prefix *prefix, int32_t target, int32_t source, int32_t n_tokens);

/* Make the first n_tokens of a live trunk block, all known, findable below `parent`; n_tokens < T: as a partial tail.
 * Returns the block's node, or 0 if what it holds of a partial tail is findable already. */
int32_t hkv_prefix_add_block(hkv_prefix *prefix, int32_t parent, int32_t block, int32_t n_tokens);
/* Tie a live block of a windowed group to a node, unless either has a partner. */
void hkv_prefix_add_companion(hkv_prefix *prefix, int32_t group, int32_t node, int32_t block);
/* Tokens that must stay in a block because they can be found there. */
int32_t hkv_prefix_n_findable(const hkv_prefix *prefix, int32_t group, int32_t block);
/* Cut a block's ties; with the last trunk block of a node goes all that is below it. */
void hkv_prefix_forget_block(hkv_prefix *prefix, int32_t group, int32_t block);

/* Drop a reference to a block. Of several trunk blocks with the same content only one is kept without references. */
void hkv_prefix_release_block(hkv_prefix *prefix, int32_t group, int32_t block);
/* Hand out a block, giving up the oldest cached one if none is free; one must be available. */
int32_t hkv_prefix_take_block(hkv_prefix *prefix, int32_t group);

/* First logical block that a query at position n_tokens reads. */
static inline int64_t hkv_window_first_block(int32_t window_tokens, int64_t n_tokens, int32_t block_tokens)
{
    int64_t first_token = n_tokens - window_tokens + 1;
    return window_tokens == 0 || first_token < 0 ? 0 : first_token / block_tokens;
}

/* Walk all invariants; HKV_ERR_STATE names the first broken one. */
hkv_status hkv_prefix_check(const hkv_prefix *prefix, hkv_error *error);

/* SipHash-2-4 (Aumasson and Bernstein) of 64-bit words in little-endian byte order. */
uint64_t hkv_siphash(const uint64_t key[2], const uint64_t *words, size_t n_words);

#endif
