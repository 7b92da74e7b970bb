/* cpu_avx512_planes.h - code planes and parameters of a record to and from rows, with AVX-512 VBMI.
 *
 * format.h orders a plane for the fragments of a tensor core. Here one tile (16 tokens) by one group (64 channels, or
 * the last 32 where DP % 64 = 32) of it becomes rows of code bytes, code[token][channel], and back. A group's vector i
 * of 64 bytes, low and high nibbles joined into `upper` and `lower` (codes of columns below 8 and from 8 on), holds the
 * fragment rows i and i + 8 of four 16-channel steps; of the half group, the rows 2i, 2i + 1, 2i + 8, 2i + 9 of two. So
 * K, whose fragment rows are tokens, needs one byte permutation, and V, whose rows are channels, a transposition.
 */
#ifndef HKV_CPU_AVX512_PLANES_H
#define HKV_CPU_AVX512_PLANES_H

#include "cpu_avx512.h"

#if defined(__x86_64__)

#define HKV_GROUP_CHANNELS 64

/* ---------------------------------------------------------------------------------------------- byte permutations */

#define HKV_SEQ8(F, b) F(b), F((b) + 1), F((b) + 2), F((b) + 3), F((b) + 4), F((b) + 5), F((b) + 6), F((b) + 7)
#define HKV_SEQ64(F)                                                                                                   \
    HKV_SEQ8(F, 0), HKV_SEQ8(F, 8), HKV_SEQ8(F, 16), HKV_SEQ8(F, 24), HKV_SEQ8(F, 32), HKV_SEQ8(F, 40),                \
        HKV_SEQ8(F, 48), HKV_SEQ8(F, 56)
#define HKV_BYTE_TABLE(name, F) static const uint8_t name[64] __attribute__((aligned(64))) = {HKV_SEQ64(F)}

/* K: row byte j from (upper, lower); add 1 for the row 8 tokens further. The half group makes two rows at once. */
#define HKV_K_ROW(j) ((((j) >> 3 & 1) << 6) + (((j)&7) >> 1) * 16 + ((j) >> 4) * 4 + ((j)&1) * 2)
#define HKV_K_ROW_HALF(j)                                                                                              \
    ((((j) >> 3 & 1) << 6) + ((j) >> 5) * 32 + (((j)&7) >> 1) * 8 + ((j) >> 4 & 1) * 4 + ((j)&1) * 2)
/* Its inverse: byte j of `upper` from (row, row 8 further); add 8 for `lower`. */
#define HKV_K_UPPER(j) ((((j)&1) << 6) + ((j) >> 2 & 3) * 16 + ((j) >> 4) * 2 + ((j) >> 1 & 1))
#define HKV_K_UPPER_HALF(j)                                                                                            \
    ((((j)&1) << 6) + ((j) >> 5) * 32 + ((j) >> 2 & 1) * 16 + ((j) >> 3 & 3) * 2 + ((j) >> 1 & 1))

/* V, first: `upper` or `lower` into one quadword per token, its bytes r * 4 + step (half: (row & 1) * 4 + r * 2 +
 * step), where r is the fragment row's upper bit. */
#define HKV_V_WORD(j)      (((j) >> 4) * 16 + ((j)&3) * 4 + ((j) >> 2 & 1) + ((j) >> 3 & 1) * 2)
#define HKV_V_WORD_HALF(j) (((j) >> 2 & 1) * 32 + ((j) >> 4) * 8 + ((j)&1) * 4 + ((j) >> 1 & 1) + ((j) >> 3 & 1) * 2)
#define HKV_V_BACK(j)      ((((j) >> 4) * 2 + ((j) >> 1 & 1)) * 8 + ((j)&1) * 4 + ((j) >> 2 & 3))
#define HKV_V_BACK_HALF(j) (((((j) >> 3) & 3) * 2 + ((j) >> 1 & 1)) * 8 + ((j) >> 5) * 4 + ((j)&1) * 2 + ((j) >> 2 & 1))
/* V, last: a token's eight quadwords, one per vector, into its row; and back. */
#define HKV_V_ROW(j)        (((j)&7) * 8 + ((j) >> 3 & 1) * 4 + ((j) >> 4))
#define HKV_V_ROW_HALF(j)   (((j) >> 1 & 3) * 8 + ((j)&1) * 4 + ((j) >> 3 & 1) * 2 + ((j) >> 4 & 1))
#define HKV_V_SPLIT(j)      (((j)&3) * 16 + ((j) >> 2 & 1) * 8 + ((j) >> 3))
#define HKV_V_SPLIT_HALF(j) (((j)&1) * 16 + ((j) >> 1 & 1) * 8 + ((j) >> 3 & 3) * 2 + ((j) >> 2 & 1))

