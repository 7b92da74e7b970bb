/* The rules of a step (docs/transitions.md), on a world in which a token is a number instead of keys and values.
 *
 * The world has everything that a backend has - records with headers, hot pages - and carries out a plan as attend
 * does. So it can be asked what counts: does every row read the very token that its sequence holds at each position?
 */
#include "test.h"

#ifdef HKV_TEST_TEAM
#include "test_team.h"
#else
#include "plan.h"
#endif

enum { MAX_BLOCKS = 48, MAX_PAGES = 40, MAX_ROWS = 6, MAX_NEW = 1024, MAX_WIDTH = 16, MAX_T = 64, MAX_STRIDE = 24 };
enum { MAX_LENGTH = 1000 };

typedef struct world {
    int32_t block_tokens, max_rows;
    /* the device: records and hot pages of tokens */
    hkv_record_header header[MAX_BLOCKS];
    int32_t record[MAX_BLOCKS][MAX_T];
    int32_t page[MAX_PAGES][MAX_T];
    /* memory of the directory and the plan */
    struct world_directory {
        int32_t block_page[MAX_BLOCKS], page_block[MAX_PAGES], page_n_tokens[MAX_PAGES], page_sealed[MAX_PAGES];
        uint32_t page_stamp[MAX_PAGES], page_last_use[MAX_PAGES], next_stamp;
    } directory;
    uint32_t block_step[MAX_BLOCKS], page_role[MAX_PAGES], step;
    hkv_page_state page_saved[MAX_PAGES];
    hkv_plan_row rows[MAX_ROWS];
    hkv_segment segments[MAX_NEW];
    hkv_victim victims[MAX_PAGES];
    int32_t claims[MAX_NEW], hot_pages[MAX_ROWS * MAX_STRIDE], n_segments, n_victims, is_appended, failure,
        failure_value[4];
    hkv_counters counters;
    /* the batch */
    int32_t cu_new_tokens[MAX_ROWS + 1], seq_lens[MAX_ROWS], copy_sources[MAX_ROWS];
    int32_t block_table[MAX_ROWS][MAX_WIDTH];
    int64_t slot_mapping[MAX_NEW];
    int32_t tokens[MAX_NEW]; /* what is appended */
    hkv_plan_job job;
} world;

/* Pages of 0 = the guaranteed number. */
static void world_init(world *w, int32_t block_tokens, int32_t hot_tokens, int32_t sink_blocks, int32_t n_blocks,
                       int32_t n_pages, int32_t max_rows)
{
    hkv_directory *dir = &w->job.directory;
    hkv_plan *plan = &w->job.plan;
    memset(w, 0, sizeof *w);
    memset(w->record, 0x7f, sizeof w->record); /* pages need no initial content */
    memset(w->page, 0x7f, sizeof w->page);
    memset(w->header, 0xff, sizeof w->header);
    memset(w->directory.block_page, 0xff, sizeof w->directory.block_page);
    memset(w->directory.page_block, 0xff, sizeof w->directory.page_block);
    w->directory.next_stamp = 1000;
    w->block_tokens = block_tokens;
    w->max_rows = max_rows;
    if (n_pages == 0)
        n_pages = (int32_t)hkv_plan_guaranteed_pages(max_rows, MAX_NEW, hot_tokens, block_tokens, sink_blocks);
    CHECK(n_pages <= MAX_PAGES);
    w->job.hot_tokens = hot_tokens;
    w->job.sink_blocks = sink_blocks;
    w->job.block_tokens = block_tokens;
    w->job.is_quantized = 1;
    w->job.n_blocks = n_blocks;
    w->job.n_pages = n_pages;
    w->job.max_sequence_tokens = MAX_LENGTH;
    w->job.headers = (const uint8_t *)w->header;
    w->job.header_stride_bytes = sizeof w->header[0];
    *dir = (hkv_directory){w->directory.block_page,
                           w->block_step,
                           w->directory.page_block,
                           w->directory.page_stamp,
                           w->directory.page_n_tokens,
                           w->directory.page_sealed,
                           w->directory.page_last_use,
                           w->page_role,
                           w->page_saved,
                           &w->directory.next_stamp,
                           &w->step};
    *plan = (hkv_plan){.rows = w->rows,
                       .segments = w->segments,
                       .victims = w->victims,
                       .claims = w->claims,
                       .hot_pages = w->hot_pages,
                       .hot_stride = sink_blocks + hkv_plan_max_window(hot_tokens, block_tokens),
                       .max_segments = (int32_t)hkv_plan_max_segments(max_rows, MAX_NEW, block_tokens),
                       .n_segments = &w->n_segments,
                       .n_victims = &w->n_victims,
                       .is_appended = &w->is_appended,
                       .failure = &w->failure,
                       .failure_value = w->failure_value};
    CHECK(plan->hot_stride <= MAX_STRIDE);
    w->job.counters = &w->counters;
}

/* ------------------------------------------------------------------------------------------------ batches */

static void batch_clear(world *w)
{
    w->job.batch = (hkv_batch){.cu_new_tokens = w->cu_new_tokens,
                               .seq_lens = w->seq_lens,
                               .block_table = &w->block_table[0][0],
                               .block_table_stride = MAX_WIDTH,
                               .slot_mapping = w->slot_mapping,
                               .copy_sources = w->copy_sources};
    memset(w->copy_sources, 0, sizeof w->copy_sources);
    memset(w->block_table, 0xee, sizeof w->block_table); /* beyond a row's blocks the table holds anything */
}

/* A row with blocks `blocks`, of `length` tokens after the step, n_new of them new; tokens are first_id + position. */
static int32_t batch_add(world *w, const int32_t *blocks, int32_t length, int32_t n_new, int32_t first_id)
{
    hkv_batch *batch = &w->job.batch;
    int32_t r = batch->n_rows++, first = batch->n_new_tokens, T = w->block_tokens;
    w->cu_new_tokens[r] = first;
    w->cu_new_tokens[r + 1] = batch->n_new_tokens = first + n_new;
    w->seq_lens[r] = length;
    for (int32_t b = 0; b * T < length; b++) w->block_table[r][b] = blocks[b];
    for (int32_t i = 0; i < n_new; i++) {
        int32_t position = length - n_new + i;
        w->slot_mapping[first + i] = (int64_t)blocks[position / T] * T + position % T;
        w->tokens[first + i] = first_id + position;
    }
    return r;
}

#ifndef HKV_TEST_TEAM
enum { N_LANES = 1, N_SEEDS = 30 };

static void run_team(const hkv_plan_job *job, int32_t *shared)
{
    const hkv_team team = {0, 1, shared};
    hkv_plan_step(job, &team);
}
#endif

static void begin(world *w)
{
    int32_t shared[HKV_TEAM_WORDS];
    memset(shared, 0xaa, sizeof shared);
    run_team(&w->job, shared);
}

