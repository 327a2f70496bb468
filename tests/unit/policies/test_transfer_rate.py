"""How fast a tier delivers, learned from its transfers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.transfer_rate import TransferRate

MB = 1_000_000


def rate_of(*transfers: tuple[int, float]) -> TransferRate:
    rate = TransferRate()
    for num_bytes, seconds in transfers:
        rate.observe(num_bytes, seconds)
    return rate


def test_before_the_first_transfer_nothing_is_known() -> None:
    """And nothing is made up."""
    rate = TransferRate()
    assert not rate.known
    assert rate.seconds(MB) is None
    assert (rate.bytes_per_s, rate.latency_s) == (0.0, 0.0)


def test_one_transfer_tells_the_rate() -> None:
    """Latency included."""
    rate = rate_of((4 * MB, 0.5))
    assert rate.bytes_per_s == 8 * MB
    assert rate.seconds(16 * MB) == 2.0
    assert rate.latency_s == 0.5


@pytest.mark.parametrize("transfer", [(0, 1.0), (-1, 1.0), (MB, 0.0), (MB, -1.0)])
def test_what_was_no_transfer_is_left_out(transfer: tuple[int, float]) -> None:
    """Nothing came, or no clock can have measured it."""
    rate = rate_of((MB, 1.0), transfer)
    assert rate.seconds(MB) == 1.0


def test_a_tier_that_turns_slow_is_known_after_two_transfers() -> None:
    """From 1 GB/s to 5 MB/s: a prediction is within a factor of two."""
    rate = rate_of(*[(4 * MB, 0.004)] * 20, *[(4 * MB, 0.8)] * 2)
    seconds = rate.seconds(4 * MB)
    assert seconds is not None
    assert 0.4 < seconds < 0.8


def test_a_tier_that_recovers_is_known_after_some_transfers() -> None:
    """It is measured every few seconds, whether it is used or not."""
    rate = rate_of(*[(4 * MB, 0.8)] * 20, *[(4 * MB, 0.004)] * 20)
    seconds = rate.seconds(4 * MB)
    assert seconds is not None
    assert seconds < 0.01


def test_a_shorter_wait_counts_at_once_a_longer_one_slowly() -> None:
    """The latency is that of the quickest transfers lately."""
    assert rate_of((MB, 0.5), (MB, 0.1)).latency_s == 0.1
    assert rate_of((MB, 0.1), (MB, 0.5)).latency_s == pytest.approx(0.11)


@given(
    transfers=st.lists(
        st.tuples(st.integers(1, 10**9), st.floats(1e-6, 100)), min_size=1, max_size=30
    )
)
def test_a_rate_lies_between_the_slowest_and_the_fastest_transfer(
    transfers: list[tuple[int, float]],
) -> None:
    """It is a mean."""
    rates = [num_bytes / seconds for num_bytes, seconds in transfers]
    rate = rate_of(*transfers).bytes_per_s
    assert min(rates) * 0.999 <= rate <= max(rates) * 1.001


def test_latency_is_the_wait_for_the_first_part() -> None:
    """A long run that comes block by block does not look like a slow answer."""
    rate = TransferRate()
    rate.observe(1_000_000, 1.0, first_s=0.01)
    assert rate.latency_s == 0.01
    assert rate.bytes_per_s == 1_000_000
