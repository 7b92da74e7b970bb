/* check.cu - CUDA kernels against the scalar codec (records, bit for bit) and against double precision (attention).
 *
 *   check                  everything; one line a case; exit status 1 if any failed
 *   check [quick] NAME...  these parts: record, plan, attention; quick: a small part, for compute-sanitizer
 */
#include "harness.cuh"
#include "plan_check.cuh"

using namespace harness;

extern "C" uint32_t hkv_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                                      int64_t v_stride_token, int32_t n_tokens, uint8_t *record);
extern "C" void hkv_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision,
                                  int32_t first_token, int32_t n_tokens, float *k_out, float *v_out);
extern "C" void hkv_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst);

namespace
{

/* ----------------------------------------------------------------------------------------------------------------
 * records */

/* Rows with everything that is awkward: NaN, infinities, clamped, constant channels, tiny and huge ranges, -0. */
std::vector<uint16_t> awkward_rows(int n_tokens, int heads, int dim, hkv_dtype dtype, uint32_t seed)
{
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(size_t(n_tokens) * heads * dim);
    for (size_t i = 0; i < x.size(); i++) {
        const int channel = static_cast<int>(i % dim), token = static_cast<int>(i / dim / heads);
        x[i] = normal(random);
        if (channel == 1) x[i] = 3.25f;
        if (channel == 2) x[i] = -0.f;
        if (channel == 3) x[i] *= 1e-6f;
        if (channel == 4) x[i] = 200.f + 0.5f * x[i];
        if (channel == 5) x[i] *= 3e4f;
        if (channel == 6 && token % 5 == 0) x[i] = token % 2 ? INFINITY : -INFINITY;
        if (channel == 7 && token % 7 == 0) x[i] = NAN;
        if (channel == 8) x[i] = INFINITY;
        if (token == 9) x[i] = 1.f;
        if (token == 10) x[i] = NAN;
    }
    std::vector<uint16_t> rows(x.size());
    hkv_elements_from_f32(dtype, x.data(), static_cast<int64_t>(x.size()), rows.data());
    return rows;
}

/* A layer of a few blocks, driven by hand-made plans. */
struct SmallLayer {
    hkv_format format;
    int heads;
    int64_t stride_token; /* of k and v */
    DeviceArray<uint8_t> records, pages;
    DeviceArray<uint16_t> k, v;
    DeviceArray<hkv_counters> counters{1};
    hkv::LayerView view = {};

