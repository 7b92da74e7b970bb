/* test_cpu_paths.c - decode, progressive reading, bounds and the choice of every code path of this machine, against the
 * reference. */
#define _POSIX_C_SOURCE 200112L /* setenv */

#include "cpu_dispatch.h"
#include "test_scene.h"

#define COUNT(array) (int32_t)(sizeof(array) / sizeof((array)[0]))

static const hkv_cpu_kernels *kernels; /* the path under test */
static const int32_t lengths[] = {1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161, 700};

/* ------------------------------------------------------------------------------------------------------ comparison */

/* One answer: state, LSE of every source, what was read. */
typedef struct answer {
    hkv_cpu_state state;
    float *source_lse;
    hkv_cpu_progressive progress;
} answer;

static answer answer_of(const hkv_cpu_kernels *path, const scene *s, const hkv_cpu_query *query,
                        const hkv_cpu_progressive *progress)
{
    answer a = {.state = state_create(query),
                .source_lse = malloc((size_t)(s->n_sources * query->n_rows) * sizeof(float))};
    if (progress) a.progress = *progress;
    path->decode(query, s->sources, s->n_sources, &a.state, progress ? &a.progress : NULL, a.source_lse);
    return a;
}

static void answer_destroy(answer *a)
{
    state_destroy(&a->state);
    free(a->source_lse);
}

/* Root of the mean square of the difference of two outputs, over that of the expected one. */
static double output_error(const hkv_cpu_query *query, const answer *actual, const answer *expected)
{
    double difference = 0, size = 0;
    for (int32_t row = 0; row < query->n_rows; row++) {
        if (expected->state.sum[row] == 0) continue;
        for (int32_t c = 0; c < query->format->head_dim; c++) {
            double a = state_out(&actual->state, query->format, row, c);
            double e = state_out(&expected->state, query->format, row, c);
            difference += (a - e) * (a - e);
            size += e * e;
        }
    }
    return size > 0 ? sqrt(difference / size) : 0;
}

static int32_t lse_is_near(double actual, double expected, double tolerance)
{
    if (expected == -INFINITY || actual == -INFINITY) return actual == expected;
    return fabs(actual - expected) <= tolerance * fmax(1, fabs(expected));
}

static void check_lse(const scene *s, const hkv_cpu_query *query, const answer *actual, const answer *expected,
                      double tolerance)
{
    for (int32_t row = 0; row < query->n_rows; row++)
        CHECK(lse_is_near(state_lse(&actual->state, row), state_lse(&expected->state, row), tolerance));
    for (int32_t i = 0; i < s->n_sources * query->n_rows; i++)
        CHECK(lse_is_near((double)actual->source_lse[i], (double)expected->source_lse[i], tolerance));
}

static void check_answers(const scene *s, const hkv_cpu_query *query, const hkv_cpu_progressive *progress,
                          double tolerance)
{
    answer actual = answer_of(kernels, s, query, progress),
           expected = answer_of(&hkv_cpu_reference, s, query, progress);
    CHECK(output_error(query, &actual, &expected) <= tolerance);
    check_lse(s, query, &actual, &expected, tolerance);
    CHECK_INT(actual.progress.n_read, expected.progress.n_read);
    CHECK_INT(actual.progress.n_skipped, expected.progress.n_skipped);
    CHECK_INT(actual.progress.n_refined, expected.progress.n_refined);
    CHECK_INT(actual.progress.n_bytes, expected.progress.n_bytes);
    CHECK(fabs(actual.progress.skipped_share - expected.progress.skipped_share) <=
          tolerance * (1 + expected.progress.skipped_share));
    answer_destroy(&actual);
    answer_destroy(&expected);
}

/* ---------------------------------------------------------------------------------------------------- decode, plain */

static void test_decode_at_all_lengths(void)
{
    for (int32_t i = 0; i < COUNT(lengths); i++) {
        int32_t n_new = i % 8 < lengths[i] ? i % 8 + 1 : 1;
        scene *s = scene_of_row(lengths[i], n_new, 64, 128, (hkv_dtype)(i % 3), (uint64_t)i);
        hkv_cpu_query query = query_create(s, n_new, 4, 7);
        check_answers(s, &query, NULL, 2e-4);
        query_destroy(&query);
        scene_destroy(s);
    }
}

