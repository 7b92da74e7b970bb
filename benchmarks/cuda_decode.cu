/* cuda_decode.cu - times of the CUDA kernels: graphs of launches over rotating caches, so that L2 is cold.
 *
 *   cuda_decode [-o FILE.json] [NAME...]     rows whose name contains one of NAME; all without one
 *
 * Every decode time includes merging partial results; append, begin and schedule have rows of their own. "read" is a
 * plain read of the same number of bytes in the same harness. Error is relative to double precision on the stored
 * values.
 */
#include "cuda_timing.cuh"
#include "../tests/cuda/plan_check.cuh"

using namespace harness;

namespace
{

/* ------------------------------------------------------------------------------------------------------------ ceilings
 */

__global__ void __launch_bounds__(1024, 2) read_kernel(const uint4 *p, size_t n, int *sink)
{
    uint32_t x = 0;
    const size_t stride = size_t(gridDim.x) * 1024;
    for (size_t i = blockIdx.x * size_t(1024) + threadIdx.x; i < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = i + j * stride < n ? __ldcs(p + i + j * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (x == 0x12345678u) *sink = 1;
}
void time_reads(Table &table)
{
    const size_t total = size_t(4) << 30;
    DeviceArray<uint8_t> memory(total);
    DeviceArray<int> sink(1);
    fill_kernel<<<1056, 256>>>(
        {reinterpret_cast<uint16_t *>(memory.get()), int64_t(total / 2 / 128), 1, 128, HKV_F16, 3, 1.f, false});
    CHECK_CUDA(cudaDeviceSynchronize());
    for (double mb : {572.5, 438.0, 304.0, 142.0, 18.7, 9.1}) {
        const size_t n = size_t(mb * 1e6 / 16), copies = std::min<size_t>(24, total / (n * 16));
        const double us = time_graph(int(copies * std::max<size_t>(1, 20 / copies)), [&](int i, cudaStream_t s) {
            read_kernel<<<264, 1024, 0, s>>>(reinterpret_cast<const uint4 *>(memory.get()) + size_t(i) % copies * n, n,
                                             sink.get());
        });
        char name[64];
        std::snprintf(name, sizeof name, "read %.1f MB", mb);
        table.add({name, us, 0, 0, double(n) * 16, -1, ""});
    }
}

/* -------------------------------------------------------------------------------------------------------------- decode
 */

Spec uniform(int rows, int older, int bits)
{
    Spec s;
    s.older.assign(rows, older + 32); /* records of `older` tokens, and a hot zone of 32 */
    s.n_new.assign(rows, 1);
    s.bits = bits;
    s.sink_blocks = 0;
    return s;
}
double time_decode(const Case &c)
{
    const int copies = c.spec().copies;
    return time_graph(launches_for(copies), [&](int i, cudaStream_t s) { c.launch(i % copies, s); });
}
double error_of(Case &c)
{
    c.poison_output();
    c.launch(0);
    CHECK_CUDA(cudaDeviceSynchronize());
    const Reference want = reference(c);
    return relative_error(c.output(), want.out, c.spec().dtype, want.unsure);
}
void decode_row(Table &table, const std::string &name, Spec s, double must, double aim, int blocks_per_sm = 0,
                bool with_error = true)
{
    if (!table.is_wanted(name)) return;
    s.copies = copies_for(s);
    Case c(s, blocks_per_sm);
    c.base_params().counters = nullptr;
    const double us = time_decode(c);
    const double error = with_error ? error_of(c) : -1;
    char note[128];
    std::snprintf(note, sizeof note, "%d chunks, %d stages, %d blocks an SM", c.n_chunks(), c.shape().n_stages,
                  c.shape().blocks_per_sm);
    table.add({name, us, must, aim, c.bytes(), error, note});
}

/* Given shares of the records are skipped and refined: by the default thresholds where keys are graded, else by
 * bisection over what the kernel counts. */
void progressive_row(Table &table, const std::string &name, Spec s, double skipped, double refined, double must,
                     double aim)
{
    if (!table.is_wanted(name)) return;
    s.copies = copies_for(s);
    s.skip_mass = s.refine_mass = 0.5f;
    s.low_share = float(skipped);
    s.high_share = float(refined);
    Case c(s);
    const auto share_below = [&](float threshold, bool of_skipped) {
        c.base_params().skip_mass = of_skipped ? threshold : 0.f;
        c.base_params().refine_mass = of_skipped ? 1e30f : threshold;
        c.clear_counters();
        c.launch(0);
        const hkv_counters n = c.counters();
        return double(of_skipped ? n.n_records_skipped : n.n_records_read - n.n_records_refined) /
               double(n.n_records_read);
    };
    const auto find = [&](double share, bool of_skipped) {
        float low = 1e-6f, high = 1e6f;
        for (int i = 0; i < 40; i++) {
            const float middle = std::sqrt(low * high);
            (share_below(middle, of_skipped) < share ? low : high) = middle;
        }
        return high;
    };
    if (s.values == Values::kGraded) {
        c.base_params().skip_mass = 1e-3f;
        c.base_params().refine_mass = 0.05f;
    } else {
        const float skip = find(skipped, true), refine = find(1 - refined, false);
        c.base_params().skip_mass = skip;
        c.base_params().refine_mass = refine;
    }
    c.clear_counters();
    c.launch(0);
    const hkv_counters n = c.counters();
    c.base_params().skipped_mask = c.base_params().refined_mask = nullptr;
    const double us = time_decode(c);
    char note[192];
    std::snprintf(note, sizeof note, "%d chunks, %d stages, skipped %.3f refined %.3f, %.0f bytes a record",
                  c.n_chunks(), c.shape().n_stages, double(n.n_records_skipped) / n.n_records_read,
                  double(n.n_records_refined) / n.n_records_read, double(n.n_bytes_read) / n.n_records_read);
    table.add({name, us, must, aim, double(n.n_bytes_read), -1, note});
}

/* --------------------------------------------------------------------------------------------------- append, begin */

/* A plan whose segments add one token to every row of a case, at this offset of the last block; one at its end seals.
 */
struct AppendPlan {
    AppendPlan(const Case &c, int offset) : segments(make_segments(c, offset)), counts(make_counts(c))
    {
        plan.is_appended = counts.get() + 2;
        plan.segments = segments.get();
        plan.n_segments = counts.get();
        plan.n_victims = counts.get() + 1;
    }
    static std::vector<hkv_segment> make_segments(const Case &c, int offset)
    {
        const Spec &s = c.spec();
        std::vector<hkv_segment> all;
        for (int r = 0; r < s.n_rows(); r++) {
            hkv_segment g = {};
            g.row = r;
            g.first_token = r;
            g.n_tokens = 1;
            g.offset = offset;
            g.seal = offset == hkv::kBlockTokens - 1;
            g.stamp = 5;
            g.restore_page = -1;
            g.page = c.page_of(r, s.older[r] / hkv::kBlockTokens);
            g.block = r + 1;
            all.push_back(g);
        }
        return all;
    }
    static std::vector<int32_t> make_counts(const Case &c)
    {
        return {c.spec().n_rows(), 0, 0};
    }
    void launch(const Case &c, int copy, cudaStream_t stream) const
    {
        CHECK_CUDA(hkv::launch_append(c.layer(copy), plan, c.spec().n_rows(), c.params().tokens, nullptr, stream));
    }

    hkv_plan plan = {};
    DeviceArray<hkv_segment> segments;
    DeviceArray<int32_t> counts;
};

void append_rows(Table &table)
{
    const char *names[] = {"append B32", "append B32, all rows seal"};
    if (!table.is_wanted(names[0]) && !table.is_wanted(names[1])) return;
    Spec s = uniform(32, 8192 + 31, 8);
    s.copies = 8;
    Case c(s);
    for (bool seal : {false, true}) {
        const AppendPlan append(c, seal ? 63 : 31);
        const double us = time_graph(64, [&](int i, cudaStream_t stream) { append.launch(c, i % s.copies, stream); });
        table.add({names[seal], us, seal ? 6.0 : 3.0, seal ? 4.0 : 2.0, 0, -1, ""});
    }
}

/* What a layer of a model launches: append, then decode. */
void attend_row(Table &table, const std::string &name, Spec s)
{
    if (!table.is_wanted(name)) return;
    s.copies = copies_for(s);
    Case c(s);
    c.base_params().counters = nullptr;
    const AppendPlan append(c, s.older[0] % hkv::kBlockTokens);
    const double us = time_graph(launches_for(s.copies), [&](int i, cudaStream_t stream) {
        append.launch(c, i % s.copies, stream);
        c.launch(i % s.copies, stream);
    });
    char note[64];
    std::snprintf(note, sizeof note, "decode alone %.2f us", time_decode(c));
    table.add({name, us, 0, 0, c.bytes(), -1, note});
}

/* Decode steps of rows that all go on in a hot block. A step that no layer carries out is undone by the next one, so
 * begin is timed with an append of one layer and KV head after it, less that append alone. */
void begin_row(Table &table, const std::string &name, int n_rows, int length, double must, double aim)
{
    if (!table.is_wanted(name)) return;
    const int width = ceil_div(length, 64), n_blocks = n_rows * width + 1;
    const plan_check::Shape shape = {n_rows, n_blocks, 2 * n_rows, 32, 0, width, n_rows, 0, true};
    std::vector<uint8_t> memory(plan_check::Tables(shape, nullptr).bytes);
    plan_check::Tables host(shape, memory.data());
    std::vector<int32_t> ids(n_blocks - 1);
    for (int i = 0; i < n_blocks - 1; i++) ids[i] = i + 1;
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    std::copy(ids.begin(), ids.end(), const_cast<int32_t *>(host.job.batch.block_table));
    for (int r = 0; r <= n_rows; r++) const_cast<int32_t *>(host.job.batch.cu_new_tokens)[r] = r;
    for (int r = 0; r < n_rows; r++) {
        const_cast<int32_t *>(host.job.batch.seq_lens)[r] = length;
        const_cast<int64_t *>(host.job.batch.slot_mapping)[r] =
            int64_t(ids[r * width + width - 1]) * 64 + (length - 1) % 64;
    }
    std::fill_n(host.job.directory.block_page, n_blocks, -1);
    std::fill_n(host.job.directory.page_block, 2 * n_rows, -1);
    *host.job.directory.next_stamp = 1;
    DeviceArray<uint8_t> device_memory(memory);
    plan_check::Tables device(shape, device_memory.get());
    device.job.batch.n_rows = device.job.batch.n_new_tokens = n_rows;

    hkv::LayerView layer = {};
    hkv_format_init(&layer.format, 8, 64, 128, HKV_BF16);
    DeviceArray<uint8_t> pages(size_t(2) * n_rows * layer.format.row_page_bytes);
    DeviceArray<uint16_t> rows(size_t(n_rows) * 128);
    rows.fill(0);
    layer.pages = {device.headers, device.job.header_stride_bytes, 0};
    layer.hot = pages.get();
    layer.n_kv_heads = 1;
    const hkv::NewTokens tokens = {rows.get(), rows.get(), 128, 128, 128, 128};
    const auto begin = [&](cudaStream_t stream) {
        CHECK_CUDA(hkv::launch_begin(device.job, device.schedule_input(0), device.schedule, stream));
    };
    const auto append = [&](cudaStream_t stream) {
        CHECK_CUDA(hkv::launch_append(layer, device.job.plan, n_rows, tokens, nullptr, stream));
    };
    const double both = time_graph(64, [&](int, cudaStream_t stream) {
        begin(stream);
        append(stream);
    });
    const double without = time_graph(64, [&](int, cudaStream_t stream) { append(stream); });
    table.add({name, both - without, must, aim, 0, -1, "schedule included"});
    const double schedule = time_graph(64, [&](int, cudaStream_t stream) {
        CHECK_CUDA(hkv::launch_schedule(device.schedule_input(0), device.schedule, stream));
    });
    table.add({"schedule alone, " + name, schedule, 0, 0, 0, -1, ""});
}

} // namespace

int main(int argc, char **argv)
{
    Table table(argc, argv);

    if (table.is_wanted("read")) time_reads(table);
    decode_row(table, "INT8 B32x8K", uniform(32, 8192, 8), 135, 132);
    decode_row(table, "INT8 B8x32K", uniform(8, 32768, 8), 138, 133);
    decode_row(table, "INT8 B1x128K", uniform(1, 131072, 8), 73, 67);
    decode_row(table, "K8V4 B32x8K", uniform(32, 8192, 6), 113, 104);
    decode_row(table, "INT4 B32x8K", uniform(32, 8192, 4), 81, 73);
    decode_row(table, "INT4 B1x128K", uniform(1, 131072, 4), 46, 38);
    decode_row(table, "INT8 B4x2K", uniform(4, 2048, 8), 12, 9.5);
    decode_row(table, "INT8 B1x4K", uniform(1, 4096, 8), 8.5, 7);
    decode_row(table, "INT4 B4x2K", uniform(4, 2048, 4), 0, 0);
    decode_row(table, "INT4 B1x4K", uniform(1, 4096, 4), 0, 0);
    decode_row(table, "bits0 B32x8K", uniform(32, 8192, 0), 256, 245);
    {
        Spec s = uniform(32, 4096, 8);
        s.older[11] = 65536 + 32;
        hkv_format f;
        hkv_format_init(&f, 8, 64, 128, HKV_BF16);
        const double floor = (65536 + 31 * 4096) / 64.0 * 8 * f.record_bytes / 4.53e6;
        decode_row(table, "INT8 skewed 64K + 31x4K", s, 1.15 * floor + 6, 1.05 * floor + 5);
    }
    const auto graded = [](Spec s) {
        s.values = Values::kGraded;
        return s;
    };
    progressive_row(table, "progressive B32x8K 55/12", graded(uniform(32, 8192, 8)), 0.55, 0.12, 80, 66);
    progressive_row(table, "progressive B1x128K 90/3", graded(uniform(1, 131072, 8)), 0.90, 0.03, 36, 26);
    progressive_row(table, "progressive B32x8K 55/0", graded(uniform(32, 8192, 8)), 0.55, 0.0, 0, 0);
    progressive_row(table, "progressive B32x8K 100/0", graded(uniform(32, 8192, 8)), 1.0, 0.0, 0, 0);
    progressive_row(table, "progressive B1x128K 100/0", graded(uniform(1, 131072, 8)), 1.0, 0.0, 0, 0);
    progressive_row(table, "progressive B32x8K 55/12, N(0,1)", uniform(32, 8192, 8), 0.55, 0.12, 0, 0);
    progressive_row(table, "progressive B1x128K 90/3, N(0,1)", uniform(1, 131072, 8), 0.90, 0.03, 0, 0);
    append_rows(table);
    attend_row(table, "append + decode, INT8 B32x8K", uniform(32, 8192, 8));
    attend_row(table, "append + decode, INT8 B1x4K", uniform(1, 4096, 8));
    begin_row(table, "begin B32x8K", 32, 8192 + 33, 10, 5);
    begin_row(table, "begin B1x128K", 1, 131072 + 33, 0, 0);
    begin_row(table, "begin B256x8K", 256, 8192 + 33, 0, 0);
    return table.write_json() ? 0 : 1;
}
