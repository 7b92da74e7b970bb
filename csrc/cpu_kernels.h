/* cpu_kernels.h - what one CPU code path (reference, avx2, avx512) provides to backend_cpu.c.
 *
 * A kernel works for one (row, KV head): the G query heads that share the head, times the row's query tokens (decode)
 * or a tile of them (prefill). Keys come from sources in any order; a kernel adds them to a running softmax.
 */
#ifndef HKV_CPU_KERNELS_H
#define HKV_CPU_KERNELS_H

#include "format.h"
#include "hkv.h"

typedef enum hkv_cpu_source_kind {
    HKV_SOURCE_RECORD, /* a quantised record */
    HKV_SOURCE_PAGE,   /* rows in the swizzled layout of a row page */
    HKV_SOURCE_TENSOR  /* K and V of the call */
} hkv_cpu_source_kind;

/* Consecutive keys first_position .. first_position + n_tokens - 1 of the sequence. */
typedef struct hkv_cpu_source {
    hkv_cpu_source_kind kind;
    hkv_precision precision;                /* RECORD: best that may be read (INT4 for L2, else what is present) */
    const uint8_t *data;                    /* RECORD: the record; PAGE: the page of this KV head */
    const void *k, *v;                      /* TENSOR: first token's K and V of this KV head, [n_tokens, D] */
    int64_t k_stride_bytes, v_stride_bytes; /* TENSOR: per token */
    int64_t first_position;
    int32_t n_tokens;
    int32_t logical_block; /* RECORD, PAGE: where its mass is reported; -1 for TENSOR */
} hkv_cpu_source;

/* The queries of one (row, KV head). Query row i is head i % group of query token i / group. */
typedef struct hkv_cpu_query {
    const hkv_format *format;
    const float *q;         /* [n_rows, DP], 64-byte aligned, zero beyond D; no scale applied */
    int32_t n_rows;         /* group * n_query_tokens */
    int32_t group;          /* G */
    int64_t first_position; /* of query token 0: it sees keys <= first_position, token t keys <= first_position + t */
    int32_t window_tokens;  /* 0, or keys > position - window only */
    float softmax_scale;
    float logits_soft_cap; /* 0 = none */
} hkv_cpu_query;

/* Running softmax, natural logarithms. An empty state has max = -inf, sum = 0, acc = 0. Output = acc / sum, lse = max +
 * log(sum). */
typedef struct hkv_cpu_state {
    float *max; /* [n_rows] */
    float *sum; /* [n_rows] */
    float *acc; /* [n_rows, DP], 64-byte aligned */
} hkv_cpu_state;

/* Progressive reading of the records of one call, and what came of it. NULL where everything is read in full.
 * Records of which no query row sees a token are neither read nor counted. n_refined counts records read beyond INT4;
 * n_bytes the prefix that was read: v_params_offset where skipped, else hkv_record_prefix_bytes. */
typedef struct hkv_cpu_progressive {
    float skip_mass, refine_mass;
    const float *reference_lse;                    /* [n_rows] log-sum-exp of the hot part; -inf: nothing there */
    int64_t n_read, n_skipped, n_refined, n_bytes; /* out, added to */
    double skipped_share; /* out, added to: the largest share over rows, of every skipped record */
} hkv_cpu_progressive;

enum { HKV_NOT_READ = -1 }; /* beside the values of hkv_precision */

/* The rule of progressive reading (docs/transitions.md) for a record of which the queries' largest share is `share`,
 * negative if none of it is visible: the precision at which it is read, or HKV_NOT_READ. Counts what was decided. */
HKV_INLINE int32_t hkv_cpu_progressive_decide(const hkv_format *f, const hkv_cpu_source *record, double share,
                                              hkv_cpu_progressive *progressive)
{
    hkv_precision precision;
    if (share < 0.0) return HKV_NOT_READ;
    progressive->n_read++;
    if (share < (double)progressive->skip_mass) {
        progressive->n_skipped++;
        progressive->skipped_share += share;
        progressive->n_bytes += f->v_params_offset;
        return HKV_NOT_READ;
    }
    precision = share >= (double)progressive->refine_mass ? record->precision : HKV_READ_INT4;
    progressive->n_refined += precision > HKV_READ_INT4;
    progressive->n_bytes += hkv_record_prefix_bytes(f, precision);
    return (int32_t)precision;
}

typedef struct hkv_cpu_kernels {
    const char *name;
    int32_t (*supported)(void); /* does this machine run it */

    /* As hkv_elements_to_f32 and hkv_elements_from_f32, but for which NaN a NaN becomes. */
    void (*elements_to_f32)(hkv_dtype dtype, const void *src, int64_t n, float *dst);
    void (*elements_from_f32)(hkv_dtype dtype, const float *src, int64_t n, void *dst);

    /* As hkv_record_encode, bit for bit. */
    uint32_t (*record_encode)(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                              int64_t v_stride_token, int32_t n_tokens, uint8_t *record);
    /* As hkv_record_decode. */
    void (*record_decode)(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                          int32_t n_tokens, float *k_out, float *v_out);

    /* Decode: add sources to the state. At most 8 query tokens. source_lse [n_sources, n_rows] or NULL receives every
     * source's own log-sum-exp per query row (-inf: nothing visible, or skipped). progressive applies to RECORD
     * sources. */
    void (*decode)(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources, hkv_cpu_state *state,
                   hkv_cpu_progressive *progressive, float *source_lse);

    /* Prefill: add sources to the state of a tile of query tokens. Everything is read in full. */
    void (*prefill)(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources, hkv_cpu_state *state);
    int32_t prefill_tile_tokens; /* query tokens of a tile that suit it, at group 1 */

    /* Quest's bound, unscaled: the largest over query rows of sum_d max(q_d * (zero + 8 scale), q_d * (zero + 248
     * scale)). */
    float (*record_bound)(const hkv_cpu_query *query, const uint8_t *record);
} hkv_cpu_kernels;

extern const hkv_cpu_kernels hkv_cpu_reference; /* reference.c: double precision, the specification */
extern const hkv_cpu_kernels hkv_cpu_avx2;      /* cpu_avx2.c */
extern const hkv_cpu_kernels hkv_cpu_avx512;    /* cpu_avx512*.c */

#endif
