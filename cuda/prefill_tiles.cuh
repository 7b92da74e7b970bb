/* prefill_tiles.cuh - what a block of threads works on in prefill: a tile of queries, the tiles of keys that it sees,
 * and how keys and values come into shared memory.
 *
 * The G query heads of a KV head are packed with the tokens: query row i of a batch row is head i % G of query token
 * i / G. So a tile of keys meets as many query rows as possible whatever G is, and nothing is padded but the last tile.
 *
 * Tiles in shared memory consist of panels, rows of 64 16-bit elements (128 bytes) whose 16-byte chunks are XORed with
 * the row's number: what ldmatrix reads without conflicts and what wgmma calls the 128-byte swizzle.
 *   keys             [panel of 64 channels][72 rows: 64 tokens, zero, scale, 6 unused]
 *   values of rows   [panel of 64 channels][64 tokens]
 *   values of records  one panel, [channel][64 tokens]: the order in which a record's words unpack
 */
#ifndef HKV_CUDA_PREFILL_TILES_CUH
#define HKV_CUDA_PREFILL_TILES_CUH

#include "format.cuh"
#include "prefill.cuh"

namespace hkv
{

constexpr int kPanelBytes = 128; /* of a row */
constexpr int kKeyRows = kBlockTokens + 8;
constexpr int kKeyPanel = kKeyRows * kPanelBytes;
constexpr int kValuePanel = kBlockTokens * kPanelBytes;

/* Bytes of a tile of keys and of one of values. */
__host__ __device__ constexpr int key_tile_bytes(int dim)
{
    return (dim + 63) / 64 * kKeyPanel;
}
__host__ __device__ constexpr int value_tile_bytes(int dim)
{
    return (dim + 63) / 64 * kValuePanel;
}

/* Byte of a panel where chunk `chunk` (0..7) of a row lies. */
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk)
{
    return static_cast<uint32_t>(row * kPanelBytes + ((chunk ^ (row & 7)) << 4));
}
/* Byte of a tile of several panels where chunk `chunk` of a row lies. */
__device__ __forceinline__ uint32_t tile_offset(int panel_bytes, int row, int chunk)
{
    return static_cast<uint32_t>(chunk / 8 * panel_bytes) + panel_offset(row, chunk & 7);
}

/* ------------------------------------------------------------------------------------------------------ query tiles */

/* Query rows first_query .. first_query + n_queries - 1 of a batch row, for one KV head. */
struct QueryTile {
    int row, head;
    int first_query, n_queries;
    int n_older, n_new, first_token;
};

__host__ __device__ inline int64_t n_query_tiles(int64_t n_new, int group, int tile_queries)
{
    return (n_new * group + tile_queries - 1) / tile_queries;
}
/* Tiles that the rows of a step can have at most, for one KV head. */
inline int64_t max_query_tiles(const PrefillParams &p, int tile_queries)
{
    const int64_t n_prefilled = min(p.n_rows, p.n_new_tokens / (HKV_DECODE_MAX_TOKENS + 1));
    return static_cast<int64_t>(p.n_new_tokens) * p.group / tile_queries + n_prefilled;
}

/* By a whole warp: tile `index` of the step, false if there are fewer. Neighbours in index are the KV heads of one
 * tile; the tiles of a row come last first, because the last ones see the most keys. */
__device__ inline bool find_query_tile(const PrefillParams &p, int index, int tile_queries, int lane, QueryTile *tile)
{
    const int wanted = index / p.layer.n_kv_heads;
    int before = 0;
    for (int base = 0; base < p.n_rows; base += 32) {
        const int n_new = base + lane < p.n_rows ? p.plan.rows[base + lane].n_new : 0;
        const int n = n_new > HKV_DECODE_MAX_TOKENS ? static_cast<int>(n_query_tiles(n_new, p.group, tile_queries)) : 0;
        int end = n;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(kFullWarp, end, static_cast<unsigned>(distance));
            if (lane >= distance) end += other;
        }
        end += before;
        const unsigned behind = __ballot_sync(kFullWarp, wanted < end);
        before = __shfl_sync(kFullWarp, end, 31);
        if (!behind) continue;
        const int owner = __ffs(static_cast<int>(behind)) - 1, last = __shfl_sync(kFullWarp, end, owner) - 1;
        const hkv_plan_row row = p.plan.rows[base + owner];
        tile->row = base + owner;
        tile->head = index % p.layer.n_kv_heads;
        tile->first_query = (last - wanted) * tile_queries;
        tile->n_queries = min(tile_queries, row.n_new * p.group - tile->first_query);
        tile->n_older = row.length - row.n_new;
        tile->n_new = row.n_new;
        tile->first_token = row.first_token;
        return true;
    }
    return false;
}

