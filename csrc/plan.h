/* plan.h - the decisions of a step: docs/transitions.md in code, compiled by C and by CUDA.
 *
 * Plain data and functions on it; hkv_plan_step at the end runs the phases in order. A step is planned by a team of
 * lanes that share memory: one lane on the CPU, the threads of one thread block on a GPU. HKV_FOR strides over a loop,
 * hkv_team_sync makes the team's writes visible; on the CPU both are free. Every choice is by index, never by arrival,
 * so the result does not depend on the team.
 *
 * Nothing here costs time per block of the pool: rows, new tokens, hot pages and the rows' own table entries are all
 * that is looked at.
 */
#ifndef HKV_PLAN_H
#define HKV_PLAN_H

#include "format.h"
#include "hkv.h"

/* A page as it was before a step changed it. */
typedef struct hkv_page_state {
    uint32_t step;     /* the step that changed it, 0 = none */
    int32_t block;     /* page_block */
    int32_t is_linked; /* block_page[block] was this page */
    uint32_t stamp;
    int32_t n_tokens, sealed;
    uint32_t last_use;
} hkv_page_state;

/* Hot/cold state of a group; one entry per block or page. */
typedef struct hkv_directory {
    int32_t *block_page;        /* [n_blocks] hot page of a block, -1 = none */
    uint32_t *block_step;       /* [n_blocks] step that last wrote the block; finds double writes */
    int32_t *page_block;        /* [n_pages] block that a page belongs to, -1 = free */
    uint32_t *page_stamp;       /* [n_pages] */
    int32_t *page_n_tokens;     /* [n_pages] tokens valid from the start */
    int32_t *page_sealed;       /* [n_pages] 1 = the record holds the same tokens */
    uint32_t *page_last_use;    /* [n_pages] step number */
    uint32_t *page_role;        /* [n_pages] scratch of a step: HKV_PAGE_* bits */
    hkv_page_state *page_saved; /* [n_pages] for undoing a step that no layer carried out */
    uint32_t *next_stamp;       /* [1] never 0 */
    uint32_t *step;             /* [1] number of the current step, from 1 */
} hkv_directory;

/* New tokens of one row inside one block. */
typedef struct hkv_segment {
    int32_t row;
    int32_t block;       /* physical */
    int32_t first_token; /* in the flat arrays of the batch */
    int32_t offset;      /* of the first token in the block */
    int32_t n_tokens;
    int32_t page;         /* hot page that is written; -1 = direct (or bits 0) */
    int32_t n_restore;    /* tokens 0 .. n_restore-1 are brought into the page (bits 0: the block) first: */
    int32_t n_held;       /* the first n_held of them from the source, the others become zeros */
    int32_t restore_page; /* source: this page, which may be `page` itself; -1 = the record of restore_block */
    int32_t restore_block;
    int32_t seal;    /* 1 = the block is full: write its record */
    int32_t restart; /* 1 = the header is cleared (offset 0, or content from another block) */
    uint32_t stamp;
    /* The same in every segment of a step: 1 = some segment overwrites what another one restores from. Only then must
     * all restores be over before anything is written; else every segment can be carried out on its own. */
    int32_t is_entangled;
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
    int32_t length;        /* L, after the step */
    int32_t window_first;  /* first logical block of the window */
    int32_t n_window;      /* blocks in the window */
    int32_t n_sinks;       /* sinks before the window */
    int32_t first_segment; /* -1 = the row writes nothing */
} hkv_plan_row;

