/* prefix.c - see prefix.h. */
#include "prefix.h"

#include <string.h>

#include "internal.h"

/* ---------------------------------------------------------------------------------------------------- SipHash-2-4 */

typedef struct siphash {
    uint64_t v[4];
    uint64_t n_words;
} siphash;

static uint64_t rotate_left(uint64_t x, int n_bits)
{
    return x << n_bits | x >> (64 - n_bits);
}

static void siphash_rounds(uint64_t v[4], int n_rounds)
{
    while (n_rounds-- > 0) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = rotate_left(v[1], 13) ^ v[0];
        v[3] = rotate_left(v[3], 16) ^ v[2];
        v[0] = rotate_left(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = rotate_left(v[1], 17) ^ v[2];
        v[3] = rotate_left(v[3], 21) ^ v[0];
        v[2] = rotate_left(v[2], 32);
    }
}

static siphash siphash_start(const uint64_t key[2])
{
    return (siphash){.v = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                           key[1] ^ 0x7465646279746573u}};
}

static void siphash_word(siphash *h, uint64_t word)
{
    h->v[3] ^= word;
    siphash_rounds(h->v, 2);
    h->v[0] ^= word;
    h->n_words++;
}

static uint64_t siphash_finish(siphash *h)
{
    siphash_word(h, h->n_words * 8 << 56); /* the length in bytes, modulo 256, in the last byte */
    h->v[2] ^= 0xff;
    siphash_rounds(h->v, 4);
    return h->v[0] ^ h->v[1] ^ h->v[2] ^ h->v[3];
}

uint64_t hkv_siphash(const uint64_t key[2], const uint64_t *words, size_t n_words)
{
    siphash h = siphash_start(key);
    for (size_t i = 0; i < n_words; i++) siphash_word(&h, words[i]);
    return siphash_finish(&h);
}

/* What is hashed is a sequence of fields, each with a tag and its length in bytes in front, so that no two different
 * sequences of fields are the same words. */
enum field_tag { FIELD_PARENT = 1, FIELD_TOKENS, FIELD_FORMAT, FIELD_SALT, FIELD_HALF };

static void hash_field_start(siphash *h, enum field_tag tag, size_t n_bytes)
{
    siphash_word(h, (uint64_t)tag);
    siphash_word(h, (uint64_t)n_bytes);
}

static void hash_field_number(siphash *h, enum field_tag tag, uint64_t value)
{
    hash_field_start(h, tag, sizeof value);
    siphash_word(h, value);
}

static uint64_t hash_block(const hkv_prefix *p, int32_t parent, const int64_t *tokens)
{
    siphash h = siphash_start(p->key);
    hash_field_number(&h, FIELD_PARENT, p->nodes[parent].hash);
    hash_field_start(&h, FIELD_TOKENS, (size_t)p->block_tokens * sizeof *tokens);
    for (int32_t i = 0; i < p->block_tokens; i++) siphash_word(&h, (uint64_t)tokens[i]);
    return siphash_finish(&h) & p->hash_mask;
}

/* One half of a salt's digest. */
static uint64_t hash_salt(const hkv_prefix *p, const uint8_t *salt, size_t n_bytes, int half)
{
    siphash h = siphash_start(p->key);
    hash_field_number(&h, FIELD_HALF, (uint64_t)half);
    hash_field_number(&h, FIELD_FORMAT, p->format_id);
    hash_field_start(&h, FIELD_SALT, n_bytes);
    for (size_t i = 0; i < n_bytes; i += 8) {
        uint64_t word = 0;
        for (size_t j = i; j < n_bytes && j < i + 8; j++) word |= (uint64_t)salt[j] << 8 * (j - i);
        siphash_word(&h, word);
    }
    return siphash_finish(&h);
}

/* ---------------------------------------------------------------------------------------------------------- nodes */

size_t hkv_prefix_n_nodes(int32_t n_blocks, int32_t max_sequences)
{
    /* none, one per block, and roots: each has a child or a user */
    return 1 + 2 * ((size_t)n_blocks - 1) + (size_t)max_sequences;
}

void hkv_prefix_reset(hkv_prefix *p)
{
    if (p->nodes == NULL) return;
    memset(p->nodes, 0, (size_t)p->n_nodes * sizeof *p->nodes);
    memset(p->buckets, 0, (size_t)p->n_buckets * sizeof *p->buckets);
    memset(p->companions, 0, (size_t)(p->n_groups - 1) * (size_t)p->n_nodes * sizeof *p->companions);
    memset(p->n_known, 0, (size_t)p->pools[0].n_blocks * sizeof *p->n_known);
    memset(p->next_same, 0, (size_t)p->pools[0].n_blocks * sizeof *p->next_same);
    p->free_node = 0;
    for (int32_t node = p->n_nodes - 1; node > 0; node--) {
        p->nodes[node].next_in_bucket = p->free_node;
        p->free_node = node;
    }
}

