/* block_pool.c - see block_pool.h. */
#include "block_pool.h"

static void stack_push(hkv_block_pool *pool, int32_t block)
{
    pool->next[block] = pool->free_head;
    pool->free_head = block;
    pool->n_free++;
}

static void stack_remove_top(hkv_block_pool *pool)
{
    pool->free_head = pool->next[pool->free_head];
    pool->n_free--;
}

static void list_append(hkv_block_pool *pool, int32_t block)
{
    int32_t newest = pool->prev[0];
    pool->next[block] = 0;
    pool->prev[block] = newest;
    pool->next[newest] = block;
    pool->prev[0] = block;
    pool->n_cached++;
}

static void list_remove(hkv_block_pool *pool, int32_t block)
{
    pool->next[pool->prev[block]] = pool->next[block];
    pool->prev[pool->next[block]] = pool->prev[block];
    pool->n_cached--;
}

void hkv_block_pool_reset(hkv_block_pool *pool)
{
    pool->n_free = 0;
    pool->n_cached = 0;
    pool->free_head = 0;
    pool->n_refs[0] = 0;
    pool->node[0] = 0;
    pool->next[0] = 0;
    pool->prev[0] = 0;
    for (int32_t block = pool->n_blocks - 1; block > 0; block--) { /* so that low ids come first */
        pool->n_refs[block] = 0;
        pool->node[block] = 0;
        pool->prev[block] = 0;
        stack_push(pool, block);
    }
}

int32_t hkv_block_pool_take(hkv_block_pool *pool)
{
    int32_t block = pool->free_head;
    stack_remove_top(pool);
    pool->n_refs[block] = 1;
    return block;
}

void hkv_block_pool_retain(hkv_block_pool *pool, int32_t block)
{
    if (pool->n_refs[block]++ == 0) list_remove(pool, block);
}

void hkv_block_pool_release(hkv_block_pool *pool, int32_t block)
{
    if (--pool->n_refs[block] > 0) return;
    if (pool->node[block] != 0)
        list_append(pool, block);
    else
        stack_push(pool, block);
}

void hkv_block_pool_set_node(hkv_block_pool *pool, int32_t block, int32_t node)
{
    if (pool->n_refs[block] == 0 && pool->node[block] != 0 && node == 0) {
        list_remove(pool, block);
        stack_push(pool, block);
    }
    pool->node[block] = node;
}

void hkv_block_pool_touch(hkv_block_pool *pool, int32_t block)
{
    list_remove(pool, block);
    list_append(pool, block);
}
