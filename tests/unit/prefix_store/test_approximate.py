"""What is assumed of replicas that announce nothing."""

from __future__ import annotations

from prefix_store.approximate import SentPrefixes
from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.residency import Holder, Match, Medium, Residency

MIB = 1024**2
DEVICE = Holder("engine-0", Medium.DEVICE)


def prompt(*texts: str) -> list[BlockHash]:
    """A chain: equal beginnings give equal hashes."""
    return [digest("/".join(texts[: i + 1])) for i in range(len(texts))]


class Rig:
    """One replica with room for some blocks, which are forgotten after ten seconds."""

    def __init__(self, max_blocks: int = 100, capacity_bytes: int = MIB) -> None:
        self.residency = Residency(capacity_bytes)
        self.sent = SentPrefixes(self.residency, DEVICE, expiry_s=10.0, max_blocks=max_blocks)

    def run(self, *texts: str) -> int:
        return self.residency.match(prompt(*texts)).by_holder.get(DEVICE, 0)


def test_answered_prompts_count_as_held_by_the_replica() -> None:
    """Under its own name: whoever asks needs not know how it became known."""
    rig = Rig()
    rig.sent.add(prompt(*"abc"), now=0.0)
    assert rig.residency.match(prompt(*"abcd")) == Match(3, {DEVICE: 3})
    assert len(rig.sent) == 3


def test_blocks_expire_a_while_after_their_last_use() -> None:
    """A prefix that is asked for again and again stays, what only followed it once goes."""
    rig = Rig()
    rig.sent.add(prompt(*"abc"), now=0.0)
    rig.sent.add(prompt(*"ab"), now=6.0)
    rig.sent.expire(9.9)
    assert rig.run(*"abc") == 3
    rig.sent.expire(10.0)
    assert rig.run(*"abc") == 2
    rig.sent.expire(16.0)
    assert rig.run(*"abc") == 0
    assert len(rig.sent) == 0


def test_what_does_not_fit_goes_from_the_tails_of_the_oldest() -> None:
    """As in the engine: a parent is never forgotten before its children."""
    rig = Rig(max_blocks=5)
    rig.sent.add(prompt("x", "y", "z"), now=0.0)
    rig.sent.add(prompt(*"abc"), now=1.0)
    assert rig.run("x", "y", "z") == 2
    assert rig.run(*"abc") == 3
    rig.sent.add(prompt("x", "q"), now=2.0)
    assert rig.run("x", "y", "z") == 1
    assert rig.run("x", "q") == 2
    assert rig.run(*"abc") == 3
    assert len(rig.sent) == 5


def test_prompt_larger_than_the_replica_leaves_its_beginning() -> None:
    """The rest cannot be there."""
    rig = Rig(max_blocks=2)
    rig.sent.add(prompt(*"abcd"), now=0.0)
    assert rig.run(*"abcd") == 2


def test_restart_leaves_nothing_and_frees_the_bit() -> None:
    """Replicas that come and go never make the masks wider."""
    rig = Rig()
    rig.sent.add(prompt(*"abc"), now=0.0)
    rig.sent.clear()
    assert rig.run(*"abc") == 0
    assert rig.residency.stats().resident_blocks == {}
    rig.sent.add(prompt(*"a"), now=0.0)
    assert rig.run(*"abc") == 1


def test_what_is_assumed_and_what_is_known_do_not_touch_each_other() -> None:
    """While a stream is cut both count; what was assumed goes without taking what was announced."""
    rig = Rig()
    rig.residency.store(DEVICE, None, prompt(*"ab"))
    rig.sent.add(prompt(*"abcd"), now=0.0)
    assert rig.run(*"abcd") == 4
    rig.sent.clear()
    assert rig.run(*"abcd") == 2
    rig.sent.add(prompt(*"a"), now=0.0)
    assert rig.run(*"abcd") == 2
    rig.residency.clear(DEVICE)
    assert rig.run(*"abcd") == 1


def test_index_that_forgot_them_is_no_trouble() -> None:
    """They expire like others, and come back with their next use."""
    rig = Rig(max_blocks=20_000)
    rig.sent.add(prompt(*"abc"), now=0.0)
    for number in range(8_000):
        rig.residency.see(prompt(str(number)))
    assert rig.run(*"abc") == 0
    rig.sent.add(prompt(*"ab"), now=5.0)
    assert rig.run(*"abc") == 2
    rig.sent.expire(20.0)
    assert rig.run(*"abc") == 0
