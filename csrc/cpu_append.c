/* cpu_append.c - the first four phases of a layer: victims, restores, writes, seals (docs/transitions.md). */
#include "cpu_step.h"

enum {
    RESTORE_TOKENS = 8,     /* tokens decoded at a time */
    INLINE_ROWS = 64,       /* token rows that are not worth waking the pool for */
    MAX_LANES_OF_PAGES = 16 /* seals are bound by memory before that */
};

static uint8_t *step_record(const hkv_cpu_step *step, int32_t block, int32_t kv_head)
{
    return hkv_layer_record(step->layer, block, kv_head);
}

static uint8_t *step_page(const hkv_cpu_step *step, int32_t page, int32_t kv_head)
{
    return hkv_group_hot_page(step->group, step->layer_idx, page, kv_head);
}

/* Tokens 0 .. n_held-1 from another row page, where they lie at the same place; zeros up to n_tokens. */
static void copy_rows(const hkv_format *f, uint8_t *dst, const uint8_t *src, int32_t n_held, int32_t n_tokens)
{
    size_t held_bytes = (size_t)n_held * (size_t)f->row_bytes;
    if (dst != src) memcpy(dst, src, held_bytes);
    memset(dst + held_bytes, 0, (size_t)n_tokens * (size_t)f->row_bytes - held_bytes);
}

/* ------------------------------------------------------------------------------------------------ writing a record */

static void header_clear(const hkv_format *f, uint32_t stamp, hkv_record_header *header)
{
    *header = (hkv_record_header){
        .stamp = stamp,
        .tier = HKV_TIER_L1,
        .version = HKV_FORMAT_VERSION,
        .bits = (uint8_t)f->bits,
        .low_k_slot = -1,
        .low_v_slot = -1,
    };
}

/* k, v with token strides in elements. */
static void record_write(const hkv_cpu_step *step, uint8_t *record, uint32_t stamp, int32_t n_tokens, const void *k,
                         int64_t k_stride_token, const void *v, int64_t v_stride_token)
{
    const hkv_format *f = &step->group->format;
    hkv_record_header *header = (hkv_record_header *)record;
    header_clear(f, stamp, header);
    header->n_clamped = step->kernels->record_encode(f, k, k_stride_token, v, v_stride_token, n_tokens, record);
    header->n_valid_tokens = (uint16_t)n_tokens;
    header->planes = (uint8_t)f->planes;
    header->last_access = step->batch->clock ? *step->batch->clock : 0;
}

/* The same from a hot page, through `scratch` of a row page's size. */
static void record_write_page(const hkv_cpu_step *step, uint8_t *record, uint32_t stamp, int32_t n_tokens,
                              const uint8_t *page, uint8_t *scratch)
{
    const hkv_format *f = &step->group->format;
    size_t half_bytes = (size_t)f->row_bytes / 2;
    uint8_t *k = scratch, *v = scratch + (size_t)n_tokens * half_bytes;
    for (int32_t token = 0; token < n_tokens; token++)
        hkv_row_load(f, page, token, k + (size_t)token * half_bytes, v + (size_t)token * half_bytes);
    record_write(step, record, stamp, n_tokens, k, f->stored_dim, v, f->stored_dim);
}

/* ----------------------------------------------------------------------------------------- tasks: (thing, KV head) */

typedef struct append_job {
    const hkv_cpu_step *step;
    uint8_t *lanes; /* [n_lanes, row_page_bytes] */
    int32_t n_lanes, n_tasks;
    void (*run)(const hkv_cpu_step *step, int32_t thing, int32_t kv_head, uint8_t *scratch);
} append_job;

static void append_lane(void *ctx, int32_t lane, int32_t worker)
{
    const append_job *job = ctx;
    uint8_t *scratch = job->lanes + (size_t)lane * job->step->group->format.row_page_bytes;
    (void)worker;
    for (int32_t task = lane; task < job->n_tasks; task += job->n_lanes)
        job->run(job->step, task / job->step->group->n_kv_heads, task % job->step->group->n_kv_heads, scratch);
}

static int32_t lanes_of(const hkv_group *group)
{
    int32_t n_lanes = hkv_cpu_max_lanes();
    int64_t n_tasks = (int64_t)group->n_kv_heads * (group->n_hot_pages > 0 ? group->n_hot_pages : 1);
    n_lanes = n_lanes < MAX_LANES_OF_PAGES ? n_lanes : MAX_LANES_OF_PAGES;
    return n_lanes < n_tasks ? n_lanes : (int32_t)n_tasks;
}