/* Where query row `query` of the tile's batch row lies in an array of [tokens, query heads, D]. */
__device__ __forceinline__ int64_t query_offset(const PrefillParams &p, const QueryTile &tile, int query,
                                                int64_t stride_token, int64_t stride_head)
{
    return (tile.first_token + query / p.group) * stride_token + (tile.head * p.group + query % p.group) * stride_head;
}

/* -------------------------------------------------------------------------------------------------------- key tiles */

enum KeyKind { kKeyEnd, kKeyRecord, kKeyPage, kKeyCall };

/* Up to 64 consecutive keys of the sequence. */
struct KeyTile {
    int kind;
    int position;          /* of the first */
    int n_tokens;          /* that there are; of a record: before its header is looked at */
    const uint8_t *source; /* the record, the page, or the first key of the call */
    const uint8_t *values; /* the first value of the call */
};

/* The keys that a query tile sees: first the records (bits 0: the blocks), then hot pages, then the call's own. Every
 * call is by a whole warp. */
class KeyWalk
{
  public:
    __device__ void start(const PrefillParams &p, const QueryTile &tile)
    {
        const int first_token = tile.first_query / p.group;
        oldest_ = p.window_tokens > 0 ? max(0, tile.n_older + first_token + 1 - p.window_tokens) : 0;
        base_ = oldest_ / kBlockTokens;
        found_ = 0;
        next_page_ = 0;
        next_new_ = max(oldest_ - tile.n_older, 0);
    }
    __device__ KeyTile next(const PrefillParams &p, const QueryTile &tile, int lane)
    {
        KeyTile keys = {kKeyEnd, 0, 0, nullptr, nullptr};
        if (!next_record(p, tile, lane, &keys) && !next_page(p, tile, &keys)) next_new(p, tile, &keys);
        return keys;
    }

  private:
    static __device__ __forceinline__ int hot_page(const PrefillParams &p, const QueryTile &tile, int block)
    {
        return p.layer.format.bits ? hkv_plan_hot_page(&p.plan, tile.row, block) : -1;
    }
    /* Blocks are looked up 32 at a time, a lane each. */
    __device__ bool next_record(const PrefillParams &p, const QueryTile &tile, int lane, KeyTile *keys)
    {
        const int n_blocks = (tile.n_older + kBlockTokens - 1) / kBlockTokens;
        while (!found_) {
            if (base_ >= n_blocks) return false;
            const int mine = base_ + lane;
            id_ = 0;
            if (mine < n_blocks && hot_page(p, tile, mine) < 0)
                id_ = p.block_table[tile.row * p.block_table_stride + mine];
            if (id_ < 0 || id_ >= p.layer.n_blocks) id_ = 0;
            found_ = __ballot_sync(kFullWarp, id_ != 0);
            base_ += 32;
        }
        const int i = __ffs(static_cast<int>(found_)) - 1, block = base_ - 32 + i;
        found_ &= found_ - 1;
        keys->kind = p.layer.format.bits ? kKeyRecord : kKeyPage;
        keys->position = block * kBlockTokens;
        keys->n_tokens = min(kBlockTokens, tile.n_older - keys->position);
        keys->source = p.layer.record(__shfl_sync(kFullWarp, id_, i), tile.head);
        return true;
    }
    __device__ bool next_page(const PrefillParams &p, const QueryTile &tile, KeyTile *keys)
    {
        const hkv_plan_row &row = p.plan.rows[tile.row];
        const int n_listed = p.layer.format.bits ? row.n_sinks + row.n_window : 0;
        while (next_page_ < n_listed) {
            const int i = next_page_++, position = hkv_plan_row_block(&row, i) * kBlockTokens;
            const int page = p.plan.hot_pages[tile.row * static_cast<int64_t>(p.plan.hot_stride) + i];
            if (page < 0 || position >= tile.n_older || position + kBlockTokens <= oldest_) continue;
            const int n_tokens = min(min(kBlockTokens, tile.n_older - position), p.page_n_tokens[page]);
            if (n_tokens <= 0) continue;
            *keys = {kKeyPage, position, n_tokens, p.layer.hot_page(page, tile.head), nullptr};
            return true;
        }
        return false;
    }
    __device__ void next_new(const PrefillParams &p, const QueryTile &tile, KeyTile *keys)
    {
        const NewTokens &t = p.tokens;
        const int end = (tile.first_query + tile.n_queries - 1) / p.group + 1;
        const int64_t token = tile.first_token + next_new_;
        if (next_new_ >= end || tile.n_older < 0) return; /* tokens of a padding row are none of its own */
        *keys = {kKeyCall, tile.n_older + next_new_, min(kBlockTokens, end - next_new_),
                 static_cast<const uint8_t *>(t.k) + 2 * (token * t.k_stride_token + tile.head * t.k_stride_head),
                 static_cast<const uint8_t *>(t.v) + 2 * (token * t.v_stride_token + tile.head * t.v_stride_head)};
        next_new_ += kBlockTokens;
    }

