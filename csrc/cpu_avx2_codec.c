/* cpu_avx2_codec.c - writing and reading records with AVX2 and F16C, bit for bit as format.c does.
 *
 * format.h orders a plane for the fragments of a tensor core: 32 lanes of 16 bytes (8 in the half group), lane
 * (row, c) holding fragment rows row and row + 8, columns 2c, 2c + 1 (upper nibbles) and 2c + 8, 2c + 9 (lower), of
 * every 16-channel step. A lane's bytes are [step][column bit][row bit]. The eight lanes of one c, transposed as bytes,
 * give runs of 16 fragment rows: tokens of K, channels of V.
 */
#include "cpu_avx2.h"

#if defined(__x86_64__)

static inline int32_t at_most(int32_t value, int32_t limit)
{
    return value < limit ? value : limit;
}

/* --------------------------------------------------------------------------------------------------------- planes */

/* One step of a transposition: of the 7 bits (vector, byte) that number the 128 bytes, the first moves to the end.
 * After 3 steps byte j of vector i is at 8 * j + i; after 4 more it is back. */
HKV_AVX2_INLINE void interleave_bytes(__m128i v[8])
{
    __m128i w[8];
    for (int i = 0; i < 4; i++) {
        w[2 * i] = _mm_unpacklo_epi8(v[i], v[i + 4]);
        w[2 * i + 1] = _mm_unpackhi_epi8(v[i], v[i + 4]);
    }
    for (int i = 0; i < 8; i++) v[i] = w[i];
}

/* Where the 16 codes of vector j are after 3 steps: K's vectors are [step][column bit], V's [column bit][step]. */
static inline size_t run_offset(int32_t is_v, int32_t c, int32_t is_lower, int32_t j)
{
    int32_t step = is_v ? j & 3 : j >> 1, column = 8 * is_lower + 2 * c + (is_v ? j >> 2 : j & 1);
    return (size_t)(is_v ? column * HKV_GROUP_CHANNELS + 16 * step : (16 * step + column) * 16);
}

HKV_AVX2_INLINE void lanes_to_codes(int32_t is_v, __m128i lanes[8], int32_t c, int32_t is_lower, uint8_t *codes)
{
    const __m128i steps_last = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    for (int i = 0; i < 8 && is_v; i++) lanes[i] = _mm_shuffle_epi8(lanes[i], steps_last);
    for (int i = 0; i < 3; i++) interleave_bytes(lanes);
    for (int32_t j = 0; j < 8; j++) _mm_storeu_si128((__m128i *)(codes + run_offset(is_v, c, is_lower, j)), lanes[j]);
}

HKV_AVX2_INLINE void codes_to_lanes(int32_t is_v, const uint8_t *codes, int32_t c, int32_t is_lower, __m128i lanes[8])
{
    const __m128i steps_first = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (int32_t j = 0; j < 8; j++)
        lanes[j] = _mm_loadu_si128((const __m128i *)(codes + run_offset(is_v, c, is_lower, j)));
    for (int i = 0; i < 4; i++) interleave_bytes(lanes);
    for (int i = 0; i < 8 && is_v; i++) lanes[i] = _mm_shuffle_epi8(lanes[i], steps_first);
}

/* Lane (row, c) of a plane; the half group's lanes hold two steps only. */
HKV_AVX2_INLINE __m128i lane_load(const uint8_t *plane, int32_t n_channels, int32_t row, int32_t c)
{
    int32_t lane = 4 * row + c;
    if (n_channels == HKV_GROUP_CHANNELS) return _mm_loadu_si128((const __m128i *)(plane + 16 * lane));
    return _mm_loadl_epi64((const __m128i *)(plane + 8 * lane));
}

HKV_AVX2_INLINE void lane_store(uint8_t *plane, int32_t n_channels, int32_t row, int32_t c, __m128i nibbles)
{
    int32_t lane = 4 * row + c;
    if (n_channels == HKV_GROUP_CHANNELS)
        _mm_storeu_si128((__m128i *)(plane + 16 * lane), nibbles);
    else
        _mm_storel_epi64((__m128i *)(plane + 8 * lane), nibbles);
}

/* Upper nibbles of a, and the nibbles of b moved down (or a's up and b's kept): how planes and codes exchange halves.
 */
