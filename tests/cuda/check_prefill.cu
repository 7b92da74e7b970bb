/* check_prefill.cu - prefill attention against double precision on the stored values.
 *
 *   check_prefill          everything
 *   check_prefill quick    a few small cases, for compute-sanitizer
 *
 * Every case also checks that outputs of other rows and the bytes around all outputs stay as they are, and that two
 * runs give the same bits. Caches are poisoned with NaN wherever nothing was written.
 */
#include "harness.cuh"

#include "../../cuda/prefill.cuh"

using namespace harness;

namespace
{

constexpr int kGuard = 64, kPad = 24;    /* elements around all outputs, and behind each token's */
constexpr uint16_t kUntouched = 0x7eadu; /* a NaN in both dtypes that no kernel writes */

/* Outputs in strided memory with guards. */
class Outputs
{
  public:
    explicit Outputs(const Spec &spec)
        : spec_(spec), q_heads_(spec.n_kv_heads * spec.group), stride_(q_heads_ * spec.dim + kPad),
          out_(std::vector<uint16_t>(size_t(spec.n_tokens()) * stride_ + 2 * kGuard, kUntouched)),
          lse_(std::vector<float>(size_t(spec.n_tokens()) * q_heads_, -12345.f))
    {
    }
    void place(hkv::PrefillParams *p) const
    {
        p->out = out_.get() + kGuard;
        p->out_stride_token = stride_;
        p->out_stride_head = spec_.dim;
        p->lse = lse_.get();
    }
    void read()
    {
        host_ = out_.host();
        host_lse_ = lse_.host();
    }
    const uint16_t *at(int token, int q_head) const
    {
        return &host_[kGuard + size_t(token) * stride_ + size_t(q_head) * spec_.dim];
    }
    float lse(int token, int q_head) const
    {
        return host_lse_[size_t(token) * q_heads_ + q_head];
    }
    /* Guards, padding and rows that are not prefilled. */
    bool others_untouched() const
    {
        std::vector<char> is_output(host_.size(), 0);
        for (int r = 0, token = 0; r < spec_.n_rows(); r++)
            for (int t = 0; t < spec_.n_new[r]; t++, token++) {
                if (spec_.n_new[r] <= HKV_DECODE_MAX_TOKENS) {
                    if (lse(token, 0) != -12345.f) return false;
                    continue;
                }
                const size_t first = kGuard + size_t(token) * stride_;
                std::fill(&is_output[first], &is_output[first] + size_t(q_heads_) * spec_.dim, 1);
            }
        for (size_t i = 0; i < host_.size(); i++)
            if (!is_output[i] && host_[i] != kUntouched) return false;
        return true;
    }
    bool operator==(const Outputs &other) const
    {
        return host_ == other.host_ && host_lse_ == other.host_lse_;
    }