static int32_t *companion_entry(const hkv_prefix *p, int32_t group, int32_t node)
{
    return &p->companions[(size_t)(group - 1) * (size_t)p->n_nodes + (size_t)node];
}

static int64_t *block_tokens(const hkv_prefix *p, int32_t block)
{
    return p->tokens + (size_t)block * (size_t)p->block_tokens;
}

static const int64_t *node_tokens(const hkv_prefix *p, int32_t node)
{
    return block_tokens(p, p->nodes[node].first_block);
}

static int32_t *bucket_of(const hkv_prefix *p, uint64_t hash)
{
    return &p->buckets[hash & (uint64_t)(p->n_buckets - 1)];
}

/* Partial tails are found through their parent only. */
static bool is_hashed(const hkv_prefix *p, const hkv_prefix_node *node)
{
    return node->n_tokens == 0 || node->n_tokens == p->block_tokens;
}

static int32_t node_create(hkv_prefix *p, uint64_t hash, int32_t parent, int32_t n_tokens)
{
    int32_t node = p->free_node;
    hkv_prefix_node *n = &p->nodes[node];
    p->free_node = n->next_in_bucket;
    *n = (hkv_prefix_node){.hash = hash, .parent = parent, .n_tokens = n_tokens};
    if (is_hashed(p, n)) {
        int32_t *bucket = bucket_of(p, hash);
        n->next_in_bucket = *bucket;
        *bucket = node;
    }
    if (parent != 0) {
        hkv_prefix_node *up = &p->nodes[parent];
        n->next_sibling = up->first_child;
        if (up->first_child != 0) p->nodes[up->first_child].prev_sibling = node;
        up->first_child = node;
    }
    return node;
}

static void unlink_from_bucket(hkv_prefix *p, int32_t node)
{
    int32_t *link = bucket_of(p, p->nodes[node].hash);
    while (*link != node) link = &p->nodes[*link].next_in_bucket;
    *link = p->nodes[node].next_in_bucket;
}

static void unlink_from_parent(hkv_prefix *p, const hkv_prefix_node *n)
{
    if (n->prev_sibling != 0)
        p->nodes[n->prev_sibling].next_sibling = n->next_sibling;
    else
        p->nodes[n->parent].first_child = n->next_sibling;
    if (n->next_sibling != 0) p->nodes[n->next_sibling].prev_sibling = n->prev_sibling;
}

/* Roots go when nothing grows below them any more. */
static bool is_dead_root(const hkv_prefix_node *n)
{
    return n->n_tokens == 0 && n->first_child == 0 && n->n_users == 0;
}

/* The node has no children and no trunk blocks any more. */
static void node_destroy(hkv_prefix *p, int32_t node)
{
    hkv_prefix_node *n = &p->nodes[node];
    int32_t parent = n->parent;
    for (int32_t group = 1; group < p->n_groups; group++) {
        int32_t *companion = companion_entry(p, group, node);
        if (*companion != 0) hkv_block_pool_set_node(&p->pools[group], *companion, 0);
        *companion = 0;
    }
    if (is_hashed(p, n)) unlink_from_bucket(p, node);
    if (parent != 0) unlink_from_parent(p, n);
    *n = (hkv_prefix_node){.next_in_bucket = p->free_node};
    p->free_node = node;
    if (parent != 0 && is_dead_root(&p->nodes[parent])) node_destroy(p, parent); /* a root: one level deep */
}

/* ---------------------------------------------------------------------------------------------------------- roots */

int32_t hkv_prefix_acquire_root(hkv_prefix *p, const void *salt, size_t salt_bytes)
{
    if (p->nodes == NULL) return 0;
    uint64_t digest[2] = {hash_salt(p, salt, salt_bytes, 0), hash_salt(p, salt, salt_bytes, 1)};
    uint64_t hash = digest[0] & p->hash_mask;
    int32_t root = *bucket_of(p, hash);
    while (root != 0 && (p->nodes[root].n_tokens != 0 || memcmp(p->nodes[root].salt, digest, sizeof digest) != 0))
        root = p->nodes[root].next_in_bucket;
    if (root == 0) {
        root = node_create(p, hash, 0, 0);
        memcpy(p->nodes[root].salt, digest, sizeof digest);
    }
    p->nodes[root].n_users++;
    return root;
}

