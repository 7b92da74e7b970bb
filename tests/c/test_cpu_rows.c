/* test_cpu_rows.c - a layer of a step on the CPU from end to end: what every row must come out as, written down
 * naively, and that it does not depend on the number of threads. */
#include <math.h>

#include "cpu_dispatch.h"
#include "cpu_step.h"
#include "store.h"
#include "test_data.h"

enum { T = 64, KV_HEADS = 2, MAX_ROWS = 4, MAX_LENGTH = 2600, MAX_BLOCKS = MAX_LENGTH / T + 1, MAX_NEW = 400 };

static hkv_error error;

/* ------------------------------------------------------------------------------------------------------------ world */

/* A store, one layer, rows with tables of their own. */
typedef struct world {
    hkv_store_options options;
    hkv_threads *threads;
    hkv_store *store;
    uint8_t *pages;
    int32_t head_dim, n_q_heads, n_rows;
    int32_t cu_new_tokens[MAX_ROWS + 1], seq_lens[MAX_ROWS], tables[MAX_ROWS * MAX_BLOCKS];
    int64_t slots[MAX_NEW], clock;
    hkv_batch batch;
    hkv_attend args;
    float *k, *v, *q, *out, *lse, *mass; /* fp32 models; of MAX_NEW tokens */
    float *sinks;
    uint64_t random;
} world;

static float *floats(size_t n)
{
    return calloc(n, sizeof(float));
}

static world *world_create(const hkv_config *config, int32_t head_dim, int32_t group, int32_t window, const char *path,
                           int32_t n_threads)
{
    world *w = calloc(1, sizeof *w);
    size_t record_bytes, page_bytes;
    w->head_dim = head_dim;
    w->n_q_heads = KV_HEADS * group;
    w->options = (hkv_store_options){.config = *config,
                                     .n_layers = 1,
                                     .n_kv_heads = KV_HEADS,
                                     .head_dim = head_dim,
                                     .dtype = HKV_F32,
                                     .window_tokens = window,
                                     .n_blocks = MAX_ROWS * MAX_BLOCKS + 1,
                                     .max_rows = MAX_ROWS,
                                     .max_new_tokens = MAX_NEW,
                                     .cpu_path = path,
                                     .first_stamp = 1};
    CHECK_OK(hkv_threads_create(n_threads, &w->threads, &error));
    w->options.threads = w->threads;
    CHECK_OK(hkv_store_create(&w->options, &w->store, &error));
    CHECK_OK(hkv_store_page_bytes(config, head_dim, HKV_F32, &record_bytes, &error));
    page_bytes = KV_HEADS * record_bytes;
    w->pages = aligned_alloc(64, (size_t)w->options.n_blocks * page_bytes);
    memset(w->pages, 0xff, (size_t)w->options.n_blocks * page_bytes);
    CHECK_OK(hkv_store_bind_layer(w->store, 0, w->pages, page_bytes, record_bytes, &error));
    for (int32_t i = 0; i < MAX_ROWS * MAX_BLOCKS; i++) w->tables[i] = MAX_ROWS * MAX_BLOCKS - i;
    w->k = floats((size_t)(MAX_NEW * KV_HEADS * head_dim));
    w->v = floats((size_t)(MAX_NEW * KV_HEADS * head_dim));
    w->q = floats((size_t)(MAX_NEW * w->n_q_heads * head_dim));
    w->out = floats((size_t)(MAX_NEW * w->n_q_heads * head_dim));
    w->lse = floats((size_t)(MAX_NEW * w->n_q_heads));
    w->mass = floats(MAX_ROWS * KV_HEADS * MAX_BLOCKS);
    w->sinks = floats((size_t)w->n_q_heads);
    w->random = 17;
    w->args = (hkv_attend){.n_q_heads = w->n_q_heads,
                           .q = w->q,
                           .k = w->k,
                           .v = w->v,
                           .out = w->out,
                           .q_stride_token = w->n_q_heads * head_dim,
                           .q_stride_head = head_dim,
                           .k_stride_token = KV_HEADS * head_dim,
                           .k_stride_head = head_dim,
                           .v_stride_token = KV_HEADS * head_dim,
                           .v_stride_head = head_dim,
                           .out_stride_token = w->n_q_heads * head_dim,
                           .out_stride_head = head_dim,
                           .softmax_scale = 1 / sqrtf((float)head_dim),
                           .lse = w->lse,
                           .mass = w->mass,
                           .mass_stride = MAX_BLOCKS};
    return w;
}

