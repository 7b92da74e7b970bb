/* mass.cuh - which share of a row's softmax fell on each block (hkv_attend.mass). Host interface of mass.cu. */
#ifndef HKV_CUDA_MASS_CUH
#define HKV_CUDA_MASS_CUH

#include "decode.cuh"

namespace hkv
{

struct MassParams {
    DecodeParams
        decode; /* as it was launched, with lse, and with skipped_mask and refined_mask if it was progressive */
    int32_t n_rows;
    float *mass; /* [n_rows, Hkv, mass_stride], every element is written */
    int64_t mass_stride;
};

/* After decode, on the same stream. */
cudaError_t launch_mass(const MassParams &params, cudaStream_t stream);

} // namespace hkv

#endif