size_t hkv_cpu_append_workspace(const hkv_group *group)
{
    return (size_t)lanes_of(group) * group->format.row_page_bytes;
}

/* n_rows: token rows touched in all, to tell whether it is worth waking the pool. */
static void append_run(const hkv_cpu_step *step, int32_t n_things, int64_t n_rows,
                       void (*run)(const hkv_cpu_step *, int32_t, int32_t, uint8_t *))
{
    /* As many lanes as the workspace holds: asking for the machine's cores again would cost more than the work. */
    size_t n_fit = step->group->workspace_bytes / step->group->format.row_page_bytes;
    int32_t n_tasks = n_things * step->group->n_kv_heads;
    int32_t n_lanes = n_fit < MAX_LANES_OF_PAGES ? (int32_t)n_fit : MAX_LANES_OF_PAGES;
    append_job job = {step, step->group->workspace, n_lanes < n_tasks ? n_lanes : n_tasks, n_tasks, run};
    if (n_tasks == 0) return;
    hkv_threads_run(n_rows <= INLINE_ROWS ? NULL : step->threads, job.n_lanes, append_lane, &job);
}

/* ---------------------------------------------------------------------------------------------------- the phases */

/* Phase 1. */
static void victim_write(const hkv_cpu_step *step, int32_t victim_idx, int32_t kv_head, uint8_t *scratch)
{
    const hkv_victim *victim = &step->group->plan.victims[victim_idx];
    record_write_page(step, step_record(step, victim->block, kv_head), victim->stamp, victim->n_tokens,
                      step_page(step, victim->page, kv_head), scratch);
}

/* Tokens 0 .. n_held-1 of a record into a row page; zeros for those that it does not hold, and up to n_tokens. */
static void restore_record(const hkv_cpu_step *step, const uint8_t *record, int32_t n_held, int32_t n_tokens,
                           uint8_t *page)
{
    const hkv_format *f = &step->group->format;
    hkv_precision precision = hkv_record_precision(((const hkv_record_header *)record)->planes);
    int32_t n_in_record = hkv_cpu_record_n_tokens(f, record);
    float k[RESTORE_TOKENS * HKV_MAX_HEAD_DIM], v[RESTORE_TOKENS * HKV_MAX_HEAD_DIM];
    uint8_t k_row[HKV_MAX_HEAD_DIM * sizeof(float)], v_row[HKV_MAX_HEAD_DIM * sizeof(float)];
    if (n_held > n_in_record) n_held = n_in_record;
    for (int32_t first = 0; first < n_tokens; first += RESTORE_TOKENS) {
        int32_t n = n_tokens - first < RESTORE_TOKENS ? n_tokens - first : RESTORE_TOKENS;
        int32_t n_decoded = n_held - first < n ? n_held - first : n;
        memset(k, 0, sizeof k);
        memset(v, 0, sizeof v);
        if (n_decoded > 0) step->kernels->record_decode(f, record, precision, first, n_decoded, k, v);
        for (int32_t i = 0; i < n; i++) {
            step->kernels->elements_from_f32((hkv_dtype)f->dtype, k + i * f->head_dim, f->head_dim, k_row);
            step->kernels->elements_from_f32((hkv_dtype)f->dtype, v + i * f->head_dim, f->head_dim, v_row);
            hkv_row_store(f, page, first + i, k_row, v_row);
        }
    }
}

/* Phase 2. */
static void segment_restore(const hkv_cpu_step *step, int32_t segment_idx, int32_t kv_head, uint8_t *scratch)
{
    const hkv_format *f = &step->group->format;
    const hkv_segment *segment = &step->group->plan.segments[segment_idx];
    (void)scratch;
    if (segment->n_restore == 0) return;
    if (f->bits == 0) {
        copy_rows(f, step_record(step, segment->block, kv_head), step_record(step, segment->restore_block, kv_head),
                  segment->n_held, segment->n_restore);
    } else if (segment->restore_page >= 0) {
        copy_rows(f, step_page(step, segment->page, kv_head), step_page(step, segment->restore_page, kv_head),
                  segment->n_held, segment->n_restore);
    } else {
        restore_record(step, step_record(step, segment->restore_block, kv_head), segment->n_held, segment->n_restore,
                       step_page(step, segment->page, kv_head));
    }
}

static const uint8_t *new_row(const void *base, int64_t token, int64_t stride_token, int32_t kv_head,
                              int64_t stride_head, int32_t element_bytes)
{
    return (const uint8_t *)base + (token * stride_token + kv_head * stride_head) * element_bytes;
}

