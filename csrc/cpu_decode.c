/* cpu_decode.c - attention of decode rows.
 *
 * An item is one (row, KV head). Its hot part (new tokens and hot pages) comes first and gives the reference of
 * progressive reading; then the cold blocks in tasks of about as many stored bytes, each with a partial softmax of
 * its own; the partials are merged in the order of the blocks. So the result does not depend on the number of threads.
 * Items run in waves that fit the workspace, the tasks of a wave in rounds of as many as an item has partials for.
 *
 * A round is one job of the pool, since each costs microseconds: its tasks wait for the earlier ones that they need,
 * and whichever ends last does what needs them all.
 *
 * Items of more than CHUNK_ROWS query rows are split into chunks of heads, one after the other. What is read of a
 * record is then decided beforehand (survey_run), since the decision belongs to all heads together.
 */
#include "cpu_step.h"

#include <math.h>
#include <stdatomic.h>

enum {
    CHUNK_ROWS = 64,        /* query rows of a kernel call */
    CALL_SOURCES = 64,      /* sources of a kernel call */
    HOT_SOURCES = 64,       /* at least 16 sinks, 17 blocks of the window, 2 blocks of new tokens */
    TASK_BYTES = 512 << 10, /* of records that a task reads, at most 1.4 times as many */
    WAVE_ITEMS = 256,
    HEADERS_AHEAD = 16,   /* blocks by which headers are prefetched */
    KEYS_AHEAD = 2,       /* first blocks of a task whose keys are prefetched while its sources are found */
    MIN_PARTIALS = 16,    /* partial states of an item */
    TARGET_PARTIALS = 64, /* the same, where it has few query rows */
    TARGET_ROWS = 8,      /* query rows, */
    TARGET_BLOCKS = 4096, /* blocks and */
    TARGET_ITEMS = 64     /* items that the workspace should hold at once */
};

/* What a block is to an item. */
enum { BLOCK_OPEN = 0, BLOCK_LEFT_OUT, BLOCK_AT_INT4 };

/* What its header says, so that headers are looked up once. */
typedef struct cold_block {
    int16_t n_tokens; /* that are read cold, 0 if none are */
    uint8_t reading;  /* BLOCK_* */
    uint8_t precision;
} cold_block;

typedef struct l2_block {
    float bound, history;
    int32_t block; /* logical */
    int32_t n_tokens;
} l2_block;

typedef struct decode_item {
    hkv_cpu_tile tile; /* the chunk of heads at work */
    hkv_cpu_query query;
    int32_t chunk_heads;           /* heads of every chunk but the last */
    int32_t first_block, n_blocks; /* logical blocks that some query token sees, new tokens included */
    int32_t n_tasks, blocks_per_task, n_partials;
    atomic_int is_ready;           /* its hot part is done */
    atomic_int n_open;             /* tasks of the round that have not ended */
    int32_t is_decided;            /* `cold` says all about records */
    float *q;                      /* [chunk rows, DP] */
    float *reference_lse;          /* [chunk rows] */
    float *state_memory;           /* of the chunk's running softmax */
    float *partials;               /* [n_partials, floats of a state] */
    hkv_cpu_progressive *progress; /* [n_partials] what the task of a partial read */
    float *block_lse;              /* [n_blocks, chunk rows]; of no use without masses */
    float *block_mass;             /* [n_blocks] largest over chunks */
    float *shares;                 /* [n_blocks] survey: largest share over chunks, -1 where nothing is visible */
    cold_block *cold;              /* [n_blocks] */
    l2_block *l2;                  /* [n_blocks] scratch of the selection */
    hkv_cpu_state state;
    hkv_cpu_progressive total; /* what the item read */
    int64_t n_unselected;
} decode_item;

typedef struct decode_job {
    const hkv_cpu_step *step;
    int32_t has_mass;  /* masses are asked for or kept in headers */
    int32_t is_survey; /* tasks only find out shares */
    decode_item *items;
    int32_t n_items;
    int32_t *head_is_decayed; /* [n_kv_heads] histories of its records */
    atomic_int *head_n_open;  /* [n_kv_heads] items of the wave that are not finished */
    int32_t round;
    int32_t n_prepares;  /* tasks of this round, first of all */
    int32_t *first_task; /* [n_items + 1] cold tasks of this round */
} decode_job;

static int32_t is_decoded(const hkv_plan_row *row)
{
    return row->n_new > 0 && row->n_new <= HKV_DECODE_MAX_TOKENS;
}

static int32_t at_most(int32_t value, int32_t limit)
{
    return value < limit ? value : limit;
}

static float larger(float a, float b)
{
    return a > b ? a : b;
}

static const hkv_plan_row *item_row(const decode_job *job, const decode_item *item)
{
    return &job->step->group->plan.rows[item->tile.row];
}

/* ------------------------------------------------------------------------------------------------------- workspace */

/* Cut n_blocks, which may be none, into tasks of nearly the same size, about TASK_BYTES: a power of two of them, which
 * few threads can share out evenly. At least one, as the item ends with its last. */
