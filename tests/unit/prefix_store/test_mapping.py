"""Shared memory lies where large pages fit, and is given back when nobody looks at it any more."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from large_pages import address_of

from prefix_store.mapping import LARGE_PAGE_BYTES, map_shared


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("headstart-test-mapping")
    os.ftruncate(fd, 3 * LARGE_PAGE_BYTES)
    yield fd
    os.close(fd)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("headstart-test-mapping")


@pytest.mark.parametrize(
    "num_bytes", [1, mmap.PAGESIZE, LARGE_PAGE_BYTES + 5, 3 * LARGE_PAGE_BYTES]
)
def test_a_view_is_aligned_and_as_long_as_asked(fd: int, num_bytes: int) -> None:
    view = map_shared(fd, num_bytes)
    assert (len(view), view.format, view.readonly) == (num_bytes, "B", False)
    assert address_of(view) % LARGE_PAGE_BYTES == 0


def test_two_views_show_the_same_bytes(fd: int) -> None:
    one, other = map_shared(fd, LARGE_PAGE_BYTES), map_shared(fd, 3 * LARGE_PAGE_BYTES)
    one[-3:] = b"abc"
    assert bytes(other[LARGE_PAGE_BYTES - 3 : LARGE_PAGE_BYTES]) == b"abc"
    assert os.pread(fd, 3, LARGE_PAGE_BYTES - 3) == b"abc"


def test_it_is_unmapped_with_the_last_part_that_somebody_holds(fd: int) -> None:
    """A thread that still copies keeps it, whoever else has let go."""
    view = map_shared(fd, 2 * LARGE_PAGE_BYTES)
    part = view[100:200]
    view.release()
    assert mappings() == 1
    part[0] = 7
    del part
    assert mappings() == 0


def test_what_cannot_be_mapped_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "read-only"
    file.write_bytes(b"x" * mmap.PAGESIZE)
    fd = os.open(file, os.O_RDONLY)
    before = inaccessible_bytes()
    with pytest.raises(PermissionError):
        map_shared(fd, mmap.PAGESIZE)
    os.close(fd)
    assert inaccessible_bytes() == before


def inaccessible_bytes() -> int:
    """Address space that is only reserved."""
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.split()[1] == "---p"
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)
