/* The store: sizes, life cycle, allocations that fail, order of calls, and what it refuses. */
#define _GNU_SOURCE
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend.h"
#include "test.h"

static hkv_error error;

/* ---------------------------------------------------------------------------------------------------------- a scene */

enum { LAYERS = 2, HEADS = 2, Q_HEADS = 4, D = 32, T = 64, BLOCKS = 12, MAX_N = 300 };

/* A store with two layers of pages, and tensors of MAX_N tokens. */
typedef struct scene {
    test_memory memory;
    hkv_allocator allocator;
    hkv_store_options options;
    hkv_store *store;
    size_t record_bytes;
    uint8_t *pages[LAYERS];
    int32_t cu_new_tokens[2], seq_lens[1], block_table[8];
    int64_t slot_mapping[MAX_N];
    hkv_batch batch;
    float k[MAX_N * HEADS * D], v[MAX_N * HEADS * D], q[MAX_N * Q_HEADS * D], out[MAX_N * Q_HEADS * D];
    hkv_attend args;
} scene;

static hkv_store_options small_options(void)
{
    hkv_store_options options = {.n_layers = LAYERS,
                                 .n_kv_heads = HEADS,
                                 .head_dim = D,
                                 .dtype = HKV_F32,
                                 .n_blocks = BLOCKS,
                                 .max_rows = 1,
                                 .max_new_tokens = MAX_N,
                                 .first_stamp = 77};
    hkv_config_init(&options.config);
    return options;
}

static void scene_bind(scene *s, int32_t layer)
{
    size_t head_stride = s->record_bytes, block_stride = HEADS * head_stride;
    CHECK_OK(hkv_store_bind_layer(s->store, layer, s->pages[layer], block_stride, head_stride, &error));
}

static void scene_open(scene *s, int32_t bits)
{
    uint64_t random = 5;
    memset(s, 0, sizeof *s);
    s->allocator = test_memory_allocator(&s->memory);
    s->options = small_options();
    s->options.config.quantization_bits = bits;
    s->options.allocator = &s->allocator;
    CHECK_OK(hkv_store_page_bytes(&s->options.config, D, HKV_F32, &s->record_bytes, &error));
    CHECK_OK(hkv_store_create(&s->options, &s->store, &error));
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        s->pages[layer] = aligned_alloc(64, BLOCKS * HEADS * s->record_bytes);
        memset(s->pages[layer], 0xff, BLOCKS * HEADS * s->record_bytes);
        scene_bind(s, layer);
    }
    for (int32_t i = 0; i < 8; i++) s->block_table[i] = 8 - i;
    for (int32_t i = 0; i < MAX_N * HEADS * D; i++) {
        s->k[i] = (float)test_random_int(&random, 2001) / 1000.0f - 1.0f;
        s->v[i] = (float)test_random_int(&random, 2001) / 1000.0f - 1.0f;
    }
    for (int32_t i = 0; i < MAX_N * Q_HEADS * D; i++) s->q[i] = (float)test_random_int(&random, 2001) / 1000.0f - 1.0f;
}

static void scene_close(scene *s)
{
    hkv_store_destroy(s->store);
    for (int32_t layer = 0; layer < LAYERS; layer++) free(s->pages[layer]);
    CHECK_INT(s->memory.n_live, 0);
    CHECK_INT(s->memory.n_bytes, 0);
}

/* One row that goes from `first` to `length` tokens; the arguments of its layers read token i of the sequence from row
 * i of the tensors. */
static void scene_batch(scene *s, int32_t first, int32_t length)
{
    int32_t n = length - first;
    s->cu_new_tokens[0] = 0;
    s->cu_new_tokens[1] = n;
    s->seq_lens[0] = length;
    for (int32_t i = 0; i < n; i++) s->slot_mapping[i] = (int64_t)s->block_table[(first + i) / T] * T + (first + i) % T;
    s->batch = (hkv_batch){.n_rows = 1,
                           .n_new_tokens = n,
                           .cu_new_tokens = s->cu_new_tokens,
                           .seq_lens = s->seq_lens,
                           .block_table = s->block_table,
                           .block_table_stride = 8,
                           .slot_mapping = s->slot_mapping};
    s->args = (hkv_attend){.n_q_heads = Q_HEADS,
                           .q = s->q + (size_t)first * Q_HEADS * D,
                           .k = s->k + (size_t)first * HEADS * D,
                           .v = s->v + (size_t)first * HEADS * D,
                           .out = s->out + (size_t)first * Q_HEADS * D,
                           .q_stride_token = Q_HEADS * D,
                           .q_stride_head = D,
                           .k_stride_token = HEADS * D,
                           .k_stride_head = D,
                           .v_stride_token = HEADS * D,
                           .v_stride_head = D,
                           .out_stride_token = Q_HEADS * D,
                           .out_stride_head = D,
                           .softmax_scale = 0.2f};
}

