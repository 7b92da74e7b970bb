/* decode.cu - decode attention: one persistent launch over hot pages, records and the call's own tokens.
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
 * Progressive reading: 73 (K high with its parameters), then per record nothing, 68 (V high) or 196 (all the rest).
 *
 * Why this tiling. What limits decode is latency times bandwidth: about 64 KB must be under way per SM at all times,
 * and the arithmetic of 8 warps must hide behind it. Four neighbouring heads of a page make runs of 69 KB in memory;
 * one bulk copy a record needs no address arithmetic; one warp a record needs no barrier among consumers.
 * docs/kernels.md has the alternatives and their times.
 */
#include "decode.cuh"

#include "decode_math.cuh"
#include "decode_merge.cuh"
#include "launch.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = (kConsumers + 1) * 32;
constexpr int kMaxStages = 32;
constexpr int kRankBarrier = 1; /* named barriers, one a head */

enum ItemKind { kItemNothing, kItemRecord, kItemRows };
enum ItemFlag { kLastItem = 1, kLastHotItem = 2 }; /* of this consumer in this chunk */

/* Tokens of a 16-bit page in one item: a tile; half of it where stages are made for K high alone. */
__host__ __device__ constexpr int row_tokens(bool progressive)
{
    return progressive ? HKV_TILE_TOKENS / 2 : HKV_TILE_TOKENS;
}

/* What a stage holds. */
struct Item {
    int16_t kind, flags;
    int32_t position;      /* of its first token in the sequence */
    int32_t n_tokens;      /* that may be read, before the record's own header is looked at */
    int32_t skew;          /* byte of the stage where it begins */
    const uint8_t *source; /* where it comes from */
};

/* Bulk copies whose two ends lie differently in their 128-byte lines cost twice the L2 accesses (records are an odd
 * multiple of 64 bytes): so the destination begins where the source does. */
constexpr int kLine = 128, kMaxSkew = kLine - 16;
__device__ __forceinline__ int skew_of(const uint8_t *source)
{
    return static_cast<int>(reinterpret_cast<uintptr_t>(source) % kLine);
}

/* What one consumer read of a chunk and what it did not. */
struct Tally {
    unsigned n_records, n_skipped, n_refined, n_rows; /* n_rows: pieces of pages */
    float skipped_share;
};