    int oldest_;     /* key that any query of the tile sees */
    int base_, id_;  /* next 32 blocks; this lane's of the last 32 */
    unsigned found_; /* of the last 32: those still to come */
    int next_page_;  /* in the row's list of hot pages */
    int next_new_;   /* token of the call */
};

/* ------------------------------------------------------------------------------------------- rows into shared memory
 */

/* Start copying 16 bytes, or zeros. Complete after wait_copies by the same thread. */
__device__ __forceinline__ void copy_chunk(uint32_t dst, const void *src, bool is_there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(is_there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until at most kPending of this thread's groups are under way. */
template <int kPending> __device__ __forceinline__ void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/* K (is_v 0) or V of a tile of rows, zeros where there is no token or channel. By kThreads threads. kDim: the head
 * size, or 0 if it is known at run time only. */
template <int kDim, int kThreads>
__device__ __forceinline__ void copy_rows(const PrefillParams &p, const KeyTile &keys, bool is_v, uint32_t dst,
                                          int thread)
{
    const int stored_dim = kDim ? kDim : p.layer.format.stored_dim, n_chunks = stored_dim / 8;
    const bool is_call = keys.kind == kKeyCall;
    const int n_there = kDim || !is_call ? n_chunks : p.layer.format.head_dim / 8;
    const uint8_t *rows = is_call && is_v ? keys.values : keys.source;
    const int64_t stride = 2 * (!is_call ? 2 * stored_dim : is_v ? p.tokens.v_stride_token : p.tokens.k_stride_token);
#pragma unroll
    for (int i = 0; i < (kDim ? kBlockTokens * kDim / 8 : 0); i += kThreads) {
        /* A thread keeps its chunk and goes on by whole groups of 8 tokens, so that all but `stride` are constants. */
        static_assert(kThreads % (kDim ? kDim : 1) == 0, "a thread would change its place among 8 tokens");
        const int token = thread / n_chunks, chunk = thread % n_chunks, more = i / n_chunks;
        const int place = is_call ? chunk : ((is_v ? n_chunks : 0) + chunk) ^ (token & 7);
        const uint8_t *src = rows + token * stride + place * 16;
        const bool is_there = token + more < keys.n_tokens;
        copy_chunk(dst + tile_offset(is_v ? kValuePanel : kKeyPanel, token, chunk) + more * kPanelBytes,
                   is_there ? src + more * stride : rows, is_there);
    }
    for (int i = thread; i < (kDim ? 0 : kBlockTokens * n_chunks); i += kThreads) {
        const int token = i / n_chunks, chunk = i % n_chunks;
        const int place = is_call ? chunk : ((is_v ? n_chunks : 0) + chunk) ^ (token & 7);
        const bool is_there = token < keys.n_tokens && chunk < n_there;
        copy_chunk(dst + tile_offset(is_v ? kValuePanel : kKeyPanel, token, chunk),
                   is_there ? rows + token * stride + place * 16 : rows, is_there);
    }
}

/* ---------------------------------------------------------------------------------------- records into shared memory
 */

/* Four 8 x 8 matrices of 16-bit elements held two a lane, to the row addresses of load_matrices: lane l's is row l % 8
 * of matrix l / 8. No clobber of memory: other loads may pass, and barriers are volatile as this is. */
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&a)[4], int lane)
{
#if HKV_HAS_BULK
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t row = __shfl_sync(kFullWarp, address, 8 * i + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane % 4)), "r"(a[i]));
    }
