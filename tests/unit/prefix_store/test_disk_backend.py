"""The disk tier's own: its directory, its quota, its restart, and a file system that refuses."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreError
from prefix_store.disk_backend import DiskBackend
from prefix_store.disk_directory import BLOCKS, MARKER
from prefix_store.disk_files import DiskFiles
from prefix_store.disk_recovery import FoundBlock, closed
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, seal, write_header

MIB = 1024**2
PAYLOAD_BYTES = 20_000
SHAPE = RecordShape(2, PAYLOAD_BYTES)


def disk_prompt(
    backend: DiskBackend, blocks: Sequence[int], salt: str = "s"
) -> list[OutgoingRecord]:
    """The records of a prompt; the payload follows from the block."""
    ids = as_token_ids([number for number in blocks for _ in range(2)])
    parent: BlockHash | None = None
    records = []
    for i, block_hash in enumerate(extend_chain(routing_root("m", salt), ids, 2)):
        raw = memoryview(bytearray(SHAPE.num_bytes))
        tokens = ids[2 * i : 2 * i + 2].tobytes()
        write_header(raw, block_hash, parent or routing_root("m", salt), tokens, SHAPE)
        raw[SHAPE.payload_at :] = random.Random(block_hash).randbytes(PAYLOAD_BYTES)
        seal(raw, block_hash, SHAPE)
        size = backend.size_of(len(raw))
        block = KeptBlock(block_hash, parent, 2, size, "" if parent else salt)
        records.append(OutgoingRecord(block, raw))
        parent = block_hash
    return records


async def is_read(backend: DiskBackend, record: OutgoingRecord) -> bool:
    """Whether a record is there; if so, its bytes are checked."""
    into = memoryview(bytearray(len(record.data)))
    (block,) = await backend.read([record.block.block_hash], [into])
    assert block is None or (block == record.block and into == record.data)
    return block is not None


@asynccontextmanager
async def disk_backend(
    path: Path, capacity_bytes: int = 64 * MIB
) -> AsyncIterator[tuple[DiskBackend, list[KeptBlock]]]:
    backend = DiskBackend(path, capacity_bytes)
    try:
        yield backend, await backend.recover()
    finally:
        await backend.close()


def file_of(path: Path, record: OutgoingRecord) -> Path:
    return path / BLOCKS / record.block.block_hash.hex()


def taken_bytes(path: Path) -> int:
    """What the file system says that our files take."""
    return sum(file.lstat().st_blocks * 512 for file in (path / BLOCKS).iterdir())


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The operating system cuts every write off there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_only_the_owner_can_read_what_lies_there(tmp_path: Path) -> None:
    """KV bytes tell of the prompts."""
    async with disk_backend(tmp_path / "tier") as (backend, _):
        await backend.write(disk_prompt(backend, [1, 2]))
        modes = {
            stat.S_IMODE(each.lstat().st_mode)
            for each in (tmp_path / "tier").rglob("*")
            if each.is_file()
        }
        assert modes == {0o600}
        assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "tier" / BLOCKS).stat().st_mode) == 0o700


async def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Nobody loses a file by a wrong path."""
    (tmp_path / "thesis.txt").write_text("years of work")
    backend = DiskBackend(tmp_path, MIB)
    with pytest.raises(StoreError, match=r"store\.disk\.path: .* holds other files"):
        await backend.recover()
    await backend.close()
    assert os.listdir(tmp_path) == ["thesis.txt"]


async def test_an_empty_directory_is_taken_even_as_a_mount_point(tmp_path: Path) -> None:
    """A new file system has lost+found in it."""
    (tmp_path / "lost+found").mkdir()
    async with disk_backend(tmp_path) as (backend, recovered):
        assert recovered == []
        assert await backend.write(disk_prompt(backend, [1])) == [True]


@pytest.mark.parametrize("what", ["file", "dangling link", "blocks link"])
async def test_what_is_no_directory_of_ours_is_refused(tmp_path: Path, what: str) -> None:
    """The error names the key; nothing is changed elsewhere."""
    path = tmp_path / "tier"
    if what == "file":
        path.write_text("x")
    elif what == "dangling link":
        path.symlink_to(tmp_path / "file" / "nowhere")
        (tmp_path / "file").write_text("x")
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine").write_text("x")
        async with disk_backend(path):
            pass
        (path / BLOCKS).rmdir()
        (path / BLOCKS).symlink_to(tmp_path / "elsewhere")
    backend = DiskBackend(path, MIB)
    with pytest.raises(StoreError, match=r"store\.disk\.path"):
        await backend.recover()
    await backend.close()
    assert what != "blocks link" or (tmp_path / "elsewhere" / "mine").exists()


