/* hkv.h - the public C interface of hybridkv.
 *
 * hybridkv keeps the key/value cache of a transformer in two zones. The newest tokens of every sequence stay in the
 * model's own dtype (the hot zone); older blocks of tokens are quantised once into records that can be read at three
 * precisions (docs/format.md). Attention over both is one softmax.
 *
 * There are two ways to use it, and the second is built on the first:
 *
 *   store   (attached mode)  An engine owns the pages, the block tables and the lifecycle of sequences. Per step it
 *                            hands over a batch; the store decides everything that is hot or cold from that alone and
 *                            never learns which request is which.  hkv_store_create, _bind_layer, _begin, _attend.
 *   cache   (managed mode)   A block manager of ours: one arena, sequences, forks, prefix reuse. It makes the same
 *                            batches and drives stores of its own.  hkv_cache_create, _add_sequence, _begin, _attend.
 *
 * Letters in shapes
 *   L layers   B blocks in a pool   T tokens in a block   R rows (sequences) of a step   N new tokens of a step
 *   Hq query heads   Hkv key/value heads   G = Hq / Hkv   D head size
 *
 * Conventions
 *   - Offsets and byte counts are size_t or int64_t. Ids of blocks and pages are int32_t.
 *   - Strides are in elements unless the name ends in _bytes. The last dimension is always contiguous.
 *   - block: T consecutive tokens of a sequence. Physical block 0 is the null block: it never holds data, and writes to
 *     it are ignored.  slot = physical block * T + offset; -1 means "do not write".
 *   - Every function that can fail returns an hkv_status and, where it takes an hkv_error, says there which argument
 *     broke which rule with which value. A failed call has changed nothing unless its comment says otherwise.
 *
 * Threads
 *   - Nothing here is global. Objects may be used from any thread, one call at a time per store or cache; a second
 *     concurrent call on the same object returns HKV_ERR_BUSY and does nothing. Different objects are independent,
 *     also when they share a thread pool.
 *
 * Ownership
 *   - *_create returns an object that the caller frees with *_destroy, which accepts NULL.
 *   - Pointers passed in are borrowed for the call, except where a comment says that they are kept.
 */
#ifndef HKV_H
#define HKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_VERSION_MAJOR 0
#define HKV_VERSION_MINOR 1
#define HKV_VERSION_PATCH 0

/* ------------------------------------------------------------------------------------------------ status and errors */

typedef enum hkv_status {
    HKV_OK = 0,
    /* 1x: the caller's arguments */
    HKV_ERR_ARGUMENT = -10,    /* a value breaks a rule */
    HKV_ERR_TYPE = -11,        /* a dtype or kind is wrong */
    HKV_ERR_RANGE = -12,       /* an index is outside its object */
    HKV_ERR_UNKNOWN_KEY = -13, /* a configuration key that does not exist */
    HKV_ERR_UNSUPPORTED = -14, /* well formed, but not built or not implemented here */
    /* 2x: the order of calls */
    HKV_ERR_STATE = -20, /* not now: a step is open, or none is; a layer was attended already */
    HKV_ERR_BUSY = -21,  /* another thread is inside this object */
    HKV_ERR_STALE = -22, /* a handle whose object is gone, or of another cache, or from before a fork() */
    /* 3x: resources */
    HKV_ERR_NO_MEMORY = -30,    /* the allocator said no */
    HKV_ERR_CACHE_FULL = -31,   /* no block, sequence slot or hot page left; freeing sequences helps */
    HKV_ERR_BUDGET_SMALL = -32, /* memory_bytes or memory cannot hold even one sequence */
    /* 4x: the device */
    HKV_ERR_NO_DEVICE = -40, /* no such device, driver or backend library */
    HKV_ERR_DEVICE = -41     /* a device call failed */
} hkv_status;

/* A short, constant text for a status ("argument", "cache full", ...). Never NULL. */
const char *hkv_status_string(hkv_status status);

/* What went wrong, for people. `argument` names the argument or configuration field ("" if there is none). */
typedef struct hkv_error {
    hkv_status status;
    char argument[64];
    char message[448];
} hkv_error;

/* -------------------------------------------------------------------------------------------------------- allocator */

/* Where host memory comes from. alignment is a power of two. NULL in place of the struct means malloc. Kept by the
 * object it is given to; ctx must outlive that object. */
