"""The doctor names what is wrong and what to change. (That it finds a healthy stack healthy is
shown on the real engine in tests/e2e.)"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from gateway.doctor.engine import EngineDoctor, probe_body
from gateway.doctor.finding import Finding, Level
from gateway.doctor.host import check_gateway, check_runtime_dir, check_store, check_tenants
from gateway.doctor.tokens import check_events
from policies.config import HeadstartConfig, ModelConfig, TenantConfig
from policies.engine import AdapterConfig, EngineConfig
from prefix_store.runtime_dir import RuntimePaths

HEALTHY: dict[str, Any] = {
    "/health": "",
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "smollm2-135m-instruct", "max_model_len": 8192}]},
    "/v1/completions": {"usage": {"prompt_tokens_details": {"cached_tokens": 0}}, "metrics": {}},
    "/metrics": 'vllm:external_prefix_cache_queries_total{engine="0"} 5.0\n',
}


class StubEngine(ThreadingHTTPServer):
    """Answers like an engine with or without some flags: for the doctor's judgement only."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = dict(HEALTHY)

    def doctor(self, paths: RuntimePaths | None = None) -> EngineDoctor:
        engine = EngineConfig(url=f"http://127.0.0.1:{self.server_port}")
        paths = paths or RuntimePaths(Path("/run/h"))
        self.answers.setdefault(
            "/kv_event_sources",
            {
                "0": {
                    "enable_kv_cache_events": True,
                    "endpoint": paths.engine_events(engine),
                    "replay_endpoint": paths.engine_replay(engine),
                }
            },
        )
        return EngineDoctor(HeadstartConfig(engines=(engine,)), engine, paths)


class _Handler(BaseHTTPRequestHandler):
    server: StubEngine

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path)
        body = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with StubEngine() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def all_of(doctor: EngineDoctor) -> list[Finding]:
    return [
        doctor.is_reachable(),
        doctor.serves_model(),
        doctor.announces_events(),
        *doctor.reports_usage(probe_body("m", 32)),
        doctor.has_connector(),
    ]


def test_engine_with_all_flags_passes(engine: StubEngine) -> None:
    """Nothing to mend."""
    assert {finding.level for finding in all_of(engine.doctor())} == {Level.OK}


