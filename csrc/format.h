/* format.h - the bytes of a record and of a hot page. The only definition; C and CUDA compile it.
 *
 * docs/format.md is the same in words and pictures. Everything here is little-endian.
 *
 *   record  one block of T tokens x one layer x one KV head (bits 8, 6 or 4)
 *           [ header 64 | K params | K high | V params | V high | K low | V low | pad to 64 ]
 *           Every precision is a contiguous prefix: INT4 ends after V high, K8V4 after K low, INT8 after V low.
 *   row page  the same at bits 0, and one KV head of a hot page at any bits
 *           [ T rows of (K | V) in the model's dtype, 16-byte chunks XOR-swizzled by token ]
 *
 * Sizes: D is stored padded to DP, a multiple of 32; T padded to TP, a multiple of 16. A plane holds 4 bits for each of
 * TP x DP elements. Padded channels and tokens hold code 8 with zero = scale = 0 in their parameters.
 *
 * Quantisation, per group of elements that share (zero, scale): K one group per channel over the valid tokens, V one
 * per token and up to 128 channels. All arithmetic in fp32, one rounding per operation, no contraction:
 *   1. v = 0 if x is NaN, else x clamped to +-61408. Elements with v != x are counted.
 *   2. lo, hi = min, max of the x that were not changed; of the v if all were changed. -0 counts as 0.
 *   3. zero  = round_down_fp16(lo - (8 * (hi - lo)) / 240)
 *      scale = round_up_fp16((hi - zero) / 248)
 *   4. code = clamp(rint((v - zero) * (1 / scale)), 8, 248), rint to even; code = 8 if scale is 0.
 *
 * 61408 is the largest bound for which zero cannot overflow fp16. Rounding zero down and scale up keeps codes of step 4
 * inside 8..248 without help, except where scale is subnormal (error at most 8 * 2^-23) and for clamped inputs; the
 * clamp makes zero + 8 * scale <= stored value <= zero + 248 * scale hold always.
 *
 * Values read back, in fp32:
 *   INT8  zero + scale * code            code = 16 * high + low
 *   INT4  zero + scale * (16 * high + 8)
 * Because lo and hi fall on codes 8 and 248, the high nibble alone is 4-bit rounding over [lo, hi].
 */
#ifndef HKV_FORMAT_H
#define HKV_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "hkv.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define HKV_INLINE static __host__ __device__ __forceinline__
#else
#define HKV_INLINE static inline
#endif

#define HKV_FORMAT_VERSION 1
#define HKV_TILE_TOKENS    16  /* tokens (or channels) of one tensor-core tile */
#define HKV_VALUE_GROUP    128 /* channels that share a V scale */
#define HKV_MAX_HEAD_DIM   256
#define HKV_MAX_BLOCK_SIZE 512
#define HKV_MAX_FINITE     61408.0f
#define HKV_CODE_MIN       8
#define HKV_CODE_MAX       248
#define HKV_HOT_ALIGN      512 /* of a hot page */
#define HKV_MASS_DECAY     0.95f

enum { /* hkv_record_header.planes */
       HKV_PLANE_K_HIGH = 1,
       HKV_PLANE_V_HIGH = 2,
       HKV_PLANE_K_LOW = 4,
       HKV_PLANE_V_LOW = 8
};

/* State of a record; travels with it, so that a copied page is complete. A record whose stamp is 0 or whose planes are
 * 0 holds nothing. 64 bytes. */
