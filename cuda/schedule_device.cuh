/* schedule_device.cuh - the schedule of a step (schedule.cuh), made by one block of kTeamThreads threads.
 *
 * Cutting. A chunk may weigh at most `size` records. The smallest size is searched for which all chunks together are no
 * more than the workers (then each has one chunk and all finish together) - or, where there are more units than
 * workers, no more than kChunksPerWorker times as many, in rounds. It lies between the average load and the largest
 * row; 32 sizes at a time are tried by 32 warps.
 *
 * Heads. With 1 KV head in a chunk the four warps of a block share it and meet once, so that few partial results
 * remain: none at all where there are about as many (row, head) as workers. With 4, a warp each, long rows among short
 * ones are split four times more finely. Whichever leaves the most loaded worker less; both are searched side by side.
 */
#ifndef HKV_CUDA_SCHEDULE_DEVICE_CUH
#define HKV_CUDA_SCHEDULE_DEVICE_CUH

#include "format.cuh"
#include "schedule.cuh"

namespace hkv
{

constexpr int kTeamThreads = 1024; /* of the block that plans and schedules */
constexpr int kTeamWarps = kTeamThreads / 32;

namespace scheduling
{

constexpr int kSmallLoad = 3 * kConsumers; /* records a worker up to which merging matters more than balance */
constexpr int kWideGain = 32;              /* several heads a chunk must be worth more than one part in this many */

/* One row's share of the work. */
struct RowWork {
    int block_begin, block_end; /* of visible older tokens */
    int cold_begin, cold_end;   /* without sinks and window, which the first part reads from hot pages */
    int hot_weight;             /* of those, in records */
    int column_tiles;           /* 0: not a decode row */

