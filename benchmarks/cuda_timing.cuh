/* cuda_timing.cuh - times of launches inside CUDA graphs, for the benchmarks. */
#ifndef HKV_BENCHMARKS_CUDA_TIMING_CUH
#define HKV_BENCHMARKS_CUDA_TIMING_CUH

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

} // namespace harness

#endif
