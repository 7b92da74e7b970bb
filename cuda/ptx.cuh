/* ptx.cuh - the instructions that C++ has no words for, one small function each.
 *
 * Everything builds for sm_80 and up. Hopper's bulk copies and dependent launches have a stand-in below sm_90 with the
 * same contract (cp.async by all lanes; nothing), so that kernels are written once.
 */
#ifndef HKV_CUDA_PTX_CUH
#define HKV_CUDA_PTX_CUH

#include <stdint.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HKV_HAS_BULK 1
#else
#define HKV_HAS_BULK 0
#endif

namespace hkv
{

constexpr unsigned kFullWarp = 0xffffffffu;

/* What seldom happens goes out of the way of what often does: instruction caches are small. */
__device__ __forceinline__ bool unlikely(bool condition)
{
    return __builtin_expect(condition, false);
}

/* --------------------------------------------------------------------------------------------------- bits and maths */

__device__ __forceinline__ uint32_t bits_of(__half2 h)
{
    return *reinterpret_cast<uint32_t *>(&h);
}
__device__ __forceinline__ __half2 half2_of(uint32_t u)
{
    return *reinterpret_cast<__half2 *>(&u);
}
__device__ __forceinline__ uint32_t pack_half2(float lo, float hi)
{
    return bits_of(__floats2half2_rn(lo, hi));
}
__device__ __forceinline__ uint32_t pack_bf162(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}
__device__ __forceinline__ float2 unpack_half2(uint32_t u)
{
    return __half22float2(half2_of(u));
}
__device__ __forceinline__ float2 unpack_bf162(uint32_t u)
{
    return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u));
}
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b)
{
    return bits_of(__hmul2(half2_of(a), half2_of(b)));
}
/* 2^x and log2 x, a few ulp; exp2f(-inf) = 0. */
__device__ __forceinline__ float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fast_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* Bit by bit: mask ? a : b. */
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
    return y;
}

/* ----------------------------------------------------------------------------------------------------- tensor cores */

/* D[16 x 8] += A[16 x 16] B[16 x 8]. Lane (r = lane / 4, c = lane % 4) holds
 *   A: a[0] row r, columns 2c, 2c+1; a[1] row r+8; a[2], a[3] the same, columns +8
 *   B: b0 rows 2c, 2c+1 of column r; b1 rows +8          D: d[0], d[1] row r, columns 2c, 2c+1; d[2], d[3] row r+8 */
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* Transpose an 8 x 8 matrix of 16-bit elements held two a lane (row lane / 4, columns 2 (lane % 4), +1). */
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
/* Four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8. */
template <bool kTranspose> __device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t address)
{
    if (kTranspose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address)
                     : "memory");
}

/* ---------------------------------------------------------------------------------- barriers and copies into shared */

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int n_arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
/* Wait until the phase of this parity has completed. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
#if HKV_HAS_BULK
    asm volatile(
        "{\n.reg .pred done;\nwait_%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra end_%=;\nbra wait_%=;\nend_%=:\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred done;\nwait_%=:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@done bra end_%=;\nbra wait_%=;\nend_%=:\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
#endif
}

/* Barriers that copies complete on are initialised with this many arrivals. */
constexpr int kCopyArrivals = HKV_HAS_BULK ? 1 : 33;

#if HKV_HAS_BULK
/* By one thread. What is copied so is read once a step and more than L2 holds: it shall not push out what every launch
 * begins with. */
__device__ __forceinline__ void start_bulk_copy(uint32_t dst, const void *src, uint32_t n_bytes, uint32_t barrier)
{
    asm volatile("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], policy;\n}" ::"r"(dst),
                 "l"(src), "r"(n_bytes), "r"(barrier)
                 : "memory");
}
#endif

/* By a whole warp: start copying n_bytes (a multiple of 16, 0 allowed; both addresses 16-byte aligned) to shared
 * memory; `barrier` completes its phase when they are there. What lane 0 wrote before is visible to who waited for it.
 */
__device__ __forceinline__ void copy_to_shared(uint32_t dst, const void *src, uint32_t n_bytes, uint32_t barrier,
                                               int lane)
{
#if HKV_HAS_BULK
    if (lane != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
    if (n_bytes) start_bulk_copy(dst, src, n_bytes, barrier);
#else
#pragma unroll 1
    for (uint32_t i = 16 * static_cast<uint32_t>(lane); i < n_bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + i),
                     "l"(static_cast<const uint8_t *>(src) + i)
                     : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
    if (lane == 0) barrier_arrive(barrier);
#endif
}

/* The same of pieces that lie apart, a lane's each (n_bytes 0: none), n_total bytes together. */
__device__ __forceinline__ void copy_pieces_to_shared(uint32_t dst, const void *src, uint32_t n_bytes, uint32_t n_total,
                                                      uint32_t barrier, int lane)
{
#if HKV_HAS_BULK
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_total) : "memory");
    __syncwarp();
    if (n_bytes) start_bulk_copy(dst, src, n_bytes, barrier);
#else
#pragma unroll 1
    for (unsigned left = __ballot_sync(kFullWarp, n_bytes > 0); left; left &= left - 1) {
        const int from = __ffs(static_cast<int>(left)) - 1;
        const uint32_t to = __shfl_sync(kFullWarp, dst, from), n = __shfl_sync(kFullWarp, n_bytes, from);
        const auto *bytes = reinterpret_cast<const uint8_t *>(
            __shfl_sync(kFullWarp, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(src)), from));
#pragma unroll 1
        for (uint32_t i = 16 * static_cast<uint32_t>(lane); i < n; i += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(bytes + i) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
    if (lane == 0) barrier_arrive(barrier);
#endif
}

/* What this thread read and wrote in shared memory comes before copies that are started after the next barrier. */
__device__ __forceinline__ void fence_copies()
{
#if HKV_HAS_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* A barrier among n_threads of a block, apart from __syncthreads (id 0). */
__device__ __forceinline__ void named_barrier(int id, int n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* After barrier_init, before the barriers' first use. */
__device__ __forceinline__ void fence_barrier_init()
{
#if HKV_HAS_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* ----------------------------------------------------------------------------------------------- dependent launches */

/* Rule of this library: a kernel lets its successor start only after its own wait. Before its wait a kernel may
 * therefore read what the kernel before its predecessor wrote, and nothing newer. Decode alone starts its successor
 * earlier: what follows it (another layer's append, begin, prefill, masses) waits before it does anything. */
__device__ __forceinline__ void wait_for_predecessor()
{
#if HKV_HAS_BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start()
{
#if HKV_HAS_BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---------------------------------------------------------------------------------------------------- global memory */

/* Words that pass between blocks of one launch, each complete in itself; kAbsent is what no word is set to. */
constexpr uint32_t kAbsent = 0xffffffffu;
__device__ __forceinline__ uint32_t load_shared_word(const uint32_t *p)
{
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared_word(uint32_t *p, uint32_t x)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 load_shared_words(const void *p)
{
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_shared_words(void *p, uint4 x)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* By a whole warp: bring n_bytes (a multiple of 16, from a 16-byte boundary) into L2. */
__device__ __forceinline__ void prefetch_to_l2(const void *src, uint32_t n_bytes, int lane)
{
#if HKV_HAS_BULK
    if (lane == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(n_bytes) : "memory");
#else
    for (uint32_t i = 128 * static_cast<uint32_t>(lane); i < n_bytes; i += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t *>(src) + i));
#endif
}

} // namespace hkv

#endif
