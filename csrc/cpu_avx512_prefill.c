/* cpu_avx512_prefill.c - attention of a tile of query tokens with AVX-512: blocked matrix products around an online
 * softmax.
 *
 * Keys are taken 64 at a time. Such a block of K and V is brought once into a form in which both products are the same
 * loop, one broadcast word of the left side times a vector of 16 words of the right side, and then meets every query
 * row of the tile, six rows (a strip) at a time. A word is 32 bits: a pair of bf16 for vdpbf16ps where the model is
 * bf16, else one fp32 for a fused multiply-add at half that rate.
 *
 *   scores [6 rows, 64 keys]     = q [6, steps over channels] . k [steps over channels, 64 keys]
 *   acc    [6 rows, 64 channels] += p [6, steps over keys]    . v [steps over keys, 64 channels]
 *
 * Records of a bf16 model: 8-bit codes would lose bits as bf16 keys if a channel lies far from zero. So a key enters as
 * its distance from the middle of the channel's range, bf16((code - 128) * scale), and q . middle, the same for all
 * keys of the record, starts the scores in fp32.
 */
#include "cpu_avx512_planes.h"

#if defined(__x86_64__)

enum {
    BLOCK_KEYS = 64,
    TILE_KEYS = 16, /* of a block: loaded at once */
    STRIP_ROWS = 6,
    VECTORS = 4, /* of 16 keys or channels: 6 x 4 accumulators and their operands fill the 32 registers */
    MAX_ROW_BYTES = HKV_MAX_HEAD_DIM * 4
};

/* Words of the two products, fp32 or pairs of bf16: a compile-time constant wherever it is passed. */
typedef enum word_kind { WORD_F32, WORD_BF16 } word_kind;

static inline int32_t elements_per_word(word_kind word)
{
    return word == WORD_BF16 ? 2 : 1;
}

static inline int32_t at_most(int32_t value, int32_t limit)
{
    return value < limit ? value : limit;
}

static inline int32_t clamp(int64_t value, int32_t lo, int32_t hi)
{
    return value < lo ? lo : value > hi ? hi : (int32_t)value;
}

/* Up to 64 consecutive keys, ready for the products. */
typedef struct key_block {
    uint32_t k[HKV_MAX_HEAD_DIM * BLOCK_KEYS]; /* [steps over DP channels, 64 keys] */
    uint32_t v[BLOCK_KEYS * HKV_MAX_HEAD_DIM]; /* [steps over 64 keys, DP channels] */
    float middle[HKV_MAX_HEAD_DIM];            /* [DP] what the keys lack */
    int32_t has_middle;
    int32_t n_keys;
    int64_t first_position;
} __attribute__((aligned(64))) key_block;

/* K and V of up to 16 tokens as rows of the products' element type, where they are or in `buffer`. */
typedef struct tile_rows {
    const uint8_t *k, *v;
    int64_t k_stride_bytes, v_stride_bytes;
    uint8_t buffer[2][TILE_KEYS][MAX_ROW_BYTES] __attribute__((aligned(64)));
} tile_rows;

/* -------------------------------------------------------------------------------------------- sources into rows */

static void tile_use_buffer(tile_rows *tile)
{
    tile->k = tile->buffer[0][0];
    tile->v = tile->buffer[1][0];
    tile->k_stride_bytes = tile->v_stride_bytes = MAX_ROW_BYTES;
}