#endif
}

/* Codes of a word of both planes as pairs of halves, `offset` (a pair of halves) taken off. */
__device__ __forceinline__ void unpack_halves(uint32_t high, uint32_t low, uint32_t offset, uint32_t (&a)[4])
{
    const uint32_t upper = select_bits(0xF0F0F0F0u, high, low >> 4);
    const uint32_t lower = select_bits(0xF0F0F0F0u, high << 4, low);
    a[0] = __byte_perm(upper, 0x64646464u, 0x4240); /* 1024 + code */
    a[1] = __byte_perm(upper, 0x64646464u, 0x4341);
    a[2] = __byte_perm(lower, 0x64646464u, 0x4240);
    a[3] = __byte_perm(lower, 0x64646464u, 0x4341);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = bits_of(__hsub2(half2_of(a[i]), half2_of(offset)));
}
constexpr uint32_t kOffsetCentred = 0x64806480u; /* 1152: codes less 128 */
constexpr uint32_t kOffsetPlain = 0x64006400u;   /* 1024 */
constexpr uint32_t kNoLow = 0x88888888u;         /* what an absent low plane reads as */

/* A record's payload, wherever it is. kDim: the head size, or 0 if it is known at run time only. */
template <int kDim> struct RecordView {
    static constexpr bool kWholeGroups = kDim > 0 && kDim % 64 == 0; /* all steps of all step groups are there */

    const uint8_t *record;
    int stored_dim, planes, n_tokens;

    __device__ __forceinline__ int dim() const
    {
        return kDim ? kDim : stored_dim;
    }
    __device__ __forceinline__ bool has(int step) const
    {
        return kWholeGroups || step * 16 < dim();
    }
    __device__ __forceinline__ int plane_bytes() const
    {
        return kBlockTokens / 2 * dim();
    }
    __device__ __forceinline__ const uint8_t *k_params() const
    {
        return record + sizeof(hkv_record_header);
    }
    __device__ __forceinline__ const uint8_t *k_high() const
    {
        return k_params() + 4 * dim();
    }
    __device__ __forceinline__ const uint8_t *v_params() const
    {
        return k_high() + plane_bytes();
    }
    __device__ __forceinline__ const uint8_t *v_high() const
    {
        return v_params() + 4 * kBlockTokens * ((dim() + HKV_VALUE_GROUP - 1) / HKV_VALUE_GROUP);
    }
    __device__ __forceinline__ const uint8_t *k_low() const
    {
        return v_high() + plane_bytes();
    }
    __device__ __forceinline__ const uint8_t *v_low() const
    {
        return k_low() + plane_bytes();
    }
    /* Units of work: step group u / 4, token tile u % 4. */
    __device__ __forceinline__ int n_units() const
    {
        return (dim() + 63) / 64 * kTiles;
    }
};

/* A unit of both planes: words of four steps of 16 channels. */
struct PlaneWords {
    uint32_t high[4], low[4];

