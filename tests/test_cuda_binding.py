"""The binding for CUDA: where tensors must lie, which stream their producers are given, what is refused, who lives on.

On machines without a GPU, the last test builds a stand-in (gpu.py) and runs this file and the graphs of
test_cuda_graph.py there.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import IS_STAND_IN, N_DEVICES, OnCuda, Wrapped, host_of, needs_device, needs_gpu, place
from test_dlpack import half

import hybridkv
from hybridkv import ArgumentError, DtypeError

ROOT = Path(__file__).parent.parent


class Recorded(Wrapped):
    """A producer on a GPU that notes what `__dlpack__` is asked."""

    def __init__(self, tensor: torch.Tensor, *, versioned: bool = True) -> None:
        super().__init__(place(tensor), versioned=versioned)

    @property
    def streams(self) -> list[Any]:
        return [call["stream"] for call in self.calls]


def make(**options: Any) -> hybridkv.Cache:
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "max_tokens": 1024}
    return hybridkv.Cache(**{**sizes, "dtype": "float16", "device": "cuda", "max_sequences": 2, **options})


def make_store(**options: Any) -> hybridkv.Store:
    store = hybridkv.Store(
        num_layers=1,
        num_kv_heads=2,
        head_dim=32,
        dtype="float16",
        num_blocks=4,
        max_rows=2,
        max_new_tokens=64,
        device="cuda:0",
        **options,
    )
    store.bind_layer(0, place(torch.zeros(4, 2, store.record_bytes, dtype=torch.uint8)))
    return store


def batch(**changed: Any) -> dict[str, Any]:
    """One row of three tokens, as `Store.begin` takes it on a device."""
    arrays = {
        "cu_new_tokens": torch.tensor([0, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([3], dtype=torch.int32),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "slot_mapping": torch.tensor([64, 65, 66]),
        "clock": torch.tensor([7]),
    }
    return {**{name: place(x) for name, x in arrays.items()}, **changed}


# -------------------------------------------------------------------------------------------------------------- tensors


@needs_device
def test_a_cache_on_a_device_answers_like_one_on_the_cpu() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 150, 2, 32).half()
    q = torch.randn(150, 4, 32).half()
    outs, stored = [], []
    for device in ("cpu", "cuda"):
        cache = make(device=device)
        put = place if device == "cuda" else (lambda x: x)
        sequence, out = cache.add_sequence(), put(torch.zeros_like(q))
        with cache.step([sequence], [150]) as step:
            step.attend(0, put(q), put(k), put(v), out=out)
        k_out = put(torch.zeros(150, 2, 32).half())
        cache._core.read_tokens(sequence.id, 0, 0, 150, k_out, put(torch.zeros(150, 2, 32).half()))
        outs.append(host_of(out) if device == "cuda" else out)
        stored.append(host_of(k_out) if device == "cuda" else k_out)
    assert torch.equal(stored[0], stored[1])
    assert (outs[0] - outs[1]).abs().max() < 2e-3


@needs_device
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "mass", "sinks"])
def test_tensors_elsewhere_are_refused(name: str) -> None:
    cache = make()
    sequence = cache.add_sequence()
    tensors = {"q": half(3, 4, 32), "k": half(3, 2, 32), "v": half(3, 2, 32), "out": half(3, 4, 32)}
    tensors |= {"lse": torch.zeros(3, 4), "mass": torch.zeros(1, 2, 1), "sinks": torch.zeros(4)}
    with cache.step([sequence], [3]) as step:
        placed = {key: place(x) for key, x in tensors.items()}
        wrong = [(tensors[name], "cpu"), (tensors[name].numpy(), "cpu"), (Wrapped(tensors[name]), "cpu")]
        if IS_STAND_IN or torch.cuda.device_count() > 1:
            wrong.append((place(tensors[name], 1), "cuda:1"))
        for x, device in wrong:
            with pytest.raises(ArgumentError, match=rf"{name}: .* on cuda:0, got one on {device}") as caught:
                step.attend(0, **{**placed, name: x})
            assert caught.value.argument == name
        step.attend(0, **placed)


@needs_device
def test_managed_memory_is_device_memory() -> None:
    cache = make()
    sequence = cache.add_sequence()
    x = place(half(3, 2, 32))
    if IS_STAND_IN:
        x.device = (13, 0)
    with cache.step([sequence], [3]) as step:
        step.attend(0, x, x, x, out=place(half(3, 2, 32)))


@needs_device
def test_pages_elsewhere_are_refused() -> None:
    store = make_store()
    with pytest.raises(ArgumentError, match="pages: expected a tensor on cuda:0, got one on cpu"):
        store.bind_layer(0, torch.zeros(4, 2, store.record_bytes, dtype=torch.uint8))


@needs_device
def test_outputs_must_come_from_somewhere() -> None:
    """Nothing but torch and CuPy is asked for memory on a device."""
    cache = make()
    sequence = cache.add_sequence()
    q = Recorded(half(1, 2, 32))
    with cache.step([sequence], [1]) as step:
        with pytest.raises(ArgumentError, match=r"out: must be given: .*cuda:0") as caught:
            step.attend(0, q, q, q)
        assert caught.value.argument == "out"
        step.attend(0, q, q, q, out=place(half(1, 2, 32)))


@needs_gpu
def test_outputs_are_made_on_the_device() -> None:
    cache = make()
    sequence = cache.add_sequence()
    q = half(1, 2, 32).cuda()
    with cache.step([sequence], [1]) as step:
        out, lse, mass = step.attend(0, q, q, q, return_lse=True, return_mass=True)
    assert all(x.is_cuda for x in (out, lse, mass, *cache.read_tokens(sequence, 0)))
    cupy = pytest.importorskip("cupy")
    with cache.step([sequence], [1]) as step:
        out = step.attend(0, *[cupy.from_dlpack(q)] * 3)
    assert isinstance(out, cupy.ndarray)
    assert float(cupy.abs(out).max()) == 0


@needs_gpu
def test_what_the_device_cannot_compute_is_refused() -> None:
    with pytest.raises(hybridkv.Error, match="float32"):
        make(dtype="float32")
    with pytest.warns(UserWarning, match="block_size"):
        config = hybridkv.HybridConfig(block_size=32)
    with pytest.raises(hybridkv.Error, match="block_size"):
        make(config=config)
    with pytest.raises(hybridkv.NoDeviceError, match=r"cuda:99"):
        make(device="cuda:99")


@needs_gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_misaligned_tensors_work_or_are_refused(name: str) -> None:
    """Kernels load 16 bytes at a time; tensors that start in between are an error or computed right, never a crash."""
    cache = make()
    sequence = cache.add_sequence()
    torch.manual_seed(0)
    x = {key: torch.randn(3, 2, 32).half().cuda() for key in ("q", "k", "v", "out")}
    moved = torch.zeros(3 * 64 + 1).half().cuda()[1:].view(3, 2, 32).copy_(x[name])
    out = moved if name == "out" else x["out"]
    with cache.step([sequence], [3]) as step:
        try:
            step.attend(0, **{**x, name: moved})
        except ArgumentError:
            step.attend(0, **x)
            out = x["out"]
    torch.cuda.synchronize()
    assert (out[0] - x["v"][0]).abs().max() < 1e-3, "the first token sees only itself"


# -------------------------------------------------------------------------------------------------------------- streams


@needs_device
@pytest.mark.parametrize("versioned", [True, False])
def test_producers_are_told_the_stream(versioned: bool) -> None:
    """1 is the legacy default stream, which we call 0; an address is passed on."""
    cache = make()
    sequence = cache.add_sequence()
    with torch.cuda.stream(None):
        own = 0x7F00 if IS_STAND_IN else torch.cuda.Stream().cuda_stream  # torch knows no per-thread stream, 2
        for stream, told in ((None, 1), (0, 1), (1, 1), (own, own), *([(2, 2)] if IS_STAND_IN else [])):
            tensors = [Recorded(half(1, 2, 32), versioned=versioned) for _ in range(4)]
            with cache.step([sequence], [1], stream=stream) as step:
                step.attend(0, *tensors[:3], out=tensors[3], stream=stream)
            for tensor in tensors:
                assert tensor.streams[-1] == told
                assert len(tensor.calls) == (1 if versioned else 2)


@needs_device
def test_stream_objects() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 1

    class Torch:
        cuda_stream = 1

    cache = make()
    sequence = cache.add_sequence()
    for stream in (Protocol(), Torch()):
        q = Recorded(half(1, 2, 32))
        with cache.step([sequence], [1], stream=stream) as step:
            step.attend(0, q, q, q, out=place(half(1, 2, 32)), stream=stream)
        assert q.streams == [1, 1, 1]
    with pytest.raises(DtypeError, match="stream: expected an integer, got str"):
        cache.step([sequence], [1], stream="x")


@needs_gpu
def test_the_current_stream_of_torch_is_the_default() -> None:
    cache = make()
    sequence = cache.add_sequence()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        q = Recorded(half(1, 2, 32))
        with cache.step([sequence], [1]) as step:
            step.attend(0, q, q, q, out=half(1, 2, 32).cuda())
    assert q.streams == [stream.cuda_stream] * 3


@needs_gpu
def test_work_of_another_stream_comes_first() -> None:
    """q, k and v are still being computed on torch's stream when they are handed over to another."""
    cache = make()
    sequence, stream = cache.add_sequence(), torch.cuda.Stream()
    slow = torch.randn(4096, 4096, device="cuda")
    q, out = torch.zeros(2, 2, 32).half().cuda(), torch.zeros(2, 2, 32).half().cuda()
    torch.cuda.synchronize()
    with cache.step([sequence], [2], stream=stream) as step:
        for _ in range(20):
            slow = slow @ slow
            slow /= slow.norm()
        q += 1
        step.attend(0, q, q, q, out=out, stream=stream)
    stream.synchronize()
    assert torch.equal(out, torch.ones_like(out))


