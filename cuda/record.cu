/* record.cu - append and seal: what a step writes in one layer, before any row attends.
 *
 * Contract. As docs/transitions.md, "Per layer" 1-4, under the tables of the plan. A record written here has the bytes
 * that hkv_record_encode writes. Every token is quantised once, when its block becomes full (or its page is evicted).
 *
 * Grid. One block of threads per (segment, KV head); heads never exchange anything. Two launches: `prepare` brings
 * older tokens into claimed pages (after saving the page's former owner, if that was a victim), `append` writes the new
 * ones and seals. They are two because a restore must see its source before any segment of the step writes to it.
 *
 * Bytes. Per new token and head 2 x 2D bytes read and written; per sealed block 64 times that read (from L2, mostly)
 * and one record written: a seal costs what reading the block once at 16 bit costs, amortised over 64 steps.
 *
 * Tiling. A block's K and V fit in shared memory at 16 bit. One thread owns a channel of K (its group is 64 tokens),
 * one warp a token of V (its group is up to 128 channels); then each thread makes whole words of a plane, i.e. whole A
 * fragments, so that stores are coalesced.
 */
#include "record.cuh"

#include "format.cuh"
#include "launch.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 512;
constexpr int kRowPad = 8; /* 16-bit elements between rows in shared memory: 16 bytes, against bank conflicts */

__device__ __forceinline__ float to_float(uint16_t bits, int dtype)
{
    return dtype == HKV_BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                             : __half2float(__ushort_as_half(bits));
}

/* Dynamic shared memory of one block of tokens; rows are [kBlockTokens][stored_dim + kRowPad] 16-bit elements. */
struct Staging {
    uint16_t *k, *v;
    float *k_zero, *k_inverse; /* [stored_dim] */
    float *v_zero, *v_inverse; /* [n_value_groups][kBlockTokens] */
    int pitch;

    __device__ Staging(const hkv_format &f, uint8_t *memory)
    {
        pitch = f.stored_dim + kRowPad;
        k = reinterpret_cast<uint16_t *>(memory);
        v = k + kBlockTokens * pitch;
        k_zero = reinterpret_cast<float *>(v + kBlockTokens * pitch);
        k_inverse = k_zero + f.stored_dim;
        v_zero = k_inverse + f.stored_dim;
        v_inverse = v_zero + f.n_value_groups * kBlockTokens;
    }
};
inline size_t staging_bytes(const hkv_format &f)
{
    return static_cast<size_t>(2 * kBlockTokens * (f.stored_dim + kRowPad)) * sizeof(uint16_t) +
           static_cast<size_t>(2 * f.stored_dim + 2 * f.n_value_groups * kBlockTokens) * sizeof(float);
}

/* ---------------------------------------------------------------------------------------------------------- staging */

/* Copy the first n_tokens rows of a row page. */
__device__ void stage_page(const hkv_format &f, const Staging &s, const uint8_t *page, int n_tokens)
{
    const int chunks = f.row_bytes / 16;
    for (int i = threadIdx.x; i < n_tokens * chunks; i += kThreads) {
        const int token = i / chunks, chunk = i % chunks, in_k = chunk < chunks / 2;
        const uint4 data = *reinterpret_cast<const uint4 *>(page + hkv_row_chunk_offset(&f, token, chunk));
        uint16_t *row = (in_k ? s.k : s.v) + token * s.pitch;
        *reinterpret_cast<uint4 *>(row + (in_k ? chunk : chunk - chunks / 2) * 8) = data;
    }
}

/* Copy n_tokens rows of K and V, [n, D] with token strides in elements. Works at any alignment of 2 bytes. */
__device__ void stage_tensors(const hkv_format &f, const Staging &s, const uint16_t *k, int64_t k_stride,
                              const uint16_t *v, int64_t v_stride, int n_tokens)
{
    for (int i = threadIdx.x; i < n_tokens * f.stored_dim; i += kThreads) {
        const int token = i / f.stored_dim, channel = i % f.stored_dim;
        const bool real = channel < f.head_dim;
        s.k[token * s.pitch + channel] = real ? k[token * k_stride + channel] : static_cast<uint16_t>(0);
        s.v[token * s.pitch + channel] = real ? v[token * v_stride + channel] : static_cast<uint16_t>(0);
    }
}

