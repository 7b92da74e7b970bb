/* The settings: defaults, presets, rules, names, access by name. */
#include <math.h>

#include "internal.h"
#include "test.h"

static hkv_error error;

static void test_defaults(void)
{
    hkv_config config;
    hkv_config_init(&config);
    CHECK_INT(config.hot_tokens, 32);
    CHECK_INT(config.quantization_bits, 8);
    CHECK_INT(config.block_size, 64);
    CHECK_INT(config.sparse_top_k, 32);
    CHECK_INT(config.sink_blocks, 1);
    CHECK_INT(config.migration_throttling, 1);
    CHECK_INT(config.kv_cache_debug, 0);
    CHECK(config.skip_mass == 1e-3f);
    CHECK(config.refine_mass == 0.05f);
    CHECK(config.sparse_min_mass == 0.0f);
    CHECK_OK(hkv_config_check(&config, &error));
}

static void test_presets(void)
{
    static const struct {
        const char *gpu;
        int32_t hot_tokens, block_size, quantization_bits;
    } expected[] = {{"H100", 32, 64, 8}, {"H200", 32, 64, 8}, {"A100", 48, 64, 8}, {"L4", 16, 32, 4}};
    hkv_config config, before;
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        CHECK_OK(hkv_config_init_preset(&config, expected[i].gpu, &error));
        CHECK_INT(config.hot_tokens, expected[i].hot_tokens);
        CHECK_INT(config.block_size, expected[i].block_size);
        CHECK_INT(config.quantization_bits, expected[i].quantization_bits);
        CHECK_OK(hkv_config_check(&config, &error));
    }
    before = config;
    CHECK_ERROR(hkv_config_init_preset(&config, "V100", &error), HKV_ERR_ARGUMENT, "gpu_name", "H100, H200, A100");
    CHECK_TEXT(error.message, "'V100'");
    CHECK_ERROR(hkv_config_init_preset(&config, NULL, &error), HKV_ERR_ARGUMENT, "gpu_name", "NULL");
    CHECK(memcmp(&before, &config, sizeof config) == 0);
}

