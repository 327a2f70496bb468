"""Memory is mapped before it is needed, and only as long as somebody wants it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
from large_pages import address_of, kernel_collapses, mapped_kib

from prefix_store.mapping import LARGE_PAGE_BYTES, map_shared
from prefix_store.prefault import prefault, use_large_pages

NUM_BYTES = 4 * LARGE_PAGE_BYTES


@pytest.fixture
def shared() -> Iterator[memoryview]:
    """Memory that is there in small pages, as a file in memory is that was filled."""
    fd = os.memfd_create("headstart-test-prefault")
    os.posix_fallocate(fd, 0, NUM_BYTES)
    view = map_shared(fd, NUM_BYTES)
    os.close(fd)
    yield view
    view.release()


def test_it_ends_when_it_is_not_wanted_any_more() -> None:
    """A store that stops does not wait for a large arena; no byte changes."""
    asked = 0

    def is_wanted() -> bool:
        nonlocal asked
        asked += 1
        return False

    with mmap.mmap(-1, 2**28) as memory:
        memory[5] = 7
        start = ctypes.c_char.from_buffer(memory)
        prefault(ctypes.addressof(start), len(memory), is_wanted=is_wanted)
        prefault(ctypes.addressof(start), 2**20)
        assert memory[5] == 7
        del start
    assert asked == 1


@pytest.mark.parametrize("large", [False, True])
def test_everything_is_mapped_and_nothing_changes(shared: memoryview, large: bool) -> None:
    shared[:3], shared[-3:] = b"abc", b"xyz"
    if large:
        use_large_pages(address_of(shared), NUM_BYTES)
    prefault(address_of(shared), NUM_BYTES)
    assert mapped_kib(shared, "Rss") == NUM_BYTES // 1024
    assert (bytes(shared[:3]), bytes(shared[-3:])) == (b"abc", b"xyz")
    assert not any(shared[3:-3])


@pytest.mark.skipif(not kernel_collapses(), reason="a kernel without MADV_COLLAPSE (Linux 6.1)")
def test_small_pages_that_are_there_become_large_ones(shared: memoryview) -> None:
    """Also where the machine gives shared memory none by itself. One of four may fail: the kernel
    leaves pages alone that it is busy with."""
    use_large_pages(address_of(shared), NUM_BYTES)
    assert mapped_kib(shared, "ShmemPmdMapped") >= NUM_BYTES // 1024 * 3 // 4
