/* test_format.c - the record format and its scalar codec, format.h and format.c. */
#include "test_data.h"

static const int32_t BITS[] = {8, 6, 4};
static const int32_t BLOCK_SIZES[] = {8, 16, 24, 56, 64, 128, 512};
static const hkv_dtype DTYPES[] = {HKV_F16, HKV_BF16, HKV_F32};

#define COUNT(array) (int32_t)(sizeof(array) / sizeof((array)[0]))

/* -------------------------------------------------------------------------------------------------------- elements */

/* The next fp32 towards +infinity of x >= 0. */
static float float_after(float x)
{
    return hkv_float_of_bits(hkv_bits_of_float(x) + 1);
}
static float float_before(float x)
{
    return hkv_float_of_bits(hkv_bits_of_float(x) - 1);
}

static uint16_t to_half(float x)
{
    uint16_t half;
    hkv_elements_from_f32(HKV_F16, &x, 1, &half);
    return half;
}

static uint16_t to_bf16(float x)
{
    uint16_t half;
    hkv_elements_from_f32(HKV_BF16, &x, 1, &half);
    return half;
}

static void test_every_half_survives_a_round_trip(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float x = hkv_f16_to_f32((uint16_t)h), y = hkv_bf16_to_f32((uint16_t)h);
        int32_t f16_is_nan = (h & 0x7fff) > 0x7c00, bf16_is_nan = (h & 0x7fff) > 0x7f80;
        CHECK(isnan(x) ? f16_is_nan && isnan(hkv_f16_to_f32(to_half(x))) : !f16_is_nan && to_half(x) == h);
        CHECK(isnan(y) ? bf16_is_nan && isnan(hkv_bf16_to_f32(to_bf16(y))) : !bf16_is_nan && to_bf16(y) == h);
    }
}

/* Between every two neighbouring fp16 values, on both sides of zero. */
static void test_half_rounding_between_all_neighbours(void)
{
    for (uint32_t h = 0; h < 0x7bff; h++) {
        uint16_t below = (uint16_t)h, above = (uint16_t)(h + 1);
        float lower = hkv_f16_to_f32(below), upper = hkv_f16_to_f32(above), middle = (lower + upper) / 2;
        const float between[] = {float_after(lower), float_before(middle), middle, float_after(middle),
                                 float_before(upper)};
        CHECK(hkv_f32_to_f16_down(lower) == below && hkv_f32_to_f16_up(lower) == below);
        CHECK(hkv_f32_to_f16_down(-upper) == (above | 0x8000) && hkv_f32_to_f16_up(-upper) == (above | 0x8000));
        for (int32_t i = 0; i < COUNT(between); i++) {
            float x = between[i];
            uint16_t nearest = x < middle ? below : x > middle ? above : below & 1 ? above : below;
            CHECK(hkv_f32_to_f16_down(x) == below && hkv_f32_to_f16_up(x) == above);
            CHECK(hkv_f32_to_f16_down(-x) == (above | 0x8000) && hkv_f32_to_f16_up(-x) == (below | 0x8000));
            CHECK(to_half(x) == nearest && to_half(-x) == (nearest | 0x8000));
        }
    }
}

static void test_half_rounding_at_the_ends(void)
{
    CHECK(to_half(65519.996f) == 0x7bff && to_half(65520.0f) == 0x7c00 && to_half(-3e38f) == 0xfc00);
    CHECK(to_half(INFINITY) == 0x7c00 && to_half(-INFINITY) == 0xfc00);
    CHECK(to_bf16(3.4028235e38f) == 0x7f80 && to_bf16(-INFINITY) == 0xff80);
    CHECK(hkv_f32_to_f16_down(0.0f) == 0 && hkv_f32_to_f16_up(-0.0f) == 0x8000);
    for (float x = 1e-45f; x < 2e-8f; x *= 3) { /* below half of the smallest fp16 */
        CHECK(hkv_f32_to_f16_down(x) == 0 && hkv_f32_to_f16_up(x) == 1 && to_half(x) == 0);
        CHECK(hkv_f32_to_f16_down(-x) == 0x8001 && hkv_f32_to_f16_up(-x) == 0x8000 && to_half(-x) == 0x8000);
    }
}