static void scene_step(scene *s, int32_t first, int32_t length)
{
    scene_batch(s, first, length);
    CHECK_OK(hkv_store_begin(s->store, &s->batch, &error));
    for (int32_t layer = 0; layer < LAYERS; layer++) CHECK_OK(hkv_store_attend(s->store, layer, &s->args, &error));
}

/* ------------------------------------------------------------------------------------------------------------ sizes */

static void test_page_bytes(void)
{
    static const struct {
        int32_t bits, head_dim;
        size_t expected;
    } cases[] = {{8, 128, 17216}, {6, 128, 13120}, {4, 128, 9024}, {0, 128, 32768}, {8, 16, 64 + 4 * 32 + 4096 + 256}};
    hkv_config config;
    size_t n_bytes = 0;
    hkv_config_init(&config);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        config.quantization_bits = cases[i].bits;
        CHECK_OK(hkv_store_page_bytes(&config, cases[i].head_dim, HKV_BF16, &n_bytes, &error));
        CHECK_INT(n_bytes, cases[i].expected);
    }
    CHECK_ERROR(hkv_store_page_bytes(&config, 100, HKV_BF16, &n_bytes, &error), HKV_ERR_ARGUMENT, "head_dim",
                "got 100");
    CHECK_ERROR(hkv_store_page_bytes(&config, 0, HKV_BF16, &n_bytes, &error), HKV_ERR_ARGUMENT, "head_dim", "16..256");
    CHECK_ERROR(hkv_store_page_bytes(&config, 128, (hkv_dtype)9, &n_bytes, &error), HKV_ERR_TYPE, "dtype", "got 9");
    config.block_size = 63;
    CHECK_ERROR(hkv_store_page_bytes(&config, 128, HKV_F16, &n_bytes, &error), HKV_ERR_ARGUMENT, "block_size",
                "got 63");
}

/* Memory in one piece, handed out from the front. */
typedef struct arena {
    uint8_t *base;
    size_t used, size;
} arena;

static void *arena_alloc(void *ctx, size_t n_bytes, size_t alignment)
{
    arena *a = ctx;
    size_t start = (a->used + alignment - 1) / alignment * alignment;
    if (start + n_bytes > a->size) return NULL;
    a->used = start + n_bytes;
    return a->base + start;
}
static void arena_release(void *ctx, void *ptr, size_t n_bytes)
{
    (void)ctx, (void)ptr, (void)n_bytes;
}

/* What a store says it needs is what it takes: an arena of that size holds it, one that is a byte smaller does not. */
static void test_required_bytes_are_exact(void)
{
    static const int32_t bits[] = {0, 4, 8};
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++) {
        hkv_store_options options = small_options();
        arena a = {0};
        hkv_allocator allocator = {arena_alloc, arena_release, &a};
        hkv_store *store = NULL;
        options.config.quantization_bits = bits[i];
        options.n_blocks = 1000; /* hot pages beyond any threshold of the allocator */
        options.max_rows = 64;
        options.allocator = &allocator;
        CHECK_OK(hkv_store_required_bytes(&options, &a.size, &error));
        a.base = aligned_alloc(HKV_HOT_ALIGN, (a.size + HKV_HOT_ALIGN - 1) / HKV_HOT_ALIGN * HKV_HOT_ALIGN);
        CHECK_OK(hkv_store_create(&options, &store, &error));
        CHECK_INT(a.used, a.size);
        hkv_store_destroy(store);
        a.used = 0;
        a.size--;
        CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_NO_MEMORY, "", "no memory for");
        free(a.base);
    }
}

