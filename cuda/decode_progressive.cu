/* decode_progressive.cu - decode attention that decides for every record how much of it is worth reading.
 *
 * Contract. As decode.cu; of a record first K high is read, whose scores give its share (docs/transitions.md,
 * "Progressive reading"), then nothing, V high, or everything. Only this kernel knows tiers: records of L2 are never
 * refined, and of a read_mask only the records that it names are read at all.
 *
 * Grid. n_workers blocks of kWarps warps, no producer. Every warp has records of its own (of a chunk with one head
 * every kWarps-th), a ring of its own for their K high and a slot for values, and starts its own copies: so a warp that
 * waits for something keeps nobody else waiting. While a record's values are under way, the next one is scored. Records
 * that are to be refined are put off; when all others are read, the warps of a head share them by tiles of 16 tokens,
 * which come through the ring of keys too.
 *
 * Bytes. At D = 128, per token, layer and KV head: 73 (K high with its parameters), then nothing, 68 (V high), or 196
 * and K high with its parameters again, the latter for every 16 tokens.
 *
 * Why this tiling. 12 warps an SM are as many as have 168 registers each; two slots a warp for keys are 112 KB an SM,
 * twice what the memory needs under way. Which records are refined is a matter of luck: a warp that had to deal with
 * its own alone would keep the whole launch waiting. Decisions, and so sums and their order, depend on the data alone.
 * What a warp does for every record is what its speed depends on, instruction by instruction: so what a chunk needs is
 * close at hand, and what is seldom asked for is computed where it is asked for. docs/kernels.md has the alternatives
 * and their times.
 */
#include "decode_unit.cuh"
#include "decode_variant.cuh"

namespace hkv
{
namespace
{

constexpr int kWarps = 6;
/* Chips with 100 KB of shared memory have room for one block of threads, which then need not save registers. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
constexpr bool kHasRoom = false;
#else
constexpr bool kHasRoom = true;
#endif
constexpr int kMaxKeySlots = 8;
constexpr int kValueSlots = 1;
constexpr int kPieceRows = HKV_TILE_TOKENS / 2; /* of a 16-bit page that are copied at once: they fit a value slot */

/* A record whose K high is in a slot, or on its way there. */
struct KeySlot {
    const uint8_t *record;
    int32_t id, block; /* physical, logical */
};

/* A record that is to be read in full. */
struct alignas(16) RefinedRecord {
    int32_t id, block;        /* physical, logical */
    int16_t n_tokens, planes; /* that it holds */
};
constexpr int kMaxRefined = 16; /* that a warp puts off before it reads no further; those in its ring may follow */

/* Where the parts of a tile of 16 tokens are that is copied for refining: K's parameters, K high, K low, V high, V low,
 * V's parameters. */
struct TileLayout {
    int dim;

