/* test_cache.c - managed mode through hkv.h on the CPU backend.
 *
 * A model keeps every sequence as a plain list of tokens. Keys and values are functions of a token, its position, layer
 * and head, so whatever the cache shares, copies or evicts, it must read back what the list says.
 */
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend.h"
#include "hkv.h"
#include "test.h"

enum { D = 16, HKV = 2, HQ = 4, MAX_LAYERS = 4, MAX_TOKENS = 512, MAX_STEP = 512, MAX_SEQUENCES = 8 };

static const int32_t NO_WINDOWS[MAX_LAYERS] = {0, 0, 0, 0};

/* ------------------------------------------------------------------------------------------------ keys and values */

/* In [-1, 1), exact in every dtype. */
static float element(int64_t token, int64_t position, int32_t layer, int32_t head, int32_t channel, int32_t what)
{
    uint64_t state = (uint64_t)token * 1000003u + (uint64_t)position * 8191u + (uint64_t)layer * 131u +
                     (uint64_t)head * 31u + (uint64_t)channel * 7u + (uint64_t)what;
    return (float)((int32_t)(test_random(&state) & 127) - 64) / 64;
}

enum { IS_K, IS_V, IS_Q };

static void fill_tokens(float *x, const int64_t *tokens, int64_t first, int64_t n, int32_t layer, int32_t n_heads,
                        int32_t what)
{
    for (int64_t i = first; i < first + n; i++)
        for (int32_t head = 0; head < n_heads; head++)
            for (int32_t c = 0; c < D; c++) *x++ = element(tokens[i], i, layer, head, c, what);
}

/* ---------------------------------------------------------------------------------------------------------- model */

typedef struct model_sequence {
    hkv_sequence handle; /* 0 = none */
    int32_t n_tokens;
    int32_t n_named; /* tokens that the cache was told of: n_tokens at least, or more */
    int64_t tokens[MAX_TOKENS];
    int32_t salt;
} model_sequence;

typedef struct fixture {
    hkv_cache *cache;
    hkv_cache_options options;
    int32_t windows[MAX_LAYERS];
    hkv_error error;
    model_sequence sequences[MAX_SEQUENCES];
    uint64_t random;
    float q[MAX_STEP * HQ * D], k[MAX_STEP * HKV * D], v[MAX_STEP * HKV * D], out[MAX_STEP * HQ * D];
    float k_read[MAX_TOKENS * HKV * D], v_read[MAX_TOKENS * HKV * D];
} fixture;

static hkv_cache_options default_options(int32_t bits, int32_t block_size, const int32_t *windows, int32_t n_layers)
{
    hkv_cache_options options = {
        .model = {n_layers, HKV, D, HKV_F32, windows},
        .max_tokens = MAX_TOKENS,
        .max_sequences = MAX_SEQUENCES,
        .max_step_tokens = MAX_STEP,
        .hash_key = {3, 4},
        .prefix_reuse = 1,
        .cpu_path = "reference",
    };
    hkv_config_init(&options.config);
    options.config.quantization_bits = bits;
    options.config.block_size = block_size;
    options.config.hot_tokens = 16;
    options.config.skip_mass = 0;
    options.config.refine_mass = 0;
    return options;
}

static fixture *fixture_create(hkv_cache_options options)
{
    fixture *f = calloc(1, sizeof *f);
    f->options = options;
    f->random = 1;
    memcpy(f->windows, options.model.layer_windows, (size_t)options.model.n_layers * sizeof(int32_t));
    CHECK_OK(hkv_cache_create(&options, &f->cache, &f->error));
    if (f->cache == NULL) {
        printf("%s: %s\n", f->error.argument, f->error.message);
        exit(1);
    }
    return f;
}

static void fixture_destroy(fixture *f)
{
    hkv_cache_destroy(f->cache);
    free(f);
}

static void check_cache(fixture *f)
{
    hkv_status status = hkv_cache_check(f->cache, &f->error);
    CHECK_OK(status);
    if (status == HKV_OK) return;
    printf("%s\n", f->error.message);
    exit(1); /* everything after it would fail too */
}

static hkv_cache_stats read_stats(const fixture *f)
{
    hkv_cache_stats stats;
    hkv_cache_read_stats(f->cache, &stats);
    return stats;
}

static const char *SALTS[] = {"", "a", "tenant-b"};