static void item_cut(const hkv_format *f, int32_t n_blocks, decode_item *item)
{
    int64_t n_bytes = (int64_t)n_blocks * f->record_bytes, n_tasks = 1;
    while (n_bytes * 5 > n_tasks * TASK_BYTES * 7 && 2 * n_tasks <= n_blocks) n_tasks *= 2; /* 7 / 5 = sqrt(2) */
    item->blocks_per_task = n_blocks > 0 ? (n_blocks + (int32_t)n_tasks - 1) / (int32_t)n_tasks : 1;
    item->n_tasks = n_blocks > 0 ? (n_blocks + item->blocks_per_task - 1) / item->blocks_per_task : 1;
}

/* Memory of an item of n_blocks blocks and n_rows query rows a chunk. */
static void item_place(const hkv_format *f, int32_t n_rows, int32_t n_blocks, hkv_cpu_arena *arena, decode_item *item)
{
    size_t rows = (size_t)n_rows, blocks = (size_t)n_blocks;
    size_t state_bytes = hkv_cpu_state_floats(f, n_rows) * sizeof(float);
    int32_t n_partials = TARGET_PARTIALS * TARGET_ROWS / n_rows;
    if (n_partials < MIN_PARTIALS) n_partials = MIN_PARTIALS;
    item->n_blocks = n_blocks;
    item_cut(f, n_blocks, item);
    item->n_partials = at_most(at_most(n_partials, TARGET_PARTIALS), item->n_tasks);
    item->q = hkv_cpu_arena_take(arena, rows * (size_t)f->stored_dim * sizeof(float));
    item->reference_lse = hkv_cpu_arena_take(arena, rows * sizeof(float));
    item->state_memory = hkv_cpu_arena_take(arena, state_bytes);
    item->partials = hkv_cpu_arena_take(arena, state_bytes * (size_t)item->n_partials);
    item->progress = hkv_cpu_arena_take(arena, sizeof(hkv_cpu_progressive) * (size_t)item->n_partials);
    item->block_lse = hkv_cpu_arena_take(arena, blocks * rows * sizeof(float));
    item->block_mass = hkv_cpu_arena_take(arena, blocks * sizeof(float));
    item->shares = hkv_cpu_arena_take(arena, blocks * sizeof(float));
    item->cold = hkv_cpu_arena_take(arena, blocks * sizeof(cold_block));
    item->l2 = hkv_cpu_arena_take(arena, blocks * sizeof(l2_block));
}

static size_t item_bytes(const hkv_format *f, int32_t n_rows, int32_t n_blocks)
{
    hkv_cpu_arena arena = {NULL, SIZE_MAX, 0};
    decode_item item;
    item_place(f, n_rows, n_blocks, &arena, &item);
    return arena.used;
}

static int32_t wave_items(const hkv_group *group)
{
    int64_t n_items = (int64_t)group->max_rows * group->n_kv_heads;
    return n_items < WAVE_ITEMS ? (int32_t)n_items : WAVE_ITEMS;
}

static size_t wave_table_bytes(const hkv_group *group)
{
    size_t n_items = (size_t)wave_items(group);
    return hkv_cpu_arena_bytes(n_items * sizeof(decode_item)) + hkv_cpu_arena_bytes((n_items + 1) * sizeof(int32_t)) +
           hkv_cpu_arena_bytes((size_t)group->n_kv_heads * sizeof(int32_t)) +
           hkv_cpu_arena_bytes((size_t)group->n_kv_heads * sizeof(atomic_int));
}

size_t hkv_cpu_decode_workspace(const hkv_group *group)
{
    const hkv_format *f = &group->format;
    size_t smallest = item_bytes(f, CHUNK_ROWS, group->n_blocks);
    size_t target = (size_t)at_most(wave_items(group), TARGET_ITEMS) *
                    item_bytes(f, TARGET_ROWS, at_most(group->n_blocks, TARGET_BLOCKS));
    return wave_table_bytes(group) + (target > smallest ? target : smallest);
}

/* --------------------------------------------------------------------------------------------------- item: hot part */

/* Tell the LSE of a source of block `block`, [n_rows]; a block may have two, a page and new tokens. */
static void block_lse_add(decode_item *item, int32_t block, const float *lse)
{
    int32_t n_rows = item->query.n_rows;
    float *total = item->block_lse + (size_t)(block - item->first_block) * (size_t)n_rows;
    for (int32_t i = 0; i < n_rows; i++) {
        float max = larger(total[i], lse[i]), min = total[i] > lse[i] ? lse[i] : total[i];
        total[i] = min == -INFINITY ? max : max + log1pf(expf(min - max));
    }
}