HKV_AVX2_INLINE __m128i upper_nibbles(__m128i a, __m128i b)
{
    const __m128i upper = _mm_set1_epi8((char)0xf0);
    return _mm_or_si128(_mm_and_si128(upper, a), _mm_srli_epi16(_mm_and_si128(upper, b), 4));
}
HKV_AVX2_INLINE __m128i lower_nibbles(__m128i a, __m128i b)
{
    const __m128i lower = _mm_set1_epi8(0x0f);
    return _mm_or_si128(_mm_slli_epi16(_mm_and_si128(lower, a), 4), _mm_and_si128(lower, b));
}

HKV_AVX2 void hkv_avx2_group_load(int32_t is_v, const uint8_t *high, const uint8_t *low, int32_t n_channels,
                                  uint8_t codes[HKV_GROUP_CODES])
{
    for (int32_t c = 0; c < 4; c++) {
        __m128i upper[8], lower[8];
        for (int32_t row = 0; row < 8; row++) {
            __m128i h = lane_load(high, n_channels, row, c);
            __m128i l = low ? lane_load(low, n_channels, row, c) : _mm_set1_epi8((char)0x88);
            upper[row] = upper_nibbles(h, l);
            lower[row] = lower_nibbles(h, l);
        }
        lanes_to_codes(is_v, upper, c, 0, codes);
        lanes_to_codes(is_v, lower, c, 1, codes);
    }
}

/* The inverse; low NULL: not stored. */
HKV_AVX2 static void group_store(int32_t is_v, const uint8_t codes[HKV_GROUP_CODES], int32_t n_channels, uint8_t *high,
                                 uint8_t *low)
{
    for (int32_t c = 0; c < 4; c++) {
        __m128i upper[8], lower[8];
        codes_to_lanes(is_v, codes, c, 0, upper);
        codes_to_lanes(is_v, codes, c, 1, lower);
        for (int32_t row = 0; row < 8; row++) {
            lane_store(high, n_channels, row, c, upper_nibbles(upper[row], lower[row]));
            if (low) lane_store(low, n_channels, row, c, lower_nibbles(upper[row], lower[row]));
        }
    }
}

/* --------------------------------------------------------------------------------------------------- quantisation */

/* Step 1: v, and all ones in the lanes that it leaves as they are. */
HKV_AVX2_INLINE __m256 lanes_clamp(__m256 x, __m256 *kept)
{
    const __m256 limit = _mm256_set1_ps(HKV_MAX_FINITE), minus_limit = _mm256_set1_ps(-HKV_MAX_FINITE);
    *kept = _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_LE_OQ), _mm256_cmp_ps(x, minus_limit, _CMP_GE_OQ));
    x = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_max_ps(_mm256_min_ps(x, limit), minus_limit);
}

/* Ranges of 8 groups, lane by lane: of the elements that step 1 kept, and of all as clamped. */
typedef struct lane_ranges {
    __m256 kept_lo, kept_hi, all_lo, all_hi;
    uint32_t n_changed;
} lane_ranges;

HKV_AVX2_INLINE lane_ranges ranges_empty(void)
{
    const __m256 infinity = _mm256_set1_ps(INFINITY), minus_infinity = _mm256_set1_ps(-INFINITY);
    return (lane_ranges){infinity, minus_infinity, infinity, minus_infinity, 0};
}

HKV_AVX2_INLINE void ranges_add(lane_ranges *ranges, __m256 x)
{
    __m256 kept, v = lanes_clamp(x, &kept);
    ranges->n_changed += 8u - (uint32_t)__builtin_popcount((unsigned)_mm256_movemask_ps(kept));
    ranges->all_lo = _mm256_min_ps(ranges->all_lo, v);
    ranges->all_hi = _mm256_max_ps(ranges->all_hi, v);
    ranges->kept_lo = _mm256_min_ps(ranges->kept_lo, _mm256_blendv_ps(_mm256_set1_ps(INFINITY), v, kept));
    ranges->kept_hi = _mm256_max_ps(ranges->kept_hi, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), v, kept));
}

