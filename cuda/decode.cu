/* decode.cu - decode attention that reads records in full: one persistent launch over hot pages, records and the call's
 * own tokens. And the host's side of decoding, for decode_progressive.cu too.
 *
 * Contract. For every decode row of the plan (1 to 8 new tokens): out = softmax(scale q.k) V over all older tokens as
 * stored and the new ones as given, reading as docs/transitions.md says. Same input, same bits.
 *
 * Grid. n_workers blocks of threads, all resident; worker w takes chunks w, w + n_workers, ... of the schedule. A block
 * is one producer warp and four consumers. The producer walks the blocks of a chunk and starts one bulk copy a record
 * (or a quarter of a hot page) into a ring of stages. Item i belongs to consumer i % 4, which is also its KV head where
 * a chunk has four: then a warp has a head to itself and nothing is exchanged until the chunk ends.
 *
 * Bytes. Per token, layer and KV head the record's 141 (INT4), 205 (K8V4) or 269 (INT8) at D = 128, each once; 512 hot.
 *
 * Why this tiling. What limits decode is latency times bandwidth: about 64 KB must be under way per SM at all times,
 * and the arithmetic of 8 warps must hide behind it. Four neighbouring heads of a page make runs of 69 KB in memory;
 * one bulk copy a record needs no address arithmetic; one warp a record needs no barrier among consumers.
 * docs/kernels.md has the alternatives and their times.
 */
#include "decode_unit.cuh"
#include "decode_variant.cuh"
#include "launch.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = (kConsumers + 1) * 32;
constexpr int kMaxStages = 32;
constexpr int kRowTokens = HKV_TILE_TOKENS; /* of a 16-bit page in one item */

enum ItemKind { kItemNothing, kItemRecord, kItemRows };

/* What a stage holds. */
struct Item {
    int16_t kind, is_last; /* of this consumer in this chunk */
    int32_t position;      /* of its first token in the sequence */
    int32_t n_tokens;      /* that may be read, before the record's own header is looked at */
    int32_t skew;          /* byte of the stage where it begins */
};

/* Fixed part of dynamic shared memory, behind ring and areas. */
struct Control {
    Item items[kMaxStages];
    Tally tallies[kConsumers];
    uint64_t full[2 * kMaxStages]; /* a stage's even and odd generations apart: any consumer may own any stage */
    uint64_t empty[kMaxStages];
};

/* A position in the ring. */
struct Cursor {
    int stage, generation;

    __device__ __forceinline__ void advance(int n, int n_stages)
    {
        stage += n;
        while (stage >= n_stages) {
            stage -= n_stages;
            generation++;
        }
    }
    __device__ __forceinline__ uint32_t full_barrier(const Control &control) const
    {
        return shared_address(&control.full[(generation & 1) * kMaxStages + stage]);
    }
};

/* --------------------------------------------------------------------------------------------------------- producer */

/* The warp that fills the ring. */
struct Producer {
    const DecodeParams &p;
    uint8_t *ring;
    Control &control;
    int lane, n_heads;
    uint32_t record_bytes; /* that are read of a record */
    Cursor cursor = {0, 0};
    int n_items = 0; /* of this chunk so far */
    bool waited = false;

