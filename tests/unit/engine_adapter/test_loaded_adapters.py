"""What a running engine's adapters are: certain, or not stored."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_adapter.adapters import adapter_digest
from engine_adapter.loaded_adapters import MAX_ADAPTERS, LoadedAdapters, digest_in

WEIGHTS = "adapter_model.safetensors"


@dataclass
class Lora:
    """The fields of vLLM's LoRARequest that are read."""

    lora_path: str
    lora_name: str = "sql"
    lora_int_id: int = 1
    is_3d_lora_weight: bool = False


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(path: Path, weights: bytes = b"w") -> Path:
    path.mkdir(parents=True)
    (path / WEIGHTS).write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    return path


def started_after(*paths: Path) -> LoadedAdapters:
    """An engine that began when these, and what is in them, were there. Any later change gets a
    later time, however coarse the clock of the file system is."""
    every = [each for path in paths for each in (path, *path.rglob("*"))]
    began = 1 + max(each.lstat().st_ctime_ns for each in every)
    tick = paths[0].with_suffix(".tick")
    tick.touch()
    while tick.stat().st_ctime_ns < began:
        time.sleep(0.001)
        tick.touch()
    return LoadedAdapters(began, "bf16")


def test_an_adapter_is_its_content_whatever_its_name_and_number(tmp_path: Path) -> None:
    """A copy is the same one; other weights under a name and number that were used before are
    not."""
    one, copy = adapter(tmp_path / "one"), adapter(tmp_path / "copy")
    other = adapter(tmp_path / "other", b"x")
    loaded = started_after(one, copy, other)
    identity = loaded.identity(Lora(str(one)))
    assert identity is not None
    assert digest_in(identity) == adapter_digest(one)
    assert loaded.identity(Lora(str(copy), "other-name", 2)) == identity
    assert loaded.identity(Lora(str(other))) not in (None, identity)
    assert loaded.identity(None) == ""


def test_what_the_engine_makes_of_the_files_counts(tmp_path: Path) -> None:
    """The type that it converts weights to, and how it reads the experts'."""
    path = adapter(tmp_path / "a")
    plain = started_after(path).identity(Lora(str(path)))
    flat = LoadedAdapters(2**63, "float16").identity(Lora(str(path)))
    experts = started_after(path).identity(Lora(str(path), is_3d_lora_weight=True))
    assert len({plain, flat, experts}) == 3
    assert len({digest_in(each or "") for each in (plain, flat, experts)}) == 1


def rewrite(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"x")


def rewrite_as_if_old(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"x")
    os.utime(path / WEIGHTS, (0, 0))


def move_in(path: Path) -> None:
    (path.parent / "other" / WEIGHTS).replace(path / WEIGHTS)


def turn_the_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("other")


def delete(path: Path) -> None:
    (path / WEIGHTS).unlink()


@pytest.mark.parametrize("change", [rewrite, rewrite_as_if_old, move_in, turn_the_link, delete])
@pytest.mark.parametrize("used_before", [True, False])
def test_an_adapter_that_changes_while_the_engine_runs_is_not_stored(
    tmp_path: Path, change: Callable[[Path], None], used_before: bool
) -> None:
    """It may have been loaded before or after, and once in doubt it stays so: the engine's own
    cache may still hold blocks of the older one."""
    adapter(tmp_path / "first")
    adapter(tmp_path / "other", b"x")
    path = tmp_path / "latest"
    path.symlink_to("first")
    loaded = started_after(tmp_path)
    if used_before:
        assert loaded.identity(Lora(str(path))) is not None
    change(path)
    assert loaded.identity(Lora(str(path))) is None
    assert loaded.identity(Lora(str(path), "other-name", 7)) is None


def test_a_link_further_up_the_way_counts(tmp_path: Path) -> None:
    """Releases are often a link that is turned."""
    adapter(tmp_path / "v1" / "sql")
    adapter(tmp_path / "v2" / "sql", b"x")
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "ours").symlink_to(tmp_path / "current")
    path = tmp_path / "ours" / "sql"
    used, unused = started_after(tmp_path), started_after(tmp_path)
    assert used.identity(Lora(str(path))) is not None
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("v2")
    assert used.identity(Lora(str(path))) is None
    assert unused.identity(Lora(str(path))) is None
    assert LoadedAdapters(2**63).identity(Lora(str(path))) is not None


def test_a_directory_that_was_exchanged_for_an_older_one_counts(tmp_path: Path) -> None:
    """Its files have times from before the engine began, but they are others."""
    adapter(tmp_path / "a" / "sql")
    adapter(tmp_path / "b" / "sql", b"x")
    path = tmp_path / "a" / "sql"
    loaded = started_after(tmp_path)
    assert loaded.identity(Lora(str(path))) is not None
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    assert loaded.identity(Lora(str(path))) is None


def test_an_adapter_that_is_newer_than_the_engine_is_not_stored(tmp_path: Path) -> None:
    """Nothing says whether it was complete, or another one, when the engine loaded it."""
    assert LoadedAdapters(0).identity(Lora(str(adapter(tmp_path / "a")))) is None


def test_what_cannot_be_read_is_not_stored(tmp_path: Path) -> None:
    """Such as a name on the model hub; files that come later do not help."""
    loaded = LoadedAdapters(2**63)
    path = tmp_path / "none"
    assert loaded.identity(Lora(str(path))) is None
    adapter(path)
    assert loaded.identity(Lora(str(path))) is None


def test_files_that_change_while_they_are_read_are_not_stored(tmp_path: Path) -> None:
    """Half of one and half of another."""
    path = adapter(tmp_path / "a")

    def digest(read: Path) -> str:
        (read / WEIGHTS).write_bytes(b"longer")
        return "d" * 32

    assert LoadedAdapters(2**63, digest_of=digest).identity(Lora(str(path))) is None


def test_an_adapter_is_read_once(tmp_path: Path) -> None:
    """Later it is only looked at."""
    path, reads = adapter(tmp_path / "a"), []

    def digest(read: Path) -> str:
        reads.append(read)
        return "d" * 32

    loaded = LoadedAdapters(2**63, digest_of=digest)
    assert {loaded.identity(Lora(str(path))) for _ in range(3)} == {"d" * 32 + "/"}
    assert reads == [path]


def test_paths_are_bounded(tmp_path: Path) -> None:
    """Beyond that many, none is stored."""
    loaded = LoadedAdapters(2**63)
    for number in range(MAX_ADAPTERS):
        loaded.identity(Lora(f"/nowhere/{number}"))
    assert loaded.identity(Lora(str(adapter(tmp_path / "a")))) is None