/* Every field: a value inside, the last ones inside, the first ones outside. */
static void test_rules(void)
{
    static const struct {
        const char *field;
        double value;
        const char *rule; /* NULL: allowed */
    } cases[] = {
        {"hot_tokens", 16, NULL},
        {"hot_tokens", 48, NULL},
        {"hot_tokens", 128, NULL},
        {"hot_tokens", 33, "16, 32, 48, 64, 128"},
        {"hot_tokens", 0, "16, 32, 48, 64, 128"},
        {"hot_tokens", 256, "16, 32, 48, 64, 128"},
        {"hot_tokens", -1, "16, 32, 48, 64, 128"},
        {"quantization_bits", 0, NULL},
        {"quantization_bits", 4, NULL},
        {"quantization_bits", 6, NULL},
        {"quantization_bits", 5, "0, 4, 6, 8"},
        {"quantization_bits", 16, "0, 4, 6, 8"},
        {"block_size", 8, NULL},
        {"block_size", 512, NULL},
        {"block_size", 63, "8..512 and divisible by 8"},
        {"block_size", 0, "8..512 and divisible by 8"},
        {"block_size", 520, "8..512 and divisible by 8"},
        {"sparse_top_k", 1, NULL},
        {"sparse_top_k", 0, "1..65536"},
        {"sparse_top_k", 65537, "1..65536"},
        {"sink_blocks", 0, NULL},
        {"sink_blocks", 16, NULL},
        {"sink_blocks", 17, "0..16"},
        {"sink_blocks", -1, "0..16"},
        {"skip_mass", 0, NULL},
        {"skip_mass", 0.999, NULL},
        {"skip_mass", 1, "at least 0 and below 1"},
        {"skip_mass", -0.5, "at least 0 and below 1"},
        {"skip_mass", NAN, "at least 0 and below 1"},
        {"refine_mass", 0, NULL},
        {"refine_mass", 2, NULL},
        {"refine_mass", INFINITY, "at least 0 and at most"},
        {"sparse_min_mass", 0.99, NULL},
        {"sparse_min_mass", 1, "at least 0 and below 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hkv_config config;
        hkv_config_init(&config);
        CHECK_OK(hkv_config_set_number(&config, cases[i].field, cases[i].value, &error));
        if (!cases[i].rule)
            CHECK_OK(hkv_config_check(&config, &error));
        else
            CHECK_ERROR(hkv_config_check(&config, &error), HKV_ERR_ARGUMENT, cases[i].field, cases[i].rule);
    }
}

static void test_message_has_field_rule_reason_and_value(void)
{
    hkv_config config;
    hkv_config_init(&config);
    config.hot_tokens = 33;
    CHECK_ERROR(hkv_config_check(&config, &error), HKV_ERR_ARGUMENT, "hot_tokens",
                "hot_tokens must be one of 16, 32, 48, 64, 128 (");
    CHECK_TEXT(error.message, ", got 33");
    CHECK_STATUS(hkv_config_check(&config, NULL), HKV_ERR_ARGUMENT);
}

static void test_switches_written_directly(void)
{
    hkv_config config;
    hkv_config_init(&config);
    config.kv_cache_debug = 2;
    CHECK_ERROR(hkv_config_check(&config, &error), HKV_ERR_ARGUMENT, "kv_cache_debug", "0..1");
}

static void test_set_number_refuses_wrong_kinds(void)
{
    hkv_config config, before;
    hkv_config_init(&config);
    before = config;
    CHECK_ERROR(hkv_config_set_number(&config, "hot_tokens", 32.5, &error), HKV_ERR_ARGUMENT, "hot_tokens", "whole");
    CHECK_ERROR(hkv_config_set_number(&config, "hot_tokens", NAN, &error), HKV_ERR_ARGUMENT, "hot_tokens", "whole");
    CHECK_ERROR(hkv_config_set_number(&config, "block_size", 1e12, &error), HKV_ERR_ARGUMENT, "block_size", "32 bits");
    CHECK_ERROR(hkv_config_set_number(&config, "kv_cache_debug", 2, &error), HKV_ERR_ARGUMENT, "kv_cache_debug",
                "got 2");
    CHECK(memcmp(&before, &config, sizeof config) == 0);
}

static void test_every_field_reads_what_was_written(void)
{
    hkv_config config;
    hkv_config_init(&config);
    CHECK_INT(hkv_config_n_fields(), 10);
    for (int32_t i = 0; i < hkv_config_n_fields(); i++) {
        char kind = hkv_config_field_kind(i);
        double written = kind == 'f' ? 0.123 : kind == 'b' ? 1 : 17, value = -1;
        CHECK(kind == 'i' || kind == 'b' || kind == 'f');
        CHECK_OK(hkv_config_set_number(&config, hkv_config_field_name(i), written, &error));
        CHECK_OK(hkv_config_get_number(&config, hkv_config_field_name(i), &value, &error));
        CHECK(value == written); /* reals too: 0.123, not 0.123000003 */
    }
    CHECK(config.sparse_min_mass == 0.123f);
    CHECK(hkv_config_field_name(-1) == NULL);
    CHECK(hkv_config_field_name(10) == NULL);
    CHECK_INT(hkv_config_field_kind(10), 0);
}

static void test_unknown_keys_name_the_nearest(void)
{
    static const char *const cases[][2] = {
        {"hot_token", "hot_tokens"},
        {"quant_bits", "quantization_bits"},
        {"hotTokens", "hot_tokens"},
        {"quantisation_bits", "quantization_bits"},
        {"blocksize", "block_size"},
        {"block", "block_size"},
        {"topk", "sparse_top_k"},
        {"sparse_topk", "sparse_top_k"},
        {"sinks", "sink_blocks"},
        {"sink_block", "sink_blocks"},
        {"throttling", "migration_throttling"},
        {"kv_debug", "kv_cache_debug"},
        {"skip", "skip_mass"},
        {"refine_maas", "refine_mass"},
        {"sparse_mass", "sparse_min_mass"},
        {"residual_length", "hot_tokens"},
        {"nbits", "quantization_bits"},
        {"kv_cache_dtype", "quantization_bits"},
    };
    hkv_config config;
    double value;
    hkv_config_init(&config);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, "did you mean '%s'?", cases[i][1]);
        CHECK_ERROR(hkv_config_set_number(&config, cases[i][0], 1, &error), HKV_ERR_UNKNOWN_KEY, cases[i][0], wanted);
        CHECK_ERROR(hkv_config_get_number(&config, cases[i][0], &value, &error), HKV_ERR_UNKNOWN_KEY, cases[i][0],
                    wanted);
    }
}

