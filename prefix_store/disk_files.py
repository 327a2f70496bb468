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
from pathlib import Path

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreError
from prefix_store.disk_counters import DiskCounters, FaultLog
from prefix_store.disk_directory import DiskDirectory
from prefix_store.disk_file import (
    FOOTER_BYTES,
    MAX_SALT_BYTES,
    TEMPORARY_PREFIX,
    BlockFile,
    encode_salt,
    is_record_of,
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

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self._path = path
        self.capacity_bytes = capacity_bytes
        self.counters = DiskCounters()
        self._faults = FaultLog()
        self._directory: DiskDirectory | None = None
        self._block_bytes = 4096
        self._lock = threading.Lock()  # of what follows, and of the counters
        self._files: dict[BlockHash, BlockFile] = {}
        self._stuck: dict[str, int] = {}
        """Files that could not be removed, with the room that they take."""
        self._used_bytes = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def size_of(self, record_bytes: int) -> int:
        """In whole blocks of the file system, and one more for its name and extents."""
        blocks = -(-(record_bytes + MAX_SALT_BYTES + FOOTER_BYTES) // self._block_bytes)
        return (blocks + 1) * self._block_bytes

    def recover(self) -> list[KeptBlock]:
        """Open the directory and find what is there; see `Backend.recover`."""
        self._directory = directory = DiskDirectory.open(self._path)
        self._block_bytes = directory.block_bytes
        try:
            found = scan(directory.blocks, self.size_of)
        except OSError as error:
            raise StoreError(
                f"store.disk.path: {self._path} cannot be listed ({error.strerror})"
            ) from None
        files = closed(found.files)
        for block_hash in surplus(files, self.capacity_bytes):
            del files[block_hash]
        lost = [each.file for key, each in found.files.items() if key not in files]
        self._files = {key: each.file for key, each in files.items()}
        self._used_bytes = sum(file.block.num_bytes for file in self._files.values())
        self.counters.records_recovered = len(files)
        self.counters.files_discarded = len(found.junk) + len(lost)
        for name, num_bytes in (*found.junk.items(), *((f.name, f.block.num_bytes) for f in lost)):
            self._used_bytes += num_bytes
            self._release(name, num_bytes)
        self._warn_of_little_space(directory)
        return [file.block for file in self._files.values()]

    def write(self, record: OutgoingRecord) -> bool:
        """Whether the record is there afterwards."""
        if self._stuck:
            self._retry_stuck()
        block, data = record.block, record.data
        file = BlockFile(block, len(data))
        before = self._files.get(block.block_hash)
        if before is not None:
            if before == file and self._is_there(file):
                return True
            self._discard(before)
        num_bytes = self.size_of(len(data))
        with self._lock:
            if (
                self._used_bytes + num_bytes > self.capacity_bytes
                or len(encode_salt(block.salt)) > MAX_SALT_BYTES
                or (block.salt and block.parent is not None)
                or block.num_bytes != num_bytes
                or is_record_of(data, block) is None
                or file.name in self._stuck
            ):
                self.counters.writes_refused += 1
                return False
            self._used_bytes += num_bytes
        if not self._write_whole(file, data):
            return False
        with self._lock:
            self._files[block.block_hash] = file
            self.counters.records_written += 1
            self.counters.bytes_written += len(data)
        return True

    def read(self, block_hash: BlockHash, into: memoryview) -> KeptBlock | None:
        """The block when `into` now holds its whole and intact record; otherwise it is gone."""
        file = self._files.get(block_hash)
        if file is None:
            return None
        counters = self.counters
        try:
            intact = len(into) == file.record_bytes and read_file(self._blocks, file, into)
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
            self._discard(file)
            return None
        return file.block

    def count(self, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes`, from the first on, are there."""
        return sum(1 for _ in itertools.takewhile(self._files.__contains__, hashes))

    def remove(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            file = self._files.get(block_hash)
            if file is not None:
                self._discard(file)
                with self._lock:
                    self.counters.records_removed += 1

    def close(self) -> None:
        """Let go of the directory; nothing may be under way."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    @property
    def _blocks(self) -> int:
        if self._directory is None:
            raise StoreError("the disk tier is not open")
        return self._directory.blocks

    def _write_whole(self, file: BlockFile, data: memoryview) -> bool:
        """Write beside and rename, so that a file with a record's name is whole. The room is
        taken already, and given back when it is not needed."""
        temporary = f"{TEMPORARY_PREFIX}{next(self._numbers)}"
        try:
            write_file(self._blocks, temporary, file, data)
            os.rename(temporary, file.name, src_dir_fd=self._blocks, dst_dir_fd=self._blocks)
        except OSError as error:
            self._note("write", error)
            self._release(temporary, file.block.num_bytes)
            return False
        return True

    def _is_there(self, file: BlockFile) -> bool:
        try:
            status = os.stat(file.name, dir_fd=self._blocks, follow_symlinks=False)
        except OSError:
            return False
        return status.st_size == file.num_bytes

    def _discard(self, file: BlockFile) -> None:
        with self._lock:
            if self._files.pop(file.block.block_hash, None) is None:
                return
        self._release(file.name, file.block.num_bytes)

    def _release(self, name: str, num_bytes: int) -> None:
        """Remove a file. Its room stays counted until it is gone."""
        try:
            os.unlink(name, dir_fd=self._blocks)
        except FileNotFoundError:
            gone = True
        except OSError as error:
            gone = False
            self._note("remove", error)
        else:
            gone = True
        with self._lock:
            if gone:
                self._stuck.pop(name, None)
                self._used_bytes -= num_bytes
            else:
                self._stuck[name] = num_bytes

    def _retry_stuck(self) -> None:
        with self._lock:
            again = list(itertools.islice(self._stuck.items(), RETRIES))
        for name, num_bytes in again:
            try:
                os.unlink(name, dir_fd=self._blocks)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            with self._lock:
                if self._stuck.pop(name, None) is not None:  # another thread may have been faster
                    self._used_bytes -= num_bytes

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
