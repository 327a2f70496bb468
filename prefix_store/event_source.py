"""One engine's or store's event stream, translated into residency.

Publishers name blocks by hashes of their own (seeded, truncated, of another kind). Here the chain
is computed again from the token ids, so that the index speaks one language whoever published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prefix_store.base import BlockHash
from prefix_store.block_names import BlockNames, short_name
from prefix_store.event_chain import chain_of
from prefix_store.events import (
    MEDIUM_DEVICE,
    MEDIUM_MEMORY,
    MEDIUM_REDIS,
    MEDIUM_STORAGE,
    REPORT_SESSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from prefix_store.hashing import digest, routing_root
from prefix_store.residency import Holder, Medium, Residency

logger = logging.getLogger(__name__)

_MEDIA = {
    MEDIUM_DEVICE: Medium.DEVICE,
    MEDIUM_MEMORY: Medium.MEMORY,
    MEDIUM_STORAGE: Medium.DISK,
    MEDIUM_REDIS: Medium.REDIS,
}


RootOf = Callable[[str, str | None], BlockHash | None]
"""Salt and name of an adapter, as events say them -> root of the chain; None: not known here."""

_FEW_FORGOTTEN = 1024


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What one stream brought since the start, and what it holds now."""

    blocks: int
    """Distinct blocks that the source has now, in all its media."""
    orphans: int
    """Blocks stored below a parent that was never announced here."""
    foreign_groups: int
    """Events of KV cache groups other than the first (sliding windows and the like), ignored."""
    foreign_media: int
    """Events of media that are not known here (an engine's own offloading), ignored."""
    refused: int
    """Blocks of another size than the gateway's, which cannot be matched with prompts."""
    refused_block_size: int | None
    """The size they had, in tokens."""
    malformed: int
    """Events that contradict themselves."""
    overflow: int
    """Blocks left out since the source announced more than `max_blocks`."""
    unknown_adapters: int
    """Blocks of adapters that are not known here; no prompt is matched with them."""
    collisions: int
    """Blocks that got the name of another one: the older one counts no more."""
    overcounts: int
    """Times more blocks were counted than the source has room for."""


