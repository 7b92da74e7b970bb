/* backend_cuda.cu - a CUDA device as a backend: memory, the plan of a step, and the order of a layer's work.
 *
 * A step is launched on the caller's stream and never waits, allocates or reads anything back, so it can be captured.
 * A graph keeps what the host knew then: pointers, R, N, max_row_tokens, the query heads and whether the group may have
 * L2 records. Lengths, tables, slots and the clock are read on the device. Rows of the plan beyond R count as padding,
 * so a graph of a cache's attends also serves later steps of fewer rows and tokens.
 *
 * A step that the plan refuses writes nothing; what broke it is left in host memory that the device can write, and the
 * next begin that finds it there returns it instead of beginning. That needs no waiting, but the host may have begun
 * further steps by then.
 */
#include <cuda_runtime.h>

#include "begin.cuh"
#include "decode.cuh"
#include "device.cuh"
#include "format.cuh"
#include "launch.cuh"
#include "mass.cuh"
#include "prefetch.cuh"
#include "prefill.cuh"
#include "read.cuh"
#include "select.cuh"

namespace hkv
{
namespace
{

constexpr int kMinCapability = 80;
constexpr int kMaxGroup = 16;          /* query heads of a KV head, */
constexpr int kMaxQueryHeads = 128;    /* or more where there are few KV heads: as long as all are not more than this */
constexpr int kTypicalGroup = 4;       /* until the first attend tells */
constexpr int kNarrow = 8, kWide = 16; /* query columns of a tile */
constexpr size_t kUploadBytes = 64 << 10;
constexpr int kUploads = 32; /* under way at a time; one more waits for the oldest */
constexpr size_t kVectorBytes = 16;

/* ------------------------------------------------------------------------------------------------- state of a group */

/* What broke a step; on the host, written by the device. */
struct Refusal {
    volatile int32_t is_set;
    volatile int32_t value[4]; /* as hkv_plan.failure_value */
};

/* Pinned buffers that uploads take in turn. */
struct UploadRing {
    uint8_t *buffers; /* [kUploads, kUploadBytes] */
    cudaEvent_t done[kUploads];
    int n_events, next;
};

/* Pieces of the group's workspace. */
struct Workspace {
    Chunk *chunks;
    int32_t *schedule_words; /* [2] n_chunks, heads_per_chunk */
    uint8_t *partials;
    uint32_t *references;
    size_t partial_bytes, reference_bytes;
    uint8_t *prefill, *select;
    size_t select_bytes;
    uint32_t *read_mask; /* [max_rows, Hkv, mask_words] */
    uint32_t *told;      /* two of [max_rows, Hkv, mask_tiles, mask_words]: skipped, refined */
    int64_t mask_words;
    float *lse; /* [max_new_tokens, Hq], where the caller wants mass alone */
};

struct CudaGroup {
    int device;
    DecodeShape shapes[2][2]; /* [progressive][wide] */
    Workspace workspace;
    int max_chunks;
    Lifetime lifetime;
    Refusal *refusal, *refusal_on_device;
    UploadRing uploads;
    /* of the open step */
    const DecodeShape *shape;
    int group; /* query heads of a KV head that it was scheduled for, then of the latest attend */
};

CudaGroup *state_of(const hkv_group *group)
{
    return static_cast<CudaGroup *>(group->backend_state);
}

int max_group(const hkv_group *g)
{
    const int by_heads = kMaxQueryHeads / g->n_kv_heads;
    return by_heads > kMaxGroup ? by_heads : kMaxGroup;
}

/* ----------------------------------------------------------------------------------------------------------- memory */

int32_t count_devices(const char **reason)
{
    int n = 0, driver = 0;
    const cudaError_t status = cudaGetDeviceCount(&n);
    *reason = nullptr;
    if (status == cudaSuccess && n > 0) return n;
    (void)cudaGetLastError();
    if (status == cudaErrorInsufficientDriver && (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0))
        *reason = "there is no NVIDIA driver";
    else if (status == cudaErrorInsufficientDriver)
        *reason = "the NVIDIA driver is older than the CUDA version that hybridkv was built with";
    else if (status == cudaSuccess || status == cudaErrorNoDevice)
        *reason = "the NVIDIA driver shows no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)";
    else
        *reason = cudaGetErrorString(status);
    return 0;
}

hkv_status allocate(int32_t device_index, const hkv_allocator *, size_t n_bytes, void **ptr, hkv_error *error)
{
    const DeviceScope scope(device_index);
    HKV_TRY(check(scope.status(), "select the device", error));
    const cudaError_t status = cudaMalloc(ptr, n_bytes);
    if (status != cudaErrorMemoryAllocation) return check(status, "allocate device memory", error);
    size_t n_free = 0, n_total = 0;
    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&n_free, &n_total);
    return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for %zu bytes on CUDA device %d: %zu of %zu are free",
                         n_bytes, static_cast<int>(device_index), n_free, n_total);
}