static void test_bf16_rounding(void)
{
    CHECK(to_bf16(hkv_float_of_bits(0x3f808000)) == 0x3f80); /* ties go to even */
    CHECK(to_bf16(hkv_float_of_bits(0x3f818000)) == 0x3f82);
    CHECK(to_bf16(hkv_float_of_bits(0x3f808001)) == 0x3f81 && to_bf16(hkv_float_of_bits(0x3f807fff)) == 0x3f80);
    CHECK(isnan(hkv_bf16_to_f32(to_bf16(hkv_float_of_bits(0x7f800001))))); /* a NaN of low bits only */
}

/* ---------------------------------------------------------------------------------------------------------- layout */

static void test_sizes(void)
{
    for (int32_t block_size = 8; block_size <= HKV_MAX_BLOCK_SIZE; block_size += 8) {
        for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += 16) {
            hkv_format f, g, h;
            hkv_format_init(&f, 8, block_size, head_dim, HKV_F16);
            hkv_format_init(&g, 6, block_size, head_dim, HKV_F32);
            hkv_format_init(&h, 4, block_size, head_dim, HKV_BF16);
            CHECK(f.stored_dim % 32 == 0 && f.stored_dim - head_dim < 32 && f.stored_dim >= head_dim);
            CHECK(f.stored_tokens % 16 == 0 && f.stored_tokens - block_size < 16 && f.stored_tokens >= block_size);
            CHECK(f.int4_bytes % 64 == 0 && f.k8v4_bytes % 64 == 0 && f.int8_bytes % 64 == 0);
            CHECK(f.record_bytes == f.int8_bytes && g.record_bytes == f.k8v4_bytes && h.record_bytes == f.int4_bytes);
            CHECK(f.planes == 15 && g.planes == 7 && h.planes == 3);
            CHECK(hkv_record_precision(f.planes) == HKV_READ_INT8 && hkv_record_precision(g.planes) == HKV_READ_K8V4 &&
                  hkv_record_precision(h.planes) == HKV_READ_INT4);
            CHECK(hkv_record_prefix_bytes(&f, HKV_READ_K8V4) == g.record_bytes);
            CHECK(g.row_page_bytes % 512 == 0 && g.row_page_bytes >= (uint32_t)(block_size * g.row_bytes));
        }
    }
}

/* The sizes of docs/format.md. */
static void test_documented_sizes(void)
{
    const uint32_t rows[][10] = {{64, 64, 320, 2368, 2624, 4672, 6720, 4672, 6720, 8768},
                                 {128, 64, 576, 4672, 4928, 9024, 13120, 9024, 13120, 17216},
                                 {256, 64, 1088, 9280, 9792, 17984, 26176, 17984, 26176, 34368}};
    for (int32_t i = 0; i < COUNT(rows); i++) {
        const uint32_t *row = rows[i];
        hkv_format f;
        hkv_format_init(&f, 8, 64, (int32_t)row[0], HKV_F16);
        CHECK(f.k_params_offset == row[1] && f.k_high_offset == row[2] && f.v_params_offset == row[3]);
        CHECK(f.v_high_offset == row[4] && f.k_low_offset == row[5] && f.v_low_offset == row[6]);
        CHECK(f.int4_bytes == row[7] && f.k8v4_bytes == row[8] && f.int8_bytes == row[9]);
    }
}

/* The worked examples of docs/format.md. */
static void test_documented_places(void)
{
    hkv_format f;
    int32_t is_upper;
    hkv_format_init(&f, 8, 64, 128, HKV_F16);
    CHECK(hkv_k_plane_offset(128, 17, 42, &is_upper) == 1112 && !is_upper);
    CHECK(hkv_v_plane_offset(128, 17, 42, &is_upper) == 1163 && is_upper);
    CHECK(hkv_k_param_index(42) == 76 && hkv_v_param_index(&f, 17, 42) == 36);
    CHECK(hkv_row_element_offset(&f, 17, 42, 0) == 8772 && hkv_row_element_offset(&f, 17, 42, 1) == 9028);
}