/* Fixed part of dynamic shared memory, behind ring, areas and queries. */
struct Control {
    Item items[kMaxStages];
    float2 hot_sums[kConsumers][16]; /* m and l of the hot part, where several warps share a head */
    Tally tallies[kConsumers];
    int is_last[kConsumers];
    uint64_t full[2 * kMaxStages]; /* a stage's even and odd generations apart: any consumer may own any stage */
    uint64_t empty[kMaxStages];
    uint64_t area_full[kConsumers][2];
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
template <bool kProgressive> struct Producer {
    const DecodeParams &p;
    uint8_t *ring;
    Control &control;
    int lane, n_heads;
    uint32_t record_bytes; /* that are fetched of a record at first */
    Cursor cursor = {0, 0};
    int n_items = 0; /* of this chunk so far */
    bool waited = false;

    /* Tables of the plan, old records: fine before the wait. Pages and records of this step: not. */
    __device__ __forceinline__ void wait_once()
    {
        if (!waited) wait_for_predecessor();
        waited = true;
    }
    __device__ __forceinline__ void push(const Item &item, uint32_t n_bytes)
    {
        barrier_wait(shared_address(&control.empty[cursor.stage]), (cursor.generation & 1) ^ 1);
        if (lane == 0) control.items[cursor.stage] = item;
        copy_to_shared(shared_address(ring + cursor.stage * p.stage_bytes + item.skew), item.source, n_bytes,
                       cursor.full_barrier(control), lane);
        cursor.advance(1, p.n_stages);
        n_items++;
    }
    /* Fill up the consumers' round; then one more that carries the flags to each of them. */
    __device__ __forceinline__ void close_round(int flags)
    {
        Item nothing = {kItemNothing, 0, 0, 0, 0, nullptr};
        while (n_items % kConsumers) push(nothing, 0);
        nothing.flags = static_cast<int16_t>(flags);
        for (int i = 0; i < kConsumers; i++) push(nothing, 0);
    }
    /* A block's rows (page of head h at page + h * head_stride), kRowTokens an item. */
    __device__ __forceinline__ void push_rows(const uint8_t *page, size_t head_stride, int block, int n_tokens)
    {
        constexpr int kRowTokens = row_tokens(kProgressive);
        const int n_bytes = kRowTokens * p.layer.format.row_bytes;
        for (int first = 0; first < n_tokens; first += kRowTokens) {
            const int n = min(kRowTokens, n_tokens - first);
            const int position = block * kBlockTokens + first;
            for (int h = 0; h < n_heads; h++) {
                const uint8_t *source = page + h * head_stride + first * p.layer.format.row_bytes;
                push({kItemRows, 0, position, n, skew_of(source), source}, n_bytes);
            }
        }
    }
    /* May the record of a chunk's head be read? */
    __device__ __forceinline__ bool may_read(const Chunk &chunk, int h, int block) const
    {
        if (!kProgressive || !p.read_mask) return true;
        const int64_t pair = static_cast<int64_t>(chunk.row) * p.layer.n_kv_heads + chunk.head + h;
        return p.read_mask[pair * p.mask_words + block / 32] >> block % 32 & 1;
    }
    __device__ __forceinline__ void push_record(const Chunk &chunk, const uint8_t *record, int block, int n_tokens)
    {
        for (int h = 0; h < n_heads; h++) {
            if (!may_read(chunk, h, block)) {
                if (n_heads > 1) push({kItemNothing, 0, 0, 0, 0, nullptr}, 0); /* items of a head stay with its warp */
                continue;
            }
            const uint8_t *source = record + h * p.layer.pages.head_stride_bytes;
            push({kItemRecord, 0, block * kBlockTokens, n_tokens, skew_of(source), source}, record_bytes);
        }
    }
    __device__ void push_hot_page(const Chunk &chunk, int block)
    {
        const int page = hkv_plan_hot_page(&p.plan, chunk.row, block), n_tokens = chunk.n_older - block * kBlockTokens;
        if (page < 0 || n_tokens <= 0) return;
        wait_once();
        push_rows(p.layer.hot_page(page, chunk.head), p.layer.format.row_page_bytes, block,
                  min(p.page_n_tokens[page], n_tokens));
    }
    /* All hot pages of a row that its queries can see. */
    __device__ void push_hot(const Chunk &chunk)
    {
        const hkv_plan_row row = p.plan.rows[chunk.row];
        const int oldest = p.window_tokens ? max(0, chunk.n_older + 1 - p.window_tokens) / kBlockTokens : 0;
        for (int block = oldest; block < row.n_sinks; block++) push_hot_page(chunk, block);
        for (int block = max(oldest, row.window_first); block < row.window_first + row.n_window; block++)
            push_hot_page(chunk, block);
    }
    /* The chunk's blocks that have no hot page: looked up 32 at a time, a lane each. */
    __device__ void push_cold(const Chunk &chunk)
    {
        const int32_t *table = p.block_table + chunk.row * p.block_table_stride;
        if (kProgressive && p.read_mask) wait_once();
        for (int base = chunk.block_begin; base < chunk.block_end; base += 32) {
            const int mine = base + lane;
            int id = 0;
            bool is_new = false;
            if (mine < chunk.block_end && hkv_plan_hot_page(&p.plan, chunk.row, mine) < 0) {
                id = table[mine];
                if (id < 0 || id >= p.layer.n_blocks) id = 0;
                is_new = p.block_step && id && p.block_step[id] == *p.step;
            }
            for (int i = 0; i < min(32, chunk.block_end - base); i++) {
                const int block = base + i, physical = __shfl_sync(kFullWarp, id, i);
                if (__shfl_sync(kFullWarp, is_new, i)) wait_once();
                if (physical == 0) continue; /* hot, or the null block: nothing to read */
                const int n_tokens = min(kBlockTokens, chunk.n_older - block * kBlockTokens);
                const uint8_t *record = p.layer.record(physical, chunk.head);
                if (p.layer.format.bits == 0) {
                    wait_once();
                    push_rows(record, p.layer.pages.head_stride_bytes, block, n_tokens);
                } else {
                    push_record(chunk, record, block, n_tokens);
                }
            }
        }
    }
    __device__ void run(int n_chunks)
    {
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            const Chunk chunk = p.schedule.chunks[i];
            n_items = 0;
            if (kProgressive && chunk.part == 0) { /* hot first: it gives everyone's reference */
                push_hot(chunk);
                close_round(kLastHotItem);
            }
            push_cold(chunk);
            if (!kProgressive && chunk.part == 0) push_hot(chunk);
            close_round(kLastItem);
        }
        wait_once();
    }
};

/* ------------------------------------------------------------------------------------------------------------
 * consumers */