/* offset + scale * code of n_channels (32 or 64) channels of one token. */
HKV_AVX512_INLINE void row_from_codes(word_kind word, const uint8_t codes[64], int32_t n_channels,
                                      const __m512 scale[4], const __m512 offset[4], uint8_t *row)
{
    for (int32_t s = 0; s < n_channels / 16; s += 2) {
        __m512 lo = _mm512_fmadd_ps(hkv_codes_to_f32(codes + 16 * s), scale[s], offset[s]);
        __m512 hi = _mm512_fmadd_ps(hkv_codes_to_f32(codes + 16 * s + 16), scale[s + 1], offset[s + 1]);
        if (word == WORD_BF16) {
            _mm512_storeu_si512(row + 32 * s, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
        } else {
            _mm512_storeu_ps(row + 64 * s, lo);
            _mm512_storeu_ps(row + 64 * s + 64, hi);
        }
    }
}

HKV_AVX512_INLINE void record_key_rows(word_kind word, const hkv_format *f, const hkv_cpu_source *source, int32_t tile,
                                       tile_rows *rows, key_block *block)
{
    const uint8_t *record = source->data;
    uint8_t codes[16][64] __attribute__((aligned(64)));
    for (int32_t first = 0; first < f->stored_dim; first += HKV_GROUP_CHANNELS) {
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(first);
        int32_t n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
        __m512 scale[4] = {{0}}, offset[4] = {{0}}; /* a half group uses two of them, which compilers do not see */
        for (int32_t s = 0; s < n_channels / 16; s++) {
            hkv_params_load(record + hkv_k_params_at(f, first / 16 + s), hkv_k_param, &scale[s], &offset[s]);
            if (word == WORD_F32) continue;
            _mm512_store_ps(block->middle + first + 16 * s,
                            _mm512_fmadd_ps(scale[s], _mm512_set1_ps(128.0f), offset[s]));
            offset[s] = _mm512_mul_ps(scale[s], _mm512_set1_ps(-128.0f));
        }
        hkv_k_group_load(record + f->k_high_offset + at,
                         source->precision >= HKV_READ_K8V4 ? record + f->k_low_offset + at : NULL, n_channels, codes);
        for (int32_t t = 0; t < TILE_KEYS; t++)
            row_from_codes(word, codes[t], n_channels, scale, offset,
                           rows->buffer[0][t] + first * 4 / elements_per_word(word));
    }
}

HKV_AVX512_INLINE void record_value_rows(word_kind word, const hkv_format *f, const hkv_cpu_source *source,
                                         int32_t tile, tile_rows *rows)
{
    const uint8_t *record = source->data;
    uint8_t codes[16][64] __attribute__((aligned(64)));
    for (int32_t first = 0; first < f->stored_dim; first += HKV_GROUP_CHANNELS) {
        size_t at = (size_t)tile * 8 * (size_t)f->stored_dim + hkv_group_bytes(first);
        int32_t n_channels = at_most(f->stored_dim - first, HKV_GROUP_CHANNELS);
        float scales[16], zeros[16];
        __m512 scale, zero;
        hkv_params_load(record + hkv_v_params_at(f, tile, first / HKV_VALUE_GROUP), hkv_v_param, &scale, &zero);
        _mm512_storeu_ps(scales, scale);
        _mm512_storeu_ps(zeros, zero);
        hkv_v_group_load(record + f->v_high_offset + at,
                         source->precision >= HKV_READ_INT8 ? record + f->v_low_offset + at : NULL, n_channels, codes);
        for (int32_t t = 0; t < TILE_KEYS; t++) {
            const __m512 s = _mm512_set1_ps(scales[t]), z = _mm512_set1_ps(zeros[t]);
            row_from_codes(word, codes[t], n_channels, (const __m512[4]){s, s, s, s}, (const __m512[4]){z, z, z, z},
                           rows->buffer[1][t] + first * 4 / elements_per_word(word));
        }
    }
}

/* Row of D halves into fp32. */
HKV_AVX512_INLINE void row_from_f16(const uint8_t *halves, int32_t n_channels, uint8_t *row)
{
    for (int32_t c = 0; c < n_channels; c += 16)
        _mm512_storeu_ps(row + 4 * c, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + 2 * c))));
}

