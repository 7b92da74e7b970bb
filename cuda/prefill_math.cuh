/* prefill_math.cuh - the softmax of 16 query rows in the registers of one warp, as accumulators of tensor-core tiles.
 *
 * Lane (r = lane / 4, c = lane % 4) holds query rows r and r + 8 of its warp; s[n][0], s[n][1] are keys 8n + 2c, +1 of
 * row r, s[n][2], s[n][3] those of row r + 8. mma.sync and wgmma agree in this.
 *
 * Numerics. Scores are in log2 units. A record's keys come as (code - 128) * scale; what they lack, q.(zero + 128 *
 * scale), is two more columns of the score tile and is added in fp32: keys at 200 +- 0.5 keep their precision. m is a
 * lazy reference: it follows the maximum only when a score passes it by kProbRoom, so accumulators are almost never
 * rescaled. Probabilities are kept times 2^kProbUnits, which uses fp16's range on both sides: up to 2^15, and normal
 * down to 2^-24 of the reference (an attention sink that takes nearly all mass costs the others no bits).
 */
#ifndef HKV_CUDA_PREFILL_MATH_CUH
#define HKV_CUDA_PREFILL_MATH_CUH

#include "prefill_tiles.cuh"

namespace hkv
{

constexpr float kProbUnits = 10.f, kProbRoom = 5.f; /* log2 */
constexpr float kNothingSeen = -1e30f;
constexpr int kScoreTiles = kBlockTokens / 8; /* one more for a record's zeros and scales */

/* The two query rows of a lane. Where a tile has fewer rows, the last one stands for those that are not there. */
struct QueryRows {
    int first;       /* of the lane, in the tile */
    int position[2]; /* in the sequence */

    __device__ __forceinline__ QueryRows(const PrefillParams &p, const QueryTile &tile, int warp_first, int lane)
        : first(warp_first + lane / 4)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) position[i] = tile.n_older + query(tile, i) / p.group;
    }
    __device__ __forceinline__ bool is_real(const QueryTile &tile, int i) const
    {
        return first + 8 * i < tile.n_queries;
    }
    /* Number in the batch row. */
    __device__ __forceinline__ int query(const QueryTile &tile, int i) const
    {
        return tile.first_query + min(first + 8 * i, tile.n_queries - 1);
    }
};

/* Running softmax of a lane's two rows. */
struct Softmax {
    float m[2] = {kNothingSeen, kNothingSeen};
    float l[2] = {0.f, 0.f}; /* this lane's share, times 2^kProbUnits */
};

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

/* -inf where a row must not see a key. */
__device__ __forceinline__ void mask_scores(float (&s)[kScoreTiles][4], const QueryRows &rows, int window_tokens,
                                            int position, int n_tokens, int lane)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int mine = 2 * (lane % 4), newest = rows.position[i] - position;
        const int end = min(n_tokens, newest + 1) - mine;
        const int first = window_tokens > 0 ? newest + 1 - window_tokens - mine : -mine;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (8 * n + j < first || 8 * n + j >= end) s[n][2 * i + j] = -INFINITY;
    }
}

/* x -> cap * tanh(x / cap), in place; tanh(y) = 1 - 2 / (1 + e^2y). */
__device__ __forceinline__ void cap_scores(float (&s)[kScoreTiles][4], float unit, const float (&base)[2], float cap)
{
    const float to_exponent = 2.f * 1.44269504f / cap;
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float x = fmaf(s[n][j], unit, base[j / 2]);
            s[n][j] = cap * (1.f - __fdividef(2.f, 1.f + fast_exp2(fminf(x * to_exponent, 80.f))));
        }
}

/* Turn the scores of a tile of keys, plain products q.k, into probabilities in place and add them up. base: what each
 * row's products lack. factor: what has to be done to accumulators that exist; true if it is not 1. */