    __host__ __device__ constexpr int plane() const
    {
        return HKV_TILE_TOKENS / 2 * dim;
    }
    __host__ __device__ constexpr int planes() const
    {
        return 4 * dim;
    }
    __host__ __device__ constexpr int v_params() const
    {
        return planes() + 4 * plane();
    }
    __host__ __device__ constexpr int n_groups() const
    {
        return (dim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP;
    }
    __host__ __device__ constexpr int bytes() const
    {
        return v_params() + 4 * kBlockTokens * (n_groups() - 1) + 4 * HKV_TILE_TOKENS; /* groups as in a record */
    }
};

/* A tile that is in a key slot, or on its way there. */
struct TileSlot {
    int32_t position, skew;   /* of its first token in the sequence; byte of the slot where it begins */
    int16_t n_tokens, planes; /* as a record's */
};

/* Logical blocks of a chunk for one of a head's ranks, each rank every n_ranks-th; looked up 32 at a time, a lane each.
 * With a read_mask a chunk is not its range of blocks but its part of the row's set bits. */
struct RecordList {
    int32_t first, stride, n; /* number (of block or of set bit) of the rank's first record, to its next, how many */
    int32_t n_looked_up;
    int32_t block[32], id[32]; /* of those looked up last, logical and physical */
};

/* What a warp has for itself, ahead of its value slots and key slots. */
struct WarpMemory {
    Chunk chunk;                 /* that is under way */
    const uint8_t *first_record; /* of the chunk's head: that of block 0 */
    float2 reference[32];        /* a lane's: log2-sum-exp of the hot part */
    float4 pending[kTiles][32];  /* scores of the record whose values are under way: 16 registers less */
    uint64_t key_full[kMaxKeySlots], value_full[kValueSlots];
    KeySlot keys[kMaxKeySlots];
    TileSlot tiles[kMaxKeySlots];
    const uint8_t *values[kValueSlots]; /* the record */
    int32_t n_refined;
    RefinedRecord refined[kMaxRefined + kMaxKeySlots];
    RecordList records;
    float2 hot_sums[16]; /* m and l of the hot part, where several warps share a head */
    Tally tally;
};
constexpr int kWarpMemoryBytes = round_up(sizeof(WarpMemory), 16);

/* Bytes of a slot in which n_bytes may begin anywhere in a line. */
__host__ __device__ constexpr int slot_bytes(int n_bytes)
{
    return (n_bytes + kMaxSkew + 15) / 16 * 16;
}
__host__ __device__ constexpr int key_slot_bytes(int dim)
{
    const int keys = static_cast<int>(sizeof(hkv_record_header)) + 4 * dim + kBlockTokens / 2 * dim;
    const int tile = TileLayout{dim}.bytes();
    return slot_bytes(keys > tile ? keys : tile);
}
__host__ __device__ constexpr int value_slot_bytes(int dim)
{
    return slot_bytes(4 * kBlockTokens * ((dim + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP) + kBlockTokens / 2 * dim);
}
/* A warp's memory without its key slots. */
__host__ __device__ constexpr int warp_bytes(int dim)
{
    return kWarpMemoryBytes + kValueSlots * value_slot_bytes(dim);
}
/* Where in a slot a copy of `source` begins. */
__device__ __forceinline__ int skew_in(const uint8_t *slot, const uint8_t *source)
{
    return static_cast<int>((static_cast<uint32_t>(reinterpret_cast<uintptr_t>(source)) - shared_address(slot)) %
                            kLine);
}
/* Position of set bit number n of a word. */
__device__ __forceinline__ int nth_bit(uint32_t word, int n)
{
    int at = 0;
#pragma unroll
    for (int width = 16; width; width /= 2) {
        const int below = __popc(word & ((1u << width) - 1u));
        if (n >= below) {
            n -= below;
            word >>= width;
            at += width;
        }
    }
    return at;
}

/* ---------------------------------------------------------------------------------------------- the records of a warp
 */

/* Logical blocks that a row's queries see. */
__device__ __forceinline__ int first_visible(const DecodeParams &p, const Chunk &chunk)
{
    return p.window_tokens ? max(0, chunk.n_older + 1 - p.window_tokens) / kBlockTokens : 0;
}
__device__ __forceinline__ int end_visible(const Chunk &chunk)
{
    return (chunk.n_older + kBlockTokens - 1) / kBlockTokens;
}
/* A word of a head's read_mask without blocks that the row does not see. */
__device__ __forceinline__ uint32_t mask_word(const DecodeParams &p, const Chunk &chunk, int head, int i)
{
    const int from = first_visible(p, chunk) - 32 * i, to = end_visible(chunk) - 32 * i;
    if (to <= 0 || from >= 32) return 0;
    uint32_t word = p.read_mask[(static_cast<int64_t>(chunk.row) * p.layer.n_kv_heads + head) * p.mask_words + i];
    if (from > 0) word &= kFullWarp << from;
    if (to < 32) word &= (1u << to) - 1u;
    return word;
}
/* By a whole warp: logical block of a set bit of the mask, a lane each. */
__device__ __forceinline__ int block_of_bit(const DecodeParams &p, const Chunk &chunk, int head, int number, int lane)
{
    int found = 0, before = 0;
    for (int i = first_visible(p, chunk) / 32; i * 32 < end_visible(chunk); i += 32) {
        const uint32_t word = mask_word(p, chunk, head, i + lane);
        int up_to = __popc(word); /* bits up to and with this lane's word */
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(kFullWarp, up_to, step);
            if (lane >= step) up_to += other;
        }
        const int wanted = number - before;
        int at = 0; /* the first word that reaches beyond it */
#pragma unroll
        for (int step = 16; step; step /= 2)
            if (__shfl_sync(kFullWarp, up_to, at + step - 1) <= wanted) at += step;
        const uint32_t its_word = __shfl_sync(kFullWarp, word, at);
        const int its_end = __shfl_sync(kFullWarp, up_to, at), total = __shfl_sync(kFullWarp, up_to, 31);
        if (wanted >= 0 && wanted < total)
            found = (i + at) * 32 + nth_bit(its_word, wanted - its_end + __popc(its_word));
        before += total;
        if (__all_sync(kFullWarp, number < before)) break;
    }
    return found;
}

/* A lane's word of chunk i; there may be no such chunk, but there is room for it. */
constexpr int kChunkWords = sizeof(Chunk) / sizeof(int32_t);
__device__ __forceinline__ int32_t chunk_word(const DecodeParams &p, int i, int lane)
{
    return lane < kChunkWords ? reinterpret_cast<const int32_t *>(p.schedule.chunks + i)[lane] : 0;
}

/* Addresses made from x are not worth a register outside the loop that uses them. */
__device__ __forceinline__ void keep_local(int &x)
{
    asm volatile("" : "+r"(x));
}

/* ----------------------------------------------------------------------------------------------------------- the warp
 */

template <typename S> struct ProgressiveReader : Unit<S, kWarps> {
    static_assert(S::kColumnTiles == 1, "there is room for scores and references of one column tile");
    using Base = Unit<S, kWarps>;
    using Base::acc;
    using Base::chunk;
    using Base::lane;
    using Base::n_ranks;
    using Base::p;
    using Base::query;
    using Base::query_token;
    using Base::rank;
    using Base::shape;
    using Base::warp;

    enum RestKind { kNoRest, kValuesHigh, kAllTheRest, kCountedBytes };
    uint8_t *warps;        /* memory of warp 0, those of the others behind it */
    uint32_t records_left; /* of those looked up last: lanes whose record is still to come */
    bool waited;
    int n_ahead; /* records that are in the ring of key slots, the next one to be scored in: */
    int score_slot;
    uint32_t score_parity;
    uint32_t n_values; /* copies into value slots */
    bool has_reference;
    unsigned n_counted; /* of this chunk: a lane's is the records of a RestKind, that of kCountedBytes bytes */
    float skipped_share;

    /* Tables of the plan, what earlier steps wrote, references: fine before the wait. Pages, records and masks of this
     * step, partial results, output: not. */
    __device__ __forceinline__ void wait_once()
    {
        if (!waited) wait_for_predecessor();
        waited = true;
    }
    __device__ __forceinline__ int warp_stride() const
    {
        return warp_bytes(shape.layout().dim) + p.n_stages * key_slot_bytes(shape.layout().dim);
    }
    __device__ __forceinline__ WarpMemory &memory_of(int its_warp) const
    {
        return *reinterpret_cast<WarpMemory *>(warps + its_warp * warp_stride());
    }
    __device__ __forceinline__ WarpMemory &mine() const
    {
        return memory_of(warp);
    }
    __device__ __forceinline__ uint8_t *value_slot(uint32_t i) const
    {
        return warps + warp * warp_stride() + kWarpMemoryBytes + i % kValueSlots * value_slot_bytes(shape.layout().dim);
    }
    __device__ __forceinline__ uint8_t *key_slot(int i) const
    {
        return value_slot(0) + kValueSlots * value_slot_bytes(shape.layout().dim) +
               i * key_slot_bytes(shape.layout().dim);
    }

    /* ------------------------------------------------------------------------------------------------------ copies */

    /* Which records of the chunk this warp reads. */
    __device__ __forceinline__ void start_list()
    {
        int begin = chunk->block_begin, end = chunk->block_end;
        if (p.read_mask) {
            int64_t n_set = 0;
            for (int i = first_visible(p, *chunk) / 32; i * 32 < end_visible(*chunk); i += 32)
                n_set += __reduce_add_sync(kFullWarp, __popc(mask_word(p, *chunk, this->head(), i + lane)));
            begin = static_cast<int>(n_set * chunk->part / chunk->n_parts);
            end = static_cast<int>(n_set * (chunk->part + 1) / chunk->n_parts);
        }
        RecordList &list = mine().records;
        if (lane == 0) {
            list.first = begin + rank();
            list.stride = n_ranks();
            list.n = max(0, end - begin - rank() + n_ranks() - 1) / n_ranks();
            list.n_looked_up = 0;
        }
        records_left = 0;
        __syncwarp();
    }
    /* Look up some more until there is one to read. */
    __device__ __forceinline__ void look_up()
    {
        RecordList &list = mine().records;
        while (list.n_looked_up < list.n) {
            const int done = list.n_looked_up, i = min(done + lane, list.n - 1), number = list.first + i * list.stride;
            const int block = p.read_mask ? block_of_bit(p, *chunk, this->head(), number, lane) : number;
            const ColdBlock cold = find_cold_block(p, *chunk, p.plan.rows[chunk->row], block);
            list.block[lane] = block;
            list.id[lane] = cold.id;
            __syncwarp();
            if (lane == 0) list.n_looked_up = done + 32;
            records_left = __ballot_sync(kFullWarp, cold.id != 0 && done + lane < list.n);
            if (__any_sync(kFullWarp, cold.is_new)) wait_once();
            __syncwarp();
            if (records_left) return;
        }
    }
    __device__ __forceinline__ bool has_more()
    {
        if (unlikely(records_left == 0)) look_up();
        return records_left != 0;
    }
    /* The ring's next free slot. */
    __device__ __forceinline__ int free_slot() const
    {
        const int i = score_slot + n_ahead;
        return i < p.n_stages ? i : i - p.n_stages;
    }
    /* The oldest slot is free again. */
    __device__ __forceinline__ void release_slot()
    {
        n_ahead--;
        score_slot++;
        if (score_slot == p.n_stages) {
            score_slot = 0;
            score_parity ^= 1;
        }
    }
    /* Start reading the next record's K high, if there is one. There is a free slot. */
    __device__ __forceinline__ void fetch_keys()
    {
        if (!has_more()) return;
        const int from = __ffs(static_cast<int>(records_left)) - 1;
        records_left &= records_left - 1;
        const int id = mine().records.id[from];
        const uint8_t *record = mine().first_record + id * p.layer.pages.block_stride_bytes;
        const int i = free_slot();
        uint8_t *slot = key_slot(i);
        if (lane == 0) mine().keys[i] = {record, id, mine().records.block[from]};
        copy_to_shared(shared_address(slot) + skew_in(slot, record), record,
                       static_cast<uint32_t>(shape.layout().v_params()), shared_address(&mine().key_full[i]), lane);
        n_ahead++;
    }
    /* Start copying to the next value slot. */
    __device__ __forceinline__ void fetch_values(const uint8_t *source, int n_bytes)
    {
        uint8_t *slot = value_slot(n_values);
        copy_to_shared(shared_address(slot) + skew_in(slot, source), source, static_cast<uint32_t>(n_bytes),
                       shared_address(&mine().value_full[n_values % kValueSlots]), lane);
        n_values++;
    }
    /* Wait for the last copy to a value slot. */
    __device__ __forceinline__ void await_values() const
    {
        const uint32_t i = n_values - 1;
        barrier_wait(shared_address(&mine().value_full[i % kValueSlots]), i / kValueSlots & 1);
    }
    /* Where in its slot that copy of `source` is. */
    __device__ __forceinline__ const uint8_t *values_of(const uint8_t *source) const
    {
        const uint8_t *slot = value_slot(n_values - 1);
        return slot + skew_in(slot, source);
    }

    /* ---------------------------------------------------------------------------------------------------- hot part */

    /* The pages that the row reads hot, in pieces that the ranks take in turn. */
    struct HotPieces {
        int base;      /* pages are looked up 32 at a time, a lane each: number of lane 0's */
        HotPage hers;  /* this lane's */
        uint32_t left; /* lanes whose page is still to come */
        int to_mine;   /* pieces up to this rank's next one */
        HotPage hot;   /* page that is under way */
        int first;     /* and the first row of the piece after this rank's last one */

        /* This rank's next piece, then: */
        const uint8_t *source;
        int position, n_tokens; /* 0: there is none */
    };
    __device__ __forceinline__ HotPieces start_hot_pages()
    {
        HotPieces pieces = {};
        pieces.hers = find_hot_page(p, *chunk, p.plan.rows[chunk->row], lane);
        pieces.left = __ballot_sync(kFullWarp, pieces.hers.n_tokens > 0);
        if (__any_sync(kFullWarp, pieces.hers.is_new)) wait_once();
        pieces.to_mine = rank();
        fetch_hot_piece(pieces);
        return pieces;
    }
    /* Find this rank's next piece and start reading it. */
    __device__ __forceinline__ void fetch_hot_piece(HotPieces &pieces)
    {
        const int row_bytes = p.layer.format.row_bytes;
        pieces.n_tokens = 0;
        for (;;) {
            while (pieces.first < pieces.hot.n_tokens) {
                const int first = pieces.first;
                pieces.first += kPieceRows;
                if (pieces.to_mine-- > 0) continue;
                pieces.to_mine = n_ranks() - 1;
                pieces.source = p.layer.hot_page(pieces.hot.page, this->head()) + first * row_bytes;
                pieces.position = pieces.hot.block * kBlockTokens + first;
                pieces.n_tokens = min(kPieceRows, pieces.hot.n_tokens - first);
                return fetch_values(pieces.source, kPieceRows * row_bytes);
            }
            while (pieces.left == 0) {
                const hkv_plan_row &row = p.plan.rows[chunk->row];
                pieces.base += 32;
                if (pieces.base >= row.n_sinks + row.n_window) return;
                pieces.hers = find_hot_page(p, *chunk, row, pieces.base + lane);
                pieces.left = __ballot_sync(kFullWarp, pieces.hers.n_tokens > 0);
                if (__any_sync(kFullWarp, pieces.hers.is_new)) wait_once();
            }
            pieces.hot = broadcast(pieces.hers, __ffs(static_cast<int>(pieces.left)) - 1);
            pieces.left &= pieces.left - 1;
            pieces.first = 0;
        }
    }
    __device__ __forceinline__ void add_hot_pages(HotPieces &pieces)
    {
        const int row_bytes = p.layer.format.row_bytes;
        while (pieces.n_tokens > 0) {
            await_values();
            this->add_rows(
                PageRows{shared_address(values_of(pieces.source)), row_bytes, row_bytes / 32, 0, pieces.n_tokens},
                pieces.position, false);
            __syncwarp();
            fetch_hot_piece(pieces);
        }
    }
    __device__ __forceinline__ float &own_reference(int column) const
    {
        return reinterpret_cast<float *>(&mine().reference[lane])[column];
    }
    __device__ __forceinline__ uint32_t *reference_words() const
    {
        return p.references +
               (static_cast<size_t>(chunk->first_slot) * kMaxChunkHeads + this->head_index()) * S::kColumns;
    }
    /* After the hot part: its log-sum-exp, over all ranks, for this chunk and the unit's others. */
    __device__ void publish_reference()
    {
        float m[S::kColumnTiles][2], l[S::kColumnTiles][2];
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                m[n][j] = acc.m[n][j];
                l[n][j] = acc.total(n, j);
                if (n_ranks() > 1 && lane < 4) mine().hot_sums[n * 8 + 2 * lane + j] = make_float2(m[n][j], l[n][j]);
            }
        this->meet_ranks();
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (n_ranks() > 1) {
                    m[n][j] = kNone;
                    l[n][j] = 0.f;
                    for (int i = this->head_index(); i < n_ranks() * this->n_heads; i += this->n_heads) {
                        const float2 other = memory_of(i).hot_sums[n * 8 + 2 * (lane % 4) + j];
                        const float top = fmaxf(m[n][j], other.x);
                        l[n][j] = l[n][j] * fast_exp2(m[n][j] - top) + other.y * fast_exp2(other.x - top);
                        m[n][j] = top;
                    }
                }
                const float reference = query_token(n, j) < chunk->n_new ? m[n][j] + fast_log2(l[n][j]) : -kNone;
                own_reference(j) = reference;
                if (chunk->n_parts > 1 && rank() == 0 && lane < 4)
                    store_shared_word(reference_words() + n * 8 + 2 * lane + j, __float_as_uint(reference));
            }
        has_reference = true;
    }
    /* In the unit's other chunks: wait for the first one's. It needs nothing from us, and all blocks are resident. */
    __device__ __forceinline__ void await_reference()
    {
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t word;
                do word = load_shared_word(reference_words() + n * 8 + 2 * (lane % 4) + j);
                while (word == kAbsent);
                own_reference(j) = __uint_as_float(word);
            }
        has_reference = true;
    }