# --------------------------------------------------------------------------------------------------------- index arrays


@needs_device
def test_index_arrays_are_used_where_they_are() -> None:
    store = make_store()
    store.begin(**batch(), max_row_tokens=3)
    x, out = place(torch.ones(3, 2, 32).half()), place(torch.zeros(3, 2, 32).half())
    store.attend(0, x, x, x, out=out)
    assert torch.equal(host_of(out), torch.ones(3, 2, 32).half())
    assert store.block_info(1)["n_hot_tokens"] == 3


INDEX_REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "seq_lens": ([3], DtypeError, "expected a NumPy array or a tensor with __dlpack__, got list"),
    "cu_new_tokens": (lambda: torch.tensor([0, 3], dtype=torch.int32), ArgumentError, "expected a tensor on cuda:0"),
    "slot_mapping": (lambda: place(torch.tensor([64, 65, 66], dtype=torch.int32)), DtypeError, "int64.*got int32"),
    "block_table": (lambda: place(torch.tensor([[1]])), DtypeError, "int32.*got int64"),
    "clock": (lambda: place(torch.tensor([1, 2])), ArgumentError, r"expected \[1\] with 1 entries, got 2"),
    "copy_sources": (lambda: place(torch.zeros(2, dtype=torch.int32)), ArgumentError, "1 entries, got 2"),
}