@pytest.mark.parametrize(
    ("path", "answer", "level", "sentence"),
    [
        ("/health", None, Level.FAIL, "start it with `headstart engine --id engine-0`"),
        ("/version", {"version": "0.40.1"}, Level.WARN, "vLLM 0.40.1 was never tried"),
        ("/version", None, Level.FAIL, "is not vLLM"),
        ("/v1/models", {"data": [{"id": "other"}]}, Level.FAIL, "serves other, not smollm2"),
        (
            "/v1/models",
            {"data": [{"id": "smollm2-135m-instruct", "max_model_len": 2048}]},
            Level.WARN,
            "its context is 2048 tokens, model.max_model_len says 8192",
        ),
        ("/kv_event_sources", {}, Level.FAIL, "KV events are off"),
        (
            "/kv_event_sources",
            {"0": {"enable_kv_cache_events": True, "endpoint": "e", "replay_endpoint": None}},
            Level.FAIL,
            "no replay endpoint",
        ),
        (
            "/kv_event_sources",
            {"0": {"enable_kv_cache_events": True, "endpoint": "e", "replay_endpoint": "r"}},
            Level.WARN,
            "the engine says e and r, the gateway uses ipc:///run/h/engine-0-events.sock",
        ),
        ("/v1/completions", {"usage": {}}, Level.FAIL, "--enable-prompt-tokens-details"),
        ("/v1/completions", {"usage": {}}, Level.WARN, "--enable-per-request-metrics"),
        ("/v1/completions", None, Level.FAIL, "a small request failed"),
        ("/metrics", "", Level.FAIL, "--kv-transfer-config"),
        (
            "/metrics",
            "vllm:external_prefix_cache_queries_total 0.0\n",
            Level.FAIL,
            "never asked a connector",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    path: str, answer: Any, level: Level, sentence: str, engine: StubEngine
) -> None:
    """The flag or key to mend stands in the line."""
    doctor = engine.doctor()
    engine.answers[path] = answer
    lines = [f.detail for f in all_of(doctor) if f.level is level]
    assert any(sentence in line for line in lines), lines


def test_probe_covers_three_blocks_and_is_new_each_time() -> None:
    """Otherwise a cached prompt would announce nothing."""
    first, second = probe_body("m", 128), probe_body("m", 128)
    assert first["prompt"] != second["prompt"]
    assert len(first["prompt"].split()) > 128


async def test_silent_events_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the endpoint and what has to agree."""
    monkeypatch.setattr("gateway.doctor.tokens.EVENTS_WITHIN_S", 0.2)
    send: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    send.set_result(None)
    [finding] = await check_events(EngineConfig(), RuntimePaths(tmp_path), range(64), send)
    assert finding.level is Level.FAIL
    assert f"{tmp_path}/engine-0-events.sock" in finding.detail
    assert "same runtime_dir" in finding.detail


def test_an_engine_must_serve_its_adapters(engine: StubEngine) -> None:
    """And the model that the configuration gives it, which need not be the first one."""
    doctor = engine.doctor()
    adapter = AdapterConfig(name="sql", digest="a" * 32)
    doctor = replace(doctor, engine=doctor.engine.model_copy(update={"adapters": (adapter,)}))
    finding = doctor.serves_model()
    assert finding.level is Level.FAIL
    assert "does not serve the adapter sql" in finding.detail
    models = HEALTHY["/v1/models"]["data"]
    engine.answers["/v1/models"] = {"data": [*models, {"id": "sql"}]}
    assert doctor.serves_model().level is Level.OK
    other = ModelConfig(name="large", path="/large")
    doctor = replace(
        doctor,
        config=doctor.config.model_copy(update={"more_models": (other,)}),
        engine=doctor.engine.model_copy(update={"model": "large"}),
    )
    assert "not large" in doctor.serves_model().detail


def test_runtime_directory_must_be_ours_alone(tmp_path: Path) -> None:
    """Its sockets carry tokens and salts."""
    tmp_path.chmod(0o755)
    assert check_runtime_dir(tmp_path).detail.endswith(f"run `chmod 700 {tmp_path}`")
    tmp_path.chmod(0o700)
    assert check_runtime_dir(tmp_path).level is Level.OK
    assert check_runtime_dir(tmp_path / "none").level is Level.WARN
    deep = tmp_path / ("x" * 100)
    deep.mkdir(mode=0o700)
    assert "too long for sockets" in check_runtime_dir(deep).detail


def test_missing_store_is_reported_with_its_command(tmp_path: Path) -> None:
    """And a configuration without a store is fine."""
    paths = RuntimePaths(tmp_path)
    [finding] = check_store(HeadstartConfig(), paths, ())
    assert finding.level is Level.FAIL
    assert "headstart store" in finding.detail
    [finding] = check_store(HeadstartConfig(store=None), paths, ())
    assert finding.level is Level.OK


def test_unreadable_key_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key of the configuration."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = HeadstartConfig(tenants={"acme": TenantConfig(key_file=str(tmp_path / "none"))})
    finding = check_tenants(config)
    assert finding.level is Level.FAIL
    assert "tenants.acme.key_file" in finding.detail
    assert check_tenants(HeadstartConfig()).level is Level.OK


def test_gateway_that_does_not_run_is_a_warning() -> None:
    """The doctor also helps before the first start."""
    finding = check_gateway(HeadstartConfig(listen="127.0.0.1:1"), ())
    assert finding.level is Level.WARN
    assert "start it with `headstart serve`" in finding.detail


def test_gateway_without_events_is_a_failure(engine: StubEngine) -> None:
    """Its index would stay empty and every prediction wrong."""
    engine.answers |= {
        "/readyz": {},
        "/cache/stats": {
            "replicas": {"engine-0": {"state": {"events": {"connected": False}}}},
            "total": {"windows": {"since_start": {"rendering_mismatches": 0}}},
        },
    }
    config = HeadstartConfig(listen=f"127.0.0.1:{engine.server_port}")
    finding = check_gateway(config, config.engines)
    assert finding.level is Level.FAIL
    assert "gets no KV events from engine-0" in finding.detail
    finding = check_gateway(config, [EngineConfig(report_events=False)])
    assert finding.level is Level.OK, "as configured"


def test_command_ends_with_1_when_something_is_to_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts can ask the doctor."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text(
        f"runtime_dir: {tmp_path}\nlisten: 127.0.0.1:1\nengines: [{{url: 'http://127.0.0.1:1'}}]\n"
    )
    assert main(["doctor", "--config", str(file)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  engine-0 reachable: no healthy engine at http://127.0.0.1:1" in out
    assert "to mend" in out


DISCOVERY = """
runtime_dir: {root}
listen: 127.0.0.1:1
store: null
fleet: {{discovery: {{kind: file, path: {root}/replicas.yaml, engine: {{report_events: false}}}}}}
"""


@pytest.mark.parametrize(
    ("replicas", "line"),
    [
        ("- {id: a, url: 'http://127.0.0.1:1'}", "FAIL  a reachable: no healthy engine"),
        ("- {id: a, url: 'http://127.0.0.1:1'}", "ok    discovery: 1 by file: a"),
        ("[]", "warn  discovery: there are no replicas"),
        ("- {id: a", "FAIL  discovery: {root}/replicas.yaml line 1: not valid YAML"),
        (None, "FAIL  discovery: {root}/replicas.yaml: cannot be read"),
    ],
)
def test_replicas_are_looked_for_as_the_gateway_does(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    replicas: str | None,
    line: str,
) -> None:
    """What is found is examined; why nothing is found is said at once."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text(DISCOVERY.format(root=tmp_path))
    if replicas is not None:
        (tmp_path / "replicas.yaml").write_text(replicas)
    main(["doctor", "--config", str(file)])
    out = capsys.readouterr().out
    assert line.replace("{root}", str(tmp_path)) in out
    assert "engine-0" not in out, "that is not configured"
