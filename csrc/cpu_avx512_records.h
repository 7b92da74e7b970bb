/* cpu_avx512_records.h - scores and weighted values of one record for up to four query rows, in integers.
 *
 * A 64-byte load of a plane holds, for two fragment rows r and r + 8, four columns (2c, 2c + 1, 2c + 8, 2c + 9) in each
 * of four 16-column steps: 32-bit word 4c + step. Joined with the low plane and masked, a word becomes two 16-bit codes
 * of one fragment row, as vpdpwssd wants them. The other operand is in 16-bit fixed point, made anew for every record:
 *
 *   keys    rows are tokens, columns channels:  q * scale_K, with one unit per query row; sums over words = a score
 *   values  rows are channels, columns tokens:  p * scale_V, with one unit per query row and value group
 *
 * The integer sums are exact. Codes count from the middle of their range (128, or 120 = 128 - 8 for a high nibble with
 * its 8 left out), which halves the rounding error of the fixed point; zero + 128 * scale is added in fp32.
 */
#ifndef HKV_CPU_AVX512_RECORDS_H
#define HKV_CPU_AVX512_RECORDS_H

#include "cpu_avx512.h"

enum {
    HKV_BLOCK_ROWS = 4, /* query rows at a time */
    HKV_MAX_GROUPS = 4, /* of 64 channels; the last may have 32 */
    HKV_MAX_STEPS = HKV_MAX_HEAD_DIM / 16,
    HKV_MAX_TILES = HKV_MAX_BLOCK_SIZE / HKV_TILE_TOKENS,
    HKV_MAX_VALUE_GROUPS = HKV_MAX_HEAD_DIM / HKV_VALUE_GROUP,
    HKV_FIXED_ONE = 32767
};

/* What is known at compile time where it matters: passed by value to inlined functions. */
typedef struct hkv_record_shape {
    int32_t n_rows;   /* 1..4 query rows */
    int32_t n_groups; /* of 64 channels, the half one included */
    int32_t has_half; /* the last group has 32 channels */
    int32_t with_low; /* join the low plane */
} hkv_record_shape;

/* ------------------------------------------------------------------------------------------ reductions of four rows */

/* Fold the lanes of x[0 .. n_rows-1] with `op`, in lane i of the result; lanes from n_rows on are arbitrary. */
#define HKV_REDUCE_ROWS(name, op, op_256, op_128)                                                                      \
    HKV_AVX512_INLINE __m128 name(int32_t n_rows, const __m512 x[HKV_BLOCK_ROWS])                                      \
    {                                                                                                                  \
        const __m512 x1 = x[n_rows > 1 ? 1 : 0], x2 = x[n_rows > 2 ? 2 : 0], x3 = x[n_rows > 3 ? 3 : 0];               \
        __m512 a = op(_mm512_unpacklo_ps(x[0], x1), _mm512_unpackhi_ps(x[0], x1));                                     \
        __m512 b = n_rows > 2 ? op(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3)) : a;                        \
        __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));                                     \
        __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));                                     \
        __m512 lanes = op(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));                                                 \
        __m256 half = op_256(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));                         \
        return op_128(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));                                   \
    }

HKV_REDUCE_ROWS(hkv_reduce_rows_add, _mm512_add_ps, _mm256_add_ps, _mm_add_ps)
HKV_REDUCE_ROWS(hkv_reduce_rows_max, _mm512_max_ps, _mm256_max_ps, _mm_max_ps)

/* Units of the fixed point in which the largest magnitudes become HKV_FIXED_ONE, and their inverses; 0 for 0. */
HKV_AVX512_INLINE void hkv_fixed_units(__m128 largest, float unit[HKV_BLOCK_ROWS], float inverse[HKV_BLOCK_ROWS])
{
    const __m128 one = _mm_set1_ps((float)HKV_FIXED_ONE);
    __mmask8 is_there = _mm_cmp_ps_mask(largest, _mm_setzero_ps(), _CMP_NEQ_UQ);
    _mm_storeu_ps(unit, _mm_div_ps(largest, one));
    _mm_storeu_ps(inverse, _mm_maskz_div_ps(is_there, one, largest));
}

/* ---------------------------------------------------------------------------------------------- one load of a plane */

HKV_AVX512_INLINE size_t hkv_group_offset(int32_t stored_dim, int32_t tile, int32_t group, int32_t r, int32_t is_half)
{
    return (size_t)tile * 8 * (size_t)stored_dim + (size_t)group * 512 + (size_t)(r * (is_half ? 32 : 64));
}

