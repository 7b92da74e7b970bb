/* cpu_avx512_decode.c - attention of a few query tokens with AVX-512.
 *
 * Query rows are taken four at a time. Records go through cpu_avx512_records.h, at most CALL_RECORDS of them between
 * two merges into the caller's state; rows of pages and tensors through cpu_avx512_rows.h.
 *
 * Progressive reading first weighs the keys of all records at INT4 (survey), then decides and reads the rest. Weights
 * are kept relative to the record's own largest score, so that those of the survey serve where a record stays at INT4.
 */
#include "cpu_avx512_rows.h"

#if defined(__x86_64__)

enum {
    CALL_RECORDS = 64,
    PLAIN_TOKENS = 64,    /* of the tuned block size */
    KEPT_WEIGHTS = 16384, /* floats of the survey's weights that are kept */
    SURVEY_AHEAD = 2,     /* records by which keys are prefetched in a survey */
    MAX_RUN = 8,          /* records that are read in full and weighed together */
    AHEAD_BYTES = 10240,  /* about what is prefetched at a time */
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

/* The same of four records side by side. */
typedef struct quad_sums {
    __m512 max, sum;
} quad_sums;

/* parts[i .. i + 3]; the last of n stands for those that are not there. */
HKV_AVX512_INLINE quad_sums quad_sums_at(const row_sums *parts, int32_t i, int32_t n)
{
    const row_sums *a = &parts[i], *b = &parts[i + 1 < n ? i + 1 : n - 1], *c = &parts[i + 2 < n ? i + 2 : n - 1],
                   *d = &parts[i + 3 < n ? i + 3 : n - 1];
    quad_sums quad = {
        _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set_m128(b->max, a->max)), _mm256_set_m128(d->max, c->max), 1),
        _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set_m128(b->sum, a->sum)), _mm256_set_m128(d->sum, c->sum),
                           1)};
    return quad;
}

