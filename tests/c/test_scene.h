/* test_scene.h - a row of a step to test code paths with: sources of every kind, queries and states. */
#ifndef HKV_TEST_SCENE_H
#define HKV_TEST_SCENE_H

#include "cpu_kernels.h"
#include "test_data.h"

enum { MAX_SOURCES = 320 };

static inline void *allocate(size_t n_bytes)
{
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}

/* ------------------------------------------------------------------------------------------------- keys and values */

/* A sequence in pieces. Memory that holds no token is NaN in every dtype. */
typedef struct scene {
    hkv_format f;
    int32_t n_tokens;
    int32_t n_sources;
    hkv_cpu_source sources[MAX_SOURCES];
    void *memory[MAX_SOURCES];
    uint64_t random;
    float k_scale, v_scale; /* standard deviations; 0 = all keys (values) are 1 */
    float k_outlier;        /* 0, or where channel 1 of the keys lies, give or take a half */
} scene;

static inline scene *scene_create(int32_t bits, int32_t block_size, int32_t head_dim, hkv_dtype dtype, uint64_t seed)
{
    scene *s = calloc(1, sizeof *s);
    hkv_format_init(&s->f, bits, block_size, head_dim, dtype);
    s->random = seed;
    s->k_scale = s->v_scale = 1;
    return s;
}

static inline void scene_destroy(scene *s)
{
    for (int32_t i = 0; i < s->n_sources; i++) free(s->memory[i]);
    free(s);
}

static inline sample scene_draw(scene *s, int32_t n_tokens)
{
    sample drawn = sample_create(s->f.bits, s->f.block_tokens, s->f.head_dim, (hkv_dtype)s->f.dtype, n_tokens);
    sample_fill_normal(&drawn, &s->random);
    for (size_t i = 0; i < sample_elements(&drawn); i++) {
        drawn.k[i] = s->k_scale == 0 ? 1 : s->k_scale * drawn.k[i];
        drawn.v[i] = s->v_scale == 0 ? 1 : s->v_scale * drawn.v[i];
        if (s->k_outlier != 0 && i % (size_t)s->f.head_dim == 1)
            drawn.k[i] = s->k_outlier + (float)test_random_int(&s->random, 1024) / 1024 - 0.5f;
    }
    return drawn;
}

static inline hkv_cpu_source *scene_append(scene *s, hkv_cpu_source_kind kind, int32_t n_tokens, void *memory)
{
    hkv_cpu_source *source = &s->sources[s->n_sources];
    s->memory[s->n_sources++] = memory;
    source->kind = kind;
    source->data = memory;
    source->first_position = s->n_tokens;
    source->n_tokens = n_tokens;
    source->logical_block = kind == HKV_SOURCE_TENSOR ? -1 : s->n_tokens / s->f.block_tokens;
    s->n_tokens += n_tokens;
    return source;
}

static inline void scene_add_record(scene *s, int32_t n_tokens, hkv_precision precision)
{
    sample drawn = scene_draw(s, n_tokens);
    uint8_t *record = allocate(s->f.record_bytes);
    sample_encode(&drawn);
    memcpy(record, drawn.record, s->f.record_bytes);
    scene_append(s, HKV_SOURCE_RECORD, n_tokens, record)->precision = precision;
    sample_destroy(&drawn);
}

static inline void scene_add_page(scene *s, int32_t n_tokens)
{
    sample drawn = scene_draw(s, n_tokens);
    uint8_t *page = allocate(s->f.row_page_bytes);
    size_t row = (size_t)s->f.head_dim * (size_t)s->f.element_bytes;
    sample_round(&drawn);
    memset(page, 0xff, s->f.row_page_bytes);
    for (int32_t t = 0; t < n_tokens; t++)
        hkv_row_store(&s->f, page, t, drawn.k_row + (size_t)t * row, drawn.v_row + (size_t)t * row);
    scene_append(s, HKV_SOURCE_PAGE, n_tokens, page);
    sample_destroy(&drawn);
}