/* The half group's two steps go where those of a whole group lie; the others are zero. */
HKV_AVX512_INLINE __m512i hkv_group_load(const uint8_t *plane, size_t offset, int32_t is_half)
{
    if (!is_half) return _mm512_loadu_si512(plane + offset);
    return _mm512_maskz_expand_epi32(0x3333,
                                     _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(plane + offset))));
}

/* Codes as 16-bit pairs of adjacent columns: [0] of row r, [1] of row r + 8. */
typedef struct hkv_code_pairs {
    __m512i upper[2]; /* columns 2c, 2c + 1 */
    __m512i lower[2]; /* columns 2c + 8, 2c + 9 */
} hkv_code_pairs;

HKV_AVX512_INLINE hkv_code_pairs hkv_split_codes(__m512i high, __m512i low, int32_t with_low)
{
    hkv_code_pairs codes;
    if (with_low) {
        const __m512i nibbles = _mm512_set1_epi8((char)0xf0), bytes = _mm512_set1_epi16(0x00ff);
        __m512i upper = _mm512_ternarylogic_epi32(nibbles, high, _mm512_srli_epi16(low, 4), 0xca);
        __m512i lower = _mm512_ternarylogic_epi32(nibbles, _mm512_slli_epi16(high, 4), low, 0xca);
        codes.upper[0] = _mm512_and_si512(upper, bytes);
        codes.upper[1] = _mm512_srli_epi16(upper, 8);
        codes.lower[0] = _mm512_and_si512(lower, bytes);
        codes.lower[1] = _mm512_srli_epi16(lower, 8);
    } else {
        const __m512i nibble = _mm512_set1_epi16(0x00f0);
        codes.upper[0] = _mm512_and_si512(high, nibble);
        codes.upper[1] = _mm512_and_si512(_mm512_srli_epi16(high, 8), nibble);
        codes.lower[0] = _mm512_and_si512(_mm512_slli_epi16(high, 4), nibble);
        codes.lower[1] = _mm512_and_si512(_mm512_srli_epi16(high, 4), nibble);
    }
    return codes;
}

/* 128, less the 8 that a code without its low nibble stands for. */
HKV_AVX512_INLINE int32_t hkv_code_middle(int32_t with_low)
{
    return with_low ? 128 : 120;
}

/* `packed` holds two steps of 16 columns, as _mm512_packs_epi32 puts them together. The dwords of 128-bit lane c become
 * columns (2c, 2c + 1) of step `step` in `upper`, (2c + 8, 2c + 9) in `lower`. */
HKV_AVX512_INLINE void hkv_spread_pairs(__m512i packed, int32_t step, __m512i *upper, __m512i *lower)
{
    const __m512i upper_words = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 4, 4, 4, 4, 5, 5, 5, 5);
    const __m512i lower_words = _mm512_setr_epi32(8, 8, 8, 8, 9, 9, 9, 9, 12, 12, 12, 12, 13, 13, 13, 13);
    const __m512i of_step = _mm512_set1_epi32(2 * step);
    *upper = _mm512_permutexvar_epi32(_mm512_add_epi32(upper_words, of_step), packed);
    *lower = _mm512_permutexvar_epi32(_mm512_add_epi32(lower_words, of_step), packed);
}

/* Every dword becomes the sum over its 128-bit lane. */
HKV_AVX512_INLINE __m512i hkv_sum_within_lanes(__m512i x)
{
    x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
    return _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
}

/* ------------------------------------------------------------------------------------------------------------- keys */

/* Queries in the record's fixed point. */
typedef struct hkv_key_side {
    /* 128-bit lane c: channels (2c, 2c + 1) of a 16-channel step, [1]: (2c + 8, 2c + 9) */
    __m512i q[HKV_MAX_STEPS][2][HKV_BLOCK_ROWS];
    __m512i start[HKV_BLOCK_ROWS]; /* summed over lanes: -middle times the sum of q */
    float unit[HKV_BLOCK_ROWS];    /* of scores */
    float base[HKV_BLOCK_ROWS];    /* score of zero + 128 scale */
} hkv_key_side;

