/* cpu_step.h - one layer of one step on the CPU: append, then attend (docs/transitions.md, "Per layer").
 *
 * backend_cpu.c owns the vtable and calls, in this order, hkv_cpu_append, hkv_cpu_decode_rows, hkv_cpu_prefill_rows.
 * Each uses the group's workspace alone for the time of its call and says how much of it it needs.
 */
#ifndef HKV_CPU_STEP_H
#define HKV_CPU_STEP_H

#include "backend.h"
#include "cpu_kernels.h"
#include "threads.h"

typedef struct hkv_cpu_step {
    hkv_group *group;
    const hkv_cpu_kernels *kernels;
    hkv_threads *threads;
    const hkv_batch *batch;
    const hkv_attend *args;
    const hkv_layer_pages *layer;
    int32_t layer_idx;
    int32_t group_heads; /* G */
} hkv_cpu_step;

void hkv_cpu_append(const hkv_cpu_step *step);
void hkv_cpu_decode_rows(const hkv_cpu_step *step);
void hkv_cpu_prefill_rows(const hkv_cpu_step *step);

size_t hkv_cpu_append_workspace(const hkv_group *group);
size_t hkv_cpu_decode_workspace(const hkv_group *group);
size_t hkv_cpu_prefill_workspace(const hkv_group *group);

/* ------------------------------------------------------------------------------------------- what the parts share */

#if defined(__GNUC__)
#define HKV_PREFETCH(address) __builtin_prefetch(address)
#else
#define HKV_PREFETCH(address) (void)(address)
#endif

/* Workspace, handed out front to back. With base NULL it only counts what would be handed out. */
typedef struct hkv_cpu_arena {
    uint8_t *base;
    size_t size, used;
} hkv_cpu_arena;

HKV_INLINE size_t hkv_cpu_arena_bytes(size_t n_bytes)
{
    return (n_bytes + 63) / 64 * 64;
}
HKV_INLINE hkv_cpu_arena hkv_cpu_arena_of(const hkv_group *group)
{
    hkv_cpu_arena arena = {(uint8_t *)group->workspace, group->workspace_bytes, 0};
    return arena;
}
HKV_INLINE size_t hkv_cpu_arena_left(const hkv_cpu_arena *arena)
{
    return arena->size - arena->used;
}
/* 64-byte aligned; the caller has made sure that it fits. */
HKV_INLINE void *hkv_cpu_arena_take(hkv_cpu_arena *arena, size_t n_bytes)
{
    void *taken = arena->base ? arena->base + arena->used : NULL;
    arena->used += hkv_cpu_arena_bytes(n_bytes);
    return taken;
}

/* Workers that can have scratch of their own at the same time; the cores of this machine, for sizing. */
int32_t hkv_cpu_max_lanes(void);

/* Some query tokens of a row times some heads of one KV head: what one kernel call works for. Query row i is token
 * first_token + i / n_heads, head kv_head * G + first_head + i % n_heads. */
typedef struct hkv_cpu_tile {
    int32_t row, kv_head;
    int32_t first_head, n_heads;
    int32_t first_token, n_tokens; /* of the row's new tokens */
} hkv_cpu_tile;

/* q [n_heads * n_tokens, DP] receives the queries; *query then describes them. */
void hkv_cpu_load_query(const hkv_cpu_step *step, const hkv_cpu_tile *tile, float *q, hkv_cpu_query *query);

/* Floats that a running softmax of n_rows query rows occupies, and the state on them, emptied. */
size_t hkv_cpu_state_floats(const hkv_format *f, int32_t n_rows);
hkv_cpu_state hkv_cpu_state_clear(const hkv_format *f, int32_t n_rows, float *memory);
/* state += part, row by row. */
void hkv_cpu_state_merge(const hkv_format *f, int32_t n_rows, hkv_cpu_state *state, const hkv_cpu_state *part);
/* Divide, add the sink logits, write output and log-sum-exp; row_lse [n_rows] or NULL receives the latter too. Changes
 * acc. */
void hkv_cpu_store_output(const hkv_cpu_step *step, const hkv_cpu_tile *tile, hkv_cpu_state *state, float *row_lse);

/* Tokens that are older than this step, of logical block `block` of a row, as its KV head reads them; false if there
 * are none. A record comes with the best precision that it has. */
int hkv_cpu_block_source(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t block, hkv_cpu_source *source);
/* New tokens first .. first + n - 1 of a row. */
void hkv_cpu_new_source(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t first_token, int32_t n_tokens,
                        hkv_cpu_source *source);
/* What attends such a source. Fast kernels multiply the value of a token that a query must not see by 0, which leaves
 * NaN of a value that is not finite: if one of the source's tokens first .. first + n - 1 has such a value, the
 * reference takes over. */
const hkv_cpu_kernels *hkv_cpu_new_kernels(const hkv_cpu_step *step, const hkv_cpu_source *source, int32_t first,
                                           int32_t n_tokens);

HKV_INLINE int32_t hkv_cpu_row_block(const hkv_cpu_step *step, int32_t row, int32_t block)
{
    return step->batch->block_table[(int64_t)row * step->batch->block_table_stride + block];
}

/* First logical block of which a query at `position` or later sees anything. */
HKV_INLINE int32_t hkv_cpu_first_block(const hkv_group *group, int64_t position)
{
    int64_t hidden = group->window_tokens > 0 ? position - group->window_tokens + 1 : 0;
    return hidden > 0 ? (int32_t)(hidden / group->format.block_tokens) : 0;
}
/* Blocks that n_tokens tokens reach into. */
HKV_INLINE int32_t hkv_cpu_n_blocks(const hkv_format *f, int64_t n_tokens)
{
    return (int32_t)((n_tokens + f->block_tokens - 1) / f->block_tokens);
}

/* Tokens that a record holds. */
HKV_INLINE int32_t hkv_cpu_record_n_tokens(const hkv_format *f, const uint8_t *record)
{
    return hkv_header_n_tokens((const hkv_record_header *)record, f->block_tokens);
}

#endif