/* New tokens, one source a block, as a tensor's source names no block: blocks [n] receives them. */
static int32_t hot_new_sources(const decode_job *job, const decode_item *item, hkv_cpu_source *sources, int32_t *blocks)
{
    const hkv_plan_row *row = item_row(job, item);
    int32_t block_tokens = job->step->group->format.block_tokens, n_old = row->length - row->n_new, n = 0;
    if (row->length == 0) return 0; /* tokens of a padding row are none of its own */
    for (int32_t token = 0; token < row->n_new; n++) {
        int32_t block = (n_old + token) / block_tokens;
        int32_t n_tokens = at_most((block + 1) * block_tokens - (n_old + token), row->n_new - token);
        hkv_cpu_new_source(job->step, item->tile.row, item->tile.kv_head, token, n_tokens, &sources[n]);
        blocks[n] = block;
        token += n_tokens;
    }
    return n;
}

static const hkv_cpu_kernels *hot_kernels(const decode_job *job, const decode_item *item, const hkv_cpu_source *sources,
                                          int32_t n_sources)
{
    const hkv_cpu_kernels *kernels = job->step->kernels;
    if (item_row(job, item)->n_new == 1) return kernels; /* which sees all of them */
    for (int32_t i = 0; i < n_sources && kernels == job->step->kernels; i++)
        kernels = hkv_cpu_new_kernels(job->step, &sources[i], 0, sources[i].n_tokens);
    return kernels;
}

static int32_t hot_page_source(const decode_job *job, const decode_item *item, int32_t block, hkv_cpu_source *source)
{
    if (block < item->first_block || hkv_plan_hot_page(&job->step->group->plan, item->tile.row, block) < 0) return 0;
    return hkv_cpu_block_source(job->step, item->tile.row, item->tile.kv_head, block, source);
}

static int32_t hot_page_sources(const decode_job *job, const decode_item *item, hkv_cpu_source *sources,
                                int32_t *blocks)
{
    const hkv_plan_row *row = item_row(job, item);
    int32_t n = 0;
    if (job->step->group->format.bits == 0) return 0;
    for (int32_t i = 0; i < row->n_sinks + row->n_window; i++) {
        int32_t block = i < row->n_sinks ? i : row->window_first + i - row->n_sinks;
        blocks[n] = block;
        n += hot_page_source(job, item, block, &sources[n]);
    }
    return n;
}

static void item_attend_hot(const decode_job *job, decode_item *item)
{
    const hkv_format *f = &job->step->group->format;
    hkv_cpu_source sources[HOT_SOURCES];
    int32_t blocks[HOT_SOURCES], n_rows = item->query.n_rows;
    float lse[HOT_SOURCES * CHUNK_ROWS];
    int32_t n = hot_new_sources(job, item, sources, blocks);
    const hkv_cpu_kernels *kernels = hot_kernels(job, item, sources, n);
    n += hot_page_sources(job, item, sources + n, blocks + n);
    kernels->decode(&item->query, sources, n, &item->state, NULL, job->has_mass ? lse : NULL);
    for (int32_t i = 0; i < n; i++) {
        if (job->has_mass) block_lse_add(item, blocks[i], lse + (size_t)i * (size_t)n_rows);
        item->total.n_bytes += (int64_t)sources[i].n_tokens * f->row_bytes;
    }
    for (int32_t i = 0; i < n_rows; i++)
        item->reference_lse[i] = item->state.sum[i] > 0.0f ? item->state.max[i] + logf(item->state.sum[i]) : -INFINITY;
}

/* All hot pages on their way while cold blocks are looked up: one after the other, as they are read, they would be
 * waited for twice as long. */
static void item_prefetch_hot(const decode_job *job, const decode_item *item)
{
    hkv_cpu_source sources[HOT_SOURCES];
    int32_t blocks[HOT_SOURCES], n = hot_page_sources(job, item, sources, blocks);
    for (int32_t i = 0; i < n; i++) {
        int64_t n_bytes = (int64_t)sources[i].n_tokens * job->step->group->format.row_bytes;
        for (int64_t byte = 0; byte < n_bytes; byte += 64) HKV_PREFETCH((const uint8_t *)sources[i].data + byte);
    }
}

/* Load the chunk of heads that starts at first_head, and do its hot part. */
static void item_start_chunk(const decode_job *job, decode_item *item, int32_t first_head)
{
    const hkv_format *f = &job->step->group->format;
    item->tile.first_head = first_head;
    item->tile.n_heads = at_most(job->step->group_heads - first_head, item->chunk_heads);
    hkv_cpu_load_query(job->step, &item->tile, item->q, &item->query);
    item->state = hkv_cpu_state_clear(f, item->query.n_rows, item->state_memory);
    if (job->has_mass)
        for (size_t i = 0; i < (size_t)item->n_blocks * (size_t)item->query.n_rows; i++) item->block_lse[i] = -INFINITY;
    item_attend_hot(job, item);
}

/* ------------------------------------------------------------------------------------ item: selection of L2 records */

/* Is a taken before b? By bound or by history; equal ones by bound, then by lower block. */
static int32_t l2_precedes(const l2_block *a, const l2_block *b, int32_t by_history)
{
    if (by_history && a->history != b->history) return a->history > b->history;
    if (a->bound != b->bound) return a->bound > b->bound;
    return a->block < b->block;
}

