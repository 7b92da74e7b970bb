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
 * Tiling. A block's K and V fit in shared memory at 16 bit, in the shape of a row page, whose swizzle serves here too.
 * What earlier steps left in the page of a block that seals is fetched and measured while the predecessor still runs;
 * the step's own tokens follow. From there on warps need nothing of each other: each has groups of its own, 32 channels
 * of K or 16 tokens of V, finds their ranges, makes parameters and writes codes. All three go over the same A
 * fragments, which ldmatrix makes of the page (transposed for V): what a lane holds of one is one word of each plane.
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

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;
constexpr int kPairsAtOnce = 4; /* whose loads are under way together */
constexpr int kWarps = kThreads / 32;

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

    __device__ __forceinline__ PairRange add(PairRange other)
    {
        if (kDtype == HKV_BF16) {
            lo = bits_of(__hmin2_nan(bf162_of(lo), bf162_of(other.lo)));
            hi = bits_of(__hmax2_nan(bf162_of(hi), bf162_of(other.hi)));
        } else {
            lo = hkv::bits_of(__hmin2_nan(half2_of(lo), half2_of(other.lo)));
            hi = hkv::bits_of(__hmax2_nan(half2_of(hi), half2_of(other.hi)));
        }
        return *this;
    }
    __device__ __forceinline__ void add(uint32_t pair)
    {
        PairRange other;
        other.lo = other.hi = pair;
        add(other);
    }
    /* Of two ranges a lane keeps one and gives the other to the lane at this distance, which keeps that. */
    static __device__ __forceinline__ PairRange exchange(PairRange a, PairRange b, bool keeps_b, int distance)
    {
        PairRange kept = keeps_b ? b : a, given = keeps_b ? a : b;
        given.lo = __shfl_xor_sync(kFullWarp, given.lo, distance);
        given.hi = __shfl_xor_sync(kFullWarp, given.hi, distance);
        return kept.add(given);
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
};

/* ---------------------------------------------------------------------------------------------------------- staging */

/* n / d where d follows from the head size: a known one is left to the compiler. */
template <int kDim> __device__ __forceinline__ int divide(int n, int d)
{
    return kDim ? n / d : Divisor(d).divide(n);
}

