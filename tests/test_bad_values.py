"""Input that is not finite: what it reaches in the step that brings it."""

from __future__ import annotations

import math

import pytest
import torch
from devices import attend, require
from reference import relative_error

import hybridkv

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n_new", [5, 8, 9, 70])
@pytest.mark.parametrize("window", [0, 3])
def test_a_bad_value_reaches_only_queries_that_see_it(backend: str, dtype: str, n_new: int, window: int) -> None:
    """A value of the call that is no number turns the outputs of its own and later tokens into such, no earlier one."""
    require(backend, dtype=dtype)
    if backend == "cuda" and n_new > 8:
        pytest.skip("prefill on CUDA multiplies hidden values by 0, as PyTorch does")
    torch.manual_seed(9)
    k, v = torch.randn(2, 60 + n_new, 2, 32).to(DTYPES[dtype])
    q = torch.randn(n_new, 4, 32).to(DTYPES[dtype])
    q0 = torch.zeros(60, 4, 32, dtype=DTYPES[dtype])
    bad = n_new - 4
    outs = []
    for value in (None, math.nan, math.inf):
        cache = hybridkv.Cache(
            num_layers=1,
            num_kv_heads=2,
            head_dim=32,
            dtype=dtype,
            max_tokens=256,
            max_sequences=1,
            layer_windows=[window] if window else None,
            device=backend,
        )
        sequence = cache.add_sequence()
        with cache.step([sequence], [60]) as step:
            attend(backend, step, 0, q0, k[:60].contiguous(), v[:60].contiguous())
        new_v = v[60:].clone()
        if value is not None:
            new_v[bad, 1, 7] = value
        with cache.step([sequence], [n_new]) as step:
            outs.append(attend(backend, step, 0, q, k[60:].contiguous(), new_v))
    for out in outs[1:]:
        changed = torch.zeros_like(q, dtype=torch.bool)
        changed[bad : bad + window if window else None, 2:, 7] = True
        assert not out[changed].isfinite().any()
        assert relative_error(out[~changed], outs[0][~changed].double()) < 1e-2
