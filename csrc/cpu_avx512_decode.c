/* cpu_avx512_decode.c - attention of a few query tokens with AVX-512.
 *
 * Query rows are taken four at a time. Records go through cpu_avx512_records.h, at most CALL_RECORDS of them between
 * two merges into the caller's state; rows of pages and tensors through cpu_avx512_rows.h.
 *
 * Progressive reading first weighs the keys of a run of records at INT4 (survey), then decides and has what was decided
 * fetched, and reads that after the survey of the next run, when it has come. Weights are kept relative to the record's
 * own largest score, so that those of the survey serve where a record stays at INT4.
 */
#include "cpu_avx512_rows.h"

#if defined(__x86_64__)

enum {
    CALL_RECORDS = 64,
    KEPT_WEIGHTS = 16384, /* floats of the survey's weights that are kept */
    SURVEY_RUN = 16,
    MAX_RUN = 8,                                                    /* records whose keys are weighed together */
    AHEAD_BYTES = 10240,                                            /* about what is prefetched at a time */
    RUN_WEIGHTS = MAX_RUN * HKV_BLOCK_ROWS * HKV_MAX_BLOCK_SIZE / 4 /* floats, for smaller blocks */
};

/* A block's running maximum lags behind the true one by at most this much: sums grow to e^20 of their share. */
#define LAZY_MAX 20.0f

/* ------------------------------------------------------------------------------------------- four rows of a query */

typedef struct row_block {
    const hkv_cpu_query *query;
    int32_t first_row, n_rows;
    const float *q;                /* [n_rows, DP] */
    int64_t first[HKV_BLOCK_ROWS]; /* positions that a row sees: first .. last */
    int64_t last[HKV_BLOCK_ROWS];
} row_block;

static row_block row_block_at(const hkv_cpu_query *query, int32_t first_row)
{
    int32_t left = query->n_rows - first_row;
    row_block rows = {.query = query,
                      .first_row = first_row,
                      .n_rows = left < HKV_BLOCK_ROWS ? left : HKV_BLOCK_ROWS,
                      .q = query->q + (size_t)first_row * (size_t)query->format->stored_dim};
    for (int32_t i = 0; i < rows.n_rows; i++) {
        rows.last[i] = query->first_position + (first_row + i) / query->group;
        rows.first[i] = query->window_tokens > 0 ? rows.last[i] - query->window_tokens + 1 : INT64_MIN;
    }
    return rows;
}

/* Tokens [*lo, *hi) of n that start at first_position are visible to row i. */
static void visible_tokens(const row_block *rows, int32_t i, int64_t first_position, int32_t n, int32_t *lo,
                           int32_t *hi)
{
    *hi = rows->last[i] >= first_position + n ? n
          : rows->last[i] < first_position    ? 0
                                              : (int32_t)(rows->last[i] - first_position) + 1;
    *lo = rows->first[i] <= first_position         ? 0
          : rows->first[i] >= first_position + *hi ? *hi
                                                   : (int32_t)(rows->first[i] - first_position);
}

/* Running or partial softmax of the rows: a lane each, the others empty. */
typedef struct row_sums {
    __m128 max, sum;
} row_sums;

HKV_AVX512_INLINE row_sums row_sums_empty(void)
{
    row_sums empty = {_mm_set1_ps(-INFINITY), _mm_setzero_ps()};
    return empty;
}

HKV_AVX512_INLINE __mmask8 lanes_of_rows(int32_t n_rows)
{
    return (__mmask8)((1u << n_rows) - 1u);
}

HKV_AVX512_INLINE __m128 exp_rows(__m128 x)
{
    return _mm512_castps512_ps128(hkv_avx512_exp(_mm512_castps128_ps512(x)));
}

/* max + log(sum), -inf where the sum is 0. */
HKV_AVX512_INLINE __m128 lse_rows(const row_sums *sums)
{
    __m128 log_sum = _mm512_castps512_ps128(hkv_avx512_log(_mm512_castps128_ps512(sums->sum)));
    __mmask8 is_empty = _mm_cmp_ps_mask(sums->sum, _mm_setzero_ps(), _CMP_EQ_OQ);
    return _mm_mask_mov_ps(_mm_add_ps(sums->max, log_sum), is_empty, _mm_set1_ps(-INFINITY));
}

static void keep_lse(const row_block *rows, const row_sums *sums, float *source_lse)
{
    if (source_lse) _mm_mask_storeu_ps(source_lse + rows->first_row, lanes_of_rows(rows->n_rows), lse_rows(sums));
}

HKV_AVX512_INLINE __mmask16 lanes_between(int32_t lo, int32_t hi)
{
    uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
    uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1u;
    return (__mmask16)(below_hi & ~below_lo);
}

/* Scores of n tokens from first_position on, [n_rows, stride], in place: soft cap, and -inf for what a row does not
 * see, up to a multiple of 16. Returns the rows' maxima. */
