"""The files of a disk tier: what is there, how much room it takes, and every access to it.

Thread-safe and blocking: the backend calls it from its threads. Two calls for one block must not
overlap (the backend sees to it); calls for different blocks may.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreError
from prefix_store.disk_counters import DiskCounters, FaultLog
from prefix_store.disk_direct import AlignedBuffers, can_write_direct
from prefix_store.disk_directory import DiskDirectory
from prefix_store.disk_file import (
    FRONT_BYTES,
    MAX_SALT_BYTES,
    TEMPORARY_PREFIX,
    encode_salt,
    file_bytes,
    file_name,
    header_of,
    read_file,
    write_file,
)
from prefix_store.disk_recovery import closed, scan, surplus

RETRIES = 4
"""So many files that could not be removed are tried again at each write."""

logger = logging.getLogger(__name__)


class DiskFiles:
    """`used_bytes` is at any moment at least what our files take, and at most `capacity_bytes`
    unless files cannot be removed; then nothing is written until it fits again."""

    def __init__(self, path: Path, capacity_bytes: int, direct: bool = False) -> None:
        self._path = path
        self.capacity_bytes = capacity_bytes
        self.counters = DiskCounters()
        self._faults = FaultLog()
        self._directory: DiskDirectory | None = None
        self._block_bytes = 4096
        self._direct = direct
        self._buffers: AlignedBuffers | None = None
        self._lock = threading.Lock()  # of what follows, and of the counters
        self._blocks: dict[BlockHash, KeptBlock] = {}
        self._stuck: dict[str, int] = {}
        """Files that could not be removed, with the room that they take."""
        self._used_bytes = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def size_of(self, record_bytes: int) -> int:
        """In whole blocks of the file system, and one more for its name and extents."""
        blocks = -(-(record_bytes + FRONT_BYTES) // self._block_bytes)
        return (blocks + 1) * self._block_bytes

    def recover(self) -> list[KeptBlock]:
        """Open the directory and find what is there; see `Backend.recover`."""
        self._directory = directory = DiskDirectory.open(self._path)
        self._block_bytes = directory.block_bytes
        if self._direct and can_write_direct(directory.blocks):
            self._buffers = AlignedBuffers()
        try:
            found = scan(directory.blocks, self.size_of)
        except OSError as error:
            raise StoreError(
                f"store.disk.path: {self._path} cannot be listed ({error.strerror})"
            ) from None
        blocks = closed(found.blocks)
        for block_hash in surplus(blocks, self.capacity_bytes):
            del blocks[block_hash]
        self._blocks = {key: each.block for key, each in blocks.items()}
        self._used_bytes = sum(block.num_bytes for block in self._blocks.values())
        discarded = dict(found.junk)
        for key, each in found.blocks.items():
            if key not in blocks:
                discarded[file_name(key)] = each.block.num_bytes
        self.counters.records_recovered = len(blocks)
        self.counters.files_discarded = len(discarded)
        for name, num_bytes in discarded.items():
            self._used_bytes += num_bytes
            self._release(name, num_bytes)
        self._warn_of_little_space(directory)
        return list(self._blocks.values())

    def write(self, record: OutgoingRecord) -> bool:
        """Whether the record is there afterwards."""
        if self._stuck:
            self._retry_stuck()
        block, data = record.block, record.data
        before = self._blocks.get(block.block_hash)
        if before is not None:
            if before == block and before.record_bytes == len(data) and self._is_there(before):
                return True
            self._discard(before)
        header = header_of(data, block)
        with self._lock:
            if (
                header is None
                or self._used_bytes + block.num_bytes > self.capacity_bytes
                or block.num_bytes != self.size_of(len(data))
                or len(encode_salt(block.salt)) > MAX_SALT_BYTES
                or file_name(block.block_hash) in self._stuck
            ):
                self.counters.writes_refused += 1
                return False
            self._used_bytes += block.num_bytes
        block = replace(block, token_ids=header.token_ids, record_bytes=len(data))
        if not self._write_whole(block, data):
            return False
        with self._lock:
            self._blocks[block.block_hash] = block
            self.counters.records_written += 1
            self.counters.bytes_written += len(data)
        return True

    def read(self, block_hash: BlockHash, into: memoryview) -> KeptBlock | None:
        """The block when `into` now holds its whole and intact record; otherwise it is gone."""
        block = self._blocks.get(block_hash)
        if block is None:
            return None
        counters = self.counters
        try:
            intact = len(into) == block.record_bytes and read_file(self._folder, block, into)
        except FileNotFoundError:
            intact = False
            with self._lock:
                counters.records_missing += 1
        except OSError as error:
            intact = False
            self._note("read", error)
        else:
            with self._lock:
                counters.records_read += intact
                counters.records_damaged += not intact
                counters.bytes_read += len(into) if intact else 0
        if not intact:
            self._discard(block)
            return None
        return block

    def count(self, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes`, from the first on, are there."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, hashes))

    def remove(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                self._discard(block)
                with self._lock:
                    self.counters.records_removed += 1

    def close(self) -> None:
        """Let go of the directory; nothing may be under way."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    @property
    def _folder(self) -> int:
        if self._directory is None:
            raise StoreError("the disk tier is not open")
        return self._directory.blocks

    def _write_whole(self, block: KeptBlock, data: memoryview) -> bool:
        """Write beside and rename, so that a file with a record's name is whole. The room is
        taken already, and given back when it is not needed."""
        folder, name = self._folder, file_name(block.block_hash)
        temporary = f"{TEMPORARY_PREFIX}{next(self._numbers)}"
        try:
            write_file(folder, temporary, block, data, self._buffers)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            self._note("write", error)
            self._release(temporary, block.num_bytes)
            return False
        return True

    def _is_there(self, block: KeptBlock) -> bool:
        name = file_name(block.block_hash)
        try:
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return status.st_size == file_bytes(block)

    def _discard(self, block: KeptBlock) -> None:
        with self._lock:
            if self._blocks.pop(block.block_hash, None) is None:
                return
        self._release(file_name(block.block_hash), block.num_bytes)

    def _release(self, name: str, num_bytes: int) -> None:
        """Remove a file. Its room stays counted until it is gone."""
        gone = self._is_unlinked(name)
        with self._lock:
            if gone:
                self._used_bytes -= num_bytes
            else:
                self._stuck[name] = num_bytes

    def _retry_stuck(self) -> None:
        with self._lock:
            again = list(itertools.islice(self._stuck, RETRIES))
        for name in again:
            gone = self._is_unlinked(name)
            with self._lock:  # another thread may have been faster
                num_bytes = self._stuck.pop(name, 0)
                if gone:
                    self._used_bytes -= num_bytes
                elif num_bytes:
                    self._stuck[name] = num_bytes  # behind the others

    def _is_unlinked(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            if not self._exists(name):  # a read-only file system refuses that too
                return True
            self._note("remove", error)
            return False
        return True

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _note(self, tried: str, error: OSError) -> None:
        with self._lock:
            self.counters.faults += 1
        self._faults.note(tried, error)

    def _warn_of_little_space(self, directory: DiskDirectory) -> None:
        room = directory.free_bytes + self._used_bytes
        if room < self.capacity_bytes:
            logger.warning(
                "store.disk.capacity is %d bytes, but the file system of %s has room for %d",
                self.capacity_bytes, self._path, room,
            )  # fmt: skip