/* ----------------------------------------------------------------------------------------------------- quantisation */

/* Running step 1 of a group: the range of unchanged elements and of clamped ones. */
struct Range {
    float lo = INFINITY, hi = -INFINITY;
    float clamped_lo = INFINITY, clamped_hi = -INFINITY;
    int n_changed = 0, n = 0;

    __device__ void add(float x)
    {
        int32_t changed;
        const float v = hkv_quant_clamp(x, &changed);
        clamped_lo = fminf(clamped_lo, v);
        clamped_hi = fmaxf(clamped_hi, v);
        if (!changed) {
            lo = fminf(lo, v);
            hi = fmaxf(hi, v);
        }
        n_changed += changed;
        n++;
    }
    /* Over the lanes of a warp. Clamped ranges matter only where nothing else is left. */
    __device__ void join_lanes()
    {
        n_changed = __reduce_add_sync(kFullWarp, n_changed);
        n = __reduce_add_sync(kFullWarp, n);
        join(lo, hi);
        if (n == n_changed) join(clamped_lo, clamped_hi);
    }
    static __device__ void join(float &low, float &high)
    {
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            low = fminf(low, __shfl_xor_sync(kFullWarp, low, step));
            high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, step));
        }
    }
    /* Steps 2 and 3. */
    __device__ void params(uint16_t *zero, uint16_t *scale) const
    {
        if (n == n_changed)
            hkv_quant_params(clamped_lo, clamped_hi, zero, scale);
        else
            hkv_quant_params(lo, hi, zero, scale);
    }
};

/* Keep a group's parameters: fp16 in the record, fp32 for the codes. */
__device__ __forceinline__ void keep_params(uint16_t zero, uint16_t scale, uint16_t *record_scale, float *zero_out,
                                            float *inverse_out)
{
    record_scale[0] = scale;
    record_scale[2] = zero;
    *zero_out = hkv_f16_to_f32(zero);
    *inverse_out = hkv_quant_inverse(hkv_f16_to_f32(scale));
}

/* Parameters of every channel of K. Returns the calling thread's number of changed elements. */
__device__ int quantise_key_params(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    uint16_t *params = reinterpret_cast<uint16_t *>(record + f.k_params_offset);
    int n_changed = 0;
    for (int channel = threadIdx.x; channel < f.stored_dim; channel += kThreads) {
        uint16_t zero = 0, scale = 0;
        if (channel < f.head_dim) {
            Range range;
            for (int t = 0; t < n_tokens; t++) range.add(to_float(s.k[t * s.pitch + channel], f.dtype));
            range.params(&zero, &scale);
            n_changed += range.n_changed;
        }
        keep_params(zero, scale, params + hkv_k_param_index(channel), s.k_zero + channel, s.k_inverse + channel);
    }
    return n_changed;
}

/* Parameters of every (token, value group) of V, a warp each. */
__device__ int quantise_value_params(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    uint16_t *params = reinterpret_cast<uint16_t *>(record + f.v_params_offset);
    const int lane = threadIdx.x % 32;
    int n_changed = 0;
    for (int i = threadIdx.x / 32; i < f.n_value_groups * kBlockTokens; i += kThreads / 32) {
        const int token = i % kBlockTokens, group = i / kBlockTokens;
        const int first = group * HKV_VALUE_GROUP, end = min(f.head_dim, first + HKV_VALUE_GROUP);
        uint16_t zero = 0, scale = 0;
        if (token < n_tokens) {
            Range range;
            for (int c = first + lane; c < end; c += 32) range.add(to_float(s.v[token * s.pitch + c], f.dtype));
            range.join_lanes();
            range.params(&zero, &scale);
            if (lane == 0) n_changed += range.n_changed;
        }
        if (lane == 0)
            keep_params(zero, scale, params + hkv_v_param_index(&f, token, first), s.v_zero + i, s.v_inverse + i);
    }
    return n_changed;
}

/* Step 4 of one element; padding holds code 8. */
__device__ __forceinline__ uint32_t code_of(const hkv_format &f, const Staging &s, bool is_v, int token, int channel,
                                            int n_tokens)
{
    if (token >= n_tokens || channel >= f.head_dim) return HKV_CODE_MIN;
    const int group = is_v ? channel / HKV_VALUE_GROUP * kBlockTokens + token : channel;
    const float x = to_float((is_v ? s.v : s.k)[token * s.pitch + channel], f.dtype);
    int32_t changed;
    return static_cast<uint32_t>(hkv_quant_code(hkv_quant_clamp(x, &changed), (is_v ? s.v_zero : s.k_zero)[group],
                                                (is_v ? s.v_inverse : s.k_inverse)[group]));
}

