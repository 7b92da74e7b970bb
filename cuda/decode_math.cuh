/* decode_math.cuh - one warp, one KV head: scores and values of records and of 16-bit rows, as tensor-core fragments.
 *
 * A warp keeps up to 16 query columns (query token x head of the group), 8 a tensor-core tile. Keys and values are the
 * A operand, so nothing is padded but the columns: S^T[token][column] = K q, O^T[channel][column] += V^T P^T.
 * Everywhere r = lane / 4 and c = lane % 4; a lane's columns are 2c, 2c+1 of each tile, its tokens r, r+8 of each 16.
 *
 * Numerics (why: docs/kernels.md).
 *   Scores are in log2 units, x = scale * log2(e) * q.k. Per record q' = fp16(q * scale_K) multiplies codes; q.zero
 * comes from the model's own q. Codes are centred (128; 136 for the high plane alone): k = q.(zero + centre * scale) +
 *   q'.(code - centre), so that the rounding of q' meets no common offset.
 *   V's codes are centred too, by taking 128 P' off o after each record: a tensor core truncates what it adds up, so o
 * must not grow with an offset that the V-zero term cancels later (1e-1 at 128K tokens otherwise). m is a lazy
 * reference, not the maximum: of x + log2(scale_V), because what must fit fp16 is P' = 2^(x - m) * scale_V * 512. It
 * moves only when some P' would pass 2^15; one vote a record. Sums and the V-zero term are fp32.
 */
#ifndef HKV_CUDA_DECODE_MATH_CUH
#define HKV_CUDA_DECODE_MATH_CUH

#include "format.cuh"

namespace hkv
{

constexpr float kProbUnit = 512.f;    /* P' = p * scale_V * kProbUnit */
constexpr float kProbLogLimit = 6.f;  /* log2 of what p * scale_V may reach: P' <= 2^15 */
constexpr float kRowUnit = 0.125f;    /* the same for 16-bit values: p * kRowUnit */
constexpr float kRowLogScale = -12.f; /* 16-bit values count as scale 2^-12 when m is chosen: p * kRowUnit <= 2^15 */
constexpr float kNone = -1e30f;       /* m of a warp that has seen nothing */
constexpr float kLeastScale = 5.9604645e-8f; /* 2^-24: what a V scale of 0 counts as */

/* Where the parts of a record are; constants where the head size is one. */
struct Layout {
    int dim; /* stored_dim */