typedef struct hkv_record_header {
    uint32_t stamp;          /*  0  unique per claim; equal to the hot page's stamp if that holds the same content */
    uint16_t n_valid_tokens; /*  4  tokens stored, 0..T */
    uint8_t planes;          /*  6  HKV_PLANE_*: what the payload holds */
    uint8_t tier;            /*  7  hkv_tier */
    uint8_t version;         /*  8  HKV_FORMAT_VERSION */
    uint8_t bits;            /*  9  quantization_bits it was written with */
    uint16_t flags;          /* 10  0; reserved */
    int32_t low_k_slot;      /* 12  slot of the K low plane in an elastic pool, -1 = in the record */
    int32_t low_v_slot;      /* 16  the same for V */
    uint32_t n_clamped;      /* 20  elements changed by step 1 */
    int64_t last_access;     /* 24  clock of the last access */
    uint32_t mean_interval;  /* 32  mean of the last access intervals (R15), clock units */
    uint32_t n_accesses;     /* 36  intervals in that mean, at most 100 */
    uint32_t age;            /* 40  clock units without access while a running row held the block */
    uint16_t recency;        /* 44  place in recency order (R16) */
    uint16_t reserved0;      /* 46 */
    /* Kept by decode steps with a clock, for every record of every row: the row's share as hkv_attend.mass reports it,
     * the largest over the rows that share the record. */
    float mass;            /* 48  share of the last step's softmax that fell here */
    float mass_history;    /* 52  max(mass, HKV_MASS_DECAY * mass_history), once a step however many rows share it */
    uint32_t reserved1[2]; /* 56 */
} hkv_record_header;

#ifdef __cplusplus
static_assert(sizeof(hkv_record_header) == 64, "record header is 64 bytes");
static_assert(offsetof(hkv_record_header, mass) == 48, "record header layout");
#else
_Static_assert(sizeof(hkv_record_header) == 64, "record header is 64 bytes");
_Static_assert(offsetof(hkv_record_header, mass) == 48, "record header layout");
#endif

/* Derived sizes of one (config, head size, dtype). Offsets are from the start of the record. */
typedef struct hkv_format {
    int32_t bits;             /* 8, 6, 4 or 0 */
    int32_t dtype;            /* hkv_dtype of rows */
    int32_t head_dim;         /* D */
    int32_t stored_dim;       /* DP */
    int32_t block_tokens;     /* T */
    int32_t stored_tokens;    /* TP */
    int32_t n_value_groups;   /* ceil(D / 128) */
    int32_t planes;           /* HKV_PLANE_* of a fresh record */
    int32_t element_bytes;    /* of a row's elements: 2 or 4 */
    int32_t row_bytes;        /* one token's K | V: 2 * DP * element_bytes */
    uint32_t plane_bytes;     /* TP * DP / 2 */
    uint32_t k_params_offset; /* 64 */
    uint32_t k_high_offset;
    uint32_t v_params_offset;
    uint32_t v_high_offset;
    uint32_t k_low_offset;
    uint32_t v_low_offset;
    uint32_t int4_bytes; /* length of the prefix that INT4 reads; also of K8V4, INT8 below */
    uint32_t k8v4_bytes;
    uint32_t int8_bytes;
    uint32_t record_bytes;   /* what is stored at these bits, multiple of 64; at bits 0 the row page */
    uint32_t row_page_bytes; /* T * row_bytes, multiple of 512: one KV head of a hot page */
} hkv_format;