/* The planes of K or V, a word of both a thread at a time: the 2 x 2 x 2 elements of one A fragment's lane. */
__device__ void write_planes(const hkv_format &f, const Staging &s, bool is_v, int n_tokens, uint8_t *high,
                             uint8_t *low)
{
    const int words_per_tile = 2 * f.stored_dim;
    for (int i = threadIdx.x; i < kTiles * words_per_tile; i += kThreads) {
        const int tile = i / words_per_tile, in_tile = i % words_per_tile;
        const int group = in_tile / 128, n_words = group * 64 + 64 <= f.stored_dim ? 4 : 2;
        const int in_group = in_tile % 128, lane = in_group / n_words, step = group * 4 + in_group % n_words;
        uint32_t high_word = 0, low_word = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int row = lane / 4 + 8 * (e & 1), col = 2 * (lane % 4) + (e >> 1 & 1) + 8 * (e >> 2);
            const int token = tile * 16 + (is_v ? col : row), channel = step * 16 + (is_v ? row : col);
            const uint32_t code = code_of(f, s, is_v, token, channel, n_tokens);
            const int shift = 8 * ((e & 1) + 2 * (e >> 1 & 1)) + (e >> 2 ? 0 : 4);
            high_word |= (code >> 4) << shift;
            low_word |= (code & 15) << shift;
        }
        reinterpret_cast<uint32_t *>(high)[i] = high_word;
        if (low) reinterpret_cast<uint32_t *>(low)[i] = low_word;
    }
}

/* Quantise the staged tokens into the payload of `record`. By all threads; returns to every thread the number of
 * clamped elements. */
__device__ int write_payload(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    __syncthreads();
    int n_changed = quantise_key_params(f, s, n_tokens, record) + quantise_value_params(f, s, n_tokens, record);
    n_changed = __reduce_add_sync(kFullWarp, n_changed);
    __shared__ int per_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = n_changed;
    __syncthreads();
    write_planes(f, s, false, n_tokens, record + f.k_high_offset,
                 f.planes & HKV_PLANE_K_LOW ? record + f.k_low_offset : nullptr);
    write_planes(f, s, true, n_tokens, record + f.v_high_offset,
                 f.planes & HKV_PLANE_V_LOW ? record + f.v_low_offset : nullptr);
    n_changed = 0;
    for (int w = 0; w < kThreads / 32; w++) n_changed += per_warp[w];
    return n_changed;
}

/* ---------------------------------------------------------------------------------------------------------- headers */

/* A header with this content and no history. */
__device__ void write_header(const hkv_format &f, uint8_t *record, uint32_t stamp, int n_tokens, int planes,
                             int n_clamped, int64_t now)
{
    hkv_record_header h;
    memset(&h, 0, sizeof h);
    h.stamp = stamp;
    h.n_valid_tokens = static_cast<uint16_t>(n_tokens);
    h.planes = static_cast<uint8_t>(planes);
    h.tier = HKV_TIER_L1;
    h.version = HKV_FORMAT_VERSION;
    h.bits = static_cast<uint8_t>(f.bits);
    h.low_k_slot = h.low_v_slot = -1;
    h.n_clamped = static_cast<uint32_t>(n_clamped);
    h.last_access = now;
    *reinterpret_cast<hkv_record_header *>(record) = h;
}

/* ------------------------------------------------------------------------------------------------------------
 * restoring */

/* Bring tokens 0 .. n_held-1 of a record into a row page, as they read back at the best precision present. Those that
 * the record does not hold, and all others up to n_tokens, become zeros. */