static void mark_once(uint8_t *seen, size_t n, size_t place)
{
    CHECK(place < n);
    if (place >= n) return;
    CHECK(!seen[place]);
    seen[place] = 1;
}

static int32_t all_marked(const uint8_t *seen, size_t n)
{
    return memchr(seen, 0, n) == NULL;
}

static void check_planes_are_bijections(const hkv_format *f)
{
    size_t n_nibbles = 2 * (size_t)f->plane_bytes;
    uint8_t *seen = calloc(n_nibbles, 2), *k_seen = seen, *v_seen = seen + n_nibbles;
    for (int32_t t = 0; t < f->stored_tokens; t++) {
        for (int32_t c = 0; c < f->stored_dim; c++) {
            int32_t is_upper;
            uint32_t byte = hkv_k_plane_offset(f->stored_dim, t, c, &is_upper);
            mark_once(k_seen, n_nibbles, 2 * (size_t)byte + (size_t)is_upper);
            byte = hkv_v_plane_offset(f->stored_dim, t, c, &is_upper);
            mark_once(v_seen, n_nibbles, 2 * (size_t)byte + (size_t)is_upper);
        }
    }
    CHECK(all_marked(seen, 2 * n_nibbles));
    free(seen);
}

static void check_params_are_bijections(const hkv_format *f)
{
    size_t n_k = (f->k_high_offset - f->k_params_offset) / 2, n_v = (f->v_high_offset - f->v_params_offset) / 2;
    uint8_t *k_seen = calloc(n_k, 1), *v_seen = calloc(n_v, 1);
    for (int32_t c = 0; c < f->stored_dim; c++) {
        mark_once(k_seen, n_k, hkv_k_param_index(c));
        mark_once(k_seen, n_k, hkv_k_param_index(c) + 2);
    }
    for (int32_t c = 0; c < f->head_dim; c += HKV_VALUE_GROUP) {
        for (int32_t t = 0; t < f->stored_tokens; t++) {
            mark_once(v_seen, n_v, hkv_v_param_index(f, t, c));
            mark_once(v_seen, n_v, hkv_v_param_index(f, t, c) + 2);
        }
    }
    CHECK(all_marked(k_seen, n_k) && all_marked(v_seen, n_v));
    free(k_seen);
    free(v_seen);
}

static void check_rows_are_bijections(const hkv_format *f)
{
    size_t n = (size_t)f->block_tokens * (size_t)f->row_bytes / (size_t)f->element_bytes;
    uint8_t *seen = calloc(n, 1);
    for (int32_t t = 0; t < f->block_tokens; t++) {
        for (int32_t c = 0; c < f->stored_dim; c++) {
            for (int32_t is_v = 0; is_v < 2; is_v++) {
                size_t byte = hkv_row_element_offset(f, t, c, is_v);
                CHECK(byte % (size_t)f->element_bytes == 0);
                mark_once(seen, n, byte / (size_t)f->element_bytes);
            }
        }
    }
    CHECK(all_marked(seen, n));
    free(seen);
}