async def test_two_stores_cannot_use_one_directory(tmp_path: Path) -> None:
    """The second is told so; once the first is closed, it may."""
    async with disk_backend(tmp_path):
        second = DiskBackend(tmp_path, MIB)
        with pytest.raises(StoreError, match="in use by another store"):
            await second.recover()
        await second.close()
    async with disk_backend(tmp_path):
        pass


async def test_another_versions_directory_is_refused(tmp_path: Path) -> None:
    """What it holds is not ours to judge."""
    async with disk_backend(tmp_path):
        pass
    (tmp_path / MARKER).write_text("Blocks of a Headstart store, format 2.")
    backend = DiskBackend(tmp_path, MIB)
    with pytest.raises(StoreError, match="another version"):
        await backend.recover()
    await backend.close()


async def test_a_marker_that_was_never_finished_is_finished(tmp_path: Path) -> None:
    """A store that was killed while it made the directory leaves no riddle."""
    (tmp_path / MARKER).write_bytes(b"Blocks of")
    async with disk_backend(tmp_path) as (_, recovered):
        assert recovered == []


async def test_foreign_and_torn_files_among_the_blocks_go_at_the_start(tmp_path: Path) -> None:
    """What is beside them and what a link points to stays."""
    async with disk_backend(tmp_path) as (backend, _):
        records = disk_prompt(backend, range(5))
        await backend.write(records)
    blocks = tmp_path / BLOCKS
    whole = {each.name for each in blocks.iterdir()}
    (tmp_path / "notes.txt").write_text("beside")
    (blocks / "foreign").write_text("x")
    (blocks / "tmp-77").write_bytes(b"half a record")
    (blocks / "link").symlink_to(tmp_path / "notes.txt")
    (blocks / "directory").mkdir()
    name = next(iter(whole))
    (blocks / name.upper()).write_bytes((blocks / name).read_bytes())
    (blocks / ("f" * 32)).write_bytes((blocks / name).read_bytes())
    last = file_of(tmp_path, records[-1])
    os.truncate(last, last.stat().st_size - 1)
    async with disk_backend(tmp_path) as (backend, recovered):
        assert recovered == [record.block for record in records[:-1]]
        assert {each.name for each in blocks.iterdir()} == whole - {last.name} | {"directory"}
        assert (tmp_path / "notes.txt").read_text() == "beside"
        assert backend.counters.files_discarded == 6
        assert backend.used_bytes == sum(block.num_bytes for block in recovered)


def test_a_circle_of_parents_is_no_prefix() -> None:
    """What leads to itself without a first block is not closed."""
    one, two, three = (BlockHash(bytes([i]) * 16) for i in (1, 2, 3))
    parents = {one: two, two: one, three: None}
    blocks = {key: FoundBlock(KeptBlock(key, parent, 2, 1), 0) for key, parent in parents.items()}
    assert list(closed(blocks)) == [three]


