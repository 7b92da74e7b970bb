/* query.cuh - 8 query columns of a row and KV head as tensor-core B fragments. */
#ifndef HKV_CUDA_QUERY_CUH
#define HKV_CUDA_QUERY_CUH

#include "format.cuh"

namespace hkv
{

constexpr int kTileColumns = 8;

/* Where a row's queries of one KV head are: column t * group + g is query token t and head g of the group. */
struct QueryColumns {
    const uint16_t *q; /* of the row's first new token and the group's first head, [n_new, group, head_dim] */
    int64_t stride_token, stride_head;
    int n_columns, group;
    int head_dim;
    bool is_bf16;

    /* Word i of tiles laid out as [tile][n_steps / 2][32 lanes]: what a lane keeps of 32 channels, {b0, b1} of 16, {b0,
     * b1} of the next 16. As it is in memory, zero where there is no such column or channel. */
    __device__ __forceinline__ uint4 load(int first_tile, int n_steps, int i) const
    {
        const int lane = i % 32, column = (first_tile + i / (n_steps / 2 * 32)) * kTileColumns + lane / 4;
        const uint16_t *from = q + column / group * stride_token + column % group * stride_head;
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int channel = i / 32 % (n_steps / 2) * 32 + j * 8 + 2 * (lane % 4);
            w[j] = 0;
            if (column < n_columns && channel < head_dim) w[j] = *reinterpret_cast<const uint32_t *>(from + channel);
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
    /* The same in fp16. */
    __device__ __forceinline__ uint4 convert(const uint4 &words) const
    {
        if (!is_bf16) return words;
        const float2 x = unpack_bf162(words.x), y = unpack_bf162(words.y), z = unpack_bf162(words.z),
                     w = unpack_bf162(words.w);
        return make_uint4(pack_half2(x.x, x.y), pack_half2(y.x, y.y), pack_half2(z.x, z.y), pack_half2(w.x, w.y));
    }
};

} // namespace hkv

#endif
