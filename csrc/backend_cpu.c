/* backend_cpu.c - the CPU as a backend: memory, the plan of a step, and the order of a layer's work. */
#define _DEFAULT_SOURCE

#include <sys/mman.h>

#include "backend.h"
#include "cpu_dispatch.h"
#include "cpu_step.h"
#include "internal.h"

enum {
    HUGE_PAGE = 2 << 20,
    HUGE_FROM = 8 << 20 /* allocations from here on are worth huge pages */
};

/* What the backend keeps per group. */
typedef struct cpu_device {
    const hkv_cpu_kernels *kernels;
    hkv_threads *threads;
} cpu_device;

/* --------------------------------------------------------------------------------------------------------- memory */

static int32_t cpu_count_devices(const char **reason)
{
    *reason = NULL;
    return 1;
}

static hkv_status cpu_alloc(int32_t device_index, const hkv_allocator *host, size_t n_bytes, void **ptr,
                            hkv_error *error)
{
    bool is_huge = !host && n_bytes >= HUGE_FROM; /* an allocator's memory is laid out by its owner */
    (void)device_index;
    *ptr = hkv_allocate(host, n_bytes, is_huge ? HUGE_PAGE : HKV_HOT_ALIGN);
    if (!*ptr) return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for %zu bytes", n_bytes);
#ifdef MADV_HUGEPAGE
    if (is_huge) (void)madvise(*ptr, n_bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); /* only a wish */
#endif
    return HKV_OK;
}

static void cpu_release(int32_t device_index, const hkv_allocator *host, void *ptr, size_t n_bytes)
{
    (void)device_index;
    hkv_release(host, ptr, n_bytes);
}

static hkv_status cpu_copy(int32_t device_index, void *dst, const void *src, size_t n_bytes, hkv_error *error)
{
    (void)device_index;
    (void)error;
    if (n_bytes > 0) memcpy(dst, src, n_bytes);
    return HKV_OK;
}

static hkv_status cpu_fill(int32_t device_index, void *dst, int value, size_t n_bytes, hkv_error *error)
{
    (void)device_index;
    (void)error;
    if (n_bytes > 0) memset(dst, value, n_bytes);
    return HKV_OK;
}

/* ---------------------------------------------------------------------------------------------------------- groups */

static hkv_status cpu_measure_workspace(const hkv_group *group, int32_t device_index, size_t *n_bytes, hkv_error *error)
{
    (void)device_index;
    (void)error;
    *n_bytes = hkv_cpu_append_workspace(group);
    if (hkv_cpu_decode_workspace(group) > *n_bytes) *n_bytes = hkv_cpu_decode_workspace(group);
    if (hkv_cpu_prefill_workspace(group) > *n_bytes) *n_bytes = hkv_cpu_prefill_workspace(group);
    return HKV_OK;
}

static hkv_status cpu_group_init(hkv_group *group, int32_t device_index, hkv_threads *threads, const char *cpu_path,
                                 const hkv_allocator *host, hkv_error *error)
{
    const hkv_cpu_kernels *kernels;
    cpu_device *device;
    if (device_index != 0)
        return hkv_error_set(error, HKV_ERR_NO_DEVICE, "device_index", "device_index must be 0 on the CPU, not %d",
                             device_index);
    HKV_TRY(hkv_cpu_find_path(cpu_path, &kernels, error));
    device = hkv_allocate(host, sizeof *device, sizeof(void *));
    if (!device) return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for %zu bytes", sizeof *device);
    device->kernels = kernels;
    device->threads = threads;
    group->backend_state = device;
    return HKV_OK;
}

static void cpu_group_deinit(hkv_group *group, const hkv_allocator *host)
{
    hkv_release(host, group->backend_state, sizeof(cpu_device));
    group->backend_state = NULL;
}

/* ----------------------------------------------------------------------------------------------------------- steps */

/* Scratch of a decode row's blocks is sized by the pool, and more blocks than there are cannot differ. Blocks outside a
 * sliding window may have left the pool. */
static hkv_status check_lengths(const hkv_group *group, const hkv_batch *batch, hkv_error *error)
{
    for (int32_t r = 0; r < batch->n_rows; r++) {
        int32_t length = batch->seq_lens[r], n_new = batch->cu_new_tokens[r + 1] - batch->cu_new_tokens[r];
        int32_t n_seen = hkv_cpu_n_blocks(&group->format, length) - hkv_cpu_first_block(group, (int64_t)length - n_new);
        if (n_new <= HKV_DECODE_MAX_TOKENS && n_seen > group->n_blocks)
            return hkv_error_set(error, HKV_ERR_RANGE, "seq_lens",
                                 "seq_lens[%d] = %d must not reach over more than the %d blocks of the pool", r, length,
                                 group->n_blocks);
    }
    return HKV_OK;
}

static hkv_status cpu_begin(hkv_group *group, const hkv_batch *batch, void *stream, hkv_error *error)
{
    int32_t shared[HKV_TEAM_WORDS];
    const hkv_team team = {.lane = 0, .n_lanes = 1, .shared = shared};
    const hkv_plan_job job = hkv_group_plan_job(group, batch);
    (void)stream;
    HKV_TRY(check_lengths(group, batch, error));
    hkv_plan_step(&job, &team);
    return *group->plan.failure == HKV_OK ? HKV_OK : hkv_plan_report(group->plan.failure_value, error);
}