static void test_very_long_key(void)
{
    char key[2000];
    hkv_config config;
    hkv_config_init(&config);
    memset(key, 'x', sizeof key);
    key[sizeof key - 1] = 0;
    CHECK_ERROR(hkv_config_set_number(&config, key, 1, &error), HKV_ERR_UNKNOWN_KEY, "xxxx", "unknown key 'xxxx");
    CHECK_INT(strlen(error.argument), sizeof error.argument - 1);
}

static void test_warnings(void)
{
    char text[1024], small[16];
    hkv_config config;
    hkv_config_init(&config);
    hkv_config_warnings(&config, text, sizeof text);
    CHECK_INT(strlen(text), 0);
    config.block_size = 32;
    config.sparse_top_k = 4;
    config.quantization_bits = 4;
    config.sink_blocks = 0;
    config.skip_mass = 0.5f;
    hkv_config_warnings(&config, text, sizeof text);
    CHECK_TEXT(text, "block_size");
    CHECK_TEXT(text, "sparse_top_k");
    CHECK_TEXT(text, "sink_blocks");
    CHECK_TEXT(text, "skip_mass");
    config.quantization_bits = 0;
    hkv_config_warnings(&config, text, sizeof text);
    CHECK_TEXT(text, "quantization_bits 0");
    memset(small, 'x', sizeof small);
    hkv_config_warnings(&config, small, 8);
    CHECK_INT(strlen(small), 7);
    CHECK_INT(small[8], 'x');
}

static void test_dtypes(void)
{
    CHECK_INT(hkv_dtype_bytes(HKV_F16), 2);
    CHECK_INT(hkv_dtype_bytes(HKV_BF16), 2);
    CHECK_INT(hkv_dtype_bytes(HKV_F32), 4);
    CHECK_INT(hkv_dtype_bytes((hkv_dtype)7), 0);
    CHECK_TEXT(hkv_dtype_name(HKV_BF16), "bfloat16");
}

static void test_status_strings_differ(void)
{
    static const hkv_status all[] = {HKV_OK,
                                     HKV_ERR_ARGUMENT,
                                     HKV_ERR_TYPE,
                                     HKV_ERR_RANGE,
                                     HKV_ERR_UNKNOWN_KEY,
                                     HKV_ERR_UNSUPPORTED,
                                     HKV_ERR_STATE,
                                     HKV_ERR_BUSY,
                                     HKV_ERR_STALE,
                                     HKV_ERR_NO_MEMORY,
                                     HKV_ERR_CACHE_FULL,
                                     HKV_ERR_BUDGET_SMALL,
                                     HKV_ERR_NO_DEVICE,
                                     HKV_ERR_DEVICE};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t j = 0; j < i; j++) CHECK(strcmp(hkv_status_string(all[i]), hkv_status_string(all[j])) != 0);
    CHECK_TEXT(hkv_status_string((hkv_status)99), "unknown");
}

static void test_sizes_that_overflow(void)
{
    size_t total = 7;
    CHECK(!hkv_size_multiply(SIZE_MAX / 2, 3, &total));
    CHECK(!hkv_size_add(SIZE_MAX, 1, &total));
    CHECK(!hkv_size_align(SIZE_MAX - 3, 64, &total));
    CHECK_INT(total, 7);
    CHECK(hkv_size_multiply(SIZE_MAX, 1, &total) && total == SIZE_MAX);
    CHECK(hkv_size_align(65, 64, &total) && total == 128);
    CHECK(hkv_size_align(128, 64, &total) && total == 128);
}

int main(void)
{
    RUN(test_defaults);
    RUN(test_presets);
    RUN(test_rules);
    RUN(test_message_has_field_rule_reason_and_value);
    RUN(test_switches_written_directly);
    RUN(test_set_number_refuses_wrong_kinds);
    RUN(test_every_field_reads_what_was_written);
    RUN(test_unknown_keys_name_the_nearest);
    RUN(test_very_long_key);
    RUN(test_warnings);
    RUN(test_dtypes);
    RUN(test_status_strings_differ);
    RUN(test_sizes_that_overflow);
    return test_report();
}
