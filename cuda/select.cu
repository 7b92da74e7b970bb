/* select.cu - which L2 records decode reads: docs/transitions.md, "Selection among L2 records". One launch a layer.
 *
 * Contract. For every decode row and KV head: the bound of each L2 record that the row may see, then exactly the
 * records that the rule names, as bits of read_mask beside those of the L1 records. Every choice is by rank, ties by
 * the lower block, so the result is the same on every run; bounds are fp32 (below), records whose bounds or estimated
 * masses differ by less than their rounding may come in either order.
 *
 * Bounds. max(q lo, q hi) = q zero + 128 q scale + 120 |q| scale, as lo and hi are zero + 8 scale and zero + 248 scale.
 * A record's key parameters lie in memory as rows of an A fragment: one MMA of 16 channels makes q.scale (rows 0-7) and
 * q.zero (rows 8-15) of 8 records and 8 query columns, a second one |q|.scale. Equal records get equal bounds.
 *
 * Grid. (splits, slots) blocks of 8 warps, about two a multiprocessor: a slot is a (row, KV head), a split an equal
 * part of its blocks, 256 at a time: a thread a header, then a warp 8 L2 records. Whoever comes last of a slot's blocks
 * of threads ranks all its records. Many more (row, head) than slots are taken in rounds, unsplit.
 *
 * Ranking. Keys are 32-bit integers in the order of the floats. A histogram of 2,048 bins over the range that occurs
 * leaves few keys in the bin where the k-th lies; those are compared with one another. That is done on keys in shared
 * memory, without branches, as the ranking is a chain that one block of threads runs alone. Where many keys are equal,
 * the next field decides (bound, then block), and very long rows stay in global memory: shorter code, slower.
 * sparse_min_mass bisects, with masses in fixed point, which add up the same in any order.
 *
 * Bytes. 64 of every record's header, 4 D more of an L2 record, once, from all multiprocessors at a time.
 */
#include "select.cuh"

#include "launch.cuh"
#include "query.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRecords = 8;      /* that a warp takes at a time */
constexpr int kSplitBlocks = 64; /* that a block of threads should have at least */
constexpr int kBlocksPerSm = 2;  /* of threads */
constexpr int kBatchTiles = 8;   /* of query columns in shared memory */
constexpr int kMaxSlots = 1024;
constexpr int kStaged = 4096; /* candidates that fit into shared memory */
constexpr int kBins = 2048, kBinBits = 11;
constexpr int kAtOnce = 8;       /* keys that a thread loads at a time */
constexpr int kListed = 32;      /* keys that are compared with one another */
constexpr int kArrivalBits = 12; /* of a slot's counter; above them the number of its L2 records */
constexpr double kMassUnit = 1ll << 36;

static_assert(kBlockTokens * kMassUnit * (1 << (32 - kArrivalBits)) < 9.2e18, "masses add up in 63 bits");
typedef unsigned long long Mass;

/* ---------------------------------------------------------------------------------------------------------- scratch */

/* What one slot knows of its blocks, from the first that its row sees: [stride] keys of bounds, of histories, and
 * tokens. Keys have the order of floats; 0 is no candidate. */
struct Candidates {
    uint32_t *memory;
    int stride; /* a multiple of 32 */

    __device__ __forceinline__ uint32_t *bounds() const
    {
        return memory;
    }
    __device__ __forceinline__ uint32_t *histories() const
    {
        return memory + stride;
    }
    __device__ __forceinline__ uint8_t *n_tokens() const
    {
        return reinterpret_cast<uint8_t *>(memory + 2 * stride);
    }
};
__host__ __device__ constexpr size_t slot_bytes(int64_t n_blocks)
{
    return static_cast<size_t>(n_blocks) * (2 * sizeof(uint32_t) + sizeof(uint8_t));
}