    /* ----------------------------------------------------------------------------------------------------- records */

    /* Largest share over the columns of a record with these scores. */
    __device__ __forceinline__ float share_of(const Scores<S, kTiles> &x) const
    {
        float sums[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float reference = own_reference(j);
            sums[j] = 0.f;
#pragma unroll
            for (int t = 0; t < kTiles; t++)
                sums[j] += fast_exp2(x[0][t][j] - reference) + fast_exp2(x[0][t][2 + j] - reference);
        }
        /* Half of the lanes go on with column 0, half with column 1. */
        const bool has_second = lane & 4;
        float sum = has_second ? sums[1] : sums[0];
        sum += __shfl_xor_sync(kFullWarp, has_second ? sums[0] : sums[1], 4);
        sum += __shfl_xor_sync(kFullWarp, sum, 8);
        sum += __shfl_xor_sync(kFullWarp, sum, 16);
        return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(sum))); /* of numbers >= 0 */
    }
    /* Set the bit of a logical block. */
    __device__ __forceinline__ void mark(uint32_t *mask, int block) const
    {
        if (lane != 0) return;
        const int64_t pair = static_cast<int64_t>(chunk->row) * p.layer.n_kv_heads + this->head();
        atomicOr(mask + (pair * p.mask_tiles + chunk->column_tile) * p.mask_words + block / 32, 1u << block % 32);
    }
    /* What a record is worth reading beyond its K high. */
    __device__ __forceinline__ RestKind judge(float share, int planes, int tier) const
    {
        if (share < p.skip_mass) return kNoRest;
        if (share < p.refine_mass || !(planes & HKV_PLANE_K_LOW) || tier == HKV_TIER_L2) return kValuesHigh;
        return kAllTheRest;
    }
    /* Count and tell what was decided. */
    __device__ __forceinline__ void account(RestKind kind, float share, int planes, int block)
    {
        const hkv_format &f = p.layer.format;
        const unsigned n_bytes = kind == kNoRest       ? f.v_params_offset
                                 : kind == kValuesHigh ? f.int4_bytes
                                                       : hkv_record_prefix_bytes(&f, hkv_record_precision(planes));
        n_counted += lane == kind ? 1 : lane == kCountedBytes ? n_bytes : 0;
        if (kind == kNoRest) skipped_share += share;
        if (unlikely(p.skipped_mask) && kind != kValuesHigh)
            mark(kind == kNoRest ? p.skipped_mask : p.refined_mask, block);
    }
    /* The chunk's counts, for report(). */
    __device__ __forceinline__ void tell_tally() const
    {
        const unsigned n_skipped = __shfl_sync(kFullWarp, n_counted, kNoRest),
                       n_refined = __shfl_sync(kFullWarp, n_counted, kAllTheRest),
                       n_high = __shfl_sync(kFullWarp, n_counted, kValuesHigh),
                       n_bytes = __shfl_sync(kFullWarp, n_counted, kCountedBytes);
        if (lane != 0) return;
        Tally &tally = mine().tally;
        tally.n_records += n_skipped + n_high + n_refined;
        tally.n_skipped += n_skipped;
        tally.n_refined += n_refined;
        tally.n_bytes += n_bytes;
        tally.skipped_share += skipped_share;
    }
    /* K high of the next record has arrived: score it, decide, and start reading what it is worth. Its slot becomes
     * free. */
    __device__ __forceinline__ RestKind score_next(Scores<S, kTiles> &x, const uint8_t *&record)
    {
        const Layout layout = shape.layout();
        barrier_wait(shared_address(&mine().key_full[score_slot]), score_parity);
        const KeySlot key = mine().keys[score_slot];
        const uint8_t *slot = key_slot(score_slot), *prefix = slot + skew_in(slot, key.record);
        release_slot();
        const hkv_record_header header = header_start(prefix);
        const int position = key.block * kBlockTokens;
        const int n_tokens =
            min(min(kBlockTokens, chunk->n_older - position), hkv_header_n_tokens(&header, kBlockTokens));
        if (unlikely(n_tokens == 0)) return kNoRest;
        const int planes = header.planes & p.layer.format.planes, tier = header.tier;
        const StoredPlane keys = {prefix + layout.k_high()};
        record_scores<false, kTiles>(shape, prefix + layout.k_params(), keys, keys, query, p.scale, lane, x);
        this->template hide<kTiles>(x, position, n_tokens, false);
        this->template cap<kTiles>(x);
        if (unlikely(!has_reference)) await_reference();
        const float share = share_of(x);
        const RestKind kind = judge(share, planes, tier);
        account(kind, share, planes, key.block);
        if (kind == kAllTheRest)
            put_off({key.id, key.block, static_cast<int16_t>(n_tokens), static_cast<int16_t>(planes)});
        record = key.record;
        return kind;
    }
    /* Start reading a record's values. */
    __device__ __forceinline__ void fetch_values_of(const uint8_t *record)
    {
        if (lane == 0) mine().values[n_values % kValueSlots] = record;
        fetch_values(record + shape.layout().v_params(), shape.layout().k_low() - shape.layout().v_params());
    }
    /* Wait for the pending record's values, and add them. */
    __device__ __forceinline__ void settle(const float4 *pending)
    {
        const Layout layout = shape.layout();
        await_values();
        const uint8_t *rest = values_of(mine().values[(n_values - 1) % kValueSlots] + layout.v_params());
        const StoredPlane values = {rest + layout.v_high() - layout.v_params()};
        Scores<S, kTiles> x;
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            const float4 f = pending[t * 32];
            x[0][t][0] = f.x, x[0][t][1] = f.y, x[0][t][2] = f.z, x[0][t][3] = f.w;
        }
        add_record_values<false, kTiles>(shape, acc, x, rest, values, values, lane);
        __syncwarp();
    }
    /* Read on until there is nothing left or no more can be put off; the ring is empty then. While a record's values
     * are under way, the next ones are scored until another one's values are wanted, too. */
    __device__ __forceinline__ void read_records()
    {
        bool is_pending = false, is_full = false;
        for (;;) {
            const bool goes_on = n_ahead > 0;
            const uint8_t *record = nullptr;
            Scores<S, kTiles> x;
            keep_local(warp);
            keep_local(lane);
            if (goes_on) {
                const RestKind kind = score_next(x, record);
                __syncwarp();
                if (unlikely(kind == kAllTheRest)) is_full = mine().n_refined >= kMaxRefined;
                if (!is_full) fetch_keys();
                if (kind != kValuesHigh) continue;
            }
            float4 *pending = &mine().pending[0][lane];
            if (is_pending) settle(pending);
            if (!goes_on) return;
            is_pending = true;
            fetch_values_of(record);
#pragma unroll
            for (int t = 0; t < kTiles; t++)
                pending[t * 32] = make_float4(x[0][t][0], x[0][t][1], x[0][t][2], x[0][t][3]);
        }
    }

    /* -------------------------------------------------------------------------------------------- records in full */

    /* Remember a record that is to be read in full. */
    __device__ __forceinline__ void put_off(const RefinedRecord &refined)
    {
        if (lane == 0) mine().refined[mine().n_refined++] = refined;
    }
    /* A lane's piece of the tiles that are copied. */
    struct Piece {
        int source, source_step; /* bytes: in the record, of tile 0; from a tile to the next */
        int target, n_bytes;     /* in the slot */
        bool is_low_values;
    };
    __device__ __forceinline__ Piece piece_of_lane() const
    {
        const Layout layout = shape.layout();
        const TileLayout to{layout.dim};
        Piece piece = {};
        if (lane == 0) {
            piece.source = layout.k_params();
            piece.n_bytes = to.planes();
        } else if (lane < 5) { /* planes in the order K high, V high, K low, V low */
            piece.source = lane == 1   ? layout.k_high()
                           : lane == 2 ? layout.v_high()
                           : lane == 3 ? layout.k_low()
                                       : layout.v_low();
            piece.source_step = piece.n_bytes = to.plane();
            piece.target = to.planes() + (lane - 1) * to.plane();
            piece.is_low_values = lane == 4;
        } else if (lane < 5 + to.n_groups()) {
            piece.source = layout.v_params() + (lane - 5) * 4 * kBlockTokens;
            piece.source_step = piece.n_bytes = 4 * HKV_TILE_TOKENS;
            piece.target = to.v_params() + (lane - 5) * 4 * kBlockTokens;
        }
        return piece;
    }
    /* Start reading a tile of a record, a lane a piece of it. There is a free slot. */
    __device__ __forceinline__ void fetch_tile(const RefinedRecord &refined, int tile, const Piece &piece)
    {
        const TileLayout to{shape.layout().dim};
        const bool with_low_values = refined.planes & HKV_PLANE_V_LOW;
        const uint8_t *record = mine().first_record + refined.id * p.layer.pages.block_stride_bytes;
        const int i = free_slot(), skew = skew_in(key_slot(i), record + shape.layout().k_params());
        if (lane == 0)
            mine().tiles[i] = {refined.block * kBlockTokens + tile * HKV_TILE_TOKENS, skew,
                               static_cast<int16_t>(refined.n_tokens - tile * HKV_TILE_TOKENS), refined.planes};
        const int n_total = to.planes() + (with_low_values ? 4 : 3) * to.plane() + to.n_groups() * 4 * HKV_TILE_TOKENS;
        copy_pieces_to_shared(shared_address(key_slot(i)) + skew + piece.target,
                              record + piece.source + tile * piece.source_step,
                              piece.is_low_values && !with_low_values ? 0u : static_cast<uint32_t>(piece.n_bytes),
                              static_cast<uint32_t>(n_total), shared_address(&mine().key_full[i]), lane);
        n_ahead++;
    }
    /* Add the tile that comes next in the ring. */
    __device__ __forceinline__ void add_tile()
    {
        const TileLayout at{shape.layout().dim};
        barrier_wait(shared_address(&mine().key_full[score_slot]), score_parity);
        const TileSlot tile = mine().tiles[score_slot];
        const uint8_t *first = key_slot(score_slot) + tile.skew, *planes = first + at.planes();
        release_slot();
        const StoredPlane key_high = {planes}, value_high = {planes + at.plane()}, key_low = {planes + 2 * at.plane()},
                          value_low = {planes + 3 * at.plane()};
        Scores<S, 1> x;
        record_scores<true, 1>(shape, first, key_high, key_low, query, p.scale, lane, x);
        this->template hide<1>(x, tile.position, tile.n_tokens, false);
        this->template cap<1>(x);
        if (tile.planes & HKV_PLANE_V_LOW)
            add_record_values<true, 1>(shape, acc, x, first + at.v_params(), value_high, value_low, lane);
        else
            add_record_values<false, 1>(shape, acc, x, first + at.v_params(), value_high, value_low, lane);
        __syncwarp();
    }
    /* What this warp has put off; or, at the end, its share of what all warps of its head have: few records would else
     * keep few warps busy for long. The ring is empty before and after. */
    __device__ __forceinline__ void refine(bool together)
    {
        if (together) this->meet_ranks();
        /* Lane i: records that ranks up to i have put off, as far as this warp deals with them. */
        const bool is_heard = lane < n_ranks() && (together || lane == rank());
        int end = is_heard ? memory_of(this->head_index() + lane * this->n_heads).n_refined : 0;
#pragma unroll
        for (int step = 1; step < 8; step <<= 1) {
            const int other = __shfl_up_sync(kFullWarp, end, step);
            if (lane >= step) end += other;
        }
        const int n_tiles = __shfl_sync(kFullWarp, end, n_ranks() - 1) * kTiles, stride = together ? n_ranks() : 1;
        const Piece piece = piece_of_lane();
        for (int next = together ? rank() : 0;;) {
            keep_local(warp);
            keep_local(lane);
            for (; n_ahead < p.n_stages && next < n_tiles; next += stride) {
                const int record = next / kTiles, tile = next % kTiles;
                const int owner = __popc(__ballot_sync(kFullWarp, lane < n_ranks() && end <= record));
                const int before = __shfl_sync(kFullWarp, end, max(owner - 1, 0));
                const RefinedRecord refined =
                    memory_of(this->head_index() + owner * this->n_heads).refined[owner ? record - before : record];
                if (tile * HKV_TILE_TOKENS < refined.n_tokens) fetch_tile(refined, tile, piece);
            }
            if (n_ahead == 0) break;
            add_tile();
        }
        if (!together && lane == 0) mine().n_refined = 0;
        __syncwarp();
    }

    /* ------------------------------------------------------------------------------------------------------ chunks */

    /* List the chunk's records and start reading the first ones. */
    __device__ __forceinline__ void start_records()
    {
        start_list();
        for (int i = 0; i < p.n_stages; i++) fetch_keys();
    }
    /* Have chunk i of the schedule close at hand, whose word this is. */
    __device__ __forceinline__ void take_chunk(int32_t word)
    {
        __syncwarp();
        if (lane < kChunkWords) reinterpret_cast<int32_t *>(&mine().chunk)[lane] = word;
        __syncwarp();
        chunk = &mine().chunk;
        if (lane == 0) mine().first_record = p.layer.record(0, this->head());
        __syncwarp();
    }
    __device__ void read_chunk()
    {
        acc.clear();
        has_reference = false;
        n_counted = 0;
        skipped_share = 0.f;
        if (lane == 0) {
            *this->tally = Tally();
            mine().n_refined = 0;
        }
        CallRows<S> rows = this->load_call_rows(); /* under way, as is q, while records are looked up */
        auto queries = this->load_queries(rank(), n_ranks());
        HotPieces hot = {};
        if (chunk->part == 0) hot = start_hot_pages();
        const bool must_wait = p.read_mask && !waited; /* for the mask */
        /* What other chunks wait for comes first. */
        const bool is_late = must_wait || (chunk->part == 0 && chunk->n_parts > 1);
        if (!is_late) start_records();
        this->store_queries(queries, rank(), n_ranks());
        this->meet_ranks();
        this->add_call_rows(rows);
        if (chunk->part == 0) {
            add_hot_pages(hot);
            publish_reference();
        }
        if (must_wait) wait_once();
        if (is_late) start_records();
        let_successor_start(); /* not earlier: its blocks take places that those of this launch should have */
        for (;;) {
            read_records();
            const bool is_done = !has_more();
            refine(is_done);
            if (is_done) break;
            for (int i = 0; i < p.n_stages; i++) fetch_keys();
        }
        tell_tally();
        this->report();
        this->finish_chunk();
        fence_copies(); /* partial results lay where values come next */
        __syncwarp();
    }
    __device__ void run(int n_chunks, int32_t first_word)
    {
        waited = false;
        n_ahead = score_slot = 0;
        score_parity = n_values = 0;
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            take_chunk(i < gridDim.x ? first_word : chunk_word(p, i, lane));
            read_chunk();
        }
        for (int i = blockIdx.x; i < n_chunks; i += gridDim.x) {
            if (n_chunks > gridDim.x) take_chunk(chunk_word(p, i, lane));
            if (chunk->n_parts > 1 && this->merge_parts() && lane < S::kColumns)
                store_shared_word(reference_words() + lane, kAbsent);
        }
        if (blockIdx.x == 0) wait_once(); /* this launch shall not be over before its predecessor */
    }
};

