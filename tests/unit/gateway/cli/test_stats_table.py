"""The page of `headstart stats`."""

import dataclasses

import pytest
from pieces import at_once
from rich.console import Console

from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import (
    EventGauges,
    Gauges,
    PolicyGauges,
    ReplicaGauges,
    RoutingGauges,
    StoreGauges,
    TierGauges,
)
from gateway.accounts.record import FirstToken, Outcome, PromptTokens, RequestRecord
from gateway.cli.stats_table import render

STORE = StoreGauges(
    id="store-0",
    incarnation=1,
    uptime_s=9.0,
    engines=["engine-0"],
    capacity_bytes=2**30,
    used_bytes=2**28,
    reserved_bytes=0,
    blocks=364,
    leases=1,
    leased_blocks=40,
    lookups=1_234_567,
    asked_blocks=123_456_789,
    matched_blocks=101_234_567,
    loads=1_000_000,
    failed_loads=2,
    loaded_tokens=10**9,
    loaded_bytes=2**44,
    stored_blocks=12_345_999,
    duplicate_blocks=0,
    orphaned_blocks=0,
    refused_blocks=0,
    expired_leases=0,
    expired_reservations=0,
    evicted_blocks={"capacity": 12_345_678, "corrupt": 1},
)

TIERS = [
    TierGauges(
        name="disk",
        capacity_bytes=2**32,
        used_bytes=2**30,
        blocks=1000,
        stored_blocks=1009,
        refused_blocks=3,
        written_bytes=2**25,
        read_bytes=2**24,
        faults=1,
        evicted_blocks={"capacity": 9},
        latency_s=0.002,
        bandwidth_bytes_s=2**30,
        breaker=None,
    ),
    TierGauges(
        name="redis",
        capacity_bytes=2**32,
        used_bytes=0,
        blocks=0,
        stored_blocks=0,
        refused_blocks=0,
        written_bytes=0,
        read_bytes=0,
        faults=5,
        evicted_blocks={},
        latency_s=None,
        bandwidth_bytes_s=None,
        breaker="open",
    ),
]

IDLE = Gauges(in_flight=0, waiting=0)


def served(delivered: int, prefill_s: float, *, load_s: float = 0.0) -> RequestRecord:
    prompt = PromptTokens(2000, delivered, delivered, delivered, 0, delivered)
    first = FirstToken(prefill_s + 0.01, 0.0003, 0.004, prefill_s, 0.002)
    return RequestRecord(
        request_id="r",
        tenant="t",
        model="m",
        replica="engine-0",
        outcome=Outcome.OK,
        status=200,
        stream=True,
        started_at=0.0,
        duration_s=1.0,
        prompt=prompt,
        first_token=first,
        output_tokens=9,
        load_s=load_s,
        rendering_mismatch=True,
    )


def page(*records: RequestRecord, window: str = "last_1m", gauges: Gauges | None = None) -> str:
    accounting = Accounting(
        ["engine-0"], model="m", version="1.2.3", block_size=32, clock=lambda: 0.0
    )
    for record in records:
        accounting.record(record)
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(at_once(accounting.snapshot(gauges=gauges or IDLE)), window))
    return capture.get()


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_the_waterfall_shows_counts_shares_and_bars() -> None:
    """Half of the tokens came from the store: half of the bar."""
    text = page(served(0, 1.0), served(2000, 0.1))
    line = line_of(text, "reused, memory")
    assert "2,000" in line
    assert "50.0%" in line
    assert line.count("█") == 14
    assert "0.0%" in line_of(text, "evicted")


def test_tiers_below_memory_are_shown_where_there_are_any() -> None:
    """Their tokens in the waterfall, their state with the store's."""
    record = served(2000, 0.1)
    assert "reused, disk" not in page(record)
    prompt = PromptTokens(2000, 2000, 2000, 2000, 0, 500, 1000, 500)
    text = page(
        dataclasses.replace(record, prompt=prompt),
        gauges=IDLE.model_copy(update={"store": STORE.model_copy(update={"tiers": TIERS})}),
    )
    assert "1,000" in line_of(text, "reused, disk")
    assert "25.0%" in line_of(text, "reused, Redis")
    assert "0 went through prefill" in text
    assert "1 GiB of 4 GiB used (25.0%), 1,000 blocks" in line_of(text, "disk:")
    assert "left alone after faults" in line_of(text, "redis:")
    assert "16 MiB read, 32 MiB written; latency 2 ms, 1 GiB/s" in text
    assert "0 B read, 0 B written; latency -, -" in text
    assert "3 not admitted, 1 faults; evicted: 9 capacity" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_savings_are_shown_with_their_error() -> None:
    """One cold prompt calibrates the curve, with a wide bar."""
    text = page(served(0, 1.0), served(1984, 0.1))
    assert "900 ms ± 500 ms over 1 request" in text