void release(int32_t device_index, const hkv_allocator *, void *ptr, size_t)
{
    const DeviceScope scope(device_index);
    (void)cudaFree(ptr); /* waits for what still uses it */
}

/* Work of all streams, also of those that do not wait for the default stream, comes before and after. */
template <typename F> hkv_status run_apart(int32_t device_index, const char *what, hkv_error *error, F f)
{
    const DeviceScope scope(device_index);
    cudaError_t status = scope.status();
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = f();
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    return check(status, what, error);
}

hkv_status read_memory(int32_t device_index, void *host_dst, const void *device_src, size_t n_bytes, hkv_error *error)
{
    return run_apart(device_index, "copy from the device", error,
                     [=] { return cudaMemcpy(host_dst, device_src, n_bytes, cudaMemcpyDeviceToHost); });
}

hkv_status write_memory(int32_t device_index, void *device_dst, const void *host_src, size_t n_bytes, hkv_error *error)
{
    return run_apart(device_index, "copy to the device", error,
                     [=] { return cudaMemcpy(device_dst, host_src, n_bytes, cudaMemcpyHostToDevice); });
}

hkv_status fill_memory(int32_t device_index, void *device_dst, int value, size_t n_bytes, hkv_error *error)
{
    return run_apart(device_index, "fill device memory", error, [=] { return cudaMemset(device_dst, value, n_bytes); });
}

/* -------------------------------------------------------------------------------------------------------- workspace */

hkv_status check_group(const hkv_group *g, int32_t device_index, hkv_error *error)
{
    int major = 0, minor = 0;
    HKV_TRY(check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index), "ask for the device",
                  error));
    HKV_TRY(check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index), "ask for the device",
                  error));
    if (10 * major + minor < kMinCapability)
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "device",
                             "GPUs must have compute capability 8.0 or later; device %d has %d.%d",
                             static_cast<int>(device_index), major, minor);
    if (g->format.block_tokens != kBlockTokens)
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "block_size", "block_size must be %d on CUDA, got %d",
                             kBlockTokens, static_cast<int>(g->format.block_tokens));
    if (g->format.dtype == HKV_F32)
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "dtype",
                             "dtype must be float16 or bfloat16 on CUDA, got float32");
    if (g->n_kv_heads > INT16_MAX)
        return hkv_error_set(error, HKV_ERR_UNSUPPORTED, "n_kv_heads", "n_kv_heads must be at most %d on CUDA, got %d",
                             INT16_MAX, static_cast<int>(g->n_kv_heads));
    return HKV_OK;
}

hkv_status plan_shapes(const hkv_group *g, CudaGroup *c, hkv_error *error)
{
    for (int progressive = 0; progressive < 2; progressive++)
        for (int wide = 0; wide < 2; wide++)
            HKV_TRY(check(
                plan_decode(g->format, wide ? kWide : kNarrow, progressive != 0, 0, &c->shapes[progressive][wide]),
                "fit the decode kernel to the device", error));
    return HKV_OK;
}

