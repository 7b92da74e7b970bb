"""What `Step.attend` and `Store.attend` have in common: outputs are made here where the caller brought none."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from ._arrays import DLPackTensor, empty, framework_of, stream_address


class OpenStep(NamedTuple):
    """Sizes of the open step."""

    num_rows: int
    num_tokens: int
    max_blocks: int


def attend(
    core: _core.Cache | _core.Store,
    dtype: str,
    device: str,
    num_kv_heads: int,
    step: OpenStep,
    layer: int,
    q: DLPackTensor,
    k: DLPackTensor,
    v: DLPackTensor,
    out: DLPackTensor | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: DLPackTensor | None,
    lse: DLPackTensor | None,
    return_lse: bool,
    mass: DLPackTensor | None,
    return_mass: bool,
    stream: Any,
) -> Any:
    """Append and attend one layer; see `Step.attend`."""
    framework = framework_of(q, dtype)
    shape = tuple(getattr(q, "shape", ()))
    if out is None:
        out = empty(framework, shape, dtype, device)
    if lse is None and return_lse:
        lse = empty(framework, shape[:2], "float32", device)
    if mass is None and return_mass:
        mass = empty(framework, (step.num_rows, num_kv_heads, step.max_blocks), "float32", device)
    core.attend(layer, q, k, v, out, scale, soft_cap, sinks, lse, mass, stream_address(stream, device))
    if not (return_lse or return_mass):
        return out
    return (out, *([lse] if return_lse else []), *([mass] if return_mass else []))
