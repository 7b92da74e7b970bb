/* format.cuh - csrc/format.h in the shape of tensor-core fragments: a word of a plane is one A fragment of m16n8k16.
 *
 * Codes go to the tensor core as fp16 subnormals: the half 0x00cc is exactly cc * 2^-24. That needs no bias, which
 * matters, because a tensor core truncates what it adds up and a bias of 1024 would cost 3e-3 at 8K tokens.
 */
#ifndef HKV_CUDA_FORMAT_CUH
#define HKV_CUDA_FORMAT_CUH

#include "../csrc/format.h"
#include "../csrc/plan.h"
#include "ptx.cuh"

namespace hkv
{

constexpr int kBlockTokens = 64; /* the only block size of this backend */
constexpr int kTiles = kBlockTokens / HKV_TILE_TOKENS;
constexpr float kCodeUnit = 16777216.f; /* 2^24: a code is the subnormal times this */

/* High and low plane -> four pairs of 8-bit codes. 8 operations. */
__device__ __forceinline__ void unpack_codes(uint32_t high, uint32_t low, uint32_t (&a)[4])
{
    const uint32_t upper = select_bits(0xF0F0F0F0u, high, low >> 4); /* codes of the upper nibbles, one a byte */
    const uint32_t lower = select_bits(0xF0F0F0F0u, high << 4, low);
    a[0] = __byte_perm(upper, 0, 0x4240);
    a[1] = __byte_perm(upper, 0, 0x4341);
    a[2] = __byte_perm(lower, 0, 0x4240);
    a[3] = __byte_perm(lower, 0, 0x4341);
}
/* High plane alone -> 16 u in a[0], a[1] and u in a[2], a[3], where 16 u + 8 is the code read. 5 operations; whoever
 * multiplies balances the factor 16 between the two halves of k. */
__device__ __forceinline__ void unpack_nibbles(uint32_t high, uint32_t (&a)[4])
{
    const uint32_t odd = high >> 8;
    a[0] = high & 0x00f000f0u;
    a[1] = odd & 0x00f000f0u;
    a[2] = high & 0x000f000fu;
    a[3] = odd & 0x000f000fu;
}

/* The first 16 bytes of a record's header, which say what the record holds; at a 16-byte boundary. */
__device__ __forceinline__ hkv_record_header header_start(const uint8_t *record)
{
    static_assert(offsetof(hkv_record_header, bits) < 16, "all that says what a record holds");
    hkv_record_header header;
    *reinterpret_cast<uint4 *>(&header) = *reinterpret_cast<const uint4 *>(record);
    return header;
}

/* One element of a record as it reads back. */
__device__ inline float record_value(const hkv_format &f, const uint8_t *record, hkv_precision precision, int token,
                                     int channel, bool is_v)
{
    int32_t upper;
    const uint32_t at = is_v ? hkv_v_plane_offset(f.stored_dim, token, channel, &upper)
                             : hkv_k_plane_offset(f.stored_dim, token, channel, &upper);
    const bool both = is_v ? precision == HKV_READ_INT8 : precision != HKV_READ_INT4;
    const int shift = upper ? 4 : 0;
    int code = (record[(is_v ? f.v_high_offset : f.k_high_offset) + at] >> shift & 15) * 16 + 8;
    if (both) code += (record[(is_v ? f.v_low_offset : f.k_low_offset) + at] >> shift & 15) - 8;
    const uint16_t *params =
        reinterpret_cast<const uint16_t *>(record + (is_v ? f.v_params_offset : f.k_params_offset)) +
        (is_v ? hkv_v_param_index(&f, token, channel) : hkv_k_param_index(channel));
    return __fadd_rn(hkv_f16_to_f32(params[2]), __fmul_rn(hkv_f16_to_f32(params[0]), static_cast<float>(code)));
}
/* The bits of x in the model's dtype. */
__device__ inline uint16_t model_element(int dtype, float x)
{
    return dtype == HKV_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

/* One plane's words of a lane for four steps of 16 channels (two at the end where stored_dim % 64 = 32). */
__device__ __forceinline__ uint4 load_plane(const uint8_t *plane_tile, int step_group, int lane, bool is_short)
{
    const uint8_t *p = plane_tile + step_group * 512;
    if (is_short) {
        const uint2 v = *reinterpret_cast<const uint2 *>(p + lane * 8);
        return make_uint4(v.x, v.y, 0, 0);
    }
    return *reinterpret_cast<const uint4 *>(p + lane * 16);
}

} // namespace hkv

#endif
