"""What a process may still have: what the machine has left, and what its groups allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from prefix_store.available_memory import available_bytes

GIB = 2**30
MEMINFO = "MemTotal:  8388608 kB\nMemFree:  1048576 kB\nMemAvailable:  4194304 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """4 GiB are available; the process is in the group /pod/box."""
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pod/box\n"})
    return tmp_path


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group(limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 5\nactive_file {cache // 4}\ninactive_file {cache - cache // 4}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def available(machine: Path, **groups: dict[str, str]) -> int | None:
    for name, files in groups.items():
        folder = "groups/" + name.replace("_", "/")
        write(machine, {f"{folder}/{file}": text for file, text in files.items()})
    return available_bytes(machine / "proc", machine / "groups")


def test_without_limits_it_is_what_the_machine_has_left(machine: Path) -> None:
    assert available(machine) == 4 * GIB
    assert available(machine, pod_box=group("max", GIB)) == 4 * GIB


def test_a_group_leaves_its_limit_less_what_it_uses(machine: Path) -> None:
    """The page cache goes when memory is wanted."""
    assert available(machine, pod_box=group(3 * GIB, 2 * GIB)) == GIB
    assert available(machine, pod_box=group(3 * GIB, 2 * GIB, cache=GIB)) == 2 * GIB
    assert available(machine, pod_box=group(GIB, 2 * GIB)) == 0


def test_a_group_further_up_limits_as_well(machine: Path) -> None:
    assert available(machine, pod_box=group("max", GIB), pod=group(2 * GIB, GIB)) == GIB


def test_a_container_sees_its_own_group_as_the_root(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/\n"})
    write(machine, {f"groups/{name}": text for name, text in group(2 * GIB, GIB).items()})
    assert available(machine) == GIB


def test_it_is_unknown_where_nothing_is_said(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    write(tmp_path, {"meminfo": "MemTotal: 5 kB\n", "self/cgroup": "4:memory:/box\n"})
    assert available_bytes(tmp_path, tmp_path) is None


def test_this_machine_says_something_sensible() -> None:
    assert 2**20 < (available_bytes() or 0) < 2**50