void hkv_prefix_retain_root(hkv_prefix *p, int32_t root)
{
    if (root != 0) p->nodes[root].n_users++;
}

void hkv_prefix_release_root(hkv_prefix *p, int32_t root)
{
    if (root == 0) return;
    p->nodes[root].n_users--;
    if (is_dead_root(&p->nodes[root])) node_destroy(p, root);
}

/* --------------------------------------------------------------------------------------------------------- search */

/* Equal tokens at the start of a and b. */
static int32_t common_length(const int64_t *a, const int64_t *b, int32_t n_tokens)
{
    int32_t n = 0;
    while (n < n_tokens && a[n] == b[n]) n++;
    return n;
}

/* The child of `parent` that holds the full block tokens [T]; 0 if there is none. */
static int32_t find_full_child(const hkv_prefix *p, int32_t parent, uint64_t hash, const int64_t *tokens)
{
    int32_t node = *bucket_of(p, hash);
    for (; node != 0; node = p->nodes[node].next_in_bucket) {
        const hkv_prefix_node *n = &p->nodes[node];
        if (n->hash == hash && n->parent == parent && n->n_tokens == p->block_tokens &&
            common_length(node_tokens(p, node), tokens, p->block_tokens) == p->block_tokens)
            return node;
    }
    return 0;
}

static bool has_companions(const hkv_prefix *p, int32_t node)
{
    for (int32_t group = 1; group < p->n_groups; group++)
        if (*companion_entry(p, group, node) == 0) return false;
    return true;
}

/* The child of `parent`, held by every group, that shares the longest beginning with tokens [n_tokens <= T]. */
static int32_t find_longest_child(const hkv_prefix *p, int32_t parent, const int64_t *tokens, int32_t n_tokens,
                                  int32_t *n_common)
{
    int32_t best = 0, n_seen = 0;
    *n_common = 0;
    for (int32_t node = p->nodes[parent].first_child; node != 0 && n_seen < HKV_PREFIX_MAX_SIBLINGS; n_seen++) {
        const hkv_prefix_node *n = &p->nodes[node];
        int32_t length = common_length(node_tokens(p, node), tokens, n_tokens < n->n_tokens ? n_tokens : n->n_tokens);
        if (length > *n_common && has_companions(p, node)) {
            *n_common = length;
            best = node;
        }
        node = n->next_sibling;
    }
    return best;
}

/* Is everything that a windowed group reads after path[0 .. n_path-1] there? */
static bool group_holds_window(const hkv_prefix *p, int32_t group, const int32_t *path, int32_t n_path)
{
    int64_t n_tokens = (int64_t)n_path * p->block_tokens;
    int64_t first = hkv_window_first_block(p->windows[group], n_tokens, p->block_tokens);
    for (int64_t i = n_path - 1; i >= first; i--)
        if (*companion_entry(p, group, path[i]) == 0) return false;
    return true;
}

static bool groups_hold_windows(const hkv_prefix *p, const int32_t *path, int32_t n_path)
{
    for (int32_t group = 1; group < p->n_groups; group++)
        if (!group_holds_window(p, group, path, n_path)) return false;
    return true;
}

hkv_prefix_hit hkv_prefix_match(const hkv_prefix *p, int32_t root, const int64_t *tokens, int64_t n_tokens,
                                int32_t *path)
{
    hkv_prefix_hit hit = {0, 0};
    int32_t block_size = p->block_tokens, n_common;
    if (p->nodes == NULL) return hit;
    for (int32_t parent = root; (int64_t)(hit.n_path + 1) * block_size <= n_tokens; parent = path[hit.n_path++]) {
        const int64_t *block = tokens + (size_t)hit.n_path * (size_t)block_size;
        path[hit.n_path] = find_full_child(p, parent, hash_block(p, parent, block), block);
        if (path[hit.n_path] == 0) break;
    }
    while (hit.n_path > 0 && !groups_hold_windows(p, path, hit.n_path)) hit.n_path--;
    hit.n_tokens = (int64_t)hit.n_path * block_size;
    n_tokens -= hit.n_tokens;
    int32_t child = find_longest_child(p, hit.n_path > 0 ? path[hit.n_path - 1] : root, tokens + hit.n_tokens,
                                       n_tokens < block_size ? (int32_t)n_tokens : block_size, &n_common);
    if (child != 0) {
        path[hit.n_path++] = child;
        hit.n_tokens += n_common;
    }
    return hit;
}

