"""Candidates in groups of equal worth."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic

from policies.eviction.base import B
from policies.eviction.gap_model import Curve


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Blocks of one category and age bucket."""

    curve: Curve
    bucket: int

    @property
    def worth(self) -> float:
        return self.curve.worth[self.bucket]


Entry = tuple[int, int, int, B]
"""Last use, depth from the deepest, serial number, block."""


class Cells(Generic[B]):
    """Blocks by the worth of their cell, within a cell by the last use and the deepest first.

    There are few cells, and the worth of all of them changes at once: then `reorder` sorts the
    cells, not the blocks."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Hashable, int], Cell] = {}
        self._entries: dict[Cell, list[Entry[B]]] = {}
        self._order: list[tuple[float, int, Cell]] = []
        """Every cell that has entries, and maybe some that have none any more."""
        self._where: dict[B, tuple[Cell, int]] = {}
        self._serial = 0
        self._stale = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, block: B) -> bool:
        return block in self._where

    def put(self, block: B, curve: Curve, bucket: int) -> None:
        """A candidate, new or moved."""
        key = (curve, bucket)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(curve, bucket)
        if block in self._where:
            self._stale += 1
        self._serial += 1
        self._where[block] = (cell, self._serial)
        entries = self._entries.get(cell)
        if entries is None:
            entries = self._entries[cell] = []
            heapq.heappush(self._order, (cell.worth, self._serial, cell))
        heapq.heappush(entries, (block.last_used, -block.depth, self._serial, block))
        self._compact()

    def drop(self, block: B) -> bool:
        """Not a candidate any more; False when it was none."""
        if self._where.pop(block, None) is None:
            return False
        self._stale += 1
        self._compact()
        return True

    def least(self) -> float | None:
        """The worth of the next victim; None without candidates."""
        cell = self._first()
        return None if cell is None else cell.worth

    def pop(self) -> B | None:
        """Take the next victim out."""
        cell = self._first()
        if cell is None:
            return None
        block = heapq.heappop(self._entries[cell])[3]
        del self._where[block]
        return block

    def reorder(self) -> None:
        """The worth of the cells has changed."""
        self._order = [(cell.worth, number, cell) for number, cell in enumerate(self._entries)]
        heapq.heapify(self._order)

    def _first(self) -> Cell | None:
        """The cell of the least worth; its first entry is a candidate."""
        while self._order:
            cell = self._order[0][2]
            entries = self._entries[cell]
            while entries:
                _, _, serial, block = entries[0]
                where = self._where.get(block)
                if where is not None and where[1] == serial:
                    return cell
                heapq.heappop(entries)
                self._stale -= 1
            heapq.heappop(self._order)
            del self._entries[cell]
        return None

    def _compact(self) -> None:
        if self._stale <= len(self._where) + 64:
            return
        self._stale = 0
        for cell, entries in list(self._entries.items()):
            live = [e for e in entries if self._where.get(e[3]) == (cell, e[2])]
            if live:
                heapq.heapify(live)
                self._entries[cell] = live
            else:
                del self._entries[cell]
        self.reorder()
