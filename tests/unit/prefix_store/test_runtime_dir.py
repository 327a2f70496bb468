"""The runtime directory is ours alone, or nothing starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prefix_store.base import StoreError
from prefix_store.runtime_dir import RuntimePaths


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_for_its_owner_only(tmp_path: Path) -> None:
    """With its parents; a second time changes nothing."""
    root = tmp_path / "a" / "b"
    for _ in range(2):
        RuntimePaths(root).create()
        assert mode_of(root) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o777])
def test_a_directory_of_ours_that_is_open_is_closed(tmp_path: Path, mode: int) -> None:
    """Others could have read what the sockets carry."""
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(mode)
    RuntimePaths(root).create()
    assert mode_of(root) == 0o700


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    """Whoever made it first says where it leads; what it leads to stays as it was."""
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o755)
    root = tmp_path / "link"
    root.symlink_to(target)
    with pytest.raises(StoreError, match="set `runtime_dir`"):
        RuntimePaths(root).create()
    assert mode_of(target) == 0o755


def test_a_file_is_refused(tmp_path: Path) -> None:
    """With a sentence, not with a traceback."""
    root = tmp_path / "file"
    root.touch()
    with pytest.raises(StoreError, match="is no directory of ours"):
        RuntimePaths(root).create()


def test_a_directory_that_all_share_is_not_closed_to_them(tmp_path: Path) -> None:
    """As root, /tmp would be ours by its owner."""
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    with pytest.raises(StoreError, match="all users share"):
        RuntimePaths(root).create()
    assert mode_of(root) == 0o1777


def test_somebody_elses_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there before us under our name: its owner could replace our sockets."""
    root = tmp_path / "theirs"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        RuntimePaths(root).create()
