/* record.cuh - writing pages and records of one layer. Host interface of record.cu. */
#ifndef HKV_CUDA_RECORD_CUH
#define HKV_CUDA_RECORD_CUH

#include <cuda_runtime_api.h>

#include "../csrc/backend.h"
#include "lifetime.cuh"

namespace hkv
{

/* One layer's memory as kernels see it. */
struct LayerView {
    hkv_format format;
    hkv_layer_pages pages;
    uint8_t *hot; /* [n_hot_pages, n_kv_heads, row_page_bytes] of this layer */
    int n_kv_heads;
    int n_blocks, n_hot_pages;
    Lifetime lifetime; /* of its cache or store */

    __host__ __device__ uint8_t *record(int block, int head) const
    {
        return hkv_layer_record(&pages, block, head);
    }
    __host__ __device__ uint8_t *hot_page(int page, int head) const
    {
        return hot + (static_cast<size_t>(page) * static_cast<size_t>(n_kv_heads) + static_cast<size_t>(head)) *
                         format.row_page_bytes;
    }
};

/* New K and V of a step: [N, Hkv, D], strides in elements. */
struct NewTokens {
    const void *k, *v;
    int64_t k_stride_token, k_stride_head;
    int64_t v_stride_token, v_stride_head;
};

/* Phases 1 to 4 of a layer (docs/transitions.md): victims, restores, new tokens, headers, seals. At most max_segments
 * segments are in the plan, whose table has room for as many; clock may be NULL. Clamped elements are added to
 * counters->n_nonfinite_inputs, if there are counters. The plan and pages of earlier steps are read before the wait:
 * the predecessor in the stream must have nothing to do with them. */
cudaError_t launch_append(const LayerView &layer, const hkv_plan &plan, int max_segments, const NewTokens &tokens,
                          const int64_t *clock, cudaStream_t stream, hkv_counters *counters = nullptr);

/* The largest number of segments that a step of these sizes can have. */
inline int max_segments(int n_rows, int n_new_tokens)
{
    const int64_t bound = static_cast<int64_t>(n_new_tokens) / 64 + 2 * static_cast<int64_t>(n_rows);
    return static_cast<int>(bound < n_new_tokens ? bound : n_new_tokens);
}

} // namespace hkv

#endif