typedef struct hkv_allocator {
    void *(*alloc)(void *ctx, size_t n_bytes, size_t alignment);
    void (*release)(void *ctx, void *ptr, size_t n_bytes);
    void *ctx;
} hkv_allocator;

/* Memory of the caller in which an object keeps what would else be its own allocation: host memory for the CPU, memory
 * of the object's device for any other. It is the object's alone until the object is destroyed, and must be there as
 * long; what it holds before and after means nothing. It may begin anywhere: the object uses it from the first multiple
 * of HKV_MEMORY_ALIGNMENT on. base = NULL: there is none. */
#define HKV_MEMORY_ALIGNMENT 512
typedef struct hkv_memory {
    void *base;
    size_t n_bytes;
} hkv_memory;

/* ---------------------------------------------------------------------------------------------------- configuration */

typedef enum hkv_dtype { HKV_F16 = 0, HKV_BF16 = 1, HKV_F32 = 2 } hkv_dtype;

/* Bytes of one element, 0 for a value that is no hkv_dtype. */
size_t hkv_dtype_bytes(hkv_dtype dtype);
const char *hkv_dtype_name(hkv_dtype dtype); /* "float16", "bfloat16", "float32" */

/* The settings of hybrid_v2 and ours. Start from hkv_config_init(); change fields directly or by name with
 * hkv_config_set_number(); hkv_config_check() is the one place that knows which combinations are allowed. */
typedef struct hkv_config {
    int32_t hot_tokens;           /* newest tokens kept in the model's dtype: 16, 32, 48, 64 or 128 */
    int32_t quantization_bits;    /* 8: INT8; 6: keys 8, values 4; 4: INT4; 0: no quantisation */
    int32_t block_size;           /* tokens in a block, divisible by 8, at most 512; 64 is tuned */
    int32_t sparse_top_k;         /* L2 blocks read per KV head and step in decode */
    int32_t sink_blocks;          /* first blocks of a sequence that stay hot, 0..16 */
    int32_t migration_throttling; /* 0 or 1; read by the access policy */
    int32_t kv_cache_debug;       /* 0 or 1 */
    float skip_mass;              /* progressive reading: below this share a record's values are not read; 0 = off */
    float refine_mass;            /* progressive reading: from this share on the low planes are read; 0 = always */
    float sparse_min_mass;        /* 0, or the share of L2's estimated mass that selection must cover, < 1 */
} hkv_config;

/* The defaults: 32 / 8 / 64, sparse_top_k 32, sink_blocks 1, throttling on, debug off, skip 1e-3, refine 0.05. */
void hkv_config_init(hkv_config *config);

/* The defaults of a GPU class: "H100", "H200", "A100", "L4". HKV_ERR_ARGUMENT lists the known names. */
hkv_status hkv_config_init_preset(hkv_config *config, const char *gpu_name, hkv_error *error);

/* Number of fields, and the name and kind ('i' integer, 'b' bool, 'f' real) of field i in the order above; NULL / 0 out
 * of range. Front ends iterate over these, so that a new field appears everywhere at once. */
int32_t hkv_config_n_fields(void);
const char *hkv_config_field_name(int32_t field_idx);
char hkv_config_field_kind(int32_t field_idx);

/* Set or read a field by name. An unknown name is HKV_ERR_UNKNOWN_KEY and the message names the nearest right key;
 * a value that is not whole (or not 0/1) for an integer (bool) field is HKV_ERR_ARGUMENT. Rules between fields and
 * ranges are left to hkv_config_check. */
hkv_status hkv_config_set_number(hkv_config *config, const char *name, double value, hkv_error *error);
hkv_status hkv_config_get_number(const hkv_config *config, const char *name, double *value, hkv_error *error);

/* HKV_OK, or the first broken rule as field, rule and value. */
hkv_status hkv_config_check(const hkv_config *config, hkv_error *error);

/* What is allowed but deserves a word (block_size not tuned, ...); "" if nothing. Writes at most n_bytes with the final
 * zero, one sentence a line. */
void hkv_config_warnings(const hkv_config *config, char *text, size_t n_bytes);

/* ------------------------------------------------------------------------------------------------------ thread pool */

/* Workers shared by any number of stores and caches of one process. */
typedef struct hkv_threads hkv_threads;