__device__ void restore_from_record(const hkv_format &f, const uint8_t *record, int n_held, int n_tokens, uint8_t *page)
{
    const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(record);
    n_held = min(n_held, hkv_header_n_tokens(header, kBlockTokens));
    const hkv_precision precision = hkv_record_precision(header->planes);
    const int per_token = 2 * f.stored_dim;
    for (int i = threadIdx.x; i < n_tokens * per_token; i += kThreads) {
        const int token = i / per_token, is_v = i % per_token >= f.stored_dim,
                  channel = i % per_token - is_v * f.stored_dim;
        float x = 0.f;
        if (token < n_held && channel < f.head_dim) {
            int32_t upper;
            const uint32_t at = is_v ? hkv_v_plane_offset(f.stored_dim, token, channel, &upper)
                                     : hkv_k_plane_offset(f.stored_dim, token, channel, &upper);
            const bool both = is_v ? precision == HKV_READ_INT8 : precision != HKV_READ_INT4;
            const int shift = upper ? 4 : 0;
            int code = (record[(is_v ? f.v_high_offset : f.k_high_offset) + at] >> shift & 15) * 16 + 8;
            if (both) code += (record[(is_v ? f.v_low_offset : f.k_low_offset) + at] >> shift & 15) - 8;
            const uint16_t *params =
                reinterpret_cast<const uint16_t *>(record + (is_v ? f.v_params_offset : f.k_params_offset)) +
                (is_v ? hkv_v_param_index(&f, token, channel) : hkv_k_param_index(channel));
            x = __fadd_rn(hkv_f16_to_f32(params[2]), __fmul_rn(hkv_f16_to_f32(params[0]), static_cast<float>(code)));
        }
        const uint16_t bits =
            f.dtype == HKV_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
        *reinterpret_cast<uint16_t *>(page + hkv_row_element_offset(&f, token, channel, is_v)) = bits;
    }
}

/* Copy tokens 0 .. n_held-1 from a row page, which may be the same; zeros up to n_tokens. */
__device__ void restore_from_page(const hkv_format &f, const uint8_t *source, int n_held, int n_tokens, uint8_t *page)
{
    const int chunks = f.row_bytes / 16; /* the swizzle stays inside a token */
    for (int i = threadIdx.x; i < n_tokens * chunks; i += kThreads)
        reinterpret_cast<uint4 *>(page)[i] =
            i < n_held * chunks ? reinterpret_cast<const uint4 *>(source)[i] : make_uint4(0, 0, 0, 0);
}

/* --------------------------------------------------------------------------------------------------------------
 * kernels */

/* The page of rows that a segment writes: a hot page, or at bits 0 the block itself. */
__device__ __forceinline__ uint8_t *segment_rows(const LayerView &layer, const hkv_segment &segment, int head)
{
    return layer.format.bits == 0 ? layer.record(segment.block, head)
           : segment.page >= 0    ? layer.hot_page(segment.page, head)
                                  : nullptr;
}

/* Save the unsealed page that this segment's claim took over, if any: its tokens become a partial record. */
__device__ void save_victim(const LayerView &layer, const hkv_plan &plan, int page, int head, const Staging &staging,
                            int64_t now)
{
    const hkv_format &f = layer.format;
    for (int i = 0; i < *plan.n_victims; i++) {
        const hkv_victim victim = plan.victims[i];
        if (victim.page != page) continue;
        uint8_t *record = layer.record(victim.block, head);
        if (reinterpret_cast<const hkv_record_header *>(record)->stamp != victim.stamp)
            return; /* not that content any more */
        stage_page(f, staging, layer.hot_page(page, head), victim.n_tokens);
        const int n_clamped = write_payload(f, staging, victim.n_tokens, record);
        if (threadIdx.x == 0) write_header(f, record, victim.stamp, victim.n_tokens, f.planes, n_clamped, now);
        __syncthreads();
    }
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ LayerView layer, const __grid_constant__ hkv_plan plan, const int64_t *clock)
{
    extern __shared__ __align__(16) uint8_t memory[];
    wait_for_predecessor();
    let_successor_start();
    if (static_cast<int>(blockIdx.x) >= *plan.n_segments) return;
    const hkv_segment segment = plan.segments[blockIdx.x];
    const int head = blockIdx.y;
    if (segment.page >= 0 && *plan.n_victims > 0)
        save_victim(layer, plan, segment.page, head, Staging(layer.format, memory), clock ? *clock : 0);
    if (segment.n_restore == 0) return;
    uint8_t *rows = segment_rows(layer, segment, head);
    const hkv_format &f = layer.format;
    if (f.bits == 0)
        restore_from_page(f, layer.record(segment.restore_block, head), segment.n_held, segment.n_restore, rows);
    else if (segment.restore_page >= 0)
        restore_from_page(f, layer.hot_page(segment.restore_page, head), segment.n_held, segment.n_restore, rows);
    else
        restore_from_record(f, layer.record(segment.restore_block, head), segment.n_held, segment.n_restore, rows);
}