/* Unsigned integers in the order of floats; 0 for nothing, which no float has but one NaN. */
__device__ __forceinline__ uint32_t key_of(float x)
{
    const uint32_t u = __float_as_uint(x + 0.f); /* -0 counts as 0 */
    return u ^ (u >> 31 ? ~0u : 0x80000000u);
}
__device__ __forceinline__ float float_of_key(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

/* ------------------------------------------------------------------------------------------------ a row and KV head */

struct Item {
    int row, head;
    int n_older, n_new;
    int first_block, n_blocks; /* whole words of the mask; from the first that a query sees */

    __device__ Item(const SelectParams &p, int item) : row(item / p.layer.n_kv_heads), head(item % p.layer.n_kv_heads)
    {
        const hkv_plan_row r = p.plan.rows[row];
        n_new = r.n_new;
        n_older = r.length - n_new;
        first_block = first_seen(p) / 32 * 32;
        n_blocks = (n_older + 32 * kBlockTokens - 1) / (32 * kBlockTokens) * 32 - first_block;
        if (n_new < 1 || n_new > HKV_DECODE_MAX_TOKENS) n_blocks = 0;
    }
    __device__ int first_seen(const SelectParams &p) const
    {
        return p.window_tokens > 0 ? max(0, n_older + 1 - p.window_tokens) / kBlockTokens : 0;
    }
    __device__ QueryColumns columns(const SelectParams &p) const
    {
        const hkv_format &f = p.layer.format;
        const uint16_t *q = static_cast<const uint16_t *>(p.q) + p.plan.rows[row].first_token * p.q_stride_token +
                            static_cast<int64_t>(head) * p.group * p.q_stride_head;
        return {q, p.q_stride_token, p.q_stride_head, n_new * p.group, p.group, f.head_dim, f.dtype == HKV_BF16};
    }
    __device__ uint32_t *mask(const SelectParams &p) const
    {
        return p.read_mask + (static_cast<int64_t>(row) * p.layer.n_kv_heads + head) * p.mask_words + first_block / 32;
    }
};

/* The wait for the predecessor, put off until something must be written, or was written by it. */
struct Start {
    const uint32_t step; /* that is under way, if anyone tells which blocks it writes */
    bool waited = false;

    __device__ explicit Start(const SelectParams &p) : step(p.block_step ? *p.step : 0)
    {
    }
    __device__ __forceinline__ void wait_once()
    {
        if (waited) return;
        wait_for_predecessor();
        let_successor_start();
        waited = true;
    }
};

/* A block as a KV head finds it. */
struct Found {
    int id = 0;       /* physical; 0: no record is to be looked at */
    int n_tokens = 0; /* that a query may see and the record holds */
    bool is_l2 = false;
    uint32_t history = 0; /* key, of an L2 record */
};

/* The header's fields that matter here. */
__device__ __forceinline__ hkv_record_header load_header(const SelectParams &p, int id, int head)
{
    static_assert(offsetof(hkv_record_header, mass_history) == 52, "in the fourth 16 bytes");
    hkv_record_header header = {};
    if (id) {
        const uint4 *record = reinterpret_cast<const uint4 *>(p.layer.record(id, head));
        uint4 *words = reinterpret_cast<uint4 *>(&header);
        words[0] = __ldcg(record);
        words[3] = __ldcg(record + 3);
    }
    return header;
}

/* Logical block `block`, which may lie past the end. By whole warps. */
__device__ Found find_block(const SelectParams &p, const Item &item, int block, Start &start)
{
    Found found;
    if (block >= item.first_seen(p) && block * kBlockTokens < item.n_older) {
        const int id = p.block_table[item.row * p.block_table_stride + block];
        const int page = hkv_plan_hot_page(&p.plan, item.row, block);
        if (id > 0 && id < p.layer.n_blocks && page < 0) found.id = id;
    }
    hkv_record_header header = load_header(p, found.id, item.head);
    const uint32_t written = p.block_step && found.id ? p.block_step[found.id] : start.step - 1u;
    if (__any_sync(kFullWarp, p.block_step && written == start.step)) {
        start.wait_once();
        header = load_header(p, found.id, item.head);
    }
    if (found.id) found.n_tokens = min(hkv_header_n_tokens(&header, kBlockTokens), item.n_older - block * kBlockTokens);
    found.is_l2 = found.n_tokens > 0 && header.tier == HKV_TIER_L2;
    if (found.is_l2) found.history = key_of(header.mass_history);
    return found;
}

/* ----------------------------------------------------------------------------------------------------------- bounds */

/* Key parameters of 8 records as A fragments: of the quad's record, or zero where record is NULL. */
template <int kSteps> struct KeyParams {
    uint4 steps[kSteps];

    __device__ __forceinline__ void load(const uint8_t *record, int dim)
    {
        const uint4 *from = reinterpret_cast<const uint4 *>(record + sizeof(hkv_record_header)) + threadIdx.x % 4;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
            steps[s] = make_uint4(0, 0, 0, 0);
            if (record && s * 16 < dim) steps[s] = __ldcg(from + s * 4);
        }
    }
    /* Largest bound of the quad's record over n_columns columns of query tiles. By whole warps. */
    __device__ __forceinline__ float bound(const uint4 *queries, int n_columns) const
    {
        constexpr float kMiddle = 0.5f * (HKV_CODE_MAX + HKV_CODE_MIN), kHalf = 0.5f * (HKV_CODE_MAX - HKV_CODE_MIN);
        const int lane = threadIdx.x % 32, c = lane % 4;
        float bound = -INFINITY;
#pragma unroll 1
        for (int n = 0; n * kTileColumns < n_columns; n++) {
            float sums[4] = {}, spread[4] = {};
#pragma unroll
            for (int s = 0; s < kSteps; s++) {
                const uint4 pair = queries[(n * kSteps / 2 + s / 2) * 32 + lane];
                const uint32_t q0 = s & 1 ? pair.z : pair.x, q1 = s & 1 ? pair.w : pair.y;
                const uint32_t a[4] = {steps[s].x, steps[s].y, steps[s].z, steps[s].w};
                mma_f16(sums, a, q0, q1);
                mma_f16(spread, a, q0 & 0x7fff7fffu, q1 & 0x7fff7fffu);
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (n * kTileColumns + 2 * c + j < n_columns)
                    bound = fmaxf(bound, fmaf(spread[j], kHalf, fmaf(sums[j], kMiddle, sums[2 + j])));
        }
        bound = fmaxf(bound, __shfl_xor_sync(kFullWarp, bound, 1));
        return fmaxf(bound, __shfl_xor_sync(kFullWarp, bound, 2));
    }
};

/* ---------------------------------------------------------------------------------------------------------- ranking */

/* Shared memory of the ranking. Between searches bins and n_listed are zero. */
struct Ranking {
    alignas(16) uint32_t bins[kBins + 1];
    alignas(16) uint32_t list[kListed][4]; /* ranks: field by field, larger comes first; the last is of no use */
    uint32_t low[kWarps], high[kWarps], sums[kWarps];
    Mass masses[kWarps];
    uint32_t bin, before, in_bin;
    int n_listed;
};

/* f(i, key) for elements 0 .. n - 1, n a multiple of 4. */
template <typename F> __device__ __forceinline__ void for_each(const uint32_t *keys, int n, const F &f)
{
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
        const uint4 four = *reinterpret_cast<const uint4 *>(keys + i);
        f(i, four.x);
        f(i + 1, four.y);
        f(i + 2, four.z);
        f(i + 3, four.w);
    }
}