__device__ __forceinline__ bool soften(const PrefillParams &p, const QueryRows &rows, const KeyTile &keys, int lane,
                                       float (&s)[kScoreTiles][4], float (&base)[2], Softmax &softmax,
                                       float (&factor)[2])
{
    float unit = p.scale;
    base[0] *= unit;
    base[1] *= unit;
    if (p.soft_cap > 0.f) {
        cap_scores(s, unit, base, p.soft_cap);
        unit = 1.f;
        base[0] = base[1] = 0.f;
    }
    /* Rows of a lane: the first is the older; of a warp: lane 0's first, lane 31's second. */
    const int oldest = __shfl_sync(kFullWarp, rows.position[0], 0),
              newest = __shfl_sync(kFullWarp, rows.position[1], 31);
    if (keys.n_tokens < kBlockTokens || keys.position + kBlockTokens > oldest + 1 ||
        (p.window_tokens > 0 && keys.position <= newest - p.window_tokens))
        mask_scores(s, rows, p.window_tokens, keys.position, keys.n_tokens, lane);

    float top[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < kScoreTiles; n++) top[i] = fmaxf(top[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        top[i] = fmaf(top[i], unit, base[i]);
        factor[i] = 1.f;
    }
    const bool raise = __any_sync(kFullWarp, top[0] - softmax.m[0] > kProbRoom || top[1] - softmax.m[1] > kProbRoom);
    if (raise) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float m = fmaxf(softmax.m[i], quad_max(top[i]));
            factor[i] = fast_exp2(softmax.m[i] - m);
            softmax.m[i] = m;
            softmax.l[i] *= factor[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float addend = base[i] - softmax.m[i] + kProbUnits;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float &x = s[n][2 * i + j];
                x = fast_exp2(fmaf(x, unit, addend));
                softmax.l[i] += x;
            }
    }
    return raise;
}

/* Two further columns of a record's scores, q.zero and q.scale, which the quad's first lane holds. */
__device__ __forceinline__ void record_base(const float (&s)[4], int lane, float (&base)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) base[i] = __shfl_sync(kFullWarp, fmaf(128.f, s[2 * i + 1], s[2 * i]), lane & ~3);
}

/* Probabilities as A fragments of four steps of 16 keys. */
template <bool kBf16>
__device__ __forceinline__ void pack_probabilities(const float (&s)[kScoreTiles][4], uint32_t (&a)[kTiles][4])
{
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&x)[4] = s[2 * t + i / 2];
            a[t][i] =
                kBf16 ? pack_bf162(x[2 * (i % 2)], x[2 * (i % 2) + 1]) : pack_half2(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
        }
}

/* What the sums of a lane's rows become: 1 / sum, sinks included, and the row's log-sum-exp. */
__device__ __forceinline__ void finish_rows(const PrefillParams &p, const QueryTile &tile, const QueryRows &rows,
                                            const Softmax &softmax, int lane, float (&factor)[2])
{
    constexpr float kLog2e = 1.44269504f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int q_head = tile.head * p.group + rows.query(tile, i) % p.group;
        const float own = quad_sum(softmax.l[i]), sink = p.sink_logits ? p.sink_logits[q_head] * kLog2e : -INFINITY;
        const float m = softmax.m[i] - kProbUnits, top = fmaxf(m, sink);
        const float sum = own * fast_exp2(m - top) + fast_exp2(sink - top);
        factor[i] = own > 0.f ? fast_exp2(m - top) / sum : 0.f;
        if (p.lse && rows.is_real(tile, i) && lane % 4 == 0)
            p.lse[static_cast<int64_t>(tile.first_token + rows.query(tile, i) / p.group) * p.group *
                      p.layer.n_kv_heads +
                  q_head] = sum > 0.f ? (top + log2f(sum)) / kLog2e : -INFINITY;
    }
}

/* Outputs of a lane's two rows. */
template <bool kBf16, int kOutputTiles>
__device__ __forceinline__ void store_rows(const PrefillParams &p, const QueryTile &tile, const QueryRows &rows,
                                           const Softmax &softmax, int lane, const float (&o)[kOutputTiles][4])
{
    float factor[2];
    finish_rows(p, tile, rows, softmax, lane, factor);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!rows.is_real(tile, i)) continue;
        uint16_t *out = static_cast<uint16_t *>(p.out) + 2 * (lane % 4) +
                        query_offset(p, tile, rows.query(tile, i), p.out_stride_token, p.out_stride_head);
#pragma unroll
        for (int n = 0; n < kOutputTiles; n++) {
            if (n * 8 >= p.layer.format.head_dim) break;
            const float x = o[n][2 * i] * factor[i], y = o[n][2 * i + 1] * factor[i];
            *reinterpret_cast<uint32_t *>(out + n * 8) = kBf16 ? pack_bf162(x, y) : pack_half2(x, y);
        }
    }
}

} // namespace hkv

#endif
