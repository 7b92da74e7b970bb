/* test_reference.c - reference.c against attention written out naively over the same keys and values. */
#include "test_scene.h"

enum { NOT_READ = -1 };

static const hkv_cpu_kernels *const kernels = &hkv_cpu_reference;

/* --------------------------------------------------------------------------------------------------- the naive way */

static int32_t naive_sees(const hkv_cpu_query *query, int32_t row, int64_t key)
{
    int64_t position = query->first_position + row / query->group;
    if (key > position) return 0;
    return query->window_tokens == 0 || position - key < query->window_tokens;
}

static double naive_score(const hkv_cpu_query *query, int32_t row, const float *k)
{
    double score = 0;
    for (int32_t c = 0; c < query->format->head_dim; c++)
        score += (double)query->q[row * query->format->stored_dim + c] * (double)k[c];
    score *= (double)query->softmax_scale;
    if (query->logits_soft_cap > 0)
        score = (double)query->logits_soft_cap * tanh(score / (double)query->logits_soft_cap);
    return score;
}

/* Log-sum-exp of one row over sources first .. end-1, read as `readings` say. */
static double naive_lse(const scene *s, const hkv_cpu_query *query, int32_t row, int32_t first, int32_t end,
                        const int32_t *readings)
{
    float k[HKV_MAX_HEAD_DIM], v[HKV_MAX_HEAD_DIM];
    double max = -INFINITY, sum = 0;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t i = first; i < end; i++) {
            for (int32_t t = 0; t < s->sources[i].n_tokens && readings[i] != NOT_READ; t++) {
                double score;
                if (!naive_sees(query, row, s->sources[i].first_position + t)) continue;
                scene_read(s, &s->sources[i], readings[i], t, k, v);
                score = naive_score(query, row, k);
                if (pass == 0)
                    max = score > max ? score : max;
                else
                    sum += exp(score - max);
            }
        }
    }
    return sum > 0 ? max + log(sum) : -INFINITY;
}

/* Output [D] of one row whose log-sum-exp is lse. */
static void naive_out(const scene *s, const hkv_cpu_query *query, int32_t row, const int32_t *readings, double lse,
                      double *out)
{
    float k[HKV_MAX_HEAD_DIM], v[HKV_MAX_HEAD_DIM];
    memset(out, 0, (size_t)s->f.head_dim * sizeof *out);
    for (int32_t i = 0; i < s->n_sources; i++) {
        for (int32_t t = 0; t < s->sources[i].n_tokens && readings[i] != NOT_READ; t++) {
            double weight;
            if (!naive_sees(query, row, s->sources[i].first_position + t)) continue;
            scene_read(s, &s->sources[i], readings[i], t, k, v);
            weight = exp(naive_score(query, row, k) - lse);
            for (int32_t c = 0; c < s->f.head_dim; c++) out[c] += weight * (double)v[c];
        }
    }
}

static void full_readings(const scene *s, int32_t *readings)
{
    for (int32_t i = 0; i < s->n_sources; i++) readings[i] = (int32_t)s->sources[i].precision;
}

static const double ROUNDING = 3e-7; /* relative, of one merge into a float state */

/* The state holds the softmax over the whole scene, read as `readings` say, after n_merges merges into it. One merge
 * rounds a finished sum; the rounding of several is relative to the values and not to what is left of them. */