/* K (is_v 0) or V of one token of a page, in the page's dtype. */
HKV_AVX512_INLINE void row_from_page(const hkv_format *f, const uint8_t *page, int32_t token, int32_t is_v,
                                     uint8_t *row)
{
    int32_t n_chunks = f->head_dim * f->element_bytes / 16, first = is_v * f->stored_dim * f->element_bytes / 16;
    for (int32_t i = 0; i < n_chunks; i++)
        _mm_storeu_si128((__m128i *)(row + 16 * i),
                         _mm_loadu_si128((const __m128i *)(page + hkv_row_chunk_offset(f, token, first + i))));
}

/* Tokens first .. first + n - 1 (at most 16) of a source; first is a multiple of 16. */
HKV_AVX512_INLINE void tile_load(word_kind word, const hkv_format *f, const hkv_cpu_source *source, int32_t first,
                                 int32_t n, tile_rows *rows, key_block *block)
{
    uint8_t halves[2][2 * HKV_MAX_HEAD_DIM];
    if (source->kind == HKV_SOURCE_RECORD) {
        tile_use_buffer(rows);
        record_key_rows(word, f, source, first / TILE_KEYS, rows, block);
        record_value_rows(word, f, source, first / TILE_KEYS, rows);
        return;
    }
    if (source->kind == HKV_SOURCE_TENSOR) {
        rows->k = (const uint8_t *)source->k + first * source->k_stride_bytes;
        rows->v = (const uint8_t *)source->v + first * source->v_stride_bytes;
        rows->k_stride_bytes = source->k_stride_bytes;
        rows->v_stride_bytes = source->v_stride_bytes;
        if (f->dtype != HKV_F16) return;
    }
    for (int32_t t = 0; t < n; t++) {
        for (int32_t is_v = 0; is_v < 2; is_v++) {
            uint8_t *row = rows->buffer[is_v][t];
            const uint8_t *src = halves[is_v];
            if (source->kind == HKV_SOURCE_PAGE)
                row_from_page(f, source->data, first + t, is_v, f->dtype == HKV_F16 ? halves[is_v] : row);
            else
                src = is_v ? rows->v + t * rows->v_stride_bytes : rows->k + t * rows->k_stride_bytes;
            if (f->dtype == HKV_F16) row_from_f16(src, f->head_dim, row);
        }
    }
    tile_use_buffer(rows);
}

/* --------------------------------------------------------------------------------------------- rows into a block */

HKV_AVX512_INLINE void transpose_words(__m512i v[16])
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* b[i + j]: column 4 * lane + j of rows i .. i + 3 */
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        __m512i even_upper = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88),
                odd_upper = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
        __m512i even_lower = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
        __m512i odd_lower = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
        v[j] = _mm512_shuffle_i32x4(even_upper, even_lower, 0x88);
        v[j + 4] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88);
        v[j + 8] = _mm512_shuffle_i32x4(even_upper, even_lower, 0xdd);
        v[j + 12] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xdd);
    }
}

static inline __mmask16 first_lanes(int32_t n)
{
    return (__mmask16)((1u << clamp(n, 0, 16)) - 1u);
}

/* 16 keys into k: [key, channel words] becomes [channel words, key]. Keys from n on and channels from D on become 0. */
HKV_AVX512_INLINE void tile_pack_keys(word_kind word, const hkv_format *f, const tile_rows *rows, int32_t n,
                                      uint32_t *k)
{
    int32_t n_words = f->head_dim / elements_per_word(word), n_steps = f->stored_dim / elements_per_word(word);
    for (int32_t w = 0; w < n_steps; w += 16) {
        __mmask16 lanes = first_lanes(n_words - w);
        __m512i v[16];
        for (int32_t t = 0; t < 16; t++) v[t] = _mm512_setzero_si512();
        for (int32_t t = 0; t < n; t++)
            v[t] = _mm512_maskz_loadu_epi32(lanes, rows->k + t * rows->k_stride_bytes + 4 * w);
        transpose_words(v);
        for (int32_t i = 0; i < 16; i++) _mm512_store_si512(k + (w + i) * BLOCK_KEYS, v[i]);
    }
}