static void world_destroy(world *w)
{
    hkv_store_destroy(w->store);
    hkv_threads_destroy(w->threads);
    free(w->pages);
    free(w->k);
    free(w->v);
    free(w->q);
    free(w->out);
    free(w->lse);
    free(w->mass);
    free(w->sinks);
    free(w);
}

/* Append n_new[r] random tokens to every row and attend them. */
static void world_step(world *w, int32_t n_rows, const int32_t *n_new)
{
    int32_t n = 0;
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t i = 0; i < n_new[r]; i++, n++) {
            int32_t position = w->seq_lens[r] + i;
            w->slots[n] = (int64_t)w->tables[r * MAX_BLOCKS + position / T] * T + position % T;
        }
        w->seq_lens[r] += n_new[r];
        w->cu_new_tokens[r + 1] = n;
    }
    for (int32_t i = 0; i < n * KV_HEADS * w->head_dim; i++) {
        w->k[i] = random_normal(&w->random);
        w->v[i] = random_normal(&w->random);
    }
    for (int32_t i = 0; i < n * w->n_q_heads * w->head_dim; i++) w->q[i] = random_normal(&w->random);
    w->n_rows = n_rows;
    w->clock++;
    w->batch = (hkv_batch){.n_rows = n_rows,
                           .n_new_tokens = n,
                           .cu_new_tokens = w->cu_new_tokens,
                           .seq_lens = w->seq_lens,
                           .block_table = w->tables,
                           .block_table_stride = MAX_BLOCKS,
                           .slot_mapping = w->slots,
                           .clock = &w->clock};
    memset(w->mass, 0xff, MAX_ROWS * KV_HEADS * MAX_BLOCKS * sizeof(float));
    CHECK_OK(hkv_store_begin(w->store, &w->batch, &error));
    CHECK_OK(hkv_store_attend(w->store, 0, &w->args, &error));
}

static void world_fill(world *w, int32_t n_rows, const int32_t *lengths)
{
    for (int32_t r = 0; r < n_rows; r++) {
        while (w->seq_lens[r] < lengths[r]) {
            int32_t n_new[MAX_ROWS] = {0};
            n_new[r] = lengths[r] - w->seq_lens[r] < MAX_NEW ? lengths[r] - w->seq_lens[r] : MAX_NEW;
            world_step(w, n_rows, n_new);
        }
    }
}

static void world_set_tiers(world *w, int32_t row, int32_t first, int32_t end)
{
    for (int32_t b = first; b < end; b++)
        for (int32_t h = 0; h < KV_HEADS; h++)
            CHECK_OK(hkv_store_set_tier(w->store, 0, h, w->tables[row * MAX_BLOCKS + b], HKV_TIER_L2, &error));
}

/* ------------------------------------------------------------------------------------------- what must come out */

/* One (row, KV head), written down from docs/transitions.md. Pieces are blocks' older tokens, then the new ones. */
typedef struct expectation {
    const world *w;
    hkv_cpu_step step;
    const hkv_format *f;
    int32_t row, kv_head, n_queries, n_blocks;
    hkv_cpu_source pieces[MAX_BLOCKS + 1];
    int32_t is_there[MAX_BLOCKS + 1];
    int32_t is_left_out[MAX_BLOCKS + 1];
    hkv_cpu_progressive counts;
    int32_t n_unselected;
} expectation;

static const float *query_of(const expectation *e, int32_t i)
{
    const hkv_plan_row *row = &e->step.group->plan.rows[e->row];
    int32_t g = e->step.group_heads;
    return e->w->q + ((row->first_token + i / g) * e->w->n_q_heads + e->kv_head * g + i % g) * e->w->head_dim;
}

