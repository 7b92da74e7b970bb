/* backend.h - what a device must provide. The CPU (backend_cpu.c) and CUDA (cuda/backend_cuda.cu) are two of these.
 *
 * A backend owns device memory and executes; it never decides. What is hot, claimed, sealed or evicted follows from
 * plan.h, which every backend compiles. store.c checks arguments and keeps the order of calls; the backend may assume
 * both. State that survives a step lives in hkv_group, in memory of the backend.
 */
#ifndef HKV_BACKEND_H
#define HKV_BACKEND_H

#include "format.h"
#include "hkv.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_BACKEND_ABI 1

/* Pages of one layer: record of (block, head) at base + block * block_stride_bytes + head * head_stride_bytes. */
typedef struct hkv_layer_pages {
    uint8_t *base;
    size_t block_stride_bytes;
    size_t head_stride_bytes;
} hkv_layer_pages;

HKV_INLINE uint8_t *hkv_layer_record(const hkv_layer_pages *layer, int32_t block, int32_t kv_head)
{
    return layer->base + (size_t)block * layer->block_stride_bytes + (size_t)kv_head * layer->head_stride_bytes;
}

/* One layer group on one device. Plain data: backends fill `device` memory pointers and read the rest. */
typedef struct hkv_group {
    hkv_config config;
    hkv_format format;
    int32_t n_layers, n_kv_heads;
    int32_t window_tokens; /* sliding window, 0 = none */
    int32_t n_blocks, n_hot_pages, max_rows;
    int64_t max_new_tokens;
    int64_t max_sequence_tokens; /* longest row; longer ones are refused */
    int32_t may_have_l2;         /* 0: no record of this group was ever put into L2 */
    hkv_layer_pages *layers;     /* [n_layers], host; base NULL = not bound yet */
    uint8_t *hot;                /* [n_layers, n_hot_pages, Hkv, row_page_bytes], device, 512-byte aligned */
    hkv_directory directory;     /* device */
    hkv_plan plan;               /* tables of the open step, device */
    void *workspace;             /* device scratch of workspace_bytes */
    size_t workspace_bytes;
    hkv_counters *counters; /* device; store.c adds them up on request */
    void *backend_state;    /* whatever the backend keeps per group */
} hkv_group;

/* Hot page of a layer and KV head. */
HKV_INLINE uint8_t *hkv_group_hot_page(const hkv_group *g, int32_t layer_idx, int32_t page, int32_t kv_head)
{
    return g->hot +
           (((size_t)layer_idx * (size_t)g->n_hot_pages + (size_t)page) * (size_t)g->n_kv_heads + (size_t)kv_head) *
               g->format.row_page_bytes;
}

/* What plan.h needs to know of a group and a batch. Layer 0 is bound. */
HKV_INLINE hkv_plan_job hkv_group_plan_job(const hkv_group *g, const hkv_batch *batch)
{
    hkv_plan_job job;
    job.hot_tokens = g->config.hot_tokens;
    job.sink_blocks = g->config.sink_blocks;
    job.block_tokens = g->format.block_tokens;
    job.is_quantized = g->format.bits != 0;
    job.n_blocks = g->n_blocks;
    job.n_pages = g->n_hot_pages;
    job.max_sequence_tokens = g->max_sequence_tokens;
    job.headers = g->layers[0].base;
    job.header_stride_bytes = g->layers[0].block_stride_bytes;
    job.directory = g->directory;
    job.plan = g->plan;
    job.batch = *batch;
    job.counters = g->counters;
    return job;
}

struct hkv_backend {
    uint32_t abi_version; /* HKV_BACKEND_ABI */
    size_t struct_size;   /* sizeof(hkv_backend) of the backend's build */
    const char *name;     /* "cpu", "cuda" */

    /* Devices present; 0 with *reason saying why there is none (constant text). */
    int32_t (*count_devices)(const char **reason);

    /* Device bytes for partial results and statistics of this group's largest step; HKV_ERR_UNSUPPORTED for a group
     * that the device cannot compute. */
    hkv_status (*measure_workspace)(const hkv_group *group, int32_t device_index, size_t *n_bytes, hkv_error *error);

    /* Device memory. alloc: 512-byte aligned, content undefined. Host copies are only used outside steps (creation,
     * tests, statistics): they come after all work that the device was given before, and are done on return. */
    hkv_status (*alloc)(int32_t device_index, const hkv_allocator *host, size_t n_bytes, void **ptr, hkv_error *error);
    void (*release)(int32_t device_index, const hkv_allocator *host, void *ptr, size_t n_bytes);
    hkv_status (*read)(int32_t device_index, void *host_dst, const void *device_src, size_t n_bytes, hkv_error *error);
    hkv_status (*write)(int32_t device_index, void *device_dst, const void *host_src, size_t n_bytes, hkv_error *error);
    hkv_status (*fill)(int32_t device_index, void *device_dst, int value, size_t n_bytes, hkv_error *error);

    /* Host bytes that group_init takes from its allocator, in one piece. */
    size_t state_bytes;
    /* Set up and tear down backend_state, after hkv_group's memory exists. */
    hkv_status (*group_init)(hkv_group *group, int32_t device_index, hkv_threads *threads, const char *cpu_path,
                             const hkv_allocator *host, hkv_error *error);
    void (*group_deinit)(hkv_group *group, const hkv_allocator *host);

    /* hkv_plan_step on the batch (device pointers), stream-ordered on devices; the result is group->plan. The CPU
     * returns the plan's failure at once (hkv_plan_report), a device at the next begin that finds it, which then does
     * nothing else. */
    hkv_status (*begin)(hkv_group *group, const hkv_batch *batch, void *stream, hkv_error *error);

    /* Append + attend of one layer under group->plan (docs/transitions.md, "Per layer"). */
    hkv_status (*attend)(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, const hkv_attend *args,
                         hkv_error *error);

    /* Bring the hot pages that the open step reads in one layer nearer, on a stream of its own if the caller likes;
     * NULL where that is no use. */
    hkv_status (*prefetch_hot)(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, void *stream,
                               hkv_error *error);

    /* Dequantise tokens of one row, as hkv_store_read_tokens: block_table on the host, k_out and v_out on the device.
     * After all work that the device was given before, and done on return. */
    hkv_status (*read_tokens)(hkv_group *group, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                              int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error);

    /* Managed mode on a device: copy a step's tables (host) to fixed device addresses without blocking the host; NULL
     * means that host pointers can be used as they are (the CPU). */
    hkv_status (*upload)(hkv_group *group, void *device_dst, const void *host_src, size_t n_bytes, void *stream,
                         hkv_error *error);
};

/* The CPU, always there. */
const hkv_backend *hkv_backend_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