static void check_state(const scene *s, const hkv_cpu_query *query, const int32_t *readings, const hkv_cpu_state *state,
                        int32_t n_merges)
{
    double out[HKV_MAX_HEAD_DIM];
    for (int32_t row = 0; row < query->n_rows; row++) {
        double lse = naive_lse(s, query, row, 0, s->n_sources, readings);
        if (lse == -INFINITY) {
            CHECK(state->max[row] == -INFINITY && state->sum[row] == 0);
            for (int32_t c = 0; c < s->f.stored_dim; c++) CHECK(state->acc[row * s->f.stored_dim + c] == 0);
            continue;
        }
        naive_out(s, query, row, readings, lse, out);
        CHECK(fabs(state_lse(state, row) - lse) <= n_merges * ROUNDING * (1 + fabs(lse)));
        for (int32_t c = 0; c < s->f.head_dim; c++)
            CHECK(fabs(state_out(state, &s->f, row, c) - out[c]) <=
                  ROUNDING * (n_merges > 1 ? n_merges : fabs(out[c])));
        for (int32_t c = s->f.head_dim; c < s->f.stored_dim; c++) CHECK(state->acc[row * s->f.stored_dim + c] == 0);
    }
}

/* Decode the scene in one call and compare everything that comes out. */
static void check_decode(const scene *s, const hkv_cpu_query *query)
{
    int32_t readings[MAX_SOURCES];
    hkv_cpu_state state = state_create(query);
    float *source_lse = malloc((size_t)s->n_sources * (size_t)query->n_rows * sizeof(float) + 1);
    full_readings(s, readings);
    kernels->decode(query, s->sources, s->n_sources, &state, NULL, source_lse);
    check_state(s, query, readings, &state, 1);
    for (int32_t row = 0; row < query->n_rows; row++) {
        for (int32_t i = 0; i < s->n_sources; i++) {
            double lse = naive_lse(s, query, row, i, i + 1, readings);
            double actual = (double)source_lse[i * query->n_rows + row];
            CHECK(actual == lse || fabs(actual - lse) <= ROUNDING * (1 + fabs(lse)));
        }
    }
    free(source_lse);
    state_destroy(&state);
}

/* ------------------------------------------------------------------------------------------------------- attention */

static const int32_t LENGTHS[] = {1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161};
static const int32_t GROUPS[] = {1, 3, 4, 7};
static const int32_t HEAD_DIMS[] = {16, 64, 80, 96, 128, 256};
#define COUNT(array) (int32_t)(sizeof(array) / sizeof((array)[0]))