/* Fill in the sizes. The caller has checked its arguments (hkv_config_check, head_dim 16..256 in steps of 16). */
HKV_INLINE void hkv_format_init(hkv_format *f, int32_t bits, int32_t block_tokens, int32_t head_dim, int32_t dtype)
{
    uint32_t k_params_bytes, v_params_bytes;
    f->bits = bits;
    f->dtype = dtype;
    f->head_dim = head_dim;
    f->stored_dim = (head_dim + 31) / 32 * 32;
    f->block_tokens = block_tokens;
    f->stored_tokens = (block_tokens + 15) / 16 * 16;
    f->n_value_groups = (head_dim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP;
    f->planes = bits == 0 ? 0
                          : HKV_PLANE_K_HIGH | HKV_PLANE_V_HIGH | (bits >= 6 ? HKV_PLANE_K_LOW : 0) |
                                (bits == 8 ? HKV_PLANE_V_LOW : 0);
    f->element_bytes = dtype == HKV_F32 ? 4 : 2;
    f->row_bytes = 2 * f->stored_dim * f->element_bytes;
    f->plane_bytes = (uint32_t)(f->stored_tokens * f->stored_dim / 2);
    k_params_bytes = (uint32_t)(4 * f->stored_dim);
    v_params_bytes = (uint32_t)(4 * f->stored_tokens * f->n_value_groups);
    f->k_params_offset = (uint32_t)sizeof(hkv_record_header);
    f->k_high_offset = f->k_params_offset + k_params_bytes;
    f->v_params_offset = f->k_high_offset + f->plane_bytes;
    f->v_high_offset = f->v_params_offset + v_params_bytes;
    f->k_low_offset = f->v_high_offset + f->plane_bytes;
    f->v_low_offset = f->k_low_offset + f->plane_bytes;
    f->int4_bytes = f->k_low_offset;
    f->k8v4_bytes = f->v_low_offset;
    f->int8_bytes = f->v_low_offset + f->plane_bytes;
    f->row_page_bytes = (uint32_t)((block_tokens * f->row_bytes + HKV_HOT_ALIGN - 1) / HKV_HOT_ALIGN * HKV_HOT_ALIGN);
    f->record_bytes = bits == 0   ? f->row_page_bytes
                      : bits == 4 ? (f->int4_bytes + 63) / 64 * 64
                      : bits == 6 ? (f->k8v4_bytes + 63) / 64 * 64
                                  : (f->int8_bytes + 63) / 64 * 64;
}

/* ------------------------------------------------------------------------------------------------ where things are */

/* Byte of a row page where chunk `chunk` (16 bytes) of token `token` lies. Chunks 0 .. DP*element_bytes/16-1 are K, the
 * next as many V. The XOR lets eight consecutive tokens be read at one chunk without bank conflicts. */
HKV_INLINE size_t hkv_row_chunk_offset(const hkv_format *f, int32_t token, int32_t chunk)
{
    return (size_t)token * (size_t)f->row_bytes + (size_t)((chunk ^ (token & 7)) * 16);
}

/* Byte of a row page of channel `channel` of K (is_v 0) or V (is_v 1). */
HKV_INLINE size_t hkv_row_element_offset(const hkv_format *f, int32_t token, int32_t channel, int32_t is_v)
{
    int32_t byte = (is_v * f->stored_dim + channel) * f->element_bytes;
    return hkv_row_chunk_offset(f, token, byte / 16) + (size_t)(byte % 16);
}

/* A plane is [tile of 16 tokens][four 16-channel steps][32 lanes][4 words], the last step group of 2 words a lane where
 * DP % 64 = 32. A word holds the four registers of one A fragment of mma.m16n8k16:
 *
 *   a0 = upper nibbles of bytes 0, 2     a1 = upper of bytes 1, 3
 *   a2 = lower nibbles of bytes 0, 2     a3 = lower of bytes 1, 3
 *
 * For K the fragment's rows are tokens and its columns channels; for V rows are channels and columns tokens. row, col:
 * 0..15 inside the fragment. Returns the byte in the plane; *is_upper tells which nibble. */
HKV_INLINE uint32_t hkv_plane_offset(int32_t stored_dim, int32_t tile, int32_t step, int32_t row, int32_t col,
                                     int32_t *is_upper)
{
    int32_t lane = (row & 7) * 4 + ((col & 7) >> 1);
    int32_t n_words = (step >> 2) * 64 + 64 <= stored_dim ? 4 : 2;
    *is_upper = col < 8;
    return (uint32_t)(tile * 8 * stored_dim + (step >> 2) * 512 + lane * 4 * n_words + (step & 3) * 4 + (row >> 3) +
                      2 * (col & 1));
}
HKV_INLINE uint32_t hkv_k_plane_offset(int32_t stored_dim, int32_t token, int32_t channel, int32_t *is_upper)
{
    return hkv_plane_offset(stored_dim, token >> 4, channel >> 4, token & 15, channel & 15, is_upper);
}
HKV_INLINE uint32_t hkv_v_plane_offset(int32_t stored_dim, int32_t token, int32_t channel, int32_t *is_upper)
{
    return hkv_plane_offset(stored_dim, token >> 4, channel >> 4, channel & 15, token & 15, is_upper);
}

/* Index in halves, from k_params_offset, of a channel's scale; its zero is 2 further. Per 16 channels and c = 0..3 one
 * A fragment: scale of 2c, 2c+1; zero of 2c, 2c+1; scale of 2c+8, 2c+9; zero of 2c+8, 2c+9. */
HKV_INLINE uint32_t hkv_k_param_index(int32_t channel)
{
    int32_t k = channel & 15;
    return (uint32_t)((channel >> 4) * 32 + ((k & 7) >> 1) * 8 + (k >> 3) * 4 + (k & 1));
}
/* The same from v_params_offset for V: per value group, tile and r = 0..7: scale of tokens r, r+8; zero of r, r+8. */
HKV_INLINE uint32_t hkv_v_param_index(const hkv_format *f, int32_t token, int32_t channel)
{
    return (uint32_t)((channel / HKV_VALUE_GROUP) * 2 * f->stored_tokens + (token >> 4) * 32 + (token & 7) * 4 +
                      ((token >> 3) & 1));
}

/* ---------------------------------------------------------------------------------------------- fp16, bf16 and bits */

HKV_INLINE uint32_t hkv_bits_of_float(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
HKV_INLINE float hkv_float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Exact. */
HKV_INLINE float hkv_f16_to_f32(uint16_t h)
{
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(h));
#else
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
    if (exponent == 31u) return hkv_float_of_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0u) {
        float magnitude = (float)fraction * 5.9604644775390625e-8f; /* 2^-24 */
        return sign ? -magnitude : magnitude;
    }
    return hkv_float_of_bits(sign | (exponent + 112u) << 23 | fraction << 13);
#endif
}
HKV_INLINE float hkv_bf16_to_f32(uint16_t h)
{
    return hkv_float_of_bits((uint32_t)h << 16);
}