HKV_AVX512_INLINE __m128 scores_finish(int32_t n_rows, const row_block *rows, int64_t first_position, int32_t n,
                                       size_t stride, float *scores)
{
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    const float cap = rows->query->logits_soft_cap;
    __m512 max[HKV_BLOCK_ROWS];
    for (int32_t i = 0; i < n_rows; i++) {
        float *row = scores + (size_t)i * stride;
        int32_t lo, hi, n_plain = 0;
        visible_tokens(rows, i, first_position, n, &lo, &hi);
        max[i] = hidden;
        if (cap == 0.0f && lo == 0)
            for (; n_plain + 16 <= hi; n_plain += 16) max[i] = _mm512_max_ps(max[i], _mm512_loadu_ps(row + n_plain));
        for (int32_t t = n_plain; t < n; t += 16) {
            __m512 score = _mm512_loadu_ps(row + t);
            if (cap > 0.0f) score = hkv_avx512_soft_cap(score, cap);
            score = _mm512_mask_mov_ps(hidden, lanes_between(lo - t, hi - t), score);
            max[i] = _mm512_max_ps(max[i], score);
            _mm512_storeu_ps(row + t, score);
        }
    }
    return _mm_mask_mov_ps(_mm_set1_ps(-INFINITY), lanes_of_rows(n_rows), hkv_reduce_rows_max(n_rows, max));
}

/* In place, scores to exp(score - reference); a reference is -inf only where all scores are. Returns the rows' sums. */
HKV_AVX512_INLINE __m128 weights_make(int32_t n_rows, __m128 reference, int32_t n, size_t stride, float *scores)
{
    float references[HKV_BLOCK_ROWS];
    __m512 sum[HKV_BLOCK_ROWS];
    _mm_storeu_ps(references,
                  _mm_maskz_mov_ps(_mm_cmp_ps_mask(reference, _mm_set1_ps(-INFINITY), _CMP_NEQ_UQ), reference));
    for (int32_t i = 0; i < n_rows; i++) {
        float *row = scores + (size_t)i * stride;
        sum[i] = _mm512_setzero_ps();
        for (int32_t t = 0; t < n; t += 16) {
            __m512 weight = hkv_avx512_exp(_mm512_sub_ps(_mm512_loadu_ps(row + t), _mm512_set1_ps(references[i])));
            sum[i] = _mm512_add_ps(sum[i], weight);
            _mm512_storeu_ps(row + t, weight);
        }
    }
    return _mm_maskz_mov_ps(lanes_of_rows(n_rows), hkv_reduce_rows_add(n_rows, sum));
}

/* ---------------------------------------------------------------------------------------- record kernels, by shape */

static int32_t tiles_of(int32_t n_tokens)
{
    return (n_tokens + HKV_TILE_TOKENS - 1) / HKV_TILE_TOKENS;
}

HKV_AVX512_INLINE void prefetch_bytes(const uint8_t *data, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i += 64) _mm_prefetch((const char *)(data + i), _MM_HINT_T0);
}

HKV_AVX512_INLINE void key_side_load(const hkv_record_shape shape, const row_block *rows, const uint8_t *record,
                                     const uint8_t *ahead, hkv_key_side *side)
{
    const hkv_format *f = rows->query->format;
    prefetch_bytes(ahead + f->k_params_offset, f->k_high_offset - f->k_params_offset);
    hkv_key_side_make(shape, f, record, rows->q, rows->query->softmax_scale, side);
}

/* In place, scores of a record [n_rows, TP] to weights relative to the rows' largest ones. */
HKV_AVX512_INLINE row_sums record_soften(const hkv_record_shape shape, const row_block *rows,
                                         const hkv_cpu_source *source, float *scores)
{
    const size_t stride = (size_t)rows->query->format->stored_tokens;
    row_sums part;
    part.max = scores_finish(shape.n_rows, rows, source->first_position, source->n_tokens, stride, scores);
    part.sum = weights_make(shape.n_rows, part.max, source->n_tokens, stride, scores);
    return part;
}

/* Softmax weights of n records' tokens, relative to each record's own maximum: weights [n, HKV_BLOCK_ROWS, TP], parts
 * [n]. The next record's queries are made and the last one's scores softened beside the products of one record, so that
 * the processor finds independent work. ahead[s] is prefetched in step with record s. */
HKV_AVX512_INLINE void records_weigh(const hkv_record_shape shape, const row_block *rows, const hkv_cpu_source *sources,
                                     int32_t n, const uint8_t *const *ahead, float *weights, row_sums *parts)
{
    const hkv_format *f = rows->query->format;
    const size_t stride = HKV_BLOCK_ROWS * (size_t)f->stored_tokens;
    hkv_key_side sides[2];
    key_side_load(shape, rows, sources[0].data, ahead[0], &sides[0]);
    for (int32_t s = 0; s < n; s++) {
        if (s + 1 < n) key_side_load(shape, rows, sources[s + 1].data, ahead[s + 1], &sides[(s + 1) & 1]);
        hkv_record_dots(shape, f, sources[s].data, &sides[s & 1], tiles_of(sources[s].n_tokens), ahead[s],
                        weights + (size_t)s * stride);
        if (s > 0) parts[s - 1] = record_soften(shape, rows, &sources[s - 1], weights + (size_t)(s - 1) * stride);
    }
    parts[n - 1] = record_soften(shape, rows, &sources[n - 1], weights + (size_t)(n - 1) * stride);
}

/* sums += factor[row] * weights . v */
HKV_AVX512_INLINE void record_add(const hkv_record_shape shape, const hkv_format *f, const hkv_cpu_source *source,
                                  const float *weights, const float *factor, const uint8_t *ahead, hkv_value_sums *sums)
{
    int32_t n_tiles = tiles_of(source->n_tokens);
    hkv_value_side side;
    prefetch_bytes(ahead + f->v_params_offset, f->v_high_offset - f->v_params_offset);
    hkv_value_side_make(shape, f, source->data, weights, source->n_tokens, n_tiles, &side);
    hkv_record_values(shape, f, source->data, &side, n_tiles, factor, ahead, sums);
}

