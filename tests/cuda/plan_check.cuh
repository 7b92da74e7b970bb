/* plan_check.cuh - the plan and the schedule of random, hostile steps on the device against plan.h on the host.
 *
 * Host and device own a copy each of every table of a step. Only inputs go from one to the other, so that a difference
 * in one step is seen in that step and in all that follow.
 */
#ifndef HKV_TESTS_CUDA_PLAN_CHECK_CUH
#define HKV_TESTS_CUDA_PLAN_CHECK_CUH

#include "../../cuda/begin.cuh"
#include "harness.cuh"

namespace plan_check
{

using harness::DeviceArray;

struct Shape {
    int n_rows, n_blocks, n_pages, hot_tokens, sink_blocks, width; /* width: blocks of a row, at most */
    int max_new_tokens, n_steps;
    bool quantized;
};

/* Tables of a step at one base address. Inputs come first. */
struct Tables {
    hkv_plan_job job = {};
    hkv::Schedule schedule = {}, separate = {}; /* by begin, and by launch_schedule from begin's rows */
    uint8_t *headers = nullptr;
    size_t input_bytes = 0, bytes = 0;

    Tables(const Shape &s, uint8_t *base) : base_(base)
    {
        hkv_batch &b = job.batch;
        hkv_directory &d = job.directory;
        hkv_plan &p = job.plan;
        const size_t rows = s.n_rows, blocks = s.n_blocks, pages = s.n_pages;
        job.hot_tokens = s.hot_tokens;
        job.sink_blocks = s.sink_blocks;
        job.block_tokens = hkv::kBlockTokens;
        job.is_quantized = s.quantized;
        job.n_blocks = s.n_blocks;
        job.n_pages = s.n_pages;
        job.max_sequence_tokens = int64_t(s.width) * hkv::kBlockTokens;
        job.header_stride_bytes = 192;
        b.block_table_stride = s.width;
        p.hot_stride = s.sink_blocks + hkv_plan_max_window(s.hot_tokens, hkv::kBlockTokens);
        p.max_segments = int32_t(hkv_plan_max_segments(s.n_rows, s.max_new_tokens, hkv::kBlockTokens));

        job.headers = headers = take<uint8_t>(blocks * job.header_stride_bytes);
        b.cu_new_tokens = take<int32_t>(rows + 1);
        b.seq_lens = take<int32_t>(rows);
        b.copy_sources = take<int32_t>(rows);
        b.block_table = take<int32_t>(rows * s.width);
        b.slot_mapping = take<int64_t>(s.max_new_tokens);
        p.is_appended = take<int32_t>(1);
        input_bytes = bytes;

        d.block_page = take<int32_t>(blocks);
        d.block_step = take<uint32_t>(blocks);
        d.page_block = take<int32_t>(pages);
        d.page_stamp = take<uint32_t>(pages);
        d.page_n_tokens = take<int32_t>(pages);
        d.page_sealed = take<int32_t>(pages);
        d.page_last_use = take<uint32_t>(pages);
        d.page_role = take<uint32_t>(pages);
        d.page_saved = take<hkv_page_state>(pages);
        d.next_stamp = take<uint32_t>(1);
        d.step = take<uint32_t>(1);
        p.rows = take<hkv_plan_row>(rows);
        p.segments = take<hkv_segment>(p.max_segments);
        p.victims = take<hkv_victim>(pages);
        p.claims = take<int32_t>(p.max_segments);
        p.hot_pages = take<int32_t>(rows * p.hot_stride);
        p.n_segments = take<int32_t>(1);
        p.n_victims = take<int32_t>(1);
        p.failure = take<int32_t>(1);
        p.failure_value = take<int32_t>(4);
        job.counters = take<hkv_counters>(1);
        for (hkv::Schedule *out : {&schedule, &separate}) {
            out->n_workers = kWorkers;
            out->max_chunks = hkv::max_chunks(kWorkers, s.n_rows, kHeads, kGroup * HKV_DECODE_MAX_TOKENS, kColumns);
            out->chunks = take<hkv::Chunk>(out->max_chunks);
            out->n_chunks = take<int32_t>(1);
            out->heads_per_chunk = take<int32_t>(1);
        }
    }
    hkv::ScheduleInput schedule_input(int window_tokens) const
    {
        return {job.plan, job.batch.n_rows, kHeads, kGroup, kColumns, window_tokens, 4};
    }

    static constexpr int kWorkers = 264, kHeads = 8, kGroup = 3, kColumns = 8;

