/* record.cu - append and seal: what a step writes in one layer, before any row attends.
 *
 * Contract. As docs/transitions.md, "Per layer" 1-4, under the tables of the plan. A record written here has the bytes
 * that hkv_record_encode writes. Every token is quantised once, when its block becomes full (or its page is evicted).
 *
 * Grid. One block of threads per (segment, KV head); heads never exchange anything. A block saves the former owner of a
 * claimed page, brings older tokens into it, writes the new ones and seals. Segments depend on each other only where
 * the plan says so (is_entangled: a segment overwrites what another restores); then the first block of every head
 * carries out all of them.
 *
 * Bytes. Per new token and head 2 x 2D bytes read and written; per sealed block 63 times that read and one record
 * written: a seal costs what reading the block once at 16 bit costs, amortised over 64 steps.
 *
 * Tiling. A block's K and V fit in shared memory at 16 bit, in the shape of a row page, whose swizzle serves here too;
 * the tokens of the page are fetched while those of the call are on their way. Ranges are found two elements at a time,
 * K's channels over a slice of the tokens a thread, V's tokens over eight lanes. Codes are made where the tensor core
 * will want them: ldmatrix hands a lane the eight elements of one A fragment (transposed for V), which are one word of
 * each plane.
 *
 * Common head sizes are template parameters: with a general format half of all instructions would compute addresses.
 *
 * A block without clamped elements and without subnormal scales, and full, needs no care: elements are their own
 * clamped values, and codes end up in 8..248 by themselves (csrc/format.h). All others take the same way with care.
 */
#include "record.cuh"

#include <cuda_pipeline_primitives.h>

#include "divide.cuh"
#include "format.cuh"
#include "launch.cuh"

namespace hkv
{
namespace
{

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kWarps = kThreads / 32;
constexpr int kLanesPerToken = kThreads / kBlockTokens;

/* ------------------------------------------------------------------------------------------------ pairs of elements */

template <int kDtype> __device__ __forceinline__ float to_float(uint16_t bits)
{
    return kDtype == HKV_BF16 ? hkv_bf16_to_f32(bits) : hkv_f16_to_f32(bits);
}
template <int kDtype> __device__ __forceinline__ float2 to_floats(uint32_t pair)
{
    return kDtype == HKV_BF16 ? unpack_bf162(pair) : unpack_half2(pair);
}

/* Smallest and largest of elements, pair by pair; NaN if there is one. */
template <int kDtype> struct PairRange {
    uint32_t lo = kDtype == HKV_BF16 ? 0x7f807f80u : 0x7c007c00u; /* infinities */
    uint32_t hi = kDtype == HKV_BF16 ? 0xff80ff80u : 0xfc00fc00u;

    __device__ __forceinline__ void add(uint32_t low, uint32_t high)
    {
        if (kDtype == HKV_BF16) {
            lo = bits_of(__hmin2_nan(bf162_of(lo), bf162_of(low)));
            hi = bits_of(__hmax2_nan(bf162_of(hi), bf162_of(high)));
        } else {
            lo = bits_of(__hmin2_nan(half2_of(lo), half2_of(low)));
            hi = bits_of(__hmax2_nan(half2_of(hi), half2_of(high)));
        }
    }
    __device__ __forceinline__ void add(uint32_t pair)
    {
        add(pair, pair);
    }

  private:
    static __device__ __forceinline__ __nv_bfloat162 bf162_of(uint32_t u)
    {
        return *reinterpret_cast<__nv_bfloat162 *>(&u);
    }
    static __device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 x)
    {
        return *reinterpret_cast<uint32_t *>(&x);
    }
    static __device__ __forceinline__ uint32_t bits_of(__half2 x)
    {
        return hkv::bits_of(x);
    }
};

/* ---------------------------------------------------------------------------------------------------------- staging */

/* (zero, inverse / 256) of a group: the code is 256 (x - zero) (inverse / 256), where 256 times is exact, and clamping
 * the rest to 0..1 costs nothing. */
using GroupParams = float2;

/* n / d where d follows from the head size: a known one is left to the compiler. */
template <int kDim> __device__ __forceinline__ int divide(int n, int d)
{
    return kDim ? n / d : Divisor(d).divide(n);
}

/* Dynamic shared memory of one block of tokens. */
struct Staging {
    uint8_t *rows;         /* a row page: 8 tokens' chunks of the same channels lie in different banks */
    GroupParams *k_params; /* [stored_dim] */
    GroupParams *v_params; /* [n_value_groups][kBlockTokens] */
    float2 *v_range;       /* [n_value_groups][kBlockTokens] (lo, hi) */
    uint32_t *k_lo, *k_hi; /* [slices of tokens][stored_dim / 2] pairs of channels */

