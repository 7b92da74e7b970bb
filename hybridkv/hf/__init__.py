"""hybridkv in transformers.

Importing this module registers the attention function ``"hybridkv"``; `HybridCache` is the cache it reads::

    from hybridkv.hf import HybridCache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hybridkv")
    cache = HybridCache(model.config, max_tokens=16384)
    model.generate(**inputs, past_key_values=cache)

The cache lies where the model does. On a GPU (float16 and bfloat16) `DecodeGraph` launches whole decode steps as CUDA
graphs; torch.compile sees the operator ``torch.ops.hybridkv.attend``. With another attention implementation the same
cache returns dequantised keys and values, which is slow and meant for comparison. Needs torch, and transformers 5.17 or
later (which call the argument ``cache`` from 5.2x on). What cannot be computed is refused with the reason: cross
attention, latent attention, recurrent or chunked layers, masks that are not causal, attention weights as output.
transformers' continuous batching brings its own cache and cannot use this one.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import hybridkv_attention
from .cache import HybridCache
from .errors import UnsupportedError
from .graphs import DecodeGraph
from .masks import hybridkv_mask

# The same name in both: without a mask function of that name transformers would pass no mask at all.
AttentionInterface.register("hybridkv", hybridkv_attention)
AttentionMaskInterface.register("hybridkv", hybridkv_mask)

__all__ = ["DecodeGraph", "HybridCache", "UnsupportedError", "hybridkv_attention", "hybridkv_mask"]
