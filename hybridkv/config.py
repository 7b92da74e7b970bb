"""`HybridConfig`: the settings of hybrid_v2. Every rule about them is in the C core, which this module asks."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from . import _core
from ._errors import made

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

STRATEGY = "hybrid_v2"
MODEL_CONFIG_KEY = "hybrid_v2"


class ConfigWarning(UserWarning):
    """A configuration that is allowed, but about which there is something to say."""


class ConfigFields(TypedDict, total=False):
    """Keywords of `HybridConfig`; all are optional."""

    strategy: str
    hot_tokens: int
    quantization_bits: int
    block_size: int
    sparse_top_k: int
    sink_blocks: int
    migration_throttling: bool
    kv_cache_debug: bool
    skip_mass: float
    refine_mass: float
    sparse_min_mass: float


class HybridConfig:
    """Settings of a hybrid cache. Immutable; equal if all fields are equal.

    Parameters
    ----------
    strategy : str
        Must be ``"hybrid_v2"`` if given.
    hot_tokens : int
        Newest tokens of a sequence that stay in the model's dtype: 16, 32, 48, 64 or 128. Default 32.
    quantization_bits : int
        8: INT8. 6: keys INT8, values INT4. 4: INT4. 0: no quantisation. Default 8.
    block_size : int
        Tokens in a block, divisible by 8. Default 64, the tuned size.
    sparse_top_k : int
        Rarely used (L2) blocks that a decode step reads per KV head. Default 32.
    sink_blocks : int
        First blocks of a sequence that stay hot. Default 1.
    migration_throttling : bool
        Spread migrations between tiers over steps. Default True.
    kv_cache_debug : bool
        Log what the cache does. Default False.
    skip_mass : float
        Records that hold less than this share of a query's attention are not read further; 0 reads all. Default 1e-3.
    refine_mass : float
        Records that hold at least this share are read at full precision; 0 reads all so. Default 0.05.
    sparse_min_mass : float
        Share of the L2 blocks' attention that a selection must cover; 0 takes `sparse_top_k` blocks. Default 0.

    Raises
    ------
    ConfigError
        A field breaks a rule (`argument` names it), or there is no such field (the nearest right one is named).

    Warns
    -----
    ConfigWarning
        What is allowed, but not advisable.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    hot_tokens: int
    quantization_bits: int
    block_size: int
    sparse_top_k: int
    sink_blocks: int
    migration_throttling: bool
    kv_cache_debug: bool
    skip_mass: float
    refine_mass: float
    sparse_min_mass: float

    def __init__(self, **fields: Unpack[ConfigFields]) -> None:
        self._build(dict(fields), None)

    def _build(self, fields: dict[str, Any], preset: str | None) -> None:
        """Fill in a new object. The caller of its caller is who a warning is shown to."""
        strategy = fields.pop("strategy", STRATEGY)
        if strategy != STRATEGY:
            raise made(_core.ConfigError, "strategy", f'expected "{STRATEGY}", got {strategy!r}')
        object.__setattr__(self, "_values", _core.config_build(fields, preset))
        for text in _core.config_warnings(self._values):
            warnings.warn(text, ConfigWarning, stacklevel=3)

    # ------------------------------------------------------------------------------------------------- other sources

    @classmethod
    def preset(cls, name: str, **fields: Unpack[ConfigFields]) -> Self:
        """The settings for a class of GPU ("H100", "H200", "A100", "L4"), changed by `fields`."""
        if not isinstance(name, str):
            raise made(_core.ConfigError, "name", f"expected the name of a GPU, got {type(name).__name__}")
        config = cls.__new__(cls)
        config._build(dict(fields), name)
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The settings in a mapping of field names; what is missing has its default."""
        if not isinstance(values, Mapping):
            raise made(_core.ConfigError, "values", f"expected a mapping of fields, got {type(values).__name__}")
        config = cls.__new__(cls)
        config._build(dict(values), None)
        return config

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The settings in the text of a JSON object. A field that appears twice is an error."""
        try:
            values = json.loads(text, object_pairs_hook=_unique_dict)
        except json.JSONDecodeError as error:
            raise made(_core.ConfigError, "text", f"is no valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise made(_core.ConfigError, "text", f"expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a JSON file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def from_model_config(cls, source: str | os.PathLike[str] | Mapping[str, Any] | object) -> Self:
        """The settings under the key ``hybrid_v2`` of a model's configuration.

        Parameters
        ----------
        source
            A model's folder, its ``config.json``, that file's content as a mapping, or a configuration object that has
            the settings as its attribute ``hybrid_v2``.

        Raises
        ------
        ConfigError
            There is no such key, or its value breaks a rule.
        """
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            source = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        values = (
            source.get(MODEL_CONFIG_KEY) if isinstance(source, Mapping) else getattr(source, MODEL_CONFIG_KEY, None)
        )
        if values is None:
            raise made(_core.ConfigError, MODEL_CONFIG_KEY, "the model's configuration has no such key")
        return cls.from_dict(values)

    def replace(self, **fields: Unpack[ConfigFields]) -> Self:
        """A copy with some fields changed."""
        return type(self).from_dict({**self.to_dict(), **fields})

    # ---------------------------------------------------------------------------------------------------- as a value

    def to_dict(self) -> dict[str, Any]:
        """All fields and the strategy; `from_dict` gives an equal object back."""
        return {"strategy": STRATEGY, **self._values}

    def to_json(self, indent: int | None = None) -> str:
        """The same as the text of a JSON object."""
        return json.dumps(self.to_dict(), indent=indent)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"HybridConfig is immutable; use replace({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("HybridConfig is immutable")

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, HybridConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"HybridConfig({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return type(self).from_dict, (self.to_dict(),)


def _field(name: str) -> property:
    """An attribute for a field; the C core says which fields there are."""
    return property(lambda self: self._values[name])


for _name, _ in _core.config_fields():
    setattr(HybridConfig, _name, _field(_name))


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise made(_core.ConfigError, twice, "appears twice")
    return values