/* One of the four warps that compute. */
template <typename S, bool kProgressive> struct Consumer {
    const DecodeParams &p;
    const uint8_t *ring;
    uint8_t *area;  /* progressive: where the rest of a record goes; two INT4 halves or one full rest */
    uint8_t *query; /* q as B fragments; between chunks room for a partial */
    Control &control;
    int warp, lane, n_heads;
    S shape;
    const Chunk *chunk;
    Cursor cursor;
    Accumulator<S> acc;

    /* -------------------------------------------------------------------------------------------------- start of a
     * chunk */

    /* KV head of this warp, and which of the warps that share it this is. */
    __device__ __forceinline__ int head() const
    {
        return chunk->head + warp % n_heads;
    }
    __device__ __forceinline__ int rank() const
    {
        return warp / n_heads;
    }
    __device__ __forceinline__ int n_ranks() const
    {
        return kConsumers / n_heads;
    }
    /* A barrier of the warps that share a head: other heads' warps may be elsewhere. */
    __device__ __forceinline__ void meet_ranks() const
    {
        named_barrier(kRankBarrier + warp % n_heads, n_ranks() * 32);
    }
    __device__ __forceinline__ int column_of(int tile, int i) const
    {
        return chunk->column_tile * S::kColumns + tile * 8 + i;
    }
    /* Query token of this lane's column j of a tile; n_new or more: there is none. */
    __device__ __forceinline__ int query_token(int tile, int j) const
    {
        return column_of(tile, 2 * (lane % 4) + j) / p.group;
    }
    /* q of this warp's columns, fp16, as B fragments. */
    __device__ void load_queries()
    {
        const int head_dim = p.layer.format.head_dim, first_token = chunk->first_token;
        const bool is_bf16 = p.layer.format.dtype == HKV_BF16;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            const int column = column_of(n, lane / 4), token = column / p.group;
            const uint16_t *q = static_cast<const uint16_t *>(p.q) + (first_token + token) * p.q_stride_token +
                                (head() * p.group + column % p.group) * p.q_stride_head;
#pragma unroll
            for (int pair = 0; pair < S::kSteps / 2; pair++) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int channel = pair * 32 + j * 8 + 2 * (lane % 4);
                    words[j] = 0;
                    if (token < chunk->n_new && channel < head_dim)
                        words[j] = *reinterpret_cast<const uint32_t *>(q + channel);
                    if (is_bf16) {
                        const float2 f = unpack_bf162(words[j]);
                        words[j] = pack_half2(f.x, f.y);
                    }
                }
                *reinterpret_cast<uint4 *>(query + ((n * S::kSteps / 2 + pair) * 32 + lane) * 16) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        __syncwarp();
    }

    /* --------------------------------------------------------------------------------------------------------------
     * masks */

    /* Soft cap, then -inf where a column's query must not see a token: first token of x is at `position`, n_tokens are
     * there; causal: column's own token is the last it sees. */
    template <int kTileCount>
    __device__ __forceinline__ void mask(Scores<S, kTileCount> &x, int position, int n_tokens, bool causal) const
    {
        if (p.soft_cap > 0.f) {
            const float to_exponent = 2.f * 1.44269504f / p.soft_cap; /* tanh(y) = 1 - 2 / (1 + e^2y) */
#pragma unroll
            for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
                for (int t = 0; t < kTileCount; t++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        x[n][t][j] = p.soft_cap *
                                     (1.f - __fdividef(2.f, 1.f + fast_exp2(fminf(x[n][t][j] * to_exponent, 80.f))));
        }
        const bool reaches_out = p.window_tokens > 0 && position < chunk->n_older + chunk->n_new - p.window_tokens;
        if (n_tokens >= 16 * kTileCount && !reaches_out && !causal) return;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int newest = chunk->n_older + query_token(n, j);
                const int first = p.window_tokens > 0 ? newest + 1 - p.window_tokens - position : 0;
                const int end = causal ? min(n_tokens, newest + 1 - position) : n_tokens;
#pragma unroll
                for (int t = 0; t < kTileCount; t++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int token = t * 16 + half * 8 + lane / 4;
                        if (token < first || token >= end) x[n][t][half * 2 + j] = -INFINITY;
                    }
            }
    }

    /* --------------------------------------------------------------------------------------------------------------
     * items */

    __device__ __forceinline__ const uint8_t *stage_of(int index) const
    {
        return ring + index * p.stage_bytes + control.items[index].skew;
    }
    template <typename Rows> __device__ __forceinline__ void add_rows(const Rows &rows, int position, bool causal)
    {
        Scores<S, 1> x;
        if (p.layer.format.dtype == HKV_BF16) {
            row_scores<true>(shape, rows, query, p.scale, lane, x);
            mask<1>(x, position, rows.n_tokens, causal);
            add_row_values<true>(shape, acc, x, rows, lane);
        } else {
            row_scores<false>(shape, rows, query, p.scale, lane, x);
            mask<1>(x, position, rows.n_tokens, causal);
            add_row_values<false>(shape, acc, x, rows, lane);
        }
    }
    /* The call's own tokens, straight from its K and V. */
    __device__ void add_call_tokens()
    {
        if (chunk->n_older < 0) return; /* tokens of a padding row are none of its own */
        const int64_t first = chunk->first_token;
        const CallRows rows = {static_cast<const uint16_t *>(p.tokens.k) + first * p.tokens.k_stride_token +
                                   head() * p.tokens.k_stride_head,
                               static_cast<const uint16_t *>(p.tokens.v) + first * p.tokens.v_stride_token +
                                   head() * p.tokens.v_stride_head,
                               p.tokens.k_stride_token,
                               p.tokens.v_stride_token,
                               chunk->n_new,
                               p.layer.format.head_dim};
        add_rows(rows, chunk->n_older, true);
    }
    __device__ __forceinline__ void add_page_rows(const Item &item, const uint8_t *stage)
    {
        const hkv_format &f = p.layer.format;
        add_rows(
            PageRows{shared_address(stage), f.row_bytes, f.row_bytes / 32, row_tokens(kProgressive) - 8, item.n_tokens},
            item.position, false);
        count(&Tally::n_rows);
    }
    /* Tokens of an item that may be read, by its record's header in the stage. */
    __device__ __forceinline__ int held_tokens(const Item &item, const uint8_t *stage, int *planes) const
    {
        const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(stage);
        *planes = header->planes;
        return min(item.n_tokens, hkv_header_n_tokens(header, kBlockTokens));
    }
    template <bool kKeyLow>
    __device__ __forceinline__ void score_record(const uint8_t *prefix, const uint8_t *k_low, const Item &item,
                                                 int n_tokens, Scores<S, kTiles> &x)
    {
        const Layout layout = shape.layout();
        record_scores<kKeyLow>(shape, prefix + layout.k_params(), prefix + layout.k_high(), k_low, query, p.scale, lane,
                               x);
        mask<kTiles>(x, item.position, n_tokens, false);
    }
    /* A whole record in one stage, at the best precision present. */
    __device__ __forceinline__ void add_record(const Item &item, const uint8_t *stage)
    {
        const Layout layout = shape.layout();
        int planes;
        const int n_tokens = held_tokens(item, stage, &planes);
        if (n_tokens == 0) return;
        planes &= p.layer.format.planes;
        Scores<S, kTiles> x;
        if (planes & HKV_PLANE_K_LOW)
            score_record<true>(stage, stage + layout.k_low(), item, n_tokens, x);
        else
            score_record<false>(stage, nullptr, item, n_tokens, x);
        if (planes & HKV_PLANE_V_LOW)
            add_record_values<true>(shape, acc, x, stage + layout.v_params(), stage + layout.v_high(),
                                    stage + layout.v_low(), lane);
        else
            add_record_values<false>(shape, acc, x, stage + layout.v_params(), stage + layout.v_high(), nullptr, lane);
        count(&Tally::n_records);
    }
    __device__ __forceinline__ void release(int stage) const
    {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&control.empty[stage]));
    }

    /* ------------------------------------------------------------------------------------------------ progressive
     * reading */

    enum RestKind { kNoRest, kValuesHigh, kAllTheRest };
    /* A record whose rest is on its way. */
    struct Pending {
        int kind = kNoRest;
        int half = 0; /* of the area, for V high */
        int skew = 0;
        int stage = 0;       /* kept for its K high, where all the rest is read */
        Scores<S, kTiles> x; /* INT4 scores */
    };
    float reference[S::kColumnTiles][2]; /* log2-sum-exp of the hot part */
    uint32_t area_parity = 0;            /* bit h: parity of half h's next phase */

    __device__ __forceinline__ uint32_t *reference_words() const
    {
        return p.references + (static_cast<size_t>(chunk->first_slot) * kConsumers + warp % n_heads) * S::kColumns;
    }
    /* After the hot part: its log-sum-exp, over all warps that share the head, for this chunk and the unit's others. */
    __device__ void publish_reference()
    {
        float m[S::kColumnTiles][2], l[S::kColumnTiles][2];
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                m[n][j] = acc.m[n][j];
                l[n][j] = acc.total(n, j);
                if (n_ranks() > 1 && lane < 4)
                    control.hot_sums[warp][n * 8 + 2 * lane + j] = make_float2(m[n][j], l[n][j]);
            }
        if (n_ranks() > 1) {
            meet_ranks();
#pragma unroll
            for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    m[n][j] = kNone;
                    l[n][j] = 0.f;
                    for (int i = warp % n_heads; i < kConsumers; i += n_heads) {
                        const float2 other = control.hot_sums[i][n * 8 + 2 * (lane % 4) + j];
                        const float top = fmaxf(m[n][j], other.x);
                        l[n][j] = l[n][j] * fast_exp2(m[n][j] - top) + other.y * fast_exp2(other.x - top);
                        m[n][j] = top;
                    }
                }
            meet_ranks();
        }
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                reference[n][j] = query_token(n, j) < chunk->n_new ? m[n][j] + fast_log2(l[n][j]) : -kNone;
                if (chunk->n_parts > 1 && rank() == 0 && lane < 4)
                    store_shared_word(reference_words() + n * 8 + 2 * lane + j, __float_as_uint(reference[n][j]));
            }
    }
    /* In the unit's other chunks: wait for the first one's. It needs nothing from us, and all blocks are resident. */
    __device__ void await_reference()
    {
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t word;
                do word = load_shared_word(reference_words() + n * 8 + 2 * (lane % 4) + j);
                while (word == kNoReference);
                reference[n][j] = __uint_as_float(word);
            }
    }
    /* Largest share over the columns of a record with these scores. */
    __device__ __forceinline__ float share_of(const Scores<S, kTiles> &x) const
    {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float sum = 0.f;
#pragma unroll
                for (int t = 0; t < kTiles; t++)
                    sum += fast_exp2(x[n][t][j] - reference[n][j]) + fast_exp2(x[n][t][2 + j] - reference[n][j]);
#pragma unroll
                for (int step = 4; step < 32; step <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, step);
                largest = fmaxf(largest, sum);
            }
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
        return fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    }
    /* Wait for the pending record's rest and add it. */
    __device__ __forceinline__ void settle(Pending &pending)
    {
        if (pending.kind == kNoRest) return;
        const Layout layout = shape.layout();
        const uint8_t *rest = area + rest_offset(pending.half, pending.skew);
        const uint8_t *high = rest + layout.v_high() - layout.v_params(),
                      *low = rest + layout.v_low() - layout.v_params();
        barrier_wait(shared_address(&control.area_full[warp][pending.half]), area_parity >> pending.half & 1);
        area_parity ^= 1u << pending.half;
        if (pending.kind == kAllTheRest) {
            const Item &item = control.items[pending.stage];
            const uint8_t *stage = stage_of(pending.stage);
            int planes;
            const int n_tokens = held_tokens(item, stage, &planes);
            score_record<true>(stage, rest + layout.k_low() - layout.v_params(), item, n_tokens, pending.x);
            release(pending.stage);
        }
        if (pending.kind == kAllTheRest && (p.layer.format.planes & HKV_PLANE_V_LOW))
            add_record_values<true>(shape, acc, pending.x, rest, high, low, lane);
        else
            add_record_values<false>(shape, acc, pending.x, rest, high, nullptr, lane);
        __syncwarp();
        pending.kind = kNoRest;
    }
    /* What a record is worth reading beyond its K high: Pending's kinds. */
    __device__ __forceinline__ int worth(const Scores<S, kTiles> &x, int planes, int tier, int position)
    {
        const float share = share_of(x);
        count(&Tally::n_records);
        if (share < p.skip_mass) {
            count(&Tally::n_skipped);
            if (lane == 0) control.tallies[warp].skipped_share += share;
            mark(p.skipped_mask, position);
            return kNoRest;
        }
        if (share < p.refine_mass || !(planes & p.layer.format.planes & HKV_PLANE_K_LOW) || tier == HKV_TIER_L2)
            return kValuesHigh;
        count(&Tally::n_refined);
        mark(p.refined_mask, position);
        return kAllTheRest;
    }
    /* Set the bit of the record that begins at `position`, if anyone wants to know. */
    __device__ __forceinline__ void mark(uint32_t *mask, int position) const
    {
        if (!mask || lane != 0) return;
        const int64_t pair = static_cast<int64_t>(chunk->row) * p.layer.n_kv_heads + head();
        const int block = position / kBlockTokens;
        atomicOr(mask + (pair * p.mask_tiles + chunk->column_tile) * p.mask_words + block / 32, 1u << block % 32);
    }
    __device__ __forceinline__ int rest_offset(int half, int skew) const
    {
        const Layout layout = shape.layout();
        return half * ((layout.k_low() - layout.v_params() + kMaxSkew + kLine - 1) / kLine * kLine) + skew;
    }
    /* Start reading the rest of the record in the cursor's stage. */
    __device__ __forceinline__ void fetch_rest(int kind, int half) const
    {
        const Layout layout = shape.layout();
        const Item &item = control.items[cursor.stage];
        const bool values_low = p.layer.format.planes & HKV_PLANE_V_LOW; /* and K low before it */
        const int end = kind == kValuesHigh ? layout.k_low()
                        : values_low        ? layout.v_low() + layout.plane()
                                            : layout.v_low();
        const uint8_t *source = item.source + layout.v_params();
        copy_to_shared(shared_address(area + rest_offset(half, skew_of(source))), source,
                       static_cast<uint32_t>(end - layout.v_params()), shared_address(&control.area_full[warp][half]),
                       lane);
        if (kind == kValuesHigh) release(cursor.stage);
    }
    /* K high of a record has arrived: score it. Returns what else to read. */
    __device__ __forceinline__ int score_prefix(const Item &item, Scores<S, kTiles> &x)
    {
        const uint8_t *stage = stage_of(cursor.stage);
        int planes;
        const int n_tokens = held_tokens(item, stage, &planes);
        int kind = kNoRest;
        if (n_tokens > 0) {
            score_record<false>(stage, nullptr, item, n_tokens, x);
            kind = worth(x, planes, reinterpret_cast<const hkv_record_header *>(stage)->tier, item.position);
        }
        if (kind == kNoRest) release(cursor.stage);
        return kind;
    }

    /* ---------------------------------------------------------------------------------------------------- end of a
     * chunk */

    __device__ __forceinline__ uint8_t *partial_of(int slot) const
    {
        return p.partials + (static_cast<size_t>(slot) * kConsumers + warp % n_heads) * kPartialBytes<S>;
    }
    /* Count an arrival at a counter; true for the last of n, which also sets it back. */
    __device__ bool arrive_last(int level, int slot, int n) const
    {
        uint32_t *counter =
            p.arrivals + (static_cast<size_t>(level) * p.schedule.max_chunks + slot) * kConsumers + warp % n_heads;
        __threadfence();
        __syncwarp();
        int last = 0;
        if (lane == 0) {
            last = atomicAdd(counter, 1u) == static_cast<uint32_t>(n - 1);
            if (last) *counter = 0;
            __threadfence();
        }
        return __shfl_sync(kFullWarp, last, 0);
    }
    /* Warps of one head to one partial: the first takes in the others through shared memory. */
    __device__ void join_ranks()
    {
        if (n_ranks() == 1) return;
        if (rank() > 0) store_partial<S>(acc, query, lane);
        meet_ranks();
        if (rank() == 0)
            add_partials<true>(acc, query + n_heads * kPartialBytes<S>, n_heads * kPartialBytes<S>, n_ranks() - 1,
                               lane);
        meet_ranks();
    }
    /* Store the chunk's (or a group's) partial and count it in; true, to all warps of the head, if it was the last of
     * n. */
    __device__ bool hand_in(int level, int slot, int first_slot, int n)
    {
        bool last = false;
        if (rank() == 0) {
            store_partial<S>(acc, partial_of(slot), lane);
            last = arrive_last(level, first_slot, n);
        }
        if (n_ranks() == 1) return last;
        if (rank() == 0 && lane == 0) control.is_last[warp] = last;
        meet_ranks();
        return control.is_last[warp % n_heads];
    }
    /* Hand the chunk's result on; whoever completes a unit writes its output. Parts are merged in groups, then the
     * groups; a group's partial takes the place of its first part's. The warps of a head share the merging. */
    __device__ void finish_chunk()
    {
        acc.finish();
        join_ranks();
        int part = chunk->part, n_left = chunk->n_parts, span = 1;
        for (int level = 0; n_left > 1; level++) {
            const int group = level == 0 ? n_ranks() * kMergeGroup : n_left;
            const int first = part / group * group, n = min(group, n_left - first);
            if (n > 1) {
                const int first_slot = chunk->first_slot + first * span, stride = span * kConsumers * kPartialBytes<S>;
                if (!hand_in(level, chunk->first_slot + part * span, first_slot, n)) return;
                const int begin = n * rank() / n_ranks(), end = n * (rank() + 1) / n_ranks();
                acc.clear();
                add_partials<false>(acc, partial_of(first_slot) + static_cast<int64_t>(begin) * stride, stride,
                                    end - begin, lane);
                join_ranks();
            }
            part /= group;
            n_left = (n_left + group - 1) / group;
            span *= group;
        }
        if (rank() != 0) return;
        if (kProgressive && chunk->n_parts > 1 && lane < S::kColumns)
            store_shared_word(reference_words() + lane, kNoReference);
        write_output();
    }
    __device__ void write_output()
    {
        const int head_dim = p.layer.format.head_dim, first_token = chunk->first_token;
        const bool is_bf16 = p.layer.format.dtype == HKV_BF16;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            float factor[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int column = column_of(n, 2 * (lane % 4) + j), q_head = head() * p.group + column % p.group;
                float sum = acc.l[n][j];
                if (p.sink_logits && query_token(n, j) < chunk->n_new)
                    sum += fast_exp2(fminf(p.sink_logits[q_head] * 1.44269504f - acc.m[n][j], 126.f));
                factor[j] = sum > 0.f ? acc.l[n][j] / sum : 0.f;
                if (p.lse && query_token(n, j) < chunk->n_new && lane < 4)
                    p.lse[static_cast<int64_t>(first_token + query_token(n, j)) * p.group * p.layer.n_kv_heads +
                          q_head] = sum > 0.f ? 0.69314718f * (acc.m[n][j] + log2f(sum)) : -INFINITY;
            }
            /* Transposed, a lane holds two neighbouring channels of column lane / 4. */
            const int column = column_of(n, lane / 4), token = column / p.group;
            uint16_t *out = static_cast<uint16_t *>(p.out) + (first_token + token) * p.out_stride_token +
                            (head() * p.group + column % p.group) * p.out_stride_head + 2 * (lane % 4);
#pragma unroll
            for (int s = 0; s < S::kSteps; s++) {
                if (!shape.has(s)) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float o0 = acc.o[n][s][2 * half] * factor[0], o1 = acc.o[n][s][2 * half + 1] * factor[1];
                    const uint32_t pair = transpose_8x8(is_bf16 ? pack_bf162(o0, o1) : pack_half2(o0, o1));
                    if (token < chunk->n_new && s * 16 < head_dim)
                        *reinterpret_cast<uint32_t *>(out + s * 16 + half * 8) = pair;
                }
            }
        }
    }

    __device__ __forceinline__ void count(unsigned Tally::*what) const
    {
        if (lane == 0) control.tallies[warp].*what += 1;
    }
    /* Add this chunk's tally to the counters. */
    __device__ void report() const
    {
        if (!p.counters || lane != 0) return;
        typedef unsigned long long Count;
        const hkv_format &f = p.layer.format;
        const Tally t = control.tallies[warp];
        const Count whole = hkv_record_prefix_bytes(&f, hkv_record_precision(f.planes));
        const unsigned n_refined = kProgressive ? t.n_refined : f.planes & HKV_PLANE_K_LOW ? t.n_records : 0;
        Count n_bytes = static_cast<Count>(t.n_rows) * static_cast<Count>(row_tokens(kProgressive) * f.row_bytes);
        if (kProgressive)
            n_bytes += static_cast<Count>(t.n_records) * f.int4_bytes +
                       static_cast<Count>(t.n_refined) * (whole - f.int4_bytes) -
                       static_cast<Count>(t.n_skipped) * (f.int4_bytes - f.v_params_offset);
        else
            n_bytes += static_cast<Count>(t.n_records) * whole;
        atomicAdd(reinterpret_cast<Count *>(&p.counters->n_records_read), static_cast<Count>(t.n_records));
        atomicAdd(reinterpret_cast<Count *>(&p.counters->n_records_skipped), static_cast<Count>(t.n_skipped));
        atomicAdd(reinterpret_cast<Count *>(&p.counters->n_records_refined), static_cast<Count>(n_refined));
        atomicAdd(reinterpret_cast<Count *>(&p.counters->n_bytes_read), n_bytes);
        atomicAdd(&p.counters->skipped_mass, static_cast<double>(t.skipped_share));
    }

    /* ------------------------------------------------------------------------------------------------------------ a
     * chunk */

    __device__ __forceinline__ const Item &next_item() const
    {
        barrier_wait(cursor.full_barrier(control), cursor.generation >> 1 & 1);
        return control.items[cursor.stage];
    }
    __device__ void read_whole()
    {
        for (bool last = false; !last; cursor.advance(kConsumers, p.n_stages)) {
            const Item &item = next_item();
            const uint8_t *stage = stage_of(cursor.stage);
            if (item.kind == kItemRecord)
                add_record(item, stage);
            else if (item.kind == kItemRows)
                add_page_rows(item, stage);
            last = item.flags & kLastItem;
            release(cursor.stage);
        }
    }
    /* Hot items come first. Then each record's K high decides about its rest, which is on its way while the next record
     * is scored; the last item, which holds nothing, lets the last record settle. */
    __device__ void read_progressively()
    {
        if (chunk->part != 0) await_reference();
        Pending pending;
        for (bool last = false; !last; cursor.advance(kConsumers, p.n_stages)) {
            const Item &item = next_item();
            last = item.flags & kLastItem;
            const uint8_t *rest_source = item.source + shape.layout().v_params();
            Scores<S, kTiles> x;
            int kind = kNoRest;
            if (item.kind == kItemRecord) {
                kind = score_prefix(item, x);
            } else {
                if (item.kind == kItemRows) add_page_rows(item, stage_of(cursor.stage));
                const bool hot_done = item.flags & kLastHotItem;
                release(cursor.stage);
                if (hot_done) publish_reference();
            }
            /* A pending V high may wait longer; a full rest keeps a stage of the ring. */
            if (kind == kNoRest && pending.kind != kAllTheRest && !last) continue;
            /* The area holds two V highs or one full rest. */
            const bool settle_first = kind == kAllTheRest || pending.kind == kAllTheRest;
            const int half = !settle_first && pending.kind == kValuesHigh ? 1 - pending.half : 0;
            if (kind != kNoRest && !settle_first) fetch_rest(kind, half);
            settle(pending);
            if (kind != kNoRest && settle_first) fetch_rest(kind, half);
            pending.kind = kind;
            pending.half = half;
            pending.stage = cursor.stage;
            pending.skew = skew_of(rest_source);
#pragma unroll
            for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
                for (int t = 0; t < kTiles; t++)
#pragma unroll
                    for (int j = 0; j < 4; j++) pending.x[n][t][j] = x[n][t][j];
        }
    }
    __device__ void run(int n_chunks)
    {
        cursor = {0, 0};
        cursor.advance(warp, p.n_stages);
        chunk = p.schedule.chunks + min(static_cast<int>(blockIdx.x), n_chunks);
        asm volatile("prefetch.global.L1 [%0];" ::"l"(chunk));
        wait_for_predecessor();
        let_successor_start();
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            chunk = p.schedule.chunks + i;
            load_queries();
            acc.clear();
            if (lane == 0) control.tallies[warp] = Tally();
            if (chunk->part == 0 && rank() == n_ranks() - 1) add_call_tokens(); /* the rank with the fewest items */
            if (kProgressive)
                read_progressively();
            else
                read_whole();
            report();
            finish_chunk();
        }
    }
};