/* Start to fetch the first n_tokens rows of a row page. */
__device__ void stage_page(const hkv_format &f, uint8_t *staged, const uint8_t *page, int n_tokens)
{
#pragma unroll 4
    for (int i = 16 * threadIdx.x; i < n_tokens * f.row_bytes; i += 16 * kThreads)
        __pipeline_memcpy_async(staged + i, page + i, 16);
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
#pragma unroll 1
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

/* ------------------------------------------------------------------------------------------------------------ units */

/* (zero, inverse / 256) of a group: the code is 256 (x - zero) (inverse / 256), where 256 times is exact, and clamping
 * the rest to 0..1 costs nothing. */
using GroupParams = float2;

/* What every block of a launch knows. */
struct Append {
    LayerView layer;
    hkv_plan plan;
    NewTokens tokens;
    const int64_t *clock;
    hkv_counters *counters;
};

/* With a format that the compiler knows; kDim 0: as it is. */
template <int kDtype, int kDim> __device__ __forceinline__ Append with_known_format(Append a)
{
    if (kDim) hkv_format_init(&a.layer.format, a.layer.format.bits, kBlockTokens, kDim, kDtype);
    return a;
}

/* A warp's share of a block: 32 channels of K, or 16 tokens and up to 128 channels of V. Every group lies in one unit,
 * so that warps need nothing of each other. Both are up to four pairs of A fragments, those of a pair 16 channels
 * apart: K's pairs are tiles of tokens, V's are channels of one tile. In a fragment the groups are columns, eight for
 * each half; a lane holds two neighbouring ones of each half, and eight lanes the same ones. */
template <int kDtype, int kDim> struct Unit {
    const hkv_format &f;
    uint32_t rows; /* of staged tokens, a row page in shared memory */
    int lane, tile, first_step, n_pairs;
    bool is_v;

    __device__ __forceinline__ Unit(const hkv_format &format, const uint8_t *staged, int index)
        : f(format), rows(shared_address(staged)), lane(threadIdx.x % 32)
    {
        const int n_key_units = f.stored_dim / 32, of_v = index - n_key_units;
        is_v = of_v >= 0;
        tile = is_v ? of_v % kTiles : 0;
        first_step = is_v ? of_v / kTiles * (HKV_VALUE_GROUP / 16) : 2 * index;
        n_pairs = is_v ? min(HKV_VALUE_GROUP / 32, f.stored_dim / 32 - first_step / 2) : kTiles;
    }
    static __device__ __forceinline__ int count(const hkv_format &f)
    {
        return f.stored_dim / 32 + kTiles * f.n_value_groups;
    }

    __device__ __forceinline__ int tile_of(int pair) const
    {
        return is_v ? tile : pair;
    }
    __device__ __forceinline__ int step_of(int pair, int side) const
    {
        return first_step + (is_v ? 2 * pair : 0) + side;
    }
    /* Beyond the head's channels: an odd number of steps is stored with one more. */
    __device__ __forceinline__ bool is_padding(int pair, int side) const
    {
        return kDim == 0 && side == 1 && 16 * step_of(pair, side) >= f.head_dim;
    }
    /* Four matrices, two of the columns 0..7, two of 8..15. A's rows are K's tokens and V's channels. */
    __device__ __forceinline__ void load(uint32_t (&a)[4], int pair, int side) const
    {
        const int matrix = lane / 8, token = 16 * tile_of(pair) + lane % 8 + 8 * (is_v ? matrix >> 1 : matrix & 1);
        const int chunk = 2 * step_of(pair, 0) + (is_v ? f.stored_dim / 8 + (matrix & 1) : matrix >> 1);
        /* Chunks of a pair differ in bit 1 alone, which is one bit of the address, swizzled or not. */
        const uint32_t address = rows + (static_cast<uint32_t>(hkv_row_chunk_offset(&f, token, chunk)) ^ 32 * side);
        if (is_v)
            load_matrices<true>(a, address);
        else
            load_matrices<false>(a, address);
    }

    /* The group that this lane finds the parameters of, a column of a pair: its bits are, from the lowest, which of two
     * neighbours, which two of eight, which half, which fragment; V's are the same in both fragments. */
    __device__ __forceinline__ int column() const
    {
        return lane % 4 * 2 + (lane >> 2 & 1) + (is_v ? lane & 8 : lane & 24);
    }
    static __device__ __forceinline__ int lane_of(int lane, int side, int half, int neighbour)
    {
        return lane % 4 + 4 * neighbour + 8 * half + 16 * side;
    }
    /* Whether this lane's group is one of the head, and this lane the one that says so. */
    __device__ __forceinline__ bool has_group() const
    {
        return is_v || kDim || 16 * (first_step + (lane >> 4)) < f.head_dim;
    }

    /* Ranges of a lane's columns: of the pairs met so far. */
    struct Ranges {
        PairRange<kDtype> of[2][2]; /* [fragment][half] */

        /* Written out: as an aggregate that is set to {}, nvcc 13.0 makes all but the first fragment zeros. */
        __device__ __forceinline__ Ranges()
        {
#pragma unroll
            for (int i = 0; i < 4; i++) of[i / 2][i % 2] = PairRange<kDtype>();
        }
    };
    /* Pairs from the first on that have only tokens below n_tokens. */
    __device__ __forceinline__ int n_pairs_below(int n_tokens) const
    {
        return !is_v ? n_tokens / 16 : 16 * tile + 16 <= n_tokens ? n_pairs : 0;
    }
    __device__ __forceinline__ void measure(Ranges *ranges, int first, int end) const
    {
#pragma unroll(kPairsAtOnce)
        for (int pair = first; pair < end; pair++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (is_padding(pair, side)) continue;
                uint32_t a[4];
                load(a, pair, side);
#pragma unroll
                for (int m = 0; m < 4; m++) ranges->of[side][m >> 1].add(a[m]);
            }
    }
    /* Smallest and largest element of this lane's group. */
    __device__ __forceinline__ float2 range(Ranges r) const
    {
        if (is_v) {
#pragma unroll
            for (int half = 0; half < 2; half++) r.of[1][half] = r.of[0][half].add(r.of[1][half]);
        }
        PairRange<kDtype> of_half[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            of_half[half] = PairRange<kDtype>::exchange(r.of[0][half], r.of[1][half], lane & 16, 16);
        PairRange<kDtype> mine = PairRange<kDtype>::exchange(of_half[0], of_half[1], lane & 8, 8);
        mine = PairRange<kDtype>::exchange(mine, mine, false, 4);
        const float2 lo = to_floats<kDtype>(mine.lo), hi = to_floats<kDtype>(mine.hi);
        return lane & 4 ? make_float2(lo.y, hi.y) : make_float2(lo.x, hi.x);
    }

    /* This lane's group's scale and zero, 2 halves further, to where they lie in the record. */
    __device__ __forceinline__ void store_params(uint8_t *record, uint16_t zero, uint16_t scale) const
    {
        if (is_v && lane & 16) return;
        const uint32_t at = is_v ? f.v_params_offset / 2 + hkv_v_param_index(&f, 16 * tile + column(), 16 * first_step)
                                 : f.k_params_offset / 2 + hkv_k_param_index(16 * first_step + column());
        reinterpret_cast<uint16_t *>(record)[at] = scale;
        reinterpret_cast<uint16_t *>(record)[at + 2] = zero;
    }

    /* Parameters of this lane's group, none of whose elements is clamped, from its range; to the record too. Returns
     * whether codes need care. A scale of 0 says that all elements are `lo`: any that gives them code 8 will do. */
    __device__ __forceinline__ bool make_params(float2 r, uint8_t *record, GroupParams *params) const
    {
        uint16_t zero = 0, scale = 0;
        if (has_group()) hkv_quant_params(r.x, r.y, &zero, &scale);
        store_params(record, zero, scale);
        *params = scale ? make_float2(hkv_f16_to_f32(zero), hkv_quant_inverse(hkv_f16_to_f32(scale)) / 256)
                        : make_float2(r.x - HKV_CODE_MIN, 1.f / 256);
        const bool is_subnormal = scale != 0 && scale < 0x0400;
        return has_group() && (is_subnormal || !(r.x >= -HKV_MAX_FINITE && r.y <= HKV_MAX_FINITE));
    }

    /* The same with care, of the first n_tokens tokens. Returns the number of clamped elements. */
    __device__ __forceinline__ int make_careful_params(uint8_t *record, int n_tokens, const uint8_t *staged,
                                                       GroupParams *params) const
    {
        const int token = 16 * tile + column(), channel = 16 * first_step + (is_v ? 0 : column());
        const int n =
            is_v ? (token < n_tokens ? min(HKV_VALUE_GROUP, f.head_dim - channel) : 0) : (has_group() ? n_tokens : 0);
        float lo = INFINITY, hi = -INFINITY, clamped_lo = INFINITY, clamped_hi = -INFINITY;
        int n_changed = 0;
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            const size_t at = hkv_row_element_offset(&f, is_v ? token : i, is_v ? channel + i : channel, is_v);
            int32_t changed;
            const float v =
                hkv_quant_clamp(to_float<kDtype>(*reinterpret_cast<const uint16_t *>(staged + at)), &changed);
            clamped_lo = fminf(clamped_lo, v);
            clamped_hi = fmaxf(clamped_hi, v);
            if (!changed) {
                lo = fminf(lo, v);
                hi = fmaxf(hi, v);
            }
            n_changed += changed;
        }
        uint16_t zero = 0, scale = 0;
        if (n > 0) hkv_quant_params(n == n_changed ? clamped_lo : lo, n == n_changed ? clamped_hi : hi, &zero, &scale);
        store_params(record, zero, scale);
        *params = make_float2(hkv_f16_to_f32(zero), hkv_quant_inverse(hkv_f16_to_f32(scale)) / 256);
        return is_v && lane & 16 ? 0 : n_changed;
    }

    /* Codes of all pairs into the planes, from the parameters that lanes hold. */
    template <bool kWithCare>
    __device__ __forceinline__ void write_codes(uint8_t *record, int n_tokens, GroupParams mine) const
    {
        float4 params[2][2]; /* [fragment][half] of two neighbours */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int side = i >> 1, half = i & 1;
            params[side][half].x = __shfl_sync(kFullWarp, mine.x, lane_of(lane, side, half, 0));
            params[side][half].y = __shfl_sync(kFullWarp, mine.y, lane_of(lane, side, half, 0));
            params[side][half].z = __shfl_sync(kFullWarp, mine.x, lane_of(lane, side, half, 1));
            params[side][half].w = __shfl_sync(kFullWarp, mine.y, lane_of(lane, side, half, 1));
        }
        uint8_t *high = record + (is_v ? f.v_high_offset : f.k_high_offset);
        uint8_t *low = record + (is_v ? f.v_low_offset : f.k_low_offset);
        const bool has_low = f.planes & (is_v ? HKV_PLANE_V_LOW : HKV_PLANE_K_LOW);
#pragma unroll(kWithCare ? 1 : kPairsAtOnce)
        for (int pair = 0; pair < n_pairs; pair++) {
            uint2 word[2]; /* (high, low) */
#pragma unroll
            for (int side = 0; side < 2; side++) word[side] = make_word<kWithCare>(pair, side, n_tokens, params[side]);
            const int step = step_of(pair, 0), n_words = kDim || step / 4 * 64 + 64 <= f.stored_dim ? 4 : 2;
            const size_t at = static_cast<size_t>(tile_of(pair)) * 8 * f.stored_dim + step / 4 * 512 +
                              lane * 4 * n_words + step % 4 * 4;
            *reinterpret_cast<uint2 *>(high + at) = make_uint2(word[0].x, word[1].x);
            if (has_low) *reinterpret_cast<uint2 *>(low + at) = make_uint2(word[0].y, word[1].y);
        }
    }

  private:
    /* Step 4 of one element, in the low byte of the result. */
    static __device__ __forceinline__ uint32_t plain_code(float x, float zero, float inverse)
    {
        constexpr float kRound = 12582912.f; /* 1.5 * 2^23: adding it rounds to even, leaves the integer in the bits */
        return __float_as_uint(__fmaf_rn(__saturatef(__fmul_rn(__fsub_rn(x, zero), inverse)), 256.f, kRound));
    }
    static __device__ __forceinline__ uint32_t careful_code(float x, float zero, float inverse, bool is_valid)
    {
        int32_t changed;
        return is_valid ? static_cast<uint32_t>(hkv_quant_code(hkv_quant_clamp(x, &changed), zero, inverse * 256))
                        : HKV_CODE_MIN;
    }
    /* The low bytes of four words. */
    static __device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
    {
        return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    }
    /* High and low word of a fragment: elements to nibbles. */
    template <bool kWithCare>
    __device__ __forceinline__ uint2 make_word(int pair, int side, int n_tokens, const float4 (&params)[2]) const
    {
        if (is_padding(pair, side)) return make_uint2(0, 0x88888888u); /* code 8 */
        uint32_t a[4], code[4][2];
        load(a, pair, side);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float4 p = params[m >> 1];
            const float2 x = to_floats<kDtype>(a[m]);
            if (kWithCare) {
                const int token = 16 * tile_of(pair) + (is_v ? 2 * (lane % 4) + 8 * (m >> 1) : lane / 4 + 8 * (m & 1));
                code[m][0] = careful_code(x.x, p.x, p.y, token < n_tokens);
                code[m][1] = careful_code(x.y, p.z, p.w, token + is_v < n_tokens);
            } else {
                code[m][0] = plain_code(x.x, p.x, p.y);
                code[m][1] = plain_code(x.y, p.z, p.w);
            }
        }
        const uint32_t upper = pack_bytes(code[0][0], code[1][0], code[0][1], code[1][1]);
        const uint32_t lower = pack_bytes(code[2][0], code[3][0], code[2][1], code[3][1]);
        return make_uint2(select_bits(0xF0F0F0F0u, upper, lower >> 4), select_bits(0xF0F0F0F0u, upper << 4, lower));
    }
};

