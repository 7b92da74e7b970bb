/* config.c - the settings: one table of fields drives names, kinds, defaults, ranges, reading and writing. */
#include "internal.h"

#include <ctype.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------------------- the table */

typedef struct field_info {
    const char *name;
    char kind;     /* 'i' integer, 'b' bool, 'f' real */
    size_t offset; /* in hkv_config; int32_t or float */
    double initial;
    double lowest, highest;
    bool open_above;        /* the value must stay below `highest` */
    int32_t step;           /* integers: the value must be divisible by it; 0 = need not */
    const int32_t *allowed; /* integers: the only values, ending in -1; NULL = all of the range */
    const char *reason;     /* why, as the end of the rule's sentence */
} field_info;

static const int32_t allowed_hot_tokens[] = {16, 32, 48, 64, 128, -1};
static const int32_t allowed_bits[] = {0, 4, 6, 8, -1};

#define INTEGER(field) .name = #field, .kind = 'i', .offset = offsetof(hkv_config, field)
#define BOOL(field)    .name = #field, .kind = 'b', .offset = offsetof(hkv_config, field), .highest = 1
#define REAL(field)    .name = #field, .kind = 'f', .offset = offsetof(hkv_config, field)

static const field_info fields[] = {
    {INTEGER(hot_tokens), .initial = 32, .lowest = 16, .highest = 128, .allowed = allowed_hot_tokens,
     .reason = "hot pages are laid out and tuned for these"},
    {INTEGER(quantization_bits), .initial = 8, .lowest = 0, .highest = 8, .allowed = allowed_bits,
     .reason = "0 keeps the model's dtype, 4 is INT4, 6 is keys at 8 and values at 4 bits, 8 is INT8"},
    {INTEGER(block_size), .initial = 64, .lowest = 8, .highest = 512, .step = 8,
     .reason = "records are stored in groups of 8 tokens; 64 is the tuned size"},
    {INTEGER(sparse_top_k), .initial = 32, .lowest = 1, .highest = 65536,
     .reason = "it counts the L2 blocks that a step may read per KV head"},
    {INTEGER(sink_blocks), .initial = 1, .lowest = 0, .highest = 16,
     .reason = "every one is kept hot in every sequence"},
    {BOOL(migration_throttling), .initial = 1, .reason = "it is a switch"},
    {BOOL(kv_cache_debug), .initial = 0, .reason = "it is a switch"},
    {REAL(skip_mass), .initial = 1e-3, .lowest = 0, .highest = 1, .open_above = true,
     .reason = "it is a share of the attention mass; 0 skips nothing"},
    {REAL(refine_mass), .initial = 0.05, .lowest = 0, .highest = 1e6,
     .reason = "it is a share relative to the hot zone; 0 reads everything in full"},
    {REAL(sparse_min_mass), .initial = 0, .lowest = 0, .highest = 1, .open_above = true,
     .reason = "it is the share that selection must cover; 0 leaves it to sparse_top_k"},
};

enum { N_FIELDS = (int32_t)(sizeof fields / sizeof fields[0]) };

static double field_read(const hkv_config *config, const field_info *field)
{
    const char *at = (const char *)config + field->offset;
    return field->kind == 'f' ? (double)*(const float *)at : (double)*(const int32_t *)at;
}

static void field_write(hkv_config *config, const field_info *field, double value)
{
    char *at = (char *)config + field->offset;
    if (field->kind == 'f')
        *(float *)at = (float)value;
    else
        *(int32_t *)at = (int32_t)value;
}

static const field_info *field_find(const char *name)
{
    for (int32_t i = 0; i < N_FIELDS; i++)
        if (strcmp(fields[i].name, name) == 0) return &fields[i];
    return NULL;
}

/* -------------------------------------------------------------------------------------------------- the nearest key */

/* What other caches call our settings. They are refused like any unknown key, but the message knows what was meant. */
static const struct {
    const char *other, *ours;
} other_names[] = {
    {"residual_length", "hot_tokens"},    {"recent_tokens", "hot_tokens"},
    {"hot_window", "hot_tokens"},         {"window_size", "hot_tokens"},
    {"nbits", "quantization_bits"},       {"bits", "quantization_bits"},
    {"kv_bits", "quantization_bits"},     {"kv_cache_dtype", "quantization_bits"},
    {"cache_dtype", "quantization_bits"}, {"page_size", "block_size"},
    {"q_group_size", "block_size"},       {"top_k", "sparse_top_k"},
    {"sink_tokens", "sink_blocks"},       {"num_sinks", "sink_blocks"},
    {"throttle", "migration_throttling"}, {"debug", "kv_cache_debug"},
};

enum { MAX_KEY = 48 };

/* Letters only, lower case, so that hotTokens and hot-tokens are at no distance from hot_tokens. Cut at MAX_KEY. */
static int32_t key_letters(const char *key, char *letters)
{
    int32_t n = 0;
    for (; *key && n < MAX_KEY; key++)
        if (isalnum((unsigned char)*key)) letters[n++] = (char)tolower((unsigned char)*key);
    return n;
}