static void test_every_allocation_fails_in_turn(void)
{
    hkv_store_options options = small_options();
    test_memory memory;
    hkv_allocator allocator = test_memory_allocator(&memory);
    hkv_store *store = NULL;
    int64_t n_allocations = 0;
    options.allocator = &allocator;
    for (;; n_allocations++) {
        hkv_status status;
        memory.n_calls = 0;
        memory.fail_at = n_allocations;
        memset(&error, 0, sizeof error);
        status = hkv_store_create(&options, &store, &error);
        if (status == HKV_OK) break;
        CHECK_STATUS(status, HKV_ERR_NO_MEMORY);
        CHECK_TEXT(error.message, "no memory for");
        CHECK(store == NULL);
        CHECK_INT(memory.n_live, 0);
        CHECK_INT(memory.n_bytes, 0);
    }
    CHECK_INT(n_allocations, 5); /* host, hot pages, tables, workspace, the backend's own */
    hkv_store_destroy(store);
    CHECK_INT(memory.n_live, 0);
    hkv_store_destroy(NULL);
}

/* ---------------------------------------------------------------------------------------------------------- options */

static void test_wrong_options(void)
{
    static const struct {
        size_t offset;
        int32_t value;
        hkv_status status;
        const char *argument, *part;
    } cases[] = {
        {offsetof(hkv_store_options, n_layers), 0, HKV_ERR_ARGUMENT, "n_layers", "got 0"},
        {offsetof(hkv_store_options, n_kv_heads), -1, HKV_ERR_ARGUMENT, "n_kv_heads", "got -1"},
        {offsetof(hkv_store_options, head_dim), 264, HKV_ERR_ARGUMENT, "head_dim", "got 264"},
        {offsetof(hkv_store_options, dtype), 3, HKV_ERR_TYPE, "dtype", "got 3"},
        {offsetof(hkv_store_options, window_tokens), -1, HKV_ERR_ARGUMENT, "window_tokens", "got -1"},
        {offsetof(hkv_store_options, n_blocks), 1, HKV_ERR_ARGUMENT, "n_blocks", "got 1"},
        {offsetof(hkv_store_options, max_rows), 0, HKV_ERR_ARGUMENT, "max_rows", "got 0"},
        {offsetof(hkv_store_options, n_hot_pages), -3, HKV_ERR_ARGUMENT, "n_hot_pages", "got -3"},
        {offsetof(hkv_store_options, config.hot_tokens), 33, HKV_ERR_ARGUMENT, "hot_tokens", "got 33"},
        {offsetof(hkv_store_options, device_index), 1, HKV_ERR_NO_DEVICE, "device_index", "got 1"},
    };
    hkv_store *store = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hkv_store_options options = small_options();
        size_t n_bytes = 0;
        memcpy((char *)&options + cases[i].offset, &cases[i].value, sizeof cases[i].value);
        CHECK_ERROR(hkv_store_create(&options, &store, &error), cases[i].status, cases[i].argument, cases[i].part);
        CHECK_ERROR(hkv_store_required_bytes(&options, &n_bytes, &error), cases[i].status, cases[i].argument,
                    cases[i].part);
    }
    CHECK(store == NULL);
}

static void test_sizes_beyond_the_address_space(void)
{
    hkv_store_options options = small_options();
    hkv_store *store = NULL;
    options.n_layers = 1 << 16;
    options.n_kv_heads = 1 << 16;
    options.n_blocks = INT32_MAX;
    options.n_hot_pages = INT32_MAX;
    CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_ARGUMENT, "n_hot_pages", "can be addressed");
}

static int32_t count_no_devices(const char **reason)
{
    *reason = "the driver is too old";
    return 0;
}

static void test_backends_that_cannot_serve(void)
{
    hkv_backend backend = *hkv_backend_cpu();
    hkv_store_options options = small_options();
    hkv_store *store = NULL;
    options.backend = &backend;
    backend.count_devices = count_no_devices;
    CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_NO_DEVICE, "backend", "the driver is too old");
    backend = *hkv_backend_cpu();
    backend.abi_version = 99;
    CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_UNSUPPORTED, "backend", "interface 99");
    backend = *hkv_backend_cpu();
    backend.struct_size = 8;
    CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_UNSUPPORTED, "backend", "of 8 bytes");
    options = small_options();
    options.cpu_path = "mmx";
    CHECK_ERROR(hkv_store_create(&options, &store, &error), HKV_ERR_ARGUMENT, "cpu_path", "mmx");
    CHECK(store == NULL);
}

