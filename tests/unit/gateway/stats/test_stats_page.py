"""The pages of statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from gateway.stats.stats_page import in_between


async def test_others_are_served_while_a_page_is_made() -> None:
    """Pages of large fleets take a tenth of a second: nobody waits that long for one."""
    seen: list[str] = []

    def page() -> Generator[None, None, str]:
        for number in range(3):
            seen.append(f"piece {number}")
            yield
        return "page"

    async def other() -> None:
        for number in range(3):
            seen.append(f"other {number}")
            await asyncio.sleep(0)

    served = asyncio.create_task(other())
    assert await in_between(page()) == "page"
    await served
    assert seen == ["piece 0", "other 0", "piece 1", "other 1", "piece 2", "other 2"]
