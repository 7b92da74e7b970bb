/* decode_merge.cuh - partial results: of the warps that share a head, and of the chunks that share a unit.
 *
 * A partial is normalised (o is an output, |o| <= max |v|), so fp16 holds it with 2^-12 relative error. It is made of
 * slices of 32 channels x 8 columns, each with its own copy of m and l, so that whoever merges a slice needs nothing
 * else: the warps of a head take a slice each, and so do the last chunks of a unit.
 *
 * Between blocks of threads a slice is its own flag: its words are all ones (no number that is ever stored) before it
 * is written, and whoever has taken it sets them back. So one trip to L2 hands a result on, without fence or counter.
 */
#ifndef HKV_CUDA_DECODE_MERGE_CUH
#define HKV_CUDA_DECODE_MERGE_CUH

#include "decode_math.cuh"

namespace hkv
{

/* 32 lanes' o in fragment order, 16 bytes each, then (m, l, m, l) of the columns of lanes 0 to 3. */
constexpr int kSliceSums = 512, kSliceBytes = kSliceSums + 64;

/* Slice n * steps / 2 + pair: column tile n, 16-channel steps 2 pair and 2 pair + 1. */
template <typename S> constexpr int kSlices = S::kColumnTiles *S::kSteps / 2;
template <typename S> constexpr int kPartialBytes = kSlices<S> *kSliceBytes; /* not less than q as fragments */

/* A lane's part of a slice as it is stored. */
struct SliceWords {
    uint4 o;
    uint4 sums;

    __device__ __forceinline__ void set_empty()
    {
        o = make_uint4(0, 0, 0, 0);
        sums = make_uint4(__float_as_uint(kNone), 0, __float_as_uint(kNone), 0);
    }
    __device__ __forceinline__ bool is_absent() const
    {
        return o.x == kAbsent || o.y == kAbsent || o.z == kAbsent || o.w == kAbsent || sums.x == kAbsent ||
               sums.y == kAbsent || sums.z == kAbsent || sums.w == kAbsent;
    }
    __device__ __forceinline__ void store(uint8_t *slice, int lane) const
    {
        *reinterpret_cast<uint4 *>(slice + lane * 16) = o;
        if (lane < 4) *reinterpret_cast<uint4 *>(slice + kSliceSums + lane * 16) = sums;
    }
    __device__ __forceinline__ void load(const uint8_t *slice, int lane)
    {
        o = *reinterpret_cast<const uint4 *>(slice + lane * 16);
        sums = *reinterpret_cast<const uint4 *>(slice + kSliceSums + lane % 4 * 16);
    }
    /* The same for other blocks of threads to see, and to take from them. */
    __device__ __forceinline__ void publish(uint8_t *slice, int lane) const
    {
        store_shared_words(slice + lane * 16, o);
        if (lane < 4) store_shared_words(slice + kSliceSums + lane * 16, sums);
    }
    __device__ __forceinline__ void peek(const uint8_t *slice, int lane)
    {
        o = load_shared_words(slice + lane * 16);
        sums = load_shared_words(slice + kSliceSums + lane % 4 * 16);
    }
};

/* A lane's part of a slice at work: o weighted by l. */
struct Slice {
    float o[2][4], m[2], l[2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int j = 0; j < 4; j++) o[0][j] = o[1][j] = 0.f;
        m[0] = m[1] = kNone;
        l[0] = l[1] = 0.f;
    }
    /* Take in some more, in their order. */
    template <int kBatch> __device__ __forceinline__ void add(const SliceWords (&words)[kBatch])
    {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float top = m[j];
#pragma unroll
            for (int i = 0; i < kBatch; i++) top = fmaxf(top, __uint_as_float(j ? words[i].sums.z : words[i].sums.x));
            const float factor = fast_exp2(m[j] - top);
            m[j] = top;
            l[j] *= factor;
            o[0][j] *= factor;
            o[0][2 + j] *= factor;
            o[1][j] *= factor;
            o[1][2 + j] *= factor;
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const uint4 sums = words[i].sums;
            const float w0 = __uint_as_float(sums.y) * fast_exp2(__uint_as_float(sums.x) - m[0]),
                        w1 = __uint_as_float(sums.w) * fast_exp2(__uint_as_float(sums.z) - m[1]);
            l[0] += w0;
            l[1] += w1;
            const uint32_t packed[4] = {words[i].o.x, words[i].o.y, words[i].o.z, words[i].o.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = unpack_half2(packed[k]);
                float(&into)[4] = o[k / 2];
                into[k % 2 * 2] = fmaf(w0, f.x, into[k % 2 * 2]);
                into[k % 2 * 2 + 1] = fmaf(w1, f.y, into[k % 2 * 2 + 1]);
            }
        }
    }
    __device__ __forceinline__ void normalise()
    {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float inverse = l[j] > 0.f ? 1.f / l[j] : 0.f;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                o[s][j] *= inverse;
                o[s][2 + j] *= inverse;
            }
        }
    }
    __device__ __forceinline__ SliceWords pack() const
    {
        return {make_uint4(pack_half2(o[0][0], o[0][1]), pack_half2(o[0][2], o[0][3]), pack_half2(o[1][0], o[1][1]),
                           pack_half2(o[1][2], o[1][3])),
                make_uint4(__float_as_uint(m[0]), __float_as_uint(l[0]), __float_as_uint(m[1]), __float_as_uint(l[1]))};
    }
};