/* Of keys. */
struct Range {
    uint32_t low = ~0u, high = 0;

    /* 0 is no key. */
    __device__ __forceinline__ void include(const uint4 &keys)
    {
        low = min(min(low, keys.x - 1u), min(min(keys.y - 1u, keys.z - 1u), keys.w - 1u)); /* 1 too low so far */
        high = max(max(high, keys.x), max(max(keys.y, keys.z), keys.w));
    }
};

/* The least and largest of all threads. */
__device__ void block_range(Ranking &r, uint32_t &least, uint32_t &largest)
{
    least = __reduce_min_sync(kFullWarp, least);
    largest = __reduce_max_sync(kFullWarp, largest);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        r.low[threadIdx.x / 32] = least;
        r.high[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    least = __reduce_min_sync(kFullWarp, r.low[threadIdx.x % kWarps]);
    largest = __reduce_max_sync(kFullWarp, r.high[threadIdx.x % kWarps]);
}
__device__ Mass block_sum(Ranking &r, Mass x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(kFullWarp, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) r.masses[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < kWarps; w++) x += r.masses[w];
    return x;
}

/* A slot's L2 records, in shared memory if kIsStaged; whoever is taken is no candidate any more. */
template <bool kIsStaged> struct Selection {
    Candidates candidates;
    Ranking &r;
    uint32_t *mask;
    int n; /* blocks */

    __device__ __forceinline__ void take(int i) const
    {
        candidates.bounds()[i] = candidates.histories()[i] = 0;
        atomicOr(mask + i / 32, 1u << i % 32);
    }
    __device__ void take_all() const
    {
        for_each(candidates.bounds(), n, [&](int i, uint32_t key) {
            if (key) atomicOr(mask + i / 32, 1u << i % 32);
        });
    }

    /* Ranks of candidates by keys, by second_keys where those are equal, by lower block where both are. */
    struct Order {
        const uint32_t *keys, *second_keys; /* [n] */
        int field = 0;                      /* that decides now, */
        uint32_t first = 0, second = 0;     /* among those with these values of the ones before */

        __device__ __forceinline__ uint32_t value(int i, uint32_t key) const
        {
            if (field == 0) return key;
            if (key != first) return 0;
            if (field == 1) return second_keys[i];
            return second_keys[i] == second ? ~static_cast<uint32_t>(i) : 0;
        }
    };
    /* Bits by which values of low .. high are shifted so that they fit the bins. */
    static __device__ __forceinline__ int bin_shift(uint32_t low, uint32_t high)
    {
        return max(0, 32 - __clz(static_cast<int>(high - low)) - kBinBits);
    }
    /* The histogram over low .. high is complete after a barrier: narrow low .. high down to the bin in which the
     * `need`-th largest value lies. Returns how many lie there; need becomes the place among them. */
    __device__ uint32_t narrow_to_bin(uint32_t &low, uint32_t &high, uint32_t &need) const
    {
        constexpr int kPerThread = kBins / kThreads;
        const int shift = bin_shift(low, high), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        __syncthreads();
        const int first_bin = (kThreads - 1 - static_cast<int>(threadIdx.x)) * kPerThread; /* the first have the last */
        uint32_t own[kPerThread], upto = 0;
#pragma unroll
        for (int i = 0; i < kPerThread; i += 4) { /* 16 bytes at a time: single words would lie in few banks */
            uint4 &four = *reinterpret_cast<uint4 *>(&r.bins[first_bin + i]);
            own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
            four = make_uint4(0, 0, 0, 0);
            upto += own[i] + own[i + 1] + own[i + 2] + own[i + 3];
        }
        const uint32_t total = upto;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const uint32_t other = __shfl_up_sync(kFullWarp, upto, step);
            if (lane >= step) upto += other;
        }
        if (lane == 31) r.sums[warp] = upto;
        __syncthreads();
        upto += __reduce_add_sync(kFullWarp, lane < warp ? r.sums[lane] : 0u);
        uint32_t before = upto - total;
        if (before < need && need <= upto) {
            int i = kPerThread - 1;
#pragma unroll
            for (int k = kPerThread - 1; k > 0; k--)
                if (i == k && before + own[k] < need) {
                    before += own[k];
                    i--;
                }
            uint32_t in_bin = own[0];
#pragma unroll
            for (int k = 1; k < kPerThread; k++) in_bin = i == k ? own[k] : in_bin;
            r.bin = static_cast<uint32_t>(first_bin + i);
            r.before = before;
            r.in_bin = in_bin;
        }
        __syncthreads();
        need -= r.before;
        low += r.bin << shift;
        high = low + min(high - low, (1u << shift) - 1u); /* low + 2^shift may not fit */
        return r.in_bin;
    }
    __device__ uint32_t narrow(const Order &order, uint32_t &low, uint32_t &high, uint32_t &need) const
    {
        const int shift = bin_shift(low, high);
        for_each(order.keys, n, [&](int i, uint32_t key) {
            const uint32_t x = order.value(i, key);
            if (x >= low && x <= high) atomicAdd(&r.bins[(x - low) >> shift], 1u);
        });
        return narrow_to_bin(low, high, need);
    }
    __device__ __forceinline__ void list(int i, uint32_t key, uint32_t second) const
    {
        uint32_t *rank = r.list[atomicAdd(&r.n_listed, 1)];
        rank[0] = key;
        rank[1] = second;
        rank[2] = ~static_cast<uint32_t>(i);
    }
    /* Take the first `need` of those who are listed. */
    __device__ void take_listed(uint32_t need) const
    {
        __syncthreads();
        const int n_listed = r.n_listed;
        if (static_cast<int>(threadIdx.x) < n_listed) {
            const uint4 own = *reinterpret_cast<const uint4 *>(r.list[threadIdx.x]);
            uint32_t n_before = 0;
#pragma unroll 4
            for (int i = 0; i < n_listed; i++) {
                const uint4 other = *reinterpret_cast<const uint4 *>(r.list[i]);
                n_before += other.x != own.x ? other.x > own.x : other.y != own.y ? other.y > own.y : other.z > own.z;
            }
            if (n_before < need) take(static_cast<int>(~own.z));
        }
        __syncthreads();
        if (threadIdx.x == 0) r.n_listed = 0;
    }
    /* Take all candidates above `high`, and the first `need` of those in low .. high, if they are to be listed. */
    __device__ void take_from(const Order &order, uint32_t low, uint32_t high, uint32_t need, bool is_listed) const
    {
        for_each(order.keys, n, [&](int i, uint32_t key) {
            const uint32_t x = order.value(i, key);
            if (x > high) return take(i);
            if (x >= low && is_listed) list(i, key, order.second_keys[i]);
        });
        if (is_listed)
            take_listed(need);
        else
            __syncthreads();
    }
    /* The same two for an order whose first field decides, without branches and with all loads at once. A warp looks
     * at 32 consecutive candidates, one word of the mask. */
    __device__ uint32_t narrow_by_key(const uint32_t *keys, uint32_t &low, uint32_t &high, uint32_t &need) const
    {
        const int shift = bin_shift(low, high);
#pragma unroll 1
        for (int base = threadIdx.x; base < n; base += kAtOnce * kThreads) {
            uint32_t key[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) key[j] = base + j * kThreads < n ? keys[base + j * kThreads] : 0;
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                const bool is_open = key[j] - low <= high - low;
                atomicAdd(&r.bins[is_open ? (key[j] - low) >> shift : kBins], 1u); /* bin kBins: nobody looks there */
            }
        }
        return narrow_to_bin(low, high, need);
    }
    __device__ void take_by_key(const Order &order, uint32_t low, uint32_t high, uint32_t need) const
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int base = 0; base < n; base += kAtOnce * kThreads) {
            uint32_t key[kAtOnce], taken = 0;
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                const int i = base + j * kThreads + threadIdx.x;
                key[j] = i < n ? order.keys[i] : 0;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                const int i = base + j * kThreads + threadIdx.x;
                const uint32_t bits = __ballot_sync(kFullWarp, key[j] > high);
                if (lane == j) taken = bits;
                if (key[j] > high) candidates.bounds()[i] = candidates.histories()[i] = 0;
                if (key[j] - low <= high - low) list(i, key[j], order.second_keys[i]);
            }
            if (taken) atomicOr(mask + base / 32 + lane * kWarps + warp, taken);
        }
        take_listed(need);
    }
    /* Take the first k of an order, whose keys lie in low .. high. There are more candidates than k. */
    __device__ void take_first(Order order, uint32_t k, uint32_t low, uint32_t high) const
    {
        uint32_t n_open = ~0u;
        if (kIsStaged) {
            while (n_open > kListed && low < high) n_open = narrow_by_key(order.keys, low, high, k);
            if (n_open <= kListed) return take_by_key(order, low, high, k);
        }
        for (;;) {
            while (n_open > kListed && low < high) n_open = narrow(order, low, high, k);
            take_from(order, low, high, k, n_open <= kListed);
            if (n_open <= kListed) return;
            /* Too many with the same value: the next field decides among them. */
            (order.field == 0 ? order.first : order.second) = low;
            order.field++;
            low = ~0u;
            high = 0;
            for_each(order.keys, n, [&](int i, uint32_t key) {
                const uint32_t x = order.value(i, key);
                if (x) low = min(low, x);
                high = max(high, x);
            });
            block_range(r, low, high);
        }
    }

    /* ------------------------------------------------------------------------------------------- sparse_min_mass */

    /* Upper bound of a record's softmax mass, up to a factor common to all: n_tokens exp(bound - largest). */
    __device__ __forceinline__ Mass mass(int i, uint32_t key, float scale, float largest) const
    {
        const float x = fminf(exp2f(scale * (float_of_key(key) - largest)), 1.f); /* NaN: 1 */
        return static_cast<Mass>(candidates.n_tokens()[i] * static_cast<double>(x) * kMassUnit);
    }
    /* Mass of the candidates with bounds of at least `least`, of those with exactly that only blocks up to `last`. */
    __device__ Mass mass_from(uint32_t least, int last, float scale, float largest) const
    {
        Mass sum = 0;
        for_each(candidates.bounds(), n, [&](int i, uint32_t key) {
            if (key && (key > least || (key == least && i <= last))) sum += mass(i, key, scale, largest);
        });
        return block_sum(r, sum);
    }
    /* Take more by bound until they have at least `need` of mass, which all together have. Returns their number, to
     * thread 0. */
    __device__ int take_mass(Mass need, float scale, float largest) const
    {
        uint32_t least = 0;
        int last = 0;
#pragma unroll 1
        for (uint32_t bit = 1u << 31; bit; bit >>= 1) /* the largest bound from which on there is enough */
            if (mass_from(least | bit, n, scale, largest) >= need) least |= bit;
#pragma unroll 1
        for (int step = 1 << 30; step; step >>= 1) /* the first block up to which there is */
            if (last + step <= n && mass_from(least, last + step - 1, scale, largest) < need) last += step;
        Mass n_taken = 0;
        for_each(candidates.bounds(), n, [&](int i, uint32_t key) {
            if (key == 0 || key < least || (key == least && i > last)) return;
            take(i);
            n_taken++;
        });
        return static_cast<int>(block_sum(r, n_taken));
    }

    /* The rule. There are more candidates than top_k; their keys lie in the ranges. Returns how many are taken, to
     * thread 0. */
    __device__ int run(int top_k, const Range &bounds, const Range &histories, float scale, float min_mass) const
    {
        const float largest = float_of_key(bounds.high);
        const bool has_histories = histories.low < histories.high; /* else the order is that of bounds throughout */
        const uint32_t n_by_bound = has_histories ? static_cast<uint32_t>(top_k + 1) / 2 : top_k,
                       n_by_history = top_k - n_by_bound;
        Mass allowed = 0;
        if (min_mass > 0.f)
            allowed = static_cast<Mass>(static_cast<double>(mass_from(0, 0, scale, largest)) *
                                        (1.0 - static_cast<double>(min_mass)));
#pragma unroll 1
        for (int pass = 0; pass < (n_by_history ? 2 : 1); pass++) {
            const Range &range = pass ? histories : bounds;
            take_first({pass ? candidates.histories() : candidates.bounds(), candidates.bounds()},
                       pass ? n_by_history : n_by_bound, range.low, range.high);
        }
        if (min_mass <= 0.f) return top_k;
        const Mass left = mass_from(0, 0, scale, largest);
        return top_k + (left > allowed ? take_mass(left - allowed, scale, largest) : 0);
    }
};