template <typename S, int kBlocksPerSm>
__global__ void __launch_bounds__(kWarps * 32, kHasRoom ? kBlocksPerSm : 1)
    progressive_kernel(const __grid_constant__ DecodeParams p)
{
    extern __shared__ __align__(128) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = p.layer.format.stored_dim;
    const int n_heads = *p.schedule.heads_per_chunk, n_chunks = *p.schedule.n_chunks; /* all under way at once */
    const int32_t first_word = chunk_word(p, blockIdx.x, lane);
    const int warp_stride = warp_bytes(dim) + p.n_stages * key_slot_bytes(dim);
    uint8_t *warps = memory + kMaxChunkHeads * S::kQueryBytes;
    WarpMemory &mine = *reinterpret_cast<WarpMemory *>(warps + warp * warp_stride);
    if (lane < p.n_stages) barrier_init(shared_address(&mine.key_full[lane]), kCopyArrivals);
    if (lane < kValueSlots) barrier_init(shared_address(&mine.value_full[lane]), kCopyArrivals);
    if (lane == 0) mine.n_refined = 0;
    fence_barrier_init();
    __syncthreads(); /* warps that no head is left for have put nothing off either */
    if (warp >= kWarps / n_heads * n_heads) return;
    ProgressiveReader<S> reader{{p, memory + (warp & (n_heads - 1)) * S::kQueryBytes, warps + kWarpMemoryBytes,
                                 warp_stride, &mine.tally, warp, lane, n_heads, S{dim}},
                                warps};
    reader.run(n_chunks, first_word);
}

template <typename S, int kBlocksPerSm> Variant variant_of(const hkv_format &format)
{
    Variant v;
    v.kernel = progressive_kernel<S, kBlocksPerSm>;
    v.columns = S::kColumns;
    v.n_threads = kWarps * 32;
    v.blocks_per_sm = kBlocksPerSm;
    v.partial_bytes = kPartialBytes<S>;
    v.fixed_bytes = kMaxChunkHeads * S::kQueryBytes + kWarps * warp_bytes(format.stored_dim);
    v.stage_bytes = kWarps * key_slot_bytes(format.stored_dim);
    v.max_stages = kMaxKeySlots;
    return v;
}

} // namespace

Variant find_progressive_variant(const hkv_format &format)
{
    switch (format.stored_dim) {
    case 64:
        return variant_of<Shape<64, true, 8>, 2>(format);
    case 128:
        return variant_of<Shape<128, true, 8>, 2>(format);
    case 256:
        return variant_of<Shape<256, true, 8>, 1>(format);
    default:
        return variant_of<Shape<256, false, 8>, 1>(format);
    }
}

} // namespace hkv
