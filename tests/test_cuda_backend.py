"""The CUDA backend beside the CPU one: the same bytes and answers from the same steps, and what it does that it cannot.

What every device must do is tested by the other files, on CUDA too; graphs by test_cuda_graph.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from devices import CUDA, attend, to_host
from reference import relative_error

import hybridkv

LAYERS, KV_HEADS, Q_HEADS, HEADER = 2, 2, 8, 64
ALLOWED = 6e-3  # both round their output to bfloat16
FULL = {"skip_mass": 0.0, "refine_mass": 0.0}

pytestmark = pytest.mark.parametrize("device", [CUDA])


class Pair:
    """A cache on the CPU and one on the GPU under the same calls."""

    def __init__(self, device: str, *, dim: int = 64, dtype: str = "bfloat16", bits: int = 8, **options: Any) -> None:
        sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "max_sequences": 8, "max_tokens": 4096, **options}
        config = hybridkv.HybridConfig(quantization_bits=bits, **FULL)
        self.caches = [
            hybridkv.Cache(config, head_dim=dim, dtype=dtype, device=where, **sizes) for where in ("cpu", device)
        ]
        self.device, self.dim, self.dtype = device, dim, getattr(torch, dtype)
        self.generator = torch.Generator().manual_seed(1)

    def all(self, method: str, *args: Any) -> tuple[Any, ...]:
        """The method of both caches; of arguments that are pairs each gets its own."""
        return tuple(
            getattr(cache, method)(*(arg[i] if isinstance(arg, tuple) else arg for arg in args))
            for i, cache in enumerate(self.caches)
        )

    def step(self, sequences: list[tuple[Any, Any]], counts: list[int], q_heads: tuple[int, ...] = (Q_HEADS,)) -> None:
        """Append the same random tokens to both, and compare what they attend to."""
        n = sum(counts)
        inputs = [
            [
                torch.randn(n, heads, self.dim, generator=self.generator).to(self.dtype)
                for heads in (q_heads[layer % len(q_heads)], KV_HEADS, KV_HEADS)
            ]
            for layer in range(LAYERS)
        ]
        outputs: list[list[torch.Tensor]] = []
        for i, (cache, where) in enumerate(zip(self.caches, ("cpu", self.device), strict=True)):
            with cache.step([pair[i] for pair in sequences], counts, clock=7) as step:
                outputs.append([attend(where, step, layer, *inputs[layer]) for layer in range(LAYERS)])
        for wanted, got in zip(*outputs, strict=True):
            assert relative_error(got, wanted) < ALLOWED

    def check_same_content(self, sequences: list[tuple[Any, Any]], bits: int) -> None:
        """Of the records all but the header, whose stamp no two caches share."""
        for layer in range(LAYERS):
            pages = [torch.utils.dlpack.from_dlpack(cache.export_pages(layer)).cpu() for cache in self.caches]
            for pair in sequences:
                stored = [[to_host(x) for x in both] for both in self.all("read_tokens", pair, layer)]
                assert all(torch.equal(a, b) for a, b in zip(*stored, strict=True))
                tables = self.all("block_table", pair, layer)
                assert tables[0] == tables[1]
                if bits == 0:
                    continue
                tiers = self.all("tiers", pair, layer, 0)
                assert tiers[0] == tiers[1]
                sealed = [block for block, tier in zip(tables[0], tiers[0], strict=True) if tier]
                assert torch.equal(*(x[sealed, :, HEADER:] for x in pages))
        for cache in self.caches:
            cache.check()


def counters_of(cache: hybridkv.Cache) -> dict[str, int | float]:
    """What a step decided; what attention read is counted for query columns that a device reads together."""
    decided = ("n_steps", "n_tokens_appended", "n_blocks", "n_pages", "n_partial", "n_hot", "n_nonfinite")
    return {name: n for name, n in cache.stats().counters.items() if name.startswith(decided)}


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (80, "bfloat16"), (256, "float16")])
def test_same_bytes_and_answers(device: str, bits: int, dim: int, dtype: str) -> None:
    pair = Pair(device, dim=dim, dtype=dtype, bits=bits)
    sequences = [pair.all("add_sequence") for _ in range(3)]
    pair.step(sequences, [200, 65, 7])
    for _ in range(70):
        pair.step(sequences, [1, 1, 1])
    forks = [pair.all("fork", sequence) for sequence in sequences[:2]]
    pair.step([*sequences, *forks], [3, 0, 8, 70, 1])
    pair.all("truncate", sequences[0], 150)
    pair.step([*sequences, *forks], [1, 130, 64, 1, 2])
    pair.all("free", sequences[1])
    del sequences[1]
    pair.step([*sequences, *forks], [1, 1, 1, 1])
    pair.check_same_content([*sequences, *forks], bits)
    assert counters_of(pair.caches[1]) == counters_of(pair.caches[0])


def test_layers_with_other_numbers_of_query_heads(device: str) -> None:
    """A step is cut into work before it is known how many query heads there are."""
    pair = Pair(device)
    sequences = [pair.all("add_sequence") for _ in range(4)]
    pair.step(sequences, [300, 65, 7, 1], q_heads=(2, 32))
    for heads in ((32, 2), (16, 16), (6, 10)):
        pair.step(sequences, [1, 2, 1, 8], q_heads=heads)
    pair.check_same_content(sequences, 8)


def test_prefetching_changes_nothing(device: str) -> None:
    pair = Pair(device)
    sequence = pair.all("add_sequence")
    pair.step([sequence], [200])
    cache, aside = pair.caches[1], torch.cuda.Stream()
    step = cache.step([sequence[1]], [1])
    aside.wait_stream(torch.cuda.current_stream())
    for layer in range(LAYERS):
        step.prefetch_hot(layer, stream=aside)
    torch.cuda.current_stream().wait_stream(aside)
    step.abort()
    pair.step([sequence], [1])
    with pytest.raises(hybridkv.StepError):
        step.prefetch_hot(0)
    pair.check_same_content([sequence], 8)


def test_tables_larger_than_a_pinned_buffer(device: str) -> None:
    pair = Pair(device, dim=16, max_tokens=64 * 20_000, max_sequences=20)
    sequences = [pair.all("add_sequence") for _ in range(20)]
    pair.step(sequences, [100] * 20)
    for _ in range(3):
        pair.step(sequences, [1] * 20)


def test_same_input_same_bits(device: str) -> None:
    torch.manual_seed(0)
    x = [torch.randn(n, heads, 128).bfloat16() for n in (3000, 1, 1) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]
    results = []
    for _ in range(2):
        cache = hybridkv.Cache(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=128,
            dtype="bfloat16",
            device=device,
            max_tokens=4096,
            max_sequences=1,
        )
        sequence = cache.add_sequence()
        outputs = []
        for i in range(0, 9, 3):
            with cache.step([sequence], [len(x[i])]) as step:
                outputs.append(attend(device, step, 0, *x[i : i + 3]))
        results.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_caches_on_two_streams(device: str) -> None:
    """Steps of one do not wait for, or disturb, those of the other."""
    torch.manual_seed(0)
    data = [torch.randn(64, 100, heads, 64).bfloat16().to(device) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]

    def make() -> tuple[hybridkv.Cache, Any]:
        cache = hybridkv.Cache(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=64,
            dtype="bfloat16",
            device=device,
            max_tokens=8192,
            max_sequences=1,
        )
        return cache, cache.add_sequence()

    def run(cache: hybridkv.Cache, sequence: Any, i: int) -> torch.Tensor:
        with cache.step([sequence], [100]) as step:
            return step.attend(0, *(x[i] for x in data))  # type: ignore[no-any-return]

    alone = make()
    wanted = [run(*alone, i) for i in range(64)]
    torch.cuda.synchronize()
    caches, streams = [make(), make()], [torch.cuda.Stream(), torch.cuda.Stream()]
    got: list[list[torch.Tensor]] = [[], []]
    for i in range(64):
        for which in (0, 1):
            with torch.cuda.stream(streams[which]):
                got[which].append(run(*caches[which], i))
    torch.cuda.synchronize()
    for outputs in got:
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


# ------------------------------------------------------------------------------------------------------------- refusals


class Attached:
    """A store of one layer on `device`, and steps of one row of three tokens in block 1."""

    RIGHT: ClassVar[dict[str, Any]] = {
        "cu_new_tokens": [0, 3],
        "seq_lens": [3],
        "block_table": [[1]],
        "slot_mapping": [64, 65, 66],
    }

    def __init__(self, device: str) -> None:
        self.device = device
        self.store = hybridkv.Store(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=64,
            dtype="bfloat16",
            num_blocks=8,
            max_rows=2,
            max_new_tokens=64,
            device=device,
        )
        pages = torch.zeros(8, KV_HEADS, self.store.record_bytes, dtype=torch.uint8, device=device)
        self.store.bind_layer(0, pages)
        self.x = [torch.randn(3, heads, 64).bfloat16().to(device) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]

    def begin(self, **changed: Any) -> None:
        arrays = {**self.RIGHT, **changed}
        numbers = {name: arrays.pop(name) for name in list(arrays) if isinstance(arrays[name], int)}
        kinds = {"slot_mapping": torch.int64}
        for name, x in arrays.items():
            arrays[name] = torch.tensor(x, dtype=kinds.get(name, torch.int32), device=self.device)
        self.store.begin(**arrays, **numbers)

    def attend(self) -> torch.Tensor:
        return to_host(self.store.attend(0, *self.x))


@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("block_table", [[8]], hybridkv.ArgumentError),
        ("block_table", [[-1]], hybridkv.ArgumentError),
        ("slot_mapping", [64 * 8, 64 * 8 + 1, 64 * 8 + 2], hybridkv.ArgumentError),
        ("slot_mapping", [64, 66, 67], hybridkv.ArgumentError),
        ("seq_lens", [2], hybridkv.ArgumentError),
        ("seq_lens", [64 * 8 + 1], hybridkv.ArgumentError),
        ("cu_new_tokens", [1, 3], hybridkv.ArgumentError),
        ("copy_sources", [8], hybridkv.ArgumentError),
        ("max_row_tokens", 2, hybridkv.ArgumentError),
    ],
)
def test_a_step_refused_on_the_device(device: str, argument: str, wrong: Any, error: type[Exception]) -> None:
    """It writes nothing, the next begin says so, and the one after works."""
    attached = Attached(device)
    attached.begin(**{argument: wrong})
    attached.attend()
    torch.cuda.synchronize()
    assert attached.store.block_info(1)["hot_page"] == -1
    with pytest.raises(error, match=f"(?s){argument}.*a step before this one was refused"):
        attached.begin()
    with pytest.raises(hybridkv.StepError):
        attached.attend()
    for _ in range(2):
        attached.begin()
        out = attached.attend()
    group = Q_HEADS // KV_HEADS
    first = to_host(attached.x[2])[0].repeat_interleave(group, 0)
    assert relative_error(out[0], first) < ALLOWED, "the first token sees only itself"
    assert attached.store.counters()["n_tokens_appended"] == 6


def test_what_the_kernels_cannot_take(device: str) -> None:
    attached = Attached(device)
    attached.begin()
    q, k, v = attached.x
    wide = torch.zeros(3, 17 * 8 * KV_HEADS, 64, dtype=torch.bfloat16, device=device)
    odd = torch.zeros(3, KV_HEADS, 68, dtype=torch.bfloat16, device=device)[:, :, :64]
    for args, message in (
        ((wide, k, v), "n_q_heads"),
        ((q, odd, v), "k must be 16-byte aligned on CUDA, with strides"),
    ):
        with pytest.raises(hybridkv.Error, match=message):
            attached.store.attend(0, *args)
    attached.attend()


def test_memory_that_is_not_there(device: str) -> None:
    options: dict[str, Any] = {"num_layers": 64, "num_kv_heads": 64, "head_dim": 256, "dtype": "float16"}
    with pytest.raises(
        hybridkv.OutOfMemoryError, match=r"no memory for \d+ bytes on CUDA device 0: \d+ of \d+ are free"
    ):
        hybridkv.Cache(**options, device=device, max_tokens=1 << 24, max_sequences=1)
    Pair(device)


def test_a_step_cannot_begin_in_a_graph(device: str) -> None:
    pair = Pair(device)
    sequence = pair.all("add_sequence")
    pair.step([sequence], [1])
    with (
        pytest.raises(hybridkv.StepError, match="before its stream is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        pair.caches[1].step([sequence[1]], [1])
    pair.step([sequence], [1])
    pair.check_same_content([sequence], 8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(device: str) -> None:
    """Each cache stays on its own, and the caller's current device is as before."""
    torch.cuda.set_device(0)
    pairs = [Pair("cuda:0"), Pair("cuda:1")]
    sequences = [pair.all("add_sequence") for pair in pairs]
    for n in (100, 1, 1):
        for pair, sequence in zip(pairs, sequences, strict=True):
            pair.step([sequence], [n])
            assert torch.cuda.current_device() == 0
    for pair, sequence in zip(pairs, sequences, strict=True):
        pair.check_same_content([sequence], 8)
