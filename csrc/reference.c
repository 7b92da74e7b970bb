/* reference.c - attention over any mix of sources in scalar double precision: what every other code path must compute.
 *
 * For a query row at position p and the keys j it sees (j <= p, and j > p - window where there is one)
 *
 *   s_j = scale * q.k_j            or c * tanh(scale * q.k_j / c) with a soft cap c
 *   out = sum_j exp(s_j) v_j / sum_j exp(s_j)
 *
 * Both sums are kept relative to the largest score (`softmax` below), so that they can be formed in pieces: two pieces
 * merge by rescaling to the larger maximum. K and V are read one token at a time, as stored; a call's contribution is
 * summed in double and merged into the caller's float state once.
 */
#include "cpu_kernels.h"

#include <math.h>

enum {
    TILE_ROWS = 8,     /* query rows that share the reading of a token */
    CALL_SOURCES = 256 /* sources whose contribution is merged into the state at once */
};

/* ----------------------------------------------------------------------------------------------- a running softmax */

typedef struct softmax {
    double max, sum;
    double acc[HKV_MAX_HEAD_DIM];
} softmax;

static void softmax_clear(softmax *s)
{
    memset(s, 0, sizeof *s);
    s->max = -INFINITY;
}

static void softmax_rescale(softmax *s, double max, int32_t n_channels)
{
    double factor = exp(s->max - max);
    s->max = max;
    s->sum *= factor;
    for (int32_t c = 0; c < n_channels; c++) s->acc[c] *= factor;
}

/* One key; v NULL if only the sum is wanted. */
static void softmax_add(softmax *s, double score, const float *v, int32_t n_channels)
{
    double weight;
    if (score == -INFINITY) return;
    if (score > s->max) softmax_rescale(s, score, v ? n_channels : 0);
    weight = exp(score - s->max);
    s->sum += weight;
    if (!v) return;
    for (int32_t c = 0; c < n_channels; c++) s->acc[c] += weight * (double)v[c];
}

static void softmax_merge(softmax *s, const softmax *part, int32_t n_channels)
{
    double factor;
    if (part->sum == 0.0) return;
    if (part->max > s->max) softmax_rescale(s, part->max, n_channels);
    factor = exp(part->max - s->max);
    s->sum += factor * part->sum;
    for (int32_t c = 0; c < n_channels; c++) s->acc[c] += factor * part->acc[c];
}

static double softmax_lse(const softmax *s)
{
    return s->sum == 0.0 ? -INFINITY : s->max + log(s->sum);
}

/* --------------------------------------------------------------------------------------------- queries and sources */

static int32_t row_sees(const hkv_cpu_query *query, int32_t row, int64_t position)
{
    int64_t own = query->first_position + row / query->group;
    return position <= own && (query->window_tokens == 0 || position > own - query->window_tokens);
}

/* k [D] */
static double row_score(const hkv_cpu_query *query, int32_t row, const float *k)
{
    const float *q = query->q + (size_t)row * (size_t)query->format->stored_dim;
    double cap = (double)query->logits_soft_cap, dot = 0.0, score;
    for (int32_t c = 0; c < query->format->head_dim; c++) dot += (double)q[c] * (double)k[c];
    score = (double)query->softmax_scale * dot;
    return cap > 0.0 ? cap * tanh(score / cap) : score;
}

/* K and V of one token of a source, [D] each; v NULL if values are not wanted. */
static void source_load(const hkv_format *f, const hkv_cpu_source *source, hkv_precision precision, int32_t token,
                        float *k, float *v)
{
    uint8_t k_row[HKV_MAX_HEAD_DIM * sizeof(float)], v_row[HKV_MAX_HEAD_DIM * sizeof(float)];
    const void *k_src = k_row, *v_src = v_row;
    if (source->kind == HKV_SOURCE_RECORD) {
        hkv_record_decode(f, source->data, precision, token, 1, k, v);
        return;
    }
    if (source->kind == HKV_SOURCE_PAGE) {
        hkv_row_load(f, source->data, token, k_row, v_row);
    } else {
        k_src = (const uint8_t *)source->k + token * source->k_stride_bytes;
        v_src = (const uint8_t *)source->v + token * source->v_stride_bytes;
    }
    hkv_elements_to_f32((hkv_dtype)f->dtype, k_src, f->head_dim, k);
    if (v) hkv_elements_to_f32((hkv_dtype)f->dtype, v_src, f->head_dim, v);
}

