/* test_prefix.c - block pools, SipHash and the prefix tree on their own. */
#include "prefix.h"
#include "test.h"

enum { T = 8, MAX_BLOCKS = 64, N_SEQUENCES = 4, MAX_NODES = 2 * MAX_BLOCKS + N_SEQUENCES, N_BUCKETS = 16 };

/* ---------------------------------------------------------------------------------------------------- SipHash-2-4 */

/* The published vectors: key 00 01 .. 0f, input 00 01 02 ..; those of whole words. */
static void test_siphash_vectors(void)
{
    const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    const uint64_t words[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    CHECK(hkv_siphash(key, words, 0) == 0x726fdb47dd0e0e31u);
    CHECK(hkv_siphash(key, words, 1) == 0x93f5f5799a932462u);
    CHECK(hkv_siphash(key, words, 2) == 0x3f2acc7f57c29bdbu);
}

/* ---------------------------------------------------------------------------------------------------------- pools */

typedef struct pool_memory {
    int32_t n_refs[MAX_BLOCKS], node[MAX_BLOCKS], next[MAX_BLOCKS], prev[MAX_BLOCKS];
} pool_memory;

static hkv_block_pool make_pool(pool_memory *memory, int32_t n_blocks)
{
    hkv_block_pool pool = {.n_blocks = n_blocks,
                           .n_refs = memory->n_refs,
                           .node = memory->node,
                           .next = memory->next,
                           .prev = memory->prev};
    hkv_block_pool_reset(&pool);
    return pool;
}

static void test_pool_hands_out_low_blocks_first(void)
{
    pool_memory memory;
    hkv_block_pool pool = make_pool(&memory, 4);
    CHECK_INT(pool.n_free, 3);
    for (int32_t i = 1; i < 4; i++) CHECK_INT(hkv_block_pool_take(&pool), i);
    CHECK_INT(hkv_block_pool_n_available(&pool), 0);
    hkv_block_pool_release(&pool, 2);
    CHECK_INT(hkv_block_pool_n_live(&pool), 2);
    CHECK_INT(hkv_block_pool_take(&pool), 2);
}

static void test_pool_keeps_blocks_with_a_node_in_order_of_release(void)
{
    pool_memory memory;
    hkv_block_pool pool = make_pool(&memory, 8);
    for (int32_t i = 1; i < 6; i++) hkv_block_pool_set_node(&pool, hkv_block_pool_take(&pool), 10 + i);
    const int32_t order[] = {3, 1, 5, 2, 4};
    for (int32_t i = 0; i < 5; i++) hkv_block_pool_release(&pool, order[i]);
    CHECK_INT(pool.n_cached, 5);
    CHECK_INT(hkv_block_pool_oldest(&pool), 3);
    hkv_block_pool_retain(&pool, 3); /* in use again */
    CHECK_INT(hkv_block_pool_oldest(&pool), 1);
    hkv_block_pool_touch(&pool, 1);
    hkv_block_pool_set_node(&pool, 5, 0); /* forgotten: free */
    CHECK_INT(pool.n_free, 3);
    CHECK_INT(hkv_block_pool_oldest(&pool), 2);
    hkv_block_pool_set_node(&pool, 2, 0);
    hkv_block_pool_set_node(&pool, 4, 0);
    CHECK_INT(hkv_block_pool_oldest(&pool), 1);
    CHECK_INT(pool.n_cached, 1);
}

/* --------------------------------------------------------------------------------------------------------------
 * fixture */

/* A tree over a trunk and, if window > 0, one windowed group. */
typedef struct tree {
    hkv_prefix prefix;
    hkv_block_pool pools[2];
    pool_memory memory[2];
    int32_t windows[2];
    hkv_prefix_node nodes[MAX_NODES];
    int32_t buckets[N_BUCKETS], companions[MAX_NODES], n_known[MAX_BLOCKS], next_same[MAX_BLOCKS];
    int64_t tokens[MAX_BLOCKS * T];
} tree;

static tree *tree_create(int32_t n_blocks, int32_t window, int32_t hash_bits)
{
    tree *t = calloc(1, sizeof *t);
    t->windows[1] = window;
    t->pools[0] = make_pool(&t->memory[0], n_blocks);
    t->pools[1] = make_pool(&t->memory[1], n_blocks);
    t->prefix = (hkv_prefix){.block_tokens = T,
                             .n_groups = window > 0 ? 2 : 1,
                             .n_nodes = (int32_t)hkv_prefix_n_nodes(n_blocks, N_SEQUENCES),
                             .n_buckets = N_BUCKETS,
                             .key = {1, 2},
                             .hash_mask = hash_bits == 0 ? UINT64_MAX : ((uint64_t)1 << hash_bits) - 1,
                             .windows = t->windows,
                             .pools = t->pools,
                             .nodes = t->nodes,
                             .buckets = t->buckets,
                             .companions = t->companions,
                             .tokens = t->tokens,
                             .n_known = t->n_known,
                             .next_same = t->next_same};
    hkv_prefix_reset(&t->prefix);
    return t;
}

/* A sequence of blocks that lives in the tree. */
typedef struct path {
    int32_t root, n_blocks;
    int32_t blocks[2][MAX_BLOCKS];
} path;

/* Write tokens [n_tokens] below root into new blocks, as a sequence would that knows no better, and make them findable
 * in every group. */
static path tree_write(tree *t, int32_t root, const int64_t *tokens, int32_t n_tokens)
{
    path p = {.root = root};
    int32_t parent = root;
    hkv_prefix_retain_root(&t->prefix, root);
    for (int32_t first = 0; first < n_tokens; first += T, p.n_blocks++) {
        int32_t n = n_tokens - first < T ? n_tokens - first : T;
        for (int32_t group = 0; group < t->prefix.n_groups; group++)
            p.blocks[group][p.n_blocks] = hkv_prefix_take_block(&t->prefix, group);
        int32_t block = p.blocks[0][p.n_blocks];
        hkv_prefix_write_tokens(&t->prefix, block, 0, tokens + first, n);
        parent = hkv_prefix_add_block(&t->prefix, parent, block, n);
        if (t->prefix.n_groups > 1 && parent != 0)
            hkv_prefix_add_companion(&t->prefix, 1, parent, p.blocks[1][p.n_blocks]);
    }
    return p;
}

static void tree_release(tree *t, const path *p)
{
    for (int32_t i = p->n_blocks - 1; i >= 0; i--)
        for (int32_t group = 0; group < t->prefix.n_groups; group++)
            hkv_prefix_release_block(&t->prefix, group, p->blocks[group][i]);
    hkv_prefix_release_root(&t->prefix, p->root);
}

static void tree_check(const tree *t)
{
    hkv_error error = {0};
    CHECK_OK(hkv_prefix_check(&t->prefix, &error));
    if (error.status != HKV_OK) printf("%s\n", error.message);
}

static int64_t tree_match(const tree *t, int32_t root, const int64_t *tokens, int32_t n_tokens)
{
    int32_t nodes[MAX_BLOCKS];
    return hkv_prefix_match(&t->prefix, root, tokens, n_tokens, nodes).n_tokens;
}

static void count_up(int64_t *tokens, int32_t n_tokens, int64_t first)
{
    for (int32_t i = 0; i < n_tokens; i++) tokens[i] = first + i;
}

/* --------------------------------------------------------------------------------------------------------------
 * searches */

static void test_full_blocks_are_found_in_order(void)
{
    tree *t = tree_create(16, 0, 0);
    int64_t tokens[4 * T], other[4 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, "salt", 4);
    count_up(tokens, 4 * T, 0);
    path p = tree_write(t, root, tokens, 3 * T);
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 3 * T);
    CHECK_INT(tree_match(t, root, tokens, 3 * T - 1), 3 * T - 1); /* part of the third */
    CHECK_INT(tree_match(t, root, tokens, 0), 0);
    memcpy(other, tokens, sizeof tokens);
    other[T + 3] = 1000;
    CHECK_INT(tree_match(t, root, other, 4 * T), T + 3);
    other[0] = 1000;
    CHECK_INT(tree_match(t, root, other, 4 * T), 0);
    CHECK_INT(tree_match(t, root, tokens + T, 2 * T), 0); /* the same blocks with another beginning */
    tree_check(t);
    tree_release(t, &p);
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 3 * T);
    CHECK_INT(t->pools[0].n_cached, 3);
    tree_check(t);
    free(t);
}

