/* harness.cuh - build a layer's cache on a GPU, and attend to it in double precision. For check.cu and the benchmarks.
 */
#ifndef HKV_TESTS_CUDA_HARNESS_CUH
#define HKV_TESTS_CUDA_HARNESS_CUH

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../cuda/decode.cuh"
#include "../../cuda/format.cuh"

#define CHECK_CUDA(call)                                                                                               \
    do {                                                                                                               \
        const cudaError_t status_ = (call);                                                                            \
        if (status_ != cudaSuccess) {                                                                                  \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));                    \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

namespace harness
{

inline int n_failed = 0;

/* A line a case. */
inline void report(bool ok, const std::string &what)
{
    std::printf("%s %s\n", ok ? "ok  " : "FAIL", what.c_str());
    std::fflush(stdout);
    n_failed += !ok;
}

/* ---------------------------------------------------------------------------------------------------- device memory */

/* Freed memory stays with the process: mapping gigabytes again takes longer than most of what is tested. */
inline void keep_memory()
{
    static bool done = false;
    cudaMemPool_t pool;
    uint64_t threshold = UINT64_MAX;
    if (done) return;
    CHECK_CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
    CHECK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    done = true;
}

template <typename T> class DeviceArray
{
  public:
    DeviceArray() = default;
    explicit DeviceArray(size_t n) : n_(n)
    {
        keep_memory();
        CHECK_CUDA(cudaMallocAsync(reinterpret_cast<void **>(&data_), std::max<size_t>(1, n) * sizeof(T), nullptr));
    }
    explicit DeviceArray(const std::vector<T> &host) : DeviceArray(host.size())
    {
        CHECK_CUDA(cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~DeviceArray()
    {
        if (data_) cudaFreeAsync(data_, nullptr);
    }
    DeviceArray(DeviceArray &&other) noexcept : data_(other.data_), n_(other.n_)
    {
        other.data_ = nullptr;
    }
    DeviceArray &operator=(DeviceArray &&other) noexcept
    {
        std::swap(data_, other.data_);
        std::swap(n_, other.n_);
        return *this;
    }
    T *get() const
    {
        return data_;
    }
    size_t size() const
    {
        return n_;
    }
    void fill(int byte)
    {
        CHECK_CUDA(cudaMemset(data_, byte, n_ * sizeof(T)));
    }
    std::vector<T> host() const
    {
        std::vector<T> copy(n_);
        CHECK_CUDA(cudaMemcpy(copy.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return copy;
    }

  private:
    T *data_ = nullptr;
    size_t n_ = 0;
};

/* ------------------------------------------------------------------------------------------------------------------
 * data */

enum class Values { kNormal, kSmallWithSink, kOutlierChannels, kGraded };
inline const char *name_of(Values v)
{
    return v == Values::kNormal            ? "N(0,1)"
           : v == Values::kSmallWithSink   ? "V 0.02, sink +12"
           : v == Values::kOutlierChannels ? "K 200 +- 0.5"
                                           : "graded";
}

__host__ __device__ inline uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9E3779B1u ^ b * 0x85EBCA77u ^ c * 0xC2B2AE3Du;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
__device__ inline float normal(uint32_t a, uint32_t b, uint32_t c)
{
    const float u = (hash(a, b, c) + 1.f) * 2.3283064e-10f,
                v = hash(a ^ 0x5bd1e995u, b + 77u, c * 3u + 1u) * 2.3283064e-10f;
    return sqrtf(-2.f * logf(u)) * cosf(6.2831853f * v);
}
__device__ inline uint16_t element(float x, int dtype)
{
    return dtype == HKV_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
__device__ inline double value(uint16_t bits, int dtype)
{
    return dtype == HKV_BF16 ? static_cast<double>(__uint_as_float(static_cast<uint32_t>(bits) << 16))
                             : static_cast<double>(__half2float(__ushort_as_half(bits)));
}

/* x [n, heads, dim] of one kind; token i is token first + i of the whole. The sink is the key of tokens that are a
 * multiple of sink_every, made of the mean query of the heads that see it. */
struct Fill {
    uint16_t *x;
    int64_t n;
    int heads, dim, dtype;
    uint32_t seed;
    float sigma;
    bool outliers;
};
__global__ void fill_kernel(Fill f)
{
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < f.n * f.heads * f.dim;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int channel = static_cast<int>(i % f.dim);
        float x = f.sigma * normal(f.seed, static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32));
        if (f.outliers && (channel == 7 || channel == f.dim / 2 + 13))
            x = 200.f + hash(f.seed + 9, static_cast<uint32_t>(i), 5u) * 2.3283064e-10f - 0.5f;
        f.x[i] = element(x, f.dtype);
    }
}
/* Key of the first token of every sequence: about +12 nats for every query. */
__global__ void sink_kernel(uint16_t *k, int64_t k_token, const uint16_t *q, int64_t q_token, int group, int dim,
                            int dtype)
{
    const int head = blockIdx.x, heads = gridDim.x, channel = threadIdx.x;
    double sum = 0;
    for (int g = 0; g < group; g++)
        sum += value(q[(q_token * heads * group + head * group + g) * dim + channel], dtype);
    k[(k_token * heads + head) * dim + channel] = element(static_cast<float>(1.06 * sum), dtype);
}

/* Graded keys: every query has kAlong in channel 0, and the keys of a block share theirs, so that the block has 0.2 of
 * the softmax of n_hot other tokens (a share `high` of each head's blocks), 1e-4 (a share `low`) or 7e-3. */
constexpr float kAlong = 8.f;
__global__ void grade_kernel(uint16_t *k, int64_t first_block, int row_blocks, int n_hot, float low, float high,
                             int dim, int dtype)
{
    const int head = blockIdx.y, heads = gridDim.y, token = threadIdx.x;
    const uint32_t row = static_cast<uint32_t>((first_block + blockIdx.x) / row_blocks),
                   block = static_cast<uint32_t>((first_block + blockIdx.x) % row_blocks),
                   seed = hash(row, static_cast<uint32_t>(head), 29u);
    if (block + 1 == static_cast<uint32_t>(row_blocks)) return; /* the hot zone */
    uint32_t place = block + seed, mask = 1; /* of the block in a shuffled order: each step is one to one */
    while (mask < static_cast<uint32_t>(row_blocks - 1)) mask *= 2;
    mask--;
    for (int i = 0; i < 4; i++) {
        place = (place * (2 * (seed >> 5 * i) + 0x9E3779B1u) + seed) & mask;
        place ^= place >> 3;
    }
    const float u = (static_cast<float>(place) + 0.5f) / static_cast<float>(mask + 1), share = u < low ? 1e-4f
                                                                                               : u >= 1.f - high
                                                                                                   ? 0.2f
                                                                                                   : 7e-3f;
    const float shift = (logf(share) - logf(float(hkv::kBlockTokens) / n_hot)) * sqrtf(float(dim)) / kAlong;
    k[((static_cast<int64_t>(blockIdx.x) * hkv::kBlockTokens + token) * heads + head) * dim] = element(shift, dtype);
}
__global__ void along_kernel(uint16_t *q, int64_t n, int dim, int dtype)
{
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < n) q[i * dim] = element(kAlong, dtype);
}

/* Which records of a row are in L2, and which of them are not selected. */
__host__ __device__ inline bool is_l2(uint32_t block, uint32_t head, float share)
{
    return hash(block, head, 17u) * 2.3283064e-10f < share;
}
__host__ __device__ inline bool is_unselected(uint32_t block, uint32_t head, float share)
{
    return hash(block, head, 23u) * 2.3283064e-10f < share;
}
__global__ void tier_kernel(uint8_t *records, int64_t n_records, int heads, size_t record_bytes, float l2_share)
{
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n_records;
         i += int64_t(gridDim.x) * blockDim.x)
        if (is_l2(static_cast<uint32_t>(i / heads), static_cast<uint32_t>(i % heads), l2_share))
            reinterpret_cast<hkv_record_header *>(records + i * record_bytes)->tier = HKV_TIER_L2;
}

/* ------------------------------------------------------------------------------------------------------------------
 * case */

/* One layer and one step. */
struct Spec {
    std::vector<int> older; /* tokens of every row before the call */
    std::vector<int> n_new; /* of every row */
    int n_kv_heads = 8, group = 4, dim = 128;
    hkv_dtype dtype = HKV_BF16;
    int bits = 8;
    int hot_tokens = 32, sink_blocks = 1;
    bool hot_pages = true; /* false: everything is read from records */
    int window_tokens = 0;
    float soft_cap = 0;
    bool sink_logits = false;
    float skip_mass = 0, refine_mass = 0;
    float l2_share = 0;         /* of the records, in tier L2 */
    float unselected_share = 0; /* of those of L2, with bit 0 in a read_mask; there is none where it is 0 */
    Values values = Values::kNormal;
    float low_share = 0, high_share = 0; /* of graded keys' blocks */
    int copies = 1;                      /* of the cache, to rotate over */
    uint32_t seed = 1;

    int n_rows() const
    {
        return static_cast<int>(older.size());
    }
    int n_tokens() const
    {
        int n = 0;
        for (int x : n_new) n += x;
        return n;
    }
};

inline int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

class Case
{
  public:
    explicit Case(const Spec &spec, int blocks_per_sm = 0) : spec_(spec)
    {
        hkv_format_init(&format_, spec.bits, hkv::kBlockTokens, spec.dim, spec.dtype);
        place_blocks();
        make_tables();
        make_tokens();
        for (int i = 0; i < spec.copies; i++) make_copy(i);
        make_launch(blocks_per_sm);
        make_masks();
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    const Spec &spec() const
    {
        return spec_;
    }
    const hkv_format &format() const
    {
        return format_;
    }
    const hkv::DecodeShape &shape() const
    {
        return shape_;
    }
    hkv::DecodeParams params(int copy = 0) const
    {
        hkv::DecodeParams p = params_;
        p.layer = layer(copy);
        return p;
    }
    hkv::DecodeParams &base_params()
    {
        return params_;
    }
    hkv::LayerView layer(int copy) const
    {
        hkv::LayerView view = {};
        view.format = format_;
        view.pages = {records_[copy].get(), static_cast<size_t>(spec_.n_kv_heads) * format_.record_bytes,
                      format_.record_bytes};
        view.hot = pages_[copy].get();
        view.n_kv_heads = spec_.n_kv_heads;
        view.n_blocks = n_blocks_;
        view.n_hot_pages = n_pages_;
        return view;
    }
    void schedule(cudaStream_t stream = nullptr) const
    {
        CHECK_CUDA(hkv::launch_schedule(schedule_input_, params_.schedule, stream));
    }
    /* Partial results take turns, as no append comes between two launches. */
    void launch(int copy, cudaStream_t stream = nullptr) const
    {
        hkv::DecodeParams p = params(copy);
        turn_ = (turn_ + 1) % kTurns;
        p.partials += partials_.size() / kTurns * turn_;
        p.references += references_.size() / kTurns * turn_;
        CHECK_CUDA(hkv::launch_decode(shape_, p, stream));
    }
    /* Bytes of records and hot pages that a full read moves. */
    double bytes() const
    {
        double n = 0;
        for (int r = 0; r < spec_.n_rows(); r++) {
            const int n_blocks = ceil_div(spec_.older[r], hkv::kBlockTokens);
            for (int b = 0; b < n_blocks; b++) {
                const int n_tokens = std::min(hkv::kBlockTokens, spec_.older[r] - b * hkv::kBlockTokens);
                const bool hot = page_of(r, b) >= 0 || spec_.bits == 0;
                n += hot ? double(ceil_div(n_tokens, 16)) * 16 * format_.row_bytes : double(format_.record_bytes);
            }
        }
        return n * spec_.n_kv_heads;
    }
    int n_chunks() const
    {
        int n = 0;
        CHECK_CUDA(cudaMemcpy(&n, params_.schedule.n_chunks, sizeof n, cudaMemcpyDeviceToHost));
        return n;
    }
    hkv_counters counters() const
    {
        return counters_.host()[0];
    }
    void clear_counters()
    {
        counters_.fill(0);
    }
    std::vector<uint16_t> output() const
    {
        return out_.host();
    }
    void poison_output()
    {
        out_.fill(0xff);
        lse_.fill(0xff);
    }
    std::vector<float> lse() const
    {
        return lse_.host();
    }
    const DeviceArray<uint16_t> &new_k() const
    {
        return k_;
    }
    /* Words of skipped_mask or refined_mask, [rows, KV heads, tiles, mask_words]. */
    std::vector<uint32_t> told(bool refined) const
    {
        return (refined ? refined_mask_ : skipped_mask_).host();
    }
    void clear_told()
    {
        skipped_mask_.fill(0);
        refined_mask_.fill(0);
    }
    int block_id(int row, int block) const
    {
        return table_[row * table_stride_ + block];
    }
    int max_blocks() const
    {
        return static_cast<int>(table_stride_);
    }
    int page_of(int row, int block) const
    {
        const hkv_plan_row &r = rows_[row];
        const int stride = hot_stride_;
        if (block < r.n_sinks) return hot_pages_[row * stride + block];
        if (block >= r.window_first && block < r.window_first + r.n_window)
            return hot_pages_[row * stride + r.n_sinks + block - r.window_first];
        return -1;
    }

  private:
    static constexpr int kT = hkv::kBlockTokens;

    /* Physical blocks in random order, as an allocator that has been running for a while gives them. */
    void place_blocks()
    {
        table_stride_ = 1;
        int n = 0;
        for (int r = 0; r < spec_.n_rows(); r++) {
            const int blocks = ceil_div(spec_.older[r] + spec_.n_new[r], kT);
            table_stride_ = std::max<int64_t>(table_stride_, blocks);
            n += blocks;
        }
        n_blocks_ = n + 1;
        std::vector<int> ids(n);
        for (int i = 0; i < n; i++) ids[i] = i + 1;
        std::mt19937 random(spec_.seed);
        std::shuffle(ids.begin(), ids.end(), random);
        table_.assign(spec_.n_rows() * table_stride_, 0);
        for (int r = 0, i = 0; r < spec_.n_rows(); r++)
            for (int b = 0; b < ceil_div(spec_.older[r] + spec_.n_new[r], kT); b++)
                table_[r * table_stride_ + b] = ids[i++];
    }
    void make_tables()
    {
        hot_stride_ = spec_.sink_blocks + hkv_plan_max_window(spec_.hot_tokens, kT);
        int first = 0;
        n_pages_ = 0;
        hot_pages_.assign(spec_.n_rows() * hot_stride_, -1);
        for (int r = 0; r < spec_.n_rows(); r++) {
            hkv_plan_row row = {};
            row.first_token = first;
            row.n_new = spec_.n_new[r];
            row.length = spec_.older[r] + spec_.n_new[r];
            const int n_blocks = ceil_div(row.length, kT);
            row.window_first = hkv_plan_window_first(row.length, spec_.hot_tokens, kT);
            row.n_window = row.length > 0 ? n_blocks - row.window_first : 0;
            row.n_sinks = std::min(spec_.sink_blocks, row.window_first);
            if (spec_.hot_pages && spec_.bits)
                for (int i = 0; i < row.n_sinks + row.n_window; i++) hot_pages_[r * hot_stride_ + i] = n_pages_++;
            rows_.push_back(row);
            first += row.n_new;
        }
        std::vector<int32_t> page_tokens(n_pages_);
        for (int r = 0; r < spec_.n_rows(); r++)
            for (int b = 0; b < ceil_div(rows_[r].length, kT); b++)
                if (page_of(r, b) >= 0) page_tokens[page_of(r, b)] = std::min(kT, rows_[r].length - b * kT);
        page_tokens_ = DeviceArray<int32_t>(page_tokens);
        rows_device_ = DeviceArray<hkv_plan_row>(rows_);
        table_device_ = DeviceArray<int32_t>(table_);
        hot_pages_device_ = DeviceArray<int32_t>(hot_pages_);
    }
    void fill(const DeviceArray<uint16_t> &x, int64_t n, int heads, uint32_t seed, float sigma, bool outliers) const
    {
        fill_kernel<<<1056, 256>>>({x.get(), n, heads, spec_.dim, spec_.dtype, seed, sigma, outliers});
        CHECK_CUDA(cudaGetLastError());
    }
    float value_sigma() const
    {
        return spec_.values == Values::kSmallWithSink ? 0.02f : 1.f;
    }
    bool outliers() const
    {
        return spec_.values == Values::kOutlierChannels;
    }
    void make_tokens()
    {
        const int n = spec_.n_tokens(), n_q_heads = spec_.n_kv_heads * spec_.group;
        q_ = DeviceArray<uint16_t>(size_t(n) * n_q_heads * spec_.dim);
        k_ = DeviceArray<uint16_t>(size_t(n) * spec_.n_kv_heads * spec_.dim);
        v_ = DeviceArray<uint16_t>(size_t(n) * spec_.n_kv_heads * spec_.dim);
        out_ = DeviceArray<uint16_t>(size_t(n) * n_q_heads * spec_.dim);
        lse_ = DeviceArray<float>(size_t(n) * n_q_heads);
        counters_ = DeviceArray<hkv_counters>(1);
        counters_.fill(0);
        fill(q_, n, n_q_heads, spec_.seed * 31 + 1, 1.f, false);
        if (spec_.values == Values::kGraded)
            along_kernel<<<ceil_div(n * n_q_heads, 256), 256>>>(q_.get(), n * n_q_heads, spec_.dim, spec_.dtype);
        fill(k_, n, spec_.n_kv_heads, spec_.seed * 31 + 2, 1.f, outliers());
        fill(v_, n, spec_.n_kv_heads, spec_.seed * 31 + 3, value_sigma(), false);
        std::vector<float> sinks(n_q_heads);
        for (int h = 0; h < n_q_heads; h++) sinks[h] = 0.3f * static_cast<float>(h % 7) - 1.f;
        sinks_ = DeviceArray<float>(sinks);
    }
    /* Records by the library's own seal (blocks completed by a prefill), pages row by row; partial records as evicted.
     */
    void make_copy(int copy)
    {
        const int heads = spec_.n_kv_heads;
        records_.emplace_back(size_t(n_blocks_) * heads * format_.record_bytes);
        pages_.emplace_back(size_t(std::max(1, n_pages_)) * heads * format_.row_page_bytes);
        records_[copy].fill(0xff); /* NaN where nothing was written */
        pages_[copy].fill(0xff);
        std::vector<std::pair<int, int>> blocks; /* (row, logical block) */
        for (int r = 0; r < spec_.n_rows(); r++)
            for (int b = 0; b < ceil_div(spec_.older[r], kT); b++) blocks.push_back({r, b});
        const int batch = static_cast<int>(std::min<size_t>(4096, std::max<size_t>(1, blocks.size())));
        DeviceArray<uint16_t> k(size_t(batch) * kT * heads * spec_.dim), v(size_t(batch) * kT * heads * spec_.dim);
        for (size_t first = 0; first < blocks.size(); first += batch) {
            const int n = static_cast<int>(std::min<size_t>(batch, blocks.size() - first));
            const uint32_t seed = spec_.seed * 131 + static_cast<uint32_t>(copy * 7919 + first);
            fill(k, int64_t(n) * kT, heads, seed + 11, 1.f, outliers());
            fill(v, int64_t(n) * kT, heads, seed + 13, value_sigma(), false);
            if (spec_.values == Values::kGraded)
                grade_kernel<<<dim3(n, heads), kT>>>(k.get(), first, ceil_div(spec_.older[0], kT), spec_.hot_tokens + 1,
                                                     spec_.low_share, spec_.high_share, spec_.dim, spec_.dtype);
            for (int i = 0; i < n; i++)
                if (spec_.values == Values::kSmallWithSink && blocks[first + i].second == 0)
                    sink_kernel<<<heads, spec_.dim>>>(k.get(), int64_t(i) * kT, q_.get(),
                                                      rows_[blocks[first + i].first].first_token, spec_.group,
                                                      spec_.dim, spec_.dtype);
            append(copy, blocks.data() + first, n, k, v);
        }
        if (spec_.l2_share > 0 && spec_.bits)
            tier_kernel<<<1056, 256>>>(records_[copy].get(), int64_t(n_blocks_) * heads, heads, format_.record_bytes,
                                       spec_.l2_share);
    }
    /* Write n blocks by two plans: rows into pages where a block has one, then every full block's record. */
    void append(int copy, const std::pair<int, int> *blocks, int n, const DeviceArray<uint16_t> &k,
                const DeviceArray<uint16_t> &v)
    {
        std::vector<hkv_segment> into_pages, into_records;
        for (int i = 0; i < n; i++) {
            const int row = blocks[i].first, block = blocks[i].second, page = page_of(row, block);
            hkv_segment s = {};
            s.row = row;
            s.block = table_[row * table_stride_ + block];
            s.first_token = i * kT;
            s.n_tokens = std::min(kT, spec_.older[row] - block * kT);
            s.stamp = static_cast<uint32_t>(s.block);
            s.restart = 1;
            s.page = page;
            s.restore_page = -1;
            if (page >= 0 || spec_.bits == 0) into_pages.push_back(s);
            if (spec_.bits == 0) continue;
            s.page = -1;
            s.seal = s.n_tokens == kT;
            if (s.seal) into_records.push_back(s);
            if (s.n_tokens < kT && page < 0) partial_record(copy, s, k, v);
        }
        run_plan(copy, into_pages, k, v);
        run_plan(copy, into_records, k, v);
    }
    void run_plan(int copy, const std::vector<hkv_segment> &segments, const DeviceArray<uint16_t> &k,
                  const DeviceArray<uint16_t> &v)
    {
        if (segments.empty()) return;
        const int64_t stride_token = int64_t(spec_.n_kv_heads) * spec_.dim;
        const hkv::NewTokens tokens = {k.get(), v.get(), stride_token, spec_.dim, stride_token, spec_.dim};
        DeviceArray<hkv_segment> device(segments);
        DeviceArray<int32_t> counts(std::vector<int32_t>{static_cast<int32_t>(segments.size()), 0, 0});
        hkv_plan plan = {};
        plan.is_appended = counts.get() + 2;
        plan.segments = device.get();
        plan.n_segments = counts.get();
        plan.n_victims = counts.get() + 1;
        CHECK_CUDA(hkv::launch_append(layer(copy), plan, static_cast<int>(segments.size()), tokens, nullptr, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    /* A block's first tokens as a record: through a scratch page that is then evicted. */
    void partial_record(int copy, hkv_segment s, const DeviceArray<uint16_t> &k, const DeviceArray<uint16_t> &v)
    {
        const int64_t stride_token = int64_t(spec_.n_kv_heads) * spec_.dim;
        const hkv::NewTokens tokens = {k.get(), v.get(), stride_token, spec_.dim, stride_token, spec_.dim};
        DeviceArray<uint8_t> scratch(size_t(spec_.n_kv_heads) * format_.row_page_bytes);
        hkv::LayerView view = layer(copy);
        view.hot = scratch.get();
        s.page = 0;
        DeviceArray<hkv_victim> victims(std::vector<hkv_victim>{{0, s.block, s.n_tokens, s.stamp}});
        DeviceArray<int32_t> counts(std::vector<int32_t>{1, 0, 1, 0});
        hkv_plan plan = {};
        plan.is_appended = counts.get() + 3;
        plan.victims = victims.get();
        plan.n_segments = counts.get();
        plan.n_victims = counts.get() + 1;
        for (int step = 0; step < 2; step++) { /* write the page; claim it for nobody, which saves it */
            if (step == 1) {
                s.n_tokens = 0;
                s.block = 0;
                plan.n_victims = counts.get() + 2;
            }
            DeviceArray<hkv_segment> device(std::vector<hkv_segment>{s});
            plan.segments = device.get();
            CHECK_CUDA(hkv::launch_append(view, plan, 1, tokens, nullptr, nullptr));
            CHECK_CUDA(cudaDeviceSynchronize());
        }
    }
    void make_launch(int blocks_per_sm)
    {
        int most_new = 1;
        for (int n : spec_.n_new) most_new = std::max(most_new, n);
        const bool progressive = spec_.skip_mass > 0 || spec_.refine_mass > 0 || spec_.l2_share > 0;
        CHECK_CUDA(hkv::plan_decode(format_, spec_.group * most_new, progressive, blocks_per_sm, &shape_));
        const int n_chunks =
            hkv::max_chunks(shape_.n_workers, spec_.n_rows(), spec_.n_kv_heads, spec_.group * most_new, shape_.columns);
        partials_ = DeviceArray<uint8_t>(kTurns * hkv::decode_partial_bytes(shape_, n_chunks));
        references_ =
            DeviceArray<uint32_t>(kTurns * (hkv::decode_reference_bytes(shape_, n_chunks) / sizeof(uint32_t)));
        chunks_ = DeviceArray<hkv::Chunk>(n_chunks);
        schedule_words_ = DeviceArray<int32_t>(2);
        partials_.fill(0xff);
        chunks_.fill(0);
        references_.fill(0xff);

        hkv::DecodeParams &p = params_;
        p = {};
        p.plan.rows = rows_device_.get();
        p.plan.hot_pages = hot_pages_device_.get();
        p.plan.hot_stride = hot_stride_;
        p.schedule = {chunks_.get(), schedule_words_.get(), schedule_words_.get() + 1, shape_.n_workers, n_chunks};
        p.page_n_tokens = page_tokens_.get();
        p.block_table = table_device_.get();
        p.block_table_stride = table_stride_;
        const int64_t kv_token = int64_t(spec_.n_kv_heads) * spec_.dim, q_token = kv_token * spec_.group;
        p.tokens = {k_.get(), v_.get(), kv_token, spec_.dim, kv_token, spec_.dim};
        p.q = q_.get();
        p.out = out_.get();
        p.q_stride_token = p.out_stride_token = q_token;
        p.q_stride_head = p.out_stride_head = spec_.dim;
        p.sink_logits = spec_.sink_logits ? sinks_.get() : nullptr;
        p.lse = lse_.get();
        p.scale = 1.4426950408889634f / std::sqrt(static_cast<float>(spec_.dim));
        p.soft_cap = spec_.soft_cap * 1.4426950408889634f;
        p.group = spec_.group;
        p.window_tokens = spec_.window_tokens;
        p.skip_mass = spec_.skip_mass;
        p.refine_mass = spec_.refine_mass;
        p.counters = counters_.get();
        p.partials = partials_.get();
        p.references = references_.get();
        schedule_input_.plan = p.plan;
        schedule_input_.n_rows = spec_.n_rows();
        schedule_input_.n_kv_heads = spec_.n_kv_heads;
        schedule_input_.group = spec_.group;
        schedule_input_.columns = shape_.columns;
        schedule_input_.window_tokens = spec_.window_tokens;
        schedule_input_.page_weight =
            spec_.hot_pages && spec_.bits ? int(std::lround(double(format_.row_page_bytes) / format_.record_bytes)) : 0;
        schedule();
    }

    /* Bits of blocks that a row does not see are set: nothing may come of them. */
    void make_masks()
    {
        if (!shape_.progressive) return;
        int most_new = 1;
        for (int n : spec_.n_new) most_new = std::max(most_new, n);
        hkv::DecodeParams &p = params_;
        p.mask_words = ceil_div(max_blocks(), 32) + 1;
        p.mask_tiles = ceil_div(spec_.group * most_new, shape_.columns);
        const size_t pairs = size_t(spec_.n_rows()) * spec_.n_kv_heads;
        skipped_mask_ = DeviceArray<uint32_t>(pairs * p.mask_tiles * p.mask_words);
        refined_mask_ = DeviceArray<uint32_t>(pairs * p.mask_tiles * p.mask_words);
        clear_told();
        p.skipped_mask = skipped_mask_.get();
        p.refined_mask = refined_mask_.get();
        if (spec_.unselected_share <= 0) return;
        std::vector<uint32_t> mask(pairs * p.mask_words, 0xffffffffu);
        for (int r = 0; r < spec_.n_rows(); r++)
            for (int h = 0; h < spec_.n_kv_heads; h++)
                for (int b = 0; b < ceil_div(spec_.older[r], kT); b++) {
                    const uint32_t id = static_cast<uint32_t>(block_id(r, b)), head = static_cast<uint32_t>(h);
                    const bool is_read = page_of(r, b) < 0 && !(is_l2(id, head, spec_.l2_share) &&
                                                                is_unselected(id, head, spec_.unselected_share));
                    if (!is_read) mask[(size_t(r) * spec_.n_kv_heads + h) * p.mask_words + b / 32] &= ~(1u << b % 32);
                }
        read_mask_ = DeviceArray<uint32_t>(mask);
        p.read_mask = read_mask_.get();
    }

    Spec spec_;
    hkv_format format_ = {};
    int n_blocks_ = 0, n_pages_ = 0, hot_stride_ = 0;
    int64_t table_stride_ = 0;
    std::vector<int32_t> table_, hot_pages_;
    std::vector<hkv_plan_row> rows_;
    DeviceArray<hkv_plan_row> rows_device_;
    DeviceArray<int32_t> table_device_, hot_pages_device_, page_tokens_, schedule_words_;
    DeviceArray<uint16_t> q_, k_, v_, out_;
    DeviceArray<float> lse_, sinks_;
    DeviceArray<hkv_counters> counters_;
    std::vector<DeviceArray<uint8_t>> records_, pages_;
    static constexpr int kTurns = 8;
    DeviceArray<uint8_t> partials_; /* kTurns times what a launch needs, as are references_ */
    mutable int turn_ = 0;
    DeviceArray<uint32_t> references_, read_mask_, skipped_mask_, refined_mask_;
    DeviceArray<hkv::Chunk> chunks_;
    hkv::DecodeShape shape_ = {};
    hkv::ScheduleInput schedule_input_ = {};
    hkv::DecodeParams params_ = {};
};

/* -------------------------------------------------------------------------------------------------------------
 * reference */

/* One stored element in double precision. */
__device__ inline double record_value(const hkv_format &f, const uint8_t *record, bool is_v, bool both, int token,
                                      int channel)
{
    int32_t upper;
    const uint32_t at = is_v ? hkv_v_plane_offset(f.stored_dim, token, channel, &upper)
                             : hkv_k_plane_offset(f.stored_dim, token, channel, &upper);
    const int shift = upper ? 4 : 0;
    const uint16_t *params =
        reinterpret_cast<const uint16_t *>(record + (is_v ? f.v_params_offset : f.k_params_offset)) +
        (is_v ? hkv_v_param_index(&f, token, channel) : hkv_k_param_index(channel));
    int code = 16 * (record[(is_v ? f.v_high_offset : f.k_high_offset) + at] >> shift & 15);
    code += both ? record[(is_v ? f.v_low_offset : f.k_low_offset) + at] >> shift & 15 : 8;
    return double(hkv_f16_to_f32(params[2])) + double(hkv_f16_to_f32(params[0])) * code;
}

/* Where token `position` of a row is, and what a query sees there. */
struct Token {
    enum Kind { kAbsent, kRecord, kRows, kCall } kind;
    const uint8_t *data;
    int in_block;
};
__device__ inline Token find_token(const hkv::DecodeParams &p, int row, int head, int position)
{
    const hkv_plan_row r = p.plan.rows[row];
    if (position >= r.length - r.n_new) return {Token::kCall, nullptr, position - (r.length - r.n_new)};
    const int block = position / 64, in_block = position % 64, page = hkv_plan_hot_page(&p.plan, row, block);
    if (page >= 0) return {Token::kRows, p.layer.hot_page(page, head), in_block};
    const uint8_t *record = p.layer.record(p.block_table[row * p.block_table_stride + block], head);
    if (p.layer.format.bits == 0) return {Token::kRows, record, in_block};
    const hkv_record_header *h = reinterpret_cast<const hkv_record_header *>(record);
    const int64_t pair = int64_t(row) * p.layer.n_kv_heads + head;
    const bool is_read = !p.read_mask || (p.read_mask[pair * p.mask_words + block / 32] >> block % 32 & 1);
    const bool held =
        is_read && h->stamp && h->version == HKV_FORMAT_VERSION && h->planes && in_block < h->n_valid_tokens;
    return {held ? Token::kRecord : Token::kAbsent, record, in_block};
}
__device__ inline double token_value(const hkv::DecodeParams &p, const Token &t, int row, int head, bool is_v,
                                     bool both, int channel)
{
    const hkv_format &f = p.layer.format;
    if (t.kind == Token::kRecord) return record_value(f, t.data, is_v, both, t.in_block, channel);
    const uint16_t *at =
        t.kind == Token::kRows
            ? reinterpret_cast<const uint16_t *>(t.data + hkv_row_element_offset(&f, t.in_block, channel, is_v))
            : static_cast<const uint16_t *>(is_v ? p.tokens.v : p.tokens.k) +
                  (p.plan.rows[row].first_token + t.in_block) *
                      (is_v ? p.tokens.v_stride_token : p.tokens.k_stride_token) +
                  head * (is_v ? p.tokens.v_stride_head : p.tokens.k_stride_head) + channel;
    return value(*at, f.dtype);
}

/* Scores of one (row, query token, query head), natural units, -inf where not visible; x [length]. By all threads. */
__device__ inline void reference_scores(const hkv::DecodeParams &p, int row, int token, int q_head, bool high_only,
                                        double *x)
{
    const hkv_plan_row r = p.plan.rows[row];
    const hkv_format &f = p.layer.format;
    const int head = q_head / p.group, position = r.length - r.n_new + token;
    const uint16_t *q =
        static_cast<const uint16_t *>(p.q) + (r.first_token + token) * p.q_stride_token + q_head * p.q_stride_head;
    for (int j = threadIdx.x; j < r.length; j += blockDim.x) {
        const Token t = find_token(p, row, head, j);
        double s = -INFINITY;
        if (t.kind != Token::kAbsent && j <= position && (p.window_tokens == 0 || j > position - p.window_tokens)) {
            s = 0;
            for (int c = 0; c < f.head_dim; c++)
                s += value(q[c], f.dtype) * token_value(p, t, row, head, false, !high_only && f.bits != 4, c);
            s *= double(p.scale) / 1.4426950408889634;
            const double cap = double(p.soft_cap) / 1.4426950408889634;
            if (cap > 0) s = cap * tanh(s / cap);
        }
        x[j] = s;
    }
    __syncthreads();
}
template <typename F> __device__ double block_reduce(double x, F f)
{
    __shared__ double shared[256];
    __syncthreads();
    shared[threadIdx.x] = x;
    for (int k = 128; k; k >>= 1) {
        __syncthreads();
        if (threadIdx.x < k) shared[threadIdx.x] = f(shared[threadIdx.x], shared[threadIdx.x + k]);
    }
    __syncthreads();
    return shared[0];
}

/* Grid (rows, query tokens, query heads). shares [rows, kv heads, tiles, max_blocks], zero before: a record is judged
 * by the columns that are read together. */
__global__ void reference_shares_kernel(hkv::DecodeParams p, double *scratch, int64_t scratch_stride, float *shares,
                                        int columns, int n_tiles, int max_blocks)
{
    const int row = blockIdx.x, token = blockIdx.y, q_head = blockIdx.z, head = q_head / p.group;
    const int tile = (token * p.group + q_head % p.group) / columns;
    const hkv_plan_row r = p.plan.rows[row];
    if (token >= r.n_new) return;
    double *x = scratch + ((int64_t(row) * gridDim.y + token) * gridDim.z + q_head) * scratch_stride;
    reference_scores(p, row, token, q_head, true, x);
    double top = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < r.length; j += blockDim.x) {
        const Token t = find_token(p, row, head, j);
        if (t.kind == Token::kRows || t.kind == Token::kCall) top = fmax(top, x[j]);
    }
    top = block_reduce(top, [](double a, double b) { return fmax(a, b); });
    for (int j = threadIdx.x; j < r.length; j += blockDim.x) {
        const Token t = find_token(p, row, head, j);
        if (t.kind == Token::kRows || t.kind == Token::kCall) sum += exp(x[j] - top);
    }
    sum = block_reduce(sum, [](double a, double b) { return a + b; });
    for (int b = threadIdx.x; b < (r.length + 63) / 64; b += blockDim.x) {
        double mass = 0;
        for (int j = b * 64; j < min(r.length, b * 64 + 64); j++)
            if (find_token(p, row, head, j).kind == Token::kRecord) mass += exp(x[j] - top);
        atomicMax(reinterpret_cast<int *>(
                      shares + ((int64_t(row) * (gridDim.z / p.group) + head) * n_tiles + tile) * max_blocks + b),
                  __float_as_int(static_cast<float>(mass / sum)));
    }
}
/* out [tokens, q heads, dim] and lse, fp64. */
__global__ void reference_kernel(hkv::DecodeParams p, double *scratch, int64_t scratch_stride, const float *shares,
                                 int columns, int n_tiles, int max_blocks, double *out, double *lse)
{
    const int row = blockIdx.x, token = blockIdx.y, q_head = blockIdx.z, head = q_head / p.group;
    const int tile = (token * p.group + q_head % p.group) / columns;
    const hkv_plan_row r = p.plan.rows[row];
    if (token >= r.n_new) return;
    const int bits = p.layer.format.bits;
    double *x = scratch + ((int64_t(row) * gridDim.y + token) * gridDim.z + q_head) * scratch_stride;
    const float *share =
        shares ? shares + ((int64_t(row) * (gridDim.z / p.group) + head) * n_tiles + tile) * max_blocks : nullptr;
    const auto precise = [&](int j) {
        if (!share) return true;
        const uint8_t *record = p.layer.record(p.block_table[row * p.block_table_stride + j / 64], head);
        return share[j / 64] >= p.refine_mass &&
               reinterpret_cast<const hkv_record_header *>(record)->tier != HKV_TIER_L2;
    };
    if (share) { /* high-only scores are there from the first kernel; replace those that are refined or skipped */
        __syncthreads();
        for (int j = threadIdx.x; j < r.length; j += blockDim.x)
            if (find_token(p, row, head, j).kind == Token::kRecord && share[j / 64] < p.skip_mass) x[j] = -INFINITY;
        double *full = x + r.length;
        reference_scores(p, row, token, q_head, false, full);
        for (int j = threadIdx.x; j < r.length; j += blockDim.x)
            if (find_token(p, row, head, j).kind != Token::kRecord || (precise(j) && share[j / 64] >= p.skip_mass))
                x[j] = full[j];
        __syncthreads();
    } else {
        reference_scores(p, row, token, q_head, false, x);
    }
    double top = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < r.length; j += blockDim.x) top = fmax(top, x[j]);
    top = block_reduce(top, [](double a, double b) { return fmax(a, b); });
    if (p.sink_logits) top = fmax(top, double(p.sink_logits[q_head]));
    for (int j = threadIdx.x; j < r.length; j += blockDim.x) sum += x[j] = exp(x[j] - top);
    sum = block_reduce(sum, [](double a, double b) { return a + b; });
    if (p.sink_logits) sum += exp(double(p.sink_logits[q_head]) - top);
    const int64_t o = int64_t(r.first_token + token) * gridDim.z + q_head;
    const int dim = p.layer.format.head_dim, slices = blockDim.x / dim;
    __shared__ double partial[256];
    double a = 0;
    if (threadIdx.x < slices * dim)
        for (int j = threadIdx.x / dim; j < r.length; j += slices) {
            const Token t = find_token(p, row, head, j);
            if (x[j] > 0) a += x[j] * token_value(p, t, row, head, true, bits == 8 && precise(j), threadIdx.x % dim);
        }
    partial[threadIdx.x] = a;
    __syncthreads();
    if (threadIdx.x < dim) {
        for (int i = 1; i < slices; i++) a += partial[threadIdx.x + i * dim];
        out[o * dim + threadIdx.x] = a / sum;
    }
    if (threadIdx.x == 0) lse[o] = top + log(sum);
}

struct Reference {
    std::vector<double> out, lse;
    std::vector<char> unsure;  /* per (token, query head): some record's share lies too near a threshold to call */
    std::vector<float> shares; /* [rows, KV heads, tiles, max_blocks], 0 where there is no record to read */
};
inline Reference reference(const Case &c, int copy = 0)
{
    const Spec &s = c.spec();
    const hkv::DecodeParams p = c.params(copy);
    int longest = 1;
    for (int r = 0; r < s.n_rows(); r++) longest = std::max(longest, s.older[r] + s.n_new[r]);
    int most_new = 1;
    for (int n : s.n_new) most_new = std::max(most_new, n);
    const int q_heads = s.n_kv_heads * s.group;
    const bool progressive = (s.skip_mass > 0 || s.refine_mass > 0 || s.l2_share > 0) && s.bits;
    const int64_t stride = int64_t(longest) * (progressive ? 2 : 1);
    DeviceArray<double> scratch(size_t(s.n_rows()) * most_new * q_heads * stride);
    const int columns = c.shape().columns, n_tiles = ceil_div(most_new * s.group, columns);
    DeviceArray<float> shares(size_t(s.n_rows()) * s.n_kv_heads * n_tiles * c.max_blocks());
    DeviceArray<double> out(size_t(s.n_tokens()) * q_heads * s.dim), lse(size_t(s.n_tokens()) * q_heads);
    shares.fill(0);
    const dim3 grid(s.n_rows(), most_new, q_heads);
    if (progressive)
        reference_shares_kernel<<<grid, 256>>>(p, scratch.get(), stride, shares.get(), columns, n_tiles,
                                               c.max_blocks());
    reference_kernel<<<grid, 256>>>(p, scratch.get(), stride, progressive ? shares.get() : nullptr, columns, n_tiles,
                                    c.max_blocks(), out.get(), lse.get());
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<char> unsure(size_t(s.n_tokens()) * q_heads, 0);
    const std::vector<float> judged = shares.host();
    for (int r = 0, first = 0; r < s.n_rows(); first += s.n_new[r++])
        for (int t = 0; t < s.n_new[r] && progressive; t++)
            for (int h = 0; h < q_heads; h++) {
                const int tile = (t * s.group + h % s.group) / columns;
                const float *x = &judged[((size_t(r) * s.n_kv_heads + h / s.group) * n_tiles + tile) * c.max_blocks()];
                for (int b = 0; b < c.max_blocks(); b++)
                    for (float limit : {s.skip_mass, s.refine_mass})
                        if (std::fabs(x[b] - limit) < 3e-3f * limit) unsure[size_t(first + t) * q_heads + h] = 1;
            }
    return {out.host(), lse.host(), unsure, judged};
}

inline double from_bits(uint16_t bits, hkv_dtype dtype)
{
    return dtype == HKV_BF16 ? hkv_bf16_to_f32(bits) : hkv_f16_to_f32(bits);
}
/* |a - b| / |b|, the output's own rounding included (bf16: about 1.2e-3). NaN counts as 1. */
inline double relative_error(const std::vector<uint16_t> &a, const std::vector<double> &b, hkv_dtype dtype,
                             const std::vector<char> &unsure)
{
    double error = 0, norm = 0;
    for (size_t i = 0; i < b.size(); i++) {
        if (unsure[i / (b.size() / unsure.size())]) continue;
        const double d = from_bits(a[i], dtype) - b[i];
        error += d * d;
        norm += b[i] * b[i];
    }
    const double e = std::sqrt(error / norm);
    return e == e ? e : 1.0;
}

} // namespace harness

#endif