static void test_every_place_is_used_once(void)
{
    for (int32_t i = 0; i < COUNT(BLOCK_SIZES); i++) {
        for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += 16) {
            hkv_format f;
            hkv_format_init(&f, 8, BLOCK_SIZES[i], head_dim, DTYPES[head_dim / 16 % 3]);
            check_planes_are_bijections(&f);
            check_params_are_bijections(&f);
            check_rows_are_bijections(&f);
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- round trips */

/* What docs/format.md promises of one element read back as y, with room for the fp32 rounding of the reading. */
static void check_element(float x, float y, float zero, float scale, hkv_precision precision, int32_t is_v)
{
    int32_t has_low = is_v ? precision == HKV_READ_INT8 : precision >= HKV_READ_K8V4;
    float codes = has_low ? 0.5f : 8.5f, smallest_normal_half = 6.103515625e-5f;
    float bound = codes * 1.0002f * scale + 1.2e-7f * fabsf(x);
    if (scale < smallest_normal_half) bound += 8 * 1.1920929e-7f; /* 8 * 2^-23 */
    CHECK(y >= zero + 8.0f * scale && y <= zero + 248.0f * scale);
    if (fabsf(x) <= HKV_MAX_FINITE) CHECK(fabsf(x - y) <= bound);
}

/* Decode at every precision that is stored, all tokens at once and one by one. */
static void check_round_trip(const sample *s)
{
    size_t n = sample_elements(s);
    float *k = malloc(n * sizeof(float)), *v = malloc(n * sizeof(float)), one[HKV_MAX_HEAD_DIM];
    for (hkv_precision precision = HKV_READ_INT4; precision <= hkv_record_precision(s->f.planes); precision++) {
        hkv_record_decode(&s->f, s->record, precision, 0, s->n_tokens, k, v);
        for (int32_t t = 0; t < s->n_tokens; t++) {
            size_t row = (size_t)t * (size_t)s->f.head_dim, row_bytes = (size_t)s->f.head_dim * sizeof(float);
            hkv_record_decode(&s->f, s->record, precision, t, 1, one, NULL);
            CHECK(memcmp(one, k + row, row_bytes) == 0);
            hkv_record_decode(&s->f, s->record, precision, t, 1, NULL, one);
            CHECK(memcmp(one, v + row, row_bytes) == 0);
            for (int32_t c = 0; c < s->f.head_dim; c++) {
                uint16_t zero, scale;
                sample_params(s, 0, t, c, &zero, &scale);
                check_element(s->k[row + (size_t)c], k[row + (size_t)c], hkv_f16_to_f32(zero), hkv_f16_to_f32(scale),
                              precision, 0);
                sample_params(s, 1, t, c, &zero, &scale);
                check_element(s->v[row + (size_t)c], v[row + (size_t)c], hkv_f16_to_f32(zero), hkv_f16_to_f32(scale),
                              precision, 1);
            }
        }
    }
    free(k);
    free(v);
}

static void test_round_trips_of_all_shapes(void)
{
    uint64_t random = 1;
    for (int32_t i = 0; i < COUNT(BLOCK_SIZES); i++) {
        for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += BLOCK_SIZES[i] > 64 ? 112 : 16) {
            int32_t n_tokens = 1 + test_random_int(&random, BLOCK_SIZES[i]);
            sample s = sample_create(BITS[(head_dim / 16 + i) % 3], BLOCK_SIZES[i], head_dim, DTYPES[head_dim % 3],
                                     head_dim % 32 ? BLOCK_SIZES[i] : n_tokens);
            sample_fill_normal(&s, &random);
            CHECK(sample_encode(&s) == 0);
            check_round_trip(&s);
            sample_destroy(&s);
        }
    }
}

/* Ranges from below the smallest fp16 to the largest value, around offsets of every size. */
static void test_round_trips_of_all_ranges(void)
{
    const float offsets[] = {0, 1e-6f, -1, 200, -3000, 30000};
    uint64_t random = 2;
    for (int32_t i = 0; i < COUNT(offsets); i++) {
        for (float spread = 1e-9f; spread < 1e4f; spread *= 4) {
            sample s = sample_create(8, 16, 64, HKV_F32, 16);
            sample_fill_normal(&s, &random);
            for (size_t e = 0; e < sample_elements(&s); e++) {
                s.k[e] = offsets[i] + spread * s.k[e];
                s.v[e] = -offsets[i] + spread * s.v[e];
            }
            CHECK(sample_encode(&s) == 0);
            check_round_trip(&s);
            sample_destroy(&s);
        }
    }
}

/* Records of fewer bits are prefixes of the 8-bit one, apart from the header. */
static void test_fewer_bits_are_a_prefix(void)
{
    for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += 48) {
        for (int32_t i = 1; i < COUNT(BITS); i++) {
            uint64_t random = 3, again = 3;
            sample whole = sample_create(8, 24, head_dim, HKV_F16, 21);
            sample part = sample_create(BITS[i], 24, head_dim, HKV_F16, 21);
            sample_fill_normal(&whole, &random);
            sample_fill_normal(&part, &again);
            sample_encode(&whole);
            sample_encode(&part);
            CHECK(memcmp(whole.record, part.record, part.f.record_bytes) == 0);
            sample_destroy(&whole);
            sample_destroy(&part);
        }
    }
}

