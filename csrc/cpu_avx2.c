/* cpu_avx2.c - the AVX2 path: attention in fp32 for machines without AVX-512.
 *
 * Decode and prefill are one thing here. Keys are taken 64 at a time; such a block is dequantised once, K as [channel,
 * key] and V as [key, channel], and meets the query rows six at a time (a strip), as two small matrix products around
 * an online softmax. A record of a progressive call is looked at twice: its INT4 scores first, which decide, then at
 * the precision that they asked for.
 */
#include "cpu_avx2.h"

#if defined(__x86_64__)

#include <math.h>

enum {
    BLOCK_KEYS = 64,
    STRIP_ROWS = 6,
    COLUMNS = 16,                /* of a product at once: 6 x 2 accumulators and their operands fill the 16 registers */
    SHARE_ROWS = 16 * STRIP_ROWS /* query rows whose share of a record is found at once */
};

/* Up to 64 consecutive keys of a source. Beyond n_keys lies anything. */
typedef struct key_block {
    float k[HKV_MAX_HEAD_DIM * BLOCK_KEYS]; /* [D, 64] */
    float v[BLOCK_KEYS * HKV_MAX_HEAD_DIM]; /* [64, DP] */
    int32_t n_keys;
    int64_t first_position;
} key_block;

/* Six query rows while they meet a block. Rows that do not exist repeat the first and see nothing. */
typedef struct strip {
    const float *q[STRIP_ROWS];
    float *acc[STRIP_ROWS];
    float scores[STRIP_ROWS][BLOCK_KEYS]; /* then weights relative to `max` */
    float max[8], sum[8];                 /* of what the row sees of the block; -inf, 0 if that is nothing */
    int32_t first[STRIP_ROWS], end[STRIP_ROWS];
    int32_t first_key, end_key; /* what any row sees */
    int32_t first_row, n_rows;
} strip;

typedef struct scratch {
    key_block block;
    strip strip;
    float unused_acc[HKV_MAX_HEAD_DIM]; /* of rows that do not exist */
} scratch;

static inline int32_t at_most(int32_t value, int32_t limit)
{
    return value < limit ? value : limit;
}

static inline int32_t clamp(int64_t value, int32_t lo, int32_t hi)
{
    return value < lo ? lo : value > hi ? hi : (int32_t)value;
}

/* ------------------------------------------------------------------------------------------------------- functions */

/* exp(x) for x <= 88, relative error below 2e-7; 0 below -87.3 and for -inf; NaN stays NaN. */
HKV_AVX2_INLINE __m256 exp_lanes(__m256 x)
{
    const __m256 log2e = _mm256_set1_ps(1.44269504f);
    __m256 is_normal = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_NLE_UQ);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x); /* ln 2 in two parts */
    __m256 p = _mm256_set1_ps(1.3981999507e-3f);
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    return _mm256_and_ps(is_normal, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

/* cap * tanh(x / cap) */
HKV_AVX2_INLINE __m256 soft_cap_lanes(__m256 x, float cap)
{
    const __m256 one = _mm256_set1_ps(1.0f), limit = _mm256_set1_ps(80.0f);
    __m256 e = exp_lanes(_mm256_min_ps(limit, _mm256_mul_ps(x, _mm256_set1_ps(2.0f / cap)))); /* keeps NaN */
    __m256 t = _mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(e, one)));
    return _mm256_mul_ps(t, _mm256_set1_ps(cap));
}

HKV_AVX2_INLINE float reduce_sum(__m256 v)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

HKV_AVX2_INLINE float reduce_max(__m256 v)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* log(exp(a) + exp(b)) */
static float add_lse(float a, float b)
{
    float max = a > b ? a : b, min = a > b ? b : a;
    return min == -INFINITY ? max : max + log1pf(expf(min - max));
}

/* ----------------------------------------------------------------------------------------------- records to blocks */

