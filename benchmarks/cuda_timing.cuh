/* cuda_timing.cuh - times of launches inside CUDA graphs, and the table of them, for the benchmarks. */
#ifndef HKV_BENCHMARKS_CUDA_TIMING_CUH
#define HKV_BENCHMARKS_CUDA_TIMING_CUH

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../tests/cuda/harness.cuh"

namespace harness
{

/* A graph of launches that can be replayed and timed. */
class TimedGraph
{
  public:
    /* launch(i, stream) for i = 0 .. n - 1. */
    template <typename F> TimedGraph(int n, F launch)
    {
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamCreate(&stream_));
        CHECK_CUDA(cudaEventCreate(&begin_));
        CHECK_CUDA(cudaEventCreate(&end_));
        CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < n; i++) launch(i, stream_);
        CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
        CHECK_CUDA(cudaGraphDestroy(graph));
    }
    TimedGraph(const TimedGraph &) = delete;
    ~TimedGraph()
    {
        cudaGraphExecDestroy(exec_);
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
        cudaStreamDestroy(stream_);
    }
    /* Microseconds of one replay. */
    double replay() const
    {
        float ms;
        CHECK_CUDA(cudaEventRecord(begin_, stream_));
        CHECK_CUDA(cudaGraphLaunch(exec_, stream_));
        CHECK_CUDA(cudaEventRecord(end_, stream_));
        CHECK_CUDA(cudaEventSynchronize(end_));
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
        return ms * 1e3;
    }
    /* Median of 15 replays after 3. */
    double median() const
    {
        std::vector<double> times;
        for (int i = 0; i < 18; i++) {
            const double us = replay();
            if (i > 2) times.push_back(us);
        }
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }

  private:
    cudaStream_t stream_;
    cudaEvent_t begin_, end_;
    cudaGraphExec_t exec_;
};

/* Microseconds a launch of a graph of n. */
template <typename F> double time_graph(int n, F launch)
{
    return TimedGraph(n, launch).median() / n;
}

/* Copies of the cache: at least 8, and 3 GB where they are small; a multiple of Case::kTurns. */
int copies_for(const Spec &s)
{
    hkv_format f;
    hkv_format_init(&f, s.bits, 64, s.dim, s.dtype);
    double bytes = 0;
    for (int n : s.older) bytes += double(n) / 64 * f.record_bytes * s.n_kv_heads;
    return int(std::max(8.0, std::min(24.0, 3e9 / bytes))) / 8 * 8;
}
/* Launches of a graph in which all copies have equally many turns: at least 20. */
int launches_for(int copies)
{
    return copies * std::max(1, ceil_div(20, copies));
}
/* One line of a benchmark's results; what does not apply is 0, an error below 0. */
struct Row {
    std::string name;
    double us, must = 0, aim = 0, bytes = 0, error = -1;
    std::string note = "";
};

/* The rows of a program called as `program [-o FILE.json] [NAME...]`. */
class Table
{
  public:
    Table(int argc, char **argv)
    {
        for (int i = 0; i < argc; i++) command_ += (i ? " " : "") + std::string(argv[i]);
        for (int i = 1; i < argc; i++)
            if (!std::strcmp(argv[i], "-o") && i + 1 < argc)
                path_ = argv[++i];
            else
                wanted_.push_back(argv[i]);
    }
    /* Whether `name` contains one of NAME; all do where there is none. */
    bool is_wanted(const std::string &name) const
    {
        for (const std::string &w : wanted_)
            if (name.find(w) != std::string::npos) return true;
        return wanted_.empty();
    }
    void add(const Row &row)
    {
        rows_.push_back(row);
        std::printf("%-52s %8.2f us", row.name.c_str(), row.us);
        if (row.must > 0)
            std::printf("  must %6.1f aim %6.1f %s", row.must, row.aim,
                        row.us <= row.aim    ? "aim "
                        : row.us <= row.must ? "must"
                                             : "MISS");
        if (row.bytes > 0) std::printf("  %6.3f TB/s", row.bytes / row.us * 1e-6);
        if (row.error >= 0) std::printf("  error %.1e", row.error);
        std::printf("  %s\n", row.note.c_str());
        std::fflush(stdout);
    }
    /* Into FILE.json, if one was named; false if that fails. The commit is that of the environment's HYBRIDKV_COMMIT.
     */
    bool write_json() const
    {
        if (!path_) return true;
        std::FILE *f = std::fopen(path_, "w");
        if (!f) {
            std::fprintf(stderr, "cannot write %s\n", path_);
            return false;
        }
        cudaDeviceProp prop;
        int driver = 0, runtime = 0;
        CHECK_CUDA(cudaGetDeviceProperties(&prop, 0));
        CHECK_CUDA(cudaDriverGetVersion(&driver));
        CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
        const char *commit = std::getenv("HYBRIDKV_COMMIT");
        std::fprintf(f, "{\n \"machine\": {\n  \"gpu\": \"%s\",\n  \"driver_cuda\": \"%d.%d\",\n", prop.name,
                     driver / 1000, driver % 1000 / 10);
        std::fprintf(f, "  \"cuda\": \"%d.%d\",\n  \"command\": \"%s\",\n  \"commit\": \"%s\"\n },\n \"rows\": [",
                     runtime / 1000, runtime % 1000 / 10, command_.c_str(), commit ? commit : "not noted");
        for (size_t i = 0; i < rows_.size(); i++)
            std::fprintf(f,
                         "%s\n  {\"name\": \"%s\", \"us\": %.3f, \"must\": %.1f, \"aim\": %.1f, \"bytes\": %.0f, "
                         "\"error\": %.3e, \"note\": \"%s\"}",
                         i ? "," : "", rows_[i].name.c_str(), rows_[i].us, rows_[i].must, rows_[i].aim, rows_[i].bytes,
                         rows_[i].error, rows_[i].note.c_str());
        std::fprintf(f, "\n ]\n}\n");
        return std::fclose(f) == 0;
    }

  private:
    std::string command_;
    const char *path_ = nullptr;
    std::vector<std::string> wanted_;
    std::vector<Row> rows_;
};

} // namespace harness

#endif