/* Returns the tokens that were cached, or -1. */
static int64_t add(fixture *f, int32_t s, const int64_t *tokens, int32_t n_tokens, int32_t salt)
{
    model_sequence *m = &f->sequences[s];
    int64_t n_cached = -1;
    hkv_status status = hkv_cache_add_sequence(f->cache, tokens, n_tokens, SALTS[salt], strlen(SALTS[salt]), &m->handle,
                                               &n_cached, &f->error);
    if (status != HKV_OK) return -1;
    CHECK(n_cached >= 0 && (n_cached < n_tokens || n_tokens == 0));
    if (n_tokens > 0) memcpy(m->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
    m->n_tokens = (int32_t)n_cached;
    m->n_named = n_tokens;
    m->salt = salt;
    return n_cached;
}

static void release(fixture *f, int32_t s)
{
    CHECK_OK(hkv_cache_free(f->cache, f->sequences[s].handle, &f->error));
    f->sequences[s].handle = 0;
}

/* ----------------------------------------------------------------------------------------------------------------
 * steps */

typedef struct step_row {
    int32_t sequence, n_new;
} step_row;

/* Begin a step that appends n_new tokens to each row: those that are in the model's list beyond its length. */
static hkv_status begin(fixture *f, const step_row *rows, int32_t n_rows, int32_t with_ids)
{
    hkv_sequence handles[MAX_SEQUENCES];
    int64_t n_tokens[MAX_SEQUENCES], ids[MAX_STEP], *id = ids;
    for (int32_t r = 0; r < n_rows; r++) {
        const model_sequence *m = &f->sequences[rows[r].sequence];
        handles[r] = m->handle;
        n_tokens[r] = rows[r].n_new;
        memcpy(id, m->tokens + m->n_tokens, (size_t)rows[r].n_new * sizeof *id);
        id += rows[r].n_new;
    }
    return hkv_cache_begin(f->cache, handles, n_tokens, n_rows, with_ids ? ids : NULL, 0, NULL, &f->error);
}

static hkv_attend attend_args(fixture *f)
{
    return (hkv_attend){
        .n_q_heads = HQ,
        .q = f->q,
        .k = f->k,
        .v = f->v,
        .out = f->out,
        .q_stride_token = HQ * D,
        .q_stride_head = D,
        .k_stride_token = HKV * D,
        .k_stride_head = D,
        .v_stride_token = HKV * D,
        .v_stride_head = D,
        .out_stride_token = HQ * D,
        .out_stride_head = D,
        .softmax_scale = 0.5f,
    };
}

static void attend_layer(fixture *f, const step_row *rows, int32_t n_rows, int32_t layer)
{
    hkv_attend args = attend_args(f);
    int64_t token = 0;
    for (int32_t r = 0; r < n_rows; r++) {
        const model_sequence *m = &f->sequences[rows[r].sequence];
        fill_tokens(f->q + token * HQ * D, m->tokens, m->n_tokens, rows[r].n_new, layer, HQ, IS_Q);
        fill_tokens(f->k + token * HKV * D, m->tokens, m->n_tokens, rows[r].n_new, layer, HKV, IS_K);
        fill_tokens(f->v + token * HKV * D, m->tokens, m->n_tokens, rows[r].n_new, layer, HKV, IS_V);
        token += rows[r].n_new;
    }
    CHECK_OK(hkv_cache_attend(f->cache, layer, &args, &f->error));
}

/* Plain attention of one query over the model's list. */
static void reference_output(const fixture *f, const model_sequence *m, int32_t position, int32_t layer, int32_t head,
                             double *out)
{
    int32_t window = f->windows[layer], kv_head = head / (HQ / HKV);
    double sum = 0;
    for (int32_t c = 0; c < D; c++) out[c] = 0;
    for (int32_t j = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0; j <= position; j++) {
        double score = 0;
        for (int32_t c = 0; c < D; c++)
            score += (double)element(m->tokens[position], position, layer, head, c, IS_Q) *
                     (double)element(m->tokens[j], j, layer, kv_head, c, IS_K);
        score = exp(0.5 * score);
        sum += score;
        for (int32_t c = 0; c < D; c++) out[c] += score * (double)element(m->tokens[j], j, layer, kv_head, c, IS_V);
    }
    for (int32_t c = 0; c < D; c++) out[c] /= sum;
}

/* The outputs of the layer attended last, at the first and last new token of every row. */
static void check_outputs(fixture *f, const step_row *rows, int32_t n_rows, int32_t layer, double tolerance)
{
    int32_t token = 0;
    for (int32_t r = 0; r < n_rows; token += rows[r].n_new, r++) {
        const model_sequence *m = &f->sequences[rows[r].sequence];
        for (int32_t i = 0; i<rows[r].n_new; i += rows[r].n_new> 1 ? rows[r].n_new - 1 : 1)
            for (int32_t head = 0; head < HQ; head++) {
                const float *out = f->out + ((token + i) * HQ + head) * D;
                double expected[D], error = 0;
                reference_output(f, m, m->n_tokens + i, layer, head, expected);
                for (int32_t c = 0; c < D; c++) error = fmax(error, fabs((double)out[c] - expected[c]));
                CHECK(error <= tolerance);
            }
    }
}

static void commit(fixture *f, const step_row *rows, int32_t n_rows)
{
    CHECK_OK(hkv_cache_end(f->cache, &f->error));
    for (int32_t r = 0; r < n_rows; r++) {
        model_sequence *m = &f->sequences[rows[r].sequence];
        m->n_tokens += rows[r].n_new;
        if (m->n_named < m->n_tokens) m->n_named = m->n_tokens;
    }
}

static double tolerance_of(const fixture *f)
{
    return f->options.config.quantization_bits == 0 ? 1e-5 : 0.02;
}

/* A whole step with outputs checked. */
static void step(fixture *f, const step_row *rows, int32_t n_rows, int32_t with_ids)
{
    CHECK_OK(begin(f, rows, n_rows, with_ids));
    for (int32_t layer = 0; layer < f->options.model.n_layers; layer++) {
        attend_layer(f, rows, n_rows, layer);
        check_outputs(f, rows, n_rows, layer, tolerance_of(f));
    }
    commit(f, rows, n_rows);
    check_cache(f);
}

static void step_one(fixture *f, int32_t s, int32_t n_new)
{
    step(f, &(step_row){s, n_new}, 1, 1);
}

/* What the cache holds of a sequence, in all layers, is what the model's list says. */
static void check_content(fixture *f, int32_t s)
{
    const model_sequence *m = &f->sequences[s];
    int32_t blocks[MAX_TOKENS], block_size = f->options.config.block_size;
    int64_t length = -1;
    CHECK_OK(hkv_cache_sequence_length(f->cache, m->handle, &length, &f->error));
    CHECK_INT(length, m->n_tokens);
    for (int32_t layer = 0; layer < f->options.model.n_layers; layer++) {
        int64_t n_blocks = MAX_TOKENS;
        CHECK_OK(hkv_cache_read_table(f->cache, m->handle, layer, blocks, &n_blocks, &f->error));
        CHECK_INT(n_blocks, (m->n_tokens + block_size - 1) / block_size);
        int32_t first = 0;
        while (first < n_blocks && blocks[first] == 0) first++;
        first *= block_size;
        int32_t first_visible = f->windows[layer] == 0 ? 0 : m->n_tokens - f->windows[layer] + 1;
        CHECK(first <= (first_visible > 0 ? first_visible : 0)); /* what the next query sees is there */
        int32_t n = m->n_tokens - first;
        CHECK_OK(hkv_cache_read_tokens(f->cache, m->handle, layer, first, n, f->k_read, f->v_read, &f->error));
        float worst = 0;
        for (int32_t i = 0; i < n; i++)
            for (int32_t head = 0; head < HKV; head++)
                for (int32_t c = 0; c < D; c++) {
                    int32_t at = (i * HKV + head) * D + c, position = first + i;
                    int64_t token = m->tokens[position];
                    worst = fmaxf(worst, fabsf(f->k_read[at] - element(token, position, layer, head, c, IS_K)));
                    worst = fmaxf(worst, fabsf(f->v_read[at] - element(token, position, layer, head, c, IS_V)));
                }
        CHECK(worst <= (f->options.config.quantization_bits == 0 ? 0.0f : 0.02f));
    }
}

/* Append until the sequence has all tokens of its list up to n_tokens, `chunk` at a time. */
static void append_up_to(fixture *f, int32_t s, int32_t n_tokens, int32_t chunk)
{
    while (f->sequences[s].n_tokens < n_tokens) {
        int32_t left = n_tokens - f->sequences[s].n_tokens;
        step_one(f, s, left < chunk ? left : chunk);
    }
    check_content(f, s);
}

static void count_up(int64_t *tokens, int32_t n, int64_t first)
{
    for (int32_t i = 0; i < n; i++) tokens[i] = first + i;
}

/* ---------------------------------------------------------------------------------------------------- life cycles */

static void run_life_cycle(int32_t bits, int32_t block_size, const int32_t *windows, int32_t chunk)
{
    fixture *f = fixture_create(default_options(bits, block_size, windows, 2));
    int64_t tokens[200];
    count_up(tokens, 200, 5);
    CHECK_INT(add(f, 0, tokens, 150, 0), 0);
    append_up_to(f, 0, 150, chunk);
    CHECK_OK(hkv_cache_fork(f->cache, f->sequences[0].handle, &f->sequences[1].handle, &f->error));
    hkv_sequence handle = f->sequences[1].handle;
    f->sequences[1] = f->sequences[0];
    f->sequences[1].handle = handle;
    for (int32_t i = 150; i < 180; i++) {
        f->sequences[0].tokens[i] = 1000 + i;
        f->sequences[1].tokens[i] = 2000 + i;
    }
    step(f, (step_row[]){{1, 3}, {0, 5}}, 2, 1);
    append_up_to(f, 0, 180, 7);
    append_up_to(f, 1, 180, 1);
    check_content(f, 0);
    CHECK_OK(hkv_cache_truncate(f->cache, handle, 175, &f->error));
    f->sequences[1].n_tokens = 175;
    check_cache(f);
    check_content(f, 1);
    append_up_to(f, 1, 180, 2);
    release(f, 0);
    check_cache(f);
    append_up_to(f, 1, 180, 5);
    release(f, 1);
    check_cache(f);
    hkv_cache_stats stats = read_stats(f);
    CHECK_INT(stats.n_sequences, 0);
    CHECK_INT(stats.n_blocks_live, 0);
    CHECK(stats.n_blocks_cached > 0);
    fixture_destroy(f);
}

static void test_life_cycles(void)
{
    const int32_t windows[][2] = {{0, 0}, {0, 8}, {64, 0}, {100, 64}, {0, 1}};
    const int32_t chunks[] = {1, 9, 64, 150};
    for (size_t w = 0; w < sizeof windows / sizeof *windows; w++)
        for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
            run_life_cycle(0, 64, windows[w], chunks[i]);
            run_life_cycle(8, 64, windows[w], chunks[i]);
            run_life_cycle(0, 16, windows[w], chunks[i]);
        }
}

static void test_empty_steps_change_nothing(void)
{
    fixture *f = fixture_create(default_options(8, 64, NO_WINDOWS, 1));
    int64_t tokens[100];
    count_up(tokens, 100, 0);
    hkv_attend args = attend_args(f);
    add(f, 0, tokens, 100, 0);
    append_up_to(f, 0, 70, 70);
    CHECK_OK(hkv_cache_begin(f->cache, NULL, NULL, 0, NULL, 0, NULL, &f->error));
    CHECK_INT(hkv_cache_step_tokens(f->cache), 0);
    CHECK_OK(hkv_cache_attend(f->cache, 0, &args, &f->error));
    CHECK_OK(hkv_cache_end(f->cache, &f->error));
    add(f, 1, NULL, 0, 0);
    step(f, (step_row[]){{1, 0}, {0, 0}}, 2, 0);
    step(f, (step_row[]){{1, 0}, {0, 10}}, 2, 0);
    check_content(f, 0);
    check_content(f, 1);
    CHECK_OK(begin(f, (step_row[]){{0, 10}, {1, 0}}, 2, 1));
    CHECK_INT(hkv_cache_step_tokens(f->cache), 10);
    CHECK_INT(hkv_cache_step_max_length(f->cache), 90);
    CHECK_OK(hkv_cache_abort(f->cache, &f->error));
    CHECK_INT(hkv_cache_step_max_length(f->cache), 0);
    fixture_destroy(f);
}

/* --------------------------------------------------------------------------------------------------- prefix reuse */

static void test_prefixes_are_reused(void)
{
    fixture *f = fixture_create(default_options(0, 16, NO_WINDOWS, 2));
    int64_t tokens[100];
    count_up(tokens, 100, 0);
    CHECK_INT(add(f, 0, tokens, 60, 0), 0);
    append_up_to(f, 0, 60, 60);
    CHECK_INT(add(f, 1, tokens, 60, 0), 48); /* full blocks of a live sequence; never the last token */
    append_up_to(f, 1, 60, 60);
    CHECK_INT(add(f, 2, tokens, 48, 0), 47);
    append_up_to(f, 2, 48, 1);
    CHECK_INT(add(f, 3, tokens, 100, 1), 0); /* another tenant */
    release(f, 3);
    for (int32_t s = 0; s < 3; s++) release(f, s);
    check_cache(f);
    CHECK_INT(add(f, 0, tokens, 100, 0), 60); /* and the partial tail of a freed one */
    append_up_to(f, 0, 100, 13);
    tokens[50] = 777;
    CHECK_INT(add(f, 1, tokens, 100, 0), 50);
    append_up_to(f, 1, 100, 50);
    check_content(f, 0);
    hkv_cache_stats stats = read_stats(f);
    CHECK_INT(stats.n_prefix_hits, 48 + 47 + 60 + 50);
    CHECK_INT(stats.n_prefix_queries, 60 + 60 + 48 + 100 + 100 + 100);
    fixture_destroy(f);
}