static void test_salts_and_formats_are_separate(void)
{
    tree *t = tree_create(16, 0, 0);
    int64_t tokens[T];
    count_up(tokens, T, 0);
    int32_t root = hkv_prefix_acquire_root(&t->prefix, "a", 1);
    tree_write(t, root, tokens, T);
    const struct {
        const char *salt;
        size_t n_bytes;
    } others[] = {{"b", 1}, {"", 0}, {"a\0", 2}, {"aa", 2}, {"aaaaaaaaa", 9}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        int32_t other = hkv_prefix_acquire_root(&t->prefix, others[i].salt, others[i].n_bytes);
        CHECK(other != root);
        CHECK_INT(tree_match(t, other, tokens, T), 0);
        hkv_prefix_release_root(&t->prefix, other);
    }
    CHECK_INT(hkv_prefix_acquire_root(&t->prefix, "a", 1), root);
    t->prefix.format_id++;
    CHECK(hkv_prefix_acquire_root(&t->prefix, "a", 1) != root);
    tree_check(t);
    free(t);
}

static void test_token_boundaries_are_no_ambiguity(void)
{
    tree *t = tree_create(16, 0, 0);
    const int64_t tokens[T] = {1, 23, 4}, other[T] = {12, 3, 4}, third[T] = {1, 2, 34};
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    tree_write(t, root, tokens, T);
    CHECK_INT(tree_match(t, root, other, T), 0);
    CHECK_INT(tree_match(t, root, third, T), 1);
    CHECK_INT(tree_match(t, root, tokens, T), T);
    free(t);
}