/* ------------------------------------------------------------------------------------- carrying out a plan */

static void write_record(world *w, int32_t block, uint32_t stamp, int32_t n_tokens, const int32_t *tokens)
{
    w->header[block] = (hkv_record_header){.stamp = stamp,
                                           .n_valid_tokens = (uint16_t)n_tokens,
                                           .planes = 15,
                                           .tier = HKV_TIER_L1,
                                           .version = HKV_FORMAT_VERSION};
    memset(w->record[block], 0x7f, sizeof w->record[block]);
    memcpy(w->record[block], tokens, (size_t)n_tokens * sizeof *tokens);
}

static void restore(world *w, const hkv_segment *s)
{
    int32_t tokens[MAX_T] = {0};
    const int32_t *source = s->restore_page >= 0 ? w->page[s->restore_page] : w->record[s->restore_block];
    memcpy(tokens, source, (size_t)s->n_held * sizeof *tokens);
    memcpy(w->page[s->page], tokens, (size_t)s->n_restore * sizeof *tokens);
}

static void write_segment(world *w, const hkv_segment *s)
{
    hkv_record_header *header = &w->header[s->block];
    int32_t n_before = s->restart ? 0 : hkv_header_n_tokens(header, w->block_tokens);
    if (s->page >= 0)
        memcpy(w->page[s->page] + s->offset, w->tokens + s->first_token, (size_t)s->n_tokens * sizeof(int32_t));
    if (s->restart) *header = (hkv_record_header){.version = HKV_FORMAT_VERSION};
    header->stamp = s->stamp;
    header->n_valid_tokens = (uint16_t)(n_before < s->offset ? n_before : s->offset);
}

/* Save the page that a segment's claim took over, and bring what came before its tokens. */
static void prepare_segment(world *w, const hkv_segment *s)
{
    for (int32_t i = 0; i < w->n_victims; i++) {
        const hkv_victim *victim = &w->victims[i];
        if (victim->page == s->page)
            write_record(w, victim->block, victim->stamp, victim->n_tokens, w->page[victim->page]);
    }
    if (s->n_restore > 0) restore(w, s);
}

static void append_segment(world *w, const hkv_segment *s)
{
    write_segment(w, s);
    if (s->seal)
        write_record(w, s->block, s->stamp, w->block_tokens,
                     s->page >= 0 ? w->page[s->page] : w->tokens + s->first_token);
}

/* docs/transitions.md, "Per layer". Segments that are not entangled are carried out one by one, the last one first. */
static void attend(world *w)
{
    if (w->n_segments > 0) w->is_appended = 1;
    if (w->n_segments > 0 && w->segments[0].is_entangled) {
        for (int32_t i = 0; i < w->n_segments; i++) prepare_segment(w, &w->segments[i]);
        for (int32_t i = 0; i < w->n_segments; i++) append_segment(w, &w->segments[i]);
        return;
    }
    for (int32_t i = w->n_segments - 1; i >= 0; i--) {
        prepare_segment(w, &w->segments[i]);
        append_segment(w, &w->segments[i]);
    }
}

/* The token that row r reads at a position; -1 where it reads none. */
static int32_t read_token(const world *w, int32_t r, int32_t position)
{
    int32_t T = w->block_tokens, block = w->block_table[r][position / T];
    int32_t page = hkv_plan_hot_page(&w->job.plan, r, position / T);
    if (page >= 0) return w->page[page][position % T];
    return position % T < hkv_header_n_tokens(&w->header[block], T) ? w->record[block][position % T] : -1;
}

/* Rows hold first_id + position at every position before this step's. */
static void check_row(const world *w, int32_t r, int32_t first_id)
{
    int32_t n_wrong = 0, n_new = w->cu_new_tokens[r + 1] - w->cu_new_tokens[r];
    for (int32_t i = 0; i < w->seq_lens[r] - n_new; i++) n_wrong += read_token(w, r, i) != first_id + i;
    CHECK_INT(n_wrong, 0);
}

/* ---------------------------------------------------------------------------------------------- invariants */

static void check_directory(const world *w)
{
    const struct world_directory *dir = &w->directory;
    for (int32_t b = 0; b < w->job.n_blocks; b++) {
        int32_t page = dir->block_page[b];
        CHECK(page >= -1 && page < w->job.n_pages);
        if (page >= 0) CHECK_INT(dir->page_block[page], b);
    }
    for (int32_t p = 0; p < w->job.n_pages; p++) {
        int32_t block = dir->page_block[p];
        CHECK(block >= -1 && block < w->job.n_blocks && block != 0);
        if (block < 0) continue;
        CHECK(dir->page_n_tokens[p] >= 1 && dir->page_n_tokens[p] <= w->block_tokens);
        CHECK(dir->page_stamp[p] != 0);
        for (int32_t q = 0; q < p; q++) CHECK(dir->page_block[q] < 0 || dir->page_stamp[q] != dir->page_stamp[p]);
    }
    CHECK_INT(dir->block_page[0], -1);
}

/* Every block that a row wrote and that its window or sinks reach is hot now. */
static void check_written_blocks_are_hot(const world *w)
{
    for (int32_t i = 0; i < w->n_segments; i++) {
        const hkv_segment *s = &w->segments[i];
        int32_t logical = hkv_plan_segment_logical(&w->job, s), is_hot = hkv_plan_is_hot(&w->job, s);
        CHECK_INT(s->seal, s->offset + s->n_tokens == w->block_tokens);
        if (is_hot) CHECK(s->page >= 0);
        if (is_hot) CHECK_INT(hkv_plan_hot_page(&w->job.plan, s->row, logical), s->page);
        if (s->page >= 0) CHECK_INT(w->directory.page_n_tokens[s->page], s->offset + s->n_tokens);
        CHECK(s->n_held <= s->n_restore && s->n_restore <= s->offset);
    }
}

/* A whole step that must succeed. */
static void step(world *w)
{
    begin(w);
    CHECK_INT(w->failure, HKV_OK);
    check_directory(w);
    check_written_blocks_are_hot(w);
    attend(w);
}

static void step_one(world *w, const int32_t *blocks, int32_t length, int32_t n_new, int32_t first_id)
{
    batch_clear(w);
    batch_add(w, blocks, length, n_new, first_id);
    step(w);
    check_row(w, 0, first_id);
}

/* ------------------------------------------------------------------------------------------------ one sequence */

static const int32_t lengths[] = {0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161};
enum { N_LENGTHS = (int32_t)(sizeof lengths / sizeof lengths[0]) };
static const int32_t blocks_of_a[] = {5, 2, 9, 7, 11, 3, 12, 20, 21, 22, 23, 24, 25, 26, 27, 28};