    __device__ Staging(const hkv_format &f, uint8_t *memory)
    {
        rows = memory;
        k_params = reinterpret_cast<GroupParams *>(memory + kBlockTokens * f.row_bytes);
        v_params = k_params + f.stored_dim;
        v_range = v_params + f.n_value_groups * kBlockTokens;
        k_lo = reinterpret_cast<uint32_t *>(v_range + f.n_value_groups * kBlockTokens);
        k_hi = k_lo + kThreads;
    }
    __device__ uint16_t element(const hkv_format &f, bool is_v, int token, int channel) const
    {
        return *reinterpret_cast<const uint16_t *>(rows + hkv_row_element_offset(&f, token, channel, is_v));
    }
};
inline size_t staging_bytes(const hkv_format &f)
{
    return static_cast<size_t>(kBlockTokens * f.row_bytes) +
           static_cast<size_t>(f.stored_dim + 2 * f.n_value_groups * kBlockTokens) * sizeof(float2) +
           static_cast<size_t>(2 * kThreads) * sizeof(uint32_t);
}

/* Start to fetch the first n_tokens rows of a row page. */
__device__ void stage_page(const hkv_format &f, const Staging &s, const uint8_t *page, int n_tokens)
{
#pragma unroll 4
    for (int i = 16 * threadIdx.x; i < n_tokens * f.row_bytes; i += 16 * kThreads)
        __pipeline_memcpy_async(s.rows + i, page + i, 16);
    __pipeline_commit();
}

/* A segment's K and V of one head. */
struct Source {
    const uint16_t *k, *v;
    int64_t k_stride, v_stride; /* from a token to the next, in elements */
};

/* Eight elements from an address of any alignment. */
__device__ __forceinline__ uint4 load_elements(const uint16_t *p)
{
    if (reinterpret_cast<uintptr_t>(p) % 16 == 0) return *reinterpret_cast<const uint4 *>(p);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = p[2 * i] | static_cast<uint32_t>(p[2 * i + 1]) << 16;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Bring new tokens to where they are wanted, from token `offset` on: in a row page and in shared memory, or NULL. */
template <int kDim>
__device__ void take_tokens(const hkv_format &f, const Source &source, int offset, int n_tokens, uint8_t *page,
                            uint8_t *staged)
{
    const int chunks = f.row_bytes / 16;
    for (int i = threadIdx.x; i < n_tokens * chunks; i += kThreads) {
        const int token = divide<kDim>(i, chunks), chunk = i - token * chunks;
        const bool is_v = 2 * chunk >= chunks;
        const int channel = 8 * (is_v ? chunk - chunks / 2 : chunk);
        const size_t at = hkv_row_chunk_offset(&f, offset + token, chunk);
        const uint16_t *row = is_v ? source.v + token * source.v_stride : source.k + token * source.k_stride;
        const uint4 elements = channel < f.head_dim ? load_elements(row + channel) : make_uint4(0, 0, 0, 0);
        if (page) *reinterpret_cast<uint4 *>(page + at) = elements;
        if (staged) *reinterpret_cast<uint4 *>(staged + at) = elements;
    }
}

/* ----------------------------------------------------------------------------------------------------------- ranges */

/* Slices of tokens that K's ranges are found in: as many as there are threads for, a power of two. */
__device__ __forceinline__ int n_key_slices(const hkv_format &f)
{
    return 1 << (31 - __clz(kThreads * 2 / f.stored_dim));
}

/* Ranges of all groups of a full block, K's slice by slice. */
template <int kDtype, int kDim> __device__ void measure_groups(const hkv_format &f, const Staging &s)
{
    const int n_pairs = f.stored_dim / 2, n_slices = n_key_slices(f), n_tokens = kBlockTokens / n_slices;
    const int thread = threadIdx.x, slice = divide<kDim>(thread, n_pairs), pair = thread - slice * n_pairs;
    if (slice < n_slices) {
        PairRange<kDtype> range;
#pragma unroll 4
        for (int token = slice * n_tokens; token < (slice + 1) * n_tokens; token++)
            range.add(*reinterpret_cast<const uint32_t *>(s.rows + hkv_row_element_offset(&f, token, 2 * pair, 0)));
        s.k_lo[slice * n_pairs + pair] = range.lo;
        s.k_hi[slice * n_pairs + pair] = range.hi;
    }
    const int token = threadIdx.x / kLanesPerToken, lane = threadIdx.x % kLanesPerToken;
    for (int group = 0; group < f.n_value_groups; group++) {
        const int first = group * HKV_VALUE_GROUP, end = min(f.head_dim, first + HKV_VALUE_GROUP);
        PairRange<kDtype> range;
        for (int channel = first + 8 * lane; channel < end; channel += 8 * kLanesPerToken) {
            const uint4 x = *reinterpret_cast<const uint4 *>(s.rows + hkv_row_element_offset(&f, token, channel, 1));
            range.add(x.x);
            range.add(x.y);
            range.add(x.z);
            range.add(x.w);
        }
#pragma unroll
        for (int step = kLanesPerToken / 2; step; step >>= 1)
            range.add(__shfl_xor_sync(kFullWarp, range.lo, step), __shfl_xor_sync(kFullWarp, range.hi, step));
        range.add(__byte_perm(range.lo, 0, 0x1032), __byte_perm(range.hi, 0, 0x1032)); /* the two of a pair */
        if (lane == 0)
            s.v_range[group * kBlockTokens + token] =
                make_float2(to_floats<kDtype>(range.lo).x, to_floats<kDtype>(range.hi).x);
    }
}

/* Range of a channel of K, from the slices. */
template <int kDtype> __device__ float2 key_range(const hkv_format &f, const Staging &s, int channel)
{
    const int n_pairs = f.stored_dim / 2, n_slices = n_key_slices(f);
    PairRange<kDtype> range;
#pragma unroll 4
    for (int i = 0; i < n_slices; i++) range.add(s.k_lo[i * n_pairs + channel / 2], s.k_hi[i * n_pairs + channel / 2]);
    const float2 lo = to_floats<kDtype>(range.lo), hi = to_floats<kDtype>(range.hi);
    return channel % 2 ? make_float2(lo.y, hi.y) : make_float2(lo.x, hi.x);
}

/* ------------------------------------------------------------------------------------------------------- parameters */

/* Where a group's scale lies in the record, in halves from the start of its section; its zero is 2 further. */
__device__ __forceinline__ void store_params(uint16_t *scale_of_record, uint16_t zero, uint16_t scale)
{
    scale_of_record[0] = scale;
    scale_of_record[2] = zero;
}

/* Parameters of a group from the range of its elements, none of which is clamped. Returns whether its codes need care.
 * A scale of 0 says that all elements are `lo`: any that gives them code 8 will do. */
__device__ bool make_params(float2 range, uint16_t *scale_of_record, GroupParams *params)
{
    uint16_t zero, scale;
    hkv_quant_params(range.x, range.y, &zero, &scale);
    store_params(scale_of_record, zero, scale);
    *params = scale ? make_float2(hkv_f16_to_f32(zero), hkv_quant_inverse(hkv_f16_to_f32(scale)) / 256)
                    : make_float2(range.x - HKV_CODE_MIN, 1.f / 256);
    const bool is_subnormal = scale != 0 && scale < 0x0400;
    return is_subnormal || !(range.x >= -HKV_MAX_FINITE && range.y <= HKV_MAX_FINITE);
}

/* Groups of a block: a channel of K each, then tokens of V. */
__device__ __forceinline__ int n_groups_of(const hkv_format &f)
{
    return f.stored_dim + f.n_value_groups * kBlockTokens;
}
/* Parameters of all groups. Returns whether a group of this thread needs care. */
template <int kDtype> __device__ bool make_all_params(const hkv_format &f, const Staging &s, uint8_t *record)
{
    bool needs_care = false;
    for (int i = threadIdx.x; i < n_groups_of(f); i += kThreads) {
        const int j = i - f.stored_dim;
        const bool is_k = j < 0;
        const uint32_t at =
            is_k ? f.k_params_offset / 2 + hkv_k_param_index(i)
                 : f.v_params_offset / 2 + hkv_v_param_index(&f, j % kBlockTokens, j / kBlockTokens * HKV_VALUE_GROUP);
        needs_care |= make_params(is_k ? key_range<kDtype>(f, s, i) : s.v_range[j],
                                  reinterpret_cast<uint16_t *>(record) + at, is_k ? s.k_params + i : s.v_params + j);
    }
    return needs_care;
}

/* The same with care: a running step 1, the range of unchanged elements and of clamped ones. */
struct CarefulRange {
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
    /* Steps 2 and 3. */
    __device__ void make_params(uint16_t *scale_of_record, GroupParams *params) const
    {
        uint16_t zero = 0, scale = 0;
        if (n > 0) hkv_quant_params(n == n_changed ? clamped_lo : lo, n == n_changed ? clamped_hi : hi, &zero, &scale);
        store_params(scale_of_record, zero, scale);
        *params = make_float2(hkv_f16_to_f32(zero), hkv_quant_inverse(hkv_f16_to_f32(scale)) / 256);
    }
};

/* Parameters of all groups of n_tokens tokens; those without tokens or channels are 0. Returns to every thread the
 * number of clamped elements. */
template <int kDtype>
__device__ int make_careful_params(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    __shared__ int n_changed;
    if (threadIdx.x == 0) n_changed = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n_groups_of(f); i += kThreads) {
        const int j = i - f.stored_dim, token = j % kBlockTokens, first = j / kBlockTokens * HKV_VALUE_GROUP;
        CarefulRange range;
        if (j < 0) {
#pragma unroll 1
            for (int t = 0; t < n_tokens && i < f.head_dim; t++) range.add(to_float<kDtype>(s.element(f, false, t, i)));
            range.make_params(reinterpret_cast<uint16_t *>(record + f.k_params_offset) + hkv_k_param_index(i),
                              s.k_params + i);
        } else {
#pragma unroll 1
            for (int c = first; c < min(f.head_dim, first + HKV_VALUE_GROUP) && token < n_tokens; c++)
                range.add(to_float<kDtype>(s.element(f, true, token, c)));
            range.make_params(reinterpret_cast<uint16_t *>(record + f.v_params_offset) +
                                  hkv_v_param_index(&f, token, first),
                              s.v_params + j);
        }
        if (range.n_changed) atomicAdd(&n_changed, range.n_changed);
    }
    __syncthreads();
    return n_changed;
}

/* ------------------------------------------------------------------------------------------------------------ codes */

/* Step 4 of one element, in the low byte of the result. */
__device__ __forceinline__ uint32_t plain_code(float x, GroupParams p)
{
    constexpr float kRound = 12582912.f; /* 1.5 * 2^23: adding it rounds to even and leaves the integer in the bits */
    return __float_as_uint(__fmaf_rn(__saturatef(__fmul_rn(__fsub_rn(x, p.x), p.y)), 256.f, kRound));
}
__device__ __forceinline__ uint32_t careful_code(float x, GroupParams p, bool is_valid)
{
    int32_t changed;
    return is_valid ? static_cast<uint32_t>(hkv_quant_code(hkv_quant_clamp(x, &changed), p.x, p.y * 256))
                    : HKV_CODE_MIN;
}
/* The low bytes of four words. */
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/* Codes of one tile's part of a plane pair, a word a lane at a time: 16 channels of K or V, elements to nibbles. */
template <int kDtype, bool kWithCare> struct WordWriter {
    const hkv_format &f;
    int lane, tile, step_group, n_tokens;
    bool is_v;
    uint32_t rows;
    const GroupParams *params; /* of this lane's columns */

    __device__ __forceinline__ WordWriter(const hkv_format &format, const Staging &s, bool of_v, int tile_index,
                                          int group, int n)
        : f(format), lane(threadIdx.x % 32), tile(tile_index), step_group(group), n_tokens(n), is_v(of_v),
          rows(shared_address(s.rows)),
          params((of_v ? s.v_params + group * 64 / HKV_VALUE_GROUP * kBlockTokens + tile_index * 16
                       : s.k_params + group * 64) +
                 2 * (lane % 4))
    {
    }
    /* High and low word of step w of this group. */
    __device__ __forceinline__ uint2 word(int w) const
    {
        if (step_group * 64 + w * 16 >= f.head_dim) return make_uint2(0, 0x88888888u); /* padding holds code 8 */
        /* Rows of the four 8 x 8 matrices: tokens. A's rows are K's tokens and V's channels. */
        const int matrix = lane / 8, token_of_matrix = tile * 16 + lane % 8 + 8 * (is_v ? matrix >> 1 : matrix & 1);
        const int chunk = (is_v ? f.stored_dim / 8 + (matrix & 1) : matrix >> 1) + step_group * 8 + 2 * w;
        const uint32_t address = rows + static_cast<uint32_t>(hkv_row_chunk_offset(&f, token_of_matrix, chunk));
        const GroupParams *of_columns = params + (is_v ? 0 : w * 16);
        uint32_t a[4], code[4][2];
        if (is_v)
            load_matrices<true>(a, address);
        else
            load_matrices<false>(a, address);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float4 p = *reinterpret_cast<const float4 *>(of_columns + 8 * (m >> 1)); /* of two columns */
            const float2 x = to_floats<kDtype>(a[m]);
            if (kWithCare) {
                const int token = tile * 16 + (is_v ? 2 * (lane % 4) + 8 * (m >> 1) : lane / 4 + 8 * (m & 1));
                code[m][0] = careful_code(x.x, make_float2(p.x, p.y), token < n_tokens);
                code[m][1] = careful_code(x.y, make_float2(p.z, p.w), token + is_v < n_tokens);
            } else {
                code[m][0] = plain_code(x.x, make_float2(p.x, p.y));
                code[m][1] = plain_code(x.y, make_float2(p.z, p.w));
            }
        }
        const uint32_t upper = pack_bytes(code[0][0], code[1][0], code[0][1], code[1][1]);
        const uint32_t lower = pack_bytes(code[2][0], code[3][0], code[2][1], code[3][1]);
        return make_uint2(select_bits(0xF0F0F0F0u, upper, lower >> 4), select_bits(0xF0F0F0F0u, upper << 4, lower));
    }
    /* Four words (two where stored_dim % 64 = 32) into the planes; low may be NULL. */
    __device__ __forceinline__ void write(uint8_t *high, uint8_t *low) const
    {
        const int n_words = step_group * 64 + 64 <= f.stored_dim ? 4 : 2;
        const size_t at = static_cast<size_t>(tile) * 8 * f.stored_dim + step_group * 512 + lane * 4 * n_words;
        if (kWithCare) { /* seldom run: registers matter more than wide stores */
#pragma unroll 1
            for (int w = 0; w < n_words; w++) {
                const uint2 x = word(w);
                *reinterpret_cast<uint32_t *>(high + at + 4 * w) = x.x;
                if (low) *reinterpret_cast<uint32_t *>(low + at + 4 * w) = x.y;
            }
            return;
        }
        /* Not unrolled: a warp comes here once, so fetching instructions would take longer than the work. */
        uint4 highs = make_uint4(0, 0, 0, 0), lows = highs; /* the last n_words of each */
#pragma unroll 1
        for (int w = 0; w < n_words; w++) {
            const uint2 x = word(w);
            highs = make_uint4(highs.y, highs.z, highs.w, x.x);
            lows = make_uint4(lows.y, lows.z, lows.w, x.y);
        }
        if (n_words == 4) {
            *reinterpret_cast<uint4 *>(high + at) = highs;
            if (low) *reinterpret_cast<uint4 *>(low + at) = lows;
        } else {
            *reinterpret_cast<uint2 *>(high + at) = make_uint2(highs.z, highs.w);
            if (low) *reinterpret_cast<uint2 *>(low + at) = make_uint2(lows.z, lows.w);
        }
    }
};