/* The longest common beginning with any of n paths: what a tree of unlimited size must find. */
static int32_t longest_common(const int64_t (*all)[3 * T], int32_t n, const int64_t *tokens)
{
    int32_t best = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t length = 0;
        while (length < 3 * T && all[i][length] == tokens[length]) length++;
        if (length > best) best = length;
    }
    return best;
}

static void test_forced_collisions_never_share(void)
{
    for (int32_t hash_bits = 1; hash_bits <= 4; hash_bits++) {
        tree *t = tree_create(MAX_BLOCKS, 0, hash_bits);
        uint64_t random = (uint64_t)hash_bits;
        int64_t all[16][3 * T], tokens[3 * T];
        int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0), n_shared = 0;
        for (int32_t i = 0; i < 16; i++) {
            for (int32_t j = 0; j < 3 * T; j++) all[i][j] = j % T < T - 1 ? 7 : test_random_int(&random, 3);
            tree_write(t, root, all[i], 3 * T);
        }
        tree_check(t);
        for (int32_t i = 0; i < 200; i++) {
            for (int32_t j = 0; j < 3 * T; j++) tokens[j] = j % T < T - 1 ? 7 : test_random_int(&random, 4);
            int32_t expected = longest_common((const int64_t(*)[3 * T]) all, 16, tokens);
            CHECK_INT(tree_match(t, root, tokens, 3 * T), expected);
            n_shared += expected >= T;
        }
        CHECK(n_shared > 50);
        free(t);
    }
}

static void test_partial_tails_are_found(void)
{
    tree *t = tree_create(16, 0, 0);
    int64_t tokens[2 * T], longer[2 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 2 * T, 0);
    path p = tree_write(t, root, tokens, T + 3);
    CHECK_INT(tree_match(t, root, tokens, 2 * T), T + 3);
    CHECK_INT(tree_match(t, root, tokens, T + 2), T + 2);
    CHECK_INT(hkv_prefix_n_findable(&t->prefix, 0, p.blocks[0][1]), 3);
    /* a longer tail and a different one beside it: the longest match wins */
    memcpy(longer, tokens, sizeof tokens);
    longer[T + 5] = 99;
    tree_write(t, root, longer, T + 6);
    CHECK_INT(tree_match(t, root, tokens, 2 * T), T + 5);
    CHECK_INT(tree_match(t, root, longer, 2 * T), T + 6);
    /* what is findable already is not added again */
    path same = tree_write(t, root, tokens, T + 4);
    CHECK_INT(hkv_prefix_n_findable(&t->prefix, 0, same.blocks[0][1]), 0);
    tree_check(t);
    free(t);
}

/* ----------------------------------------------------------------------------------------------- blocks and nodes */