static void l2_sift_down(l2_block *heap, int32_t n, int32_t parent, int32_t by_history)
{
    for (int32_t child; (child = 2 * parent + 1) < n; parent = child) {
        l2_block moved = heap[parent];
        if (child + 1 < n && l2_precedes(&heap[child + 1], &heap[child], by_history)) child++;
        if (!l2_precedes(&heap[child], &moved, by_history)) return;
        heap[parent] = heap[child];
        heap[child] = moved;
    }
}

static void l2_make_heap(l2_block *heap, int32_t n, int32_t by_history)
{
    for (int32_t parent = n / 2 - 1; parent >= 0; parent--) l2_sift_down(heap, n, parent, by_history);
}

/* Move the first of the heap behind the other n - 1. */
static void l2_take_first(l2_block *heap, int32_t n, int32_t by_history)
{
    l2_block first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    l2_sift_down(heap, n - 1, 0, by_history);
}

static int32_t l2_take(l2_block *blocks, int32_t n, int32_t n_taken, int32_t by_history)
{
    l2_make_heap(blocks, n, by_history);
    for (; n_taken > 0 && n > 0; n_taken--, n--) l2_take_first(blocks, n, by_history);
    return n;
}

/* Upper bound of the softmax mass of a record, up to a factor common to all. */
static double l2_estimate(const hkv_cpu_step *step, const l2_block *block, float max_bound)
{
    return block->n_tokens * exp((double)step->args->softmax_scale * ((double)block->bound - (double)max_bound));
}

/* Take more of blocks 0 .. n-1, by bound, until what is left of n_all estimates is small enough. */
static int32_t l2_take_mass(const hkv_cpu_step *step, l2_block *blocks, int32_t n, int32_t n_all)
{
    double left = 0.0, total = 0.0, allowed;
    float max_bound = -INFINITY;
    for (int32_t i = 0; i < n_all; i++) max_bound = larger(max_bound, blocks[i].bound);
    for (int32_t i = 0; i < n_all; i++) {
        double estimate = l2_estimate(step, &blocks[i], max_bound);
        total += estimate;
        left += i < n ? estimate : 0.0;
    }
    allowed = total * (1.0 - (double)step->group->config.sparse_min_mass);
    l2_make_heap(blocks, n, 0);
    for (; n > 0 && left > allowed; n--) {
        left -= l2_estimate(step, &blocks[0], max_bound);
        l2_take_first(blocks, n, 0);
    }
    return n;
}

static void prefetch_header(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t block)
{
    HKV_PREFETCH(hkv_layer_record(step->layer, hkv_cpu_row_block(step, row, block), kv_head));
}

/* Keys of a record at INT4, on their way while something else is done. */
static void prefetch_keys(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t block)
{
    const uint8_t *record = hkv_layer_record(step->layer, hkv_cpu_row_block(step, row, block), kv_head);
    for (uint32_t byte = 0; byte < step->group->format.v_params_offset; byte += 64) HKV_PREFETCH(record + byte);
}

/* What is cold; returns how many of it are L2 records of which some query token sees a token. */
static int32_t item_find_cold(const decode_job *job, decode_item *item)
{
    const hkv_cpu_step *step = job->step;
    const int32_t has_records = step->group->format.bits != 0;
    int32_t n_l2 = 0;
    for (int32_t i = 0; i < item->n_blocks; i++) {
        hkv_cpu_source source;
        const hkv_record_header *header;
        item->cold[i] = (cold_block){.n_tokens = 0, .reading = BLOCK_OPEN};
        if (has_records && i + HEADERS_AHEAD < item->n_blocks)
            prefetch_header(step, item->tile.row, item->tile.kv_head, item->first_block + i + HEADERS_AHEAD);
        if (!hkv_cpu_block_source(step, item->tile.row, item->tile.kv_head, item->first_block + i, &source)) continue;
        if (has_records && source.kind != HKV_SOURCE_RECORD) continue;
        item->cold[i].n_tokens = (int16_t)source.n_tokens;
        item->cold[i].precision = (uint8_t)source.precision;
        header = (const hkv_record_header *)source.data;
        if (!has_records || header->tier != HKV_TIER_L2) continue;
        item->cold[i].reading = BLOCK_AT_INT4;
        item->l2[n_l2++] = (l2_block){-INFINITY, header->mass_history, item->first_block + i, source.n_tokens};
    }
    return n_l2;
}

static void item_bound_l2(const decode_job *job, decode_item *item, int32_t n)
{
    const hkv_cpu_step *step = job->step;
    for (int32_t head = 0; head < step->group_heads; head += item->chunk_heads) {
        hkv_cpu_tile tile = item->tile;
        hkv_cpu_query query;
        tile.first_head = head;
        tile.n_heads = at_most(step->group_heads - head, item->chunk_heads);
        hkv_cpu_load_query(step, &tile, item->q, &query);
        for (int32_t i = 0; i < n; i++) {
            int32_t physical = hkv_cpu_row_block(step, tile.row, item->l2[i].block);
            const uint8_t *record = hkv_layer_record(step->layer, physical, tile.kv_head);
            item->l2[i].bound = larger(item->l2[i].bound, step->kernels->record_bound(&query, record));
        }
    }
}