/* n_threads >= 1 counts the calling thread; 0 means the cores this process may run on. HKV_ERR_NO_MEMORY if a thread
 * cannot be made. The pool must outlive every store and cache that was given it. After fork() the child's pool starts
 * its workers anew on first use. */
hkv_status hkv_threads_create(int32_t n_threads, hkv_threads **threads, hkv_error *error);
void hkv_threads_destroy(hkv_threads *threads);
int32_t hkv_threads_count(const hkv_threads *threads);
/* Change the number of workers. HKV_ERR_BUSY while a job runs. */
hkv_status hkv_threads_resize(hkv_threads *threads, int32_t n_threads, hkv_error *error);

/* The CPU code paths in ascending order of preference: "reference", "avx2", "avx512". */
int32_t hkv_cpu_n_paths(void);
const char *hkv_cpu_path_name(int32_t path_idx);
/* 1 if this machine can run it. */
int32_t hkv_cpu_path_supported(int32_t path_idx);

/* ----------------------------------------------------------------------------------------------------------------
 * model */

/* One layer group: layers that have the same sliding window and therefore share block tables. */
typedef struct hkv_model {
    int32_t n_layers;
    int32_t n_kv_heads; /* Hkv */
    int32_t head_dim;   /* D: 16..256 in steps of 16 */
    hkv_dtype dtype;    /* of q, k, v and of the hot zone */
    /* [n_layers] window in tokens a query sees including itself, 0 = all. NULL = no layer has one. */
    const int32_t *layer_windows;
} hkv_model;

/* ----------------------------------------------------------------------------------------------------------------
 * batch */

/* What an engine says about one step; the whole input of every hot/cold decision. The arrays live on the store's device
 * and stay valid and unchanged from begin until the last attend of the step.
 *
 * Row r has the new tokens cu_new_tokens[r] .. cu_new_tokens[r+1]-1 of the flat token arrays, and afterwards
 * seq_lens[r] tokens in all. Rows with no new tokens or of length 0 are padding. Only slots >= 0 move state. */
typedef struct hkv_batch {
    int32_t n_rows;               /* R */
    int32_t n_new_tokens;         /* N = cu_new_tokens[R] */
    int32_t max_row_tokens;       /* no row has more new tokens than this, else the step is refused; 0 = not known */
    const int32_t *cu_new_tokens; /* [R + 1] */
    const int32_t *seq_lens;      /* [R] tokens including the new ones */
    const int32_t *block_table;   /* [R, block_table_stride] physical block of every logical block */
    int64_t block_table_stride;   /* >= ceil(max(seq_lens) / T) */
    const int64_t *slot_mapping;  /* [N] */
    /* [R] or NULL. c > 0: before its first write the row's first written block takes the tokens before the write from
     * block c (from its hot page if it has one, else its record): copy-on-write and reuse of part of a block. */
    const int32_t *copy_sources;
    /* [1] time for access statistics, in ms or in steps. NULL = no statistics in this step. */
    const int64_t *clock;
    void *stream; /* CUDA stream on which the step is decided, NULL on the CPU */
} hkv_batch;

/* One layer's attention. Token i of the batch is row i of q, k, v and out. Pointers live on the store's device. */
typedef struct hkv_attend {
    int32_t n_q_heads; /* Hq, a multiple of Hkv */
    /* [N, Hq, D]; NULL: only append, which needs k and v alone (a cache closes a failed step like this) */
    const void *q;
    const void *k; /* [N, Hkv, D], RoPE applied */
    const void *v; /* [N, Hkv, D] */
    void *out;     /* [N, Hq, D], must not overlap q, k, v */
    int64_t q_stride_token, q_stride_head;
    int64_t k_stride_token, k_stride_head;
    int64_t v_stride_token, v_stride_head;
    int64_t out_stride_token, out_stride_head;
    float softmax_scale;      /* > 0; scores are scale * q.k */
    float logits_soft_cap;    /* 0 = none; c: score = c * tanh(score / c), before the mask */
    const float *sink_logits; /* [Hq] or NULL: a learned logit that joins the denominator only */
    float *lse;               /* [N, Hq] or NULL: natural log of the denominator, -inf if nothing is visible */
    /* [R, Hkv, mass_stride] or NULL: share of the row's softmax on each logical block, largest over the group's heads
     * and the row's query tokens; 0 for what was skipped or not selected. Decode rows only; prefill rows get zeros. */
    float *mass;
    int64_t mass_stride; /* >= ceil(max(seq_lens) / T) */
    void *stream;        /* CUDA stream, NULL on the CPU */
} hkv_attend;

