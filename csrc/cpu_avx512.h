/* cpu_avx512.h - what the files of the AVX-512 path share. They are compiled for AVX-512 F, BW, VL, DQ, VBMI, VBMI2,
 * VNNI and BF16; nothing in them runs before `supported` has said yes.
 */
#ifndef HKV_CPU_AVX512_H
#define HKV_CPU_AVX512_H

#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu_kernels.h"

#define HKV_AVX512_INLINE static inline __attribute__((always_inline))

/* cpu_avx512_decode.c */
void hkv_avx512_decode(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                       hkv_cpu_state *state, hkv_cpu_progressive *progressive, float *source_lse);
float hkv_avx512_record_bound(const hkv_cpu_query *query, const uint8_t *record);
/* cpu_avx512_prefill.c */
void hkv_avx512_prefill(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                        hkv_cpu_state *state);
#define HKV_AVX512_PREFILL_TILE 256
/* cpu_avx512_elements.c */
void hkv_avx512_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst);
void hkv_avx512_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst);
/* cpu_avx512_encode.c */
uint32_t hkv_avx512_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                                  int64_t v_stride_token, int32_t n_tokens, uint8_t *record);
void hkv_avx512_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                              int32_t n_tokens, float *k_out, float *v_out);

/* exp(x) for x <= 88, relative error below 3e-7; 0 below -87.3 and for -inf, NaN for NaN. */
HKV_AVX512_INLINE __m512 hkv_avx512_exp(__m512 x)
{
    const __m512 log2e = _mm512_set1_ps(1.44269504f);
    __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLE_UQ); /* or NaN */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x); /* ln 2 in two parts */
    __m512 p = _mm512_set1_ps(1.3981999507e-3f);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(is_normal, p, n);
}

/* exp(x - reference) for the weights of a softmax, given reference * log2(e): relative error below 2e-7 and what the
 * rounding of x * log2(e) makes of it; 0 below 2^-126 and for -inf, NaN for NaN. */
HKV_AVX512_INLINE __m512 hkv_avx512_weight(__m512 x, __m512 reference_log2)
{
    __m512 y = _mm512_fmsub_ps(x, _mm512_set1_ps(1.44269504f), reference_log2);
    __m512 r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* y - floor(y) */
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.8775766e-3f), r, _mm512_set1_ps(8.9893406e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5826318e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4015361e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9315308e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.9999994e-1f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, y);
}

/* Natural logarithm of a normal x > 0, error below 2e-7 absolute or relative. */
HKV_AVX512_INLINE __m512 hkv_avx512_log(__m512 x)
{
    __m512 e = _mm512_getexp_ps(x);
    __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); /* [1, 2) */
    __mmask16 is_large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
    __m512 t, t2, p;
    m = _mm512_mask_mul_ps(m, is_large, m, _mm512_set1_ps(0.5f));
    e = _mm512_mask_add_ps(e, is_large, e, _mm512_set1_ps(1.0f));
    /* log m = 2 atanh(t), t = (m - 1) / (m + 1), |t| <= 0.1716 */
    t = _mm512_div_ps(_mm512_sub_ps(m, _mm512_set1_ps(1.0f)), _mm512_add_ps(m, _mm512_set1_ps(1.0f)));
    t2 = _mm512_mul_ps(t, t);
    p = _mm512_set1_ps(2.0f / 9.0f);
    p = _mm512_fmadd_ps(p, t2, _mm512_set1_ps(2.0f / 7.0f));
    p = _mm512_fmadd_ps(p, t2, _mm512_set1_ps(2.0f / 5.0f));
    p = _mm512_fmadd_ps(p, t2, _mm512_set1_ps(2.0f / 3.0f));
    p = _mm512_fmadd_ps(p, t2, _mm512_set1_ps(2.0f));
    return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693147181f), _mm512_mul_ps(p, t));
}

/* c * tanh(x / c), absolute error below 3e-7 * c. */
HKV_AVX512_INLINE __m512 hkv_avx512_soft_cap(__m512 x, float cap)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 y = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)), _mm512_set1_ps(80.0f));
    __m512 e = hkv_avx512_exp(y); /* tanh = 1 - 2 / (e + 1) */
    __m512 t = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
    return _mm512_mul_ps(t, _mm512_set1_ps(cap));
}

#endif
#endif