typedef struct record_kernels {
    void (*weigh)(const row_block *rows, const hkv_cpu_source *sources, int32_t n, int32_t with_low,
                  const uint8_t *const *ahead, float *weights, row_sums *parts);
    void (*add)(const hkv_format *f, const hkv_cpu_source *source, int32_t with_low, const float *weights,
                const float *factor, const uint8_t *ahead, hkv_value_sums *sums);
} record_kernels;

#define RECORD_KERNELS(name, rows_n, groups, half)                                                                     \
    static void weigh_##name(const row_block *rows, const hkv_cpu_source *sources, int32_t n, int32_t with_low,        \
                             const uint8_t *const *ahead, float *weights, row_sums *parts)                             \
    {                                                                                                                  \
        const hkv_format *f = rows->query->format;                                                                     \
        (void)f;                                                                                                       \
        if (with_low)                                                                                                  \
            records_weigh((hkv_record_shape){rows_n, groups, half, 1}, rows, sources, n, ahead, weights, parts);       \
        else                                                                                                           \
            records_weigh((hkv_record_shape){rows_n, groups, half, 0}, rows, sources, n, ahead, weights, parts);       \
    }                                                                                                                  \
    static void add_##name(const hkv_format *f, const hkv_cpu_source *source, int32_t with_low, const float *weights,  \
                           const float *factor, const uint8_t *ahead, hkv_value_sums *sums)                            \
    {                                                                                                                  \
        if (with_low)                                                                                                  \
            record_add((hkv_record_shape){rows_n, groups, half, 1}, f, source, weights, factor, ahead, sums);          \
        else                                                                                                           \
            record_add((hkv_record_shape){rows_n, groups, half, 0}, f, source, weights, factor, ahead, sums);          \
    }