/* max + log(sum), -inf where the sum is 0. */
HKV_AVX512_INLINE __m512 quad_lse(const quad_sums quad)
{
    __mmask16 is_empty = _mm512_cmp_ps_mask(quad.sum, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(_mm512_add_ps(quad.max, hkv_avx512_log(quad.sum)), is_empty, _mm512_set1_ps(-INFINITY));
}

static void keep_lse(const row_block *rows, const row_sums *sums, float *source_lse)
{
    if (source_lse)
        _mm_mask_storeu_ps(source_lse + rows->first_row, lanes_of_rows(rows->n_rows),
                           _mm512_castps512_ps128(quad_lse(quad_sums_at(sums, 0, 1))));
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

/* Steps are done in their order, which the compiler does not see. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

static int32_t tiles_of(int32_t n_tokens)
{
    return (n_tokens + HKV_TILE_TOKENS - 1) / HKV_TILE_TOKENS;
}

HKV_AVX512_INLINE void prefetch_bytes(const uint8_t *data, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i += 64) _mm_prefetch((const char *)(data + i), _MM_HINT_T0);
}

/* Step 0, 1 or 2 of a record's key side; `ahead` is a record whose key parameters are fetched. */
HKV_AVX512_INLINE void key_side_step(const hkv_record_shape shape, int32_t step, const row_block *rows,
                                     const uint8_t *record, const uint8_t *ahead, hkv_key_work *work,
                                     hkv_key_side *side)
{
    const hkv_format *f = rows->query->format;
    if (step == 0) {
        prefetch_bytes(ahead + f->k_params_offset, f->k_high_offset - f->k_params_offset);
        hkv_key_side_scale(shape, f, record, rows->q, work);
    } else if (step == 1) {
        hkv_key_side_measure(shape, rows->query->softmax_scale, work, side);
    } else if (step == 2) {
        hkv_key_side_fix(shape, work, side);
    }
}

/* A block of the tuned size that every row sees all of, without a soft cap. */
static int32_t source_is_plain(int32_t n_rows, const row_block *rows, const hkv_cpu_source *source)
{
    return source->n_tokens == PLAIN_TOKENS && rows->query->logits_soft_cap == 0.0f &&
           rows->last[0] >= source->first_position + PLAIN_TOKENS - 1 &&
           rows->first[n_rows - 1] <= source->first_position;
}

/* The rows' largest scores, their weights, and the sums of those, [n_rows] each, in steps 0, 1 and 2. */
HKV_AVX512_INLINE __m128 plain_max(int32_t n_rows, size_t stride, const float *scores)
{
    __m512 max[HKV_BLOCK_ROWS];
    for (int32_t i = 0; i < n_rows; i++) {
        max[i] = _mm512_loadu_ps(scores + (size_t)i * stride);
        for (int32_t t = 16; t < PLAIN_TOKENS; t += 16)
            max[i] = _mm512_max_ps(max[i], _mm512_loadu_ps(scores + (size_t)i * stride + t));
    }
    return _mm_mask_mov_ps(_mm_set1_ps(-INFINITY), lanes_of_rows(n_rows), hkv_reduce_rows_max(n_rows, max));
}

HKV_AVX512_INLINE void plain_weights(int32_t n_rows, size_t stride, __m128 max, float *scores,
                                     __m512 sum[HKV_BLOCK_ROWS])
{
    const __m512 reference = _mm512_castps128_ps512(_mm_mul_ps(max, _mm_set1_ps(1.44269504f)));
    for (int32_t i = 0; i < n_rows; i++) {
        const __m512 row_reference = _mm512_permutexvar_ps(_mm512_set1_epi32(i), reference);
        sum[i] = _mm512_setzero_ps();
        for (int32_t t = 0; t < PLAIN_TOKENS; t += 16) {
            float *score = scores + (size_t)i * stride + t;
            __m512 weight = hkv_avx512_weight(_mm512_loadu_ps(score), row_reference);
            _mm512_storeu_ps(score, weight);
            sum[i] = _mm512_add_ps(sum[i], weight);
        }
    }
}

/* In three steps and in place, scores of a record [n_rows, TP] to weights relative to the rows' largest ones. */
HKV_AVX512_INLINE void soften_step(const hkv_record_shape shape, int32_t step, const row_block *rows,
                                   const hkv_cpu_source *source, int32_t is_plain, float *scores,
                                   __m512 sum[HKV_BLOCK_ROWS], row_sums *part)
{
    const size_t stride = (size_t)rows->query->format->stored_tokens;
    if (!is_plain) {
        if (step != 0) return;
        part->max = scores_finish(shape.n_rows, rows, source->first_position, source->n_tokens, stride, scores);
        part->sum = weights_make(shape.n_rows, part->max, source->n_tokens, stride, scores);
    } else if (step == 0) {
        part->max = plain_max(shape.n_rows, stride, scores);
    } else if (step == 1) {
        plain_weights(shape.n_rows, stride, part->max, scores, sum);
    } else if (step == 2) {
        part->sum = _mm_maskz_mov_ps(lanes_of_rows(shape.n_rows), hkv_reduce_rows_add(shape.n_rows, sum));
    }
}

/* Softmax weights of n records' tokens, relative to each record's own maximum: weights [n, HKV_BLOCK_ROWS, TP], parts
 * [n]. Between the tiles of a record's products the next record's queries are made and the last one's scores softened,
 * a step at a time, so that the processor finds independent work. ahead[s] is prefetched in step with record s. */
HKV_AVX512_INLINE void records_weigh(const hkv_record_shape shape, const row_block *rows, const hkv_cpu_source *sources,
                                     int32_t n, const uint8_t *const *ahead, float *weights, row_sums *parts)
{
    const hkv_format *f = rows->query->format;
    const size_t stride = HKV_BLOCK_ROWS * (size_t)f->stored_tokens;
    hkv_key_work work;
    hkv_key_side sides[2];
    __m512 sum[HKV_BLOCK_ROWS];
    for (int32_t s = -1; s <= n; s++) {
        const int32_t n_tiles = s >= 0 && s < n ? tiles_of(sources[s].n_tokens) : 0;
        const int32_t is_plain = s > 0 && source_is_plain(shape.n_rows, rows, &sources[s - 1]);
        for (int32_t step = 0; step < n_tiles || step < HKV_SIDE_STEPS; step++) {
            if (step < n_tiles)
                hkv_record_dots(shape, f, sources[s].data, &sides[s & 1], step, ahead[s], weights + (size_t)s * stride);
            if (s + 1 < n)
                key_side_step(shape, step, rows, sources[s + 1].data, ahead[s + 1], &work, &sides[(s + 1) & 1]);
            if (s > 0)
                soften_step(shape, step, rows, &sources[s - 1], is_plain, weights + (size_t)(s - 1) * stride, sum,
                            &parts[s - 1]);
        }
    }
}

/* A record whose values are to be added with these weights [n_rows, TP], which count factor [n_rows]. */
typedef struct weighed_record {
    const hkv_cpu_source *source;
    const float *weights;
    const uint8_t *ahead; /* a record whose values are fetched in step */
    float factor[HKV_BLOCK_ROWS];
} weighed_record;

/* Step 0, 1 or 2 of a record's value side. */
HKV_AVX512_INLINE void value_side_step(const hkv_record_shape shape, int32_t step, const hkv_format *f,
                                       const weighed_record *record, hkv_value_work work[HKV_MAX_VALUE_GROUPS],
                                       hkv_value_side *side)
{
    const int32_t n_tokens = record->source->n_tokens, n_tiles = tiles_of(n_tokens);
    if (step == 0) prefetch_bytes(record->ahead + f->v_params_offset, f->v_high_offset - f->v_params_offset);
    for (int32_t vg = 0; vg < (shape.n_groups + 1) / 2; vg++) {
        if (step == 0)
            hkv_value_side_scale(shape, f, record->source->data, vg, record->weights, n_tokens, n_tiles, &work[vg]);
        else if (step == 1)
            hkv_value_side_measure(shape, vg, &work[vg], side);
        else if (step == 2)
            hkv_value_side_fix(shape, vg, n_tiles, &work[vg], side);
    }
}

/* sums += factor[row] * weights . v over n records. The next record's weights are made beside the products of one. */
HKV_AVX512_INLINE void records_add(const hkv_record_shape shape, const hkv_format *f, const weighed_record *records,
                                   int32_t n, hkv_value_sums *sums)
{
    hkv_value_work work[HKV_MAX_VALUE_GROUPS];
    hkv_value_side sides[2];
    for (int32_t i = -1; i < n; i++) {
        if (i >= 0) hkv_record_add_base(shape, &sides[i & 1], records[i].factor, sums);
        for (int32_t step = 0; step < 4 * shape.n_groups; step++) {
            if (i >= 0 && records[i].source->n_tokens == PLAIN_TOKENS)
                hkv_record_values(shape, f, records[i].source->data, &sides[i & 1], PLAIN_TOKENS / HKV_TILE_TOKENS,
                                  records[i].factor, step / 4, 2 * (step % 4), records[i].ahead, sums);
            else if (i >= 0)
                hkv_record_values(shape, f, records[i].source->data, &sides[i & 1],
                                  tiles_of(records[i].source->n_tokens), records[i].factor, step / 4, 2 * (step % 4),
                                  records[i].ahead, sums);
            if (i + 1 < n) value_side_step(shape, step, f, &records[i + 1], work, &sides[(i + 1) & 1]);
        }
    }
}

typedef struct record_kernels {
    void (*weigh)(const row_block *rows, const hkv_cpu_source *sources, int32_t n, int32_t with_low,
                  const uint8_t *const *ahead, float *weights, row_sums *parts);
    void (*add)(const hkv_format *f, const weighed_record *records, int32_t n, int32_t with_low, hkv_value_sums *sums);
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
    static void add_##name(const hkv_format *f, const weighed_record *records, int32_t n, int32_t with_low,            \
                           hkv_value_sums *sums)                                                                       \
    {                                                                                                                  \
        if (with_low)                                                                                                  \
            records_add((hkv_record_shape){rows_n, groups, half, 1}, f, records, n, sums);                             \
        else                                                                                                           \
            records_add((hkv_record_shape){rows_n, groups, half, 0}, f, records, n, sums);                             \
    }

#define RECORD_KERNELS_OF_ROWS(n)                                                                                      \
    RECORD_KERNELS(n##_d64, n, 1, 0)                                                                                   \
    RECORD_KERNELS(n##_d128, n, 2, 0)                                                                                  \
    RECORD_KERNELS(n##_any, n, (f->stored_dim + 63) / 64, (f->stored_dim & 32) != 0)

RECORD_KERNELS_OF_ROWS(1)
RECORD_KERNELS_OF_ROWS(2)
RECORD_KERNELS_OF_ROWS(3)
RECORD_KERNELS_OF_ROWS(4)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

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
static void running_follow(const row_block *rows, __mmask8 lagging, __m128 max, row_sums *running, hkv_value_sums *sums)
{
    float scale[HKV_BLOCK_ROWS];
    __m128 kept = _mm_maskz_mov_ps(_mm_cmp_ps_mask(running->sum, _mm_setzero_ps(), _CMP_NEQ_UQ),
                                   exp_rows(_mm_sub_ps(running->max, max)));
    _mm_storeu_ps(scale, kept);
    for (int32_t i = 0; i < rows->n_rows; i++)
        if (lagging >> i & 1) value_sums_scale(rows->query->format, i, scale[i], sums);
    running->sum = _mm_mask_mul_ps(running->sum, lagging, running->sum, kept);
    running->max = _mm_mask_mov_ps(running->max, lagging, max);
}

/* Take the parts of n records into the running softmax; records[i].factor is what the weights of record i count. */
static void running_take(const row_block *rows, const row_sums *parts, int32_t n, row_sums *running,
                         hkv_value_sums *sums, weighed_record *records)
{
    const __m512 nowhere = _mm512_set1_ps(-INFINITY);
    __m128 max = _mm512_castps512_ps128(nowhere);
    __mmask8 lagging;
    for (int32_t i = 0; i < n; i++) max = _mm_max_ps(max, parts[i].max);
    lagging = _mm_cmp_ps_mask(max, _mm_add_ps(running->max, _mm_set1_ps(LAZY_MAX)), _CMP_GT_OQ);
    if (lagging) running_follow(rows, lagging, max, running, sums);
    for (int32_t i = 0; i < n; i += 4) {
        const quad_sums quad = quad_sums_at(parts, i, n);
        __m512 distance = _mm512_sub_ps(quad.max, _mm512_broadcast_f32x4(running->max));
        __m512 count =
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(quad.max, nowhere, _CMP_NEQ_UQ), hkv_avx512_exp(distance));
        float counts[4 * HKV_BLOCK_ROWS], sums_counted[4 * HKV_BLOCK_ROWS];
        _mm512_storeu_ps(counts, count);
        _mm512_storeu_ps(sums_counted, _mm512_mul_ps(count, quad.sum));
        for (int32_t j = 0; j < 4 && i + j < n; j++) {
            memcpy(records[i + j].factor, counts + j * HKV_BLOCK_ROWS, sizeof records[i + j].factor);
            running->sum = _mm_add_ps(running->sum, _mm_loadu_ps(sums_counted + j * HKV_BLOCK_ROWS));
        }
    }
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
    int32_t max_run;                /* records that are weighed together */
    int32_t distance;               /* records by which keys are prefetched */
    int32_t readings[CALL_RECORDS]; /* hkv_precision or HKV_NOT_READ */
    float *kept;                    /* weights of the survey at INT4, NULL where there was none or they do not fit */
    row_sums *kept_parts;           /* [row blocks, n] */
    float *source_lse;              /* [n, n_rows] or NULL */
} record_batch;

static size_t kept_idx(const record_batch *batch, int32_t block, int32_t s)
{
    return (size_t)block * (size_t)batch->n + (size_t)s;
}

static float *kept_weights(const record_batch *batch, int32_t block, int32_t s)
{
    return batch->kept + kept_idx(batch, block, s) * HKV_BLOCK_ROWS * (size_t)batch->query->format->stored_tokens;
}

/* Records of a batch that are read alike, one after the other. */
typedef struct record_list {
    int32_t n;
    int32_t records[CALL_RECORDS];
} record_list;

/* What is prefetched while record i of a list is read; the last ones stand for themselves. */
static const uint8_t *list_ahead(const record_batch *batch, const record_list *list, int32_t i)
{
    return batch->sources[list->records[i + batch->distance < list->n ? i + batch->distance : i]].data;
}

/* LSEs of n records for those who asked. */
static void batch_keep_lse(const record_batch *batch, const row_block *rows, const int32_t *records, int32_t n,
                           const row_sums *parts)
{
    for (int32_t i = 0; batch->source_lse && i < n; i += 4) {
        float lse[4 * HKV_BLOCK_ROWS];
        _mm512_storeu_ps(lse, quad_lse(quad_sums_at(parts, i, n)));
        for (int32_t j = 0; j < 4 && i + j < n; j++)
            _mm_mask_storeu_ps(batch->source_lse + (size_t)records[i + j] * (size_t)batch->query->n_rows +
                                   rows->first_row,
                               lanes_of_rows(rows->n_rows), _mm_loadu_ps(lse + j * HKV_BLOCK_ROWS));
    }
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

/* Add the values of a list's records first .. first + n - 1, of which weighed[i].weights and parts[i] are known. */
static void batch_add(const record_batch *batch, const record_list *list, int32_t first, int32_t n,
                      weighed_record *weighed, const row_sums *parts, block_sums *sums)
{
    const hkv_format *f = batch->query->format;
    const record_kernels *kernels = record_kernels_of(f, sums->rows.n_rows);
    const int32_t *records = list->records + first;
    batch_keep_lse(batch, &sums->rows, records, n, parts);
    running_take(&sums->rows, parts, n, &sums->running, &sums->values, weighed);
    for (int32_t i = 0; i < n; i++) {
        weighed[i].source = &batch->sources[records[i]];
        weighed[i].ahead = list_ahead(batch, list, first + i);
    }
    for (int32_t start = 0, end; start < n; start = end) {
        int32_t with_low = batch->readings[records[start]] == HKV_READ_INT8;
        for (end = start + 1; end < n && (batch->readings[records[end]] == HKV_READ_INT8) == with_low; end++) continue;
        kernels->add(f, weighed + start, end - start, with_low, &sums->values);
    }
}

/* The same for records that the survey has weighed. */
static void batch_add_kept(const record_batch *batch, const record_list *list, block_sums *sums)
{
    weighed_record weighed[CALL_RECORDS];
    row_sums parts[CALL_RECORDS];
    for (int32_t i = 0; i < list->n; i++) {
        weighed[i].weights = kept_weights(batch, sums->block, list->records[i]);
        parts[i] = batch->kept_parts[kept_idx(batch, sums->block, list->records[i])];
    }
    if (list->n > 0) batch_add(batch, list, 0, list->n, weighed, parts, sums);
}

/* Weigh and add a list's records, which are all read with low planes of keys or all without. */
static void batch_read(const record_batch *batch, const record_list *list, int32_t with_low, block_sums *sums)
{
    const hkv_format *f = batch->query->format;
    const record_kernels *kernels = record_kernels_of(f, sums->rows.n_rows);
    float weights[RUN_WEIGHTS] __attribute__((aligned(64)));
    weighed_record weighed[MAX_RUN];
    row_sums parts[MAX_RUN];
    hkv_cpu_source sources[MAX_RUN];
    const uint8_t *ahead[MAX_RUN];
    for (int32_t first = 0, n; first < list->n; first += n) {
        n = list->n - first < batch->max_run ? list->n - first : batch->max_run;
        for (int32_t i = 0; i < n; i++) {
            sources[i] = batch->sources[list->records[first + i]];
            ahead[i] = list_ahead(batch, list, first + i);
            weighed[i].weights = weights + (size_t)i * HKV_BLOCK_ROWS * (size_t)f->stored_tokens;
        }
        kernels->weigh(&sums->rows, sources, n, with_low, ahead, weights, parts);
        batch_add(batch, list, first, n, weighed, parts, sums);
    }
}

/* Read all records as decided. Those of a kind go together, so that each has others beside it. */
static void batch_attend(const record_batch *batch, block_sums *sums)
{
    const row_sums unread = row_sums_empty();
    record_list surveyed, unweighed[2]; /* to be weighed without and with low planes of keys */
    surveyed.n = unweighed[0].n = unweighed[1].n = 0;
    for (int32_t s = 0; s < batch->n; s++) {
        int32_t with_low = batch->readings[s] != HKV_READ_INT4;
        record_list *list = batch->kept && !with_low ? &surveyed : &unweighed[with_low];
        if (batch->readings[s] == HKV_NOT_READ)
            batch_keep_lse(batch, &sums->rows, &s, 1, &unread);
        else
            list->records[list->n++] = s;
    }
    batch_add_kept(batch, &surveyed, sums);
    for (int32_t with_low = 0; with_low < 2; with_low++) batch_read(batch, &unweighed[with_low], with_low, sums);
}

static void block_sums_end(const block_sums *sums, hkv_cpu_state *state)
{
    value_sums_merge(&sums->rows, &sums->running, &sums->values, state);
}

/* -------------------------------------------------------------------------------------------- progressive reading */

/* The largest share of each of n records among the block's rows, as the hot part has it, where it is larger than
 * shares[i]; a share is capped where it only matters that it is large. */
static void rows_shares(const row_block *rows, const row_sums *parts, int32_t n, const float *reference_lse,
                        float *shares)
{
    const __m512 unseen = _mm512_set1_ps(-1.0f);
    const __m512 reference =
        _mm512_broadcast_f32x4(_mm_maskz_loadu_ps(lanes_of_rows(rows->n_rows), reference_lse + rows->first_row));
    for (int32_t i = 0; i < n; i += 4) {
        const quad_sums quad = quad_sums_at(parts, i, n);
        __m512 distance = _mm512_min_ps(_mm512_sub_ps(quad.max, reference), _mm512_set1_ps(80.0f));
        __m512 share = _mm512_mul_ps(quad.sum, hkv_avx512_exp(distance));
        float largest[4 * HKV_BLOCK_ROWS];
        share = _mm512_mask_mov_ps(unseen, _mm512_cmp_ps_mask(quad.sum, _mm512_setzero_ps(), _CMP_NEQ_UQ), share);
        share = _mm512_max_ps(share, _mm512_permute_ps(share, 0x4e));
        _mm512_storeu_ps(largest, _mm512_max_ps(share, _mm512_permute_ps(share, 0xb1)));
        for (int32_t j = 0; j < 4 && i + j < n; j++) shares[i + j] = fmaxf(shares[i + j], largest[j * HKV_BLOCK_ROWS]);
    }
}

/* Weigh the keys of the records first .. end-1 at INT4, then decide. */
static void batch_survey(record_batch *batch, int32_t first, int32_t end, hkv_cpu_progressive *progressive)
{
    const hkv_format *f = batch->query->format;
    int32_t n_blocks = (batch->query->n_rows + HKV_BLOCK_ROWS - 1) / HKV_BLOCK_ROWS, n = end - first;
    float own_weights[RUN_WEIGHTS] __attribute__((aligned(64))), shares[CALL_RECORDS];
    row_sums own_parts[MAX_RUN];
    const uint8_t *ahead[CALL_RECORDS];
    for (int32_t s = 0; s < n; s++) {
        int32_t next = first + s + batch->distance;
        ahead[s] = batch->sources[next < batch->n ? next : first + s].data;
        shares[s] = -1.0f;
    }
    for (int32_t block = 0; block < n_blocks; block++) {
        const row_block rows = row_block_at(batch->query, block * HKV_BLOCK_ROWS);
        float *weights = batch->kept ? kept_weights(batch, block, first) : own_weights;
        row_sums *parts = batch->kept ? &batch->kept_parts[kept_idx(batch, block, first)] : own_parts;
        record_kernels_of(f, rows.n_rows)->weigh(&rows, batch->sources + first, n, 0, ahead, weights, parts);
        rows_shares(&rows, parts, n, progressive->reference_lse, shares);
    }
    for (int32_t s = 0; s < n; s++)
        batch->readings[first + s] =
            hkv_cpu_progressive_decide(f, &batch->sources[first + s], (double)shares[s], progressive);
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
                          .distance = is_progressive ? SURVEY_AHEAD : prefetch_distance(query->format, precision),
                          .source_lse = source_lse};
    int32_t n_blocks = (query->n_rows + HKV_BLOCK_ROWS - 1) / HKV_BLOCK_ROWS;
    prefetch_first(&batch, precision);
    if (is_progressive) {
        size_t n_weights = (size_t)n_blocks * (size_t)n * HKV_BLOCK_ROWS * (size_t)query->format->stored_tokens;
        int32_t run = n_weights <= KEPT_WEIGHTS ? n : batch.max_run;
        if (n_weights <= KEPT_WEIGHTS) {
            batch.kept = kept;
            batch.kept_parts = kept_parts;
        }
        for (int32_t first = 0; first < n; first += run)
            batch_survey(&batch, first, first + run < n ? first + run : n, progressive);
    } else {
        batch_read_all(&batch, progressive);
    }
    for (int32_t block = 0; block < n_blocks; block++) {
        block_sums sums;
        block_sums_start(query, block, &sums);
        batch_attend(&batch, &sums);
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