/* ----------------------------------------------------------------------------------------------------------- kernel */

template <int kSteps> struct Shared {
    union {
        uint4 queries[kBatchTiles * kSteps / 2 * 32];
        uint4 staged[slot_bytes(kStaged) / sizeof(uint4)];
    };
    Ranking ranking;
    int ids[kThreads];         /* of the blocks under way */
    uint32_t bounds[kThreads]; /* keys */
    uint8_t l2[kThreads];      /* those of them that are L2 */
    int n_l2_now, n_l2, is_last;
};

/* Bounds of the L2 records under way, over the columns from `first_column` on that are in shared memory. */
template <int kSteps>
__device__ void find_bounds(const SelectParams &p, int head, Shared<kSteps> &shared, int first_column, int n_columns)
{
    const int quad = threadIdx.x % 32 / 4, dim = p.layer.format.stored_dim, n = shared.n_l2_now;
    KeyParams<kSteps> params;
    for (int at = threadIdx.x / 32 * kRecords + quad; at - quad < n; at += kWarps * kRecords) {
        params.load(at < n ? p.layer.record(shared.ids[shared.l2[at]], head) : nullptr, dim);
        const uint32_t key = key_of(params.bound(shared.queries, n_columns));
        if (at >= n || threadIdx.x % 4 != 0) continue;
        uint32_t *bound = &shared.bounds[shared.l2[at]];
        *bound = first_column > 0 ? max(*bound, key) : key;
    }
}