/* Prefill to one length, go on to another, then decode over the next block's end. */
static void test_lengths(void)
{
    static world w;
    for (int32_t i = 0; i < N_LENGTHS; i++) {
        for (int32_t j = i; j < N_LENGTHS; j++) {
            world_init(&w, 64, 32, 1, 32, 0, 1);
            if (lengths[i] > 0) step_one(&w, blocks_of_a, lengths[i], lengths[i], 1);
            if (lengths[j] > lengths[i]) step_one(&w, blocks_of_a, lengths[j], lengths[j] - lengths[i], 1);
            for (int32_t n = lengths[j] + 1; n < lengths[j] + 70; n++) step_one(&w, blocks_of_a, n, 1, 1);
            CHECK_INT(w.counters.n_partial_evicted, 0);
            CHECK_INT(w.counters.n_tokens_appended, lengths[j] + 69);
        }
    }
}

/* What the window is at each length, written out. */
static void test_window(void)
{
    static const struct {
        int32_t length, first, n, n_sinks;
    } expected[] = {{1, 0, 1, 0},  {32, 0, 1, 0}, {33, 0, 1, 0},  {64, 0, 1, 0},  {65, 0, 2, 0},  {95, 0, 2, 0},
                    {96, 1, 1, 1}, {97, 1, 1, 1}, {128, 1, 1, 1}, {129, 1, 2, 1}, {160, 2, 1, 1}, {161, 2, 1, 1}};
    static world w;
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        world_init(&w, 64, 32, 1, 32, 0, 1);
        step_one(&w, blocks_of_a, expected[i].length, expected[i].length, 1);
        CHECK_INT(w.rows[0].window_first, expected[i].first);
        CHECK_INT(w.rows[0].n_window, expected[i].n);
        CHECK_INT(w.rows[0].n_sinks, expected[i].n_sinks);
    }
}

/* 300 tokens at once: block 0 is a sink, 1..3 go straight to records, 4 is the window. */
static void test_prefill_seals_directly(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_a, 300, 300, 1);
    CHECK_INT(w.n_segments, 5);
    for (int32_t i = 0; i < 5; i++) {
        CHECK_INT(w.segments[i].block, blocks_of_a[i]);
        CHECK_INT(w.segments[i].page >= 0, i == 0 || i == 4);
        CHECK_INT(w.segments[i].seal, i < 4);
        CHECK_INT(w.segments[i].stamp, 1000 + i);
        CHECK_INT(w.segments[i].first_token, 64 * i);
        CHECK_INT(w.segments[i].restart, 1);
    }
    CHECK_INT(w.segments[0].page, 0);
    CHECK_INT(w.segments[4].page, 1);
    CHECK_INT(w.counters.n_blocks_sealed, 4);
    CHECK_INT(w.counters.n_blocks_sealed_direct, 3);
    CHECK_INT(w.counters.n_pages_claimed, 2);
    CHECK_INT(w.directory.next_stamp, 1005);
}

/* A chunk that starts inside a block that ends outside the window needs a page for it, even with the pool of one row.
 */
static void test_chunk_starts_inside_a_cold_block(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    CHECK_INT(w.job.n_pages, 4);
    step_one(&w, blocks_of_a, 70, 70, 1);
    step_one(&w, blocks_of_a, 212, 142, 1);
    CHECK_INT(w.n_segments, 3);
    CHECK_INT(w.segments[0].offset, 6);
    CHECK(w.segments[0].page >= 0);
    CHECK_INT(w.segments[0].seal, 1);
    CHECK_INT(w.counters.n_pages_evicted, 0);
    CHECK(hkv_plan_hot_page(&w.job.plan, 0, 0) >= 0); /* the sink stays */
}

/* Pages of blocks that left the window are given up, the oldest first, and cost nothing: the record is there. */
static void test_decode_evicts_sealed_pages(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 3, 1);
    for (int32_t n = 1; n <= 400; n++) step_one(&w, blocks_of_a, n, 1, 1);
    CHECK_INT(w.counters.n_blocks_sealed, 6);
    CHECK_INT(w.counters.n_blocks_sealed_direct, 0);
    CHECK_INT(w.counters.n_pages_claimed, 7);
    CHECK_INT(w.counters.n_pages_evicted, 4);
    CHECK_INT(w.counters.n_partial_evicted, 0);
    CHECK_INT(w.counters.n_hot_blocks_read, w.counters.n_hot_blocks_wanted);
}

/* Every pattern of a draft of up to 70 tokens of which some are rejected, around block ends. */
static void test_rejected_drafts(void)
{
    static const int32_t starts[] = {1, 30, 62, 63, 64, 65, 126, 127, 128, 129, 190};
    static world w;
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        for (int32_t n_draft = 1; n_draft <= 70; n_draft += n_draft < 8 ? 1 : 31) {
            for (int32_t n_kept = 0; n_kept <= n_draft; n_kept += n_draft <= 8 ? 1 : 9) {
                int32_t length = starts[i];
                world_init(&w, 64, 32, 1, 32, 0, 1);
                step_one(&w, blocks_of_a, length, length, 1);
                batch_clear(&w);
                batch_add(&w, blocks_of_a, length + n_draft, n_draft, 100000);
                for (int32_t t = 0; t < n_kept; t++) w.tokens[t] = 1 + length + t; /* the accepted ones are right */
                step(&w);
                check_row(&w, 0, 1);
                length += n_kept;
                for (int32_t n = 0; n < 3; n++, length++) step_one(&w, blocks_of_a, length + 1, 1, 1);
            }
        }
    }
}

/* Going back into a sealed, cold block and writing on: its first tokens come back from the record. */
static void test_truncated_into_a_sealed_block(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_a, 300, 300, 1);
    CHECK_INT(w.directory.block_page[blocks_of_a[2]], -1);
    step_one(&w, blocks_of_a, 141, 1, 1); /* truncated to 140 */
    CHECK_INT(w.segments[0].offset, 12);
    CHECK_INT(w.segments[0].n_restore, 12);
    CHECK_INT(w.segments[0].n_held, 12);
    CHECK_INT(w.segments[0].restore_page, -1);
    CHECK_INT(w.segments[0].restore_block, blocks_of_a[2]);
    CHECK_INT(w.segments[0].restart, 0);
    CHECK_INT(w.header[blocks_of_a[2]].n_valid_tokens, 12);
    CHECK_INT(w.counters.n_pages_restored, 1);
    step_one(&w, blocks_of_a, 142, 1, 1);
    CHECK_INT(w.segments[0].n_restore, 0); /* a hit */
}