    __device__ constexpr int plane() const
    {
        return kBlockTokens / 2 * dim;
    }
    __device__ constexpr int k_params() const
    {
        return static_cast<int>(sizeof(hkv_record_header));
    }
    __device__ constexpr int k_high() const
    {
        return k_params() + 4 * dim;
    }
    __device__ constexpr int v_params() const
    {
        return k_high() + plane();
    }
    __device__ constexpr int v_high() const
    {
        return v_params() + 4 * kBlockTokens * ((dim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP);
    }
    __device__ constexpr int k_low() const
    {
        return v_high() + plane();
    }
    __device__ constexpr int v_low() const
    {
        return k_low() + plane();
    }
};

/* A kernel's sizes: kDim is the stored head size, or (kExact false) a bound of it; kColumns 8 or 16. */
template <int kDim, bool kExact, int kColumns_> struct Shape {
    static constexpr int kColumns = kColumns_;
    static constexpr int kColumnTiles = kColumns / 8;
    static constexpr int kSteps = kDim / 16; /* of 16 channels */
    static constexpr int kValueGroups = (kDim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP;
    static constexpr int kQueryBytes = kColumnTiles * kSteps * 256; /* q as B fragments */

    int runtime_dim;

    __device__ __forceinline__ Layout layout() const
    {
        return Layout{kExact ? kDim : runtime_dim};
    }
    /* Does step `s` of 16 channels exist? */
    __device__ __forceinline__ bool has(int s) const
    {
        return kExact || s * 16 < runtime_dim;
    }
    /* Byte of a slice in a partial (decode_merge.cuh): 576 bytes for 32 channels, those that exist side by side. */
    __device__ __forceinline__ int slice_offset(int column_tile, int pair) const
    {
        return (column_tile * (layout().dim / 32) + pair) * 576;
    }
    /* Does the group of 4 steps that begins at `s` have only 2? */
    __device__ __forceinline__ bool is_short(int s) const
    {
        return !kExact && (s + 4) * 16 > runtime_dim;
    }
};

/* What a warp has added up. o is in units of P' * (code - centre) * 2^-24 until finish(). */
template <typename S> struct Accumulator {
    float o[S::kColumnTiles][S::kSteps][4];
    float m[S::kColumnTiles][2], l[S::kColumnTiles][2]; /* l and z: this lane's tokens only, until finish() */
    float z[S::kColumnTiles][S::kValueGroups][2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
#pragma unroll
            for (int s = 0; s < S::kSteps; s++) o[n][s][0] = o[n][s][1] = o[n][s][2] = o[n][s][3] = 0.f;
            m[n][0] = m[n][1] = kNone;
            l[n][0] = l[n][1] = 0.f;
#pragma unroll
            for (int g = 0; g < S::kValueGroups; g++) z[n][g][0] = z[n][g][1] = 0.f;
        }
    }
    /* Move m of one column tile up to this lane's candidates (and the other lanes'). Rare. */
    __device__ __forceinline__ void raise(int n, float top0, float top1)
    {
#pragma unroll
        for (int step = 4; step < 32; step <<= 1) {
            top0 = fmaxf(top0, __shfl_xor_sync(kFullWarp, top0, step));
            top1 = fmaxf(top1, __shfl_xor_sync(kFullWarp, top1, step));
        }
        top0 = fmaxf(top0, m[n][0]);
        top1 = fmaxf(top1, m[n][1]);
        const float f0 = fast_exp2(m[n][0] - top0), f1 = fast_exp2(m[n][1] - top1);
        m[n][0] = top0;
        m[n][1] = top1;
        l[n][0] *= f0;
        l[n][1] *= f1;
#pragma unroll
        for (int g = 0; g < S::kValueGroups; g++) {
            z[n][g][0] *= f0;
            z[n][g][1] *= f1;
        }
#pragma unroll
        for (int s = 0; s < S::kSteps; s++) {
            o[n][s][0] *= f0;
            o[n][s][1] *= f1;
            o[n][s][2] *= f0;
            o[n][s][3] *= f1;
        }
    }
    /* Sum of l over the tokens of all lanes. */
    __device__ __forceinline__ float total(int n, int column) const
    {
        float sum = l[n][column];
#pragma unroll
        for (int step = 4; step < 32; step <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, step);
        return sum;
    }
    /* o = output of what was added (0 if nothing), l = its sum relative to 2^m. */
    __device__ __forceinline__ void finish()
    {
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
#pragma unroll
            for (int g = 0; g < S::kValueGroups; g++)
#pragma unroll
                for (int step = 4; step < 32; step <<= 1) {
                    z[n][g][0] += __shfl_xor_sync(kFullWarp, z[n][g][0], step);
                    z[n][g][1] += __shfl_xor_sync(kFullWarp, z[n][g][1], step);
                }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                l[n][j] = total(n, j);
                const float inverse = l[n][j] > 0.f ? 1.f / l[n][j] : 0.f, unit = kCodeUnit / kProbUnit * inverse;
#pragma unroll
                for (int s = 0; s < S::kSteps; s++) {
                    const float zero = z[n][s * 16 / HKV_VALUE_GROUP][j] * inverse;
                    o[n][s][j] = fmaf(o[n][s][j], unit, zero);
                    o[n][s][2 + j] = fmaf(o[n][s][2 + j], unit, zero);
                }
            }
        }
    }
};

/* One of a record's planes, where it is stored; tiles of 16 tokens from the first that is read. */
struct StoredPlane {
    const uint8_t *first_tile;

    template <typename S> __device__ __forceinline__ uint4 words(const S &shape, int tile, int step, int lane) const
    {
        return load_plane(first_tile + tile * shape.layout().dim * 8, step / 4, lane, shape.is_short(step));
    }
};
/* Scores of 16 x kTileCount tokens, log2 units. */
template <typename S, int kTileCount> using Scores = float[S::kColumnTiles][kTileCount][4];

/* ---------------------------------------------------------------------------------------------------------- queries */

/* q of one warp in shared memory as B fragments: [column tile][pair of steps][lane] of {b0, b1 of a step, b0, b1 of the
 * next}, fp16. bf16 queries fit fp16 exactly between 2^-14 and 65504; smaller parts do not matter. */