/* A unit of n_tokens tokens with care, whatever they are. Returns how many elements of this lane were clamped. */
template <int kDtype, int kDim>
__device__ __forceinline__ int write_unit_with_care(const hkv_format &f, const uint8_t *staged, int index, int n_tokens,
                                                    uint8_t *record)
{
    const Unit<kDtype, kDim> unit(f, staged, index);
    GroupParams params;
    const int n_changed = unit.make_careful_params(record, n_tokens, staged, &params);
    unit.template write_codes<true>(record, n_tokens, params);
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

/* The page of rows that a segment writes: a hot page, or at bits 0 the block itself. */
__device__ __forceinline__ uint8_t *segment_rows(const LayerView &layer, const hkv_segment &segment, int head)
{
    return layer.format.bits == 0 ? layer.record(segment.block, head)
           : segment.page >= 0    ? layer.hot_page(segment.page, head)
                                  : nullptr;
}

/* The header of a record that was written, by one thread. */
__device__ __forceinline__ void finish_record(const Append &a, uint8_t *record, uint32_t stamp, int n_tokens,
                                              int n_clamped)
{
    write_header(a.layer.format, record, stamp, n_tokens, a.layer.format.planes, n_clamped, a.clock ? *a.clock : 0);
    if (n_clamped && a.counters)
        atomicAdd(reinterpret_cast<unsigned long long *>(&a.counters->n_nonfinite_inputs),
                  static_cast<unsigned long long>(n_clamped));
}

/* Save the unsealed page that this segment's claim took over, if any: its tokens become a partial record. */
template <int kDtype, int kDim> __device__ void save_victim(const Append &a, int page, int head, uint8_t *staged)
{
    __shared__ int n_clamped;
    const hkv_format &f = a.layer.format;
#pragma unroll 1
    for (int i = 0; i < *a.plan.n_victims; i++) {
        const hkv_victim victim = a.plan.victims[i];
        if (victim.page != page) continue;
        uint8_t *record = a.layer.record(victim.block, head);
        if (reinterpret_cast<const hkv_record_header *>(record)->stamp != victim.stamp)
            return; /* not that content any more */
        if (threadIdx.x == 0) n_clamped = 0;
        stage_page(f, staged, a.layer.hot_page(page, head), victim.n_tokens);
        __pipeline_wait_prior(0);
        __syncthreads();
#pragma unroll 1
        for (int u = threadIdx.x / 32; u < Unit<kDtype, kDim>::count(f); u += kWarps) {
            const int n = write_unit_with_care<kDtype, kDim>(f, staged, u, victim.n_tokens, record);
            if (n) atomicAdd(&n_clamped, n);
        }
        __syncthreads();
        if (threadIdx.x == 0) finish_record(a, record, victim.stamp, victim.n_tokens, n_clamped);
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

/* Phases 1 and 2 of segments. What was written is visible to the whole block afterwards. Seldom anything to do. */
template <int kDtype, int kDim>
__device__ void prepare_segments(const Append &a, int first, int end, int head, uint8_t *staged)
{
#pragma unroll 1
    for (int i = first; i < end; i++) {
        const hkv_segment &segment = a.plan.segments[i];
        if (segment.page >= 0) save_victim<kDtype, kDim>(a, segment.page, head, staged);
        if (segment.n_restore > 0) restore(a.layer, segment, head);
    }
    __syncthreads();
}

/* The header of a segment that does not seal. */
__device__ __forceinline__ void write_open_header(uint8_t *record, const hkv_format &f, const hkv_segment &segment)
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

/* What a warp knows of its first unit before the step's tokens are there. */
template <int kDtype, int kDim> struct Early {
    typename Unit<kDtype, kDim>::Ranges ranges;
    int n_pairs;

    __device__ __forceinline__ Early() : n_pairs(0)
    {
    }
};

/* The new tokens of a segment to where they are wanted: its page, and shared memory or NULL. */
template <int kDim>
__device__ __forceinline__ void take_segment(const Append &a, const hkv_segment &segment, int head, uint8_t *staged)
{
    const NewTokens &t = a.tokens;
    const Source source = {
        static_cast<const uint16_t *>(t.k) + segment.first_token * t.k_stride_token + head * t.k_stride_head,
        static_cast<const uint16_t *>(t.v) + segment.first_token * t.v_stride_token + head * t.v_stride_head,
        t.k_stride_token, t.v_stride_token};
    take_tokens<kDim>(a.layer.format, source, segment.offset, segment.n_tokens, segment_rows(a.layer, segment, head),
                      staged);
}

/* Phase 4 of a segment whose tokens are staged, on their way until now. */
template <int kDtype, int kDim>
__device__ __forceinline__ void seal(const Append &a, const hkv_segment &segment, int head, uint8_t *staged,
                                     Early<kDtype, kDim> early)
{
    __shared__ int n_clamped;
    const hkv_format &f = a.layer.format;
    uint8_t *record = a.layer.record(segment.block, head);
    if (threadIdx.x == 0) n_clamped = 0;
    __pipeline_wait_prior(0);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < Unit<kDtype, kDim>::count(f); i += kWarps) {
        const Unit<kDtype, kDim> unit(f, staged, i);
        unit.measure(&early.ranges, early.n_pairs, unit.n_pairs);
        GroupParams params;
        const float2 range = unit.range(early.ranges);
        if (unlikely(__any_sync(kFullWarp, unit.make_params(range, record, &params)))) {
            const int n = write_unit_with_care<kDtype, kDim>(f, staged, i, kBlockTokens, record);
            if (n) atomicAdd(&n_clamped, n);
        } else {
            unit.template write_codes<false>(record, kBlockTokens, params);
        }
        early = Early<kDtype, kDim>();
    }
    __syncthreads();
    if (threadIdx.x == 0) finish_record(a, record, segment.stamp, kBlockTokens, n_clamped);
}

/* Phases 3 and 4 of a segment. */
template <int kDtype, int kDim>
__device__ __forceinline__ void append_segment(const Append &a, const hkv_segment &segment, int head, uint8_t *staged)
{
    const hkv_format &f = a.layer.format;
    const bool seals = f.bits != 0 && segment.seal;
    if (seals && segment.page >= 0) stage_page(f, staged, a.layer.hot_page(segment.page, head), segment.offset);
    take_segment<kDim>(a, segment, head, seals ? staged : nullptr);
    if (seals)
        seal(a, segment, head, staged, Early<kDtype, kDim>());
    else if (f.bits != 0 && threadIdx.x == kThreads - 1)
        write_open_header(a.layer.record(segment.block, head), f, segment);
}

/* All of a segment at once: 14 words. */
__device__ __forceinline__ hkv_segment load_segment(const hkv_segment *p)
{
    static_assert(sizeof(hkv_segment) % 8 == 0, "loaded as pairs of words");
    hkv_segment segment;
    uint2 *words = reinterpret_cast<uint2 *>(&segment);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(hkv_segment) / 8); i++)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(words[i].x), "=r"(words[i].y)
                     : "l"(reinterpret_cast<const uint2 *>(p) + i));
    return segment;
}

