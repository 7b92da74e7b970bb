/* fake_cuda.c - a "CUDA" backend for machines without a GPU: the CPU one, whose host memory passes for a device's.
 *
 * The Python tests put it beside the extension to see what the layers above do for a device: where tensors must lie,
 * which stream their producers are given, what is kept alive, and what a captured graph keeps of the step in which it
 * was captured: like a graph of kernels, a recorded call has its arguments by value and what they point to as it is
 * when it is replayed.
 */
#include <string.h>

#include "backend.h"

#define PUBLIC __attribute__((visibility("default")))

enum { MAX_CALLS = 64 };

/* A begin (args.k NULL) or an attend of the one graph there is. */
typedef struct recorded_call {
    hkv_group *group;
    hkv_batch batch;
    int32_t layer_idx;
    hkv_attend args;
} recorded_call;

static recorded_call calls[MAX_CALLS];
static int n_calls, is_recording;
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

static hkv_status record(const recorded_call *call)
{
    if (n_calls == MAX_CALLS) return HKV_ERR_NO_MEMORY;
    calls[n_calls++] = *call;
    return HKV_OK;
}

/* Rows beyond the step's count as padding, for a graph of a larger step. */
static hkv_status begin(hkv_group *group, const hkv_batch *batch, void *stream, hkv_error *error)
{
    if (is_recording) return record(&(recorded_call){.group = group, .batch = *batch});
    hkv_status status = hkv_backend_cpu()->begin(group, batch, stream, error);
    for (int32_t r = batch->n_rows; r < group->max_rows; r++)
        memset(&group->plan.rows[r], 0, sizeof group->plan.rows[r]);
    return status;
}

static hkv_status attend(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, const hkv_attend *args,
                         hkv_error *error)
{
    if (is_recording) return record(&(recorded_call){group, *batch, layer_idx, *args});
    return hkv_backend_cpu()->attend(group, batch, layer_idx, args, error);
}

/* 1: record instead of computing, from the beginning; 0: compute again. */
PUBLIC void fake_cuda_record(int recording)
{
    is_recording = recording;
    if (recording) n_calls = 0;
}

/* Run what was recorded; the number of calls, or the status of the first that failed. */
PUBLIC int fake_cuda_replay(void)
{
    hkv_error error;
    for (int i = 0; i < n_calls; i++) {
        const recorded_call *call = &calls[i];
        hkv_status status = call->args.k ? attend(call->group, &call->batch, call->layer_idx, &call->args, &error)
                                         : begin(call->group, &call->batch, NULL, &error);
        if (status != HKV_OK) return (int)status;
    }
    return n_calls;
}

PUBLIC const hkv_backend *hkv_backend_cuda(void)
{
    fake = *hkv_backend_cpu();
    fake.name = "cuda";
    fake.count_devices = count_devices;
    fake.upload = upload;
    fake.begin = begin;
    fake.attend = attend;
    return &fake;
}