/* A row is decoded (progressive and sparse reading apply) if it has at most this many new tokens, else prefilled. */
#define HKV_DECODE_MAX_TOKENS 8

/* Counters since creation. Shares of a step: difference of two readings. */
typedef struct hkv_counters {
    uint64_t n_steps;
    uint64_t n_tokens_appended; /* per group, not per layer */
    uint64_t n_blocks_sealed;
    uint64_t n_blocks_sealed_direct; /* straight from K/V, without a hot page */
    uint64_t n_pages_claimed;
    uint64_t n_pages_restored;     /* claims that took earlier tokens from a record or another page */
    uint64_t n_pages_evicted;      /* sealed pages given up */
    uint64_t n_partial_evicted;    /* partial pages written to their record and given up */
    uint64_t n_hot_blocks_read;    /* block reads answered by the hot zone, per row and group */
    uint64_t n_hot_blocks_wanted;  /* blocks of windows and sinks that a row reached into */
    uint64_t n_records_read;       /* decode: records whose K high plane was read (row x layer x KV head x record) */
    uint64_t n_records_skipped;    /* ... whose values were skipped */
    uint64_t n_records_refined;    /* ... whose low planes were read */
    uint64_t n_records_unselected; /* L2 records not selected */
    uint64_t n_bytes_read;         /* payload, parameter and hot bytes read by decode attention */
    uint64_t n_nonfinite_inputs;   /* K/V elements that were clamped when sealed (not finite or beyond 61408) */
    double skipped_mass;           /* sum over decode rows x layers x KV heads of the estimated share skipped */
    uint64_t n_skipped_mass_terms; /* number of terms in that sum */
} hkv_counters;

/* A device that holds pages and computes; csrc/backend.h. NULL in the options below means the CPU. */
typedef struct hkv_backend hkv_backend;

/* -------------------------------------------------------------------------------------------------- store: attached */

typedef struct hkv_store hkv_store;

typedef enum hkv_tier { HKV_TIER_L1 = 1, HKV_TIER_L2 = 2 } hkv_tier;

typedef struct hkv_store_options {
    hkv_config config;
    int32_t n_layers, n_kv_heads, head_dim;
    hkv_dtype dtype;
    int32_t window_tokens;          /* sliding window of every layer of this group, 0 = none */
    int32_t n_blocks;               /* B: blocks in the engine's pool, including the null block */
    int32_t max_rows;               /* largest R of a step */
    int64_t max_new_tokens;         /* largest N of a step */
    int64_t max_sequence_tokens;    /* longest row; 0: B * T */
    int32_t n_hot_pages;            /* 0: the size that guarantees that live rows never lose a partial page */
    uint32_t first_stamp;           /* 0: drawn from clock and address; else stamps count from here (tests, replays) */
    const hkv_backend *backend;     /* NULL = CPU; kept */
    int32_t device_index;           /* which device of the backend */
    hkv_threads *threads;           /* CPU only; kept */
    const char *cpu_path;           /* NULL: the best one, or the one named by HYBRIDKV_CPU */
    const hkv_allocator *allocator; /* NULL = malloc */
    hkv_memory memory;              /* for hkv_store_memory_bytes(); base NULL: the backend allocates */
} hkv_store_options;

/* Bytes of one token of one KV head in a page, for the engine's page size: record_bytes / T. Whole for T = 64. */
hkv_status hkv_store_page_bytes(const hkv_config *config, int32_t head_dim, hkv_dtype dtype, size_t *record_bytes,
                                hkv_error *error);
/* Host (or device) bytes a store of these options allocates, hot pages included. */
hkv_status hkv_store_required_bytes(const hkv_store_options *options, size_t *n_bytes, hkv_error *error);

/* Those of them that lie in options.memory if there is one: hot pages, tables and scratch. */
hkv_status hkv_store_memory_bytes(const hkv_store_options *options, size_t *n_bytes, hkv_error *error);

/* HKV_ERR_BUDGET_SMALL if options.memory is too small. */
hkv_status hkv_store_create(const hkv_store_options *options, hkv_store **store, hkv_error *error);
void hkv_store_destroy(hkv_store *store); /* captured graphs: as hkv_cache_destroy says */