static void load_key(const expectation *e, int32_t piece, int32_t precision, int32_t token, float *k, float *v)
{
    const hkv_cpu_source *s = &e->pieces[piece];
    if (s->kind == HKV_SOURCE_RECORD) {
        hkv_record_decode(e->f, s->data, (hkv_precision)precision, token, 1, k, v);
    } else if (s->kind == HKV_SOURCE_PAGE) {
        hkv_row_load(e->f, s->data, token, k, v);
    } else {
        memcpy(k, (const uint8_t *)s->k + token * s->k_stride_bytes, (size_t)e->w->head_dim * sizeof(float));
        memcpy(v, (const uint8_t *)s->v + token * s->v_stride_bytes, (size_t)e->w->head_dim * sizeof(float));
    }
}

/* Score of query i and a key at `position`; -inf where it is not seen. */
static double score_of(const expectation *e, int32_t i, int64_t position, const float *k)
{
    const hkv_plan_row *row = &e->step.group->plan.rows[e->row];
    int64_t own = row->length - row->n_new + i / e->step.group_heads;
    const float *q = query_of(e, i);
    double dot = 0, cap = (double)e->w->args.logits_soft_cap;
    if (position > own || (e->w->options.window_tokens && position <= own - e->w->options.window_tokens))
        return -INFINITY;
    for (int32_t c = 0; c < e->w->head_dim; c++) dot += (double)q[c] * (double)k[c];
    dot *= (double)e->w->args.softmax_scale;
    return cap > 0 ? cap * tanh(dot / cap) : dot;
}

/* Sum of exp(score) of query i over a piece; random data keeps scores small. out [D] or NULL takes the values. */
static double piece_sum(const expectation *e, int32_t piece, int32_t precision, int32_t i, double *out)
{
    float k[HKV_MAX_HEAD_DIM], v[HKV_MAX_HEAD_DIM];
    double sum = 0;
    for (int32_t t = 0; t < e->pieces[piece].n_tokens; t++) {
        double weight;
        load_key(e, piece, precision, t, k, v);
        weight = exp(score_of(e, i, e->pieces[piece].first_position + t, k));
        sum += weight;
        for (int32_t c = 0; out && c < e->w->head_dim; c++) out[c] += weight * (double)v[c];
    }
    return sum;
}

static int32_t is_cold(const expectation *e, int32_t piece)
{
    return e->is_there[piece] && e->pieces[piece].kind == HKV_SOURCE_RECORD;
}

static int32_t is_decoded(const expectation *e)
{
    return e->step.group->plan.rows[e->row].n_new <= HKV_DECODE_MAX_TOKENS;
}

/* Precision at which a piece is read; leaves it out where its share is too small. */
static int32_t read_piece(expectation *e, int32_t piece, const double *hot)
{
    const hkv_config *config = &e->w->options.config;
    int32_t precision = (int32_t)e->pieces[piece].precision;
    double share = -1;
    if (!is_cold(e, piece) || !is_decoded(e)) return precision;
    for (int32_t i = 0; i < e->n_queries; i++) {
        double sum = piece_sum(e, piece, HKV_READ_INT4, i, NULL);
        if (sum > 0) share = fmax(share, sum / hot[i]);
    }
    if (share < 0) {
        e->is_left_out[piece] = 1;
        return precision;
    }
    e->counts.n_read++;
    if (share < (double)config->skip_mass) {
        e->is_left_out[piece] = 1;
        e->counts.n_skipped++;
        e->counts.skipped_share += share;
    } else if (share < (double)config->refine_mass) {
        precision = HKV_READ_INT4;
    }
    e->counts.n_refined += !e->is_left_out[piece] && precision > HKV_READ_INT4;
    return precision;
}

static double bound_of(const expectation *e, int32_t piece)
{
    double bound = -INFINITY;
    for (int32_t i = 0; i < e->n_queries; i++) {
        const float *q = query_of(e, i);
        double sum = 0;
        for (int32_t c = 0; c < e->w->head_dim; c++) {
            const uint8_t *params = e->pieces[piece].data + e->f->k_params_offset + 2 * (size_t)hkv_k_param_index(c);
            uint16_t scale, zero;
            memcpy(&scale, params, 2);
            memcpy(&zero, params + 4, 2);
            sum += fmax((double)q[c] * ((double)hkv_f16_to_f32(zero) + 8 * (double)hkv_f16_to_f32(scale)),
                        (double)q[c] * ((double)hkv_f16_to_f32(zero) + 248 * (double)hkv_f16_to_f32(scale)));
        }
        bound = fmax(bound, sum);
    }
    return bound;
}

