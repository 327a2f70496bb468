"""The identity of adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.adapters import AdapterError, adapter_digest, adapter_rank

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(
    path: Path,
    weights: bytes = b"w" * 1000,
    *,
    file: str = "adapter_model.safetensors",
    **keys: Any,
) -> Path:
    path.mkdir()
    (path / file).write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **keys}))
    return path


def test_a_copy_is_the_same_adapter(tmp_path: Path) -> None:
    """Wherever it lies, and whatever else lies there."""
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    (two / "README.md").write_text("other words")
    assert adapter_digest(one) == adapter_digest(two)
    assert len(adapter_digest(one)) == 32


def test_what_changes_nothing_does_not_count(tmp_path: Path) -> None:
    """Names and paths, the order of sets, defaults that another version of PEFT writes out."""
    base = adapter_digest(adapter(tmp_path / "base"))
    same: dict[str, Any] = {
        "base_model_name_or_path": "/elsewhere",
        "revision": "main",
        "inference_mode": True,
        "lora_dropout": 0.1,
        "task_type": "CAUSAL_LM",
        "target_modules": ["v_proj", "q_proj"],
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    assert adapter_digest(adapter(tmp_path / "same", **same)) == base


@pytest.mark.parametrize(
    "keys",
    [
        {"r": 16},
        {"lora_alpha": 32},
        {"lora_alpha": 0},
        {"target_modules": ["q_proj"]},
        {"use_rslora": True},
        {"bias": "all"},
        {"modules_to_save": ["score"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q": 4, "q_proj": 8}},
        {"something_new": 1},
    ],
)
def test_a_setting_that_counts_makes_another_adapter(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Also one that nobody here knows."""
    base = adapter_digest(adapter(tmp_path / "base"))
    assert adapter_digest(adapter(tmp_path / "other", **keys)) != base


def test_patterns_count_in_their_order(tmp_path: Path) -> None:
    """The first one that fits is taken."""
    one = adapter(tmp_path / "one", alpha_pattern={"q": 4, "q_proj": 8})
    two = adapter(tmp_path / "two", alpha_pattern={"q_proj": 8, "q": 4})
    assert adapter_digest(one) != adapter_digest(two)


def test_other_weights_are_another_adapter(tmp_path: Path) -> None:
    """Of the same size, under the same path, with the times set back."""
    path = adapter(tmp_path / "a")
    weights = path / "adapter_model.safetensors"
    base, before = adapter_digest(path), weights.stat()
    weights.write_bytes(b"w" * 999 + b"x")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert adapter_digest(path) != base


def test_the_file_that_the_engine_takes_counts(tmp_path: Path) -> None:
    """safetensors first, then .bin, then .pt."""
    path = adapter(tmp_path / "a", file="adapter_model.pt")
    as_pt = adapter_digest(path)
    (path / "adapter_model.bin").write_bytes(b"b")
    as_bin = adapter_digest(path)
    (path / "adapter_model.pt").write_bytes(b"p")
    assert adapter_digest(path) == as_bin != as_pt
    (path / "adapter_model.safetensors").write_bytes(b"s")
    assert adapter_digest(path) not in (as_pt, as_bin)


def test_a_digest_is_remembered(tmp_path: Path) -> None:
    """While the files stay as they are, nothing is read."""
    path = adapter(tmp_path / "a")
    adapter_digest(path)
    [remembered] = (tmp_path / "cache" / "headstart" / "adapters").iterdir()
    remembered.write_text("f" * 32)
    assert adapter_digest(path) == "f" * 32
    remembered.write_text("torn")
    assert adapter_digest(path) not in ("f" * 32, "torn")


def test_what_is_no_adapter_is_an_error(tmp_path: Path) -> None:
    """Never a guess."""
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        adapter_digest(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match=r"none of adapter_model\.safetensors"):
        adapter_digest(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    with pytest.raises(AdapterError, match="not a JSON object"):
        adapter_digest(tmp_path)
    with pytest.raises(AdapterError, match="no rank"):
        adapter_rank(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(b" " * (1024**2 + 1))
    with pytest.raises(AdapterError, match="larger than"):
        adapter_digest(tmp_path)


def test_the_rank_is_the_largest(tmp_path: Path) -> None:
    """A pattern may give some modules a larger one."""
    assert adapter_rank(adapter(tmp_path / "a")) == 8
    assert adapter_rank(adapter(tmp_path / "b", rank_pattern={"q_proj": 4, "v_proj": 32})) == 32