static void test_reuse_can_be_off(void)
{
    hkv_cache_options options = default_options(0, 16, NO_WINDOWS, 1);
    options.prefix_reuse = 0;
    fixture *f = fixture_create(options);
    int64_t tokens[64];
    count_up(tokens, 64, 0);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_INT(add(f, 0, tokens, 64, 0), 0);
        append_up_to(f, 0, 64, 30);
        release(f, 0);
        check_cache(f);
        CHECK_INT(read_stats(f).n_blocks_cached, 0);
    }
    CHECK_INT(read_stats(f).prefix_bytes, 0);
    fixture_destroy(f);
}

/* Tokens that nobody named end what can be found. */
static void test_unknown_tokens_are_not_found(void)
{
    fixture *f = fixture_create(default_options(0, 16, NO_WINDOWS, 1));
    int64_t tokens[100];
    count_up(tokens, 100, 0);
    add(f, 0, tokens, 40, 0);
    memcpy(f->sequences[0].tokens, tokens, sizeof tokens);
    step(f, &(step_row){0, 100}, 1, 0); /* 40 named by add_sequence, 60 by nobody */
    release(f, 0);
    CHECK_INT(add(f, 0, tokens, 100, 0), 32);
    fixture_destroy(f);
}

/* A step's own ids count more than what was announced. */
static void test_ids_of_a_step_replace_announced_ones(void)
{
    fixture *f = fixture_create(default_options(0, 16, NO_WINDOWS, 1));
    int64_t tokens[64], other[64];
    count_up(tokens, 64, 0);
    count_up(other, 64, 100);
    add(f, 0, tokens, 64, 0);
    memcpy(f->sequences[0].tokens, other, sizeof other);
    step(f, &(step_row){0, 32}, 1, 1);
    step(f, &(step_row){0, 32}, 1, 0);
    release(f, 0);
    CHECK_INT(add(f, 0, tokens, 64, 0), 0);
    CHECK_INT(add(f, 1, other, 64, 0), 32);
    fixture_destroy(f);
}

static void test_least_recently_used_blocks_go_first(void)
{
    hkv_cache_options options = default_options(0, 16, NO_WINDOWS, 1);
    options.max_tokens = 8 * 16;
    options.max_sequences = 1;
    fixture *f = fixture_create(options);
    CHECK_INT(read_stats(f).n_blocks_total, 8);
    int64_t a[65], b[65], c[65];
    count_up(a, 65, 0);
    count_up(b, 65, 100);
    count_up(c, 65, 200);
    const int64_t *const order[] = {a, b, a};
    for (int32_t i = 0; i < 3; i++) { /* a is used last, b is in the way */
        add(f, 0, order[i], 65, 0);
        append_up_to(f, 0, 64, 64);
        release(f, 0);
    }
    CHECK_INT(read_stats(f).n_blocks_cached, 8);
    add(f, 0, c, 32, 0); /* takes the last two blocks of b */
    append_up_to(f, 0, 32, 32);
    release(f, 0);
    check_cache(f);
    CHECK_INT(read_stats(f).n_prefix_evictions, 2);
    CHECK_INT(add(f, 0, a, 65, 0), 64);
    release(f, 0);
    CHECK_INT(add(f, 0, b, 65, 0), 32);
    fixture_destroy(f);
}

static void test_windows_reuse_only_what_all_layers_hold(void)
{
    const int32_t windows[] = {0, 24};
    fixture *f = fixture_create(default_options(8, 16, windows, 2));
    int64_t tokens[160];
    count_up(tokens, 160, 0);
    add(f, 0, tokens, 128, 0);
    append_up_to(f, 0, 128, 128); /* in one chunk: the windowed layer keeps the last blocks only */
    CHECK_INT(add(f, 1, tokens, 64, 0), 0);
    CHECK_INT(add(f, 2, tokens, 160, 0), 128);
    append_up_to(f, 2, 160, 32);
    release(f, 1);
    append_up_to(f, 0, 128, 1);
    add(f, 1, tokens, 64, 1);
    append_up_to(f, 1, 64, 1); /* token by token: every window was there once */
    CHECK_INT(add(f, 3, tokens, 40, 1), 39);
    append_up_to(f, 3, 40, 1);
    fixture_destroy(f);
}

/* -------------------------------------------------------------------------------------------- copying and sharing */

static int64_t live_blocks(const fixture *f)
{
    return read_stats(f).n_blocks_live;
}

static void test_forks_share_until_they_write(void)
{
    fixture *f = fixture_create(default_options(8, 16, NO_WINDOWS, 1));
    int64_t tokens[100];
    count_up(tokens, 100, 0);
    add(f, 0, tokens, 40, 0);
    append_up_to(f, 0, 40, 40);
    CHECK_INT(live_blocks(f), 3);
    for (int32_t s = 1; s < 4; s++) {
        f->sequences[s] = f->sequences[0];
        CHECK_OK(hkv_cache_fork(f->cache, f->sequences[0].handle, &f->sequences[s].handle, &f->error));
        for (int32_t i = 40; i < 60; i++) f->sequences[s].tokens[i] = 100 * s + i;
    }
    CHECK_INT(live_blocks(f), 3);
    step_one(f, 1, 1);
    CHECK_INT(live_blocks(f), 4);
    step(f, (step_row[]){{0, 1}, {2, 2}, {3, 20}}, 3, 1); /* all in one step */
    CHECK_INT(live_blocks(f), 2 + 5);
    for (int32_t s = 0; s < 4; s++) check_content(f, s);
    for (int32_t s = 3; s >= 0; s--) release(f, s);
    check_cache(f);
    CHECK_INT(live_blocks(f), 0);
    fixture_destroy(f);
}

static void test_reorder_moves_content(void)
{
    const int32_t windows[] = {0, 8};
    fixture *f = fixture_create(default_options(0, 16, windows, 2));
    hkv_sequence handles[4];
    int32_t lengths[] = {20, 40, 61, 1};
    for (int32_t s = 0; s < 4; s++) {
        int64_t tokens[100];
        count_up(tokens, 100, 1000 * s);
        add(f, s, tokens, lengths[s], 0);
        append_up_to(f, s, lengths[s], 17);
        handles[s] = f->sequences[s].handle;
    }
    const int32_t sources[][4] = {{1, 0, 3, 2}, {0, 1, 2, 3}, {2, 0, 0, 1}, {3, 3, 3, 3}};
    for (int32_t i = 0; i < 4; i++) {
        model_sequence before[4];
        memcpy(before, f->sequences, sizeof before);
        CHECK_OK(hkv_cache_reorder(f->cache, handles, sources[i], 4, &f->error));
        for (int32_t s = 0; s < 4; s++) {
            f->sequences[s] = before[sources[i][s]];
            f->sequences[s].handle = handles[s];
            f->sequences[s].tokens[f->sequences[s].n_tokens] = 9000 + s;
        }
        check_cache(f);
        for (int32_t s = 0; s < 4; s++) check_content(f, s);
        step(f, (step_row[]){{0, 1}, {1, 1}, {2, 1}, {3, 1}}, 4, 1);
    }
    fixture_destroy(f);
}

/* Every cut and every number of tokens written after it. */
static void run_truncations(int32_t bits, const int32_t *windows)
{
    fixture *f = fixture_create(default_options(bits, 16, windows, 2));
    int64_t tokens[64];
    count_up(tokens, 64, 0);
    for (int32_t cut = 41; cut <= 50; cut++)
        for (int32_t n_new = 1; n_new <= 9; n_new += 4) {
            add(f, 0, tokens, 50, 0);
            append_up_to(f, 0, 50, 9);
            CHECK_OK(hkv_cache_truncate(f->cache, f->sequences[0].handle, cut, &f->error));
            f->sequences[0].n_tokens = cut;
            check_cache(f);
            check_content(f, 0);
            for (int32_t i = cut; i < 64; i++) f->sequences[0].tokens[i] = 500 + i;
            append_up_to(f, 0, cut + n_new, n_new);
            release(f, 0);
            check_cache(f);
        }
    fixture_destroy(f);
}

static void test_truncated_blocks_are_written_again(void)
{
    const int32_t windows[] = {0, 20};
    run_truncations(0, windows);
    run_truncations(8, windows);
}

static void test_truncation_stops_at_the_window(void)
{
    const int32_t windows[] = {0, 20};
    fixture *f = fixture_create(default_options(0, 16, windows, 2));
    int64_t tokens[200];
    hkv_error error;
    count_up(tokens, 200, 0);
    add(f, 0, tokens, 200, 0);
    append_up_to(f, 0, 200, 200);
    hkv_sequence handle = f->sequences[0].handle;
    CHECK_ERROR(hkv_cache_truncate(f->cache, handle, 100, &error), HKV_ERR_ARGUMENT, "n_tokens", "window of 20");
    CHECK_ERROR(hkv_cache_truncate(f->cache, handle, 201, &error), HKV_ERR_ARGUMENT, "n_tokens", "200");
    check_content(f, 0);
    CHECK_OK(hkv_cache_truncate(f->cache, handle, 200 - 16, &error)); /* a block's worth can be taken back */
    f->sequences[0].n_tokens = 184;
    check_content(f, 0);
    CHECK_OK(hkv_cache_truncate(f->cache, handle, 0, &error));
    f->sequences[0].n_tokens = 0;
    check_content(f, 0);
    append_up_to(f, 0, 64, 5);
    fixture_destroy(f);
}