HKV_BYTE_TABLE(hkv_k_row, HKV_K_ROW);
HKV_BYTE_TABLE(hkv_k_row_half, HKV_K_ROW_HALF);
HKV_BYTE_TABLE(hkv_k_upper, HKV_K_UPPER);
HKV_BYTE_TABLE(hkv_k_upper_half, HKV_K_UPPER_HALF);
HKV_BYTE_TABLE(hkv_v_word, HKV_V_WORD);
HKV_BYTE_TABLE(hkv_v_word_half, HKV_V_WORD_HALF);
HKV_BYTE_TABLE(hkv_v_back, HKV_V_BACK);
HKV_BYTE_TABLE(hkv_v_back_half, HKV_V_BACK_HALF);
HKV_BYTE_TABLE(hkv_v_row, HKV_V_ROW);
HKV_BYTE_TABLE(hkv_v_row_half, HKV_V_ROW_HALF);
HKV_BYTE_TABLE(hkv_v_split, HKV_V_SPLIT);
HKV_BYTE_TABLE(hkv_v_split_half, HKV_V_SPLIT_HALF);

/* ------------------------------------------------------------------------------------------------------- codes */

/* Bytes of one group of a tile: 16 tokens x n_channels (64 or 32), 4 bits each. */
static inline size_t hkv_group_bytes(int32_t n_channels)
{
    return (size_t)n_channels * 8;
}

HKV_AVX512_INLINE __m512i hkv_permute_bytes(const uint8_t table[64], __m512i bytes)
{
    return _mm512_permutexvar_epi8(_mm512_load_si512(table), bytes);
}

/* 64 bytes of the high and low plane into whole codes; low NULL: its nibbles are 8. */
HKV_AVX512_INLINE void hkv_join_nibbles(const uint8_t *high, const uint8_t *low, __m512i *upper, __m512i *lower)
{
    const __m512i upper_nibble = _mm512_set1_epi8((char)0xf0);
    __m512i h = _mm512_loadu_si512(high), l = low ? _mm512_loadu_si512(low) : _mm512_set1_epi8((char)0x88);
    /* 0xca: first ? second : third, bit by bit */
    *upper = _mm512_ternarylogic_epi64(upper_nibble, h, _mm512_srli_epi16(_mm512_and_si512(l, upper_nibble), 4), 0xca);
    *lower = _mm512_ternarylogic_epi64(upper_nibble, _mm512_slli_epi16(h, 4), l, 0xca);
}

/* The inverse; low NULL: not stored. */
HKV_AVX512_INLINE void hkv_split_nibbles(__m512i upper, __m512i lower, uint8_t *high, uint8_t *low)
{
    const __m512i upper_nibble = _mm512_set1_epi8((char)0xf0);
    __m512i lower_shifted = _mm512_srli_epi16(_mm512_and_si512(lower, upper_nibble), 4);
    _mm512_storeu_si512(high, _mm512_ternarylogic_epi64(upper_nibble, upper, lower_shifted, 0xca));
    if (low)
        _mm512_storeu_si512(low, _mm512_ternarylogic_epi64(upper_nibble, _mm512_slli_epi16(upper, 4), lower, 0xca));
}

/* Transpose 8 x 8 quadwords in place. */
HKV_AVX512_INLINE void hkv_transpose_quadwords(__m512i v[8])
{
    __m512i pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            quads[i + j] = _mm512_shuffle_i64x2(pairs[i + j], pairs[i + j + 2], 0x88);     /* columns j, j + 4 */
            quads[i + j + 2] = _mm512_shuffle_i64x2(pairs[i + j], pairs[i + j + 2], 0xdd); /* j + 2, j + 6 */
        }
    }
    for (int j = 0; j < 4; j++) {
        v[j] = _mm512_shuffle_i64x2(quads[j], quads[j + 4], 0x88);
        v[j + 4] = _mm512_shuffle_i64x2(quads[j], quads[j + 4], 0xdd);
    }
}