static void test_duplicates_share_a_node_and_survive_each_other(void)
{
    tree *t = tree_create(16, 0, 0);
    int64_t tokens[3 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 3 * T, 0);
    path a = tree_write(t, root, tokens, 2 * T), b = tree_write(t, root, tokens, 3 * T);
    CHECK_INT(t->pools[0].node[a.blocks[0][0]], t->pools[0].node[b.blocks[0][0]]);
    tree_check(t);
    tree_release(t, &a); /* b holds the same: nothing is kept twice */
    CHECK_INT(t->pools[0].n_cached, 0);
    CHECK_INT(tree_match(t, root, tokens, 3 * T), 3 * T);
    a = tree_write(t, root, tokens, 2 * T);
    tree_release(t, &b);
    CHECK_INT(t->pools[0].n_cached, 1); /* only the third, which a does not have */
    tree_release(t, &a);
    CHECK_INT(t->pools[0].n_cached, 3);
    tree_check(t);
    /* evicted from the end */
    for (int32_t left = 2; left >= 0; left--) {
        hkv_prefix_forget_block(&t->prefix, 0, hkv_block_pool_oldest(&t->pools[0]));
        CHECK_INT(tree_match(t, root, tokens, 3 * T), left * T);
        tree_check(t);
    }
    free(t);
}

static void test_eviction_takes_the_least_recent_path_from_its_end(void)
{
    tree *t = tree_create(7, 0, 0); /* six blocks */
    int64_t old[3 * T], recent[3 * T], fresh[T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(old, 3 * T, 0);
    count_up(recent, 3 * T, 100);
    count_up(fresh, T, 200);
    path p = tree_write(t, root, old, 3 * T), q = tree_write(t, root, recent, 3 * T);
    tree_release(t, &p);
    tree_release(t, &q);
    for (int32_t left = 2; left >= 0; left--) {
        hkv_prefix_take_block(&t->prefix, 0);
        tree_check(t);
        CHECK_INT(tree_match(t, root, old, 3 * T), left * T);
        CHECK_INT(tree_match(t, root, recent, 3 * T), 3 * T);
    }
    CHECK_INT(t->prefix.n_evicted, 3);
    free(t);
}

/* A cached block that is written once more and released again counts as used then. */
static void test_duplicates_renew_what_is_cached(void)
{
    tree *t = tree_create(16, 0, 0);
    int64_t tokens[3 * T], other[T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 3 * T, 0);
    count_up(other, T, 100);
    path a = tree_write(t, root, tokens, 2 * T);
    tree_release(t, &a);
    path x = tree_write(t, root, other, T);
    tree_release(t, &x);
    path b = tree_write(t, root, tokens, 3 * T);
    tree_release(t, &b);
    CHECK_INT(t->pools[0].n_cached, 4);
    hkv_prefix_forget_block(&t->prefix, 0, hkv_block_pool_oldest(&t->pools[0]));
    CHECK_INT(tree_match(t, root, other, T), 0);
    for (int32_t left = 2; left >= 0; left--) {
        CHECK_INT(tree_match(t, root, tokens, 3 * T), (left + 1) * T);
        hkv_prefix_forget_block(&t->prefix, 0, hkv_block_pool_oldest(&t->pools[0]));
        tree_check(t);
    }
    free(t);
}

static void test_what_is_below_a_forgotten_block_goes_too(void)
{
    tree *t = tree_create(16, T, 0);
    int64_t tokens[4 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 4 * T, 0);
    path p = tree_write(t, root, tokens, 3 * T);
    tokens[3 * T - 1] = 99;
    path q = tree_write(t, root, tokens, 3 * T + 2);
    tree_release(t, &p);
    tree_release(t, &q);
    CHECK_INT(t->pools[0].n_cached, 5); /* two in common, and their ends */
    int32_t nodes[3];
    hkv_prefix_match(&t->prefix, root, tokens, 2 * T, nodes);
    hkv_prefix_forget_block(&t->prefix, 0, hkv_prefix_block_of(&t->prefix, 0, nodes[1]));
    tree_check(t);
    CHECK_INT(t->pools[0].n_cached, 1);
    CHECK_INT(t->pools[1].n_cached, 1);
    CHECK_INT(tree_match(t, root, tokens, 3 * T), T);
    free(t);
}

static void test_roots_go_with_their_last_user_and_child(void)
{
    tree *t = tree_create(8, 0, 0);
    int64_t tokens[T];
    count_up(tokens, T, 0);
    for (int32_t i = 0; i < 1000; i++) { /* far more salts than there are nodes */
        int32_t root = hkv_prefix_acquire_root(&t->prefix, &i, sizeof i);
        path p = tree_write(t, root, tokens, T);
        tree_release(t, &p);
        hkv_prefix_release_root(&t->prefix, root);
        tree_check(t);
    }
    CHECK_INT(t->pools[0].n_cached, 7);
    free(t);
}

/* -------------------------------------------------------------------------------------------------------- windows */

static void test_windowed_groups_must_hold_the_last_window(void)
{
    tree *t = tree_create(16, T + 2, 0); /* at a block's end the window reaches into two blocks */
    int64_t tokens[4 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 4 * T, 0);
    path p = tree_write(t, root, tokens, 4 * T);
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 4 * T);
    hkv_prefix_forget_block(&t->prefix, 1, p.blocks[1][0]); /* far outside */
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 4 * T);
    hkv_prefix_forget_block(&t->prefix, 1,
                            p.blocks[1][2]);          /* inside: only the first block is left to share, in part... */
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 0); /* ...but its own companion is gone too */
    hkv_prefix_add_companion(&t->prefix, 1, t->pools[0].node[p.blocks[0][0]], p.blocks[1][0]);
    CHECK_INT(tree_match(t, root, tokens, 4 * T), 2 * T);
    tree_check(t);
    free(t);
}