/* Scales and zeros of 16 channels in order. */
HKV_AVX512_INLINE void hkv_key_params(const uint8_t *params, int32_t step, __m512 *scale, __m512 *zero)
{
    static const uint16_t order[32] __attribute__((aligned(64))) = {
        0, 1, 8,  9,  16, 17, 24, 25, 4, 5, 12, 13, 20, 21, 28, 29,  /* scales: hkv_k_param_index */
        2, 3, 10, 11, 18, 19, 26, 27, 6, 7, 14, 15, 22, 23, 30, 31}; /* zeros */
    __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_loadu_si512(params + (size_t)step * 64));
    *scale = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    *zero = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

/* The making of a key side takes three steps, each a chain of instructions that wait for each other: they are to be
 * done beside something else. Between them it is here. */
typedef struct hkv_key_work {
    __m512 product[HKV_BLOCK_ROWS][HKV_MAX_STEPS]; /* q * scale */
    __m512 largest[HKV_BLOCK_ROWS];
    __m512 base[HKV_BLOCK_ROWS];
    float inverse[HKV_BLOCK_ROWS];
} hkv_key_work;

enum { HKV_SIDE_STEPS = 3 };

HKV_AVX512_INLINE int32_t hkv_n_channel_steps(const hkv_record_shape shape)
{
    return shape.n_groups * 4 - 2 * shape.has_half;
}

/* q [n_rows, DP] */
HKV_AVX512_INLINE void hkv_key_side_scale(const hkv_record_shape shape, const hkv_format *f, const uint8_t *record,
                                          const float *q, hkv_key_work *work)
{
    const uint8_t *params = record + f->k_params_offset;
    __m512 largest[HKV_BLOCK_ROWS], base[HKV_BLOCK_ROWS];
    for (int32_t i = 0; i < shape.n_rows; i++) largest[i] = base[i] = _mm512_setzero_ps();
    for (int32_t s = 0; s < hkv_n_channel_steps(shape); s++) {
        __m512 scale, zero, centre;
        hkv_key_params(params, s, &scale, &zero);
        centre = _mm512_fmadd_ps(scale, _mm512_set1_ps(128.0f), zero);
        for (int32_t i = 0; i < shape.n_rows; i++) {
            __m512 q_step = _mm512_loadu_ps(q + (size_t)i * (size_t)f->stored_dim + 16 * s);
            __m512 product = _mm512_mul_ps(q_step, scale);
            base[i] = _mm512_fmadd_ps(q_step, centre, base[i]);
            largest[i] = _mm512_max_ps(largest[i], _mm512_abs_ps(product));
            work->product[i][s] = product;
        }
    }
    for (int32_t i = 0; i < shape.n_rows; i++) {
        work->largest[i] = largest[i];
        work->base[i] = base[i];
    }
}

/* Scores are softmax_scale * q . k. */
HKV_AVX512_INLINE void hkv_key_side_measure(const hkv_record_shape shape, float softmax_scale, hkv_key_work *work,
                                            hkv_key_side *side)
{
    hkv_fixed_units(hkv_reduce_rows_max(shape.n_rows, work->largest), side->unit, work->inverse);
    _mm_storeu_ps(side->unit, _mm_mul_ps(_mm_loadu_ps(side->unit), _mm_set1_ps(softmax_scale)));
    _mm_storeu_ps(side->base, _mm_mul_ps(hkv_reduce_rows_add(shape.n_rows, work->base), _mm_set1_ps(softmax_scale)));
}

HKV_AVX512_INLINE void hkv_key_side_fix(const hkv_record_shape shape, const hkv_key_work *work, hkv_key_side *side)
{
    const __m512i middle = _mm512_set1_epi16((short)-hkv_code_middle(shape.with_low));
    for (int32_t i = 0; i < shape.n_rows; i++) {
        const __m512 to_fixed = _mm512_set1_ps(work->inverse[i]);
        __m512i start = _mm512_setzero_si512();
        for (int32_t s = 0; s < hkv_n_channel_steps(shape); s += 2) { /* there are always two more */
            __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(work->product[i][s], to_fixed)),
                                                _mm512_cvtps_epi32(_mm512_mul_ps(work->product[i][s + 1], to_fixed)));
            start = _mm512_dpwssd_epi32(start, packed, middle);
            for (int32_t j = 0; j < 2; j++) hkv_spread_pairs(packed, j, &side->q[s + j][0][i], &side->q[s + j][1][i]);
        }
        side->start[i] = hkv_sum_within_lanes(start);
    }
}

