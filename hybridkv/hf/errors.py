"""Errors of the transformers integration; each says which argument broke which rule with which value."""

from __future__ import annotations

from typing import TypeVar

import hybridkv

_E = TypeVar("_E", bound=hybridkv.Error)


class UnsupportedError(hybridkv.Error, NotImplementedError):
    """The model or the call needs something that hybridkv attention does not compute."""


def _made(kind: type[_E], argument: str, rule: str) -> _E:
    error = kind(f"{argument}: {rule}")
    error.argument = argument
    return error


def unsupported(argument: str, rule: str) -> UnsupportedError:
    """An `UnsupportedError` about `argument`."""
    return _made(UnsupportedError, argument, rule)


def wrong_argument(argument: str, rule: str) -> hybridkv.ArgumentError:
    """A `hybridkv.ArgumentError` about `argument`."""
    return _made(hybridkv.ArgumentError, argument, rule)


def wrong_step(argument: str, rule: str) -> hybridkv.StepError:
    """A `hybridkv.StepError` about `argument`."""
    return _made(hybridkv.StepError, argument, rule)