/* Tokens first .. first + n_keys - 1 of a record; first is a multiple of 16. */
HKV_AVX2 static void record_keys(const hkv_format *f, const hkv_cpu_source *source, hkv_precision precision,
                                 int32_t first, key_block *block)
{
    const uint8_t *high = source->data + f->k_high_offset, *low = source->data + f->k_low_offset;
    float params[2 * HKV_MAX_HEAD_DIM];
    uint8_t codes[HKV_GROUP_CODES];
    hkv_avx2_halves_to_f32(source->data + f->k_params_offset, 2 * f->stored_dim, params);
    for (int32_t t = 0; t < block->n_keys; t += 16) {
        for (int32_t c = 0; c < f->head_dim; c++) {
            const uint8_t *channel_codes = codes + c % HKV_GROUP_CHANNELS * 16;
            float *k = block->k + c * BLOCK_KEYS + t;
            uint32_t index = hkv_k_param_index(c);
            __m256 scale = _mm256_set1_ps(params[index]), zero = _mm256_set1_ps(params[index + 2]);
            if (c % HKV_GROUP_CHANNELS == 0) {
                size_t at = hkv_avx2_group_offset(f, (first + t) / 16, c);
                hkv_avx2_group_load(0, high + at, precision >= HKV_READ_K8V4 ? low + at : NULL,
                                    at_most(f->stored_dim - c, HKV_GROUP_CHANNELS), codes);
            }
            _mm256_storeu_ps(k, hkv_avx2_dequantise(channel_codes, scale, zero));
            _mm256_storeu_ps(k + 8, hkv_avx2_dequantise(channel_codes + 8, scale, zero));
        }
    }
}