/* Four rows' loads of a group, words (lane c, dword step), to one vector a step: (lane c, dword row). */
HKV_AVX512_INLINE void hkv_words_by_step(const __m512i rows[4], __m512i steps[4])
{
    __m512i lo_01 = _mm512_unpacklo_epi32(rows[0], rows[1]), hi_01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
    __m512i lo_23 = _mm512_unpacklo_epi32(rows[2], rows[3]), hi_23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    steps[0] = _mm512_unpacklo_epi64(lo_01, lo_23);
    steps[1] = _mm512_unpackhi_epi64(lo_01, lo_23);
    steps[2] = _mm512_unpacklo_epi64(hi_01, hi_23);
    steps[3] = _mm512_unpackhi_epi64(hi_01, hi_23);
}

/* Sums over the 128-bit lanes of four vectors, side by side. */
HKV_AVX512_INLINE __m512i hkv_fold_lanes(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    __m512i cd = _mm512_add_epi32(_mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}

HKV_AVX512_INLINE __m512 hkv_fold_lanes_ps(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* Scores of a tile for every row: scores [n_rows, TP]. `ahead` is prefetched in step with the record. */
HKV_AVX512_INLINE void hkv_record_dots(const hkv_record_shape shape, const hkv_format *f, const uint8_t *record,
                                       const hkv_key_side *side, int32_t tile, const uint8_t *ahead, float *scores)
{
    const uint8_t *high = record + f->k_high_offset, *low = record + f->k_low_offset;
    const uint8_t *ahead_high = ahead + f->k_high_offset, *ahead_low = ahead + f->k_low_offset;
    __m512i sum[HKV_BLOCK_ROWS][2][2]; /* [][rows 0..3, 4..7][+ 0, + 8] */
    for (int32_t i = 0; i < shape.n_rows; i++)
        sum[i][0][0] = sum[i][0][1] = sum[i][1][0] = sum[i][1][1] = side->start[i];
    for (int32_t g = 0; g < shape.n_groups; g++) {
        const int32_t is_half = shape.has_half && g + 1 == shape.n_groups;
        __m512i high_steps[2][4], low_steps[2][4];
        for (int32_t half = 0; half < 2; half++) {
            __m512i high_rows[4], low_rows[4];
            for (int32_t r = 0; r < 4; r++) {
                size_t offset = hkv_group_offset(f->stored_dim, tile, g, 4 * half + r, is_half);
                high_rows[r] = hkv_group_load(high, offset, is_half);
                _mm_prefetch((const char *)(ahead_high + offset), _MM_HINT_T0);
                if (!shape.with_low) continue;
                low_rows[r] = hkv_group_load(low, offset, is_half);
                _mm_prefetch((const char *)(ahead_low + offset), _MM_HINT_T0);
            }
            hkv_words_by_step(high_rows, high_steps[half]);
            if (shape.with_low) hkv_words_by_step(low_rows, low_steps[half]);
        }
        for (int32_t s = 0; s < (is_half ? 2 : 4); s++) {
            const hkv_code_pairs codes[2] = {
                hkv_split_codes(high_steps[0][s], shape.with_low ? low_steps[0][s] : high_steps[0][s], shape.with_low),
                hkv_split_codes(high_steps[1][s], shape.with_low ? low_steps[1][s] : high_steps[1][s], shape.with_low)};
            for (int32_t i = 0; i < shape.n_rows; i++) {
                const __m512i upper = side->q[4 * g + s][0][i], lower = side->q[4 * g + s][1][i];
                for (int32_t j = 0; j < 4; j++)
                    sum[i][j >> 1][j & 1] =
                        _mm512_dpwssd_epi32(sum[i][j >> 1][j & 1], codes[j >> 1].upper[j & 1], upper);
                for (int32_t j = 0; j < 4; j++)
                    sum[i][j >> 1][j & 1] =
                        _mm512_dpwssd_epi32(sum[i][j >> 1][j & 1], codes[j >> 1].lower[j & 1], lower);
            }
        }
    }
    for (int32_t i = 0; i < shape.n_rows; i++) {
        __m512i dots = hkv_fold_lanes(sum[i][0][0], sum[i][1][0], sum[i][0][1], sum[i][1][1]);
        _mm512_storeu_ps(
            scores + (size_t)i * (size_t)f->stored_tokens + 16 * tile,
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_set1_ps(side->unit[i]), _mm512_set1_ps(side->base[i])));
    }
}

/* ----------------------------------------------------------------------------------------------------------- values */

/* Weights in the record's fixed point. */
typedef struct hkv_value_side {
    /* word 4c + step: tokens (2c, 2c + 1) of a tile, [1]: (2c + 8, 2c + 9), whatever the step */
    __m512i p[HKV_MAX_VALUE_GROUPS][HKV_MAX_TILES][2][HKV_BLOCK_ROWS];
    __m512i start[HKV_MAX_VALUE_GROUPS][HKV_BLOCK_ROWS]; /* summed over lanes: -middle times the sum of p */
    float unit[HKV_MAX_VALUE_GROUPS][HKV_BLOCK_ROWS];
    float base[HKV_MAX_VALUE_GROUPS][HKV_BLOCK_ROWS]; /* sum of p * (zero + 128 scale) */
} hkv_value_side;

/* Scales and zeros of a tile's 16 tokens in order. */
HKV_AVX512_INLINE void hkv_value_params(const uint8_t *params, int32_t tile, __m512 *scale, __m512 *zero)
{
    static const uint16_t order[32] __attribute__((aligned(64))) = {
        0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,  /* scales: hkv_v_param_index */
        2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31}; /* zeros */
    __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_loadu_si512(params + (size_t)tile * 64));
    *scale = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    *zero = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

/* The same three steps as for keys, for a value group. */
typedef struct hkv_value_work {
    __m512 scaled[HKV_BLOCK_ROWS][HKV_MAX_TILES]; /* p * scale */
    __m512 largest[HKV_BLOCK_ROWS];
    __m512 base[HKV_BLOCK_ROWS];
    float inverse[HKV_BLOCK_ROWS];
} hkv_value_work;

/* weights [n_rows, TP], 0 for tokens that a row does not see; tokens from n_tokens on have no parameters. */
HKV_AVX512_INLINE void hkv_value_side_scale(const hkv_record_shape shape, const hkv_format *f, const uint8_t *record,
                                            int32_t value_group, const float *weights, int32_t n_tokens,
                                            int32_t n_tiles, hkv_value_work *work)
{
    const uint8_t *params = record + f->v_params_offset + (size_t)value_group * 4 * (size_t)f->stored_tokens;
    __m512 largest[HKV_BLOCK_ROWS], base[HKV_BLOCK_ROWS];
    for (int32_t i = 0; i < shape.n_rows; i++) largest[i] = base[i] = _mm512_setzero_ps();
    for (int32_t tile = 0; tile < n_tiles; tile++) {
        int32_t n = n_tokens - 16 * tile;
        __mmask16 is_there = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1u);
        __m512 scale, zero, centre;
        hkv_value_params(params, tile, &scale, &zero);
        centre = _mm512_maskz_fmadd_ps(is_there, scale, _mm512_set1_ps(128.0f), zero);
        scale = _mm512_maskz_mov_ps(is_there, scale);
        for (int32_t i = 0; i < shape.n_rows; i++) {
            __m512 p = _mm512_loadu_ps(weights + (size_t)i * (size_t)f->stored_tokens + 16 * tile);
            __m512 scaled = _mm512_mul_ps(p, scale);
            largest[i] = _mm512_max_ps(largest[i], scaled);
            base[i] = _mm512_fmadd_ps(p, centre, base[i]);
            work->scaled[i][tile] = scaled;
        }
    }
    for (int32_t i = 0; i < shape.n_rows; i++) {
        work->largest[i] = largest[i];
        work->base[i] = base[i];
    }
}

