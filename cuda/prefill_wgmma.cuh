/* prefill_wgmma.cuh - prefill attention by Hopper's warpgroup products (sm_90a), head sizes 64 and 128.
 *
 * A block of threads has 128 query rows and three warpgroups with roles: one producer fills a ring of stages, each a
 * tile of 64 keys and their values, and two consumers of 64 query rows attend. Records come by bulk copies into a ring
 * of their own, several ahead, and the producer unpacks them into stages while the consumers multiply; rows of pages
 * and of the call come straight into stages. Blocks are persistent: the producer runs ahead over the end of a tile of
 * queries. Queries stay in registers, so that shared memory serves keys and values alone: at full speed the tensor
 * cores take half of its bandwidth, and unpacking most of the rest.
 *
 * What a consumer cannot do beside its own products, softmax above all, runs beside those of the other consumer.
 */
#ifndef HKV_CUDA_PREFILL_WGMMA_CUH
#define HKV_CUDA_PREFILL_WGMMA_CUH

#include "prefill_math.cuh"
#include "wgmma.cuh"

namespace hkv
{
namespace
{

constexpr int kGroupThreads = 128; /* of a warpgroup */
constexpr int kWgmmaThreads = 3 * kGroupThreads, kWgmmaQueries = 128;
constexpr int kStages = 4, kRecordStages = 4;
constexpr int kProducerRegisters = 136, kConsumerRegisters = 184;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "what a block starts with is all there is");
constexpr int kLineBytes = 128; /* both ends of a bulk copy lie alike in their lines (docs/kernels.md) */

/* A step of the producer's work: keys, or the end of a tile of queries or of all. */
enum { kWorkStop = kKeyCall + 1 };

/* Rings and what is known of their stages. */
struct Rings {
    uint64_t full[kStages], empty[kStages];
    uint64_t record_full[kRecordStages], record_empty[kRecordStages];
    KeyTile keys[kStages], work[kRecordStages];
};

__host__ __device__ constexpr int stage_bytes(int dim)
{
    return key_tile_bytes(dim) + value_tile_bytes(dim);
}
__host__ __device__ constexpr int record_stage_bytes(const hkv_format &f)
{
    return ((f.bits ? static_cast<int>(f.record_bytes) : 0) + 2 * kLineBytes - 1) / kLineBytes * kLineBytes;
}
constexpr int wgmma_shared_bytes(const hkv_format &f)
{
    return 1024 + kStages * stage_bytes(f.head_dim) + kRecordStages * record_stage_bytes(f) +
           static_cast<int>(sizeof(Rings));
}

/* A place in a ring of kSize. */
template <int kSize> struct RingCursor {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage < kSize) return;
        stage = 0;
        parity ^= 1;
    }
};