typedef struct hkv_plan {
    hkv_plan_row *rows;    /* [max_rows] */
    hkv_segment *segments; /* [max_segments] in token order */
    hkv_victim *victims;   /* [n_hot_pages] */
    int32_t *claims;       /* [max_segments] scratch: the segments that claim a page, in order */
    /* [max_rows, hot_stride] pages of the n_sinks sinks, then of the n_window blocks; -1 = read the record */
    int32_t *hot_pages;
    int32_t hot_stride; /* sink_blocks + ceil((hot_tokens - 1) / T) + 1 */
    int32_t max_segments;
    int32_t *n_segments;    /* [1] */
    int32_t *is_appended;   /* [1] begin clears it; the append of any layer sets it to 1 if there are segments */
    int32_t *n_victims;     /* [1] */
    int32_t *failure;       /* [1] 0, or the hkv_status of a refused step, whose plan is empty */
    int32_t *failure_value; /* [4] what broke it: kind (hkv_plan_fault), index, value, limit */
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

/* Hot pages with which a step of at most max_rows rows never has to give up a page that it uses: what the rows' windows
 * and sinks reach, and the block in which a long chunk starts, once for every row that can have one in a step. */
HKV_INLINE int64_t hkv_plan_guaranteed_pages(int64_t max_rows, int64_t max_new_tokens, int32_t hot_tokens,
                                             int32_t block_tokens, int32_t sink_blocks)
{
    int64_t n_long_chunks = max_new_tokens / (hot_tokens + 1);
    if (n_long_chunks > max_rows) n_long_chunks = max_rows;
    return max_rows * (hkv_plan_max_window(hot_tokens, block_tokens) + sink_blocks) + n_long_chunks;
}

/* Segments that a step can have: every row's tokens are consecutive, so only their ends lie in blocks that they share
 * with no other token of the row. */
HKV_INLINE int64_t hkv_plan_max_segments(int64_t max_rows, int64_t max_new_tokens, int32_t block_tokens)
{
    int64_t n = max_new_tokens / block_tokens + 2 * max_rows;
    return n < max_new_tokens ? n : max_new_tokens;
}

/* Tokens that a record holds: 0 unless its header is one of ours. */
HKV_INLINE int32_t hkv_header_n_tokens(const hkv_record_header *header, int32_t block_tokens)
{
    if (header->stamp == 0 || header->version != HKV_FORMAT_VERSION || header->planes == 0) return 0;
    return header->n_valid_tokens <= block_tokens ? header->n_valid_tokens : 0;
}

/* --------------------------------------------------------------------------------------------------------- the team */

enum { /* team.shared: sums of the step, then scratch of hkv_team_rank */
       HKV_TALLY_FAULTS,
       HKV_TALLY_ENTANGLED, /* see hkv_segment */
       HKV_TALLY_TOKENS,    /* appended */
       HKV_TALLY_SEALED,
       HKV_TALLY_DIRECT,
       HKV_TALLY_RESTORED,
       HKV_TALLY_VICTIMS_A, /* candidates of each class */
       HKV_TALLY_VICTIMS_B,
       HKV_TALLY_VICTIMS_C,
       HKV_TALLY_HOT_READ,
       HKV_TALLY_HOT_WANTED,
       HKV_TALLY_COUNT = 16,
       HKV_TEAM_WORDS = HKV_TALLY_COUNT + 32
};
enum { HKV_TEAM_BARRIER = 1 }; /* of a CUDA thread block */

/* Lane `lane` of n_lanes; on CUDA whole warps of one thread block, which HKV_TEAM_BARRIER is left to. */
typedef struct hkv_team {
    int32_t lane, n_lanes;
    int32_t *shared; /* [HKV_TEAM_WORDS] */
} hkv_team;

/* On a GPU a step runs through all this code once, so what counts is how much of it there is: loops stay loops. */
#ifdef __CUDA_ARCH__
#define HKV_ROLLED _Pragma("unroll 1")
#else
#define HKV_ROLLED
#endif
#define HKV_FOR_STEP(i, first, n, step) HKV_ROLLED for (int32_t i = (first); i < (n); i += (step))
#define HKV_FOR(i, n, team)             HKV_FOR_STEP(i, (team)->lane, n, (team)->n_lanes)

HKV_INLINE void hkv_team_sync(const hkv_team *team)
{
    (void)team;
#if defined(__CUDA_ARCH__)
    __barrier_sync_count(HKV_TEAM_BARRIER, (unsigned)team->n_lanes);
#elif defined(HKV_TEST_TEAM) /* lanes as coroutines: tests/c/test_plan_lanes.c */
    hkv_test_team_sync(team->lane);
#endif
}

/* Lanes below this one whose flag (0 or 1) is set; *total of all. Every lane must call it. */
HKV_INLINE int32_t hkv_team_rank(const hkv_team *team, int32_t flag, int32_t *total)
{
#ifdef __CUDA_ARCH__
    int32_t *warp_sums = team->shared + HKV_TALLY_COUNT;
    int32_t warp_lane = team->lane & 31, warp = team->lane >> 5, of_warp;
    unsigned flags = __ballot_sync(0xffffffffu, flag);
    if (warp_lane == 0) warp_sums[warp] = __popc(flags);
    hkv_team_sync(team);
    of_warp = warp_lane < team->n_lanes >> 5 ? warp_sums[warp_lane] : 0;
    hkv_team_sync(team);
    *total = __reduce_add_sync(0xffffffffu, of_warp);
    return __reduce_add_sync(0xffffffffu, warp_lane < warp ? of_warp : 0) + __popc(flags & ((1u << warp_lane) - 1u));
#elif defined(HKV_TEST_TEAM)
    return hkv_test_team_rank(team->lane, team->n_lanes, flag, total);
#else
    (void)team;
    *total = flag;
    return 0;
#endif
}

/* Each returns the old value. */
HKV_INLINE int32_t hkv_team_add(int32_t *word, int32_t n)
{
#ifdef __CUDA_ARCH__
    return atomicAdd(word, n);
#else
    int32_t old = *word;
    *word += n;
    return old;
#endif
}
HKV_INLINE int32_t hkv_team_max(int32_t *word, int32_t n)
{
#ifdef __CUDA_ARCH__
    return atomicMax(word, n);
#else
    int32_t old = *word;
    if (n > old) *word = n;
    return old;
#endif
}
HKV_INLINE uint32_t hkv_team_or(uint32_t *word, uint32_t bits)
{
#ifdef __CUDA_ARCH__
    return atomicOr(word, bits);
#else
    uint32_t old = *word;
    *word |= bits;
    return old;
#endif
}
HKV_INLINE uint32_t hkv_team_exchange(uint32_t *word, uint32_t value)
{
#ifdef __CUDA_ARCH__
    return atomicExch(word, value);
#else
    uint32_t old = *word;
    *word = value;
    return old;
#endif
}

/* -------------------------------------------------------------------------------------------------- what is planned */

/* All inputs of a step. Pointers are on the group's device. */
typedef struct hkv_plan_job {
    int32_t hot_tokens, sink_blocks, block_tokens;
    int32_t is_quantized; /* 0 at bits 0: segments only */
    int32_t n_blocks, n_pages;
    int64_t max_sequence_tokens;
    const uint8_t *headers;     /* record of block 0 in the group's first layer and KV head 0 */
    size_t header_stride_bytes; /* from a block to the next */
    hkv_directory directory;
    hkv_plan plan;
    hkv_batch batch;
    hkv_counters *counters;
} hkv_plan_job;

/* Why a step was refused; hkv_plan_report (plan.c) has the words. */
typedef enum hkv_plan_fault {
    HKV_PLAN_OK = 0,
    HKV_PLAN_CU_TOKENS,   /* cu_new_tokens[index] = value does not ascend from 0 to limit = N */
    HKV_PLAN_LENGTH,      /* seq_lens[index] = value < limit new tokens */
    HKV_PLAN_TOO_LONG,    /* seq_lens[index] = value > limit = max_sequence_tokens */
    HKV_PLAN_ROW_TOKENS,  /* row index has value new tokens, max_row_tokens = limit is less */
    HKV_PLAN_STRIDE,      /* row index has value blocks, block_table_stride = limit is less */
    HKV_PLAN_COPY_SOURCE, /* copy_sources[index] = value >= limit = B */
    HKV_PLAN_TABLE,       /* block_table of row index names block value outside 0 .. limit-1 */
    HKV_PLAN_SLOT,        /* slot_mapping[index] lies in block value >= limit = B */
    HKV_PLAN_SLOT_BLOCK,  /* slot_mapping[index] = value is not limit, where the row's table puts that token */
    HKV_PLAN_SLOT_HOLES,  /* more than limit segments: slots with holes inside blocks */
    HKV_PLAN_TWO_WRITERS, /* segments index and another one write block value */
    HKV_PLAN_NO_PAGE      /* value pages are to be claimed of limit */
} hkv_plan_fault;

HKV_INLINE hkv_status hkv_plan_fault_status(hkv_plan_fault fault)
{
    switch (fault) {
    case HKV_PLAN_OK:
        return HKV_OK;
    case HKV_PLAN_TOO_LONG:
    case HKV_PLAN_COPY_SOURCE:
    case HKV_PLAN_TABLE:
    case HKV_PLAN_SLOT:
        return HKV_ERR_RANGE;
    case HKV_PLAN_NO_PAGE:
        return HKV_ERR_CACHE_FULL;
    default:
        return HKV_ERR_ARGUMENT;
    }
}

enum {                          /* directory.page_role */
       HKV_PAGE_VALID = 1,      /* valid for its block when the step began */
       HKV_PAGE_USED = 2,       /* reached by a writing row */
       HKV_PAGE_WRITTEN = 4,    /* its block is written */
       HKV_PAGE_SOURCE = 8,     /* its block is a copy source */
       HKV_PAGE_FREED = 16,     /* its block moved on: free from now on */
       HKV_PAGE_IN_TABLE = 32,  /* its block is in a table of the step; known only when partial pages must go */
       HKV_PAGE_VICTIM_A = 64,  /* candidate: sealed, not used */
       HKV_PAGE_VICTIM_B = 128, /* candidate if not in a table: unsealed, not used */
       HKV_PAGE_VICTIM_C = 256  /* candidate: sealed, used, neither written nor a copy source */
};

#define HKV_PLAN_CLAIM (-2) /* segment.page until phase 4 */

/* The first lane to find a fault reports it; on the CPU that is the first fault. */
HKV_INLINE void hkv_plan_fail(const hkv_plan_job *job, const hkv_team *team, hkv_plan_fault fault, int32_t index,
                              int64_t value, int64_t limit)
{
    if (hkv_team_add(&team->shared[HKV_TALLY_FAULTS], 1) != 0) return;
    *job->plan.failure = hkv_plan_fault_status(fault);
    job->plan.failure_value[0] = fault;
    job->plan.failure_value[1] = index;
    job->plan.failure_value[2] = value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (int32_t)value;
    job->plan.failure_value[3] = limit > INT32_MAX ? INT32_MAX : (int32_t)limit;
}

/* The same answer for every lane; what the team wrote before is visible after it. */
HKV_INLINE int32_t hkv_plan_failed(const hkv_team *team)
{
    int32_t failed;
    hkv_team_sync(team);
    failed = team->shared[HKV_TALLY_FAULTS];
    hkv_team_sync(team);
    return failed;
}

HKV_INLINE const hkv_record_header *hkv_plan_header(const hkv_plan_job *job, int32_t block)
{
    return (const hkv_record_header *)(job->headers + (size_t)block * job->header_stride_bytes);
}

HKV_INLINE int32_t hkv_plan_table_entry(const hkv_plan_job *job, int32_t row, int32_t logical_block)
{
    return job->batch.block_table[row * job->batch.block_table_stride + logical_block];
}

/* Logical block number `i` of the n_sinks + n_window that a row reads hot if it can; -1 beyond them. */
HKV_INLINE int32_t hkv_plan_row_block(const hkv_plan_row *row, int32_t i)
{
    if (i < row->n_sinks) return i;
    return i < row->n_sinks + row->n_window ? row->window_first + i - row->n_sinks : -1;
}

HKV_INLINE int32_t hkv_plan_segment_logical(const hkv_plan_job *job, const hkv_segment *segment)
{
    const hkv_plan_row *row = &job->plan.rows[segment->row];
    return (row->length - row->n_new + segment->first_token - row->first_token) / job->block_tokens;
}

/* ------------------------------------------------------------------------------------ before phase 0: a clean start */

/* Keep what a page is before this step changes it. */
HKV_INLINE void hkv_plan_save_page(const hkv_plan_job *job, uint32_t step, int32_t page)
{
    const hkv_directory *dir = &job->directory;
    hkv_page_state *saved = &dir->page_saved[page];
    saved->step = step;
    saved->block = dir->page_block[page];
    saved->is_linked = saved->block >= 0 && dir->block_page[saved->block] == page;
    saved->stamp = dir->page_stamp[page];
    saved->n_tokens = dir->page_n_tokens[page];
    saved->sealed = dir->page_sealed[page];
    saved->last_use = dir->page_last_use[page];
}

HKV_INLINE void hkv_plan_detach(const hkv_plan_job *job, int32_t page)
{
    const hkv_directory *dir = &job->directory;
    int32_t block = dir->page_block[page];
    if (block >= 0 && dir->block_page[block] == page) dir->block_page[block] = -1;
    dir->page_block[page] = -1;
}

/* A step that was begun and then begun again or given up never happened: no layer has written anything, so its pages
 * still hold what they held, and some of that (evicted partial blocks) exists nowhere else. */
HKV_INLINE void hkv_plan_undo(const hkv_plan_job *job, const hkv_team *team)
{
    const hkv_directory *dir = &job->directory;
    uint32_t step = *dir->step;
    HKV_FOR(p, job->n_pages, team)
        if (dir->page_saved[p].step == step) hkv_plan_detach(job, p);
    hkv_team_sync(team);
    HKV_FOR(p, job->n_pages, team) {
        const hkv_page_state *saved = &dir->page_saved[p];
        if (saved->step != step) continue;
        dir->page_block[p] = saved->block;
        if (saved->is_linked) dir->block_page[saved->block] = p;
        dir->page_stamp[p] = saved->stamp;
        dir->page_n_tokens[p] = saved->n_tokens;
        dir->page_sealed[p] = saved->sealed;
        dir->page_last_use[p] = saved->last_use;
    }
}

/* Returns the number of this step. It counts refused steps too, so that marks of theirs are not mistaken for ours. */
HKV_INLINE uint32_t hkv_plan_open(const hkv_plan_job *job, const hkv_team *team)
{
    uint32_t step = *job->directory.step + 1u;
    if (step == 0) step = 1;
    HKV_FOR(i, HKV_TALLY_COUNT, team) team->shared[i] = 0;
    HKV_FOR(p, job->n_pages, team) job->directory.page_role[p] = 0;
    if (*job->directory.step != 0 && !*job->plan.is_appended) hkv_plan_undo(job, team);
    hkv_team_sync(team);
    if (team->lane == 0) {
        *job->directory.step = step;
        *job->plan.is_appended = 0;
        *job->plan.failure = HKV_OK;
        job->plan.failure_value[0] = HKV_PLAN_OK;
        *job->plan.n_segments = 0;
        *job->plan.n_victims = 0;
    }
    return step;
}

/* ------------------------------------------------------------------------------------------------ phase 0: segments */

/* A row as the batch has it; its window and sinks, if it is no padding and the step is quantised. */
HKV_INLINE hkv_plan_row hkv_plan_read_row(const hkv_plan_job *job, int32_t r)
{
    hkv_plan_row row;
    row.first_token = job->batch.cu_new_tokens[r];
    row.n_new = job->batch.cu_new_tokens[r + 1] - row.first_token;
    row.length = job->batch.seq_lens[r];
    row.window_first = row.n_window = row.n_sinks = 0;
    row.first_segment = -1;
    if (row.n_new <= 0 || row.length <= 0 || !job->is_quantized) return row; /* at bits 0 all is read like a hot page */
    row.window_first = hkv_plan_window_first(row.length, job->hot_tokens, job->block_tokens);
    row.n_window = (row.length - 1) / job->block_tokens + 1 - row.window_first;
    row.n_sinks = job->sink_blocks < row.window_first ? job->sink_blocks : row.window_first;
    return row;
}

HKV_INLINE void hkv_plan_make_row(const hkv_plan_job *job, const hkv_team *team, int32_t r)
{
    const hkv_batch *batch = &job->batch;
    const hkv_plan_row row = hkv_plan_read_row(job, r);
    int32_t end = batch->cu_new_tokens[r + 1], source = batch->copy_sources ? batch->copy_sources[r] : 0;
    int32_t n_blocks = row.length > 0 ? (row.length - 1) / job->block_tokens + 1 : 0;
    job->plan.rows[r] = row;
    if (r == 0 && row.first_token != 0)
        hkv_plan_fail(job, team, HKV_PLAN_CU_TOKENS, 0, row.first_token, batch->n_new_tokens);
    if (row.n_new < 0 || end > batch->n_new_tokens || (r + 1 == batch->n_rows && end != batch->n_new_tokens))
        hkv_plan_fail(job, team, HKV_PLAN_CU_TOKENS, r + 1, end, batch->n_new_tokens);
    if (row.length < 0) hkv_plan_fail(job, team, HKV_PLAN_LENGTH, r, row.length, 0);
    if (source >= job->n_blocks) hkv_plan_fail(job, team, HKV_PLAN_COPY_SOURCE, r, source, job->n_blocks);
    if (row.n_new <= 0 || row.length <= 0) return; /* padding */
    if (row.length < row.n_new) hkv_plan_fail(job, team, HKV_PLAN_LENGTH, r, row.length, row.n_new);
    if (row.length > job->max_sequence_tokens)
        hkv_plan_fail(job, team, HKV_PLAN_TOO_LONG, r, row.length, job->max_sequence_tokens);
    if (batch->max_row_tokens > 0 && row.n_new > batch->max_row_tokens)
        hkv_plan_fail(job, team, HKV_PLAN_ROW_TOKENS, r, row.n_new, batch->max_row_tokens);
    if (n_blocks > batch->block_table_stride)
        hkv_plan_fail(job, team, HKV_PLAN_STRIDE, r, n_blocks, batch->block_table_stride);
}

/* Blocks of a row that is no padding, else 0. */
HKV_INLINE int32_t hkv_plan_row_n_blocks(const hkv_plan_job *job, int32_t r)
{
    const hkv_plan_row *row = &job->plan.rows[r];
    return row->n_new > 0 && row->length > 0 ? (row->length - 1) / job->block_tokens + 1 : 0;
}

enum { HKV_LOADS_IN_FLIGHT = 16, HKV_LANES_PER_ROW = 8 }; /* of a walk over tables on a GPU */

/* 1 if an entry of a row's table at `first`, `first + step`, ... lies outside the pool. */
HKV_INLINE int32_t hkv_plan_has_stray_entry(const hkv_plan_job *job, const int32_t *table, int32_t n, int32_t first,
                                            int32_t step)
{
    int32_t is_stray = 0;
    HKV_FOR_STEP(base, first, n, HKV_LOADS_IN_FLIGHT * step) {
        for (int32_t k = 0; k < HKV_LOADS_IN_FLIGHT; k++) { /* none waits for another */
            int32_t i = base + k * step, block = i < n ? table[i] : 0;
            is_stray |= (uint32_t)block >= (uint32_t)job->n_blocks;
        }
    }
    return is_stray;
}

/* Visit all table entries of the step: fail for one outside the pool, or mark the page of its block. As many lanes for
 * every row. */
HKV_INLINE void hkv_plan_walk_tables(const hkv_plan_job *job, const hkv_team *team, int32_t is_check)
{
    int32_t n_rows = job->batch.n_rows, most = team->n_lanes / HKV_LANES_PER_ROW;
    int32_t n_groups = n_rows < most ? n_rows : most, step, first;
    if (n_groups == 0) n_groups = 1;
    step = team->n_lanes / n_groups;
    first = team->lane % step;
    if (team->lane / step >= n_groups) return;
    HKV_FOR_STEP(r, team->lane / step, n_rows, n_groups) {
        const int32_t *table = job->batch.block_table + r * job->batch.block_table_stride;
        int32_t n = hkv_plan_row_n_blocks(job, r);
        if (is_check && !hkv_plan_has_stray_entry(job, table, n, first, step)) continue;
        HKV_FOR_STEP(i, first, n, step) {
            if (!is_check) {
                int32_t page = job->directory.block_page[table[i]];
                if (page >= 0) hkv_team_or(&job->directory.page_role[page], HKV_PAGE_IN_TABLE);
            } else if (table[i] < 0 || table[i] >= job->n_blocks) {
                hkv_plan_fail(job, team, HKV_PLAN_TABLE, r, table[i], job->n_blocks);
            }
        }
    }
}

/* The row of a token: the last one that starts at or before it. */
HKV_INLINE int32_t hkv_plan_row_of_token(const hkv_plan_job *job, int32_t token)
{
    int32_t low = 0, high = job->batch.n_rows;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (job->batch.cu_new_tokens[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Slot of a token that moves state, else -1: no slot, null block, padding row, or refused. */
HKV_INLINE int64_t hkv_plan_slot(const hkv_plan_job *job, const hkv_team *team, const hkv_plan_row *row, int32_t token)
{
    int64_t slot = job->batch.slot_mapping[token];
    if (slot < job->block_tokens || row->length == 0) return -1;
    if (slot / job->block_tokens < job->n_blocks) return slot;
    hkv_plan_fail(job, team, HKV_PLAN_SLOT, token, slot / job->block_tokens, job->n_blocks);
    return -1;
}

/* 1 if token `token` of a row, at `slot`, belongs to the segment of the token before it. */
HKV_INLINE int32_t hkv_plan_slot_continues(const hkv_plan_job *job, const hkv_plan_row *row, int32_t token,
                                           int64_t slot)
{
    return token > row->first_token && slot % job->block_tokens != 0 && job->batch.slot_mapping[token - 1] == slot - 1;
}

HKV_INLINE void hkv_plan_open_segment(const hkv_plan_job *job, const hkv_team *team, int32_t s, int32_t r,
                                      int32_t token, int64_t slot)
{
    const hkv_plan_row *row = &job->plan.rows[r];
    hkv_segment *segment = &job->plan.segments[s];
    int32_t position = row->length - row->n_new + token - row->first_token;
    int64_t expected = (int64_t)hkv_plan_table_entry(job, r, position / job->block_tokens) * job->block_tokens +
                       position % job->block_tokens;
    if (slot != expected) hkv_plan_fail(job, team, HKV_PLAN_SLOT_BLOCK, token, slot, expected);
    segment->row = r;
    segment->block = (int32_t)(slot / job->block_tokens);
    segment->first_token = token;
    segment->offset = (int32_t)(slot % job->block_tokens);
}

/* Find the segments; token t's is the number of segment starts up to t, less one. */
HKV_INLINE void hkv_plan_make_segments(const hkv_plan_job *job, const hkv_team *team)
{
    int32_t n_segments = 0;
    HKV_FOR_STEP(base, 0, job->batch.n_new_tokens, team->n_lanes) {
        int32_t token = base + team->lane, r = 0, starts = 0, ends = 0, n_starts, s;
        int64_t slot = -1;
        if (token < job->batch.n_new_tokens) {
            const hkv_plan_row *row = &job->plan.rows[r = hkv_plan_row_of_token(job, token)];
            slot = hkv_plan_slot(job, team, row, token);
            if (slot >= 0) {
                starts = !hkv_plan_slot_continues(job, row, token, slot);
                ends = token + 1 == row->first_token + row->n_new || job->batch.slot_mapping[token + 1] != slot + 1 ||
                       (slot + 1) % job->block_tokens == 0;
            }
        }
        s = n_segments + hkv_team_rank(team, starts, &n_starts) + starts - 1;
        n_segments += n_starts;
        if (s >= job->plan.max_segments) continue; /* refused below */
        if (starts) hkv_plan_open_segment(job, team, s, r, token, slot);
        if (ends) job->plan.segments[s].n_tokens = (int32_t)(slot % job->block_tokens) + 1; /* less offset: below */
    }
    if (team->lane == 0) *job->plan.n_segments = n_segments;
    if (n_segments > job->plan.max_segments && team->lane == 0)
        hkv_plan_fail(job, team, HKV_PLAN_SLOT_HOLES, 0, n_segments, job->plan.max_segments);
}

HKV_INLINE void hkv_plan_close_segments(const hkv_plan_job *job, const hkv_team *team, uint32_t step)
{
    HKV_FOR(s, *job->plan.n_segments, team) {
        hkv_segment *segment = &job->plan.segments[s];
        segment->n_tokens -= segment->offset;
        if (s == 0 || job->plan.segments[s - 1].row != segment->row) job->plan.rows[segment->row].first_segment = s;
        if (hkv_team_exchange(&job->directory.block_step[segment->block], step) == step)
            hkv_plan_fail(job, team, HKV_PLAN_TWO_WRITERS, s, segment->block, 0);
    }
}

/* -------------------------------------------------------------------------------------------------- phase 1: in use */

/* Page of a block when the step began, valid or not; -1 = none. */
HKV_INLINE int32_t hkv_plan_page(const hkv_plan_job *job, int32_t block)
{
    int32_t page = job->directory.block_page[block];
    return page >= 0 && job->directory.page_block[page] == block ? page : -1;
}

/* The same, if phase 1 found it valid. */
HKV_INLINE int32_t hkv_plan_valid_page(const hkv_plan_job *job, int32_t block)
{
    int32_t page = hkv_plan_page(job, block);
    return page >= 0 && (job->directory.page_role[page] & HKV_PAGE_VALID) ? page : -1;
}

/* Find out whether a block's page is valid: give it the bits, or free it. */
HKV_INLINE void hkv_plan_touch(const hkv_plan_job *job, int32_t block, uint32_t bits)
{
    int32_t page = hkv_plan_page(job, block);
    if (page < 0) return;
    if (hkv_plan_header(job, block)->stamp != job->directory.page_stamp[page]) bits = HKV_PAGE_FREED;
    hkv_team_or(&job->directory.page_role[page], bits);
}

/* Block from which a segment takes the tokens before it, if that is not its own: 0 = its own. */
HKV_INLINE int32_t hkv_plan_copy_source(const hkv_plan_job *job, int32_t s)
{
    const hkv_segment *segment = &job->plan.segments[s];
    int32_t source;
    if (!job->batch.copy_sources || segment->offset == 0) return 0;
    if (job->plan.rows[segment->row].first_segment != s) return 0;
    source = job->batch.copy_sources[segment->row];
    return source > 0 && source != segment->block ? source : 0;
}

/* Entry i of the hot pages that a row wants. */
HKV_INLINE void hkv_plan_mark_row(const hkv_plan_job *job, int32_t i)
{
    int32_t stride = job->plan.hot_stride, r = i / stride;
    const hkv_plan_row *row = &job->plan.rows[r];
    int32_t logical = hkv_plan_row_block(row, i - r * stride);
    if (logical < 0) return;
    hkv_plan_touch(job, hkv_plan_table_entry(job, r, logical),
                   HKV_PAGE_VALID | (row->first_segment >= 0 ? HKV_PAGE_USED : 0));
}

HKV_INLINE void hkv_plan_mark_segment(const hkv_plan_job *job, int32_t s)
{
    int32_t source = hkv_plan_copy_source(job, s);
    hkv_plan_touch(job, job->plan.segments[s].block, HKV_PAGE_VALID | HKV_PAGE_USED | HKV_PAGE_WRITTEN);
    if (source) hkv_plan_touch(job, source, HKV_PAGE_VALID | HKV_PAGE_USED | HKV_PAGE_SOURCE);
}

/* Rows and segments by lanes side by side: each waits for reads that depend on each other. */
HKV_INLINE void hkv_plan_mark_used(const hkv_plan_job *job, const hkv_team *team)
{
    int32_t n_of_rows = job->batch.n_rows * job->plan.hot_stride, n = n_of_rows + *job->plan.n_segments;
    HKV_FOR(i, n, team) {
        if (i < n_of_rows)
            hkv_plan_mark_row(job, i);
        else
            hkv_plan_mark_segment(job, i - n_of_rows);
    }
}

/* --------------------------------------------------------------------------------- phase 2: what each segment needs */

/* Tokens 0 .. offset-1 come from `block`: from its valid page, else from its record. */
HKV_INLINE void hkv_plan_restore_from(const hkv_plan_job *job, hkv_segment *segment, int32_t block)
{
    int32_t page = hkv_plan_valid_page(job, block), n_held;
    n_held = page >= 0 ? job->directory.page_n_tokens[page]
                       : hkv_header_n_tokens(hkv_plan_header(job, block), job->block_tokens);
    segment->n_restore = segment->offset;
    segment->n_held = n_held < segment->offset ? n_held : segment->offset;
    segment->restore_page = page;
    segment->restore_block = block;
}

HKV_INLINE int32_t hkv_plan_is_hot(const hkv_plan_job *job, const hkv_segment *segment)
{
    int32_t logical = hkv_plan_segment_logical(job, segment);
    return logical < job->sink_blocks || logical >= job->plan.rows[segment->row].window_first;
}

/* Choose page (or HKV_PLAN_CLAIM, or -1 = direct), restore, restart and seal. The stamp stays 0 where a new one is due.
 */
HKV_INLINE void hkv_plan_classify(const hkv_plan_job *job, int32_t s)
{
    hkv_segment *segment = &job->plan.segments[s];
    int32_t source = hkv_plan_copy_source(job, s), own = hkv_plan_valid_page(job, segment->block);
    uint32_t own_role = own >= 0 ? job->directory.page_role[own] : 0;
    segment->seal = segment->offset + segment->n_tokens == job->block_tokens;
    segment->restart = segment->offset == 0 || source;
    segment->n_restore = segment->n_held = 0;
    segment->restore_page = -1;
    segment->restore_block = 0;
    segment->stamp = 0;

    if (segment->offset == 0 && segment->n_tokens == job->block_tokens && !hkv_plan_is_hot(job, segment)) { /* direct */
        segment->page = -1;
        if (own >= 0 && !(own_role & HKV_PAGE_SOURCE)) hkv_team_or(&job->directory.page_role[own], HKV_PAGE_FREED);
        return;
    }
    if (source) { /* the block's own page, if it has one, unless another row copies from it */
        hkv_plan_restore_from(job, segment, source);
        segment->page = own >= 0 && !(own_role & HKV_PAGE_SOURCE) ? own : HKV_PLAN_CLAIM;
    } else if (own >= 0) { /* hit */
        segment->page = own;
        if (segment->offset > 0) segment->stamp = job->directory.page_stamp[own];
        if (segment->offset > job->directory.page_n_tokens[own])
            hkv_plan_restore_from(job, segment, segment->block); /* zeros between what it holds and the write */
    } else {
        segment->page = HKV_PLAN_CLAIM;
        if (segment->offset > 0) hkv_plan_restore_from(job, segment, segment->block);
        if (segment->n_held == 0) segment->restart = 1; /* whatever the header says, it is not this content */
    }
}

/* bits 0: no pages, no records; blocks are written and copied in place. */
HKV_INLINE void hkv_plan_classify_rows(const hkv_plan_job *job, int32_t s)
{
    hkv_segment *segment = &job->plan.segments[s];
    int32_t source = hkv_plan_copy_source(job, s);
    segment->page = segment->restore_page = -1;
    segment->restore_block = source;
    segment->n_restore = segment->n_held = source ? segment->offset : 0;
    segment->seal = segment->restart = 0;
    segment->stamp = 0;
}

/* ------------------------------------------------------------------------------------ phases 3 and 4: pages, claims */

/* Give new stamps and list the claims, both in segment order. Returns the number of claims. */
HKV_INLINE int32_t hkv_plan_number_segments(const hkv_plan_job *job, const hkv_team *team, uint32_t *next_stamp)
{
    int32_t n_segments = *job->plan.n_segments, n_claims = 0;
    uint32_t stamp = *job->directory.next_stamp;
    HKV_FOR_STEP(base, 0, n_segments, team->n_lanes) {
        int32_t s = base + team->lane, claims = 0, is_new = 0, n, rank;
        if (s < n_segments) {
            claims = job->plan.segments[s].page == HKV_PLAN_CLAIM;
            is_new = job->plan.segments[s].stamp == 0;
        }
        rank = n_claims + hkv_team_rank(team, claims, &n);
        if (claims) job->plan.claims[rank] = s;
        n_claims += n;
        rank = hkv_team_rank(team, is_new, &n);
        if (is_new) {
            uint32_t own = stamp + (uint32_t)rank;
            job->plan.segments[s].stamp = own < stamp ? own + 1u : own; /* 0 is no stamp */
        }
        stamp = stamp + (uint32_t)n < stamp ? stamp + (uint32_t)n + 1u : stamp + (uint32_t)n;
    }
    *next_stamp = stamp;
    return n_claims;
}

HKV_INLINE int32_t hkv_plan_page_is_free(const hkv_plan_job *job, int32_t page)
{
    return job->directory.page_block[page] < 0 || (job->directory.page_role[page] & HKV_PAGE_FREED);
}

/* Hand free pages to the first claims, lowest page first. Returns how many there were, at most n_claims. */
HKV_INLINE int32_t hkv_plan_take_free(const hkv_plan_job *job, const hkv_team *team, int32_t n_claims)
{
    int32_t n_free = 0;
    for (int32_t base = 0; base < job->n_pages && n_free < n_claims; base += team->n_lanes) {
        int32_t page = base + team->lane, n, rank;
        int32_t is_free = page < job->n_pages && hkv_plan_page_is_free(job, page);
        rank = n_free + hkv_team_rank(team, is_free, &n);
        if (is_free && rank < n_claims) job->plan.segments[job->plan.claims[rank]].page = page;
        n_free += n;
    }
    return n_free < n_claims ? n_free : n_claims;
}

/* Free every page whose block moved on without this step meeting it. */
HKV_INLINE void hkv_plan_free_stale(const hkv_plan_job *job, const hkv_team *team)
{
    const hkv_directory *dir = &job->directory;
    HKV_FOR(p, job->n_pages, team) {
        int32_t block = dir->page_block[p];
        if (block < 0 || (dir->page_role[p] & HKV_PAGE_VALID)) continue;
        if (dir->block_page[block] != p || hkv_plan_header(job, block)->stamp != dir->page_stamp[p])
            dir->page_role[p] |= HKV_PAGE_FREED;
    }
}

/* Sort the pages into the classes of victims. */
HKV_INLINE void hkv_plan_find_victims(const hkv_plan_job *job, const hkv_team *team)
{
    const hkv_directory *dir = &job->directory;
    HKV_FOR(p, job->n_pages, team) {
        uint32_t role = dir->page_role[p];
        int32_t sealed;
        if (hkv_plan_page_is_free(job, p) || (role & (HKV_PAGE_WRITTEN | HKV_PAGE_SOURCE))) continue;
        sealed = dir->page_sealed[p];
        if (!(role & HKV_PAGE_USED)) {
            dir->page_role[p] |= sealed ? HKV_PAGE_VICTIM_A : HKV_PAGE_VICTIM_B;
            if (sealed) hkv_team_add(&team->shared[HKV_TALLY_VICTIMS_A], 1);
        } else if (sealed) {
            dir->page_role[p] |= HKV_PAGE_VICTIM_C;
            hkv_team_add(&team->shared[HKV_TALLY_VICTIMS_C], 1);
        }
    }
}

/* Partial pages may go only if no row of the step has their block. */
HKV_INLINE void hkv_plan_exclude_tables(const hkv_plan_job *job, const hkv_team *team)
{
    hkv_plan_walk_tables(job, team, 0);
    hkv_team_sync(team);
    HKV_FOR(p, job->n_pages, team) {
        if (!(job->directory.page_role[p] & HKV_PAGE_VICTIM_B)) continue;
        if (job->directory.page_role[p] & HKV_PAGE_IN_TABLE)
            job->directory.page_role[p] &= ~(uint32_t)HKV_PAGE_VICTIM_B;
        else
            hkv_team_add(&team->shared[HKV_TALLY_VICTIMS_B], 1);
    }
}

/* Class of a victim, 3 = none. */
HKV_INLINE int32_t hkv_plan_victim_class(uint32_t role)
{
    return role & HKV_PAGE_VICTIM_A ? 0 : role & HKV_PAGE_VICTIM_B ? 1 : role & HKV_PAGE_VICTIM_C ? 2 : 3;
}

/* Victims that go before `page`: of an earlier class, used longer ago, or lower. Counts up to `enough`. */
HKV_INLINE int32_t hkv_plan_victim_rank(const hkv_plan_job *job, uint32_t step, int32_t page, int32_t enough)
{
    const hkv_directory *dir = &job->directory;
    int32_t class_of_page = hkv_plan_victim_class(dir->page_role[page]), rank = 0;
    uint32_t age_of_page = step - dir->page_last_use[page];
    for (int32_t p = 0; p < job->n_pages && rank < enough; p++) {
        int32_t victim_class = hkv_plan_victim_class(dir->page_role[p]);
        uint32_t age = step - dir->page_last_use[p];
        rank += victim_class != class_of_page ? victim_class < class_of_page
                : age != age_of_page          ? age > age_of_page
                                              : p < page;
    }
    return rank;
}

/* Give the pages of the first victims to the claims from n_free on. The roles stay as they are until all have ranked
 * their page: what became of a page is kept in the claim and in the list of victims. */
HKV_INLINE void hkv_plan_take_victims(const hkv_plan_job *job, const hkv_team *team, uint32_t step, int32_t n_free,
                                      int32_t n_claims)
{
    const hkv_directory *dir = &job->directory;
    int32_t n_wanted = n_claims - n_free, n_sealed = team->shared[HKV_TALLY_VICTIMS_A];
    HKV_FOR(p, job->n_pages, team) {
        int32_t victim_class = hkv_plan_victim_class(dir->page_role[p]);
        int32_t rank = victim_class < 3 ? hkv_plan_victim_rank(job, step, p, n_wanted) : n_wanted;
        if (rank >= n_wanted) continue;
        job->plan.segments[job->plan.claims[n_free + rank]].page = p;
        if (victim_class == 1) {
            hkv_victim *victim = &job->plan.victims[rank - n_sealed];
            victim->page = p;
            victim->block = dir->page_block[p];
            victim->n_tokens = dir->page_n_tokens[p];
            victim->stamp = dir->page_stamp[p];
        }
    }
    if (team->lane == 0) {
        int32_t n_partial = n_wanted - n_sealed, n_candidates = team->shared[HKV_TALLY_VICTIMS_B];
        *job->plan.n_victims = n_partial < 0 ? 0 : n_partial < n_candidates ? n_partial : n_candidates;
    }
}

/* Find a page for every claim; *n_evicted of them are taken from another block. Fails if there are too few. */
HKV_INLINE void hkv_plan_claim_pages(const hkv_plan_job *job, const hkv_team *team, uint32_t step, int32_t n_claims,
                                     int32_t *n_evicted)
{
    const int32_t *shared = team->shared;
    int32_t n_free = hkv_plan_take_free(job, team, n_claims);
    *n_evicted = 0;
    if (n_free == n_claims) return;
    hkv_plan_free_stale(job, team);
    hkv_team_sync(team);
    n_free = hkv_plan_take_free(job, team, n_claims);
    *n_evicted = n_claims - n_free;
    if (*n_evicted == 0) return;
    hkv_plan_find_victims(job, team);
    hkv_team_sync(team);
    if (shared[HKV_TALLY_VICTIMS_A] < *n_evicted) hkv_plan_exclude_tables(job, team);
    hkv_team_sync(team);
    if (shared[HKV_TALLY_VICTIMS_A] + shared[HKV_TALLY_VICTIMS_B] + shared[HKV_TALLY_VICTIMS_C] >= *n_evicted)
        hkv_plan_take_victims(job, team, step, n_free, n_claims);
    else if (team->lane == 0)
        hkv_plan_fail(job, team, HKV_PLAN_NO_PAGE, 0, n_claims, job->n_pages);
}

/* ----------------------------------------------------------------------------------------------- phase 5: new state */

/* Pages that were freed or lost their block let go of it, before any block gets a new page. All are saved first. */
HKV_INLINE void hkv_plan_release_pages(const hkv_plan_job *job, const hkv_team *team, uint32_t step, int32_t n_claims)
{
    const hkv_directory *dir = &job->directory;
    const hkv_plan *plan = &job->plan;
    HKV_FOR(p, job->n_pages, team)
        if (dir->page_role[p] & (HKV_PAGE_FREED | HKV_PAGE_WRITTEN)) hkv_plan_save_page(job, step, p);
    HKV_FOR(i, n_claims, team) hkv_plan_save_page(job, step, plan->segments[plan->claims[i]].page);
    hkv_team_sync(team);
    HKV_FOR(p, job->n_pages, team) {
        if (dir->page_role[p] & HKV_PAGE_USED) dir->page_last_use[p] = step;
        if (dir->page_role[p] & HKV_PAGE_FREED) hkv_plan_detach(job, p);
    }
    hkv_team_sync(team); /* a freed page may be claimed */
    HKV_FOR(i, n_claims, team) hkv_plan_detach(job, plan->segments[plan->claims[i]].page);
}

HKV_INLINE void hkv_plan_write_directory(const hkv_plan_job *job, const hkv_team *team, uint32_t step)
{
    const hkv_directory *dir = &job->directory;
    HKV_FOR(s, *job->plan.n_segments, team) {
        const hkv_segment *segment = &job->plan.segments[s];
        int32_t page = segment->page;
        dir->block_page[segment->block] = page; /* -1: direct */
        if (page < 0) continue;
        dir->page_block[page] = segment->block;
        dir->page_stamp[page] = segment->stamp;
        dir->page_n_tokens[page] = segment->offset + segment->n_tokens;
        dir->page_sealed[page] = segment->seal;
        dir->page_last_use[page] = step;
        hkv_team_or(&dir->page_role[page], HKV_PAGE_WRITTEN);
    }
}

/* 1 if another segment of this step writes over what segment s restores from, or over the header that tells it what is
 * there. */
HKV_INLINE int32_t hkv_plan_is_overwritten(const hkv_plan_job *job, uint32_t step, int32_t s)
{
    const hkv_segment *reader = &job->plan.segments[s];
    if (reader->n_held == 0 || reader->restore_block == reader->block) return 0;
    if (job->directory.block_step[reader->restore_block] != step) return 0;
    if (job->is_quantized && reader->restore_page < 0) return 1;
    HKV_FOR_STEP(i, 0, *job->plan.n_segments, 1) {
        const hkv_segment *writer = &job->plan.segments[i];
        if (writer->block == reader->restore_block && writer->offset < reader->n_held) return 1;
    }
    return 0;
}

HKV_INLINE void hkv_plan_find_entangled(const hkv_plan_job *job, const hkv_team *team, uint32_t step)
{
    HKV_FOR(s, *job->plan.n_segments, team)
        if (hkv_plan_is_overwritten(job, step, s)) hkv_team_max(&team->shared[HKV_TALLY_ENTANGLED], 1);
    hkv_team_sync(team);
    HKV_FOR(s, *job->plan.n_segments, team) job->plan.segments[s].is_entangled = team->shared[HKV_TALLY_ENTANGLED];
}

/* --------------------------------------------------------------------------------- phase 6: what each row reads hot */

HKV_INLINE void hkv_plan_make_hot_pages(const hkv_plan_job *job, const hkv_team *team)
{
    const hkv_directory *dir = &job->directory;
    int32_t stride = job->plan.hot_stride, n = job->batch.n_rows * stride;
    HKV_FOR(i, n, team) {
        const hkv_plan_row *row = &job->plan.rows[i / stride];
        int32_t logical = hkv_plan_row_block(row, i % stride), page = -1;
        if (logical >= 0) {
            int32_t is_read = logical * (int64_t)job->block_tokens < row->length - row->n_new;
            page = hkv_plan_page(job, hkv_plan_table_entry(job, i / stride, logical));
            if (page >= 0 && !(dir->page_role[page] & (HKV_PAGE_VALID | HKV_PAGE_WRITTEN))) page = -1;
            hkv_team_add(&team->shared[HKV_TALLY_HOT_WANTED], is_read);
            hkv_team_add(&team->shared[HKV_TALLY_HOT_READ], is_read && page >= 0);
        }
        job->plan.hot_pages[i] = page;
    }
}

/* --------------------------------------------------------------------------------------------------------- the step */

HKV_INLINE void hkv_plan_tally_segments(const hkv_plan_job *job, const hkv_team *team)
{
    HKV_FOR(s, *job->plan.n_segments, team) {
        const hkv_segment *segment = &job->plan.segments[s];
        hkv_team_add(&team->shared[HKV_TALLY_TOKENS], segment->n_tokens);
        hkv_team_add(&team->shared[HKV_TALLY_SEALED], segment->seal);
        hkv_team_add(&team->shared[HKV_TALLY_DIRECT], segment->seal && segment->page < 0);
        hkv_team_add(&team->shared[HKV_TALLY_RESTORED], segment->n_held > 0 && segment->page >= 0);
    }
}

HKV_INLINE void hkv_plan_count(const hkv_plan_job *job, const hkv_team *team, int32_t n_claims, int32_t n_evicted)
{
    hkv_counters *counters = job->counters;
    const int32_t *shared = team->shared;
    counters->n_steps += 1;
    counters->n_tokens_appended += (uint64_t)shared[HKV_TALLY_TOKENS];
    counters->n_blocks_sealed += (uint64_t)shared[HKV_TALLY_SEALED];
    counters->n_blocks_sealed_direct += (uint64_t)shared[HKV_TALLY_DIRECT];
    counters->n_pages_claimed += (uint64_t)n_claims;
    counters->n_pages_restored += (uint64_t)shared[HKV_TALLY_RESTORED];
    counters->n_pages_evicted += (uint64_t)(n_evicted - *job->plan.n_victims);
    counters->n_partial_evicted += (uint64_t)*job->plan.n_victims;
    counters->n_hot_blocks_read += (uint64_t)shared[HKV_TALLY_HOT_READ];
    counters->n_hot_blocks_wanted += (uint64_t)shared[HKV_TALLY_HOT_WANTED];
}

/* A refused step leaves an empty plan, under which every row is padding. */
HKV_INLINE void hkv_plan_clear(const hkv_plan_job *job, const hkv_team *team)
{
    HKV_FOR(r, job->batch.n_rows, team) {
        hkv_plan_row *row = &job->plan.rows[r];
        row->n_new = row->length = row->window_first = row->n_window = row->n_sinks = 0;
        row->first_segment = -1;
    }
    if (team->lane == 0) *job->plan.n_segments = *job->plan.n_victims = 0;
}

/* Phase 0 with all its checks. */
HKV_INLINE int32_t hkv_plan_read_batch(const hkv_plan_job *job, const hkv_team *team, uint32_t step)
{
    HKV_FOR(r, job->batch.n_rows, team) hkv_plan_make_row(job, team, r);
    if (hkv_plan_failed(team)) return 0;
    hkv_plan_walk_tables(job, team, 1);
    if (hkv_plan_failed(team)) return 0;
    hkv_plan_make_segments(job, team);
    if (hkv_plan_failed(team)) return 0;
    hkv_plan_close_segments(job, team, step);
    return !hkv_plan_failed(team);
}

HKV_INLINE void hkv_plan_run_phases(const hkv_plan_job *job, const hkv_team *team)
{
    uint32_t step = hkv_plan_open(job, team), next_stamp = 0;
    int32_t n_claims = 0, n_evicted = 0;
    hkv_team_sync(team);
    if (!hkv_plan_read_batch(job, team, step)) { /* phase 0 */
        hkv_plan_clear(job, team);
        return;
    }
    if (job->is_quantized) {
        hkv_plan_mark_used(job, team); /* phase 1 */
        hkv_team_sync(team);
        HKV_FOR(s, *job->plan.n_segments, team) hkv_plan_classify(job, s); /* phase 2 */
        hkv_team_sync(team);
        n_claims = hkv_plan_number_segments(job, team, &next_stamp);
        hkv_team_sync(team);
        hkv_plan_claim_pages(job, team, step, n_claims, &n_evicted); /* phases 3 and 4 */
        if (hkv_plan_failed(team)) {
            hkv_plan_clear(job, team);
            return;
        }
        hkv_plan_release_pages(job, team, step, n_claims); /* phase 5 */
        hkv_team_sync(team);
        hkv_plan_write_directory(job, team, step);
        if (team->lane == 0) *job->directory.next_stamp = next_stamp;
    } else {
        HKV_FOR(s, *job->plan.n_segments, team) hkv_plan_classify_rows(job, s);
    }
    hkv_team_sync(team);
    hkv_plan_find_entangled(job, team, step);
    hkv_plan_make_hot_pages(job, team); /* phase 6 */
    hkv_plan_tally_segments(job, team);
    hkv_team_sync(team);
    if (team->lane == 0) hkv_plan_count(job, team, n_claims, n_evicted);
}

/* Plan a step. All lanes of the team call it with the same job; afterwards all see the plan, plan.failure tells whether
 * it was refused, and then the directory is as before. */
HKV_INLINE void hkv_plan_step(const hkv_plan_job *job, const hkv_team *team)
{
    hkv_plan_run_phases(job, team);
    hkv_team_sync(team);
}

#ifdef __cplusplus
extern "C" {
#endif

/* The status and the words of plan.failure_value, copied to the host (plan.c). */
hkv_status hkv_plan_report(const int32_t *failure_value, hkv_error *error);

#ifdef __cplusplus
}
#endif

#endif