/* The best L2 piece not yet taken by the measure; -1 = none. */
static int32_t best_l2(const double *measure, const double *bounds, const int32_t *is_open, int32_t n)
{
    int32_t best = -1;
    for (int32_t p = 0; p < n; p++) {
        if (!is_open[p]) continue;
        if (best < 0 || measure[p] > measure[best] || (measure[p] == measure[best] && bounds[p] > bounds[best]))
            best = p;
    }
    return best;
}

/* `before`: the pages as they were before the step; the step itself changed the histories. */
static void select_l2(expectation *e, const uint8_t *before)
{
    double bounds[MAX_BLOCKS], history[MAX_BLOCKS], estimate[MAX_BLOCKS], left = 0, total = 0;
    int32_t is_open[MAX_BLOCKS] = {0}, n = 0, k = e->w->options.config.sparse_top_k, n_by_bound = (k + 1) / 2, p;
    for (p = 0; p < e->n_blocks; p++) {
        const hkv_record_header *header;
        if (!is_cold(e, p)) continue;
        header = (const hkv_record_header *)(before + (e->pieces[p].data - e->w->pages));
        if (header->tier != HKV_TIER_L2) continue;
        e->pieces[p].precision = HKV_READ_INT4;
        is_open[p] = 1;
        n++;
        bounds[p] = bound_of(e, p);
        history[p] = (double)header->mass_history;
        estimate[p] = e->pieces[p].n_tokens * exp((double)e->w->args.softmax_scale * bounds[p]);
        total += estimate[p];
    }
    if (n <= k) return;
    left = total;
    for (int32_t taken = 0; n > 0; taken++, n--) {
        double allowed = total * (1 - (double)e->w->options.config.sparse_min_mass);
        if (taken >= k && (e->w->options.config.sparse_min_mass == 0 || left <= allowed)) break;
        p = best_l2(taken < n_by_bound || taken >= k ? bounds : history, bounds, is_open, e->n_blocks);
        is_open[p] = 0;
        left -= estimate[p];
    }
    for (p = 0; p < e->n_blocks; p++) e->is_left_out[p] = is_open[p];
    e->n_unselected = n;
}

/* The row's pieces after a step. */
static expectation *expectation_create(const world *w, int32_t row, int32_t kv_head, const uint8_t *before)
{
    expectation *e = calloc(1, sizeof *e);
    hkv_group *group = hkv_store_group(w->store);
    const hkv_plan_row *r = &group->plan.rows[row];
    e->w = w;
    e->f = &group->format;
    e->step = (hkv_cpu_step){.group = group,
                             .batch = &w->batch,
                             .args = &w->args,
                             .layer = &group->layers[0],
                             .group_heads = w->n_q_heads / KV_HEADS};
    e->row = row;
    e->kv_head = kv_head;
    e->n_queries = r->n_new * e->step.group_heads;
    e->n_blocks = (r->length + T - 1) / T;
    for (int32_t p = 0; p < e->n_blocks; p++) {
        int32_t hidden = w->options.window_tokens ? r->length - r->n_new - w->options.window_tokens + 1 : 0;
        if ((p + 1) * T <= hidden) continue;
        e->is_there[p] = hkv_cpu_block_source(&e->step, row, kv_head, p, &e->pieces[p]);
    }
    hkv_cpu_new_source(&e->step, row, kv_head, 0, r->n_new, &e->pieces[e->n_blocks]);
    e->is_there[e->n_blocks] = 1;
    if (is_decoded(e)) select_l2(e, before);
    return e;
}

