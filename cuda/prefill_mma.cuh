/* prefill_mma.cuh - prefill attention by four warps and mma.sync: any chip, any head size.
 *
 * A block of threads has 64 query rows, 16 a warp, in shared memory, and one buffer that holds a tile of keys, then of
 * values. All warps fill it together; what hides their waiting is the other blocks of the SM.
 */
#ifndef HKV_CUDA_PREFILL_MMA_CUH
#define HKV_CUDA_PREFILL_MMA_CUH

#include "prefill_math.cuh"

namespace hkv
{
namespace
{

constexpr int kMmaThreads = 128, kMmaQueries = 64;

/* Bytes of shared memory: queries, and a tile of keys or values. */
constexpr int mma_shared_bytes(int dim)
{
    return value_tile_bytes(dim) + key_tile_bytes(dim) + 1024;
}

template <bool kBf16>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (kBf16)
        mma_bf16(d, a, b0, b1);
    else
        mma_f16(d, a, b0, b1);
}

/* One block of threads. kDim: 64, 128 or 256, a bound of the stored head size. */
template <int kDim, bool kBf16> struct MmaBlock {
    static constexpr int kSteps = kDim / 16;

    const PrefillParams &p;
    const QueryTile &tile;
    uint32_t query, buffer; /* shared memory */
    int warp, lane, stored_dim;

    __device__ __forceinline__ bool has(int step) const
    {
        return step * 16 < stored_dim;
    }
    /* Queries into shared memory; those of a bf16 model as halves where they meet records. */
    __device__ void load_queries(bool as_halves) const
    {
        const int n_chunks = stored_dim / 8, head_dim = p.layer.format.head_dim;
        for (int i = threadIdx.x; i < kMmaQueries * n_chunks; i += kMmaThreads) {
            const int row = i / n_chunks, chunk = i % n_chunks;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < tile.n_queries && chunk * 8 < head_dim)
                v = *reinterpret_cast<const uint4 *>(
                    static_cast<const uint16_t *>(p.q) +
                    query_offset(p, tile, tile.first_query + row, p.q_stride_token, p.q_stride_head) + chunk * 8);
            if (kBf16 && as_halves) v = make_uint4(half_pair(v.x), half_pair(v.y), half_pair(v.z), half_pair(v.w));
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(query + tile_offset(kValuePanel, row, chunk)),
                         "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                         : "memory");
        }
    }
    static __device__ __forceinline__ uint32_t half_pair(uint32_t bf16_pair)
    {
        const float2 f = unpack_bf162(bf16_pair);
        return pack_half2(f.x, f.y);
    }
    /* s = q.k; extra: the columns of a record's zeros and scales. */
    template <bool kRecord> __device__ __forceinline__ void score(float (&s)[kScoreTiles][4], float (&extra)[4]) const
    {
        constexpr bool kAsBf16 = kBf16 && !kRecord;
        const int matrix = lane / 8;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
        extra[0] = extra[1] = extra[2] = extra[3] = 0.f;
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (!has(step)) break;
            uint32_t a[4], b[4];
            load_matrices<false>(
                a, query + tile_offset(kValuePanel, warp * 16 + matrix % 2 * 8 + lane % 8, step * 2 + matrix / 2));
#pragma unroll
            for (int n = 0; n < kScoreTiles; n += 2) {
                load_matrices<false>(
                    b, buffer + tile_offset(kKeyPanel, n * 8 + matrix / 2 * 8 + lane % 8, step * 2 + matrix % 2));
                mma<kAsBf16>(s[n], a, b[0], b[1]);
                mma<kAsBf16>(s[n + 1], a, b[2], b[3]);
            }
            if (!kRecord) continue;
            load_matrices<false>(b, buffer + tile_offset(kKeyPanel, kBlockTokens + lane % 8, step * 2 + matrix % 2));
            mma_f16(extra, a, b[0], b[1]);
        }
    }
    /* o += p.v */
    template <bool kRecord>
    __device__ __forceinline__ void add_values(float (&o)[kDim / 8][4], const float (&s)[kScoreTiles][4]) const
    {
        constexpr bool kAsBf16 = kBf16 && !kRecord;
        const int matrix = lane / 8;
        uint32_t a[kTiles][4];
        pack_probabilities<kAsBf16>(s, a);
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                if (!has(step)) break;
                uint32_t b[4];
                if (kRecord)
                    load_matrices<false>(
                        b, buffer + panel_offset(step * 16 + matrix / 2 * 8 + lane % 8, t * 2 + matrix % 2));
                else
                    load_matrices<true>(b, buffer + tile_offset(kValuePanel, t * 16 + matrix % 2 * 8 + lane % 8,
                                                                step * 2 + matrix / 2));
                mma<kAsBf16>(o[2 * step], a[t], b[0], b[1]);
                mma<kAsBf16>(o[2 * step + 1], a[t], b[2], b[3]);
            }
    }
    /* One tile of keys. */
    template <bool kRecord>
    __device__ __forceinline__ void add_keys(const KeyTile &keys, int planes, const QueryRows &rows, Softmax &softmax,
                                             float (&o)[kDim / 8][4]) const
    {
        const RecordView<0> view = {keys.source, stored_dim, planes, keys.n_tokens};
        float s[kScoreTiles][4], extra[4], base[2] = {0.f, 0.f}, factor[2];
        if (kRecord) {
            for (int unit = warp; unit < view.n_units(); unit += kMmaThreads / 32)
                unpack_keys(view, buffer, unit, lane);
            if (warp == 0) unpack_key_params(view, buffer, lane);
        } else {
            copy_rows<0, kMmaThreads>(p, keys, false, buffer, threadIdx.x);
            commit_copies();
            wait_copies<0>();
        }
        __syncthreads();
        score<kRecord>(s, extra);
        if (kRecord) record_base(extra, lane, base);
        __syncthreads();
        if (kRecord) {
            for (int unit = warp; unit < view.n_units(); unit += kMmaThreads / 32)
                unpack_values(view, buffer, unit, lane);
        } else {
            copy_rows<0, kMmaThreads>(p, keys, true, buffer, threadIdx.x);
            commit_copies();
        }
        if (soften(p, rows, keys, lane, s, base, softmax, factor)) {
#pragma unroll
            for (int n = 0; n < kDim / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[n][j] *= factor[j / 2];
        }
        if (!kRecord) wait_copies<0>();
        __syncthreads();
        add_values<kRecord>(o, s);
        __syncthreads();
    }
    __device__ void run() const
    {
        const QueryRows rows(p, tile, warp * 16, lane);
        __shared__ KeyWalk walks[kMmaThreads]; /* registers are short */
        KeyWalk &walk = walks[threadIdx.x];
        walk.start(p, tile);
        Softmax softmax;
        float o[kDim / 8][4];
#pragma unroll
        for (int n = 0; n < kDim / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
        bool has_queries = false, has_halves = false;
        for (;;) {
            KeyTile keys = walk.next(p, tile, lane);
            if (keys.kind == kKeyEnd) break;
            const bool is_record = keys.kind == kKeyRecord;
            int planes = 0;
            if (is_record) {
                const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(keys.source);
                keys.n_tokens = min(keys.n_tokens, hkv_header_n_tokens(header, kBlockTokens));
                planes = header->planes;
                if (keys.n_tokens == 0) continue;
            }
            if (!has_queries || (kBf16 && has_halves != is_record)) load_queries(is_record);
            has_queries = true;
            has_halves = is_record;
            if (is_record)
                add_keys<true>(keys, planes, rows, softmax, o);
            else
                add_keys<false>(keys, planes, rows, softmax, o);
        }
        store_rows<kBf16>(p, tile, rows, softmax, lane, o);
    }
};

/* Registers decide how many blocks an SM holds. */
constexpr int mma_blocks_per_sm(int dim)
{
    return dim == 64 ? 3 : 2;
}

template <int kDim, bool kBf16>
__global__ void __launch_bounds__(kMmaThreads, mma_blocks_per_sm(kDim))
    prefill_mma_kernel(const __grid_constant__ PrefillParams p)
{
    extern __shared__ uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_predecessor();
    let_successor_start();
    QueryTile tile;
    if (!find_query_tile(p, blockIdx.x, kMmaQueries, lane, &tile)) return;
    const uint32_t base = (shared_address(memory) + 1023u) & ~1023u;
    MmaBlock<kDim, kBf16>{p, tile, base, base + value_tile_bytes(kDim), warp, lane, p.layer.format.stored_dim}.run();
}

} // namespace
} // namespace hkv

#endif
