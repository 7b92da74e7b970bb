/* plan.h - the decisions of a step: docs/transitions.md in code, compiled by C and by CUDA.
 *
 * Plain data and functions on it. A step is planned by a team of lanes that share memory: one lane on the CPU, the
 * threads of one thread block on a GPU. HKV_FOR strides over a loop, HKV_SYNC makes the team's writes visible; on the
 * CPU both are free. Every choice is by index, never by arrival, so the result does not depend on the team.
 */
#ifndef HKV_PLAN_H
#define HKV_PLAN_H

#include "format.h"
#include "hkv.h"

/* Hot/cold state of a group; one entry per block or page. */
typedef struct hkv_directory {
    int32_t *block_page;     /* [n_blocks] hot page of a block, -1 = none */
    uint32_t *block_step;    /* [n_blocks] step that last wrote the block; finds double writes */
    int32_t *page_block;     /* [n_pages] block that a page belongs to, -1 = free */
    uint32_t *page_stamp;    /* [n_pages] */
    int32_t *page_n_tokens;  /* [n_pages] tokens valid from the start */
    int32_t *page_sealed;    /* [n_pages] 1 = the record holds the same tokens */
    uint32_t *page_last_use; /* [n_pages] step number */
    uint32_t *page_role;     /* [n_pages] scratch of a step: HKV_PAGE_* bits, valid where page_last_use = step */
    uint32_t *next_stamp;    /* [1] never 0 */
    uint32_t *step;          /* [1] number of the current step, from 1 */
} hkv_directory;

/* New tokens of one row inside one block. */
typedef struct hkv_segment {
    int32_t row;
    int32_t block;       /* physical */
    int32_t first_token; /* in the flat arrays of the batch */
    int32_t offset;      /* of the first token in the block */
    int32_t n_tokens;
    int32_t page;         /* hot page that is written; -1 = direct (or bits 0) */
    int32_t n_restore;    /* tokens 0 .. n_restore-1 are brought into the page (bits 0: the block) first */
    int32_t restore_page; /* from this page, or -1 = from the record of restore_block */
    int32_t restore_block;
    int32_t seal;    /* 1 = the block is full: write its record */
    int32_t restart; /* 1 = the header is cleared (offset 0, or content from another block) */
    uint32_t stamp;
} hkv_segment;

/* An unsealed page that gives way: its tokens are written to the record first. */
typedef struct hkv_victim {
    int32_t page;
    int32_t block;
    int32_t n_tokens;
    uint32_t stamp;
} hkv_victim;

typedef struct hkv_plan_row {
    int32_t first_token; /* in the flat arrays */
    int32_t n_new;
    int32_t length;       /* L, after the step */
    int32_t window_first; /* first logical block of the window */
    int32_t n_window;     /* blocks in the window */
    int32_t n_sinks;      /* sinks before the window */
} hkv_plan_row;

typedef struct hkv_plan {
    hkv_plan_row *rows;    /* [max_rows] */
    hkv_segment *segments; /* [max_segments] in token order */
    hkv_victim *victims;   /* [n_hot_pages] */
    /* [max_rows, hot_stride] pages of the n_sinks sinks, then of the n_window blocks; -1 = read the record */
    int32_t *hot_pages;
    int32_t hot_stride; /* sink_blocks + ceil((hot_tokens - 1) / T) + 1 */
    int32_t max_segments;
    int32_t *n_segments;    /* [1] */
    int32_t *n_victims;     /* [1] */
    int32_t *failure;       /* [1] 0, or an hkv_status of a refused step */
    int32_t *failure_value; /* [4] what broke it: kind (HKV_PLAN_*), index, value, limit */
} hkv_plan;

/* First logical block of the window of a row of length n_tokens. */
HKV_INLINE int32_t hkv_plan_window_first(int32_t n_tokens, int32_t hot_tokens, int32_t block_tokens)
{
    return n_tokens > hot_tokens ? (n_tokens - hot_tokens) / block_tokens : 0;
}

/* Blocks that a window of hot_tokens can reach into. */
HKV_INLINE int32_t hkv_plan_max_window(int32_t hot_tokens, int32_t block_tokens)
{
    return (hot_tokens - 1 + block_tokens - 1) / block_tokens + 1;
}

/* Hot page from which `row` reads logical block `block`, -1 = its record. */
HKV_INLINE int32_t hkv_plan_hot_page(const hkv_plan *plan, int32_t row, int32_t block)
{
    const hkv_plan_row *r = &plan->rows[row];
    const int32_t *pages = plan->hot_pages + (size_t)row * (size_t)plan->hot_stride;
    if (block < r->n_sinks) return pages[block];
    if (block >= r->window_first && block < r->window_first + r->n_window)
        return pages[r->n_sinks + block - r->window_first];
    return -1;
}

#endif