/* Tokens that nobody ever wrote are zeros, not what lay there. */
static void test_gap_becomes_zeros(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 11, 1, 1);
    step(&w);
    CHECK_INT(w.segments[0].n_restore, 10);
    CHECK_INT(w.segments[0].n_held, 0);
    CHECK_INT(w.segments[0].restart, 1); /* what the header said was not ours */
    for (int32_t i = 0; i < 10; i++) CHECK_INT(w.page[w.segments[0].page][i], 0);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 31, 1, 1);
    step(&w);
    CHECK_INT(w.segments[0].restore_page, w.segments[0].page); /* stays where it is */
    CHECK_INT(w.segments[0].n_held, 11);
    CHECK_INT(w.page[w.segments[0].page][10], 11);
    CHECK_INT(w.page[w.segments[0].page][11], 0);
    CHECK_INT(w.header[blocks_of_a[0]].n_valid_tokens, 0);
}

/* ------------------------------------------------------------------------------------- behind the cache's back */

static void test_zeroed_header_is_not_answered_from_the_page(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_a, 40, 40, 1);
    memset(&w.header[blocks_of_a[0]], 0, sizeof w.header[0]);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 41, 1, 500);
    step(&w);
    CHECK_INT(w.segments[0].n_held, 0);
    CHECK_INT(w.page[w.segments[0].page][39], 0);
    CHECK_INT(w.page[w.segments[0].page][40], 540);
}

/* The engine copies one block's bytes over another that has a page. */
static void test_copied_block_is_read_from_its_record(void)
{
    static world w;
    static const int32_t copy[] = {14, 15};
    world_init(&w, 64, 32, 1, 32, 0, 2);
    step_one(&w, blocks_of_a, 64, 64, 1);
    step_one(&w, copy, 64, 64, 7000);
    CHECK(w.directory.block_page[14] >= 0);
    w.header[14] = w.header[5];
    memcpy(w.record[14], w.record[5], sizeof w.record[5]);
    step_one(&w, copy, 65, 1, 1);
    CHECK_INT(hkv_plan_hot_page(&w.job.plan, 0, 0), -1);
    CHECK_INT(w.directory.block_page[14], -1); /* the old page is free */
}

/* A block that is freed and taken by another sequence restarts in the page that it has. */
static void test_reused_block_restarts(void)
{
    static world w;
    int32_t page;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_a, 40, 40, 1);
    page = w.segments[0].page;
    step_one(&w, blocks_of_a, 10, 10, 9000);
    CHECK_INT(w.segments[0].page, page);
    CHECK_INT(w.segments[0].restart, 1);
    CHECK_INT(w.segments[0].stamp, 1001);
    CHECK_INT(w.directory.page_n_tokens[page], 10);
}

/* A prefill over a block that still has a page releases it. */
static void test_direct_releases_the_old_page(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_a, 80, 80, 1);
    CHECK(w.directory.block_page[blocks_of_a[1]] >= 0);
    step_one(&w, blocks_of_a, 300, 300, 9000);
    CHECK_INT(w.directory.block_page[blocks_of_a[1]], -1);
}

/* ------------------------------------------------------------------------------------------------ copy sources */

static const int32_t blocks_of_b[] = {5, 2, 10, 13, 14};

static void copy_row(world *w, int32_t length, int32_t n_new, int32_t source)
{
    batch_clear(w);
    batch_add(w, blocks_of_b, length, n_new, 1);
    w->copy_sources[0] = source;
    step(w);
    check_row(w, 0, 1);
}

static void test_copy_from_a_hot_page(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 2);
    step_one(&w, blocks_of_a, 150, 150, 1);
    copy_row(&w, 151, 1, blocks_of_a[2]);
    CHECK_INT(w.segments[0].block, 10);
    CHECK_INT(w.segments[0].n_restore, 22);
    CHECK_INT(w.segments[0].restore_page, w.directory.block_page[blocks_of_a[2]]);
    CHECK(w.segments[0].page != w.segments[0].restore_page);
    copy_row(&w, 152, 1, 0);
    step_one(&w, blocks_of_a, 151, 1, 1); /* the source goes on unharmed */
}

static void test_copy_from_a_record(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 2);
    step_one(&w, blocks_of_a, 400, 400, 1);
    copy_row(&w, 141, 1, blocks_of_a[2]);
    CHECK_INT(w.segments[0].restore_page, -1);
    CHECK_INT(w.segments[0].restore_block, blocks_of_a[2]);
    CHECK_INT(w.segments[0].n_held, 12);
    CHECK_INT(w.header[10].n_valid_tokens, 0);
}

/* A fresh block with an old page of its own must not answer with it. */
static void test_copy_into_a_block_that_has_a_page(void)
{
    static world w;
    static const int32_t old[] = {10, 16};
    int32_t page;
    world_init(&w, 64, 32, 1, 32, 0, 2);
    step_one(&w, old, 50, 50, 8000);
    page = w.directory.block_page[10];
    step_one(&w, blocks_of_a, 150, 150, 1);
    copy_row(&w, 151, 1, blocks_of_a[2]);
    CHECK_INT(w.segments[0].page, page);
    CHECK_INT(w.segments[0].restart, 1);
    CHECK_INT(w.directory.page_n_tokens[page], 23);
}

/* b copies from a's block while a's block copies from c's: both get what was there before the step. */
static void test_chain_of_copies(void)
{
    static world w;
    static const int32_t a[] = {1}, b[] = {2}, c[] = {3};
    world_init(&w, 64, 32, 1, 32, 0, 3);
    step_one(&w, a, 20, 20, 1000);
    step_one(&w, c, 20, 20, 3000);
    batch_clear(&w);
    batch_add(&w, a, 21, 1, 3000);
    batch_add(&w, b, 21, 1, 1000);
    w.copy_sources[0] = 3;
    w.copy_sources[1] = 1;
    step(&w);
    check_row(&w, 0, 3000);
    check_row(&w, 1, 1000);
    batch_clear(&w);
    batch_add(&w, a, 22, 1, 3000);
    batch_add(&w, b, 22, 1, 1000);
    batch_add(&w, c, 21, 1, 3000);
    step(&w);
    for (int32_t r = 0; r < 3; r++) check_row(&w, r, r == 1 ? 1000 : 3000);
}

/* At offset 0 there is nothing to copy; a block is no source of itself. */
static void test_copy_sources_without_effect(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    step_one(&w, blocks_of_b, 64, 64, 1);
    copy_row(&w, 65, 1, 5);
    CHECK_INT(w.segments[0].n_restore, 0);
    copy_row(&w, 66, 1, blocks_of_b[1]);
    CHECK_INT(w.segments[0].n_restore, 0);
    CHECK_INT(w.segments[0].restart, 0);
}

/* -------------------------------------------------------------------------------------------- several rows, victims */

/* Two rows on a shared block: sealed by one, read by both, in the same step. */
static void test_shared_blocks(void)
{
    static world w;
    static const int32_t b[] = {5, 2, 17, 18};
    world_init(&w, 64, 32, 1, 32, 0, 2);
    step_one(&w, blocks_of_a, 128, 128, 1);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 129, 1, 1);
    batch_add(&w, b, 129, 1, 1);
    step(&w);
    check_row(&w, 0, 1);
    check_row(&w, 1, 1);
    CHECK_INT(hkv_plan_hot_page(&w.job.plan, 0, 1), hkv_plan_hot_page(&w.job.plan, 1, 1));
}