/* One group of a K tile into codes[token][channel]; channels from n_channels on are left alone. */
HKV_AVX512_INLINE void hkv_k_group_load(const uint8_t *high, const uint8_t *low, int32_t n_channels,
                                        uint8_t codes[16][64])
{
    const __m512i one = _mm512_set1_epi8(1);
    __m512i upper, lower, row;
    if (n_channels == HKV_GROUP_CHANNELS) {
        row = _mm512_load_si512(hkv_k_row);
        for (int i = 0; i < 8; i++) {
            hkv_join_nibbles(high + 64 * i, low ? low + 64 * i : NULL, &upper, &lower);
            _mm512_store_si512(codes[i], _mm512_permutex2var_epi8(upper, row, lower));
            _mm512_store_si512(codes[i + 8], _mm512_permutex2var_epi8(upper, _mm512_add_epi8(row, one), lower));
        }
        return;
    }
    row = _mm512_load_si512(hkv_k_row_half);
    for (int i = 0; i < 4; i++) {
        hkv_join_nibbles(high + 64 * i, low ? low + 64 * i : NULL, &upper, &lower);
        for (int r = 0; r < 2; r++) {
            __m512i two_rows = _mm512_permutex2var_epi8(upper, r ? _mm512_add_epi8(row, one) : row, lower);
            _mm256_store_si256((__m256i *)codes[8 * r + 2 * i], _mm512_castsi512_si256(two_rows));
            _mm256_store_si256((__m256i *)codes[8 * r + 2 * i + 1], _mm512_extracti64x4_epi64(two_rows, 1));
        }
    }
}

/* The inverse: every byte of the group is written. */
HKV_AVX512_INLINE void hkv_k_group_store(const uint8_t codes[16][64], int32_t n_channels, uint8_t *high, uint8_t *low)
{
    const __m512i eight = _mm512_set1_epi8(8);
    int32_t is_full = n_channels == HKV_GROUP_CHANNELS;
    __m512i upper = _mm512_load_si512(is_full ? hkv_k_upper : hkv_k_upper_half), lower = _mm512_add_epi8(upper, eight);
    for (int i = 0; i < n_channels / 8; i++) {
        __m512i rows[2];
        for (int r = 0; r < 2; r++) {
            if (is_full) {
                rows[r] = _mm512_load_si512(codes[8 * r + i]);
                continue;
            }
            rows[r] =
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256((const __m256i *)codes[8 * r + 2 * i])),
                                   _mm256_load_si256((const __m256i *)codes[8 * r + 2 * i + 1]), 1);
        }
        hkv_split_nibbles(_mm512_permutex2var_epi8(rows[0], upper, rows[1]),
                          _mm512_permutex2var_epi8(rows[0], lower, rows[1]), high + 64 * i, low ? low + 64 * i : NULL);
    }
}

/* One group of a V tile into codes[token][channel]; channels from n_channels on become arbitrary. */
HKV_AVX512_INLINE void hkv_v_group_load(const uint8_t *high, const uint8_t *low, int32_t n_channels,
                                        uint8_t codes[16][64])
{
    int32_t is_full = n_channels == HKV_GROUP_CHANNELS;
    const uint8_t *word = is_full ? hkv_v_word : hkv_v_word_half, *row = is_full ? hkv_v_row : hkv_v_row_half;
    __m512i first[8], last[8]; /* tokens 0..7, 8..15 */
    for (int i = 0; i < 8; i++) {
        __m512i upper = _mm512_setzero_si512(), lower = upper;
        if (i < n_channels / 8) hkv_join_nibbles(high + 64 * i, low ? low + 64 * i : NULL, &upper, &lower);
        first[i] = hkv_permute_bytes(word, upper);
        last[i] = hkv_permute_bytes(word, lower);
    }
    hkv_transpose_quadwords(first);
    hkv_transpose_quadwords(last);
    for (int i = 0; i < 8; i++) {
        _mm512_store_si512(codes[i], hkv_permute_bytes(row, first[i]));
        _mm512_store_si512(codes[i + 8], hkv_permute_bytes(row, last[i]));
    }
}