/* --------------------------------------------------------------------------------- what may and may not be touched */

/* Padding included, the payload depends on nothing but the input; the header and what surrounds a record stay. */
static void test_encode_writes_the_payload_and_nothing_else(void)
{
    enum { GUARD = 64 };
    for (int32_t i = 0; i < COUNT(BITS); i++) {
        for (int32_t n_tokens = 1; n_tokens <= 24; n_tokens++) {
            const uint8_t fills[] = {0x00, 0xff, 0x7e};
            uint64_t random = 4;
            sample s = sample_create(BITS[i], 24, 80, HKV_BF16, n_tokens);
            size_t n = s.f.record_bytes;
            uint8_t *memory = malloc(n + 2 * GUARD), *record = memory + GUARD;
            sample_fill_normal(&s, &random);
            sample_encode(&s);
            for (int32_t fill = 0; fill < COUNT(fills); fill++) {
                memset(memory, fills[fill], n + 2 * GUARD);
                hkv_record_encode(&s.f, s.k_row, 80, s.v_row, 80, n_tokens, record);
                CHECK(memcmp(record + 64, s.record + 64, n - 64) == 0);
                for (int32_t b = 0; b < GUARD + 64; b++) CHECK(memory[b] == fills[fill]);
                for (int32_t b = 0; b < GUARD; b++) CHECK(record[n + (size_t)b] == fills[fill]);
            }
            free(memory);
            sample_destroy(&s);
        }
    }
}

static int32_t plane_nibble(const uint8_t *plane, uint32_t byte, int32_t is_upper)
{
    return is_upper ? plane[byte] >> 4 : plane[byte] & 15;
}

/* Absent tokens and padded channels: code 8, parameters 0. */
static void test_padding(void)
{
    uint64_t random = 5;
    for (int32_t n_tokens = 1; n_tokens <= 24; n_tokens += 5) {
        sample s = sample_create(8, 24, 144, HKV_F16, n_tokens);
        sample_fill_normal(&s, &random);
        sample_encode(&s);
        for (int32_t t = 0; t < s.f.stored_tokens; t++) {
            for (int32_t c = 0; c < s.f.stored_dim; c++) {
                int32_t is_upper;
                uint32_t byte;
                uint16_t zero, scale;
                if (t < n_tokens && c < 144) continue;
                byte = hkv_k_plane_offset(s.f.stored_dim, t, c, &is_upper);
                CHECK(plane_nibble(s.record + s.f.k_high_offset, byte, is_upper) == 0);
                CHECK(plane_nibble(s.record + s.f.k_low_offset, byte, is_upper) == 8);
                byte = hkv_v_plane_offset(s.f.stored_dim, t, c, &is_upper);
                CHECK(plane_nibble(s.record + s.f.v_high_offset, byte, is_upper) == 0);
                CHECK(plane_nibble(s.record + s.f.v_low_offset, byte, is_upper) == 8);
                if (c >= 144) {
                    sample_params(&s, 0, t, c, &zero, &scale);
                    CHECK(zero == 0 && scale == 0);
                }
                if (t >= n_tokens) {
                    sample_params(&s, 1, t, c, &zero, &scale);
                    CHECK(zero == 0 && scale == 0);
                }
            }
        }
        sample_destroy(&s);
    }
}

/* Rows of a wider tensor: what lies between them plays no part. */
static void test_encode_follows_strides(void)
{
    enum { DIM = 48, K_STRIDE = 61, V_STRIDE = 50, TOKENS = 16 };
    uint64_t random = 6;
    sample s = sample_create(8, TOKENS, DIM, HKV_F32, TOKENS);
    float *k = malloc(TOKENS * K_STRIDE * sizeof(float)), *v = malloc(TOKENS * V_STRIDE * sizeof(float));
    uint8_t *record = malloc(s.f.record_bytes);
    sample_fill_normal(&s, &random);
    sample_encode(&s);
    for (int32_t i = 0; i < TOKENS * K_STRIDE; i++) k[i] = NAN;
    for (int32_t i = 0; i < TOKENS * V_STRIDE; i++) v[i] = NAN;
    for (int32_t t = 0; t < TOKENS; t++) {
        memcpy(k + t * K_STRIDE, s.k + t * DIM, DIM * sizeof(float));
        memcpy(v + t * V_STRIDE, s.v + t * DIM, DIM * sizeof(float));
    }
    CHECK(hkv_record_encode(&s.f, k, K_STRIDE, v, V_STRIDE, TOKENS, record) == 0);
    CHECK(memcmp(record + 64, s.record + 64, s.f.record_bytes - 64) == 0);
    free(k);
    free(v);
    free(record);
    sample_destroy(&s);
}