template <typename S> __device__ __forceinline__ uint4 load_query(const uint8_t *query, int n, int pair, int lane)
{
    return *reinterpret_cast<const uint4 *>(query + ((n * S::kSteps / 2 + pair) * 32 + lane) * 16);
}

/* ------------------------------------------------------------------------------------------------ scores of records */

/* x of kTileCount tiles of a record; low is not read if !kBoth. A step's products of all tiles follow each other, so
 * that no product waits for the one before. */
template <bool kBoth, int kTileCount, typename S>
__device__ __forceinline__ void record_scores(const S &shape, const uint8_t *key_params, const StoredPlane &high,
                                              const StoredPlane &low, const uint8_t *query, float scale, int lane,
                                              Scores<S, kTileCount> &x)
{
    constexpr float kCentre = kBoth ? 128.f : 136.f;
    const float unit = scale * (kBoth ? kCodeUnit : 16.f * kCodeUnit); /* high plane: sum of u q' */
    /* -centre for the MMA that sums q': -128 * 2^-24; for the high plane -8 u, with q' / 16 beside the upper nibbles */
    constexpr uint32_t kMinusUpper = 0x80808080u, kMinusLower = kBoth ? 0x80808080u : 0x80088008u;
    const uint32_t minus_centre[4] = {kMinusUpper, kMinusUpper, kMinusLower, kMinusLower};
    float sums[S::kColumnTiles][4], offsets[S::kColumnTiles][4];
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums[n][j] = offsets[n][j] = 0.f;
#pragma unroll
            for (int t = 0; t < kTileCount; t++) x[n][t][j] = 0.f;
        }
