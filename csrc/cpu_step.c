/* cpu_step.c - what decode and prefill rows share: queries in, sources, running softmaxes, outputs out. */
#define _POSIX_C_SOURCE 200112L

#include "cpu_step.h"

#include <math.h>
#include <unistd.h>

int32_t hkv_cpu_max_lanes(void)
{
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    return n_cores < 1 ? 1 : n_cores > 256 ? 256 : (int32_t)n_cores;
}

/* ------------------------------------------------------------------------------------------------------- queries */

static size_t output_row(const hkv_cpu_step *step, const hkv_cpu_tile *tile, int32_t query_row, int64_t *token,
                         int32_t *head)
{
    *token = step->group->plan.rows[tile->row].first_token + tile->first_token + query_row / tile->n_heads;
    *head = tile->kv_head * step->group_heads + tile->first_head + query_row % tile->n_heads;
    return (size_t)*token * (size_t)step->args->n_q_heads + (size_t)*head;
}

void hkv_cpu_load_query(const hkv_cpu_step *step, const hkv_cpu_tile *tile, float *q, hkv_cpu_query *query)
{
    const hkv_format *f = &step->group->format;
    const hkv_attend *args = step->args;
    const hkv_plan_row *row = &step->group->plan.rows[tile->row];
    int32_t n_rows = tile->n_heads * tile->n_tokens;
    for (int32_t i = 0; i < n_rows; i++) {
        float *dst = q + (size_t)i * (size_t)f->stored_dim;
        int64_t token;
        int32_t head;
        output_row(step, tile, i, &token, &head);
        step->kernels->elements_to_f32(
            (hkv_dtype)f->dtype,
            (const uint8_t *)args->q + (token * args->q_stride_token + head * args->q_stride_head) * f->element_bytes,
            f->head_dim, dst);
        for (int32_t c = f->head_dim; c < f->stored_dim; c++) dst[c] = 0.0f;
    }
    *query = (hkv_cpu_query){
        .format = f,
        .q = q,
        .n_rows = n_rows,
        .group = tile->n_heads,
        .first_position = (int64_t)row->length - row->n_new + tile->first_token,
        .window_tokens = step->group->window_tokens,
        .softmax_scale = args->softmax_scale,
        .logits_soft_cap = args->logits_soft_cap,
    };
}

/* -------------------------------------------------------------------------------------------------- running softmax */

size_t hkv_cpu_state_floats(const hkv_format *f, int32_t n_rows)
{
    size_t per_row = (size_t)(n_rows + 15) / 16 * 16; /* keeps acc aligned */
    return 2 * per_row + (size_t)n_rows * (size_t)f->stored_dim;
}

hkv_cpu_state hkv_cpu_state_clear(const hkv_format *f, int32_t n_rows, float *memory)
{
    size_t per_row = (size_t)(n_rows + 15) / 16 * 16;
    hkv_cpu_state state = {memory, memory + per_row, memory + 2 * per_row};
    memset(memory, 0, hkv_cpu_state_floats(f, n_rows) * sizeof(float));
    for (int32_t i = 0; i < n_rows; i++) state.max[i] = -INFINITY;
    return state;
}

void hkv_cpu_state_merge(const hkv_format *f, int32_t n_rows, hkv_cpu_state *state, const hkv_cpu_state *part)
{
    for (int32_t i = 0; i < n_rows; i++) {
        float *acc = state->acc + (size_t)i * (size_t)f->stored_dim;
        const float *part_acc = part->acc + (size_t)i * (size_t)f->stored_dim;
        float max = fmaxf(state->max[i], part->max[i]), own, other;
        if (part->max[i] == -INFINITY) continue;
        own = expf(state->max[i] - max);
        other = expf(part->max[i] - max);
        state->max[i] = max;
        state->sum[i] = state->sum[i] * own + part->sum[i] * other;
        for (int32_t c = 0; c < f->stored_dim; c++) acc[c] = acc[c] * own + part_acc[c] * other;
    }
}

