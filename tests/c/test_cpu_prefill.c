/* test_cpu_prefill.c - prefill and the record codec of every code path of this machine, against the reference and the
 * scalar codec. */
#include "cpu_dispatch.h"
#include "test_scene.h"

#define COUNT(array) (int32_t)(sizeof(array) / sizeof((array)[0]))

static const hkv_cpu_kernels *kernels; /* the path under test */

/* --------------------------------------------------------------------------------------- what 16 bits would give */

/* Keys and values of a scene as stored, [n_tokens, D] each. */
typedef struct stored_rows {
    float *k, *v;
} stored_rows;

static stored_rows stored_rows_create(const scene *s)
{
    size_t n_bytes = (size_t)s->n_tokens * (size_t)s->f.head_dim * sizeof(float);
    stored_rows rows = {allocate(n_bytes), allocate(n_bytes)};
    for (int32_t i = 0; i < s->n_sources; i++) {
        const hkv_cpu_source *source = &s->sources[i];
        for (int32_t t = 0; t < source->n_tokens; t++) {
            size_t at = (size_t)(source->first_position + t) * (size_t)s->f.head_dim;
            scene_read(s, source, (int32_t)source->precision, t, rows.k + at, rows.v + at);
        }
    }
    return rows;
}

static void stored_rows_destroy(stored_rows *rows)
{
    free(rows->k);
    free(rows->v);
}

static float rounded(hkv_dtype dtype, float x)
{
    uint8_t bytes[4];
    hkv_elements_from_f32(dtype, &x, 1, bytes);
    hkv_elements_to_f32(dtype, bytes, 1, &x);
    return x;
}

static void round_all(hkv_dtype dtype, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = rounded(dtype, x[i]);
}

/* Scores of one query row, -inf where it sees nothing; returns the largest. */
static double plain_scores(const scene *s, const hkv_cpu_query *query, int32_t row, const float *k, double *scores)
{
    double max = -INFINITY;
    int64_t own = query->first_position + row / query->group;
    for (int32_t t = 0; t < s->n_tokens; t++) {
        const float *q = query->q + (size_t)row * (size_t)s->f.stored_dim;
        double cap = (double)query->logits_soft_cap, dot = 0;
        scores[t] = -INFINITY;
        if (t > own || (query->window_tokens > 0 && own - t >= query->window_tokens)) continue;
        for (int32_t c = 0; c < s->f.head_dim; c++)
            dot += (double)q[c] * (double)k[(size_t)t * (size_t)s->f.head_dim + (size_t)c];
        scores[t] = (double)query->softmax_scale * dot;
        if (cap > 0) scores[t] = cap * tanh(scores[t] / cap);
        max = fmax(max, scores[t]);
    }
    return max;
}

/* Output [D] of one row, all in double but for K, V (both rounded by the caller) and P, which are of 16 bits. */
static void plain_row(const scene *s, const hkv_cpu_query *query, int32_t row, const stored_rows *rows, double *out)
{
    double *scores = malloc((size_t)s->n_tokens * sizeof *scores), sum = 0;
    double max = plain_scores(s, query, row, rows->k, scores);
    memset(out, 0, (size_t)s->f.head_dim * sizeof *out);
    for (int32_t t = 0; t < s->n_tokens; t++) {
        float p = (float)exp(scores[t] - max);
        sum += (double)p;
        p = rounded((hkv_dtype)s->f.dtype, p);
        for (int32_t c = 0; c < s->f.head_dim; c++)
            out[c] += (double)p * (double)rows->v[(size_t)t * (size_t)s->f.head_dim + (size_t)c];
    }
    for (int32_t c = 0; c < s->f.head_dim; c++) out[c] /= sum;
    free(scores);
}

/* Relative error (Frobenius) of what the path computed and of the 16-bit computation, against `exact`. */
typedef struct errors {
    double path, plain;
} errors;

static errors measure_errors(const scene *s, const hkv_cpu_query *query, const hkv_cpu_state *state,
                             const hkv_cpu_state *exact)
{
    stored_rows rows = stored_rows_create(s);
    size_t n = (size_t)s->n_tokens * (size_t)s->f.head_dim;
    double plain[HKV_MAX_HEAD_DIM], path_error = 0, plain_error = 0, norm = 0;
    round_all((hkv_dtype)s->f.dtype, rows.k, n);
    round_all((hkv_dtype)s->f.dtype, rows.v, n);
    for (int32_t row = 0; row < query->n_rows; row++) {
        plain_row(s, query, row, &rows, plain);
        for (int32_t c = 0; c < s->f.head_dim; c++) {
            double want = state_out(exact, &s->f, row, c), is = state_out(state, &s->f, row, c);
            path_error += (is - want) * (is - want);
            plain_error += (plain[c] - want) * (plain[c] - want);
            norm += want * want;
        }
    }
    stored_rows_destroy(&rows);
    return (errors){sqrt(path_error / norm), sqrt(plain_error / norm)};
}