#pragma unroll
    for (int g = 0; g < S::kSteps; g += 4) {
        if (!shape.has(g)) break;
        uint32_t hs[kTileCount][4], ls[kTileCount][4];
#pragma unroll
        for (int t = 0; t < kTileCount; t++) {
            const uint4 h = high.words(shape, t, g, lane);
            const uint4 l = kBoth ? low.words(shape, t, g, lane) : uint4{};
            hs[t][0] = h.x, hs[t][1] = h.y, hs[t][2] = h.z, hs[t][3] = h.w;
            ls[t][0] = l.x, ls[t][1] = l.y, ls[t][2] = l.z, ls[t][3] = l.w;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int s = g + j;
            if (!shape.has(s)) break;
            const uint4 p = *reinterpret_cast<const uint4 *>(key_params + s * 64 + lane % 4 * 16);
            const uint32_t params[4] = {p.x, p.y, p.z, p.w};
            uint32_t scaled[S::kColumnTiles][2];
#pragma unroll
            for (int n = 0; n < S::kColumnTiles; n++) {
                const uint4 pair = load_query<S>(query, n, s / 2, lane);
                const uint32_t q0 = j & 1 ? pair.z : pair.x, q1 = j & 1 ? pair.w : pair.y;
                scaled[n][0] = multiply_half2(q0, p.x);
                scaled[n][1] = multiply_half2(q1, p.z);
                if (!kBoth) scaled[n][0] = multiply_half2(scaled[n][0], 0x2c002c00u); /* 1/16 */
                mma_f16(sums[n], params, q0, q1); /* rows 0-7: q.scale, rows 8-15: q.zero */
                mma_f16(offsets[n], minus_centre, scaled[n][0], scaled[n][1]);
            }
#pragma unroll
            for (int t = 0; t < kTileCount; t++) {
                uint32_t a[4];
                if (kBoth)
                    unpack_codes(hs[t][j], ls[t][j], a);
                else
                    unpack_nibbles(hs[t][j], a);
#pragma unroll
                for (int n = 0; n < S::kColumnTiles; n++) mma_f16(x[n][t], a, scaled[n][0], scaled[n][1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float base = fmaf(offsets[n][j], unit, fmaf(sums[n][j], kCentre, sums[n][2 + j]) * scale);
#pragma unroll
            for (int t = 0; t < kTileCount; t++) {
                x[n][t][j] = fmaf(x[n][t][j], unit, base);
                x[n][t][2 + j] = fmaf(x[n][t][2 + j], unit, base);
            }
        }
}

/* ------------------------------------------------------------------------------------------------ values of records */

/* Scale and zero of V of tokens r and r + 8 of a tile, one value group. */
struct ValueParams {
    float2 scale, zero;

    __device__ __forceinline__ ValueParams(const uint8_t *params, int group, int tile, int lane)
    {
        const uint2 v = *reinterpret_cast<const uint2 *>(params + group * 4 * kBlockTokens + tile * 64 + lane / 4 * 8);
        scale = unpack_half2(v.x);
        zero = unpack_half2(v.y);
        scale.x = fmaxf(scale.x, kLeastScale);
        scale.y = fmaxf(scale.y, kLeastScale);
    }
};

/* Make room in fp16 for the P' of these scores. */
template <int kTileCount, typename S>
__device__ __forceinline__ void make_room(const S &shape, Accumulator<S> &acc, const Scores<S, kTileCount> &x,
                                          const uint8_t *value_params, float limit, int lane)
{
    float top[S::kColumnTiles][2];
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++) top[n][0] = top[n][1] = -INFINITY;
#pragma unroll
    for (int t = 0; t < kTileCount; t++) {
        float2 scale = ValueParams(value_params, 0, t, lane).scale;
#pragma unroll
        for (int g = 1; g < S::kValueGroups; g++) {
            if (!shape.has(g * 8)) break;
            const float2 other = ValueParams(value_params, g, t, lane).scale;
            scale = make_float2(fmaxf(scale.x, other.x), fmaxf(scale.y, other.y));
        }
        const float log0 = fast_log2(scale.x), log8 = fast_log2(scale.y);
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) top[n][j] = fmaxf(top[n][j], fmaxf(x[n][t][j] + log0, x[n][t][2 + j] + log8));
    }
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
        if (unlikely(__any_sync(kFullWarp, fmaxf(top[n][0] - acc.m[n][0], top[n][1] - acc.m[n][1]) > limit)))
            acc.raise(n, top[n][0], top[n][1]);
}

/* Add the values of kTileCount tiles of a record under scores x (-inf: not visible). value_params: of the first. */
template <bool kBoth, int kTileCount, typename S>
__device__ __forceinline__ void add_record_values(const S &shape, Accumulator<S> &acc, const Scores<S, kTileCount> &x,
                                                  const uint8_t *value_params, const StoredPlane &high,
                                                  const StoredPlane &low, int lane)
{
    /* The high plane's 16 u and u meet P' and 16 P', so P' must leave room for the 16; 16 u stands for 16 u + 8.
     * v = (zero + centre * scale) + scale * (code - centre). */
    constexpr float kLaterUnit = kBoth ? kProbUnit : kProbUnit * 16.f, kCentre = kBoth ? 128.f : 136.f;
    constexpr uint32_t kMinusLater = kBoth ? 0x80808080u : 0x80088008u; /* -128 * 2^-24, or -8 beside 16 P' */
    const uint32_t minus_centre[4] = {0x80808080u, 0x80808080u, kMinusLater, kMinusLater};
    float offsets[S::kColumnTiles][S::kValueGroups][4];
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int g = 0; g < S::kValueGroups; g++)
            offsets[n][g][0] = offsets[n][g][1] = offsets[n][g][2] = offsets[n][g][3] = 0.f;
    make_room<kTileCount>(shape, acc, x, value_params, kBoth ? kProbLogLimit : kProbLogLimit - 4.f, lane);
#pragma unroll
    for (int t = 0; t < kTileCount; t++) {
        uint32_t b[S::kColumnTiles][S::kValueGroups][2]; /* P'^T as B fragments */
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            float p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) p[j] = fast_exp2(x[n][t][j] - acc.m[n][j & 1]);
            acc.l[n][0] += p[0] + p[2];
            acc.l[n][1] += p[1] + p[3];
#pragma unroll
            for (int g = 0; g < S::kValueGroups; g++) {
                if (!shape.has(g * 8)) break;
                const ValueParams v(value_params, g, t, lane);
                const float middle0 = fmaf(v.scale.x, kCentre, v.zero.x), middle8 = fmaf(v.scale.y, kCentre, v.zero.y);
                acc.z[n][g][0] = fmaf(p[0], middle0, fmaf(p[2], middle8, acc.z[n][g][0]));
                acc.z[n][g][1] = fmaf(p[1], middle0, fmaf(p[3], middle8, acc.z[n][g][1]));
                const float unit0 = v.scale.x * kProbUnit, unit8 = v.scale.y * kLaterUnit;
                b[n][g][0] = transpose_8x8(pack_half2(p[0] * unit0, p[1] * unit0));
                b[n][g][1] = transpose_8x8(pack_half2(p[2] * unit8, p[3] * unit8));
                mma_f16(offsets[n][g], minus_centre, b[n][g][0], b[n][g][1]);
            }
        }
