/* cuda_select.cu - times of selection, masses and prefetching: graphs of launches over rotating caches (L2 is cold).
 *
 *   cuda_select [-o FILE.json] [NAME...]     rows whose name contains one of NAME; all without one
 */
#include "../cuda/mass.cuh"
#include "../cuda/prefetch.cuh"
#include "../cuda/select.cuh"
#include "cuda_timing.cuh"

using namespace harness;

namespace
{

Spec uniform(int rows, int older, int bits)
{
    Spec s;
    s.older.assign(rows, older + 32);
    s.n_new.assign(rows, 1);
    s.bits = bits;
    s.sink_blocks = 0;
    s.skip_mass = 1e-30f; /* selects the progressive kernel, the one that reads a mask */
    s.refine_mass = 1e30f;
    return s;
}

/* -------------------------------------------------------------------------------------------------------- selection */

/* Make every record L2, or only the share of them that a hash gives. */
__global__ void demote_kernel(hkv::LayerView layer, uint32_t per_1024)
{
    const int64_t n = int64_t(layer.n_blocks) * layer.n_kv_heads;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        hkv_record_header *h =
            reinterpret_cast<hkv_record_header *>(layer.record(int(i / layer.n_kv_heads), int(i % layer.n_kv_heads)));
        const uint32_t x = hash(uint32_t(i), 5u, 9u);
        h->tier = x % 1024 < per_1024 ? HKV_TIER_L2 : HKV_TIER_L1;
        h->mass_history = float(x >> 10) * 1e-9f;
    }
}

struct Selection {
    hkv::SelectParams p = {};
    DeviceArray<uint32_t> mask;
    DeviceArray<uint8_t> workspace;

    Selection(const Case &c, int top_k)
    {
        const Spec &s = c.spec();
        const hkv::DecodeParams d = c.params();
        p.mask_words = (c.max_blocks() + 31) / 32;
        mask = DeviceArray<uint32_t>(size_t(s.n_rows()) * s.n_kv_heads * p.mask_words);
        workspace = DeviceArray<uint8_t>(hkv::select_workspace_bytes(s.n_rows(), s.n_kv_heads, p.mask_words));
        workspace.fill(0);
        mask.fill(0);
        p.plan = d.plan;
        p.n_rows = s.n_rows();
        p.block_table = d.block_table;
        p.block_table_stride = d.block_table_stride;
        p.q = d.q;
        p.q_stride_token = d.q_stride_token;
        p.q_stride_head = d.q_stride_head;
        p.scale = d.scale;
        p.group = d.group;
        p.top_k = top_k;
        p.read_mask = mask.get();
        p.workspace = workspace.get();
    }
    void launch(const Case &c, int copy, cudaStream_t stream)
    {
        p.layer = c.layer(copy);
        CHECK_CUDA(hkv::launch_select(p, stream));
    }
};

void select_rows(Table &table, const std::string &name, Spec s, int top_k, uint32_t per_1024, double must, double aim)
{
    if (!table.is_wanted(name)) return;
    s.copies = copies_for(s);
    Case c(s);
    for (int i = 0; i < s.copies; i++) demote_kernel<<<1056, 256>>>(c.layer(i), per_1024);
    CHECK_CUDA(cudaDeviceSynchronize());
    Selection selection(c, top_k);
    hkv::DecodeParams &d = c.base_params();
    d.skipped_mask = d.refined_mask = nullptr;
    d.read_mask = selection.mask.get();
    d.mask_words = selection.p.mask_words;
    const int n = launches_for(s.copies);
    const double bytes =
        double(c.params().layer.n_blocks) * s.n_kv_heads * (64 + per_1024 / 1024. * 4 * c.format().stored_dim);
    table.add({"select " + name,
               time_graph(n, [&](int i, cudaStream_t stream) { selection.launch(c, i % s.copies, stream); }), 0, 0,
               bytes});
    table.add({"select + decode " + name,
               time_graph(n,
                          [&](int i, cudaStream_t stream) {
                              selection.launch(c, i % s.copies, stream);
                              c.launch(i % s.copies, stream);
                          }),
               must, aim, 0});
    table.add({"decode with that mask " + name,
               time_graph(n, [&](int i, cudaStream_t stream) { c.launch(i % s.copies, stream); }), 0, 0, 0});
}

/* ----------------------------------------------------------------------------------------------------------- masses */

void mass_row(Table &table, const std::string &name, Spec s)
{
    if (!table.is_wanted("mass " + name)) return;
    s.skip_mass = s.refine_mass = 0;
    s.copies = copies_for(s);
    Case c(s);
    c.launch(0); /* some lse */
    const int64_t stride = c.max_blocks();
    DeviceArray<float> mass(size_t(s.n_rows()) * s.n_kv_heads * stride);
    const int n = launches_for(s.copies);
    const double us = time_graph(n, [&](int i, cudaStream_t stream) {
        CHECK_CUDA(hkv::launch_mass({c.params(i % s.copies), s.n_rows(), mass.get(), stride}, stream));
    });
    const hkv_format &f = c.format();
    const double record = f.v_params_offset + (s.bits == 4 ? 0.0 : double(f.plane_bytes));
    table.add({"mass " + name, us, 0, 0, double(c.params().layer.n_blocks) * s.n_kv_heads * record});
}