/* Three sequences in turn, two pages: partial pages of the others are written to their records and come back. */
static void test_partial_victims_come_back(void)
{
    static world w;
    static const int32_t blocks[3][2] = {{1, 2}, {3, 4}, {5, 6}};
    world_init(&w, 64, 32, 0, 32, 2, 1);
    for (int32_t n = 1; n < 100; n++)
        for (int32_t s = 0; s < 3; s++) step_one(&w, blocks[s], n, 1, 1000 * (s + 1));
    CHECK(w.counters.n_partial_evicted > 100);
    CHECK(w.counters.n_pages_restored > 100);
}

/* Which page goes first: (a) sealed and unused by age, (b) partial, not in a table, by age. */
static void test_order_of_victims(void)
{
    static world w;
    static const int32_t sealed_young[] = {1}, partial_old[] = {2}, sealed_old[] = {3}, partial_young[] = {4},
                         in_table[] = {5}, new[] = {6}, more[] = {7}, most[] = {8}, last[] = {9};
    world_init(&w, 64, 32, 1, 32, 5, 6);
    step_one(&w, partial_old, 10, 10, 100);   /* page 0 */
    step_one(&w, sealed_old, 64, 64, 200);    /* page 1 */
    step_one(&w, partial_young, 10, 10, 300); /* page 2 */
    step_one(&w, sealed_young, 64, 64, 400);  /* page 3 */
    step_one(&w, in_table, 10, 10, 500);      /* page 4 */
    step_one(&w, new, 1, 1, 600);
    CHECK_INT(w.segments[0].page, 1);
    step_one(&w, more, 1, 1, 700);
    CHECK_INT(w.segments[0].page, 3);
    CHECK_INT(w.n_victims, 0);
    batch_clear(&w); /* a row that only reads keeps its partial page */
    batch_add(&w, partial_old, 11, 1, 100);
    w.slot_mapping[0] = -1;
    batch_add(&w, most, 1, 1, 800);
    step(&w);
    check_row(&w, 0, 100);
    CHECK_INT(w.segments[0].page, 2);
    CHECK_INT(w.n_victims, 1);
    CHECK_INT(w.victims[0].block, 4);
    CHECK_INT(w.victims[0].n_tokens, 10);
    step_one(&w, last, 1, 1, 900); /* now the oldest partial one goes */
    CHECK_INT(w.victims[0].block, 2);
    step_one(&w, partial_young, 11, 1, 300);
    step_one(&w, partial_old, 11, 1, 100);
    CHECK_INT(w.counters.n_pages_evicted, 2);
}

/* (c): with a pool too small for its rows a sealed page in use is given up, and read cold. */
static void test_pool_smaller_than_its_rows(void)
{
    static world w;
    static const int32_t a[] = {1, 2, 3}, b[] = {4, 5, 6};
    world_init(&w, 64, 32, 1, 32, 3, 2);
    batch_clear(&w);
    batch_add(&w, a, 64, 64, 1000);
    batch_add(&w, b, 64, 64, 2000);
    step(&w);
    batch_clear(&w);
    batch_add(&w, a, 66, 2, 1000);
    batch_add(&w, b, 66, 2, 2000);
    step(&w);
    check_row(&w, 0, 1000);
    check_row(&w, 1, 2000);
    CHECK_INT(w.counters.n_pages_evicted, 1);
    CHECK_INT(hkv_plan_hot_page(&w.job.plan, 0, 0), -1);
    CHECK(hkv_plan_hot_page(&w.job.plan, 1, 0) >= 0);
}

/* The step that needs more than there is changes nothing. */
static void test_full(void)
{
    static world w;
    static const int32_t a[] = {1}, b[] = {2}, c[] = {3};
    struct world_directory before;
    world_init(&w, 64, 32, 1, 32, 2, 3);
    step_one(&w, a, 10, 10, 100);
    before = w.directory;
    batch_clear(&w);
    batch_add(&w, a, 11, 1, 100);
    batch_add(&w, b, 1, 1, 200);
    batch_add(&w, c, 1, 1, 300);
    begin(&w);
    CHECK_INT(w.failure, HKV_ERR_CACHE_FULL);
    CHECK_INT(w.failure_value[0], HKV_PLAN_NO_PAGE);
    CHECK_INT(w.failure_value[2], 2);
    CHECK_INT(w.failure_value[3], 2);
    CHECK(memcmp(&before, &w.directory, sizeof before) == 0);
    CHECK_INT(w.n_segments, 0);
    CHECK_INT(w.rows[0].length, 0);
    batch_clear(&w); /* fewer rows fit */
    batch_add(&w, a, 11, 1, 100);
    batch_add(&w, b, 1, 1, 200);
    step(&w);
    check_row(&w, 0, 100);
}

/* ------------------------------------------------------------------------------------------- repeated and given up */

/* Begun three times, attended once. */
static void test_repeated_begin(void)
{
    static world w;
    static const int32_t blocks[3][2] = {{1, 2}, {3, 4}, {5, 6}};
    world_init(&w, 64, 32, 0, 32, 2, 1);
    for (int32_t n = 1; n < 100; n++) {
        for (int32_t s = 0; s < 3; s++) {
            batch_clear(&w);
            batch_add(&w, blocks[s], n, 1, 1000 * (s + 1));
            for (int32_t i = 0; i < 3; i++) begin(&w);
            step(&w);
            check_row(&w, 0, 1000 * (s + 1));
            begin(&w); /* and after attend */
            check_row(&w, 0, 1000 * (s + 1));
        }
    }
}

/* A step that is begun and never attended; the engine goes on with another one. */
static void test_abandoned_steps(void)
{
    static world w;
    static const int32_t blocks[4][3] = {{1, 2, 9}, {3, 4, 10}, {5, 6, 11}, {7, 8, 12}};
    int32_t length[4] = {0};
    uint64_t random = 1;
    world_init(&w, 64, 32, 0, 32, 2, 1);
    for (int32_t i = 0; i < 1500; i++) {
        int32_t s = test_random_int(&random, 4), n = 1 + test_random_int(&random, 3);
        if (length[s] + n > 190) continue;
        batch_clear(&w);
        batch_add(&w, blocks[s], length[s] + n, n, 1000 * (s + 1));
        if (test_random_int(&random, 3) == 0) {
            begin(&w);
            continue;
        }
        step(&w);
        check_row(&w, 0, 1000 * (s + 1));
        length[s] += n;
    }
}