static void test_stamps(void)
{
    hkv_block_info info;
    uint32_t stamps[2];
    static scene s;
    scene_open(&s, 8);
    scene_step(&s, 0, 10);
    CHECK_OK(hkv_store_read_block(s.store, 8, &info, &error));
    CHECK_INT(info.stamp, 77);
    scene_close(&s);
    for (int i = 0; i < 2; i++) { /* drawn: different, and hardly near each other */
        scene_open(&s, 8);
        hkv_store_destroy(s.store);
        s.options.first_stamp = 0;
        CHECK_OK(hkv_store_create(&s.options, &s.store, &error));
        for (int32_t layer = 0; layer < LAYERS; layer++) scene_bind(&s, layer);
        scene_step(&s, 0, 10);
        CHECK_OK(hkv_store_read_block(s.store, 8, &info, &error));
        stamps[i] = info.stamp;
        scene_close(&s);
    }
    CHECK(stamps[0] != 0 && stamps[1] != 0 && stamps[0] != stamps[1]);
}

/* ----------------------------------------------------------------------------------------------------------- layers */

static void test_bind_layer(void)
{
    static scene s;
    size_t record;
    uint8_t *base;
    scene_open(&s, 8);
    record = s.record_bytes;
    base = s.pages[0];
    CHECK_ERROR(hkv_store_bind_layer(s.store, 2, base, 2 * record, record, &error), HKV_ERR_RANGE, "layer_idx",
                "got 2");
    CHECK_ERROR(hkv_store_bind_layer(s.store, -1, base, 2 * record, record, &error), HKV_ERR_RANGE, "layer_idx",
                "0..1");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, NULL, 2 * record, record, &error), HKV_ERR_ARGUMENT, "base", "NULL");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, base + 8, 2 * record, record, &error), HKV_ERR_ARGUMENT, "base",
                "16-byte");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, base, 2 * record + 8, record, &error), HKV_ERR_ARGUMENT,
                "block_stride_bytes", "multiples of 16");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, base, 2 * record, record - 16, &error), HKV_ERR_ARGUMENT,
                "block_stride_bytes", "overlap");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, base, record, record, &error), HKV_ERR_ARGUMENT, "block_stride_bytes",
                "overlap");
    CHECK_ERROR(hkv_store_bind_layer(s.store, 0, base, SIZE_MAX / 16 * 16, record, &error), HKV_ERR_ARGUMENT,
                "block_stride_bytes", "address space");
    CHECK_OK(hkv_store_bind_layer(s.store, 0, base, record, BLOCKS * record, &error)); /* heads outermost */
    scene_close(&s);
}

/* --------------------------------------------------------------------------------------------------- order of calls */

static void test_order_of_calls(void)
{
    static scene s;
    hkv_store *unbound = NULL;
    scene_open(&s, 8);
    scene_batch(&s, 0, 10);
    CHECK_ERROR(hkv_store_attend(s.store, 0, &s.args, &error), HKV_ERR_STATE, "store", "hkv_store_begin first");
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error));
    CHECK_OK(hkv_store_attend(s.store, 1, &s.args, &error)); /* any order */
    CHECK_ERROR(hkv_store_attend(s.store, 1, &s.args, &error), HKV_ERR_STATE, "layer_idx", "layer 1 was attended");
    CHECK_ERROR(hkv_store_attend(s.store, 2, &s.args, &error), HKV_ERR_RANGE, "layer_idx", "got 2");
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error));
    CHECK_ERROR(hkv_store_attend(s.store, 0, &s.args, &error), HKV_ERR_STATE, "layer_idx", "layer 0 was attended");
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error)); /* the same step again */
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error));
    s.batch.n_rows = 2; /* a refused step leaves none open */
    CHECK_ERROR(hkv_store_begin(s.store, &s.batch, &error), HKV_ERR_ARGUMENT, "n_rows", "got 2");
    CHECK_OK(hkv_store_attend(s.store, 1, &s.args, &error)); /* ... unless it was not even looked at */
    s.batch.n_rows = 1;
    s.seq_lens[0] = -1;
    CHECK_ERROR(hkv_store_begin(s.store, &s.batch, &error), HKV_ERR_ARGUMENT, "seq_lens", "length -1");
    CHECK_ERROR(hkv_store_attend(s.store, 1, &s.args, &error), HKV_ERR_STATE, "store", "no step is open");

    CHECK_OK(hkv_store_create(&s.options, &unbound, &error));
    scene_batch(&s, 0, 10);
    CHECK_ERROR(hkv_store_begin(unbound, &s.batch, &error), HKV_ERR_STATE, "layer_idx", "layer 0 has no pages");
    CHECK_OK(hkv_store_bind_layer(unbound, 0, s.pages[0], HEADS * s.record_bytes, s.record_bytes, &error));
    CHECK_OK(hkv_store_begin(unbound, &s.batch, &error));
    CHECK_ERROR(hkv_store_attend(unbound, 1, &s.args, &error), HKV_ERR_STATE, "layer_idx", "layer 1 has no pages");
    hkv_store_destroy(unbound);
    scene_close(&s);
}

