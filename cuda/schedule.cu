/* schedule.cu - the schedule of a step whose plan is there already. In a step, begin.cu makes both in one launch.
 *
 * Contract. Every decode row (1 to HKV_DECODE_MAX_TOKENS new tokens) gets the chunks of all its units; every block that
 * a query can see is in exactly one of them (blocks with hot pages are read by the first, wherever they lie). Chunks
 * and their owners depend on lengths alone, so the order in which partial results are added, and thus the output, is
 * the same on every run.
 */
#include "schedule.cuh"

#include "launch.cuh"
#include "schedule_device.cuh"

namespace hkv
{
namespace
{

__global__ void __launch_bounds__(kSchedulers)
    schedule_kernel(const __grid_constant__ ScheduleInput in, const __grid_constant__ Schedule out)
{
    __shared__ scheduling::Scratch scratch;
    wait_for_predecessor();
    let_successor_start();
    scheduling::make_schedule(
        in, [&](int row) { return in.plan.rows[row]; }, out, scratch);
}

} // namespace

cudaError_t launch_schedule(const ScheduleInput &input, const Schedule &schedule, cudaStream_t stream)
{
    return launch_dependent(schedule_kernel, 1, kSchedulers, 0, stream, input, schedule);
}

} // namespace hkv
