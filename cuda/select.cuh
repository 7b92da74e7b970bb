/* select.cuh - which L2 records a step's decode rows read. Host interface of select.cu. */
#ifndef HKV_CUDA_SELECT_CUH
#define HKV_CUDA_SELECT_CUH

#include "record.cuh"

namespace hkv
{

/* Everything that selection reads and writes. Device pointers. */
struct SelectParams {
    LayerView layer; /* bits 8, 6 or 4 */
    hkv_plan plan;
    int32_t n_rows;
    const int32_t *block_table; /* [n_rows, block_table_stride] */
    int64_t block_table_stride;
    const uint32_t *block_step; /* as in DecodeParams */
    const uint32_t *step;

    /* [N, Hq, D]; may be read before the wait: by a kernel that came before the predecessor */
    const void *q;
    int64_t q_stride_token, q_stride_head;
    float scale;           /* softmax scale * log2(e) */
    int32_t group;         /* query heads of a KV head */
    int32_t window_tokens; /* 0 = none */

    int32_t top_k;  /* sparse_top_k */
    float min_mass; /* sparse_min_mass, 0 = none */

    hkv_counters *counters; /* or NULL: n_records_unselected */

    /* [n_rows, Hkv, mask_words] bit b % 32 of word b / 32: decode reads the record of logical block b. Set for the L1
     * records and the selected L2 records that a decode row's queries may see; 0 where a hot page answers or nothing is
     * held. Words before the first and after the last block that a row sees are left as they are. */
    uint32_t *read_mask;
    int64_t mask_words; /* >= ceil(longest row / (32 * T)) */

    void *workspace; /* select_workspace_bytes, zero before the first launch, for one stream at a time */
};

size_t select_workspace_bytes(int max_rows, int n_kv_heads, int64_t mask_words);

cudaError_t launch_select(const SelectParams &params, cudaStream_t stream);

} // namespace hkv

#endif
