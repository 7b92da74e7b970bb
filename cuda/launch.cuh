/* launch.cuh - start a kernel that may begin before its predecessor in the stream has ended (see ptx.cuh). */
#ifndef HKV_CUDA_LAUNCH_CUH
#define HKV_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

namespace hkv
{

/* 48 KB are there without asking, but a kernel's own variables count too. */
constexpr size_t kSharedBytesAsked = 40 * 1024;

/* Programmatic dependent launches need compute capability 9.0; on older devices the attribute is left out. */
template <typename... Params, typename... Args>
cudaError_t launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                             const Args &...args)
{
    int device = 0, major = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess && shared_bytes > kSharedBytesAsked)
        status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = major >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

} // namespace hkv

#endif