#pragma unroll
        for (int g = 0; g < S::kSteps; g += 4) {
            if (!shape.has(g)) break;
            const uint4 h = high.words(shape, t, g, lane);
            const uint4 l = kBoth ? low.words(shape, t, g, lane) : uint4{};
            const uint32_t hs[4] = {h.x, h.y, h.z, h.w}, ls[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!shape.has(g + j)) break;
                uint32_t a[4];
                if (kBoth)
                    unpack_codes(hs[j], ls[j], a);
                else
                    unpack_nibbles(hs[j], a);
#pragma unroll
                for (int n = 0; n < S::kColumnTiles; n++) {
                    const uint32_t(&prob)[2] = b[n][(g + j) * 16 / HKV_VALUE_GROUP];
                    mma_f16(acc.o[n][g + j], a, prob[0], prob[1]);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int s = 0; s < S::kSteps; s++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc.o[n][s][j] += offsets[n][s * 16 / HKV_VALUE_GROUP][j];
}

/* ----------------------------------------------------------------------------------------- 16 tokens of 16-bit rows */

/* 16 rows of a row page in shared memory, or 8 (then the others repeat them). V of tokens from n_tokens on may be
 * anything, NaN included. */
struct PageRows {
    uint32_t address;
    int row_bytes, chunks; /* 16-byte chunks of K in a row */
    int later;             /* where row 8 is: 8, or 0 */
    int n_tokens;

    __device__ __forceinline__ void keys(int step, int lane, uint32_t (&a)[4]) const
    {
        const int matrix = lane / 8, row = lane % 8 + matrix % 2 * later;
        load_matrices<false>(a, address + row * row_bytes + (((2 * step + matrix / 2) ^ (lane % 8)) << 4));
    }
    __device__ __forceinline__ void values(int step, int lane, uint32_t (&a)[4]) const
    {
        const int matrix = lane / 8, row = lane % 8 + matrix / 2 * later;
        load_matrices<true>(a, address + row * row_bytes + (((chunks + 2 * step + matrix % 2) ^ (lane % 8)) << 4));
        const int first = 2 * (lane % 4), n_lower = n_tokens - first, n_upper = n_tokens - 8 - first;
        const uint32_t lower = n_lower >= 2 ? ~0u : n_lower == 1 ? 0xffffu : 0u;
        const uint32_t upper = n_upper >= 2 ? ~0u : n_upper == 1 ? 0xffffu : 0u;
        a[0] &= lower;
        a[1] &= lower;
        a[2] &= upper;
        a[3] &= upper;
    }
};

/* Exponents of two 16-bit elements; all of an element's are set where it is no number. */
__device__ __forceinline__ uint32_t exponent_bits(bool is_bf16)
{
    return is_bf16 ? 0x7f807f80u : 0x7c007c00u;
}

/* At most 8 rows of a call's K and V, loaded from global memory at once; 4-byte aligned, strides in elements. */
template <typename S> struct CallRows {
    uint32_t k[S::kSteps][2], v[S::kSteps][2];
    int n_tokens;

    __device__ __forceinline__ CallRows(const uint16_t *k_rows, int64_t k_stride, const uint16_t *v_rows,
                                        int64_t v_stride, int n_rows, int head_dim, int lane)
        : n_tokens(n_rows)
    {
#pragma unroll
        for (int s = 0; s < S::kSteps; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = lane / 4, channel = s * 16 + half * 8 + 2 * (lane % 4);
                const bool is_there = row < n_rows && channel < head_dim;
                k[s][half] = is_there ? *reinterpret_cast<const uint32_t *>(k_rows + row * k_stride + channel) : 0;
                v[s][half] = is_there ? *reinterpret_cast<const uint32_t *>(v_rows + row * v_stride + channel) : 0;
            }
    }
    /* Set values that are no numbers to 0; true in every lane if there were any. */
    __device__ __forceinline__ bool drop_bad_values(bool is_bf16)
    {
        const uint32_t exponent = exponent_bits(is_bf16);
        bool is_bad = false;
#pragma unroll
        for (int s = 0; s < S::kSteps; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t bad = __vcmpeq2(v[s][half] & exponent, exponent);
                is_bad = is_bad || bad;
                v[s][half] &= ~bad;
            }
        return __any_sync(kFullWarp, is_bad);
    }
    __device__ __forceinline__ void keys(int step, int, uint32_t (&a)[4]) const
    {
        a[0] = k[step][0];
        a[2] = k[step][1];
        a[1] = a[3] = 0;
    }
    __device__ __forceinline__ void values(int step, int, uint32_t (&a)[4]) const
    {
        a[0] = transpose_8x8(v[step][0]);
        a[1] = transpose_8x8(v[step][1]);
        a[2] = a[3] = 0;
    }
};

template <bool kBf16>
__device__ __forceinline__ void mma_rows(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (kBf16)
        mma_bf16(d, a, b0, b1);
    else
        mma_f16(d, a, b0, b1);
}
template <bool kBf16> __device__ __forceinline__ uint32_t query_for_rows(uint32_t q)
{
    if (!kBf16) return q;
    const float2 f = unpack_half2(q);
    return pack_bf162(f.x, f.y);
}

/* x of 16 rows. */
template <bool kBf16, typename S, typename Rows>
__device__ __forceinline__ void row_scores(const S &shape, const Rows &rows, const uint8_t *query, float scale,
                                           int lane, Scores<S, 1> &x)
{
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++) x[n][0][0] = x[n][0][1] = x[n][0][2] = x[n][0][3] = 0.f;
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) {
        if (!shape.has(s)) break;
        uint32_t a[4];
        rows.keys(s, lane, a);
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            const uint4 pair = load_query<S>(query, n, s / 2, lane);
            mma_rows<kBf16>(x[n][0], a, query_for_rows<kBf16>(s & 1 ? pair.z : pair.x),
                            query_for_rows<kBf16>(s & 1 ? pair.w : pair.y));
        }
    }
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[n][0][j] *= scale;
}

