"""The mask function registered as ``"hybridkv"``: it accepts what the kernels compute, and refuses the rest.

transformers describes a mask as a function of four indices, put together from a few building blocks. The kernels know
two shapes, causal and causal with a sliding window, plus columns that are padding. Everything else must be an error
here, since a mask that is not understood would otherwise be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from .errors import unsupported

MaskFunction = Callable[..., Any]

# Building blocks are closures made anew on each call; what identifies one is its code object.
_AND_CODE = and_masks(causal_mask_function).__code__
_WINDOW_CODE = sliding_window_overlay(1).__code__


def _closure(function: MaskFunction) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _conjuncts(function: MaskFunction) -> Iterator[MaskFunction]:
    """Parts of nested ``and_masks``, in order."""
    if getattr(function, "__code__", None) is _AND_CODE:
        for part in _closure(function)["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield function


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sliding_window_of(mask_function: MaskFunction) -> int:
    """Window that a mask function stands for.

    Parameters
    ----------
    mask_function : callable
        What ``create_causal_mask`` and its relatives hand to a mask interface.

    Returns
    -------
    int
        Tokens that a query sees including itself, 0 if all earlier ones.

    Raises
    ------
    UnsupportedError
        If the function is anything but causal, with or without a sliding window.
    """
    causal, window = False, 0
    for part in _conjuncts(mask_function):
        if part is causal_mask_function:
            causal = True
        elif getattr(part, "__code__", None) is _WINDOW_CODE:
            size = int(_closure(part)["sliding_window"])
            window = min(window, size) if window else size
        else:
            name = getattr(part, "__qualname__", repr(part))
            raise unsupported(
                "mask_function",
                f"hybridkv attention computes causal masks and causal sliding windows; the model asks for {name} "
                "(packed, chunked, bidirectional and custom masks need attn_implementation='sdpa' or 'eager')",
            )
    if not causal:
        raise unsupported("mask_function", "hybridkv attention is causal; the model asks for a mask that is not")
    return window


def require_padding_mask(attention_mask: torch.Tensor) -> None:
    """Refuse any mask that is not ``[batch, columns]``."""
    if attention_mask.ndim != 2:
        raise unsupported(
            "attention_mask",
            f"hybridkv attention takes a 2-D padding mask [batch, columns], got {attention_mask.ndim}-D "
            f"{list(attention_mask.shape)}",
        )


def hybridkv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Check a mask and reduce it to what the attention function needs: which positions are padding.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset : int
        Sizes as transformers states them.
    mask_function : callable
        Shape of the mask; causal or causal with a sliding window.
    attention_mask : torch.Tensor, optional
        ``[batch_size, kv_offset + kv_length]``, False (or 0) where a position is padding.
    **kwargs
        What transformers passes besides (dtype, device, config, ...); not needed here.

    Returns
    -------
    torch.Tensor or None
        The boolean padding mask, None if nothing is padding.

    Raises
    ------
    UnsupportedError
        If the mask is of another shape (4-D, packed, bidirectional, chunked, custom).
    """
    sliding_window_of(mask_function)
    if attention_mask is None:
        return None
    require_padding_mask(attention_mask)
    mask = attention_mask.to(torch.bool)
    if torch.compiler.is_compiling():
        return mask  # values are looked at where the cache is asked
    # A mask of the wrong length is passed on: the cache knows what the right one is, and says so.
    complete = mask.shape[1] == q_offset + q_length and bool(mask.all())
    return None if complete else mask