HKV_AVX512_INLINE void hkv_value_side_measure(const hkv_record_shape shape, int32_t value_group, hkv_value_work *work,
                                              hkv_value_side *side)
{
    hkv_fixed_units(hkv_reduce_rows_max(shape.n_rows, work->largest), side->unit[value_group], work->inverse);
    _mm_storeu_ps(side->base[value_group], hkv_reduce_rows_add(shape.n_rows, work->base));
}

HKV_AVX512_INLINE void hkv_value_side_fix(const hkv_record_shape shape, int32_t value_group, int32_t n_tiles,
                                          const hkv_value_work *work, hkv_value_side *side)
{
    const __m512i middle = _mm512_set1_epi16((short)-hkv_code_middle(shape.with_low));
    for (int32_t i = 0; i < shape.n_rows; i++) {
        const __m512 to_fixed = _mm512_set1_ps(work->inverse[i]);
        __m512i start = _mm512_setzero_si512();
        for (int32_t tile = 0; tile < n_tiles; tile += 2) {
            __m512 second = tile + 1 < n_tiles ? work->scaled[i][tile + 1] : _mm512_setzero_ps();
            __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(work->scaled[i][tile], to_fixed)),
                                                _mm512_cvtps_epi32(_mm512_mul_ps(second, to_fixed)));
            start = _mm512_dpwssd_epi32(start, packed, middle);
            for (int32_t j = 0; j < 2 && tile + j < n_tiles; j++)
                hkv_spread_pairs(packed, j, &side->p[value_group][tile + j][0][i],
                                 &side->p[value_group][tile + j][1][i]);
        }
        side->start[value_group][i] = hkv_sum_within_lanes(start);
    }
}