#define RECORD_KERNELS_OF_ROWS(n)                                                                                      \
    RECORD_KERNELS(n##_d64, n, 1, 0)                                                                                   \
    RECORD_KERNELS(n##_d128, n, 2, 0)                                                                                  \
    RECORD_KERNELS(n##_any, n, (f->stored_dim + 63) / 64, (f->stored_dim & 32) != 0)

RECORD_KERNELS_OF_ROWS(1)
RECORD_KERNELS_OF_ROWS(2)
RECORD_KERNELS_OF_ROWS(3)
RECORD_KERNELS_OF_ROWS(4)

static const record_kernels *record_kernels_of(const hkv_format *f, int32_t n_rows)
{
    static const record_kernels table[3][HKV_BLOCK_ROWS] = {
        {{weigh_1_d64, add_1_d64}, {weigh_2_d64, add_2_d64}, {weigh_3_d64, add_3_d64}, {weigh_4_d64, add_4_d64}},
        {{weigh_1_d128, add_1_d128},
         {weigh_2_d128, add_2_d128},
         {weigh_3_d128, add_3_d128},
         {weigh_4_d128, add_4_d128}},
        {{weigh_1_any, add_1_any}, {weigh_2_any, add_2_any}, {weigh_3_any, add_3_any}, {weigh_4_any, add_4_any}},
    };
    return &table[f->stored_dim == 64 ? 0 : f->stored_dim == 128 ? 1 : 2][n_rows - 1];
}

/* ----------------------------------------------------------------------------------------- sums of a block of rows */

static void value_sums_clear(const row_block *rows, hkv_value_sums *sums)
{
    size_t n_groups = (size_t)(rows->query->format->stored_dim + 63) / 64;
    for (int32_t i = 0; i < rows->n_rows; i++) {
        memset(sums->words[i], 0, n_groups * sizeof sums->words[i][0]);
        memset(sums->base[i], 0, sizeof sums->base[i]);
    }
}

static void value_sums_scale(const hkv_format *f, int32_t row, float factor, hkv_value_sums *sums)
{
    __m512 *words = sums->words[row][0][0];
    for (int32_t i = 0; i < (f->stored_dim + 63) / 64 * 16; i++)
        words[i] = _mm512_mul_ps(words[i], _mm512_set1_ps(factor));
    for (int32_t vg = 0; vg < HKV_MAX_VALUE_GROUPS; vg++) sums->base[row][vg] *= factor;
}

/* Let the running maxima follow where they lag too far behind. */
static void running_follow(const row_block *rows, __mmask8 lagging, const row_sums *part, row_sums *running,
                           hkv_value_sums *sums)
{
    float scale[HKV_BLOCK_ROWS];
    __m128 kept = _mm_maskz_mov_ps(_mm_cmp_ps_mask(running->sum, _mm_setzero_ps(), _CMP_NEQ_UQ),
                                   exp_rows(_mm_sub_ps(running->max, part->max)));
    _mm_storeu_ps(scale, kept);
    for (int32_t i = 0; i < rows->n_rows; i++)
        if (lagging >> i & 1) value_sums_scale(rows->query->format, i, scale[i], sums);
    running->sum = _mm_mask_mul_ps(running->sum, lagging, running->sum, kept);
    running->max = _mm_mask_mov_ps(running->max, lagging, part->max);
}

/* Take a record's part into the running softmax; factor [n_rows] is what its weights count. */
static void running_update(const row_block *rows, const row_sums *part, row_sums *running, hkv_value_sums *sums,
                           float factor[HKV_BLOCK_ROWS])
{
    __mmask8 is_there = _mm_cmp_ps_mask(part->max, _mm_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __mmask8 lagging =
        _mm_mask_cmp_ps_mask(is_there, part->max, _mm_add_ps(running->max, _mm_set1_ps(LAZY_MAX)), _CMP_GT_OQ);
    __m128 count;
    if (lagging) running_follow(rows, lagging, part, running, sums);
    count = _mm_maskz_mov_ps(is_there, exp_rows(_mm_sub_ps(part->max, running->max)));
    running->sum = _mm_fmadd_ps(count, part->sum, running->sum);
    _mm_storeu_ps(factor, count);
}

/* Merge sums relative to `running` into row `row` of the state: acc [DP]. */
static void state_merge_row(const hkv_cpu_query *query, hkv_cpu_state *state, int32_t row, float max, float sum,
                            const float *acc)
{
    int32_t stored_dim = query->format->stored_dim;
    float *dst = state->acc + (size_t)row * (size_t)stored_dim;
    float new_max, own, other;
    if (sum == 0.0f) return;
    new_max = fmaxf(state->max[row], max);
    own = expf(state->max[row] - new_max);
    other = expf(max - new_max);
    state->max[row] = new_max;
    state->sum[row] = state->sum[row] * own + sum * other;
    for (int32_t c = 0; c < stored_dim; c += 16)
        _mm512_storeu_ps(dst + c, _mm512_fmadd_ps(_mm512_loadu_ps(acc + c), _mm512_set1_ps(other),
                                                  _mm512_mul_ps(_mm512_loadu_ps(dst + c), _mm512_set1_ps(own))));
}

/* Words of one row summed over their columns, as DP channels. */
static void value_sums_row(const hkv_format *f, const hkv_value_sums *sums, int32_t row, float *acc)
{
    const __m512i by_channel = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int32_t g = 0; g < (f->stored_dim + 63) / 64; g++) {
        const __m512 base = _mm512_set1_ps(sums->base[row][g / 2]);
        const int32_t n_steps = f->stored_dim - 64 * g < 64 ? 2 : 4;
        __m512i quads[4], steps[4]; /* quads[k]: lane j, dword s is channel 16 s + 4 k + j */
        for (int32_t k = 0; k < 4; k++) {
            const __m512(*words)[2] = &sums->words[row][g][4 * k & 7];
            quads[k] = _mm512_castps_si512(
                hkv_fold_lanes_ps(words[0][k >> 1], words[1][k >> 1], words[2][k >> 1], words[3][k >> 1]));
        }
        hkv_words_by_step(quads, steps);
        for (int32_t s = 0; s < n_steps; s++) {
            __m512 channels = _mm512_castsi512_ps(_mm512_permutexvar_epi32(by_channel, steps[s]));
            _mm512_storeu_ps(acc + 64 * g + 16 * s, _mm512_add_ps(channels, base));
        }
    }
}

static void value_sums_merge(const row_block *rows, const row_sums *running, const hkv_value_sums *sums,
                             hkv_cpu_state *state)
{
    float acc[HKV_MAX_HEAD_DIM], max[HKV_BLOCK_ROWS], sum[HKV_BLOCK_ROWS];
    _mm_storeu_ps(max, running->max);
    _mm_storeu_ps(sum, running->sum);
    for (int32_t i = 0; i < rows->n_rows; i++) {
        value_sums_row(rows->query->format, sums, i, acc);
        state_merge_row(rows->query, state, rows->first_row + i, max[i], sum[i], acc);
    }
}

/* ---------------------------------------------------------------------------------------------- a batch of records */

typedef struct record_batch {
    const hkv_cpu_query *query;
    const hkv_cpu_source *sources; /* [n] records */
    int32_t n;
    int32_t max_run;                    /* records that are weighed together */
    int32_t distance;                   /* records by which keys are prefetched */
    int32_t readings[CALL_RECORDS];     /* hkv_precision or HKV_NOT_READ */
    const uint8_t *ahead[CALL_RECORDS]; /* what is prefetched while a record is read */
    float *kept;          /* weights of the survey at INT4, NULL where there was none or they do not fit */
    row_sums *kept_parts; /* [row blocks, n] */
    float *source_lse;    /* [n, n_rows] or NULL */
} record_batch;

static size_t kept_idx(const record_batch *batch, int32_t block, int32_t s)
{
    return (size_t)block * (size_t)batch->n + (size_t)s;
}

static float *kept_weights(const record_batch *batch, int32_t block, int32_t s)
{
    return batch->kept + kept_idx(batch, block, s) * HKV_BLOCK_ROWS * (size_t)batch->query->format->stored_tokens;
}

static float *batch_lse(const record_batch *batch, int32_t s)
{
    return batch->source_lse ? batch->source_lse + (size_t)s * (size_t)batch->query->n_rows : NULL;
}

/* While a record is surveyed, the one `distance` further; the last ones stand for themselves. */
static void look_ahead_in_survey(record_batch *batch)
{
    for (int32_t s = 0; s < batch->n; s++)
        batch->ahead[s] = batch->sources[s + batch->distance < batch->n ? s + batch->distance : s].data;
}

/* The same among the records first .. end-1 that are read. */
static void look_ahead_in_reading(record_batch *batch, int32_t first, int32_t end)
{
    int32_t queue[CALL_RECORDS], n = 0;
    for (int32_t s = first; s < end; s++)
        if (batch->readings[s] != HKV_NOT_READ) queue[n++] = s;
    for (int32_t i = 0; i < n; i++)
        batch->ahead[queue[i]] = batch->sources[queue[i + batch->distance < n ? i + batch->distance : i]].data;
}

/* A block of rows and what it has of a batch so far. */
typedef struct block_sums {
    row_block rows;
    int32_t block;
    row_sums running;
    hkv_value_sums values;
} block_sums;

static void block_sums_start(const hkv_cpu_query *query, int32_t block, block_sums *sums)
{
    sums->rows = row_block_at(query, block * HKV_BLOCK_ROWS);
    sums->block = block;
    sums->running = row_sums_empty();
    value_sums_clear(&sums->rows, &sums->values);
}

/* Add the values of n records, batch->sources[which[i]], with weights [n, HKV_BLOCK_ROWS, TP]. */
static void records_add(const record_batch *batch, const int32_t *which, int32_t n, const float *weights,
                        const row_sums *parts, block_sums *sums)
{
    const hkv_format *f = batch->query->format;
    const record_kernels *kernels = record_kernels_of(f, sums->rows.n_rows);
    for (int32_t i = 0; i < n; i++) {
        int32_t s = which[i];
        float factor[HKV_BLOCK_ROWS];
        keep_lse(&sums->rows, &parts[i], batch_lse(batch, s));
        running_update(&sums->rows, &parts[i], &sums->running, &sums->values, factor);
        kernels->add(f, &batch->sources[s], batch->readings[s] == HKV_READ_INT8,
                     weights + (size_t)i * HKV_BLOCK_ROWS * (size_t)f->stored_tokens, factor, batch->ahead[s],
                     &sums->values);
    }
}

/* Weigh and add n records, wherever in the batch they are, which are read with low planes of keys or all without. */
static void records_read(const record_batch *batch, const int32_t *which, int32_t n, int32_t with_low, block_sums *sums)
{
    const record_kernels *kernels = record_kernels_of(batch->query->format, sums->rows.n_rows);
    float weights[RUN_WEIGHTS];
    row_sums parts[MAX_RUN];
    hkv_cpu_source sources[MAX_RUN];
    const uint8_t *ahead[MAX_RUN];
    for (int32_t first = 0, n_run; first < n; first += n_run) {
        n_run = n - first < batch->max_run ? n - first : batch->max_run;
        for (int32_t i = 0; i < n_run; i++) {
            sources[i] = batch->sources[which[first + i]];
            ahead[i] = batch->ahead[which[first + i]];
        }
        kernels->weigh(&sums->rows, sources, n_run, with_low, ahead, weights, parts);
        records_add(batch, which + first, n_run, weights, parts, sums);
    }
}

/* Read the records first .. end-1 as decided. Those of a kind go together, so that each has others beside it. */
static void batch_attend(const record_batch *batch, int32_t first, int32_t end, block_sums *sums)
{
    const row_sums unread = row_sums_empty();
    int32_t queues[2][CALL_RECORDS], n[2] = {0, 0}; /* to be weighed without and with low planes of keys */
    for (int32_t s = first; s < end; s++) {
        int32_t with_low = batch->readings[s] != HKV_READ_INT4;
        if (batch->readings[s] == HKV_NOT_READ)
            keep_lse(&sums->rows, &unread, batch_lse(batch, s));
        else if (batch->kept && !with_low)
            records_add(batch, &s, 1, kept_weights(batch, sums->block, s),
                        &batch->kept_parts[kept_idx(batch, sums->block, s)], sums);
        else
            queues[with_low][n[with_low]++] = s;
    }
    for (int32_t with_low = 0; with_low < 2; with_low++)
        records_read(batch, queues[with_low], n[with_low], with_low, sums);
}

static void block_sums_end(const block_sums *sums, hkv_cpu_state *state)
{
    value_sums_merge(&sums->rows, &sums->running, &sums->values, state);
}

/* -------------------------------------------------------------------------------------------- progressive reading */

/* Have what was decided on the way to the L2 cache while other records are surveyed. */
static void prefetch_reading(const hkv_format *f, const uint8_t *record, int32_t reading)
{
    size_t end = reading == HKV_NOT_READ ? 0 : hkv_record_prefix_bytes(f, (hkv_precision)reading);
    for (size_t i = f->v_params_offset; i < end; i += 64) _mm_prefetch((const char *)(record + i), _MM_HINT_T1);
}

/* Largest share of the record among the block's rows, as the hot part has it; -1 if none sees any of it. */
HKV_AVX512_INLINE float rows_share(const row_block *rows, const row_sums *part, const float *reference_lse)
{
    __mmask8 is_there = _mm_cmp_ps_mask(part->sum, _mm_setzero_ps(), _CMP_NEQ_UQ);
    __m128 reference = _mm_maskz_loadu_ps(lanes_of_rows(rows->n_rows), reference_lse + rows->first_row);
    /* capped: it only matters then that it is large */
    __m128 distance = _mm_min_ps(_mm_sub_ps(part->max, reference), _mm_set1_ps(80.0f));
    __m128 share = _mm_mul_ps(part->sum, exp_rows(distance));
    share = _mm_mask_mov_ps(_mm_set1_ps(-1.0f), is_there, share);
    share = _mm_max_ps(share, _mm_movehl_ps(share, share));
    return _mm_cvtss_f32(_mm_max_ss(share, _mm_shuffle_ps(share, share, 1)));
}

/* Weigh the keys of a run, records first .. end-1, at INT4 and decide. */
static void batch_survey(record_batch *batch, int32_t first, int32_t end, hkv_cpu_progressive *progressive)
{
    const hkv_format *f = batch->query->format;
    const hkv_cpu_source *sources = batch->sources + first;
    int32_t n_blocks = (batch->query->n_rows + HKV_BLOCK_ROWS - 1) / HKV_BLOCK_ROWS, n = end - first;
    float own_weights[RUN_WEIGHTS], shares[CALL_RECORDS];
    row_sums own_parts[MAX_RUN];
    for (int32_t s = 0; s < n; s++) shares[s] = -1.0f;
    for (int32_t block = 0; block < n_blocks; block++) {
        const row_block rows = row_block_at(batch->query, block * HKV_BLOCK_ROWS);
        float *weights = batch->kept ? kept_weights(batch, block, first) : own_weights;
        row_sums *parts = batch->kept ? &batch->kept_parts[kept_idx(batch, block, first)] : own_parts;
        record_kernels_of(f, rows.n_rows)->weigh(&rows, sources, n, 0, &batch->ahead[first], weights, parts);
        for (int32_t s = 0; s < n; s++)
            shares[s] = fmaxf(shares[s], rows_share(&rows, &parts[s], progressive->reference_lse));
    }
    for (int32_t s = 0; s < n; s++) {
        batch->readings[first + s] = hkv_cpu_progressive_decide(f, &sources[s], (double)shares[s], progressive);
        prefetch_reading(f, sources[s].data, batch->readings[first + s]);
    }
    look_ahead_in_reading(batch, first, end);
}

/* Survey a run, then read the one before, for which the memory had the time of a survey. */
static void batch_attend_progressively(record_batch *batch, hkv_cpu_progressive *progressive, hkv_cpu_state *state)
{
    block_sums sums;
    int32_t read = 0, n;
    block_sums_start(batch->query, 0, &sums);
    for (int32_t first = 0; first < batch->n; first += n) {
        n = batch->n - first < SURVEY_RUN ? batch->n - first : SURVEY_RUN;
        batch_survey(batch, first, first + n, progressive);
        batch_attend(batch, read, first, &sums);
        read = first;
    }
    batch_attend(batch, read, batch->n, &sums);
    block_sums_end(&sums, state);
}

/* Is any of a source's tokens visible to any row? */
static int32_t source_is_visible(const hkv_cpu_query *query, const hkv_cpu_source *source)
{
    int64_t first = query->first_position, last = first + query->n_rows / query->group - 1;
    int64_t hidden = query->window_tokens > 0 ? first - query->window_tokens : -1;
    return source->n_tokens > 0 && source->first_position <= last &&
           source->first_position + source->n_tokens - 1 > hidden;
}

/* Read in full what is visible. */
static void batch_read_all(record_batch *batch, hkv_cpu_progressive *progressive)
{
    for (int32_t s = 0; s < batch->n; s++) {
        const hkv_cpu_source *source = &batch->sources[s];
        batch->readings[s] = source_is_visible(batch->query, source) ? (int32_t)source->precision : HKV_NOT_READ;
        if (!progressive || batch->readings[s] == HKV_NOT_READ) continue;
        progressive->n_read++;
        progressive->n_refined += source->precision > HKV_READ_INT4;
        progressive->n_bytes += hkv_record_prefix_bytes(batch->query->format, source->precision);
    }
}

static int32_t run_limit(const hkv_format *f)
{
    int32_t n = RUN_WEIGHTS / (HKV_BLOCK_ROWS * f->stored_tokens);
    return n < MAX_RUN ? n : MAX_RUN;
}

/* The records that are read before any prefetching in step with others can have reached them. */
static void prefetch_first(const record_batch *batch, hkv_precision precision)
{
    const hkv_format *f = batch->query->format;
    for (int32_t s = 0; s < batch->n && s < batch->distance; s++) {
        const uint8_t *record = batch->sources[s].data;
        prefetch_bytes(record + f->k_params_offset, f->v_params_offset - f->k_params_offset);
        if (precision > HKV_READ_INT4) prefetch_bytes(record + f->k_low_offset, f->v_params_offset - f->k_high_offset);
    }
}

/* Records by which prefetching runs ahead: a short one is read faster than memory answers. */
static int32_t prefetch_distance(const hkv_format *f, hkv_precision precision)
{
    size_t key_bytes = (f->v_params_offset - f->k_params_offset) * (precision > HKV_READ_INT4 ? 2 : 1);
    return key_bytes < AHEAD_BYTES ? (int32_t)(AHEAD_BYTES / key_bytes) : 1;
}

static void records_attend(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n, hkv_cpu_state *state,
                           hkv_cpu_progressive *progressive, float *source_lse)
{
    float kept[KEPT_WEIGHTS] __attribute__((aligned(64)));
    row_sums kept_parts[KEPT_WEIGHTS / (HKV_BLOCK_ROWS * HKV_TILE_TOKENS)];
    const int32_t is_progressive = progressive && (progressive->skip_mass > 0.0f || progressive->refine_mass > 0.0f);
    const hkv_precision precision = is_progressive ? HKV_READ_INT4 : sources[0].precision;
    record_batch batch = {.query = query,
                          .sources = sources,
                          .n = n,
                          .max_run = run_limit(query->format),
                          .distance = prefetch_distance(query->format, precision),
                          .source_lse = source_lse};
    int32_t n_blocks = (query->n_rows + HKV_BLOCK_ROWS - 1) / HKV_BLOCK_ROWS;
    prefetch_first(&batch, precision);
    if (is_progressive) {
        size_t n_weights = (size_t)n_blocks * (size_t)n * HKV_BLOCK_ROWS * (size_t)query->format->stored_tokens;
        if (n_weights <= KEPT_WEIGHTS) {
            batch.kept = kept;
            batch.kept_parts = kept_parts;
        }
        look_ahead_in_survey(&batch);
        if (n_blocks == 1 && batch.kept) {
            batch_attend_progressively(&batch, progressive, state);
            return;
        }
        for (int32_t first = 0; first < n; first += batch.max_run)
            batch_survey(&batch, first, first + batch.max_run < n ? first + batch.max_run : n, progressive);
    } else {
        batch_read_all(&batch, progressive);
        look_ahead_in_reading(&batch, 0, n);
    }
    for (int32_t block = 0; block < n_blocks; block++) {
        block_sums sums;
        block_sums_start(query, block, &sums);
        batch_attend(&batch, 0, n, &sums);
        block_sums_end(&sums, state);
    }
}

/* Records to take at once: as many as the survey can keep the weights of, if it can of any. */
static int32_t batch_size(const hkv_cpu_query *query)
{
    int32_t n_blocks = (query->n_rows + HKV_BLOCK_ROWS - 1) / HKV_BLOCK_ROWS;
    int64_t n = KEPT_WEIGHTS / ((int64_t)n_blocks * HKV_BLOCK_ROWS * query->format->stored_tokens);
    return n < 1 ? 1 : n < CALL_RECORDS ? (int32_t)n : CALL_RECORDS;
}

/* ------------------------------------------------------------------------------------------------ pages and tensors */

HKV_AVX512_INLINE void rows_attend_shaped(const hkv_rows_shape shape, const row_block *rows,
                                          const hkv_cpu_source *source, const uint8_t *ahead, hkv_cpu_state *state,
                                          float *source_lse)
{
    const hkv_cpu_query *query = rows->query;
    const hkv_format *f = query->format;
    const size_t stored_dim = (size_t)f->stored_dim;
    const hkv_rows_view keys = hkv_rows_view_of(f, source, 0), values = hkv_rows_view_of(f, source, 1);
    float q[HKV_BLOCK_ROWS * HKV_MAX_HEAD_DIM], acc[HKV_BLOCK_ROWS * HKV_MAX_HEAD_DIM], row_acc[HKV_MAX_HEAD_DIM];
    float weights[HKV_BLOCK_ROWS * HKV_ROWS_TOKENS], factor[HKV_BLOCK_ROWS], max[HKV_BLOCK_ROWS], sum[HKV_BLOCK_ROWS];
    row_sums running = row_sums_empty();
    for (int32_t i = 0; i < shape.n_rows; i++)
        hkv_rows_order(shape, f->stored_dim, query->softmax_scale, rows->q + (size_t)i * stored_dim,
                       q + (size_t)i * stored_dim);
    memset(acc, 0, (size_t)shape.n_rows * stored_dim * sizeof(float));
    for (int32_t first = 0; first < source->n_tokens; first += HKV_ROWS_TOKENS) {
        int32_t n = source->n_tokens - first < HKV_ROWS_TOKENS ? source->n_tokens - first : HKV_ROWS_TOKENS;
        __m128 old = running.max, kept;
        hkv_rows_dots(shape, f->stored_dim, &keys, first, n, q, ahead, f->row_bytes, weights);
        running.max = _mm_max_ps(
            old, scores_finish(shape.n_rows, rows, source->first_position + first, n, HKV_ROWS_TOKENS, weights));
        kept = _mm_maskz_mov_ps(_mm_cmp_ps_mask(old, _mm_set1_ps(-INFINITY), _CMP_NEQ_UQ),
                                exp_rows(_mm_sub_ps(old, running.max)));
        running.sum =
            _mm_fmadd_ps(running.sum, kept, weights_make(shape.n_rows, running.max, n, HKV_ROWS_TOKENS, weights));
        _mm_storeu_ps(factor, kept);
        hkv_rows_values(shape, f->stored_dim, &values, first, n, weights, factor, acc);
    }
    keep_lse(rows, &running, source_lse);
    _mm_storeu_ps(max, running.max);
    _mm_storeu_ps(sum, running.sum);
    for (int32_t i = 0; i < shape.n_rows; i++) {
        hkv_rows_order_back(shape, f->stored_dim, acc + (size_t)i * stored_dim, row_acc);
        state_merge_row(query, state, rows->first_row + i, max[i], sum[i], row_acc);
    }
}

#define ROWS_KERNEL(n, dtype, is_page)                                                                                 \
    static void rows_attend_##n##_##dtype##_##is_page(const row_block *rows, const hkv_cpu_source *source,             \
                                                      const uint8_t *ahead, hkv_cpu_state *state, float *source_lse)   \
    {                                                                                                                  \
        rows_attend_shaped((hkv_rows_shape){n, dtype, is_page}, rows, source, ahead, state, source_lse);               \
    }
#define ROWS_KERNELS_OF_DTYPE(n, dtype) ROWS_KERNEL(n, dtype, 0) ROWS_KERNEL(n, dtype, 1)
#define ROWS_KERNELS_OF_ROWS(n)                                                                                        \
    ROWS_KERNELS_OF_DTYPE(n, HKV_F16) ROWS_KERNELS_OF_DTYPE(n, HKV_BF16) ROWS_KERNELS_OF_DTYPE(n, HKV_F32)

ROWS_KERNELS_OF_ROWS(1)
ROWS_KERNELS_OF_ROWS(2)
ROWS_KERNELS_OF_ROWS(3)
ROWS_KERNELS_OF_ROWS(4)

static void rows_attend(const hkv_cpu_query *query, const hkv_cpu_source *source, const uint8_t *ahead,
                        hkv_cpu_state *state, float *source_lse)
{
    typedef void (*rows_kernel)(const row_block *, const hkv_cpu_source *, const uint8_t *, hkv_cpu_state *, float *);
#define ROWS_ENTRY(n, dtype)                                                                                           \
    {                                                                                                                  \
        rows_attend_##n##_##dtype##_0, rows_attend_##n##_##dtype##_1                                                   \
    }
#define ROWS_ENTRIES(n)                                                                                                \
    {                                                                                                                  \
        ROWS_ENTRY(n, HKV_F16), ROWS_ENTRY(n, HKV_BF16), ROWS_ENTRY(n, HKV_F32)                                        \
    }
    static const rows_kernel table[HKV_BLOCK_ROWS][3][2] = {ROWS_ENTRIES(1), ROWS_ENTRIES(2), ROWS_ENTRIES(3),
                                                            ROWS_ENTRIES(4)};
    for (int32_t first_row = 0; first_row < query->n_rows; first_row += HKV_BLOCK_ROWS) {
        const row_block rows = row_block_at(query, first_row);
        table[rows.n_rows - 1][query->format->dtype][source->kind == HKV_SOURCE_PAGE](&rows, source, ahead, state,
                                                                                      source_lse);
    }
}

/* The page after a source, for prefetching; its own data (which may be NULL) if the next is none. */
static const uint8_t *rows_ahead(const hkv_cpu_source *source, int32_t n_sources)
{
    return n_sources > 1 && source[1].kind == HKV_SOURCE_PAGE ? source[1].data : source[0].data;
}

/* ------------------------------------------------------------------------------------------------------------ entry */

void hkv_avx512_decode(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                       hkv_cpu_state *state, hkv_cpu_progressive *progressive, float *source_lse)
{
    int32_t max_batch = batch_size(query), n;
    for (int32_t s = 0; s < n_sources; s += n) {
        float *lse = source_lse ? source_lse + (size_t)s * (size_t)query->n_rows : NULL;
        n = 1;
        if (sources[s].kind != HKV_SOURCE_RECORD) {
            rows_attend(query, &sources[s], rows_ahead(sources + s, n_sources - s), state, lse);
            continue;
        }
        while (n < max_batch && s + n < n_sources && sources[s + n].kind == HKV_SOURCE_RECORD) n++;
        records_attend(query, sources + s, n, state, progressive, lse);
    }
}

/* The largest bound of a block of rows, in lane 0. */
HKV_AVX512_INLINE __m128 rows_bound(int32_t n_rows, const row_block *rows, const uint8_t *params)
{
    const size_t stored_dim = (size_t)rows->query->format->stored_dim;
    __m512 sum[HKV_BLOCK_ROWS];
    __m128 bounds;
    for (int32_t i = 0; i < n_rows; i++) sum[i] = _mm512_setzero_ps();
    for (int32_t step = 0; step < rows->query->format->stored_dim / 16; step++) {
        __m512 scale, zero, lo, hi;
        hkv_key_params(params, step, &scale, &zero);
        lo = _mm512_fmadd_ps(scale, _mm512_set1_ps((float)HKV_CODE_MIN), zero);
        hi = _mm512_fmadd_ps(scale, _mm512_set1_ps((float)HKV_CODE_MAX), zero);
        for (int32_t i = 0; i < n_rows; i++) {
            __m512 q = _mm512_loadu_ps(rows->q + (size_t)i * stored_dim + 16 * step);
            sum[i] = _mm512_add_ps(sum[i], _mm512_max_ps(_mm512_mul_ps(q, lo), _mm512_mul_ps(q, hi)));
        }
    }
    bounds = _mm_mask_mov_ps(_mm_set1_ps(-INFINITY), lanes_of_rows(n_rows), hkv_reduce_rows_add(n_rows, sum));
    bounds = _mm_max_ps(bounds, _mm_movehl_ps(bounds, bounds));
    return _mm_max_ps(bounds, _mm_shuffle_ps(bounds, bounds, 1));
}

float hkv_avx512_record_bound(const hkv_cpu_query *query, const uint8_t *record)
{
    const uint8_t *params = record + query->format->k_params_offset;
    __m128 bound = _mm_set1_ps(-INFINITY);
    for (int32_t first_row = 0; first_row < query->n_rows; first_row += HKV_BLOCK_ROWS) {
        const row_block rows = row_block_at(query, first_row);
        bound = _mm_max_ss(bound, rows.n_rows == HKV_BLOCK_ROWS ? rows_bound(HKV_BLOCK_ROWS, &rows, params)
                                                                : rows_bound(rows.n_rows, &rows, params));
    }
    return _mm_cvtss_f32(bound);
}

#endif