/* Hands out pieces of the workspace; without a base it only counts. */
struct Carver {
    uint8_t *base;
    size_t used = 0;

    template <typename T> T *take(size_t n_bytes)
    {
        uint8_t *piece = base ? base + used : nullptr;
        used += (n_bytes + 127) / 128 * 128;
        return reinterpret_cast<T *>(piece);
    }
};

/* Column tiles of a row of n_new tokens in the progressive kernel. */
int mask_tiles(const CudaGroup *c, int n_new, int group)
{
    const int columns = c->shapes[1][0].columns;
    return (n_new * group + columns - 1) / columns;
}

/* Which records decode reads, skips and refines, for selection and for mass. There are none at bits 0. */
void carve_masks(const hkv_group *g, CudaGroup *c, Carver *carver)
{
    constexpr int64_t kBlocksPerWord = 32;
    const size_t n_row_heads = static_cast<size_t>(g->max_rows) * static_cast<size_t>(g->n_kv_heads);
    const size_t n_tiles = static_cast<size_t>(mask_tiles(c, HKV_DECODE_MAX_TOKENS, max_group(g)));
    Workspace *w = &c->workspace;
    w->lse = carver->take<float>(static_cast<size_t>(g->max_new_tokens) * static_cast<size_t>(g->n_kv_heads) *
                                 static_cast<size_t>(max_group(g)) * sizeof(float));
    if (g->format.bits == 0) return;
    w->mask_words = (g->max_sequence_tokens + kBlocksPerWord * kBlockTokens - 1) / (kBlocksPerWord * kBlockTokens);
    w->select_bytes = select_workspace_bytes(g->max_rows, g->n_kv_heads, w->mask_words);
    const size_t mask_bytes = n_row_heads * static_cast<size_t>(w->mask_words) * sizeof(uint32_t);
    w->select = carver->take<uint8_t>(w->select_bytes);
    w->read_mask = carver->take<uint32_t>(mask_bytes);
    w->told = carver->take<uint32_t>(2 * n_tiles * mask_bytes);
}

/* The one list of what the workspace holds. Chunks are split only where all of them are no more than kChunksPerWorker
 * for each worker, and only those that are need room for partial results. */
void carve_workspace(const hkv_group *g, CudaGroup *c, Carver *carver)
{
    Workspace *w = &c->workspace;
    w->partial_bytes = w->reference_bytes = 0;
    c->max_chunks = 0;
    for (const DecodeShape(&pair)[2] : c->shapes)
        for (const DecodeShape &shape : pair) {
            const int n_split = kChunksPerWorker * shape.n_workers;
            const int n = max_chunks(shape.n_workers, g->max_rows, g->n_kv_heads, HKV_DECODE_MAX_TOKENS * max_group(g),
                                     shape.columns);
            const size_t partials = decode_partial_bytes(shape, n_split);
            const size_t references = decode_reference_bytes(shape, n_split);
            c->max_chunks = n > c->max_chunks ? n : c->max_chunks;
            w->partial_bytes = partials > w->partial_bytes ? partials : w->partial_bytes;
            w->reference_bytes = references > w->reference_bytes ? references : w->reference_bytes;
        }
    w->chunks = carver->take<Chunk>(static_cast<size_t>(c->max_chunks) * sizeof(Chunk));
    w->schedule_words = carver->take<int32_t>(2 * sizeof(int32_t));
    w->partials = carver->take<uint8_t>(w->partial_bytes);
    w->references = carver->take<uint32_t>(w->reference_bytes);
    carve_masks(g, c, carver);
    w->prefill = carver->take<uint8_t>(prefill_workspace_bytes(g->format, g->n_kv_heads, max_group(g), g->max_rows,
                                                               static_cast<int>(g->max_new_tokens)));
}

hkv_status measure_workspace(const hkv_group *group, int32_t device_index, size_t *n_bytes, hkv_error *error)
{
    const DeviceScope scope(device_index);
    CudaGroup draft = {};
    Carver carver = {nullptr};
    HKV_TRY(check(scope.status(), "select the device", error));
    HKV_TRY(check_group(group, device_index, error));
    HKV_TRY(plan_shapes(group, &draft, error));
    carve_workspace(group, &draft, &carver);
    *n_bytes = carver.used;
    return HKV_OK;
}