/* Write the segment's new tokens to its rows. */
__device__ void write_rows(const hkv_format &f, uint8_t *rows, const hkv_segment &segment, const uint16_t *k,
                           int64_t k_stride, const uint16_t *v, int64_t v_stride)
{
    const int pairs = f.stored_dim; /* of 16-bit elements in K and V together */
    for (int i = threadIdx.x; i < segment.n_tokens * pairs; i += kThreads) {
        const int token = i / pairs, is_v = i % pairs >= pairs / 2, channel = 2 * (i % pairs - is_v * (pairs / 2));
        const uint16_t *source = is_v ? v + token * v_stride : k + token * k_stride;
        const uint32_t pair =
            channel < f.head_dim ? source[channel] | static_cast<uint32_t>(source[channel + 1]) << 16 : 0;
        *reinterpret_cast<uint32_t *>(rows + hkv_row_element_offset(&f, segment.offset + token, channel, is_v)) = pair;
    }
}

/* The header of a segment that does not seal. */
__device__ void write_open_header(const hkv_format &f, uint8_t *record, const hkv_segment &segment)
{
    hkv_record_header *header = reinterpret_cast<hkv_record_header *>(record);
    const int held = hkv_header_n_tokens(header, kBlockTokens);
    if (segment.restart || held == 0) {
        write_header(f, record, segment.stamp, 0, 0, 0, 0);
        return;
    }
    header->stamp = segment.stamp;
    header->n_valid_tokens = static_cast<uint16_t>(held < segment.offset ? held : segment.offset);
}

__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ LayerView layer, const __grid_constant__ hkv_plan plan,
                  const __grid_constant__ NewTokens tokens, const int64_t *clock)
{
    extern __shared__ __align__(16) uint8_t memory[];
    wait_for_predecessor();
    let_successor_start();
    if (static_cast<int>(blockIdx.x) >= *plan.n_segments) return;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *plan.is_appended = 1;
    const hkv_format &f = layer.format;
    const hkv_segment segment = plan.segments[blockIdx.x];
    const int head = blockIdx.y;
    const uint16_t *k = static_cast<const uint16_t *>(tokens.k) + segment.first_token * tokens.k_stride_token +
                        head * tokens.k_stride_head;
    const uint16_t *v = static_cast<const uint16_t *>(tokens.v) + segment.first_token * tokens.v_stride_token +
                        head * tokens.v_stride_head;
    uint8_t *rows = segment_rows(layer, segment, head);
    if (rows) write_rows(f, rows, segment, k, tokens.k_stride_token, v, tokens.v_stride_token);
    if (f.bits == 0) return;

    uint8_t *record = layer.record(segment.block, head);
    if (!segment.seal) {
        if (threadIdx.x == 0) write_open_header(f, record, segment);
        return;
    }
    const Staging staging(f, memory);
    if (rows) {
        __syncthreads();
        stage_page(f, staging, rows, kBlockTokens);
    } else {
        stage_tensors(f, staging, k, tokens.k_stride_token, v, tokens.v_stride_token, kBlockTokens);
    }
    const int n_clamped = write_payload(f, staging, kBlockTokens, record);
    if (threadIdx.x == 0) write_header(f, record, segment.stamp, kBlockTokens, f.planes, n_clamped, clock ? *clock : 0);
}

} // namespace

cudaError_t launch_append(const LayerView &layer, const hkv_plan &plan, int max_segments, const NewTokens &tokens,
                          const int64_t *clock, cudaStream_t stream)
{
    if (max_segments == 0) return cudaSuccess;
    const size_t shared = layer.format.bits ? staging_bytes(layer.format) : 0;
    const dim3 grid(static_cast<unsigned>(max_segments), static_cast<unsigned>(layer.n_kv_heads));
    cudaError_t status = launch_dependent(prepare_kernel, grid, kThreads, shared, stream, layer, plan, clock);
    if (status != cudaSuccess) return status;
    return launch_dependent(append_kernel, grid, kThreads, shared, stream, layer, plan, tokens, clock);
}

} // namespace hkv
