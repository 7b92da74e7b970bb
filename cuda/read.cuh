/* read.cuh - what a row would read, dequantised. Host interface of read.cu. */
#ifndef HKV_CUDA_READ_CUH
#define HKV_CUDA_READ_CUH

#include "record.cuh"

namespace hkv
{

/* Consecutive tokens of one row. Device pointers. */
struct ReadParams {
    LayerView layer;
    hkv_directory directory;
    hkv_layer_pages first_layer; /* whose headers tell which pages are valid */
    int32_t window_first;        /* the row's blocks from here on, and its sinks, may be read from hot pages */
    int32_t sink_blocks;
    void *k, *v; /* [n_tokens, Hkv, D] in the model's dtype */
};

/* Tokens first_token .. first_token + n_tokens - 1. block_table [blocks of the row] is on the host and may be changed
 * on return. What nothing holds reads as zeros. */
cudaError_t launch_read(const ReadParams &params, const int32_t *block_table, int64_t first_token, int64_t n_tokens,
                        cudaStream_t stream);

} // namespace hkv

#endif
