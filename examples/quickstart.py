"""A hybrid cache in a few lines: one layer, one sequence, a prompt and some decode steps, on a GPU if there is one."""

import torch

import hybridkv

device = "cuda" if hybridkv.devices()["cuda"] and torch.cuda.is_available() else "cpu"
config = hybridkv.HybridConfig(hot_tokens=32, quantization_bits=8, block_size=64)
cache = hybridkv.Cache(
    config,
    num_layers=1,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    device=device,
    max_tokens=4096,
    max_sequences=4,
)
sequence = cache.add_sequence()


def projections(n_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand-ins for what a model computes: q for 32 heads, k and v for 8."""
    q = torch.randn(n_tokens, 32, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, n_tokens, 8, 128, dtype=torch.bfloat16, device=device)
    return q, k, v


for n_tokens in [1000, 1, 1, 1]:
    with cache.step([sequence], [n_tokens]) as step:
        out = step.attend(0, *projections(n_tokens))
    print(f"{sequence.length:5d} tokens in the cache, output {tuple(out.shape)}")

stats = cache.stats()
plain_bytes = sequence.length * 8 * 128 * 2 * 2
print(f"in use: {stats.bytes_in_use / 2**20:.2f} MiB; as bfloat16 it would be {plain_bytes / 2**20:.2f} MiB")