/* Insertions, deletions and replacements that turn a into b. */
static int32_t edit_distance(const char *a, int32_t n_a, const char *b, int32_t n_b)
{
    int32_t row[MAX_KEY + 1];
    for (int32_t j = 0; j <= n_b; j++) row[j] = j;
    for (int32_t i = 1; i <= n_a; i++) {
        int32_t diagonal = row[0];
        row[0] = i;
        for (int32_t j = 1; j <= n_b; j++) {
            int32_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = row[j] + 1 < row[j - 1] + 1 ? row[j] + 1 : row[j - 1] + 1;
            if (replaced < row[j]) row[j] = replaced;
        }
    }
    return row[n_b];
}

static bool same_letters(const char *a, const char *b)
{
    char letters_a[MAX_KEY], letters_b[MAX_KEY];
    int32_t n_a = key_letters(a, letters_a), n_b = key_letters(b, letters_b);
    return n_a == n_b && memcmp(letters_a, letters_b, (size_t)n_a) == 0;
}

/* Length of the longest run of letters that both have. */
static int32_t longest_common_run(const char *a, int32_t n_a, const char *b, int32_t n_b)
{
    int32_t longest = 0;
    for (int32_t i = 0; i < n_a; i++) {
        for (int32_t j = 0; j < n_b; j++) {
            int32_t n = 0;
            while (i + n < n_a && j + n < n_b && a[i + n] == b[j + n]) n++;
            if (n > longest) longest = n;
        }
    }
    return longest;
}

/* How unlike two keys are: the edit distance, less the longest run of letters that they share. Half a name (throttling)
 * or a shortened word (quant_bits) is far in edits, but shares a long run. */
static int32_t key_difference(const char *a, const char *b)
{
    char letters_a[MAX_KEY], letters_b[MAX_KEY];
    int32_t n_a = key_letters(a, letters_a), n_b = key_letters(b, letters_b);
    return 2 * edit_distance(letters_a, n_a, letters_b, n_b) - 3 * longest_common_run(letters_a, n_a, letters_b, n_b);
}

static const char *nearest_name(const char *key)
{
    const char *nearest = NULL;
    int32_t smallest = 0;
    for (size_t i = 0; i < sizeof other_names / sizeof other_names[0]; i++)
        if (same_letters(key, other_names[i].other)) return other_names[i].ours;
    for (int32_t i = 0; i < N_FIELDS; i++) {
        int32_t difference = key_difference(key, fields[i].name);
        if (nearest && difference >= smallest) continue;
        nearest = fields[i].name;
        smallest = difference;
    }
    return nearest;
}

/* A longer name does not fit hkv_error.argument, so the message quotes its beginning only. */
static hkv_status unknown_key(const char *key, hkv_error *error)
{
    return hkv_error_set(error, HKV_ERR_UNKNOWN_KEY, key, "unknown key '%.64s'; did you mean '%s'?", key,
                         nearest_name(key));
}

/* --------------------------------------------------------------------------------------------------- initial values */

void hkv_config_init(hkv_config *config)
{
    for (int32_t i = 0; i < N_FIELDS; i++) field_write(config, &fields[i], fields[i].initial);
}

static const struct {
    const char *gpu;
    int32_t hot_tokens, block_size, quantization_bits;
} presets[] = {{"H100", 32, 64, 8}, {"H200", 32, 64, 8}, {"A100", 48, 64, 8}, {"L4", 16, 32, 4}};

hkv_status hkv_config_init_preset(hkv_config *config, const char *gpu_name, hkv_error *error)
{
    if (!gpu_name) return hkv_error_set(error, HKV_ERR_ARGUMENT, "gpu_name", "gpu_name must not be NULL");
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(presets[i].gpu, gpu_name) != 0) continue;
        hkv_config_init(config);
        config->hot_tokens = presets[i].hot_tokens;
        config->block_size = presets[i].block_size;
        config->quantization_bits = presets[i].quantization_bits;
        return HKV_OK;
    }
    return hkv_error_set(error, HKV_ERR_ARGUMENT, "gpu_name",
                         "there are presets for H100, H200, A100 and L4; got '%.64s'", gpu_name);
}

/* ---------------------------------------------------------------------------------------------------- names, access */

int32_t hkv_config_n_fields(void)
{
    return N_FIELDS;
}

const char *hkv_config_field_name(int32_t field_idx)
{
    return field_idx >= 0 && field_idx < N_FIELDS ? fields[field_idx].name : NULL;
}

char hkv_config_field_kind(int32_t field_idx)
{
    return field_idx >= 0 && field_idx < N_FIELDS ? fields[field_idx].kind : 0;
}