/* fp32 rounding of scores of a few units, and of sums of a few hundred terms. */
static const double F32_ERROR = 2e-6;

/* The state is right: at most twice the error of a plain 16-bit computation, nothing in the padding. */
static void check_state(const scene *s, const hkv_cpu_query *query, const hkv_cpu_state *state)
{
    hkv_cpu_state exact = state_create(query);
    errors e;
    hkv_cpu_reference.prefill(query, s->sources, s->n_sources, &exact);
    e = measure_errors(s, query, state, &exact);
    CHECK(e.path <= 2 * e.plain + F32_ERROR);
    for (int32_t row = 0; row < query->n_rows; row++) {
        double lse = state_lse(&exact, row), tolerance = s->f.dtype == HKV_BF16 ? 4e-3 : 1e-5;
        CHECK(fabs(state_lse(state, row) - lse) <= tolerance * (1 + fabs(lse)));
        for (int32_t c = s->f.head_dim; c < s->f.stored_dim; c++) CHECK(state->acc[row * s->f.stored_dim + c] == 0);
    }
    state_destroy(&exact);
}

/* Queries of the last n_new tokens, in the model's dtype. */
static hkv_cpu_query query_create_rounded(const scene *s, int32_t n_new, int32_t group, uint64_t seed)
{
    hkv_cpu_query query = query_create(s, n_new, group, seed);
    round_all((hkv_dtype)s->f.dtype, (float *)(uintptr_t)query.q, (size_t)query.n_rows * (size_t)s->f.stored_dim);
    return query;
}

static void check_prefill(const scene *s, const hkv_cpu_query *query)
{
    hkv_cpu_state state = state_create(query);
    kernels->prefill(query, s->sources, s->n_sources, &state);
    check_state(s, query, &state);
    state_destroy(&state);
}

/* -------------------------------------------------------------------------------------------------------- prefill */

static const int32_t CACHED[] = {0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161};
static const int32_t CHUNKS[] = {9, 32, 65, 100, 200};
static const int32_t GROUPS[] = {1, 3, 4, 7};
static const int32_t BLOCKS[] = {64, 24, 128, 8, 160};

