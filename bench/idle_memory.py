"""What a pause does to memory on this machine: the same bytes, moved again at once or later.

On some virtual machines memory that nobody touched for a second is slow to touch again, page by
page: what finds a page has left the processor's caches. Large pages need less of that. Every hit in
a tier touches memory that was idle: KV in the arena, files in the page cache. So look at this
before you judge the figures of bench.tiers or bench.ttft. The store's arena, with small pages and
with large ones; 46 MB as 2,000 tokens of the demo's model are; "read": files in the page cache into
it; "copy": out of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import Spread, machine, print_table, write_json
from prefix_store.arena import Arena

BLOCK_BYTES = 737_408
NUM_BLOCKS = 62
PAUSES_S = (0.0, 0.1, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Moved:
    """Medians of some rounds."""

    large_pages: bool
    pause_s: float
    read_s: float
    copy_s: float

    @property
    def seconds(self) -> tuple[float, float]:
        return self.read_s, self.copy_s


class Blocks:
    """A run of blocks: a file each, and their places in an arena."""

    def __init__(self, folder: Path, *, large_pages: bool) -> None:
        self.large_pages = large_pages
        self._paths = [folder / str(i) for i in range(NUM_BLOCKS)]
        for path in self._paths:
            path.write_bytes(os.urandom(BLOCK_BYTES))
        arena = (Arena.create if large_pages else arena_of_small_pages)(NUM_BLOCKS * BLOCK_BYTES)
        arena.populate()
        arena.close_descriptor()
        self._memory = arena.view
        self._target = bytearray(BLOCK_BYTES)

    def read(self) -> None:
        for i, path in enumerate(self._paths):
            fd = os.open(path, os.O_RDONLY)
            os.preadv(fd, [self._place(i)], 0)
            os.close(fd)

    def copy(self) -> None:
        for i in range(NUM_BLOCKS):
            self._target[:] = self._place(i)

    def _place(self, i: int) -> memoryview:
        return self._memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]


def arena_of_small_pages(num_bytes: int) -> Arena:
    """As it is where the kernel does not put pages together."""
    fd = os.memfd_create("bench")
    os.posix_fallocate(fd, 0, num_bytes)
    return Arena(fd, num_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.idle_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7, help="for each pause (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [Blocks(Path(folder), large_pages=large) for large in (False, True)]
        # The kinds take turns, so both see the same machine.
        results = [measure(kinds, pause_s, args.rounds) for pause_s in PAUSES_S]
    rows = [
        [f"{both[0].pause_s:g}", *(f"{s * 1e3:.1f}" for each in both for s in each.seconds)]
        for both in results
    ]
    columns = ["after a pause of s", "read", "copy", "read, large pages", "copy, large pages"]
    print_table("46 MB (ms)", columns, rows)
    flat = [asdict(each) for both in results for each in both]
    write_json(args.json, {"machine": machine(), "results": flat})
    return 0


def measure(kinds: Sequence[Blocks], pause_s: float, rounds: int) -> list[Moved]:
    """Each kind of memory and each way by itself."""
    seconds: dict[tuple[bool, str], list[float]] = {}
    for _ in range(rounds):
        for blocks in kinds:
            for name, move in (("read", blocks.read), ("copy", blocks.copy)):
                time.sleep(pause_s)
                began = time.perf_counter()
                move()
                took = time.perf_counter() - began
                seconds.setdefault((blocks.large_pages, name), []).append(took)
    medians = {key: Spread.of(each).median for key, each in seconds.items()}
    return [
        Moved(large, pause_s, medians[large, "read"], medians[large, "copy"])
        for large in (False, True)
    ]


if __name__ == "__main__":
    sys.exit(main())
