"""How an answer ended, in the words of the policies."""

from __future__ import annotations

from gateway.accounts.record import Outcome
from policies.access import Stop

_STOPS = {
    "stop": Stop.END_TURN,
    "tool_calls": Stop.TOOL_USE,
    "function_call": Stop.TOOL_USE,
    "length": Stop.LENGTH,
    "abort": Stop.CANCELLED,
}
"""By finish_reason: OpenAI's, and vLLM's `abort`."""


def stop_of(finish_reason: str | None, outcome: Outcome) -> Stop:
    """`finish_reason`: of the first answer, None where none was seen. It counts also when the
    client left behind it: some do not wait for the end of the stream."""
    if finish_reason is not None:
        return _STOPS.get(finish_reason, Stop.UNKNOWN)
    return Stop.CANCELLED if outcome is Outcome.CANCELLED else Stop.UNKNOWN
