/* format.c - the scalar codec of format.h: the specification of a record's bytes.
 *
 * One element at a time, in the order in which docs/format.md tells it. The code paths in cpu_*.c and the CUDA kernels
 * are tested against this file, bit for bit; speed is their job.
 */
#include "format.h"

/* -------------------------------------------------------------------------------------------------------- elements */

/* Round to nearest even; NaN stays NaN, what is beyond the largest finite fp16 becomes infinite. */
static uint16_t f32_to_f16_nearest(float x)
{
    uint32_t bits = hkv_bits_of_float(x), magnitude = bits & 0x7fffffffu;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u), below;
    int32_t inexact;
    float lower, upper, distance;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520: half way from 65504 to 65536 */
    below = hkv_f16_truncate(hkv_float_of_bits(magnitude), &inexact);
    if (!inexact) return (uint16_t)(sign | below);
    lower = hkv_f16_to_f32(below);
    upper = below == 0x7bffu ? 65536.0f : hkv_f16_to_f32((uint16_t)(below + 1u));
    distance = (hkv_float_of_bits(magnitude) - lower) - (upper - hkv_float_of_bits(magnitude)); /* exact near a tie */
    return (uint16_t)(sign | (below + (distance > 0.0f || (distance == 0.0f && (below & 1u)) ? 1u : 0u)));
}

