"""An imitated engine: what a connector says to a store, and blocks whose bytes can be checked."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from prefix_store import protocol
from prefix_store.base import BlockHash
from prefix_store.client import StoreClient
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, is_block, is_intact, payload, seal, write_header

BLOCK = 8
SHAPE = RecordShape(BLOCK, 64 * 1024 - 128)
ROOT = routing_root("m", "s")


class Prompt:
    """A prompt of whole blocks, with KV bytes that are made from its seed."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.tokens = as_token_ids([seed * 1000 + i for i in range(num_blocks * BLOCK)])
        self.hashes = extend_chain(ROOT, self.tokens, BLOCK)
        random = np.random.default_rng(seed)
        self.payloads = [random.bytes(SHAPE.payload_bytes) for _ in range(num_blocks)]

    def block_tokens(self, block: int) -> bytes:
        return self.tokens[block * BLOCK : (block + 1) * BLOCK].tobytes()


class Engine:
    """What a connector does with a store."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self._served = 0

    def save(self, prompt: Prompt, request: str = "") -> int:
        """Blocks that were written."""
        reserved = self.client.reserve(ROOT, True, prompt.hashes, SHAPE.num_bytes, request)
        tickets = []
        for i, place in enumerate(reserved.places):
            if place is None:
                continue
            view = self.client.arena.view[place.offset : place.offset + SHAPE.num_bytes]
            parent = prompt.hashes[i - 1] if i else ROOT
            write_header(view, prompt.hashes[i], parent, prompt.block_tokens(i), SHAPE)
            payload(view, SHAPE)[:] = prompt.payloads[i]
            seal(view, prompt.hashes[i], SHAPE)
            tickets.append(place.ticket)
        self.client.commit(tickets, "salt", request)
        return len(tickets)

    def match(
        self,
        hashes: list[BlockHash],
        lease_from: int = 0,
        request: str = "r",
        **facts: str | int,
    ) -> protocol.Matched:
        return self.client.match(
            hashes,
            lease_from,
            request=request,
            record_bytes=SHAPE.num_bytes,
            block_tokens=BLOCK,
            facts=msgspec.convert(facts, protocol.Facts),
        )

    def serve(self, prompt: Prompt, **facts: str | int) -> int:
        """A request from its look-up to its saved blocks; how many it had not to compute."""
        self._served += 1
        request = f"request-{self._served}"
        matched = self.match(prompt.hashes, request=request, **facts)
        num_blocks = matched.num_blocks
        if matched.arriving:
            num_blocks += self.arrived(matched.lease) - matched.arriving
        self.client.release(matched.lease)
        self.save(prompt, request)
        return num_blocks

    def resident(self, prompt: Prompt) -> int:
        """Blocks of a prompt that memory has; asking counts as a use."""
        return self.client.match(prompt.hashes, len(prompt.hashes)).num_blocks

    def load(self, prompt: Prompt, lease_from: int = 0) -> int:
        """Blocks that came, each checked against what was saved."""
        matched = self.match(prompt.hashes, lease_from)
        in_memory = len(matched.offsets) - matched.arriving
        arrived = 0
        if matched.arriving:
            arrived = self.arrived(matched.lease)
        for i, offset in enumerate(matched.offsets[: in_memory + arrived], lease_from):
            record = self.client.arena.view[offset : offset + SHAPE.num_bytes]
            assert is_block(record, prompt.hashes[i], prompt.block_tokens(i), SHAPE)
            assert is_intact(record, prompt.hashes[i], SHAPE)
            assert payload(record, SHAPE) == prompt.payloads[i]
        self.client.release(matched.lease)
        return in_memory + arrived

    def arrived(self, lease: int) -> int:
        for _ in range(2000):
            progress = self.client.progress(lease)
            if progress.done:
                return progress.arrived
            time.sleep(0.002)
        pytest.fail("the load never ended")

    def tier(self, name: str) -> protocol.TierStats:
        return next(tier for tier in self.client.stats().tiers if tier.name == name)

    def await_stats(self, condition: Callable[[protocol.StoreStats], bool]) -> None:
        for _ in range(500):
            if condition(self.client.stats()):
                return
            time.sleep(0.01)
        pytest.fail(str(self.client.stats()))


def prompts(count: int) -> list[Prompt]:
    """Eight blocks each: half a MiB."""
    return [Prompt(seed, 8) for seed in range(1, count + 1)]
