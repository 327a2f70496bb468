"""How much more memory this process could have."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """What the machine has left and what the limits of this process' control groups (version 2)
    leave, whichever is less; None where the kernel does not say."""
    known = [*_of_machine(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", cgroups)]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> list[int]:
    fields = _fields(meminfo)
    return [fields["MemAvailable:"] * 1024] if "MemAvailable:" in fields else []


def _of_groups(own: Path, root: Path) -> list[int]:
    """Of the group and of all that it is part of."""
    path = next((line[3:] for line in _lines(own) if line.startswith("0::")), None)
    if path is None:
        return []
    group = root / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            fields = _fields(folder / "memory.stat")
            # The page cache counts as used, and goes when memory is wanted.
            cache = fields.get("active_file", 0) + fields.get("inactive_file", 0)
            found.append(max(0, limit - used + cache))
        if folder == root:
            break
    return found


def _number(file: Path) -> int | None:
    """None for "max" as for a file that is not there."""
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    parts = (line.split() for line in _lines(file))
    return {each[0]: int(each[1]) for each in parts if len(each) > 1 and each[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