/* Tell where a layer's pages are: the record of block b and KV head h is at base + b * block_stride_bytes +
 * h * head_stride_bytes. base is 16-byte aligned, both strides multiples of 16, and the memory outlives the store.
 * Pages need no initial content. */
hkv_status hkv_store_bind_layer(hkv_store *store, int32_t layer_idx, void *base, size_t block_stride_bytes,
                                size_t head_stride_bytes, hkv_error *error);

/* Decide a step: which pages are claimed, restored, sealed, evicted, and what each row reads hot (docs/transitions.md).
 * Changes the directory; page contents change in each layer's attend. Calling it again with the same batch is harmless.
 * HKV_ERR_RANGE for block ids or slots outside the pool, HKV_ERR_CACHE_FULL if this step alone writes to more blocks
 * than there are hot pages; both before anything changed. Retains the batch's pointers until the next begin.
 *
 * On a device all this happens on the batch's stream, after the call: a step that turns out to be refused writes
 * nothing, its attends leave `out` as it was, and the first begin that knows of it returns the error and does nothing
 * else. */
hkv_status hkv_store_begin(hkv_store *store, const hkv_batch *batch, hkv_error *error);

/* Append this step's K and V to one layer, then attend. Once per layer and step, any layer order. */
hkv_status hkv_store_attend(hkv_store *store, int32_t layer_idx, const hkv_attend *args, hkv_error *error);

/* Start bringing the hot pages that the open step will read in one layer into a device's L2 cache, on `stream`, which
 * must come after the one that the step began on. Changes nothing, waits for nothing, and does nothing on the CPU. */
hkv_status hkv_store_prefetch_hot(hkv_store *store, int32_t layer_idx, void *stream, hkv_error *error);

/* Dequantise what layer_idx holds of one row of a block table (tokens first_token .. first_token+n_tokens-1) into
 * k_out, v_out [n_tokens, Hkv, D] contiguous in the model's dtype, from the hot zone or the record as the next step
 * would read it for a row of length seq_len. k_out and v_out live on the store's device, block_table on the host. Waits
 * for the device, so it has no place inside a step that is to be captured. */
hkv_status hkv_store_read_tokens(hkv_store *store, int32_t layer_idx, const int32_t *block_table, int64_t seq_len,
                                 int64_t first_token, int64_t n_tokens, void *k_out, void *v_out, hkv_error *error);

/* Place or read the tier of one record by hand (tests, experiments). get writes 0 for a block that is not sealed. */
hkv_status hkv_store_set_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, hkv_tier tier,
                              hkv_error *error);
hkv_status hkv_store_get_tier(hkv_store *store, int32_t layer_idx, int32_t kv_head, int32_t block, int32_t *tier,
                              hkv_error *error);

void hkv_store_read_counters(const hkv_store *store, hkv_counters *counters);

/* Directory entry of a block: its hot page or -1, tokens valid in it, whether it is sealed. For tests and debugging. */
typedef struct hkv_block_info {
    int32_t hot_page;
    int32_t n_hot_tokens;
    int32_t sealed;
    uint32_t stamp;
} hkv_block_info;
hkv_status hkv_store_read_block(const hkv_store *store, int32_t block, hkv_block_info *info, hkv_error *error);

/* --------------------------------------------------------------------------------------------------- cache: managed */

typedef struct hkv_cache hkv_cache;

/* A sequence: index in the low 32 bits, generation above, so that a freed handle is recognised. 0 is never valid. */
typedef uint64_t hkv_sequence;

typedef struct hkv_cache_options {
    hkv_config config;
    hkv_model model;
    /* Hard bound over everything the cache allocates or keeps in memory, at most the size of memory if there is one;
     * 0: derive it from max_tokens. */
    size_t memory_bytes;
    /* Another bound: everything on the CPU, and on a device all that lies there (its tables on the host are a few
     * bytes a block), is in this memory; base NULL: the backend allocates it. HKV_ERR_BUDGET_SMALL says how much the
     * smallest cache takes. */
    hkv_memory memory;
    int64_t max_tokens;         /* tokens over all sequences; 0: as many as memory_bytes and memory hold */
    int32_t max_sequences;      /* >= 1 */
    int64_t max_step_tokens;    /* largest number of new tokens in a step, >= max_sequences; 0 = 8192 */
    size_t hot_memory_bytes;    /* 0: the guaranteed size; smaller is allowed and stays correct */
    uint64_t hash_key[2];       /* key of the prefix hash; draw it at random */
    int32_t prefix_reuse;       /* 1: blocks are found again by their tokens */
    const hkv_backend *backend; /* NULL = CPU; kept */
    int32_t device_index;
    hkv_threads *threads; /* CPU only; kept */
    const char *cpu_path;
    const hkv_allocator *allocator;
    /* Tests only: 0, or the number of low bits of the prefix hash that are kept, to force collisions. */
    int32_t test_hash_bits;
} hkv_cache_options;