static void clear_mass(const hkv_group *group, const hkv_batch *batch, const hkv_attend *args)
{
    size_t n_heads = (size_t)batch->n_rows * (size_t)group->n_kv_heads;
    if (args->mass) memset(args->mass, 0, n_heads * (size_t)args->mass_stride * sizeof(float));
}

static hkv_status cpu_attend(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, const hkv_attend *args,
                             hkv_error *error)
{
    const cpu_device *device = group->backend_state;
    const hkv_cpu_step step = {
        .group = group,
        .kernels = device->kernels,
        .threads = device->threads,
        .batch = batch,
        .args = args,
        .layer = &group->layers[layer_idx],
        .layer_idx = layer_idx,
        .group_heads = args->n_q_heads / group->n_kv_heads,
    };
    (void)error;
    if (*group->plan.n_segments > 0) *group->plan.is_appended = 1;
    hkv_cpu_append(&step);
    if (!args->q) return HKV_OK;
    clear_mass(group, batch, args);
    hkv_cpu_decode_rows(&step);
    hkv_cpu_prefill_rows(&step);
    return HKV_OK;
}

/* --------------------------------------------------------------------------------------------------- reading back */

/* Hot page from which a row of length seq_len would read logical block `block`, physical `physical`; -1 = none. */
static int32_t valid_page(const hkv_group *group, int64_t seq_len, int32_t block, int32_t physical)
{
    const hkv_directory *directory = &group->directory;
    int32_t page = directory->block_page[physical];
    int32_t window_first =
        hkv_plan_window_first((int32_t)seq_len, group->config.hot_tokens, group->format.block_tokens);
    const uint8_t *record = hkv_layer_record(&group->layers[0], physical, 0);
    if (block >= group->config.sink_blocks && block < window_first) return -1;
    if (page < 0 || directory->page_block[page] != physical) return -1;
    return ((const hkv_record_header *)record)->stamp == directory->page_stamp[page] ? page : -1;
}

/* K and V of one token of one head, [D] in the model's dtype; zeros where nothing is held. */
static void read_token(const hkv_group *group, int32_t layer_idx, int32_t physical, int32_t page, int32_t kv_head,
                       int32_t token, void *k, void *v)
{
    const hkv_format *f = &group->format;
    const uint8_t *record = hkv_layer_record(&group->layers[layer_idx], physical, kv_head);
    float k_row[HKV_MAX_HEAD_DIM], v_row[HKV_MAX_HEAD_DIM];
    if (f->bits == 0 && physical != 0) {
        hkv_row_load(f, record, token, k, v);
    } else if (page >= 0 && token < group->directory.page_n_tokens[page]) {
        hkv_row_load(f, hkv_group_hot_page(group, layer_idx, page, kv_head), token, k, v);
    } else if (page < 0 && physical != 0 && f->bits != 0 && token < hkv_cpu_record_n_tokens(f, record)) {
        hkv_precision precision = hkv_record_precision(((const hkv_record_header *)record)->planes);
        hkv_record_decode(f, record, precision, token, 1, k_row, v_row);
        hkv_elements_from_f32((hkv_dtype)f->dtype, k_row, f->head_dim, k);
        hkv_elements_from_f32((hkv_dtype)f->dtype, v_row, f->head_dim, v);
    } else {
        memset(k, 0, (size_t)f->head_dim * (size_t)f->element_bytes);
        memset(v, 0, (size_t)f->head_dim * (size_t)f->element_bytes);
    }
}

static hkv_status cpu_read_tokens(hkv_group *group, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                                  int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    const hkv_format *f = &group->format;
    size_t row_bytes = (size_t)f->head_dim * (size_t)f->element_bytes, row = 0;
    (void)error;
    for (int64_t position = first_token; position < first_token + n_tokens; position++) {
        int32_t block = (int32_t)(position / f->block_tokens), physical = block_table[block];
        int32_t page = f->bits == 0 ? -1 : valid_page(group, seq_len, block, physical);
        for (int32_t kv_head = 0; kv_head < group->n_kv_heads; kv_head++, row++)
            read_token(group, layer_idx, physical, page, kv_head, (int32_t)(position % f->block_tokens),
                       (uint8_t *)k_out + row * row_bytes, (uint8_t *)v_out + row * row_bytes);
    }
    return HKV_OK;
}

/* ---------------------------------------------------------------------------------------------------------- vtable */

const hkv_backend *hkv_backend_cpu(void)
{
    static const hkv_backend cpu = {
        .abi_version = HKV_BACKEND_ABI,
        .struct_size = sizeof(hkv_backend),
        .name = "cpu",
        .count_devices = cpu_count_devices,
        .measure_workspace = cpu_measure_workspace,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .read = cpu_copy,
        .write = cpu_copy,
        .fill = cpu_fill,
        .state_bytes = sizeof(cpu_device),
        .group_init = cpu_group_init,
        .group_deinit = cpu_group_deinit,
        .begin = cpu_begin,
        .attend = cpu_attend,
        .prefetch_hot = NULL, /* one layer's hot pages are gone from a CPU's caches by the time they are read */
        .read_tokens = cpu_read_tokens,
        .upload = NULL, /* host pointers serve as they are */
    };
    return &cpu;
}