/* The inverse: every byte of the group is written. */
HKV_AVX512_INLINE void hkv_v_group_store(const uint8_t codes[16][64], int32_t n_channels, uint8_t *high, uint8_t *low)
{
    int32_t is_full = n_channels == HKV_GROUP_CHANNELS;
    const uint8_t *split = is_full ? hkv_v_split : hkv_v_split_half, *back = is_full ? hkv_v_back : hkv_v_back_half;
    __m512i first[8], last[8];
    for (int i = 0; i < 8; i++) {
        first[i] = hkv_permute_bytes(split, _mm512_load_si512(codes[i]));
        last[i] = hkv_permute_bytes(split, _mm512_load_si512(codes[i + 8]));
    }
    hkv_transpose_quadwords(first);
    hkv_transpose_quadwords(last);
    for (int i = 0; i < n_channels / 8; i++) {
        hkv_split_nibbles(hkv_permute_bytes(back, first[i]), hkv_permute_bytes(back, last[i]), high + 64 * i,
                          low ? low + 64 * i : NULL);
    }
}

/* -------------------------------------------------------------------------------------------------- parameters */

/* 32 halves hold scales and zeros of 16 channels (K) or 16 tokens (V). Half j of them sorted, 16 scales then 16 zeros,
 * comes from half HKV_K_PARAM(j); the _BACK permutations undo that. */
#define HKV_K_PARAM(j)      ((((j)&7) >> 1) * 8 + ((j) >> 3 & 1) * 4 + ((j)&1) + ((j) >> 4) * 2)
#define HKV_K_PARAM_BACK(j) (((j) >> 1 & 1) * 16 + ((j) >> 2 & 1) * 8 + ((j) >> 3) * 2 + ((j)&1))
#define HKV_V_PARAM(j)      (((j)&7) * 4 + ((j) >> 3 & 1) + ((j) >> 4) * 2)
#define HKV_V_PARAM_BACK(j) (((j) >> 1 & 1) * 16 + ((j)&1) * 8 + ((j) >> 2))
#define HKV_HALF_TABLE(name, F)                                                                                        \
    static const uint16_t name[32]                                                                                     \
        __attribute__((aligned(64))) = {HKV_SEQ8(F, 0), HKV_SEQ8(F, 8), HKV_SEQ8(F, 16), HKV_SEQ8(F, 24)}
HKV_HALF_TABLE(hkv_k_param, HKV_K_PARAM);
HKV_HALF_TABLE(hkv_k_param_back, HKV_K_PARAM_BACK);
HKV_HALF_TABLE(hkv_v_param, HKV_V_PARAM);
HKV_HALF_TABLE(hkv_v_param_back, HKV_V_PARAM_BACK);

HKV_AVX512_INLINE void hkv_params_load(const uint8_t *halves, const uint16_t order[32], __m512 *scale, __m512 *zero)
{
    __m512i sorted = _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_loadu_si512(halves));
    *scale = _mm512_cvtph_ps(_mm512_castsi512_si256(sorted));
    *zero = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1));
}

HKV_AVX512_INLINE void hkv_params_store(__m256i scale, __m256i zero, const uint16_t back[32], uint8_t *halves)
{
    __m512i sorted = _mm512_inserti64x4(_mm512_castsi256_si512(scale), zero, 1);
    _mm512_storeu_si512(halves, _mm512_permutexvar_epi16(_mm512_load_si512(back), sorted));
}

/* Parameters of channels 16 * step .. + 15 of K, and of tokens 16 * tile .. + 15 of V for channels of one value group.
 */
static inline size_t hkv_k_params_at(const hkv_format *f, int32_t step)
{
    return f->k_params_offset + (size_t)step * 64;
}
static inline size_t hkv_v_params_at(const hkv_format *f, int32_t tile, int32_t value_group)
{
    return f->v_params_offset + ((size_t)value_group * (size_t)(f->stored_tokens / 16) + (size_t)tile) * 64;
}

/* 16 code bytes as floats. */
HKV_AVX512_INLINE __m512 hkv_codes_to_f32(const uint8_t *codes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)codes)));
}

#endif
#endif