/* What query rows first_row .. first_row + n_rows - 1 see of one source, as a softmax per row: parts [n_rows]. */
static void source_attend(const hkv_cpu_query *query, const hkv_cpu_source *source, hkv_precision precision,
                          int32_t with_values, int32_t first_row, int32_t n_rows, softmax *parts)
{
    float k[HKV_MAX_HEAD_DIM], v_row[HKV_MAX_HEAD_DIM], *v = with_values ? v_row : NULL;
    int32_t head_dim = query->format->head_dim;
    for (int32_t r = 0; r < n_rows; r++) softmax_clear(&parts[r]);
    for (int32_t token = 0; token < source->n_tokens; token++) {
        source_load(query->format, source, precision, token, k, v);
        for (int32_t r = 0; r < n_rows; r++) {
            if (row_sees(query, first_row + r, source->first_position + token))
                softmax_add(&parts[r], row_score(query, first_row + r, k), v, head_dim);
        }
    }
}

/* --------------------------------------------------------------------------------------------- progressive reading */

/* The largest over query rows of exp(LSE of the record's INT4 scores - LSE of the hot part); -1 if no row sees any of
 * it. */
static double record_share(const hkv_cpu_query *query, const hkv_cpu_source *record, const float *reference_lse)
{
    softmax parts[TILE_ROWS];
    double share = -1.0;
    for (int32_t first = 0; first < query->n_rows; first += TILE_ROWS) {
        int32_t n_rows = query->n_rows - first < TILE_ROWS ? query->n_rows - first : TILE_ROWS;
        source_attend(query, record, HKV_READ_INT4, 0, first, n_rows, parts);
        for (int32_t r = 0; r < n_rows; r++) {
            if (parts[r].sum == 0.0) continue;
            share = fmax(share, exp(softmax_lse(&parts[r]) - (double)reference_lse[first + r]));
        }
    }
    return share;
}

/* ------------------------------------------------------------------------------------------------------- attention */

/* Merge a contribution into row `row` of the state. Its sums follow the maximum as rounded to float. */
static void state_merge(hkv_cpu_state *state, const hkv_format *f, int32_t row, const softmax *contribution)
{
    float *acc = state->acc + (size_t)row * (size_t)f->stored_dim;
    softmax total;
    softmax_clear(&total);
    total.max = (double)state->max[row];
    total.sum = (double)state->sum[row];
    for (int32_t c = 0; c < f->head_dim; c++) total.acc[c] = (double)acc[c];
    softmax_merge(&total, contribution, f->head_dim);
    if (total.sum == 0.0) return;
    softmax_rescale(&total, (double)(float)total.max, f->head_dim);
    state->max[row] = (float)total.max;
    state->sum[row] = (float)total.sum;
    for (int32_t c = 0; c < f->head_dim; c++) acc[c] = (float)total.acc[c];
}