int32_t hkv_prefix_block_of(const hkv_prefix *p, int32_t group, int32_t node)
{
    return group == 0 ? p->nodes[node].first_block : *companion_entry(p, group, node);
}

/* --------------------------------------------------------------------------------------------------- known tokens */

void hkv_prefix_write_tokens(hkv_prefix *p, int32_t block, int32_t offset, const int64_t *tokens, int32_t n_tokens)
{
    if (p->nodes == NULL || p->n_known[block] < offset) return;
    p->n_known[block] = offset;
    if (tokens == NULL) return;
    memcpy(block_tokens(p, block) + offset, tokens, (size_t)n_tokens * sizeof *tokens);
    p->n_known[block] += n_tokens;
}

void hkv_prefix_copy_tokens(hkv_prefix *p, int32_t target, int32_t source, int32_t n_tokens)
{
    if (p->nodes == NULL) return;
    p->n_known[target] = 0;
    hkv_prefix_write_tokens(p, target, 0, block_tokens(p, source),
                            n_tokens < p->n_known[source] ? n_tokens : p->n_known[source]);
}

/* --------------------------------------------------------------------------------------------------- registration */

int32_t hkv_prefix_add_block(hkv_prefix *p, int32_t parent, int32_t block, int32_t n_tokens)
{
    const int64_t *tokens = block_tokens(p, block);
    bool is_full = n_tokens == p->block_tokens;
    uint64_t hash = is_full ? hash_block(p, parent, tokens) : 0;
    int32_t node = is_full ? find_full_child(p, parent, hash, tokens) : 0, n_common;
    if (!is_full && find_longest_child(p, parent, tokens, n_tokens, &n_common) != 0 && n_common == n_tokens) return 0;
    if (node == 0) node = node_create(p, hash, parent, n_tokens);
    p->next_same[block] = p->nodes[node].first_block;
    p->nodes[node].first_block = block;
    hkv_block_pool_set_node(&p->pools[0], block, node);
    return node;
}

void hkv_prefix_add_companion(hkv_prefix *p, int32_t group, int32_t node, int32_t block)
{
    int32_t *companion = companion_entry(p, group, node);
    if (*companion != 0 || p->pools[group].node[block] != 0) return;
    *companion = block;
    hkv_block_pool_set_node(&p->pools[group], block, node);
}

int32_t hkv_prefix_n_findable(const hkv_prefix *p, int32_t group, int32_t block)
{
    int32_t node = p->pools[group].node[block];
    return node == 0 ? 0 : p->nodes[node].n_tokens;
}

static void forget_trunk_block(hkv_prefix *p, int32_t block);

/* Nothing can be found below a node that goes. Eviction starts at the leaves, but a block that is written again may
 * have had cached descendants; live ones would hold another block of this node. */
static void forget_descendants(hkv_prefix *p, int32_t node)
{
    while (p->nodes[node].first_child != 0) {
        int32_t leaf = p->nodes[node].first_child;
        while (p->nodes[leaf].first_child != 0) leaf = p->nodes[leaf].first_child;
        forget_trunk_block(p, p->nodes[leaf].first_block);
    }
}

static void forget_trunk_block(hkv_prefix *p, int32_t block)
{
    int32_t node = p->pools[0].node[block];
    int32_t *link = &p->nodes[node].first_block;
    if (*link == block && p->next_same[block] == 0) forget_descendants(p, node);
    while (*link != block) link = &p->next_same[*link];
    *link = p->next_same[block];
    p->next_same[block] = 0;
    hkv_block_pool_set_node(&p->pools[0], block, 0);
    if (p->nodes[node].first_block == 0) node_destroy(p, node);
}

void hkv_prefix_forget_block(hkv_prefix *p, int32_t group, int32_t block)
{
    int32_t node = p->pools[group].node[block];
    if (node == 0) return;
    if (group == 0) {
        forget_trunk_block(p, block);
    } else {
        *companion_entry(p, group, node) = 0;
        hkv_block_pool_set_node(&p->pools[group], block, 0);
    }
}

void hkv_prefix_release_block(hkv_prefix *p, int32_t group, int32_t block)
{
    hkv_block_pool *pool = &p->pools[group];
    int32_t node = pool->node[block], same;
    hkv_block_pool_release(pool, block);
    if (group != 0 || node == 0 || pool->n_refs[block] > 0) return;
    same = p->nodes[node].first_block != block ? p->nodes[node].first_block : p->next_same[block];
    if (same == 0) return;
    /* `same` takes over the place in the order of eviction: the children released just now must still come before it */
    forget_trunk_block(p, block);
    if (pool->n_refs[same] == 0) hkv_block_pool_touch(pool, same);
}