/* ------------------------------------------------------------------------------------------------ full and failed */

static void test_full_cache_can_be_retried(void)
{
    hkv_cache_options options = default_options(8, 16, NO_WINDOWS, 1);
    options.max_tokens = 100;
    options.max_sequences = 2;
    fixture *f = fixture_create(options);
    int64_t tokens[100];
    hkv_error error;
    count_up(tokens, 100, 0);
    add(f, 0, tokens, 50, 0);
    append_up_to(f, 0, 50, 50);
    count_up(tokens, 100, 1000);
    add(f, 1, tokens, 100, 0);
    CHECK(add(f, 2, tokens, 10, 0) < 0); /* no third sequence */
    append_up_to(f, 1, 60, 60);
    hkv_cache_stats before = read_stats(f);
    hkv_sequence handles[] = {f->sequences[0].handle, f->sequences[1].handle};
    CHECK_ERROR(hkv_cache_begin(f->cache, handles, (int64_t[]){1, 40}, 2, NULL, 0, NULL, &error), HKV_ERR_CACHE_FULL,
                "sequences", "blocks");
    hkv_cache_stats after = read_stats(f);
    CHECK_INT(memcmp(&before, &after, sizeof before), 0);
    check_cache(f);
    check_content(f, 0);
    check_content(f, 1);
    release(f, 0);
    append_up_to(f, 1, 100, 40);
    fixture_destroy(f);
}

/* The last sequence can use every block, also where one of them is findable and would be copied if there were room. */
static void test_one_sequence_can_fill_the_cache(void)
{
    hkv_cache_options options = default_options(8, 16, NO_WINDOWS, 1);
    options.max_tokens = 96;
    options.max_sequences = 1;
    fixture *f = fixture_create(options);
    int64_t tokens[97];
    hkv_error error;
    count_up(tokens, 97, 0);
    CHECK_INT(read_stats(f).max_tokens, 96);
    add(f, 0, tokens, 97, 0);
    append_up_to(f, 0, 96, 96);
    CHECK_STATUS(begin(f, &(step_row){0, 1}, 1, 0), HKV_ERR_CACHE_FULL);
    CHECK_OK(hkv_cache_truncate(f->cache, f->sequences[0].handle, 90, &error));
    f->sequences[0].n_tokens = 90;
    for (int32_t i = 90; i < 96; i++) f->sequences[0].tokens[i] = 300 + i;
    append_up_to(f, 0, 96, 3);
    release(f, 0);
    CHECK_INT(add(f, 0, tokens, 97, 0), 90);
    fixture_destroy(f);
}

/* A step that fails after any number of layers leaves everybody as they were. */
static void run_failed_steps(int32_t bits, size_t hot_memory_bytes)
{
    const int32_t windows[] = {0, 24, 0};
    hkv_cache_options options = default_options(bits, 16, windows, 3);
    options.hot_memory_bytes = hot_memory_bytes;
    fixture *f = fixture_create(options);
    for (int32_t s = 0; s < 4; s++) {
        int64_t tokens[MAX_TOKENS];
        count_up(tokens, MAX_TOKENS, 1000 * s);
        memcpy(f->sequences[s].tokens, tokens, sizeof tokens);
        add(f, s, tokens, 90, 0);
        append_up_to(f, s, 21 + s, 30);
    }
    f->sequences[4] = f->sequences[0];
    CHECK_OK(hkv_cache_fork(f->cache, f->sequences[0].handle, &f->sequences[4].handle, &f->error));
    for (int32_t n_layers = 0; n_layers <= 3; n_layers++)
        for (int32_t n_new = 1; n_new <= 61; n_new += 12) {
            const step_row rows[] = {{0, 1}, {4, n_new}};
            hkv_cache_stats before = read_stats(f);
            CHECK_OK(begin(f, rows, 2, 0));
            check_cache(f);
            for (int32_t layer = 0; layer < n_layers; layer++) attend_layer(f, rows, 2, layer);
            CHECK_OK(n_layers == 3 ? hkv_cache_abort(f->cache, &f->error) : hkv_cache_end(f->cache, &f->error));
            check_cache(f);
            CHECK_INT(read_stats(f).n_blocks_live, before.n_blocks_live);
            CHECK_INT(read_stats(f).n_tokens, before.n_tokens);
            for (int32_t s = 0; s < 5; s++) check_content(f, s);
            step(f, (step_row[]){{1, 1}, {2, 1}, {3, 1}}, 3, 0);
        }
    for (int32_t s = 0; s < 5; s++) append_up_to(f, s, 90, 11);
    fixture_destroy(f);
}

/* One hot page in each group: a step that writes to two partial blocks is refused by a store, after the blocks were
 * reserved and perhaps after another store has begun. */
static void test_step_without_hot_pages_is_refused(void)
{
    const int32_t windows[] = {0, 24};
    hkv_cache_options options = default_options(8, 16, windows, 2);
    options.hot_memory_bytes = 1;
    fixture *f = fixture_create(options);
    CHECK_INT(read_stats(f).n_hot_pages_total, 2);
    for (int32_t s = 0; s < 2; s++) {
        int64_t tokens[60];
        count_up(tokens, 60, 1000 * s);
        add(f, s, tokens, 60, 0);
        append_up_to(f, s, 21, 1);
    }
    CHECK_STATUS(begin(f, (step_row[]){{0, 1}, {1, 1}}, 2, 1), HKV_ERR_CACHE_FULL);
    CHECK_TEXT(f->error.message, "hot pages");
    check_cache(f);
    for (int32_t s = 0; s < 2; s++) check_content(f, s);
    CHECK_INT(read_stats(f).n_hot_pages_used, 2);
    for (int32_t i = 22; i < 40; i++)
        for (int32_t s = 0; s < 2; s++) append_up_to(f, s, i, 1);
    fixture_destroy(f);
}

static void test_failed_steps_roll_back(void)
{
    run_failed_steps(0, 0);
    run_failed_steps(8, 0);
    run_failed_steps(8, 4 * 3 * HKV * 16 * 2 * 32 * 4); /* four pages: partial pages give way all the time */
}

/* ------------------------------------------------------------------------------------------------------ bad input */