HKV_AVX512_INLINE __m512i value_row_load(const tile_rows *rows, int32_t token, int32_t n, int32_t word, int32_t n_words)
{
    if (token >= n) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi32(first_lanes(n_words - word), rows->v + token * rows->v_stride_bytes + 4 * word);
}

/* 16 keys into v, bf16 in pairs of keys. Keys from n on and channels from D on become 0. */
HKV_AVX512_INLINE void tile_pack_values(word_kind word, const hkv_format *f, const tile_rows *rows, int32_t n,
                                        uint32_t *v)
{
    const __m512i pairs = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i upper_pairs = _mm512_add_epi16(pairs, _mm512_set1_epi16(16));
    int32_t n_words = f->head_dim / elements_per_word(word), n_stored = f->stored_dim / elements_per_word(word);
    for (int32_t t = 0; t < TILE_KEYS; t += elements_per_word(word)) {
        for (int32_t w = 0; w < n_stored; w += 16) {
            __m512i row = value_row_load(rows, t, n, w, n_words), next;
            if (word == WORD_F32) {
                _mm512_store_si512(v + t * f->stored_dim + w, row);
                continue;
            }
            next = value_row_load(rows, t + 1, n, w, n_words);
            _mm512_store_si512(v + t / 2 * f->stored_dim + 2 * w, _mm512_permutex2var_epi16(row, pairs, next));
            _mm512_store_si512(v + t / 2 * f->stored_dim + 2 * w + 16,
                               _mm512_permutex2var_epi16(row, upper_pairs, next));
        }
    }
}

/* Tokens first .. first + 63 of a source, as far as it goes. */
HKV_AVX512_INLINE void block_load(word_kind word, const hkv_format *f, const hkv_cpu_source *source, int32_t first,
                                  tile_rows *rows, key_block *block)
{
    block->n_keys = at_most(source->n_tokens - first, BLOCK_KEYS);
    block->first_position = source->first_position + first;
    block->has_middle = word == WORD_BF16 && source->kind == HKV_SOURCE_RECORD;
    for (int32_t t = 0; t < BLOCK_KEYS; t += TILE_KEYS) {
        int32_t n = clamp(block->n_keys - t, 0, TILE_KEYS);
        if (n > 0) tile_load(word, f, source, first + t, n, rows, block);
        tile_pack_keys(word, f, rows, n, block->k + t);
        tile_pack_values(word, f, rows, n, block->v + t / elements_per_word(word) * f->stored_dim);
    }
}

/* -------------------------------------------------------------------------------------------------------- strips */

/* c [6, 16 * n_vectors] += left [6, n_steps] . right [n_steps, 16 * n_vectors], strides in words. */
HKV_AVX512_INLINE void strip_multiply(word_kind word, const int n_vectors, const uint32_t *left, size_t left_stride,
                                      const uint32_t *right, size_t right_stride, int32_t n_steps,
                                      __m512 c[STRIP_ROWS][VECTORS])
{
    for (int32_t s = 0; s < n_steps; s++) {
        __m512i b[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++) b[v] = _mm512_load_si512(right + (size_t)s * right_stride + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++) {
            __m512i a = _mm512_set1_epi32((int32_t)left[(size_t)r * left_stride + (size_t)s]);
#pragma GCC unroll 4
            for (int v = 0; v < n_vectors; v++)
                c[r][v] = word == WORD_BF16
                              ? _mm512_dpbf16_ps(c[r][v], (__m512bh)a, (__m512bh)b[v])
                              : _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b[v]), c[r][v]);
        }
    }
}