/* ----------------------------------------------------------------------------------------------------------- groups */

void deinit_group(hkv_group *group, const hkv_allocator *host)
{
    CudaGroup *c = state_of(group);
    const DeviceScope scope(c->device);
    (void)cudaDeviceSynchronize();
    (void)c->lifetime.end();
    for (int i = 0; i < c->uploads.n_events; i++) (void)cudaEventDestroy(c->uploads.done[i]);
    if (c->uploads.buffers) (void)cudaFreeHost(c->uploads.buffers);
    if (c->refusal) (void)cudaFreeHost(c->refusal);
    (void)cudaGetLastError();
    hkv_release(host, c, sizeof *c);
    group->backend_state = nullptr;
}

hkv_status start_uploads(UploadRing *ring, hkv_error *error)
{
    HKV_TRY(
        check(cudaHostAlloc(reinterpret_cast<void **>(&ring->buffers), kUploads * kUploadBytes, cudaHostAllocDefault),
              "allocate pinned host memory", error));
    for (; ring->n_events < kUploads; ring->n_events++)
        HKV_TRY(check(cudaEventCreateWithFlags(&ring->done[ring->n_events], cudaEventDisableTiming), "create an event",
                      error));
    return HKV_OK;
}

hkv_status start_group(hkv_group *group, CudaGroup *c, hkv_error *error)
{
    const Workspace *w = &c->workspace;
    Carver carver = {static_cast<uint8_t *>(group->workspace)};
    HKV_TRY(plan_shapes(group, c, error));
    carve_workspace(group, c, &carver);
    c->group = kTypicalGroup;
    HKV_TRY(fill_memory(c->device, w->partials, 0xff, w->partial_bytes, error)); /* kAbsent */
    HKV_TRY(fill_memory(c->device, w->chunks, 0, static_cast<size_t>(c->max_chunks) * sizeof(Chunk), error));
    HKV_TRY(fill_memory(c->device, w->references, 0xff, w->reference_bytes, error));
    HKV_TRY(fill_memory(c->device, w->select, 0, w->select_bytes, error));
    HKV_TRY(check(cudaHostAlloc(reinterpret_cast<void **>(&c->refusal), sizeof *c->refusal, cudaHostAllocMapped),
                  "allocate pinned host memory", error));
    memset(c->refusal, 0, sizeof *c->refusal);
    HKV_TRY(check(cudaHostGetDevicePointer(reinterpret_cast<void **>(&c->refusal_on_device), c->refusal, 0),
                  "map host memory", error));
    HKV_TRY(check(c->lifetime.begin(), "allocate device memory", error));
    return start_uploads(&c->uploads, error);
}

hkv_status init_group(hkv_group *group, int32_t device_index, hkv_threads *, const char *, const hkv_allocator *host,
                      hkv_error *error)
{
    const DeviceScope scope(device_index);
    HKV_TRY(check(scope.status(), "select the device", error));
    CudaGroup *c = static_cast<CudaGroup *>(hkv_allocate(host, sizeof(CudaGroup), alignof(CudaGroup)));
    if (!c) return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for %zu bytes", sizeof(CudaGroup));
    memset(c, 0, sizeof *c);
    c->device = device_index;
    group->backend_state = c; /* what start_group leaves behind goes with it */
    return start_group(group, c, error);
}

/* ------------------------------------------------------------------------------------------------------------ begin */

/* Tell the host of a refused step, unless it has not yet heard of another, and clear the plan's rows beyond the step's,
 * which a captured graph of a larger step still looks at. */
