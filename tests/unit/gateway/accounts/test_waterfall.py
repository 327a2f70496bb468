"""The waterfall of one prompt."""

from gateway.accounts.record import PromptTokens
from gateway.accounts.waterfall import waterfall


def prompt(
    total: int,
    seen: int,
    available: int,
    captured: int,
    *,
    device: int = 0,
    memory: int = 0,
    disk: int = 0,
    redis: int = 0,
) -> PromptTokens:
    return PromptTokens(
        total=total,
        seen=seen,
        available=available,
        captured=captured,
        delivered_device=device,
        delivered_memory=memory,
        delivered_disk=disk,
        delivered_redis=redis,
    )


def test_each_step_is_what_the_step_before_lost() -> None:
    """The plain case: every number is a difference of two neighbours."""
    steps = waterfall(prompt(1000, 800, 600, 500, device=200, memory=100))
    assert (steps.never_seen, steps.evicted, steps.elsewhere) == (200, 200, 100)
    assert (steps.not_delivered, steps.device, steps.memory) == (200, 200, 100)
    assert (steps.uncached, steps.delivered, steps.unpredicted) == (700, 300, 0)


def test_what_was_delivered_was_there_even_if_the_index_did_not_know() -> None:
    """An index that is behind shows as unpredicted, not as negative steps."""
    steps = waterfall(prompt(1000, 0, 0, 0, device=320))
    assert (steps.never_seen, steps.evicted, steps.elsewhere, steps.not_delivered) == (680, 0, 0, 0)
    assert steps.unpredicted == 320


def test_our_longer_rendering_does_not_exceed_the_engines_count() -> None:
    """With a rendering mismatch we may have seen more than the engine counts."""
    steps = waterfall(prompt(100, 128, 128, 128))
    assert (steps.never_seen, steps.not_delivered, steps.uncached) == (0, 100, 100)


def test_every_tier_has_a_step() -> None:
    """And all of them are delivered."""
    steps = waterfall(prompt(1000, 900, 800, 700, device=100, memory=200, disk=50, redis=25))
    assert (steps.device, steps.memory, steps.disk, steps.redis) == (100, 200, 50, 25)
    assert (steps.delivered, steps.not_delivered, steps.uncached) == (375, 325, 625)
