/* mass.cu - shares of the softmax by block, for who asks (hkv_attend.mass); a launch of its own after decode.
 *
 * Contract. For every decode row, KV head and logical block: the sum of exp(score - lse) over the block's tokens, those
 * of hot pages and of the call included, the largest over the group's heads and the row's query tokens. 0 where decode
 * skipped the record, did not select it, or there is nothing; 0 for rows that are not decoded. Keys are read as decode
 * read them: a progressive launch tells by its masks which records it refined, a dense one reads what is there.
 *
 * Grid. (splits, rows x KV heads) blocks of 8 warps, a warp a block of tokens at a time. Bytes: the keys once more (73
 * a token, layer and KV head at INT4, 137 at INT8 or K8V4, D = 128), straight from global memory: there is nothing to
 * share between warps, and few ask.
 */
#include "mass.cuh"

#include "decode_math.cuh"
#include "launch.cuh"
#include "query.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 8; /* of threads that a launch should have, not all at the same time */
constexpr int kMaxItems = 65535;
constexpr float kLog2E = 1.44269504f;

/* 16 rows of a row page in global memory. */
struct StoredRows {
    const uint8_t *rows; /* the first of them; its token is a multiple of 16 */
    int row_bytes;

    __device__ __forceinline__ uint32_t pair(int row, int chunk, int lane) const
    {
        return *reinterpret_cast<const uint32_t *>(rows + row * row_bytes + (chunk ^ (row & 7)) * 16 + lane % 4 * 4);
    }
    __device__ __forceinline__ void keys(int step, int lane, uint32_t (&a)[4]) const
    {
        a[0] = pair(lane / 4, 2 * step, lane);
        a[1] = pair(lane / 4 + 8, 2 * step, lane);
        a[2] = pair(lane / 4, 2 * step + 1, lane);
        a[3] = pair(lane / 4 + 8, 2 * step + 1, lane);
    }
};