void hkv_cpu_store_output(const hkv_cpu_step *step, const hkv_cpu_tile *tile, hkv_cpu_state *state, float *row_lse)
{
    const hkv_format *f = &step->group->format;
    const hkv_attend *args = step->args;
    for (int32_t i = 0; i < tile->n_heads * tile->n_tokens; i++) {
        float *acc = state->acc + (size_t)i * (size_t)f->stored_dim;
        float max = state->max[i], sum = state->sum[i], factor = 1.0f, lse;
        int64_t token;
        int32_t head;
        size_t lse_idx = output_row(step, tile, i, &token, &head);
        if (args->sink_logits) {
            float sink = args->sink_logits[head], new_max = fmaxf(max, sink);
            factor = expf(max - new_max);
            sum = sum * factor + expf(sink - new_max);
            max = new_max;
        }
        lse = sum > 0.0f ? max + logf(sum) : -INFINITY;
        factor = sum > 0.0f ? factor / sum : 0.0f;
        for (int32_t c = 0; c < f->head_dim; c++) acc[c] *= factor;
        step->kernels->elements_from_f32(
            (hkv_dtype)f->dtype, acc, f->head_dim,
            (uint8_t *)args->out + (token * args->out_stride_token + head * args->out_stride_head) * f->element_bytes);
        if (args->lse) args->lse[lse_idx] = lse;
        if (row_lse) row_lse[i] = lse;
    }
}

/* ------------------------------------------------------------------------------------------------------- sources */

int hkv_cpu_block_source(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t block, hkv_cpu_source *source)
{
    const hkv_group *group = step->group;
    const hkv_format *f = &group->format;
    const hkv_plan_row *r = &group->plan.rows[row];
    int64_t first = (int64_t)block * f->block_tokens, n_old = (int64_t)r->length - r->n_new;
    int32_t n_tokens = n_old - first < f->block_tokens ? (int32_t)(n_old - first) : f->block_tokens;
    int32_t physical = hkv_cpu_row_block(step, row, block), page;
    if (n_tokens <= 0 || physical == 0) return 0;
    *source = (hkv_cpu_source){.kind = HKV_SOURCE_PAGE, .first_position = first, .logical_block = block};
    page = f->bits == 0 ? -1 : hkv_plan_hot_page(&group->plan, row, block);
    if (f->bits == 0) {
        source->data = hkv_layer_record(step->layer, physical, kv_head);
    } else if (page >= 0) {
        int32_t n_held = group->directory.page_n_tokens[page];
        source->data = hkv_group_hot_page(group, step->layer_idx, page, kv_head);
        n_tokens = n_tokens < n_held ? n_tokens : n_held;
    } else {
        int32_t n_held;
        source->data = hkv_layer_record(step->layer, physical, kv_head);
        source->kind = HKV_SOURCE_RECORD;
        source->precision = hkv_record_precision(((const hkv_record_header *)source->data)->planes);
        n_held = hkv_cpu_record_n_tokens(f, source->data);
        n_tokens = n_tokens < n_held ? n_tokens : n_held;
    }
    source->n_tokens = n_tokens;
    return n_tokens > 0;
}

void hkv_cpu_new_source(const hkv_cpu_step *step, int32_t row, int32_t kv_head, int32_t first_token, int32_t n_tokens,
                        hkv_cpu_source *source)
{
    const hkv_attend *args = step->args;
    const hkv_plan_row *r = &step->group->plan.rows[row];
    int32_t element_bytes = step->group->format.element_bytes;
    int64_t token = (int64_t)r->first_token + first_token;
    *source = (hkv_cpu_source){
        .kind = HKV_SOURCE_TENSOR,
        .k = (const uint8_t *)args->k + (token * args->k_stride_token + kv_head * args->k_stride_head) * element_bytes,
        .v = (const uint8_t *)args->v + (token * args->v_stride_token + kv_head * args->v_stride_head) * element_bytes,
        .k_stride_bytes = args->k_stride_token * element_bytes,
        .v_stride_bytes = args->v_stride_token * element_bytes,
        .first_position = (int64_t)r->length - r->n_new + first_token,
        .n_tokens = n_tokens,
        .logical_block = -1,
    };
}

/* No exponent is all ones. */
static int elements_are_finite(hkv_dtype dtype, const uint8_t *elements, int32_t n)
{
    const uint16_t exponent = dtype == HKV_F16 ? 0x7c00 : 0x7f80; /* of the upper half of an element */
    const size_t element_bytes = hkv_dtype_bytes(dtype);
    int is_finite = 1;
    for (int32_t i = 0; i < n; i++) {
        uint16_t upper;
        memcpy(&upper, elements + (size_t)(i + 1) * element_bytes - sizeof upper, sizeof upper); /* little-endian */
        is_finite &= (upper & exponent) != exponent;
    }
    return is_finite;
}

const hkv_cpu_kernels *hkv_cpu_new_kernels(const hkv_cpu_step *step, const hkv_cpu_source *source, int32_t first,
                                           int32_t n_tokens)
{
    const hkv_format *f = &step->group->format;
    for (int32_t t = first; t < first + n_tokens; t++)
        if (!elements_are_finite((hkv_dtype)f->dtype, (const uint8_t *)source->v + t * source->v_stride_bytes,
                                 f->head_dim))
            return &hkv_cpu_reference;
    return step->kernels;
}