/* K and V of a token side by side, with gaps, as slices of a larger tensor are. */
static inline void scene_add_tensor(scene *s, int32_t n_tokens)
{
    sample drawn = scene_draw(s, n_tokens);
    size_t row = (size_t)s->f.head_dim * (size_t)s->f.element_bytes, stride = 3 * row + 10;
    uint8_t *memory = allocate((size_t)n_tokens * stride);
    hkv_cpu_source *source;
    sample_round(&drawn);
    memset(memory, 0xff, (size_t)n_tokens * stride);
    for (int32_t t = 0; t < n_tokens; t++) {
        memcpy(memory + (size_t)t * stride, drawn.k_row + (size_t)t * row, row);
        memcpy(memory + (size_t)t * stride + 2 * row, drawn.v_row + (size_t)t * row, row);
    }
    source = scene_append(s, HKV_SOURCE_TENSOR, n_tokens, memory);
    source->k = memory;
    source->v = memory + 2 * row;
    source->k_stride_bytes = source->v_stride_bytes = (int64_t)stride;
    sample_destroy(&drawn);
}

/* The way a row of a step looks: a sink page, records of all precisions (the last one partial where it falls so), a
 * page that ends in the middle, the tokens of the call. */
static inline scene *scene_of_row(int32_t length, int32_t n_new, int32_t block_size, int32_t head_dim, hkv_dtype dtype,
                                  uint64_t seed)
{
    scene *s = scene_create(8, block_size, head_dim, dtype, seed);
    int32_t n_old = length - n_new;
    for (int32_t first = 0; first < n_old; first += block_size) {
        int32_t n = n_old - first < block_size ? n_old - first : block_size;
        if (first == 0 || (n < block_size && length % 2))
            scene_add_page(s, n);
        else
            scene_add_record(s, n, (hkv_precision)((first / block_size) % 3));
    }
    if (n_new > 0) scene_add_tensor(s, n_new);
    return s;
}

/* K and V of one token, [D] each, as stored. */
static inline void scene_read(const scene *s, const hkv_cpu_source *source, int32_t precision, int32_t token, float *k,
                              float *v)
{
    uint8_t k_row[HKV_MAX_HEAD_DIM * 4], v_row[HKV_MAX_HEAD_DIM * 4];
    if (source->kind == HKV_SOURCE_RECORD) {
        hkv_record_decode(&s->f, source->data, (hkv_precision)precision, token, 1, k, v);
        return;
    }
    if (source->kind == HKV_SOURCE_PAGE) {
        hkv_row_load(&s->f, source->data, token, k_row, v_row);
    } else {
        size_t row = (size_t)(s->f.head_dim * s->f.element_bytes);
        memcpy(k_row, (const uint8_t *)source->k + token * source->k_stride_bytes, row);
        memcpy(v_row, (const uint8_t *)source->v + token * source->v_stride_bytes, row);
    }
    hkv_elements_to_f32((hkv_dtype)s->f.dtype, k_row, s->f.head_dim, k);
    hkv_elements_to_f32((hkv_dtype)s->f.dtype, v_row, s->f.head_dim, v);
}

/* ------------------------------------------------------------------------------------------------- queries, states */

/* Queries of the last n_new tokens of a scene. */
static inline hkv_cpu_query query_create(const scene *s, int32_t n_new, int32_t group, uint64_t seed)
{
    hkv_cpu_query query = {
        .format = &s->f, .n_rows = n_new * group, .group = group, .first_position = s->n_tokens - n_new};
    size_t n = (size_t)query.n_rows * (size_t)s->f.stored_dim;
    float *q = allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        q[i] = (int32_t)(i % (size_t)s->f.stored_dim) < s->f.head_dim ? random_normal(&seed) : 0;
    query.q = q;
    query.softmax_scale = 1 / sqrtf((float)s->f.head_dim);
    return query;
}

static inline void query_destroy(hkv_cpu_query *query)
{
    free((void *)(uintptr_t)query->q);
}

static inline hkv_cpu_state state_create(const hkv_cpu_query *query)
{
    size_t n = (size_t)query->n_rows, n_acc = n * (size_t)query->format->stored_dim;
    hkv_cpu_state state = {malloc(n * sizeof(float)), calloc(n, sizeof(float)), allocate(n_acc * sizeof(float))};
    for (size_t i = 0; i < n; i++) state.max[i] = -INFINITY;
    memset(state.acc, 0, n_acc * sizeof(float));
    return state;
}

static inline void state_destroy(hkv_cpu_state *state)
{
    free(state->max);
    free(state->sum);
    free(state->acc);
}

static inline double state_lse(const hkv_cpu_state *state, int32_t row)
{
    return (double)state->max[row] + log((double)state->sum[row]);
}

static inline double state_out(const hkv_cpu_state *state, const hkv_format *f, int32_t row, int32_t channel)
{
    return (double)state->acc[row * f->stored_dim + channel] / (double)state->sum[row];
}

#endif