/* Step 2. */
HKV_AVX2_INLINE void ranges_bounds(const lane_ranges *ranges, float lo[8], float hi[8])
{
    __m256 any_kept = _mm256_cmp_ps(ranges->kept_lo, ranges->kept_hi, _CMP_LE_OQ);
    _mm256_storeu_ps(lo, _mm256_blendv_ps(ranges->all_lo, ranges->kept_lo, any_kept));
    _mm256_storeu_ps(hi, _mm256_blendv_ps(ranges->all_hi, ranges->kept_hi, any_kept));
}

/* The same over all lanes, which belong to one group. */
HKV_AVX2_INLINE void ranges_bounds_of_one(const lane_ranges *ranges, int32_t any_kept, float *lo, float *hi)
{
    float los[8], his[8];
    _mm256_storeu_ps(los, any_kept ? ranges->kept_lo : ranges->all_lo);
    _mm256_storeu_ps(his, any_kept ? ranges->kept_hi : ranges->all_hi);
    *lo = los[0];
    *hi = his[0];
    for (int i = 1; i < 8; i++) {
        *lo = los[i] < *lo ? los[i] : *lo;
        *hi = his[i] > *hi ? his[i] : *hi;
    }
}

/* Step 3 for one group, stored at `index` (in halves) of a parameter section; zero and the inverse of scale for step 4.
 */
static inline void params_write(uint8_t *section, uint32_t index, float lo, float hi, float *zero, float *inverse)
{
    uint16_t zero_half, scale_half;
    hkv_quant_params(lo, hi, &zero_half, &scale_half);
    memcpy(section + 2 * (size_t)index, &scale_half, 2);
    memcpy(section + 2 * (size_t)index + 4, &zero_half, 2);
    *zero = hkv_f16_to_f32(zero_half);
    *inverse = hkv_quant_inverse(hkv_f16_to_f32(scale_half));
}

/* Steps 1 and 4 for 8 elements. Clamping before rounding is the same as after, since the bounds are whole. */
HKV_AVX2_INLINE void lanes_codes(__m256 x, __m256 zero, __m256 inverse, uint8_t codes[8])
{
    __m256 kept, code = _mm256_mul_ps(_mm256_sub_ps(lanes_clamp(x, &kept), zero), inverse);
    __m256i whole;
    __m128i halves;
    code = _mm256_min_ps(_mm256_max_ps(code, _mm256_set1_ps(HKV_CODE_MIN)), _mm256_set1_ps(HKV_CODE_MAX));
    whole = _mm256_cvtps_epi32(_mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(halves, halves));
}

/* ------------------------------------------------------------------------------------------------------- encoding */

/* K or V of one block, as the caller has it. */
typedef struct rows_view {
    const uint8_t *data;
    int64_t stride_bytes; /* per token */
    int32_t dtype, element_bytes;
    int32_t n_tokens;
} rows_view;

HKV_AVX2_INLINE __m256 rows_load(const rows_view *rows, int32_t token, int32_t channel)
{
    return hkv_avx2_elements_load(rows->dtype, rows->data + token * rows->stride_bytes + channel * rows->element_bytes);
}

/* Parameters of all channels of K. */
HKV_AVX2 static uint32_t encode_key_params(const hkv_format *f, const rows_view *k, uint8_t *record, float *zeros,
                                           float *inverses)
{
    uint8_t *section = record + f->k_params_offset;
    uint32_t n_changed = 0;
    memset(section, 0, 4 * (size_t)f->stored_dim);
    for (int32_t c = 0; c < f->head_dim; c += 8) {
        lane_ranges ranges = ranges_empty();
        float lo[8], hi[8];
        for (int32_t t = 0; t < k->n_tokens; t++) ranges_add(&ranges, rows_load(k, t, c));
        ranges_bounds(&ranges, lo, hi);
        n_changed += ranges.n_changed;
        for (int32_t i = 0; i < 8; i++)
            params_write(section, hkv_k_param_index(c + i), lo[i], hi[i], &zeros[c + i], &inverses[c + i]);
    }
    return n_changed;
}