static void test_prefill_of_all_sizes(void)
{
    for (int32_t i = 0; i < COUNT(CACHED); i++) {
        for (int32_t j = 0; j < COUNT(GROUPS); j++) {
            int32_t n_new = CHUNKS[(i + j) % COUNT(CHUNKS)], head_dim = 16 * (1 + (4 * i + j + i / 4) % 16);
            scene *s = scene_of_row(CACHED[i] + n_new, n_new, BLOCKS[(i + 2 * j) % COUNT(BLOCKS)], head_dim,
                                    (hkv_dtype)((i + j) % 3), (uint64_t)(100 * i + j));
            hkv_cpu_query query = query_create_rounded(s, n_new, GROUPS[j], (uint64_t)i);
            check_prefill(s, &query);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

static void test_windows_and_soft_caps(void)
{
    const int32_t windows[] = {1, 16, 63, 64, 65, 130};
    for (int32_t i = 0; i < COUNT(windows); i++) {
        for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
            scene *s = scene_of_row(230, 70, 32, 80, (hkv_dtype)dtype, (uint64_t)i);
            hkv_cpu_query query = query_create_rounded(s, 70, 2, 1);
            query.window_tokens = windows[i];
            query.logits_soft_cap = i % 2 ? 3 : 0;
            check_prefill(s, &query);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

/* What is cached may come in any order and in any number of calls. */
static void test_sources_in_any_order_and_number_of_calls(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
        scene *s = scene_of_row(300, 40, 64, 128, (hkv_dtype)dtype, 3);
        hkv_cpu_query query = query_create_rounded(s, 40, 4, 4);
        hkv_cpu_state state = state_create(&query);
        for (int32_t i = s->n_sources - 1; i >= 0; i--) kernels->prefill(&query, &s->sources[i], 1, &state);
        check_state(s, &query, &state);
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* Peaked softmax over small values: the shares that are left for the rest must not be lost. */
static void test_small_values_beside_large_scores(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
        scene *s = scene_create(8, 64, 128, (hkv_dtype)dtype, 5);
        hkv_cpu_query query;
        s->v_scale = 0.02f;
        for (int32_t i = 0; i < 4; i++) scene_add_record(s, 64, HKV_READ_INT8);
        s->k_scale = 3;
        scene_add_page(s, 32);
        scene_add_tensor(s, 20);
        query = query_create_rounded(s, 20, 4, 6);
        check_prefill(s, &query);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* A channel of the keys far from zero: its bf16 rounding alone would be a quarter. */
static void test_key_channels_far_from_zero(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_BF16; dtype++) {
        scene *s = scene_create(8, 64, 128, (hkv_dtype)dtype, 7);
        hkv_cpu_query query;
        hkv_cpu_state state, exact;
        s->k_outlier = 200;
        for (int32_t i = 0; i < 4; i++) scene_add_record(s, 64, HKV_READ_INT8);
        scene_add_page(s, 40);
        scene_add_tensor(s, 30);
        query = query_create_rounded(s, 30, 4, 8);
        query.softmax_scale = 0.3f;
        state = state_create(&query);
        exact = state_create(&query);
        kernels->prefill(&query, s->sources, s->n_sources, &state);
        hkv_cpu_reference.prefill(&query, s->sources, s->n_sources, &exact);
        CHECK(measure_errors(s, &query, &state, &exact).path <= 0.01);
        state_destroy(&exact);
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* Rows that see nothing keep an empty state; sources without tokens change nothing. */
static void test_nothing_visible(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
        scene *s = scene_of_row(200, 20, 64, 64, (hkv_dtype)dtype, 9);
        hkv_cpu_query query = query_create_rounded(s, 20, 3, 10);
        hkv_cpu_state state = state_create(&query);
        int64_t own = query.first_position;
        query.window_tokens = 8;
        kernels->prefill(&query, s->sources, 1, &state); /* long out of every window */
        query.first_position = 5;                        /* tokens 5..24; the sources from 64 on are their future */
        query.window_tokens = 0;
        kernels->prefill(&query, s->sources + 1, s->n_sources - 1, &state);
        for (int32_t row = 0; row < query.n_rows; row++) {
            CHECK(state.max[row] == -INFINITY && state.sum[row] == 0);
            for (int32_t c = 0; c < s->f.stored_dim; c++) CHECK(state.acc[row * s->f.stored_dim + c] == 0);
        }
        query.first_position = own;
        s->sources[1].n_tokens = 0;
        kernels->prefill(&query, s->sources + 1, 1, &state);
        CHECK(state.max[0] == -INFINITY);
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* A key that is not a number concerns the tokens that see it, and those before not at all. */
static void test_non_finite_keys(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
        scene *s = scene_of_row(60, 12, 16, 32, (hkv_dtype)dtype, 11);
        hkv_cpu_query query = query_create_rounded(s, 12, 1, 12);
        hkv_cpu_source *call = &s->sources[s->n_sources - 1];
        hkv_cpu_state clean = state_create(&query), state = state_create(&query);
        float bad = NAN;
        kernels->prefill(&query, s->sources, s->n_sources, &clean);
        hkv_elements_from_f32((hkv_dtype)dtype, &bad, 1, (uint8_t *)(uintptr_t)call->k + 5 * call->k_stride_bytes);
        kernels->prefill(&query, s->sources, s->n_sources, &state);
        for (int32_t row = 0; row < 12; row++) {
            if (row < 5)
                CHECK(state.sum[row] == clean.sum[row] && state.acc[row * 32] == clean.acc[row * 32]);
            else
                CHECK(isnan(state.sum[row]));
        }
        state_destroy(&state);
        state_destroy(&clean);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* ---------------------------------------------------------------------------------------------------------- codec */

/* Kinds of data that take different ways through the quantisation. */
enum { NORMAL, OUTLIERS, BAD_ELEMENTS, ONLY_BAD, TINY, ZEROS_OF_BOTH_SIGNS, CONSTANT, N_KINDS };

static float element_of_kind(int32_t kind, uint64_t *random)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, 1e30f, -61408, 61440, -1e30f};
    float x = random_normal(random);
    int32_t i = test_random_int(random, 40);
    switch (kind) {
    case OUTLIERS:
        return i == 0 ? 300 * x : x;
    case BAD_ELEMENTS:
        return i < COUNT(bad) ? bad[i] : x;
    case ONLY_BAD:
        return i % 2 ? INFINITY : i % 4 ? NAN : -INFINITY;
    case TINY:
        return i % 3 ? 1e-6f * x : 1e-39f * x;
    case ZEROS_OF_BOTH_SIGNS:
        return i % 2 ? -0.0f : 0.0f;
    case CONSTANT:
        return -3.14f;
    default:
        return x;
    }
}

/* Encode and decode as the scalar codec does, to the bit; bytes beyond the record stay as they are. */
static void check_codec(int32_t bits, int32_t block_size, int32_t head_dim, hkv_dtype dtype, int32_t n_tokens,
                        int32_t kind, uint64_t random)
{
    sample s = sample_create(bits, block_size, head_dim, dtype, n_tokens);
    uint8_t *record = malloc(s.f.record_bytes);
    size_t n = (size_t)block_size * (size_t)head_dim;
    float *want = calloc(2 * n, sizeof(float)), *is = calloc(2 * n, sizeof(float));
    int32_t first = test_random_int(&random, block_size), count = 1 + test_random_int(&random, block_size - first);
    hkv_precision precision = (hkv_precision)test_random_int(&random, 1 + (int32_t)hkv_record_precision(s.f.planes));
    uint32_t n_clamped;
    for (size_t i = 0; i < sample_elements(&s); i++) {
        s.k[i] = element_of_kind(kind, &random);
        s.v[i] = element_of_kind(kind, &random);
    }
    memset(record, 0xff, s.f.record_bytes);
    n_clamped = sample_encode(&s);
    CHECK_INT(kernels->record_encode(&s.f, s.k_row, head_dim, s.v_row, head_dim, n_tokens, record), n_clamped);
    CHECK(memcmp(record, s.record, s.f.record_bytes) == 0);
    hkv_record_decode(&s.f, record, precision, first, count, want, want + n);
    kernels->record_decode(&s.f, record, precision, first, count, is, is + n);
    CHECK(memcmp(want, is, 2 * n * sizeof(float)) == 0);
    memset(is, 0, 2 * n * sizeof(float));
    kernels->record_decode(&s.f, record, precision, first, count, NULL, is + n);
    kernels->record_decode(&s.f, record, precision, first, count, is, NULL);
    CHECK(memcmp(want, is, 2 * n * sizeof(float)) == 0);
    free(is);
    free(want);
    free(record);
    sample_destroy(&s);
}

static void test_codec_to_the_bit(void)
{
    const int32_t bits[] = {8, 6, 4};
    uint64_t random = 13;
    for (int32_t head_dim = 16; head_dim <= HKV_MAX_HEAD_DIM; head_dim += 16) {
        for (int32_t i = 0; i < 21; i++) {
            int32_t block_size = i == 0 ? HKV_MAX_BLOCK_SIZE : 8 * (1 + test_random_int(&random, 16));
            int32_t n_tokens = i % 2 ? block_size : 1 + test_random_int(&random, block_size);
            check_codec(bits[i % 3], block_size, head_dim, (hkv_dtype)(i / 3 % 3), n_tokens, i % N_KINDS, random);
        }
    }
}

/* Rows of K and V inside a larger tensor. */
static void test_encode_with_strides(void)
{
    for (int32_t dtype = HKV_F16; dtype <= HKV_F32; dtype++) {
        enum { D = 48, T = 24, K_STRIDE = 2 * D, V_STRIDE = 3 * D + 1 };
        float k[T * K_STRIDE], v[T * V_STRIDE];
        uint8_t k_rows[sizeof k], v_rows[sizeof v], *records[2];
        uint64_t random = 17;
        hkv_format f;
        hkv_format_init(&f, 8, T, D, dtype);
        for (int32_t i = 0; i < T * K_STRIDE; i++) k[i] = random_normal(&random);
        for (int32_t i = 0; i < T * V_STRIDE; i++) v[i] = random_normal(&random);
        hkv_elements_from_f32((hkv_dtype)dtype, k, T * K_STRIDE, k_rows);
        hkv_elements_from_f32((hkv_dtype)dtype, v, T * V_STRIDE, v_rows);
        for (int32_t i = 0; i < 2; i++) {
            records[i] = calloc(1, f.record_bytes);
            (i ? hkv_record_encode : kernels->record_encode)(&f, k_rows, K_STRIDE, v_rows, V_STRIDE, T, records[i]);
        }
        CHECK(memcmp(records[0], records[1], f.record_bytes) == 0);
        free(records[0]);
        free(records[1]);
    }
}

int main(void)
{
    for (int32_t i = 0; i < hkv_cpu_n_paths(); i++) {
        kernels = hkv_cpu_path(i);
        if (kernels == &hkv_cpu_reference || !kernels->supported()) continue;
        printf("%s\n", kernels->name);
        RUN(test_prefill_of_all_sizes);
        RUN(test_windows_and_soft_caps);
        RUN(test_sources_in_any_order_and_number_of_calls);
        RUN(test_small_values_beside_large_scores);
        RUN(test_key_channels_far_from_zero);
        RUN(test_nothing_visible);
        RUN(test_non_finite_keys);
        RUN(test_codec_to_the_bit);
        RUN(test_encode_with_strides);
    }
    return test_report();
}
