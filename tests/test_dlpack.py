"""Tensors in and out: every path into the C core, what it refuses and in which words, and who keeps what alive."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu import OnCuda, Wrapped, capsule_pointer

import hybridkv
from hybridkv import ArgumentError, DtypeError, _core

MakeCache = Callable[..., hybridkv.Cache]


def identity(tensor: Any) -> Any:
    return tensor


def unversioned(tensor: Any) -> Wrapped:
    return Wrapped(tensor, versioned=False)


KINDS = {
    "torch": identity,
    "numpy": lambda tensor: tensor.numpy(),
    "versioned": Wrapped,
    "unversioned": unversioned,
}


def encode(k: Any, v: Any) -> bytes:
    return _core.record_encode(k, v, bits=8, block_size=64)


def attended(cache: hybridkv.Cache, *tensors: Any, **options: Any) -> Any:
    """One step of a fresh sequence in every layer; the last layer's result."""
    sequence = cache.add_sequence()
    try:
        with cache.step([sequence], [tensors[1].shape[0]]) as step:
            for layer in range(cache.num_layers):
                result = step.attend(layer, *tensors, **options)
    finally:
        cache.free(sequence)
    return result


# ----------------------------------------------------------------------------------------------------------- tensors in


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_gives_the_same_bytes(kind: str) -> None:
    k, v = torch.randn(2, 50, 64).half()
    assert encode(KINDS[kind](k), KINDS[kind](v)) == encode(k, v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sliced", "expanded", "transposed", "offset", "one token"])
def test_strides_and_offsets(kind: str, name: str) -> None:
    """Views are read where they are."""
    base = torch.randn(2, 64, 128).half()
    view = {
        "sliced": lambda x: x[::2, :64],
        "expanded": lambda x: x[3:4, :64].expand(40, 64),
        "transposed": lambda x: x.reshape(64, 2, 64).transpose(0, 1)[1],
        "offset": lambda x: x[17:40, 32:96],
        "one token": lambda x: x.t()[:64].t()[5:6],
    }[name]
    k, v = view(base[0]), view(base[1])
    assert encode(KINDS[kind](k), KINDS[kind](v)) == encode(k.contiguous().clone(), v.contiguous().clone())


def test_torch_takes_the_fast_path_and_others_do_not() -> None:
    """`__dlpack__` is asked once, with the newest version that we know; an old producer is asked again without it."""
    k, v = Wrapped(torch.ones(1, 32).half()), unversioned(torch.ones(1, 32).half())
    encode(k, v)
    assert k.calls == [{"stream": None, "max_version": (1, 3)}]
    assert v.calls == [{"stream": None, "max_version": (1, 3)}, {"stream": None}]
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_pass(make_cache: MakeCache, dtype: str) -> None:
    cache = make_cache(dtype=getattr(torch, dtype))
    assert cache.dtype == dtype
    q, k, v = (torch.randn(5, heads, 32).to(getattr(torch, dtype)) for heads in (4, 2, 2))
    out = attended(cache, q, k, v)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == getattr(torch, dtype)
    assert torch.equal(out[0], v[0].repeat_interleave(2, dim=0)), "the first token sees only itself"


def test_outputs_are_of_the_callers_kind(make_cache: MakeCache) -> None:
    q, k, v = torch.randn(3, 3, 2, 32).half()
    cache = make_cache()
    from_torch = attended(cache, q, k, v, return_lse=True, return_mass=True)
    from_numpy = attended(cache, *(x.numpy() for x in (q, k, v)), return_lse=True, return_mass=True)
    assert all(isinstance(x, torch.Tensor) for x in from_torch)
    assert all(isinstance(x, np.ndarray) for x in from_numpy)
    for ours, theirs in zip(from_torch, from_numpy, strict=True):
        assert np.array_equal(ours.numpy(), theirs)
    out, lse, mass = from_numpy
    assert (out.shape, lse.shape, mass.shape) == ((3, 2, 32), (3, 2), (1, 2, 1))
    given = np.empty((3, 2, 32), np.float16)
    assert attended(cache, q, k, v, given) is given
    assert np.array_equal(given, out)


def test_strided_outputs_leave_their_gaps_alone(make_cache: MakeCache) -> None:
    q, k, v = torch.randn(3, 4, 2, 32).half()
    cache = make_cache()
    memory = torch.full((4, 3, 48), 7.0).half()
    attended(cache, q, k, v, memory[:, :2, 8:40])
    assert torch.equal(memory[:, :2, 8:40], attended(cache, q, k, v))
    memory[:, :2, 8:40] = 7
    assert (memory == 7).all()


# -------------------------------------------------------------------------------------------------------------- refused


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).half()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q no tensor": ({"q": [[1.0]]}, DtypeError, r"q: expected a NumPy array or a tensor with __dlpack__, got list"),
    "k None": ({"k": None}, DtypeError, r"k: .*got NoneType"),
    "q dtype": ({"q": half(3, 4, 32).float()}, DtypeError, r"q: expected dtype float16, got float32 \[3, 4, 32\]"),
    "k dtype": ({"k": half(3, 2, 32).bfloat16()}, DtypeError, r"k: expected dtype float16, got bfloat16"),
    "v integers": ({"v": np.zeros((3, 2, 32), np.int16)}, DtypeError, r"v: expected dtype float16, got int16"),
    "v complex": ({"v": np.zeros((3, 2, 32), np.complex64)}, DtypeError, r"v: NumPy dtype c8"),
    "v swapped": ({"v": np.zeros((3, 2, 32), ">f2")}, DtypeError, r"v: expected native byte order"),
    "q dims": (
        {"q": half(3, 128)},
        ArgumentError,
        r"q: expected shape \[N, Hq, D\] = \[3, any, 32\], got float16 \[3, 128\]",
    ),
    "q tokens": ({"q": half(4, 4, 32)}, ArgumentError, r"q: expected shape .*\[3, any, 32\], got float16 \[4, 4, 32\]"),
    "q head size": ({"q": half(3, 4, 16)}, ArgumentError, r"q: .*got float16 \[3, 4, 16\]"),
    "q heads": ({"q": half(3, 3, 32)}, ArgumentError, r"q: .*multiple of the 2 KV heads, got 3"),
    "q no heads": ({"q": half(3, 0, 32)}, ArgumentError, r"q: .*multiple of the 2 KV heads, got 0"),
    "k heads": ({"k": half(3, 4, 32)}, ArgumentError, r"k: expected shape \[N, Hkv, D\] = \[3, 2, 32\]"),
    "v empty": ({"v": half(0, 2, 32)}, ArgumentError, r"v: expected shape .*got float16 \[0, 2, 32\]"),
    "k stride": (
        {"k": half(3, 2, 64)[..., ::2]},
        ArgumentError,
        r"k: the last dimension must be contiguous, got stride 2",
    ),
    "v negative": ({"v": np.zeros((3, 2, 32), np.float16)[::-1]}, ArgumentError, r"v: stride -64 of dimension 0"),
    "q grad": ({"q": half(3, 4, 32).requires_grad_()}, ArgumentError, r"q: must not require grad.*tensor\.detach\(\)"),
    "k wrapped": ({"k": Wrapped(half(2, 2, 32))}, ArgumentError, r"k: expected shape"),
    "q on a GPU": (
        {"q": OnCuda(half(3, 4, 32), 1)},
        ArgumentError,
        r"q: expected a tensor on cpu, got one on cuda:1",
    ),
    "k managed": (
        {"k": OnCuda(half(3, 2, 32), device_type=13)},
        ArgumentError,
        r"k: expected a tensor on cpu, got one on cuda:0",
    ),
    "v elsewhere": (
        {"v": OnCuda(half(3, 2, 32), device_type=8, versioned=False)},
        ArgumentError,
        r"v: expected a tensor on cpu, got one on DLPack device 8:0",
    ),
    "out on a GPU": (
        {"out": OnCuda(half(3, 4, 32))},
        ArgumentError,
        r"out: expected a tensor on cpu, got one on cuda:0",
    ),
    "stream": ({"stream": 1}, ArgumentError, r"stream: there are no streams on the CPU, got 0x1"),
    "stream negative": ({"stream": -1}, ArgumentError, r"stream: expected integers in 0\.\."),
    "stream text": ({"stream": "x"}, DtypeError, r"stream: expected an integer, got str"),
    "v sparse": ({"v": half(3, 2, 32).to_sparse()}, ArgumentError, r"v: a Tensor could not be shared"),
    "v meta": ({"v": half(3, 2, 32).to("meta")}, ArgumentError, r"v: "),
    "out read-only": (
        {"out": read_only(np.zeros((3, 4, 32), np.float16))},
        ArgumentError,
        r"out: is written to, but the tensor is read-only",
    ),
    "out expanded": (
        {"out": half(1, 4, 32).expand(3, 4, 32)},
        ArgumentError,
        r"out: is written to, but elements overlap",
    ),
    "out overlaps": (
        {"out": torch.as_strided(half(500), (3, 4, 32), (100, 32, 1))},
        ArgumentError,
        r"out: .*overlap along dimension 0 \(stride 100\)",
    ),
    "out shape": ({"out": half(3, 2, 32)}, ArgumentError, r"out: expected shape \[N, Hq, D\] = \[3, 4, 32\]"),
    "out dtype": ({"out": np.zeros((3, 4, 32), np.float32)}, DtypeError, r"out: expected dtype float16"),
    "lse dtype": ({"lse": half(3, 4)}, DtypeError, r"lse: expected dtype float32"),
    "lse shape": ({"lse": torch.zeros(4, 3)}, ArgumentError, r"lse: expected shape \[N, Hq\] = \[3, 4\]"),
    "lse strides": ({"lse": torch.zeros(3, 8)[:, :4]}, ArgumentError, r"lse: must be contiguous, got stride 8"),
    "mass rows": (
        {"mass": torch.zeros(2, 2, 1)},
        ArgumentError,
        r"mass: expected shape \[R, Hkv, blocks\] = \[1, 2, any\]",
    ),
    "mass blocks": ({"mass": torch.zeros(1, 2, 0)}, ArgumentError, r"mass: .*1 blocks of the longest sequence, got 0"),
    "sinks shape": ({"sinks": torch.zeros(2)}, ArgumentError, r"sinks: expected shape \[Hq\] = \[4\]"),
    "sinks dtype": ({"sinks": half(4)}, DtypeError, r"sinks: expected dtype float32"),
    "scale text": ({"scale": "1"}, DtypeError, r"scale: expected a real number, got str"),
    "scale zero": ({"scale": 0.0}, ArgumentError, r"scale.*got 0"),
    "scale nan": ({"scale": float("nan")}, ArgumentError, r"scale.*got -?nan"),
    "soft_cap negative": ({"soft_cap": -1.0}, ArgumentError, r"soft_cap.*got -1"),
    "layer": ({"layer": 2}, ArgumentError, r"layer: expected integers in 0\.\.1, got 2"),
    "layer negative": ({"layer": -1}, ArgumentError, r"layer: .*got -1"),
    "layer huge": ({"layer": 2**70}, ArgumentError, r"layer: .*beyond 64 bits"),
    "layer real": ({"layer": 0.0}, DtypeError, r"layer: expected an integer, got float"),
    "layer bool": ({"layer": True}, DtypeError, r"layer: expected an integer, got bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_tensors_are_refused_and_change_nothing(make_cache: MakeCache, name: str) -> None:
    changed, kind, message = REFUSED[name]
    cache = make_cache()
    sequence = cache.add_sequence()
    right = {"layer": 0, "q": half(3, 4, 32), "k": half(3, 2, 32), "v": half(3, 2, 32)}
    with cache.step([sequence], [3]) as step:
        before = np.from_dlpack(cache.export_pages(0)).tobytes(), cache.stats()
        with pytest.raises(kind, match=message) as caught:
            step.attend(**{**right, **changed})
        assert caught.value.argument == next(iter(changed))
        assert isinstance(caught.value, hybridkv.Error)
        assert (np.from_dlpack(cache.export_pages(0)).tobytes(), cache.stats()) == before
        step.attend(**right)
        step.attend(**{**right, "layer": 1})
    assert sequence.length == 3


def test_out_must_not_overlap_inputs(make_cache: MakeCache) -> None:
    memory = torch.zeros(4, 4, 32).half()
    cache = make_cache()
    sequence = cache.add_sequence()
    with cache.step([sequence], [3]) as step:
        for name, tensors in {
            "q": (memory[:3], half(3, 2, 32), half(3, 2, 32)),
            "k": (half(3, 4, 32), memory[1:, :2], half(3, 2, 32)),
            "v": (half(3, 4, 32), half(3, 2, 32), memory[:3, 2:]),
        }.items():
            with pytest.raises(ArgumentError, match=rf"out must not overlap {name}"):
                step.attend(0, *tensors, out=memory[:3])
        step.abort()


@pytest.mark.parametrize("wrap", [identity, Wrapped])
def test_requires_grad_is_refused_on_both_paths(wrap: Any) -> None:
    k = torch.ones(1, 32, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"k: .*detach") as caught:
        encode(k if wrap is identity else _with_grad(k), torch.ones(1, 32))
    assert caught.value.argument == "k"
    assert encode(wrap(k.detach()), wrap(k.detach()))


def _with_grad(tensor: torch.Tensor) -> Wrapped:
    wrapped = Wrapped(tensor)
    wrapped.requires_grad = True  # type: ignore[attr-defined]
    return wrapped


def test_a_producer_that_raises_is_quoted() -> None:
    class Failing(Wrapped):
        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError("the tensor is on fire")

    with pytest.raises(ArgumentError, match=r"v: a Failing could not be shared: the tensor is on fire") as caught:
        encode(half(1, 32), Failing(half(1, 32)))
    assert isinstance(caught.value.__cause__, BufferError)
    assert caught.value.argument == "v"


def test_capsules_are_consumed_once() -> None:
    class Repeating(Wrapped):
        def __init__(self, tensor: Any) -> None:
            super().__init__(tensor)
            self.capsule = tensor.__dlpack__(max_version=(1, 3))

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.capsule

    v = Repeating(half(1, 32))
    first = encode(half(1, 32), v)
    assert "used_dltensor_versioned" in repr(v.capsule)
    with pytest.raises(ArgumentError, match=r"v: .*unused DLPack capsule"):
        encode(half(1, 32), v)
    assert first == encode(half(1, 32), half(1, 32))


@pytest.mark.parametrize("answer", [None, 3, "capsule"])
def test_what_is_no_capsule_is_refused(answer: Any) -> None:
    class Odd(Wrapped):
        def __dlpack__(self, **kwargs: Any) -> Any:
            return answer

    with pytest.raises(ArgumentError, match="unused DLPack capsule"):
        encode(Odd(half(1, 32)), half(1, 32))


def test_capsules_of_another_major_version_are_left_alone() -> None:
    """Nothing but the version of such a capsule may be looked at; it keeps its content."""

    class Future(Wrapped):
        def __dlpack__(self, **kwargs: Any) -> Any:
            capsule = self.tensor.__dlpack__(max_version=(1, 3))
            self.pointer = capsule_pointer(capsule, b"dltensor_versioned")
            ctypes.c_uint32.from_address(self.pointer).value = 9
            self.capsule = capsule
            return capsule

    v = Future(half(1, 32))
    with pytest.raises(ArgumentError, match=r"v: DLPack version 9\.\d+ is not supported"):
        encode(half(1, 32), v)
    assert "used" not in repr(v.capsule)
    ctypes.c_uint32.from_address(v.pointer).value = 1  # its own destructor may look at it


# ------------------------------------------------------------------------------------------------------------- lifetime


def references(thing: object) -> int:
    gc.collect()
    return sys.getrefcount(thing)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_let_go(make_cache: MakeCache, kind: str) -> None:
    """No reference to a call-scoped tensor stays, whether the call succeeds or fails."""
    cache = make_cache()
    tensors = [KINDS[kind](half(3, heads, 32)) for heads in (4, 2, 2, 4)]
    inner = [x.tensor if isinstance(x, Wrapped) else x for x in tensors]
    before = [references(x) for x in inner]
    for _ in range(100):
        attended(cache, *tensors)
        with pytest.raises(ArgumentError):
            attended(cache, *tensors[:3], tensors[1])
    assert [references(x) for x in inner] == before


def test_memory_of_inputs_is_freed(make_cache: MakeCache) -> None:
    cache = make_cache()
    freed = []
    for _ in range(20):
        q, k, v = (half(3, heads, 32).numpy().copy() for heads in (4, 2, 2))
        for array in (q, k, v):
            weakref.finalize(array, freed.append, 1)
        attended(cache, Wrapped(torch.from_numpy(q)), Wrapped(torch.from_numpy(k)), unversioned(torch.from_numpy(v)))
    del q, k, v, array
    gc.collect()
    assert len(freed) == 60


def test_many_calls_do_not_leak(make_cache: MakeCache) -> None:
    psutil = pytest.importorskip("psutil")
    cache = make_cache()
    tensors = half(1, 4, 32), half(1, 2, 32), half(1, 2, 32)

    def round_trip(n: int) -> int:
        for _ in range(n):
            attended(cache, *tensors)
            np.from_dlpack(cache.export_pages(0))
            encode(Wrapped(half(1, 32)), unversioned(half(1, 32)))
            with pytest.raises(ArgumentError):
                cache.add_sequence([-1])
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    round_trip(500)
    assert round_trip(4000) - round_trip(100) < 2 << 20
    assert cache.stats().n_sequences == 0


def test_pages_stay_alive_with_the_store() -> None:
    """What a store writes to later is kept; a numpy array by reference, another tensor by its capsule."""
    for wrap in (identity, lambda t: t.numpy(), Wrapped, unversioned):
        store = hybridkv.Store(
            num_layers=1, num_kv_heads=2, head_dim=32, dtype="float16", num_blocks=4, max_rows=1, max_new_tokens=64
        )
        pages = torch.zeros(4, 2, store.record_bytes, dtype=torch.uint8)
        untyped = pages.untyped_storage()
        store.bind_layer(0, wrap(pages))
        address = untyped.data_ptr()
        del pages, untyped
        gc.collect()
        filler = [torch.full((4, 2, store.record_bytes), 255, dtype=torch.uint8) for _ in range(8)]
        assert all(x.data_ptr() != address for x in filler)
        x = torch.randn(64, 2, 32).half()
        store.begin([0, 64], [64], [[1]], list(range(64, 128)))
        store.attend(0, x, x, x)
        k, v = store.read_tokens(0, [1], 64)
        assert np.abs(k - x.numpy()).max() < 0.05
        assert np.abs(v - x.numpy()).max() < 0.05


# ---------------------------------------------------------------------------------------------------------- tensors out


def filled(make_cache: MakeCache) -> hybridkv.Cache:
    cache = make_cache(num_layers=1, max_tokens=512)
    sequence = cache.add_sequence()
    x = torch.randn(200, 2, 32).half()
    with cache.step([sequence], [200]) as step:
        step.attend(0, x, x, x)
    cache.first = sequence  # type: ignore[attr-defined]
    return cache


def test_export_is_what_the_cache_holds(make_cache: MakeCache) -> None:
    """Bytes of a record, found through the block table and decoded, are the cache's tokens. Block 1 is cold."""
    cache = filled(make_cache)
    sequence = cache.first  # type: ignore[attr-defined]
    pages = np.from_dlpack(cache.export_pages(0))
    layout = hybridkv.record_layout(cache.config, 32)
    assert pages.dtype == np.uint8
    assert pages.shape == cache.export_pages(0).shape
    assert pages.shape[1:] == (2, layout["record_bytes"])
    block = cache.block_table(sequence, 0)[1]
    k, v = cache.read_tokens(sequence, 0, 64, 128)
    for head in range(2):
        dumped = hybridkv.record_decode(cache.config, pages[block, head].tobytes(), 32)
        assert np.array_equal(dumped[0].astype(np.float16), k[:, head])
        assert np.array_equal(dumped[1].astype(np.float16), v[:, head])


def test_export_is_read_only_and_outlives_the_cache(make_cache: MakeCache) -> None:
    cache = filled(make_cache)
    view = cache.export_pages(0)
    array = np.from_dlpack(view)
    tensor = torch.from_dlpack(view)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    before = array.tobytes()
    cache.close()
    del view, cache
    gc.collect()
    assert array.tobytes() == before
    assert tensor.numpy().tobytes() == before


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_export_answers_every_version(make_cache: MakeCache, max_version: tuple[int, int] | None) -> None:
    view = filled(make_cache).export_pages(0)
    capsule = view.__dlpack__(max_version=max_version)
    is_versioned = max_version is not None and max_version[0] >= 1
    assert f'"{"dltensor_versioned" if is_versioned else "dltensor"}"' in repr(capsule)

    class Held:
        def __dlpack__(self, **kwargs: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return view.__dlpack_device__()

    array = np.from_dlpack(Held())
    assert array.tobytes() == np.from_dlpack(view).tobytes()


def test_export_refuses_what_it_cannot_do(make_cache: MakeCache) -> None:
    view = filled(make_cache).export_pages(0)
    assert view.__dlpack_device__() == (1, 0)
    for wrong in ({"stream": 1}, {"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match=next(iter(wrong))):
            view.__dlpack__(**wrong)
    for wrong in ({"max_version": 1}, {"max_version": ("a", 1)}, {"dl_device": "cpu"}, {"strem": None}):
        with pytest.raises(TypeError):
            view.__dlpack__(**wrong)
    assert view.__dlpack__(stream=None, copy=False, dl_device=(1, 0))
    with pytest.raises(TypeError):
        _core.PagesView()  # type: ignore[call-arg]


def test_export_may_be_deleted_on_any_thread(make_cache: MakeCache) -> None:
    """Arrays and capsules that nobody consumed, dropped by other threads after the cache is gone."""
    cache = filled(make_cache)
    things = [np.from_dlpack(cache.export_pages(0)) for _ in range(4)]
    things += [cache.export_pages(0).__dlpack__(max_version=version) for version in (None, (1, 3)) for _ in range(4)]
    cache.close()
    del cache
    threads = [threading.Thread(target=things.pop) for _ in range(len(things))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not things
