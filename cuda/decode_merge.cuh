/* decode_merge.cuh - partial results: what chunks of one unit leave for the warp that completes it.
 *
 * A partial is normalised (o is an output, |o| <= max |v|), so fp16 holds it with 2^-12 relative error; it is written
 * in fragment order, 16 bytes a lane, and read back the same way. m and l stay fp32. 2.1 KB for 8 columns of D = 128.
 */
#ifndef HKV_CUDA_DECODE_MERGE_CUH
#define HKV_CUDA_DECODE_MERGE_CUH

#include "decode_math.cuh"

namespace hkv
{

/* [column tile][pair of steps][lane] 16 bytes, then [column tile][4] of (m, l, m, l). Not less than q as fragments. */
template <typename S> constexpr int kPartialBytes = S::kQueryBytes + S::kColumnTiles * 64;

/* Write a finished accumulator. */
template <typename S>
__device__ __forceinline__ void store_partial(const Accumulator<S> &acc, uint8_t *partial, int lane)
{
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++) {
#pragma unroll
        for (int pair = 0; pair < S::kSteps / 2; pair++) {
            const float(&a)[4] = acc.o[n][2 * pair], (&b)[4] = acc.o[n][2 * pair + 1];
            *reinterpret_cast<uint4 *>(partial + ((n * S::kSteps / 2 + pair) * 32 + lane) * 16) = make_uint4(
                pack_half2(a[0], a[1]), pack_half2(a[2], a[3]), pack_half2(b[0], b[1]), pack_half2(b[2], b[3]));
        }
        if (lane < 4)
            *reinterpret_cast<float4 *>(partial + S::kQueryBytes + (n * 4 + lane) * 16) =
                make_float4(acc.m[n][0], acc.l[n][0], acc.m[n][1], acc.l[n][1]);
    }
}

/* acc += w * o of one partial, column by column. */
template <typename S>
__device__ __forceinline__ void add_weighted(Accumulator<S> &acc, int n, int pair, uint4 o, float w0, float w1)
{
    const uint32_t words[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = unpack_half2(words[i]);
        float(&into)[4] = acc.o[n][2 * pair + i / 2];
        into[i % 2 * 2] = fmaf(w0, f.x, into[i % 2 * 2]);
        into[i % 2 * 2 + 1] = fmaf(w1, f.y, into[i % 2 * 2 + 1]);
    }
}

template <bool kShared, typename T> __device__ __forceinline__ T load_partial(const T *p)
{
    return kShared ? *p : __ldcg(p);
}

/* Take n more partials, `stride` bytes apart, into a finished (or cleared) accumulator, in their order. Those in
 * global memory are fresh from other blocks: read past L1. */
template <bool kShared, typename S>
__device__ __forceinline__ void add_partials(Accumulator<S> &acc, const uint8_t *partials, int stride, int n_partials,
                                             int lane)
{
    constexpr int kBatch = S::kSteps * S::kColumnTiles <= 8 ? 4 : 2; /* partials under way */
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++) {
        /* From normalised to weighted. */
#pragma unroll
        for (int s = 0; s < S::kSteps; s++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc.o[n][s][j] *= acc.l[n][j & 1];
        for (int first = 0; first < n_partials; first += kBatch) {
            float4 sums[kBatch];
            uint4 o[kBatch][S::kSteps / 2];
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                const uint8_t *partial = partials + static_cast<int64_t>(min(first + i, n_partials - 1)) * stride;
                sums[i] = load_partial<kShared>(
                    reinterpret_cast<const float4 *>(partial + S::kQueryBytes + (n * 4 + lane % 4) * 16));
                if (first + i >= n_partials) sums[i] = make_float4(kNone, 0.f, kNone, 0.f);
#pragma unroll
                for (int pair = 0; pair < S::kSteps / 2; pair++)
                    o[i][pair] = load_partial<kShared>(
                        reinterpret_cast<const uint4 *>(partial + ((n * S::kSteps / 2 + pair) * 32 + lane) * 16));
            }
            float top0 = acc.m[n][0], top1 = acc.m[n][1];
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                top0 = fmaxf(top0, sums[i].x);
                top1 = fmaxf(top1, sums[i].z);
            }
            const float f0 = fast_exp2(acc.m[n][0] - top0), f1 = fast_exp2(acc.m[n][1] - top1);
            acc.m[n][0] = top0;
            acc.m[n][1] = top1;
            acc.l[n][0] *= f0;
            acc.l[n][1] *= f1;
#pragma unroll
            for (int s = 0; s < S::kSteps; s++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc.o[n][s][j] *= j & 1 ? f1 : f0;
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                const float w0 = sums[i].y * fast_exp2(sums[i].x - top0), w1 = sums[i].w * fast_exp2(sums[i].z - top1);
                acc.l[n][0] += w0;
                acc.l[n][1] += w1;
#pragma unroll
                for (int pair = 0; pair < S::kSteps / 2; pair++) add_weighted<S>(acc, n, pair, o[i][pair], w0, w1);
            }
        }
        const float inverse0 = acc.l[n][0] > 0.f ? 1.f / acc.l[n][0] : 0.f;
        const float inverse1 = acc.l[n][1] > 0.f ? 1.f / acc.l[n][1] : 0.f;
#pragma unroll
        for (int s = 0; s < S::kSteps; s++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc.o[n][s][j] *= j & 1 ? inverse1 : inverse0;
    }
}

} // namespace hkv

#endif
