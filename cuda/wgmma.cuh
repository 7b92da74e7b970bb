/* wgmma.cuh - Hopper's warpgroup products (sm_90a): four warps multiply 64 rows held in registers with a tile in shared
 * memory, asynchronously.
 *
 * Accumulators d[n][4] are those of mma.m16n8k16 for each warp's 16 rows; A fragments too. Between issue and
 * wait_products neither may be touched; hold(d) after the wait keeps the compiler from reading them earlier.
 */
#ifndef HKV_CUDA_WGMMA_CUH
#define HKV_CUDA_WGMMA_CUH

#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HKV_HAS_WGMMA 1
#else
#define HKV_HAS_WGMMA 0
#endif

namespace hkv
{

#if HKV_HAS_WGMMA
#define HKV_TILE(d, n)  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define HKV_TILES(d, n) HKV_TILE(d, n), HKV_TILE(d, n + 1), HKV_TILE(d, n + 2), HKV_TILE(d, n + 3)
#define HKV_A(a)        "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define HKV_R32                                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
    "%30,%31"
#define HKV_R64                                                                                                        \
    HKV_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"    \
            "%57,%58,%59,%60,%61,%62,%63"
#define HKV_WGMMA(shape, type) "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " "
#endif

/* Descriptor of a tile in the 128-byte swizzle. leading: bytes from 64 columns to the next where columns are contiguous
 * (transposed B); unused otherwise. stride: bytes from eight rows to the next. */
__device__ __forceinline__ uint64_t swizzled_tile(uint32_t address, uint32_t leading, uint32_t stride)
{
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void fence_products()
{
#if HKV_HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products()
{
#if HKV_HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/* Until at most kPending groups are under way. */
template <int kPending> __device__ __forceinline__ void wait_products()
{
#if HKV_HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
template <int kTileCount> __device__ __forceinline__ void hold(float (&d)[kTileCount][4])
{
#pragma unroll
    for (int n = 0; n < kTileCount; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            asm volatile("" : "+f"(d[n][j])::"memory");
        }
}

/* If `wanted`, rows times factor[0] (d[n][0], d[n][1]) and factor[1]: in place. In C++ the branch would make copies of
 * accumulators, for which ptxas gives up running products beside other work (its remark C7511). */
__device__ __forceinline__ void scale_if(bool wanted, float (&d)[8][4], const float (&factor)[2])
{
#if HKV_HAS_WGMMA
#define HKV_SCALE(r0, r1, r2, r3)                                                                                      \
    "mul.f32 %" #r0 ", %" #r0 ", %32;\nmul.f32 %" #r1 ", %" #r1 ", %32;\nmul.f32 %" #r2 ", %" #r2                      \
    ", %33;\nmul.f32 %" #r3 ", %" #r3 ", %33;\n"
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %34, 0;\n@p bra kept_%=;\n" HKV_SCALE(0, 1, 2, 3)
                     HKV_SCALE(4, 5, 6, 7) HKV_SCALE(8, 9, 10, 11) HKV_SCALE(12, 13, 14, 15) HKV_SCALE(16, 17, 18, 19)
                         HKV_SCALE(20, 21, 22, 23) HKV_SCALE(24, 25, 26, 27) HKV_SCALE(28, 29, 30, 31) "kept_%=:\n}"
                 : HKV_TILES(d, 0), HKV_TILES(d, 4)
                 : "f"(factor[0]), "f"(factor[1]), "r"(static_cast<int>(wanted)));
#endif
}

/* What ordinary stores of this thread wrote to shared memory becomes visible to products. */
__device__ __forceinline__ void fence_stores_for_products()
{
#if HKV_HAS_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* Registers of this warpgroup's threads. */
template <int kRegisters> __device__ __forceinline__ void take_registers()
{
#if HKV_HAS_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters> __device__ __forceinline__ void give_registers()
{
#if HKV_HAS_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/* d (+)= a b for 64 columns; is_first: d is not read. transposed: b's columns, not its rows, are contiguous. */
template <bool kBf16, bool kTransposed>
__device__ __forceinline__ void multiply(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool is_first)
{
#if HKV_HAS_WGMMA
    if (kBf16)
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %37, 0;\n" HKV_WGMMA("m64n64k16",
                                                                            "bf16") "{" HKV_R32 "}, {%32,%33,%34,%35}, "
                                                                                    "%36, p, 1, 1, %38;\n}"
                     : HKV_TILES(d, 0), HKV_TILES(d, 4)
                     : HKV_A(a), "l"(b), "r"(static_cast<int>(is_first)), "n"(kTransposed));
    else
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %37, 0;\n" HKV_WGMMA("m64n64k16", "f16") "{" HKV_R32
                                                                                                "}, {%32,%33,%34,%35}, "
                                                                                                "%36, p, 1, 1, %38;\n}"
                     : HKV_TILES(d, 0), HKV_TILES(d, 4)
                     : HKV_A(a), "l"(b), "r"(static_cast<int>(is_first)), "n"(kTransposed));
#endif
}
/* The same for 64 + 8 columns, halves. */
__device__ __forceinline__ void multiply_more(float (&d)[8][4], float (&extra)[1][4], const uint32_t (&a)[4],
                                              uint64_t b, bool is_first)
{
#if HKV_HAS_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %41, 0;\n" HKV_WGMMA(
                     "m64n72k16", "f16") "{" HKV_R32 ",%32,%33,%34,%35}, {%36,%37,%38,%39}, %40, p, 1, 1, 0;\n}"
                 : HKV_TILES(d, 0), HKV_TILES(d, 4), HKV_TILE(extra, 0)
                 : HKV_A(a), "l"(b), "r"(static_cast<int>(is_first)));
#endif
}
/* The same for 128 columns. */
template <bool kBf16, bool kTransposed>
__device__ __forceinline__ void multiply(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool is_first)
{
#if HKV_HAS_WGMMA
    if (kBf16)
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %69, 0;\n" HKV_WGMMA(
                         "m64n128k16", "bf16") "{" HKV_R64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                     : HKV_TILES(d, 0), HKV_TILES(d, 4), HKV_TILES(d, 8), HKV_TILES(d, 12)
                     : HKV_A(a), "l"(b), "r"(static_cast<int>(is_first)), "n"(kTransposed));
    else
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %69, 0;\n" HKV_WGMMA(
                         "m64n128k16", "f16") "{" HKV_R64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                     : HKV_TILES(d, 0), HKV_TILES(d, 4), HKV_TILES(d, 8), HKV_TILES(d, 12)
                     : HKV_A(a), "l"(b), "r"(static_cast<int>(is_first)), "n"(kTransposed));
#endif
}

} // namespace hkv

#endif
