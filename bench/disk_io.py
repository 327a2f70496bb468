"""How records come fastest from and to this machine's disk: plain or O_DIRECT, and what the disk
tier makes of it.

Raw: files of one size, several threads, whole files; "cold" after POSIX_FADV_DONTNEED, "warm" from
the page cache. O_DIRECT needs aligned memory, which records in the arena are not, so its figure
has the copy in it that brings a record to its place. Tier: DiskBackend with its checks, in runs of
16 records. Restart: a directory of many small records, cold and warm. Seed: 20261130.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import machine, print_table, write_json
from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.disk_backend import DiskBackend
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, seal, write_header

SEED = 20261130
MIB = 1024**2
SIZES = (256 * 1024, MIB, 4 * MIB)
THREADS = (1, 4)
RUN = 16
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Figure:
    """MB a second of one way, median of the rounds."""

    what: str
    record_bytes: int
    threads: int
    mb_s: float


@dataclass(frozen=True, slots=True)
class Restart:
    num_files: int
    cold_s: float
    warm_s: float


class RawFiles:
    """`count` files of `size` bytes, and the ways to read and write them."""

    def __init__(self, folder: Path, size: int, count: int, threads: int) -> None:
        self._paths = [folder / str(i) for i in range(count)]
        self._size, self._threads = size, threads
        self._aligned = [mmap.mmap(-1, size) for _ in range(threads)]
        for buffer in self._aligned:
            buffer.write(random.Random(SEED).randbytes(size))
        self._places = [bytearray(size) for _ in range(threads)]

    def mb_s(self, way: Callable[[Path, int], None]) -> float:
        def share(first: int) -> None:
            for path in self._paths[first :: self._threads]:
                way(path, first)

        start = time.perf_counter()
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(share, range(self._threads)))
        return self._size * len(self._paths) / (time.perf_counter() - start) / 1e6

    def write_plain(self, path: Path, thread: int) -> None:
        self._write(path, thread, 0)

    def write_and_drop(self, path: Path, thread: int) -> None:
        self._write(path, thread, 0, sync=True)

    def write_direct(self, path: Path, thread: int) -> None:
        self._places[thread][:] = memoryview(self._aligned[thread])
        self._write(path, thread, os.O_DIRECT)

    def read_plain(self, path: Path, thread: int) -> None:
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [self._places[thread]], 0)
        os.close(fd)

    def read_direct(self, path: Path, thread: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [self._aligned[thread]], 0)
        os.close(fd)
        self._places[thread][:] = memoryview(self._aligned[thread])

    def drop(self) -> None:
        for path in self._paths:
            drop_from_cache(path)

    def clean(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        os.sync()

    def _write(self, path: Path, thread: int, flags: int, *, sync: bool = False) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        os.pwritev(fd, [self._aligned[thread]], 0)
        if sync:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def raw_round(folder: Path, size: int, count: int, threads: int) -> list[Figure]:
    files = RawFiles(folder, size, count, threads)
    found = []
    for what, write in (
        ("write plain", files.write_plain),
        ("write, sync, drop", files.write_and_drop),
        ("write direct", files.write_direct),
    ):
        files.clean()
        found.append(Figure(what, size, threads, files.mb_s(write)))
    for what, read, cold in (
        ("read cold, plain", files.read_plain, True),
        ("read warm, plain", files.read_plain, False),
        ("read direct", files.read_direct, True),
    ):
        if cold:
            files.drop()
        found.append(Figure(what, size, threads, files.mb_s(read)))
    files.clean()
    return found


def records_of(backend: DiskBackend, count: int, payload_bytes: int) -> list[OutgoingRecord]:
    """One prompt's records, all with the same payload."""
    root = parent = routing_root("bench", "salt")
    shape = RecordShape(BLOCK_SIZE, payload_bytes)
    ids = as_token_ids(range(count * BLOCK_SIZE))
    body = random.Random(SEED).randbytes(payload_bytes)
    records = []
    for i, block_hash in enumerate(extend_chain(root, ids, BLOCK_SIZE)):
        raw = memoryview(bytearray(shape.num_bytes))
        write_header(raw, block_hash, parent, ids[i * 16 : i * 16 + 16].tobytes(), shape)
        raw[shape.payload_at :] = body
        seal(raw, block_hash, shape)
        above, salt = (parent, "") if i else (None, "salt")
        size = backend.size_of(len(raw))
        records.append(OutgoingRecord(KeptBlock(block_hash, above, BLOCK_SIZE, size, salt), raw))
        parent = block_hash
    return records