/* Outputs, LSE and masses of one (row, KV head) against what the step gave. */
static void check_row(expectation *e, double tolerance)
{
    const world *w = e->w;
    const hkv_plan_row *r = &e->step.group->plan.rows[e->row];
    const float *mass = w->mass + (e->row * KV_HEADS + e->kv_head) * MAX_BLOCKS;
    double *hot = calloc((size_t)e->n_queries, sizeof *hot), expected_mass[MAX_BLOCKS] = {0}, difference = 0, size = 0;
    int32_t precisions[MAX_BLOCKS + 1];
    for (int32_t i = 0; i < e->n_queries; i++)
        for (int32_t p = 0; p <= e->n_blocks; p++)
            if (e->is_there[p] && !is_cold(e, p)) hot[i] += piece_sum(e, p, 0, i, NULL);
    for (int32_t p = 0; p <= e->n_blocks; p++)
        precisions[p] = e->is_there[p] && !e->is_left_out[p] ? read_piece(e, p, hot) : 0;
    for (int32_t i = 0; i < e->n_queries; i++) {
        int32_t token = r->first_token + i / e->step.group_heads;
        int32_t head = e->kv_head * e->step.group_heads + i % e->step.group_heads;
        double out[HKV_MAX_HEAD_DIM] = {0}, sums[MAX_BLOCKS + 1] = {0};
        double total = w->args.sink_logits ? exp((double)w->args.sink_logits[head]) : 0;
        const float *actual = w->out + (token * w->n_q_heads + head) * w->head_dim;
        for (int32_t p = 0; p <= e->n_blocks; p++) {
            if (!e->is_there[p] || e->is_left_out[p]) continue;
            sums[p] = piece_sum(e, p, precisions[p], i, out);
            total += sums[p];
        }
        for (int32_t t = 0; t < r->n_new; t++) { /* new tokens count for the block that they fall into */
            float *k = w->k + ((r->first_token + t) * KV_HEADS + e->kv_head) * w->head_dim;
            int32_t position = r->length - r->n_new + t;
            sums[position / T] += exp(score_of(e, i, position, k));
        }
        for (int32_t b = 0; b < e->n_blocks; b++) expected_mass[b] = fmax(expected_mass[b], sums[b] / total);
        CHECK(fabs((double)w->lse[token * w->n_q_heads + head] - log(total)) <= tolerance);
        for (int32_t c = 0; c < w->head_dim; c++) {
            difference += pow((double)actual[c] - out[c] / total, 2);
            size += pow(out[c] / total, 2);
        }
    }
    CHECK(sqrt(difference / size) <= tolerance);
    for (int32_t b = 0; b < MAX_BLOCKS; b++) {
        double expected = b < e->n_blocks && is_decoded(e) ? expected_mass[b] : 0;
        CHECK(fabs((double)mass[b] - expected) <= tolerance * fmax(expected, 1e-2));
    }
    free(hot);
}

static size_t world_page_bytes(const world *w)
{
    return (size_t)w->options.n_blocks * hkv_store_group(w->store)->layers[0].block_stride_bytes;
}

/* Append and attend, then compare every row with its expectation, and the counters with their sum. */
static void check_step(world *w, int32_t n_rows, const int32_t *n_new, double tolerance)
{
    hkv_counters old, new;
    int64_t n_read = 0, n_skipped = 0, n_refined = 0, n_unselected = 0;
    double skipped = 0;
    uint8_t *before = malloc(world_page_bytes(w));
    memcpy(before, w->pages, world_page_bytes(w));
    hkv_store_read_counters(w->store, &old);
    world_step(w, n_rows, n_new);
    hkv_store_read_counters(w->store, &new);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t h = 0; h < KV_HEADS && n_new[r] > 0; h++) {
            expectation *e = expectation_create(w, r, h, before);
            check_row(e, tolerance);
            n_read += e->counts.n_read;
            n_skipped += e->counts.n_skipped;
            n_refined += e->counts.n_refined;
            n_unselected += e->n_unselected;
            skipped += e->counts.skipped_share;
            free(e);
        }
    }
    free(before);
    CHECK_INT(new.n_records_read - old.n_records_read, n_read);
    CHECK_INT(new.n_records_skipped - old.n_records_skipped, n_skipped);
    CHECK_INT(new.n_records_refined - old.n_records_refined, n_refined);
    CHECK_INT(new.n_records_unselected - old.n_records_unselected, n_unselected);
    CHECK(fabs(new.skipped_mass - old.skipped_mass - skipped) <= tolerance * (1 + skipped));
}

