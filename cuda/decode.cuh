/* decode.cuh - attention of decode rows over hot pages, records and the call's own tokens. Host interface of decode.cu.
 */
#ifndef HKV_CUDA_DECODE_CUH
#define HKV_CUDA_DECODE_CUH

#include "record.cuh"
#include "schedule.cuh"

namespace hkv
{

/* Everything that decode kernels read and write. Device pointers. */
struct DecodeParams {
    LayerView layer;
    hkv_plan plan;
    Schedule schedule;

    const int32_t *block_table; /* [n_rows, block_table_stride] */
    int64_t block_table_stride;
    const int32_t *page_n_tokens; /* [n_hot_pages] tokens valid in each */
    const uint32_t *block_step;   /* [n_blocks] step that last wrote a block, or NULL: may be read before the wait */
    const uint32_t *step;         /* [1] */

    NewTokens tokens;
    const void *q;
    void *out;
    int64_t q_stride_token, q_stride_head;
    int64_t out_stride_token, out_stride_head;
    const float *sink_logits; /* [Hq] or NULL */
    float *lse;               /* [N, Hq] or NULL */
    float scale;              /* softmax scale * log2(e) */
    float soft_cap;           /* * log2(e); 0 = none */
    int32_t group;            /* query heads of a KV head */
    int32_t window_tokens;    /* 0 = none */

    float skip_mass, refine_mass; /* progressive reading; (0, 0) reads everything in full */
    hkv_counters *counters;       /* or NULL; n_records_unselected is counted where the mask is made */

    /* Progressive kernel only; bit b % 32 of word b / 32 is logical block b. NULL: every record may be read; nothing is
     * told (both masks or neither). What was skipped and refined is added to words that the caller has cleared. */
    const uint32_t *read_mask; /* [n_rows, Hkv, mask_words] records that may be read: L1 and selected L2 */
    uint32_t *skipped_mask;    /* [n_rows, Hkv, mask_tiles, mask_words] records whose values a column tile skipped, */
    uint32_t *refined_mask;    /* ... and those that it read at the best precision */
    int64_t mask_words;
    int32_t mask_tiles;

    uint8_t *partials;    /* [max_chunks, kMaxChunkHeads, partial_bytes] all ones between launches */
    uint32_t *references; /* [max_chunks, kMaxChunkHeads, columns] log2-sum-exp of the hot part; the same */

    int32_t n_stages, stage_bytes; /* of the ring; this and the next are launch_decode's */
    uint32_t group_inverse;        /* 2^22 / group, rounded up: a division by the group is 20 instructions */
};

constexpr int kMaxChunkHeads = kConsumers;

/* How a launch is shaped on one device: fixed at creation, so that every step launches the same grid. */
struct DecodeShape {
    int32_t columns;       /* query columns of a tile, 8 or 16 */
    int32_t progressive;   /* 1: the kernel that decides per record what to read */
    int32_t blocks_per_sm; /* resident blocks of threads */
    int32_t n_workers;     /* grid size */
    int32_t n_stages, stage_bytes;
    size_t shared_bytes;
    size_t partial_bytes; /* of one (chunk, KV head) */
};

/* Fit a launch to the current device. columns_wanted: query columns a row usually has. blocks_per_sm 0: what suits
 * best. */
cudaError_t plan_decode(const hkv_format &format, int columns_wanted, bool progressive, int blocks_per_sm,
                        DecodeShape *shape);

/* Bytes of partials and references for max_chunks chunks; the caller sets every bit of them once. */
size_t decode_partial_bytes(const DecodeShape &shape, int max_chunks);
size_t decode_reference_bytes(const DecodeShape &shape, int max_chunks);

/* Before its wait the kernel reads q, k, v, tables of the plan, pages and records of earlier steps, and writes partial
 * results and its output: its predecessor in the stream, append or selection, must have nothing to do with them. Two
 * launches that follow each other directly must not share partials and references. */
cudaError_t launch_decode(const DecodeShape &shape, const DecodeParams &params, cudaStream_t stream);

} // namespace hkv

#endif