__global__ void conclude_kernel(const __grid_constant__ hkv_plan plan, int n_rows, int max_rows, Refusal *refusal)
{
    wait_for_predecessor();
    let_successor_start();
    for (int row = n_rows + static_cast<int>(threadIdx.x); row < max_rows; row += static_cast<int>(blockDim.x))
        plan.rows[row] = {};
    if (threadIdx.x != 0 || *plan.failure == HKV_OK || refusal->is_set) return;
    for (int i = 0; i < 4; i++) refusal->value[i] = plan.failure_value[i];
    __threadfence_system();
    refusal->is_set = 1;
}

hkv_status report_refusal(CudaGroup *c, hkv_error *error)
{
    hkv_error cause;
    int32_t value[4];
    if (!c->refusal->is_set) return HKV_OK;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (int i = 0; i < 4; i++) value[i] = c->refusal->value[i];
    c->refusal->is_set = 0;
    const hkv_status status = hkv_plan_report(value, &cause);
    return hkv_error_set(error, status, cause.argument,
                         "a step before this one was refused on the device and wrote nothing: %s", cause.message);
}

/* The kernel for what is known of the step's rows. */
const DecodeShape *choose_shape(const hkv_group *g, const CudaGroup *c, const hkv_batch *batch)
{
    const bool progressive =
        g->format.bits != 0 && (g->config.skip_mass > 0 || g->config.refine_mass > 0 || g->may_have_l2);
    const int most =
        batch->max_row_tokens > 0 && batch->max_row_tokens <= HKV_DECODE_MAX_TOKENS ? batch->max_row_tokens : 1;
    return &c->shapes[progressive][c->group * most > kNarrow];
}

Schedule schedule_of(const CudaGroup *c)
{
    const Workspace &w = c->workspace;
    return {w.chunks, w.schedule_words, w.schedule_words + 1, c->shape->n_workers, c->max_chunks};
}

ScheduleInput schedule_input(const hkv_group *g, const CudaGroup *c, const hkv_batch *batch)
{
    const hkv_format &f = g->format;
    ScheduleInput input = {};
    input.plan = g->plan;
    input.n_rows = batch->n_rows;
    input.n_kv_heads = g->n_kv_heads;
    input.group = c->group;
    input.columns = c->shape->columns;
    input.window_tokens = g->window_tokens;
    if (f.bits != 0) input.page_weight = static_cast<int32_t>((f.row_page_bytes + f.record_bytes / 2) / f.record_bytes);
    return input;
}

hkv_status begin(hkv_group *group, const hkv_batch *batch, void *stream, hkv_error *error)
{
    CudaGroup *c = state_of(group);
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    const DeviceScope scope(c->device);
    HKV_TRY(check(scope.status(), "select the device", error));
    HKV_TRY(report_refusal(c, error));
    c->shape = choose_shape(group, c, batch);
    HKV_TRY(check(launch_begin(hkv_group_plan_job(group, batch), schedule_input(group, c, batch), schedule_of(c), s),
                  "launch the plan of a step", error));
    return check(launch_dependent(conclude_kernel, 1, 128, 0, s, group->plan, batch->n_rows, group->max_rows,
                                  c->refusal_on_device),
                 "launch the end of a plan", error);
}

/* ----------------------------------------------------------------------------------------------------------- attend */

hkv_status check_vectors(const char *name, const void *data, int64_t stride_token, int64_t stride_head,
                         hkv_error *error)
{
    const int64_t n_elements = kVectorBytes / sizeof(uint16_t);
    if (reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 && stride_token % n_elements == 0 &&
        stride_head % n_elements == 0)
        return HKV_OK;
    return hkv_error_set(error, HKV_ERR_ARGUMENT, name,
                         "%s must be 16-byte aligned on CUDA, with strides that are multiples of %d elements, got %p "
                         "with strides of %lld between tokens and %lld between heads",
                         name, static_cast<int>(n_elements), data, static_cast<long long>(stride_token),
                         static_cast<long long>(stride_head));
}