/* Sums (is_max 0) or maxima of eight vectors, in their order. */
HKV_AVX512_INLINE __m256 reduce_rows(int is_max, const __m512 v[8])
{
#define JOIN(a, b) (is_max ? _mm512_max_ps((a), (b)) : _mm512_add_ps((a), (b)))
    __m512 two[4], four[2], eight;
    for (int i = 0; i < 4; i++)
        two[i] = JOIN(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        four[i] = JOIN(_mm512_shuffle_ps(two[2 * i], two[2 * i + 1], _MM_SHUFFLE(1, 0, 1, 0)),
                       _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], _MM_SHUFFLE(3, 2, 3, 2)));
    eight = JOIN(_mm512_shuffle_f32x4(four[0], four[1], _MM_SHUFFLE(1, 0, 1, 0)),
                 _mm512_shuffle_f32x4(four[0], four[1], _MM_SHUFFLE(3, 2, 3, 2)));
    return _mm512_castps512_ps256(JOIN(_mm512_shuffle_f32x4(eight, eight, _MM_SHUFFLE(2, 0, 2, 0)),
                                       _mm512_shuffle_f32x4(eight, eight, _MM_SHUFFLE(3, 1, 3, 1))));
#undef JOIN
}

/* Six query rows and what they need while they meet one block. Rows beyond the last are zero and see nothing. */
typedef struct strip {
    uint32_t q[STRIP_ROWS][HKV_MAX_HEAD_DIM]; /* words */
    float scores[STRIP_ROWS][BLOCK_KEYS];
    uint32_t p[STRIP_ROWS][BLOCK_KEYS]; /* words */
    float unused_acc[HKV_MAX_HEAD_DIM];
    float rescale[8];
    float *acc[STRIP_ROWS];
    uint64_t visible[8]; /* bit per key */
    int32_t first_row, n_rows;
    int32_t first_key, end_key; /* what any row sees */
} __attribute__((aligned(64))) strip;

/* Which keys the rows see. */
static void strip_look(const hkv_cpu_query *query, const key_block *block, strip *s)
{
    s->first_key = BLOCK_KEYS;
    s->end_key = 0;
    for (int32_t r = 0; r < STRIP_ROWS; r++) {
        int64_t own = query->first_position + (s->first_row + r) / query->group - block->first_position;
        int32_t end = clamp(own + 1, 0, block->n_keys);
        int32_t first = query->window_tokens ? clamp(own - query->window_tokens + 1, 0, end) : 0;
        s->visible[r] = 0;
        if (r >= s->n_rows || first == end) continue;
        s->visible[r] = ~(uint64_t)0 >> (BLOCK_KEYS - end) & ~(uint64_t)0 << first;
        s->first_key = at_most(first, s->first_key);
        s->end_key = s->end_key > end ? s->end_key : end;
    }
}

HKV_AVX512_INLINE void strip_load(word_kind word, const hkv_cpu_query *query, const hkv_cpu_state *state, strip *s)
{
    int32_t stored_dim = query->format->stored_dim;
    for (int32_t r = 0; r < STRIP_ROWS; r++) {
        size_t row = (size_t)(s->first_row + r) * (size_t)stored_dim;
        if (r >= s->n_rows) {
            memset(s->q[r], 0, (size_t)stored_dim * 4);
            s->acc[r] = s->unused_acc;
            continue;
        }
        s->acc[r] = state->acc + row;
        for (int32_t c = 0; c < stored_dim; c += 32) {
            __m512 lo = _mm512_load_ps(query->q + row + c), hi = _mm512_load_ps(query->q + row + c + 16);
            if (word == WORD_BF16) {
                _mm512_store_si512(s->q[r] + c / 2, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
            } else {
                _mm512_store_ps(s->q[r] + c, lo);
                _mm512_store_ps(s->q[r] + c + 16, hi);
            }
        }
    }
}

/* q . middle per row, in fp32. */
HKV_AVX512_INLINE __m256 strip_middle(const hkv_cpu_query *query, const key_block *block, const strip *s)
{
    int32_t stored_dim = query->format->stored_dim;
    __m512 dots[8];
    for (int r = 0; r < 8; r++) dots[r] = _mm512_setzero_ps();
    for (int32_t c = 0; c < stored_dim; c += 16) {
        __m512 middle = _mm512_load_ps(block->middle + c);
        const float *q = query->q + (size_t)s->first_row * (size_t)stored_dim + c;
#pragma GCC unroll 6
        for (int r = 0; r < STRIP_ROWS; r++)
            dots[r] = _mm512_fmadd_ps(_mm512_load_ps(q + (size_t)(r < s->n_rows ? r : 0) * (size_t)stored_dim), middle,
                                      dots[r]);
    }
    return reduce_rows(0, dots);
}

HKV_AVX512_INLINE void strip_score(word_kind word, const hkv_cpu_query *query, const key_block *block, strip *s)
{
    __m512 c[STRIP_ROWS][VECTORS];
    float start[8] = {0};
    if (block->has_middle) _mm256_storeu_ps(start, strip_middle(query, block, s));
#pragma GCC unroll 6
    for (int r = 0; r < STRIP_ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) c[r][v] = _mm512_set1_ps(start[r]);
    }
    strip_multiply(word, VECTORS, s->q[0], HKV_MAX_HEAD_DIM, block->k, BLOCK_KEYS,
                   query->format->stored_dim / elements_per_word(word), c);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP_ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&s->scores[r][16 * v], c[r][v]);
    }
}

