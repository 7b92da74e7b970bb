/* prefill.cu - attention of rows with more than HKV_DECODE_MAX_TOKENS new tokens.
 *
 * Contract. For every such row of the plan: out = softmax(scale q.k) V over all older tokens as stored (hot pages, else
 * records at the best precision present) and the new ones as given, causal. One softmax, fp32 sums. Same input, same
 * bits. Nothing that append writes is read before the wait for the predecessor.
 *
 * Grid. One block of threads per (tile of query rows, KV head), as many as n_rows and n_new_tokens allow; which batch
 * row and tile a block has follows from the plan on the device, and blocks beyond the last leave at once. The last
 * tiles of a row, which see the most keys, start first.
 *
 * Bytes. A tile reads every key that it sees once: of a record at D = 128 269 bytes a token (INT8), of rows 512, from
 * L2 if a tile of the same KV head was there before. A record is unpacked once a tile of queries, so a tile holds the
 * query rows of all G heads of the group.
 */
#include "prefill.cuh"

#include "launch.cuh"
#include "prefill_mma.cuh"
#include "prefill_wgmma.cuh"

namespace hkv
{
namespace
{

/* ------------------------------------------------------------------------------------------------------------- host */

using Kernel = void (*)(PrefillParams);

/* A kernel and how it is launched. */
struct Variant {
    Kernel kernel;
    int threads, tile_queries, shared_bytes;
    bool is_persistent; /* one block of threads an SM, whatever there is to do */
};

template <int kDim> Variant mma_variant(bool is_bf16)
{
    return {is_bf16 ? prefill_mma_kernel<kDim, true> : prefill_mma_kernel<kDim, false>, kMmaThreads, kMmaQueries,
            mma_shared_bytes(kDim), false};
}
template <int kDim> Variant wgmma_variant(const hkv_format &f)
{
    return {f.dtype == HKV_BF16 ? prefill_wgmma_kernel<kDim, true> : prefill_wgmma_kernel<kDim, false>, kWgmmaThreads,
            kWgmmaQueries, wgmma_shared_bytes(f), true};
}
Variant find_variant(const hkv_format &f, bool is_hopper)
{
    const int dim = f.stored_dim;
    if (is_hopper && f.head_dim == 64) return wgmma_variant<64>(f);
    if (is_hopper && f.head_dim == 128) return wgmma_variant<128>(f);
    const bool is_bf16 = f.dtype == HKV_BF16;
    return dim <= 64 ? mma_variant<64>(is_bf16) : dim <= 128 ? mma_variant<128>(is_bf16) : mma_variant<256>(is_bf16);
}

} // namespace

size_t prefill_workspace_bytes(const hkv_format &, int, int, int, int)
{
    return 0;
}

cudaError_t launch_prefill(const PrefillParams &params, cudaStream_t stream)
{
    int device = 0, major = 0, minor = 0, n_sms = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    const Variant v = find_variant(params.layer.format, major == 9 && minor == 0);
    int64_t n_blocks = max_query_tiles(params, v.tile_queries) * params.layer.n_kv_heads;
    if (params.n_new_tokens <= HKV_DECODE_MAX_TOKENS || n_blocks == 0) return cudaSuccess;
    if (v.is_persistent && n_blocks > n_sms) n_blocks = n_sms;
    return launch_dependent(v.kernel, static_cast<unsigned>(n_blocks), static_cast<unsigned>(v.threads),
                            static_cast<size_t>(v.shared_bytes), stream, params);
}

} // namespace hkv