  private:
    Spec spec_;
    int q_heads_;
    size_t stride_;
    DeviceArray<uint16_t> out_;
    DeviceArray<float> lse_;
    std::vector<uint16_t> host_;
    std::vector<float> host_lse_;
};

hkv::PrefillParams prefill_params(const Case &c)
{
    return hkv::prefill_of(c.params(), c.spec().n_rows(), c.spec().n_tokens(), nullptr);
}

/* Launch into fresh outputs. */
Outputs run(const Case &c, hkv::PrefillParams p)
{
    Outputs outputs(c.spec());
    DeviceArray<uint8_t> workspace(
        hkv::prefill_workspace_bytes(c.format(), c.spec().n_kv_heads, c.spec().group, p.n_rows, p.n_new_tokens));
    workspace.fill(0xff);
    outputs.place(&p);
    p.workspace = workspace.get();
    CHECK_CUDA(hkv::launch_prefill(p, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    outputs.read();
    return outputs;
}

std::string describe(const Spec &s)
{
    char text[256];
    std::snprintf(text, sizeof text, "bits %d D %d %s heads %dx%d rows %d older %d.. new %d..%s%s%s%s hot %d+%d %s",
                  s.bits, s.dim, s.dtype == HKV_BF16 ? "bf16" : "f16", s.n_kv_heads, s.group, s.n_rows(), s.older[0],
                  s.n_new[0], s.hot_pages ? "" : " no pages", s.window_tokens ? " window" : "",
                  s.soft_cap > 0 ? " cap" : "", s.sink_logits ? " sinks" : "", s.hot_tokens, s.sink_blocks,
                  name_of(s.values));
    return text;
}

/* The largest relative error of any batch row, and the largest error of an lse. NaN counts as 1. */
void compare(const Spec &s, const Outputs &got, const Reference &want, double *error, double *lse_error)
{
    const int q_heads = s.n_kv_heads * s.group;
    *error = *lse_error = 0;
    for (int r = 0, first = 0; r < s.n_rows(); first += s.n_new[r++]) {
        if (s.n_new[r] <= HKV_DECODE_MAX_TOKENS) continue;
        double sum = 0, norm = 0;
        for (int t = first; t < first + s.n_new[r]; t++)
            for (int h = 0; h < q_heads; h++) {
                const double *x = &want.out[(size_t(t) * q_heads + h) * s.dim];
                const double d = std::fabs(got.lse(t, h) - want.lse[size_t(t) * q_heads + h]);
                *lse_error = d == d ? std::max(*lse_error, d) : 1;
                for (int i = 0; i < s.dim; i++) {
                    const double e = from_bits(got.at(t, h)[i], s.dtype) - x[i];
                    sum += e * e;
                    norm += x[i] * x[i];
                }
            }
        const double e = std::sqrt(sum / norm);
        *error = e == e ? std::max(*error, e) : 1;
    }
}

void check_case(const Spec &spec)
{
    const Case c(spec);
    const Reference want = reference(c);
    const Outputs first = run(c, prefill_params(c)), second = run(c, prefill_params(c));
    double error, lse_error;
    compare(spec, first, want, &error, &lse_error);
    const double limit = spec.dtype == HKV_BF16 ? 2.5e-3 : 6e-4; /* a good part of it is the output's rounding */
    char text[128];
    std::snprintf(text, sizeof text, ": error %.1e lse %.1e%s%s", error, lse_error,
                  first == second ? "" : " NOT REPEATABLE", first.others_untouched() ? "" : " WROTE ELSEWHERE");
    report(error <= limit && lse_error <= 3e-3 && first == second && first.others_untouched(), describe(spec) + text);
}

/* Every number of older tokens that meets a boundary, with chunks of 9 to 300. */
Spec base(int bits, int dim, hkv_dtype dtype)
{
    Spec s;
    s.bits = bits;
    s.dim = dim;
    s.dtype = dtype;
    s.n_kv_heads = 2;
    s.older = {0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161, 1000};
    s.n_new = {9, 300, 64, 17, 33, 65, 31, 10, 128, 127, 95, 129, 63, 200, 256, 97, 161};
    return s;
}

void check_attention()
{
    for (int bits : {8, 6, 4, 0})
        for (int dim : {64, 128, 256})
            for (Values values : {Values::kNormal, Values::kSmallWithSink, Values::kOutlierChannels})
                for (hkv_dtype dtype : {HKV_F16, HKV_BF16}) {
                    Spec s = base(bits, dim, dtype);
                    s.values = values;
                    check_case(s);
                }
    for (int dim : {16, 32, 48, 80, 96, 112, 160, 192, 208, 224, 240}) { /* every other head size */
        check_case(base(8, dim, HKV_F16));
        check_case(base(4, dim, HKV_BF16));
        check_case(base(0, dim, HKV_F16));
    }
    for (int group : {1, 2, 3, 5, 7, 8, 12, 16, 71})
        for (int heads : {1, 3}) {
            Spec s = base(heads == 1 ? 8 : 4, 128, HKV_F16);
            s.group = group;
            s.n_kv_heads = heads;
            s.older = {0, 161, 700};
            s.n_new = {70, 9, 43};
            check_case(s);
        }
    for (int bits : {8, 4, 0}) /* windows, caps, sink logits, no pages and partial records, other hot zones */
        for (hkv_dtype dtype : {HKV_F16, HKV_BF16}) {
            Spec s = base(bits, 128, dtype);
            s.hot_pages = false;
            check_case(s);
            s.window_tokens = 100;
            check_case(s);
            s.hot_pages = true;
            check_case(s);
            s.window_tokens = 1;
            check_case(s);
            s.window_tokens = 64;
            s.soft_cap = 2.f;
            check_case(s);
            s.sink_logits = true;
            check_case(s);
            s.window_tokens = 0;
            s.hot_tokens = 200;
            s.sink_blocks = 2;
            check_case(s);
            s.sink_blocks = 0;
            check_case(s);
        }
    for (int bits : {8, 0}) { /* among decode rows and rows of length 0; long */
        Spec s = base(bits, 128, HKV_F16);
        s.n_kv_heads = 8;
        s.older = {0, 500, 64, 0, 3000, 100, 7, 0};
        s.n_new = {0, 1, 100, 8, 9, 0, 40, 77};
        check_case(s);
        s.older = {20000};
        s.n_new = {200};
        s.n_kv_heads = 2;
        check_case(s);
        s.dtype = HKV_BF16;
        check_case(s);
        s.values = Values::kSmallWithSink;
        check_case(s);
        s.dtype = HKV_F16;
        check_case(s);
        s.older.assign(70, 130);
        s.n_new.assign(70, 12);
        s.values = Values::kNormal;
        check_case(s);
    }
}

/* ------------------------------------------------------------------------------------------------- what is in memory
 */

/* Change the header of the row's logical block, of every KV head. */
template <typename F> void edit_headers(const Case &c, int row, int block, F edit)
{
    const hkv::LayerView layer = c.layer(0);
    int32_t id;
    CHECK_CUDA(cudaMemcpy(&id, c.params().block_table + row * c.params().block_table_stride + block, sizeof id,
                          cudaMemcpyDeviceToHost));
    for (int head = 0; head < layer.n_kv_heads; head++) {
        hkv_record_header header;
        uint8_t *record = layer.record(id, head);
        CHECK_CUDA(cudaMemcpy(&header, record, sizeof header, cudaMemcpyDeviceToHost));
        edit(header);
        CHECK_CUDA(cudaMemcpy(record, &header, sizeof header, cudaMemcpyHostToDevice));
    }
}

Spec cold(int bits, hkv_dtype dtype)
{
    Spec s = base(bits, 128, dtype);
    s.older = {640};
    s.n_new = {70};
    s.hot_pages = false;
    return s;
}

/* Records that lost low planes read like records that never had them. */
void check_planes()
{
    for (hkv_dtype dtype : {HKV_F16, HKV_BF16})
        for (int bits : {6, 4}) {
            const Case full(cold(8, dtype)), fewer(cold(bits, dtype));
            for (int block = 0; block < 10; block++)
                edit_headers(full, 0, block,
                             [&](hkv_record_header &h) { h.planes = static_cast<uint8_t>(fewer.format().planes); });
            report(run(full, prefill_params(full)) == run(fewer, prefill_params(fewer)),
                   "records of 8 bits with the planes of " + std::to_string(bits));
        }
}

/* Blocks that are absent, and records that hold nothing or another version, are not there. */
void check_absent()
{
    const Case c(cold(8, HKV_F16));
    const hkv::PrefillParams p = prefill_params(c);
    std::vector<int32_t> table(static_cast<size_t>(p.block_table_stride));
    CHECK_CUDA(cudaMemcpy(table.data(), p.block_table, table.size() * 4, cudaMemcpyDeviceToHost));
    const int32_t absent[4] = {0, -5, p.layer.n_blocks, INT32_MAX};
    for (int i = 0; i < 4; i++) table[2 * i] = absent[i];
    const DeviceArray<int32_t> device_table(table);
    hkv::PrefillParams other = p;
    other.block_table = device_table.get();
    const Outputs by_table = run(c, other);
    edit_headers(c, 0, 0, [](hkv_record_header &h) { h.stamp = 0; });
    edit_headers(c, 0, 2, [](hkv_record_header &h) { h.planes = 0; });
    edit_headers(c, 0, 4, [](hkv_record_header &h) { h.version ^= 1; });
    edit_headers(c, 0, 6, [](hkv_record_header &h) { h.n_valid_tokens = 65; });
    const Outputs by_header = run(c, p);
    report(by_table == by_header, "absent blocks and records");
    double error, lse_error;
    edit_headers(c, 0, 6, [](hkv_record_header &h) { h.n_valid_tokens = 0; });
    compare(c.spec(), by_header, reference(c), &error, &lse_error);
    report(error < 6e-4, "without them");
}

/* A captured launch serves whatever lengths the plan has when it is replayed. */
void check_graph()
{
    Spec s = base(8, 128, HKV_F16);
    const Case big(s);
    s.older.assign(s.older.size(), 77);
    s.n_new.assign(s.n_new.size(), 0);
    s.n_new[3] = 200;
    s.n_new[9] = 41;
    const Case small(s);
    hkv::PrefillParams p = prefill_params(small);
    const Outputs want = run(small, p);
    DeviceArray<hkv_plan_row> rows(std::vector<hkv_plan_row>(s.older.size()));
    DeviceArray<uint8_t> workspace(
        hkv::prefill_workspace_bytes(small.format(), 2, s.group, p.n_rows, big.spec().n_tokens()));
    Outputs got(s);
    got.place(&p);
    const hkv_plan_row *real_rows = p.plan.rows;
    p.plan.rows = rows.get();
    p.n_new_tokens = big.spec().n_tokens();
    p.workspace = workspace.get();
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK_CUDA(hkv::launch_prefill(p, stream));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(exec, stream)); /* a plan of padding */
    CHECK_CUDA(
        cudaMemcpyAsync(rows.get(), real_rows, rows.size() * sizeof(hkv_plan_row), cudaMemcpyDeviceToDevice, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    got.read();
    report(got == want, "a graph replayed for other lengths");
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

void check_quick()
{
    for (int bits : {8, 4, 0})
        for (int dim : {64, 128, 256, 96})
            for (hkv_dtype dtype : {HKV_F16, HKV_BF16}) {
                Spec s = base(bits, dim, dtype);
                s.older = {0, 161, 97};
                s.n_new = {40, 33, 2};
                check_case(s);
                s.hot_pages = false;
                check_case(s);
            }
}

} // namespace

int main(int argc, char **argv)
{
    if (argc > 1 && !std::strcmp(argv[1], "quick")) {
        check_quick();
    } else {
        check_attention();
        check_planes();
        check_absent();
        check_graph();
    }
    std::printf("%d failed\n", n_failed);
    return n_failed != 0;
}