    SmallLayer(const hkv_format &f, int heads_, const std::vector<uint16_t> &k_rows,
               const std::vector<uint16_t> &v_rows)
        : format(f), heads(heads_), stride_token(int64_t(heads_) * f.head_dim),
          records(size_t(4) * heads_ * f.record_bytes), pages(size_t(2) * heads_ * f.row_page_bytes), k(k_rows),
          v(v_rows)
    {
        records.fill(0xa5);
        pages.fill(0xa5);
        counters.fill(0);
        view.format = f;
        view.pages = {records.get(), size_t(heads) * f.record_bytes, f.record_bytes};
        view.hot = pages.get();
        view.n_kv_heads = heads;
        view.n_blocks = 4;
        view.n_hot_pages = 2;
    }
    void run(const std::vector<hkv_segment> &plan_segments, std::vector<hkv_victim> victims = {})
    {
        const int n = static_cast<int>(plan_segments.size());
        DeviceArray<hkv_segment> segments(plan_segments);
        DeviceArray<int32_t> counts(std::vector<int32_t>{n, static_cast<int32_t>(victims.size()), 0});
        DeviceArray<hkv_victim> device_victims(victims);
        DeviceArray<int64_t> clock(std::vector<int64_t>{77});
        hkv_plan plan = {};
        plan.segments = segments.get();
        plan.victims = device_victims.get();
        plan.n_segments = counts.get();
        plan.n_victims = counts.get() + 1;
        plan.is_appended = counts.get() + 2;
        const hkv::NewTokens tokens = {k.get(), v.get(), stride_token, format.head_dim, stride_token, format.head_dim};
        CHECK_CUDA(hkv::launch_append(view, plan, n, tokens, clock.get(), nullptr, counters.get()));
        CHECK_CUDA(cudaDeviceSynchronize());
    }
};

hkv_segment segment_of(int block, int page, int offset, int n_tokens, int first_token, bool seal, bool restart)
{
    hkv_segment s = {};
    s.block = block;
    s.page = page;
    s.offset = offset;
    s.n_tokens = n_tokens;
    s.first_token = first_token;
    s.seal = seal;
    s.restart = restart;
    s.restore_page = -1;
    s.stamp = 1000u + static_cast<uint32_t>(block);
    return s;
}

/* Payload and header of a block's record against the scalar codec. */
bool same_record(const SmallLayer &layer, int block, const std::vector<uint16_t> &k, const std::vector<uint16_t> &v,
                 int n_tokens)
{
    const hkv_format &f = layer.format;
    const std::vector<uint8_t> device = layer.records.host();
    const size_t payload = f.k_params_offset;
    const uint32_t end = hkv_record_prefix_bytes(&f, hkv_record_precision(f.planes));
    std::vector<uint8_t> expected(f.record_bytes);
    for (int h = 0; h < layer.heads; h++) {
        const uint8_t *record = device.data() + (size_t(block) * layer.heads + h) * f.record_bytes;
        const uint32_t n_clamped =
            hkv_record_encode(&f, k.data() + h * f.head_dim, layer.stride_token, v.data() + h * f.head_dim,
                              layer.stride_token, n_tokens, expected.data());
        const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(record);
        if (std::memcmp(record + payload, expected.data() + payload, end - payload)) return false;
        if (header->n_clamped != n_clamped || header->n_valid_tokens != n_tokens || header->planes != f.planes ||
            header->stamp != 1000u + static_cast<uint32_t>(block) || header->tier != HKV_TIER_L1 ||
            header->last_access != 77)
            return false;
    }
    return true;
}

/* The clamped elements of a block are what the counters count. */
bool counts_clamped(const SmallLayer &layer, int block)
{
    const std::vector<uint8_t> device = layer.records.host();
    uint64_t n = 0;
    for (int h = 0; h < layer.heads; h++)
        n += reinterpret_cast<const hkv_record_header *>(device.data() +
                                                         (size_t(block) * layer.heads + h) * layer.format.record_bytes)
                 ->n_clamped;
    return n > 0 && layer.counters.host()[0].n_nonfinite_inputs == n;
}

/* Blocks without special values, and those whose scales are subnormal, from tensors of any alignment; a block that is
 * overwritten while another copies from it. */
void check_appends()
{
    for (int dim : {16, 64, 96, 128, 144, 256})
        for (hkv_dtype dtype : {HKV_F16, HKV_BF16})
            for (float sigma : {1.f, 1e-4f}) {
                hkv_format f;
                hkv_format_init(&f, 8, 64, dim, dtype);
                const int heads = 2, stride = heads * dim + 3;
                std::mt19937 random(7);
                std::normal_distribution<float> normal(0.f, sigma);
                std::vector<float> x(size_t(64) * stride), y(x.size());
                /* Two columns in three lie on one side of zero, which must then count for nothing. */
                for (size_t i = 0; i < x.size(); i++) x[i] = normal(random) + 5 * sigma * (int(i % stride % 3) - 1);
                for (size_t i = 0; i < y.size(); i++) y[i] = normal(random) + 5 * sigma * (int(i / stride % 3) - 1);
                for (int t = 0; t < 64; t++) x[size_t(t) * stride] = 0.f; /* a channel of scale 0 */
                std::vector<uint16_t> k(x.size()), v(x.size());
                hkv_elements_from_f32(dtype, x.data(), static_cast<int64_t>(x.size()), k.data());
                hkv_elements_from_f32(dtype, y.data(), static_cast<int64_t>(y.size()), v.data());
                SmallLayer layer(f, heads, k, v);
                layer.stride_token = stride;
                layer.run({segment_of(1, -1, 0, 64, 0, true, true), segment_of(2, 0, 0, 50, 0, false, true)});
                layer.run({segment_of(2, 0, 50, 14, 50, true, false)});
                const bool sealed = same_record(layer, 1, k, v, 64) && same_record(layer, 2, k, v, 64);

                /* Block 2 is written from token 4 on; block 3 takes its tokens 0 .. 9 as they were. */
                hkv_segment writer = segment_of(2, 0, 4, 20, 30, false, false),
                            reader = segment_of(3, 1, 10, 3, 60, false, true);
                reader.n_restore = reader.n_held = 10;
                reader.restore_page = 0;
                reader.restore_block = 2;
                writer.is_entangled = reader.is_entangled = 1;
                layer.run({writer, reader});
                const std::vector<uint8_t> pages = layer.pages.host();
                bool copied = true;
                for (int h = 0; h < heads; h++)
                    for (int t = 0; t < 24; t++)
                        for (int c = 0; c < 2 * dim; c++) {
                            const bool is_v = c >= dim;
                            const auto same = [&](int page, int source) {
                                const size_t at = hkv_row_element_offset(&f, t, c % dim, is_v);
                                uint16_t stored;
                                std::memcpy(&stored, &pages[size_t(page * heads + h) * f.row_page_bytes + at], 2);
                                return stored == (is_v ? v : k)[size_t(source) * stride + h * dim + c % dim];
                            };
                            copied = copied && same(0, t < 4 ? t : t + 26);
                            if (t < 13) copied = copied && same(1, t < 10 ? t : t + 50);
                        }
                report(sealed && copied, "append D " + std::to_string(dim) + (dtype ? " bf16" : " f16") + " sigma " +
                                             std::to_string(sigma) + ": sealed " + std::to_string(sealed) + " copied " +
                                             std::to_string(copied));
            }
}

void check_records()
{
    for (int dim : {16, 64, 80, 96, 128, 208, 256})
        for (int bits : {8, 6, 4})
            for (hkv_dtype dtype : {HKV_F16, HKV_BF16}) {
                hkv_format f;
                hkv_format_init(&f, bits, 64, dim, dtype);
                const int heads = 3;
                const std::vector<uint16_t> k = awkward_rows(64, heads, dim, dtype, 1),
                                            v = awkward_rows(64, heads, dim, dtype, 2);
                SmallLayer layer(f, heads, k, v);
                layer.run({segment_of(1, -1, 0, 64, 0, true, true)}); /* direct */
                const bool direct = same_record(layer, 1, k, v, 64) && counts_clamped(layer, 1);
                for (int o = 0; o < 64; o += 16)
                    layer.run({segment_of(2, 0, o, 16, o, o == 48, o == 0)}); /* through a page */
                const bool paged = same_record(layer, 2, k, v, 64);
                layer.run({segment_of(3, 1, 0, 41, 0, false, true)}); /* 41 tokens, then evicted by block 0's claim */
                layer.run({segment_of(0, 1, 0, 0, 0, false, true)}, {{1, 3, 41, 1003}});
                const bool evicted = same_record(layer, 3, k, v, 41);

                /* Block 3 claims page 1 again: its 41 tokens come back as the record holds them. */
                hkv_segment s = segment_of(3, 1, 41, 2, 0, false, false);
                s.n_restore = s.n_held = 41;
                s.restore_block = 3;
                layer.run({s});
                bool restored = true;
                const std::vector<uint8_t> records = layer.records.host(), pages = layer.pages.host();
                for (int h = 0; h < heads; h++) {
                    std::vector<float> kf(size_t(41) * dim), vf(kf);
                    hkv_record_decode(&f, records.data() + (size_t(3) * heads + h) * f.record_bytes,
                                      hkv_record_precision(f.planes), 0, 41, kf.data(), vf.data());
                    std::vector<uint16_t> kh(kf.size()), vh(kf.size());
                    hkv_elements_from_f32(dtype, kf.data(), static_cast<int64_t>(kf.size()), kh.data());
                    hkv_elements_from_f32(dtype, vf.data(), static_cast<int64_t>(vf.size()), vh.data());
                    const uint8_t *page = pages.data() + (size_t(1) * heads + h) * f.row_page_bytes;
                    for (int t = 0; t < 41; t++)
                        for (int c = 0; c < dim; c++) {
                            uint16_t a, b;
                            std::memcpy(&a, page + hkv_row_element_offset(&f, t, c, 0), 2);
                            std::memcpy(&b, page + hkv_row_element_offset(&f, t, c, 1), 2);
                            restored = restored && a == kh[size_t(t) * dim + c] && b == vh[size_t(t) * dim + c];
                        }
                }
                if (!direct || !paged || !evicted || !restored || dim == 128)
                    report(direct && paged && evicted && restored,
                           "record D " + std::to_string(dim) + " bits " + std::to_string(bits) +
                               (dtype ? " bf16" : " f16") + ": direct " + std::to_string(direct) + " paged " +
                               std::to_string(paged) + " evicted " + std::to_string(evicted) + " restored " +
                               std::to_string(restored));
            }
}

/* ------------------------------------------------------------------------------------------------------------ begin */

/* Sequences of steps: what the device plans is what plan.h plans on the host, and every block is in one chunk. */
void check_plans(bool quick)
{
    const std::vector<plan_check::Shape> shapes = {
        /* rows, blocks, pages, hot tokens, sinks, width, new tokens, steps, quantised */
        {4, 60, 24, 32, 1, 12, 400, 400, true},     /* blocks that rows share without knowing */
        {6, 400, 5, 100, 1, 20, 600, 400, true},    /* fewer pages than rows need */
        {32, 9000, 96, 32, 1, 40, 2000, 300, true}, /* the guaranteed pool */
        {32, 9000, 70, 64, 0, 40, 2000, 300, true},      {9, 900, 40, 128, 2, 64, 900, 300, false}, /* bits 0 */
        {1, 5000, 8, 32, 0, 2050, 400, 100, true},                                                  /* one long row */
        {64, 90000, 2500, 200, 2, 130, 3000, 100, true}, /* more pages than threads */
        {1100, 90000, 3400, 64, 1, 12, 9000, 60, true},  /* more rows, tokens and segments than threads */
    };
    for (size_t i = 0; i < shapes.size(); i++) {
        plan_check::Shape shape = shapes[i];
        if (quick) shape.n_steps = std::min(shape.n_steps, 10);
        plan_check::Engine engine(shape, static_cast<uint32_t>(i + 1));
        const std::string wrong = engine.run();
        report(wrong.empty(), "plan rows " + std::to_string(shape.n_rows) + " pages " + std::to_string(shape.n_pages) +
                                  (shape.quantized ? "" : " bits 0") + ": " + engine.summary() +
                                  (wrong.empty() ? "" : "; different: " + wrong));
    }
}

/* --------------------------------------------------------------------------------------------------------------
 * attention */

std::string describe(const Spec &s)
{
    char text[256];
    std::snprintf(text, sizeof text, "bits %d D %d %s heads %dx%d rows %d older %d.. new %d%s%s%s%s%s %s", s.bits,
                  s.dim, s.dtype == HKV_BF16 ? "bf16" : "f16", s.n_kv_heads, s.group, s.n_rows(), s.older[0],
                  s.n_new[0], s.hot_pages ? "" : " no pages", s.window_tokens ? " window" : "",
                  s.soft_cap > 0 ? " cap" : "", s.sink_logits ? " sinks" : "",
                  s.skip_mass > 0 || s.refine_mass > 0 ? " progressive"
                  : s.l2_share > 0                     ? " tiers"
                                                       : "",
                  name_of(s.values));
    return text;
}

/* Run one case three times: right, every element written, the same bits. */
void check_case(const Spec &spec, int blocks_per_sm = 0)
{
    Case c(spec, blocks_per_sm);
    const Reference want = reference(c);
    std::vector<uint16_t> first;
    bool repeats = true;
    for (int i = 0; i < 3; i++) {
        c.poison_output();
        c.launch(0);
        CHECK_CUDA(cudaDeviceSynchronize());
        const std::vector<uint16_t> out = c.output();
        if (i == 0) first = out;
        repeats = repeats && out == first;
    }
    const double error = relative_error(first, want.out, spec.dtype, want.unsure);
    double lse_error = 0;
    const std::vector<float> lse = c.lse();
    for (size_t i = 0; i < want.lse.size(); i++) {
        if (want.unsure[i]) continue;
        const double d = std::fabs(lse[i] - want.lse[i]);
        lse_error = d == d ? std::max(lse_error, d) : 1e9;
    }
    const double limit = spec.dtype == HKV_BF16 ? 2e-3 : 6e-4; /* half of it, or more, is the output's rounding */
    char text[128];
    std::snprintf(text, sizeof text, ": error %.1e lse %.1e%s (%d chunks)", error, lse_error,
                  repeats ? "" : " NOT REPEATABLE", c.n_chunks());
    report(error <= limit && lse_error <= 3e-3 && repeats, describe(spec) + text);
}

/* What the kernel tells and counts of a case, against the shares of the reference. */
void check_told(const Spec &spec)
{
    Case c(spec);
    const Reference want = reference(c);
    const hkv::DecodeParams p = c.params();
    c.clear_counters();
    c.launch(0);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<uint32_t> skipped = c.told(false), refined = c.told(true);
    const hkv_format &f = c.format();
    uint64_t n_read = 0, n_skipped = 0, n_refined = 0, n_bytes = 0;
    double skipped_mass = 0;
    int n_wrong = 0, n_unsure = 0;
    for (int r = 0; r < spec.n_rows(); r++)
        for (int h = 0; h < spec.n_kv_heads; h++) {
            n_bytes += uint64_t(spec.n_new[r] * f.row_bytes);
            for (int b = 0; b < c.max_blocks(); b++) {
                const size_t pair = size_t(r) * spec.n_kv_heads + h;
                const float share = want.shares[pair * c.max_blocks() + b];
                const bool told_skipped = skipped[pair * p.mask_words + b / 32] >> b % 32 & 1,
                           told_refined = refined[pair * p.mask_words + b / 32] >> b % 32 & 1;
                if (c.page_of(r, b) >= 0)
                    n_bytes += uint64_t(std::max(0, std::min(64, spec.older[r] - b * 64)) * f.row_bytes);
                const bool l2 = is_l2(uint32_t(c.block_id(r, b)), uint32_t(h), spec.l2_share);
                const bool is_skipped = share > 0 && share < spec.skip_mass;
                const bool is_refined = share > 0 && !is_skipped && share >= spec.refine_mass && !l2;
                n_unsure += std::fabs(share - spec.skip_mass) < 3e-3f * spec.skip_mass ||
                            std::fabs(share - spec.refine_mass) < 3e-3f * spec.refine_mass;
                n_wrong += told_skipped != is_skipped || told_refined != is_refined;
                n_read += share > 0;
                n_skipped += is_skipped;
                n_refined += is_refined;
                skipped_mass += is_skipped ? share : 0;
                if (share > 0) n_bytes += is_skipped ? f.v_params_offset : is_refined ? f.int8_bytes : f.int4_bytes;
            }
        }
    const hkv_counters n = c.counters();
    const auto near = [&](uint64_t a, uint64_t b, uint64_t each) { return (a > b ? a - b : b - a) <= each * n_unsure; };
    char text[192];
    std::snprintf(text, sizeof text, ": read %d skipped %d refined %d, unsure %d, told wrongly %d",
                  static_cast<int>(n_read), static_cast<int>(n_skipped), static_cast<int>(n_refined), n_unsure,
                  n_wrong);
    report(n_wrong <= n_unsure && n.n_records_read == n_read && near(n.n_records_skipped, n_skipped, 1) &&
               near(n.n_records_refined, n_refined, 1) && near(n.n_bytes_read, n_bytes, f.record_bytes) &&
               n.n_skipped_mass_terms == uint64_t(spec.n_rows() * spec.n_kv_heads) &&
               std::fabs(n.skipped_mass - skipped_mass) <= 1e-3 * skipped_mass + n_unsure * spec.skip_mass,
           "told: " + describe(spec) + text);
}

Spec base(int bits, int dim, hkv_dtype dtype)
{
    Spec s;
    s.bits = bits;
    s.dim = dim;
    s.dtype = dtype;
    s.older = {1, 63, 64, 65, 200, 1000, 2047};
    s.n_new.assign(s.older.size(), 1);
    return s;
}

void check_attention(bool quick)
{
    if (quick) {
        for (int bits : {8, 4, 0}) {
            Spec s = base(bits, 128, HKV_F16);
            s.older = {100, 700};
            s.n_new = {1, 2};
            s.n_kv_heads = 2;
            check_case(s);
        }
        Spec s = base(8, 128, HKV_F16);
        s.older = {700};
        s.n_new = {1};
        s.n_kv_heads = 4;
        s.skip_mass = 0.3f;
        s.refine_mass = 0.6f;
        s.l2_share = 0.3f;
        s.unselected_share = 0.3f;
        check_case(s);
        check_told(s);
        return;
    }
    for (int bits :
         {8, 6, 4, 0}) /* every precision, the three tuned head sizes, both dtypes, the three kinds of values */
        for (int dim : {64, 128, 256})
            for (Values values : {Values::kNormal, Values::kSmallWithSink, Values::kOutlierChannels}) {
                Spec s = base(bits, dim, HKV_F16);
                s.values = values;
                check_case(s);
                if (values != Values::kNormal) continue;
                s.dtype = HKV_BF16;
                check_case(s);
            }
    for (int dim : {16, 32, 48, 80, 96, 112, 160, 192, 208, 224, 240}) { /* every other head size */
        check_case(base(8, dim, HKV_F16));
        check_case(base(4, dim, HKV_BF16));
        Spec s = base(0, dim, HKV_F16);
        check_case(s);
    }
    for (int group : {1, 2, 3, 5, 7, 8, 12, 16}) /* groups and KV heads */
        for (int heads : {1, 2, 3, 6, 8}) {
            if (group > 8 && heads > 2) continue;
            Spec s = base(heads % 2 ? 8 : 4, 128, HKV_F16);
            s.group = group;
            s.n_kv_heads = heads;
            check_case(s);
        }
    for (int n_new : {2, 4, 8}) /* several query tokens, mixed with rows that are prefilled and padding */
        for (int bits : {8, 4, 0}) {
            Spec s = base(bits, 128, HKV_F16);
            s.n_new = {n_new, 1, n_new, 2, n_new, 3, n_new};
            check_case(s);
            s.group = 16;
            s.n_kv_heads = 2;
            check_case(s);
        }
    for (int bits : {8, 0}) { /* windows, caps, sink logits, no pages, partial records */
        Spec s = base(bits, 128, HKV_F16);
        s.n_new = {3, 1, 2, 1, 4, 1, 5};
        s.hot_pages = false;
        check_case(s);
        s.window_tokens = 100;
        check_case(s);
        s.hot_pages = true;
        check_case(s);
        s.soft_cap = 2.f;
        check_case(s);
        s.sink_logits = true;
        check_case(s);
    }
    for (int bits : {8, 6, 4}) /* progressive reading: thresholds between the shares of random keys */
        for (int dim : {64, 128, 256, 96}) {
            Spec s = base(bits, dim, HKV_F16);
            s.skip_mass = 0.3f;
            s.refine_mass = 0.6f;
            check_case(s);
            s.n_new = {3, 1, 2, 1, 4, 1, 5};
            s.sink_logits = true;
            s.window_tokens = 900;
            check_case(s);
        }
    for (int heads :
         {1, 8}) /* tiers and masks: little of much, much of little, more put off than a warp has room for */
        for (float unselected : {0.f, 0.5f, 0.97f}) {
            Spec s = base(8, 128, HKV_F16);
            s.n_kv_heads = heads;
            s.older = {1, 64, 700, 40000, 9000};
            s.n_new = {1, 1, 2, 1, 1};
            s.l2_share = 0.8f;
            s.unselected_share = unselected;
            check_case(s);
            check_told(s);
            s.skip_mass = 0.3f;
            s.refine_mass = 0.6f;
            check_case(s);
            check_told(s);
            s.window_tokens = 5000;
            check_case(s);
            s.soft_cap = 3.f;
            check_case(s);
        }
    for (int bits : {8, 6, 4}) { /* long, and enough to fill the chip; more units than workers */
        Spec s = base(bits, 128, HKV_F16);
        s.older = {131072};
        s.n_new = {1};
        check_case(s);
        s.values = Values::kSmallWithSink;
        check_case(s);
        s.older.assign(32, 8192);
        s.n_new.assign(32, 1);
        check_case(s);
        s.values = Values::kNormal;
        check_case(s);
        s.older.assign(300, 640);
        s.older[7] = 20000;
        s.n_new.assign(300, 1);
        check_case(s);
        s.skip_mass = 0.7f;
        s.refine_mass = 0.9f;
        check_case(s);
        s.older = {8192, 77};
        s.n_new = {1, 1};
        check_case(s);
    }
    Spec s = base(4, 128, HKV_F16);
    s.older.assign(32, 4096);
    s.n_new.assign(32, 1);
    check_case(s, 3);
}

} // namespace

int main(int argc, char **argv)
{
    const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
    const auto is_wanted = [&](const char *part) {
        bool named = false;
        for (int i = 1 + quick; i < argc; i++) named = named || !std::strcmp(argv[i], part);
        return named || argc == 1 + quick;
    };
    if (!quick && is_wanted("record")) {
        check_records();
        check_appends();
    }
    if (is_wanted("plan")) check_plans(quick);
    if (is_wanted("attention")) check_attention(quick);
    std::printf("%d failed\n", n_failed);
    return n_failed != 0;
}