hkv_status check_attend(const hkv_group *g, const hkv_attend *a, hkv_error *error)
{
    HKV_TRY(check_vectors("k", a->k, a->k_stride_token, a->k_stride_head, error));
    HKV_TRY(check_vectors("v", a->v, a->v_stride_token, a->v_stride_head, error));
    if (!a->q) return HKV_OK;
    HKV_TRY(check_vectors("q", a->q, a->q_stride_token, a->q_stride_head, error));
    HKV_TRY(check_vectors("out", a->out, a->out_stride_token, a->out_stride_head, error));
    if (a->n_q_heads > max_group(g) * g->n_kv_heads)
        return hkv_error_set(
            error, HKV_ERR_UNSUPPORTED, "n_q_heads", "n_q_heads must be at most %d for %d KV heads on CUDA, got %d",
            max_group(g) * g->n_kv_heads, static_cast<int>(g->n_kv_heads), static_cast<int>(a->n_q_heads));
    return HKV_OK;
}

LayerView layer_view(const hkv_group *g, int32_t layer_idx)
{
    LayerView view = {};
    view.format = g->format;
    view.pages = g->layers[layer_idx];
    view.hot = hkv_group_hot_page(g, layer_idx, 0, 0);
    view.n_kv_heads = g->n_kv_heads;
    view.n_blocks = g->n_blocks;
    view.n_hot_pages = g->n_hot_pages;
    view.lifetime = state_of(g)->lifetime;
    return view;
}

NewTokens new_tokens(const hkv_attend *a)
{
    return {a->k, a->v, a->k_stride_token, a->k_stride_head, a->v_stride_token, a->v_stride_head};
}

/* The step was scheduled before it was known how many query heads there are. */
hkv_status schedule_again(const hkv_group *g, CudaGroup *c, const hkv_batch *batch, int group, cudaStream_t stream,
                          hkv_error *error)
{
    if (c->group == group) return HKV_OK;
    c->group = group;
    c->shape = choose_shape(g, c, batch);
    return check(launch_schedule(schedule_input(g, c, batch), schedule_of(c), stream), "launch a schedule", error);
}

DecodeParams decode_params(const hkv_group *g, const CudaGroup *c, const hkv_batch *batch, const LayerView &layer,
                           const hkv_attend *a)
{
    constexpr float kLog2e = 1.4426950408889634f;
    DecodeParams p = {};
    p.layer = layer;
    p.plan = g->plan;
    p.schedule = schedule_of(c);
    p.block_table = batch->block_table;
    p.block_table_stride = batch->block_table_stride;
    p.page_n_tokens = g->directory.page_n_tokens;
    p.block_step = g->directory.block_step;
    p.step = g->directory.step;
    p.tokens = new_tokens(a);
    p.q = a->q;
    p.out = a->out;
    p.q_stride_token = a->q_stride_token;
    p.q_stride_head = a->q_stride_head;
    p.out_stride_token = a->out_stride_token;
    p.out_stride_head = a->out_stride_head;
    p.sink_logits = a->sink_logits;
    p.lse = a->mass && !a->lse ? c->workspace.lse : a->lse;
    p.scale = a->softmax_scale * kLog2e;
    p.soft_cap = a->logits_soft_cap * kLog2e;
    p.group = c->group;
    p.window_tokens = g->window_tokens;
    p.skip_mass = g->config.skip_mass;
    p.refine_mass = g->config.refine_mass;
    p.counters = g->counters;
    p.partials = c->workspace.partials;
    p.references = c->workspace.references;
    return p;
}

/* Choose the L2 records to read, into the mask that decode then goes by. */
hkv_status select_records(const hkv_group *g, const CudaGroup *c, const hkv_batch *batch, DecodeParams *decode,
                          cudaStream_t stream, hkv_error *error)
{
    const Workspace &w = c->workspace;
    SelectParams p = {};
    p.layer = decode->layer;
    p.plan = decode->plan;
    p.n_rows = batch->n_rows;
    p.block_table = decode->block_table;
    p.block_table_stride = decode->block_table_stride;
    p.block_step = decode->block_step;
    p.step = decode->step;
    p.q = decode->q;
    p.q_stride_token = decode->q_stride_token;
    p.q_stride_head = decode->q_stride_head;
    p.scale = decode->scale;
    p.group = decode->group;
    p.window_tokens = g->window_tokens;
    p.top_k = g->config.sparse_top_k;
    p.min_mass = g->config.sparse_min_mass;
    p.counters = g->counters;
    p.read_mask = w.read_mask;
    p.mask_words = w.mask_words;
    p.workspace = w.select;
    decode->read_mask = w.read_mask;
    decode->mask_words = w.mask_words;
    return check(launch_select(p, stream), "launch selection", error);
}