def test_a_loss_is_shown_as_one() -> None:
    """A slow load is no saving."""
    text = page(served(0, 1.0), served(1984, 0.1, load_s=3.0))
    assert "-2.10 s ± 500 ms over 1 request" in text
    assert "1 request lost 2.10 s by it" in text


def test_tokens_of_unknown_origin_and_suspicions_are_shown() -> None:
    """Only where there are any."""
    accounting = Accounting(
        ["engine-0"], model="m", version="1.2.3", block_size=32, clock=lambda: 0.0
    )
    record = served(0, 1.0)
    assert "unattributed" not in page(record)
    assert "samples" not in page(record)
    prompt = PromptTokens(2000, 0, 0, 0, 640, 0, unattributed=640)
    accounting.record(dataclasses.replace(record, prompt=prompt))
    accounting.rendering_checked("engine-0", False)
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(at_once(accounting.snapshot(gauges=IDLE)), "last_1m"))
    text = capture.get()
    assert "640" in line_of(text, "unattributed")
    assert "1 of 1 samples may be other tokens: no engine announced them" in text


def test_unknown_savings_are_said_to_be_unknown() -> None:
    """Never 0 when it was not measured."""
    assert "not known yet" in page(served(1984, 0.1))


def test_first_token_parts_stand_in_milliseconds() -> None:
    """Each part has percentiles, mean and count."""
    text = page(served(0, 1.0))
    assert line_of(text, "gateway").split()[-1] == "1"
    assert "0.3 ms" in line_of(text, "gateway")
    assert "1.00 s" in line_of(text, "prefill")


def test_an_idle_gateway_prints_no_empty_tables() -> None:
    """Without requests there is no waterfall, and no numbers are made up."""
    text = page()
    assert "Prompt tokens" not in text
    assert "Time to first token" not in text
    assert "0 ended" in text
    assert "none, or it does not answer" in text


def test_troubles_are_shown() -> None:
    """Mismatches, failed loads and silent event streams catch the eye."""
    events = ReplicaGauges(events=EventGauges(connected=False))
    text = page(
        served(0, 1.0),
        gauges=Gauges(in_flight=0, waiting=0, store=STORE, replicas={"engine-0": events}),
    )
    assert "1 prompts differ from the engine's count" in text
    assert "1,000,000 loads, 2 failed" in text
    assert line_of(text, "engine-0").endswith("silent")


def test_replicas_that_get_no_requests_say_why() -> None:
    """And the routing says how it decided."""
    gauges = Gauges(
        in_flight=0,
        waiting=0,
        replicas={
            "engine-0": ReplicaGauges(
                condition="ejected", reason="no answer to /health", evidence="approximate"
            )
        },
        routing=RoutingGauges(
            kind="least_ttft",
            by_evidence={"exact": 3, "approximate": 1},
            by_reason={"least expected time to first token": 4},
            retries={"EngineLostError": 1},
            joined=2,
            recent=[],
        ),
    )
    text = page(gauges=gauges)
    assert line_of(text, "engine-0").endswith("off, guessed")
    assert "engine-0 is ejected: no answer to /health" in text
    assert "by least_ttft; knowledge: 3 exact, 1 approximate" in text
    assert "asked again elsewhere: 1 EngineLostError" in text


def test_every_line_fits_80_columns() -> None:
    """Nothing is cut or wrapped with large numbers."""
    state = ReplicaGauges(in_flight=256, events=EventGauges(connected=True, gaps=123))
    gauges = Gauges(in_flight=256, waiting=256, store=STORE, replicas={"engine-0": state})
    text = page(*[served(1984, 0.1)] * 2000, window="since_start", gauges=gauges)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "12,345,678 capacity" in text
    assert "on, 123 gaps" in text


def test_an_unknown_window_is_refused() -> None:
    """The caller offers the four names."""
    with pytest.raises(ValueError, match="last_2m"):
        page(window="last_2m")


def test_a_configuration_that_is_not_in_force_is_shown() -> None:
    """And nothing is said of one that is."""
    fine = PolicyGauges(reloads=3, refused=0, error=None, needs_restart=[])
    stale = PolicyGauges(reloads=3, refused=1, error="line 3: bad", needs_restart=["store.id"])
    texts = [
        page(
            gauges=IDLE.model_copy(
                update={"store": STORE.model_copy(update={"policies": policies})}
            )
        )
        for policies in (fine, stale)
    ]
    assert "configuration" not in texts[0]
    assert "the changed configuration was refused: line 3: bad" in texts[1]
    assert "for the next start of the store: store.id" in texts[1]
