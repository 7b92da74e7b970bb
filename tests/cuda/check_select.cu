/* check_select.cu - selection, masses and prefetching against the host, on an NVIDIA GPU.
 *
 *   check_select          everything
 *   check_select quick    a few small cases, for compute-sanitizer
 */
#include "../../cuda/mass.cuh"
#include "../../cuda/prefetch.cuh"
#include "../../cuda/select.cuh"
#include "harness.cuh"

using namespace harness;

namespace
{

template <typename T> std::vector<T> from_device(const T *p, size_t n)
{
    std::vector<T> copy(n);
    CHECK_CUDA(cudaMemcpy(copy.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
}

/* --------------------------------------------------------------------------------------------------------- tiers */

/* How a case's records are spread over the tiers, and what their headers say. */
struct Tiers {
    double l2 = 1.0;        /* share of the records that are L2 */
    double duplicates = 0;  /* share of the records that get the key parameters of another one */
    int n_histories = 1000; /* distinct values of mass_history; 1: all zero */
    double emptied = 0;     /* share of the records that hold nothing */
};

/* A layer whose records are also on the host. */
class Layer
{
  public:
    Layer(const Case &c, const Tiers &tiers)
        : spec_(c.spec()), format_(c.format()), params_(c.params()),
          table_(from_device(params_.block_table, size_t(spec_.n_rows()) * params_.block_table_stride)),
          rows_(from_device(params_.plan.rows, spec_.n_rows())),
          q_(from_device(static_cast<const uint16_t *>(params_.q),
                         size_t(spec_.n_tokens()) * spec_.n_kv_heads * spec_.group * spec_.dim)),
          records_(from_device(params_.layer.pages.base,
                               size_t(params_.layer.n_blocks) * spec_.n_kv_heads * format_.record_bytes))
    {
        std::mt19937 random(spec_.seed + 7);
        for (int r = 0; r < spec_.n_rows(); r++)
            for (int h = 0; h < spec_.n_kv_heads; h++) spread(tiers, r, h, random);
        CHECK_CUDA(cudaMemcpy(params_.layer.pages.base, records_.data(), records_.size(), cudaMemcpyHostToDevice));
    }
    const Spec &spec() const
    {
        return spec_;
    }
    const hkv::DecodeParams &params() const
    {
        return params_;
    }
    const hkv_plan_row &row(int r) const
    {
        return rows_[r];
    }
    int block_id(int r, int block) const
    {
        return table_[r * params_.block_table_stride + block];
    }
    const uint8_t *record(int r, int block, int head) const
    {
        return records_.data() + (size_t(block_id(r, block)) * spec_.n_kv_heads + head) * format_.record_bytes;
    }
    const hkv_record_header &header(int r, int block, int head) const
    {
        return *reinterpret_cast<const hkv_record_header *>(record(r, block, head));
    }
    /* The bound of a record in double precision, and how far off it may be in single precision. */
    double bound(int r, int block, int head, double *tolerance) const
    {
        const hkv_plan_row &row = rows_[r];
        const uint8_t *rec = record(r, block, head);
        double bound = -INFINITY, magnitude = 0;
        for (int column = 0; column < row.n_new * spec_.group; column++) {
            const size_t token = row.first_token + column / spec_.group;
            const size_t q_head = size_t(head) * spec_.group + column % spec_.group;
            const uint16_t *q = &q_[(token * spec_.n_kv_heads * spec_.group + q_head) * spec_.dim];
            double sum = 0, size = 0;
            for (int c = 0; c < spec_.dim; c++) {
                uint16_t params[3];
                std::memcpy(params, rec + format_.k_params_offset + 2 * hkv_k_param_index(c), sizeof params);
                const double scale = hkv_f16_to_f32(params[0]), zero = hkv_f16_to_f32(params[2]);
                const double x = from_bits(q[c], spec_.dtype);
                sum += std::max(x * (zero + 8 * scale), x * (zero + 248 * scale));
                size += std::fabs(x) * (std::fabs(zero) + 248 * scale);
            }
            bound = std::max(bound, sum);
            magnitude = std::max(magnitude, size);
        }
        *tolerance = 2e-6 * magnitude;
        return bound;
    }

  private:
    void spread(const Tiers &tiers, int r, int head, std::mt19937 &random)
    {
        std::uniform_real_distribution<double> uniform;
        const int n = ceil_div(spec_.older[r], hkv::kBlockTokens);
        const auto at = [&](int block) { return const_cast<uint8_t *>(record(r, block, head)); };
        for (int block = 0; block < n; block++) {
            hkv_record_header h;
            std::memcpy(&h, at(block), sizeof h);
            if (hkv_header_n_tokens(&h, hkv::kBlockTokens) == 0) continue; /* never written: a hot page answers */
            if (uniform(random) < tiers.l2) h.tier = HKV_TIER_L2;
            const int history = int(random() % unsigned(tiers.n_histories));
            h.mass_history = float(history) / float(tiers.n_histories) * 0.1f;
            if (uniform(random) < tiers.emptied) h.planes = 0;
            std::memcpy(at(block), &h, sizeof h);
            const int other = int(random() % unsigned(block + 1));
            if (uniform(random) < tiers.duplicates && header(r, other, head).stamp == unsigned(block_id(r, other)))
                std::memcpy(at(block) + format_.k_params_offset, at(other) + format_.k_params_offset,
                            4 * size_t(format_.stored_dim));
        }
    }

    Spec spec_;
    hkv_format format_;
    hkv::DecodeParams params_;
    std::vector<int32_t> table_;
    std::vector<hkv_plan_row> rows_;
    std::vector<uint16_t> q_;
    std::vector<uint8_t> records_;
};

/* ----------------------------------------------------------------------------------------------------- selection */

struct Rule {
    int top_k = 32;
    float min_mass = 0;
};

/* What the rule takes of one row and KV head, on the host in double precision. */
struct Expected {
    int first_block, n_blocks; /* whole words of the mask */
    std::vector<char> bits;    /* [n_blocks] */
    std::vector<char> open;    /* [n_blocks] so near to the mass wanted that single precision may see it either way */
    int n_unselected = 0, n_open = 0;
    bool is_sure = true; /* no two candidates are too near each other where it matters */

    int at(int block) const
    {
        return block - first_block;
    }
};

struct Candidate {
    double bound, tolerance, weight;
    float history;
    int block, n_tokens;
};

/* Move the first n in this order to `taken`; false if the n-th and the next are too near to tell. */
template <typename Before>
bool take(std::vector<Candidate> &left, int n, std::vector<int> &taken, bool needs_history, Before before)
{
    std::sort(left.begin(), left.end(), before);
    bool is_sure = true;
    if (n > 0 && n < int(left.size())) {
        const Candidate &a = left[n - 1], &b = left[n];
        const bool same_history = !needs_history || a.history == b.history;
        is_sure = !same_history || a.bound == b.bound || a.bound - b.bound > a.tolerance + b.tolerance;
    }
    for (int i = 0; i < n; i++) taken.push_back(left[i].block);
    left.erase(left.begin(), left.begin() + n);
    return is_sure;
}

Expected expect(const Case &c, const Layer &layer, const Rule &rule, int r, int head)
{
    const Spec &s = layer.spec();
    const hkv_plan_row &row = layer.row(r);
    const int n_older = row.length - row.n_new, n = ceil_div(n_older, hkv::kBlockTokens);
    const int first_seen = s.window_tokens ? std::max(0, n_older + 1 - s.window_tokens) / hkv::kBlockTokens : 0;
    Expected e;
    e.first_block = first_seen / 32 * 32;
    e.n_blocks = row.n_new < 1 || row.n_new > HKV_DECODE_MAX_TOKENS ? 0 : ceil_div(n, 32) * 32 - e.first_block;
    e.bits.assign(e.n_blocks, 0);
    e.open.assign(e.n_blocks, 0);
    if (e.n_blocks == 0) return e;
    std::vector<Candidate> left;
    std::vector<int> taken;
    for (int b = first_seen; b < n; b++) {
        const hkv_record_header &h = layer.header(r, b, head);
        const int n_tokens = std::min(hkv_header_n_tokens(&h, hkv::kBlockTokens), n_older - b * hkv::kBlockTokens);
        if (c.page_of(r, b) >= 0 || n_tokens == 0) continue;
        if (h.tier != HKV_TIER_L2) {
            e.bits[e.at(b)] = 1;
            continue;
        }
        Candidate x = {0, 0, 0, h.mass_history, b, n_tokens};
        x.bound = layer.bound(r, b, head, &x.tolerance);
        left.push_back(x);
    }
    const auto by_bound = [](const Candidate &a, const Candidate &b) {
        return a.bound != b.bound ? a.bound > b.bound : a.block < b.block;
    };
    const auto by_history = [&](const Candidate &a, const Candidate &b) {
        return a.history != b.history ? a.history > b.history : by_bound(a, b);
    };
    if (int(left.size()) <= rule.top_k) {
        for (const Candidate &x : left) e.bits[e.at(x.block)] = 1;
        return e;
    }
    double most = -INFINITY, total = 0;
    for (const Candidate &x : left) most = std::max(most, x.bound);
    for (Candidate &x : left)
        total += x.weight = x.n_tokens * std::exp(double(layer.params().scale) * 0.6931471805599453 * (x.bound - most));
    e.is_sure = take(left, (rule.top_k + 1) / 2, taken, false, by_bound);
    e.is_sure = take(left, rule.top_k / 2, taken, true, by_history) && e.is_sure;
    if (rule.min_mass > 0) {
        double rest = 0;
        const double allowed = total * (1.0 - double(rule.min_mass)), slack = 1e-5 * total;
        for (const Candidate &x : left) rest += x.weight;
        std::sort(left.begin(), left.end(), by_bound);
        const auto n_taken = [&](double target) {
            double still = rest;
            size_t n_more = 0;
            while (n_more < left.size() && still > target) still -= left[n_more++].weight;
            return n_more;
        };
        size_t n_sure = n_taken(allowed + slack), n_possible = n_taken(allowed - slack);
        const auto is_near = [&](size_t i, size_t j) {
            return left[i].bound != left[j].bound &&
                   left[i].bound - left[j].bound <= left[i].tolerance + left[j].tolerance;
        };
        while (n_sure > 0 && n_sure < left.size() && is_near(n_sure - 1, n_sure)) n_sure--;
        while (n_possible > 0 && n_possible < left.size() && is_near(n_possible - 1, n_possible)) n_possible++;
        for (size_t i = 0; i < n_possible; i++) (i < n_sure ? e.bits : e.open)[e.at(left[i].block)] = 1;
        e.n_open = static_cast<int>(n_possible - n_sure);
        left.erase(left.begin(), left.begin() + static_cast<int64_t>(n_possible));
    }
    for (int b : taken) e.bits[e.at(b)] = 1;
    e.n_unselected = int(left.size());
    return e;
}

/* Launch a selection and keep what it needs. */
class Selector
{
  public:
    Selector(const Layer &layer, const Rule &rule, const std::vector<uint32_t> &block_step = {})
    {
        const Spec &s = layer.spec();
        const hkv::DecodeParams &d = layer.params();
        n_words_ = (d.block_table_stride + 31) / 32 + 1;
        n_mask_ = size_t(s.n_rows()) * s.n_kv_heads * n_words_;
        n_workspace_ = hkv::select_workspace_bytes(s.n_rows(), s.n_kv_heads, n_words_);
        mask_ = DeviceArray<uint32_t>(n_mask_ + kGuard);
        workspace_ = DeviceArray<uint8_t>(n_workspace_ + kGuard);
        workspace_.fill(0);
        CHECK_CUDA(cudaMemset(workspace_.get() + n_workspace_, 0xa5, kGuard));
        counters_ = DeviceArray<hkv_counters>(1);
        counters_.fill(0);
        block_step_ = DeviceArray<uint32_t>(block_step);
        step_ = DeviceArray<uint32_t>(std::vector<uint32_t>{77});
        p_ = {};
        p_.layer = d.layer;
        p_.plan = d.plan;
        p_.n_rows = s.n_rows();
        p_.block_table = d.block_table;
        p_.block_table_stride = d.block_table_stride;
        p_.block_step = block_step.empty() ? nullptr : block_step_.get();
        p_.step = step_.get();
        p_.q = d.q;
        p_.q_stride_token = d.q_stride_token;
        p_.q_stride_head = d.q_stride_head;
        p_.scale = d.scale;
        p_.group = d.group;
        p_.window_tokens = d.window_tokens;
        p_.top_k = rule.top_k;
        p_.min_mass = rule.min_mass;
        p_.counters = counters_.get();
        p_.read_mask = mask_.get();
        p_.mask_words = n_words_;
        p_.workspace = workspace_.get();
    }
    /* One launch on a poisoned mask. */
    std::vector<uint32_t> run()
    {
        counters_.fill(0);
        mask_.fill(0xcd);
        CHECK_CUDA(hkv::launch_select(p_, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        return mask_.host();
    }
    bool guards_hold() const
    {
        for (uint8_t x : from_device(workspace_.get() + n_workspace_, kGuard))
            if (x != 0xa5) return false;
        for (uint32_t x : from_device(mask_.get() + n_mask_, kGuard))
            if (x != kPoison) return false;
        return true;
    }
    int64_t n_words() const
    {
        return n_words_;
    }
    const uint32_t *mask() const
    {
        return mask_.get();
    }
    uint64_t n_unselected() const
    {
        return counters_.host()[0].n_records_unselected;
    }
    static constexpr uint32_t kPoison = 0xcdcdcdcd;

  private:
    static constexpr int kGuard = 256;
    int64_t n_words_;
    size_t n_mask_, n_workspace_;
    DeviceArray<uint32_t> mask_, block_step_, step_;
    DeviceArray<uint8_t> workspace_;
    DeviceArray<hkv_counters> counters_;
    hkv::SelectParams p_;
};

/* Every word of the mask, the counter, guards, repeatability. */
void check_selection(const std::string &name, const Spec &spec, const Tiers &tiers, const Rule &rule,
                     bool some_new = false)
{
    const Case c(spec);
    const Layer layer(c, tiers);
    std::vector<uint32_t> block_step(some_new ? layer.params().layer.n_blocks : 0);
    for (size_t i = 0; i < block_step.size(); i++) block_step[i] = i % 5 ? 76 : 77;
    Selector selector(layer, rule, block_step);
    const std::vector<uint32_t> mask = selector.run();
    const uint64_t n_unselected = selector.n_unselected();
    const bool repeats = mask == selector.run() && mask == selector.run();
    int n_wrong = 0, n_unsure = 0, n_pairs = 0;
    uint64_t n_left = 0, n_open = 0;
    for (int r = 0; r < spec.n_rows(); r++)
        for (int h = 0; h < spec.n_kv_heads; h++) {
            const Expected e = expect(c, layer, rule, r, h);
            const uint32_t *words = &mask[(size_t(r) * spec.n_kv_heads + h) * selector.n_words()];
            bool is_same = true;
            for (int64_t w = 0; w < selector.n_words(); w++) {
                uint32_t want = Selector::kPoison, open = 0;
                const int64_t first = w * 32 - e.first_block;
                if (first >= 0 && first < e.n_blocks) {
                    want = 0;
                    for (int b = 0; b < 32; b++) {
                        want |= uint32_t(e.bits[first + b]) << b;
                        open |= uint32_t(e.open[first + b]) << b;
                    }
                }
                is_same = is_same && (words[w] & ~open) == want;
            }
            n_pairs++;
            n_unsure += !e.is_sure;
            n_wrong += e.is_sure && !is_same;
            n_left += e.n_unselected;
            n_open += e.n_open;
        }
    const bool counted = n_unsure || (n_left <= n_unselected && n_unselected <= n_left + n_open);
    const bool guards = selector.guards_hold();
    char text[128];
    std::snprintf(text, sizeof text, ": %d of %d wrong, %d unsure, %llu left%s%s%s", n_wrong, n_pairs, n_unsure,
                  static_cast<unsigned long long>(n_unselected), repeats ? "" : " NOT REPEATABLE",
                  counted ? "" : " MISCOUNTED", guards ? "" : " OUT OF BOUNDS");
    report(n_wrong == 0 && n_unsure * 2 <= n_pairs && repeats && counted && guards, "select " + name + text);
}

/* Rows at the edges of tokens, blocks, words and chunks of the mask. */
Spec edges(int bits, int dim, hkv_dtype dtype)
{
    Spec s;
    s.bits = bits;
    s.dim = dim;
    s.dtype = dtype;
    s.n_kv_heads = 2;
    s.older = {0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161};
    for (int blocks : {31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161}) s.older.push_back(blocks * 64 + 9);
    for (size_t i = 0; i < s.older.size(); i++) s.n_new.push_back(i % 7 == 3 ? 9 : i % 7 == 5 ? 0 : 1 + int(i) % 8);
    return s;
}

std::string sizes(const Spec &s)
{
    return "bits " + std::to_string(s.bits) + " D " + std::to_string(s.dim) + (s.dtype ? " bf16" : " f16") + " heads " +
           std::to_string(s.n_kv_heads) + "x" + std::to_string(s.group);
}

void check_selections(bool quick)
{
    {
        const Spec s = edges(8, 128, HKV_BF16);
        check_selection("mixed tiers, " + sizes(s), s, {0.7, 0.1, 5, 0.05}, {12, 0});
        if (quick) return;
        check_selection("no L2, " + sizes(s), s, {0, 0, 5, 0.05}, {12, 0});
        check_selection("few L2, " + sizes(s), s, {0.05, 0, 5, 0.05}, {12, 0});
        for (int top_k : {1, 2, 3, 16, 1000})
            for (int n_histories : {1, 3, 1000})
                check_selection("k " + std::to_string(top_k) + ", " + std::to_string(n_histories) + " histories", s,
                                {1, 0.2, n_histories, 0}, {top_k, 0}, true);
        check_selection("all records the same", s, {1, 1, 1, 0}, {16, 0});
        for (float min_mass : {0.3f, 0.9f, 0.999f})
            check_selection("mass " + std::to_string(min_mass), s, {1, 0.1, 5, 0}, {4, min_mass});
    }
    for (int dim : {16, 48, 64, 96, 160, 192, 256})
        for (int bits : {8, 4}) {
            const Spec s = edges(bits, dim, bits == 8 ? HKV_F16 : HKV_BF16);
            check_selection(sizes(s), s, {0.9, 0.1, 20, 0}, {12, bits == 8 ? 0.f : 0.8f});
        }
    for (int group : {1, 3, 8, 16, 20}) { /* 20 heads of 8 tokens: columns in more than one batch */
        Spec s = edges(6, 128, HKV_F16);
        s.group = group;
        check_selection(sizes(s), s, {0.9, 0, 20, 0}, {12, 0});
    }
    for (int window : {100, 3000, 7000}) {
        Spec s = edges(8, 128, HKV_F16);
        s.window_tokens = window;
        check_selection("window " + std::to_string(window), s, {0.9, 0, 20, 0}, {12, 0});
        s.hot_pages = false;
        s.values = Values::kOutlierChannels;
        check_selection("no pages, outliers, window " + std::to_string(window), s, {0.9, 0, 20, 0}, {12, 0.5f});
    }
    for (int older : {131072, 300000}) { /* one row over many blocks of threads; more than shared memory stages */
        Spec s;
        s.bits = 4;
        s.older = {older, 5000};
        s.n_new = {1, 2};
        check_selection("long row " + std::to_string(older), s, {1, 0.01, 1000, 0}, {128, 0});
        check_selection("long row, all of one history " + std::to_string(older), s, {1, 0.2, 1, 0}, {128, 0.9f});
    }
    for (int blocks = 2350; blocks < 2354; blocks++) { /* ties up to the very first block, in more blocks than bins */
        Spec s;
        s.bits = 4;
        s.dim = 64;
        s.hot_pages = false;
        s.older = {blocks * 64};
        s.n_new = {1};
        for (int top_k : {1, 2, 7, 200})
            check_selection("long row, all the same, " + std::to_string(blocks) + " blocks, k " + std::to_string(top_k),
                            s, {1, 1, 1, 0}, {top_k, 0});
    }
    {
        Spec s; /* 110,000 blocks */
        s.bits = 4;
        s.dim = 64;
        s.n_kv_heads = 1;
        s.older = {110000 * 64};
        s.n_new = {1};
        check_selection("7 M tokens", s, {1, 0.001, 100000, 0}, {1024, 0});
        check_selection("7 M tokens, mass", s, {1, 0.001, 100000, 0}, {1024, 0.5f});
    }
    Spec s; /* more (row, head) than slots */
    s.bits = 4;
    s.dim = 64;
    s.older.assign(150, 3000);
    s.n_new.assign(150, 1);
    check_selection("150 rows", s, {0.9, 0.1, 20, 0}, {12, 0});
}

/* ------------------------------------------------------------------------------------------------------------ masses
 */

/* Grid (rows, query tokens, query heads), 256 threads; mass [rows, kv heads, stride] zero before. Shares relative to
 * the lse that decode wrote, of keys as decode's masks say it read them. */
__global__ void reference_mass_kernel(hkv::DecodeParams p, double *scratch, int64_t scratch_stride, float *mass,
                                      int64_t stride)
{
    const int row = blockIdx.x, token = blockIdx.y, q_head = blockIdx.z, head = q_head / p.group;
    const hkv_plan_row r = p.plan.rows[row];
    if (token >= r.n_new || r.n_new > HKV_DECODE_MAX_TOKENS) return;
    double *high = scratch + ((int64_t(row) * gridDim.y + token) * gridDim.z + q_head) * scratch_stride;
    double *both = high + r.length;
    reference_scores(p, row, token, q_head, true, high);
    reference_scores(p, row, token, q_head, false, both);
    const double lse = p.lse[int64_t(r.first_token + token) * gridDim.z + q_head];
    const int64_t pair = int64_t(row) * p.layer.n_kv_heads + head;
    const int tile = (token * p.group + q_head % p.group) / 8;
    const auto has = [&](const uint32_t *mask, int64_t line, int b) {
        return mask[line * p.mask_words + b / 32] >> b % 32 & 1;
    };
    for (int b = threadIdx.x; b < (r.length + 63) / 64; b += blockDim.x) {
        double sum = 0;
        for (int j = b * 64; j < min(r.length, b * 64 + 64); j++) {
            const bool is_record = find_token(p, row, head, j).kind == Token::kRecord;
            if (is_record && p.read_mask && !has(p.read_mask, pair, b)) continue;
            if (is_record && p.skipped_mask && has(p.skipped_mask, pair * p.mask_tiles + tile, b)) continue;
            const bool is_high = is_record && p.refined_mask && !has(p.refined_mask, pair * p.mask_tiles + tile, b);
            sum += exp((is_high ? high[j] : both[j]) - lse);
        }
        atomicMax(reinterpret_cast<int *>(mass + pair * stride + b), __float_as_int(float(sum)));
    }
}

/* After a decode; read_mask too if top_k > 0. */
void check_mass(const std::string &name, const Spec &spec, int top_k = 0)
{
    Case c(spec);
    const bool is_progressive = c.shape().progressive;
    const Layer layer(c, {top_k ? 0.8 : 0.0, 0, 10, 0});
    Selector selector(layer, {std::max(1, top_k), 0});
    const int most_new = HKV_DECODE_MAX_TOKENS, q_heads = spec.n_kv_heads * spec.group;
    hkv::DecodeParams &d = c.base_params();
    d.mask_words = selector.n_words();
    d.mask_tiles = ceil_div(most_new * spec.group, 8);
    DeviceArray<uint32_t> masks(size_t(2) * spec.n_rows() * spec.n_kv_heads * d.mask_tiles * d.mask_words);
    masks.fill(0);
    if (is_progressive) {
        d.skipped_mask = masks.get();
        d.refined_mask = masks.get() + masks.size() / 2;
    }
    if (top_k) {
        selector.run();
        d.read_mask = selector.mask();
    }
    c.poison_output();
    c.launch(0);

    constexpr int kGuard = 64;
    const int64_t stride = c.max_blocks() + 3;
    const size_t n = size_t(spec.n_rows()) * spec.n_kv_heads * stride;
    DeviceArray<float> mass(n + kGuard), want(n);
    mass.fill(0xff);
    want.fill(0);
    const hkv::MassParams m = {c.params(), spec.n_rows(), mass.get(), stride};
    CHECK_CUDA(hkv::launch_mass(m, nullptr));
    const std::vector<float> first = mass.host();
    CHECK_CUDA(hkv::launch_mass(m, nullptr));
    const std::vector<float> again = mass.host();

    int longest = 1;
    for (int r = 0; r < spec.n_rows(); r++) longest = std::max(longest, spec.older[r] + spec.n_new[r]);
    DeviceArray<double> scratch(size_t(spec.n_rows()) * most_new * q_heads * longest * 2);
    reference_mass_kernel<<<dim3(spec.n_rows(), most_new, q_heads), 256>>>(c.params(), scratch.get(),
                                                                           int64_t(longest) * 2, want.get(), stride);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<float> expected = want.host();
    double error = 0, largest = 0;
    bool zeros = true, guards = true;
    for (size_t i = 0; i < n; i++) {
        const double e = std::fabs(first[i] - expected[i]);
        error = std::max(error, e == e ? e / std::max(1e-6, double(expected[i])) : 1e9);
        largest = std::max(largest, double(expected[i]));
        zeros = zeros && (expected[i] != 0 || first[i] == 0);
    }
    for (int i = 0; i < kGuard; i++) {
        uint32_t bits;
        std::memcpy(&bits, &first[n + i], sizeof bits);
        guards = guards && bits == 0xffffffffu;
    }
    const bool repeats = !std::memcmp(first.data(), again.data(), n * sizeof(float));
    char text[128];
    std::snprintf(text, sizeof text, ": relative error %.1e, largest mass %.2f%s%s%s", error, largest,
                  zeros ? "" : " NOT ZERO", guards ? "" : " OUT OF BOUNDS", repeats ? "" : " NOT REPEATABLE");
    report(error < 1e-2 && largest > 0 && zeros && guards && repeats, "mass " + name + ", " + sizes(spec) + text);
}

void check_masses(bool quick)
{
    Spec s = edges(8, 128, HKV_F16);
    check_mass("dense", s);
    s.skip_mass = 0.3f;
    s.refine_mass = 0.6f;
    check_mass("progressive", s);
    check_mass("progressive, sparse", s, 12);
    if (quick) return;
    for (int bits : {8, 6, 4, 0})
        for (int dim : {64, 128, 256, 96, 16}) {
            s = edges(bits, dim, dim == 96 ? HKV_F16 : HKV_BF16);
            check_mass("dense", s);
            if (bits == 0) continue;
            s.skip_mass = 0.3f;
            s.refine_mass = 0.6f;
            check_mass("progressive", s);
        }
    for (int group : {1, 3, 16}) {
        s = edges(8, 128, HKV_F16);
        s.group = group;
        check_mass("dense", s);
        s.skip_mass = 0.3f;
        s.refine_mass = 0.6f;
        check_mass("progressive, sparse", s, 12);
    }
    for (bool pages : {true, false}) {
        s = edges(8, 128, HKV_F16);
        s.window_tokens = 1000;
        s.soft_cap = 2.f;
        s.sink_logits = true;
        s.hot_pages = pages;
        check_mass("window, cap, sinks", s);
        s.skip_mass = 0.3f;
        s.refine_mass = 0.6f;
        check_mass("window, cap, sinks, progressive", s);
    }
}

/* ---------------------------------------------------------------------------------------------------------- prefetch
 */

/* Mean clocks to load a line of the hot pages, one after the other, by one thread. */
__global__ void latency_kernel(const uint8_t *pages, size_t n_bytes, float *mean)
{
    uint32_t offset = 0;
    int64_t clocks = 0;
    int n = 0;
    for (size_t at = 0; at + 128 <= n_bytes; at += 128 * 37, n++) { /* apart, so that no line brings its neighbour */
        const int64_t begin = clock64();
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(offset) : "l"(pages + at + (offset & 1) * 4) : "memory");
        asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x12345678; @p trap; }" ::"r"(offset));
        clocks += clock64() - begin;
    }
    *mean = float(clocks) / float(n);
}

/* Pages that were prefetched are faster to read than those that were not. */
void check_prefetch()
{
    Spec s;
    s.older.assign(4, 3 * 64);
    s.n_new.assign(4, 1);
    s.hot_tokens = 128;
    s.older.push_back(0);
    s.n_new.push_back(0);
    const Case c(s);
    const hkv::DecodeParams p = c.params();
    DeviceArray<uint8_t> other(size_t(256) << 20);
    DeviceArray<float> mean(1);
    const size_t n_bytes = size_t(p.layer.n_hot_pages) * s.n_kv_heads * c.format().row_page_bytes;
    double clocks[2];
    for (int with = 0; with < 2; with++) {
        other.fill(with);
        if (with) CHECK_CUDA(hkv::launch_prefetch_hot(p.layer, p.plan, s.n_rows(), p.page_n_tokens, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        latency_kernel<<<1, 1>>>(p.layer.hot, n_bytes, mean.get());
        clocks[with] = mean.host()[0];
    }
    char text[128];
    std::snprintf(text, sizeof text, "prefetch: %.0f clocks a line instead of %.0f", clocks[1], clocks[0]);
    report(clocks[1] < 0.85 * clocks[0], text);
}

} // namespace

int main(int argc, char **argv)
{
    const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
    check_selections(quick);
    check_masses(quick);
    if (!quick) check_prefetch(); /* measures clocks */
    std::printf("%d failed\n", n_failed);
    return n_failed != 0;
}