/* The n-th tile of a block: there and back, as the early tiles are the heavy ones. */
__device__ __forceinline__ int tile_index(int n)
{
    return n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* --------------------------------------------------------------------------------------------------------- producer */

template <int kDim> struct PrefillProducer {
    const PrefillParams &p;
    Rings &rings;
    uint32_t stages;  /* shared memory */
    uint8_t *records; /* shared memory */
    int record_bytes; /* of a stage */
    int warp, lane;

    RingCursor<kStages> filled = {};
    int pending = -1; /* stage whose rows are on their way */

    /* ---------------------------------------------------------------------- the first warp's part: what comes next */

    RingCursor<kRecordStages> fetched = {};
    int n_tiles = 0;
    bool has_tile = false;
    QueryTile tile = {};
    KeyWalk walk = {};

    __device__ KeyTile next_work()
    {
        if (!has_tile) {
            has_tile = find_query_tile(p, tile_index(n_tiles++), kWgmmaQueries, lane, &tile);
            if (!has_tile) return {kWorkStop, 0, 0, nullptr, nullptr};
            walk.start(p, tile);
        }
        const KeyTile keys = walk.next(p, tile, lane);
        has_tile = keys.kind != kKeyEnd;
        return keys;
    }
    /* True until all is fetched. */
    __device__ bool fetch()
    {
        const KeyTile work = next_work();
        barrier_wait(shared_address(&rings.record_empty[fetched.stage]), fetched.parity ^ 1);
        if (lane == 0) rings.work[fetched.stage] = work;
        const uint32_t skew = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(work.source) % kLineBytes);
        copy_to_shared(shared_address(records + fetched.stage * record_bytes) + skew, work.source,
                       work.kind == kKeyRecord ? p.layer.format.record_bytes : 0,
                       shared_address(&rings.record_full[fetched.stage]), lane);
        fetched.advance();
        return work.kind != kWorkStop;
    }

    /* ------------------------------------------------------------------------------------------ stages, by all warps
     */

    __device__ __forceinline__ uint32_t stage_keys() const
    {
        return stages + filled.stage * stage_bytes(kDim);
    }
    __device__ __forceinline__ void publish(int stage) const
    {
        fence_stores_for_products();
        barrier_arrive(shared_address(&rings.full[stage]));
    }
    __device__ __forceinline__ void publish_pending()
    {
        if (pending < 0) return;
        wait_copies<0>();
        publish(pending);
        pending = -1;
    }
    __device__ __forceinline__ void begin_stage(const KeyTile &keys) const
    {
        barrier_wait(shared_address(&rings.empty[filled.stage]), filled.parity ^ 1);
        if (threadIdx.x == 0) rings.keys[filled.stage] = keys;
    }
    __device__ __forceinline__ void put_record(KeyTile keys, const uint8_t *record)
    {
        const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(record);
        keys.n_tokens = min(keys.n_tokens, hkv_header_n_tokens(header, kBlockTokens));
        if (keys.n_tokens == 0) return;
        const RecordView<kDim> view = {record, kDim, header->planes, keys.n_tokens};
        begin_stage(keys);
#pragma unroll
        for (int i = 0; i < kDim / 64; i++) unpack_keys(view, stage_keys(), warp * kDim / 64 + i, lane);
        if (warp == 0) unpack_key_params(view, stage_keys(), lane);
#pragma unroll
        for (int i = 0; i < kDim / 64; i++)
            unpack_values(view, stage_keys() + key_tile_bytes(kDim), warp * kDim / 64 + i, lane);
        publish(filled.stage);
        filled.advance();
    }
    /* Rows are published when the next ones are on their way. */
    __device__ __forceinline__ void put_rows(const KeyTile &keys)
    {
        begin_stage(keys);
        copy_rows<kDim, kGroupThreads>(p, keys, false, stage_keys(), threadIdx.x);
        copy_rows<kDim, kGroupThreads>(p, keys, true, stage_keys() + key_tile_bytes(kDim), threadIdx.x);
        commit_copies();
        if (pending >= 0) {
            wait_copies<1>();
            publish(pending);
        }
        pending = filled.stage;
        filled.advance();
    }
    __device__ __forceinline__ void put_end(const KeyTile &keys)
    {
        begin_stage(keys);
        publish(filled.stage);
        filled.advance();
    }
    __device__ void run()
    {
        bool more = warp == 0;
        for (int i = 0; i < kRecordStages - 1 && more; i++) more = fetch();
        for (RingCursor<kRecordStages> cursor;; cursor.advance()) {
            if (more) more = fetch();
            barrier_wait(shared_address(&rings.record_full[cursor.stage]), cursor.parity);
            const KeyTile keys = rings.work[cursor.stage];
            if (keys.kind == kKeyPage || keys.kind == kKeyCall) {
                put_rows(keys);
            } else {
                publish_pending();
                if (keys.kind == kWorkStop) break;
                if (keys.kind == kKeyEnd)
                    put_end(keys);
                else
                    put_record(keys, records + cursor.stage * record_bytes +
                                         reinterpret_cast<uintptr_t>(keys.source) % kLineBytes);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&rings.record_empty[cursor.stage]));
        }
    }
};