/* Slots of -1, of the null block, and padding rows move nothing. */
static void test_dummy_steps_change_nothing(void)
{
    static world w;
    struct world_directory before;
    hkv_record_header headers[MAX_BLOCKS];
    world_init(&w, 64, 32, 1, 32, 0, 4);
    step_one(&w, blocks_of_a, 100, 100, 1);
    before = w.directory;
    memcpy(headers, w.header, sizeof headers);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 101, 1, 1);
    batch_add(&w, blocks_of_b, 3, 3, 5000);
    batch_add(&w, blocks_of_a, 0, 0, 1);
    w.job.batch.n_rows++;
    w.cu_new_tokens[4] = ++w.job.batch.n_new_tokens; /* a padding row with a token */
    w.seq_lens[3] = 0;
    w.slot_mapping[0] = -1;
    w.slot_mapping[1] = 63;
    w.slot_mapping[2] = 0;
    w.slot_mapping[3] = -1;
    w.slot_mapping[4] = 100;
    step(&w);
    CHECK_INT(w.n_segments, 0);
    check_row(&w, 0, 1);
    CHECK(memcmp(&before, &w.directory, sizeof before) == 0);
    CHECK(memcmp(headers, w.header, sizeof headers) == 0);
    CHECK_INT(w.rows[3].n_new, 1);
    CHECK_INT(w.rows[3].n_window, 0);
    CHECK_INT(w.rows[0].first_segment, -1);
    batch_clear(&w); /* no rows at all */
    step(&w);
    CHECK(memcmp(&before, &w.directory, sizeof before) == 0);
}

/* ------------------------------------------------------------------------------------------------- refused batches */

typedef void (*spoil_fn)(world *w);

static void spoil_first(world *w)
{
    w->cu_new_tokens[0] = 1;
}
static void spoil_order(world *w)
{
    w->cu_new_tokens[1] = 60;
}
static void spoil_total(world *w)
{
    w->cu_new_tokens[2] = 39;
}
static void spoil_length(world *w)
{
    w->seq_lens[1] = 19;
}
static void spoil_negative_length(world *w)
{
    w->seq_lens[0] = -5;
}
static void spoil_longest(world *w)
{
    w->seq_lens[1] = MAX_LENGTH + 1;
}
static void spoil_row_tokens(world *w)
{
    w->job.batch.max_row_tokens = 19;
}
static void spoil_stride(world *w)
{
    w->job.batch.block_table_stride = 1;
}
static void spoil_table(world *w)
{
    w->block_table[0][0] = 32;
}
static void spoil_negative_entry(world *w)
{
    w->block_table[1][1] = -1;
}
static void spoil_source(world *w)
{
    w->copy_sources[1] = 32;
}
static void spoil_slot(world *w)
{
    w->slot_mapping[21] = 32 * 64 + 1;
}
static void spoil_huge_slot(world *w)
{
    w->slot_mapping[39] = INT64_MAX;
}
static void spoil_offset(world *w)
{
    w->slot_mapping[0] += 5;
}
static void spoil_block(world *w)
{
    w->slot_mapping[25] = 7 * 64;
}
static void spoil_writers(world *w)
{
    w->block_table[1][1] = 5;
    for (int32_t i = 20; i < 40; i++) w->slot_mapping[i] = 5 * 64 + i - 20;
    w->seq_lens[1] = 84;
}
static void spoil_hole(world *w)
{
    w->slot_mapping[10] = -1;
}

static void test_refused_batches_change_nothing(void)
{
    static const struct {
        spoil_fn spoil;
        hkv_plan_fault fault;
        hkv_status status;
        int32_t index;
        const char *argument, *part;
    } cases[] = {
        {spoil_first, HKV_PLAN_CU_TOKENS, HKV_ERR_ARGUMENT, 0, "cu_new_tokens", "entry 0 is 1"},
        {spoil_order, HKV_PLAN_CU_TOKENS, HKV_ERR_ARGUMENT, 1, "cu_new_tokens", "entry 1 is 60"},
        {spoil_total, HKV_PLAN_CU_TOKENS, HKV_ERR_ARGUMENT, 2, "cu_new_tokens", "n_new_tokens = 40; entry 2 is 39"},
        {spoil_length, HKV_PLAN_LENGTH, HKV_ERR_ARGUMENT, 1, "seq_lens", "row 1 has length 19 and 20 new tokens"},
        {spoil_negative_length, HKV_PLAN_LENGTH, HKV_ERR_ARGUMENT, 0, "seq_lens", "length -5"},
        {spoil_longest, HKV_PLAN_TOO_LONG, HKV_ERR_RANGE, 1, "seq_lens", "1000 tokens that a row can have; row 1"},
        {spoil_row_tokens, HKV_PLAN_ROW_TOKENS, HKV_ERR_ARGUMENT, 0, "max_row_tokens",
         "max_row_tokens = 19 must be at least the new tokens of every row; row 0 has 20"},
        {spoil_stride, HKV_PLAN_STRIDE, HKV_ERR_ARGUMENT, 1, "block_table_stride", "row 1 has 2, got 1"},
        {spoil_table, HKV_PLAN_TABLE, HKV_ERR_RANGE, 0, "block_table", "0..31; row 0 names block 32"},
        {spoil_negative_entry, HKV_PLAN_TABLE, HKV_ERR_RANGE, 1, "block_table", "block -1"},
        {spoil_source, HKV_PLAN_COPY_SOURCE, HKV_ERR_RANGE, 1, "copy_sources", "row 1 names block 32"},
        {spoil_slot, HKV_PLAN_SLOT, HKV_ERR_RANGE, 21, "slot_mapping", "token 21 is to be written to block 32"},
        {spoil_huge_slot, HKV_PLAN_SLOT, HKV_ERR_RANGE, 39, "slot_mapping", "token 39"},
        {spoil_offset, HKV_PLAN_SLOT_BLOCK, HKV_ERR_ARGUMENT, 0, "slot_mapping", "token 0 has slot 325 instead of 320"},
        {spoil_block, HKV_PLAN_SLOT_BLOCK, HKV_ERR_ARGUMENT, 25, "slot_mapping", "token 25"},
        {spoil_writers, HKV_PLAN_TWO_WRITERS, HKV_ERR_ARGUMENT, 1, "slot_mapping", "block 5 is written twice"},
        {spoil_hole, HKV_PLAN_TWO_WRITERS, HKV_ERR_ARGUMENT, 1, "slot_mapping", "block 5 is written twice"},
    };
    static world w;
    static const int32_t a[] = {5, 6}, b[] = {8, 9};
    hkv_error error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct world_directory before;
        world_init(&w, 64, 32, 1, 32, 0, 2);
        step_one(&w, b, 60, 60, 100);
        before = w.directory;
        batch_clear(&w);
        batch_add(&w, a, 20, 20, 500);
        batch_add(&w, b, 80, 20, 100);
        cases[i].spoil(&w);
        begin(&w);
        CHECK_INT(w.failure, cases[i].status);
        CHECK_INT(w.failure_value[0], cases[i].fault);
        if (N_LANES == 1) CHECK_INT(w.failure_value[1], cases[i].index); /* of several faults any may be told */
        CHECK_ERROR(hkv_plan_report(w.failure_value, &error), cases[i].status, cases[i].argument,
                    N_LANES == 1 ? cases[i].part : "");
        CHECK(memcmp(&before, &w.directory, sizeof before) == 0);
        CHECK_INT(w.counters.n_steps, 1);
        batch_clear(&w); /* the same step, right, still works */
        batch_add(&w, a, 20, 20, 500);
        batch_add(&w, b, 80, 20, 100);
        step(&w);
        check_row(&w, 1, 100);
    }
}