/* Truncate a finite |x| < 65536 towards zero; *inexact tells whether anything was cut off. */
HKV_INLINE uint16_t hkv_f16_truncate(float x, int32_t *inexact)
{
    uint32_t u = hkv_bits_of_float(x), sign = u >> 16 & 0x8000u, exponent = u >> 23 & 255u;
    uint32_t fraction = (u & 0x7fffffu) | 0x800000u;
    uint32_t shift;
    if (exponent >= 113u) {
        *inexact = (fraction & 0x1fffu) != 0;
        return (uint16_t)(sign | (exponent - 112u) << 10 | (fraction >> 13 & 1023u));
    }
    if (exponent == 0u) { /* fp32 zero or subnormal: below every fp16 */
        *inexact = (u & 0x7fffffffu) != 0;
        return (uint16_t)sign;
    }
    shift = 126u - exponent; /* 14 for the largest fp16 subnormal */
    if (shift > 31u) shift = 31u;
    *inexact = (fraction & ((1u << shift) - 1u)) != 0;
    return (uint16_t)(sign | fraction >> shift);
}
/* Towards -infinity and +infinity, for finite |x| <= 65504. */
HKV_INLINE uint16_t hkv_f32_to_f16_down(float x)
{
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rd(x));
#else
    int32_t inexact;
    uint16_t h = hkv_f16_truncate(x, &inexact);
    return (uint16_t)(h + ((h & 0x8000u) && inexact ? 1u : 0u));
#endif
}
HKV_INLINE uint16_t hkv_f32_to_f16_up(float x)
{
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_ru(x));
#else
    int32_t inexact;
    uint16_t h = hkv_f16_truncate(x, &inexact);
    return (uint16_t)(h + (!(h & 0x8000u) && inexact ? 1u : 0u));
#endif
}

/* --------------------------------------------------------------------------- quantisation of one group, to the bit */

/* On CUDA the intrinsics forbid contraction; C files are compiled with -ffp-contract=off. */
#ifdef __CUDA_ARCH__
#define HKV_FADD(a, b) __fadd_rn((a), (b))
#define HKV_FSUB(a, b) __fsub_rn((a), (b))
#define HKV_FMUL(a, b) __fmul_rn((a), (b))
#define HKV_FDIV(a, b) __fdiv_rn((a), (b))
#define HKV_RINT(a)    rintf(a)
#else
#include <math.h>
#define HKV_FADD(a, b) ((a) + (b))
#define HKV_FSUB(a, b) ((a) - (b))
#define HKV_FMUL(a, b) ((a) * (b))
#define HKV_FDIV(a, b) ((a) / (b))
#define HKV_RINT(a)    rintf(a)
#endif

