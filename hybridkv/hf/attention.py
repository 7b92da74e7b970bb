"""The attention function registered as ``"hybridkv"``."""

from __future__ import annotations

from typing import Any

import torch

from .cache import find_cache
from .errors import unsupported


def hybridkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Append a layer's new keys and values to its `HybridCache` and attend over everything in it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer that calls.
    query : torch.Tensor
        ``[B, Hq, q, D]``.
    key, value : torch.Tensor
        ``[B, Hkv, q, D]``: the new tokens only, as `HybridCache.update` returned them. They are never repeated.
    attention_mask : torch.Tensor, optional
        What `hybridkv_mask` returned: ``[B, columns]`` booleans, or None if no column is padding.
    scaling : float, optional
        Softmax scale, ``D ** -0.5`` if None.
    dropout : float, default 0.0
        Must be 0.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)``.
    s_aux : torch.Tensor, optional
        ``[Hq]`` learned logit per head that joins the softmax denominator only.
    sliding_window : int, optional
        The layer's window; must be the one that the cache was made with.
    is_causal : bool, optional
        Must not be False.
    **kwargs
        Whatever else the model passes to every attention function.

    Returns
    -------
    tuple of torch.Tensor and None
        The output ``[B, q, Hq, D]``, zero where a column is padding, and None in place of attention weights.

    Raises
    ------
    StepError
        If `key` does not come from a `HybridCache` that noted it for this call.
    ArgumentError
        If the mask or the window do not fit what the cache holds.
    UnsupportedError
        For dropout, attention weights, position biases, non-causal attention and masks of other shapes.
    """
    if dropout:
        raise unsupported(
            "dropout", f"hybridkv attention is for inference and has none, got {dropout}; use model.eval()"
        )
    if kwargs.get("output_attentions"):
        raise unsupported(
            "output_attentions", "hybridkv attention never forms the weights; use attn_implementation='eager'"
        )
    if kwargs.get("position_bias") is not None:
        raise unsupported("position_bias", "hybridkv attention adds no bias to the logits")
    if is_causal is False:
        raise unsupported("is_causal", "hybridkv attention is causal (no encoders, no cross attention), got False")

    cache, layer_idx = find_cache(key)
    if sliding_window is not None:
        cache.check_window(layer_idx, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.detach().to(torch.float32)
    if torch.compiler.is_compiling():
        arguments = (attention_mask, cache.number, layer_idx, scale, softcap or None, sinks)
        return torch.ops.hybridkv.attend(query, key, value, *arguments), None
    output = cache.attend(
        layer_idx, query, key, value, attention_mask, scale=scale, soft_cap=softcap or None, sinks=sinks
    )
    return output, None