hkv_status hkv_cache_create(const hkv_cache_options *options, hkv_cache **cache, hkv_error *error);
/* A CUDA graph that holds attends of the cache must not be launched any more: it would work on freed memory. A backend
 * that was built with HYBRIDKV_CUDA_DEBUG=1 traps then. */
void hkv_cache_destroy(hkv_cache *cache);

/* Start a sequence. token_ids [n_tokens] (>= 0, may be NULL with n_tokens 0) are the tokens that the caller means to
 * append; as many of their leading ones as the cache already holds (never the last) are taken over, and *n_cached says
 * how many need no compute. salt [salt_bytes] separates tenants: no block is shared between different salts. */
hkv_status hkv_cache_add_sequence(hkv_cache *cache, const int64_t *token_ids, int64_t n_tokens, const void *salt,
                                  size_t salt_bytes, hkv_sequence *sequence, int64_t *n_cached, hkv_error *error);
/* A second sequence with the same content; blocks are shared until one of them writes. */
hkv_status hkv_cache_fork(hkv_cache *cache, hkv_sequence sequence, hkv_sequence *forked, hkv_error *error);
/* Keep the first n_tokens. Growing is HKV_ERR_ARGUMENT, and so is a length before which layers with a window dropped
 * tokens that they would have to read: block_size tokens can always be taken back, and all of them. */
hkv_status hkv_cache_truncate(hkv_cache *cache, hkv_sequence sequence, int64_t n_tokens, hkv_error *error);
/* sequences[i] takes the content of sequences[source_idx[i]] (beam search); handles stay. */
hkv_status hkv_cache_reorder(hkv_cache *cache, const hkv_sequence *sequences, const int32_t *source_idx, int32_t n,
                             hkv_error *error);
/* End a sequence. Its blocks stay findable until the space is needed. */
hkv_status hkv_cache_free(hkv_cache *cache, hkv_sequence sequence, hkv_error *error);
hkv_status hkv_cache_sequence_length(const hkv_cache *cache, hkv_sequence sequence, int64_t *n_tokens,
                                     hkv_error *error);
/* Forget all sequences and all reusable blocks. */
hkv_status hkv_cache_reset(hkv_cache *cache, hkv_error *error);

/* Open a step: row i is sequences[i] with n_tokens[i] >= 0 new tokens; a sequence appears once. token_ids (flat, in row
 * order) or NULL: without them blocks completed in this step can only be found again where add_sequence named their
 * tokens. Blocks are reserved here, so HKV_ERR_CACHE_FULL comes before anything changed and can be retried after a
 * free. The sequences have their new length from now on. The step is decided on `stream` (a CUDA stream, NULL on the
 * CPU); it must be the one of the attends, or ordered before them and after those of the previous step. On a device the
 * error can be that of an earlier step (hkv_store_begin), whose tokens are missing then: truncate or free its
 * sequences. */
hkv_status hkv_cache_begin(hkv_cache *cache, const hkv_sequence *sequences, const int64_t *n_tokens, int32_t n_rows,
                           const int64_t *token_ids, int64_t clock, void *stream, hkv_error *error);
/* Attend one layer of the open step; each layer once. */
hkv_status hkv_cache_attend(hkv_cache *cache, int32_t layer_idx, const hkv_attend *args, hkv_error *error);
/* Count every layer of the open step as attended: a CUDA graph that holds the attends of all layers, captured in an
 * earlier step of as many rows and at least as many tokens, was launched in their place. */
hkv_status hkv_cache_mark_attended(hkv_cache *cache, hkv_error *error);
/* As hkv_store_prefetch_hot, for a layer of the open step. */
hkv_status hkv_cache_prefetch_hot(hkv_cache *cache, int32_t layer_idx, void *stream, hkv_error *error);
/* Close the step. With every layer attended its full blocks become findable; if some layer was not attended (the
 * caller's forward pass failed), the sequences go back to the length they had before the step. */
