/* divide.cuh - division of small numbers. The compiler's own takes some 20 instructions in a row, 150 cycles. */
#ifndef HKV_CUDA_DIVIDE_CUH
#define HKV_CUDA_DIVIDE_CUH

namespace hkv
{

/* n / d for 0 <= n < 2^20: (n + 1/2) / d is at least 1 / 2d away from every integer, farther than it is rounded. */
class Divisor
{
  public:
    __device__ __forceinline__ explicit Divisor(int d)
    {
        inverse_ = __fdividef(1.f, static_cast<float>(d));
    }
    __device__ __forceinline__ int divide(int n) const
    {
        return static_cast<int>((static_cast<float>(n) + 0.5f) * inverse_);
    }

  private:
    float inverse_;
};

} // namespace hkv

#endif