/* -------------------------------------------------------------------------------------------------------- consumers */

/* One of the two warpgroups that attend, one tile of queries. */
template <int kDim, bool kBf16> struct PrefillConsumer {
    static constexpr int kSteps = kDim / 16;

    const PrefillParams &p;
    Rings &rings;
    uint32_t stages;
    int lane;
    const QueryTile &tile;
    const QueryRows rows;

    RingCursor<kStages> cursor;
    Softmax softmax = {};
    bool has_queries = false;
    uint32_t q[kSteps][4];
    float o[kDim / 8][4];

    /* Queries as A fragments; those of a bf16 model as halves where they meet records. */
    template <bool kHalves> __device__ __forceinline__ void load_queries()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint16_t *row = static_cast<const uint16_t *>(p.q) + 2 * (lane % 4) +
                                  query_offset(p, tile, rows.query(tile, i), p.q_stride_token, p.q_stride_head);
#pragma unroll
            for (int step = 0; step < kSteps; step++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t pair = *reinterpret_cast<const uint32_t *>(row + step * 16 + half * 8);
                    if (kBf16 && kHalves) {
                        const float2 f = unpack_bf162(pair);
                        pair = pack_half2(f.x, f.y);
                    }
                    q[step][half * 2 + i] = pair;
                }
        }
    }
    __device__ __forceinline__ uint32_t stage_keys(int stage) const
    {
        return stages + stage * stage_bytes(kDim);
    }
    __device__ __forceinline__ const KeyTile &await_keys() const
    {
        barrier_wait(shared_address(&rings.full[cursor.stage]), cursor.parity);
        return rings.keys[cursor.stage];
    }
    __device__ __forceinline__ void release(int stage) const
    {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&rings.empty[stage]));
    }
    template <bool kRecord>
    __device__ __forceinline__ void issue_scores(const KeyTile &keys, int stage, float (&s)[kScoreTiles][4],
                                                 float (&extra)[1][4]) const
    {
        /* At head size 64 ptxas 13.0 puts probabilities into the registers of queries although the next tile needs
         * them. With copies made for every tile it may: 0 is not known to be 0. */
        const uint32_t nothing = kDim == 64 ? static_cast<uint32_t>(keys.position) >> 31 : 0u;
        uint32_t a[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; step++)
#pragma unroll
            for (int j = 0; j < 4; j++) a[step][j] = q[step][j] ^ nothing;
        fence_products();
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const uint64_t b = swizzled_tile(stage_keys(stage) + step / 4 * kKeyPanel + step % 4 * 32, 16, 1024);
            if (kRecord)
                multiply_more(s, extra, a[step], b, step == 0);
            else
                multiply<kBf16, false>(s, a[step], b, step == 0);
        }
        commit_products();
    }
    template <bool kRecord> __device__ __forceinline__ void issue_values(int stage, const uint32_t (&a)[kTiles][4])
    {
        const uint32_t values = stage_keys(stage) + key_tile_bytes(kDim);
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            if (kRecord)
                multiply<false, false>(o, a[t], swizzled_tile(values + t * 32, 16, 1024), false);
            else
                multiply<kBf16, true>(o, a[t], swizzled_tile(values + t * 2048, kValuePanel, 1024), false);
        }
        commit_products();
    }
    template <bool kRecord> static __device__ __forceinline__ bool is_kind(const KeyTile &keys)
    {
        return kRecord ? keys.kind == kKeyRecord : keys.kind == kKeyPage || keys.kind == kKeyCall;
    }
    /* Scores that have arrived into probabilities; true if accumulators must be scaled. */
    template <bool kRecord>
    __device__ __forceinline__ bool weigh(const KeyTile &keys, float (&s)[kScoreTiles][4], float (&extra)[1][4],
                                          float (&factor)[2])
    {
        float base[2] = {0.f, 0.f};
        hold(s);
        if (kRecord) {
            hold(extra);
            record_base(extra[0], lane, base);
        }
        return soften(p, rows, keys, lane, s, base, softmax, factor);
    }
    /* With the branch ptxas finds no registers for running products (C7511) in one of the four kernels. */
    __device__ __forceinline__ void scale_outputs(bool is_needed, const float (&factor)[2])
    {
        constexpr bool kAlways = kDim == 64 && kBf16;
#pragma unroll
        for (int n = 0; n < kDim / 8; n++)
#pragma unroll
            for (int j = 0; kAlways && j < 4; j++) o[n][j] *= factor[j / 2];
#pragma unroll
        for (int n = 0; !kAlways && n < kDim / 8; n += 8)
            scale_if(is_needed, *reinterpret_cast<float(*)[8][4]>(&o[n]), factor);
    }
    /* All consecutive stages of one kind. */
    template <bool kRecord> __device__ __forceinline__ void add_keys()
    {
        float s[kScoreTiles][4], extra[1][4], factor[2];
        uint32_t a[kTiles][4];
        if (!is_kind<kRecord>(await_keys())) return;
        if (kBf16 || kRecord || !has_queries) load_queries<kRecord>();
        has_queries = true;
        for (;;) {
            const KeyTile &keys = await_keys();
            if (!is_kind<kRecord>(keys)) break;
            issue_scores<kRecord>(keys, cursor.stage, s, extra);
            wait_products<0>();
            const bool raise = weigh<kRecord>(keys, s, extra, factor);
            scale_outputs(raise, factor);
            pack_probabilities<kBf16 && !kRecord>(s, a);
            hold(o);
            fence_products();
            issue_values<kRecord>(cursor.stage, a);
            wait_products<0>();
            hold(o);
            release(cursor.stage);
            cursor.advance();
        }
    }
    __device__ void run()
    {
#pragma unroll
        for (int n = 0; n < kDim / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
        add_keys<true>();
        add_keys<false>();
        await_keys(); /* the end of the tile */
        release(cursor.stage);
        cursor.advance();
        store_rows<kBf16>(p, tile, rows, softmax, lane, o);
    }
};