class EventSource:
    """The blocks of one source, by its own names. Bounded: an entry leaves with its block."""

    def __init__(
        self,
        source: str,
        residency: Residency,
        *,
        model: str,
        block_size: int,
        medium: Medium = Medium.DEVICE,
        max_blocks: int = 500_000,
        root_of: RootOf | None = None,
    ) -> None:
        """`medium`: what an event without one means. `block_size`: tokens per block of the
        gateway's chains. `root_of`: unset, adapters are known by their names."""
        self._source = source
        self._residency = residency
        self._model = model
        self._root_of = root_of or self._root_by_name
        self._block_size = block_size
        self._default_medium = medium
        self._max_blocks = max_blocks
        self._names: dict[Medium, BlockNames] = {}
        self._room: int | None = None
        self._counts_copies = True
        self._is_closed = False
        self._lost = False
        """Since the last `clear` something was left out that the source has."""
        self._orphans = 0
        self._foreign_groups = 0
        self._foreign_media = 0
        self._refused = 0
        self._refused_block_size: int | None = None
        self._malformed = 0
        self._overflow = 0
        self._unknown_adapters = 0
        self._collisions = 0
        self._overcounts = 0
        self._learned = 0

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch. Never raises on what a publisher sends: oddities are counted."""
        if self._is_closed:
            return
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self.clear()
        self._check_room()

    def has_room(self, num_blocks: int) -> None:
        """The source says how many blocks fit into its own medium.

        Other clients may ask an engine to announce again what it reuses, and nothing tells such
        an announcement from that of a second copy. Counted as a copy, the block is believed to be
        there for ever after. More than fits proves that this happens: what is known is to be built
        anew (see `overcounts`), and from then on a repetition from the start of a prompt is no
        copy. A real copy may then be taken for gone too early, which costs a hit at most."""
        self._room = num_blocks

    def clear(self) -> None:
        """The source is empty: a new incarnation, or it said so."""
        for medium, names in self._names.items():
            self._residency.clear(Holder(self._source, medium), names.hashes())
        self._names.clear()
        self._lost = False

    def close(self) -> None:
        """The source is gone: it holds nothing, and whatever it still says is ignored."""
        self.clear()
        self._is_closed = True

    @property
    def orphans(self) -> int:
        return self._orphans

    @property
    def overcounts(self) -> int:
        return self._overcounts

    @property
    def learned(self) -> int:
        """Blocks that were known only by reports of their reuse, since the start."""
        return self._learned

    @property
    def is_whole(self) -> bool:
        """All that the source said it has is in the index."""
        if self._lost or not self._residency.evicted_resident:
            return not self._lost
        return not any(self._num_forgotten(medium, names) for medium, names in self._names.items())

    def stats(self) -> SourceStats:
        return SourceStats(
            blocks=sum(names.num_blocks for names in self._names.values()),
            orphans=self._orphans,
            foreign_groups=self._foreign_groups,
            foreign_media=self._foreign_media,
            refused=self._refused,
            refused_block_size=self._refused_block_size,
            malformed=self._malformed,
            overflow=self._overflow,
            unknown_adapters=self._unknown_adapters,
            collisions=self._collisions,
            overcounts=self._overcounts,
        )

    def _check_room(self) -> None:
        names = self._names.get(self._default_medium)
        if self._room is None or names is None or names.num_copies <= self._room:
            return
        if self._counts_copies:
            self._counts_copies = False
            self._overcounts += 1
            logger.warning(
                "%s announced %d blocks and has room for %d: a client that asks it for full cache "
                "reports makes blocks look doubled; its events are read anew",
                self._source, names.num_copies, self._room,
            )  # fmt: skip

    def _medium(self, name: str | None) -> Medium | None:
        """None, counted, for a medium that nobody here knows: it is on no replica's path."""
        medium = self._default_medium if not name else _MEDIA.get(name)
        self._foreign_media += medium is None
        return medium

    def _stored(self, event: BlockStored) -> None:
        count = len(event.block_hashes)
        medium = self._medium(event.medium)
        if medium is None or not self._is_usable(event, count):
            return
        parent = self._parent(event)
        if parent is None and event.parent_block_hash is not None:
            self._orphans += count
            return
        try:
            hashes = chain_of(event, parent, self._block_size, lambda salt: self._root(salt, event))
        except (OverflowError, TypeError, ValueError):
            self._malformed += 1
            self._lost = True
            return
        names = self._names.setdefault(medium, BlockNames())
        room = self._max_blocks - sum(map(len, self._names.values()))
        if count > room:
            hashes = self._within(room, names, event, hashes)
        self._take(Holder(self._source, medium), names, event, parent, hashes)
        forgotten = self._num_forgotten(medium, names)
        if forgotten > _FEW_FORGOTTEN + len(names) // 8:
            self._drop_forgotten(Holder(self._source, medium), names)

    def _within(
        self, room: int, names: BlockNames, event: BlockStored, hashes: list[BlockHash]
    ) -> list[BlockHash]:
        """The first ones of a run: those that are here, and `room` new ones."""
        for position, external in enumerate(event.block_hashes):
            if names.get(short_name(external)) is None:
                room -= 1
                if room < 0:
                    self._overflow += len(hashes) - position
                    self._lost = True
                    return hashes[:position]
        return hashes

    def _take(
        self,
        holder: Holder,
        names: BlockNames,
        event: BlockStored,
        parent: BlockHash | None,
        hashes: list[BlockHash],
    ) -> None:
        # Blocks that were reused, not copied: they are told again because a gateway asked for it.
        is_ours = event.session_id == REPORT_SESSION
        is_report = event.parent_block_hash is None and (is_ours or not self._counts_copies)
        new: list[tuple[int, int, bool]] = []
        for position, external in enumerate(event.block_hashes[: len(hashes)]):
            name, block_hash = short_name(external), hashes[position]
            known = names.get(name)
            if known == block_hash:
                if not is_report:
                    names.add_copy(name)
                continue
            if known is not None:
                self._collisions += 1
                self._release(holder, names.remove(name))
            new.append((position, name, self._residency.has(holder, block_hash)))
        kept = self._residency.store(holder, parent, hashes) or hashes
        for position, name, is_held in new:
            names.add(name, kept[position], is_held=is_held)
        if is_report and is_ours:
            self._learned += len(new)

    def _is_usable(self, event: BlockStored, count: int) -> bool:
        if event.group_idx:
            self._foreign_groups += 1
            return False
        if event.block_size != self._block_size:
            self._refused += count
            self._refused_block_size = event.block_size
            self._lost = True
            return False
        keys = event.extra_keys
        if len(event.token_ids) != count * self._block_size or (keys and len(keys) != count):
            self._malformed += 1
            self._lost = True
            return False
        return count > 0

    def _removed(self, event: BlockRemoved) -> None:
        if event.group_idx:
            self._foreign_groups += 1
            return
        medium = self._medium(event.medium)
        names = self._names.get(medium) if medium is not None else None
        if medium is None or names is None:
            return
        holder = Holder(self._source, medium)
        for external in event.block_hashes:
            self._release(holder, names.remove_copy(short_name(external)))

    def _release(self, holder: Holder, block_hash: BlockHash | None) -> None:
        if block_hash is not None:
            self._residency.remove(holder, block_hash)

    def _num_forgotten(self, medium: Medium, names: BlockNames) -> int:
        """Blocks that the source has and the index had no room for."""
        return names.num_blocks - self._residency.num_resident(Holder(self._source, medium))

    def _drop_forgotten(self, holder: Holder, names: BlockNames) -> None:
        """They cannot be matched any more, so their names are dead weight."""
        dead = [name for name, known in names.names() if not self._residency.has(holder, known)]
        for name in dead:
            names.remove(name)
        self._lost = True

    def _parent(self, event: BlockStored) -> BlockHash | None:
        """Our hash of the event's parent, whichever medium it is in."""
        if event.parent_block_hash is None:
            return None
        name = short_name(event.parent_block_hash)
        for names in self._names.values():
            block_hash = names.get(name)
            if block_hash is not None:
                return block_hash
        return None

    def _root(self, salt: str, event: BlockStored) -> BlockHash:
        root = self._root_of(salt, event.lora_name)
        if root is None:
            # The chain is kept, so that what follows it has a parent; no prompt begins like it.
            self._unknown_adapters += len(event.block_hashes)
            return digest("headstart-unknown-adapter", self._source, event.lora_name or "", salt)
        return root

    def _root_by_name(self, salt: str, adapter: str | None) -> BlockHash:
        return routing_root(self._model, salt, adapter or "")
