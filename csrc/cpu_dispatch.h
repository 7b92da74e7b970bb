/* cpu_dispatch.h - which CPU code path runs. */
#ifndef HKV_CPU_DISPATCH_H
#define HKV_CPU_DISPATCH_H

#include "cpu_kernels.h"

/* Path path_idx of hkv_cpu_n_paths(), NULL out of range. */
const hkv_cpu_kernels *hkv_cpu_path(int32_t path_idx);

/* The path called `name`; for NULL the one that the environment variable HYBRIDKV_CPU names, else the best that this
 * machine runs. HKV_ERR_ARGUMENT (cpu_path): no such path. HKV_ERR_UNSUPPORTED: not on this machine. */
hkv_status hkv_cpu_find_path(const char *name, const hkv_cpu_kernels **kernels, hkv_error *error);

#endif
