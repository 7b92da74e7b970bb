"""Decode steps of a model as a CUDA graph."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import torch

from hybridkv import ArgumentError, StepError
from hybridkv._errors import made

from .cache import HybridCache


class DecodeGraph:
    """Decode steps of one token for every row of a `HybridCache`, launched as one CUDA graph each::

        logits = model(**prompt, past_key_values=cache).logits[:, -1]
        decode = DecodeGraph(model, cache)
        for _ in range(n_tokens):
            tokens = logits.argmax(-1)
            logits = decode(tokens)

    The first call runs the model as usual, the second captures what it launches, all later ones replay that. Between
    calls the cache may be used in any way that leaves the number of rows: other forward passes, cropping, reordering.
    On the CPU every call runs the model as usual.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention function ``"hybridkv"``, in evaluation mode.
    cache : HybridCache
        Holds the prompts already.

    Raises
    ------
    StepError
        If the cache is empty.
    """

    def __init__(self, model: Any, cache: HybridCache) -> None:
        if cache.batch_size < 1:
            raise made(StepError, "cache", "the prompts must be in the cache before their continuation is decoded")
        self._model = model
        self._cache = cache
        device = model.device
        self._tokens = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._tokens)
        # transformers 5.2x renamed the argument
        named = "cache" in inspect.signature(model.forward).parameters
        self._arguments = {"cache" if named else "past_key_values": cache, "use_cache": True}
        self._can_capture = device.type == "cuda"
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to every row and predict the next.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B]`` or ``[B, 1]``.

        Returns
        -------
        torch.Tensor
            Logits ``[B, vocabulary]``; from the second call on the next call overwrites them.

        Raises
        ------
        ArgumentError
            If the cache or `tokens` have another number of rows than at the beginning.
        CacheFullError
            If the new tokens do not fit; nothing changed.
        """
        n_rows = len(self._tokens)
        if self._cache.batch_size != n_rows or tokens.numel() != n_rows:
            rule = f"made for {n_rows} rows, got {tokens.numel()} tokens for a cache of {self._cache.batch_size} rows"
            raise made(ArgumentError, "tokens", rule)
        self._tokens.copy_(tokens.view(n_rows, 1))
        self._positions.copy_(torch.tensor(self._cache.token_counts()).view(n_rows, 1))
        if self._graph is not None:
            self._cache.replay_pass(self._graph)
            return self._logits  # type: ignore[return-value]
        self._cache.begin_pass(1)
        if self._can_capture and self._is_warm:
            return self._capture()
        self._is_warm = True
        return self._run()

    def _run(self) -> torch.Tensor:
        output = self._model(input_ids=self._tokens, position_ids=self._positions, **self._arguments)
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _capture(self) -> torch.Tensor:
        """Capture the step that is open, and launch it for the first time."""
        gc.collect()  # a cache that is freed later on would spoil the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._run()
        graph.replay()
        self._graph = graph
        return self._logits
