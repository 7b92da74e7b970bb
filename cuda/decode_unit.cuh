/* decode_unit.cuh - what a computing warp does in every decode kernel: queries, visibility, 16-bit rows, and handing on
 * what it has added up.
 *
 * The warps of a block share a chunk: with n heads in it, warp i works for head i % n and is the (i / n)th of the
 * head's "ranks". Ranks read different records and meet when the chunk ends. A unit's chunks meet in global memory
 * after all chunks of all blocks are read (decode_merge.cuh); since that waits for other blocks, it comes last.
 */
#ifndef HKV_CUDA_DECODE_UNIT_CUH
#define HKV_CUDA_DECODE_UNIT_CUH

#include "decode.cuh"
#include "decode_math.cuh"
#include "decode_merge.cuh"

namespace hkv
{

constexpr int kRankBarrier = 1; /* named barriers, one a head */

/* Bulk copies whose two ends lie differently in their 128-byte lines cost twice the L2 accesses (records are an odd
 * multiple of 64 bytes): so the destination begins where the source does. */
constexpr int kLine = 128, kMaxSkew = kLine - 16;

/* What one warp read of a chunk and what it did not. */
struct Tally {
    unsigned n_records, n_skipped, n_refined, n_bytes;
    float skipped_share;
};

/* Was a block written in this step? */
__device__ __forceinline__ bool is_written_now(const DecodeParams &p, int id)
{
    return p.block_step && p.block_step[id] == *p.step;
}

/* One of the pages that a row reads hot; n_tokens 0: none of it is visible. */
struct HotPage {
    int block, page, n_tokens;
    bool is_new; /* what is visible of it is written in this step */
};
__device__ __forceinline__ HotPage find_hot_page(const DecodeParams &p, const Chunk &chunk, const hkv_plan_row &row,
                                                 int index)
{
    HotPage hot = {hkv_plan_row_block(&row, index), -1, 0, false};
    if (hot.block < 0) return hot;
    hot.page = p.plan.hot_pages[static_cast<size_t>(chunk.row) * static_cast<size_t>(p.plan.hot_stride) + index];
    const bool is_visible = !p.window_tokens || (hot.block + 1) * kBlockTokens > chunk.n_older + 1 - p.window_tokens;
    if (hot.page >= 0 && is_visible)
        hot.n_tokens = max(0, min(p.page_n_tokens[hot.page], chunk.n_older - hot.block * kBlockTokens));
    if (hot.n_tokens > 0) {
        /* The row's own new tokens lie behind those that it sees, if its page was not just filled. */
        const bool is_own = hot.block == chunk.n_older / kBlockTokens && row.first_segment >= 0;
        hot.is_new = is_written_now(p, p.block_table[chunk.row * p.block_table_stride + hot.block]) &&
                     !(is_own && p.plan.segments[row.first_segment].n_restore == 0);
    }
    return hot;
}
__device__ __forceinline__ HotPage broadcast(const HotPage &hot, int lane)
{
    return {__shfl_sync(kFullWarp, hot.block, lane), __shfl_sync(kFullWarp, hot.page, lane),
            __shfl_sync(kFullWarp, hot.n_tokens, lane), false};
}

/* The physical block behind a logical one; 0: there is nothing to read, or a hot page is read instead. */
struct ColdBlock {
    int id;
    bool is_new; /* written in this step */
};
__device__ __forceinline__ ColdBlock find_cold_block(const DecodeParams &p, const Chunk &chunk, const hkv_plan_row &row,
                                                     int block)
{
    const int32_t *pages = p.plan.hot_pages + static_cast<size_t>(chunk.row) * static_cast<size_t>(p.plan.hot_stride);
    int page = -1, id = p.block_table[chunk.row * p.block_table_stride + block];
    if (block < row.n_sinks)
        page = pages[block];
    else if (block >= row.window_first && block < row.window_first + row.n_window)
        page = pages[row.n_sinks + block - row.window_first];
    if (page >= 0 || id < 0 || id >= p.layer.n_blocks) id = 0;
    return {id, id && is_written_now(p, id)};
}

/* One of kWarps computing warps. */
template <typename S, int kWarps> struct Unit {
    const DecodeParams &p;
    uint8_t *query; /* of this warp's head, as B fragments */
    uint8_t *areas; /* room for a partial of every warp; of no use while records are read */
    int area_stride;
    Tally *tally;
    int warp, lane, n_heads;
    S shape;
    const Chunk *chunk;
    Accumulator<S> acc;

    /* KV head of this warp, and which of the warps that share it this is. n_heads is 1, 2 or 4. */
    __device__ __forceinline__ int head_index() const
    {
        return warp & (n_heads - 1);
    }
    __device__ __forceinline__ int head() const
    {
        return chunk->head + head_index();
    }
    __device__ __forceinline__ int rank() const
    {
        return warp >> (n_heads >> 1);
    }
    __device__ __forceinline__ int n_ranks() const
    {
        return kWarps >> (n_heads >> 1);
    }
    /* A barrier of the warps that share a head: other heads' warps may be elsewhere. */
    __device__ __forceinline__ void meet_ranks() const
    {
        if (n_ranks() > 1)
            named_barrier(kRankBarrier + head_index(), n_ranks() * 32);
        else
            __syncwarp();
    }
    __device__ __forceinline__ int column_of(int tile, int i) const
    {
        return chunk->column_tile * S::kColumns + tile * 8 + i;
    }
    /* Query token of a column; n_new or more: there is none. */
    __device__ __forceinline__ int token_of(int column) const
    {
        return static_cast<int>(static_cast<uint32_t>(column) * p.group_inverse >> 22);
    }
    /* The same of this lane's column j of a tile. */
    __device__ __forceinline__ int query_token(int tile, int j) const
    {
        return token_of(column_of(tile, 2 * (lane % 4) + j));
    }
    /* Query head of a column, its token known. */
    __device__ __forceinline__ int query_head(int column, int token) const
    {
        return head() * p.group + column - token * p.group;
    }
    __device__ __forceinline__ void count(unsigned Tally::*what, unsigned n = 1) const
    {
        if (lane == 0) tally->*what += n;
    }

    /* --------------------------------------------------------------------------------------------- start of a chunk */

    /* A lane's words of q of this head's columns, as they are in memory, for the pairs of steps first, first + stride,
     * ... */
    struct QueryWords {
        uint32_t words[S::kColumnTiles][S::kSteps / 2][4];
    };
    __device__ __forceinline__ QueryWords load_queries(int first, int stride) const
    {
        const int head_dim = p.layer.format.head_dim;
        QueryWords q;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            const int column = column_of(n, lane / 4), token = token_of(column);
            const uint16_t *from = static_cast<const uint16_t *>(p.q) +
                                   (chunk->first_token + token) * p.q_stride_token +
                                   query_head(column, token) * p.q_stride_head;
            int turn = 0;
#pragma unroll
            for (int pair = 0; pair < S::kSteps / 2; pair++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int channel = pair * 32 + j * 8 + 2 * (lane % 4);
                    q.words[n][pair][j] = 0;
                    if (turn == first && token < chunk->n_new && channel < head_dim)
                        q.words[n][pair][j] = *reinterpret_cast<const uint32_t *>(from + channel);
                }
                turn = turn + 1 == stride ? 0 : turn + 1;
            }
        }
        return q;
    }
    /* Put them where all ranks find them: fp16, as B fragments. */
    __device__ __forceinline__ void store_queries(QueryWords &q, int first, int stride) const
    {
        const bool is_bf16 = p.layer.format.dtype == HKV_BF16;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++) {
            int turn = 0;
#pragma unroll
            for (int pair = 0; pair < S::kSteps / 2; pair++) {
                uint32_t(&words)[4] = q.words[n][pair];
                if (turn == first) {
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (is_bf16) {
                            const float2 f = unpack_bf162(words[j]);
                            words[j] = pack_half2(f.x, f.y);
                        }
                    *reinterpret_cast<uint4 *>(query + ((n * S::kSteps / 2 + pair) * 32 + lane) * 16) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
                turn = turn + 1 == stride ? 0 : turn + 1;
            }
        }
    }

    /* -------------------------------------------------------------------------------------------------------- masks */

    /* A score with the soft cap; what is hidden stays so. */
    __device__ __forceinline__ float capped(float x) const
    {
        const float to_exponent = 2.f * 1.44269504f / p.soft_cap; /* tanh(y) = 1 - 2 / (1 + e^2y) */
        const float y = p.soft_cap * (1.f - __fdividef(2.f, 1.f + fast_exp2(fminf(x * to_exponent, 80.f))));
        return x > -INFINITY ? y : x;
    }
    template <int kTileCount> __device__ __forceinline__ void cap(Scores<S, kTileCount> &x) const
    {
        if (!unlikely(p.soft_cap > 0.f)) return;
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
            for (int t = 0; t < kTileCount; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) x[n][t][j] = capped(x[n][t][j]);
    }
    /* -inf where a column's query must not see a token: first token of x is at `position`, n_tokens are there; causal:
     * column's own token is the last it sees. */
    template <int kTileCount>
    __device__ __forceinline__ void hide(Scores<S, kTileCount> &x, int position, int n_tokens, bool causal) const
    {
        const bool reaches_out = p.window_tokens > 0 && position < chunk->n_older + chunk->n_new - p.window_tokens;
        if (!unlikely(n_tokens < 16 * kTileCount || reaches_out || causal)) return;
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

    /* --------------------------------------------------------------------------------------------------------- rows */

    /* 16-bit rows, the first at `position` in the sequence. */
    template <typename Rows> __device__ __forceinline__ void add_rows(const Rows &rows, int position, bool causal)
    {
        Scores<S, 1> x;
        if (p.layer.format.dtype == HKV_BF16) {
            row_scores<true>(shape, rows, query, p.scale, lane, x);
            hide<1>(x, position, rows.n_tokens, causal);
            cap<1>(x);
            add_row_values<true>(shape, acc, x, rows, lane);
        } else {
            row_scores<false>(shape, rows, query, p.scale, lane, x);
            hide<1>(x, position, rows.n_tokens, causal);
            cap<1>(x);
            add_row_values<false>(shape, acc, x, rows, lane);
        }
        count(&Tally::n_bytes, static_cast<unsigned>(rows.n_tokens * p.layer.format.row_bytes));
    }
    /* Does this warp deal with the call's own tokens? The last rank has fewest records; tokens of a padding row are
     * none of its own. */
    __device__ __forceinline__ bool has_call_rows() const
    {
        return chunk->part == 0 && chunk->n_older >= 0 && rank() == n_ranks() - 1;
    }
    /* The call's own tokens, straight from its K and V, if this warp deals with them. */
    __device__ __forceinline__ CallRows<S> load_call_rows() const
    {
        const int64_t first = chunk->first_token;
        return CallRows<S>(static_cast<const uint16_t *>(p.tokens.k) + first * p.tokens.k_stride_token +
                               head() * p.tokens.k_stride_head,
                           p.tokens.k_stride_token,
                           static_cast<const uint16_t *>(p.tokens.v) + first * p.tokens.v_stride_token +
                               head() * p.tokens.v_stride_head,
                           p.tokens.v_stride_token, has_call_rows() ? chunk->n_new : 0, p.layer.format.head_dim, lane);
    }
    /* Is token t of the call hidden from query token `query`? */
    __device__ __forceinline__ bool is_hidden(int t, int query) const
    {
        return t > query || (p.window_tokens > 0 && t <= query - p.window_tokens);
    }
    /* Values of the call that are no numbers, to the queries that see their tokens. */
    __device__ __forceinline__ void add_bad_values()
    {
        const bool is_bf16 = p.layer.format.dtype == HKV_BF16;
        const uint16_t *v = static_cast<const uint16_t *>(p.tokens.v) + chunk->first_token * p.tokens.v_stride_token +
                            head() * p.tokens.v_stride_head;
#pragma unroll 1
        for (int t = 0; t < chunk->n_new; t++, v += p.tokens.v_stride_token)
#pragma unroll
            for (int s = 0; s < S::kSteps; s++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int channel = s * 16 + half * 8 + lane / 4;
                    const uint32_t bits = channel < p.layer.format.head_dim ? v[channel] : 0;
                    const float2 value = is_bf16 ? unpack_bf162(bits) : unpack_half2(bits);
                    if (isfinite(value.x)) continue;
#pragma unroll
                    for (int n = 0; n < S::kColumnTiles; n++)
#pragma unroll
                        for (int j = 0; j < 2; j++)
                            if (!is_hidden(t, query_token(n, j))) acc.o[n][s][2 * half + j] += value.x;
                }
    }
    /* The call's own tokens. What a query must not see has weight 0, which would make a value that is no number one to
     * the query too: such values go apart. */
    __device__ __forceinline__ void add_call_rows(CallRows<S> &rows)
    {
        if (rows.n_tokens == 0) return;
        const bool has_bad = rows.n_tokens > 1 && rows.drop_bad_values(p.layer.format.dtype == HKV_BF16);
        add_rows(rows, chunk->n_older, true);
        if (unlikely(has_bad)) add_bad_values();
    }

    /* ----------------------------------------------------------------------------------------------- end of a chunk */

    __device__ __forceinline__ uint8_t *area_of_rank(int i) const
    {
        return areas + (i * n_heads + head_index()) * area_stride;
    }
    __device__ __forceinline__ uint8_t *published_partial(int part) const
    {
        return p.partials +
               (static_cast<size_t>(chunk->first_slot + part) * kMaxChunkHeads + head_index()) * kPartialBytes<S>;
    }
    __device__ __forceinline__ int n_slices() const
    {
        return S::kColumnTiles * (shape.layout().dim / 32);
    }
    /* Ranks to one result, a slice each at a time: output, or what the unit's chunks merge later. */
    __device__ void finish_chunk()
    {
        acc.finish();
        store_partial(shape, acc, area_of_rank(rank()), lane);
        meet_ranks();
        for (int i = rank(); i < n_slices(); i += n_ranks()) {
            Slice slice;
            slice.clear();
            add_stored(slice, area_of_rank(0) + i * kSliceBytes, n_heads * area_stride, n_ranks(), lane);
            slice.normalise();
            if (chunk->n_parts == 1)
                write_output(slice, i);
            else
                slice.pack().publish(published_partial(chunk->part) + i * kSliceBytes, lane);
        }
        meet_ranks();
    }
    /* Every slice of a unit is merged by one of its last chunks, ranks a share of the parts each. The last, as blocks
     * of threads start in their order: whoever waits for an earlier one knows it to be running, whatever else runs on
     * the device. True for the warp that has seen all parts of slice 0. */
    __device__ bool merge_parts()
    {
        const int n_parts = chunk->n_parts, begin = n_parts * rank() / n_ranks(),
                  end = n_parts * (rank() + 1) / n_ranks();
        const int64_t stride = static_cast<int64_t>(kMaxChunkHeads) * kPartialBytes<S>;
        for (int i = n_parts - 1 - chunk->part; i < n_slices(); i += n_parts) {
            Slice slice;
            slice.clear();
            add_published(slice, published_partial(begin) + i * kSliceBytes, stride, end - begin, lane);
            if (n_ranks() > 1) {
                slice.normalise();
                slice.pack().store(area_of_rank(rank()), lane);
                meet_ranks();
                slice.clear();
                if (rank() == 0) add_stored(slice, area_of_rank(0), n_heads * area_stride, n_ranks(), lane);
            }
            slice.normalise();
            if (rank() == 0) write_output(slice, i);
            meet_ranks();
        }
        return chunk->part == n_parts - 1 && rank() == 0;
    }
    __device__ __forceinline__ void write_output(const Slice &slice, int slice_index)
    {
        const int head_dim = p.layer.format.head_dim, pairs = shape.layout().dim / 32;
        const int n = slice_index / pairs, pair = slice_index % pairs;
        const bool is_bf16 = p.layer.format.dtype == HKV_BF16;
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int token = query_token(n, j), q_head = query_head(column_of(n, 2 * (lane % 4) + j), token);
            float sum = slice.l[j];
            if (p.sink_logits && token < chunk->n_new)
                sum += fast_exp2(fminf(p.sink_logits[q_head] * 1.44269504f - slice.m[j], 126.f));
            factor[j] = sum > 0.f ? slice.l[j] / sum : 0.f;
            if (p.lse && pair == 0 && token < chunk->n_new && lane < 4)
                p.lse[static_cast<int64_t>(chunk->first_token + token) * p.group * p.layer.n_kv_heads + q_head] =
                    sum > 0.f ? 0.69314718f * (slice.m[j] + log2f(sum)) : -INFINITY;
        }
        /* Transposed, a lane holds two neighbouring channels of column lane / 4. */
        const int column = column_of(n, lane / 4), token = token_of(column);
        uint16_t *out = static_cast<uint16_t *>(p.out) + (chunk->first_token + token) * p.out_stride_token +
                        query_head(column, token) * p.out_stride_head;
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float o0 = slice.o[s][2 * half] * factor[0], o1 = slice.o[s][2 * half + 1] * factor[1];
                const uint32_t words = transpose_8x8(is_bf16 ? pack_bf162(o0, o1) : pack_half2(o0, o1));
                const int channel = pair * 32 + s * 16 + half * 8 + 2 * (lane % 4);
                if (token < chunk->n_new && channel < head_dim) *reinterpret_cast<uint32_t *>(out + channel) = words;
            }
    }
    /* Add this chunk's tally to the counters. */
    __device__ void report() const
    {
        if (!p.counters || lane != 0) return;
        typedef unsigned long long Count;
        const auto add = [](uint64_t *counter, unsigned n) {
            if (n) atomicAdd(reinterpret_cast<Count *>(counter), static_cast<Count>(n));
        };
        add(&p.counters->n_records_read, tally->n_records);
        add(&p.counters->n_records_skipped, tally->n_skipped);
        add(&p.counters->n_records_refined, tally->n_refined);
        add(&p.counters->n_bytes_read, tally->n_bytes);
        add(&p.counters->n_skipped_mass_terms, chunk->part == 0 && chunk->column_tile == 0 && rank() == 0);
        if (tally->n_skipped) atomicAdd(&p.counters->skipped_mass, static_cast<double>(tally->skipped_share));
    }
};

} // namespace hkv

#endif
