"""Prefix reuse: a second conversation with the same system prompt computes only what is new.

K and V here are a function of the token ids, as in a real model.
"""

import torch

import hybridkv

table = torch.randn(2, 1000, 2, 64, dtype=torch.bfloat16)
cache = hybridkv.Cache(num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16", max_tokens=4096, max_sequences=4)


def run(prompt: list[int], salt: bytes = b"") -> None:
    """Append what the cache does not have yet."""
    sequence = cache.add_sequence(prompt, salt=salt)
    new = prompt[sequence.num_cached :]
    k, v = table[:, new]
    with cache.step([sequence], [len(new)]) as step:
        step.attend(0, torch.randn(len(new), 8, 64, dtype=torch.bfloat16), k, v)
    print(f"{len(prompt)} tokens: {sequence.num_cached} from the cache, {len(new)} computed")
    cache.free(sequence)


system = list(range(300))
run([*system, 500, 501, 502])
run([*system, 600, 601])
run([*system, 500, 501, 502, 700])
run([*system, 500, 501, 502, 700], salt=b"another tenant")