/* Headers and bounds of blocks begin .. end - 1 of the slot: L1 bits to the mask, candidates to the slot. */
template <int kSteps>
__device__ void survey(const SelectParams &p, const Item &item, const Candidates &slot, int begin, int end,
                       Shared<kSteps> &shared, Start &start)
{
    constexpr int kBatchColumns = kBatchTiles * kTileColumns;
    const int thread = threadIdx.x, lane = thread % 32, n_columns = item.n_new * p.group;
    const auto n_words = [&](int first_column) {
        return (min(kBatchColumns, n_columns - first_column) + kTileColumns - 1) / kTileColumns * (kSteps / 2 * 32);
    };
    const QueryColumns columns = item.columns(p);
    uint4 words = columns.load(0, kSteps, min(thread, n_words(0) - 1)); /* on its way while headers are */
    for (int base = begin; base < end; base += kThreads) {
        const int i = base + thread;
        Found found;
        if (base + thread / 32 * 32 < end) found = find_block(p, item, item.first_block + i, start);
        if (thread == 0) shared.n_l2_now = 0;
        __syncthreads();
        const unsigned l2 = __ballot_sync(kFullWarp, found.is_l2);
        int at = 0;
        if (lane == 0 && l2) at = atomicAdd(&shared.n_l2_now, __popc(l2));
        at = __shfl_sync(kFullWarp, at, 0) + __popc(l2 & ((1u << lane) - 1u));
        if (found.is_l2) shared.l2[at] = static_cast<uint8_t>(thread);
        shared.ids[thread] = found.id;
        for (int first = 0; first < n_columns; first += kBatchColumns) {
            if (first > 0) __syncthreads();
            if (n_columns > kBatchColumns || base == begin) {
                if (first > 0 || base > begin)
                    words = columns.load(first / kTileColumns, kSteps, min(thread, n_words(first) - 1));
                if (thread < n_words(first)) shared.queries[thread] = columns.convert(words);
                for (int w = thread + kThreads; w < n_words(first); w += kThreads)
                    shared.queries[w] = columns.convert(columns.load(first / kTileColumns, kSteps, w));
            }
            __syncthreads();
            find_bounds(p, item.head, shared, first, min(kBatchColumns, n_columns - first));
        }
        __syncthreads();
        start.wait_once();
        const unsigned l1 = __ballot_sync(kFullWarp, found.n_tokens > 0 && !found.is_l2);
        if (i < end) {
            slot.bounds()[i] = found.is_l2 ? shared.bounds[thread] : 0;
            slot.histories()[i] = found.history;
            slot.n_tokens()[i] = static_cast<uint8_t>(found.n_tokens);
            if (lane == 0) item.mask(p)[i / 32] = l1;
        }
        if (thread == 0) shared.n_l2 += shared.n_l2_now;
        __syncthreads();
    }
}

