/* cpu_avx512_encode.c - writing and reading records with AVX-512, bit for bit as format.c does.
 *
 * Codes are made row by row, 16 channels at a time, into a tile of 16 tokens x 64 channels, and go from there into the
 * planes (cpu_avx512_planes.h). fp16 conversion instructions round as the format asks: zero down, scale up.
 */
#include "cpu_avx512_planes.h"

#if defined(__x86_64__)

/* ------------------------------------------------------------------------------------------------- quantisation */

HKV_AVX512_INLINE __m512 elements_load(hkv_dtype dtype, const uint8_t *elements)
{
    if (dtype == HKV_F32) return _mm512_loadu_ps(elements);
    __m256i halves = _mm256_loadu_si256((const __m256i *)elements);
    if (dtype == HKV_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Lanes that step 1 leaves as they are; NaN is not among them. */
HKV_AVX512_INLINE __mmask16 lanes_kept(__m512 x)
{
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(HKV_MAX_FINITE), _CMP_LE_OQ);
}

/* Step 1. */
HKV_AVX512_INLINE __m512 lanes_clamp(__m512 x)
{
    const __m512 limit = _mm512_set1_ps(HKV_MAX_FINITE);
    x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
    return _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
}

/* Ranges of 16 groups, lane by lane: of the elements that step 1 kept, and of all as clamped. */
typedef struct lane_ranges {
    __m512 kept_lo, kept_hi, all_lo, all_hi;
    uint32_t n_changed;
} lane_ranges;

HKV_AVX512_INLINE lane_ranges ranges_empty(void)
{
    const __m512 infinity = _mm512_set1_ps(INFINITY), minus_infinity = _mm512_set1_ps(-INFINITY);
    return (lane_ranges){infinity, minus_infinity, infinity, minus_infinity, 0};
}

HKV_AVX512_INLINE void ranges_add(lane_ranges *ranges, __m512 x)
{
    __mmask16 kept = lanes_kept(x);
    __m512 v = x;
    if (__builtin_expect(kept != 0xffff, 0)) {
        v = lanes_clamp(x);
        ranges->n_changed += 16u - (uint32_t)__builtin_popcount(kept);
    }
    ranges->all_lo = _mm512_min_ps(ranges->all_lo, v);
    ranges->all_hi = _mm512_max_ps(ranges->all_hi, v);
    ranges->kept_lo = _mm512_mask_min_ps(ranges->kept_lo, kept, ranges->kept_lo, v);
    ranges->kept_hi = _mm512_mask_max_ps(ranges->kept_hi, kept, ranges->kept_hi, v);
}

/* Parameters of 16 groups. */
typedef struct lane_params {
    __m256i zero_half, scale_half;
    __m512 zero, inverse;
} lane_params;

/* Step 3, and the inverse scale that step 4 needs. */
HKV_AVX512_INLINE lane_params lanes_params(__m512 lo, __m512 hi)
{
    enum { DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC, UP = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC };
    lane_params p;
    __m512 margin, scale;
    lo = _mm512_add_ps(lo, _mm512_setzero_ps());
    hi = _mm512_add_ps(hi, _mm512_setzero_ps());
    margin = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(8.0f), _mm512_sub_ps(hi, lo)), _mm512_set1_ps(240.0f));
    p.zero_half = _mm512_cvtps_ph(_mm512_sub_ps(lo, margin), DOWN);
    p.zero = _mm512_cvtph_ps(p.zero_half);
    p.scale_half = _mm512_cvtps_ph(_mm512_div_ps(_mm512_sub_ps(hi, p.zero), _mm512_set1_ps(248.0f)), UP);
    scale = _mm512_cvtph_ps(p.scale_half);
    p.inverse =
        _mm512_maskz_div_ps(_mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_GT_OQ), _mm512_set1_ps(1.0f), scale);
    return p;
}