static void test_decode_at_all_lengths(void)
{
    for (int32_t i = 0; i < COUNT(LENGTHS); i++) {
        for (int32_t j = 0; j < COUNT(GROUPS); j++) {
            int32_t n_new = 1 + (i + j) % 3 * 3;
            int32_t head_dim = HEAD_DIMS[(i + j) % COUNT(HEAD_DIMS)];
            scene *s;
            hkv_cpu_query query;
            if (n_new > LENGTHS[i]) n_new = LENGTHS[i];
            s = scene_of_row(LENGTHS[i], n_new, j % 2 ? 64 : 24, head_dim, (hkv_dtype)(i % 3), (uint64_t)(100 * i + j));
            query = query_create(s, n_new, GROUPS[j], (uint64_t)i);
            check_decode(s, &query);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

static void test_decode_with_window_and_soft_cap(void)
{
    const int32_t windows[] = {0, 1, 8, 64, 100};
    for (int32_t i = 0; i < COUNT(windows); i++) {
        for (int32_t length = 98; length <= 102; length++) {
            scene *s = scene_of_row(length, 3, 32, 48, HKV_BF16, (uint64_t)length);
            hkv_cpu_query query = query_create(s, 3, 2, 1);
            query.window_tokens = windows[i];
            query.softmax_scale = 1;
            query.logits_soft_cap = length % 2 ? 5 : 0;
            check_decode(s, &query);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

/* A chunk of many tokens over what is cached: causal inside, more rows than fit one tile. */
static void test_prefill(void)
{
    const int32_t cached[] = {0, 1, 64, 130};
    for (int32_t i = 0; i < COUNT(cached); i++) {
        for (int32_t window = 0; window <= 40; window += 20) {
            int32_t readings[MAX_SOURCES];
            scene *s = scene_of_row(cached[i] + 37, 37, 64, 64, HKV_F16, (uint64_t)i);
            hkv_cpu_query query = query_create(s, 37, 3, 2);
            hkv_cpu_state state = state_create(&query);
            query.window_tokens = window;
            full_readings(s, readings);
            kernels->prefill(&query, s->sources, s->n_sources, &state);
            check_state(s, &query, readings, &state, 1);
            state_destroy(&state);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

/* The order of the sources and how they are spread over calls does not matter. */
static void test_sources_in_any_order_and_number_of_calls(void)
{
    int32_t readings[MAX_SOURCES];
    scene *s = scene_of_row(300, 5, 16, 64, HKV_F32, 3);
    hkv_cpu_query query = query_create(s, 5, 4, 4);
    hkv_cpu_state state = state_create(&query);
    for (int32_t i = s->n_sources - 1; i >= 0; i--) kernels->decode(&query, &s->sources[i], 1, &state, NULL, NULL);
    full_readings(s, readings);
    check_state(s, &query, readings, &state, s->n_sources);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_more_sources_than_are_merged_at_once(void)
{
    scene *s = scene_create(4, 8, 16, HKV_F16, 5);
    hkv_cpu_query query;
    for (int32_t i = 0; i < 300; i++) scene_add_record(s, 8 - i % 2, HKV_READ_INT4);
    query = query_create(s, 1, 3, 6);
    check_decode(s, &query);
    query_destroy(&query);
    scene_destroy(s);
}

/* cases 5: nothing to see leaves a state as it is. */
static void test_empty_sources_change_nothing(void)
{
    scene *s = scene_of_row(40, 1, 16, 32, HKV_F16, 7);
    hkv_cpu_query query = query_create(s, 1, 2, 8);
    hkv_cpu_state state = state_create(&query), before = state_create(&query);
    hkv_cpu_source future = s->sources[1], empty = s->sources[1];
    float source_lse[4] = {0, 0, 0, 0};
    hkv_cpu_source hidden[2];
    size_t n_acc = (size_t)query.n_rows * (size_t)s->f.stored_dim * sizeof(float);
    future.first_position = 40; /* beyond the query */
    empty.n_tokens = 0;
    hidden[0] = future;
    hidden[1] = empty;
    for (int32_t filled = 0; filled < 2; filled++) {
        if (filled) {
            kernels->decode(&query, s->sources, s->n_sources, &state, NULL, NULL);
            kernels->decode(&query, s->sources, s->n_sources, &before, NULL, NULL);
        }
        kernels->decode(&query, hidden, 2, &state, NULL, source_lse);
        kernels->decode(&query, hidden, 0, &state, NULL, source_lse);
        kernels->prefill(&query, hidden, 2, &state);
        for (int32_t i = 0; i < 4; i++) CHECK(source_lse[i] == -INFINITY);
        CHECK(memcmp(state.max, before.max, 2 * sizeof(float)) == 0);
        CHECK(memcmp(state.sum, before.sum, 2 * sizeof(float)) == 0);
        CHECK(memcmp(state.acc, before.acc, n_acc) == 0);
    }
    state_destroy(&before);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

/* cases 4: equal weights of equal values give exactly that value. */
static void test_uniform_attention_over_a_constant_is_exact(void)
{
    for (int32_t i = 0; i < COUNT(LENGTHS); i++) {
        scene *s = scene_create(8, 64, 64, HKV_BF16, 9);
        hkv_cpu_query query;
        hkv_cpu_state state;
        int32_t old = LENGTHS[i] - 1;
        s->v_scale = 0;
        for (int32_t n; old > 0; old -= n) {
            n = old < 64 ? old : 64;
            if (s->n_sources % 3 == 0)
                scene_add_page(s, n);
            else
                scene_add_record(s, n, (hkv_precision)(s->n_sources % 3));
        }
        scene_add_tensor(s, 1);
        query = query_create(s, 1, 3, 10);
        memset((void *)(uintptr_t)query.q, 0, 3 * 64 * sizeof(float));
        state = state_create(&query);
        kernels->decode(&query, s->sources, s->n_sources, &state, NULL, NULL);
        for (int32_t row = 0; row < 3; row++) {
            CHECK(state.max[row] == 0 && state.sum[row] == (float)LENGTHS[i]);
            for (int32_t c = 0; c < 64; c++) CHECK(state_out(&state, &s->f, row, c) == 1.0);
        }
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* Scores of thousands, positive and negative, neither overflow nor lose the sum. */
static void test_large_scores(void)
{
    for (int32_t seed = 0; seed < 4; seed++) {
        scene *s = scene_of_row(100, 2, 32, 64, HKV_F32, (uint64_t)seed);
        hkv_cpu_query query = query_create(s, 2, 2, (uint64_t)seed);
        query.softmax_scale = 1000;
        check_decode(s, &query);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* A NaN stays with the rows that see it; a score of -inf, here of the first token of a source, is a weight of 0. */
static void test_non_finite_tokens_of_the_call(void)
{
    scene *s = scene_of_row(50, 4, 16, 32, HKV_F32, 11);
    hkv_cpu_query query = query_create(s, 4, 1, 12);
    hkv_cpu_source *call = &s->sources[s->n_sources - 1];
    hkv_cpu_state clean = state_create(&query), with_nan = state_create(&query), with_infinity = state_create(&query);
    uint8_t *k = (uint8_t *)(uintptr_t)call->k, *k2 = k + 2 * call->k_stride_bytes;
    float original;
    const float nan = NAN, infinity = query.q[3 * 32] > 0 ? -INFINITY : INFINITY;
    kernels->decode(&query, s->sources, s->n_sources, &clean, NULL, NULL);
    memcpy(&original, k2, sizeof original);
    memcpy(k2, &nan, sizeof nan);
    kernels->decode(&query, s->sources, s->n_sources, &with_nan, NULL, NULL);
    for (int32_t row = 0; row < 4; row++) {
        if (row < 2)
            CHECK(with_nan.sum[row] == clean.sum[row]);
        else
            CHECK(isnan(with_nan.sum[row]));
    }
    memcpy(k2, &original, sizeof original);
    memcpy(k, &infinity, sizeof infinity);
    kernels->decode(&query, s->sources, s->n_sources, &with_infinity, NULL, NULL);
    CHECK(isfinite(with_infinity.sum[3]) && isfinite(with_infinity.acc[3 * 32]));
    CHECK(state_lse(&with_infinity, 3) < state_lse(&clean, 3));
    state_destroy(&with_infinity);
    state_destroy(&with_nan);
    state_destroy(&clean);
    query_destroy(&query);
    scene_destroy(s);
}

/* --------------------------------------------------------------------------------------------- progressive reading */

static uint32_t bytes_of(const hkv_format *f, int32_t reading)
{
    const uint32_t bytes[] = {f->v_params_offset, f->int4_bytes, f->k8v4_bytes, f->int8_bytes};
    return bytes[reading + 1];
}

/* One record of 64 equal keys whose share of the hot part is exactly known, read once. */
static void check_decision(double share, float skip_mass, float refine_mass, hkv_precision stored, int32_t expected)
{
    scene *s = scene_create(8, 64, 32, HKV_F16, 13);
    hkv_cpu_query query;
    hkv_cpu_state state;
    float reference_lse, source_lse;
    hkv_cpu_progressive progressive = {skip_mass, refine_mass, &reference_lse, 0, 0, 0, 0, 0.0};
    s->k_scale = 0;
    scene_add_record(s, 64, stored);
    query = query_create(s, 1, 1, 14);
    state = state_create(&query);
    reference_lse = (float)(naive_lse(s, &query, 0, 0, 1, &(int32_t){HKV_READ_INT4}) - log(share));
    kernels->decode(&query, s->sources, 1, &state, &progressive, &source_lse);
    check_state(s, &query, &expected, &state, 1);
    CHECK(expected == NOT_READ ? source_lse == -INFINITY : isfinite(source_lse));
    CHECK_INT(progressive.n_read, 1);
    CHECK_INT(progressive.n_skipped, expected == NOT_READ);
    CHECK_INT(progressive.n_refined, expected > HKV_READ_INT4);
    CHECK_INT(progressive.n_bytes, bytes_of(&s->f, expected));
    CHECK(fabs(progressive.skipped_share - (expected == NOT_READ ? share : 0)) <= 1e-5 * share);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_shares_on_both_sides_of_the_thresholds(void)
{
    check_decision(0.9999e-3, 1e-3f, 0.05f, HKV_READ_INT8, NOT_READ);
    check_decision(1.0001e-3, 1e-3f, 0.05f, HKV_READ_INT8, HKV_READ_INT4);
    check_decision(0.049995, 1e-3f, 0.05f, HKV_READ_INT8, HKV_READ_INT4);
    check_decision(0.050005, 1e-3f, 0.05f, HKV_READ_INT8, HKV_READ_INT8);
    check_decision(30.0, 1e-3f, 0.05f, HKV_READ_K8V4, HKV_READ_K8V4);
    check_decision(30.0, 1e-3f, 0.05f, HKV_READ_INT4, HKV_READ_INT4); /* nothing more is there, or it is L2 */
    check_decision(0.9e-3, 1e-3f, 0.05f, HKV_READ_INT4, NOT_READ);
    check_decision(1e-20, 0.0f, 0.05f, HKV_READ_INT8, HKV_READ_INT4); /* skipping off */
    check_decision(1e-20, 0.0f, 0.0f, HKV_READ_INT8, HKV_READ_INT8);  /* both off */
    check_decision(0.5, 1.0f, 0.0f, HKV_READ_INT8, NOT_READ);         /* skipping is asked first */
}

/* The row with the largest share decides for all. */
static void test_the_largest_share_over_rows_decides(void)
{
    for (int32_t row = 0; row < 6; row++) {
        float reference_lse[6];
        int32_t readings[1] = {HKV_READ_INT8}, int4 = HKV_READ_INT4;
        hkv_cpu_progressive progressive = {1e-3f, 0.05f, reference_lse, 0, 0, 0, 0, 0.0};
        scene *s = scene_create(8, 16, 64, HKV_F16, 15);
        hkv_cpu_query query;
        hkv_cpu_state state;
        scene_add_record(s, 16, HKV_READ_INT8);
        query = query_create(s, 1, 6, 16);
        state = state_create(&query);
        for (int32_t r = 0; r < 6; r++)
            reference_lse[r] = (float)naive_lse(s, &query, r, 0, 1, &int4) + (r == row ? 1.0f : 20.0f);
        kernels->decode(&query, s->sources, 1, &state, &progressive, NULL);
        check_state(s, &query, readings, &state, 1);
        CHECK_INT(progressive.n_refined, 1);
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* Only the tokens that a row sees count, and a record of which no row sees any does not exist. */
static void test_shares_are_of_visible_tokens(void)
{
    scene *s = scene_create(8, 64, 32, HKV_F16, 17);
    hkv_cpu_query query;
    hkv_cpu_state state;
    float reference_lse[1] = {0};
    hkv_cpu_progressive progressive = {0.2f, 0.05f, reference_lse, 0, 0, 0, 0, 0.0};
    const int32_t readings[2] = {HKV_READ_INT8, HKV_READ_INT8};
    s->k_scale = 0;
    scene_add_record(s, 64, HKV_READ_INT8);
    scene_add_record(s, 64, HKV_READ_INT8);
    query = query_create(s, 1, 1, 18);
    query.window_tokens = 8; /* 8 of 128 tokens, all in the second record */
    reference_lse[0] = (float)(naive_lse(s, &query, 0, 1, 2, readings) - log(0.1));
    state = state_create(&query);
    kernels->decode(&query, s->sources, 2, &state, &progressive, NULL);
    CHECK_INT(progressive.n_read, 1);
    CHECK_INT(progressive.n_skipped, 1);
    CHECK(fabs(progressive.skipped_share - 0.1) < 1e-5);
    CHECK(state.max[0] == -INFINITY);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_without_a_hot_part_everything_is_refined(void)
{
    int32_t readings[MAX_SOURCES];
    scene *s = scene_create(8, 16, 64, HKV_F16, 19);
    hkv_cpu_query query;
    hkv_cpu_state state;
    float reference_lse[2] = {-INFINITY, -INFINITY};
    hkv_cpu_progressive progressive = {1e-3f, 0.05f, reference_lse, 0, 0, 0, 0, 0.0};
    for (int32_t i = 0; i < 4; i++) scene_add_record(s, 16, HKV_READ_INT8);
    query = query_create(s, 1, 2, 20);
    state = state_create(&query);
    kernels->decode(&query, s->sources, 4, &state, &progressive, NULL);
    full_readings(s, readings);
    check_state(s, &query, readings, &state, 1);
    CHECK_INT(progressive.n_refined, 4);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

/* The largest share over rows of a record; 0 if no row sees any of it. */
static double naive_share(const scene *s, const hkv_cpu_query *query, int32_t record, const float *reference_lse)
{
    int32_t int4[MAX_SOURCES] = {0};
    double share = 0;
    for (int32_t row = 0; row < query->n_rows; row++)
        share = fmax(share, exp(naive_lse(s, query, row, record, record + 1, int4) - (double)reference_lse[row]));
    return share;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Thresholds that split the n >= 3 shares into three equal parts. */
static void split_shares(const double *shares, int32_t n, float *skip_mass, float *refine_mass)
{
    double sorted[MAX_SOURCES];
    memcpy(sorted, shares, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    *skip_mass = (float)((sorted[n / 3 - 1] + sorted[n / 3]) / 2);
    *refine_mass = (float)((sorted[n - n / 3 - 1] + sorted[n - n / 3]) / 2);
}

/* Random records with shares below, between and above the thresholds, beside pages and tokens of the call. */
static void test_progressive_reading_of_a_row(void)
{
    for (int32_t seed = 0; seed < 8; seed++) {
        int32_t readings[MAX_SOURCES], records[MAX_SOURCES], n_records = 0, n_refined = 0, n_skipped = 0;
        int64_t n_bytes = 0;
        double shares[MAX_SOURCES], skipped_share = 0;
        scene *s = scene_of_row(400, 2, 16, 64, HKV_BF16, (uint64_t)seed);
        hkv_cpu_query query = query_create(s, 2, 3, (uint64_t)seed);
        hkv_cpu_state state = state_create(&query);
        float reference_lse[6];
        hkv_cpu_progressive progressive = {0, 0, reference_lse, 0, 0, 0, 0, 0.0};
        query.window_tokens = seed % 2 ? 150 : 0;
        for (int32_t row = 0; row < 6; row++) reference_lse[row] = 5.0f + 0.1f * (float)row;
        full_readings(s, readings);
        for (int32_t i = 0; i < s->n_sources; i++) {
            if (s->sources[i].kind != HKV_SOURCE_RECORD) continue;
            records[n_records] = i;
            shares[n_records] = naive_share(s, &query, i, reference_lse);
            n_records += shares[n_records] > 0;
        }
        split_shares(shares, n_records, &progressive.skip_mass, &progressive.refine_mass);
        for (int32_t i = 0; i < n_records; i++) {
            int32_t *reading = &readings[records[i]];
            if (shares[i] < (double)progressive.skip_mass) {
                *reading = NOT_READ;
                skipped_share += shares[i];
                n_skipped++;
            } else if (shares[i] < (double)progressive.refine_mass) {
                *reading = HKV_READ_INT4;
            }
            n_refined += *reading > HKV_READ_INT4;
            n_bytes += bytes_of(&s->f, *reading);
        }
        kernels->decode(&query, s->sources, s->n_sources, &state, &progressive, NULL);
        check_state(s, &query, readings, &state, 1);
        CHECK(n_skipped > 0 && n_refined > 0 && n_skipped + n_refined < n_records); /* every outcome occurs */
        CHECK_INT(progressive.n_read, n_records);
        CHECK_INT(progressive.n_skipped, n_skipped);
        CHECK_INT(progressive.n_refined, n_refined);
        CHECK_INT(progressive.n_bytes, n_bytes);
        CHECK(fabs(progressive.skipped_share - skipped_share) <= 1e-9 * skipped_share);
        state_destroy(&state);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* ---------------------------------------------------------------------------------------------------------- bounds */

/* No stored key scores above the bound, and the bound is no larger than the rule makes it. */
static void test_record_bound(void)
{
    for (int32_t i = 0; i < COUNT(HEAD_DIMS); i++) {
        scene *s = scene_create(8, 64, HEAD_DIMS[i], HKV_F16, (uint64_t)i);
        float k[HKV_MAX_HEAD_DIM], lo, hi, bound;
        double expected = -INFINITY;
        hkv_cpu_query query;
        scene_add_record(s, 50, HKV_READ_INT8);
        query = query_create(s, 2, 3, 21);
        query.softmax_scale = 1;
        bound = kernels->record_bound(&query, s->sources[0].data);
        for (int32_t row = 0; row < 6; row++) {
            double sum = 0;
            for (int32_t c = 0; c < HEAD_DIMS[i]; c++) {
                const uint8_t *params = s->sources[0].data + s->f.k_params_offset + 2 * hkv_k_param_index(c);
                double q = (double)query.q[row * s->f.stored_dim + c];
                uint16_t scale, zero;
                memcpy(&scale, params, 2);
                memcpy(&zero, params + 4, 2);
                lo = hkv_f16_to_f32(zero) + 8 * hkv_f16_to_f32(scale);
                hi = hkv_f16_to_f32(zero) + 248 * hkv_f16_to_f32(scale);
                sum += q * (double)(q > 0 ? hi : lo);
            }
            expected = sum > expected ? sum : expected;
            for (int32_t t = 0; t < 50; t++) {
                for (hkv_precision precision = HKV_READ_INT4; precision <= HKV_READ_INT8; precision++) {
                    hkv_record_decode(&s->f, s->sources[0].data, precision, t, 1, k, NULL);
                    CHECK(naive_score(&query, row, k) <= (double)bound * (1 + 1e-6));
                }
            }
        }
        CHECK(fabs((double)bound - expected) <= 1e-6 * expected);
        query_destroy(&query);
        scene_destroy(s);
    }
}

static void test_the_path_describes_itself(void)
{
    CHECK(strcmp(kernels->name, "reference") == 0 && kernels->supported());
    CHECK(kernels->prefill_tile_tokens >= 1);
    CHECK(kernels->record_encode == hkv_record_encode && kernels->record_decode == hkv_record_decode);
}

int main(void)
{
    RUN(test_decode_at_all_lengths);
    RUN(test_decode_with_window_and_soft_cap);
    RUN(test_prefill);
    RUN(test_sources_in_any_order_and_number_of_calls);
    RUN(test_more_sources_than_are_merged_at_once);
    RUN(test_empty_sources_change_nothing);
    RUN(test_uniform_attention_over_a_constant_is_exact);
    RUN(test_large_scores);
    RUN(test_non_finite_tokens_of_the_call);
    RUN(test_shares_on_both_sides_of_the_thresholds);
    RUN(test_the_largest_share_over_rows_decides);
    RUN(test_shares_are_of_visible_tokens);
    RUN(test_without_a_hot_part_everything_is_refined);
    RUN(test_progressive_reading_of_a_row);
    RUN(test_record_bound);
    RUN(test_the_path_describes_itself);
    return test_report();
}