__device__ __forceinline__ uint32_t add_acquire_release(uint32_t *p, uint32_t x)
{
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(x) : "memory");
    return old;
}

/* Count this block of threads in; true for the last of n, to which all others' writes are visible. shared.n_l2 then is
 * the slot's. */
template <int kSteps> __device__ bool arrive_last(uint32_t *counter, int n, Shared<kSteps> &shared)
{
    __syncthreads();
    if (n == 1) return true;
    if (threadIdx.x == 0) {
        const uint32_t sum = add_acquire_release(counter, static_cast<uint32_t>(shared.n_l2) << kArrivalBits | 1u);
        shared.is_last = (sum & ((1u << kArrivalBits) - 1u)) == static_cast<uint32_t>(n - 1);
        if (shared.is_last) {
            shared.n_l2 += static_cast<int>(sum >> kArrivalBits);
            *counter = 0;
        }
    }
    __syncthreads();
    return shared.is_last;
}

/* Choose among the slot's candidates, of which there are more than top_k, and set their bits. Returns how many, to
 * thread 0. */
template <int kSteps>
__device__ int choose(const SelectParams &p, const Item &item, const Candidates &slot, Shared<kSteps> &shared)
{
    const Candidates staged = {reinterpret_cast<uint32_t *>(shared.staged), kStaged};
    const bool is_staged = item.n_blocks <= kStaged;
    Range bounds, histories;
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < item.n_blocks; i += 4 * kThreads) {
        const uint4 four_bounds = __ldcg(reinterpret_cast<const uint4 *>(slot.bounds() + i));
        const uint4 four_histories = __ldcg(reinterpret_cast<const uint4 *>(slot.histories() + i));
        bounds.include(four_bounds);
        histories.include(four_histories);
        if (!is_staged) continue;
        *reinterpret_cast<uint4 *>(staged.bounds() + i) = four_bounds;
        *reinterpret_cast<uint4 *>(staged.histories() + i) = four_histories;
        if (p.min_mass > 0.f)
            *reinterpret_cast<uint32_t *>(staged.n_tokens() + i) =
                __ldcg(reinterpret_cast<const uint32_t *>(slot.n_tokens() + i));
    }
    block_range(shared.ranking, bounds.low, bounds.high);
    block_range(shared.ranking, histories.low, histories.high);
    bounds.low++;
    histories.low++;
    uint32_t *mask = item.mask(p);
    return is_staged ? Selection<true>{staged, shared.ranking, mask, item.n_blocks}.run(p.top_k, bounds, histories,
                                                                                        p.scale, p.min_mass)
                     : Selection<false>{slot, shared.ranking, mask, item.n_blocks}.run(p.top_k, bounds, histories,
                                                                                       p.scale, p.min_mass);
}