/* A backend that calls back into the store, as another thread would in the middle of a step. */
static hkv_store *intruded;
static hkv_status status_inside[6];

static hkv_status begin_and_intrude(hkv_group *group, const hkv_batch *batch, void *stream, hkv_error *e)
{
    hkv_attend args = {0};
    hkv_block_info info;
    int32_t tier;
    (void)group, (void)stream, (void)e;
    status_inside[0] = hkv_store_begin(intruded, batch, &error);
    status_inside[1] = hkv_store_attend(intruded, 0, &args, NULL);
    status_inside[2] = hkv_store_get_tier(intruded, 0, 0, 1, &tier, NULL);
    status_inside[3] = hkv_store_read_block(intruded, 1, &info, NULL);
    status_inside[4] = hkv_store_set_tier(intruded, 0, 0, 1, HKV_TIER_L1, NULL);
    status_inside[5] = hkv_store_bind_layer(intruded, 0, NULL, 0, 0, NULL);
    return HKV_ERR_DEVICE;
}

static void test_a_second_caller_is_told_busy(void)
{
    static scene s;
    hkv_backend backend = *hkv_backend_cpu();
    scene_open(&s, 8);
    hkv_store_destroy(s.store);
    backend.begin = begin_and_intrude;
    s.options.backend = &backend;
    CHECK_OK(hkv_store_create(&s.options, &s.store, &error));
    scene_bind(&s, 0);
    scene_batch(&s, 0, 10);
    intruded = s.store;
    CHECK_STATUS(hkv_store_begin(s.store, &s.batch, NULL), HKV_ERR_DEVICE);
    for (int i = 0; i < 6; i++) CHECK_STATUS(status_inside[i], HKV_ERR_BUSY);
    CHECK_TEXT(error.message, "another thread");
    CHECK_STATUS(hkv_store_attend(s.store, 0, &s.args, NULL), HKV_ERR_STATE); /* free again */
    scene_close(&s);
}

/* ---------------------------------------------------------------------------------------------------- wrong batches */

static void test_wrong_batches(void)
{
    static scene s;
    uint8_t *before;
    size_t n_bytes;
    scene_open(&s, 8);
    scene_step(&s, 0, 100);
    n_bytes = BLOCKS * HEADS * s.record_bytes;
    before = malloc(n_bytes);
    memcpy(before, s.pages[0], n_bytes);
#define REFUSED(change, status, argument, part)                                                                        \
    do {                                                                                                               \
        scene_batch(&s, 100, 101);                                                                                     \
        change;                                                                                                        \
        CHECK_ERROR(hkv_store_begin(s.store, &s.batch, &error), status, argument, part);                               \
    } while (0)
    CHECK_ERROR(hkv_store_begin(s.store, NULL, &error), HKV_ERR_ARGUMENT, "batch", "NULL");
    REFUSED(s.batch.n_rows = -1, HKV_ERR_ARGUMENT, "n_rows", "got -1");
    REFUSED(s.batch.n_rows = 0, HKV_ERR_ARGUMENT, "n_new_tokens", "must be 0..0, got 1");
    REFUSED(s.batch.n_new_tokens = MAX_N + 1, HKV_ERR_ARGUMENT, "n_new_tokens", "got 301");
    REFUSED(s.batch.cu_new_tokens = NULL, HKV_ERR_ARGUMENT, "cu_new_tokens", "NULL");
    REFUSED(s.batch.seq_lens = NULL, HKV_ERR_ARGUMENT, "seq_lens", "NULL");
    REFUSED(s.batch.block_table = NULL, HKV_ERR_ARGUMENT, "block_table", "NULL");
    REFUSED(s.batch.block_table_stride = -1, HKV_ERR_ARGUMENT, "block_table_stride", "got -1");
    REFUSED(s.batch.slot_mapping = NULL, HKV_ERR_ARGUMENT, "slot_mapping", "NULL");
    REFUSED(s.cu_new_tokens[1] = 2, HKV_ERR_ARGUMENT, "cu_new_tokens", "entry 1 is 2");
    REFUSED(s.batch.block_table_stride = 1, HKV_ERR_ARGUMENT, "block_table_stride", "row 0 has 2, got 1");
    REFUSED(s.block_table[1] = BLOCKS, HKV_ERR_RANGE, "block_table", "names block 12");
    s.block_table[1] = 7;
    REFUSED(s.slot_mapping[0] = BLOCKS * T, HKV_ERR_RANGE, "slot_mapping", "block 12");
    REFUSED(s.seq_lens[0] = 102, HKV_ERR_ARGUMENT, "slot_mapping", "instead of");
#undef REFUSED
    CHECK(memcmp(before, s.pages[0], n_bytes) == 0);
    free(before);
    scene_step(&s, 100, 101); /* and the store goes on */
    scene_batch(&s, 0, 0);
    s.batch = (hkv_batch){0};
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error)); /* a step of nothing */
    s.args = (hkv_attend){.n_q_heads = Q_HEADS, .softmax_scale = 1.0f, .q = s.q};
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error));
    scene_close(&s);
}