@needs_device
@pytest.mark.parametrize("name", INDEX_REFUSED)
def test_wrong_index_arrays_are_refused(name: str) -> None:
    value, kind, message = INDEX_REFUSED[name]
    store = make_store()
    with pytest.raises(kind, match=rf"{name}: .*{message}") as caught:
        store.begin(**batch(**{name: value() if callable(value) else value}))
    assert caught.value.argument == name
    store.begin(**batch())


@needs_device
def test_index_arrays_with_gaps_are_refused() -> None:
    store = make_store()
    table = torch.zeros(2, 3, dtype=torch.int32)
    arrays = batch(
        cu_new_tokens=place(torch.tensor([0, 1, 3], dtype=torch.int32)),
        seq_lens=place(torch.tensor([1, 2], dtype=torch.int32)),
        block_table=OnCuda(table[:, :2]) if IS_STAND_IN else table.cuda()[:, :2],
    )
    with pytest.raises(ArgumentError, match="block_table: must be contiguous, got stride 3"):
        store.begin(**arrays)


@needs_device
def test_index_arrays_live_until_the_next_step() -> None:
    """The kernels of a step read them; the caller need not keep them."""
    store = make_store()
    store.begin(**batch())
    gc.collect()
    filler = [place(torch.full((3,), 99)) for _ in range(50)]
    x = place(torch.ones(3, 2, 32).half())
    store.attend(0, x, x, x, out=place(torch.zeros(3, 2, 32).half()))
    assert store.block_info(1)["n_hot_tokens"] == 3
    del filler


# ---------------------------------------------------------------------------------------------------------- tensors out