template <int kSteps>
__global__ void __launch_bounds__(kThreads, kSteps > 8 ? 1 : 2) select_kernel(const __grid_constant__ SelectParams p)
{
    extern __shared__ __align__(16) uint8_t memory[];
    Shared<kSteps> &shared = *reinterpret_cast<Shared<kSteps> *>(memory);
    Start start(p);
    const int n_items = p.n_rows * p.layer.n_kv_heads;
    const int64_t stride = p.mask_words * 32;
    uint32_t *counters = static_cast<uint32_t *>(p.workspace);
    const Candidates slot = {counters + kMaxSlots + slot_bytes(stride) / sizeof(uint32_t) * blockIdx.y,
                             static_cast<int>(stride)};
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.ranking.bins[i] = 0;
    if (threadIdx.x == 0) shared.ranking.n_listed = 0;
    for (int i = blockIdx.y; i < n_items; i += gridDim.y) {
        const Item item(p, i);
        const int n_words = item.n_blocks / 32, n_wanted = (item.n_blocks + kSplitBlocks - 1) / kSplitBlocks;
        const int n_active = min(static_cast<int>(gridDim.x), n_wanted);
        if (static_cast<int>(blockIdx.x) >= n_active) continue;
        const int begin = n_words * blockIdx.x / n_active * 32, end = n_words * (blockIdx.x + 1) / n_active * 32;
        __syncthreads();
        if (threadIdx.x == 0) shared.n_l2 = 0;
        survey(p, item, slot, begin, end, shared, start);
        if (!arrive_last(counters + blockIdx.y, n_active, shared) || shared.n_l2 == 0) continue;
        if (shared.n_l2 <= p.top_k) {
            Selection<false>{slot, shared.ranking, item.mask(p), item.n_blocks}.take_all();
            continue;
        }
        const int n_taken = choose(p, item, slot, shared);
        if (threadIdx.x == 0 && p.counters)
            atomicAdd(&reinterpret_cast<Mass &>(p.counters->n_records_unselected),
                      static_cast<Mass>(shared.n_l2 - n_taken));
    }
    start.wait_once();
}

