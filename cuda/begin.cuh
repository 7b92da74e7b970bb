/* begin.cuh - everything that a step decides, on the device. Host interface of begin.cu. */
#ifndef HKV_CUDA_BEGIN_CUH
#define HKV_CUDA_BEGIN_CUH

#include "schedule.cuh"

namespace hkv
{

/* hkv_plan_step, then the schedule of its decode rows, in one launch. input.plan is job.plan and input.n_rows is
 * job.batch.n_rows; all pointers are on the current device. A refused step (plan.failure) leaves no segments, rows
 * without tokens and no chunks. */
cudaError_t launch_begin(const hkv_plan_job &job, const ScheduleInput &input, const Schedule &schedule,
                         cudaStream_t stream);

} // namespace hkv

#endif