@needs_device
def test_pages_are_exported_on_the_device() -> None:
    cache = make()
    view = cache.export_pages(0)
    assert view.__dlpack_device__() == (2, 0)
    for stream in (None, -1, 1, 2, 0x7F00):
        assert view.__dlpack__(stream=stream, max_version=(1, 3), dl_device=(2, 0))
    for wrong in ({"stream": 0}, {"stream": -2}, {"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}):
        with pytest.raises(BufferError, match=next(iter(wrong))):
            view.__dlpack__(**wrong)
    with pytest.raises(TypeError):
        view.__dlpack__(stream="x")


@needs_gpu
def test_exported_pages_are_what_the_cache_holds() -> None:
    cache = make()
    sequence = cache.add_sequence()
    x = torch.randn(200, 2, 32).half().cuda()
    with cache.step([sequence], [200]) as step:
        step.attend(0, x, x, x)
    pages = torch.from_dlpack(cache.export_pages(0))
    assert pages.is_cuda
    block = cache.block_table(sequence, 0)[1]
    k, v = cache.read_tokens(sequence, 0, 64, 128)
    for head in range(2):
        dumped = hybridkv.record_decode(cache.config, pages[block, head].cpu().numpy().tobytes(), 32)
        assert torch.equal(torch.from_numpy(dumped[0]).half(), k[:, head].cpu())
        assert torch.equal(torch.from_numpy(dumped[1]).half(), v[:, head].cpu())


# ---------------------------------------------------------------------------------------------------------- lent memory


def memory_on(index: int, n_bytes: int = 512 << 20) -> Any:
    return place(torch.zeros(n_bytes, dtype=torch.uint8), index)


@needs_device
def test_a_cache_in_lent_memory_of_its_gpu() -> None:
    q = half(3, 2, 32)
    outputs = []
    for memory in (None, memory_on(0)):
        cache = make(memory=memory)
        with cache.step([cache.add_sequence()], [3]) as step:
            out = place(torch.zeros(3, 2, 32).half())
            step.attend(0, place(q), place(q), place(q), out=out)
        outputs.append(host_of(out))
        stats = cache.stats()
        names = ("record", "hot", "directory", "table", "prefix", "workspace", "unused")
        assert sum(getattr(stats, f"{name}_bytes") for name in names) == stats.allocated_bytes
    assert torch.equal(*outputs)
    assert cache.export_pages(0).__dlpack_device__() == (2, 0)


@needs_device
@pytest.mark.parametrize("kind", [hybridkv.Cache, hybridkv.Store])
def test_lent_memory_must_be_of_the_gpu(kind: type) -> None:
    def create(memory: Any) -> Any:
        return make(memory=memory) if kind is hybridkv.Cache else make_store(memory=memory)

    wrong = [(torch.zeros(8 << 20, dtype=torch.uint8), "expected a tensor on cuda:0, got one on cpu")]
    if N_DEVICES > 1:
        wrong.append((memory_on(1, 8 << 20), "expected a tensor on cuda:0, got one on cuda:1"))
    for memory, message in wrong:
        with pytest.raises(ArgumentError, match=message) as caught:
            create(memory)
        assert caught.value.argument == "memory"
    create(memory_on(0))


# ------------------------------------------------------------------------------------------------------------- stand-in


def build_stand_in(folder: Path) -> None:
    """hybridkv/_cuda.so from the C core and tests/c/fake_cuda.c."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        pytest.skip(f"needs a C compiler, {compiler}")
    flags = ["-std=c11", "-O0", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{ROOT / 'csrc'}"]
    avx512 = [f"avx512{name}" for name in ("f", "bw", "vl", "dq", "vbmi", "vbmi2", "vnni", "bf16")]
    avx_flags = [f"-m{name}" for name in ("avx2", "fma", "f16c", *avx512)]

    def compile_source(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        own = [*flags, *avx_flags] if source.name.startswith("cpu_avx") else flags
        subprocess.run([compiler, *own, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, [*ROOT.glob("csrc/*.c"), ROOT / "tests/c/fake_cuda.c"]))
    library = folder / "hybridkv/_cuda.so"
    subprocess.run([compiler, "-shared", *objects, "-pthread", "-lm", "-o", library], check=True)


@pytest.mark.skipif(N_DEVICES > 0, reason="there is a GPU")
def test_on_a_stand_in(tmp_path: Path) -> None:
    package = Path(hybridkv.__file__).parent
    shutil.copytree(package, tmp_path / "hybridkv", ignore=shutil.ignore_patterns("_cuda.so", "__pycache__"))
    build_stand_in(tmp_path)
    files = [__file__, str(ROOT / "tests/test_cuda_graph.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    search = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": search, "HYBRIDKV_SOAK_STEPS": "100"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA" not in done.stdout, "the stand-in was not found"
