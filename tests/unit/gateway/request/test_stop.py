"""How answers end."""

import pytest

from gateway.accounts.record import Outcome
from gateway.request.stop import stop_of
from policies.access import Stop


@pytest.mark.parametrize(
    ("reason", "outcome", "stop"),
    [
        ("stop", Outcome.OK, Stop.END_TURN),
        ("tool_calls", Outcome.OK, Stop.TOOL_USE),
        ("function_call", Outcome.OK, Stop.TOOL_USE),
        ("length", Outcome.OK, Stop.LENGTH),
        ("abort", Outcome.OK, Stop.CANCELLED),
        ("content_filter", Outcome.OK, Stop.UNKNOWN),
        (None, Outcome.OK, Stop.UNKNOWN),
        (None, Outcome.CANCELLED, Stop.CANCELLED),
        ("stop", Outcome.CANCELLED, Stop.END_TURN),
        (None, Outcome.ENGINE_ERROR, Stop.UNKNOWN),
    ],
)
def test_stop_is_the_engines_reason_else_how_the_request_ended(reason, outcome, stop):
    """A client that leaves after the last token has its answer."""
    assert stop_of(reason, outcome) is stop