/* Of n_all records. */
static void item_select_l2(const decode_job *job, decode_item *item, int32_t n_all)
{
    int32_t k = job->step->group->config.sparse_top_k, n_by_bound = (k + 1) / 2, n = n_all;
    if (n_all <= k) return;
    item_bound_l2(job, item, n_all);
    n = l2_take(item->l2, n, n_by_bound, 0);
    n = l2_take(item->l2, n, k - n_by_bound, 1);
    if (job->step->group->config.sparse_min_mass > 0.0f) n = l2_take_mass(job->step, item->l2, n, n_all);
    for (int32_t i = 0; i < n; i++) item->cold[item->l2[i].block - item->first_block].reading = BLOCK_LEFT_OUT;
    item->n_unselected = n;
}

/* ----------------------------------------------------------------------------------------------- tasks: cold blocks */

/* The cold source of the item's block i, as precise as it may be read; false if nothing of it is. */
static int32_t item_cold_source(const decode_job *job, const decode_item *item, int32_t i, hkv_cpu_source *source)
{
    const hkv_cpu_step *step = job->step;
    const hkv_format *f = &step->group->format;
    const cold_block cold = item->cold[i];
    int32_t block = item->first_block + i, at_int4 = job->is_survey || cold.reading == BLOCK_AT_INT4;
    if (cold.n_tokens == 0 || cold.reading == BLOCK_LEFT_OUT) return 0;
    *source = (hkv_cpu_source){
        .kind = f->bits == 0 ? HKV_SOURCE_PAGE : HKV_SOURCE_RECORD,
        .precision = at_int4 ? HKV_READ_INT4 : (hkv_precision)cold.precision,
        .data = hkv_layer_record(step->layer, hkv_cpu_row_block(step, item->tile.row, block), item->tile.kv_head),
        .first_position = (int64_t)block * f->block_tokens,
        .n_tokens = cold.n_tokens,
        .logical_block = block,
    };
    return 1;
}

/* [n_sources, n_rows] LSEs of a call: into shares in a survey, else where masses are made from. */
static void item_keep_lse(const decode_job *job, decode_item *item, const hkv_cpu_source *sources, int32_t n_sources,
                          const float *lse)
{
    int32_t n_rows = item->query.n_rows;
    for (int32_t s = 0; s < n_sources; s++) {
        const float *source_lse = lse + (size_t)s * (size_t)n_rows;
        float *share = &item->shares[sources[s].logical_block - item->first_block];
        if (!job->is_survey) block_lse_add(item, sources[s].logical_block, source_lse);
        for (int32_t r = 0; job->is_survey && r < n_rows; r++)
            if (source_lse[r] > -INFINITY) *share = larger(*share, expf(source_lse[r] - item->reference_lse[r]));
    }
}

static hkv_cpu_progressive item_progress(const decode_job *job, const decode_item *item)
{
    const hkv_config *config = &job->step->group->config;
    return (hkv_cpu_progressive){
        .skip_mass = config->skip_mass, .refine_mass = config->refine_mass, .reference_lse = item->reference_lse};
}

/* A single task needs no partial softmax. */
static int32_t adds_to_state(const decode_job *job, const decode_item *item)
{
    return item->n_tasks == 1 && !job->is_survey;
}

static void item_attend_cold(const decode_job *job, decode_item *item, int32_t task, int32_t partial)
{
    const hkv_format *f = &job->step->group->format;
    int32_t end = at_most((task + 1) * item->blocks_per_task, item->n_blocks), n = 0;
    int32_t needs_lse = job->has_mass || job->is_survey;
    float *memory = item->partials + (size_t)partial * hkv_cpu_state_floats(f, item->query.n_rows);
    hkv_cpu_state state = adds_to_state(job, item) ? item->state : hkv_cpu_state_clear(f, item->query.n_rows, memory);
    hkv_cpu_progressive *progress = &item->progress[partial];
    hkv_cpu_source sources[CALL_SOURCES];
    float lse[CALL_SOURCES * CHUNK_ROWS];
    *progress = item_progress(job, item);
    for (int32_t i = task * item->blocks_per_task;
         f->bits != 0 && i < end && i < task * item->blocks_per_task + KEYS_AHEAD; i++)
        prefetch_keys(job->step, item->tile.row, item->tile.kv_head, item->first_block + i);
    for (int32_t i = task * item->blocks_per_task; i < end; i++) {
        n += item_cold_source(job, item, i, &sources[n]);
        if (n == 0 || (n < CALL_SOURCES && i + 1 < end)) continue;
        job->step->kernels->decode(&item->query, sources, n, &state, item->is_decided ? NULL : progress,
                                   needs_lse ? lse : NULL);
        if (needs_lse) item_keep_lse(job, item, sources, n, lse);
        for (int32_t s = 0; f->bits == 0 && s < n; s++)
            progress->n_bytes += (int64_t)sources[s].n_tokens * f->row_bytes;
        n = 0;
    }
}

