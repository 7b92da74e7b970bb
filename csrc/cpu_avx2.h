/* cpu_avx2.h - what the files of the AVX2 path share: planes and parameters of a record, elements of rows.
 *
 * Functions carry their target as an attribute, so that the files compile with whatever flags.
 */
#ifndef HKV_CPU_AVX2_H
#define HKV_CPU_AVX2_H

#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu_kernels.h"

#define HKV_AVX2        __attribute__((target("avx2,fma,f16c")))
#define HKV_AVX2_INLINE HKV_AVX2 static inline __attribute__((always_inline))

/* cpu_avx2_elements.c */
void hkv_avx2_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst);
void hkv_avx2_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst);
/* cpu_avx2_codec.c */
uint32_t hkv_avx2_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                                int64_t v_stride_token, int32_t n_tokens, uint8_t *record);
void hkv_avx2_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                            int32_t n_tokens, float *k_out, float *v_out);

/* Codes of one tile (16 tokens) by one group of 64 channels, or of the last 32 where DP % 64 = 32: of K as
 * [64 channels, 16 tokens], of V as [16 tokens, 64 channels]. */
enum { HKV_GROUP_CHANNELS = 64, HKV_GROUP_CODES = 1024 };

/* Read the group's bytes of a high and a low plane; low NULL: its nibbles are 8. Channels from n_channels (64 or 32) on
 * become arbitrary. */
void hkv_avx2_group_load(int32_t is_v, const uint8_t *high, const uint8_t *low, int32_t n_channels,
                         uint8_t codes[HKV_GROUP_CODES]);

/* Bytes before a tile's group in a plane. */
static inline size_t hkv_avx2_group_offset(const hkv_format *f, int32_t tile, int32_t first_channel)
{
    return ((size_t)tile * (size_t)f->stored_dim + (size_t)first_channel) * 8;
}

/* n, a multiple of 8, halves. */
HKV_AVX2_INLINE void hkv_avx2_halves_to_f32(const uint8_t *halves, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + 2 * i))));
}

/* Scales and zeros of V for the 16 tokens of a tile and the value group of a channel. */
typedef struct hkv_token_params {
    float scale[16], zero[16];
} hkv_token_params;

HKV_AVX2_INLINE void hkv_avx2_token_params(const hkv_format *f, const uint8_t *record, int32_t tile, int32_t channel,
                                           hkv_token_params *out)
{
    uint32_t first = hkv_v_param_index(f, 16 * tile, channel);
    float params[32];
    hkv_avx2_halves_to_f32(record + f->v_params_offset + 2 * (size_t)first, 32, params);
    for (int32_t t = 0; t < 16; t++) {
        uint32_t index = hkv_v_param_index(f, 16 * tile + t, channel) - first;
        out->scale[t] = params[index];
        out->zero[t] = params[index + 2];
    }
}

/* zero + scale * code for 8 code bytes: at most 19 bits before the sum, so that it rounds once, like format.h's. */
HKV_AVX2_INLINE __m256 hkv_avx2_dequantise(const uint8_t codes[8], __m256 scale, __m256 zero)
{
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(wide), scale, zero);
}

/* 8 consecutive elements of a row. */
HKV_AVX2_INLINE __m256 hkv_avx2_elements_load(int32_t dtype, const uint8_t *elements)
{
    __m128i halves;
    if (dtype == HKV_F32) return _mm256_loadu_ps((const float *)(const void *)elements);
    halves = _mm_loadu_si128((const __m128i *)elements);
    if (dtype == HKV_F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

#endif
#endif
