/* read.cu - tokens of one row as the next step would read them, for attention of others and for debugging.
 *
 * Contract. Element for element what the CPU's read_tokens writes. Grid: one block of threads per token and KV head.
 * Physical block numbers travel as kernel arguments, kTableBlocks a launch, so that no memory is needed.
 */
#include "read.cuh"

#include "format.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 64;
constexpr int kTableBlocks = 512;

/* Part of a block table. */
struct TablePart {
    int32_t blocks[kTableBlocks]; /* of logical blocks first_block .. */
    int32_t first_block;
    int32_t first_token; /* position of the launch's first token */
};

/* Hot page that answers for a block of the row, -1 = none. */
__device__ int valid_page(const ReadParams &p, int logical, int physical)
{
    if (p.layer.format.bits == 0 || (logical >= p.sink_blocks && logical < p.window_first)) return -1;
    const int page = p.directory.block_page[physical];
    if (page < 0 || p.directory.page_block[page] != physical) return -1;
    const uint8_t *record = hkv_layer_record(&p.first_layer, physical, 0);
    return reinterpret_cast<const hkv_record_header *>(record)->stamp == p.directory.page_stamp[page] ? page : -1;
}

__global__ void __launch_bounds__(kThreads)
    read_kernel(const __grid_constant__ ReadParams p, const __grid_constant__ TablePart table)
{
    const hkv_format &f = p.layer.format;
    const int head = blockIdx.y, position = table.first_token + static_cast<int>(blockIdx.x);
    const int logical = position / kBlockTokens, token = position % kBlockTokens;
    const int physical = table.blocks[logical - table.first_block], page = valid_page(p, logical, physical);
    const uint8_t *record = p.layer.record(physical, head), *rows = nullptr;
    bool is_quantized = false;
    if (f.bits == 0)
        rows = physical != 0 ? record : nullptr;
    else if (page >= 0)
        rows = token < p.directory.page_n_tokens[page] ? p.layer.hot_page(page, head) : nullptr;
    else
        is_quantized = physical != 0 &&
                       token < hkv_header_n_tokens(reinterpret_cast<const hkv_record_header *>(record), kBlockTokens);
    const hkv_precision precision =
        is_quantized ? hkv_record_precision(reinterpret_cast<const hkv_record_header *>(record)->planes)
                     : HKV_READ_INT4;
    const size_t to = (static_cast<size_t>(blockIdx.x) * gridDim.y + head) * f.head_dim;
    for (int i = threadIdx.x; i < 2 * f.head_dim; i += kThreads) {
        const bool is_v = i >= f.head_dim;
        const int channel = is_v ? i - f.head_dim : i;
        uint16_t x = 0;
        if (rows)
            x = *reinterpret_cast<const uint16_t *>(rows + hkv_row_element_offset(&f, token, channel, is_v));
        else if (is_quantized)
            x = model_element(f.dtype, record_value(f, record, precision, token, channel, is_v));
        static_cast<uint16_t *>(is_v ? p.v : p.k)[to + channel] = x;
    }
}

} // namespace

cudaError_t launch_read(const ReadParams &params, const int32_t *block_table, int64_t first_token, int64_t n_tokens,
                        cudaStream_t stream)
{
    const int64_t end = first_token + n_tokens;
    ReadParams p = params;
    TablePart table;
    for (int64_t first = first_token; first < end;) {
        const int64_t first_block = first / kBlockTokens;
        const int64_t part_end = (first_block + kTableBlocks) * kBlockTokens, next = part_end < end ? part_end : end;
        const int64_t n_blocks = (next - 1) / kBlockTokens + 1 - first_block;
        table.first_token = static_cast<int32_t>(first);
        table.first_block = static_cast<int32_t>(first_block);
        memcpy(table.blocks, block_table + first_block, static_cast<size_t>(n_blocks) * sizeof *block_table);
        const dim3 grid(static_cast<unsigned>(next - first), static_cast<unsigned>(p.layer.n_kv_heads));
        read_kernel<<<grid, kThreads, 0, stream>>>(p, table);
        const cudaError_t status = cudaGetLastError();
        if (status != cudaSuccess) return status;
        const size_t n_bytes = static_cast<size_t>(next - first) * static_cast<size_t>(p.layer.n_kv_heads) *
                               static_cast<size_t>(p.layer.format.head_dim) * sizeof(uint16_t);
        p.k = static_cast<uint8_t *>(p.k) + n_bytes;
        p.v = static_cast<uint8_t *>(p.v) + n_bytes;
        first = next;
    }
    return cudaSuccess;
}

} // namespace hkv