/* ------------------------------------------------------------------------------------------ masses kept in headers */

/* The header of the item's block i, NULL if the row has no record there. */
static hkv_record_header *item_header(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t block)
{
    int32_t physical = hkv_cpu_row_block(step, row, block);
    uint8_t *record = physical == 0 ? NULL : hkv_layer_record(step->layer, physical, kv_head);
    return record && hkv_cpu_record_n_tokens(&step->group->format, record) > 0 ? (hkv_record_header *)record : NULL;
}

/* Only rows that write move state: a dummy step leaves no trace. */
static int32_t row_keeps_mass(const hkv_cpu_step *step, int32_t row)
{
    return step->group->plan.rows[row].first_segment >= 0;
}

static int32_t keeps_mass(const decode_job *job)
{
    return job->step->batch->clock != NULL && job->step->group->format.bits != 0;
}

/* Once a step, and before any mass of it is kept: the histories of a KV head's records decay, whoever shares them, and
 * their masses start again. A negative mass marks what is done. */
static void head_decay_history(const decode_job *job, int32_t kv_head)
{
    const hkv_cpu_step *step = job->step;
    for (int32_t r = 0; r < step->batch->n_rows; r++) {
        const hkv_plan_row *row = &step->group->plan.rows[r];
        int32_t end =
            is_decoded(row) && row_keeps_mass(step, r) ? hkv_cpu_n_blocks(&step->group->format, row->length) : 0;
        for (int32_t block = hkv_cpu_first_block(step->group, row->length - row->n_new); block < end; block++) {
            hkv_record_header *header = item_header(step, r, kv_head, block);
            if (block + HEADERS_AHEAD < end) prefetch_header(step, r, kv_head, block + HEADERS_AHEAD);
            if (!header || header->mass < 0.0f) continue;
            header->mass_history *= HKV_MASS_DECAY;
            header->mass = -1.0f;
        }
    }
}

/* Masses of the wave's items of one KV head, all of which have ended, into headers, which rows may share. */
static void head_keep_mass(const decode_job *job, int32_t kv_head)
{
    if (!job->head_is_decayed[kv_head]) head_decay_history(job, kv_head);
    job->head_is_decayed[kv_head] = 1;
    for (int32_t n = 0; n < job->n_items; n++) {
        const decode_item *item = &job->items[n];
        if (item->tile.kv_head != kv_head || !row_keeps_mass(job->step, item->tile.row)) continue;
        for (int32_t i = 0; i < item->n_blocks; i++) {
            hkv_record_header *header = item_header(job->step, item->tile.row, kv_head, item->first_block + i);
            if (!header) continue;
            header->mass = larger(header->mass, item->block_mass[i]);
            header->mass_history = larger(header->mass_history, item->block_mass[i]);
        }
    }
}

/* --------------------------------------------------------------------------------------- an item from begin to end */

static void item_prepare(const decode_job *job, decode_item *item)
{
    int32_t n_l2;
    item_prefetch_hot(job, item);
    n_l2 = item_find_cold(job, item);
    for (int32_t i = 0; i < item->n_blocks; i++) {
        item->block_mass[i] = 0.0f;
        item->shares[i] = -1.0f;
    }
    item_select_l2(job, item, n_l2);
    item_start_chunk(job, item, 0);
    atomic_store(&item->is_ready, 1);
}

static int32_t round_n_tasks(const decode_job *job, const decode_item *item)
{
    int64_t done = (int64_t)job->round * item->n_partials;
    return done >= item->n_tasks ? 0 : at_most(item->n_tasks - (int32_t)done, item->n_partials);
}

/* What the tasks of a round found, in the order of their blocks. */
static void item_merge_round(const decode_job *job, decode_item *item)
{
    const hkv_format *f = &job->step->group->format;
    int32_t n_rows = item->query.n_rows, n = round_n_tasks(job, item);
    size_t per_row = (size_t)(n_rows + 15) / 16 * 16, state_floats = hkv_cpu_state_floats(f, n_rows);
    for (int32_t p = 0; p < n; p++) {
        float *memory = item->partials + (size_t)p * state_floats;
        hkv_cpu_state part = {memory, memory + per_row, memory + 2 * per_row};
        const hkv_cpu_progressive *progress = &item->progress[p];
        if (!adds_to_state(job, item)) hkv_cpu_state_merge(f, n_rows, &item->state, &part);
        item->total.n_read += progress->n_read;
        item->total.n_skipped += progress->n_skipped;
        item->total.n_refined += progress->n_refined;
        item->total.n_bytes += progress->n_bytes;
        item->total.skipped_share += progress->skipped_share;
    }
}