/* Add the values of 16 rows under scores x. bf16 probabilities are split in two, as 8 bits are not enough. */
template <bool kBf16, typename S, typename Rows>
__device__ __forceinline__ void add_row_values(const S &shape, Accumulator<S> &acc, const Scores<S, 1> &x,
                                               const Rows &rows, int lane)
{
    uint32_t b[S::kColumnTiles][2], rest[S::kColumnTiles][2];
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++) {
        const float top0 = fmaxf(x[n][0][0], x[n][0][2]) + kRowLogScale,
                    top1 = fmaxf(x[n][0][1], x[n][0][3]) + kRowLogScale;
        if (unlikely(__any_sync(kFullWarp, fmaxf(top0 - acc.m[n][0], top1 - acc.m[n][1]) > kProbLogLimit)))
            acc.raise(n, top0, top1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float p0 = fast_exp2(x[n][0][2 * i] - acc.m[n][0]), p1 = fast_exp2(x[n][0][2 * i + 1] - acc.m[n][1]);
            acc.l[n][0] += p0;
            acc.l[n][1] += p1;
            p0 *= kRowUnit;
            p1 *= kRowUnit;
            if (kBf16) {
                const uint32_t packed = pack_bf162(p0, p1);
                const float2 kept = unpack_bf162(packed);
                b[n][i] = transpose_8x8(packed);
                rest[n][i] = transpose_8x8(pack_bf162(p0 - kept.x, p1 - kept.y));
            } else {
                b[n][i] = transpose_8x8(pack_half2(p0, p1));
            }
        }
    }
    constexpr float kUnit = kProbUnit / (kRowUnit * kCodeUnit); /* into the unit of o */
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) {
        if (!shape.has(s)) break;
        uint32_t a[4];
        rows.values(s, lane, a);
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
            mma_rows<kBf16>(sum, a, b[n][0], b[n][1]);
            if (kBf16) mma_bf16(sum, a, rest[n][0], rest[n][1]);
#pragma unroll
            for (int j = 0; j < 4; j++) acc.o[n][s][j] = fmaf(sum[j], kUnit, acc.o[n][s][j]);
        }
    }
}

} // namespace hkv

#endif