/* ---------------------------------------------------------------------------------------------------------------
 * kernel */

/* Of one consumer. Not less than two V highs. */
__host__ __device__ constexpr int area_bytes(bool progressive, int dim)
{
    const int params = 4 * kBlockTokens * ((dim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP),
              plane = kBlockTokens / 2 * dim;
    return progressive ? (params + 3 * plane + kMaxSkew + kLine - 1) / kLine * kLine : 0;
}

template <typename S, bool kProgressive, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) decode_kernel(const __grid_constant__ DecodeParams p)
{
    extern __shared__ __align__(128) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int area_stride = area_bytes(kProgressive, p.layer.format.stored_dim);
    uint8_t *areas = memory + p.n_stages * p.stage_bytes;
    uint8_t *queries = areas + kConsumers * area_stride;
    Control &control = *reinterpret_cast<Control *>(queries + kConsumers * kPartialBytes<S>);
    if (warp == kConsumers) {
        if (lane < p.n_stages) {
            barrier_init(shared_address(&control.full[lane]), kCopyArrivals);
            barrier_init(shared_address(&control.full[kMaxStages + lane]), kCopyArrivals);
            barrier_init(shared_address(&control.empty[lane]), 1);
        }
        if (lane < 2 * kConsumers) barrier_init(shared_address(&control.area_full[lane / 2][lane % 2]), kCopyArrivals);
        fence_barrier_init();
    }
    __syncthreads();
    const int n_chunks = *p.schedule.n_chunks, n_heads = *p.schedule.heads_per_chunk;
    if (warp == kConsumers) {
        const hkv_format &f = p.layer.format;
        const uint32_t record_bytes = kProgressive  ? f.v_params_offset
                                      : f.bits == 8 ? f.int8_bytes
                                      : f.bits == 6 ? f.k8v4_bytes
                                                    : f.int4_bytes;
        Producer<kProgressive> producer{p, memory, control, lane, n_heads, record_bytes};
        producer.run(n_chunks);
    } else {
        Consumer<S, kProgressive> consumer{
            p,    memory,  areas + warp * area_stride,  queries + warp * kPartialBytes<S>, control, warp,
            lane, n_heads, S{p.layer.format.stored_dim}};
        consumer.run(n_chunks);
    }
}