  private:
    template <typename T> T *take(size_t n)
    {
        T *p = reinterpret_cast<T *>(base_ + bytes);
        bytes += (n * sizeof(T) + 15) / 16 * 16;
        return p;
    }
    uint8_t *base_;
};

/* An engine that does everything that an engine may do, and some of what it may not. */
class Engine
{
  public:
    Engine(const Shape &shape, uint32_t seed)
        : s_(shape), random_(seed), memory_(Tables(shape, nullptr).bytes), device_memory_(memory_.size()),
          host_(shape, memory_.data()), device_(shape, device_memory_.get()), rows_(shape.n_rows)
    {
        std::memset(host_.headers, 0xff, size_t(s_.n_blocks) * host_.job.header_stride_bytes);
        std::fill_n(host_.job.directory.block_page, s_.n_blocks, -1);
        std::fill_n(host_.job.directory.page_block, s_.n_pages, -1);
        *host_.job.directory.next_stamp = 0xfffffff0u; /* wraps soon */
        CHECK_CUDA(cudaMemcpy(device_memory_.get(), memory_.data(), memory_.size(), cudaMemcpyHostToDevice));
        for (Row &row : rows_) {
            row.blocks.resize(s_.width);
            for (int &b : row.blocks) b = fresh_block();
        }
    }
    /* Empty if all steps were the same on both sides, else what differed. */
    std::string run()
    {
        for (int i = 0; i < s_.n_steps; i++) {
            make_batch();
            const int window_tokens = below(2) ? 0 : 1 + below(500);
            const std::string difference = step(window_tokens);
            if (!difference.empty()) return difference + " in step " + std::to_string(i);
            if (below(5)) append();
        }
        return "";
    }
    /* How often each thing happened. */
    std::string summary() const
    {
        const hkv_counters &c = *host_.job.counters;
        char text[160];
        std::snprintf(
            text, sizeof text, "%d refused, %llu claims, %llu restores, %llu + %llu evicted, %llu sealed", n_refused_,
            static_cast<unsigned long long>(c.n_pages_claimed), static_cast<unsigned long long>(c.n_pages_restored),
            static_cast<unsigned long long>(c.n_pages_evicted), static_cast<unsigned long long>(c.n_partial_evicted),
            static_cast<unsigned long long>(c.n_blocks_sealed));
        return text;
    }

  private:
    struct Row {
        int length = 0;
        int copy_of = 0;        /* block that the next write is to copy from */
        bool is_shared = false; /* another row may have its blocks */
        std::vector<int> blocks;
    };
    int below(int n)
    {
        return int(random_() % unsigned(n));
    }
    int any_block()
    {
        return 1 + below(s_.n_blocks - 1);
    }
    /* In turn: one that another row still has only after all others. */
    int fresh_block()
    {
        return 1 + n_taken_++ % (s_.n_blocks - 1);
    }
    hkv_record_header &header(int block)
    {
        return *reinterpret_cast<hkv_record_header *>(host_.headers + size_t(block) * host_.job.header_stride_bytes);
    }