static void test_row_pages(void)
{
    for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += 16) {
        for (int32_t i = 0; i < COUNT(DTYPES); i++) {
            uint64_t random = 7;
            sample s = sample_create(0, 24, head_dim, DTYPES[i], 24);
            size_t row = (size_t)head_dim * (size_t)s.f.element_bytes;
            uint8_t *k = malloc(row), *v = malloc(row);
            sample_fill_normal(&s, &random);
            sample_round(&s);
            for (int32_t t = 23; t >= 0; t--)
                hkv_row_store(&s.f, s.record, t, s.k_row + (size_t)t * row, s.v_row + (size_t)t * row);
            for (int32_t t = 0; t < 24; t++) {
                hkv_row_load(&s.f, s.record, t, k, v);
                CHECK(memcmp(k, s.k_row + (size_t)t * row, row) == 0);
                CHECK(memcmp(v, s.v_row + (size_t)t * row, row) == 0);
                for (int32_t c = head_dim; c < s.f.stored_dim; c++) {
                    CHECK(s.record[hkv_row_element_offset(&s.f, t, c, 0)] == 0);
                    CHECK(s.record[hkv_row_element_offset(&s.f, t, c, 1)] == 0);
                }
            }
            free(k);
            free(v);
            sample_destroy(&s);
        }
    }
}

/* -------------------------------------------------------------------------------------------------- special values */

/* cases 2: constant channels, zero rows, tiny and huge ranges. */
static void test_degenerate_groups(void)
{
    for (int32_t i = 0; i < COUNT(DTYPES); i++) {
        uint64_t random = 8;
        sample s = sample_create(8, 64, 64, DTYPES[i], 64);
        float k[64 * 64], v[64 * 64];
        sample_fill_normal(&s, &random);
        for (int32_t t = 0; t < 64; t++) {
            s.k[t * 64 + 0] = 0;
            s.k[t * 64 + 1] = 3;
            s.k[t * 64 + 2] = 1e-7f * (float)t;
            s.k[t * 64 + 3] = t % 2 ? 6e4f : -6e4f;
            s.k[t * 64 + 4] = t % 3 ? 1e-5f : -1e-5f;
            s.k[t * 64 + 5] = 200 + random_normal(&random);
            s.k[t * 64 + 6] = t % 2 ? 0.0f : -0.0f;
            s.v[5 * 64 + t] = 0;
            s.v[6 * 64 + t] = -1.25f;
        }
        CHECK(sample_encode(&s) == 0);
        check_round_trip(&s);
        for (hkv_precision precision = HKV_READ_INT4; precision <= HKV_READ_INT8; precision++) {
            hkv_record_decode(&s.f, s.record, precision, 0, 64, k, v);
            for (int32_t t = 0; t < 64; t++) {
                CHECK(k[t * 64] == 0 && k[t * 64 + 1] == 3 && k[t * 64 + 6] == 0);
                CHECK(v[5 * 64 + t] == 0 && v[6 * 64 + t] == -1.25f);
            }
            for (int32_t e = 0; e < 64 * 64; e++) CHECK(isfinite(k[e]) && isfinite(v[e]));
        }
        sample_destroy(&s);
    }
}

/* A group of zeros of any sign has the parameters of zeros. */
static void test_the_sign_of_zero_leaves_no_trace(void)
{
    sample s = sample_create(8, 8, 16, HKV_F32, 8);
    for (int32_t e = 0; e < 8 * 16; e++) {
        s.k[e] = e / 16 % 2 ? -0.0f : 0.0f;
        s.v[e] = e % 2 ? 0.0f : -0.0f;
    }
    s.k[0] = -0.0f;
    CHECK(sample_encode(&s) == 0);
    for (int32_t i = 0; i < 16; i++) {
        uint16_t zero, scale;
        sample_params(&s, 0, 0, i, &zero, &scale);
        CHECK(zero == 0 && scale == 0);
        sample_params(&s, 1, i / 2, 0, &zero, &scale);
        CHECK(zero == 0 && scale == 0);
    }
    sample_destroy(&s);
}

