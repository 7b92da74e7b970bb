/* cpu_dispatch.c - the table of CPU code paths. */
#include "cpu_dispatch.h"

#include <stdlib.h>

#include "internal.h"

static const hkv_cpu_kernels *const cpu_paths[] = {
    &hkv_cpu_reference,
#if defined(__x86_64__)
    &hkv_cpu_avx2,
    &hkv_cpu_avx512,
#endif
};

int32_t hkv_cpu_n_paths(void)
{
    return (int32_t)(sizeof cpu_paths / sizeof *cpu_paths);
}

const hkv_cpu_kernels *hkv_cpu_path(int32_t path_idx)
{
    return path_idx >= 0 && path_idx < hkv_cpu_n_paths() ? cpu_paths[path_idx] : NULL;
}

const char *hkv_cpu_path_name(int32_t path_idx)
{
    const hkv_cpu_kernels *path = hkv_cpu_path(path_idx);
    return path ? path->name : NULL;
}

int32_t hkv_cpu_path_supported(int32_t path_idx)
{
    const hkv_cpu_kernels *path = hkv_cpu_path(path_idx);
    return path && path->supported();
}

static const hkv_cpu_kernels *best_path(void)
{
    int32_t path_idx = hkv_cpu_n_paths() - 1;
    while (!hkv_cpu_path_supported(path_idx)) path_idx--; /* ends at the reference, which runs everywhere */
    return cpu_paths[path_idx];
}

hkv_status hkv_cpu_find_path(const char *name, const hkv_cpu_kernels **kernels, hkv_error *error)
{
    const char *origin = "cpu_path";
    if (!name) {
        name = getenv("HYBRIDKV_CPU");
        origin = "HYBRIDKV_CPU";
    }
    if (!name || !*name) {
        *kernels = best_path();
        return HKV_OK;
    }
    for (int32_t i = 0; i < hkv_cpu_n_paths(); i++) {
        if (strcmp(name, cpu_paths[i]->name) != 0) continue;
        if (!cpu_paths[i]->supported())
            return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "cpu_path", "%s is \"%s\", which this machine cannot run",
                                 origin, name);
        *kernels = cpu_paths[i];
        return HKV_OK;
    }
    return hkv_error_set(error, HKV_ERR_ARGUMENT, "cpu_path", "%s must be reference, avx2 or avx512, not \"%s\"",
                         origin, name);
}
