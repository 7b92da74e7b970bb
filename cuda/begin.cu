/* begin.cu - plan a step and cut its decode work into chunks. One block of threads, once a step and layer group.
 *
 * Contract. The plan is that of csrc/plan.h to the bit; the schedule is that of schedule.cu. Nothing is read before the
 * predecessor has ended: tables may come from a copy, and appends of the step before change what is decided here.
 *
 * Bytes: rows, new tokens, hot pages, the rows' table entries and one record header per hot block; never the pool.
 *
 * One half of the threads plans, the other half cuts: how a row is cut depends on its lengths alone, whatever becomes
 * of the plan; if that is refused, there are no chunks.
 *
 * Time is a chain of some forty phases with a barrier between them; what counts is what a phase waits for. So the
 * tables that phases hand to each other live in shared memory for the time of the step: all that exists is fetched at
 * once, and stored at the end without anybody waiting. What stays in global memory are the arrays with an entry per
 * block and whatever changes only where pages do. A step whose tables are too large for that works on them in place.
 */
#include "begin.cuh"

#include <cuda_pipeline_primitives.h>
#include <type_traits>

#include "launch.cuh"
#include "schedule_device.cuh"

namespace hkv
{
namespace
{

constexpr int kPlanners = 256; /* threads that plan; the schedulers come after them */
constexpr int kThreads = kPlanners + kSchedulers;
constexpr int kWarps = kThreads / 32;
constexpr size_t kMaxSharedBytes = 99 * 1024; /* that every device has for a block */

enum TableName {
    kSlotMapping, /* read */
    kCuNewTokens,
    kSeqLens,
    kCopySources,
    kPageBlock, /* read and written */
    kPageTokens,
    kPageSealed,
    kPageStamp,
    kPageLastUse,
    kStep,
    kNextStamp,
    kIsAppended,
    kRows, /* written */
    kSegments,
    kHotPages,
    kSegmentCount,
    kVictimCount,
    kFailure,
    kFailureValue,
    kPageRole, /* scratch */
    kClaims,
    kCounters, /* added to those in global memory */
    kTableCount,
    kFirstStored = kPageBlock,
    kFirstMade = kRows,
    kFirstScratch = kPageRole,
};

/* The tables that a step is planned on in shared memory, one after the other. Laid out on the host. */
struct StagedTables {
    struct Table {
        const void *global;
        int first_word, n_words; /* of 4 bytes */
    } table[kTableCount];
    int n_words;

    explicit StagedTables(const hkv_plan_job &job) : n_words(0)
    {
        const hkv_batch &batch = job.batch;
        const hkv_directory &dir = job.directory;
        const hkv_plan &plan = job.plan;
        const int n_segments = plan.max_segments < batch.n_new_tokens ? plan.max_segments : batch.n_new_tokens;
        place(kSlotMapping, batch.slot_mapping, batch.n_new_tokens);
        place(kCuNewTokens, batch.cu_new_tokens, batch.n_rows + 1);
        place(kSeqLens, batch.seq_lens, batch.n_rows);
        place(kCopySources, batch.copy_sources, batch.copy_sources ? batch.n_rows : 0);
        place(kPageBlock, dir.page_block, job.n_pages);
        place(kPageTokens, dir.page_n_tokens, job.n_pages);
        place(kPageSealed, dir.page_sealed, job.n_pages);
        place(kPageStamp, dir.page_stamp, job.n_pages);
        place(kPageLastUse, dir.page_last_use, job.n_pages);
        place(kStep, dir.step, 1);
        place(kNextStamp, dir.next_stamp, 1);
        place(kIsAppended, plan.is_appended, 1);
        place(kRows, plan.rows, batch.n_rows);
        place(kSegments, plan.segments, n_segments);
        place(kHotPages, plan.hot_pages, batch.n_rows * plan.hot_stride);
        place(kSegmentCount, plan.n_segments, 1);
        place(kVictimCount, plan.n_victims, 1);
        place(kFailure, plan.failure, 1);
        place(kFailureValue, plan.failure_value, 4);
        place(kPageRole, dir.page_role, job.n_pages);
        place(kClaims, plan.claims, n_segments);
        place(kCounters, job.counters, 1);
    }
    size_t bytes() const
    {
        return static_cast<size_t>(n_words) * sizeof(uint32_t);
    }

