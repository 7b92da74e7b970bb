/* device.cuh - what the host side of the backend shares: the current device, and CUDA's failures in words. */
#ifndef HKV_CUDA_DEVICE_CUH
#define HKV_CUDA_DEVICE_CUH

#include <cuda_runtime_api.h>

#include "../csrc/internal.h"

namespace hkv
{

/* Makes a device current for as long as this object lives; then the caller's is current again. */
class DeviceScope
{
  public:
    explicit DeviceScope(int device)
    {
        status_ = cudaGetDevice(&previous_);
        switched_ = status_ == cudaSuccess && previous_ != device;
        if (switched_) status_ = cudaSetDevice(device);
    }
    ~DeviceScope()
    {
        if (switched_) (void)cudaSetDevice(previous_);
    }
    DeviceScope(const DeviceScope &) = delete;
    DeviceScope &operator=(const DeviceScope &) = delete;
    cudaError_t status() const
    {
        return status_;
    }

  private:
    int previous_ = 0;
    bool switched_ = false;
    cudaError_t status_;
};

/* HKV_OK, or an error that says what could not be done and why. Failures of single calls leave nothing behind. */
inline hkv_status check(cudaError_t status, const char *what, hkv_error *error)
{
    if (status == cudaSuccess) return HKV_OK;
    (void)cudaGetLastError();
    const char *hint = "";
    if (status == cudaErrorStreamCaptureUnsupported || status == cudaErrorStreamCaptureImplicit)
        hint = "; a stream is being captured, and this has to happen outside of that";
    if (status == cudaErrorInvalidResourceHandle || status == cudaErrorContextIsDestroyed)
        hint = "; the stream is none of this device";
    if (status == cudaErrorNoKernelImageForDevice) hint = "; build with HYBRIDKV_CUDA_ARCHS set to this GPU";
    return hkv_error_set(error, status == cudaErrorMemoryAllocation ? HKV_ERR_NO_MEMORY : HKV_ERR_DEVICE, "",
                         "CUDA could not %s: %s%s", what, cudaGetErrorString(status), hint);
}

} // namespace hkv

#endif
