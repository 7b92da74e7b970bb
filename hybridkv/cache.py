"""`Cache`: a hybrid cache that manages its own memory, sequences and prefix reuse."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._arrays import DLPackTensor, default_framework, device_name, dtype_name, empty, stream_address
from ._attend import OpenStep, attend
from ._errors import made
from .config import HybridConfig

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._arrays import Framework

Tier = Literal["L1", "L2"]
TIER_NUMBERS: dict[str, int] = {"L1": 1, "L2": 2}
TIER_NAMES: tuple[Tier | None, ...] = (None, "L1", "L2")


@dataclass(frozen=True)
class CacheStats:
    """Where every byte of a cache is, and what it did. The ``*_bytes`` of the kinds add up to `allocated_bytes`."""

    memory_bytes: int
    """The bound."""
    allocated_bytes: int
    """What was allocated, all at creation."""
    record_bytes: int
    """Quantised records with their headers; 16-bit pages at bits 0."""
    hot_bytes: int
    """Hot pages."""
    directory_bytes: int
    """The directory of hot pages and the tables of a step."""
    table_bytes: int
    """Sequences and block tables."""
    prefix_bytes: int
    """Hashes, tokens and lists for prefix reuse."""
    workspace_bytes: int
    """Scratch memory of a step."""
    unused_bytes: int
    """Alignment, and what no block fits into."""
    n_blocks_total: int
    n_blocks_live: int
    """Blocks that a sequence refers to."""
    n_blocks_cached: int
    """Blocks that no sequence refers to, but that can be found again."""
    n_blocks_free: int
    n_hot_pages_total: int
    n_hot_pages_used: int
    max_tokens: int
    """Tokens that one sequence alone could have."""
    n_sequences: int
    n_tokens: int
    """Tokens over all sequences."""
    n_prefix_queries: int
    """Tokens that `Cache.add_sequence` looked for."""
    n_prefix_hits: int
    """... and found."""
    n_prefix_evictions: int
    """Blocks that were given up for new ones."""
    bytes_in_use: int
    """Bytes of records and hot pages that hold tokens of sequences."""
    counters: dict[str, int | float]
    """Counters since creation; shares of a step are differences of two readings. Names as in ``hkv_counters``."""

    def as_dict(self) -> dict[str, int | float]:
        """Everything in one flat dict."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "counters"}
        return {**own, **self.counters}


class Sequence:
    """A sequence of a cache; `Cache.add_sequence` and `Cache.fork` make them.

    Attributes
    ----------
    id : int
        Identifies the sequence in its cache; never used again.
    num_cached : int
        Leading tokens that the cache had already when the sequence was added; they need no compute.
    """

    __slots__ = ("_cache", "id", "num_cached")

    def __init__(self, cache: Cache, sequence_id: int, num_cached: int) -> None:
        self._cache = cache
        self.id = sequence_id
        self.num_cached = num_cached

    @property
    def length(self) -> int:
        """Tokens in the cache. Raises `StaleHandleError` once the sequence was freed."""
        return self._cache._core.sequence_length(self.id)

    @property
    def alive(self) -> bool:
        """Whether the sequence can still be used."""
        try:
            self._cache._core.sequence_length(self.id)
        except (_core.StaleHandleError, _core.StepError):
            return False
        return True

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = f"length={self.length}" if self.alive else "freed"
        return f"<hybridkv.Sequence {self.id:#x} {state}>"