HKV_AVX512_INLINE lane_params ranges_params(const lane_ranges *ranges)
{
    __mmask16 any_kept = _mm512_cmp_ps_mask(ranges->kept_lo, ranges->kept_hi, _CMP_LE_OQ);
    return lanes_params(_mm512_mask_mov_ps(ranges->all_lo, any_kept, ranges->kept_lo),
                        _mm512_mask_mov_ps(ranges->all_hi, any_kept, ranges->kept_hi));
}

/* Steps 1 and 4. Clamping before rounding is the same as after, since the bounds are whole. */
HKV_AVX512_INLINE __m128i lanes_codes(__m512 x, __m512 zero, __m512 inverse)
{
    __m512 code = _mm512_mul_ps(_mm512_sub_ps(lanes_clamp(x), zero), inverse);
    code = _mm512_min_ps(_mm512_max_ps(code, _mm512_set1_ps(HKV_CODE_MIN)), _mm512_set1_ps(HKV_CODE_MAX));
    return _mm512_cvtepi32_epi8(_mm512_cvt_roundps_epi32(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* ----------------------------------------------------------------------------------------------------- encoding */

/* K or V of one block, as the caller has it. */
typedef struct rows_view {
    const uint8_t *data;
    int64_t stride_bytes; /* per token */
    hkv_dtype dtype;
    int32_t element_bytes;
    int32_t n_tokens;
} rows_view;

HKV_AVX512_INLINE __m512 rows_load(const rows_view *rows, int32_t token, int32_t channel)
{
    return elements_load(rows->dtype, rows->data + token * rows->stride_bytes + channel * rows->element_bytes);
}

static inline int32_t at_most(int32_t value, int32_t limit)
{
    return value < limit ? value : limit;
}

/* Channels 64 * group .. of K: parameters, then codes tile by tile. */
HKV_AVX512_INLINE uint32_t encode_key_group(const hkv_format *f, const rows_view *k, int32_t group, uint8_t *record)
{
    uint8_t codes[16][64] __attribute__((aligned(64)));
    int32_t first = group * HKV_GROUP_CHANNELS, n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
    int32_t n_steps = at_most(f->head_dim - first, HKV_GROUP_CHANNELS) / 16;
    lane_params params[4];
    uint32_t n_changed = 0;
    for (int32_t s = 0; s < n_channels / 16; s++) {
        uint8_t *halves = record + hkv_k_params_at(f, first / 16 + s);
        lane_ranges ranges = ranges_empty();
        if (s >= n_steps) {
            _mm512_storeu_si512(halves, _mm512_setzero_si512());
            continue;
        }
        for (int32_t t = 0; t < k->n_tokens; t++) ranges_add(&ranges, rows_load(k, t, first + 16 * s));
        params[s] = ranges_params(&ranges);
        hkv_params_store(params[s].scale_half, params[s].zero_half, hkv_k_param_back, halves);
        n_changed += ranges.n_changed;
    }
    memset(codes, HKV_CODE_MIN, sizeof codes);
    for (int32_t tile = 0; tile < f->stored_tokens / 16; tile++) {
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(HKV_GROUP_CHANNELS) * (size_t)group;
        int32_t n_rows = at_most(k->n_tokens - 16 * tile, 16);
        for (int32_t t = 0; t < n_rows; t++) {
            for (int32_t s = 0; s < n_steps; s++) {
                __m512 x = rows_load(k, 16 * tile + t, first + 16 * s);
                _mm_store_si128((__m128i *)&codes[t][16 * s], lanes_codes(x, params[s].zero, params[s].inverse));
            }
        }
        for (int32_t t = n_rows > 0 ? n_rows : 0; t < 16; t++) memset(codes[t], HKV_CODE_MIN, 64);
        hkv_k_group_store(codes, n_channels, record + f->k_high_offset + at,
                          f->planes & HKV_PLANE_K_LOW ? record + f->k_low_offset + at : NULL);
    }
    return n_changed;
}

/* Parameters of V for up to 16 tokens and one value group, stored and, per token, for the codes. */
typedef struct token_params {
    float zero[16], inverse[16];
} token_params;

HKV_AVX512_INLINE uint32_t encode_value_params(const hkv_format *f, const rows_view *v, int32_t tile,
                                               int32_t value_group, uint8_t *record, token_params *out)
{
    float lo[16] = {0}, hi[16] = {0};
    int32_t first = value_group * HKV_VALUE_GROUP, end = at_most(f->head_dim, first + HKV_VALUE_GROUP);
    int32_t n_rows = at_most(v->n_tokens - 16 * tile, 16);
    uint32_t n_changed = 0;
    lane_params params;
    for (int32_t t = 0; t < n_rows; t++) {
        lane_ranges ranges = ranges_empty();
        int32_t any_kept;
        for (int32_t c = first; c < end; c += 16) ranges_add(&ranges, rows_load(v, 16 * tile + t, c));
        n_changed += ranges.n_changed;
        any_kept = ranges.n_changed < (uint32_t)(end - first);
        lo[t] = _mm512_reduce_min_ps(any_kept ? ranges.kept_lo : ranges.all_lo);
        hi[t] = _mm512_reduce_max_ps(any_kept ? ranges.kept_hi : ranges.all_hi);
    }
    /* Tokens that are not there have lo = hi = 0, which makes zero = scale = 0. */
    params = lanes_params(_mm512_loadu_ps(lo), _mm512_loadu_ps(hi));
    hkv_params_store(params.scale_half, params.zero_half, hkv_v_param_back,
                     record + hkv_v_params_at(f, tile, value_group));
    _mm512_storeu_ps(out->zero, params.zero);
    _mm512_storeu_ps(out->inverse, params.inverse);
    return n_changed;
}

/* Tokens 16 * tile .. of V. */
HKV_AVX512_INLINE uint32_t encode_value_tile(const hkv_format *f, const rows_view *v, int32_t tile, uint8_t *record)
{
    uint8_t codes[16][64] __attribute__((aligned(64)));
    token_params params[HKV_MAX_HEAD_DIM / HKV_VALUE_GROUP];
    int32_t n_rows = at_most(v->n_tokens - 16 * tile, 16);
    uint32_t n_changed = 0;
    for (int32_t g = 0; g < f->n_value_groups; g++) n_changed += encode_value_params(f, v, tile, g, record, &params[g]);
    memset(codes, HKV_CODE_MIN, sizeof codes);
    for (int32_t first = 0; first < f->stored_dim; first += HKV_GROUP_CHANNELS) {
        const token_params *p = &params[first / HKV_VALUE_GROUP];
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(first);
        int32_t n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
        for (int32_t t = 0; t < n_rows; t++) {
            __m512 zero = _mm512_set1_ps(p->zero[t]), inverse = _mm512_set1_ps(p->inverse[t]);
            for (int32_t c = 0; c < n_channels; c += 16) {
                __m128i padding = _mm_set1_epi8(HKV_CODE_MIN);
                int32_t is_padding = first + c >= f->head_dim;
                _mm_store_si128((__m128i *)&codes[t][c],
                                is_padding ? padding
                                           : lanes_codes(rows_load(v, 16 * tile + t, first + c), zero, inverse));
            }
        }
        hkv_v_group_store(codes, n_channels, record + f->v_high_offset + at,
                          f->planes & HKV_PLANE_V_LOW ? record + f->v_low_offset + at : NULL);
    }
    return n_changed;
}

/* dtype is a constant in every copy of this. */
HKV_AVX512_INLINE uint32_t record_encode(const hkv_format *f, hkv_dtype dtype, const void *k, int64_t k_stride_token,
                                         const void *v, int64_t v_stride_token, int32_t n_tokens, uint8_t *record)
{
    int32_t size = dtype == HKV_F32 ? 4 : 2;
    rows_view k_rows = {k, k_stride_token * size, dtype, size, n_tokens};
    rows_view v_rows = {v, v_stride_token * size, dtype, size, n_tokens};
    uint32_t n_changed = 0;
    for (int32_t g = 0; g < (f->stored_dim + 63) / 64; g++) n_changed += encode_key_group(f, &k_rows, g, record);
    for (int32_t t = 0; t < f->stored_tokens / 16; t++) n_changed += encode_value_tile(f, &v_rows, t, record);
    return n_changed;
}

uint32_t hkv_avx512_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                                  int64_t v_stride_token, int32_t n_tokens, uint8_t *record)
{
    if (f->dtype == HKV_BF16) return record_encode(f, HKV_BF16, k, k_stride_token, v, v_stride_token, n_tokens, record);
    if (f->dtype == HKV_F16) return record_encode(f, HKV_F16, k, k_stride_token, v, v_stride_token, n_tokens, record);
    return record_encode(f, HKV_F32, k, k_stride_token, v, v_stride_token, n_tokens, record);
}

/* ----------------------------------------------------------------------------------------------------- decoding */

/* Where a tile's tokens go: rows first .. end-1 of the tile, the first of them to out [.., D]. */
typedef struct tile_target {
    int32_t first, end;
    float *out;
} tile_target;

static void decode_key_tile(const hkv_format *f, const uint8_t *record, int32_t tile, int32_t with_low,
                            tile_target target)
{
    uint8_t codes[16][64] __attribute__((aligned(64)));
    for (int32_t first = 0; first < f->head_dim; first += HKV_GROUP_CHANNELS) {
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(first);
        int32_t n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
        hkv_k_group_load(record + f->k_high_offset + at, with_low ? record + f->k_low_offset + at : NULL, n_channels,
                         codes);
        for (int32_t c = 0; c < n_channels && first + c < f->head_dim; c += 16) {
            __m512 scale, zero;
            hkv_params_load(record + hkv_k_params_at(f, (first + c) / 16), hkv_k_param, &scale, &zero);
            for (int32_t t = target.first; t < target.end; t++) {
                float *out = target.out + (size_t)(t - target.first) * (size_t)f->head_dim + first + c;
                _mm512_storeu_ps(out, _mm512_fmadd_ps(hkv_codes_to_f32(&codes[t][c]), scale, zero));
            }
        }
    }
}

static void decode_value_tile(const hkv_format *f, const uint8_t *record, int32_t tile, int32_t with_low,
                              tile_target target)
{
    uint8_t codes[16][64] __attribute__((aligned(64)));
    for (int32_t first = 0; first < f->head_dim; first += HKV_GROUP_CHANNELS) {
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(first);
        int32_t n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
        float scales[16], zeros[16];
        __m512 scale, zero;
        hkv_v_group_load(record + f->v_high_offset + at, with_low ? record + f->v_low_offset + at : NULL, n_channels,
                         codes);
        hkv_params_load(record + hkv_v_params_at(f, tile, first / HKV_VALUE_GROUP), hkv_v_param, &scale, &zero);
        _mm512_storeu_ps(scales, scale);
        _mm512_storeu_ps(zeros, zero);
        for (int32_t t = target.first; t < target.end; t++) {
            float *out = target.out + (size_t)(t - target.first) * (size_t)f->head_dim + first;
            for (int32_t c = 0; c < n_channels && first + c < f->head_dim; c += 16)
                _mm512_storeu_ps(out + c, _mm512_fmadd_ps(hkv_codes_to_f32(&codes[t][c]), _mm512_set1_ps(scales[t]),
                                                          _mm512_set1_ps(zeros[t])));
        }
    }
}

/* scale * code has at most 19 bits, so that one fused operation rounds as format.c's two do. */
void hkv_avx512_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                              int32_t n_tokens, float *k_out, float *v_out)
{
    int32_t end_token = first_token + n_tokens;
    for (int32_t tile = first_token / 16; 16 * tile < end_token; tile++) {
        tile_target target = {first_token > 16 * tile ? first_token - 16 * tile : 0, at_most(end_token - 16 * tile, 16),
                              NULL};
        size_t n_before = (size_t)(16 * tile + target.first - first_token) * (size_t)f->head_dim;
        if (k_out) {
            target.out = k_out + n_before;
            decode_key_tile(f, record, tile, precision >= HKV_READ_K8V4, target);
        }
        if (v_out) {
            target.out = v_out + n_before;
            decode_value_tile(f, record, tile, precision >= HKV_READ_INT8, target);
        }
    }
}

#endif
