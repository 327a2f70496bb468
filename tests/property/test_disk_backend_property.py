"""The disk tier's files under any sequence of writes, reads, removals, restarts and damage: what is
read is what was written, the room is counted, what a restart finds is closed under prefixes."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.disk_directory import BLOCKS
from prefix_store.disk_files import DiskFiles
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, seal, write_header

ROOT = routing_root("m", "salt")
SHAPES = {2: RecordShape(2, 64), 3: RecordShape(3, 9000)}
"""Two namespaces with records of different sizes share the directory."""

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
"""Few different blocks, so that prompts extend and fork one another."""

CAPACITY_BYTES = 96 * 1024


def files_prompt(prompt: list[int], size: int) -> list[tuple[KeptBlock, bytes]]:
    """Blocks with their records; `num_bytes` is left open."""
    shape, parent = SHAPES[size], ROOT
    ids = as_token_ids([token for token in prompt for _ in range(size)])
    result = []
    for i, block_hash in enumerate(extend_chain(ROOT, ids, size)):
        raw = memoryview(bytearray(shape.num_bytes))
        tokens = ids[i * size : (i + 1) * size].tobytes()
        write_header(raw, block_hash, parent, tokens, shape)
        raw[shape.payload_at :] = random.Random(block_hash).randbytes(shape.payload_bytes)
        seal(raw, block_hash, shape)
        block = KeptBlock(
            block_hash, parent if i else None, size, 0, "" if i else "salt", tokens, len(raw)
        )
        result.append((block, bytes(raw)))
        parent = block_hash
    return result


class DiskFilesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="headstart-test-"))
        self.capacity_bytes = CAPACITY_BYTES
        self.expected: dict[BlockHash, tuple[KeptBlock, bytes]] = {}
        self.damaged: set[BlockHash] = set()
        self.files = DiskFiles(self.path, self.capacity_bytes)
        self.files.recover()

    def teardown(self) -> None:
        self.files.close()
        shutil.rmtree(self.path)

    def is_written(self, block: KeptBlock, raw: bytes) -> bool:
        size = self.files.size_of(len(raw))
        described = KeptBlock(block.block_hash, block.parent, block.num_tokens, size, block.salt)
        return self.files.write(OutgoingRecord(described, memoryview(raw)))

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 3]))
    def write(self, prompt: list[int], size: int) -> None:
        for block, raw in files_prompt(prompt, size):
            self.write_one(block, raw)

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 3]))
    def read(self, prompt: list[int], size: int) -> None:
        for block, raw in files_prompt(prompt, size):
            self.read_one(block, raw)

    def write_one(self, block: KeptBlock, raw: bytes) -> None:
        key = block.block_hash
        known, damaged = key in self.expected, key in self.damaged
        fits = self.files.used_bytes + self.files.size_of(len(raw)) <= self.capacity_bytes
        done = self.is_written(block, raw)
        if done:
            self.expected[key] = (block, raw)
        elif damaged:  # found out, and no room for it now
            self.expected.pop(key, None)
        assert damaged or done == (known or fits)

    def read_one(self, block: KeptBlock, raw: bytes) -> None:
        key = block.block_hash
        into = memoryview(bytearray(len(raw)))
        got = self.files.read(key, into)
        if got is None:
            assert key not in self.expected or key in self.damaged
            self.expected.pop(key, None)
            self.damaged.discard(key)
            return
        assert key in self.expected
        assert into == raw
        assert got == replace(block, num_bytes=self.files.size_of(len(raw)))
        assert got.token_ids == block.token_ids

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 3]))
    def remove_the_last(self, prompt: list[int], size: int) -> None:
        block, _ = files_prompt(prompt, size)[-1]
        self.files.remove([block.block_hash])
        self.expected.pop(block.block_hash, None)

    @precondition(lambda self: self.expected)
    @rule(
        which=st.integers(0, 99),
        where=st.floats(0, 1),
        how=st.sampled_from(["flip", "cut", "longer", "gone"]),
        then=st.sampled_from(["read", "write", "nothing"]),
    )
    def damage(self, which: int, where: float, how: str, then: str) -> None:
        key = sorted(self.expected)[which % len(self.expected)]
        block, written = self.expected[key]
        file = self.path / BLOCKS / key.hex()
        if key in self.damaged or not file.exists():  # a second flip could make it good again
            return
        self.damaged.add(key)
        raw = bytearray(file.read_bytes())
        at = int(where * (len(raw) - 1))
        if how == "flip":
            raw[at] ^= 16
        elif how == "cut":
            del raw[at:]
        elif how == "longer":
            raw += bytes(1 + at)
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(raw)
        if then == "read":
            self.read_one(block, written)
            assert key not in self.expected
        elif then == "write":
            self.write_one(block, written)

    @rule(name=st.sampled_from(["tmp-1", "x", "f" * 32, "link"]))
    def put_something_foreign(self, name: str) -> None:
        file = self.path / BLOCKS / name
        if name == "link":
            file.unlink(missing_ok=True)
            file.symlink_to("/etc/hostname")
        else:
            file.write_bytes(b"foreign")
        self.restart()

    @rule(blocks=st.integers(2, 24))
    def restart_with_another_quota(self, blocks: int) -> None:
        self.capacity_bytes = blocks * 4096
        self.restart()

    @rule()
    def restart(self) -> None:
        self.files.close()
        self.files = DiskFiles(self.path, self.capacity_bytes)
        recovered = self.files.recover()
        seen: set[BlockHash | None] = {None}
        for block in recovered:
            assert block.parent in seen
            seen.add(block.block_hash)
            known, raw = self.expected[block.block_hash]
            assert block.num_bytes == self.files.size_of(len(raw))
            assert (block.parent, block.salt, block.token_ids, block.record_bytes) == (
                known.parent, known.salt, known.token_ids, known.record_bytes,
            )  # fmt: skip
        whole = {key: each for key, each in self.expected.items() if key not in self.damaged}
        lost = {
            key
            for key, (block, _) in whole.items()
            if block.block_hash not in seen and (block.parent is None or block.parent in seen)
        }
        needed = min((self.files.size_of(len(whole[key][1])) for key in lost), default=None)
        if needed is not None:  # only for want of room; what went last may have been the larger
            largest = self.files.size_of(SHAPES[3].num_bytes)
            assert self.files.used_bytes + largest > self.capacity_bytes
        assert {file.name for file in (self.path / BLOCKS).iterdir()} == {
            block.block_hash.hex() for block in recovered
        }
        self.expected = {key: each for key, each in self.expected.items() if key in seen}
        self.damaged &= self.expected.keys()

    @invariant()
    def the_room_is_counted(self) -> None:
        assert len(self.files) == len(self.expected)
        assert self.files.used_bytes == sum(
            self.files.size_of(len(raw)) for _, raw in self.expected.values()
        )
        assert self.files.used_bytes <= self.capacity_bytes
        if not self.damaged:
            with os.scandir(self.path / BLOCKS) as listing:
                taken = sum(each.stat().st_blocks * 512 for each in listing)
            assert taken <= self.files.used_bytes


TestDiskFiles = DiskFilesMachine.TestCase
TestDiskFiles.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
