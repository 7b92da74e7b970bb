"""Which models a `HybridCache` can hold."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.configuration_utils import PreTrainedConfig

from .errors import unsupported


def layer_windows(config: PreTrainedConfig) -> list[int]:
    """Sliding window of every layer.

    Parameters
    ----------
    config : PreTrainedConfig
        Configuration of the decoder.

    Returns
    -------
    list of int
        Per layer, the tokens that a query sees including itself; 0 = all earlier ones.

    Raises
    ------
    UnsupportedError
        If some layer's state is something else than one key and one value of equal size per token and head.
    """
    model = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(
            "model_config",
            f"{model} is an encoder-decoder model; cross attention reads keys that are not causal, which hybridkv "
            "does not compute",
        )
    if rank := getattr(config, "kv_lora_rank", None):
        raise unsupported(
            "model_config",
            f"{model} uses multi-head latent attention (kv_lora_rank={rank}); its keys and values differ in size, and "
            "hybridkv holds pairs of equal size",
        )
    layer_types, kwargs = get_layer_types_and_kwargs(config)
    if getattr(config, "num_kv_shared_layers", None) or "dummy" in layer_types:
        raise unsupported("model_config", f"{model} has layers without keys and values of their own")
    # One dict for all layers, or, since transformers 5.2x, one per layer.
    per_layer: list[dict[str, Any]] = [kwargs] * len(layer_types) if isinstance(kwargs, dict) else kwargs
    windows = []
    for layer_idx, (layer_type, layer_kwargs) in enumerate(zip(layer_types, per_layer, strict=True)):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise unsupported(
                "model_config",
                f"layer {layer_idx} of {model} is of type '{layer_type}'; hybridkv holds 'full_attention' and "
                "'sliding_attention' layers (no recurrent, chunked, sparse or latent state)",
            )
        windows.append(int(layer_kwargs["sliding_window"]) if layer_type == "sliding_attention" else 0)
    return windows