async def tier_round(folder: Path, size: int, count: int, *, direct: bool) -> list[Figure]:
    backend = DiskBackend(folder, 2**35, direct=direct)
    await backend.recover()
    records = records_of(backend, count, size)
    runs = [records[at : at + RUN] for at in range(0, count, RUN)]
    buffers = [memoryview(bytearray(len(records[0].data))) for _ in range(RUN)]
    total = sum(len(record.data) for record in records) / 1e6
    mode = "direct" if direct else "plain"

    async def read(what: str) -> Figure:
        start = time.perf_counter()
        for run in runs:
            got = await backend.read([each.block.block_hash for each in run], buffers[: len(run)])
            assert all(got)
        return Figure(f"tier: {what} ({mode})", size, 4, total / (time.perf_counter() - start))

    start = time.perf_counter()
    for run in runs:
        assert all(await backend.write(run))
    found = [Figure(f"tier: write ({mode})", size, 1, total / (time.perf_counter() - start))]
    found.append(await read("read what was just written"))
    for record in records:
        drop_from_cache(folder / "blocks" / record.block.block_hash.hex())
    found.append(await read("read cold"))
    await backend.close()
    shutil.rmtree(folder)
    os.sync()
    return found


async def restart(folder: Path, num_files: int) -> Restart:
    """Records of 4 KiB: the number of files is what counts, as no payload is read."""
    backend = DiskBackend(folder, 2**35)
    await backend.recover()
    assert all(await backend.write(records_of(backend, num_files, 3 * 1024)))
    await backend.close()
    os.sync()
    for file in (folder / "blocks").iterdir():
        drop_from_cache(file)
    seconds = []
    for _ in range(2):
        again = DiskBackend(folder, 2**35)
        start = time.perf_counter()
        assert len(await again.recover()) == num_files
        seconds.append(time.perf_counter() - start)
        await again.close()
    shutil.rmtree(folder)
    return Restart(num_files, seconds[0], seconds[1])


def medians(rounds: list[list[Figure]]) -> list[Figure]:
    return [
        sorted(same, key=lambda figure: figure.mb_s)[len(same) // 2]
        for same in zip(*rounds, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="directory on the disk to be measured (default: temporary)")
    parser.add_argument("--megabytes", type=int, default=256, help="of files of each size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=100_000, help="of the restart")
    parser.add_argument("--json", help="write the figures there as well")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headstart-bench-", dir=options.path))
    figures: list[Figure] = []
    try:
        for size in SIZES:
            count = options.megabytes * MIB // size
            for threads in THREADS:
                rounds = [raw_round(folder, size, count, threads) for _ in range(options.rounds)]
                figures += medians(rounds)
            for direct in (False, True):
                tier = [
                    asyncio.run(tier_round(folder / "tier", size, count, direct=direct))
                    for _ in range(options.rounds)
                ]
                figures += medians(tier)
        restarted = asyncio.run(restart(folder / "tier", options.files))
    finally:
        shutil.rmtree(folder)
    print_table(
        "Disk, MB/s",
        ("way", "record", "threads", "MB/s"),
        [(f.what, f"{f.record_bytes // 1024} KiB", str(f.threads), f"{f.mb_s:,.0f}")
         for f in figures],
    )  # fmt: skip
    print(
        f"restart with {restarted.num_files:,} files: {restarted.cold_s:.1f} s with the files' "
        f"content out of the cache, {restarted.warm_s:.1f} s with it in the cache"
    )
    write_json(
        options.json,
        {
            "machine": machine(),
            "seed": SEED,
            "figures": [asdict(figure) for figure in figures],
            "restart": asdict(restarted),
        },
    )


if __name__ == "__main__":
    main()