/* Add sources, read as `readings` [n_sources] says, to the state of up to TILE_ROWS query rows. */
static void tile_attend(const hkv_cpu_query *query, const hkv_cpu_source *sources, const int32_t *readings,
                        int32_t n_sources, int32_t first_row, int32_t n_rows, hkv_cpu_state *state, float *source_lse)
{
    softmax contribution[TILE_ROWS], parts[TILE_ROWS];
    for (int32_t r = 0; r < n_rows; r++) softmax_clear(&contribution[r]);
    for (int32_t i = 0; i < n_sources; i++) {
        int32_t is_read = readings[i] != HKV_NOT_READ;
        if (is_read) source_attend(query, &sources[i], (hkv_precision)readings[i], 1, first_row, n_rows, parts);
        for (int32_t r = 0; r < n_rows; r++) {
            if (is_read) softmax_merge(&contribution[r], &parts[r], query->format->head_dim);
            if (source_lse)
                source_lse[(size_t)i * (size_t)query->n_rows + (size_t)(first_row + r)] =
                    is_read ? (float)softmax_lse(&parts[r]) : -INFINITY;
        }
    }
    for (int32_t r = 0; r < n_rows; r++) state_merge(state, query->format, first_row + r, &contribution[r]);
}

static void reference_decode(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                             hkv_cpu_state *state, hkv_cpu_progressive *progressive, float *source_lse)
{
    int32_t readings[CALL_SOURCES];
    for (int32_t first = 0; first < n_sources; first += CALL_SOURCES) {
        int32_t n = n_sources - first < CALL_SOURCES ? n_sources - first : CALL_SOURCES;
        float *lse = source_lse ? source_lse + (size_t)first * (size_t)query->n_rows : NULL;
        for (int32_t i = 0; i < n; i++) {
            const hkv_cpu_source *source = &sources[first + i];
            int32_t is_progressive = progressive && source->kind == HKV_SOURCE_RECORD;
            readings[i] =
                is_progressive
                    ? hkv_cpu_progressive_decide(query->format, source,
                                                 record_share(query, source, progressive->reference_lse), progressive)
                    : (int32_t)source->precision;
        }
        for (int32_t row = 0; row < query->n_rows; row += TILE_ROWS) {
            int32_t n_rows = query->n_rows - row < TILE_ROWS ? query->n_rows - row : TILE_ROWS;
            tile_attend(query, sources + first, readings, n, row, n_rows, state, lse);
        }
    }
}

static void reference_prefill(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                              hkv_cpu_state *state)
{
    reference_decode(query, sources, n_sources, state, NULL, NULL);
}

/* --------------------------------------------------------------------------------------------------- record bounds */

/* The smallest and the largest value that a channel of the record's keys can have. */
static void key_range(const hkv_format *f, const uint8_t *record, int32_t channel, double *lo, double *hi)
{
    const uint8_t *params = record + f->k_params_offset + 2 * (size_t)hkv_k_param_index(channel);
    uint16_t scale, zero;
    memcpy(&scale, params, 2);
    memcpy(&zero, params + 4, 2);
    *lo = (double)hkv_f16_to_f32(zero) + HKV_CODE_MIN * (double)hkv_f16_to_f32(scale);
    *hi = (double)hkv_f16_to_f32(zero) + HKV_CODE_MAX * (double)hkv_f16_to_f32(scale);
}

static float reference_record_bound(const hkv_cpu_query *query, const uint8_t *record)
{
    double bound = -INFINITY;
    for (int32_t row = 0; row < query->n_rows; row++) {
        const float *q = query->q + (size_t)row * (size_t)query->format->stored_dim;
        double sum = 0.0, lo, hi;
        for (int32_t c = 0; c < query->format->head_dim; c++) {
            key_range(query->format, record, c, &lo, &hi);
            sum += fmax((double)q[c] * lo, (double)q[c] * hi);
        }
        bound = fmax(bound, sum);
    }
    return (float)bound;
}

/* -------------------------------------------------------------------------------------------------------- the path */

static int32_t reference_supported(void)
{
    return 1;
}

const hkv_cpu_kernels hkv_cpu_reference = {
    .name = "reference",
    .supported = reference_supported,
    .elements_to_f32 = hkv_elements_to_f32,
    .elements_from_f32 = hkv_elements_from_f32,
    .record_encode = hkv_record_encode,
    .record_decode = hkv_record_decode,
    .decode = reference_decode,
    .prefill = reference_prefill,
    .prefill_tile_tokens = 16,
    .record_bound = reference_record_bound,
};
