/* cpu_prefill.c - attention of prefill rows: tiles of query tokens, each a task of its own. */
#include "cpu_dispatch.h"
#include "cpu_step.h"

#include <stdatomic.h>

enum { CALL_SOURCES = 32 };

typedef struct prefill_job {
    const hkv_cpu_step *step;
    int32_t heads_per_tile, tokens_per_tile, n_head_chunks;
    int64_t *first_tile; /* [n_rows + 1] of every row, 0 tiles for rows that are not prefilled */
    uint8_t *lanes;      /* [n_lanes, lane_bytes] scratch */
    size_t lane_bytes;
    atomic_int_least64_t next_tile;
} prefill_job;

static int32_t is_prefilled(const hkv_plan_row *row)
{
    return row->n_new > HKV_DECODE_MAX_TOKENS;
}

/* Largest tile of any path: the workspace is sized before one is chosen. */
static int32_t max_tile_rows(void)
{
    int32_t n_rows = 1;
    for (int32_t i = 0; i < hkv_cpu_n_paths(); i++) {
        int32_t n = hkv_cpu_path(i)->prefill_tile_tokens;
        n_rows = n > n_rows ? n : n_rows;
    }
    return n_rows;
}

static size_t query_bytes(const hkv_format *f, int32_t n_rows)
{
    return hkv_cpu_arena_bytes((size_t)n_rows * (size_t)f->stored_dim * sizeof(float));
}

static size_t lane_bytes(const hkv_format *f, int32_t n_rows)
{
    return query_bytes(f, n_rows) + hkv_cpu_arena_bytes(hkv_cpu_state_floats(f, n_rows) * sizeof(float));
}

size_t hkv_cpu_prefill_workspace(const hkv_group *group)
{
    int32_t n_lanes = group->max_new_tokens > HKV_DECODE_MAX_TOKENS ? hkv_cpu_max_lanes() : 0;
    size_t table = hkv_cpu_arena_bytes(((size_t)group->max_rows + 1) * sizeof(int64_t));
    return table + (size_t)n_lanes * lane_bytes(&group->format, max_tile_rows());
}

/* ------------------------------------------------------------------------------------------------------- one tile */

static void add_blocks(const prefill_job *job, const hkv_cpu_tile *tile, const hkv_cpu_query *query,
                       hkv_cpu_state *state)
{
    const hkv_cpu_step *step = job->step;
    const hkv_plan_row *row = &step->group->plan.rows[tile->row];
    hkv_cpu_source sources[CALL_SOURCES];
    int32_t n_blocks = hkv_cpu_n_blocks(&step->group->format, (int64_t)row->length - row->n_new), n = 0;
    for (int32_t block = hkv_cpu_first_block(step->group, query->first_position); block < n_blocks; block++) {
        n += hkv_cpu_block_source(step, tile->row, tile->kv_head, block, &sources[n]);
        if (n < CALL_SOURCES && block + 1 < n_blocks) continue;
        step->kernels->prefill(query, sources, n, state);
        n = 0;
    }
}

/* The row's new tokens that the tile sees. */
static void add_new_tokens(const prefill_job *job, const hkv_cpu_tile *tile, const hkv_cpu_query *query,
                           hkv_cpu_state *state)
{
    int32_t end = tile->first_token + tile->n_tokens, window = job->step->group->window_tokens, first = 0;
    int32_t first_hidden; /* from here on some query of the tile does not see a token */
    hkv_cpu_source source;
    if (job->step->group->plan.rows[tile->row].length == 0) return; /* tokens of a padding row are none of its own */
    if (window > 0 && tile->first_token - window + 1 > 0) first = tile->first_token - window + 1;
    first_hidden = window > 0 ? first : tile->first_token;
    hkv_cpu_new_source(job->step, tile->row, tile->kv_head, first, end - first, &source);
    hkv_cpu_new_kernels(job->step, &source, first_hidden - first, end - first_hidden)
        ->prefill(query, &source, 1, state);
}