static void test_part_of_a_block_needs_every_group(void)
{
    tree *t = tree_create(16, T, 0);
    int64_t tokens[2 * T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, 2 * T, 0);
    path p = tree_write(t, root, tokens, 2 * T);
    CHECK_INT(tree_match(t, root, tokens, T + 5), T + 5);
    hkv_prefix_forget_block(&t->prefix, 1, p.blocks[1][1]);
    CHECK_INT(tree_match(t, root, tokens, T + 5), T);
    free(t);
}

static void test_companions_go_with_their_node(void)
{
    tree *t = tree_create(16, T, 0);
    int64_t tokens[T];
    int32_t root = hkv_prefix_acquire_root(&t->prefix, NULL, 0);
    count_up(tokens, T, 0);
    path p = tree_write(t, root, tokens, T);
    tree_release(t, &p);
    CHECK_INT(t->pools[1].n_cached, 1);
    hkv_prefix_forget_block(&t->prefix, 0, p.blocks[0][0]);
    CHECK_INT(t->pools[1].n_cached, 0);
    CHECK_INT(t->pools[1].n_free, 15);
    tree_check(t);
    free(t);
}

static void test_first_block_of_a_window(void)
{
    CHECK_INT(hkv_window_first_block(0, 1000, 64), 0);
    CHECK_INT(hkv_window_first_block(64, 64, 64), 0); /* sees 1..64 */
    CHECK_INT(hkv_window_first_block(64, 126, 64), 0);
    CHECK_INT(hkv_window_first_block(64, 127, 64), 1); /* sees 64..127 */
    CHECK_INT(hkv_window_first_block(1, 128, 64), 2);  /* sees itself */
    CHECK_INT(hkv_window_first_block(INT32_MAX, 128, 64), 0);
}

int main(void)
{
    RUN(test_siphash_vectors);
    RUN(test_pool_hands_out_low_blocks_first);
    RUN(test_pool_keeps_blocks_with_a_node_in_order_of_release);
    RUN(test_full_blocks_are_found_in_order);
    RUN(test_salts_and_formats_are_separate);
    RUN(test_token_boundaries_are_no_ambiguity);
    RUN(test_forced_collisions_never_share);
    RUN(test_partial_tails_are_found);
    RUN(test_duplicates_share_a_node_and_survive_each_other);
    RUN(test_eviction_takes_the_least_recent_path_from_its_end);
    RUN(test_duplicates_renew_what_is_cached);
    RUN(test_what_is_below_a_forgotten_block_goes_too);
    RUN(test_roots_go_with_their_last_user_and_child);
    RUN(test_windowed_groups_must_hold_the_last_window);
    RUN(test_part_of_a_block_needs_every_group);
    RUN(test_companions_go_with_their_node);
    RUN(test_first_block_of_a_window);
    return test_report();
}
