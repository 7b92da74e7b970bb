/* cpu_avx512_rows.h - attention over keys and values that are stored as rows: hot pages and the call's own tensors.
 *
 * Rows are read 64 bytes (a unit) at a time and widened to fp32. A unit of bf16 gives the even and the odd channels of
 * 32, the cheap way to widen; queries and sums are kept in that order.
 */
#ifndef HKV_CPU_AVX512_ROWS_H
#define HKV_CPU_AVX512_ROWS_H

#include "cpu_avx512_records.h"

enum {
    HKV_ROWS_TOKENS = 64, /* tokens between two updates of the sums */
    HKV_MAX_VECTORS = HKV_MAX_HEAD_DIM / 16,
    HKV_SUM_VECTORS = 4 /* of the sums held in registers, per query row */
};

typedef struct hkv_rows_shape {
    int32_t n_rows; /* 1..4 query rows */
    int32_t dtype;
    int32_t is_page;
} hkv_rows_shape;

/* K or V of a source. */
typedef struct hkv_rows_view {
    const uint8_t *data;
    int64_t stride_bytes;
    int32_t first_unit; /* PAGE: unit of the row in which they start */
    int32_t n_units;
    __mmask64 last_unit; /* bytes of the last unit that are there */
} hkv_rows_view;

HKV_AVX512_INLINE hkv_rows_view hkv_rows_view_of(const hkv_format *f, const hkv_cpu_source *source, int32_t is_v)
{
    int32_t n_units = f->stored_dim * f->element_bytes / 64;
    int32_t n_bytes_last = f->head_dim * f->element_bytes - (n_units - 1) * 64;
    hkv_rows_view view = {source->data, f->row_bytes, is_v * n_units, n_units,
                          n_bytes_last >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n_bytes_last) - 1};
    if (source->kind == HKV_SOURCE_TENSOR) {
        view.data = is_v ? source->v : source->k;
        view.stride_bytes = is_v ? source->v_stride_bytes : source->k_stride_bytes;
        view.first_unit = 0;
    }
    return view;
}

HKV_AVX512_INLINE __m512i hkv_unit_load(const hkv_rows_shape shape, const hkv_rows_view *view, int32_t token,
                                        int32_t unit)
{
    const uint8_t *row = view->data + token * view->stride_bytes;
    __mmask64 bytes = unit + 1 == view->n_units ? view->last_unit : ~(__mmask64)0;
    if (shape.is_page) { /* chunk c lies at c ^ (token & 7) */
        const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
        int32_t place = (view->first_unit + unit) ^ (token >> 2 & 1);
        __m512i order = _mm512_xor_si512(lanes, _mm512_set1_epi64(2 * (token & 3)));
        return _mm512_maskz_mov_epi8(bytes,
                                     _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row + (size_t)place * 64)));
    }
    return _mm512_maskz_loadu_epi8(bytes, row + (size_t)unit * 64);
}

HKV_AVX512_INLINE int32_t hkv_vectors_per_unit(const hkv_rows_shape shape)
{
    return shape.dtype == HKV_F32 ? 1 : 2;
}

HKV_AVX512_INLINE void hkv_unit_widen(const hkv_rows_shape shape, __m512i unit, __m512 vectors[2])
{
    if (shape.dtype == HKV_BF16) {
        vectors[0] = _mm512_castsi512_ps(_mm512_slli_epi32(unit, 16));
        vectors[1] = _mm512_castsi512_ps(_mm512_and_si512(unit, _mm512_set1_epi32((int32_t)0xffff0000u)));
    } else if (shape.dtype == HKV_F16) {
        vectors[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(unit));
        vectors[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(unit, 1));
    } else {
        vectors[0] = _mm512_castsi512_ps(unit);
    }
}

/* A row of DP floats, times `factor`, into the order in which units are widened; and back. */
HKV_AVX512_INLINE void hkv_rows_order(const hkv_rows_shape shape, int32_t stored_dim, float factor, const float *src,
                                      float *dst)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    for (int32_t c = 0; c < stored_dim; c += 32) {
        __m512 a = _mm512_loadu_ps(src + c), b = _mm512_loadu_ps(src + c + 16), first = a, second = b;
        if (shape.dtype == HKV_BF16) {
            first = _mm512_permutex2var_ps(a, even, b);
            second = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
        }
        _mm512_storeu_ps(dst + c, _mm512_mul_ps(first, _mm512_set1_ps(factor)));
        _mm512_storeu_ps(dst + c + 16, _mm512_mul_ps(second, _mm512_set1_ps(factor)));
    }
}

HKV_AVX512_INLINE void hkv_rows_order_back(const hkv_rows_shape shape, int32_t stored_dim, const float *src, float *dst)
{
    const __m512i first_half = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    for (int32_t c = 0; c < stored_dim; c += 32) {
        __m512 even = _mm512_loadu_ps(src + c), odd = _mm512_loadu_ps(src + c + 16), first = even, second = odd;
        if (shape.dtype == HKV_BF16) {
            first = _mm512_permutex2var_ps(even, first_half, odd);
            second = _mm512_permutex2var_ps(even, _mm512_add_epi32(first_half, _mm512_set1_epi32(8)), odd);
        }
        _mm512_storeu_ps(dst + c, first);
        _mm512_storeu_ps(dst + c + 16, second);
    }
}

/* ----------------------------------------------------------------------------------------------------------- scores */

