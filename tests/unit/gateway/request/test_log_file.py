"""A rotated file of whole lines."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.log_file import LogFile


def contents(path: Path) -> list[bytes]:
    """Of all files, oldest first."""
    old = sorted(path.parent.glob(f"{path.name}.*"), key=lambda p: -int(p.suffix[1:]))
    return [each.read_bytes() for each in (*old, path)]


LINES = st.lists(st.integers(1, 30).map(lambda length: b"x" * (length - 1) + b"\n"), max_size=20)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(LINES, st.booleans()), max_size=6), st.integers(0, 3))
def test_no_line_is_split_and_only_the_oldest_go(batches, keep):
    """However it is written and opened again; the bounds hold all the time."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "log"
        file = LogFile(path, max_bytes=40, keep=keep)
        file.open()
        number, expected = 0, []
        for lines, again in batches:
            numbered = [b"%06d" % (number + i) + line for i, line in enumerate(lines)]
            number += len(lines)
            expected += numbered
            file.write(numbered)
            if again:
                file.close()
            files = contents(path)
            assert len(files) <= keep + 1
            assert all(len(data) <= 40 for data in files)
            kept = b"".join(files).splitlines(keepends=True)
            assert kept == (expected[-len(kept) :] if kept else [])
            if not number or sum(map(len, expected)) <= 40:
                assert kept == expected
        file.close()


def test_a_line_that_is_too_long_has_a_file_of_its_own(tmp_path):
    """It is not lost, and the next one does not follow it."""
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=10, keep=2)
    file.write([b"a\n", b"b" * 50 + b"\n", b"c\n"])
    file.close()
    assert contents(path) == [b"a\n", b"b" * 50 + b"\n", b"c\n"]


def test_what_a_crash_tore_is_cut_off(tmp_path):
    """Lines stay readable, also when the last one is long."""
    path = tmp_path / "log"
    path.write_bytes(b"whole\n" + b"torn" * 50_000)
    file = LogFile(path, max_bytes=1000, keep=1)
    file.write([b"next\n"])
    file.close()
    assert path.read_bytes() == b"whole\nnext\n"
    path.write_bytes(b"torn")
    file.write([b"next\n"])
    file.close()
    assert path.read_bytes() == b"next\n"


def test_only_its_owner_can_read_it(tmp_path):
    """Also one that lay open before; directories are made likewise."""
    path = tmp_path / "a" / "log"
    file = LogFile(path, max_bytes=4, keep=1)
    file.write([b"one\n", b"two\n"])
    file.close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}
    path.chmod(0o644)
    file.open()
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_whole_lines_and_is_left_behind(tmp_path, monkeypatch):
    """Half a line is taken back; the next write goes on."""
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=1000, keep=1)
    file.write([b"one\n"])
    write, room = os.write, [3]

    def full(fd, data):
        if not room:
            raise OSError(28, "No space left on device")
        return write(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.write([b"two\n"])
    monkeypatch.setattr(os, "write", write)
    assert path.read_bytes() == b"one\n"
    file.write([b"three\n"])
    file.close()
    assert path.read_bytes() == b"one\nthree\n"


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "below a file"])
def test_what_is_no_file_of_ours_is_an_error(tmp_path, kind):
    """At once: a pipe would block, a link would lead elsewhere."""
    path = tmp_path / "log"
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.touch()
            path /= "log"
    with pytest.raises(OSError, match=r"log"):
        LogFile(path, max_bytes=10, keep=1).open()
    assert not (tmp_path / "elsewhere").exists()