    /* The predecessor, append, writes pages and records of this step; all else is there before the wait. */
    __device__ __forceinline__ void wait_once()
    {
        if (!waited) wait_for_predecessor();
        waited = true;
    }
    __device__ __forceinline__ void push(const Item &item, const uint8_t *source, uint32_t n_bytes)
    {
        barrier_wait(shared_address(&control.empty[cursor.stage]), (cursor.generation & 1) ^ 1);
        if (lane == 0) control.items[cursor.stage] = item;
        copy_to_shared(shared_address(ring + cursor.stage * p.stage_bytes + item.skew), source, n_bytes,
                       cursor.full_barrier(control), lane);
        cursor.advance(1, p.n_stages);
        n_items++;
    }
    __device__ __forceinline__ void push_item(ItemKind kind, const uint8_t *source, int position, int n_tokens,
                                              uint32_t n_bytes)
    {
        const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kLine);
        push({static_cast<int16_t>(kind), 0, position, n_tokens, skew}, source, n_bytes);
    }
    /* Fill up the consumers' round; then one more that tells each of them that it was the last. */
    __device__ __forceinline__ void close_round()
    {
        Item nothing = {kItemNothing, 0, 0, 0, 0};
        while (n_items % kConsumers) push(nothing, nullptr, 0);
        nothing.is_last = 1;
        for (int i = 0; i < kConsumers; i++) push(nothing, nullptr, 0);
    }
    /* A block's rows (page of head h at page + h * head_stride), kRowTokens an item. */
    __device__ __forceinline__ void push_rows(const uint8_t *page, size_t head_stride, int block, int n_tokens)
    {
        const int row_bytes = p.layer.format.row_bytes;
        for (int first = 0; first < n_tokens; first += kRowTokens)
            for (int h = 0; h < n_heads; h++)
                push_item(kItemRows, page + h * head_stride + first * row_bytes, block * kBlockTokens + first,
                          min(kRowTokens, n_tokens - first), static_cast<uint32_t>(kRowTokens * row_bytes));
    }
    /* All hot pages of a row that its queries can see: looked up 32 at a time, a lane each. */
    __device__ void push_hot(const Chunk &chunk)
    {
        const hkv_plan_row row = p.plan.rows[chunk.row];
        for (int base = 0; base < row.n_sinks + row.n_window; base += 32) {
            const HotPage mine = find_hot_page(p, chunk, row, base + lane);
            if (__any_sync(kFullWarp, mine.is_new)) wait_once();
            for (uint32_t left = __ballot_sync(kFullWarp, mine.n_tokens > 0); left; left &= left - 1) {
                const HotPage hot = broadcast(mine, __ffs(static_cast<int>(left)) - 1);
                push_rows(p.layer.hot_page(hot.page, chunk.head), p.layer.format.row_page_bytes, hot.block,
                          hot.n_tokens);
            }
        }
    }
    /* The chunk's blocks that have no hot page: looked up 32 at a time, a lane each. */
    __device__ void push_cold(const Chunk &chunk)
    {
        const hkv_plan_row row = p.plan.rows[chunk.row];
        for (int base = chunk.block_begin; base < chunk.block_end; base += 32) {
            const ColdBlock mine =
                base + lane < chunk.block_end ? find_cold_block(p, chunk, row, base + lane) : ColdBlock{0, false};
            for (uint32_t left = __ballot_sync(kFullWarp, mine.id != 0); left; left &= left - 1) {
                const int i = __ffs(static_cast<int>(left)) - 1, block = base + i;
                const uint8_t *record = p.layer.record(__shfl_sync(kFullWarp, mine.id, i), chunk.head);
                const int n_tokens = min(kBlockTokens, chunk.n_older - block * kBlockTokens);
                if (p.layer.format.bits == 0 || __shfl_sync(kFullWarp, mine.is_new, i)) wait_once();
                if (p.layer.format.bits == 0) {
                    push_rows(record, p.layer.pages.head_stride_bytes, block, n_tokens);
                    continue;
                }
                for (int h = 0; h < n_heads; h++)
                    push_item(kItemRecord, record + h * p.layer.pages.head_stride_bytes, block * kBlockTokens, n_tokens,
                              record_bytes);
            }
        }
    }
    __device__ void run(int n_chunks)
    {
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            const Chunk chunk = p.schedule.chunks[i];
            n_items = 0;
            push_cold(chunk);
            if (chunk.part == 0) push_hot(chunk);
            close_round();
        }
        if (blockIdx.x == 0) wait_once(); /* this launch shall not be over before its predecessor */
    }
};

/* -------------------------------------------------------------------------------------------------------- consumers */