    template <int kDim>
    __device__ __forceinline__ PlaneWords(const RecordView<kDim> &view, const uint8_t *high_plane,
                                          const uint8_t *low_plane, bool has_low, int unit, int lane)
    {
        const int group = unit / kTiles, at = unit % kTiles * 8 * view.dim();
        const bool is_short = !view.kWholeGroups && group * 64 + 64 > view.dim();
        const uint4 h = load_plane(high_plane + at, group, lane, is_short);
        uint4 l = make_uint4(kNoLow, kNoLow, kNoLow, kNoLow);
        if (has_low) l = load_plane(low_plane + at, group, lane, is_short);
        high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
        low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
    }
};

/* A unit of a record's keys as halves (code - 128) * scale, by one warp. */
template <int kDim>
__device__ __forceinline__ void unpack_keys(const RecordView<kDim> &view, uint32_t dst, int unit, int lane)
{
    const int matrix = lane / 8, row = unit % kTiles * 16 + matrix % 2 * 8 + lane % 8;
    const PlaneWords words(view, view.k_high(), view.k_low(), view.planes & HKV_PLANE_K_LOW, unit, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int step = unit / kTiles * 4 + j;
        if (!view.has(step)) break;
        const uint4 params = *reinterpret_cast<const uint4 *>(view.k_params() + step * 64 + lane % 4 * 16);
        uint32_t a[4];
        unpack_halves(words.high[j], words.low[j], kOffsetCentred, a);
        a[0] = multiply_half2(a[0], params.x);
        a[1] = multiply_half2(a[1], params.x);
        a[2] = multiply_half2(a[2], params.z);
        a[3] = multiply_half2(a[3], params.z);
        store_matrices(dst + unit / kTiles * kKeyPanel + panel_offset(row, j * 2 + matrix / 2), a, lane);
    }
}
/* Zeros and scales of all channels as rows 64 and 65 of the keys, by one warp. */
template <int kDim>
__device__ __forceinline__ void unpack_key_params(const RecordView<kDim> &view, uint32_t dst, int lane)
{
    for (int step = lane / 4; view.dim() > step * 16; step += 8) {
        const uint4 params = *reinterpret_cast<const uint4 *>(view.k_params() + step * 64 + lane % 4 * 16);
        const uint32_t pairs[2][2] = {{params.y, params.w}, {params.x, params.z}};
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(
                             dst + tile_offset(kKeyPanel, kBlockTokens + i / 2, step * 2 + i % 2) + 4 * (lane % 4)),
                         "r"(pairs[i / 2][i % 2]));
    }
}

/* A unit of its values, as halves zero + scale * code, rounded once; 0 for tokens that the record does not hold. */
template <int kDim>
__device__ __forceinline__ void unpack_values(const RecordView<kDim> &view, uint32_t dst, int unit, int lane)
{
    const int matrix = lane / 8, tile = unit % kTiles, group = unit / kTiles, token = 2 * (lane % 4);
    const PlaneWords words(view, view.v_high(), view.v_low(), view.planes & HKV_PLANE_V_LOW, unit, lane);
    /* scale t, t+8; zero t, t+8; the same of t+1 */
    const uint4 params = *reinterpret_cast<const uint4 *>(
        view.v_params() + group * 64 / HKV_VALUE_GROUP * 4 * kBlockTokens + tile * 64 + token * 8);
    uint32_t scale[2] = {__byte_perm(params.x, params.z, 0x5410), __byte_perm(params.x, params.z, 0x7632)};
    uint32_t zero[2] = {__byte_perm(params.y, params.w, 0x5410), __byte_perm(params.y, params.w, 0x7632)};
    if (view.n_tokens < kBlockTokens) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int n = view.n_tokens - tile * 16 - half * 8 - token;
            const uint32_t there = n >= 2 ? ~0u : n == 1 ? 0xffffu : 0u;
            scale[half] &= there;
            zero[half] &= there;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (!view.has(group * 4 + j)) break;
        uint32_t a[4];
        unpack_halves(words.high[j], words.low[j], kOffsetPlain, a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = bits_of(__hfma2(half2_of(a[i]), half2_of(scale[i / 2]), half2_of(zero[i / 2])));
        store_matrices(dst + group * 64 * kPanelBytes +
                           panel_offset(j * 16 + matrix % 2 * 8 + lane % 8, tile * 2 + matrix / 2),
                       a, lane);
    }
}

} // namespace hkv

#endif
