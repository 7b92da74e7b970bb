/* schedule_device.cuh - the schedule of a step (schedule.cuh), made by kSchedulers threads.
 *
 * Cutting. A chunk may weigh at most `size` records. The smallest size is searched for which all chunks together are no
 * more than the workers (then each has one chunk and all finish together) - or, where there are more units than
 * workers, no more than kChunksPerWorker times as many, in rounds. Equal parts need at least the average load, and less
 * than one more chunk a unit than that; the few sizes in between are tried, a warp each.
 *
 * Heads. With 1 KV head in a chunk the four warps of a block share it and meet once, so that few partial results
 * remain: none at all where there are about as many (row, head) as workers. With 4, a warp each, long rows among short
 * ones are split four times more finely. Whichever leaves the most loaded worker less; both are searched side by side.
 */
#ifndef HKV_CUDA_SCHEDULE_DEVICE_CUH
#define HKV_CUDA_SCHEDULE_DEVICE_CUH

#include "divide.cuh"
#include "format.cuh"
#include "schedule.cuh"

namespace hkv
{

/* Schedulers: whole warps of a thread block, the last ones, with a barrier of their own. Few: most phases have little
 * to do, and what a thread executes for nothing costs issue slots of the one multiprocessor. */
constexpr int kSchedulers = 256;

namespace scheduling
{

constexpr int kWarps = kSchedulers / 32;
constexpr int kBarrier = 2;
constexpr int kLogConsumers = 2;
static_assert(1 << kLogConsumers == kConsumers, "heads of a chunk are a power of two");
constexpr int kSmallLoad = 3 * kConsumers; /* records a worker up to which merging matters more than balance */
constexpr int kWideGain = 32;              /* several heads a chunk must be worth more than one part in this many */

__device__ __forceinline__ int thread()
{
    return static_cast<int>(threadIdx.x % kSchedulers);
}
__device__ __forceinline__ void sync()
{
    named_barrier(kBarrier, kSchedulers);
}

/* One row's share of the work. */
struct RowWork {
    int block_begin, block_end; /* of visible older tokens */
    int cold_begin, n_cold;     /* without sinks and window, which the first part reads from hot pages */
    int hot_weight;             /* of those, in records */
    int column_tiles;           /* 0: not a decode row */
    int parts;                  /* that its units are cut into, as soon as that is known */

    __device__ int weight() const
    {
        return n_cold + hot_weight;
    }
    /* Parts for chunks of at most 1 / inverse_size records, give or take a thousandth. */
    __device__ int n_parts(float inverse_size) const
    {
        return max(1, min(static_cast<int>(ceilf(static_cast<float>(weight()) * inverse_size - 1e-3f)), n_cold));
    }
    /* First block of a part: parts have equal weight, the hot one lies before all blocks. */
    __device__ int part_begin(int part) const
    {
        if (part == 0) return block_begin;
        if (part == parts) return block_end;
        const float share = __fdividef(static_cast<float>(weight()), static_cast<float>(parts));
        return cold_begin + min(n_cold, max(part, static_cast<int>(share * static_cast<float>(part)) - hot_weight));
    }
};

__device__ __forceinline__ RowWork row_work(const ScheduleInput &in, const hkv_plan_row &r)
{
    RowWork w = {};
    if (r.n_new < 1 || r.n_new > HKV_DECODE_MAX_TOKENS) return w;
    const int n_older = r.length - r.n_new;
    w.column_tiles = Divisor(in.columns).divide(r.n_new * in.group + in.columns - 1);
    w.block_end = (n_older + kBlockTokens - 1) / kBlockTokens;
    if (in.window_tokens > 0) w.block_begin = min(w.block_end, max(0, n_older + 1 - in.window_tokens) / kBlockTokens);
    w.cold_begin = min(w.block_end, max(w.block_begin, r.n_sinks));
    w.n_cold = max(0, min(w.block_end, r.n_window ? r.window_first : w.block_end) - w.cold_begin);
    w.hot_weight = (r.n_sinks + r.n_window) * in.page_weight + 1; /* 1: the call's own tokens */
    return w;
}

/* Shared memory: kSchedulers rows at a time. */
struct Scratch {
    hkv_plan_row rows[kSchedulers];
    RowWork work[kSchedulers];
    int first_chunk[kSchedulers];
    int counts[2][2][kWarps]; /* [round % 2][search] chunks at the size that a warp tried */
    int warp_sums[kWarps];
};

/* By all schedulers; row_at(r) is row r of the plan. Makes its writes visible, and waits for those who still read the
 * rows before. */
template <typename F>
__device__ __forceinline__ void load_rows(const ScheduleInput &in, const F &row_at, int base, Scratch &s)
{
    const int row = base + thread();
    sync();
    if (row < in.n_rows) {
        s.rows[thread()] = row_at(row);
        s.work[thread()] = row_work(in, s.rows[thread()]);
    }
    sync();
}

/* Call f(work) for every row, the lanes of each warp sharing all rows. */
template <typename R, typename F>
__device__ __forceinline__ void for_rows(const ScheduleInput &in, const R &row_at, Scratch &s, F f)
{
#pragma unroll 1
    for (int base = 0; base < in.n_rows; base += kSchedulers) {
        if (in.n_rows > kSchedulers) load_rows(in, row_at, base, s);
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < min(kSchedulers, in.n_rows - base); i += 32) f(s.work[i]);
    }
}

/* Smallest size of a chunk of `heads` KV heads. Sizes are counted in rounds: the records that the warps of a block take
 * at once. low is too small, high fits; the largest row always counts as fitting. */
struct Search {
    int heads, groups, round, limit, low, high;

