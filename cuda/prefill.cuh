/* prefill.cuh - attention of rows with many new tokens over hot pages, records and themselves. Host interface of
 * prefill.cu.
 */
#ifndef HKV_CUDA_PREFILL_CUH
#define HKV_CUDA_PREFILL_CUH

#include "decode.cuh"

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

/* The prefilled rows of the step whose decode rows these parameters are for. */
inline PrefillParams prefill_of(const DecodeParams &d, int32_t n_rows, int32_t n_new_tokens, void *workspace)
{
    PrefillParams p = {};
    p.layer = d.layer;
    p.plan = d.plan;
    p.block_table = d.block_table;
    p.block_table_stride = d.block_table_stride;
    p.page_n_tokens = d.page_n_tokens;
    p.tokens = d.tokens;
    p.q = d.q;
    p.out = d.out;
    p.q_stride_token = d.q_stride_token;
    p.q_stride_head = d.q_stride_head;
    p.out_stride_token = d.out_stride_token;
    p.out_stride_head = d.out_stride_head;
    p.sink_logits = d.sink_logits;
    p.lse = d.lse;
    p.scale = d.scale;
    p.soft_cap = d.soft_cap;
    p.group = d.group;
    p.window_tokens = d.window_tokens;
    p.n_rows = n_rows;
    p.n_new_tokens = n_new_tokens;
    p.workspace = workspace;
    return p;
}

/* Bytes of partial results for steps of at most these sizes. */
size_t prefill_workspace_bytes(const hkv_format &format, int n_kv_heads, int group, int n_rows, int n_new_tokens);

/* Attend for every row of the plan with more than HKV_DECODE_MAX_TOKENS new tokens; other rows are left alone. */
cudaError_t launch_prefill(const PrefillParams &params, cudaStream_t stream);

} // namespace hkv

#endif