class Step:
    """An open step of a cache: one forward pass. `Cache.step` makes it; leaving its ``with`` block closes it."""

    __slots__ = ("_cache", "_is_open", "_sizes")

    def __init__(self, cache: Cache, sizes: OpenStep) -> None:
        self._cache = cache
        self._sizes = sizes
        self._is_open = True

    @property
    def num_tokens(self) -> int:
        """New tokens over all sequences: N."""
        return self._sizes.num_tokens

    def attend(
        self,
        layer: int,
        q: DLPackTensor,
        k: DLPackTensor,
        v: DLPackTensor,
        out: DLPackTensor | None = None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: DLPackTensor | None = None,
        lse: DLPackTensor | None = None,
        return_lse: bool = False,
        mass: DLPackTensor | None = None,
        return_mass: bool = False,
        stream: Any = None,
    ) -> Any:
        """Append this step's keys and values to one layer, then attend. Each layer once, in any order.

        Shapes: N new tokens of the step in the order of its sequences, Hq query heads (a multiple of Hkv), Hkv
        key/value heads, D head size, R sequences. Tensors are any with ``__dlpack__``, are not copied, and need a
        contiguous last dimension.

        Parameters
        ----------
        layer : int
        q : tensor, shape ``[N, Hq, D]``
        k, v : tensor, shape ``[N, Hkv, D]``
            With position embeddings applied.
        out : tensor, shape ``[N, Hq, D]``, optional
            Written to if given; must not overlap q, k and v.
        scale : float, optional
            Of the scores; default ``D ** -0.5``.
        soft_cap : float, optional
            ``score = soft_cap * tanh(score / soft_cap)`` before the mask.
        sinks : float32 tensor, shape ``[Hq]``, optional
            A learned logit per head that joins the denominator only.
        lse : float32 tensor, shape ``[N, Hq]``, optional
            Receives the natural logarithm of the denominator.
        return_lse : bool
            Return `lse`, made here if not given.
        mass : float32 tensor, shape ``[R, Hkv, blocks]``, optional
            Receives the share of the softmax on each block of each sequence (decode; zeros for longer chunks).
        return_mass : bool
            Return `mass`, made here if not given.
        stream : int or stream object, optional
            CUDA stream to work on, by its address (0 = the default stream) or as an object of torch or any other with
            ``__cuda_stream__``. None = torch's current stream of the device if torch is in use, else the default one.
            Work that the producers of the tensors queued comes first. Tensors must live until the stream is done.

        Returns
        -------
        out, or (out, lse), (out, mass), (out, lse, mass) as asked for
            A torch tensor if q is one or the dtype is bfloat16, a CuPy array if q is one, else a NumPy array. On a CUDA
            device `out` must be given if q is of any other kind.

        Raises
        ------
        ArgumentError, DtypeError
            A tensor's shape, layout, device or dtype, or a layer that does not exist. Nothing changed.
        StepError
            The step is closed, or the layer was attended already.
        BusyError
            Another thread is inside the cache.
        """
        self._check_open()
        cache = self._cache
        return attend(
            cache._core,
            cache.dtype,
            cache.device,
            cache.num_kv_heads,
            self._sizes,
            layer,
            q,
            k,
            v,
            out,
            scale,
            soft_cap,
            sinks,
            lse,
            return_lse,
            mass,
            return_mass,
            stream,
        )

    def prefetch_hot(self, layer: int, *, stream: Any = None) -> None:
        """Start bringing the hot pages that `attend` will read in a layer into a GPU's L2 cache.

        Meant for a stream of its own beside work that leaves the memory bus idle, such as the experts of a mixture
        before; waits for nothing, changes nothing, and does nothing on the CPU.

        Parameters
        ----------
        layer : int
        stream : int or stream object, optional
            As in `attend`; must come after the stream of `Cache.step`.
        """
        self._check_open()
        self._cache._core.prefetch_hot(layer, stream_address(stream, self._cache.device))

    def replay(self, graph: Any) -> None:
        """Launch a CUDA graph in place of all `attend` calls of the step.

        Capture the graph in an open step, around the `attend` calls of all layers; they compute nothing then, so that
        step too is to be replayed. The graph serves every later step, of whatever sequences, that has at most as many
        sequences and new tokens, and at most as many new tokens in one sequence. Its tensors keep their addresses; the
        first `num_tokens` entries of the outputs are those of the step. While a stream is captured no cache may be
        closed or deleted: that frees device memory, which spoils the capture. The graph must not outlive the cache: it
        would work on freed memory (a backend built with ``HYBRIDKV_CUDA_DEBUG=1`` traps).

        Parameters
        ----------
        graph : object with ``replay()``
            Such as ``torch.cuda.CUDAGraph``. Its stream must come after the one that `Cache.step` worked on.
        """
        self._check_open()
        if self.num_tokens:
            graph.replay()
        self._cache._core.mark_attended()

    def end(self) -> None:
        """Close the step. If some layer was not attended, the sequences go back to their lengths before it."""
        self._check_open()
        self._cache._core.end()
        self._is_open = False

    def abort(self) -> None:
        """Close the step; the sequences go back to their lengths before it."""
        self._check_open()
        self._cache._core.abort()
        self._is_open = False

    def _check_open(self) -> None:
        """A closed step must not reach into the one that is open now."""
        if not self._is_open:
            raise made(_core.StepError, "", "this step is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_open:
            self.end() if kind is None else self.abort()


class Cache:
    """A hybrid key/value cache.

    All memory is allocated here, at once. One thread at a time may use a cache; another gets `BusyError`.

    Parameters
    ----------
    config : HybridConfig or mapping, optional
        Default: `HybridConfig()`.
    num_layers, num_kv_heads : int
    head_dim : int
        16 to 256 in steps of 16.
    dtype : str, torch.dtype or NumPy dtype
        Of queries, keys, values and the hot zone: float16, bfloat16 or float32.
    device : str or torch.device
        "cpu", "cuda" (the first GPU) or "cuda:N".
    memory_bytes : int, optional
        Hard bound over everything the cache allocates or keeps in `memory`, and at most the size of that.
    max_tokens : int, optional
        Tokens over all sequences. Give at least one of the two or `memory`.
    memory : tensor, optional
        Memory of yours on `device` for all that the cache keeps there, instead of its own: a writable contiguous
        tensor of any dtype and shape. As many tokens as fit, unless another bound is lower. It is the cache's alone,
        and kept alive, until the cache and all that it gave out are gone; its content means nothing before and after.
        It may begin anywhere; what lies before a multiple of 512 bytes is not used. Too little is refused, and the
        message says how much the smallest cache takes.
        On the CPU everything lies there; of a cache on a GPU, tables of a few bytes a block stay on the host.
    max_sequences : int
        Sequences at a time, which is also the largest number in one step.
    layer_windows : sequence of int or None, optional
        Sliding window of every layer in tokens; 0 or None = the layer sees everything.
    hot_memory_bytes : int, optional
        Memory of the hot zone; default: what guarantees that no running sequence loses a hot block.
    max_step_tokens : int, optional
        Largest number of new tokens in a step. Default 8192.
    prefix_reuse : bool
        Find blocks again by their tokens.

    Raises
    ------
    ConfigError, ArgumentError, DtypeError
        `argument` names what breaks a rule; ``memory_bytes`` or ``memory`` if it cannot hold even one sequence.
    NoDeviceError
        The device does not exist, or this build has no backend for it; the message says what is missing.
    OutOfMemoryError
        The memory could not be allocated.
    """

    def __init__(
        self,
        config: HybridConfig | Mapping[str, Any] | None = None,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any,
        device: Any = "cpu",
        memory_bytes: int | None = None,
        max_tokens: int | None = None,
        max_sequences: int = 16,
        layer_windows: SequenceOf[int | None] | None = None,
        hot_memory_bytes: int | None = None,
        max_step_tokens: int | None = None,
        prefix_reuse: bool = True,
        memory: DLPackTensor | None = None,
    ) -> None:
        self.config = as_config(config)
        self.dtype = dtype_name(dtype)
        self.device = device_name(device)
        self._core = _core.Cache(
            self.config._values,
            dtype=self.dtype,
            device=self.device,
            layer_windows=None if layer_windows is None else [window or 0 for window in layer_windows],
            hash_key=secrets.token_bytes(16),
            prefix_reuse=prefix_reuse,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_sequences=max_sequences,
            memory_bytes=or_zero("memory_bytes", memory_bytes),
            max_tokens=or_zero("max_tokens", max_tokens),
            max_step_tokens=or_zero("max_step_tokens", max_step_tokens),
            hot_memory_bytes=or_zero("hot_memory_bytes", hot_memory_bytes),
            test_hash_bits=0,
            memory=memory,
        )
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    # ------------------------------------------------------------------------------------------------------ sequences

    def add_sequence(self, token_ids: Any = None, *, salt: bytes = b"") -> Sequence:
        """Start a sequence.

        Parameters
        ----------
        token_ids : integers, shape ``[n]``, optional
            The tokens that are going to be appended. As many of the leading ones as the cache already holds, never the
            last, are taken over; `Sequence.num_cached` says how many.
        salt : bytes
            Sequences share blocks only with sequences of the same salt.

        Raises
        ------
        CacheFullError
            `max_sequences` are in use.
        """
        sequence_id, num_cached = self._core.add_sequence(token_ids, salt)
        return Sequence(self, sequence_id, num_cached)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same content. Blocks are shared until one of the two writes to them."""
        return Sequence(self, self._core.fork(self._id(sequence)), sequence.num_cached)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        self._core.truncate(self._id(sequence), num_tokens)

    def reorder(self, sequences: SequenceOf[Sequence], source_indices: Any) -> None:
        """Let ``sequences[i]`` take the content of ``sequences[source_indices[i]]``, all at once (beam search)."""
        self._core.reorder(self._ids(sequences), source_indices)

    def free(self, sequence: Sequence) -> None:
        """End a sequence. Its blocks can be found again until their space is needed."""
        self._core.free(self._id(sequence))

    def _id(self, sequence: Sequence) -> int:
        if not isinstance(sequence, Sequence):
            raise made(_core.DtypeError, "sequence", f"expected a hybridkv.Sequence, got {type(sequence).__name__}")
        if sequence._cache is not self:
            raise made(_core.StaleHandleError, "sequence", f"{sequence.id:#x} belongs to another cache")
        return sequence.id

    def _ids(self, sequences: SequenceOf[Sequence]) -> tuple[int, ...]:
        return tuple(self._id(sequence) for sequence in sequences)

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(
        self,
        sequences: SequenceOf[Sequence],
        num_tokens: Any,
        token_ids: Any = None,
        clock: int | None = None,
        *,
        stream: Any = None,
    ) -> Step:
        """Open a step, the cache's side of one forward pass; use it as ``with cache.step(...) as step``.

        The sequences have their new lengths at once. An exception in the block, or a layer that was not attended, takes
        them back.

        Parameters
        ----------
        sequences : sequence of Sequence
            Each at most once. Their new tokens follow each other in this order in the tensors of `Step.attend`.
        num_tokens : integers, shape ``[len(sequences)]``
            New tokens of each.
        token_ids : integers, shape ``[sum(num_tokens)]``, or one list for each sequence, optional
            With them the blocks can be found again by `add_sequence`.
        clock : int, optional
            Time for access statistics in ms; default: a monotonic clock.
        stream : int or stream object, optional
            CUDA stream on which the step is decided, as in `Step.attend`: the same stream, or one that comes before it
            and after the previous step. Not to be called while the stream is captured.

        Raises
        ------
        CacheFullError
            No space for the new tokens; nothing changed, and the call can be repeated after a `free`.
        StepError
            Another step is open.
        StaleHandleError
            A sequence was freed, or belongs to another cache.
        """
        ids = self._ids(sequences)
        if clock is None:
            clock = time.monotonic_ns() // 1_000_000
        tokens = flat_tokens(token_ids, num_tokens)
        address = stream_address(stream, self.device)
        total, max_blocks = self._core.begin(ids, num_tokens, tokens, clock, address)
        return Step(self, OpenStep(len(ids), total, max_blocks))

    # -------------------------------------------------------------------------------------------------------- content

    def read_tokens(
        self,
        sequence: Sequence,
        layer: int,
        start: int = 0,
        stop: int | None = None,
        *,
        framework: Framework | None = None,
    ) -> tuple[Any, Any]:
        """What the cache holds of tokens ``start .. stop - 1``, as the next step would read it at full precision.

        Returns
        -------
        k, v : shape ``[stop - start, Hkv, D]`` in the cache's dtype
            NumPy arrays, or torch tensors if `framework` is "torch", the dtype is bfloat16 or the device no CPU; they
            lie where the cache does.

        Raises
        ------
        ArgumentError
            The range is not inside the sequence, or the layer's window has left it.
        """
        sequence_id, length = self._id(sequence), sequence.length
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            rule = f"expected 0 <= start <= stop <= {length}, the sequence's length, got start {start} and stop {stop}"
            raise made(_core.ArgumentError, "start", rule)
        if framework is None:
            framework = default_framework(self.dtype, self.device)
        shape = (stop - start, self.num_kv_heads, self.head_dim)
        k, v = (empty(framework, shape, self.dtype, self.device) for _ in range(2))
        self._core.read_tokens(sequence_id, layer, start, stop - start, k, v)
        return k, v

    def tiers(self, sequence: Sequence, layer: int, kv_head: int) -> list[Tier | None]:
        """Tiers of the sequence's blocks in one layer and KV head: "L1", "L2", or None where a block is not sealed."""
        return [TIER_NAMES[tier] for tier in self._core.tiers(self._id(sequence), layer, kv_head)]

    def set_tier(self, sequence: Sequence, layer: int, kv_head: int, block: int, tier: Tier) -> None:
        """Place one sealed block by hand; for tests and experiments."""
        if tier not in TIER_NUMBERS:
            raise made(_core.ArgumentError, "tier", f'expected "L1" or "L2", got {tier!r}')
        self._core.set_tier(self._id(sequence), layer, kv_head, block, TIER_NUMBERS[tier])

    def block_table(self, sequence: Sequence, layer: int) -> list[int]:
        """Physical block of every logical block of a sequence, the first index of `export_pages`; 0: given up."""
        return self._core.block_table(self._id(sequence), layer)

    def export_pages(self, layer: int) -> _core.PagesView:
        """The bytes of a layer, uint8 ``[blocks, Hkv, record_bytes]``, read-only and not copied; for dumps.

        For ``numpy.from_dlpack`` and the like; of a cache on a GPU, device memory for ``torch.from_dlpack`` and the
        like, which waits for the device. The memory lives as long as any view of it. ``docs/format.md`` describes
        what the bytes mean.
        """
        return self._core.export_pages(layer)

    # ----------------------------------------------------------------------------------------------------- whole cache

    def stats(self) -> CacheStats:
        """Where every byte is, and counters since creation."""
        values = self._core.stats()
        own = {field.name: values.pop(field.name) for field in fields(CacheStats) if field.name != "counters"}
        return CacheStats(**own, counters=values)  # type: ignore[arg-type]

    def check(self) -> None:
        """Walk all invariants; `StepError` names the first broken one. For tests."""
        self._core.check()

    def reset(self) -> None:
        """Forget all sequences and everything that could be found again."""
        self._core.reset()

    def close(self) -> None:
        """Give the memory back now; afterwards every other call raises `StepError`. Harmless if closed."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<hybridkv.Cache {self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim}, "
            f"{self.dtype} on {self.device}, bits {self.config.quantization_bits}>"
        )

    def _repr_html_(self) -> str:
        stats = self.stats()
        rows = {
            "layers x KV heads x head size": f"{self.num_layers} x {self.num_kv_heads} x {self.head_dim}",
            "dtype, bits": f"{self.dtype}, {self.config.quantization_bits}",
            "sequences, tokens": f"{stats.n_sequences}, {stats.n_tokens}",
            "memory in use": f"{stats.bytes_in_use / 2**20:.1f} of {stats.allocated_bytes / 2**20:.1f} MiB",
            "prefix hits": f"{stats.n_prefix_hits} of {stats.n_prefix_queries} tokens",
        }
        body = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<table><caption>hybridkv.Cache</caption>{body}</table>"


def as_config(config: HybridConfig | Mapping[str, Any] | None) -> HybridConfig:
    """The configuration that a caller means; None is the default one."""
    if config is None:
        return HybridConfig()
    if isinstance(config, HybridConfig):
        return config
    if isinstance(config, Mapping):
        return HybridConfig.from_dict(config)
    raise made(_core.ConfigError, "config", f"expected a HybridConfig or a mapping, got {type(config).__name__}")


def or_zero(argument: str, value: int | None) -> int:
    """The C core's 0 stands for "not given", which here is None; a 0 that was given is an error."""
    if value is None:
        return 0
    if value == 0 and isinstance(value, int):
        raise made(_core.ArgumentError, argument, "expected a positive number or None, got 0")
    return value


def flat_tokens(token_ids: Any, num_tokens: Any) -> Any:
    """Token ids of a step in one list, also where they come as one list for each sequence."""
    if not isinstance(token_ids, (list, tuple)) or not any(hasattr(row, "__len__") for row in token_ids):
        return token_ids
    rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in token_ids]
    lengths = [len(row) for row in rows]
    if lengths != [int(n) for n in num_tokens]:
        rule = f"expected one list for each sequence, with num_tokens ids, got lists of {lengths}"
        raise made(_core.ArgumentError, "token_ids", rule)
    return [token for row in rows for token in row]
