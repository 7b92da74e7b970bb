/* lifetime.cuh - in a debug build, a captured graph stops when the cache that it works on is gone.
 *
 * A graph keeps addresses. Once its cache is destroyed they may be anybody's memory, and nothing tells. With HKV_DEBUG
 * (HYBRIDKV_CUDA_DEBUG=1 when the package is built) each group has one word that is never freed; append, the first
 * kernel of every attend, traps when it says that the group has ended. Other builds have none of this.
 */
#ifndef HKV_CUDA_LIFETIME_CUH
#define HKV_CUDA_LIFETIME_CUH

#include <cstdint>
#include <cuda_runtime.h>

namespace hkv
{

struct Lifetime {
#ifdef HKV_DEBUG
    uint32_t *is_alive; /* [1] on the device */

    cudaError_t begin()
    {
        const cudaError_t status = cudaMalloc(&is_alive, sizeof *is_alive);
        return status == cudaSuccess ? cudaMemset(is_alive, 1, sizeof *is_alive) : status;
    }
    cudaError_t end() const
    {
        return is_alive ? cudaMemset(is_alive, 0, sizeof *is_alive) : cudaSuccess;
    }
    __device__ void require() const
    {
        if (is_alive && *is_alive == 0) __trap();
    }
#else
    cudaError_t begin()
    {
        return cudaSuccess;
    }
    cudaError_t end() const
    {
        return cudaSuccess;
    }
    __device__ void require() const
    {
    }
#endif
};

} // namespace hkv

#endif
