"""The identity of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_adapter.weights import WeightsError, weights_digest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model(path: Path, weights: bytes = b"w" * 1000, config: str = "{}") -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_equal_files_are_equal_wherever_they_are(tmp_path: Path) -> None:
    """A copy of a model may exchange KV bytes with the original; its tokenizer does not matter."""
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    (two / "tokenizer.json").write_text('{"other": 1}')
    assert weights_digest(one) == weights_digest(two)
    assert weights_digest(one) == weights_digest(one)


def test_one_changed_byte_is_another_model(tmp_path: Path) -> None:
    """In the weights or in the configuration (a changed rope scaling changes KV bytes)."""
    base = weights_digest(model(tmp_path / "a"))
    assert weights_digest(model(tmp_path / "b", weights=b"w" * 999 + b"x")) != base
    assert weights_digest(model(tmp_path / "c", config='{"rope": 2}')) != base


def test_a_change_is_seen_after_the_digest_was_remembered(tmp_path: Path) -> None:
    """Other size or time: read again."""
    path = model(tmp_path / "a")
    base = weights_digest(path)
    (path / "model.safetensors").write_bytes(b"v" * 1001)
    assert weights_digest(path) != base


def test_no_weights_is_an_error(tmp_path: Path) -> None:
    """Never a guess."""
    with pytest.raises(WeightsError, match="no weights"):
        weights_digest(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weights"):
        weights_digest(tmp_path)