int32_t hkv_prefix_take_block(hkv_prefix *p, int32_t group)
{
    hkv_block_pool *pool = &p->pools[group];
    if (pool->n_free == 0) {
        hkv_prefix_forget_block(p, group, hkv_block_pool_oldest(pool));
        p->n_evicted++;
    }
    int32_t block = hkv_block_pool_take(pool);
    if (group == 0 && p->nodes != NULL) p->n_known[block] = 0;
    return block;
}

/* ---------------------------------------------------------------------------------------------------------- check */

static hkv_status broken(hkv_error *error, const char *what, int32_t node)
{
    return hkv_error_set(error, HKV_ERR_STATE, "", "prefix node %d: %s", (int)node, what);
}

static hkv_status check_links(const hkv_prefix *p, int32_t node, hkv_error *error)
{
    const hkv_prefix_node *n = &p->nodes[node], *up = &p->nodes[n->parent];
    int32_t found = is_hashed(p, n) ? *bucket_of(p, n->hash) : node;
    while (found != 0 && found != node) found = p->nodes[found].next_in_bucket;
    if (found == 0) return broken(error, "not in its bucket", node);
    if (n->parent == 0) return n->n_tokens == 0 ? HKV_OK : broken(error, "no parent", node);
    if (is_dead_root(up) || (up->n_tokens != 0 && up->n_tokens != p->block_tokens))
        return broken(error, "parent is gone or partial", node);
    int32_t before = n->prev_sibling != 0 ? p->nodes[n->prev_sibling].next_sibling : up->first_child;
    if (before != node || (n->next_sibling != 0 && p->nodes[n->next_sibling].prev_sibling != node))
        return broken(error, "not linked to its siblings", node);
    return HKV_OK;
}

/* Adds the node's blocks of every group to n_blocks [n_groups]. */
static hkv_status check_blocks(const hkv_prefix *p, int32_t node, int64_t *n_blocks, hkv_error *error)
{
    const hkv_prefix_node *n = &p->nodes[node];
    if ((n->first_block == 0) != (n->n_tokens == 0)) return broken(error, "no block", node);
    for (int32_t block = n->first_block; block != 0; block = p->next_same[block], n_blocks[0]++) {
        if (p->pools[0].node[block] != node) return broken(error, "a block belongs to another node", node);
        if (p->n_known[block] < n->n_tokens) return broken(error, "a block's tokens are not known", node);
        if (common_length(block_tokens(p, block), node_tokens(p, node), n->n_tokens) != n->n_tokens)
            return broken(error, "its blocks have different tokens", node);
    }
    for (int32_t group = 1; group < p->n_groups; group++) {
        int32_t companion = *companion_entry(p, group, node);
        if (companion != 0 && p->pools[group].node[companion] != node)
            return broken(error, "a companion belongs to another node", node);
        n_blocks[group] += companion != 0;
    }
    return HKV_OK;
}

/* The oldest cached block goes next: nothing may be left below it. */
static hkv_status check_oldest(const hkv_prefix *p, hkv_error *error)
{
    int32_t node = p->pools[0].node[hkv_block_pool_oldest(&p->pools[0])];
    if (node == 0 || p->nodes[node].first_child == 0 || p->next_same[p->nodes[node].first_block] != 0) return HKV_OK;
    return broken(error, "would be evicted before its children", node);
}

hkv_status hkv_prefix_check(const hkv_prefix *p, hkv_error *error)
{
    int64_t n_blocks[HKV_MAX_LAYER_GROUPS] = {0};
    if (p->nodes == NULL) return HKV_OK;
    for (int32_t node = 1; node < p->n_nodes; node++) {
        if (is_dead_root(&p->nodes[node])) continue; /* free */
        HKV_TRY(check_links(p, node, error));
        HKV_TRY(check_blocks(p, node, n_blocks, error));
    }
    for (int32_t group = 0; group < p->n_groups; group++)
        for (int32_t block = 1; block < p->pools[group].n_blocks; block++)
            n_blocks[group] -= p->pools[group].node[block] != 0;
    for (int32_t group = 0; group < p->n_groups; group++)
        if (n_blocks[group] != 0) return broken(error, "blocks and nodes are not one to one", group);
    return check_oldest(p, error);
}