    __device__ int n_cold() const
    {
        return cold_end - cold_begin;
    }
    __device__ int weight() const
    {
        return n_cold() + hot_weight;
    }
    /* First block of a part: parts have equal weight, the hot one lies before all blocks. */
    __device__ int part_begin(int part, int n_parts) const
    {
        if (part == 0) return block_begin;
        if (part == n_parts) return block_end;
        return cold_begin + max(part, static_cast<int>(static_cast<int64_t>(weight()) * part / n_parts) - hot_weight);
    }
};

__device__ inline RowWork row_work(const ScheduleInput &in, const hkv_plan_row &r)
{
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

__device__ __forceinline__ int n_parts(int weight, int n_cold, int size)
{
    return max(1, min((weight + size - 1) / size, n_cold));
}

/* Shared memory: what the search needs to know of kTeamThreads rows at a time. */
struct Scratch {
    int weight[kTeamThreads], n_cold[kTeamThreads], column_tiles[kTeamThreads];
    int first_chunk[kTeamThreads];
    int counts[2][2][kTeamWarps]; /* [round % 2][search] chunks at the size that a warp tried */
    int warp_sums[kTeamWarps];
};

/* By all threads. Makes its writes visible, and waits for those who still read the rows before. */
__device__ inline void load_rows(const ScheduleInput &in, const hkv_plan_row *rows, int base, Scratch &s)
{
    const int row = base + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (row < in.n_rows) {
        const RowWork w = row_work(in, rows[row]);
        s.weight[threadIdx.x] = w.weight();
        s.n_cold[threadIdx.x] = w.n_cold();
        s.column_tiles[threadIdx.x] = w.column_tiles;
    }
    __syncthreads();
}

/* Call f(i) for every row's place i in the scratch, the lanes of each warp sharing all rows. */
template <typename F> __device__ void for_rows(const ScheduleInput &in, const hkv_plan_row *rows, Scratch &s, F f)
{
    for (int base = 0; base < in.n_rows; base += kTeamThreads) {
        if (in.n_rows > kTeamThreads) load_rows(in, rows, base, s);
        for (int i = threadIdx.x % 32; i < min(kTeamThreads, in.n_rows - base); i += 32) f(i);
    }
}

/* Smallest size of a chunk of `heads` KV heads. Sizes are counted in rounds: the records that the warps of a block take
 * at once. low is too small, high fits; the largest row always counts as fitting. */
struct Search {
    int heads, groups, round, limit, low, high;

    __device__ Search(const ScheduleInput &in, int n_workers, int heads_, int n_tiles, float work, int heaviest)
        : heads(heads_), groups(in.n_kv_heads / heads_), round(kConsumers / heads_)
    {
        limit = n_workers * rounds(n_tiles, n_workers);
        low = max(0, static_cast<int>(work * static_cast<float>(groups) / static_cast<float>(limit * round)) - 1);
        high = max(low + 1, (heaviest + round - 1) / round);
    }
    /* Chunks a worker gets at most, by the number of units. */
    __device__ int rounds(int n_tiles, int n_workers) const
    {
        return n_tiles * groups <= n_workers ? 1 : kChunksPerWorker;
    }
    __device__ bool is_open() const
    {
        return high - low > 1;
    }
    __device__ int size() const
    {
        return high * round;
    }
    __device__ int step() const
    {
        return (high - low + kTeamWarps) / (kTeamWarps + 1);
    }
    /* Size that warp i tries. */
    __device__ int candidate(int i) const
    {
        return min(high, low + step() * (i + 1)) * round;
    }
    /* counts[i] chunks at candidate i; they do not grow with i. */
    __device__ void narrow(const int *counts)
    {
        const unsigned fits = __ballot_sync(kFullWarp, counts[threadIdx.x % 32] * groups <= limit);
        const int first = fits ? __ffs(static_cast<int>(fits)) - 1 : kTeamWarps;
        const int fitting = min(high, low + step() * (first + 1));
        low = min(low + step() * first, fitting - 1);
        high = fitting;
    }
    /* Records of one head that the most loaded worker gets. */
    __device__ int load(int n_tiles, int n_workers) const
    {
        return size() * heads * rounds(n_tiles, n_workers);
    }
};

/* How the step is cut: the size of a chunk and its KV heads, the same in every thread. */
struct Cut {
    int size, heads;
};
__device__ inline Cut find_cut(const ScheduleInput &in, const hkv_plan_row *rows, int n_workers, Scratch &s)
{
    int n_tiles = 0, heaviest = 0;
    unsigned work = 0;
    for_rows(in, rows, s, [&](int i) {
        n_tiles += s.column_tiles[i];
        work += static_cast<unsigned>(s.column_tiles[i]) * static_cast<unsigned>(s.weight[i]);
        heaviest = max(heaviest, s.weight[i]);
    });
    n_tiles = __reduce_add_sync(kFullWarp, n_tiles);
    work = __reduce_add_sync(kFullWarp, work);
    heaviest = __reduce_max_sync(kFullWarp, heaviest);
    const int widest = in.n_kv_heads % 2 ? 1 : in.n_kv_heads % 4 ? 2 : kConsumers, warp = threadIdx.x / 32;
    Search one(in, n_workers, 1, n_tiles, static_cast<float>(work), heaviest);
    Search several(in, n_workers, widest, n_tiles, static_cast<float>(work), heaviest);
    for (int turn = 0; one.is_open() || several.is_open(); turn ^= 1) {
        const int size_one = one.candidate(warp), size_several = several.candidate(warp);
        int n_one = 0, n_several = 0;
        for_rows(in, rows, s, [&](int i) {
            n_one += s.column_tiles[i] * n_parts(s.weight[i], s.n_cold[i], size_one);
            n_several += s.column_tiles[i] * n_parts(s.weight[i], s.n_cold[i], size_several);
        });
        s.counts[turn][0][warp] = __reduce_add_sync(kFullWarp, n_one);
        s.counts[turn][1][warp] = __reduce_add_sync(kFullWarp, n_several);
        __syncthreads();
        one.narrow(s.counts[turn][0]);
        several.narrow(s.counts[turn][1]);
    }
    const int load = one.load(n_tiles, n_workers), load_several = several.load(n_tiles, n_workers);
    const bool is_one = load <= kSmallLoad || load * kWideGain <= load_several * (kWideGain + 1);
    return is_one ? Cut{one.size(), 1} : Cut{several.size(), widest};
}

/* Sum over the threads below this one, and over all. */
__device__ inline int scan_threads(int n, int *total, int (&warp_sums)[kTeamWarps])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = n;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    const int of_warp = warp_sums[lane];
    *total = __reduce_add_sync(kFullWarp, of_warp);
    return __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0) + sum - n;
}

/* The chunks of one row, by a warp. Units lie side by side part by part, so that neighbours read the same pages. */
__device__ inline void write_chunks(const ScheduleInput &in, const hkv_plan_row &r, int row, const Cut &cut,
                                    int first_chunk, Chunk *chunks)
{
    const RowWork w = row_work(in, r);
    const int parts = n_parts(w.weight(), w.n_cold(), cut.size), n_units = w.column_tiles * (in.n_kv_heads / cut.heads);
    for (int j = threadIdx.x % 32; j < n_units * parts; j += 32) {
        const int part = j / n_units, unit = j % n_units;
        Chunk c;
        c.row = row;
        c.head = static_cast<int16_t>(unit / w.column_tiles * cut.heads);
        c.column_tile = static_cast<int16_t>(unit % w.column_tiles);
        c.block_begin = w.part_begin(part, parts);
        c.block_end = w.part_begin(part + 1, parts);
        c.first_slot = first_chunk + unit * parts;
        c.part = static_cast<int16_t>(part);
        c.n_parts = static_cast<int16_t>(parts);
        c.n_older = r.length - r.n_new;
        c.n_new = r.n_new;
        c.first_token = r.first_token;
        chunks[first_chunk + j] = c;
    }
}

/* By all kTeamThreads threads. rows: those of the plan. */
__device__ inline void make_schedule(const ScheduleInput &in, const hkv_plan_row *rows, const Schedule &out, Scratch &s)
{
    load_rows(in, rows, 0, s);
    const Cut cut = find_cut(in, rows, out.n_workers, s);
    int n_chunks = 0;
    for (int base = 0; base < in.n_rows; base += kTeamThreads) {
        const int here = min(kTeamThreads, in.n_rows - base), i = threadIdx.x;
        int n = 0, total;
        if (in.n_rows > kTeamThreads) load_rows(in, rows, base, s);
        if (i < here) n = s.column_tiles[i] * n_parts(s.weight[i], s.n_cold[i], cut.size) * (in.n_kv_heads / cut.heads);
        s.first_chunk[i] = n_chunks + scan_threads(n, &total, s.warp_sums);
        n_chunks += total;
        __syncthreads();
        for (int row = threadIdx.x / 32; row < here; row += kTeamWarps)
            write_chunks(in, rows[base + row], base + row, cut, s.first_chunk[row], out.chunks);
    }
    if (threadIdx.x == 0) {
        *out.n_chunks = n_chunks;
        *out.heads_per_chunk = cut.heads;
    }
}

} // namespace scheduling
} // namespace hkv

#endif