/* cases 15: one bad token costs its block no precision, and is counted. */
static void test_bad_elements_do_not_poison_their_group(void)
{
    const float bad[] = {NAN, INFINITY, -INFINITY, 1e5f, -3e38f};
    const float stored_as[] = {0, HKV_MAX_FINITE, -HKV_MAX_FINITE, HKV_MAX_FINITE, -HKV_MAX_FINITE};
    for (int32_t i = 0; i < COUNT(bad); i++) {
        uint64_t random = 9, again = 9;
        sample clean = sample_create(8, 64, 128, HKV_BF16, 64), s = sample_create(8, 64, 128, HKV_BF16, 64);
        float k[128], v[128];
        sample_fill_normal(&clean, &random);
        sample_fill_normal(&s, &again);
        for (int32_t c = 0; c < 128; c++) {
            clean.k[17 * 128 + c] = clean.k[16 * 128 + c]; /* takes no part in the range */
            s.k[17 * 128 + c] = bad[i];
        }
        clean.v[3 * 128 + 7] = clean.v[3 * 128 + 8];
        s.v[3 * 128 + 7] = bad[i];
        CHECK(sample_encode(&clean) == 0);
        CHECK(sample_encode(&s) == 129);
        CHECK(memcmp(clean.record + s.f.k_params_offset, s.record + s.f.k_params_offset, 512) == 0);
        CHECK(memcmp(clean.record + s.f.v_params_offset, s.record + s.f.v_params_offset, 256) == 0);
        check_round_trip(&s);
        hkv_record_decode(&s.f, s.record, HKV_READ_INT8, 17, 1, k, v);
        for (int32_t c = 0; c < 128; c++) { /* the end of the range nearest to it */
            uint16_t zero, scale;
            sample_params(&s, 0, 17, c, &zero, &scale);
            if (stored_as[i] > 0) CHECK(k[c] == hkv_f16_to_f32(zero) + 248 * hkv_f16_to_f32(scale));
            if (stored_as[i] < 0) CHECK(k[c] == hkv_f16_to_f32(zero) + 8 * hkv_f16_to_f32(scale));
            if (stored_as[i] == 0) CHECK(fabsf(k[c]) <= hkv_f16_to_f32(scale));
        }
        sample_destroy(&clean);
        sample_destroy(&s);
    }
}

static void test_groups_of_bad_elements_only(void)
{
    sample s = sample_create(8, 8, 16, HKV_F32, 2);
    float k[2 * 16];
    for (int32_t c = 0; c < 16; c++) {
        s.k[c] = c == 0 ? NAN : INFINITY;
        s.k[16 + c] = c == 0 ? NAN : -1e9f;
    }
    CHECK(sample_encode(&s) == 32);
    hkv_record_decode(&s.f, s.record, HKV_READ_INT8, 0, 2, k, NULL);
    CHECK(k[0] == 0 && k[16] == 0);
    for (int32_t c = 1; c < 16; c++) {
        CHECK(fabsf(k[c] - HKV_MAX_FINITE) <= 256 && fabsf(k[16 + c] + HKV_MAX_FINITE) <= 256);
    }
    sample_destroy(&s);
}

/* 61408 is kept as it is, the next fp32 is not; zero does not overflow at the widest range. */
static void test_the_largest_range(void)
{
    sample s = sample_create(8, 8, 16, HKV_F32, 2);
    uint16_t zero, scale;
    for (int32_t c = 0; c < 16; c++) {
        s.k[c] = HKV_MAX_FINITE;
        s.k[16 + c] = -HKV_MAX_FINITE;
    }
    CHECK(sample_encode(&s) == 0);
    check_round_trip(&s);
    sample_params(&s, 0, 0, 0, &zero, &scale);
    CHECK(zero == 0xfbff); /* -65504 */
    s.k[3] = float_after(HKV_MAX_FINITE);
    CHECK(sample_encode(&s) == 1);
    sample_destroy(&s);
}