/* Let decode tell which records it skipped and refined, for the masses of blocks. */
hkv_status clear_told(const hkv_group *g, const CudaGroup *c, const hkv_batch *batch, DecodeParams *decode,
                      cudaStream_t stream, hkv_error *error)
{
    const Workspace &w = c->workspace;
    const int n_new = batch->max_row_tokens > 0 && batch->max_row_tokens < HKV_DECODE_MAX_TOKENS
                          ? batch->max_row_tokens
                          : HKV_DECODE_MAX_TOKENS;
    decode->mask_tiles = mask_tiles(c, n_new, c->group);
    decode->mask_words = w.mask_words;
    const size_t n_words = static_cast<size_t>(batch->n_rows) * static_cast<size_t>(g->n_kv_heads) *
                           static_cast<size_t>(decode->mask_tiles) * static_cast<size_t>(w.mask_words);
    decode->skipped_mask = w.told;
    decode->refined_mask = w.told + n_words;
    return check(cudaMemsetAsync(w.told, 0, 2 * n_words * sizeof(uint32_t), stream), "clear masks", error);
}

/* What the host knows of a step's rows: whether some may be decoded, and some prefilled. */
bool may_decode(const hkv_batch *batch)
{
    return batch->n_rows > 1 || batch->n_new_tokens <= HKV_DECODE_MAX_TOKENS;
}
bool may_prefill(const hkv_batch *batch)
{
    const bool rows_are_short = batch->max_row_tokens > 0 && batch->max_row_tokens <= HKV_DECODE_MAX_TOKENS;
    return !rows_are_short && batch->n_new_tokens > HKV_DECODE_MAX_TOKENS;
}

hkv_status attend(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, const hkv_attend *args, hkv_error *error)
{
    CudaGroup *c = state_of(group);
    cudaStream_t s = static_cast<cudaStream_t>(args->stream);
    if (batch->n_new_tokens == 0) return HKV_OK;
    HKV_TRY(check_attend(group, args, error));
    const DeviceScope scope(c->device);
    HKV_TRY(check(scope.status(), "select the device", error));
    const LayerView layer = layer_view(group, layer_idx);
    if (args->q) HKV_TRY(schedule_again(group, c, batch, args->n_q_heads / group->n_kv_heads, s, error));
    HKV_TRY(check(launch_append(layer, group->plan, max_segments(batch->n_rows, batch->n_new_tokens), new_tokens(args),
                                batch->clock, s, group->counters),
                  "launch append", error));
    if (!args->q) return HKV_OK;
    DecodeParams decode = decode_params(group, c, batch, layer, args);
    if (c->shape->progressive && group->may_have_l2 && may_decode(batch))
        HKV_TRY(select_records(group, c, batch, &decode, s, error));
    if (c->shape->progressive && args->mass) HKV_TRY(clear_told(group, c, batch, &decode, s, error));
    if (may_decode(batch)) HKV_TRY(check(launch_decode(*c->shape, decode, s), "launch decode", error));
    if (may_prefill(batch))
        HKV_TRY(check(launch_prefill(prefill_of(decode, batch->n_rows, batch->n_new_tokens, c->workspace.prefill), s),
                      "launch prefill", error));
    if (!args->mass) return HKV_OK;
    return check(launch_mass({decode, batch->n_rows, args->mass, args->mass_stride}, s), "launch masses", error);
}

