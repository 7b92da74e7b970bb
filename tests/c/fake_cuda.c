/* fake_cuda.c - a "CUDA" backend for machines without a GPU: the CPU one, whose host memory passes for a device's.
 *
 * test_cuda_binding.py puts it beside the extension, to see what the binding does for a device: where tensors must lie,
 * which stream their producers are given, what is kept alive.
 */
#include <string.h>

#include "backend.h"

static hkv_backend fake;

static int32_t count_devices(const char **reason)
{
    *reason = "";
    return 2;
}

static hkv_status upload(hkv_group *group, void *device_dst, const void *host_src, size_t n_bytes, void *stream,
                         hkv_error *error)
{
    (void)group, (void)stream, (void)error;
    memcpy(device_dst, host_src, n_bytes);
    return HKV_OK;
}

__attribute__((visibility("default"))) const hkv_backend *hkv_backend_cuda(void)
{
    fake = *hkv_backend_cpu();
    fake.name = "cuda";
    fake.count_devices = count_devices;
    fake.upload = upload;
    return &fake;
}