int n_slots_of(int n_rows, int n_kv_heads)
{
    const int64_t n_items = static_cast<int64_t>(n_rows) * n_kv_heads;
    return static_cast<int>(n_items < kMaxSlots ? n_items : kMaxSlots);
}

template <int kSteps> cudaError_t launch(const SelectParams &params, dim3 grid, cudaStream_t stream)
{
    return launch_dependent(select_kernel<kSteps>, grid, kThreads, sizeof(Shared<kSteps>), stream, params);
}

} // namespace

size_t select_workspace_bytes(int max_rows, int n_kv_heads, int64_t mask_words)
{
    return kMaxSlots * sizeof(uint32_t) +
           static_cast<size_t>(n_slots_of(max_rows, n_kv_heads)) * slot_bytes(mask_words * 32);
}

cudaError_t launch_select(const SelectParams &params, cudaStream_t stream)
{
    if (params.n_rows < 1) return cudaSuccess;
    int device = 0, n_sms = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    const int n_slots = n_slots_of(params.n_rows, params.layer.n_kv_heads);
    const int64_t n_useful = (params.mask_words * 32 + kSplitBlocks - 1) / kSplitBlocks;
    int n_splits = n_sms * kBlocksPerSm / n_slots;
    if (n_splits < 1) n_splits = 1;
    if (n_splits > n_useful) n_splits = static_cast<int>(n_useful);
    const dim3 grid(static_cast<unsigned>(n_splits), static_cast<unsigned>(n_slots));
    const int dim = params.layer.format.stored_dim;
    return dim <= 64    ? launch<4>(params, grid, stream)
           : dim <= 128 ? launch<8>(params, grid, stream)
                        : launch<16>(params, grid, stream);
}

} // namespace hkv