hkv_status prefetch_hot(hkv_group *group, const hkv_batch *batch, int32_t layer_idx, void *stream, hkv_error *error)
{
    const DeviceScope scope(state_of(group)->device);
    HKV_TRY(check(scope.status(), "select the device", error));
    return check(launch_prefetch_hot(layer_view(group, layer_idx), group->plan, batch->n_rows,
                                     group->directory.page_n_tokens, static_cast<cudaStream_t>(stream)),
                 "launch a prefetch", error);
}

/* ----------------------------------------------------------------------------------------------------- reading back */

hkv_status read_tokens(hkv_group *group, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                       int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error)
{
    ReadParams p = {};
    p.layer = layer_view(group, layer_idx);
    p.directory = group->directory;
    p.first_layer = group->layers[0];
    p.window_first =
        hkv_plan_window_first(static_cast<int32_t>(seq_len), group->config.hot_tokens, group->format.block_tokens);
    p.sink_blocks = group->config.sink_blocks;
    p.k = k_out;
    p.v = v_out;
    return run_apart(state_of(group)->device, "read tokens back", error,
                     [&] { return launch_read(p, block_table, first_token, n_tokens, nullptr); });
}

/* ---------------------------------------------------------------------------------------------------------- uploads */

hkv_status upload_piece(UploadRing *ring, uint8_t *dst, const uint8_t *src, size_t n_bytes, cudaStream_t stream,
                        hkv_error *error)
{
    uint8_t *buffer = ring->buffers + static_cast<size_t>(ring->next) * kUploadBytes;
    cudaEvent_t done = ring->done[ring->next];
    HKV_TRY(check(cudaEventSynchronize(done), "wait for an earlier upload", error)); /* at once if never recorded */
    memcpy(buffer, src, n_bytes);
    HKV_TRY(
        check(cudaMemcpyAsync(dst, buffer, n_bytes, cudaMemcpyHostToDevice, stream), "upload a step's tables", error));
    ring->next = (ring->next + 1) % kUploads;
    return check(cudaEventRecord(done, stream), "record an event", error);
}

hkv_status upload(hkv_group *group, void *device_dst, const void *host_src, size_t n_bytes, void *stream,
                  hkv_error *error)
{
    CudaGroup *c = state_of(group);
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const DeviceScope scope(c->device);
    HKV_TRY(check(scope.status(), "select the device", error));
    HKV_TRY(check(cudaStreamIsCapturing(s, &capture), "use the stream", error));
    if (capture != cudaStreamCaptureStatusNone)
        return hkv_error_set(error, HKV_ERR_STATE, "stream",
                             "a cache's step must begin before its stream is captured; only attends go into a graph");
    for (size_t done = 0; done < n_bytes; done += kUploadBytes) {
        const size_t n = n_bytes - done < kUploadBytes ? n_bytes - done : kUploadBytes;
        HKV_TRY(upload_piece(&c->uploads, static_cast<uint8_t *>(device_dst) + done,
                             static_cast<const uint8_t *>(host_src) + done, n, s, error));
    }
    return HKV_OK;
}

} // namespace
} // namespace hkv

/* ----------------------------------------------------------------------------------------------------------- vtable */

extern "C" __attribute__((visibility("default"))) const hkv_backend *hkv_backend_cuda(void)
{
    static const hkv_backend cuda = {
        .abi_version = HKV_BACKEND_ABI,
        .struct_size = sizeof(hkv_backend),
        .name = "cuda",
        .count_devices = hkv::count_devices,
        .measure_workspace = hkv::measure_workspace,
        .alloc = hkv::allocate,
        .release = hkv::release,
        .read = hkv::read_memory,
        .write = hkv::write_memory,
        .fill = hkv::fill_memory,
        .state_bytes = sizeof(hkv::CudaGroup),
        .group_init = hkv::init_group,
        .group_deinit = hkv::deinit_group,
        .begin = hkv::begin,
        .attend = hkv::attend,
        .prefetch_hot = hkv::prefetch_hot,
        .read_tokens = hkv::read_tokens,
        .upload = hkv::upload,
    };
    return &cuda;
}
