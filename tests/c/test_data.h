/* test_data.h - reproducible random data and records to test with. */
#ifndef HKV_TEST_DATA_H
#define HKV_TEST_DATA_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "test.h"

/* About N(0, 1): a sum of uniforms, exact in fp32, so that golden checksums hold on every machine. */
static inline float random_normal(uint64_t *state)
{
    int32_t sum = 0;
    for (int32_t i = 0; i < 3; i++) sum += (int32_t)(test_random(state) >> 43) - (1 << 20);
    return (float)sum * 9.5367431640625e-7f; /* 2^-20 */
}

/* K and V of one block and the record made of them. */
typedef struct sample {
    hkv_format f;
    int32_t n_tokens;
    float *k, *v;           /* [n_tokens, D] */
    uint8_t *k_row, *v_row; /* the same in the format's dtype */
    uint8_t *record;        /* exactly record_bytes, so that a sanitizer sees every step beyond */
} sample;

static inline size_t sample_elements(const sample *s)
{
    return (size_t)s->n_tokens * (size_t)s->f.head_dim;
}

static inline sample sample_create(int32_t bits, int32_t block_tokens, int32_t head_dim, hkv_dtype dtype,
                                   int32_t n_tokens)
{
    sample s;
    hkv_format_init(&s.f, bits, block_tokens, head_dim, dtype);
    s.n_tokens = n_tokens;
    s.k = calloc(sample_elements(&s), sizeof(float));
    s.v = calloc(sample_elements(&s), sizeof(float));
    s.k_row = malloc(sample_elements(&s) * (size_t)s.f.element_bytes);
    s.v_row = malloc(sample_elements(&s) * (size_t)s.f.element_bytes);
    s.record = malloc(s.f.record_bytes);
    memset(s.record, 0xff, s.f.record_bytes);
    return s;
}

static inline void sample_destroy(sample *s)
{
    free(s->k);
    free(s->v);
    free(s->k_row);
    free(s->v_row);
    free(s->record);
}

static inline void sample_fill_normal(sample *s, uint64_t *random)
{
    for (size_t i = 0; i < sample_elements(s); i++) s->k[i] = random_normal(random);
    for (size_t i = 0; i < sample_elements(s); i++) s->v[i] = random_normal(random);
}

/* Round k and v to the dtype. */
static inline void sample_round(sample *s)
{
    int64_t n = (int64_t)sample_elements(s);
    hkv_dtype dtype = (hkv_dtype)s->f.dtype;
    hkv_elements_from_f32(dtype, s->k, n, s->k_row);
    hkv_elements_from_f32(dtype, s->v, n, s->v_row);
    hkv_elements_to_f32(dtype, s->k_row, n, s->k);
    hkv_elements_to_f32(dtype, s->v_row, n, s->v);
}

/* Round, then encode; returns the number of clamped elements. */
static inline uint32_t sample_encode(sample *s)
{
    sample_round(s);
    return hkv_record_encode(&s->f, s->k_row, s->f.head_dim, s->v_row, s->f.head_dim, s->n_tokens, s->record);
}

/* Zero and scale of the group of an element, as fp16 bits. */
static inline void sample_params(const sample *s, int32_t is_v, int32_t token, int32_t channel, uint16_t *zero,
                                 uint16_t *scale)
{
    uint32_t index = is_v ? hkv_v_param_index(&s->f, token, channel) : hkv_k_param_index(channel);
    const uint8_t *params = s->record + (is_v ? s->f.v_params_offset : s->f.k_params_offset) + 2 * (size_t)index;
    memcpy(scale, params, 2);
    memcpy(zero, params + 4, 2);
}

#endif