/* One warp, one tile of 8 query columns of a row and KV head. */
template <typename S> struct Weigher {
    const MassParams &m;
    const uint8_t *query; /* B fragments in shared memory */
    S shape;
    hkv_plan_row row;
    int row_idx, head, tile, lane;
    float reference[2]; /* log2 of the softmax's denominator of columns 2c, 2c + 1; infinite if there is none */

    __device__ __forceinline__ const DecodeParams &p() const
    {
        return m.decode;
    }
    __device__ __forceinline__ int n_older() const
    {
        return row.length - row.n_new;
    }
    __device__ __forceinline__ int column(int j) const
    {
        return tile * kTileColumns + 2 * (lane % 4) + j;
    }
    __device__ void load_references()
    {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int token = column(j) / p().group, q_head = head * p().group + column(j) % p().group;
            float lse = -INFINITY;
            if (token < row.n_new)
                lse =
                    p().lse[static_cast<int64_t>(row.first_token + token) * p().layer.n_kv_heads * p().group + q_head];
            reference[j] = lse == -INFINITY ? INFINITY : lse * kLog2E;
        }
    }
    __device__ __forceinline__ float capped(float x) const
    {
        if (p().soft_cap <= 0.f) return x;
        const float e = fast_exp2(fminf(x * (2.f * kLog2E / p().soft_cap), 80.f)); /* tanh y = 1 - 2 / (1 + e^2y) */
        return p().soft_cap * (1.f - __fdividef(2.f, 1.f + e));
    }
    /* Add what the columns give n_tokens tokens from `position` on, of which x are the scores. */
    template <int kTileCount>
    __device__ __forceinline__ void add(const Scores<S, kTileCount> &x, int position, int n_tokens,
                                        float (&shares)[2]) const
    {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int newest = n_older() + column(j) / p().group; /* that the column's query sees */
            const int first = p().window_tokens > 0 ? newest + 1 - p().window_tokens : 0;
            const int end = min(position + n_tokens, newest + 1);
#pragma unroll
            for (int t = 0; t < kTileCount; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int token = position + t * 16 + half * 8 + lane / 4;
                    if (token >= first && token < end)
                        shares[j] += fast_exp2(capped(x[0][t][half * 2 + j]) - reference[j]);
                }
        }
    }
    template <typename Rows>
    __device__ __forceinline__ void add_rows(const Rows &rows, int position, int n_tokens, float (&shares)[2]) const
    {
        Scores<S, 1> x;
        if (p().layer.format.dtype == HKV_BF16)
            row_scores<true>(shape, rows, query, p().scale, lane, x);
        else
            row_scores<false>(shape, rows, query, p().scale, lane, x);
        add<1>(x, position, n_tokens, shares);
    }
    __device__ void add_page(const uint8_t *page, int block, int n_tokens, float (&shares)[2]) const
    {
        const int row_bytes = p().layer.format.row_bytes;
        for (int first = 0; first < n_tokens; first += HKV_TILE_TOKENS)
            add_rows(StoredRows{page + first * row_bytes, row_bytes}, block * kBlockTokens + first, n_tokens - first,
                     shares);
    }
    __device__ void add_record(const uint8_t *record, int block, int n_older_tokens, float (&shares)[2]) const
    {
        const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(record);
        const int n_tokens = min(hkv_header_n_tokens(header, kBlockTokens), n_older_tokens);
        if (n_tokens == 0 || !was_read(block)) return;
        const Layout layout = shape.layout();
        const StoredPlane high{record + layout.k_high()}, low{record + layout.k_low()};
        Scores<S, kTiles> x;
        if (was_refined(block, header->planes))
            record_scores<true, kTiles>(shape, record + layout.k_params(), high, low, query, p().scale, lane, x);
        else
            record_scores<false, kTiles>(shape, record + layout.k_params(), high, low, query, p().scale, lane, x);
        add<kTiles>(x, block * kBlockTokens, n_tokens, shares);
    }
    __device__ __forceinline__ bool has_bit(const uint32_t *mask, int64_t line, int block) const
    {
        return mask[line * p().mask_words + block / 32] >> block % 32 & 1;
    }
    __device__ bool was_read(int block) const
    {
        const int64_t pair = static_cast<int64_t>(row_idx) * p().layer.n_kv_heads + head;
        if (p().read_mask && !has_bit(p().read_mask, pair, block)) return false;
        return !p().skipped_mask || !has_bit(p().skipped_mask, pair * p().mask_tiles + tile, block);
    }
    __device__ bool was_refined(int block, int planes) const
    {
        const int64_t pair = static_cast<int64_t>(row_idx) * p().layer.n_kv_heads + head;
        if (p().refined_mask) return has_bit(p().refined_mask, pair * p().mask_tiles + tile, block);
        return planes & p().layer.format.planes & HKV_PLANE_K_LOW;
    }
    /* The call's tokens that lie in a block: at most 8 in all, so that one tile holds them. */
    __device__ void add_call_tokens(int block, float (&shares)[2]) const
    {
        const int begin = max(block * kBlockTokens, n_older()), end = min((block + 1) * kBlockTokens, row.length);
        if (begin >= end) return;
        const NewTokens &t = p().tokens;
        const int64_t token = row.first_token + (begin - n_older());
        const uint16_t *k = static_cast<const uint16_t *>(t.k) + token * t.k_stride_token + head * t.k_stride_head;
        /* nobody asks these rows for values */
        const CallRows<S> rows(k, t.k_stride_token, k, t.k_stride_token, end - begin, p().layer.format.head_dim, lane);
        add_rows(rows, begin, end - begin, shares);
    }
    /* Largest share of a block over the tile's columns. */
    __device__ float weigh(int block) const
    {
        float shares[2] = {0.f, 0.f};
        const int n_older_tokens = min(kBlockTokens, n_older() - block * kBlockTokens);
        const int id = n_older_tokens > 0 ? p().block_table[row_idx * p().block_table_stride + block] : 0;
        if (id > 0 && id < p().layer.n_blocks) {
            const int page = p().layer.format.bits ? hkv_plan_hot_page(&p().plan, row_idx, block) : -1;
            if (page >= 0)
                add_page(p().layer.hot_page(page, head), block, min(p().page_n_tokens[page], n_older_tokens), shares);
            else if (p().layer.format.bits == 0)
                add_page(p().layer.record(id, head), block, n_older_tokens, shares);
            else
                add_record(p().layer.record(id, head), block, n_older_tokens, shares);
        }
        add_call_tokens(block, shares);
#pragma unroll
        for (int step = 4; step < 32; step <<= 1) {
            shares[0] += __shfl_xor_sync(kFullWarp, shares[0], step);
            shares[1] += __shfl_xor_sync(kFullWarp, shares[1], step);
        }
        float largest = fmaxf(shares[0], shares[1]);
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
        return fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    }
};

