"""HybridConfig: where settings come from, what is refused and in which words. The rules themselves are the C core's."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import hybridkv
from hybridkv import ConfigError, ConfigWarning, HybridConfig, _core
from hybridkv.config import ConfigFields

CHANGED: dict[str, Any] = {
    "hot_tokens": 64,
    "quantization_bits": 4,
    "block_size": 64,
    "sparse_top_k": 128,
    "sink_blocks": 2,
    "migration_throttling": False,
    "kv_cache_debug": True,
    "skip_mass": 0.002,
    "refine_mass": 0.1,
    "sparse_min_mass": 0.5,
}


def test_defaults() -> None:
    config = HybridConfig()
    assert (config.hot_tokens, config.quantization_bits, config.block_size) == (32, 8, 64)
    assert (config.sparse_top_k, config.sink_blocks, config.migration_throttling, config.kv_cache_debug) == (
        32,
        1,
        True,
        False,
    )
    assert config.skip_mass == pytest.approx(1e-3)
    assert config.refine_mass == pytest.approx(0.05)
    assert config.sparse_min_mass == 0


def test_declared_fields_are_those_of_the_core() -> None:
    kinds = {"i": int, "b": bool, "f": float}
    of_the_core = {name: kinds[kind] for name, kind in _core.config_fields()}
    hints = get_type_hints(HybridConfig)
    hints.pop("_values")
    assert hints == of_the_core
    assert get_type_hints(ConfigFields) == {"strategy": str, **of_the_core}
    assert all(name in (HybridConfig.__doc__ or "") for name in of_the_core)
    for name, kind in of_the_core.items():
        assert type(getattr(HybridConfig(), name)) is kind


@pytest.mark.parametrize(
    "make", [lambda d: HybridConfig(**d), HybridConfig.from_dict, lambda d: HybridConfig().replace(**d)]
)
def test_every_field_can_be_set(make: Any) -> None:
    config = make(CHANGED)
    assert {name: pytest.approx(value) for name, value in config.to_dict().items() if name != "strategy"} == CHANGED


def test_round_trips() -> None:
    config = HybridConfig(**CHANGED)
    assert HybridConfig.from_dict(config.to_dict()) == config
    assert HybridConfig.from_json(config.to_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert eval(repr(config), {"HybridConfig": HybridConfig}) == config
    assert hash(HybridConfig(**CHANGED)) == hash(config)
    assert config != HybridConfig()
    assert config != config.to_dict()
    assert config.to_dict()["strategy"] == "hybrid_v2"


def test_is_immutable() -> None:
    config = HybridConfig()
    with pytest.raises(AttributeError, match="immutable"):
        config.hot_tokens = 64
    with pytest.raises(AttributeError, match="immutable"):
        del config.hot_tokens
    with pytest.raises(AttributeError):
        config.no_such_field  # noqa: B018
    assert config == HybridConfig()


def test_files(tmp_path: Path) -> None:
    config = HybridConfig(hot_tokens=48)
    (tmp_path / "cache.json").write_text(config.to_json(indent=2))
    assert HybridConfig.from_file(tmp_path / "cache.json") == config
    with pytest.raises(FileNotFoundError):
        HybridConfig.from_file(tmp_path / "missing.json")


def test_model_config(tmp_path: Path) -> None:
    config = HybridConfig(hot_tokens=48, quantization_bits=6)
    values = {"model_type": "llama", "hybrid_v2": {"hot_tokens": 48, "quantization_bits": 6}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert HybridConfig.from_model_config(tmp_path) == config
    assert HybridConfig.from_model_config(str(tmp_path / "config.json")) == config
    assert HybridConfig.from_model_config(values) == config
    assert HybridConfig.from_model_config(SimpleNamespace(**values)) == config
    for without in ({"model_type": "llama"}, SimpleNamespace(model_type="llama")):
        with pytest.raises(ConfigError, match="no such key") as caught:
            HybridConfig.from_model_config(without)
        assert caught.value.argument == "hybrid_v2"
    with pytest.raises(ConfigError, match="hot_tokens"):
        HybridConfig.from_model_config({"hybrid_v2": {"hot_tokens": 33}})


@pytest.mark.parametrize(
    ("name", "hot_tokens", "block_size", "bits"),
    [("H100", 32, 64, 8), ("H200", 32, 64, 8), ("A100", 48, 64, 8), ("L4", 16, 32, 4)],
)
def test_presets(name: str, hot_tokens: int, block_size: int, bits: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        config = HybridConfig.preset(name)
        assert (config.hot_tokens, config.block_size, config.quantization_bits) == (hot_tokens, block_size, bits)
        assert HybridConfig.preset(name, quantization_bits=6) == config.replace(quantization_bits=6)


def test_unknown_presets_list_the_known_ones() -> None:
    for name in ("H999", "", None):
        with pytest.raises(ConfigError) as caught:
            HybridConfig.preset(name)  # type: ignore[arg-type]
        assert caught.value.argument == "name"
        assert "H200" in str(caught.value) or "NoneType" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("hot_token", "hot_tokens"),
        ("quant_bits", "quantization_bits"),
        ("blocksize", "block_size"),
        ("sinks", "sink_blocks"),
    ],
)
def test_unknown_keys_name_the_nearest(wrong: str, right: str) -> None:
    for make in (lambda: HybridConfig(**{wrong: 1}), lambda: HybridConfig.from_json(json.dumps({wrong: "x"}))):
        with pytest.raises(ConfigError, match=rf"{wrong}.*{right}") as caught:
            make()
        assert caught.value.argument == wrong
        assert "unknown" in caught.value.status


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("hot_tokens", 33, "33"),
        ("hot_tokens", 0, "0"),
        ("hot_tokens", -32, "-32"),
        ("hot_tokens", 2**40, "1.09951"),
        ("hot_tokens", 10**400, "64 bits"),
        ("hot_tokens", "32", "str"),
        ("hot_tokens", 32.0, "float"),
        ("hot_tokens", None, "NoneType"),
        ("hot_tokens", True, "bool"),
        ("quantization_bits", 5, "5"),
        ("block_size", 63, "63"),
        ("block_size", 0, "0"),
        ("block_size", 1024, "1024"),
        ("sparse_top_k", -1, "-1"),
        ("sink_blocks", 17, "17"),
        ("sink_blocks", 1.5, "float"),
        ("migration_throttling", 2, "2"),
        ("migration_throttling", "yes", "str"),
        ("skip_mass", -0.1, "-0.1"),
        ("skip_mass", float("nan"), "nan"),
        ("skip_mass", float("inf"), "inf"),
        ("skip_mass", "0.1", "str"),
        ("skip_mass", False, "bool"),
        ("sparse_min_mass", 1.0, "1"),
        ("strategy", "hybrid_v1", "hybrid_v1"),
        ("strategy", None, "None"),
    ],
)
def test_wrong_values_name_field_rule_and_value(field: str, value: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig(**{field: value})
    assert caught.value.argument == field
    text = str(caught.value)
    assert text.startswith(field), text
    assert shown in text, text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, hybridkv.Error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no valid JSON"),
        ("[32, 8, 64]", "JSON object"),
        ("null", "JSON object"),
        ('{"hot_tokens": 32, "hot_tokens": 64}', "hot_tokens: appears twice"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HybridConfig.from_json(text)


def test_bad_mappings() -> None:
    for values in ([], None, "x"):
        with pytest.raises(ConfigError, match="mapping"):
            HybridConfig.from_dict(values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="str"):
        HybridConfig.from_dict({1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="HybridConfig"):
        hybridkv.Cache(3, num_layers=1, num_kv_heads=1, head_dim=32, dtype="float16", max_tokens=64)  # type: ignore[arg-type]


def test_advice_is_a_warning_and_comes_once() -> None:
    with pytest.warns(ConfigWarning, match="block_size") as caught:
        config = HybridConfig(block_size=32)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HybridConfig() == HybridConfig()
        hybridkv.Cache(config, num_layers=1, num_kv_heads=1, head_dim=32, dtype="float16", max_tokens=256).close()