static hkv_cpu_tile tile_of(const prefill_job *job, int64_t tile_idx)
{
    const hkv_cpu_step *step = job->step;
    int32_t row = 0;
    int64_t n_token_tiles, in_row;
    hkv_cpu_tile tile;
    while (tile_idx >= job->first_tile[row + 1]) row++;
    in_row = tile_idx - job->first_tile[row];
    n_token_tiles = (job->first_tile[row + 1] - job->first_tile[row]) / (step->group->n_kv_heads * job->n_head_chunks);
    tile.row = row;
    tile.kv_head = (int32_t)(in_row / (n_token_tiles * job->n_head_chunks));
    tile.first_head = (int32_t)(in_row / n_token_tiles % job->n_head_chunks) * job->heads_per_tile;
    tile.n_heads = step->group_heads - tile.first_head < job->heads_per_tile ? step->group_heads - tile.first_head
                                                                             : job->heads_per_tile;
    tile.first_token = (int32_t)(in_row % n_token_tiles) * job->tokens_per_tile;
    tile.n_tokens = step->group->plan.rows[row].n_new - tile.first_token;
    if (tile.n_tokens > job->tokens_per_tile) tile.n_tokens = job->tokens_per_tile;
    return tile;
}

static void tile_attend(const prefill_job *job, const hkv_cpu_tile *tile, uint8_t *scratch)
{
    const hkv_format *f = &job->step->group->format;
    int32_t n_rows = tile->n_heads * tile->n_tokens;
    float *q = (float *)scratch;
    hkv_cpu_state state = hkv_cpu_state_clear(f, n_rows, (float *)(scratch + query_bytes(f, n_rows)));
    hkv_cpu_query query;
    hkv_cpu_load_query(job->step, tile, q, &query);
    add_blocks(job, tile, &query, &state);
    add_new_tokens(job, tile, &query, &state);
    hkv_cpu_store_output(job->step, tile, &state, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- all */

static void prefill_lane(void *ctx, int32_t lane, int32_t worker)
{
    prefill_job *job = ctx;
    int64_t n_tiles = job->first_tile[job->step->batch->n_rows], tile_idx;
    (void)worker;
    while ((tile_idx = atomic_fetch_add(&job->next_tile, 1)) < n_tiles) {
        hkv_cpu_tile tile = tile_of(job, tile_idx);
        tile_attend(job, &tile, job->lanes + (size_t)lane * job->lane_bytes);
    }
}

void hkv_cpu_prefill_rows(const hkv_cpu_step *step)
{
    const hkv_group *group = step->group;
    hkv_cpu_arena arena = hkv_cpu_arena_of(group);
    int32_t tile_rows = step->kernels->prefill_tile_tokens, n_rows = step->batch->n_rows;
    prefill_job job = {.step = step, .lane_bytes = lane_bytes(&group->format, tile_rows)};
    int64_t n_lanes, n_threads = step->threads ? hkv_threads_count(step->threads) : 1;
    job.heads_per_tile = step->group_heads < tile_rows ? step->group_heads : tile_rows;
    job.n_head_chunks = (step->group_heads + job.heads_per_tile - 1) / job.heads_per_tile;
    job.tokens_per_tile = tile_rows / job.heads_per_tile;
    job.first_tile = hkv_cpu_arena_take(&arena, ((size_t)n_rows + 1) * sizeof(int64_t));
    job.first_tile[0] = 0;
    for (int32_t row = 0; row < n_rows; row++) {
        const hkv_plan_row *r = &group->plan.rows[row];
        int64_t n_token_tiles = is_prefilled(r) ? (r->n_new + job.tokens_per_tile - 1) / job.tokens_per_tile : 0;
        job.first_tile[row + 1] = job.first_tile[row] + n_token_tiles * group->n_kv_heads * job.n_head_chunks;
    }
    if (job.first_tile[n_rows] == 0) return;
    job.lanes = arena.base + arena.used;
    n_lanes = (int64_t)(hkv_cpu_arena_left(&arena) / job.lane_bytes);
    if (n_lanes > n_threads) n_lanes = n_threads;
    if (n_lanes > job.first_tile[n_rows]) n_lanes = job.first_tile[n_rows];
    atomic_init(&job.next_tile, 0);
    hkv_threads_run(step->threads, (int32_t)n_lanes, prefill_lane, &job);
}