/* ------------------------------------------------------------------------------------------------------------ tests */

static hkv_config plain_config(int32_t bits)
{
    hkv_config config;
    hkv_config_init(&config);
    config.quantization_bits = bits;
    config.skip_mass = config.refine_mass = 0;
    return config;
}

static void test_rows_of_a_mixed_batch(void)
{
    static const int32_t bits[] = {0, 4, 6, 8};
    for (int32_t b = 0; b < 4; b++) {
        const hkv_config config = plain_config(bits[b]);
        world *w = world_create(&config, 32, 2, 0, NULL, 2);
        world_fill(w, 4, (const int32_t[]){1, 300, 127, 0});
        check_step(w, 4, (const int32_t[]){1, 8, 40, 3}, 1e-3);
        check_step(w, 4, (const int32_t[]){1, 0, 9, 2}, 1e-3);
        check_step(w, 2, (const int32_t[]){70, 1}, 1e-3);
        world_destroy(w);
    }
}

static void test_options_of_attention(void)
{
    static const int32_t windows[] = {0, 50, 130};
    const hkv_config config = plain_config(8);
    for (int32_t i = 0; i < 3; i++) {
        world *w = world_create(&config, 64, 4, windows[i], NULL, 2);
        w->args.logits_soft_cap = i == 1 ? 2.0f : 0;
        w->args.sink_logits = w->sinks;
        for (int32_t h = 0; h < w->n_q_heads; h++) w->sinks[h] = (float)(h % 3) * 4 - 4;
        world_fill(w, 2, (const int32_t[]){500, 190});
        check_step(w, 2, (const int32_t[]){2, 20}, 1e-3);
        check_step(w, 2, (const int32_t[]){1, 1}, 1e-3);
        world_destroy(w);
    }
}

/* Groups of more query rows than a kernel call takes: the decision on a record belongs to all of them. */
static void test_groups_in_chunks(void)
{
    static const int32_t groups[] = {8, 71, 256}, n_new[] = {8, 1, 1};
    for (int32_t g = 0; g < 3; g++) {
        hkv_config config = plain_config(8);
        world *w;
        config.skip_mass = 0.3f;
        config.refine_mass = 0.6f;
        config.sparse_top_k = 3;
        w = world_create(&config, 32, groups[g], 0, NULL, 2);
        w->args.softmax_scale *= 0.5f;
        world_fill(w, 1, (const int32_t[]){900});
        check_step(w, 1, &n_new[g], 1e-3);
        world_set_tiers(w, 0, 2, 9);
        check_step(w, 1, &n_new[g], 1e-3);
        world_destroy(w);
    }
}

static void test_progressive_reading(void)
{
    hkv_config config = plain_config(8);
    world *w;
    config.skip_mass = 0.3f;
    config.refine_mass = 0.6f;
    w = world_create(&config, 64, 4, 0, NULL, 2);
    world_fill(w, 2, (const int32_t[]){2400, 700});
    for (int32_t i = 0; i < 3; i++) check_step(w, 2, (const int32_t[]){1, 2}, 1e-3);
    world_destroy(w);
}

static void test_selection_of_l2_records(void)
{
    static const float min_mass[] = {0, 0.5f, 0.9f};
    for (int32_t i = 0; i < 3; i++) {
        hkv_config config = plain_config(i == 2 ? 4 : 8);
        world *w;
        config.sparse_top_k = 5;
        config.sparse_min_mass = min_mass[i];
        w = world_create(&config, 32, 3, 0, NULL, 2);
        world_fill(w, 2, (const int32_t[]){2000, 260});
        check_step(w, 2, (const int32_t[]){1, 1}, 1e-3); /* gives the records histories */
        world_set_tiers(w, 0, 1, 25);
        world_set_tiers(w, 1, 1, 3); /* fewer than k: all are read */
        for (int32_t step = 0; step < 3; step++) check_step(w, 2, (const int32_t[]){1, 1}, 1e-3);
        world_destroy(w);
    }
}

