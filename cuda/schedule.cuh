/* schedule.cuh - how the decode work of a step is cut into chunks, on the device.
 *
 * Unit: (row, heads_per_chunk neighbouring KV heads, one tile of query columns). Chunk: a run of a unit's logical
 * blocks. The first chunk of a unit also reads the row's hot pages and the tokens of the call. Worker w (a block of
 * threads of the decode kernel) takes chunks w, w + n_workers, ...; usually exactly one. A unit's chunks come in the
 * order of their parts.
 *
 * Query columns of a row and KV head: query token t and head g of the group are column t * group + g.
 */
#ifndef HKV_CUDA_SCHEDULE_CUH
#define HKV_CUDA_SCHEDULE_CUH

#include <cuda_runtime_api.h>

#include "../csrc/plan.h"

namespace hkv
{

constexpr int kConsumers = 4;       /* warps of a decode block that compute; a chunk has at most as many KV heads */
constexpr int kMergeGroup = 16;     /* partials that a warp merges at a time */
constexpr int kChunksPerWorker = 4; /* where there are more units than workers */

struct Chunk {
    int32_t row;
    int16_t head;                   /* first KV head */
    int16_t column_tile;            /* first column / columns of a tile */
    int32_t block_begin, block_end; /* logical blocks */
    int32_t first_slot;             /* of the unit's partials */
    int16_t part, n_parts;
    int32_t n_older;            /* tokens of the row before this call */
    int32_t n_new, first_token; /* of this call, in the flat arrays */
};

struct Schedule {
    Chunk *chunks;            /* [max_chunks] */
    int32_t *n_chunks;        /* [1] */
    int32_t *heads_per_chunk; /* [1] 1, 2 or 4 */
    int32_t n_workers, max_chunks;
};

/* What the cutting depends on. Plan rows are read on the device. */
struct ScheduleInput {
    hkv_plan plan;
    int32_t n_rows, n_kv_heads, group;
    int32_t columns;       /* of a tile: 8 or 16 */
    int32_t window_tokens; /* sliding window, 0 = none */
    int32_t page_weight;   /* bytes of a hot page over those of a record, rounded */
};

/* Chunks that a step can have at most. */
inline int max_chunks(int n_workers, int n_rows, int n_kv_heads, int n_columns, int columns)
{
    const int tiles = (n_columns + columns - 1) / columns;
    return kChunksPerWorker * n_workers + n_rows * n_kv_heads * tiles;
}

cudaError_t launch_schedule(const ScheduleInput &input, const Schedule &schedule, cudaStream_t stream);

} // namespace hkv

#endif