/* The chunk's outputs and its part in the masses. */
static void item_finish_chunk(const decode_job *job, decode_item *item)
{
    float row_lse[CHUNK_ROWS];
    hkv_cpu_store_output(job->step, &item->tile, &item->state, row_lse);
    for (int32_t i = 0; job->has_mass && i < item->n_blocks; i++) {
        const float *lse = item->block_lse + (size_t)i * (size_t)item->query.n_rows;
        float largest = -INFINITY;
        for (int32_t r = 0; r < item->query.n_rows; r++) largest = larger(largest, lse[r] - row_lse[r]);
        item->block_mass[i] = larger(item->block_mass[i], expf(largest));
    }
}

static int32_t is_chunked(const decode_job *job)
{
    return job->items[0].chunk_heads < job->step->group_heads;
}

/* The last task of the item's round has ended. Whole items end here, and with its last item the KV head. */
static void item_end_round(const decode_job *job, decode_item *item)
{
    int32_t kv_head = item->tile.kv_head;
    if (!job->is_survey) item_merge_round(job, item);
    if (is_chunked(job) || (int64_t)(job->round + 1) * item->n_partials < item->n_tasks) return;
    item_finish_chunk(job, item);
    if (atomic_fetch_sub(&job->head_n_open[kv_head], 1) == 1 && keeps_mass(job)) head_keep_mass(job, kv_head);
}

/* -------------------------------------------------------------------------------------------------- rounds of tasks */

static decode_item *round_item(const decode_job *job, int32_t cold_task)
{
    int32_t lo = 0, hi = job->n_items - 1;
    while (lo < hi) { /* the last item whose first task is not beyond */
        int32_t middle = (lo + hi + 1) / 2;
        if (job->first_task[middle] <= cold_task) {
            lo = middle;
        } else {
            hi = middle - 1;
        }
    }
    return &job->items[lo];
}

static void round_cold_task(const decode_job *job, int32_t cold_task)
{
    decode_item *item = round_item(job, cold_task);
    int32_t partial = cold_task - job->first_task[item - job->items];
    if (job->step->group->format.bits != 0) /* later blocks first, of which more is read */
        partial = job->first_task[item - job->items + 1] - 1 - cold_task;
    hkv_threads_await(&item->is_ready);
    item_attend_cold(job, item, job->round * item->n_partials + partial, partial);
    if (atomic_fetch_sub(&item->n_open, 1) == 1) item_end_round(job, item);
}

static void round_task(void *ctx, int32_t task_idx, int32_t worker)
{
    const decode_job *job = ctx;
    (void)worker;
    if (task_idx < job->n_prepares) {
        item_prepare(job, &job->items[task_idx]);
    } else {
        round_cold_task(job, task_idx - job->n_prepares);
    }
}

/* All cold blocks of all items of the wave, after n_prepares tasks of that kind. */
static void wave_attend_cold(decode_job *job)
{
    for (job->round = 0;; job->round++) {
        job->first_task[0] = 0;
        for (int32_t i = 0; i < job->n_items; i++) {
            int32_t n_tasks = round_n_tasks(job, &job->items[i]);
            atomic_store(&job->items[i].n_open, n_tasks);
            job->first_task[i + 1] = job->first_task[i] + n_tasks;
        }
        if (job->first_task[job->n_items] == 0) return;
        hkv_threads_run(job->step->threads, job->n_prepares + job->first_task[job->n_items], round_task, job);
        job->n_prepares = 0;
    }
}

/* ------------------------------------------------------------------------------------- waves of one item in chunks */

/* Several chunks: decide what is read of every record from what a reading of all keys at INT4 says. */
static void survey_decide(const decode_job *job, decode_item *item)
{
    const hkv_config *config = &job->step->group->config;
    const hkv_format *f = &job->step->group->format;
    for (int32_t i = 0; i < item->n_blocks; i++) {
        hkv_cpu_source source;
        if (item->shares[i] < 0.0f || !item_cold_source(job, item, i, &source)) continue;
        item->total.n_read++;
        if (item->shares[i] < config->skip_mass) {
            item->cold[i].reading = BLOCK_LEFT_OUT;
            item->total.n_skipped++;
            item->total.skipped_share += (double)item->shares[i];
            item->total.n_bytes += f->v_params_offset;
            continue;
        }
        if (item->shares[i] < config->refine_mass) {
            item->cold[i].reading = BLOCK_AT_INT4;
            source.precision = HKV_READ_INT4;
        }
        item->total.n_refined += source.precision > HKV_READ_INT4;
        item->total.n_bytes += hkv_record_prefix_bytes(f, source.precision);
    }
}

