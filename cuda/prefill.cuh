/* prefill.cuh - attention of rows with many new tokens over hot pages, records and themselves. Host interface of
 * prefill.cu.
 */
#ifndef HKV_CUDA_PREFILL_CUH
#define HKV_CUDA_PREFILL_CUH

#include "record.cuh"

namespace hkv
{

/* Everything that prefill kernels read and write. Device pointers; rows of q, k, v and out are 16-byte aligned. */
struct PrefillParams {
    LayerView layer;
    hkv_plan plan; /* rows, hot_pages and hot_stride are read */

    const int32_t *block_table; /* [n_rows, block_table_stride] */
    int64_t block_table_stride;
    const int32_t *page_n_tokens; /* [n_hot_pages] tokens valid in each */

    NewTokens tokens;
    const void *q; /* [N, Hq, D] */
    void *out;     /* [N, Hq, D] */
    int64_t q_stride_token, q_stride_head;
    int64_t out_stride_token, out_stride_head;
    const float *sink_logits; /* [Hq] or NULL */
    float *lse;               /* [N, Hq] or NULL; natural logarithm, -inf where nothing is visible */
    float scale;              /* softmax scale * log2(e) */
    float soft_cap;           /* * log2(e); 0 = none */
    int32_t group;            /* query heads of a KV head */
    int32_t window_tokens;    /* 0 = none */

    int32_t n_rows, n_new_tokens; /* of the batch; the grid depends on nothing else */
    void *workspace;              /* prefill_workspace_bytes */
};

/* Bytes of partial results for steps of at most these sizes. */
size_t prefill_workspace_bytes(const hkv_format &format, int n_kv_heads, int group, int n_rows, int n_new_tokens);

/* Attend for every row of the plan with more than HKV_DECODE_MAX_TOKENS new tokens; other rows are left alone. */
cudaError_t launch_prefill(const PrefillParams &params, cudaStream_t stream);

} // namespace hkv

#endif