/* Codes of one tile and group of K, from its parameters. */
HKV_AVX2 static void encode_key_group(const hkv_format *f, const rows_view *k, int32_t tile, int32_t first,
                                      const float *zeros, const float *inverses, uint8_t *record)
{
    uint8_t codes[HKV_GROUP_CODES], row[8];
    size_t at = hkv_avx2_group_offset(f, tile, first);
    int32_t n_rows = at_most(k->n_tokens - 16 * tile, 16);
    memset(codes, HKV_CODE_MIN, sizeof codes);
    for (int32_t c = first; c < at_most(f->head_dim, first + HKV_GROUP_CHANNELS); c += 8) {
        __m256 zero = _mm256_loadu_ps(zeros + c), inverse = _mm256_loadu_ps(inverses + c);
        for (int32_t t = 0; t < n_rows; t++) {
            lanes_codes(rows_load(k, 16 * tile + t, c), zero, inverse, row);
            for (int32_t i = 0; i < 8; i++) codes[(c - first + i) * 16 + t] = row[i];
        }
    }
    group_store(0, codes, at_most(f->stored_dim - first, HKV_GROUP_CHANNELS), record + f->k_high_offset + at,
                f->planes & HKV_PLANE_K_LOW ? record + f->k_low_offset + at : NULL);
}

/* Parameters of V for one tile and value group. */
HKV_AVX2 static uint32_t encode_value_params(const hkv_format *f, const rows_view *v, int32_t tile, int32_t first,
                                             uint8_t *record, float zeros[16], float inverses[16])
{
    uint8_t *section = record + f->v_params_offset;
    int32_t n_rows = at_most(v->n_tokens - 16 * tile, 16), end = at_most(f->head_dim, first + HKV_VALUE_GROUP);
    uint32_t n_changed = 0;
    memset(section + 2 * (size_t)hkv_v_param_index(f, 16 * tile, first), 0, 64);
    for (int32_t t = 0; t < n_rows; t++) {
        lane_ranges ranges = ranges_empty();
        float lo, hi;
        for (int32_t c = first; c < end; c += 8) ranges_add(&ranges, rows_load(v, 16 * tile + t, c));
        ranges_bounds_of_one(&ranges, ranges.n_changed < (uint32_t)(end - first), &lo, &hi);
        n_changed += ranges.n_changed;
        params_write(section, hkv_v_param_index(f, 16 * tile + t, first), lo, hi, &zeros[t], &inverses[t]);
    }
    return n_changed;
}

/* Codes of one tile and group of V. */
HKV_AVX2 static void encode_value_group(const hkv_format *f, const rows_view *v, int32_t tile, int32_t first,
                                        const float zeros[16], const float inverses[16], uint8_t *record)
{
    uint8_t codes[HKV_GROUP_CODES];
    size_t at = hkv_avx2_group_offset(f, tile, first);
    int32_t n_rows = at_most(v->n_tokens - 16 * tile, 16), end = at_most(f->head_dim, first + HKV_GROUP_CHANNELS);
    memset(codes, HKV_CODE_MIN, sizeof codes);
    for (int32_t t = 0; t < n_rows; t++) {
        __m256 zero = _mm256_set1_ps(zeros[t]), inverse = _mm256_set1_ps(inverses[t]);
        for (int32_t c = first; c < end; c += 8)
            lanes_codes(rows_load(v, 16 * tile + t, c), zero, inverse, codes + t * HKV_GROUP_CHANNELS + (c - first));
    }
    group_store(1, codes, at_most(f->stored_dim - first, HKV_GROUP_CHANNELS), record + f->v_high_offset + at,
                f->planes & HKV_PLANE_V_LOW ? record + f->v_low_offset + at : NULL);
}

static uint32_t encode_keys(const hkv_format *f, const rows_view *k, uint8_t *record)
{
    float zeros[HKV_MAX_HEAD_DIM], inverses[HKV_MAX_HEAD_DIM];
    uint32_t n_changed = encode_key_params(f, k, record, zeros, inverses);
    for (int32_t tile = 0; tile < f->stored_tokens / 16; tile++) {
        for (int32_t c = 0; c < f->stored_dim; c += HKV_GROUP_CHANNELS)
            encode_key_group(f, k, tile, c, zeros, inverses, record);
    }
    return n_changed;
}

static uint32_t encode_values(const hkv_format *f, const rows_view *v, uint8_t *record)
{
    uint32_t n_changed = 0;
    for (int32_t tile = 0; tile < f->stored_tokens / 16; tile++) {
        float zeros[16], inverses[16];
        for (int32_t c = 0; c < f->stored_dim; c += HKV_GROUP_CHANNELS) {
            if (c % HKV_VALUE_GROUP == 0) n_changed += encode_value_params(f, v, tile, c, record, zeros, inverses);
            encode_value_group(f, v, tile, c, zeros, inverses, record);
        }
    }
    return n_changed;
}