/* More runs than a step can have: every second slot is missing. */
static void test_slots_full_of_holes(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 200, 200, 1);
    for (int32_t i = 0; i < 200; i += 2) w.slot_mapping[i] = -1;
    begin(&w);
    CHECK_INT(w.failure, HKV_ERR_ARGUMENT);
    CHECK_INT(w.failure_value[0], HKV_PLAN_SLOT_HOLES);
}

/* ----------------------------------------------------------------------------------------------------------- bits 0 */

static void test_bits_0(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    w.job.is_quantized = 0;
    w.job.n_pages = 0;
    batch_clear(&w);
    batch_add(&w, blocks_of_a, 70, 70, 1);
    begin(&w);
    CHECK_INT(w.failure, HKV_OK);
    CHECK_INT(w.n_segments, 2);
    CHECK_INT(w.segments[0].page, -1);
    CHECK_INT(w.segments[0].seal, 0);
    batch_clear(&w);
    batch_add(&w, blocks_of_b, 71, 1, 1);
    w.copy_sources[0] = blocks_of_a[1];
    w.block_table[0][1] = 10;
    w.slot_mapping[0] = 10 * 64 + 6;
    begin(&w);
    CHECK_INT(w.failure, HKV_OK);
    CHECK_INT(w.segments[0].n_restore, 6);
    CHECK_INT(w.segments[0].n_held, 6);
    CHECK_INT(w.segments[0].restore_block, blocks_of_a[1]);
    CHECK_INT(w.segments[0].restore_page, -1);
    CHECK_INT(hkv_plan_hot_page(&w.job.plan, 0, 1), -1);
    CHECK_INT(w.directory.next_stamp, 1000);
}

/* ------------------------------------------------------------------------------------------------ numbers that wrap */

static void test_stamps_and_steps_wrap(void)
{
    static world w;
    world_init(&w, 64, 32, 1, 32, 0, 1);
    w.directory.next_stamp = UINT32_MAX - 1;
    w.step = UINT32_MAX - 1;
    step_one(&w, blocks_of_a, 300, 300, 1);
    CHECK_INT(w.segments[1].stamp, UINT32_MAX);
    CHECK_INT(w.segments[2].stamp, 1);
    CHECK_INT(w.segments[3].stamp, 2);
    CHECK_INT(w.directory.next_stamp, 4);
    for (int32_t n = 301; n < 500; n++) step_one(&w, blocks_of_a, n, 1, 1);
    CHECK_INT(w.step, 199);
}

/* -------------------------------------------------------------------------------------------------------- an engine */

/* Sequences over a pool of blocks, as a serving engine keeps them: shared prefixes, copy-on-write, rejected drafts,
 * preemption, blocks zeroed when freed. Blocks of 8 tokens, so that everything happens often. */
enum { E_SEQUENCES = 8, E_BLOCK = 8, E_MAX_LENGTH = 12 * E_BLOCK };

typedef struct engine {
    world w;
    uint64_t random;
    int32_t n_refs[MAX_BLOCKS];
    int32_t pinned[MAX_BLOCKS]; /* copy sources, until their step is over */
    struct {
        int32_t length, blocks[MAX_WIDTH], token[E_MAX_LENGTH];
        int32_t copy_of; /* source of the block at length, 0 = none */
    } seq[E_SEQUENCES];
    int32_t next_token;
    int64_t n_full;
} engine;

static int32_t engine_n_blocks(int32_t length)
{
    return (length + E_BLOCK - 1) / E_BLOCK;
}

static void engine_unref(engine *e, int32_t block)
{
    if (--e->n_refs[block] > 0 || e->pinned[block] > 0) return;
    if (test_random_int(&e->random, 4) == 0) memset(&e->w.header[block], 0, sizeof e->w.header[block]);
}

static int32_t engine_take_block(engine *e)
{
    int32_t first = test_random_int(&e->random, e->w.job.n_blocks);
    for (int32_t i = 0; i < e->w.job.n_blocks; i++) {
        int32_t block = (first + i) % e->w.job.n_blocks;
        if (block == 0 || e->n_refs[block] > 0 || e->pinned[block] > 0) continue;
        e->n_refs[block] = 1;
        return block;
    }
    return 0;
}

/* Drop blocks that a sequence of `length` tokens does not need. */
static void engine_truncate(engine *e, int32_t s, int32_t length)
{
    for (int32_t b = engine_n_blocks(length); b < engine_n_blocks(e->seq[s].length); b++)
        engine_unref(e, e->seq[s].blocks[b]);
    e->seq[s].length = length;
}

/* Make room for n more tokens: own the block that is written next, copying it if it is shared; take new ones.
 * Returns 0, with the sequence as it was, if blocks run out. */
static int32_t engine_extend(engine *e, int32_t s, int32_t n, int32_t *copy_source)
{
    int32_t length = e->seq[s].length, n_have = engine_n_blocks(length), n_need = engine_n_blocks(length + n);
    int32_t partial = length % E_BLOCK ? length / E_BLOCK : -1, shared = 0;
    *copy_source = 0;
    if (partial >= 0 && e->n_refs[e->seq[s].blocks[partial]] > 1) {
        int32_t block = engine_take_block(e);
        if (block == 0) return 0;
        shared = *copy_source = e->seq[s].blocks[partial];
        e->seq[s].blocks[partial] = block;
        e->n_refs[shared]--;
        e->pinned[shared]++;
    }
    for (int32_t b = n_have; b < n_need; b++) {
        e->seq[s].blocks[b] = engine_take_block(e);
        if (e->seq[s].blocks[b] != 0) continue;
        while (--b >= n_have) engine_unref(e, e->seq[s].blocks[b]);
        if (shared) {
            e->n_refs[e->seq[s].blocks[partial]] = 0;
            e->seq[s].blocks[partial] = shared;
            e->n_refs[shared]++;
            e->pinned[shared]--;
        }
        return 0;
    }
    return 1;
}