/* --------------------------------------------------------------------------------------------------------- prefetch */

/* Reads n 16-byte words: experts whose weights are used once. */
__global__ void __launch_bounds__(1024, 2) experts_kernel(const uint4 *weights, size_t n, int *sink)
{
    uint32_t x = 0;
    const size_t stride = size_t(gridDim.x) * 1024;
    for (size_t i = blockIdx.x * size_t(1024) + threadIdx.x; i < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = i + j * stride < n ? __ldcs(weights + i + j * stride) : uint4{};
#pragma unroll
        for (int j = 0; j < 4; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (x == 0x12345678u) *sink = 1;
}
/* A router: a few microseconds in which memory has nothing to do. */
__global__ void router_kernel(int64_t clocks)
{
    const int64_t begin = clock64();
    while (clock64() - begin < clocks) {
    }
}

/* A layer of a mixture of experts, then the next layer's attention: how much shorter is it if the hot pages are
 * prefetched on another stream while the router runs? */
void prefetch_rows(Table &table, const std::string &name, Spec s, int hot_tokens, double expert_mb)
{
    if (!table.is_wanted("prefetch " + name)) return;
    s.skip_mass = s.refine_mass = 0;
    s.hot_tokens = hot_tokens;
    s.sink_blocks = 1;
    s.copies = copies_for(s);
    Case c(s);
    c.base_params().counters = nullptr;
    const size_t n_words = size_t(expert_mb * 1e6 / 16);
    const int n_weights = std::max(1, int(2e9 / (expert_mb * 1e6)));
    DeviceArray<uint4> weights(n_words * n_weights);
    DeviceArray<int> sink(1);
    weights.fill(1);
    cudaStream_t side;
    cudaEvent_t fork, join;
    CHECK_CUDA(cudaStreamCreate(&side));
    CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    enum { kNoAttention, kPlain, kPrefetch };
    const auto chain = [&](int kind) {
        return [&, kind](int i, cudaStream_t stream) {
            const hkv::DecodeParams p = c.params(i % s.copies);
            if (kind == kPrefetch) {
                CHECK_CUDA(cudaEventRecord(fork, stream));
                CHECK_CUDA(cudaStreamWaitEvent(side, fork));
                CHECK_CUDA(hkv::launch_prefetch_hot(p.layer, p.plan, s.n_rows(), p.page_n_tokens, side));
                CHECK_CUDA(cudaEventRecord(join, side));
            }
            router_kernel<<<1, 32, 0, stream>>>(4000);
            experts_kernel<<<264, 1024, 0, stream>>>(weights.get() + i % n_weights * n_words, n_words, sink.get());
            if (kind == kPrefetch) CHECK_CUDA(cudaStreamWaitEvent(stream, join));
            if (kind != kNoAttention) c.launch(i % s.copies, stream);
        };
    };
    const int n = launches_for(s.copies);
    TimedGraph none(n, chain(kNoAttention)), plain(n, chain(kPlain)), with(n, chain(kPrefetch));
    double times[3] = {1e30, 1e30, 1e30}; /* alternating, the best of four medians */
    for (int round = 0; round < 4; round++) {
        times[0] = std::min(times[0], none.median() / n);
        times[1] = std::min(times[1], plain.median() / n);
        times[2] = std::min(times[2], with.median() / n);
    }
    table.add({"prefetch " + name + ": router + experts", times[0], 0, 0, 0});
    table.add({"prefetch " + name + ": + attention", times[1], 0, 0, 0});
    table.add({"prefetch " + name + ": + attention, prefetched", times[2], 0, 0, 0});
    CHECK_CUDA(cudaEventDestroy(fork));
    CHECK_CUDA(cudaEventDestroy(join));
    CHECK_CUDA(cudaStreamDestroy(side));
}

} // namespace

int main(int argc, char **argv)
{
    Table table(argc, argv);
    select_rows(table, "B1x128K, all L2, 128 of 2048", uniform(1, 131072, 8), 128, 1024, 22, 17);
    select_rows(table, "B32x8K, all L2, 32 of 128", uniform(32, 8192, 8), 32, 1024, 0, 0);
    select_rows(table, "B32x8K, no L2", uniform(32, 8192, 8), 32, 0, 0, 0);
    mass_row(table, "INT8 B1x128K", uniform(1, 131072, 8));
    mass_row(table, "INT8 B32x8K", uniform(32, 8192, 8));
    prefetch_rows(table, "B1x8K, hot 32, experts 75 MB", uniform(1, 8192, 8), 32, 75);
    prefetch_rows(table, "B1x8K, hot 128, experts 352 MB", uniform(1, 8192, 8), 128, 352);
    prefetch_rows(table, "B32x2K, hot 32, experts 20 MB", uniform(32, 2048, 8), 32, 20);
    prefetch_rows(table, "B32x2K, hot 128, experts 75 MB", uniform(32, 2048, 8), 128, 75);
    prefetch_rows(table, "B32x8K, hot 32, experts 352 MB", uniform(32, 8192, 8), 32, 352);
    return table.write_json() ? 0 : 1;
}