static void wave_of_chunks(decode_job *job)
{
    decode_item *item = job->items;
    int32_t n_heads = job->step->group_heads;
    item_prepare(job, item);
    item->is_decided = 1;
    if (job->step->group->format.bits != 0) {
        job->is_survey = 1;
        for (int32_t head = 0; head < n_heads; head += item->chunk_heads) {
            item_start_chunk(job, item, head);
            wave_attend_cold(job);
        }
        job->is_survey = 0;
        item->total = item_progress(job, item);
        survey_decide(job, item);
    }
    for (int32_t head = 0; head < n_heads; head += item->chunk_heads) {
        item_start_chunk(job, item, head);
        wave_attend_cold(job);
        item_finish_chunk(job, item);
    }
    if (keeps_mass(job)) head_keep_mass(job, item->tile.kv_head);
}

/* ------------------------------------------------------------------------------------------------------------ waves */

static void item_write_mass(const decode_job *job, const decode_item *item)
{
    const hkv_attend *args = job->step->args;
    size_t row = (size_t)item->tile.row * (size_t)job->step->group->n_kv_heads + (size_t)item->tile.kv_head;
    memcpy(args->mass + row * (size_t)args->mass_stride + item->first_block, item->block_mass,
           (size_t)item->n_blocks * sizeof(float));
}

static void wave_count(const decode_job *job)
{
    hkv_counters *counters = job->step->group->counters;
    for (int32_t i = 0; i < job->n_items; i++) {
        const decode_item *item = &job->items[i];
        counters->n_records_read += (uint64_t)item->total.n_read;
        counters->n_records_skipped += (uint64_t)item->total.n_skipped;
        counters->n_records_refined += (uint64_t)item->total.n_refined;
        counters->n_records_unselected += (uint64_t)item->n_unselected;
        counters->n_bytes_read += (uint64_t)item->total.n_bytes;
        counters->skipped_mass += item->total.skipped_share;
        counters->n_skipped_mass_terms++;
    }
}

static void wave_run(decode_job *job)
{
    if (job->n_items == 0) return;
    if (is_chunked(job)) {
        wave_of_chunks(job);
    } else {
        for (int32_t h = 0; h < job->step->group->n_kv_heads; h++) atomic_store(&job->head_n_open[h], 0);
        for (int32_t i = 0; i < job->n_items; i++) atomic_fetch_add(&job->head_n_open[job->items[i].tile.kv_head], 1);
        job->n_prepares = job->n_items;
        wave_attend_cold(job);
    }
    for (int32_t i = 0; job->step->args->mass && i < job->n_items; i++) item_write_mass(job, &job->items[i]);
    wave_count(job);
    job->n_items = 0;
}

static decode_item item_of(const decode_job *job, int32_t row_idx, int32_t kv_head)
{
    const hkv_cpu_step *step = job->step;
    const hkv_plan_row *row = &step->group->plan.rows[row_idx];
    int32_t max_heads = CHUNK_ROWS / row->n_new;
    decode_item item = {
        .tile = {.row = row_idx, .kv_head = kv_head, .n_tokens = row->n_new},
        .chunk_heads = at_most(step->group_heads, max_heads),
        .first_block = hkv_cpu_first_block(step->group, row->length - row->n_new),
    };
    return item;
}

void hkv_cpu_decode_rows(const hkv_cpu_step *step)
{
    const hkv_group *group = step->group;
    const hkv_format *f = &group->format;
    int32_t max_items = wave_items(group);
    hkv_cpu_arena arena = hkv_cpu_arena_of(group), empty;
    decode_job job = {.step = step};
    job.items = hkv_cpu_arena_take(&arena, (size_t)max_items * sizeof(decode_item));
    job.first_task = hkv_cpu_arena_take(&arena, ((size_t)max_items + 1) * sizeof(int32_t));
    job.head_is_decayed = hkv_cpu_arena_take(&arena, (size_t)group->n_kv_heads * sizeof(int32_t));
    job.head_n_open = hkv_cpu_arena_take(&arena, (size_t)group->n_kv_heads * sizeof(atomic_int));
    memset(job.head_is_decayed, 0, (size_t)group->n_kv_heads * sizeof(int32_t));
    job.has_mass = step->args->mass != NULL || keeps_mass(&job);
    empty = arena;
    for (int32_t r = 0; r < step->batch->n_rows; r++) {
        const hkv_plan_row *row = &group->plan.rows[r];
        if (!is_decoded(row)) continue;
        for (int32_t kv_head = 0; kv_head < group->n_kv_heads; kv_head++) {
            decode_item item = item_of(&job, r, kv_head);
            int32_t n_blocks = hkv_cpu_n_blocks(f, row->length) - item.first_block;
            int32_t n_rows = item.chunk_heads * row->n_new;
            int32_t is_alone = item.chunk_heads < step->group_heads ||
                               (job.n_items > 0 && job.items[0].chunk_heads < step->group_heads);
            if (job.n_items == max_items || (is_alone && job.n_items > 0) ||
                item_bytes(f, n_rows, n_blocks) > hkv_cpu_arena_left(&arena)) {
                wave_run(&job);
                arena = empty;
            }
            item_place(f, n_rows, n_blocks, &arena, &item);
            item.total = item_progress(&job, &item);
            job.items[job.n_items++] = item;
        }
    }
    wave_run(&job);
}