/* Scores into weights p relative to the rows' new maxima; max and sum of the state follow. */
HKV_AVX512_INLINE void strip_softmax(word_kind word, const hkv_cpu_query *query, hkv_cpu_state *state, strip *s)
{
    const __m512 minus_infinity = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(query->softmax_scale);
    const __mmask8 rows = (__mmask8)((1u << s->n_rows) - 1u);
    __m512 maxima[8], sums[8];
    __m256 old_max, new_max, shift, sum;
    float shifts[8];
    for (int r = 0; r < 8; r++) {
        maxima[r] = minus_infinity;
        sums[r] = _mm512_setzero_ps();
    }
    for (int r = 0; r < STRIP_ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            __m512 score = _mm512_mul_ps(_mm512_load_ps(&s->scores[r][16 * v]), scale);
            if (query->logits_soft_cap > 0.0f) score = hkv_avx512_soft_cap(score, query->logits_soft_cap);
            score = _mm512_mask_mov_ps(minus_infinity, (__mmask16)(s->visible[r] >> 16 * v), score);
            _mm512_store_ps(&s->scores[r][16 * v], score);
            maxima[r] = _mm512_max_ps(maxima[r], score);
        }
    }
    old_max = _mm256_mask_loadu_ps(_mm256_set1_ps(-INFINITY), rows, state->max + s->first_row);
    new_max = _mm256_max_ps(old_max, reduce_rows(1, maxima));
    /* A row that has seen nothing yet is shifted by 0, not by -inf. */
    shift = _mm256_maskz_mov_ps(_mm256_cmp_ps_mask(new_max, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ), new_max);
    _mm256_storeu_ps(shifts, shift);
    for (int r = 0; r < STRIP_ROWS; r++) {
        __m512 p[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            p[v] = hkv_avx512_exp(_mm512_sub_ps(_mm512_load_ps(&s->scores[r][16 * v]), _mm512_set1_ps(shifts[r])));
            sums[r] = _mm512_add_ps(sums[r], p[v]);
        }
        for (int v = 0; v < VECTORS; v += 2) {
            if (word == WORD_BF16) {
                _mm512_store_si512(&s->p[r][8 * v], (__m512i)_mm512_cvtne2ps_pbh(p[v + 1], p[v]));
            } else {
                _mm512_store_ps(&s->p[r][16 * v], p[v]);
                _mm512_store_ps(&s->p[r][16 * v + 16], p[v + 1]);
            }
        }
    }
    __m256 rescale = _mm512_castps512_ps256(hkv_avx512_exp(_mm512_castps256_ps512(_mm256_sub_ps(old_max, shift))));
    sum = _mm256_maskz_loadu_ps(rows, state->sum + s->first_row);
    _mm256_mask_storeu_ps(state->max + s->first_row, rows, new_max);
    _mm256_mask_storeu_ps(state->sum + s->first_row, rows, _mm256_fmadd_ps(sum, rescale, reduce_rows(0, sums)));
    _mm256_storeu_ps(s->rescale, rescale);
}

