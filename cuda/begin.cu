/* begin.cu - plan a step and cut its decode work into chunks. One block of threads, once a step and layer group.
 *
 * Contract. The plan is that of csrc/plan.h to the bit; the schedule is that of schedule.cu. Nothing is read before the
 * predecessor has ended: tables may come from a copy, and appends of the step before change what is decided here.
 *
 * Bytes: rows, new tokens, hot pages, the rows' table entries and one record header per hot block; never the pool.
 */
#include "begin.cuh"

#include "launch.cuh"
#include "schedule_device.cuh"

namespace hkv
{
namespace
{

__global__ void __launch_bounds__(kTeamThreads)
    begin_kernel(const __grid_constant__ hkv_plan_job job, const __grid_constant__ ScheduleInput input,
                 const __grid_constant__ Schedule schedule)
{
    __shared__ int32_t team_words[HKV_TEAM_WORDS];
    __shared__ scheduling::Scratch scratch;
    wait_for_predecessor();
    let_successor_start();
    const hkv_team team = {static_cast<int32_t>(threadIdx.x), kTeamThreads, team_words};
    hkv_plan_step(&job, &team);
    scheduling::make_schedule(input, job.plan.rows, schedule, scratch);
}

} // namespace

cudaError_t launch_begin(const hkv_plan_job &job, const ScheduleInput &input, const Schedule &schedule,
                         cudaStream_t stream)
{
    return launch_dependent(begin_kernel, 1, kTeamThreads, 0, stream, job, input, schedule);
}

} // namespace hkv
