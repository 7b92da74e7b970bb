/* cpu_avx512.c - the AVX-512 path as a table. */
#include "cpu_avx512.h"

#if defined(__x86_64__)

static int32_t avx512_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("fma");
}

const hkv_cpu_kernels hkv_cpu_avx512 = {
    .name = "avx512",
    .supported = avx512_supported,
    .elements_to_f32 = hkv_avx512_elements_to_f32,
    .elements_from_f32 = hkv_avx512_elements_from_f32,
    .record_encode = hkv_avx512_record_encode,
    .record_decode = hkv_avx512_record_decode,
    .decode = hkv_avx512_decode,
    .prefill = hkv_avx512_prefill,
    .prefill_tile_tokens = HKV_AVX512_PREFILL_TILE,
    .record_bound = hkv_avx512_record_bound,
};

#endif
