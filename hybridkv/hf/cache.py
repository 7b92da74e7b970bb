"""`HybridCache`: a transformers cache whose keys and values live in a `hybridkv.Cache`.

transformers sees a padded batch: every row has the same number of *columns*, and a 2-D mask says which of them are
padding. hybridkv sees sequences of *tokens*. Padding is dropped on the way in and comes back as zeros on the way out,
so that it never reaches a block's scales and never takes memory.

A forward pass with the attention function ``"hybridkv"``::

    layer 0     update(k, v, 0)   notes on k whose it is, and returns both as they are
                attention(...)    opens a step for all rows, appends k and v, attends
    layer 1     ...               in the same step
    layer L-1   attention(...)    the last layer closes the step: only now have the rows their new length

A pass that stops half-way leaves an open step, which whatever comes next rolls back.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

import hybridkv
from hybridkv import ArgumentError, CacheFullError, StepError
from hybridkv._errors import made
from hybridkv.cache import as_config
from hybridkv.config import MODEL_CONFIG_KEY

from .errors import unsupported
from .models import layer_windows
from .ops import number_cache
from .padding import Padding

ATTENTION_NAME = "hybridkv"

# Without max_tokens, memory_bytes and memory a row may grow to its first prompt plus the first number, at least to the
# second.
DEFAULT_NEW_TOKENS = 4096
DEFAULT_MIN_TOKENS = 8192

_NOTE = "_hybridkv_note"  # attribute that update() leaves on a key tensor for the attention function


def find_cache(key: torch.Tensor) -> tuple[HybridCache, int]:
    """Cache and layer that `HybridCache.update` noted on a key tensor.

    Raises
    ------
    StepError
        If there is no note: another cache or none, or one made from another configuration object.
    """
    note: tuple[HybridCache, int] | None = getattr(key, _NOTE, None)
    if note is None:
        raise made(
            StepError,
            "past_key_values",
            "attn_implementation='hybridkv' attends over a HybridCache; give the model, or generate(), one that was "
            "made from the model's own configuration object: HybridCache(model.config, ...)",
        )
    return note


class HybridLayer(CacheLayerMixin):
    """What a layer of a `HybridCache` answers when transformers asks a layer and not the cache.

    It holds nothing: what changes the batch acts on all layers at once and belongs to the cache. Nor does it keep the
    cache alive, so that memory goes back with the last reference to the cache and waits for no garbage collection.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: HybridCache, layer_idx: int, window: int) -> None:
        super().__init__()
        self._cache: HybridCache = weakref.proxy(cache)
        self._layer_idx = layer_idx
        self.is_sliding = window > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the cache allocates for all layers, at the first forward pass."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HybridCache.update`."""
        return self._cache.update(key_states, value_states, self._layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `HybridCache.get_mask_sizes`."""
        return self._cache.get_mask_sizes(query_length, self._layer_idx)

    def get_seq_length(self) -> int:
        """See `HybridCache.get_seq_length`."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """See `HybridCache.get_max_length`."""
        return self._cache.get_max_length()

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise unsupported("layer", "hybridkv does this for all layers at once; call it on the cache")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


@dataclasses.dataclass
class _Forward:
    """A forward pass: an open step, and how the batch's columns map to its tokens."""

    step: hybridkv.Step
    n_rows: int
    n_columns: int
    held: torch.Tensor | None = None  # [n_rows, n_columns] on the host, True = a token; None = everywhere
    device: torch.device | None = None  # of keys and values; of no use where everything is held
    attended: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        # [N] flat column of every token
        self._token_idx = None if self.held is None else self.held.flatten().nonzero().flatten().to(self.device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, q, D] -> [N, H, D]; a view where one is possible."""
        x = x.detach()
        if self._token_idx is None and self.n_columns == 1:
            packed = x.squeeze(2)
        elif self._token_idx is None and self.n_rows == 1:
            packed = x[0].transpose(0, 1)
        else:
            packed = x.transpose(1, 2).flatten(0, 1)
            if self._token_idx is not None:
                packed = packed.index_select(0, self._token_idx)
        return packed if packed.stride(-1) == 1 else packed.contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[N, H, D] -> [B, q, H, D]; zeros at padding."""
        shape = (self.n_rows, self.n_columns, *packed.shape[1:])
        if self._token_idx is None:
            return packed.view(shape)
        columns = packed.new_zeros(self.n_rows * self.n_columns, *packed.shape[1:])
        return columns.index_copy_(0, self._token_idx, packed).view(shape)


class HybridCache(Cache):
    """A transformers cache on top of `hybridkv.Cache`.

    Parameters
    ----------
    model_config : PreTrainedConfig
        ``model.config`` itself, not a copy: the cache reads from it which attention implementation is active.
    hybrid_config : HybridConfig or mapping, optional
        Settings of the cache. None takes the ``hybrid_v2`` key of the model's configuration, else the defaults.
    max_tokens : int, optional
        Tokens that the cache holds over all rows, beams included.
    memory_bytes : int, optional
        Bound over everything the cache allocates, in place of `max_tokens`. Without any of the three, every row may
        grow to the first prompt plus 4096 tokens, at least to 8192 and at most to the model's
        ``max_position_embeddings``.
    memory : torch.Tensor, optional
        Memory of yours on the model's device for what the cache keeps there, in place of both (`hybridkv.Cache`).
    max_batch : int, optional
        Rows, beams included. None takes the batch of the first forward pass; give it where rows are added later
        (`batch_repeat_interleave`) or one cache serves batches of several sizes.

    Raises
    ------
    UnsupportedError
        For models that hybridkv cannot hold: encoder-decoder, latent attention, recurrent or chunked layers, layers
        that share keys and values.
    ArgumentError, ConfigError
        If the other arguments break a rule.

    Notes
    -----
    Memory is allocated once, at the first forward pass. A pass that does not fit raises `CacheFullError` before
    anything changed. Reordering, cropping, repeating and selecting rows act on every tier of the cache.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        hybrid_config: hybridkv.HybridConfig | Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        memory_bytes: int | None = None,
        memory: torch.Tensor | None = None,
        max_batch: int | None = None,
    ) -> None:
        if max_tokens is not None and memory_bytes is not None:
            raise made(ArgumentError, "max_tokens", f"give it or memory_bytes, got {max_tokens} and {memory_bytes}")
        config = model_config.get_text_config(decoder=True)
        self._windows = layer_windows(config)
        super().__init__(layers=[HybridLayer(self, idx, window) for idx, window in enumerate(self._windows)])
        self._model_config = config
        self._hybrid_config = _resolve_hybrid_config(hybrid_config, config)
        self._max_tokens = max_tokens
        self._memory_bytes = memory_bytes
        self._memory = memory
        self._max_batch = max_batch
        self._core: hybridkv.Cache | None = None
        self._max_rows = 0
        self._rows: list[hybridkv.Sequence] = []  # a sequence of the core per row
        self._padding = Padding()
        self._forward: _Forward | None = None
        self.number = number_cache(self)  # for torch.ops.hybridkv.attend

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def core(self) -> hybridkv.Cache | None:
        """The `hybridkv.Cache` underneath; None before the first forward pass."""
        return self._core

    @property
    def hybrid_config(self) -> hybridkv.HybridConfig:
        """Settings of the cache."""
        return self._hybrid_config

    def __repr__(self) -> str:
        return (
            f"HybridCache(layers={len(self._windows)}, rows={len(self._rows)}, columns={self._padding.n_columns}, "
            f"config={self._hybrid_config!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise unsupported(
            "cache", "its memory is not copied; to go on from one prompt twice, use batch_repeat_interleave"
        )

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward pass."""
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether memory has been allocated."""
        return self._core is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns, padding included: where the next column stands in a 2-D mask."""
        return self._padding.n_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that the coming `update` will stand for, and the first of them."""
        return self._padding.n_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that one row alone can grow to; -1 before the first forward pass."""
        return -1 if self._core is None else int(self._core.stats().max_tokens)

    def check_window(self, layer_idx: int, sliding_window: int) -> None:
        """Refuse a layer that attends with another sliding window than its cache was made with."""
        if sliding_window != self._windows[layer_idx]:
            raise made(
                ArgumentError,
                "sliding_window",
                f"layer {layer_idx} attends with {sliding_window}, its cache was made with "
                f"{self._windows[layer_idx] or 'none'}",
            )

    # -------------------------------------------------------------------------------------------- the forward pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[B, Hkv, q, D]``, RoPE applied.
        layer_idx : int
            Layer of the model.

        Returns
        -------
        tuple of torch.Tensor
            With the attention function ``"hybridkv"``, which appends them itself, the same tensors. With any other, all
            keys and values so far, dequantised, ``[B, Hkv, columns + q, D]``, and zeros for padding that was dropped
            and tokens that left the layer's window.

        Raises
        ------
        ArgumentError
            If batch, shapes or layer index do not fit what the cache holds.
        """
        if self._model_config._attn_implementation == ATTENTION_NAME:
            setattr(key_states, _NOTE, (self, layer_idx))
            return key_states, value_states
        self._check_states(key_states, value_states, layer_idx)
        # Without a mask every new column counts as a token.
        forward = self._current(layer_idx) or self._begin(key_states, None)
        n_old, past = self._padding.n_columns, self._padding.token_counts()
        # The core has no append alone: attend with queries of zeros and drop the output.
        key, value = forward.pack(key_states), forward.pack(value_states)
        zeros = torch.zeros_like(key, memory_format=torch.contiguous_format)
        self._run(forward, layer_idx, zeros, key, value, scale=1.0)
        keys = torch.cat([key_states.new_zeros(*key_states.shape[:2], n_old, key_states.shape[3]), key_states], dim=2)
        values = torch.cat([torch.zeros_like(keys[:, :, :n_old]), value_states], dim=2)
        self._read_into(layer_idx, past, keys, values)
        return keys, values

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append a layer's new keys and values, then attend. Called by the attention function.

        Parameters
        ----------
        layer_idx : int
            Layer of the model; each once per forward pass.
        query : torch.Tensor
            ``[B, Hq, q, D]``.
        key, value : torch.Tensor
            ``[B, Hkv, q, D]``.
        mask : torch.Tensor or None
            ``[B, columns + q]`` booleans, False where a column is padding; None if none is.
        scale : float
            Softmax scale.
        soft_cap : float, optional
            Of the logits.
        sinks : torch.Tensor, optional
            ``[Hq]`` float32, learned sink logits.

        Returns
        -------
        torch.Tensor
            ``[B, q, Hq, D]``, zero at padding.

        Raises
        ------
        ArgumentError
            If the mask does not fit the columns, or contradicts an earlier one.
        CacheFullError
            If the new tokens do not fit; nothing changed.
        """
        self._check_states(key, value, layer_idx)
        forward = self._current(layer_idx)
        if forward is None:
            forward = self._begin(key, self._padding.split_mask(mask, key.shape[0], key.shape[2]))
        output = self._run(
            forward,
            layer_idx,
            forward.pack(query),
            forward.pack(key),
            forward.pack(value),
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        return forward.unpack(output)

    def _check_states(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> None:
        if not 0 <= layer_idx < len(self._windows):
            raise made(ArgumentError, "layer_idx", f"the cache has {len(self._windows)} layers, got {layer_idx}")
        if key.shape != value.shape:
            raise made(
                ArgumentError, "value_states", f"must have the keys' shape {list(key.shape)}, got {list(value.shape)}"
            )
        if self._padding.n_columns and key.shape[0] != len(self._rows):
            raise made(ArgumentError, "key_states", f"the cache holds {len(self._rows)} rows, got {key.shape[0]}")

    def _current(self, layer_idx: int) -> _Forward | None:
        """The open forward pass, if `layer_idx` can be its next layer; one that broke off is rolled back."""
        if self._forward is not None and layer_idx in self._forward.attended:
            self._rollback()
        return self._forward

    def _begin(self, key: torch.Tensor, held: torch.Tensor | None) -> _Forward:
        """Open a forward pass whose first layer brings `key` ``[B, Hkv, q, D]``; `held` as in `_Forward`."""
        core = self._ensure_core(key)
        self._ensure_rows(core, key.shape[0])
        return self._open(core, key.shape[2], held, key.device)

    def _open(
        self,
        core: hybridkv.Cache,
        n_columns: int,
        held: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> _Forward:
        """Open a forward pass; `held` and `device` as in `_Forward`."""
        n_rows = len(self._rows)
        counts = [n_columns] * n_rows if held is None else held.sum(1).tolist()
        self._forward = _Forward(core.step(self._rows, counts), n_rows, n_columns, held, device)
        return self._forward

    def _close(self, forward: _Forward) -> None:
        """End a forward pass that all layers took part in."""
        self._forward = None
        forward.step.end()
        self._padding.append(forward.held, forward.n_columns)

    def _run(
        self,
        forward: _Forward,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append and attend one layer; the last one closes the step. All [N, H, D]."""
        output = query.new_empty(query.shape)
        try:
            forward.step.attend(layer_idx, query, key, value, out=output, scale=scale, soft_cap=soft_cap, sinks=sinks)
        except BaseException:
            self._rollback()
            raise
        forward.attended.add(layer_idx)
        if len(forward.attended) == len(self._windows):
            self._close(forward)
        return output

    def begin_pass(self, n_columns: int) -> None:
        """Open the next forward pass, of `n_columns` tokens for every row, before the model runs.

        The pass needs no mask then, and decides nothing itself: its layers can be captured in a CUDA graph.

        Raises
        ------
        CacheFullError
            If the new tokens do not fit; nothing changed.
        """
        self._rollback()
        self._open(self._require_core(), n_columns)

    def replay_pass(self, graph: Any) -> None:
        """A forward pass of one token for every row, by launching a graph that was captured after `begin_pass`.

        Raises
        ------
        CacheFullError
            If the new tokens do not fit; nothing changed.
        """
        self.begin_pass(1)
        forward = self._forward
        assert forward is not None
        try:
            forward.step.replay(graph)
        except BaseException:
            self._rollback()
            raise
        self._close(forward)

    def token_counts(self) -> list[int]:
        """Tokens of every row, without padding."""
        return self._padding.token_counts()

    def _rollback(self) -> None:
        """Undo a forward pass that did not reach its last layer."""
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.step.abort()

    def _read_into(self, layer_idx: int, past: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what a layer stores of every row's `past` tokens to their columns of ``[B, Hkv, columns, D]``."""
        core, held, window = self._require_core(), self._padding.held, self._windows[layer_idx]
        for row, n_tokens in enumerate(past):
            first = max(0, n_tokens - window + 1) if window else 0
            if first == n_tokens:
                continue
            stored = core.read_tokens(self._rows[row], layer_idx, first, n_tokens, framework="torch")
            columns = slice(first, n_tokens) if held is None else held[row].nonzero().flatten()[first:n_tokens]
            for full, tokens in zip((keys, values), stored, strict=True):
                full[row, :, columns] = tokens.transpose(0, 1)

    # ---------------------------------------------------------------------------------------------------- capacity

    def _ensure_core(self, key: torch.Tensor) -> hybridkv.Cache:
        """The cache underneath, made to measure for the first keys ``[B, Hkv, q, D]``."""
        if self._core is None:
            n_rows, n_kv_heads, n_columns, head_dim = key.shape
            max_rows = self._max_batch or n_rows
            max_tokens = self._max_tokens
            if max_tokens is None and self._memory_bytes is None and self._memory is None:
                max_tokens = max_rows * self._default_tokens(n_columns)
            self._core = hybridkv.Cache(
                self._hybrid_config,
                num_layers=len(self._windows),
                num_kv_heads=n_kv_heads,
                head_dim=head_dim,
                dtype=key.dtype,
                device=str(key.device),
                memory_bytes=self._memory_bytes,
                memory=self._memory,
                max_tokens=max_tokens,
                max_sequences=max_rows,
                max_step_tokens=max(max_tokens or 0, n_rows * n_columns, DEFAULT_MIN_TOKENS),
                layer_windows=self._windows,
                # transformers does not tell a cache which tokens it holds
                prefix_reuse=False,
            )
            self._max_rows = max_rows
        return self._core

    def _default_tokens(self, n_prompt: int) -> int:
        wanted = max(n_prompt + DEFAULT_NEW_TOKENS, DEFAULT_MIN_TOKENS)
        return min(wanted, getattr(self._model_config, "max_position_embeddings", None) or wanted)

    def _ensure_rows(self, core: hybridkv.Cache, n_rows: int) -> None:
        """One sequence per row; while it is empty the cache takes any batch size."""
        if self._padding.n_rows == n_rows:
            return
        while len(self._rows) > n_rows:
            core.free(self._rows.pop())
        while len(self._rows) < n_rows:
            self._rows.append(core.add_sequence())
        self._padding = Padding(n_rows)

    # ------------------------------------------------------------------------------------------ changing the batch

    def reset(self) -> None:
        """Forget all rows; the memory stays allocated."""
        self._rollback()
        self._padding = Padding()
        while self._rows:
            self._require_core().free(self._rows.pop())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns of all rows.

        Parameters
        ----------
        tokens_to_remove : int
            Minus the number of columns; 0 does nothing, more than there are empties the cache.

        Raises
        ------
        ArgumentError
            If it is positive, which older versions of transformers read as a length and newer ones refuse, or if a
            layer's window would reach back to tokens that were freed.
        """
        self._rollback()
        n_wanted = int(tokens_to_remove)  # assisted decoding passes a tensor
        if n_wanted > 0:
            raise made(
                ArgumentError, "tokens_to_remove", f"must be minus the number of columns to drop, got {n_wanted}"
            )
        if n_wanted == 0:
            return
        if -n_wanted >= self._padding.n_columns:
            self.reset()
            return
        kept = self._padding.token_counts(-n_wanted)
        self._check_windows_reach(kept)
        core = self._require_core()
        for sequence, n_tokens in zip(self._rows, kept, strict=True):
            core.truncate(sequence, n_tokens)
        self._padding.crop(-n_wanted)

    def _check_windows_reach(self, kept: list[int]) -> None:
        """Raise, before any row is cropped, if a window of `kept` tokens reaches back to tokens that are gone."""
        for window, layer_idx in {window: idx for idx, window in enumerate(self._windows) if window}.items():
            for sequence, n_tokens in zip(self._rows, kept, strict=True):
                if n_tokens < sequence.length:
                    first = max(0, n_tokens - window + 1)
                    self._require_core().read_tokens(sequence, layer_idx, first, first + 1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search).

        Raises
        ------
        ArgumentError
            If there is not one index per row, or one is out of range.
        """
        self._rollback()
        if not self._rows:
            return
        source_idx = self._check_rows("beam_idx", beam_idx)
        if len(source_idx) != len(self._rows):
            raise made(ArgumentError, "beam_idx", f"needs one index per row, {len(self._rows)}, got {len(source_idx)}")
        self._require_core().reorder(self._rows, source_idx)
        self._padding.select(source_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of every row in its place; copies share memory until they differ.

        Raises
        ------
        CacheFullError
            If there are more rows than `max_batch`.
        """
        if repeats < 1:
            raise made(ArgumentError, "repeats", f"must be at least 1, got {repeats}")
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` ``[n]`` (integers, or booleans per row), in that order.

        Raises
        ------
        ArgumentError
            If an index is out of range.
        """
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(self._check_rows("indices", indices))

    def _select(self, source_idx: list[int]) -> None:
        """Row i becomes what row ``source_idx[i]`` was; rows may vanish or multiply."""
        self._rollback()
        if not self._rows:
            return
        if len(source_idx) > self._max_rows:
            rule = f"the cache was made for {self._max_rows} rows, got {len(source_idx)}"
            raise made(CacheFullError, "max_batch", rule)
        core = self._require_core()
        old = self._rows
        for row in sorted(set(range(len(old))) - set(source_idx)):
            core.free(old[row])
        taken: set[int] = set()
        self._rows = []
        for row in source_idx:
            self._rows.append(core.fork(old[row]) if row in taken else old[row])
            taken.add(row)
        self._padding.select(source_idx)

    def _check_rows(self, argument: str, indices: torch.Tensor) -> list[int]:
        rows: list[int] = torch.as_tensor(indices).flatten().tolist()
        for row in rows:
            if not -len(self._rows) <= row < len(self._rows):
                raise made(ArgumentError, argument, f"the cache has {len(self._rows)} rows, got index {row}")
        return [row % len(self._rows) for row in rows]

    def _require_core(self) -> hybridkv.Cache:
        if self._core is None:
            raise made(StepError, "cache", "nothing is cached before the first forward pass")
        return self._core


def _resolve_hybrid_config(
    hybrid_config: hybridkv.HybridConfig | Mapping[str, Any] | None, model_config: PreTrainedConfig
) -> hybridkv.HybridConfig:
    """Settings as given, or from the model's ``hybrid_v2`` key, or the defaults."""
    if hybrid_config is None and getattr(model_config, MODEL_CONFIG_KEY, None) is not None:
        return hybridkv.HybridConfig.from_model_config(model_config)
    return as_config(hybrid_config)