    /* A sequence ends, is forked, cut, or reused for another; the engine zeroes a block. */
    void change_rows()
    {
        for (Row &row : rows_) {
            const int what = below(24);
            if (what == 0) end(row);
            if (what == 1) fork(row, rows_[below(s_.n_rows)]);
            if (what == 2) cut(row, row.length - below(std::min(row.length, 80) + 1));
            if (what == 3) cut(row, below(s_.width * hkv::kBlockTokens / 2));
            if (what == 4) header(any_block()).stamp = 0;
        }
    }
    void end(Row &row)
    {
        row = {0, 0, false, std::move(row.blocks)};
        for (int &b : row.blocks) b = fresh_block();
    }
    void fork(Row &row, Row &source)
    {
        source.is_shared = true;
        row = source;
        own_end(row);
    }
    /* Rows that share blocks seldom write into one of them: then the step is refused. */
    void cut(Row &row, int length)
    {
        row.length = length;
        if (row.is_shared && below(4 * s_.n_rows)) own_end(row);
    }
    /* New blocks from where the row is written next. */
    void own_end(Row &row)
    {
        const size_t first = row.length / hkv::kBlockTokens;
        row.copy_of = first < row.blocks.size() && row.length % hkv::kBlockTokens ? row.blocks[first] : 0;
        for (size_t b = first; b < row.blocks.size(); b++) row.blocks[b] = fresh_block();
    }
    void make_batch()
    {
        change_rows();
        hkv_batch batch = host_.job.batch;
        int32_t *cu = const_cast<int32_t *>(batch.cu_new_tokens), *lengths = const_cast<int32_t *>(batch.seq_lens);
        int32_t *sources = const_cast<int32_t *>(batch.copy_sources), *table = const_cast<int32_t *>(batch.block_table);
        int64_t *slots = const_cast<int64_t *>(batch.slot_mapping);
        batch.n_rows = below(4) ? s_.n_rows : 1 + below(s_.n_rows);
        cu[0] = 0;
        for (int r = 0; r < batch.n_rows; r++) {
            Row &row = rows_[r];
            const int room = std::min(s_.width * hkv::kBlockTokens - row.length, s_.max_new_tokens - cu[r]);
            const int kind = below(12), wanted = kind < 7 ? 1 : kind < 10 ? 1 + below(8) : kind < 11 ? below(200) : 0;
            const int n_new = std::min(room, wanted);
            const bool is_written = below(40);
            row.length += n_new;
            cu[r + 1] = cu[r] + n_new;
            lengths[r] = below(30) ? row.length : 0; /* 0: padding, whatever its slots */
            sources[r] = row.copy_of ? row.copy_of : below(6) ? 0 : any_block();
            if (n_new) row.copy_of = 0;
            for (int b = 0; b < s_.width; b++) table[r * s_.width + b] = row.blocks[b];
            for (int i = 0; i < n_new; i++) {
                const int position = row.length - n_new + i;
                slots[cu[r] + i] = is_written ? int64_t(row.blocks[position / hkv::kBlockTokens]) * hkv::kBlockTokens +
                                                    position % hkv::kBlockTokens
                                              : -1;
            }
            if (lengths[r] == 0) row.length -= n_new;
        }
        batch.n_new_tokens = cu[batch.n_rows];
        break_batch(batch.n_rows, batch.n_new_tokens, cu, lengths, sources, table, slots);
        for (Tables *t : {&host_, &device_}) {
            t->job.batch.n_rows = batch.n_rows;
            t->job.batch.n_new_tokens = batch.n_new_tokens;
        }
    }
    /* Now and then one thing that must be refused. */
    void break_batch(int n_rows, int n_new, int32_t *cu, int32_t *lengths, int32_t *sources, int32_t *table,
                     int64_t *slots)
    {
        const int r = below(n_rows), token = n_new ? below(n_new) : 0;
        switch (below(60)) {
        case 0:
            cu[n_rows] = -1;
            break;
        case 1:
            lengths[r] = -1;
            break;
        case 2:
            lengths[r] = s_.width * hkv::kBlockTokens + 1;
            break;
        case 3:
            sources[r] = s_.n_blocks;
            break;
        case 4:
            table[r * s_.width + below(s_.width)] = below(2) ? s_.n_blocks : -1;
            break;
        case 5:
            slots[token] = int64_t(s_.n_blocks) * hkv::kBlockTokens;
            break;
        case 6:
            slots[token] += 1;
            break;
        case 7:
            slots[token] = -1;
            break;
        }
    }
    /* What an append leaves: headers of victims and segments. */
    void append()
    {
        const hkv_plan &p = host_.job.plan;
        const auto write = [&](int block, uint32_t stamp, int n_tokens, int planes) {
            hkv_record_header &h = header(block);
            h = {};
            h.stamp = stamp;
            h.version = HKV_FORMAT_VERSION;
            h.n_valid_tokens = static_cast<uint16_t>(n_tokens);
            h.planes = static_cast<uint8_t>(planes);
        };
        for (int i = 0; i < *p.n_victims; i++) write(p.victims[i].block, p.victims[i].stamp, p.victims[i].n_tokens, 15);
        for (int i = 0; i < *p.n_segments; i++) {
            const hkv_segment &s = p.segments[i];
            if (s.seal || s.restart)
                write(s.block, s.stamp, s.seal ? hkv::kBlockTokens : 0, s.seal ? 15 : 0);
            else
                header(s.block).stamp = s.stamp;
        }
        if (*p.n_segments) *p.is_appended = 1;
    }
    std::string step(int window_tokens)
    {
        CHECK_CUDA(cudaMemcpy(device_memory_.get(), memory_.data(), host_.input_bytes, cudaMemcpyHostToDevice));
        int32_t words[HKV_TEAM_WORDS];
        const hkv_team one_lane = {0, 1, words};
        hkv_plan_step(&host_.job, &one_lane);
        const hkv::ScheduleInput input = device_.schedule_input(window_tokens);
        CHECK_CUDA(hkv::launch_begin(device_.job, input, device_.schedule, nullptr));
        CHECK_CUDA(hkv::launch_schedule(input, device_.separate, nullptr));
        std::vector<uint8_t> copy = device_memory_.host();
        Tables there(s_, copy.data());
        n_refused_ += *host_.job.plan.failure != HKV_OK;
        const std::string difference = compare(there);
        return difference.empty() ? check_schedule(there, window_tokens) : difference;
    }
    std::string compare(const Tables &there) const
    {
        const hkv_directory &d = host_.job.directory, &e = there.job.directory;
        const hkv_plan &p = host_.job.plan, &q = there.job.plan;
        const bool refused = *p.failure != HKV_OK;
        std::string different;
        const auto same = [&](const char *name, const auto *a, const auto *b, size_t n) {
            if (std::memcmp(a, b, n * sizeof *a)) different += std::string(different.empty() ? "" : ", ") + name;
        };
        same("failure", p.failure, q.failure, 1);
        same("failure kind", p.failure_value, q.failure_value, 1);
        same("n_segments", p.n_segments, q.n_segments, 1);
        same("n_victims", p.n_victims, q.n_victims, 1);
        same("is_appended", p.is_appended, q.is_appended, 1);
        same("rows", p.rows, q.rows, host_.job.batch.n_rows);
        same("segments", p.segments, q.segments, *p.n_segments);
        same("victims", p.victims, q.victims, *p.n_victims);
        if (!refused) same("hot_pages", p.hot_pages, q.hot_pages, size_t(host_.job.batch.n_rows) * p.hot_stride);
        same("block_page", d.block_page, e.block_page, s_.n_blocks);
        same("block_step", d.block_step, e.block_step, s_.n_blocks);
        same("page_block", d.page_block, e.page_block, s_.n_pages);
        same("page_stamp", d.page_stamp, e.page_stamp, s_.n_pages);
        same("page_n_tokens", d.page_n_tokens, e.page_n_tokens, s_.n_pages);
        same("page_sealed", d.page_sealed, e.page_sealed, s_.n_pages);
        same("page_last_use", d.page_last_use, e.page_last_use, s_.n_pages);
        same("page_saved", d.page_saved, e.page_saved, s_.n_pages);
        same("next_stamp", d.next_stamp, e.next_stamp, 1);
        same("step", d.step, e.step, 1);
        same("counters", host_.job.counters, there.job.counters, 1);
        return different;
    }
    /* Every block that a decode row sees lies in one chunk of each of its units; a refused step has no chunks. */
    std::string check_schedule(const Tables &there, int window_tokens) const
    {
        const hkv::Schedule &made = there.schedule, &separate = there.separate;
        const int n = *made.n_chunks, heads = *made.heads_per_chunk;
        if (n != *separate.n_chunks || (n > 0 && heads != *separate.heads_per_chunk) ||
            std::memcmp(made.chunks, separate.chunks, n * sizeof(hkv::Chunk)))
            return "schedules differ";
        if (n > made.max_chunks) return "too many chunks";
        int i = 0;
        for (int r = 0; r < host_.job.batch.n_rows; r++) {
            const hkv_plan_row &row = host_.job.plan.rows[r];
            if (row.n_new < 1 || row.n_new > HKV_DECODE_MAX_TOKENS) continue;
            const int n_older = row.length - row.n_new, end = harness::ceil_div(n_older, hkv::kBlockTokens);
            const int begin =
                window_tokens ? std::min(end, std::max(0, n_older + 1 - window_tokens) / hkv::kBlockTokens) : 0;
            const int tiles = harness::ceil_div(row.n_new * Tables::kGroup, Tables::kColumns);
            const int units = tiles * Tables::kHeads / heads, first = i;
            if (i >= n) return "chunks are missing";
            const int parts = made.chunks[i].n_parts;
            for (int part = 0; part < parts; part++)
                for (int unit = 0; unit < units; unit++, i++) {
                    const hkv::Chunk &c = made.chunks[i], &before = made.chunks[part ? i - units : i];
                    const bool right = i < n && c.row == r && c.head == unit / tiles * heads &&
                                       c.column_tile == unit % tiles && c.part == part && c.n_parts == parts &&
                                       c.first_slot == first + unit * parts && c.n_older == n_older &&
                                       c.n_new == row.n_new && c.first_token == row.first_token &&
                                       c.block_begin == (part ? before.block_end : begin) &&
                                       c.block_begin <= c.block_end && (part + 1 < parts || c.block_end == end);
                    if (!right) return "chunk " + std::to_string(i) + " is wrong";
                }
        }
        return i == n ? "" : "chunks of no row";
    }

    Shape s_;
    std::mt19937 random_;
    std::vector<uint8_t> memory_;
    DeviceArray<uint8_t> device_memory_;
    Tables host_, device_;
    std::vector<Row> rows_;
    int n_refused_ = 0, n_taken_ = 0;
};

} // namespace plan_check

#endif