hkv_status hkv_cache_end(hkv_cache *cache, hkv_error *error);
/* Close the step as failed, whatever was attended: the sequences go back to the length they had before it. */
hkv_status hkv_cache_abort(hkv_cache *cache, hkv_error *error);
/* The step's total of new tokens, and the longest sequence after it (for sizing outputs); 0 if no step is open. */
int64_t hkv_cache_step_tokens(const hkv_cache *cache);
int64_t hkv_cache_step_max_length(const hkv_cache *cache);

/* Dequantised content, as hkv_store_read_tokens. */
hkv_status hkv_cache_read_tokens(hkv_cache *cache, hkv_sequence sequence, int32_t layer_idx, int64_t first_token,
                                 int64_t n_tokens, void *k_out, void *v_out, hkv_error *error);
/* tiers [n_blocks] of a sequence's sealed blocks in one layer and KV head (0 where not sealed); n_blocks in/out. */
hkv_status hkv_cache_read_tiers(hkv_cache *cache, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head,
                                uint8_t *tiers, int64_t *n_blocks, hkv_error *error);
hkv_status hkv_cache_set_tier(hkv_cache *cache, hkv_sequence sequence, int32_t layer_idx, int32_t kv_head,
                              int64_t logical_block, hkv_tier tier, hkv_error *error);

/* Where the pages of a layer are, for dumps: the record of block b and KV head h is at base + b * block_stride_bytes +
 * h * head_stride_bytes, of record_bytes; n_blocks counts the null block. Device memory on a device, and all that steps
 * wrote is there when this returns; to be read only while no other call runs; valid until hkv_cache_destroy. */
typedef struct hkv_cache_pages {
    const uint8_t *base;
    size_t block_stride_bytes, head_stride_bytes, record_bytes;
    int32_t n_blocks, n_kv_heads;
} hkv_cache_pages;
hkv_status hkv_cache_read_pages(const hkv_cache *cache, int32_t layer_idx, hkv_cache_pages *pages, hkv_error *error);
/* blocks [n_blocks]: the physical block of every logical block of a sequence in one layer, 0 where it was freed because
 * it fell out of the layer's window; n_blocks in/out. */
hkv_status hkv_cache_read_table(const hkv_cache *cache, hkv_sequence sequence, int32_t layer_idx, int32_t *blocks,
                                int64_t *n_blocks, hkv_error *error);

/* Where every byte is. The *_bytes of the kinds add up to allocated_bytes, which never exceeds memory_bytes. */
typedef struct hkv_cache_stats {
    size_t memory_bytes;     /* the bound */
    size_t allocated_bytes;  /* what was allocated or taken of options.memory, all at creation */
    size_t record_bytes;     /* cold payload with its headers, or 16-bit pages at bits 0 */
    size_t hot_bytes;        /* hot pages */
    size_t directory_bytes;  /* hot directory and step tables */
    size_t table_bytes;      /* sequences and block tables */
    size_t prefix_bytes;     /* hashes, tokens of blocks, least-recently-used lists */
    size_t workspace_bytes;  /* scratch of a step */
    size_t unused_bytes;     /* alignment */
    int64_t n_blocks_total;  /* over all groups, without null blocks */
    int64_t n_blocks_live;   /* referenced by a sequence */
    int64_t n_blocks_cached; /* unreferenced but findable */
    int64_t n_blocks_free;
    int64_t n_hot_pages_total, n_hot_pages_used;
    int64_t max_tokens; /* capacity of one sequence alone */
    int64_t n_sequences;
    int64_t n_tokens;                        /* over all sequences */
    int64_t n_prefix_queries, n_prefix_hits; /* in tokens */
    int64_t n_prefix_evictions;              /* blocks */
    size_t bytes_in_use;                     /* records and hot pages that hold live tokens, by what they occupy */
    hkv_counters counters;                   /* summed over groups */
} hkv_cache_stats;
void hkv_cache_read_stats(const hkv_cache *cache, hkv_cache_stats *stats);

/* Walk all invariants (reference counts, lists, tables, directory); HKV_ERR_STATE names the first broken one. */
hkv_status hkv_cache_check(const hkv_cache *cache, hkv_error *error);

#ifdef __cplusplus
}
#endif
#endif
