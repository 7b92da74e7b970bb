/* schedule.cu - cut a step's decode work into chunks. One block of threads, once a step and layer group.
 *
 * Contract. Every decode row (1 to HKV_DECODE_MAX_TOKENS new tokens) gets the chunks of all its units; every block that
 * a query can see is in exactly one of them (blocks with hot pages are read by the first, wherever they lie). Chunks
 * and their owners depend on lengths alone, so the order in which partial results are added, and thus the output, is
 * the same on every run.
 *
 * Cutting. A chunk may weigh at most `size` records. The smallest size is searched for which all chunks together are no
 * more than the workers (then each has one chunk and all finish together) - or, where there are more units than
 * workers, no more than kChunksPerWorker times as many, in rounds. Sizes 32 at a time are tried by 32 warps.
 *
 * Heads. With 1 KV head in a chunk the four warps of a block share it and meet once, so that few partial results
 * remain: none at all where there are about as many (row, head) as workers. With 4, a warp each, long rows among short
 * ones are split four times more finely. Whichever leaves the most loaded worker less.
 */
#include "schedule.cuh"

#include "format.cuh"
#include "launch.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kSmallLoad = 3 * kConsumers; /* records a worker up to which merging matters more than balance */
constexpr int kWideGain = 32;              /* several heads a chunk must be worth more than one part in this many */

/* One row's share of the work. */
struct RowWork {
    int block_begin, block_end; /* of visible older tokens */
    int cold_begin, cold_end;   /* without sinks and window, which the first part reads from hot pages */
    int hot_weight;             /* of those, in records */
    int column_tiles;           /* 0: not a decode row */

    __device__ int weight() const
    {
        return cold_end - cold_begin + hot_weight;
    }
    __device__ int n_parts(int size) const
    {
        return max(1, min((weight() + size - 1) / size, cold_end - cold_begin));
    }
    /* First block of a part: parts have equal weight, the hot one lies before all blocks. */
    __device__ int part_begin(int part, int n_parts) const
    {
        if (part == 0) return block_begin;
        if (part == n_parts) return block_end;
        return cold_begin + max(part, static_cast<int>(static_cast<int64_t>(weight()) * part / n_parts) - hot_weight);
    }
};

__device__ RowWork row_work(const ScheduleInput &in, int row)
{
    const hkv_plan_row r = in.plan.rows[row];
    RowWork w = {};
    if (r.n_new < 1 || r.n_new > HKV_DECODE_MAX_TOKENS) return w;
    const int n_older = r.length - r.n_new;
    w.column_tiles = (r.n_new * in.group + in.columns - 1) / in.columns;
    w.block_end = (n_older + kBlockTokens - 1) / kBlockTokens;
    if (in.window_tokens > 0) w.block_begin = min(w.block_end, max(0, n_older + 1 - in.window_tokens) / kBlockTokens);
    w.cold_begin = min(w.block_end, max(w.block_begin, r.n_sinks));
    w.cold_end = max(w.cold_begin, min(w.block_end, r.n_window ? r.window_first : w.block_end));
    w.hot_weight = (r.n_sinks + r.n_window) * in.page_weight + 1; /* 1: the call's own tokens */
    return w;
}

/* Sum over all rows by one warp of f(row). */
template <typename F> __device__ int warp_sum_rows(int n_rows, F f)
{
    int sum = 0;
    for (int row = threadIdx.x % 32; row < n_rows; row += 32) sum += f(row);
    return __reduce_add_sync(kFullWarp, sum);
}

/* Chunks a worker gets at most, by the number of units. */
__device__ int rounds_for(int n_units, int n_workers)
{
    return n_units <= n_workers ? 1 : kChunksPerWorker;
}

/* The smallest chunk size, in records of one head, with which all chunks are within the limit. Warps try 32 sizes, then
 * 32 between the last that was too small and the first that fitted; the largest always counts as fitting. */