/* ---------------------------------------------------------------------------------------------------- the contract */

/* FNV-1a of the payload. */
static uint64_t checksum(const sample *s)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 64; i < s->f.record_bytes; i++) hash = (hash ^ s->record[i]) * 0x100000001b3u;
    return hash;
}

/* The bytes of version 1. If this fails, HKV_FORMAT_VERSION must change and old dumps are lost. */
static void test_the_format_is_what_it_was(void)
{
    static const struct {
        int32_t bits, head_dim, block_size;
        uint64_t checksum;
    } golden[] = {
        {8, 16, 8, 0x817a1b095a64319e},   {8, 16, 64, 0x2635bae7a859b420},  {8, 64, 8, 0x10b0d19e69f580f8},
        {8, 64, 64, 0x3c146840234fc663},  {8, 96, 8, 0x449cf513b39ca237},   {8, 96, 64, 0x669c9ece5ecd81e9},
        {8, 128, 8, 0x6241df99ce77ed3d},  {8, 128, 64, 0x0d49869400826533}, {8, 256, 8, 0xa7a9b510013bf08d},
        {8, 256, 64, 0xdf0aa04b4aa8878a}, {6, 16, 8, 0xdc112afa5f8114de},   {6, 16, 64, 0xce1d50f51ef7fdd2},
        {6, 64, 8, 0x8f49e1969ec63528},   {6, 64, 64, 0x5b5c8450a32981b9},  {6, 96, 8, 0x897a4b64edd1e7d7},
        {6, 96, 64, 0x1842d8c4c0b50211},  {6, 128, 8, 0xa01cce4d6e0611fd},  {6, 128, 64, 0x9a7587e0bb9a4fb4},
        {6, 256, 8, 0xf19706e9044e786d},  {6, 256, 64, 0xbf67165a97bfac82}, {4, 16, 8, 0x15dee2c9a8efd65c},
        {4, 16, 64, 0xf1a3324dc546a27a},  {4, 64, 8, 0xcbef57861cb3a817},   {4, 64, 64, 0x56ee7665330f3ad9},
        {4, 96, 8, 0xa184b4c4de2dc3de},   {4, 96, 64, 0xadf8d3cf1c2d9441},  {4, 128, 8, 0x6184ab3cb81d1e51},
        {4, 128, 64, 0xd4b557c4df1c4052}, {4, 256, 8, 0x8ff07e322e2eb191},  {4, 256, 64, 0x5f879460ab7a85b9},
    };
    for (int32_t i = 0; i < COUNT(golden); i++) {
        uint64_t random = 10;
        int32_t block_size = golden[i].block_size;
        sample s = sample_create(golden[i].bits, block_size, golden[i].head_dim, HKV_F32, block_size - 1);
        sample_fill_normal(&s, &random);
        CHECK(sample_encode(&s) == 0);
        CHECK(checksum(&s) == golden[i].checksum);
        sample_destroy(&s);
    }
}

int main(void)
{
    RUN(test_every_half_survives_a_round_trip);
    RUN(test_half_rounding_between_all_neighbours);
    RUN(test_half_rounding_at_the_ends);
    RUN(test_bf16_rounding);
    RUN(test_sizes);
    RUN(test_documented_sizes);
    RUN(test_documented_places);
    RUN(test_every_place_is_used_once);
    RUN(test_round_trips_of_all_shapes);
    RUN(test_round_trips_of_all_ranges);
    RUN(test_fewer_bits_are_a_prefix);
    RUN(test_encode_writes_the_payload_and_nothing_else);
    RUN(test_padding);
    RUN(test_encode_follows_strides);
    RUN(test_row_pages);
    RUN(test_degenerate_groups);
    RUN(test_the_sign_of_zero_leaves_no_trace);
    RUN(test_bad_elements_do_not_poison_their_group);
    RUN(test_groups_of_bad_elements_only);
    RUN(test_the_largest_range);
    RUN(test_the_format_is_what_it_was);
    return test_report();
}