/* One of the four warps that compute. */
template <typename S> struct Consumer : Unit<S, kConsumers> {
    using Base = Unit<S, kConsumers>;
    using Base::acc;
    using Base::chunk;
    using Base::lane;
    using Base::p;
    using Base::query;
    using Base::shape;

    const uint8_t *ring;
    Control &control;
    Cursor cursor;

    __device__ __forceinline__ void add_page_rows(const Item &item, const uint8_t *stage)
    {
        const int row_bytes = p.layer.format.row_bytes;
        this->add_rows(PageRows{shared_address(stage), row_bytes, row_bytes / 32, kRowTokens - 8, item.n_tokens},
                       item.position, false);
    }
    /* A whole record in one stage, at the best precision present. */
    __device__ __forceinline__ void add_record(const Item &item, const uint8_t *stage)
    {
        const Layout layout = shape.layout();
        const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(stage);
        const int n_tokens = min(item.n_tokens, hkv_header_n_tokens(header, kBlockTokens));
        const int planes = header->planes & p.layer.format.planes;
        if (n_tokens == 0) return;
        const StoredPlane key_high = {stage + layout.k_high()}, key_low = {stage + layout.k_low()};
        const StoredPlane value_high = {stage + layout.v_high()}, value_low = {stage + layout.v_low()};
        Scores<S, kTiles> x;
        if (planes & HKV_PLANE_K_LOW)
            record_scores<true, kTiles>(shape, stage + layout.k_params(), key_high, key_low, query, p.scale, lane, x);
        else
            record_scores<false, kTiles>(shape, stage + layout.k_params(), key_high, key_low, query, p.scale, lane, x);
        this->template hide<kTiles>(x, item.position, n_tokens, false);
        this->template cap<kTiles>(x);
        if (planes & HKV_PLANE_V_LOW)
            add_record_values<true, kTiles>(shape, acc, x, stage + layout.v_params(), value_high, value_low, lane);
        else
            add_record_values<false, kTiles>(shape, acc, x, stage + layout.v_params(), value_high, value_low, lane);
        this->count(&Tally::n_records);
        this->count(&Tally::n_refined, planes & HKV_PLANE_K_LOW ? 1 : 0);
        this->count(&Tally::n_bytes, hkv_record_prefix_bytes(&p.layer.format, hkv_record_precision(planes)));
    }
    __device__ void read_items()
    {
        for (bool is_last = false; !is_last; cursor.advance(kConsumers, p.n_stages)) {
            barrier_wait(cursor.full_barrier(control), cursor.generation >> 1 & 1);
            const Item &item = control.items[cursor.stage];
            const uint8_t *stage = ring + cursor.stage * p.stage_bytes + item.skew;
            if (item.kind == kItemRecord)
                add_record(item, stage);
            else if (item.kind == kItemRows)
                add_page_rows(item, stage);
            is_last = item.is_last;
            let_successor_start(); /* not earlier: its blocks take places that those of this launch should have */
            __syncwarp();
            barrier_arrive(shared_address(&control.empty[cursor.stage]));
        }
    }
    __device__ void run(int n_chunks)
    {
        cursor = {0, 0};
        cursor.advance(this->warp, p.n_stages);
        chunk = p.schedule.chunks + min(static_cast<int>(blockIdx.x), n_chunks);
        asm volatile("prefetch.global.L1 [%0];" ::"l"(chunk));
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            chunk = p.schedule.chunks + i;
            acc.clear();
            if (lane == 0) *this->tally = Tally();
            CallRows<S> rows = this->load_call_rows(); /* under way together with q */
            auto queries = this->load_queries(0, 1);
            this->store_queries(queries, 0, 1);
            __syncwarp();
            this->add_call_rows(rows);
            read_items();
            this->report();
            this->finish_chunk();
        }
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            chunk = p.schedule.chunks + i;
            if (chunk->n_parts > 1) this->merge_parts();
        }
    }
};

/* ----------------------------------------------------------------------------------------------------------- kernel */

