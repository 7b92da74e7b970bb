/* cuda_prefill.cu - times of prefill attention: graphs of launches over rotating caches, so that L2 is cold.
 *
 *   cuda_prefill [-o FILE.json] [NAME...]     shapes whose name contains one of NAME; all without one
 *
 * cuda_prefill_peers.py times PyTorch on the same shapes. Products: what causal attention needs, 4 D a query and key.
 */
#include "../cuda/prefill.cuh"
#include "cuda_timing.cuh"

using namespace harness;

namespace
{

struct Shape {
    const char *name;
    int n_rows, older, n_new, dim, bits;
    hkv_dtype dtype;
};

const Shape shapes[] = {
    {"2K over 0", 1, 0, 2048, 128, 8, HKV_BF16},
    {"2K over 30K, INT8", 1, 30720, 2048, 128, 8, HKV_BF16},
    {"2K over 30K, INT4", 1, 30720, 2048, 128, 4, HKV_BF16},
    {"2K over 30K, bits 0", 1, 30720, 2048, 128, 0, HKV_BF16},
    {"2K over 30K, INT8, fp16", 1, 30720, 2048, 128, 8, HKV_F16},
    {"8K over 0", 1, 0, 8192, 128, 8, HKV_BF16},
    {"4 x 512 over 4K, INT8", 4, 4096, 512, 128, 8, HKV_BF16},
    {"64 over 128K, INT8", 1, 131072, 64, 128, 8, HKV_BF16},
    {"2K over 0, D 64", 1, 0, 2048, 64, 8, HKV_BF16},
    {"2K over 30K, INT8, D 64", 1, 30720, 2048, 64, 8, HKV_BF16},
    {"2K over 0, D 256", 1, 0, 2048, 256, 8, HKV_BF16},
    {"2K over 30K, INT8, D 256", 1, 30720, 2048, 256, 8, HKV_BF16},
    {"2K over 30K, INT8, D 96", 1, 30720, 2048, 96, 8, HKV_BF16},
};

double time_shape(const Shape &shape)
{
    Spec s;
    s.older.assign(shape.n_rows, shape.older);
    s.n_new.assign(shape.n_rows, shape.n_new);
    s.dim = shape.dim;
    s.bits = shape.bits;
    s.dtype = shape.dtype;
    s.copies = 4;
    const Case c(s);
    DeviceArray<uint8_t> workspace(
        hkv::prefill_workspace_bytes(c.format(), s.n_kv_heads, s.group, s.n_rows(), s.n_tokens()));
    workspace.fill(0);
    return time_graph(8, [&](int i, cudaStream_t stream) {
        hkv::PrefillParams p = hkv::prefill_of(c.params(i % s.copies), s.n_rows(), s.n_tokens(), workspace.get());
        p.lse = nullptr;
        CHECK_CUDA(hkv::launch_prefill(p, stream));
    });
}

} // namespace

int main(int argc, char **argv)
{
    const int first_name = argc > 2 && !std::strcmp(argv[1], "-o") ? 3 : 1;
    FILE *json = first_name == 3 ? std::fopen(argv[2], "w") : nullptr;
    const char *separator = "[";
    for (const Shape &shape : shapes) {
        bool is_wanted = argc == first_name;
        for (int i = first_name; i < argc; i++) is_wanted = is_wanted || std::strstr(shape.name, argv[i]);
        if (!is_wanted) continue;
        const double us = time_shape(shape);
        const double products = 4.0 * shape.dim * 32 * shape.n_rows * shape.n_new * (shape.older + 0.5 * shape.n_new);
        std::printf("%-28s %9.1f us %7.1f TFLOP/s\n", shape.name, us, products / us * 1e-6);
        std::fflush(stdout);
        if (json)
            std::fprintf(json, "%s\n {\"name\": \"%s\", \"us\": %.2f, \"tflops\": %.1f}", separator, shape.name, us,
                         products / us * 1e-6);
        separator = ",";
    }
    if (json) {
        std::fprintf(json, "\n]\n");
        std::fclose(json);
    }
    return 0;
}