__device__ int find_size(const ScheduleInput &in, int n_workers, int n_tiles, int heads, int (&counts)[kWarps])
{
    const int warp = threadIdx.x / 32, groups = in.n_kv_heads / heads;
    const int round = kConsumers / heads; /* records that the warps of a block take at once: sizes are multiples */
    const int limit = n_workers * rounds_for(n_tiles * groups, n_workers);
    const int n_records = warp_sum_rows(in.n_rows, [&](int row) { return row_work(in, row).weight(); });
    int low = 0, high = max(1, (n_records + round - 1) / round); /* low is too small, high fits */
    while (high - low > 1) {
        const int step = (high - low + kWarps) / (kWarps + 1), size = min(high, low + step * (warp + 1));
        const int n = groups * warp_sum_rows(in.n_rows, [&](int row) {
                          const RowWork w = row_work(in, row);
                          return w.column_tiles * w.n_parts(size * round);
                      });
        __syncthreads();
        if (threadIdx.x % 32 == 0) counts[warp] = n;
        __syncthreads();
        int first = 0;
        while (first < kWarps && counts[first] > limit) first++;
        const int fitting = min(high, low + step * (first + 1));
        low = min(low + step * first, fitting - 1);
        high = fitting;
    }
    return high * round;
}

__global__ void __launch_bounds__(kThreads)
    schedule_kernel(const __grid_constant__ ScheduleInput in, const __grid_constant__ Schedule out)
{
    __shared__ int counts[kWarps];
    __shared__ int row_first[kThreads], row_total;
    wait_for_predecessor();
    let_successor_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    /* Few heads a chunk leave fewer partial results; many split long rows more finely. The smaller load of a worker
     * wins. */
    const int n_tiles = warp_sum_rows(in.n_rows, [&](int row) { return row_work(in, row).column_tiles; });
    const int widest = in.n_kv_heads % 2 ? 1 : in.n_kv_heads % 4 ? 2 : kConsumers;
    const int narrow_size = find_size(in, out.n_workers, n_tiles, 1, counts);
    const int wide_size = find_size(in, out.n_workers, n_tiles, widest, counts);
    const int narrow_load = narrow_size * rounds_for(n_tiles * in.n_kv_heads, out.n_workers);
    const int wide_load = wide_size * widest * rounds_for(n_tiles * in.n_kv_heads / widest, out.n_workers);
    const bool small = narrow_load <= kSmallLoad;
    const int heads = small || narrow_load * kWideGain <= wide_load * (kWideGain + 1) ? 1 : widest;
    const int size = heads == 1 ? narrow_size : wide_size, groups = in.n_kv_heads / heads;

    /* First chunk of every row: rows in blocks of kThreads, a scan each. */
    if (threadIdx.x == 0) row_total = 0;
    for (int base = 0; base < in.n_rows; base += kThreads) {
        const int row = base + threadIdx.x;
        RowWork w = {};
        if (row < in.n_rows) w = row_work(in, row);
        const int parts = w.n_parts(size), n = w.column_tiles * parts * groups;
        int before = n;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(kFullWarp, before, step);
            if (lane >= step) before += other;
        }
        __syncthreads();
        if (lane == 31) counts[warp] = before;
        __syncthreads();
        int warp_base = row_total;
        for (int i = 0; i < warp; i++) warp_base += counts[i];
        row_first[threadIdx.x] = warp_base + before - n;
        __syncthreads();
        if (threadIdx.x == kThreads - 1) row_total = warp_base + before;

        /* Chunks, a warp a row. Units of a row lie side by side part by part, so that neighbours read the same pages.
         */
        for (int i = warp; i < min(kThreads, in.n_rows - base); i += kWarps) {
            const hkv_plan_row r = in.plan.rows[base + i];
            const RowWork rw = row_work(in, base + i);
            const int n_parts = rw.n_parts(size), n_units = rw.column_tiles * groups;
            for (int j = lane; j < n_units * n_parts; j += 32) {
                const int part = j / n_units, unit = j % n_units;
                Chunk c;
                c.row = base + i;
                c.head = static_cast<int16_t>(unit / rw.column_tiles * heads);
                c.column_tile = static_cast<int16_t>(unit % rw.column_tiles);
                c.block_begin = rw.part_begin(part, n_parts);
                c.block_end = rw.part_begin(part + 1, n_parts);
                c.first_slot = row_first[i] + unit * n_parts;
                c.part = static_cast<int16_t>(part);
                c.n_parts = static_cast<int16_t>(n_parts);
                c.n_older = r.length - r.n_new;
                c.n_new = r.n_new;
                c.first_token = r.first_token;
                out.chunks[row_first[i] + j] = c;
            }
        }
        __syncthreads();
    }

    if (threadIdx.x == 0) {
        *out.n_chunks = row_total;
        *out.heads_per_chunk = heads;
    }
}

} // namespace

cudaError_t launch_schedule(const ScheduleInput &input, const Schedule &schedule, cudaStream_t stream)
{
    return launch_dependent(schedule_kernel, 1, kThreads, 0, stream, input, schedule);
}

} // namespace hkv
