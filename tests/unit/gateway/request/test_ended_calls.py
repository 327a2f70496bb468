"""Records are made once, and as soon as what they need is known."""

from __future__ import annotations

import asyncio

from replicas import assignment_of, replica_of

from engine_adapter.base import Prompt
from engine_adapter.load_reports import LoadReports
from gateway.accounts.record import Outcome, PromptTokens, RequestRecord
from gateway.request.answer import PromptTokensDetails, Usage
from gateway.request.call import Call
from gateway.request.ended_calls import EndedCalls
from policies.access import Stop
from policies.engine import EngineConfig
from prefix_store.events import BlocksLoaded
from prefix_store.residency import Holder, Match, Medium

DEVICE = Holder("engine-0", Medium.DEVICE)
MEMORY = Holder("store-0", Medium.MEMORY)
FOREVER_S = 3600.0


class Recorded:
    """An accounting that keeps all."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)

    @property
    def prompts(self) -> list[PromptTokens]:
        return [record.prompt for record in self.records if record.prompt is not None]


def ended_call(
    request_id: str = "r",
    *,
    cached: int = 96,
    on_device: int = 1,
    outcome: Outcome = Outcome.OK,
    store: bool = True,
    sent: float | None = 1.0,
) -> Call:
    """A prompt of 100 tokens in blocks of 32; `on_device` blocks were known to be there."""
    replica = replica_of(EngineConfig(), holders=(DEVICE, MEMORY) if store else (DEVICE,))
    match = Match(3, {DEVICE: on_device, MEMORY: 3})
    return Call(
        request_id,
        32,
        prompt=Prompt(100, [], []),
        match=match,
        assignment=assignment_of(replica, match, captured_blocks=3, device_blocks=on_device),
        report_id=f"report of {request_id}" if store else None,
        sent=sent,
        usage=Usage(100, 1, PromptTokensDetails(cached)),
        outcome=outcome,
    )


def report_of(request_id: str, num_tokens: int) -> BlocksLoaded:
    return BlocksLoaded(f"report of {request_id}", num_tokens, num_tokens, 1, 0.002)


async def test_what_is_known_is_recorded_at_once() -> None:
    """The report is there, or none can be on its way."""
    loads, recorded = LoadReports(), Recorded()
    ended = EndedCalls(loads, recorded, wait_s=FOREVER_S)
    loads.add(report_of("a", 64))
    ended.add(ended_call("a"))
    ended.add(ended_call("b", on_device=3))
    ended.add(ended_call("c", cached=0))
    ended.add(ended_call("d", outcome=Outcome.CANCELLED))
    ended.add(ended_call("e", store=False))
    assert [record.request_id for record in recorded.records] == list("abcde")
    assert len(ended) == 0
    assert [p.unattributed for p in recorded.prompts] == [0] * 5
    assert [p.delivered_memory for p in recorded.prompts] == [64, 0, 0, 0, 0]


async def test_a_report_that_comes_after_the_answer_counts() -> None:
    """The record waits for it, and says of the request what it would have said at once."""
    loads, recorded = LoadReports(), Recorded()
    ended = EndedCalls(loads, recorded, wait_s=0.01)
    ended.add(ended_call("a"))
    assert recorded.records == []
    loads.add(report_of("a", 64))
    async with asyncio.timeout(10):
        while not recorded.records:  # noqa: ASYNC110 - the record has no event
            await asyncio.sleep(0.001)
    (prompt,) = recorded.prompts
    assert (prompt.delivered_device, prompt.delivered_memory, prompt.unattributed) == (32, 64, 0)
    assert recorded.records[0].load_s == 0.002
    assert len(loads) == len(ended) == 0


async def test_waiting_is_no_part_of_a_requests_duration() -> None:
    """It ended when its answer was out."""
    recorded = Recorded()
    ended = EndedCalls(LoadReports(), recorded, wait_s=FOREVER_S)
    call = ended_call()
    ended.add(call)
    call.finished = call.began + 0.25
    ended.close()
    assert abs(recorded.records[0].duration_s - 0.25) < 1e-6


async def test_without_a_report_it_stays_open_where_the_tokens_came_from() -> None:
    """They count as the device's, and are said to be unattributed; each call is recorded once."""
    recorded = Recorded()
    ended = EndedCalls(LoadReports(), recorded, wait_s=0.0)
    for number in range(5):
        ended.add(ended_call(str(number)))
    async with asyncio.timeout(10):
        while len(ended):  # noqa: ASYNC110 - the records have no event
            await asyncio.sleep(0.001)
    assert [record.request_id for record in recorded.records] == list("01234")
    assert {(p.delivered_device, p.unattributed) for p in recorded.prompts} == {(96, 64)}


async def test_waiting_is_bounded() -> None:
    """One call too many is recorded as it is."""
    recorded = Recorded()
    ended = EndedCalls(LoadReports(), recorded, wait_s=FOREVER_S, max_waiting=2)
    for request_id in "abc":
        ended.add(ended_call(request_id))
    assert [record.request_id for record in recorded.records] == ["c"]
    assert len(ended) == 2
    ended.close()
    assert [record.request_id for record in recorded.records] == list("cab")


async def test_closing_records_what_waits() -> None:
    """With the reports that have come by then."""
    loads, recorded = LoadReports(), Recorded()
    ended = EndedCalls(loads, recorded, wait_s=FOREVER_S)
    ended.add(ended_call("a"))
    loads.add(report_of("a", 64))
    ended.close()
    ended.close()
    assert [p.delivered_memory for p in recorded.prompts] == [64]


async def test_the_store_is_told_at_once_of_what_was_sent() -> None:
    """Even if the record waits; not of requests that no store can know."""
    told: list[tuple[str, Stop, int]] = []

    class Told:
        def tell(self, report_id: str, stop: Stop, output_tokens: int) -> None:
            told.append((report_id, stop, output_tokens))

    recorded = Recorded()
    ended = EndedCalls(LoadReports(), recorded, outcomes=Told(), wait_s=FOREVER_S)
    waiting = ended_call("a")
    waiting.finish_reason = "tool_calls"
    for call in (
        waiting,
        ended_call("b", cached=0, outcome=Outcome.CANCELLED),
        ended_call("c", store=False),
        ended_call("d", sent=None),
    ):
        ended.add(call)
    assert told == [
        ("report of a", Stop.TOOL_USE, 1),
        ("report of b", Stop.CANCELLED, 1),
    ]
    assert "a" not in [record.request_id for record in recorded.records]
    ended.close()