HKV_AVX2 static void record_values(const hkv_format *f, const hkv_cpu_source *source, hkv_precision precision,
                                   int32_t first, key_block *block)
{
    const uint8_t *high = source->data + f->v_high_offset, *low = source->data + f->v_low_offset;
    uint8_t codes[HKV_GROUP_CODES];
    for (int32_t tile = first / 16; 16 * tile < first + block->n_keys; tile++) {
        for (int32_t group = 0; group < f->head_dim; group += HKV_GROUP_CHANNELS) {
            size_t at = hkv_avx2_group_offset(f, tile, group);
            int32_t n_channels = at_most(f->head_dim - group, HKV_GROUP_CHANNELS);
            hkv_token_params params;
            hkv_avx2_token_params(f, source->data, tile, group, &params);
            hkv_avx2_group_load(1, high + at, precision >= HKV_READ_INT8 ? low + at : NULL,
                                at_most(f->stored_dim - group, HKV_GROUP_CHANNELS), codes);
            for (int32_t t = 0; t < 16; t++) {
                float *v = block->v + (16 * tile + t - first) * f->stored_dim + group;
                __m256 scale = _mm256_set1_ps(params.scale[t]), zero = _mm256_set1_ps(params.zero[t]);
                for (int32_t c = 0; c < n_channels; c += 8)
                    _mm256_storeu_ps(v + c, hkv_avx2_dequantise(codes + t * HKV_GROUP_CHANNELS + c, scale, zero));
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------- rows to blocks */

/* Up to 8 rows of D elements in the model's dtype, where they are or in `buffer`. */
typedef struct row_view {
    const uint8_t *rows[8];
    uint8_t buffer[8][HKV_MAX_HEAD_DIM * 4];
} row_view;

/* K (is_v 0) or V of tokens first .. first + n - 1 of a page or tensor. */
HKV_AVX2 static void view_rows(const hkv_format *f, const hkv_cpu_source *source, int32_t is_v, int32_t first,
                               int32_t n, row_view *view)
{
    int32_t n_chunks = f->head_dim * f->element_bytes / 16, first_chunk = is_v * f->stored_dim * f->element_bytes / 16;
    for (int32_t t = 0; t < n; t++) {
        if (source->kind == HKV_SOURCE_TENSOR) {
            const uint8_t *rows = is_v ? source->v : source->k;
            view->rows[t] = rows + (first + t) * (is_v ? source->v_stride_bytes : source->k_stride_bytes);
            continue;
        }
        view->rows[t] = view->buffer[t];
        for (int32_t i = 0; i < n_chunks; i++)
            memcpy(view->buffer[t] + 16 * i, source->data + hkv_row_chunk_offset(f, first + t, first_chunk + i), 16);
    }
}

HKV_AVX2_INLINE void transpose_floats(__m256 v[8])
{
    __m256 w[8];
    for (int step = 0; step < 2; step++) { /* of rows i and i + 4 in turn, inside 128 bits */
        for (int i = 0; i < 4; i++) {
            w[2 * i] = _mm256_unpacklo_ps(v[i], v[i + 4]);
            w[2 * i + 1] = _mm256_unpackhi_ps(v[i], v[i + 4]);
        }
        for (int i = 0; i < 8; i++) v[i] = w[i];
    }
    /* v[4 * i + j]: column j, and in the upper half column j + 4, of rows i, i + 2, i + 4, i + 6 */
    for (int j = 0; j < 4; j++) {
        __m256 lo = _mm256_unpacklo_ps(v[j], v[j + 4]), hi = _mm256_unpackhi_ps(v[j], v[j + 4]);
        w[j] = _mm256_permute2f128_ps(lo, hi, 0x20);
        w[j + 4] = _mm256_permute2f128_ps(lo, hi, 0x31);
    }
    for (int i = 0; i < 8; i++) v[i] = w[i];
}

HKV_AVX2 static void row_keys(const hkv_format *f, const hkv_cpu_source *source, int32_t first, key_block *block)
{
    row_view view;
    for (int32_t t = 0; t < block->n_keys; t += 8) {
        int32_t n = at_most(block->n_keys - t, 8);
        view_rows(f, source, 0, first + t, n, &view);
        for (int32_t c = 0; c < f->head_dim; c += 8) {
            __m256 v[8];
            for (int32_t i = 0; i < 8; i++)
                v[i] =
                    i < n ? hkv_avx2_elements_load(f->dtype, view.rows[i] + c * f->element_bytes) : _mm256_setzero_ps();
            transpose_floats(v);
            for (int32_t i = 0; i < 8; i++) _mm256_storeu_ps(block->k + (c + i) * BLOCK_KEYS + t, v[i]);
        }
    }
}

HKV_AVX2 static void row_values(const hkv_format *f, const hkv_cpu_source *source, int32_t first, key_block *block)
{
    row_view view;
    for (int32_t t = 0; t < block->n_keys; t++) {
        view_rows(f, source, 1, first + t, 1, &view);
        for (int32_t c = 0; c < f->head_dim; c += 8)
            _mm256_storeu_ps(block->v + t * f->stored_dim + c,
                             hkv_avx2_elements_load(f->dtype, view.rows[0] + c * f->element_bytes));
    }
}

/* Keys of tokens first .. first + 63 of a source, as far as it goes. */
static void block_load_keys(const hkv_format *f, const hkv_cpu_source *source, hkv_precision precision, int32_t first,
                            key_block *block)
{
    block->n_keys = at_most(source->n_tokens - first, BLOCK_KEYS);
    block->first_position = source->first_position + first;
    if (source->kind == HKV_SOURCE_RECORD)
        record_keys(f, source, precision, first, block);
    else
        row_keys(f, source, first, block);
}

/* Their values. */
static void block_load_values(const hkv_format *f, const hkv_cpu_source *source, hkv_precision precision, int32_t first,
                              key_block *block)
{
    if (source->kind == HKV_SOURCE_RECORD)
        record_values(f, source, precision, first, block);
    else
        row_values(f, source, first, block);
}

/* ---------------------------------------------------------------------------------------------------------- strips */

/* c [6, 16] += left [6, n_steps] . right [n_steps, 16] */
HKV_AVX2_INLINE void strip_multiply(const float *const left[STRIP_ROWS], const float *right, size_t right_stride,
                                    int32_t n_steps, __m256 c[STRIP_ROWS][2])
{
    for (int32_t s = 0; s < n_steps; s++) {
        __m256 lo = _mm256_loadu_ps(right + (size_t)s * right_stride);
        __m256 hi = _mm256_loadu_ps(right + (size_t)s * right_stride + 8);
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) {
            __m256 a = _mm256_broadcast_ss(left[r] + s);
            c[r][0] = _mm256_fmadd_ps(a, lo, c[r][0]);
            c[r][1] = _mm256_fmadd_ps(a, hi, c[r][1]);
        }
    }
}

/* Rows first_row .. of the query and what they see of the block; 0 if that is nothing. */
static int32_t strip_look(const hkv_cpu_query *query, const key_block *block, int32_t first_row, strip *s)
{
    s->first_row = first_row;
    s->n_rows = at_most(query->n_rows - first_row, STRIP_ROWS);
    s->first_key = BLOCK_KEYS;
    s->end_key = 0;
    for (int32_t r = 0; r < STRIP_ROWS; r++) {
        int32_t row = first_row + (r < s->n_rows ? r : 0);
        int64_t own = query->first_position + row / query->group - block->first_position;
        int32_t end = r < s->n_rows ? clamp(own + 1, 0, block->n_keys) : 0;
        int32_t first = query->window_tokens ? clamp(own - query->window_tokens + 1, 0, end) : 0;
        s->q[r] = query->q + (size_t)row * (size_t)query->format->stored_dim;
        s->first[r] = first;
        s->end[r] = end;
        if (first == end) continue;
        s->first_key = at_most(first, s->first_key);
        s->end_key = end > s->end_key ? end : s->end_key;
    }
    return s->first_key < s->end_key;
}

/* Raw scores. */
HKV_AVX2 static void strip_score(const hkv_cpu_query *query, const key_block *block, strip *s)
{
    for (int32_t key = s->first_key / COLUMNS * COLUMNS; key < s->end_key; key += COLUMNS) {
        __m256 c[STRIP_ROWS][2];
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) c[r][0] = c[r][1] = _mm256_setzero_ps();
        strip_multiply(s->q, block->k + key, BLOCK_KEYS, query->format->head_dim, c);
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) {
            _mm256_storeu_ps(&s->scores[r][key], c[r][0]);
            _mm256_storeu_ps(&s->scores[r][key + 8], c[r][1]);
        }
    }
}

/* Scores into weights exp(score - max), 0 where the row sees nothing. */
HKV_AVX2 static void strip_weigh(const hkv_cpu_query *query, strip *s)
{
    const __m256 minus_infinity = _mm256_set1_ps(-INFINITY), scale = _mm256_set1_ps(query->softmax_scale);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int32_t r = 0; r < STRIP_ROWS; r++) {
        const __m256i before = _mm256_set1_epi32(s->first[r] - 1), end = _mm256_set1_epi32(s->end[r]);
        __m256 max = minus_infinity, sum = _mm256_setzero_ps(), shift;
        for (int32_t i = s->first_key / 8 * 8; i < s->end_key; i += 8) {
            __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(i));
            __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(key, before), _mm256_cmpgt_epi32(end, key));
            __m256 score = _mm256_mul_ps(_mm256_loadu_ps(&s->scores[r][i]), scale);
            if (query->logits_soft_cap > 0.0f) score = soft_cap_lanes(score, query->logits_soft_cap);
            score = _mm256_blendv_ps(minus_infinity, score, _mm256_castsi256_ps(seen));
            _mm256_storeu_ps(&s->scores[r][i], score);
            max = _mm256_max_ps(max, score);
        }
        s->max[r] = reduce_max(max);
        shift = _mm256_set1_ps(s->max[r] == -INFINITY ? 0.0f : s->max[r]);
        for (int32_t i = s->first_key / 8 * 8; i < s->end_key; i += 8) {
            __m256 p = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(&s->scores[r][i]), shift));
            _mm256_storeu_ps(&s->scores[r][i], p);
            sum = _mm256_add_ps(sum, p);
        }
        s->sum[r] = reduce_sum(sum);
    }
}