/* All planes of a record: a warp per tile, 64 channels and K or V. */
template <int kDtype, bool kWithCare>
__device__ void write_planes(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    const int n_groups = (f.stored_dim + 63) / 64, n_units = kTiles * n_groups;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < 2 * n_units; i += kWarps) {
        const bool is_v = i >= n_units;
        const int unit = i % n_units;
        const WordWriter<kDtype, kWithCare> writer(f, s, is_v, unit / n_groups, unit % n_groups, n_tokens);
        const bool has_low = f.planes & (is_v ? HKV_PLANE_V_LOW : HKV_PLANE_K_LOW);
        writer.write(record + (is_v ? f.v_high_offset : f.k_high_offset),
                     has_low ? record + (is_v ? f.v_low_offset : f.k_low_offset) : nullptr);
    }
}

/* Quantise the first n_tokens staged tokens into the payload of `record`, whatever they are. By all threads; returns to
 * every thread the number of clamped elements. */
template <int kDtype>
__device__ int write_payload_with_care(const hkv_format &f, const Staging &s, int n_tokens, uint8_t *record)
{
    __syncthreads();
    const int n_changed = make_careful_params<kDtype>(f, s, n_tokens, record);
    write_planes<kDtype, true>(f, s, n_tokens, record);
    return n_changed;
}