/* Running sums of weighted values, word 4c + step of [r], [1]: r + 8; channel 64 g + 16 step + r once summed over c. */
typedef struct hkv_value_sums {
    __m512 words[HKV_BLOCK_ROWS][HKV_MAX_GROUPS][8][2];
    float base[HKV_BLOCK_ROWS][HKV_MAX_VALUE_GROUPS]; /* to be added to every channel of the value group */
} hkv_value_sums;

/* sums += factor[row] * what the zeros of the values are worth */
HKV_AVX512_INLINE void hkv_record_add_base(const hkv_record_shape shape, const hkv_value_side *side,
                                           const float *factor, hkv_value_sums *sums)
{
    for (int32_t vg = 0; vg < (shape.n_groups + 1) / 2; vg++)
        for (int32_t i = 0; i < shape.n_rows; i++) sums->base[i][vg] += factor[i] * side->base[vg][i];
}

/* sums += factor[row] * weights . v, for fragment rows r, r + 1, r + 8 and r + 9 of a group's steps: two rows share the
 * loads of weights. */
HKV_AVX512_INLINE void hkv_record_values(const hkv_record_shape shape, const hkv_format *f, const uint8_t *record,
                                         const hkv_value_side *side, int32_t n_tiles, const float *factor, int32_t g,
                                         int32_t r, const uint8_t *ahead, hkv_value_sums *sums)
{
    const uint8_t *high = record + f->v_high_offset, *low = record + f->v_low_offset;
    const uint8_t *ahead_high = ahead + f->v_high_offset, *ahead_low = ahead + f->v_low_offset;
    const int32_t vg = g / 2, is_half = shape.has_half && g + 1 == shape.n_groups;
    __m512i sum[HKV_BLOCK_ROWS][2][2]; /* [][r, r + 1][+ 0, + 8] */
    for (int32_t i = 0; i < shape.n_rows; i++)
        sum[i][0][0] = sum[i][0][1] = sum[i][1][0] = sum[i][1][1] = side->start[vg][i];
#pragma GCC unroll 4
    for (int32_t tile = 0; tile < n_tiles; tile++) {
        hkv_code_pairs codes[2];
        for (int32_t j = 0; j < 2; j++) {
            size_t offset = hkv_group_offset(f->stored_dim, tile, g, r + j, is_half);
            __m512i high_codes = hkv_group_load(high, offset, is_half);
            __m512i low_codes = shape.with_low ? hkv_group_load(low, offset, is_half) : high_codes;
            codes[j] = hkv_split_codes(high_codes, low_codes, shape.with_low);
            _mm_prefetch((const char *)(ahead_high + offset), _MM_HINT_T0);
            if (shape.with_low) _mm_prefetch((const char *)(ahead_low + offset), _MM_HINT_T0);
        }
        for (int32_t i = 0; i < shape.n_rows; i++) {
            const __m512i upper = side->p[vg][tile][0][i], lower = side->p[vg][tile][1][i];
            for (int32_t j = 0; j < 4; j++)
                sum[i][j >> 1][j & 1] = _mm512_dpwssd_epi32(sum[i][j >> 1][j & 1], codes[j >> 1].upper[j & 1], upper);
            for (int32_t j = 0; j < 4; j++)
                sum[i][j >> 1][j & 1] = _mm512_dpwssd_epi32(sum[i][j >> 1][j & 1], codes[j >> 1].lower[j & 1], lower);
        }
    }
    for (int32_t i = 0; i < shape.n_rows; i++) {
        const __m512 unit = _mm512_set1_ps(factor[i] * side->unit[vg][i]);
        for (int32_t j = 0; j < 4; j++) {
            __m512 *words = &sums->words[i][g][r + (j >> 1)][j & 1];
            *words = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][j >> 1][j & 1]), unit, *words);
        }
    }
}

#endif
