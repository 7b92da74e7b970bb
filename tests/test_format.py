"""docs/format.md against the code: a reader written from the page alone reads what the library wrote."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from format_reader import PRECISIONS, Layout, read_header, read_record, read_row_page, stored_precision

import hybridkv
from hybridkv import _core

PATHS = [path for path, supported in hybridkv.cpu_paths().items() if supported]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BEST = {8: "int8", 6: "k8v4", 4: "int4"}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HYBRIDKV_CPU", request.param)
    return request.param


def tokens(n: int, head_dim: int, dtype: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [n, D] with outlier channels, a constant, a zero row and values that are clamped."""
    torch.manual_seed(seed)
    k, v = torch.randn(2, n, head_dim)
    k[:, 3] += 200
    k[:, 5] = 3
    k[0, 7] = float("nan")
    v[n // 2] = 0
    v[n - 1, 1] = float("inf")
    return k.to(DTYPES[dtype]), v.to(DTYPES[dtype])


def same_bits(a: object, b: object) -> bool:
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("block_size", [8, 24, 64, 512])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_layout(bits: int, block_size: int) -> None:
    for head_dim in range(16, 257, 16):
        wanted, layout = _core.record_layout(bits, block_size, head_dim), Layout(block_size, head_dim)
        assert layout.record_bytes(bits) == wanted["record_bytes"]
        for name in ("k_params", "k_high", "v_params", "v_high", "k_low", "v_low"):
            assert layout.sections[name].start == wanted[f"{name}_offset"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_records(path: str, bits: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path writes the bytes of the reference, and the reader finds in them what the path finds."""
    for seed, (head_dim, block_size, n) in enumerate(
        [
            (64, 64, 64),
            (128, 64, 64),
            (256, 64, 64),
            (128, 64, 13),
            (96, 64, 50),
            (16, 8, 7),
            (80, 24, 24),
            (144, 128, 100),
        ]
    ):
        k, v = tokens(n, head_dim, dtype, seed)
        record = _core.record_encode(k, v, bits=bits, block_size=block_size)
        header = read_header(record)
        assert (header["n_valid_tokens"], header["bits"], header["n_clamped"]) == (n, bits, 2)
        assert stored_precision(record) == BEST[bits]
        for precision in PRECISIONS[: PRECISIONS.index(BEST[bits]) + 1]:
            read = read_record(record, block_size, head_dim, precision)
            decoded = _core.record_decode(record, head_dim, block_size=block_size, precision=precision)
            assert same_bits(read[0], decoded[0])
            assert same_bits(read[1], decoded[1])
        with monkeypatch.context() as context:
            context.setenv("HYBRIDKV_CPU", "reference")
            assert record == _core.record_encode(k, v, bits=bits, block_size=block_size)


def test_the_reader_refuses_what_is_not_there() -> None:
    record = _core.record_encode(*tokens(8, 16, "float32", 0), bits=4, block_size=8)
    with pytest.raises(ValueError, match="precision"):
        read_record(record, 8, 16, "k8v4")
    nothing = bytes(64) + record[64:]
    assert stored_precision(nothing) is None
    assert read_record(nothing, 8, 16)[0].shape == (0, 16)


def fill(
    bits: int, dtype: str, n: int, head_dim: int
) -> tuple[hybridkv.Store, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A store whose sequence of n tokens lies in blocks 1, 2, ...; its pages and the K and V [n, 2, D] appended."""
    n_blocks = -(-n // 64) + 1
    store = hybridkv.Store(
        hybridkv.HybridConfig(quantization_bits=bits, sink_blocks=0),
        num_layers=1,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        num_blocks=n_blocks,
        max_rows=1,
        max_new_tokens=n,
    )
    pages = torch.full((n_blocks, 2, store.record_bytes), 0xFF, dtype=torch.uint8)
    store.bind_layer(0, pages)
    torch.manual_seed(n)
    k, v = torch.randn(2, n, 2, head_dim).to(DTYPES[dtype])
    store.begin([0, n], [n], torch.arange(1, n_blocks, dtype=torch.int32)[None], torch.arange(64, 64 + n))
    store.attend(0, torch.zeros_like(k), k, v)
    return store, pages, k, v


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_a_dump_of_a_store(bits: int) -> None:
    """The pages of an engine, sealed by prefill, hold what the store says it holds."""
    store, pages, _, _ = fill(bits, "float32", 200, 80)
    k, v = store.read_tokens(0, torch.tensor([1, 2, 3, 4], dtype=torch.int32), 200, 0, 128)
    for block in (1, 2):  # outside the window of the last 32 tokens
        for head in range(2):
            read = read_record(pages[block, head].numpy().tobytes(), 64, 80)
            part = slice(64 * (block - 1), 64 * block)
            assert same_bits(read[0], np.ascontiguousarray(np.asarray(k)[part, head]))
            assert same_bits(read[1], np.ascontiguousarray(np.asarray(v)[part, head]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dump_of_row_pages(dtype: str) -> None:
    _, pages, k, v = fill(0, dtype, 100, 48)
    for block, n in ((1, 64), (2, 36)):
        for head in range(2):
            read = read_row_page(pages[block, head].numpy().tobytes(), n, 48, dtype)
            part = slice(64 * (block - 1), 64 * (block - 1) + n)
            assert np.array_equal(read[0], k[part, head].float().numpy())
            assert np.array_equal(read[1], v[part, head].float().numpy())