/* ----------------------------------------------------------------------------------------------------------- kernel */

template <int kDim, bool kBf16>
__global__ void __launch_bounds__(kWgmmaThreads, 1) prefill_wgmma_kernel(const __grid_constant__ PrefillParams p)
{
#if HKV_HAS_WGMMA
    extern __shared__ uint8_t memory[];
    uint8_t *stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    uint8_t *records = stages + kStages * stage_bytes(kDim);
    const int record_stage = record_stage_bytes(p.layer.format);
    Rings &rings = *reinterpret_cast<Rings *>(records + kRecordStages * record_stage);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            barrier_init(shared_address(&rings.full[i]), kGroupThreads);
            barrier_init(shared_address(&rings.empty[i]), 2 * kGroupThreads / 32);
        }
        for (int i = 0; i < kRecordStages; i++) {
            barrier_init(shared_address(&rings.record_full[i]), kCopyArrivals);
            barrier_init(shared_address(&rings.record_empty[i]), kGroupThreads / 32);
        }
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();
    if (warp < kGroupThreads / 32) {
        give_registers<kProducerRegisters>();
        PrefillProducer<kDim>{p, rings, shared_address(stages), records, record_stage, warp, lane}.run();
    } else {
        take_registers<kConsumerRegisters>();
        RingCursor<kStages> cursor;
        for (int n = 0;; n++) {
            QueryTile tile;
            if (!find_query_tile(p, tile_index(n), kWgmmaQueries, lane, &tile)) break;
            PrefillConsumer<kDim, kBf16> consumer{
                p, rings, shared_address(stages), lane, tile, QueryRows(p, tile, (warp - 4) * 16, lane), cursor};
            consumer.run();
            cursor = consumer.cursor;
        }
    }
#endif
}

} // namespace
} // namespace hkv

#endif