uint32_t hkv_avx2_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                                int64_t v_stride_token, int32_t n_tokens, uint8_t *record)
{
    rows_view k_rows = {k, k_stride_token * f->element_bytes, f->dtype, f->element_bytes, n_tokens};
    rows_view v_rows = {v, v_stride_token * f->element_bytes, f->dtype, f->element_bytes, n_tokens};
    uint32_t n_changed = encode_keys(f, &k_rows, record);
    return n_changed + encode_values(f, &v_rows, record);
}

/* ------------------------------------------------------------------------------------------------------- decoding */

/* Rows first .. end-1 of a tile, the first of them to out [.., D]. */
typedef struct tile_target {
    int32_t first, end;
    float *out;
} tile_target;

HKV_AVX2 static void decode_key_tile(const hkv_format *f, const uint8_t *record, int32_t tile, int32_t with_low,
                                     tile_target target)
{
    uint8_t codes[HKV_GROUP_CODES];
    float params[2 * HKV_MAX_HEAD_DIM], values[16];
    hkv_avx2_halves_to_f32(record + f->k_params_offset, 2 * f->stored_dim, params);
    for (int32_t c = 0; c < f->head_dim; c++) {
        __m256 scale = _mm256_set1_ps(params[hkv_k_param_index(c)]);
        __m256 zero = _mm256_set1_ps(params[hkv_k_param_index(c) + 2]);
        const uint8_t *channel_codes = codes + c % HKV_GROUP_CHANNELS * 16;
        if (c % HKV_GROUP_CHANNELS == 0) {
            size_t at = hkv_avx2_group_offset(f, tile, c);
            hkv_avx2_group_load(0, record + f->k_high_offset + at, with_low ? record + f->k_low_offset + at : NULL,
                                at_most(f->stored_dim - c, HKV_GROUP_CHANNELS), codes);
        }
        for (int32_t i = 0; i < 16; i += 8)
            _mm256_storeu_ps(values + i, hkv_avx2_dequantise(channel_codes + i, scale, zero));
        for (int32_t t = target.first; t < target.end; t++)
            target.out[(size_t)(t - target.first) * (size_t)f->head_dim + (size_t)c] = values[t];
    }
}

HKV_AVX2 static void decode_value_tile(const hkv_format *f, const uint8_t *record, int32_t tile, int32_t with_low,
                                       tile_target target)
{
    uint8_t codes[HKV_GROUP_CODES];
    for (int32_t first = 0; first < f->head_dim; first += HKV_GROUP_CHANNELS) {
        int32_t n_channels = at_most(f->head_dim - first, HKV_GROUP_CHANNELS);
        size_t at = hkv_avx2_group_offset(f, tile, first);
        hkv_token_params params;
        hkv_avx2_token_params(f, record, tile, first, &params);
        hkv_avx2_group_load(1, record + f->v_high_offset + at, with_low ? record + f->v_low_offset + at : NULL,
                            at_most(f->stored_dim - first, HKV_GROUP_CHANNELS), codes);
        for (int32_t t = target.first; t < target.end; t++) {
            float *out = target.out + (size_t)(t - target.first) * (size_t)f->head_dim + first;
            __m256 scale = _mm256_set1_ps(params.scale[t]), zero = _mm256_set1_ps(params.zero[t]);
            for (int32_t c = 0; c < n_channels; c += 8)
                _mm256_storeu_ps(out + c, hkv_avx2_dequantise(codes + t * HKV_GROUP_CHANNELS + c, scale, zero));
        }
    }
}

void hkv_avx2_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                            int32_t n_tokens, float *k_out, float *v_out)
{
    int32_t end_token = first_token + n_tokens;
    for (int32_t tile = first_token / 16; 16 * tile < end_token; tile++) {
        int32_t first = first_token > 16 * tile ? first_token - 16 * tile : 0;
        size_t n_before = (size_t)(16 * tile + first - first_token) * (size_t)f->head_dim;
        tile_target target = {first, at_most(end_token - 16 * tile, 16), NULL};
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
