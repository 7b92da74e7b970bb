"""Errors that the Python layer itself finds, with the same attributes as those of the C core."""

from __future__ import annotations

from typing import TypeVar

from . import _core

E = TypeVar("E", bound=_core.Error)


def made(kind: type[E], argument: str, rule: str) -> E:
    """An error of class `kind` about `argument`; the rule's text ends with the value that broke it."""
    error = kind(f"{argument}: {rule}" if argument else rule)
    error.argument = argument
    error.status = "type" if issubclass(kind, TypeError) else "argument"
    return error