/* Write a finished accumulator to shared memory, as far as its channels exist. */
template <typename S>
__device__ __forceinline__ void store_partial(const S &shape, const Accumulator<S> &acc, uint8_t *partial, int lane)
{
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
        for (int pair = 0; pair < S::kSteps / 2; pair++) {
            if (!shape.has(2 * pair)) break;
            const float(&a)[4] = acc.o[n][2 * pair], (&b)[4] = acc.o[n][2 * pair + 1];
            Slice slice;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                slice.o[0][j] = a[j];
                slice.o[1][j] = b[j];
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                slice.m[j] = acc.m[n][j];
                slice.l[j] = acc.l[n][j];
            }
            slice.pack().store(partial + shape.slice_offset(n, pair), lane);
        }
}

/* By a whole warp: add n slices, `stride` bytes apart, that warps of this block have stored. */
__device__ __forceinline__ void add_stored(Slice &slice, const uint8_t *first, int stride, int n, int lane)
{
    constexpr int kBatch = 4;
    for (int done = 0; done < n; done += kBatch) {
        SliceWords words[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; i++)
            if (done + i < n)
                words[i].load(first + (done + i) * stride, lane);
            else
                words[i].set_empty();
        slice.add(words);
    }
}

/* The same of slices that other blocks publish: wait for them, and set them back. */
__device__ __forceinline__ void add_published(Slice &slice, uint8_t *first, int64_t stride, int n, int lane)
{
    constexpr int kBatch = 9; /* under way at once: a quarter of the 33 chunks that one long row's head has */
    for (int done = 0; done < n; done += kBatch) {
        SliceWords words[kBatch];
        bool is_missing;
        do {
            is_missing = false;
#pragma unroll
            for (int i = 0; i < kBatch; i++)
                if (done + i < n)
                    words[i].peek(first + (done + i) * stride, lane);
                else
                    words[i].set_empty();
#pragma unroll
            for (int i = 0; i < kBatch; i++) is_missing = is_missing || words[i].is_absent();
        } while (is_missing);
        __syncwarp(); /* lanes share the sums */
        const SliceWords nothing = {make_uint4(kAbsent, kAbsent, kAbsent, kAbsent),
                                    make_uint4(kAbsent, kAbsent, kAbsent, kAbsent)};
#pragma unroll
        for (int i = 0; i < kBatch; i++)
            if (done + i < n) nothing.publish(first + (done + i) * stride, lane);
        slice.add(words);
    }
}

} // namespace hkv

#endif