static void test_misuse_is_refused(void)
{
    fixture *f = fixture_create(default_options(8, 16, NO_WINDOWS, 2));
    fixture *other = fixture_create(default_options(8, 16, NO_WINDOWS, 2));
    int64_t tokens[40], n_cached, n_blocks;
    hkv_error error;
    hkv_sequence out;
    hkv_attend args = attend_args(f);
    uint8_t tiers[8];
    hkv_cache *c = f->cache;
    count_up(tokens, 40, 0);
    add(f, 0, tokens, 40, 0);
    add(f, 1, tokens, 40, 0);
    add(other, 0, tokens, 40, 0);
    append_up_to(f, 0, 20, 20);
    hkv_sequence s = f->sequences[0].handle, t = f->sequences[1].handle, foreign = other->sequences[0].handle;
    int64_t one[] = {1, 1};

    /* handles */
    CHECK_ERROR(hkv_cache_free(c, 0, &error), HKV_ERR_STALE, "sequence", "0x0");
    CHECK_ERROR(hkv_cache_free(c, foreign, &error), HKV_ERR_STALE, "sequence", "freed");
    CHECK_ERROR(hkv_cache_fork(c, s + (1ull << 32), &out, &error), HKV_ERR_STALE, "sequence", "");
    CHECK_ERROR(hkv_cache_truncate(c, s + 100, 0, &error), HKV_ERR_STALE, "sequence", "");
    CHECK_OK(hkv_cache_free(c, t, &error));
    CHECK_ERROR(hkv_cache_free(c, t, &error), HKV_ERR_STALE, "sequence", "");
    add(f, 1, tokens, 40, 0);
    CHECK((f->sequences[1].handle & 0xffffffff) == (t & 0xffffffff)); /* the same slot */
    CHECK_ERROR(hkv_cache_free(c, t, &error), HKV_ERR_STALE, "sequence", "");
    t = f->sequences[1].handle;

    /* arguments */
    CHECK_ERROR(hkv_cache_begin(c, (hkv_sequence[]){s, s}, one, 2, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT,
                "sequences", "same");
    CHECK_ERROR(hkv_cache_begin(c, (hkv_sequence[]){t, foreign}, one, 2, NULL, 0, NULL, &error), HKV_ERR_STALE,
                "sequences", "");
    CHECK_ERROR(hkv_cache_begin(c, &s, (int64_t[]){-1}, 1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "n_tokens", "-1");
    CHECK_ERROR(hkv_cache_begin(c, &s, (int64_t[]){INT64_MAX}, 1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "n_tokens",
                "max_step_tokens = 512");
    CHECK_ERROR(hkv_cache_begin(c, &s, one, -1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "sequences", "-1");
    CHECK_ERROR(hkv_cache_begin(c, &s, one, MAX_SEQUENCES + 1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "sequences",
                "9");
    CHECK_ERROR(hkv_cache_begin(c, NULL, one, 1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "sequences", "");
    CHECK_ERROR(hkv_cache_begin(c, &s, NULL, 1, NULL, 0, NULL, &error), HKV_ERR_ARGUMENT, "n_tokens", "NULL");
    CHECK_ERROR(hkv_cache_begin(c, &s, one, 1, (int64_t[]){-5}, 0, NULL, &error), HKV_ERR_ARGUMENT, "token_ids", "-5");
    CHECK_ERROR(hkv_cache_add_sequence(c, (int64_t[]){1, -2}, 2, NULL, 0, &out, &n_cached, &error), HKV_ERR_ARGUMENT,
                "token_ids", "token_ids[1] = -2");
    CHECK_ERROR(hkv_cache_add_sequence(c, tokens, -1, NULL, 0, &out, &n_cached, &error), HKV_ERR_ARGUMENT, "n_tokens",
                "-1");
    CHECK_ERROR(hkv_cache_add_sequence(c, NULL, 3, NULL, 0, &out, &n_cached, &error), HKV_ERR_ARGUMENT, "token_ids",
                "NULL");
    CHECK_ERROR(hkv_cache_add_sequence(c, tokens, 3, NULL, 1, &out, &n_cached, &error), HKV_ERR_ARGUMENT, "salt", "");
    CHECK_ERROR(hkv_cache_reorder(c, &s, (int32_t[]){1}, 1, &error), HKV_ERR_RANGE, "source_idx", "0..0");
    CHECK_ERROR(hkv_cache_reorder(c, &s, NULL, 1, &error), HKV_ERR_ARGUMENT, "source_idx", "NULL");
    CHECK_ERROR(hkv_cache_read_tokens(c, s, 0, 15, 6, f->k_read, f->v_read, &error), HKV_ERR_RANGE, "n_tokens", "20");
    CHECK_ERROR(hkv_cache_read_tokens(c, s, 2, 0, 1, f->k_read, f->v_read, &error), HKV_ERR_RANGE, "layer_idx", "0..1");
    CHECK_ERROR(hkv_cache_set_tier(c, s, 0, 0, 2, HKV_TIER_L2, &error), HKV_ERR_RANGE, "logical_block", "2");
    n_blocks = 1;
    CHECK_ERROR(hkv_cache_read_tiers(c, s, 0, 0, tiers, &n_blocks, &error), HKV_ERR_ARGUMENT, "n_blocks", "2 blocks");
    CHECK_INT(n_blocks, 2);

    /* order of calls */
    CHECK_ERROR(hkv_cache_attend(c, 0, &args, &error), HKV_ERR_STATE, "cache", "no step");
    CHECK_ERROR(hkv_cache_end(c, &error), HKV_ERR_STATE, "cache", "no step");
    CHECK_ERROR(hkv_cache_abort(c, &error), HKV_ERR_STATE, "cache", "no step");
    CHECK_OK(hkv_cache_begin(c, &s, one, 1, NULL, 0, NULL, &error));
    CHECK_ERROR(hkv_cache_begin(c, &t, one, 1, NULL, 0, NULL, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_add_sequence(c, tokens, 3, NULL, 0, &out, &n_cached, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_free(c, t, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_fork(c, t, &out, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_truncate(c, t, 0, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_reorder(c, &t, (int32_t[]){0}, 1, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_reset(c, &error), HKV_ERR_STATE, "cache", "open");
    CHECK_ERROR(hkv_cache_attend(c, 2, &args, &error), HKV_ERR_RANGE, "layer_idx", "2");
    CHECK_ERROR(hkv_cache_attend(c, 0, NULL, &error), HKV_ERR_ARGUMENT, "args", "NULL");
    args.n_q_heads = 3;
    CHECK_ERROR(hkv_cache_attend(c, 0, &args, &error), HKV_ERR_ARGUMENT, "n_q_heads", "3");
    args.n_q_heads = HQ;
    CHECK_OK(hkv_cache_attend(c, 0, &args, &error)); /* the failed try did not count */
    CHECK_ERROR(hkv_cache_attend(c, 0, &args, &error), HKV_ERR_STATE, "layer_idx", "already");
    CHECK_OK(hkv_cache_abort(c, &error));
    check_cache(f);
    check_content(f, 0);
    fixture_destroy(other);
    fixture_destroy(f);
}

static void expect_refused(const hkv_cache_options *options, hkv_status status, const char *name, const char *part)
{
    hkv_cache *cache = (hkv_cache *)options;
    hkv_error error;
    CHECK_ERROR(hkv_cache_create(options, &cache, &error), status, name, part);
    CHECK(cache == NULL);
}

static void test_options_are_checked(void)
{
    const hkv_cache_options good = default_options(8, 64, NO_WINDOWS, 2);
    hkv_cache_options bad;
    expect_refused(NULL, HKV_ERR_ARGUMENT, "options", "NULL");
#define REFUSED(field, value, status, name, part)                                                                      \
    bad = good, bad.field = value, expect_refused(&bad, status, name, part)
    REFUSED(model.n_layers, 0, HKV_ERR_ARGUMENT, "model.n_layers", "not 0");
    REFUSED(model.n_kv_heads, -1, HKV_ERR_ARGUMENT, "model.n_kv_heads", "-1");
    REFUSED(model.head_dim, 100, HKV_ERR_ARGUMENT, "model.head_dim", "multiple of 16");
    REFUSED(model.head_dim, 512, HKV_ERR_ARGUMENT, "model.head_dim", "512");
    REFUSED(model.dtype, (hkv_dtype)9, HKV_ERR_TYPE, "model.dtype", "9");
    REFUSED(max_sequences, 0, HKV_ERR_ARGUMENT, "max_sequences", "0");
    REFUSED(max_tokens, -1, HKV_ERR_ARGUMENT, "max_tokens", "-1");
    REFUSED(max_tokens, 0, HKV_ERR_ARGUMENT, "memory_bytes", "bound");
    REFUSED(max_step_tokens, MAX_SEQUENCES - 1, HKV_ERR_ARGUMENT, "max_step_tokens", "7");
    REFUSED(config.hot_tokens, 33, HKV_ERR_ARGUMENT, "hot_tokens", "33");
    REFUSED(test_hash_bits, 64, HKV_ERR_ARGUMENT, "test_hash_bits", "64");
    REFUSED(memory_bytes, 1000, HKV_ERR_BUDGET_SMALL, "memory_bytes", "1000 is too small");
    REFUSED(model.layer_windows, ((const int32_t[]){0, -4}), HKV_ERR_ARGUMENT, "model.layer_windows", "-4");
    REFUSED(device_index, 1, HKV_ERR_NO_DEVICE, "device_index", "1");
    REFUSED(cpu_path, "abacus", HKV_ERR_ARGUMENT, "cpu_path", "abacus");
#undef REFUSED
    int32_t windows[9];
    for (int32_t i = 0; i < 9; i++) windows[i] = i + 1;
    bad = good;
    bad.model.n_layers = 9;
    bad.model.layer_windows = windows;
    expect_refused(&bad, HKV_ERR_UNSUPPORTED, "model.layer_windows", "different");
}

static void *call_from_thread(void *cache)
{
    static hkv_error error; /* of this thread alone */
    return hkv_cache_check(cache, &error) == HKV_ERR_BUSY ? cache : NULL;
}

/* An allocator cannot be re-entered on a live cache, but a backend can: it calls back in the middle of attend. */
static hkv_cache *reentered;
static hkv_status reentered_status;
static void *thread_result;
static hkv_status attend_and_reenter(hkv_group *group, const hkv_batch *batch, int32_t layer_idx,
                                     const hkv_attend *args, hkv_error *error)
{
    pthread_t thread;
    reentered_status = hkv_cache_reset(reentered, NULL);
    pthread_create(&thread, NULL, call_from_thread, reentered);
    pthread_join(thread, &thread_result);
    return hkv_backend_cpu()->attend(group, batch, layer_idx, args, error);
}

static void test_second_caller_is_told_to_wait(void)
{
    hkv_backend backend = *hkv_backend_cpu();
    backend.attend = attend_and_reenter;
    hkv_cache_options options = default_options(8, 64, NO_WINDOWS, 1);
    options.backend = &backend;
    fixture *f = fixture_create(options);
    int64_t tokens[10];
    count_up(tokens, 10, 0);
    reentered = f->cache;
    add(f, 0, tokens, 10, 0);
    step_one(f, 0, 10);
    CHECK_STATUS(reentered_status, HKV_ERR_BUSY);
    CHECK(thread_result == f->cache);
    check_content(f, 0);
    fixture_destroy(f);
}

static void test_child_of_fork_is_refused(void)
{
    fixture *f = fixture_create(default_options(8, 64, NO_WINDOWS, 1));
    int status;
    pid_t child = fork();
    if (child == 0) {
        int is_stale = hkv_cache_reset(f->cache, NULL) == HKV_ERR_STALE;
        hkv_cache_destroy(f->cache); /* does nothing */
        _exit(is_stale ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(hkv_cache_reset(f->cache, &f->error));
    fixture_destroy(f);
}

static void test_reset_forgets_everything(void)
{
    const int32_t windows[] = {0, 24};
    fixture *f = fixture_create(default_options(8, 16, windows, 2));
    int64_t tokens[90];
    hkv_error error;
    count_up(tokens, 90, 0);
    for (int32_t s = 0; s < 3; s++) {
        add(f, s, tokens, 90, s);
        append_up_to(f, s, 60 + s, 20);
    }
    release(f, 2);
    hkv_sequence old = f->sequences[0].handle;
    CHECK_OK(hkv_cache_reset(f->cache, &error));
    check_cache(f);
    CHECK_ERROR(hkv_cache_free(f->cache, old, &error), HKV_ERR_STALE, "sequence", "");
    hkv_cache_stats stats = read_stats(f);
    CHECK_INT(stats.n_sequences + stats.n_tokens + stats.n_blocks_live + stats.n_blocks_cached, 0);
    CHECK_INT(add(f, 0, tokens, 90, 0), 0);
    tokens[3] = 4000;
    memcpy(f->sequences[0].tokens, tokens, sizeof tokens);
    append_up_to(f, 0, 90, 8);
    fixture_destroy(f);
}

/* -----------------------------------------------------------------------------------------------------------------
 * tiers */

static void test_tiers_are_placed_by_logical_block(void)
{
    const int32_t windows[] = {0, 20};
    fixture *f = fixture_create(default_options(8, 16, windows, 2));
    int64_t tokens[100], n_blocks = 8;
    uint8_t tiers[8];
    hkv_cache_pages pages;
    count_up(tokens, 100, 0);
    add(f, 0, tokens, 100, 0);
    append_up_to(f, 0, 100, 100);
    hkv_sequence s = f->sequences[0].handle;
    CHECK_OK(hkv_cache_set_tier(f->cache, s, 0, 1, 2, HKV_TIER_L2, &f->error));
    CHECK_OK(hkv_cache_read_tiers(f->cache, s, 0, 1, tiers, &n_blocks, &f->error));
    CHECK_INT(n_blocks, 7);
    CHECK_INT(memcmp(tiers, "\1\1\2\1\1\1\0", 7), 0);
    CHECK_OK(hkv_cache_read_tiers(f->cache, s, 0, 0, tiers, &n_blocks, &f->error));
    CHECK_INT(memcmp(tiers, "\1\1\1\1\1\1\0", 7), 0);
    CHECK_OK(hkv_cache_read_tiers(f->cache, s, 1, 0, tiers, &n_blocks, &f->error));
    CHECK_INT(memcmp(tiers, "\0\0\0\0\1\1\0", 7), 0); /* the first ones left the window */
    CHECK_STATUS(hkv_cache_read_tokens(f->cache, s, 1, 60, 10, f->k_read, f->v_read, &f->error), HKV_ERR_RANGE);

    int32_t blocks[8];
    CHECK_OK(hkv_cache_read_table(f->cache, s, 0, blocks, &n_blocks, &f->error));
    CHECK_OK(hkv_cache_read_pages(f->cache, 0, &pages, &f->error));
    const hkv_record_header *header =
        (const hkv_record_header *)(pages.base + (size_t)blocks[2] * pages.block_stride_bytes +
                                    1 * pages.head_stride_bytes);
    CHECK_INT(header->tier, HKV_TIER_L2);
    CHECK_INT(header->n_valid_tokens, 16);
    fixture_destroy(f);
}

/* ---------------------------------------------------------------------------------------------------------------
 * memory */

static size_t sum_of_kinds(const hkv_cache_stats *stats)
{
    return stats->record_bytes + stats->hot_bytes + stats->directory_bytes + stats->table_bytes + stats->prefix_bytes +
           stats->workspace_bytes + stats->unused_bytes;
}

/* Create a cache that barely fits, if `options` leave too little; the message says how much that is. */
static hkv_status create_smallest(hkv_cache_options *options, hkv_cache **cache, hkv_error *error)
{
    size_t n_needed = 0;
    hkv_status status = hkv_cache_create(options, cache, error);
    if (status != HKV_ERR_BUDGET_SMALL) return status;
    const char *text = strstr(error->message, " takes ");
    CHECK(text != NULL && sscanf(text, " takes %zu bytes", &n_needed) == 1);
    CHECK(n_needed > options->memory_bytes);
    options->memory_bytes = n_needed - 1;
    CHECK_STATUS(hkv_cache_create(options, cache, error), HKV_ERR_BUDGET_SMALL);
    options->memory_bytes = n_needed;
    return hkv_cache_create(options, cache, error);
}

/* Everything comes from the allocator, in one piece, within the bound, and is accounted for. */
static void check_account(hkv_cache_options options)
{
    test_memory memory;
    hkv_allocator allocator = test_memory_allocator(&memory);
    hkv_cache *cache;
    hkv_error error = {0};
    hkv_cache_stats stats;
    options.allocator = &allocator;
    CHECK_OK(create_smallest(&options, &cache, &error));
    CHECK_TEXT(error.message, "");
    if (cache == NULL) return;
    hkv_cache_read_stats(cache, &stats);
    CHECK_INT(sum_of_kinds(&stats), stats.allocated_bytes);
    CHECK_INT(memory.n_bytes, stats.allocated_bytes);
    CHECK_INT(memory.n_calls, 1);
    if (options.memory_bytes > 0) CHECK(stats.allocated_bytes <= options.memory_bytes);
    CHECK(stats.n_blocks_total > 0 && stats.max_tokens >= options.config.block_size);
    CHECK_OK(hkv_cache_check(cache, &error));
    hkv_cache_destroy(cache);
    CHECK_INT(memory.n_bytes, 0);
    CHECK_INT(memory.n_live, 0);
}

static void test_bound_and_account_hold_for_many_shapes(void)
{
    const int32_t windows[][MAX_LAYERS] = {{0, 0, 0, 0}, {0, 128, 0, 128}, {8, 64, 100, 0}, {32, 32, 32, 32}};
    const int32_t bits[] = {8, 6, 4, 0}, n_heads[] = {1, 3}, head_dims[] = {16, 80, 256};
    const int32_t max_sequences[] = {1, 5, 40}, block_sizes[] = {64, 8, 256};
    const size_t memory_bytes[] = {1 << 19, 2 << 20, (3 << 20) + 12345};
    for (int32_t i = 0; i < 4 * 4 * 2 * 3 * 3 * 3; i++) {
        int32_t n = i;
        hkv_cache_options options = default_options(bits[n % 4], 64, windows[n / 4 % 4], MAX_LAYERS);
        n /= 16;
        options.model.n_kv_heads = n_heads[n % 2], n /= 2;
        options.model.head_dim = head_dims[n % 3], n /= 3;
        options.max_sequences = max_sequences[n % 3], n /= 3;
        options.config.block_size = block_sizes[n % 3];
        options.model.dtype = (hkv_dtype)(i % 3);
        options.prefix_reuse = i % 5 != 0;
        options.max_step_tokens = i % 2 ? 64 : 1000;
        options.hot_memory_bytes = i % 7 ? 0 : 100000;
        options.max_tokens = i % 4 ? 0 : 300;
        options.memory_bytes = memory_bytes[i % 3];
        check_account(options);
    }
}

static void test_account_holds_for_tokens(void)
{
    const int32_t windows[MAX_LAYERS] = {0, 24, 8, 0};
    for (int32_t max_tokens = 1; max_tokens < 5000; max_tokens = 3 * max_tokens + 1) {
        hkv_cache_options options = default_options(8, 16, windows, MAX_LAYERS);
        options.max_tokens = max_tokens;
        check_account(options);
    }
}

/* One byte less than a size needs gives a smaller cache: the bound is used up. */
static void test_budget_is_used(void)
{
    hkv_cache_options options = default_options(8, 64, NO_WINDOWS, 2);
    hkv_cache_stats by_tokens, same, less;
    fixture *f = fixture_create(options);
    by_tokens = read_stats(f);
    fixture_destroy(f);
    options.max_tokens = 0;
    options.memory_bytes = by_tokens.allocated_bytes;
    f = fixture_create(options);
    same = read_stats(f);
    fixture_destroy(f);
    CHECK_INT(same.n_blocks_total, by_tokens.n_blocks_total);
    options.memory_bytes--;
    f = fixture_create(options);
    less = read_stats(f);
    fixture_destroy(f);
    CHECK_INT(less.n_blocks_total, by_tokens.n_blocks_total - 1);
}

static void test_max_tokens_is_a_promise(void)
{
    for (int32_t seed = 0; seed < 20; seed++) { /* any way to share 300 tokens among five sequences fits */
        hkv_cache_options options = default_options(8, 16, NO_WINDOWS, 1);
        options.max_tokens = 300;
        options.max_sequences = 5;
        fixture *f = fixture_create(options);
        uint64_t random = (uint64_t)seed;
        int32_t left = 300;
        for (int32_t s = 0; s < 5; s++) {
            int64_t tokens[300];
            int32_t n = s == 4 ? left : test_random_int(&random, left + 1);
            count_up(tokens, 300, 1000 * s);
            CHECK_INT(add(f, s, tokens, n, 0), 0);
            if (n > 0) append_up_to(f, s, n, n);
            left -= n;
        }
        fixture_destroy(f);
    }
}

static void test_failed_allocations_are_reported(void)
{
    test_memory memory;
    hkv_allocator allocator = test_memory_allocator(&memory);
    hkv_cache_options options = default_options(8, 64, NO_WINDOWS, 2);
    options.allocator = &allocator;
    memory.fail_at = 0;
    expect_refused(&options, HKV_ERR_NO_MEMORY, "", "memory");
    CHECK_INT(memory.n_live, 0);
}

/* --------------------------------------------------------------------------------------------- a pretended device */

/* The CPU with memory of its own: tables must be uploaded before they are used, and the n-th allocation can fail. */
static int32_t n_uploads, n_device_allocations, fail_device_allocation;
static hkv_status device_upload(hkv_group *group, void *device_dst, const void *host_src, size_t n_bytes, void *stream,
                                hkv_error *error)
{
    (void)group, (void)stream, (void)error;
    n_uploads++;
    memcpy(device_dst, host_src, n_bytes);
    return HKV_OK;
}
static hkv_status device_alloc(int32_t device_index, const hkv_allocator *host, size_t n_bytes, void **ptr,
                               hkv_error *error)
{
    (void)device_index, (void)host;
    if (n_device_allocations++ == fail_device_allocation)
        return hkv_backend_cpu()->alloc(0, &(hkv_allocator){test_memory_alloc, test_memory_release, &(test_memory){0}},
                                        n_bytes, ptr, error);
    *ptr = aligned_alloc(512, (n_bytes + 511) / 512 * 512);
    memset(*ptr, 0xcb, n_bytes);
    return HKV_OK;
}
static void device_release(int32_t device_index, const hkv_allocator *host, void *ptr, size_t n_bytes)
{
    (void)device_index, (void)host, (void)n_bytes;
    free(ptr);
}

static hkv_backend pretended_device(void)
{
    hkv_backend backend = *hkv_backend_cpu();
    backend.name = "pretended";
    backend.alloc = device_alloc;
    backend.release = device_release;
    backend.upload = device_upload;
    n_uploads = n_device_allocations = 0;
    fail_device_allocation = -1;
    return backend;
}

static void test_steps_of_a_device_use_uploaded_tables(void)
{
    const int32_t windows[] = {0, 24};
    hkv_backend backend = pretended_device();
    hkv_cache_options options = default_options(8, 16, windows, 2);
    options.backend = &backend;
    fixture *f = fixture_create(options);
    hkv_cache_stats stats = read_stats(f);
    CHECK_INT(sum_of_kinds(&stats), stats.allocated_bytes);
    int64_t tokens[120];
    count_up(tokens, 120, 0);
    add(f, 0, tokens, 120, 0);
    append_up_to(f, 0, 60, 30);
    add(f, 1, tokens, 120, 0);
    append_up_to(f, 1, 120, 50);
    CHECK(n_uploads > 0);
    CHECK_OK(begin(f, &(step_row){0, 9}, 1, 0));
    CHECK_OK(hkv_cache_abort(f->cache, &f->error));
    append_up_to(f, 0, 120, 1);
    fixture_destroy(f);
}

static void test_failed_device_allocations_are_reported(void)
{
    const int32_t windows[] = {0, 24};
    hkv_backend backend = pretended_device();
    test_memory memory;
    hkv_allocator allocator = test_memory_allocator(&memory);
    hkv_cache_options options = default_options(8, 16, windows, 2);
    hkv_cache *cache;
    options.backend = &backend;
    options.allocator = &allocator;
    for (fail_device_allocation = 0; fail_device_allocation < 100; fail_device_allocation++) {
        n_device_allocations = 0;
        hkv_status status = hkv_cache_create(&options, &cache, NULL);
        if (status == HKV_OK) break;
        CHECK_STATUS(status, HKV_ERR_NO_MEMORY);
        CHECK(cache == NULL);
        CHECK_INT(memory.n_live, 0);
    }
    CHECK(fail_device_allocation > 3 && fail_device_allocation < 100);
    hkv_cache_destroy(cache);
    CHECK_INT(memory.n_live, 0);
}

/* ------------------------------------------------------------------------------------------------------------------
 * soak */

enum { MAX_SOAK_TOKENS = 120 };

/* Prompts that share beginnings: four documents, left at a random place. */
static int32_t draw_prompt(fixture *f, int64_t *tokens)
{
    int32_t document = test_random_int(&f->random, 4), n = 1 + test_random_int(&f->random, MAX_SOAK_TOKENS / 2);
    int32_t leave_at = test_random_int(&f->random, 2 * n);
    for (int32_t i = 0; i < n; i++)
        tokens[i] = i < leave_at ? 100 * (document / 2) + (i < 20 ? 0 : document) : test_random_int(&f->random, 3);
    return n;
}

static int32_t draw_sequence(fixture *f, int32_t is_live)
{
    int32_t first = test_random_int(&f->random, MAX_SEQUENCES);
    for (int32_t i = 0; i < MAX_SEQUENCES; i++) {
        int32_t s = (first + i) % MAX_SEQUENCES;
        if ((f->sequences[s].handle != 0) == is_live) return s;
    }
    return -1;
}

static void soak_add(fixture *f)
{
    int32_t s = draw_sequence(f, 0);
    int64_t tokens[MAX_SOAK_TOKENS];
    if (s < 0) return;
    int32_t n = draw_prompt(f, tokens);
    CHECK(add(f, s, tokens, n, test_random_int(&f->random, 3)) >= 0);
}

static void soak_fork(fixture *f)
{
    int32_t from = draw_sequence(f, 1), to = draw_sequence(f, 0);
    if (from < 0 || to < 0) return;
    hkv_sequence handle;
    CHECK_OK(hkv_cache_fork(f->cache, f->sequences[from].handle, &handle, &f->error));
    f->sequences[to] = f->sequences[from];
    f->sequences[to].handle = handle;
    f->sequences[to].n_named = f->sequences[to].n_tokens;
}

static void soak_truncate(fixture *f)
{
    int32_t s = draw_sequence(f, 1);
    if (s < 0) return;
    model_sequence *m = &f->sequences[s];
    int32_t back = test_random_int(&f->random, 4) == 0 ? m->n_tokens : 10;
    int32_t n = m->n_tokens - test_random_int(&f->random, back + 1);
    if (n < 0) n = 0;
    hkv_status status = hkv_cache_truncate(f->cache, m->handle, n, &f->error);
    CHECK(status == HKV_OK || (status == HKV_ERR_ARGUMENT && strstr(f->error.message, "window")));
    if (status != HKV_OK || n == m->n_tokens) return;
    m->n_tokens = m->n_named = n;
}

static void soak_reorder(fixture *f)
{
    hkv_sequence handles[MAX_SEQUENCES] = {0};
    int32_t rows[MAX_SEQUENCES], sources[MAX_SEQUENCES] = {0}, n = 0;
    for (int32_t s = 0; s < MAX_SEQUENCES; s++)
        if (f->sequences[s].handle != 0 && test_random_int(&f->random, 2)) rows[n++] = s;
    model_sequence before[MAX_SEQUENCES];
    memcpy(before, f->sequences, sizeof before);
    for (int32_t i = 0; i < n; i++) {
        handles[i] = f->sequences[rows[i]].handle;
        sources[i] = test_random_int(&f->random, n);
    }
    CHECK_OK(hkv_cache_reorder(f->cache, handles, sources, n, &f->error));
    for (int32_t i = 0; i < n; i++) {
        model_sequence *m = &f->sequences[rows[i]];
        if (sources[i] == i) continue;
        *m = before[rows[sources[i]]];
        m->handle = handles[i];
        m->n_named = m->n_tokens;
    }
}

static void soak_free(fixture *f)
{
    int32_t s = draw_sequence(f, 1);
    if (s >= 0) release(f, s);
}

/* What comes next in a sequence: what was named, then anything. */
static void draw_tokens(fixture *f, model_sequence *m, int32_t n_new)
{
    for (int32_t i = m->n_named; i < m->n_tokens + n_new; i++) m->tokens[i] = test_random_int(&f->random, 3);
}

static void soak_step(fixture *f)
{
    step_row rows[MAX_SEQUENCES];
    int32_t n_rows = 0, with_ids = test_random_int(&f->random, 2), n_layers = f->options.model.n_layers;
    for (int32_t i = 0; i < MAX_SEQUENCES; i++) {
        int32_t s = (i * 5 + 3) % MAX_SEQUENCES, n_new;
        model_sequence *m = &f->sequences[s];
        if (m->handle == 0 || test_random_int(&f->random, 2)) continue;
        n_new = test_random_int(&f->random, 4) == 0 ? test_random_int(&f->random, 60) : test_random_int(&f->random, 3);
        if (n_new > MAX_SOAK_TOKENS - m->n_tokens) n_new = MAX_SOAK_TOKENS - m->n_tokens;
        draw_tokens(f, m, n_new);
        rows[n_rows++] = (step_row){s, n_new};
    }
    hkv_status status = begin(f, rows, n_rows, with_ids);
    CHECK(status == HKV_OK || status == HKV_ERR_CACHE_FULL);
    if (status != HKV_OK) return;
    int32_t fails = test_random_int(&f->random, 8) == 0,
            n_attended = fails ? test_random_int(&f->random, n_layers) : n_layers;
    if (test_random_int(&f->random, 16) == 0) check_cache(f);
    for (int32_t i = 0; i < n_attended; i++) {
        int32_t layer = n_layers - 1 - i;
        attend_layer(f, rows, n_rows, layer);
        if (test_random_int(&f->random, 16) == 0) check_outputs(f, rows, n_rows, layer, tolerance_of(f));
    }
    if (fails) {
        CHECK_OK(hkv_cache_end(f->cache, &f->error));
        return;
    }
    commit(f, rows, n_rows);
    for (int32_t r = 0; r < n_rows && with_ids; r++) {
        model_sequence *m = &f->sequences[rows[r].sequence];
        if (rows[r].n_new > 0) m->n_named = m->n_tokens;
    }
}

static void soak(hkv_cache_options options, uint64_t seed, int32_t n_operations)
{
    fixture *f = fixture_create(options);
    f->random = seed;
    int n_before = test_n_failed_checks;
    for (int32_t i = 0; i < n_operations; i++) {
        int32_t draw = test_random_int(&f->random, 100);
        if (draw < 18)
            soak_add(f);
        else if (draw < 34)
            soak_free(f);
        else if (draw < 40)
            soak_fork(f);
        else if (draw < 48)
            soak_truncate(f);
        else if (draw < 51)
            soak_reorder(f);
        else
            soak_step(f);
        check_cache(f);
        int32_t s = draw_sequence(f, 1);
        if (s >= 0 && i % 8 == 0) check_content(f, s);
        if (test_n_failed_checks > n_before) {
            printf("soak: seed %d, operation %d (%d)\n", (int)seed, i, draw);
            break;
        }
    }
    fixture_destroy(f);
}

/* In memory of the caller, of every size and skew, nothing else is allocated for what lies there, and nothing beside it
 * is touched. */
static void run_in_lent_memory(hkv_backend *device, size_t n_bytes, size_t skew)
{
    enum { GUARD_BYTES = 1024 };
    const int32_t windows[] = {0, 8, 20};
    const size_t n_whole = n_bytes + 2 * GUARD_BYTES;
    uint8_t *whole = aligned_alloc(512, (n_whole + 511) / 512 * 512), *lent = whole + GUARD_BYTES / 2 + skew;
    hkv_cache_options options = default_options(8, 16, windows, 3);
    hkv_error error = {0};
    hkv_cache *none = NULL;
    size_t n_needed = 0;
    memset(whole, 0x5a, n_whole);
    memset(lent, 0xcb, n_bytes);
    options.backend = device;
    options.max_tokens = 0;
    options.max_step_tokens = 256;
    options.memory = (hkv_memory){lent, n_bytes};
    n_device_allocations = 0;
    soak(options, n_bytes + skew, 300);
    CHECK_INT(n_device_allocations, 0);
    for (uint8_t *p = whole; p < whole + n_whole; p++)
        if ((p < lent || p >= lent + n_bytes) && *p != 0x5a) {
            CHECK(!"written beside the memory");
            break;
        }
    options.memory.n_bytes = 600; /* too little, and how much is needed is said: */
    CHECK_STATUS(hkv_cache_create(&options, &none, &error), HKV_ERR_BUDGET_SMALL);
    CHECK_TEXT(error.argument, "memory");
    const char *text = strstr(error.message, " takes ");
    CHECK(text != NULL && sscanf(text, " takes %zu bytes", &n_needed) == 1);
    const size_t n_lost = -(size_t)(uintptr_t)lent % HKV_MEMORY_ALIGNMENT;
    options.memory.n_bytes = n_needed + n_lost - 1;
    CHECK_STATUS(hkv_cache_create(&options, &none, &error), HKV_ERR_BUDGET_SMALL);
    options.memory.n_bytes++;
    CHECK_OK(hkv_cache_create(&options, &none, &error));
    hkv_cache_destroy(none);
    options.memory_bytes = options.memory.n_bytes + 1; /* bounds that cannot both be meant */
    expect_refused(&options, HKV_ERR_ARGUMENT, "memory_bytes", "at most the size of memory");
    free(whole);
}

/* A cache that needs all of its memory accounts for that to the byte, what alignment costs included. Of what its stores
 * keep on the host of a device it counts their alignment too, as without memory. */
static void check_account_in_lent_memory(hkv_cache_options options)
{
    test_memory memory;
    hkv_allocator allocator = test_memory_allocator(&memory);
    const int32_t n_windows = 3;
    hkv_error error = {0};
    hkv_cache *cache = NULL;
    hkv_cache_stats stats;
    size_t n_needed = 0;
    uint8_t *lent = aligned_alloc(HKV_MEMORY_ALIGNMENT, (size_t)64 << 20);
    options.allocator = &allocator;
    options.memory = (hkv_memory){lent, 1};
    CHECK_STATUS(hkv_cache_create(&options, &cache, &error), HKV_ERR_BUDGET_SMALL);
    const char *text = strstr(error.message, " takes ");
    CHECK(text != NULL && sscanf(text, " takes %zu bytes", &n_needed) == 1);
    CHECK(n_needed <= (size_t)64 << 20);
    options.memory.n_bytes = n_needed;
    memset(lent, 0xcb, n_needed);
    n_device_allocations = 0;
    CHECK_OK(hkv_cache_create(&options, &cache, &error));
    if (cache != NULL) {
        hkv_cache_read_stats(cache, &stats);
        CHECK_INT(n_device_allocations, 0);
        CHECK_INT(sum_of_kinds(&stats), stats.allocated_bytes);
        const size_t n_held = n_needed + memory.n_bytes;
        CHECK(stats.allocated_bytes >= n_held);
        CHECK(stats.allocated_bytes <= n_held + (options.backend ? (size_t)n_windows * 2 * HKV_MEMORY_ALIGNMENT : 0));
        if (options.backend == NULL) CHECK_INT(memory.n_calls, 0);
        CHECK_OK(hkv_cache_check(cache, &error));
    }
    hkv_cache_destroy(cache);
    CHECK_INT(memory.n_live, 0);
    free(lent);
}

static void test_account_holds_in_lent_memory(void)
{
    const int32_t windows[][3] = {{0, 0, 0}, {0, 8, 20}, {24, 8, 24}};
    const int32_t bits[] = {8, 6, 4, 0}, head_dims[] = {16, 80};
    hkv_backend device = pretended_device();
    for (int32_t i = 0; i < 4 * 3 * 2 * 2; i++) {
        hkv_cache_options options = default_options(bits[i % 4], 16, windows[i / 4 % 3], 3);
        options.model.head_dim = head_dims[i / 12 % 2];
        options.prefix_reuse = i % 5 != 0;
        options.max_tokens = 0;
        options.backend = i / 24 ? &device : NULL;
        check_account_in_lent_memory(options);
    }
}

static void test_cache_in_lent_memory(void)
{
    hkv_backend device = pretended_device();
    for (int32_t i = 0; i < 8; i++) {
        const size_t n_bytes = i / 2 % 2 ? (size_t)1 << 20 : ((size_t)9 << 20) + 333;
        run_in_lent_memory(i % 2 ? &device : NULL, n_bytes, i / 4 ? 3 : 0);
    }
}

static void test_soak(void)
{
    const int32_t windows[][3] = {{0, 0, 0}, {0, 8, 20}, {24, 8, 24}};
    const int32_t bits[] = {0, 8}, n_operations = 100000 / 24;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        hkv_cache_options options = default_options(bits[seed % 2], seed % 8 < 4 ? 8 : 16, windows[seed % 3], 3);
        options.max_tokens = seed % 4 < 2 ? 200 : 500;
        options.max_step_tokens = 256;
        options.test_hash_bits = seed % 5 == 0 ? 2 : 0;
        options.prefix_reuse = seed % 7 != 0;
        soak(options, seed, n_operations);
    }
}

int main(void)
{
    RUN(test_life_cycles);
    RUN(test_empty_steps_change_nothing);
    RUN(test_prefixes_are_reused);
    RUN(test_reuse_can_be_off);
    RUN(test_unknown_tokens_are_not_found);
    RUN(test_ids_of_a_step_replace_announced_ones);
    RUN(test_least_recently_used_blocks_go_first);
    RUN(test_windows_reuse_only_what_all_layers_hold);
    RUN(test_forks_share_until_they_write);
    RUN(test_reorder_moves_content);
    RUN(test_truncated_blocks_are_written_again);
    RUN(test_truncation_stops_at_the_window);
    RUN(test_full_cache_can_be_retried);
    RUN(test_one_sequence_can_fill_the_cache);
    RUN(test_failed_steps_roll_back);
    RUN(test_step_without_hot_pages_is_refused);
    RUN(test_misuse_is_refused);
    RUN(test_options_are_checked);
    RUN(test_second_caller_is_told_to_wait);
    RUN(test_child_of_fork_is_refused);
    RUN(test_reset_forgets_everything);
    RUN(test_tiers_are_placed_by_logical_block);
    RUN(test_bound_and_account_hold_for_many_shapes);
    RUN(test_account_holds_for_tokens);
    RUN(test_budget_is_used);
    RUN(test_max_tokens_is_a_promise);
    RUN(test_failed_allocations_are_reported);
    RUN(test_steps_of_a_device_use_uploaded_tables);
    RUN(test_failed_device_allocations_are_reported);
    RUN(test_cache_in_lent_memory);
    RUN(test_account_holds_in_lent_memory);
    RUN(test_soak);
    return test_report();
}
