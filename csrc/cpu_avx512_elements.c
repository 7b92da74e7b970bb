/* cpu_avx512_elements.c - elements of a model's dtype to and from fp32 with AVX-512. */
#include "cpu_avx512.h"

#if defined(__x86_64__)

enum { LANES = 16 };

static __mmask16 lanes_left(int64_t n)
{
    return n >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u);
}

static __m512 halves_widen(hkv_dtype dtype, __m256i halves)
{
    if (dtype == HKV_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* To nearest, ties to even; NaN to quiet NaN. vcvtneps2bf16 would flush subnormals. */
static __m256i halves_round(hkv_dtype dtype, __m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    __m512i odd, rounded;
    if (dtype == HKV_F16) return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

void hkv_avx512_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst)
{
    if (dtype == HKV_F32) {
        memcpy(dst, src, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = lanes_left(n - i);
        __m256i halves = _mm256_maskz_loadu_epi16(lanes, (const uint8_t *)src + 2 * i);
        _mm512_mask_storeu_ps(dst + i, lanes, halves_widen(dtype, halves));
    }
}

void hkv_avx512_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst)
{
    if (dtype == HKV_F32) {
        memcpy(dst, src, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = lanes_left(n - i);
        __m512 x = _mm512_maskz_loadu_ps(lanes, src + i);
        _mm256_mask_storeu_epi16((uint8_t *)dst + 2 * i, lanes, halves_round(dtype, x));
    }
}

#endif
