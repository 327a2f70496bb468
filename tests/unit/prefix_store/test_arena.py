"""The arena is there as a whole before anything is kept in it, or the store does not start."""

from __future__ import annotations

import os

import pytest
from large_pages import kernel_collapses, mapped_kib

from prefix_store import arena as arenas
from prefix_store.arena import Arena, ArenaMemoryError
from prefix_store.mapping import LARGE_PAGE_BYTES

NUM_BYTES = 4 * LARGE_PAGE_BYTES


@pytest.mark.parametrize("num_bytes", [4096, NUM_BYTES - 4096, NUM_BYTES, NUM_BYTES + 100])
def test_all_of_it_is_there(num_bytes: int) -> None:
    arena = Arena.create(num_bytes)
    assert os.fstat(arena.fd).st_size == len(arena.view) == num_bytes
    assert os.fstat(arena.fd).st_blocks * 512 >= num_bytes
    assert not any(arena.view)
    arena.close()


@pytest.mark.skipif(not kernel_collapses(), reason="a kernel without MADV_COLLAPSE (Linux 6.1)")
def test_it_lies_in_large_pages_for_engines_too() -> None:
    """One of four may fail: the kernel leaves pages alone that it is busy with."""
    arena = Arena.create(NUM_BYTES)
    engine = Arena(os.dup(arena.fd), NUM_BYTES)
    for each in (arena, engine):
        each.populate()
        assert mapped_kib(each.view, "ShmemPmdMapped") >= NUM_BYTES // 1024 * 3 // 4
        assert mapped_kib(each.view, "Rss") == NUM_BYTES // 1024
        each.close()


def test_more_than_there_is_is_refused_before_it_is_taken() -> None:
    """The kernel would hand it out until it had to end some process, perhaps the engine."""
    with pytest.raises(ArenaMemoryError, match=r"store\.memory\.capacity: 1048576\.0 GiB .*lower"):
        Arena.create(1 << 50)


def test_what_the_kernel_refuses_is_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that nobody could read before; descriptor and mapping are given back."""
    monkeypatch.setattr(arenas, "available_bytes", lambda: None)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArenaMemoryError, match=r"0\.0 GiB .*No space left"):
        Arena.create(NUM_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before