/* -----------------------------------------------------------------------------------------------------------------
 * host */

using Kernel = void (*)(DecodeParams);

/* A kernel and what its shared memory needs besides the ring. */
struct Variant {
    Kernel kernel;
    int columns;
    size_t partial_bytes;
};

template <typename S, int kBlocksPerSm, bool kProgressive> Variant variant_of()
{
    return {decode_kernel<S, kProgressive, kBlocksPerSm>, S::kColumns, kPartialBytes<S>};
}
/* Progressive reading keeps two records' scores, which leaves no registers for 16 columns. */
Variant find_variant(int dim, int columns, bool progressive)
{
    const bool wide = columns > 8;
    if (progressive)
        return dim == 64    ? variant_of<Shape<64, true, 8>, 2, true>()
               : dim == 128 ? variant_of<Shape<128, true, 8>, 2, true>()
               : dim == 256 ? variant_of<Shape<256, true, 8>, 1, true>()
                            : variant_of<Shape<256, false, 8>, 1, true>();
    if (dim == 64)
        return wide ? variant_of<Shape<64, true, 16>, 2, false>() : variant_of<Shape<64, true, 8>, 2, false>();
    if (dim == 128 && wide) return variant_of<Shape<128, true, 16>, 1, false>();
    if (dim == 128) return variant_of<Shape<128, true, 8>, 2, false>();
    return dim == 256 ? variant_of<Shape<256, true, 8>, 1, false>() : variant_of<Shape<256, false, 8>, 1, false>();
}
/* Resident blocks that a variant was compiled for. */
int compiled_blocks(int dim, int columns)
{
    return dim == 64 || (dim == 128 && columns <= 8) ? 2 : 1;
}

} // namespace

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
    const int rows_bytes = row_tokens(progressive) * format.row_bytes;
    const int fetched = format.bits == 0 ? rows_bytes
                        : progressive    ? static_cast<int>(format.v_params_offset)
                                         : static_cast<int>(format.bits == 8   ? format.int8_bytes
                                                            : format.bits == 6 ? format.k8v4_bytes
                                                                               : format.int4_bytes);
    shape->stage_bytes = (max(rows_bytes, fetched) + kMaxSkew + kLine - 1) / kLine * kLine;
    shape->progressive = progressive;
    for (int blocks = blocks_per_sm ? blocks_per_sm
                                    : compiled_blocks(format.stored_dim, progressive ? 8 : columns_wanted);
         blocks >= 1; blocks--) {
        const Variant v = find_variant(format.stored_dim, columns_wanted, progressive);
        const int area = progressive ? kConsumers * area_bytes(true, format.stored_dim) : 0;
        const int fixed =
            area + kConsumers * static_cast<int>(v.partial_bytes) + static_cast<int>(sizeof(Control)) + 128;
        const int room = min(per_block, per_sm / blocks - reserved) - fixed;
        int n_stages = min(kMaxStages, room / shape->stage_bytes);
        if (n_stages < kConsumers && blocks > 1) continue;
        if (n_stages == 3) n_stages = 2; /* three would let a consumer mistake a stage's generation */
        if (n_stages < 1) return cudaErrorInvalidConfiguration;
        shape->columns = v.columns;
        shape->blocks_per_sm = blocks;
        shape->n_workers = n_sms * blocks;
        shape->n_stages = n_stages;
        shape->partial_bytes = v.partial_bytes;
        shape->shared_bytes =
            static_cast<size_t>(n_stages) * static_cast<size_t>(shape->stage_bytes) + static_cast<size_t>(fixed);
        return cudaSuccess;
    }
    return cudaErrorInvalidConfiguration;
}

size_t decode_partial_bytes(const DecodeShape &shape, int max_chunks)
{
    return static_cast<size_t>(max_chunks) * kConsumers * shape.partial_bytes;
}
size_t decode_counter_bytes(int max_chunks)
{
    return static_cast<size_t>(2 * max_chunks) * kConsumers * sizeof(uint32_t);
}
size_t decode_reference_bytes(const DecodeShape &shape, int max_chunks)
{
    return static_cast<size_t>(max_chunks) * kConsumers * static_cast<size_t>(shape.columns) * sizeof(uint32_t);
}

cudaError_t launch_decode(const DecodeShape &shape, const DecodeParams &params, cudaStream_t stream)
{
    const Variant v = find_variant(params.layer.format.stored_dim, shape.columns, shape.progressive);
    DecodeParams p = params;
    p.n_stages = shape.n_stages;
    p.stage_bytes = shape.stage_bytes;
    return launch_dependent(v.kernel, static_cast<unsigned>(shape.n_workers), kThreads, shape.shared_bytes, stream, p);
}

} // namespace hkv