/* Step 1. */
HKV_INLINE float hkv_quant_clamp(float x, int32_t *changed)
{
    *changed = !(x >= -HKV_MAX_FINITE && x <= HKV_MAX_FINITE);
    if (!*changed) return x;
    return x > 0.0f ? HKV_MAX_FINITE : x < 0.0f ? -HKV_MAX_FINITE : 0.0f; /* NaN fails both comparisons */
}
/* Step 3. Both results as fp16 bits. Adding 0 turns -0 into 0: no minimum promises which of the two it returns. */
HKV_INLINE void hkv_quant_params(float lo, float hi, uint16_t *zero, uint16_t *scale)
{
    lo = HKV_FADD(lo, 0.0f);
    hi = HKV_FADD(hi, 0.0f);
    *zero = hkv_f32_to_f16_down(HKV_FSUB(lo, HKV_FDIV(HKV_FMUL(8.0f, HKV_FSUB(hi, lo)), 240.0f)));
    *scale = hkv_f32_to_f16_up(HKV_FDIV(HKV_FSUB(hi, hkv_f16_to_f32(*zero)), 248.0f));
}
/* Step 4, with inverse = 1 / scale, or 0 where scale is 0 (then code 8). */
HKV_INLINE float hkv_quant_inverse(float scale)
{
    return scale > 0.0f ? HKV_FDIV(1.0f, scale) : 0.0f;
}
HKV_INLINE int32_t hkv_quant_code(float v, float zero, float inverse)
{
    float code = HKV_RINT(HKV_FMUL(HKV_FSUB(v, zero), inverse));
    return code < (float)HKV_CODE_MIN ? HKV_CODE_MIN : code > (float)HKV_CODE_MAX ? HKV_CODE_MAX : (int32_t)code;
}

/* Which planes a read uses. */
typedef enum hkv_precision { HKV_READ_INT4 = 0, HKV_READ_K8V4 = 1, HKV_READ_INT8 = 2 } hkv_precision;

/* The best precision whose planes are present. */
HKV_INLINE hkv_precision hkv_record_precision(int32_t planes)
{
    return !(planes & HKV_PLANE_K_LOW) ? HKV_READ_INT4 : !(planes & HKV_PLANE_V_LOW) ? HKV_READ_K8V4 : HKV_READ_INT8;
}

/* Bytes of a record, from its start, that hold everything a precision needs. */
HKV_INLINE uint32_t hkv_record_prefix_bytes(const hkv_format *f, hkv_precision precision)
{
    return precision == HKV_READ_INT4 ? f->int4_bytes : precision == HKV_READ_K8V4 ? f->k8v4_bytes : f->int8_bytes;
}

/* ------------------------------------------------------------------------------------------ scalar codec: format.c */
#ifndef __CUDACC__

/* Quantise tokens 0 .. n_tokens-1 (1..T) of k and v, [n_tokens, D] in the format's dtype with token strides in
 * elements, into the payload of `record`, padding included. The header is the caller's. Returns the number of clamped
 * elements. */
uint32_t hkv_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                           int64_t v_stride_token, int32_t n_tokens, uint8_t *record);
/* Read tokens first .. first+n-1 back as fp32 [n, D] contiguous; k_out or v_out may be NULL. */
void hkv_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                       int32_t n_tokens, float *k_out, float *v_out);
/* Row pages: store and load one token's K and V, [D] in the format's dtype. Store zeroes the channels D .. DP-1. */
void hkv_row_store(const hkv_format *f, uint8_t *page, int32_t token, const void *k, const void *v);
void hkv_row_load(const hkv_format *f, const uint8_t *page, int32_t token, void *k, void *v);
/* Elements of a dtype to and from fp32; to_dtype rounds to nearest even and keeps NaN and infinities. */
void hkv_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst);
void hkv_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst);

#endif
#endif
