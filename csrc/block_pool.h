/* block_pool.h - which physical blocks of a layer group are free, in use, or kept for reuse.
 *
 * A block is in exactly one of three states:
 *   live    n_refs > 0: sequences (and copies of the open step) refer to it
 *   cached  n_refs = 0 and node != 0: its tokens can be found again; in a list ordered by last use
 *   free    n_refs = 0 and node = 0: on a stack
 * All arrays belong to the caller. Nothing here can fail: the caller asks for blocks only after counting them.
 */
#ifndef HKV_BLOCK_POOL_H
#define HKV_BLOCK_POOL_H

#include <stdint.h>

typedef struct hkv_block_pool {
    int32_t n_blocks;  /* including block 0, the null block, which is never handed out */
    int32_t n_free;    /* blocks on the stack */
    int32_t n_cached;  /* blocks in the list */
    int32_t free_head; /* top of the stack, 0 = empty */
    int32_t *n_refs;   /* [n_blocks] */
    int32_t *node;     /* [n_blocks] prefix node that knows the block's tokens, 0 = none */
    /* [n_blocks] stack (next only) or list, oldest first. Entry 0 is the ring's anchor: next = oldest, prev = newest.
     */
    int32_t *next, *prev;
} hkv_block_pool;

/* Every block becomes free. */
void hkv_block_pool_reset(hkv_block_pool *pool);

/* Blocks that can be handed out: free ones now, cached ones after they were forgotten. */
static inline int32_t hkv_block_pool_n_available(const hkv_block_pool *pool)
{
    return pool->n_free + pool->n_cached;
}
static inline int32_t hkv_block_pool_n_live(const hkv_block_pool *pool)
{
    return pool->n_blocks - 1 - hkv_block_pool_n_available(pool);
}
/* The cached block that was released first; 0 if there is none. */
static inline int32_t hkv_block_pool_oldest(const hkv_block_pool *pool)
{
    return pool->next[0];
}

/* Hand out a free block with one reference; n_free > 0. */
int32_t hkv_block_pool_take(hkv_block_pool *pool);
/* Add a reference to a live or cached block. */
void hkv_block_pool_retain(hkv_block_pool *pool, int32_t block);
/* Drop a reference. The last one makes the block the newest cached one, or free. */
void hkv_block_pool_release(hkv_block_pool *pool, int32_t block);
/* Tie a block to a prefix node (0: to none), which moves a block without references between the cached and the free. */
void hkv_block_pool_set_node(hkv_block_pool *pool, int32_t block, int32_t node);
/* Make a cached block the newest. */
void hkv_block_pool_touch(hkv_block_pool *pool, int32_t block);

#endif
