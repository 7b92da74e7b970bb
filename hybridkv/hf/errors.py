"""The error of the transformers integration; the others are those of the library."""

from __future__ import annotations

import hybridkv
from hybridkv._errors import made


class UnsupportedError(hybridkv.Error, NotImplementedError):
    """The model or the call needs something that hybridkv attention does not compute."""


def unsupported(argument: str, rule: str) -> UnsupportedError:
    """An `UnsupportedError` about `argument`."""
    return made(UnsupportedError, argument, rule)
