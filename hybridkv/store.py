"""`Store`: hot and cold state on pages that an engine owns. For builders of engines; `Cache` is built on the same core.

The engine keeps the pages, the block tables and the lifecycle of requests. Per step it hands over a batch; the store
decides everything that is hot or cold from that alone and never learns which request is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from . import _core
from ._arrays import DLPackTensor, default_framework, device_name, dtype_name, empty, stream_address
from ._attend import OpenStep, attend
from ._errors import made
from .cache import TIER_NAMES, TIER_NUMBERS, Tier, as_config
from .config import HybridConfig


class BlockInfo(TypedDict):
    """Directory entry of a physical block."""

    hot_page: int
    n_hot_tokens: int
    sealed: bool
    stamp: int


class Store:
    """Hot and cold state of one layer group, that is of layers with the same sliding window.

    Parameters
    ----------
    config : HybridConfig or mapping, optional
    num_layers, num_kv_heads, head_dim : int
    dtype : str, torch.dtype or NumPy dtype
    num_blocks : int
        Blocks in the engine's pool, with the null block 0, which never holds data.
    max_rows : int
        Largest number of sequences in a step.
    max_new_tokens : int
        Largest number of new tokens in a step.
    window_tokens : int
        Sliding window of the layers; 0 = none.
    num_hot_pages : int
        0: what guarantees that no running row loses a partly filled hot page.
    max_sequence_tokens : int
        Longest sequence; 0: as long as the pool. On CUDA the scratch memory of L2 selection grows with it.
    device : str or torch.device
        "cpu", "cuda" (the first GPU) or "cuda:N".
    memory : tensor, optional
        Memory of yours on `device` for hot pages, tables and scratch, instead of the store's own: a writable contiguous
        tensor of any dtype and shape; how many bytes are needed is said where they do not suffice. It is the store's
        alone, and kept alive, until the store is gone; its content means nothing before and after.

    Raises
    ------
    ConfigError, ArgumentError, DtypeError
        `argument` names what breaks a rule.
    NoDeviceError
        The device does not exist, or this build has no backend for it.
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
        num_blocks: int,
        max_rows: int,
        max_new_tokens: int,
        window_tokens: int = 0,
        num_hot_pages: int = 0,
        max_sequence_tokens: int = 0,
        device: Any = "cpu",
        memory: DLPackTensor | None = None,
    ) -> None:
        self.config = as_config(config)
        self.dtype = dtype_name(dtype)
        self.device = device_name(device)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self._sizes = OpenStep(0, 0, 0)
        self._core = _core.Store(
            self.config._values,
            dtype=self.dtype,
            device=self.device,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_rows=max_rows,
            window_tokens=window_tokens,
            num_blocks=num_blocks,
            num_hot_pages=num_hot_pages,
            max_new_tokens=max_new_tokens,
            max_sequence_tokens=max_sequence_tokens,
            memory=memory,
        )

    @property
    def record_bytes(self) -> int:
        """Bytes that one block takes in a page, per layer and KV head."""
        return self._core.record_bytes

    def bind_layer(self, layer: int, pages: DLPackTensor) -> None:
        """Say where the pages of a layer are.

        Parameters
        ----------
        layer : int
        pages : tensor, shape ``[num_blocks, Hkv, record_bytes]`` or ``[num_blocks, Hkv * record_bytes]`` in bytes
            Of any dtype, with any strides that are multiples of 16 bytes; needs no initial content. Kept alive by the
            store and written to by every step.
        """
        self._core.bind_layer(layer, pages)

    def begin(
        self,
        cu_new_tokens: Any,
        seq_lens: Any,
        block_table: Any,
        slot_mapping: Any,
        copy_sources: Any = None,
        clock: Any = None,
        *,
        max_row_tokens: int = 0,
        stream: Any = None,
    ) -> None:
        """Decide a step of R rows (sequences) and N new tokens: what is claimed, restored, sealed, evicted, read hot.

        On the CPU all arguments are integers as lists, arrays or tensors. On a CUDA device they are contiguous tensors
        there, int64 for `slot_mapping` and `clock` and int32 for the others: nothing is copied or read by the host, so
        a step can be captured in a CUDA graph, and a refused batch is reported by the next call of `begin`.

        Parameters
        ----------
        cu_new_tokens : shape ``[R + 1]``
            Row r has the new tokens ``cu_new_tokens[r] .. cu_new_tokens[r + 1] - 1`` of the flat arrays.
        seq_lens : shape ``[R]``
            Tokens of each row including the new ones.
        block_table : shape ``[R, blocks]``
            Physical block of every logical block.
        slot_mapping : shape ``[N]``
            ``physical block * block_size + offset`` of each new token; -1 = do not write.
        copy_sources : shape ``[R]``, optional
            c > 0: the block that row r writes first takes its earlier tokens from block c.
        clock : int (CPU) or tensor of shape ``[1]`` (CUDA), optional
            Time for access statistics; None = no statistics in this step.
        max_row_tokens : int
            No row has more new tokens than this; 0 = not known. At most 8 spares a CUDA step the kernels of prefill.
        stream : int or stream object, optional
            CUDA stream on which the step is decided; as in `Step.attend`.
        """
        address = stream_address(stream, self.device)
        sizes = self._core.begin(
            cu_new_tokens, seq_lens, block_table, slot_mapping, copy_sources, clock, max_row_tokens, address
        )
        self._sizes = OpenStep(*sizes)

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
        """Append this step's keys and values to one layer, then attend; arguments and result as of `Step.attend`."""
        return attend(
            self._core,
            self.dtype,
            self.device,
            self.num_kv_heads,
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
        """As `Step.prefetch_hot`, for the open step; `stream` must come after that of `begin`."""
        self._core.prefetch_hot(layer, stream_address(stream, self.device))

    def read_tokens(
        self, layer: int, block_table: Any, seq_len: int, start: int = 0, stop: int | None = None
    ) -> tuple[Any, Any]:
        """What a layer holds of tokens ``start .. stop - 1`` of one row, ``[stop - start, Hkv, D]`` each.

        Parameters
        ----------
        layer : int
        block_table : shape ``[blocks]``
            The row's physical blocks, integers of the host.
        seq_len : int
            The row's length.
        """
        stop = seq_len if stop is None else stop
        if not 0 <= start <= stop <= seq_len:
            rule = f"expected 0 <= start <= stop <= {seq_len}, seq_len, got start {start} and stop {stop}"
            raise made(_core.ArgumentError, "start", rule)
        framework = default_framework(self.dtype, self.device)
        shape = (stop - start, self.num_kv_heads, self.head_dim)
        k, v = (empty(framework, shape, self.dtype, self.device) for _ in range(2))
        self._core.read_tokens(layer, block_table, seq_len, start, stop - start, k, v)
        return k, v

    def tier(self, layer: int, kv_head: int, block: int) -> Tier | None:
        """Tier of one record, None if it is not sealed."""
        return TIER_NAMES[self._core.tier(layer, kv_head, block)]

    def set_tier(self, layer: int, kv_head: int, block: int, tier: Tier) -> None:
        """Place one sealed record by hand; for tests and experiments."""
        if tier not in TIER_NUMBERS:
            raise made(_core.ArgumentError, "tier", f'expected "L1" or "L2", got {tier!r}')
        self._core.set_tier(layer, kv_head, block, TIER_NUMBERS[tier])

    def block_info(self, block: int) -> BlockInfo:
        """Directory entry of a physical block: its hot page (-1 = none), tokens in it, whether it is sealed, stamp."""
        return self._core.block_info(block)

    def counters(self) -> dict[str, int | float]:
        """Counters since creation; names as in ``hkv_counters``."""
        return self._core.counters()

    def close(self) -> None:
        """Let go of the pages and the memory now; afterwards every other call raises `StepError`."""
        self._core.close()
