/* prefetch.cu - the hot pages that a step's rows will read in one layer, into L2 (step.prefetch_hot).
 *
 * Contract. Nothing is written and nothing waits for it: a prefetch that comes too late or falls out of L2 again costs
 * only its bytes. Older tokens of every page in plan.hot_pages; the tokens of the call are not there yet.
 *
 * Grid. (pages of a row, rows) blocks of one warp; a lane starts one bulk prefetch of 4 KB at a time (a line of 128
 * bytes below sm_90). Bytes: tokens x 2 D x 2 x KV heads, 512 a token and head at D = 128. One warp a page, so that the
 * kernel finds room beside whatever else runs.
 */
#include "prefetch.cuh"

#include "format.cuh"

namespace hkv
{
namespace
{

#if HKV_HAS_BULK
constexpr uint32_t kPiece = 4096;
#else
constexpr uint32_t kPiece = 128;
#endif

/* n_bytes: a multiple of 16, at most kPiece. */
__device__ __forceinline__ void prefetch(const uint8_t *p, uint32_t n_bytes)
{
#if HKV_HAS_BULK
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(n_bytes) : "memory");
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

__global__ void __launch_bounds__(32)
    prefetch_kernel(const __grid_constant__ LayerView layer, const __grid_constant__ hkv_plan plan,
                    const int32_t *page_n_tokens)
{
    const hkv_plan_row row = plan.rows[blockIdx.y];
    const int slot = blockIdx.x;
    if (row.n_new < 1 || slot >= row.n_sinks + row.n_window) return;
    const int page = plan.hot_pages[static_cast<int64_t>(blockIdx.y) * plan.hot_stride + slot];
    const int block = slot < row.n_sinks ? slot : row.window_first + slot - row.n_sinks;
    if (page < 0) return;
    const int n_tokens = min(page_n_tokens[page], row.length - row.n_new - block * kBlockTokens);
    if (n_tokens <= 0) return;
    const uint32_t n_bytes = static_cast<uint32_t>(n_tokens * layer.format.row_bytes);
    const uint32_t n_pieces = (n_bytes + kPiece - 1) / kPiece;
    for (uint32_t i = threadIdx.x; i < n_pieces * layer.n_kv_heads; i += 32) {
        const uint32_t first = i % n_pieces * kPiece;
        prefetch(layer.hot_page(page, static_cast<int>(i / n_pieces)) + first, min(kPiece, n_bytes - first));
    }
}

} // namespace

cudaError_t launch_prefetch_hot(const LayerView &layer, const hkv_plan &plan, int n_rows, const int32_t *page_n_tokens,
                                cudaStream_t stream)
{
    if (layer.format.bits == 0 || n_rows < 1) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(plan.hot_stride), static_cast<unsigned>(n_rows));
    prefetch_kernel<<<grid, 32, 0, stream>>>(layer, plan, page_n_tokens);
    return cudaGetLastError();
}

} // namespace hkv
