"""What a store's clients and the store say to each other over its Unix socket.

A frame is 4 bytes little-endian length + one msgpack message. The first exchange is Hello and
Welcome; the arena's descriptor comes with the Welcome. Messages marked "one way" have no answer,
every other message has exactly one, in order.
"""

from __future__ import annotations

import msgspec

from prefix_store.base import HASH_BYTES, BlockHash, StoreProtocolError
from prefix_store.events import BlocksLoaded

VERSION = 2
MAX_FRAME_BYTES = 4 * 1024**2

MAX_PINS = 2000
"""Owners in one answer: sessions may be many, and an answer has to fit into a frame."""

MAX_REASON_CHARS = 4096
"""Kept of what is wrong with a configuration: it goes out with every answer to GetStats."""


class Hello(msgspec.Struct, tag=True):
    """First message of a client."""

    version: int
    client: str
    """Who this is, for the stats: an engine's id or a tool's name."""


class Welcome(msgspec.Struct, tag=True):
    """Answer to Hello."""

    version: int
    store: str
    incarnation: int
    """Differs between two starts of the store: offsets of one mean nothing to the other."""
    arena_bytes: int
    lease_s: float
    verify: bool


class Serving(msgspec.Struct, tag=True):
    """This client is half of an engine's connector and uses the store from now on. One way."""


class Facts(msgspec.Struct, frozen=True):
    """What the gateway knows of a request; policies go by it. Texts are empty where nothing is
    known."""

    tenant: str = ""
    model: str = ""
    session: str = ""
    prefix: str = ""
    turn: int = 0
    num_tokens: int = 0


class Match(msgspec.Struct, tag=True):
    """How many blocks of this prefix are here? Those from `lease_from` on are leased."""

    hashes: bytes
    lease_from: int
    """Index of the first block that will be loaded."""
    request: str = ""
    """Names the request in later messages."""
    record_bytes: int = 0
    """Of each block; 0: only what is in memory is asked for."""
    block_tokens: int = 0
    facts: Facts = Facts()


class Matched(msgspec.Struct, tag=True):
    """Answer to Match."""

    num_blocks: int
    """Contiguous from the start, those that are on their way included."""
    lease: int
    """0: nothing was leased."""
    offsets: list[int]
    """Of the leased blocks' records."""
    from_disk: int = 0
    """That many of the leased blocks, behind those in memory, are still on their way from disk,"""
    from_redis: int = 0
    """and that many, behind them, from Redis. Ask with Progress."""
    pending: bool = False
    """Not known yet: ask again in a moment."""

    @property
    def arriving(self) -> int:
        """Leased blocks at the end of the run that are on their way."""
        return self.from_disk + self.from_redis


class Progress(msgspec.Struct, tag=True):
    """How many blocks of this lease have arrived?"""

    lease: int


class Progressed(msgspec.Struct, tag=True):
    """Answer to Progress."""

    arrived: int
    """Of those that were on their way."""
    done: bool
    """No more of them will come."""


class Computed(msgspec.Struct, tag=True):
    """What a step of the engine took, so that loading can be weighed against it. One way."""

    num_tokens: int
    attended: float
    """Positions that these tokens attended to: see policies.prefill_cost."""
    seconds: float


class Release(msgspec.Struct, tag=True):
    """A lease is not needed any more. One way."""

    lease: int
    loaded: BlocksLoaded | None = None
    """What the load delivered, to be published."""