/* 16 * n_vectors channels of acc. */
HKV_AVX512_INLINE void strip_add_channels(word_kind word, const int n_vectors, const hkv_format *f,
                                          const key_block *block, int32_t channel, const strip *s)
{
    int32_t first = s->first_key / elements_per_word(word);
    int32_t end = (s->end_key + elements_per_word(word) - 1) / elements_per_word(word);
    __m512 c[STRIP_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < STRIP_ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++)
            c[r][v] = _mm512_mul_ps(_mm512_load_ps(s->acc[r] + channel + 16 * v), _mm512_set1_ps(s->rescale[r]));
    }
    strip_multiply(word, n_vectors, s->p[0] + first, BLOCK_KEYS, block->v + first * f->stored_dim + channel,
                   (size_t)f->stored_dim, end - first, c);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP_ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++) _mm512_store_ps(s->acc[r] + channel + 16 * v, c[r][v]);
    }
}

HKV_AVX512_INLINE void strip_add_values(word_kind word, const hkv_format *f, const key_block *block, const strip *s)
{
    int32_t channel = 0;
    for (; channel + 64 <= f->stored_dim; channel += 64) strip_add_channels(word, 4, f, block, channel, s);
    if (channel < f->stored_dim) strip_add_channels(word, 2, f, block, channel, s);
}

/* ------------------------------------------------------------------------------------------------------- prefill */

/* All query rows of the tile meet one block. */
HKV_AVX512_INLINE void block_attend(word_kind word, const hkv_cpu_query *query, const key_block *block,
                                    hkv_cpu_state *state, strip *s)
{
    for (s->first_row = 0; s->first_row < query->n_rows; s->first_row += STRIP_ROWS) {
        s->n_rows = at_most(query->n_rows - s->first_row, STRIP_ROWS);
        strip_look(query, block, s);
        if (s->first_key >= s->end_key) continue;
        strip_load(word, query, state, s);
        strip_score(word, query, block, s);
        strip_softmax(word, query, state, s);
        strip_add_values(word, query->format, block, s);
    }
}

/* Does any query token of the tile see any of the keys first_position .. + n - 1? */
static int32_t query_reaches(const hkv_cpu_query *query, int64_t first_position, int32_t n)
{
    int64_t last_query = query->first_position + (query->n_rows - 1) / query->group;
    return first_position <= last_query &&
           (query->window_tokens == 0 || first_position + n > query->first_position - query->window_tokens + 1);
}

HKV_AVX512_INLINE void attend_sources(word_kind word, const hkv_cpu_query *query, const hkv_cpu_source *sources,
                                      int32_t n_sources, hkv_cpu_state *state)
{
    key_block block;
    tile_rows rows;
    strip s;
    memset(s.unused_acc, 0, sizeof s.unused_acc);
    for (int32_t i = 0; i < n_sources; i++) {
        for (int32_t first = 0; first < sources[i].n_tokens; first += BLOCK_KEYS) {
            if (!query_reaches(query, sources[i].first_position + first,
                               at_most(sources[i].n_tokens - first, BLOCK_KEYS)))
                continue;
            block_load(word, query->format, &sources[i], first, &rows, &block);
            block_attend(word, query, &block, state, &s);
        }
    }
}

static void attend_sources_bf16(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                                hkv_cpu_state *state)
{
    attend_sources(WORD_BF16, query, sources, n_sources, state);
}

static void attend_sources_f32(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                               hkv_cpu_state *state)
{
    attend_sources(WORD_F32, query, sources, n_sources, state);
}

void hkv_avx512_prefill(const hkv_cpu_query *query, const hkv_cpu_source *sources, int32_t n_sources,
                        hkv_cpu_state *state)
{
    if (query->format->dtype == HKV_BF16)
        attend_sources_bf16(query, sources, n_sources, state);
    else
        attend_sources_f32(query, sources, n_sources, state);
}

#endif