  private:
    template <typename T> void place(TableName name, const T *global, int n)
    {
        table[name] = {global, n_words, n * static_cast<int>(sizeof(T) / sizeof(uint32_t))};
        n_words += (table[name].n_words + 1) / 2 * 2; /* 8 bytes are the most that an element needs */
    }
};

/* Fetch what exists; counters begin at 0. A warp a table. */
__device__ void fetch_tables(const StagedTables &tables, uint32_t *words)
{
#pragma unroll 1
    for (int t = threadIdx.x / 32; t < kFirstMade; t += kWarps) {
        const uint32_t *global = static_cast<const uint32_t *>(tables.table[t].global);
        uint32_t *shared = words + tables.table[t].first_word;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < tables.table[t].n_words; i += 32)
            __pipeline_memcpy_async(shared + i, global + i, sizeof(uint32_t));
    }
    if (threadIdx.x < tables.table[kCounters].n_words) words[tables.table[kCounters].first_word + threadIdx.x] = 0;
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
}

/* Store what the step made; what lies beyond its counts is of no matter. */
__device__ void store_tables(const StagedTables &tables, const uint32_t *words)
{
#pragma unroll 1
    for (int t = kFirstStored + threadIdx.x / 32; t < kFirstScratch; t += kWarps) {
        uint32_t *global = static_cast<uint32_t *>(const_cast<void *>(tables.table[t].global));
        const uint32_t *shared = words + tables.table[t].first_word;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < tables.table[t].n_words; i += 32) global[i] = shared[i];
    }
    const int i = static_cast<int>(threadIdx.x) - (kThreads - 32);
    if (i < 0 || 2 * i >= tables.table[kCounters].n_words) return;
    const unsigned long long n =
        reinterpret_cast<const unsigned long long *>(words + tables.table[kCounters].first_word)[i];
    if (n) atomicAdd(static_cast<unsigned long long *>(const_cast<void *>(tables.table[kCounters].global)) + i, n);
}

/* The same step on the staged tables. */
__device__ __forceinline__ hkv_plan_job staged_job(hkv_plan_job job, const StagedTables &tables, uint32_t *words)
{
    const auto move = [&](auto *&table, TableName name) {
        table = reinterpret_cast<std::remove_reference_t<decltype(table)>>(words + tables.table[name].first_word);
    };
    move(job.batch.slot_mapping, kSlotMapping);
    move(job.batch.cu_new_tokens, kCuNewTokens);
    move(job.batch.seq_lens, kSeqLens);
    if (job.batch.copy_sources) move(job.batch.copy_sources, kCopySources);
    move(job.directory.page_block, kPageBlock);
    move(job.directory.page_n_tokens, kPageTokens);
    move(job.directory.page_sealed, kPageSealed);
    move(job.directory.page_stamp, kPageStamp);
    move(job.directory.page_last_use, kPageLastUse);
    move(job.directory.page_role, kPageRole);
    move(job.directory.step, kStep);
    move(job.directory.next_stamp, kNextStamp);
    move(job.plan.is_appended, kIsAppended);
    move(job.plan.rows, kRows);
    move(job.plan.segments, kSegments);
    move(job.plan.claims, kClaims);
    move(job.plan.hot_pages, kHotPages);
    move(job.plan.n_segments, kSegmentCount);
    move(job.plan.n_victims, kVictimCount);
    move(job.plan.failure, kFailure);
    move(job.plan.failure_value, kFailureValue);
    move(job.counters, kCounters);
    return job;
}

/* What the team works with, at the start of shared memory. */
struct TeamMemory {
    scheduling::Scratch schedule;
    int32_t team_words[HKV_TEAM_WORDS];
};

template <bool kStaged>
__global__ void __launch_bounds__(kThreads, 1)
    begin_kernel(const __grid_constant__ hkv_plan_job job, const __grid_constant__ StagedTables tables,
                 const __grid_constant__ ScheduleInput input, const __grid_constant__ Schedule schedule)
{
    extern __shared__ __align__(16) uint8_t memory[];
    TeamMemory &shared = *reinterpret_cast<TeamMemory *>(memory);
    uint32_t *words = reinterpret_cast<uint32_t *>(memory + sizeof(TeamMemory));
    wait_for_predecessor();
    let_successor_start();
    hkv_plan_job here = kStaged ? staged_job(job, tables, words) : job;
    if (kStaged) fetch_tables(tables, words);
    here.block_tokens = kBlockTokens; /* the same, but the compiler knows it */
    if (threadIdx.x < kPlanners) {
        const hkv_team team = {static_cast<int32_t>(threadIdx.x), kPlanners, shared.team_words};
        hkv_plan_step(&here, &team);
    } else {
        const auto row_at = [&](int row) { return hkv_plan_read_row(&here, row); };
        scheduling::make_schedule(input, row_at, schedule, shared.schedule);
    }
    __syncthreads();
    if (kStaged) store_tables(tables, words);
    if (threadIdx.x == 0 && *here.plan.failure != HKV_OK) *schedule.n_chunks = 0;
}

} // namespace

cudaError_t launch_begin(const hkv_plan_job &job, const ScheduleInput &input, const Schedule &schedule,
                         cudaStream_t stream)
{
    const StagedTables tables(job);
    const size_t own = sizeof(TeamMemory), with_tables = own + tables.bytes();
    if (with_tables > kMaxSharedBytes)
        return launch_dependent(begin_kernel<false>, 1, kThreads, own, stream, job, tables, input, schedule);
    return launch_dependent(begin_kernel<true>, 1, kThreads, with_tables, stream, job, tables, input, schedule);
}

} // namespace hkv