static void test_wrong_attend_arguments(void)
{
    static scene s;
    float mass[HEADS];
    uint8_t *before;
    size_t n_bytes;
    scene_open(&s, 8);
    scene_step(&s, 0, 100);
    scene_batch(&s, 100, 103);
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error));
    n_bytes = BLOCKS * HEADS * s.record_bytes;
    before = malloc(n_bytes);
    memcpy(before, s.pages[0], n_bytes);
#define REFUSED(change, argument, part)                                                                                \
    do {                                                                                                               \
        scene_batch(&s, 100, 103);                                                                                     \
        change;                                                                                                        \
        CHECK_ERROR(hkv_store_attend(s.store, 0, &s.args, &error), HKV_ERR_ARGUMENT, argument, part);                  \
    } while (0)
    CHECK_ERROR(hkv_store_attend(s.store, 0, NULL, &error), HKV_ERR_ARGUMENT, "args", "NULL");
    REFUSED(s.args.n_q_heads = 3, "n_q_heads", "multiple of the 2 KV heads, got 3");
    REFUSED(s.args.n_q_heads = 0, "n_q_heads", "got 0");
    REFUSED(s.args.softmax_scale = 0.0f, "softmax_scale", "got 0");
    REFUSED(s.args.softmax_scale = NAN, "softmax_scale", "finite");
    REFUSED(s.args.logits_soft_cap = -1.0f, "logits_soft_cap", "got -1");
    REFUSED(s.args.logits_soft_cap = INFINITY, "logits_soft_cap", "got inf");
    REFUSED(s.args.k = NULL, "k", "NULL");
    REFUSED(s.args.v = NULL, "v", "NULL");
    REFUSED(s.args.out = NULL, "out", "NULL");
    REFUSED(s.args.q = (const char *)s.args.q + 1, "q", "aligned to its elements of 4 bytes");
    REFUSED(s.args.k_stride_token = -64, "k", "got -64 between tokens");
    REFUSED(s.args.v_stride_head = INT64_MAX, "v", "beyond the address space");
    REFUSED(s.args.out_stride_head = D - 1, "out", "overlap itself");
    REFUSED(s.args.out_stride_token = D, "out", "overlap itself");
    REFUSED(s.args.out = (void *)(uintptr_t)s.args.q, "out", "must not overlap q");
    REFUSED(s.args.out = s.k + 100 * HEADS * D, "out", "must not overlap k");
    REFUSED(s.args.out = s.v + 102 * HEADS * D, "out", "must not overlap v");
    REFUSED((s.args.mass = mass, s.args.mass_stride = 1), "mass_stride", "2 blocks of the longest row, got 1");
#undef REFUSED
    CHECK(memcmp(before, s.pages[0], n_bytes) == 0);
    free(before);
    scene_batch(&s, 100, 103);
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error)); /* nothing refused has used up the layer */
    s.args.q = s.args.out = NULL;
    CHECK_OK(hkv_store_attend(s.store, 1, &s.args, &error)); /* only append */
    scene_close(&s);
}