template <typename S> __global__ void __launch_bounds__(kThreads, 1) mass_kernel(const __grid_constant__ MassParams m)
{
    __shared__ uint4 query[S::kQueryBytes / sizeof(uint4)];
    const DecodeParams &p = m.decode;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_predecessor();
    let_successor_start();
    for (int item = blockIdx.y; item < m.n_rows * p.layer.n_kv_heads; item += gridDim.y) {
        const int row_idx = item / p.layer.n_kv_heads, head = item % p.layer.n_kv_heads;
        const hkv_plan_row row = p.plan.rows[row_idx];
        const bool is_decoded = row.n_new > 0 && row.n_new <= HKV_DECODE_MAX_TOKENS;
        const int n_columns = is_decoded ? row.n_new * p.group : 0;
        const int n_blocks = is_decoded ? (row.length + kBlockTokens - 1) / kBlockTokens : 0;
        float *mass = m.mass + item * m.mass_stride;
        const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + warp, step = gridDim.x * kWarps;
        for (int64_t b = first; b < m.mass_stride; b += step)
            if (b >= n_blocks && lane == 0) mass[b] = 0.f;
        if (static_cast<int64_t>(blockIdx.x) * kWarps >= n_blocks) continue;
        const uint16_t *q = static_cast<const uint16_t *>(p.q) + row.first_token * p.q_stride_token +
                            static_cast<int64_t>(head) * p.group * p.q_stride_head;
        const QueryColumns columns = {q,
                                      p.q_stride_token,
                                      p.q_stride_head,
                                      n_columns,
                                      p.group,
                                      p.layer.format.head_dim,
                                      p.layer.format.dtype == HKV_BF16};
        for (int tile = 0; tile * kTileColumns < n_columns; tile++) {
            __syncthreads();
            for (int i = threadIdx.x; i < S::kSteps / 2 * 32; i += kThreads)
                query[i] = columns.convert(columns.load(tile, S::kSteps, i));
            __syncthreads();
            Weigher<S> weigher = {
                m,   reinterpret_cast<const uint8_t *>(query), S{p.layer.format.stored_dim}, row, row_idx, head, tile,
                lane};
            weigher.load_references();
            for (int64_t b = first; b < n_blocks; b += step) {
                const float share = weigher.weigh(static_cast<int>(b));
                if (lane == 0) mass[b] = tile > 0 ? fmaxf(mass[b], share) : share;
            }
        }
    }
}

} // namespace

cudaError_t launch_mass(const MassParams &params, cudaStream_t stream)
{
    if (params.n_rows < 1) return cudaSuccess;
    int device = 0, n_sms = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    const int64_t n_items = static_cast<int64_t>(params.n_rows) * params.decode.layer.n_kv_heads;
    const int64_t n_wanted = (n_sms * kBlocksPerSm + n_items - 1) / n_items;
    const int64_t n_useful = (params.mass_stride + kWarps - 1) / kWarps;
    const dim3 grid(static_cast<unsigned>(n_wanted < n_useful ? n_wanted : n_useful),
                    static_cast<unsigned>(n_items < kMaxItems ? n_items : kMaxItems));
    const int dim = params.decode.layer.format.stored_dim;
    const auto kernel = dim == 64    ? mass_kernel<Shape<64, true, 8>>
                        : dim == 128 ? mass_kernel<Shape<128, true, 8>>
                        : dim == 256 ? mass_kernel<Shape<256, true, 8>>
                                     : mass_kernel<Shape<256, false, 8>>;
    return launch_dependent(kernel, grid, kThreads, 0, stream, params);
}

} // namespace hkv