static const uint8_t *new_k(const hkv_cpu_step *step, int64_t token, int32_t kv_head)
{
    return new_row(step->args->k, token, step->args->k_stride_token, kv_head, step->args->k_stride_head,
                   step->group->format.element_bytes);
}

static const uint8_t *new_v(const hkv_cpu_step *step, int64_t token, int32_t kv_head)
{
    return new_row(step->args->v, token, step->args->v_stride_token, kv_head, step->args->v_stride_head,
                   step->group->format.element_bytes);
}

static void segment_update_header(const hkv_format *f, const hkv_segment *segment, uint8_t *record)
{
    hkv_record_header *header = (hkv_record_header *)record;
    int32_t n_held = hkv_cpu_record_n_tokens(f, record);
    if (segment->restart || n_held == 0) {
        header_clear(f, segment->stamp, header);
        return;
    }
    header->stamp = segment->stamp;
    header->n_valid_tokens = (uint16_t)(n_held < segment->offset ? n_held : segment->offset);
}

/* Phase 3. */
static void segment_write(const hkv_cpu_step *step, int32_t segment_idx, int32_t kv_head, uint8_t *scratch)
{
    const hkv_format *f = &step->group->format;
    const hkv_segment *segment = &step->group->plan.segments[segment_idx];
    uint8_t *record = step_record(step, segment->block, kv_head), *page = record;
    (void)scratch;
    if (f->bits != 0) {
        if (segment->page < 0) return; /* direct: phase 4 writes everything */
        page = step_page(step, segment->page, kv_head);
        segment_update_header(f, segment, record);
    }
    for (int32_t i = 0; i < segment->n_tokens; i++) {
        int64_t token = (int64_t)segment->first_token + i;
        hkv_row_store(f, page, segment->offset + i, new_k(step, token, kv_head), new_v(step, token, kv_head));
    }
}

static int32_t segment_is_direct(const hkv_format *f, const hkv_segment *segment)
{
    return f->bits != 0 && segment->page < 0;
}

static int32_t segment_is_sealed(const hkv_format *f, const hkv_segment *segment)
{
    return segment_is_direct(f, segment) || (f->bits != 0 && segment->seal);
}

/* Phase 4. */
static void segment_seal(const hkv_cpu_step *step, int32_t segment_idx, int32_t kv_head, uint8_t *scratch)
{
    const hkv_format *f = &step->group->format;
    const hkv_segment *segment = &step->group->plan.segments[segment_idx];
    uint8_t *record = step_record(step, segment->block, kv_head);
    if (segment_is_direct(f, segment)) {
        record_write(step, record, segment->stamp, f->block_tokens, new_k(step, segment->first_token, kv_head),
                     step->args->k_stride_token, new_v(step, segment->first_token, kv_head),
                     step->args->v_stride_token);
    } else if (segment_is_sealed(f, segment)) {
        record_write_page(step, record, segment->stamp, f->block_tokens, step_page(step, segment->page, kv_head),
                          scratch);
    }
}

static void count_clamped(const hkv_cpu_step *step, int32_t block)
{
    for (int32_t kv_head = 0; kv_head < step->group->n_kv_heads; kv_head++)
        step->group->counters->n_nonfinite_inputs +=
            ((const hkv_record_header *)step_record(step, block, kv_head))->n_clamped;
}

void hkv_cpu_append(const hkv_cpu_step *step)
{
    const hkv_format *f = &step->group->format;
    const hkv_plan *plan = &step->group->plan;
    int32_t n_segments = *plan->n_segments, n_victims = f->bits == 0 ? 0 : *plan->n_victims;
    int64_t n_heads = step->group->n_kv_heads, n_restored = 0, n_written = 0, n_sealed = 0;
    for (int32_t i = 0; i < n_segments; i++) {
        const hkv_segment *segment = &plan->segments[i];
        n_restored += segment->n_restore;
        n_written += segment->n_tokens;
        n_sealed += segment_is_sealed(f, segment);
    }
    append_run(step, n_victims, (int64_t)n_victims * f->block_tokens * n_heads, victim_write);
    append_run(step, n_restored ? n_segments : 0, n_restored * n_heads, segment_restore);
    append_run(step, n_segments, n_written * n_heads, segment_write);
    append_run(step, n_sealed ? n_segments : 0, n_sealed * f->block_tokens * n_heads, segment_seal);
    for (int32_t i = 0; i < n_victims; i++) count_clamped(step, plan->victims[i].block);
    for (int32_t i = 0; i < n_segments; i++) {
        const hkv_segment *segment = &plan->segments[i];
        if (segment_is_sealed(f, segment)) count_clamped(step, segment->block);
    }
}
