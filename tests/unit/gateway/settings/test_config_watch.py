"""The configuration is read again on SIGHUP and when its file has changed and rested."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.settings.config_watch import ConfigWatch
from gateway.settings.file_stamp import FileStamp
from policies.config import HeadstartConfig

POLL_S = 0.02


class Taker:
    """Takes what the watch brings."""

    def __init__(self) -> None:
        self.listens: list[str] = []
        self.reasons: list[str] = []
        self.fail = False
        self._called = asyncio.Event()

    async def apply(self, config: HeadstartConfig) -> None:
        if self.fail:
            raise RuntimeError("no way")
        self.listens.append(config.listen)
        self._called.set()

    async def refuse(self, reason: str) -> None:
        self.reasons.append(reason)
        self._called.set()

    async def until(self, *, listens: int = 0, reasons: int = 0) -> None:
        async with asyncio.timeout(10):
            while len(self.listens) < listens or len(self.reasons) < reasons:
                await self._called.wait()
                self._called.clear()


def write(path: Path, text: str) -> None:
    path.write_text(text)


@contextlib.asynccontextmanager
async def watching(watch: ConfigWatch, ready: asyncio.Event | None = None) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run(ready))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headstart.yaml"
    path.write_text("listen: 127.0.0.1:1\n")
    return path


async def test_a_changed_file_is_applied_once(file: Path) -> None:
    """And not again while it stays as it is."""
    taker = Taker()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)):
        await asyncio.sleep(5 * POLL_S)
        assert taker.listens == []
        write(file, "listen: 127.0.0.1:22\n")
        await taker.until(listens=1)
        await asyncio.sleep(5 * POLL_S)
    assert taker.listens == ["127.0.0.1:22"]


async def test_a_replaced_file_is_applied(file: Path) -> None:
    """Editors and ConfigMaps put another file in its place."""
    taker = Taker()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)):
        new = file.with_name("new")
        write(new, "listen: 127.0.0.1:2\n")
        os.replace(new, file)
        await taker.until(listens=1)
    assert taker.listens == ["127.0.0.1:2"]


async def test_a_change_between_reading_and_watching_is_not_missed(file: Path) -> None:
    """The process starts slowly."""
    taker = Taker()
    watch = ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)
    write(file, "listen: 127.0.0.1:22\n")
    async with watching(watch):
        await taker.until(listens=1)


async def test_a_file_that_is_still_being_written_is_left_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file is valid: writers that empty it first must not reset everything."""
    taker = Taker()
    watch = ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)
    looks = 0
    changed = FileStamp.changed

    def writing(stamp: FileStamp) -> bool:
        nonlocal looks
        looks += 1
        if looks < 6:  # it changes before each look
            write(file, "# half\n" * looks)
        elif looks == 6:
            write(file, "listen: 127.0.0.1:333\n")
        return changed(stamp)

    monkeypatch.setattr(FileStamp, "changed", writing)
    async with watching(watch):
        await taker.until(listens=1)
    assert taker.listens == ["127.0.0.1:333"]


async def test_sighup_applies_at_once_what_has_not_changed(file: Path) -> None:
    """No look at the file's times: whoever asks gets it."""
    taker = Taker()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=3600)):
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            await taker.until(listens=count)
    assert taker.listens == ["127.0.0.1:1"] * 2


async def test_sighup_before_it_is_ready_waits(file: Path) -> None:
    """A store that is still starting must not die of it."""
    taker, ready = Taker(), asyncio.Event()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S), ready):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(3 * POLL_S)
        assert taker.listens == []
        ready.set()
        await taker.until(listens=1)


async def test_sighup_without_a_file_applies_the_defaults() -> None:
    """It does not end the process there either."""
    taker = Taker()
    async with watching(ConfigWatch(None, taker.apply, taker.refuse, poll_s=POLL_S)):
        os.kill(os.getpid(), signal.SIGHUP)
        await taker.until(listens=1)
    assert taker.listens == [HeadstartConfig().listen]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("listen: 8080\n", "line 1: listen"),
        ("store: {memory: {capcity: 1GiB}}\n", 'did you mean "capacity"?'),
        ("store: [\n", "not valid YAML"),
    ],
)
async def test_a_bad_file_is_refused_once_and_the_next_good_one_applied(
    file: Path, text: str, reason: str
) -> None:
    """With the sentence that the user would get at the start."""
    taker = Taker()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)):
        write(file, text)
        await taker.until(reasons=1)
        await asyncio.sleep(5 * POLL_S)
        write(file, "listen: 127.0.0.1:4444\n")
        await taker.until(listens=1)
    assert len(taker.reasons) == 1
    assert reason in taker.reasons[0]
    assert taker.listens == ["127.0.0.1:4444"]


async def test_a_file_that_is_gone_is_refused(file: Path) -> None:
    """The old settings stay, and the user is told."""
    taker = Taker()
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)):
        os.unlink(file)
        await taker.until(reasons=1)
    assert "cannot be read" in taker.reasons[0]


async def test_a_fault_while_applying_does_not_end_the_watch(file: Path) -> None:
    """It is refused, and the next file is still seen."""
    taker = Taker()
    taker.fail = True
    async with watching(ConfigWatch(file, taker.apply, taker.refuse, poll_s=POLL_S)):
        write(file, "listen: 127.0.0.1:22\n")
        await taker.until(reasons=1)
        taker.fail = False
        write(file, "listen: 127.0.0.1:333\n")
        await taker.until(listens=1)
    assert taker.reasons == ["it could not be applied: no way"]