/* Another sequence becomes a copy of the first `length` tokens of s. */
static void engine_fork(engine *e, int32_t s, int32_t other, int32_t length)
{
    if (s == other || length > e->seq[s].length) return;
    engine_truncate(e, other, 0);
    memcpy(e->seq[other].blocks, e->seq[s].blocks, sizeof e->seq[s].blocks);
    memcpy(e->seq[other].token, e->seq[s].token, sizeof e->seq[s].token);
    e->seq[other].length = length;
    for (int32_t b = 0; b < engine_n_blocks(length); b++) e->n_refs[e->seq[other].blocks[b]]++;
}

static void engine_check_reads(const engine *e, const int32_t *rows)
{
    const world *w = &e->w;
    int32_t n_wrong = 0;
    for (int32_t r = 0; r < w->job.batch.n_rows; r++) {
        int32_t n_old = w->seq_lens[r] - (w->cu_new_tokens[r + 1] - w->cu_new_tokens[r]);
        for (int32_t i = 0; i < n_old; i++) n_wrong += read_token(w, r, i) != e->seq[rows[r]].token[i];
    }
    CHECK_INT(n_wrong, 0);
}

/* One step over some sequences. Each row appends 0..40 tokens, of which some may be rejected afterwards. */
static void engine_step(engine *e)
{
    world *w = &e->w;
    int32_t rows[MAX_ROWS], n_new[MAX_ROWS], sources[MAX_ROWS], n_rows = 0, used = 0;
    struct world_directory before;
    batch_clear(w);
    for (int32_t want = 1 + test_random_int(&e->random, w->max_rows); n_rows < want;) {
        int32_t s = test_random_int(&e->random, E_SEQUENCES), kind = test_random_int(&e->random, 10);
        int32_t n = kind < 6 ? 1 : kind < 9 ? 1 + test_random_int(&e->random, 6) : 1 + test_random_int(&e->random, 40);
        if (used & 1 << s) {
            want--;
            continue;
        }
        used |= 1 << s;
        if (e->seq[s].length + n > E_MAX_LENGTH) engine_truncate(e, s, test_random_int(&e->random, E_BLOCK * 2));
        if (!engine_extend(e, s, n, &sources[n_rows])) {
            want--;
            continue;
        }
        for (int32_t i = 0; i < n; i++) e->seq[s].token[e->seq[s].length + i] = ++e->next_token;
        e->seq[s].length += n;
        rows[n_rows] = s;
        n_new[n_rows] = n;
        batch_add(w, e->seq[s].blocks, e->seq[s].length, n, 0);
        memcpy(&w->tokens[w->cu_new_tokens[n_rows]], &e->seq[s].token[e->seq[s].length - n],
               (size_t)n * sizeof(int32_t));
        w->copy_sources[n_rows] = sources[n_rows];
        n_rows++;
    }
    before = w->directory;
    begin(w);
    if (w->failure ==
        HKV_ERR_CACHE_FULL) { /* small pools only; the engine drops the rows and starts them again later */
        e->n_full++;
        CHECK(memcmp(&before, &w->directory, sizeof before) == 0);
        for (int32_t r = 0; r < n_rows; r++) engine_truncate(e, rows[r], 0);
    } else {
        CHECK_INT(w->failure, HKV_OK);
        while (test_random_int(&e->random, 6) == 0) begin(w);
        check_directory(w);
        check_written_blocks_are_hot(w);
        attend(w);
        engine_check_reads(e, rows);
        for (int32_t r = 0; r < n_rows; r++)
            if (test_random_int(&e->random, 3) == 0)
                engine_truncate(e, rows[r], e->seq[rows[r]].length - test_random_int(&e->random, n_new[r] + 1));
    }
    memset(e->pinned, 0, sizeof e->pinned);
}

static void engine_run(uint64_t seed, int32_t n_steps, int32_t n_blocks, int32_t n_pages, int32_t sink_blocks,
                       int32_t max_rows, engine *e)
{
    memset(e, 0, sizeof *e);
    world_init(&e->w, E_BLOCK, 16, sink_blocks, n_blocks, n_pages, max_rows);
    e->random = seed;
    for (int32_t i = 0; i < n_steps; i++) {
        int32_t s = test_random_int(&e->random, E_SEQUENCES), kind = test_random_int(&e->random, 12);
        if (kind == 0)
            engine_fork(e, s, test_random_int(&e->random, E_SEQUENCES), test_random_int(&e->random, E_MAX_LENGTH));
        if (kind == 1) engine_truncate(e, s, test_random_int(&e->random, e->seq[s].length + 1));
        if (kind == 2) engine_truncate(e, s, 0);
        engine_step(e);
    }
}

static void test_engine_with_the_guaranteed_pool(void)
{
    static engine e;
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        engine_run(seed, 1500, 40, 0, (int32_t)(seed % 3), 3, &e);
        CHECK_INT(e.n_full, 0);
        CHECK(e.w.counters.n_pages_evicted > 100);
        CHECK(e.w.counters.n_pages_restored > 50);
        CHECK(e.w.counters.n_blocks_sealed_direct > 10);
    }
}

static void test_engine_with_small_pools(void)
{
    static engine e;
    int64_t n_full = 0;
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        engine_run(seed, 1500, 16 + (int32_t)seed % 16 * 2, 2 + (int32_t)(seed % 5), (int32_t)(seed % 3), 4, &e);
        CHECK(e.w.counters.n_partial_evicted > 20);
        n_full += e.n_full;
    }
    CHECK(n_full > 0);
}

int main(void)
{
    RUN(test_lengths);
    RUN(test_window);
    RUN(test_prefill_seals_directly);
    RUN(test_chunk_starts_inside_a_cold_block);
    RUN(test_decode_evicts_sealed_pages);
    RUN(test_rejected_drafts);
    RUN(test_truncated_into_a_sealed_block);
    RUN(test_gap_becomes_zeros);
    RUN(test_zeroed_header_is_not_answered_from_the_page);
    RUN(test_copied_block_is_read_from_its_record);
    RUN(test_reused_block_restarts);
    RUN(test_direct_releases_the_old_page);
    RUN(test_copy_from_a_hot_page);
    RUN(test_copy_from_a_record);
    RUN(test_copy_into_a_block_that_has_a_page);
    RUN(test_chain_of_copies);
    RUN(test_copy_sources_without_effect);
    RUN(test_shared_blocks);
    RUN(test_partial_victims_come_back);
    RUN(test_order_of_victims);
    RUN(test_pool_smaller_than_its_rows);
    RUN(test_full);
    RUN(test_repeated_begin);
    RUN(test_abandoned_steps);
    RUN(test_dummy_steps_change_nothing);
    RUN(test_refused_batches_change_nothing);
    RUN(test_slots_full_of_holes);
    RUN(test_bits_0);
    RUN(test_stamps_and_steps_wrap);
    RUN(test_engine_with_the_guaranteed_pool);
    RUN(test_engine_with_small_pools);
    return test_report();
}
