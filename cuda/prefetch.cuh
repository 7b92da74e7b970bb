/* prefetch.cuh - bring a step's hot pages into L2 ahead of attention. Host interface of prefetch.cu. */
#ifndef HKV_CUDA_PREFETCH_CUH
#define HKV_CUDA_PREFETCH_CUH

#include "record.cuh"

namespace hkv
{

/* Which pages the open step's rows read in one layer is known once `begin` has run, so the stream must be behind it; it
 * may be another than that of attention, joined by an event. page_n_tokens [n_hot_pages]: tokens valid in each. Nothing
 * is launched at bits 0, which has no hot pages. */
cudaError_t launch_prefetch_hot(const LayerView &layer, const hkv_plan &plan, int n_rows, const int32_t *page_n_tokens,
                                cudaStream_t stream);

} // namespace hkv

#endif
