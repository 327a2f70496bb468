"""Memory is mapped before it is needed, and only as long as somebody wants it."""

from __future__ import annotations

import ctypes
import mmap

from prefix_store.prefault import prefault


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