static void test_decode_of_all_head_sizes(void)
{
    for (int32_t head_dim = 16; head_dim <= 256; head_dim += 16) {
        for (int32_t dtype = 0; dtype < 3; dtype++) {
            scene *s = scene_of_row(330, 2, 64, head_dim, (hkv_dtype)dtype, (uint64_t)head_dim);
            hkv_cpu_query query = query_create(s, 2, 3, 9);
            check_answers(s, &query, NULL, 2e-4);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

static void test_decode_of_all_groups_and_block_sizes(void)
{
    static const int32_t groups[] = {1, 2, 3, 4, 5, 7, 8, 71, 256}, block_sizes[] = {8, 16, 40, 64, 512};
    for (int32_t g = 0; g < COUNT(groups); g++) {
        for (int32_t b = 0; b < COUNT(block_sizes); b++) {
            scene *s = scene_of_row(2 * block_sizes[b] + 11, 1, block_sizes[b], 64, HKV_BF16, (uint64_t)g);
            hkv_cpu_query query = query_create(s, 1, groups[g], 3);
            check_answers(s, &query, NULL, 2e-4);
            query_destroy(&query);
            scene_destroy(s);
        }
    }
}

static void test_decode_with_window_and_soft_cap(void)
{
    static const int32_t windows[] = {1, 8, 64, 100, 129, 300};
    for (int32_t w = 0; w < COUNT(windows); w++) {
        scene *s = scene_of_row(333, 5, 64, 96, HKV_F16, (uint64_t)w);
        hkv_cpu_query query = query_create(s, 5, 2, 5);
        query.window_tokens = windows[w];
        query.logits_soft_cap = w % 2 ? 1.5f : 0;
        check_answers(s, &query, NULL, 2e-4);
        query_destroy(&query);
        scene_destroy(s);
    }
}

/* ------------------------------------------------------------------------------------------------ hard to be exact */

static void test_keys_far_from_zero(void)
{
    scene *s = scene_create(8, 64, 128, HKV_BF16, 21);
    hkv_cpu_query query;
    s->k_outlier = 200;
    for (int32_t i = 0; i < 8; i++) scene_add_record(s, 64, (hkv_precision)(i % 3));
    scene_add_tensor(s, 1);
    query = query_create(s, 1, 4, 8);
    check_answers(s, &query, NULL, 4e-4);
    query_destroy(&query);
    scene_destroy(s);
}

/* The first source holds a key that takes all but exp(-12) of each other token's weight, and no value. */
static void test_small_values_behind_a_sink(void)
{
    scene *s = scene_create(8, 64, 64, HKV_F32, 22);
    hkv_cpu_query query;
    uint8_t *sink;
    float k[64], v[64] = {0}, norm = 0;
    s->v_scale = 0.02f;
    scene_add_tensor(s, 1);
    for (int32_t i = 0; i < 60; i++) scene_add_record(s, 64, HKV_READ_INT8);
    s->n_tokens++;
    query = query_create(s, 1, 1, 8);
    for (int32_t c = 0; c < 64; c++) norm += query.q[c] * query.q[c];
    for (int32_t c = 0; c < 64; c++) k[c] = query.q[c] * 12 / (norm * query.softmax_scale);
    sink = s->memory[0];
    memcpy(sink, k, sizeof k);
    memcpy(sink + 2 * sizeof k, v, sizeof v);
    check_answers(s, &query, NULL, 4e-4);
    query_destroy(&query);
    scene_destroy(s);
}

/* The sink inside a record: its neighbours must not drown in the fixed point of the weights. */
static void test_a_sink_inside_a_record(void)
{
    scene *s = scene_create(8, 64, 64, HKV_F32, 23);
    hkv_cpu_query query;
    for (int32_t i = 0; i < 40; i++) scene_add_record(s, 64, HKV_READ_INT8);
    query = query_create(s, 1, 4, 8);
    query.softmax_scale = 2;
    check_answers(s, &query, NULL, 4e-4);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_an_infinite_or_missing_key(void)
{
    scene *s = scene_of_row(200, 3, 64, 64, HKV_F32, 24);
    hkv_cpu_query query = query_create(s, 3, 1, 8);
    uint8_t *k = s->memory[s->n_sources - 1];
    const float nan = NAN, infinity = query.q[2 * 64] > 0 ? -INFINITY : INFINITY;
    hkv_cpu_state state = state_create(&query);
    memcpy(k + 2 * s->sources[s->n_sources - 1].k_stride_bytes, &nan, sizeof nan);
    kernels->decode(&query, s->sources, s->n_sources, &state, NULL, NULL);
    for (int32_t row = 0; row < 3; row++) CHECK(isnan(state.sum[row]) == (row == 2));
    state_destroy(&state);
    state = state_create(&query);
    memcpy(k + 2 * s->sources[s->n_sources - 1].k_stride_bytes, &infinity, sizeof infinity);
    kernels->decode(&query, s->sources, s->n_sources, &state, NULL, NULL);
    CHECK(isfinite(state.sum[2]) && isfinite(state.acc[2 * 64 + 5]));
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_no_tokens_change_nothing(void)
{
    scene *s = scene_of_row(200, 1, 64, 64, HKV_BF16, 25);
    hkv_cpu_query query = query_create(s, 1, 4, 8);
    hkv_cpu_state state = state_create(&query);
    for (int32_t i = 0; i < s->n_sources; i++) s->sources[i].n_tokens = 0;
    kernels->decode(&query, s->sources, s->n_sources, &state, NULL, NULL);
    kernels->decode(&query, s->sources, 0, &state, NULL, NULL);
    for (int32_t row = 0; row < 4; row++) CHECK(state.max[row] == -INFINITY && state.sum[row] == 0);
    for (int32_t i = 0; i < 4 * 64; i++) CHECK(state.acc[i] == 0);
    state_destroy(&state);
    query_destroy(&query);
    scene_destroy(s);
}

/* ----------------------------------------------------------------------------------------------------- progressive */

/* References around which shares fall on all sides of the thresholds. */
static void check_progressive(int32_t length, int32_t n_new, int32_t group, int32_t head_dim, int32_t block_size,
                              float skip_mass, float refine_mass)
{
    scene *s = scene_of_row(length, n_new, block_size, head_dim, HKV_BF16, (uint64_t)(length + group));
    hkv_cpu_query query = query_create(s, n_new, group, 11);
    float *reference_lse = malloc((size_t)query.n_rows * sizeof(float));
    hkv_cpu_progressive progress = {.skip_mass = skip_mass, .refine_mass = refine_mass, .reference_lse = reference_lse};
    query.softmax_scale *= 2;
    for (int32_t row = 0; row < query.n_rows; row++) reference_lse[row] = 9 + 0.25f * (float)(row % 5);
    check_answers(s, &query, &progress, 4e-4);
    free(reference_lse);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_progressive_reading(void)
{
    static const int32_t groups[] = {1, 3, 4, 8, 17, 71};
    for (int32_t g = 0; g < COUNT(groups); g++) {
        check_progressive(3000, 1, groups[g], 128, 64, 1e-2f, 0.1f);
        check_progressive(1500, 3, groups[g], 80, 64, 1e-2f, 0.1f);
        check_progressive(2000, 1, groups[g], 64, 512, 2e-2f, 0);
        check_progressive(700, 2, groups[g], 64, 8, 0, 5e-2f);
        check_progressive(1000, 1, groups[g], 64, 64, 0, 0);
    }
}

static void test_progressive_reading_inside_a_window(void)
{
    scene *s = scene_of_row(1000, 2, 64, 64, HKV_BF16, 31);
    hkv_cpu_query query = query_create(s, 2, 4, 11);
    float reference_lse[8];
    hkv_cpu_progressive progress = {.skip_mass = 1e-2f, .refine_mass = 0.1f, .reference_lse = reference_lse};
    query.window_tokens = 300;
    for (int32_t row = 0; row < 8; row++) reference_lse[row] = 8;
    check_answers(s, &query, &progress, 4e-4);
    progress.skip_mass = progress.refine_mass = 0;
    check_answers(s, &query, &progress, 4e-4);
    query_destroy(&query);
    scene_destroy(s);
}

static void test_without_a_reference_everything_is_refined(void)
{
    scene *s = scene_of_row(400, 1, 64, 64, HKV_BF16, 32);
    hkv_cpu_query query = query_create(s, 1, 4, 11);
    const float reference_lse[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    const hkv_cpu_progressive progress = {.skip_mass = 0.5f, .refine_mass = 0.9f, .reference_lse = reference_lse};
    check_answers(s, &query, &progress, 4e-4);
    query_destroy(&query);
    scene_destroy(s);
}

/* ---------------------------------------------------------------------------------------------------- records, path */

static void test_elements_of_all_dtypes(void)
{
    static const uint32_t special[] = {0,          0x80000000, 0x00000001, 0x007fffff, 0x33000000,
                                       0x33000001, 0x387fe000, 0x387ff000, 0x477fe000, 0x477fefff,
                                       0x477ff000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                       0xffc00000, 0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000};
    float x[333], expected[333], actual[333];
    uint8_t expected_bytes[333 * 4], actual_bytes[333 * 4 + 1];
    uint64_t random = 9;
    for (int32_t i = 0; i < 333; i++)
        x[i] = hkv_float_of_bits(i < COUNT(special) ? special[i] : (uint32_t)(test_random(&random) >> 32));
    for (int32_t i = 0; i < 333; i++)
        if (isnan(x[i])) x[i] = NAN;
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        for (int32_t n = 333; n > 300; n--) {
            size_t n_bytes = (size_t)n * hkv_dtype_bytes((hkv_dtype)dtype);
            actual_bytes[n_bytes] = 0xa5;
            hkv_elements_from_f32((hkv_dtype)dtype, x, n, expected_bytes);
            kernels->elements_from_f32((hkv_dtype)dtype, x, n, actual_bytes);
            CHECK(memcmp(actual_bytes, expected_bytes, n_bytes) == 0 && actual_bytes[n_bytes] == 0xa5);
            hkv_elements_to_f32((hkv_dtype)dtype, expected_bytes, n, expected);
            kernels->elements_to_f32((hkv_dtype)dtype, expected_bytes, n, actual);
            CHECK(memcmp(actual, expected, (size_t)n * sizeof(float)) == 0);
        }
    }
}

static void test_record_bound(void)
{
    for (int32_t head_dim = 16; head_dim <= 256; head_dim += 16) {
        scene *s = scene_create(8, 64, head_dim, HKV_BF16, (uint64_t)head_dim);
        hkv_cpu_query query;
        float actual, expected;
        scene_add_record(s, 50, HKV_READ_INT4);
        query = query_create(s, 1, 5, 8);
        actual = kernels->record_bound(&query, s->memory[0]);
        expected = hkv_cpu_reference.record_bound(&query, s->memory[0]);
        CHECK(fabsf(actual - expected) <= 1e-5f * fabsf(expected));
        query_destroy(&query);
        scene_destroy(s);
    }
}

static void test_choice_of_a_path(void)
{
    const hkv_cpu_kernels *found = NULL;
    hkv_error error;
    int32_t best = 0;
    CHECK_INT(setenv("HYBRIDKV_CPU", "", 1), 0);
    for (int32_t i = 0; i < hkv_cpu_n_paths(); i++) {
        hkv_status expected = hkv_cpu_path_supported(i) ? HKV_OK : HKV_ERR_UNSUPPORTED;
        if (hkv_cpu_path_supported(i)) best = i;
        CHECK_STATUS(hkv_cpu_find_path(hkv_cpu_path_name(i), &found, &error), expected);
        if (expected == HKV_OK) CHECK(found == hkv_cpu_path(i));
    }
    CHECK_OK(hkv_cpu_find_path(NULL, &found, &error));
    CHECK(found == hkv_cpu_path(best));
    CHECK_INT(setenv("HYBRIDKV_CPU", "reference", 1), 0);
    CHECK_OK(hkv_cpu_find_path(NULL, &found, &error));
    CHECK(found == &hkv_cpu_reference);
    CHECK_INT(setenv("HYBRIDKV_CPU", "fast", 1), 0);
    CHECK_ERROR(hkv_cpu_find_path(NULL, &found, &error), HKV_ERR_ARGUMENT, "cpu_path", "HYBRIDKV_CPU");
    CHECK_ERROR(hkv_cpu_find_path("slow", &found, &error), HKV_ERR_ARGUMENT, "cpu_path", "\"slow\"");
    CHECK_INT(unsetenv("HYBRIDKV_CPU"), 0);
    CHECK(hkv_cpu_path_name(-1) == NULL && hkv_cpu_path_name(hkv_cpu_n_paths()) == NULL);
    CHECK(!hkv_cpu_path_supported(-1) && !hkv_cpu_path_supported(hkv_cpu_n_paths()));
}

int main(void)
{
    RUN(test_choice_of_a_path);
    for (int32_t i = 1; i < hkv_cpu_n_paths(); i++) {
        if (!hkv_cpu_path_supported(i)) continue;
        kernels = hkv_cpu_path(i);
        printf("%s\n", kernels->name);
        RUN(test_decode_at_all_lengths);
        RUN(test_decode_of_all_head_sizes);
        RUN(test_decode_of_all_groups_and_block_sizes);
        RUN(test_decode_with_window_and_soft_cap);
        RUN(test_keys_far_from_zero);
        RUN(test_small_values_behind_a_sink);
        RUN(test_a_sink_inside_a_record);
        RUN(test_an_infinite_or_missing_key);
        RUN(test_no_tokens_change_nothing);
        RUN(test_progressive_reading);
        RUN(test_progressive_reading_inside_a_window);
        RUN(test_without_a_reference_everything_is_refined);
        RUN(test_elements_of_all_dtypes);
        RUN(test_record_bound);
    }
    return test_report();
}
