"""What a pause does to memory on this machine: the same bytes, moved again at once or later.

On some virtual machines memory that nobody touched for a second is slow to touch again, page by
page. Every hit in a tier touches memory that was idle: KV in the arena, files in the page cache. So
look at this before you judge the figures of bench.tiers or bench.ttft. Shared memory as the arena
is, 46 MB as 2,000 tokens of the demo's model are; "read": files in the page cache into it; "copy":
out of it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import Spread, machine, print_table, write_json

BLOCK_BYTES = 737_408
NUM_BLOCKS = 62


@dataclass(frozen=True, slots=True)
class Moved:
    """Medians of some rounds."""

    pause_s: float
    read_s: float
    copy_s: float


class Blocks:
    """A run of blocks: a file each, and their places in shared memory."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / str(i) for i in range(NUM_BLOCKS)]
        for path in self._paths:
            path.write_bytes(os.urandom(BLOCK_BYTES))
        fd = os.memfd_create("bench")
        os.ftruncate(fd, NUM_BLOCKS * BLOCK_BYTES)
        self._memory = memoryview(mmap.mmap(fd, NUM_BLOCKS * BLOCK_BYTES))
        os.close(fd)
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
        blocks = Blocks(Path(folder))
        blocks.read()  # maps the pages
        results = [measure(blocks, pause_s, args.rounds) for pause_s in (0.0, 0.1, 1.0, 3.0)]
    rows = [
        [f"{each.pause_s:g}", f"{each.read_s * 1e3:.1f}", f"{each.copy_s * 1e3:.1f}"]
        for each in results
    ]
    print_table("46 MB (ms)", ["after a pause of s", "read", "copy"], rows)
    write_json(args.json, {"machine": machine(), "results": [asdict(each) for each in results]})
    return 0


def measure(blocks: Blocks, pause_s: float, rounds: int) -> Moved:
    """Each way by itself."""
    read_s = _median(blocks.read, pause_s, rounds)
    return Moved(pause_s, read_s, _median(blocks.copy, pause_s, rounds))


def _median(move: Callable[[], None], pause_s: float, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        time.sleep(pause_s)
        began = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - began)
    return Spread.of(seconds).median


if __name__ == "__main__":
    sys.exit(main())