static float header_of(const world *w, int32_t block, int32_t kv_head, float *history)
{
    const hkv_record_header *header =
        (const hkv_record_header *)hkv_layer_record(&hkv_store_group(w->store)->layers[0], block, kv_head);
    *history = header->mass_history;
    return header->mass;
}

/* Two rows share their first blocks: the record keeps the larger mass, and its history decays once. */
static void test_masses_in_headers(void)
{
    const hkv_config config = plain_config(8);
    world *w = world_create(&config, 32, 2, 0, NULL, 2);
    float history[2], mass;
    world_fill(w, 1, (const int32_t[]){256});
    memcpy(w->tables + MAX_BLOCKS, w->tables, 4 * sizeof *w->tables);
    w->seq_lens[1] = 256;
    for (int32_t step = 0; step < 3; step++) {
        float larger;
        header_of(w, w->tables[1], 1, &history[0]);
        world_step(w, 2, (const int32_t[]){1, 1});
        mass = header_of(w, w->tables[1], 1, &history[1]);
        larger = fmaxf(w->mass[(0 * KV_HEADS + 1) * MAX_BLOCKS + 1], w->mass[(1 * KV_HEADS + 1) * MAX_BLOCKS + 1]);
        CHECK(mass == larger && mass > 0);
        CHECK(history[1] == fmaxf(mass, HKV_MASS_DECAY * history[0]));
    }
    world_destroy(w);
}

static void test_threads_change_nothing(void)
{
    static const int32_t n_threads[] = {1, 2, 5};
    hkv_config config;
    world *w[3];
    hkv_config_init(&config);
    config.sparse_top_k = 4;
    for (int32_t i = 0; i < 3; i++) {
        w[i] = world_create(&config, 64, 4, 0, NULL, n_threads[i]);
        world_fill(w[i], 3, (const int32_t[]){2300, 700, 100});
        world_set_tiers(w[i], 0, 5, 15);
        world_step(w[i], 3, (const int32_t[]){1, 3, 50});
        world_step(w[i], 3, (const int32_t[]){1, 1, 1});
        if (i == 0) continue;
        CHECK(memcmp(w[0]->out, w[i]->out, (size_t)(3 * w[0]->n_q_heads * 64) * sizeof(float)) == 0);
        CHECK(memcmp(w[0]->lse, w[i]->lse, (size_t)(3 * w[0]->n_q_heads) * sizeof(float)) == 0);
        CHECK(memcmp(w[0]->mass, w[i]->mass, 3 * KV_HEADS * MAX_BLOCKS * sizeof(float)) == 0);
        CHECK(memcmp(w[0]->pages, w[i]->pages, world_page_bytes(w[0])) == 0);
    }
    for (int32_t i = 0; i < 3; i++) world_destroy(w[i]);
}

static void test_rows_longer_than_the_pool(void)
{
    const hkv_config config = plain_config(8);
    world *w = world_create(&config, 32, 1, 0, NULL, 1);
    w->cu_new_tokens[1] = 1;
    w->seq_lens[0] = (w->options.n_blocks + 1) * T;
    w->batch = (hkv_batch){.n_rows = 1,
                           .n_new_tokens = 1,
                           .cu_new_tokens = w->cu_new_tokens,
                           .seq_lens = w->seq_lens,
                           .block_table = w->tables,
                           .block_table_stride = w->options.n_blocks + 1,
                           .slot_mapping = w->slots};
    CHECK_ERROR(hkv_store_begin(w->store, &w->batch, &error), HKV_ERR_RANGE, "seq_lens", "blocks of the pool");
    world_destroy(w);
}

int main(void)
{
    RUN(test_rows_of_a_mixed_batch);
    RUN(test_options_of_attention);
    RUN(test_groups_in_chunks);
    RUN(test_progressive_reading);
    RUN(test_selection_of_l2_records);
    RUN(test_masses_in_headers);
    RUN(test_threads_change_nothing);
    RUN(test_rows_longer_than_the_pool);
    return test_report();
}
