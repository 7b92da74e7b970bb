/* cpu_avx2_elements.c - elements of a model's dtype to and from fp32 with AVX2. */
#include "cpu_avx2.h"

#if defined(__x86_64__)

enum { LANES = 8 };

HKV_AVX2_INLINE __m256 halves_widen(hkv_dtype dtype, __m128i halves)
{
    if (dtype == HKV_F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* To nearest, ties to even; NaN to quiet NaN. */
HKV_AVX2_INLINE __m128i halves_round(hkv_dtype dtype, __m256 x)
{
    const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i odd, rounded;
    if (dtype == HKV_F16) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

HKV_AVX2 void hkv_avx2_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst)
{
    int64_t n_whole = dtype == HKV_F32 ? 0 : n / LANES * LANES;
    for (int64_t i = 0; i < n_whole; i += LANES)
        _mm256_storeu_ps(dst + i,
                         halves_widen(dtype, _mm_loadu_si128((const __m128i *)((const uint8_t *)src + 2 * i))));
    hkv_elements_to_f32(dtype, (const uint8_t *)src + 2 * n_whole, n - n_whole, dst + n_whole);
}

HKV_AVX2 void hkv_avx2_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst)
{
    int64_t n_whole = dtype == HKV_F32 ? 0 : n / LANES * LANES;
    for (int64_t i = 0; i < n_whole; i += LANES)
        _mm_storeu_si128((__m128i *)((uint8_t *)dst + 2 * i), halves_round(dtype, _mm256_loadu_ps(src + i)));
    hkv_elements_from_f32(dtype, src + n_whole, n - n_whole, (uint8_t *)dst + 2 * n_whole);
}

#endif