template <int kDtype, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) append_kernel(const __grid_constant__ Append general)
{
    extern __shared__ __align__(128) uint8_t staged[]; /* a row page */
    const Append a = with_known_format<kDtype, kDim>(general);
    a.layer.lifetime.require();
    /* All at once; what lies beyond the step's segments is not used. */
    hkv_segment segment = load_segment(a.plan.segments + blockIdx.x);
    const int n_segments = *a.plan.n_segments, n_victims = *a.plan.n_victims, head = blockIdx.y;
    const bool is_simple = !segment.is_entangled && segment.n_restore == 0 && n_victims == 0;
    const int first = blockIdx.x;
    int end = first + 1;
    /* Before the wait: fetch what earlier steps left in the page of a segment that seals, if this step does nothing
     * else to it. */
    const bool is_early =
        first < n_segments && is_simple && segment.seal && segment.page >= 0 && a.layer.format.bits != 0;
    if (is_early) {
        Early<kDtype, kDim> early;
        stage_page(a.layer.format, staged, a.layer.hot_page(segment.page, head), segment.offset);
        __pipeline_wait_prior(0);
        __syncthreads();
        if (threadIdx.x / 32 < Unit<kDtype, kDim>::count(a.layer.format)) {
            const Unit<kDtype, kDim> unit(a.layer.format, staged, threadIdx.x / 32);
            early.n_pairs = unit.n_pairs_below(segment.offset);
            unit.measure(&early.ranges, 0, early.n_pairs);
        }
        wait_for_predecessor();
        let_successor_start();
        if (first == 0 && head == 0 && threadIdx.x == 0) *a.plan.is_appended = 1;
        take_segment<kDim>(a, segment, head, staged);
        seal<kDtype, kDim>(a, segment, head, staged, early);
        return;
    }
    wait_for_predecessor();
    let_successor_start();
    if (first >= n_segments) return;
    if (first == 0 && head == 0 && threadIdx.x == 0) *a.plan.is_appended = 1;
    if (unlikely(!is_simple)) {
        if (segment.is_entangled) {
            if (first > 0) return;
            end = n_segments;
        }
        prepare_segments<kDtype, kDim>(a, first, end, head, staged);
        segment = load_segment(a.plan.segments + first);
    }
#pragma unroll 1
    for (int i = first;;) {
        append_segment<kDtype, kDim>(a, segment, head, staged);
        if (++i == end) return;
        __syncthreads();
        segment = load_segment(a.plan.segments + i);
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
    const size_t shared = layer.format.bits ? layer.format.row_page_bytes : 0;
    const dim3 grid(static_cast<unsigned>(max_segments), static_cast<unsigned>(layer.n_kv_heads));
    const auto kernel =
        layer.format.dtype == HKV_BF16 ? find_kernel<HKV_BF16>(layer.format) : find_kernel<HKV_F16>(layer.format);
    return launch_dependent(kernel, grid, kThreads, shared, stream, append);
}

} // namespace hkv