/* Head-major outputs are as good as token-major ones. */
static void test_strided_output(void)
{
    static scene s;
    static float expected[3 * Q_HEADS * D];
    int32_t n_wrong = 0;
    scene_open(&s, 8);
    scene_step(&s, 0, 70);
    scene_batch(&s, 70, 73);
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error));
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error));
    memcpy(expected, s.args.out, sizeof expected);
    CHECK_OK(hkv_store_begin(s.store, &s.batch, &error));
    s.args.out_stride_token = D;
    s.args.out_stride_head = 3 * D;
    CHECK_OK(hkv_store_attend(s.store, 0, &s.args, &error));
    for (int32_t i = 0; i < 3 * Q_HEADS * D; i++) {
        int32_t token = i / (Q_HEADS * D), head = i / D % Q_HEADS, channel = i % D;
        n_wrong += expected[i] != ((float *)s.args.out)[head * 3 * D + token * D + channel];
    }
    CHECK_INT(n_wrong, 0);
    scene_close(&s);
}

/* ------------------------------------------------------------------------------------------------------- looking in */

/* Largest difference between what a layer holds of tokens first .. end-1 and what was appended. */
static float largest_error(scene *s, int32_t length, int32_t first, int32_t end)
{
    static float k[MAX_N * HEADS * D], v[MAX_N * HEADS * D];
    float largest = 0.0f;
    CHECK_OK(hkv_store_read_tokens(s->store, 1, s->block_table, length, first, end - first, k, v, &error));
    for (int32_t i = 0; i < (end - first) * HEADS * D; i++) {
        float k_error = fabsf(k[i] - s->k[first * HEADS * D + i]), v_error = fabsf(v[i] - s->v[first * HEADS * D + i]);
        if (k_error > largest) largest = k_error;
        if (v_error > largest) largest = v_error;
    }
    return largest;
}

static void test_read_tokens(void)
{
    static scene s;
    float k[HEADS * D], v[HEADS * D];
    scene_open(&s, 8);
    scene_step(&s, 0, 250);
    CHECK(largest_error(&s, 250, 192, 250) == 0.0f); /* hot */
    CHECK(largest_error(&s, 250, 0, 64) == 0.0f);    /* the sink */
    CHECK(largest_error(&s, 250, 64, 192) > 0.0f);   /* records */
    CHECK(largest_error(&s, 250, 64, 192) < 0.01f);
    scene_step(&s, 250, 251);
    CHECK(largest_error(&s, 251, 192, 251) == 0.0f);
#define READ(table, length, first, n, k_out)                                                                           \
    hkv_store_read_tokens(s.store, 0, table, length, first, n, k_out, v, &error)
    CHECK_ERROR(READ(s.block_table, -1, 0, 0, k), HKV_ERR_ARGUMENT, "seq_len", "got -1");
    CHECK_ERROR(READ(s.block_table, 10, 11, 0, k), HKV_ERR_ARGUMENT, "first_token", "0..10, got 11");
    CHECK_ERROR(READ(s.block_table, 10, 9, 2, k), HKV_ERR_ARGUMENT, "n_tokens", "0..1, got 2");
    CHECK_ERROR(READ(NULL, 10, 9, 1, k), HKV_ERR_ARGUMENT, "block_table", "NULL");
    CHECK_ERROR(READ(s.block_table, 10, 9, 1, NULL), HKV_ERR_ARGUMENT, "k_out", "NULL");
    s.block_table[0] = BLOCKS;
    CHECK_ERROR(READ(s.block_table, 10, 9, 1, k), HKV_ERR_RANGE, "block_table", "got 12");
#undef READ
    scene_close(&s);
}

static void test_tiers(void)
{
    static scene s;
    int32_t tier = -1;
    scene_open(&s, 8);
    scene_step(&s, 0, 150);
    CHECK_OK(hkv_store_get_tier(s.store, 0, 1, 8, &tier, &error));
    CHECK_INT(tier, HKV_TIER_L1);
    CHECK_OK(hkv_store_set_tier(s.store, 0, 1, 8, HKV_TIER_L2, &error));
    CHECK_OK(hkv_store_get_tier(s.store, 0, 1, 8, &tier, &error));
    CHECK_INT(tier, HKV_TIER_L2);
    CHECK_OK(hkv_store_get_tier(s.store, 0, 0, 8, &tier, &error)); /* of that head only */
    CHECK_INT(tier, HKV_TIER_L1);
    CHECK_OK(hkv_store_get_tier(s.store, 0, 0, 6, &tier, &error)); /* partial */
    CHECK_INT(tier, 0);
    CHECK_OK(hkv_store_get_tier(s.store, 0, 0, 3, &tier, &error)); /* never written: all bytes 0xff */
    CHECK_INT(tier, 0);
    CHECK_ERROR(hkv_store_set_tier(s.store, 0, 0, 6, HKV_TIER_L2, &error), HKV_ERR_STATE, "block", "not sealed");
    CHECK_ERROR(hkv_store_set_tier(s.store, 0, 0, 8, (hkv_tier)3, &error), HKV_ERR_ARGUMENT, "tier", "got 3");
    CHECK_ERROR(hkv_store_set_tier(s.store, 0, 2, 8, HKV_TIER_L2, &error), HKV_ERR_RANGE, "kv_head", "got 2");
    CHECK_ERROR(hkv_store_get_tier(s.store, 0, 0, BLOCKS, &tier, &error), HKV_ERR_RANGE, "block", "got 12");
    CHECK_ERROR(hkv_store_get_tier(s.store, 9, 0, 1, &tier, &error), HKV_ERR_RANGE, "layer_idx", "got 9");
    scene_close(&s);
    scene_open(&s, 0);
    CHECK_ERROR(hkv_store_get_tier(s.store, 0, 0, 1, &tier, &error), HKV_ERR_UNSUPPORTED, "store",
                "quantization_bits 0");
    scene_close(&s);
}

