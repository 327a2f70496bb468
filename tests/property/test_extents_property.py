"""The arena's allocator against a byte map."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.extents import ALIGNMENT, Extent, ExtentAllocator

UNITS = 24
STEPS = st.lists(
    st.one_of(st.integers(1, 9 * ALIGNMENT), st.integers(-30, -1)), min_size=1, max_size=120
)


@given(STEPS)
def test_extents_never_overlap_and_the_account_is_exact(steps: list[int]) -> None:
    """Positive: allocate so many bytes. Negative: free one of what is allocated. A byte map says
    what is free, and whether a long enough run was there."""
    allocator = ExtentAllocator(UNITS * ALIGNMENT)
    taken = [False] * UNITS
    held: list[Extent] = []
    for step in steps:
        if step > 0:
            units = -(-step // ALIGNMENT)
            fits = any(not any(taken[i : i + units]) for i in range(UNITS - units + 1))
            extent = allocator.allocate(step)
            assert (extent is not None) == fits
            if extent is None:
                continue
            span = range(extent.offset // ALIGNMENT, (extent.offset + extent.num_bytes) // 64)
            assert len(span) == units
            assert not any(taken[i] for i in span)
            for i in span:
                taken[i] = True
            held.append(extent)
        elif held:
            extent = held.pop(-step % len(held))
            allocator.free(extent)
            for i in range(extent.offset // 64, (extent.offset + extent.num_bytes) // 64):
                taken[i] = False
        assert allocator.used_bytes == sum(taken) * ALIGNMENT
        assert allocator.used_bytes + allocator.free_bytes == allocator.capacity_bytes
    for extent in held:
        allocator.free(extent)
    assert allocator.allocate(UNITS * ALIGNMENT) is not None


def test_freeing_twice_is_refused() -> None:
    """A double free would let two blocks share bytes."""
    allocator = ExtentAllocator(10 * ALIGNMENT)
    first = allocator.allocate(64)
    assert first is not None
    allocator.allocate(64)
    allocator.free(first)
    with pytest.raises(ValueError, match="was not allocated"):
        allocator.free(first)