/* The same for a full block, without care as far as that goes. */
template <int kDtype, int kDim> __device__ int write_payload(const hkv_format &f, const Staging &s, uint8_t *record)
{
    __syncthreads();
    measure_groups<kDtype, kDim>(f, s);
    __syncthreads();
    if (__syncthreads_or(make_all_params<kDtype>(f, s, record)))
        return write_payload_with_care<kDtype>(f, s, kBlockTokens, record);
    write_planes<kDtype, false>(f, s, kBlockTokens, record);
    return 0;
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

/* -------------------------------------------------------------------------------------------------------- restoring */

/* Bring tokens 0 .. n_held-1 of a record into a row page, as they read back at the best precision present. Those that
 * the record does not hold, and all others up to n_tokens, become zeros. */
__device__ void restore_from_record(const hkv_format &f, const uint8_t *record, int n_held, int n_tokens, uint8_t *page)
{
    const hkv_record_header *header = reinterpret_cast<const hkv_record_header *>(record);
    n_held = min(n_held, hkv_header_n_tokens(header, kBlockTokens));
    const hkv_precision precision = hkv_record_precision(header->planes);
    const int per_token = 2 * f.stored_dim;
#pragma unroll 1 /* seldom run */
    for (int i = threadIdx.x; i < n_tokens * per_token; i += kThreads) {
        const int token = i / per_token, is_v = i % per_token >= f.stored_dim,
                  channel = i % per_token - is_v * f.stored_dim;
        const bool is_held = token < n_held && channel < f.head_dim;
        const float x = is_held ? record_value(f, record, precision, token, channel, is_v) : 0.f;
        const uint16_t bits = model_element(f.dtype, x);
        *reinterpret_cast<uint16_t *>(page + hkv_row_element_offset(&f, token, channel, is_v)) = bits;
    }
}

/* Copy tokens 0 .. n_held-1 from a row page, which may be the same; zeros up to n_tokens. */
__device__ void restore_from_page(const hkv_format &f, const uint8_t *source, int n_held, int n_tokens, uint8_t *page)
{
    const int chunks = f.row_bytes / 16; /* the swizzle stays inside a token */
#pragma unroll 1
    for (int i = threadIdx.x; i < n_tokens * chunks; i += kThreads)
        reinterpret_cast<uint4 *>(page)[i] =
            i < n_held * chunks ? reinterpret_cast<const uint4 *>(source)[i] : make_uint4(0, 0, 0, 0);
}

/* --------------------------------------------------------------------------------------------------------- segments */

/* What every block of a launch knows. */
struct Append {
    LayerView layer;
    hkv_plan plan;
    NewTokens tokens;
    const int64_t *clock;
    hkv_counters *counters;
};

/* The page of rows that a segment writes: a hot page, or at bits 0 the block itself. */
__device__ __forceinline__ uint8_t *segment_rows(const LayerView &layer, const hkv_segment &segment, int head)
{
    return layer.format.bits == 0 ? layer.record(segment.block, head)
           : segment.page >= 0    ? layer.hot_page(segment.page, head)
                                  : nullptr;
}

/* The header of a record that was written, by one thread. */
__device__ void finish_record(const Append &a, uint8_t *record, uint32_t stamp, int n_tokens, int n_clamped)
{
    if (threadIdx.x != 0) return;
    write_header(a.layer.format, record, stamp, n_tokens, a.layer.format.planes, n_clamped, a.clock ? *a.clock : 0);
    if (n_clamped && a.counters)
        atomicAdd(reinterpret_cast<unsigned long long *>(&a.counters->n_nonfinite_inputs),
                  static_cast<unsigned long long>(n_clamped));
}

/* Save the unsealed page that this segment's claim took over, if any: its tokens become a partial record. */
template <int kDtype> __device__ void save_victim(const Append &a, int page, int head, const Staging &staging)
{
    for (int i = 0; i < *a.plan.n_victims; i++) {
        const hkv_victim victim = a.plan.victims[i];
        if (victim.page != page) continue;
        uint8_t *record = a.layer.record(victim.block, head);
        if (reinterpret_cast<const hkv_record_header *>(record)->stamp != victim.stamp)
            return; /* not that content any more */
        stage_page(a.layer.format, staging, a.layer.hot_page(page, head), victim.n_tokens);
        __pipeline_wait_prior(0);
        finish_record(a, record, victim.stamp, victim.n_tokens,
                      write_payload_with_care<kDtype>(a.layer.format, staging, victim.n_tokens, record));
        __syncthreads();
    }
}

/* Bring older tokens into a segment's page. */
__device__ void restore(const LayerView &layer, const hkv_segment &segment, int head)
{
    uint8_t *rows = segment_rows(layer, segment, head);
    const hkv_format &f = layer.format;
    if (f.bits == 0)
        restore_from_page(f, layer.record(segment.restore_block, head), segment.n_held, segment.n_restore, rows);
    else if (segment.restore_page >= 0)
        restore_from_page(f, layer.hot_page(segment.restore_page, head), segment.n_held, segment.n_restore, rows);
    else
        restore_from_record(f, layer.record(segment.restore_block, head), segment.n_held, segment.n_restore, rows);
}

/* Phases 1 and 2 of a segment. What was written is visible to the whole block afterwards. */
template <int kDtype>
__device__ void prepare_segment(const Append &a, const hkv_segment &segment, int n_victims, int head,
                                const Staging &staging)
{
    if (segment.page >= 0 && n_victims > 0) save_victim<kDtype>(a, segment.page, head, staging);
    if (segment.n_restore == 0) return;
    restore(a.layer, segment, head);
    __syncthreads();
}

/* The header of a segment that does not seal. */
__device__ void write_open_header(uint8_t *record, const hkv_format &f, const hkv_segment &segment)
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

/* Before the wait: fetch what earlier steps left in the page of a segment that seals, if this step does nothing else to
 * it. */
__device__ bool stage_early(const Append &a, const hkv_segment &segment, int n_victims, int head,
                            const Staging &staging)
{
    if (!segment.seal || segment.page < 0 || segment.n_restore > 0 || segment.is_entangled || n_victims > 0)
        return false;
    stage_page(a.layer.format, staging, a.layer.hot_page(segment.page, head), segment.offset);
    return true;
}

/* Phases 3 and 4 of a segment. */
template <int kDtype, int kDim>
__device__ void append_segment(const Append &a, const hkv_segment &segment, int head, const Staging &staging,
                               bool is_staged)
{
    const hkv_format &f = a.layer.format;
    const NewTokens &t = a.tokens;
    const Source source = {
        static_cast<const uint16_t *>(t.k) + segment.first_token * t.k_stride_token + head * t.k_stride_head,
        static_cast<const uint16_t *>(t.v) + segment.first_token * t.v_stride_token + head * t.v_stride_head,
        t.k_stride_token, t.v_stride_token};
    uint8_t *rows = segment_rows(a.layer, segment, head), *record = a.layer.record(segment.block, head);
    if (f.bits == 0 || !segment.seal) {
        if (f.bits != 0 && threadIdx.x == kThreads - 1) write_open_header(record, f, segment);
        take_tokens<kDim>(f, source, segment.offset, segment.n_tokens, rows, nullptr);
        return;
    }
    if (rows && !is_staged) stage_page(f, staging, rows, segment.offset);
    take_tokens<kDim>(f, source, segment.offset, segment.n_tokens, rows, staging.rows);
    __pipeline_wait_prior(0);
    finish_record(a, record, segment.stamp, kBlockTokens, write_payload<kDtype, kDim>(f, staging, record));
}

/* With a format that the compiler knows; kDim 0: as it is. */
template <int kDtype, int kDim> __device__ __forceinline__ Append with_known_format(Append a)
{
    if (kDim) hkv_format_init(&a.layer.format, a.layer.format.bits, kBlockTokens, kDim, kDtype);
    return a;
}

template <int kDtype, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) append_kernel(const __grid_constant__ Append general)
{
    extern __shared__ __align__(16) uint8_t memory[];
    const Append a = with_known_format<kDtype, kDim>(general);
    const Staging staging(a.layer.format, memory);
    a.layer.lifetime.require();
    /* All at once; what lies beyond the step's segments is not used. */
    const int n_segments = *a.plan.n_segments, n_victims = *a.plan.n_victims, head = blockIdx.y;
    const hkv_segment own = a.plan.segments[blockIdx.x];
    const bool is_entangled = own.is_entangled;
    const int first = blockIdx.x, end = !is_entangled ? first + 1 : first == 0 ? n_segments : first;
    const bool is_staged =
        first < n_segments && a.layer.format.bits != 0 && stage_early(a, own, n_victims, head, staging);
    wait_for_predecessor();
    let_successor_start();
    if (first >= n_segments) return;
    if (first == 0 && head == 0 && threadIdx.x == 0) *a.plan.is_appended = 1;
#pragma unroll 1
    for (int i = first; i < end; i++) prepare_segment<kDtype>(a, a.plan.segments[i], n_victims, head, staging);
#pragma unroll 1
    for (int i = first; i < end; i++) {
        append_segment<kDtype, kDim>(a, a.plan.segments[i], head, staging, is_staged);
        if (is_entangled) __syncthreads();
    }
}

template <int kDtype> void (*find_kernel(const hkv_format &format))(Append)
{
    switch (format.head_dim) {
    case 64:
        return append_kernel<kDtype, 64>;
    case 128:
        return append_kernel<kDtype, 128>;
    case 256:
        return append_kernel<kDtype, 256>;
    default:
        return append_kernel<kDtype, 0>;
    }
}

} // namespace

cudaError_t launch_append(const LayerView &layer, const hkv_plan &plan, int max_segments, const NewTokens &tokens,
                          const int64_t *clock, cudaStream_t stream, hkv_counters *counters)
{
    if (max_segments == 0) return cudaSuccess;
    const Append append = {layer, plan, tokens, clock, counters};
    const size_t shared = layer.format.bits ? staging_bytes(layer.format) : 0;
    const dim3 grid(static_cast<unsigned>(max_segments), static_cast<unsigned>(layer.n_kv_heads));
    const auto kernel =
        layer.format.dtype == HKV_BF16 ? find_kernel<HKV_BF16>(layer.format) : find_kernel<HKV_F16>(layer.format);
    return launch_dependent(kernel, grid, kThreads, shared, stream, append);
}

} // namespace hkv