static float strip_lse(const strip *s, int32_t r)
{
    return s->sum[r] == 0.0f ? -INFINITY : s->max[r] + logf(s->sum[r]);
}

/* The state's maxima and sums take the block in. Its own sums are to be multiplied by rescale, the weights by the share
 * that they are multiplied with here. */
HKV_AVX2 static void strip_merge(hkv_cpu_state *state, strip *s, float rescale[8])
{
    float old_max[8], new_max[8], factor[8];
    for (int32_t r = 0; r < 8; r++) {
        old_max[r] = new_max[r] = factor[r] = 0.0f;
        if (r >= s->n_rows) continue;
        old_max[r] = state->max[s->first_row + r];
        new_max[r] = s->max[r] > old_max[r] ? s->max[r] : old_max[r];
        factor[r] = s->max[r];
    }
    for (int32_t r = 0; r < s->n_rows; r++) { /* a row that has seen nothing yet: -inf - 0 instead of -inf - -inf */
        float shift = new_max[r] == -INFINITY ? 0.0f : new_max[r];
        state->max[s->first_row + r] = new_max[r];
        old_max[r] -= shift;
        factor[r] -= shift;
    }
    _mm256_storeu_ps(rescale, exp_lanes(_mm256_loadu_ps(old_max)));
    _mm256_storeu_ps(factor, exp_lanes(_mm256_loadu_ps(factor)));
    for (int32_t r = 0; r < s->n_rows; r++) {
        float *sum = &state->sum[s->first_row + r];
        *sum = *sum * rescale[r] + s->sum[r] * factor[r];
        for (int32_t i = s->first_key / 8 * 8; i < s->end_key; i += 8)
            _mm256_storeu_ps(&s->scores[r][i],
                             _mm256_mul_ps(_mm256_loadu_ps(&s->scores[r][i]), _mm256_set1_ps(factor[r])));
    }
}