class Reserve(msgspec.Struct, tag=True):
    """Room for these blocks, please; a run that hangs below `parent`."""

    parent: bytes
    """Hash of the block before the run, or the root."""
    is_root: bool
    hashes: bytes
    record_bytes: int
    request: str = ""


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Room for one record."""

    ticket: int
    """Names this reservation and no other: its offset may be given to somebody else later."""
    offset: int


class Reserved(msgspec.Struct, tag=True):
    """Answer to Reserve."""

    places: list[Place | None]
    """One for each block; None: it is here already, or there is no room."""
    expires_s: float
    """From now; a record that is not committed by then must not be written any more."""


class Commit(msgspec.Struct, tag=True):
    """The reserved records are complete; make them visible. One way."""

    tickets: list[int]
    salt: str = ""
    """The tenant's salt, for the events of a prompt's first block."""
    request: str = ""


class Cancel(msgspec.Struct, tag=True):
    """Reserved records that will not be written. One way."""

    tickets: list[int]


class Outcome(msgspec.Struct, tag=True):
    """How the answer to a request ended: see policies.access.Stop. One way."""

    request_id: str
    stop: str
    output_tokens: int


class Drop(msgspec.Struct, tag=True):
    """This block failed its check: take it out, with what hangs below it. One way."""

    block_hash: bytes


class Clear(msgspec.Struct, tag=True):
    """Take everything out that is not leased."""


class Cleared(msgspec.Struct, tag=True):
    """Answer to Clear."""

    num_blocks: int


class ReloadRefused(msgspec.Struct, tag=True):
    """Whoever watches the configuration for the store cannot use the newest one. One way."""

    reason: str


class GetPins(msgspec.Struct, tag=True):
    """Which blocks are pinned for an owner? Empty texts match any."""

    tenant: str = ""
    session: str = ""
    prefix: str = ""


class Pin(msgspec.Struct):
    """Pinned blocks of one owner in one tier."""

    tier: str
    tenant: str
    session: str
    prefix: str
    num_blocks: int
    num_bytes: int
    ends_in_s: float


class Pins(msgspec.Struct, tag=True):
    """Answer to GetPins."""

    pins: list[Pin]
    """The first MAX_PINS: of memory before those below, the largest first."""
    more: int = 0
    """Owners that were left out."""


class Unpin(msgspec.Struct, tag=True):
    """End the pins of an owner; empty texts match any. Answered with Cleared."""

    tenant: str = ""
    session: str = ""
    prefix: str = ""


class PolicyStats(msgspec.Struct, frozen=True):
    """The policies in force."""

    reloads: int = 0
    error: str = ""
    """Why the newest file was not taken; empty when it was."""
    needs_restart: list[str] = []
    """Keys of the newest file that take effect only when the store starts again."""
    refused: int = 0
    """Files that were not taken."""


class GetStats(msgspec.Struct, tag=True):
    """Figures, please."""


class TierStats(msgspec.Struct):
    """State and counters of one tier."""

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    blocks_stored: int = 0
    blocks_refused: int = 0
    """Not admitted, or no room."""
    bytes_written: int = 0
    bytes_read: int = 0
    faults: int = 0
    evictions: dict[str, int] = {}
    latency_ms: float = 0.0
    bandwidth_bytes_s: float = 0.0
    breaker: str = ""
    """closed, open or half_open; empty where there is none."""


class StoreStats(msgspec.Struct, tag=True):
    """Answer to GetStats: the state of the store and its counters since its start."""

    store: str
    incarnation: int
    uptime_s: float
    capacity_bytes: int
    used_bytes: int
    """Committed blocks, including those that were dropped while somebody still reads them."""
    reserved_bytes: int
    """Being written."""
    blocks: int
    leases: int
    leased_blocks: int
    connectors: list[str]
    """Connected halves of engines' connectors: engine-0/scheduler, engine-0/worker."""
    matches: int
    blocks_asked: int
    blocks_matched: int
    blocks_stored: int
    blocks_duplicate: int
    """Written by two engines at the same time; the second copy was dropped."""
    blocks_orphaned: int
    """Not taken since their parent was gone."""
    blocks_refused: int
    """Not taken since everything else was leased or being written."""
    evictions: dict[str, int]
    """By reason: capacity, corrupt, cleared."""
    leases_expired: int
    reservations_expired: int
    loads: int
    loads_failed: int
    tokens_loaded: int
    bytes_loaded: int
    tiers: list[TierStats] = []
    policies: PolicyStats = PolicyStats()


class Refused(msgspec.Struct, tag=True):
    """The store cannot talk to this client; it closes the connection."""

    reason: str


Request = (
    Hello
    | Serving
    | Match
    | Progress
    | Computed
    | Outcome
    | Release
    | Reserve
    | Commit
    | Cancel
    | Drop
    | Clear
    | ReloadRefused
    | GetPins
    | Unpin
    | GetStats
)
Answer = Welcome | Matched | Progressed | Reserved | Cleared | Pins | StoreStats | Refused

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """A message ready for the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def frame_length(header: bytes) -> int:
    """Length of the message behind a 4-byte header. Raises StoreProtocolError."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise StoreProtocolError(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} go")
    return length


def decode_request(body: bytes) -> Request:
    """Raises StoreProtocolError."""
    try:
        return _request_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise StoreProtocolError(f"unreadable request: {error}") from error


def decode_answer(body: bytes) -> Answer:
    """Raises StoreProtocolError."""
    try:
        return _answer_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise StoreProtocolError(f"unreadable answer: {error}") from error


def join_hashes(hashes: list[BlockHash]) -> bytes:
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Raises StoreProtocolError when the length is not a multiple of a hash."""
    if len(joined) % HASH_BYTES:
        raise StoreProtocolError(f"{len(joined)} bytes are not a list of {HASH_BYTES}-byte hashes")
    return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]
