"""The soak's memory and traffic."""

from __future__ import annotations

import json

import pytest

from bench.soak import judgement
from bench.soak_memory import MIB, Sample, trend_of
from bench.soak_traffic import Traffic


def samples(slope_mib: float, index_mib: float = 16.0) -> list[Sample]:
    """`slope_mib` per 100,000 requests; the first half grows by much more."""
    result = []
    for step in range(41):
        requests = step * 25_000
        rss_mib = 100 + min(requests, 400_000) / 1000 + slope_mib * requests / 100_000
        index = min(index_mib, requests / 1000) * MIB
        result.append(Sample(step * 3.0, requests, int(rss_mib * MIB), int(index), None, 0, 4))
    return result


def test_growth_is_that_of_the_second_half() -> None:
    """Per 100,000 requests, whatever came before."""
    trend = trend_of(samples(3.0))
    assert trend is not None
    assert trend.growth_mib == pytest.approx(3.0, abs=0.01)
    assert not trend.is_flat
    assert (trend.from_requests, trend.to_requests) == (500_000, 1_000_000)
    flat = trend_of(samples(0.0))
    assert flat is not None
    assert flat.is_flat


def test_bounds_that_still_fill_are_named() -> None:
    """They look like growth."""
    filling = samples(3.0, index_mib=1000.0)
    assert any("index was still filling" in line for line in judgement(filling, trend_of(filling)))
    full = samples(0.0)
    assert len(judgement(full, trend_of(full))) == 1


def test_too_few_samples_tell_nothing() -> None:
    """Nor does a soak that was stopped at once."""
    assert trend_of([]) is None
    assert trend_of(samples(1.0)[:2]) is None
    assert judgement([], None) == ["too short to tell whether memory is flat"]


def test_equal_seeds_make_equal_traffic() -> None:
    """And requests are whole HTTP requests of a tenant."""
    first, second = (Traffic("http://gateway:1", "m", ["sk-a", "sk-b"], 7) for _ in range(2))
    requests = [first.request() for _ in range(200)]
    assert requests == [second.request() for _ in range(200)]
    assert len(set(requests)) == 200
    for request in requests:
        head, _, body = request.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert b"Authorization: Bearer sk-" in head
        assert json.loads(body)["stream"] is True


def test_conversations_extend_their_prompts() -> None:
    """So that there is something to reuse."""
    traffic = Traffic("http://gateway:1", "m", ["sk-a"], 7)
    longest: dict[bytes, list[int]] = {}
    extended = 0
    for _ in range(500):
        head, _, body = traffic.request().partition(b"\r\n\r\n")
        name = head.partition(b"x-headstart-session: ")[2].partition(b"\r\n")[0]
        prompt = json.loads(body).get("prompt")
        if not name:
            continue
        if name in longest:
            assert prompt[: len(longest[name])] == longest[name]
            extended += 1
        longest[name] = prompt
    assert extended > 50