/* acc = acc * rescale + weights . values */
HKV_AVX2 static void strip_add_values(const hkv_format *f, const key_block *block, const float rescale[8],
                                      const strip *s)
{
    const float *weights[STRIP_ROWS];
    for (int32_t r = 0; r < STRIP_ROWS; r++) weights[r] = &s->scores[r][s->first_key];
    for (int32_t channel = 0; channel < f->head_dim; channel += COLUMNS) {
        __m256 c[STRIP_ROWS][2];
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) {
            c[r][0] = _mm256_mul_ps(_mm256_loadu_ps(s->acc[r] + channel), _mm256_set1_ps(rescale[r]));
            c[r][1] = _mm256_mul_ps(_mm256_loadu_ps(s->acc[r] + channel + 8), _mm256_set1_ps(rescale[r]));
        }
        strip_multiply(weights, block->v + s->first_key * f->stored_dim + channel, (size_t)f->stored_dim,
                       s->end_key - s->first_key, c);
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) {
            _mm256_storeu_ps(s->acc[r] + channel, c[r][0]);
            _mm256_storeu_ps(s->acc[r] + channel + 8, c[r][1]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- attention */

/* Does any query token see any of the keys first_position .. + n - 1? */
static int32_t query_reaches(const hkv_cpu_query *query, int64_t first_position, int32_t n)
{
    int64_t last_query = query->first_position + (query->n_rows - 1) / query->group;
    return first_position <= last_query &&
           (query->window_tokens == 0 || first_position + n > query->first_position - query->window_tokens + 1);
}

/* All query rows meet a block. source_lse [n_rows] or NULL takes in what the block adds to the source's. */
static void block_attend(const hkv_cpu_query *query, scratch *work, hkv_cpu_state *state, float *source_lse)
{
    const hkv_format *f = query->format;
    strip *s = &work->strip;
    for (int32_t row = 0; row < query->n_rows; row += STRIP_ROWS) {
        float rescale[8];
        if (!strip_look(query, &work->block, row, s)) continue;
        for (int32_t r = 0; r < STRIP_ROWS; r++)
            s->acc[r] = r < s->n_rows ? state->acc + (size_t)(row + r) * (size_t)f->stored_dim : work->unused_acc;
        strip_score(query, &work->block, s);
        strip_weigh(query, s);
        for (int32_t r = 0; source_lse && r < s->n_rows; r++)
            source_lse[row + r] = add_lse(source_lse[row + r], strip_lse(s, r));
        strip_merge(state, s, rescale);
        strip_add_values(f, &work->block, rescale, s);
    }
}

static void source_attend(const hkv_cpu_query *query, const hkv_cpu_source *source, hkv_precision precision,
                          scratch *work, hkv_cpu_state *state, float *source_lse)
{
    for (int32_t first = 0; first < source->n_tokens; first += BLOCK_KEYS) {
        int32_t n = at_most(source->n_tokens - first, BLOCK_KEYS);
        if (!query_reaches(query, source->first_position + first, n)) continue;
        block_load_keys(query->format, source, precision, first, &work->block);
        block_load_values(query->format, source, precision, first, &work->block);
        block_attend(query, work, state, source_lse);
    }
}

/* ---------------------------------------------------------------------------------------------- progressive reading */

/* Log-sum-exp of the record's INT4 scores for rows first_row .. first_row + n_rows - 1; first_row is a multiple of 6.
 */
static void record_lse(const hkv_cpu_query *query, const hkv_cpu_source *record, int32_t first_row, int32_t n_rows,
                       scratch *work, float *lse)
{
    for (int32_t r = 0; r < n_rows; r++) lse[r] = -INFINITY;
    for (int32_t first = 0; first < record->n_tokens; first += BLOCK_KEYS) {
        block_load_keys(query->format, record, HKV_READ_INT4, first, &work->block);
        for (int32_t row = 0; row < n_rows; row += STRIP_ROWS) {
            strip *s = &work->strip;
            if (!strip_look(query, &work->block, first_row + row, s)) continue;
            strip_score(query, &work->block, s);
            strip_weigh(query, s);
            for (int32_t r = 0; r < s->n_rows; r++) lse[row + r] = add_lse(lse[row + r], strip_lse(s, r));
        }
    }
}

/* The record's share, largest over query rows; -1 if no row sees any of it. */
static double record_share(const hkv_cpu_query *query, const hkv_cpu_source *record, const float *reference_lse,
                           scratch *work)
{
    double share = -1.0;
    for (int32_t first = 0; first < query->n_rows; first += SHARE_ROWS) {
        int32_t n_rows = at_most(query->n_rows - first, SHARE_ROWS);
        float lse[SHARE_ROWS];
        record_lse(query, record, first, n_rows, work, lse);
        for (int32_t r = 0; r < n_rows; r++) {
            if (lse[r] != -INFINITY) share = fmax(share, exp((double)lse[r] - (double)reference_lse[first + r]));
        }
    }
    return share;
}

/* -------------------------------------------------------------------------------------------------------- the path */

static void avx2_decode(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                        hkv_cpu_state *state, hkv_cpu_progressive *progressive, float *source_lse)
{
    scratch work;
    memset(work.unused_acc, 0, sizeof work.unused_acc);
    for (int32_t i = 0; i < n_sources; i++) {
        float *lse = source_lse ? source_lse + (size_t)i * (size_t)query->n_rows : NULL;
        int32_t reading = (int32_t)sources[i].precision;
        for (int32_t r = 0; lse && r < query->n_rows; r++) lse[r] = -INFINITY;
        if (progressive && sources[i].kind == HKV_SOURCE_RECORD)
            reading = hkv_cpu_progressive_decide(query->format, &sources[i],
                                                 record_share(query, &sources[i], progressive->reference_lse, &work),
                                                 progressive);
        if (reading != HKV_NOT_READ) source_attend(query, &sources[i], (hkv_precision)reading, &work, state, lse);
    }
}

static void avx2_prefill(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                         hkv_cpu_state *state)
{
    avx2_decode(query, sources, n_sources, state, NULL, NULL);
}

HKV_AVX2 static float avx2_record_bound(const hkv_cpu_query *query, const uint8_t *record)
{
    const hkv_format *f = query->format;
    float params[2 * HKV_MAX_HEAD_DIM], lo[HKV_MAX_HEAD_DIM], hi[HKV_MAX_HEAD_DIM], bound = -INFINITY;
    hkv_avx2_halves_to_f32(record + f->k_params_offset, 2 * f->stored_dim, params);
    for (int32_t c = 0; c < f->head_dim; c++) {
        float scale = params[hkv_k_param_index(c)], zero = params[hkv_k_param_index(c) + 2];
        lo[c] = zero + HKV_CODE_MIN * scale;
        hi[c] = zero + HKV_CODE_MAX * scale;
    }
    for (int32_t row = 0; row < query->n_rows; row++) {
        const float *q = query->q + (size_t)row * (size_t)f->stored_dim;
        __m256 sum = _mm256_setzero_ps();
        float total;
        for (int32_t c = 0; c < f->head_dim; c += 8) {
            __m256 x = _mm256_loadu_ps(q + c);
            sum = _mm256_add_ps(sum, _mm256_max_ps(_mm256_mul_ps(x, _mm256_loadu_ps(lo + c)),
                                                   _mm256_mul_ps(x, _mm256_loadu_ps(hi + c))));
        }
        total = reduce_sum(sum);
        bound = total > bound ? total : bound;
    }
    return bound;
}

static int32_t avx2_supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const hkv_cpu_kernels hkv_cpu_avx2 = {
    .name = "avx2",
    .supported = avx2_supported,
    .elements_to_f32 = hkv_avx2_elements_to_f32,
    .elements_from_f32 = hkv_avx2_elements_from_f32,
    .record_encode = hkv_avx2_record_encode,
    .record_decode = hkv_avx2_record_decode,
    .decode = avx2_decode,
    .prefill = avx2_prefill,
    .prefill_tile_tokens = 256,
    .record_bound = avx2_record_bound,
};

#endif