static void test_blocks_and_counters(void)
{
    static scene s;
    hkv_block_info info;
    hkv_counters counters;
    scene_open(&s, 8);
    scene_step(&s, 0, 250);
    CHECK_OK(hkv_store_read_block(s.store, s.block_table[0], &info, &error));
    CHECK(info.hot_page >= 0 && info.n_hot_tokens == T && info.sealed && info.stamp == 77);
    CHECK_OK(hkv_store_read_block(s.store, s.block_table[1], &info, &error));
    CHECK(info.hot_page == -1 && info.n_hot_tokens == 0 && info.sealed && info.stamp == 78);
    CHECK_OK(hkv_store_read_block(s.store, s.block_table[3], &info, &error));
    CHECK(info.hot_page >= 0 && info.n_hot_tokens == 250 - 3 * T && !info.sealed);
    CHECK_OK(hkv_store_read_block(s.store, 1, &info, &error));
    CHECK(info.hot_page == -1 && !info.sealed);
    CHECK_ERROR(hkv_store_read_block(s.store, -1, &info, &error), HKV_ERR_RANGE, "block", "got -1");
    hkv_store_read_counters(s.store, &counters);
    CHECK_INT(counters.n_steps, 1);
    CHECK_INT(counters.n_tokens_appended, 250);
    CHECK_INT(counters.n_blocks_sealed, 3);
    CHECK_INT(counters.n_blocks_sealed_direct, 2);
    CHECK_INT(counters.n_pages_claimed, 2);
    scene_close(&s);
}

/* A child process goes on with the store and the pool that it inherited. */
static void test_fork(void)
{
    static scene s;
    hkv_threads *threads;
    pid_t child;
    int status = -1, n_failed_before = test_n_failed_checks;
    scene_open(&s, 8);
    hkv_store_destroy(s.store);
    CHECK_OK(hkv_threads_create(2, &threads, &error));
    s.options.threads = threads;
    CHECK_OK(hkv_store_create(&s.options, &s.store, &error));
    for (int32_t layer = 0; layer < LAYERS; layer++) scene_bind(&s, layer);
    scene_step(&s, 0, 150);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        scene_step(&s, 150, 250);
        CHECK(largest_error(&s, 250, 192, 250) == 0.0f);
        scene_close(&s);
        hkv_threads_destroy(threads);
        _exit(test_n_failed_checks != n_failed_before);
    }
    waitpid(child, &status, 0);
    CHECK_INT(status, 0);
    scene_step(&s, 150, 151); /* the parent's store knows nothing of that */
    CHECK(largest_error(&s, 151, 128, 151) == 0.0f);
    scene_close(&s);
    hkv_threads_destroy(threads);
}

int main(void)
{
    RUN(test_page_bytes);
    RUN(test_required_bytes_are_exact);
    RUN(test_every_allocation_fails_in_turn);
    RUN(test_wrong_options);
    RUN(test_sizes_beyond_the_address_space);
    RUN(test_backends_that_cannot_serve);
    RUN(test_stamps);
    RUN(test_bind_layer);
    RUN(test_order_of_calls);
    RUN(test_a_second_caller_is_told_busy);
    RUN(test_wrong_batches);
    RUN(test_wrong_attend_arguments);
    RUN(test_strided_output);
    RUN(test_read_tokens);
    RUN(test_tiers);
    RUN(test_blocks_and_counters);
    RUN(test_fork);
    return test_report();
}