template <typename S, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) decode_kernel(const __grid_constant__ DecodeParams p)
{
    extern __shared__ __align__(128) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *areas = memory + p.n_stages * p.stage_bytes;
    Control &control = *reinterpret_cast<Control *>(areas + kConsumers * kPartialBytes<S>);
    if (warp == kConsumers) {
        if (lane < p.n_stages) {
            barrier_init(shared_address(&control.full[lane]), kCopyArrivals);
            barrier_init(shared_address(&control.full[kMaxStages + lane]), kCopyArrivals);
            barrier_init(shared_address(&control.empty[lane]), 32);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int n_chunks = *p.schedule.n_chunks, n_heads = *p.schedule.heads_per_chunk;
    if (warp == kConsumers) {
        const hkv_format &f = p.layer.format;
        Producer producer{p,    memory,  control,
                          lane, n_heads, hkv_record_prefix_bytes(&f, hkv_record_precision(f.planes))};
        producer.run(n_chunks);
    } else {
        uint8_t *own = areas + warp * kPartialBytes<S>; /* q while records are read, then a partial */
        Consumer<S> consumer{{p, own, areas, kPartialBytes<S>, &control.tallies[warp], warp, lane, n_heads,
                              S{p.layer.format.stored_dim}},
                             memory,
                             control};
        consumer.run(n_chunks);
    }
}

template <typename S, int kBlocksPerSm> Variant variant_of(const hkv_format &format)
{
    const uint32_t fetched =
        format.bits == 0 ? 0 : hkv_record_prefix_bytes(&format, hkv_record_precision(format.planes));
    Variant v;
    v.kernel = decode_kernel<S, kBlocksPerSm>;
    v.columns = S::kColumns;
    v.n_threads = kThreads;
    v.blocks_per_sm = kBlocksPerSm;
    v.partial_bytes = kPartialBytes<S>;
    v.fixed_bytes = kConsumers * kPartialBytes<S> + static_cast<int>(sizeof(Control));
    v.stage_bytes = round_up(max(kRowTokens * format.row_bytes, static_cast<int>(fetched)) + kMaxSkew, kLine);
    v.max_stages = kMaxStages;
    return v;
}
Variant find_variant(const hkv_format &format, int columns)
{
    const bool wide = columns > 8;
    switch (format.stored_dim) {
    case 64:
        return wide ? variant_of<Shape<64, true, 16>, 1>(format) : variant_of<Shape<64, true, 8>, 2>(format);
    case 128:
        return wide ? variant_of<Shape<128, true, 16>, 1>(format) : variant_of<Shape<128, true, 8>, 2>(format);
    case 256:
        return variant_of<Shape<256, true, 8>, 1>(format);
    default:
        return variant_of<Shape<256, false, 8>, 1>(format);
    }
}
Variant find_any_variant(const hkv_format &format, int columns, bool progressive)
{
    return progressive ? find_progressive_variant(format) : find_variant(format, columns);
}

} // namespace

/* ------------------------------------------------------------------------------------------------------------- host */

cudaError_t plan_decode(const hkv_format &format, int columns_wanted, bool progressive, int blocks_per_sm,
                        DecodeShape *shape)
{
    int device = 0, n_sms = 0, per_block = 0, per_sm = 0, reserved = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    if (status != cudaSuccess) return status;

    progressive = progressive && format.bits != 0;
    const Variant v = find_any_variant(format, columns_wanted, progressive);
    for (int blocks = blocks_per_sm ? blocks_per_sm : v.blocks_per_sm; blocks >= 1; blocks--) {
        const int room = min(per_block, per_sm / blocks - reserved) - v.fixed_bytes;
        int n_stages = min(v.max_stages, room / v.stage_bytes);
        if (n_stages < 4 && blocks > 1 && !progressive) continue;
        if (n_stages == 3 && !progressive) n_stages = 2; /* three would let a consumer mistake a stage's generation */
        if (n_stages < 1) continue;
        shape->columns = v.columns;
        shape->progressive = progressive;
        shape->blocks_per_sm = blocks;
        shape->n_workers = n_sms * blocks;
        shape->n_stages = n_stages;
        shape->stage_bytes = v.stage_bytes;
        shape->partial_bytes = v.partial_bytes;
        shape->shared_bytes = static_cast<size_t>(n_stages * v.stage_bytes + v.fixed_bytes);
        return cudaSuccess;
    }
    return cudaErrorInvalidConfiguration;
}

size_t decode_partial_bytes(const DecodeShape &shape, int max_chunks)
{
    return static_cast<size_t>(max_chunks) * kMaxChunkHeads * shape.partial_bytes;
}
size_t decode_reference_bytes(const DecodeShape &shape, int max_chunks)
{
    return static_cast<size_t>(max_chunks) * kMaxChunkHeads * static_cast<size_t>(shape.columns) * sizeof(uint32_t);
}

cudaError_t launch_decode(const DecodeShape &shape, const DecodeParams &params, cudaStream_t stream)
{
    const Variant v = find_any_variant(params.layer.format, shape.columns, shape.progressive);
    DecodeParams p = params;
    p.n_stages = shape.n_stages;
    p.stage_bytes = shape.stage_bytes;
    p.group_inverse = (1u << 22) / static_cast<uint32_t>(p.group) + 1;
    return launch_dependent(v.kernel, static_cast<unsigned>(shape.n_workers), static_cast<unsigned>(v.n_threads),
                            shape.shared_bytes, stream, p);
}

} // namespace hkv