/* Sums over the lanes of 16 vectors, as one vector in their order. */
HKV_AVX512_INLINE __m512 hkv_reduce_vectors(const __m512 x[16])
{
    __m512 y[4], z[2];
    for (int32_t k = 0; k < 4; k++) {
        __m512 ab =
            _mm512_add_ps(_mm512_unpacklo_ps(x[4 * k], x[4 * k + 1]), _mm512_unpackhi_ps(x[4 * k], x[4 * k + 1]));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * k + 2], x[4 * k + 3]),
                                  _mm512_unpackhi_ps(x[4 * k + 2], x[4 * k + 3]));
        __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        y[k] = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    }
    for (int32_t k = 0; k < 2; k++)
        z[k] = _mm512_add_ps(_mm512_shuffle_f32x4(y[2 * k], y[2 * k + 1], 0x88),
                             _mm512_shuffle_f32x4(y[2 * k], y[2 * k + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
}

/* q . k of tokens first .. first + n - 1: scores [n_rows, HKV_ROWS_TOKENS]; q [n_rows, DP] in the units' order. `ahead`
 * is prefetched in step, as many bytes as there are keys and values, in rows of row_bytes. */
HKV_AVX512_INLINE void hkv_rows_dots(const hkv_rows_shape shape, int32_t stored_dim, const hkv_rows_view *keys,
                                     int32_t first, int32_t n, const float *q, const uint8_t *ahead, int32_t row_bytes,
                                     float *scores)
{
    for (int32_t base = 0; base < n; base += 16) {
        __m512 sums[HKV_BLOCK_ROWS][16];
        for (int32_t t = 0; t < 16; t++) {
            __m512 sum[HKV_BLOCK_ROWS][2];
            for (int32_t byte = 0; byte < row_bytes; byte += 64)
                _mm_prefetch((const char *)(ahead + (size_t)(base + t) * (size_t)row_bytes + byte), _MM_HINT_T0);
            for (int32_t i = 0; i < shape.n_rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
            for (int32_t unit = 0; base + t < n && unit < keys->n_units; unit++) {
                __m512 k[2];
                hkv_unit_widen(shape, hkv_unit_load(shape, keys, first + base + t, unit), k);
                for (int32_t j = 0; j < hkv_vectors_per_unit(shape); j++)
                    for (int32_t i = 0; i < shape.n_rows; i++)
                        sum[i][j] = _mm512_fmadd_ps(k[j],
                                                    _mm512_loadu_ps(q + (size_t)i * (size_t)stored_dim +
                                                                    16 * (unit * hkv_vectors_per_unit(shape) + j)),
                                                    sum[i][j]);
            }
            for (int32_t i = 0; i < shape.n_rows; i++) sums[i][t] = _mm512_add_ps(sum[i][0], sum[i][1]);
        }
        for (int32_t i = 0; i < shape.n_rows; i++)
            _mm512_storeu_ps(scores + i * HKV_ROWS_TOKENS + base, hkv_reduce_vectors(sums[i]));
    }
}

/* ----------------------------------------------------------------------------------------------------------- values */

/* acc = factor[row] * acc + weights . v, over tokens first .. first + n - 1; weights [n_rows, HKV_ROWS_TOKENS], acc
 * [n_rows, DP] in the units' order. */
HKV_AVX512_INLINE void hkv_rows_values(const hkv_rows_shape shape, int32_t stored_dim, const hkv_rows_view *values,
                                       int32_t first, int32_t n, const float *weights, const float *factor, float *acc)
{
    const int32_t per_unit = hkv_vectors_per_unit(shape), n_vectors = stored_dim / 16;
    for (int32_t base = 0; base < n_vectors; base += HKV_SUM_VECTORS) {
        const int32_t n_here = n_vectors - base < HKV_SUM_VECTORS ? n_vectors - base : HKV_SUM_VECTORS;
        __m512 sum[HKV_BLOCK_ROWS][HKV_SUM_VECTORS];
        for (int32_t i = 0; i < shape.n_rows; i++)
            for (int32_t j = 0; j < HKV_SUM_VECTORS; j++)
                sum[i][j] = j < n_here
                                ? _mm512_mul_ps(_mm512_set1_ps(factor[i]),
                                                _mm512_loadu_ps(acc + (size_t)i * (size_t)stored_dim + 16 * (base + j)))
                                : _mm512_setzero_ps();
        for (int32_t t = 0; t < n; t++) {
            for (int32_t j = 0; j < HKV_SUM_VECTORS; j += per_unit) {
                __m512 v[2];
                if (j >= n_here) break;
                hkv_unit_widen(shape, hkv_unit_load(shape, values, first + t, (base + j) / per_unit), v);
                for (int32_t i = 0; i < shape.n_rows; i++)
                    for (int32_t k = 0; k < per_unit; k++)
                        sum[i][j + k] =
                            _mm512_fmadd_ps(_mm512_set1_ps(weights[i * HKV_ROWS_TOKENS + t]), v[k], sum[i][j + k]);
            }
        }
        for (int32_t i = 0; i < shape.n_rows; i++)
            for (int32_t j = 0; j < HKV_SUM_VECTORS; j++)
                if (j < n_here) _mm512_storeu_ps(acc + (size_t)i * (size_t)stored_dim + 16 * (base + j), sum[i][j]);
    }
}

#endif