static uint16_t f32_to_bf16_nearest(float x)
{
    uint32_t bits = hkv_bits_of_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static size_t element_size(hkv_dtype dtype)
{
    return dtype == HKV_F32 ? 4 : 2;
}

/* memcpy: rows of a caller's tensor need not be aligned. */
static float element_load(hkv_dtype dtype, const void *src, int64_t index)
{
    const uint8_t *bytes = (const uint8_t *)src + index * (int64_t)element_size(dtype);
    uint16_t half;
    float single;
    if (dtype == HKV_F32) {
        memcpy(&single, bytes, sizeof single);
        return single;
    }
    memcpy(&half, bytes, sizeof half);
    return dtype == HKV_F16 ? hkv_f16_to_f32(half) : hkv_bf16_to_f32(half);
}

static void element_store(hkv_dtype dtype, void *dst, int64_t index, float x)
{
    uint8_t *bytes = (uint8_t *)dst + index * (int64_t)element_size(dtype);
    uint16_t half;
    if (dtype == HKV_F32) {
        memcpy(bytes, &x, sizeof x);
        return;
    }
    half = dtype == HKV_F16 ? f32_to_f16_nearest(x) : f32_to_bf16_nearest(x);
    memcpy(bytes, &half, sizeof half);
}

void hkv_elements_to_f32(hkv_dtype dtype, const void *src, int64_t n, float *dst)
{
    for (int64_t i = 0; i < n; i++) dst[i] = element_load(dtype, src, i);
}

void hkv_elements_from_f32(hkv_dtype dtype, const float *src, int64_t n, void *dst)
{
    for (int64_t i = 0; i < n; i++) element_store(dtype, dst, i, src[i]);
}

/* --------------------------------------------------------------------------------------------- one group, step 1-4 */

typedef struct group_params {
    uint16_t zero, scale; /* fp16 bits */
} group_params;

/* Steps 1 to 3: x [n] becomes v; *n_changed counts the elements that step 1 changed. */
static group_params group_measure(float *x, int32_t n, uint32_t *n_changed)
{
    float kept_lo = INFINITY, kept_hi = -INFINITY, all_lo = INFINITY, all_hi = -INFINITY;
    int32_t n_kept = 0;
    group_params params;
    for (int32_t i = 0; i < n; i++) {
        int32_t changed;
        float v = x[i] = hkv_quant_clamp(x[i], &changed);
        all_lo = v < all_lo ? v : all_lo;
        all_hi = v > all_hi ? v : all_hi;
        if (changed) continue;
        kept_lo = v < kept_lo ? v : kept_lo;
        kept_hi = v > kept_hi ? v : kept_hi;
        n_kept++;
    }
    *n_changed += (uint32_t)(n - n_kept);
    hkv_quant_params(n_kept > 0 ? kept_lo : all_lo, n_kept > 0 ? kept_hi : all_hi, &params.zero, &params.scale);
    return params;
}

/* Step 4 for one v. */
static int32_t group_code(group_params params, float v)
{
    float scale = hkv_f16_to_f32(params.scale);
    return hkv_quant_code(v, hkv_f16_to_f32(params.zero), hkv_quant_inverse(scale));
}

static float group_value(group_params params, int32_t code)
{
    return HKV_FADD(hkv_f16_to_f32(params.zero), HKV_FMUL(hkv_f16_to_f32(params.scale), (float)code));
}

/* ---------------------------------------------------------------------------------------------- where a group lies */

/* Both at an index in halves; the zero is 2 halves beyond the scale. */
static void params_store(uint8_t *params_section, uint32_t index, group_params params)
{
    memcpy(params_section + 2 * (size_t)index, &params.scale, 2);
    memcpy(params_section + 2 * (size_t)index + 4, &params.zero, 2);
}

static group_params params_load(const uint8_t *params_section, uint32_t index)
{
    group_params params;
    memcpy(&params.scale, params_section + 2 * (size_t)index, 2);
    memcpy(&params.zero, params_section + 2 * (size_t)index + 4, 2);
    return params;
}

static void nibble_store(uint8_t *plane, uint32_t byte, int32_t is_upper, int32_t nibble)
{
    plane[byte] = (uint8_t)(is_upper ? (plane[byte] & 0x0f) | nibble << 4 : (plane[byte] & 0xf0) | nibble);
}

static int32_t nibble_load(const uint8_t *plane, uint32_t byte, int32_t is_upper)
{
    return is_upper ? plane[byte] >> 4 : plane[byte] & 0x0f;
}

/* A code is split over two planes. The low one may be absent (NULL): it is then taken to hold 8, the middle of what it
 * could hold. */
static void code_store(uint8_t *high, uint8_t *low, uint32_t byte, int32_t is_upper, int32_t code)
{
    nibble_store(high, byte, is_upper, code >> 4);
    if (low) nibble_store(low, byte, is_upper, code & 15);
}

static int32_t code_load(const uint8_t *high, const uint8_t *low, uint32_t byte, int32_t is_upper)
{
    return 16 * nibble_load(high, byte, is_upper) + (low ? nibble_load(low, byte, is_upper) : 8);
}

/* --------------------------------------------------------------------------------------------------------- records */

/* Code 8 and zero = scale = 0 everywhere: what padded channels and tokens keep. */
static void payload_clear(const hkv_format *f, uint8_t *record)
{
    memset(record + f->k_params_offset, 0, f->k_low_offset - f->k_params_offset);
    memset(record + f->k_low_offset, 0x88, f->record_bytes - f->k_low_offset);
}

static void encode_key_channel(const hkv_format *f, const void *k, int64_t k_stride_token, int32_t channel,
                               int32_t n_tokens, uint8_t *record, uint32_t *n_changed)
{
    float x[HKV_MAX_BLOCK_SIZE];
    uint8_t *low = f->planes & HKV_PLANE_K_LOW ? record + f->k_low_offset : NULL;
    group_params params;
    for (int32_t t = 0; t < n_tokens; t++) x[t] = element_load((hkv_dtype)f->dtype, k, t * k_stride_token + channel);
    params = group_measure(x, n_tokens, n_changed);
    params_store(record + f->k_params_offset, hkv_k_param_index(channel), params);
    for (int32_t t = 0; t < n_tokens; t++) {
        int32_t is_upper;
        uint32_t byte = hkv_k_plane_offset(f->stored_dim, t, channel, &is_upper);
        code_store(record + f->k_high_offset, low, byte, is_upper, group_code(params, x[t]));
    }
}

/* Channels first_channel .. first_channel+n_channels-1 of one token. */
static void encode_value_group(const hkv_format *f, const void *v_row, int32_t token, int32_t first_channel,
                               int32_t n_channels, uint8_t *record, uint32_t *n_changed)
{
    float x[HKV_VALUE_GROUP];
    uint8_t *low = f->planes & HKV_PLANE_V_LOW ? record + f->v_low_offset : NULL;
    group_params params;
    for (int32_t c = 0; c < n_channels; c++) x[c] = element_load((hkv_dtype)f->dtype, v_row, first_channel + c);
    params = group_measure(x, n_channels, n_changed);
    params_store(record + f->v_params_offset, hkv_v_param_index(f, token, first_channel), params);
    for (int32_t c = 0; c < n_channels; c++) {
        int32_t is_upper;
        uint32_t byte = hkv_v_plane_offset(f->stored_dim, token, first_channel + c, &is_upper);
        code_store(record + f->v_high_offset, low, byte, is_upper, group_code(params, x[c]));
    }
}

uint32_t hkv_record_encode(const hkv_format *f, const void *k, int64_t k_stride_token, const void *v,
                           int64_t v_stride_token, int32_t n_tokens, uint8_t *record)
{
    uint32_t n_changed = 0;
    payload_clear(f, record);
    for (int32_t c = 0; c < f->head_dim; c++) encode_key_channel(f, k, k_stride_token, c, n_tokens, record, &n_changed);
    for (int32_t t = 0; t < n_tokens; t++) {
        const uint8_t *v_row = (const uint8_t *)v + t * v_stride_token * f->element_bytes;
        for (int32_t c = 0; c < f->head_dim; c += HKV_VALUE_GROUP) {
            int32_t n_channels = f->head_dim - c < HKV_VALUE_GROUP ? f->head_dim - c : HKV_VALUE_GROUP;
            encode_value_group(f, v_row, t, c, n_channels, record, &n_changed);
        }
    }
    return n_changed;
}

static float decode_key(const hkv_format *f, const uint8_t *record, const uint8_t *low, int32_t token, int32_t channel)
{
    int32_t is_upper;
    uint32_t byte = hkv_k_plane_offset(f->stored_dim, token, channel, &is_upper);
    group_params params = params_load(record + f->k_params_offset, hkv_k_param_index(channel));
    return group_value(params, code_load(record + f->k_high_offset, low, byte, is_upper));
}

static float decode_value(const hkv_format *f, const uint8_t *record, const uint8_t *low, int32_t token,
                          int32_t channel)
{
    int32_t is_upper;
    uint32_t byte = hkv_v_plane_offset(f->stored_dim, token, channel, &is_upper);
    group_params params = params_load(record + f->v_params_offset, hkv_v_param_index(f, token, channel));
    return group_value(params, code_load(record + f->v_high_offset, low, byte, is_upper));
}

void hkv_record_decode(const hkv_format *f, const uint8_t *record, hkv_precision precision, int32_t first_token,
                       int32_t n_tokens, float *k_out, float *v_out)
{
    const uint8_t *k_low = precision >= HKV_READ_K8V4 ? record + f->k_low_offset : NULL;
    const uint8_t *v_low = precision >= HKV_READ_INT8 ? record + f->v_low_offset : NULL;
    for (int32_t i = 0; i < n_tokens; i++) {
        size_t row = (size_t)i * (size_t)f->head_dim;
        for (int32_t c = 0; c < f->head_dim; c++) {
            if (k_out) k_out[row + (size_t)c] = decode_key(f, record, k_low, first_token + i, c);
            if (v_out) v_out[row + (size_t)c] = decode_value(f, record, v_low, first_token + i, c);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- row pages */

/* K (is_v 0) or V (is_v 1) of one token, [D] in the format's dtype. Channels between D and DP become zero, so that
 * kernels may read whole chunks of a page that held anything before. */
static void row_half_store(const hkv_format *f, uint8_t *page, int32_t token, int32_t is_v, const uint8_t *src)
{
    size_t size = (size_t)f->element_bytes;
    for (int32_t c = 0; c < f->stored_dim; c++) {
        uint8_t *element = page + hkv_row_element_offset(f, token, c, is_v);
        if (c < f->head_dim)
            memcpy(element, src + (size_t)c * size, size);
        else
            memset(element, 0, size);
    }
}

static void row_half_load(const hkv_format *f, const uint8_t *page, int32_t token, int32_t is_v, uint8_t *dst)
{
    size_t size = (size_t)f->element_bytes;
    for (int32_t c = 0; c < f->head_dim; c++)
        memcpy(dst + (size_t)c * size, page + hkv_row_element_offset(f, token, c, is_v), size);
}

void hkv_row_store(const hkv_format *f, uint8_t *page, int32_t token, const void *k, const void *v)
{
    row_half_store(f, page, token, 0, k);
    row_half_store(f, page, token, 1, v);
}

void hkv_row_load(const hkv_format *f, const uint8_t *page, int32_t token, void *k, void *v)
{
    row_half_load(f, page, token, 0, k);
    row_half_load(f, page, token, 1, v);
}