async def test_no_more_is_written_than_the_quota_allows(tmp_path: Path) -> None:
    """Measured at the file system; room that is given back can be used."""
    backend_size = DiskBackend(tmp_path, MIB).size_of(SHAPE.num_bytes)
    async with disk_backend(tmp_path, 3 * backend_size + backend_size // 2) as (backend, _):
        records = disk_prompt(backend, range(5))
        assert await backend.write(records) == [True, True, True, False, False]
        assert taken_bytes(tmp_path) <= backend.used_bytes <= 3 * backend_size
        assert backend.counters.writes_refused == 1  # the child of a missing block is not tried
        await backend.remove([records[2].block.block_hash])
        assert await backend.write(disk_prompt(backend, [8])) == [True]


async def test_a_smaller_quota_at_the_restart_drops_what_was_unused_longest(
    tmp_path: Path,
) -> None:
    """Children before their parents; what was read last stays."""
    async with disk_backend(tmp_path) as (backend, _):
        old, used = disk_prompt(backend, [1, 2, 3]), disk_prompt(backend, [4, 5, 6])
        await backend.write(used + old)
        size = old[0].block.num_bytes
    for file in (tmp_path / BLOCKS).iterdir():
        os.utime(file, (1000, 1000))
    async with disk_backend(tmp_path) as (backend, _):
        assert await is_read(backend, used[2])
    async with disk_backend(tmp_path, 4 * size) as (backend, recovered):
        assert {b.block_hash for b in recovered} == {
            record.block.block_hash for record in (*used, old[0])
        }
        assert taken_bytes(tmp_path) <= backend.used_bytes == 4 * size


async def test_a_restart_orders_blocks_by_their_last_use(tmp_path: Path) -> None:
    """Oldest first, but no child before its parent, even if the parent was used later."""
    async with disk_backend(tmp_path) as (backend, _):
        a, b, c = (disk_prompt(backend, [i, 10 + i]) for i in (1, 2, 3))
        await backend.write(a + b + c)
    times = [(a[0], 30), (a[1], 20), (b[0], 10), (b[1], 40), (c[0], 15), (c[1], 16)]
    for record, used in times:
        os.utime(file_of(tmp_path, record), (used, used))
    async with disk_backend(tmp_path) as (_, recovered):
        order = [b[0], c[0], c[1], a[0], a[1], b[1]]
        assert recovered == [record.block for record in order]


def test_no_changed_byte_and_no_other_length_goes_unnoticed(tmp_path: Path) -> None:
    """Every byte of a file, its padding too, and every place where it can be cut off."""
    files = DiskFiles(tmp_path, MIB)
    files.recover()
    shape = RecordShape(2, 70)
    parent, tokens = routing_root("m", "s"), as_token_ids([1, 2])
    (block_hash,) = extend_chain(parent, tokens, 2)
    raw = memoryview(bytearray(shape.num_bytes))
    write_header(raw, block_hash, parent, tokens.tobytes(), shape)
    raw[shape.payload_at :] = random.Random(0).randbytes(shape.payload_bytes)
    seal(raw, block_hash, shape)
    block = KeptBlock(block_hash, None, 2, files.size_of(len(raw)), "salt")
    record = OutgoingRecord(block, raw)
    file = file_of(tmp_path, record)
    into = memoryview(bytearray(len(raw)))
    assert files.write(record)
    assert files.read(block_hash, into) == block
    whole = file.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in (*changed, *(whole[:at] for at in range(len(whole))), whole + b"x"):
        file.write_bytes(damaged)
        assert files.read(block_hash, into) is None
        assert not file.exists()
        assert files.write(record)
    assert files.read(block_hash, into) == block
    assert into == raw
    files.close()


async def test_what_is_not_the_record_of_its_block_is_not_written(tmp_path: Path) -> None:
    """A caller's mistake must not come back as somebody's block."""
    async with disk_backend(tmp_path) as (backend, _):
        one, two = disk_prompt(backend, [1, 2])
        assert await backend.write([OutgoingRecord(one.block, two.data)]) == [False]
        long_salt = disk_prompt(backend, [1], salt="x" * 513)
        assert await backend.write(long_salt) == [False]
        assert backend.used_bytes == 0
        assert len(backend) == 0


async def test_a_write_that_is_cut_off_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answered, counted, said once; afterwards it goes on."""
    async with disk_backend(tmp_path) as (backend, _):
        records = disk_prompt(backend, [1, 2, 3])
        assert await backend.write(records[:1]) == [True]
        with largest_file(PAYLOAD_BYTES // 2), caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert await backend.write(records) == [True, False, False]
        assert backend.counters.faults == 3
        assert len([each for each in caplog.records if "could not write" in each.message]) == 1
        assert len(list((tmp_path / BLOCKS).iterdir())) == 1
        assert backend.used_bytes == records[0].block.num_bytes
        assert await backend.write(records) == [True, True, True]


async def test_a_directory_that_is_removed_under_us_means_a_miss(tmp_path: Path) -> None:
    """Nothing is raised; nothing is counted as taken any more."""
    path = tmp_path / "tier"
    async with disk_backend(path) as (backend, _):
        records = disk_prompt(backend, [1, 2, 3])
        await backend.write(records)
        shutil.rmtree(path)
        assert not await is_read(backend, records[0])
        await backend.remove([record.block.block_hash for record in records[1:]])
        assert await backend.write(records) == [False, False, False]
        assert backend.used_bytes == 0
        assert backend.counters.records_missing == 1


@pytest.mark.parametrize("what", ["directory", "pipe"])
async def test_something_else_in_a_files_place_is_a_miss(tmp_path: Path, what: str) -> None:
    """What cannot be removed stays counted, so that the quota holds; it is tried again."""
    async with disk_backend(tmp_path) as (backend, _):
        records = disk_prompt(backend, [1, 2])
        await backend.write(records)
        file = file_of(tmp_path, records[1])
        file.unlink()
        os.mkdir(file) if what == "directory" else os.mkfifo(file)
        assert not await is_read(backend, records[1])
        size = records[1].block.num_bytes
        assert backend.used_bytes == (2 * size if what == "directory" else size)
        if what == "directory":
            assert await backend.write(records) == [True, False]
            file.rmdir()
        assert await backend.write(records) == [True, True]
        assert backend.used_bytes == 2 * size
        assert await is_read(backend, records[1])


async def test_a_file_that_vanished_is_written_again(tmp_path: Path) -> None:
    """A second write looks whether the first one's file is still there."""
    async with disk_backend(tmp_path) as (backend, _):
        records = disk_prompt(backend, [1])
        await backend.write(records)
        file_of(tmp_path, records[0]).unlink()
        assert await backend.write(records) == [True]
        assert await is_read(backend, records[0])
        assert backend.used_bytes == records[0].block.num_bytes


async def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    """And what comes later is a miss, not an error."""
    backend = DiskBackend(tmp_path, 64 * MIB)
    await backend.recover()
    records = disk_prompt(backend, range(50))
    writing = asyncio.create_task(backend.write(records))
    await asyncio.sleep(0)
    await backend.close()
    assert await writing == [True] * 50
    assert await backend.write(records) == [False] * 50
    assert not await is_read(backend, records[0])
    await backend.remove([records[0].block.block_hash])
    async with disk_backend(tmp_path) as (_, recovered):
        assert len(recovered) == 50


async def test_a_warning_tells_of_a_quota_that_the_file_system_cannot_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Better at the start than on the day when the disk is full."""
    async with disk_backend(tmp_path, 2**60):
        assert "has room for" in caplog.text


def run_here(*arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """This file as a process."""
    return subprocess.Popen(
        [*before, sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


async def test_after_a_kill_in_the_middle_of_writes_everything_served_is_right(
    tmp_path: Path,
) -> None:
    """Several lives, each ended at another moment: no wrong bytes, no lost room, no lost parents;
    what a life had written and not removed is there in the next."""
    chance = random.Random(20261130)
    kept = 0
    for _ in range(3):
        with run_here("write", str(tmp_path)) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            await asyncio.sleep(chance.uniform(0.01, 0.15))
            writer.send_signal(signal.SIGKILL)
        async with disk_backend(tmp_path, 4 * MIB) as (backend, recovered):
            kept += len(recovered)
            assert sum(block.num_bytes for block in recovered) == backend.used_bytes <= 4 * MIB
            assert taken_bytes(tmp_path) <= backend.used_bytes
            for number in range(40):
                for record in disk_prompt(backend, killed_prompt(number)):
                    there = record.block in recovered
                    assert await is_read(backend, record) == there
            assert backend.counters.records_damaged == 0
    assert kept > 0


def test_a_full_and_a_read_only_file_system_are_misses(tmp_path: Path) -> None:
    """Real ones, in a mount namespace of their own."""
    with run_here("mount", str(tmp_path), before=["unshare", "--user", "-rm"]) as child:
        output = child.communicate(timeout=60)[0]
    if "unshare: " in output or "permission denied" in output:
        pytest.skip(f"no namespace of our own here: {output.strip()}")
    assert child.returncode == 0, output


def killed_prompt(number: int) -> list[int]:
    return [number % 4, number % 8, number]


async def write_for_ever(path: Path) -> None:
    """Until killed."""
    async with disk_backend(path, 4 * MIB) as (backend, _):
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        chance = random.Random()
        while True:
            records = disk_prompt(backend, killed_prompt(chance.randrange(40)))
            written = await backend.write(records)
            if not all(written) or chance.random() < 0.3:
                await backend.remove([records[-1].block.block_hash])


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


async def fill_and_freeze(path: Path) -> None:
    """In a tmpfs of 1 MiB."""
    mount("-t", "tmpfs", "-o", "size=1m", "none", str(path))
    async with disk_backend(path) as (backend, _):
        records = disk_prompt(backend, range(60))
        written = await backend.write(records)
        fit = sum(written)
        assert written == [True] * fit + [False] * (60 - fit)
        assert 20 < fit < 60
        assert backend.used_bytes == fit * records[0].block.num_bytes
        assert len(os.listdir(path / BLOCKS)) == fit
        mount("-o", "remount,ro", str(path))
        used = backend.used_bytes
        assert await is_read(backend, records[0])
        await backend.remove([records[fit - 1].block.block_hash])
        for record in records[fit - 1 : fit + 1]:
            assert await backend.write([record]) == [False]
        assert backend.used_bytes == used  # the file is still there
        assert backend.counters.faults >= 3
        await backend.close()
        with pytest.raises(StoreError, match="Read-only"):
            await DiskBackend(path, MIB).recover()
        mount("-o", "remount,rw", str(path))
    async with disk_backend(path) as (backend, recovered):
        assert len(recovered) == fit
        for record in records[:fit]:
            assert await is_read(backend, record)


if __name__ == "__main__":
    work = {"write": write_for_ever, "mount": fill_and_freeze}[sys.argv[1]]
    asyncio.run(work(Path(sys.argv[2])))
