"""Admission: which blocks a tier takes in."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from policies.access import NO_ACCESS, Access
from policies.admission import ADMIT_ALL, Admission, AdmissionGate, SecondUseGate, all_of


def gate_of(yaml: object) -> AdmissionGate:
    return all_of(TypeAdapter(Admission).validate_python(yaml))


RUN = [b"a", b"b", b"c"]


def test_always_and_never_mean_it() -> None:
    """Everything, nothing."""
    assert all_of(ADMIT_ALL).admit(RUN, NO_ACCESS) == 3
    assert gate_of({"kind": "always"}).admit(RUN, NO_ACCESS) == 3
    assert gate_of({"kind": "never"}).admit(RUN, NO_ACCESS) == 0


def test_second_use_lets_in_what_another_request_used() -> None:
    """The part of a run that two requests share comes in, the rest waits for its second use."""
    gate = gate_of({"kind": "second_use"})
    assert gate.admit(RUN, Access()) == 0
    assert gate.admit([b"a", b"b", b"x"], Access()) == 2
    assert gate.admit(RUN, Access()) == 3


def test_one_request_that_offers_its_run_again_is_one_use() -> None:
    """Pieces and repetitions of one request do not count as a second use."""
    gate, first, second = gate_of({"kind": "second_use"}), Access(), Access()
    assert [gate.admit(RUN[:n], first) for n in (1, 2, 3)] == [0, 0, 0]
    assert [gate.admit(RUN, second) for _ in range(2)] == [3, 3]


def test_uses_elsewhere_count_when_the_tier_tells_them() -> None:
    """A block that two requests used in a tier above is let in at its first offer."""
    gate, first, second = gate_of({"kind": "second_use"}), Access(), Access()
    gate.note(RUN, first)
    gate.note(RUN[:2], second)
    assert gate.admit(RUN, first) == 2


def test_unknown_requests_are_told_apart_by_their_offers() -> None:
    """Without knowledge of requests every offer is a use."""
    gate = gate_of({"kind": "second_use"})
    assert [gate.admit(RUN, NO_ACCESS) for _ in range(2)] == [0, 3]


def test_second_use_forgets_the_oldest_tails_first() -> None:
    """The memory is bounded, and what stays of a run is its head."""
    gate = SecondUseGate(4)
    gate.note(RUN, Access())
    gate.note([b"x", b"y"], Access())
    assert len(gate) == 4
    assert gate.admit(RUN, Access()) == 2


def test_a_run_longer_than_the_memory_is_let_in_as_far_as_remembered() -> None:
    """Nothing breaks when a single run overflows the memory."""
    gate = SecondUseGate(2)
    assert [gate.admit(RUN, Access()) for _ in range(2)] == [0, 2]


def test_min_tokens_refuses_short_prompts() -> None:
    """Length is that of the whole prompt; where it is unknown nothing is refused."""
    gate = gate_of({"kind": "min_tokens", "tokens": 100})
    assert [gate.admit(RUN, Access(num_tokens=n)) for n in (99, 100, 0)] == [0, 3, 3]


def test_gates_must_all_agree_and_later_ones_see_what_earlier_ones_let_in() -> None:
    """A short prompt is no first use."""
    gate = gate_of([{"kind": "min_tokens", "tokens": 100}, {"kind": "second_use"}])
    assert gate.admit(RUN, Access(num_tokens=5)) == 0
    assert gate.admit(RUN[:2], Access(num_tokens=100)) == 0
    assert gate.admit(RUN, Access(num_tokens=100)) == 2


@pytest.mark.parametrize(
    "yaml", [[], {"kind": "sometimes"}, {"kind": "min_tokens", "tokens": 0}, "always", None]
)
def test_what_is_no_admission_is_refused(yaml: object) -> None:
    """Errors at start, not surprises later."""
    with pytest.raises(ValidationError):
        gate_of(yaml)
