"""The operator ``torch.ops.hybridkv.attend``: what torch.compile sees of `HybridCache.attend`.

The compiler needs to know the shape of the output and no more. A cache is a Python object and goes by its number. The
operator opens and closes steps, which cannot be part of a CUDA graph: it is tagged so that the compiler leaves it out.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .cache import HybridCache

_NAME = "hybridkv::attend"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, SymInt cache, SymInt layer, float scale, float? soft_cap, "
    "Tensor? sinks) -> Tensor"
)
_numbers = itertools.count()
_caches: weakref.WeakValueDictionary[int, HybridCache] = weakref.WeakValueDictionary()


def number_cache(cache: HybridCache) -> int:
    """A number by which the operator finds the cache as long as it lives."""
    number = next(_numbers)
    _caches[number] = cache
    return number


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cache: int,
    layer: int,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return _caches[cache].attend(layer, query, key, value, mask, scale=scale, soft_cap=soft_cap, sinks=sinks)


def _attend_shape(query: torch.Tensor, *args: object) -> torch.Tensor:
    n_rows, n_heads, n_columns, head_dim = query.shape
    return query.new_empty(n_rows, n_columns, n_heads, head_dim)


_TAGS = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]
torch.library.define(_NAME, _SCHEMA, tags=_TAGS)
torch.library.impl(_NAME, "default", _attend)
torch.library.register_fake(_NAME, _attend_shape)
