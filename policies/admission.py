"""Which blocks a tier takes in at all: gates that must all agree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BeforeValidator, Field

from policies.access import NO_ACCESS, Access
from policies.base import Settings


class AdmissionGate(Protocol):
    """Says how much of a run is let in. A run is a chain, heads first, and tiers are closed under
    prefixes, so the answer is a number of leading blocks. O(1) per block at most."""

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        """A request asks for this run, wherever its blocks are. Tiers that tell it let blocks in
        that were used twice in a tier above; to those that do not, only offers count."""

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        """How many blocks of this run, from the first on, may come in. The same answer for the
        same request when it offers its run again, or in pieces."""


class AlwaysGate:
    """Lets everything in."""

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        return

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        del access
        return len(hashes)


class NeverGate:
    """Lets nothing in."""

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        return

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        del hashes, access
        return 0


class MinTokensGate:
    """Lets blocks of long prompts in. A prompt of unknown length (0) is let in."""

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        return

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        return 0 if 0 < access.num_tokens < self._min_tokens else len(hashes)


class SecondUseGate:
    """Lets blocks in that a second request uses while the first is remembered. Uses are told apart
    by their Access object, since one request may offer a block several times; NO_ACCESS is a new
    use each time."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        # Not a plain dict: finding its first key steps over all that were deleted before it.
        self._seen = OrderedDict[bytes, Access | None]()
        """By hash, the least recently used first: its only use so far; None: there were more."""

    def __len__(self) -> int:
        """Hashes remembered."""
        return len(self._seen)

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        seen = self._seen
        for block_hash in reversed(hashes):  # tails are forgotten first
            if block_hash not in seen:
                seen[block_hash] = access
                continue
            seen.move_to_end(block_hash)
            if seen[block_hash] is not access or access is NO_ACCESS:
                seen[block_hash] = None
        while len(seen) > self._remember:
            seen.popitem(last=False)

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        self.note(hashes, access)
        for count, block_hash in enumerate(hashes):
            if self._seen.get(block_hash, access) is not None:
                return count
        return len(hashes)


class AllOfGate:
    """Lets in what every gate lets in. A gate sees only what those before it let in, so that, say,
    short prompts do not fill the memory of a later `second_use`."""

    def __init__(self, gates: Sequence[AdmissionGate]) -> None:
        self._gates = tuple(gates)

    def note(self, hashes: Sequence[bytes], access: Access) -> None:
        for gate in self._gates:
            gate.note(hashes, access)

    def admit(self, hashes: Sequence[bytes], access: Access) -> int:
        count = len(hashes)
        for gate in self._gates:
            count = gate.admit(hashes[:count], access)
            if count == 0:
                break
        return count


class AlwaysAdmission(Settings):
    """Everything."""

    kind: Literal["always"] = "always"

    def gate(self) -> AdmissionGate:
        return AlwaysGate()


class NeverAdmission(Settings):
    """Nothing: the tier serves what it has and takes no more."""

    kind: Literal["never"] = "never"

    def gate(self) -> AdmissionGate:
        return NeverGate()


class SecondUseAdmission(Settings):
    """Blocks that are used a second time; most are used once only and need no room."""

    kind: Literal["second_use"] = "second_use"
    remember: int = Field(default=100_000, ge=1, le=10_000_000)
    """Hashes that are remembered; 300 bytes each."""

    def gate(self) -> AdmissionGate:
        return SecondUseGate(self.remember)


class MinTokensAdmission(Settings):
    """Blocks of prompts of at least so many tokens; short ones are recomputed soon enough."""

    kind: Literal["min_tokens"] = "min_tokens"
    tokens: int = Field(default=256, ge=1)

    def gate(self) -> AdmissionGate:
        return MinTokensGate(self.tokens)


AdmissionRule = Annotated[
    AlwaysAdmission | NeverAdmission | SecondUseAdmission | MinTokensAdmission,
    Field(discriminator="kind"),
]


def _as_list(value: object) -> object:
    return value if isinstance(value, (list, tuple)) else (value,)


Admission = Annotated[
    tuple[AdmissionRule, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=16)
]
"""In YAML one mapping, or a list of mappings that must all agree."""

ADMIT_ALL: tuple[AdmissionRule, ...] = (AlwaysAdmission(),)


def all_of(admission: Sequence[AdmissionRule]) -> AdmissionGate:
    """One gate for a tier, with its own memory."""
    gates = [rule.gate() for rule in admission]
    return gates[0] if len(gates) == 1 else AllOfGate(gates)
