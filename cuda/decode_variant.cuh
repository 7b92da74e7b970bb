/* decode_variant.cuh - a decode kernel and what it needs, for the host's side of decode.cu. */
#ifndef HKV_CUDA_DECODE_VARIANT_CUH
#define HKV_CUDA_DECODE_VARIANT_CUH

#include "decode.cuh"

namespace hkv
{

struct Variant {
    void (*kernel)(DecodeParams);
    int columns; /* of a tile */
    int n_threads;
    int blocks_per_sm; /* that it was compiled for */
    size_t partial_bytes;
    int fixed_bytes; /* of shared memory, besides the ring */
    int stage_bytes; /* of the ring */
    int max_stages;
};

__host__ __device__ constexpr int round_up(int n, int unit)
{
    return (n + unit - 1) / unit * unit;
}

/* decode_progressive.cu. */
Variant find_progressive_variant(const hkv_format &format);

} // namespace hkv

#endif