hkv_status hkv_config_set_number(hkv_config *config, const char *name, double value, hkv_error *error)
{
    const field_info *field = field_find(name);
    if (!field) return unknown_key(name, error);
    if (field->kind == 'i' && !(value == floor(value) && value >= INT32_MIN && value <= INT32_MAX))
        return hkv_error_set(error, HKV_ERR_ARGUMENT, name, "%s must be a whole number of 32 bits, got %.9g", name,
                             value);
    if (field->kind == 'b' && value != 0 && value != 1)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, name, "%s must be false (0) or true (1), got %.9g", name, value);
    field_write(config, field, value);
    return HKV_OK;
}

/* The shortest decimal number that rounds to this float: 0.001, not 0.00100000005. */
static double shortest_decimal(float value)
{
    char text[32];
    for (int n_digits = 6; n_digits <= 9; n_digits++) {
        snprintf(text, sizeof text, "%.*g", n_digits, (double)value);
        if (strtof(text, NULL) == value) return strtod(text, NULL);
    }
    return (double)value; /* NaN */
}

hkv_status hkv_config_get_number(const hkv_config *config, const char *name, double *value, hkv_error *error)
{
    const field_info *field = field_find(name);
    if (!field) return unknown_key(name, error);
    *value = field_read(config, field);
    if (field->kind == 'f') *value = shortest_decimal((float)*value);
    return HKV_OK;
}

/* ------------------------------------------------------------------------------------------------------------ rules */

static bool is_allowed(const field_info *field, double value)
{
    if (!(value >= field->lowest && value <= field->highest)) return false; /* NaN, too */
    if (field->open_above && value == field->highest) return false;
    if (field->step && (int32_t)value % field->step != 0) return false;
    if (!field->allowed) return true;
    for (const int32_t *allowed = field->allowed; *allowed >= 0; allowed++)
        if (value == *allowed) return true;
    return false;
}

/* "16, 32, 48, 64 or 128", "8..512 and divisible by 8", "0 <= x < 1". */
static void describe_rule(const field_info *field, char *text, size_t n_bytes)
{
    if (field->allowed) {
        size_t n = 0;
        for (const int32_t *allowed = field->allowed; *allowed >= 0; allowed++)
            n += (size_t)snprintf(text + n, n_bytes - n, "%s%d", n == 0 ? "one of " : ", ", *allowed);
    } else if (field->kind == 'f') {
        snprintf(text, n_bytes, "at least %g and %s %g", field->lowest, field->open_above ? "below" : "at most",
                 field->highest);
    } else if (field->step) {
        snprintf(text, n_bytes, "%g..%g and divisible by %d", field->lowest, field->highest, field->step);
    } else {
        snprintf(text, n_bytes, "%g..%g", field->lowest, field->highest);
    }
}

hkv_status hkv_config_check(const hkv_config *config, hkv_error *error)
{
    for (int32_t i = 0; i < N_FIELDS; i++) {
        const field_info *field = &fields[i];
        double value = field_read(config, field);
        char rule[128];
        if (is_allowed(field, value)) continue;
        describe_rule(field, rule, sizeof rule);
        return hkv_error_set(error, HKV_ERR_ARGUMENT, field->name, "%s must be %s (%s), got %.9g", field->name, rule,
                             field->reason, value);
    }
    return HKV_OK;
}

/* --------------------------------------------------------------------------------------------------------- warnings */

void hkv_config_warnings(const hkv_config *config, char *text, size_t n_bytes)
{
    const struct {
        bool applies;
        const char *sentence;
    } warnings[] = {
        {config->block_size != 64, "block_size is not tuned for other values than 64, and CUDA refuses them.\n"},
        {config->quantization_bits == 0,
         "quantization_bits 0 saves no memory: everything stays in the model's dtype.\n"},
        {config->quantization_bits == 4 && config->sink_blocks == 0,
         "sink_blocks 0 with quantization_bits 4 doubles the error: the first block draws much attention.\n"},
        {config->sparse_top_k < 16, "sparse_top_k below 16 can lead to repetition on long contexts.\n"},
        {config->skip_mass > 0.01f, "skip_mass above 0.01 drops enough attention mass to be seen in the output.\n"},
    };
    size_t n = 0;
    if (n_bytes == 0) return;
    text[0] = 0;
    for (size_t i = 0; i < sizeof warnings / sizeof warnings[0] && n < n_bytes; i++)
        if (warnings[i].applies) n += (size_t)snprintf(text + n, n_bytes - n, "%s", warnings[i].sentence);
}

/* ----------------------------------------------------------------------------------------------------------- dtypes */

size_t hkv_dtype_bytes(hkv_dtype dtype)
{
    switch (dtype) {
    case HKV_F16:
    case HKV_BF16:
        return 2;
    case HKV_F32:
        return 4;
    }
    return 0;
}

const char *hkv_dtype_name(hkv_dtype dtype)
{
    switch (dtype) {
    case HKV_F16:
        return "float16";
    case HKV_BF16:
        return "bfloat16";
    case HKV_F32:
        return "float32";
    }
    return "unknown";
}