    /* heads = 1 << log_heads */
    __device__ Search(const ScheduleInput &in, int n_workers, int log_heads, int n_tiles, float work, int heaviest)
        : heads(1 << log_heads), groups(in.n_kv_heads >> log_heads), round(kConsumers >> log_heads)
    {
        limit = n_workers * rounds(n_tiles, n_workers);
        const int log_round = kLogConsumers - log_heads;
        const float share = work * static_cast<float>(groups) * (static_cast<float>(heads) / kConsumers);
        const int n_spare = limit - n_tiles * groups;
        low = max(0, static_cast<int>(__fdividef(share, static_cast<float>(limit))) - 1);
        high = max(low + 1, (heaviest + round - 1) >> log_round);
        if (n_spare > 0) high = min(high, static_cast<int>(__fdividef(share, static_cast<float>(n_spare))) + 2);
        high = max(high, low + 1);
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
        return (high - low + kWarps) / (kWarps + 1);
    }
    /* Size that warp i tries, inverted. */
    __device__ float inverse_candidate(int i) const
    {
        return __fdividef(1.f, static_cast<float>(min(high, low + step() * (i + 1)) * round));
    }
    /* counts[i] chunks at candidate i; they do not grow with i. */
    __device__ void narrow(const int *counts)
    {
        const int i = threadIdx.x % 32;
        const unsigned fits = __ballot_sync(kFullWarp, i < kWarps && counts[i] * groups <= limit);
        const int first = fits ? __ffs(static_cast<int>(fits)) - 1 : kWarps;
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
    int size, heads, groups;
};
template <typename R> __device__ Cut find_cut(const ScheduleInput &in, const R &row_at, int n_workers, Scratch &s)
{
    int n_tiles = 0, heaviest = 0;
    unsigned work = 0;
    for_rows(in, row_at, s, [&](const RowWork &w) {
        n_tiles += w.column_tiles;
        work += static_cast<unsigned>(w.column_tiles) * static_cast<unsigned>(w.weight());
        heaviest = max(heaviest, w.weight());
    });
    n_tiles = __reduce_add_sync(kFullWarp, n_tiles);
    work = __reduce_add_sync(kFullWarp, work);
    heaviest = __reduce_max_sync(kFullWarp, heaviest);
    const int log_widest = in.n_kv_heads % 2 ? 0 : in.n_kv_heads % kConsumers ? 1 : kLogConsumers, warp = thread() / 32;
    Search one(in, n_workers, 0, n_tiles, static_cast<float>(work), heaviest);
    Search several(in, n_workers, log_widest, n_tiles, static_cast<float>(work), heaviest);
#pragma unroll 1
    for (int turn = 0; one.is_open() || several.is_open(); turn ^= 1) {
        const float inverse_one = one.inverse_candidate(warp), inverse_several = several.inverse_candidate(warp);
        int n_one = 0, n_several = 0;
        for_rows(in, row_at, s, [&](const RowWork &w) {
            n_one += w.column_tiles * w.n_parts(inverse_one);
            n_several += w.column_tiles * w.n_parts(inverse_several);
        });
        s.counts[turn][0][warp] = __reduce_add_sync(kFullWarp, n_one);
        s.counts[turn][1][warp] = __reduce_add_sync(kFullWarp, n_several);
        sync();
        one.narrow(s.counts[turn][0]);
        several.narrow(s.counts[turn][1]);
    }
    const int load = one.load(n_tiles, n_workers), load_several = several.load(n_tiles, n_workers);
    const bool is_one = load <= kSmallLoad || load * kWideGain <= load_several * (kWideGain + 1);
    return is_one ? Cut{one.size(), one.heads, one.groups} : Cut{several.size(), several.heads, several.groups};
}

/* Sum over the threads below this one, and over all. */
__device__ inline int scan_threads(int n, int *total, int (&warp_sums)[kWarps])
{
    const int warp = thread() / 32, lane = threadIdx.x % 32;
    int sum = n;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    sync();
    const int of_warp = lane < kWarps ? warp_sums[lane] : 0;
    *total = __reduce_add_sync(kFullWarp, of_warp);
    return __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0) + sum - n;
}

/* Chunk number j of a row. Units lie side by side part by part, so that neighbours read the same pages. */
__device__ __forceinline__ Chunk make_chunk(const RowWork &w, const hkv_plan_row &r, int row, const Cut &cut,
                                            int first_chunk, int j)
{
    const int n_units = w.column_tiles * cut.groups;
    const int part = Divisor(n_units).divide(j), unit = j - part * n_units;
    const int group = Divisor(w.column_tiles).divide(unit);
    Chunk c;
    c.row = row;
    c.head = static_cast<int16_t>(group * cut.heads);
    c.column_tile = static_cast<int16_t>(unit - group * w.column_tiles);
    c.block_begin = w.part_begin(part);
    c.block_end = w.part_begin(part + 1);
    c.first_slot = first_chunk + unit * w.parts;
    c.part = static_cast<int16_t>(part);
    c.n_parts = static_cast<int16_t>(w.parts);
    c.n_older = r.length - r.n_new;
    c.n_new = r.n_new;
    c.first_token = r.first_token;
    return c;
}

/* The last of n rows whose first chunk is not beyond j. */
__device__ inline int row_of_chunk(const int *first_chunk, int n, int j)
{
    int low = 0, high = n;
#pragma unroll 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_chunk[middle] <= j)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* By all schedulers; row_at(r) is row r of the plan. Whatever the rows are, no more is written than there is room for.
 */
template <typename R>
__device__ __forceinline__ void make_schedule(const ScheduleInput &in, const R &row_at, const Schedule &out, Scratch &s)
{
    load_rows(in, row_at, 0, s);
    const Cut cut = find_cut(in, row_at, out.n_workers, s);
    const float inverse_size = __fdividef(1.f, static_cast<float>(cut.size));
    const int i = thread();
    int n_chunks = 0;
#pragma unroll 1
    for (int base = 0; base < in.n_rows; base += kSchedulers) {
        const int here = min(kSchedulers, in.n_rows - base);
        int n = 0, n_here;
        if (in.n_rows > kSchedulers) load_rows(in, row_at, base, s);
        if (i < here) {
            s.work[i].parts = s.work[i].n_parts(inverse_size);
            n = s.work[i].column_tiles * cut.groups * s.work[i].parts;
        }
        s.first_chunk[i] = n_chunks + scan_threads(n, &n_here, s.warp_sums);
        sync();
        const int end = min(n_chunks + n_here, out.max_chunks);
#pragma unroll 1
        for (int j = n_chunks + i; j < end; j += kSchedulers) {
            const int row = row_of_chunk(s.first_chunk, here, j), first = s.first_chunk[row];
            out.chunks[j] = make_chunk(s.work[row], s.rows[row], base + row, cut, first, j - first);
        }
        n_chunks = end;
    }
    if (i == 0) {
        *out.n_chunks = n_chunks;
        *out.heads_per_chunk = cut.heads;
    }
}

} // namespace scheduling
} // namespace hkv

#endif
