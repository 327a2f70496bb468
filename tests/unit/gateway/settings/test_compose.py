"""docker-compose.yml and deploy/ fit together and keep their promises, as far as files can tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pieces import at_once

from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import (
    EventGauges,
    Gauges,
    IndexGauges,
    MemoGauges,
    ReplicaGauges,
    RoutingGauges,
    StoreGauges,
    TierGauges,
)
from gateway.cli.main import build_parser
from gateway.settings.config_file import load_config
from gateway.stats.metrics import Metrics

ROOT = Path(__file__).parents[4]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = [name for name, service in SERVICES.items() if service["restart"] != "no"]


def test_every_part_of_the_system_is_there() -> None:
    """One engine for each profile, all else always."""
    assert {"gateway", "store", "redis", "prometheus", "grafana"} <= SERVICES.keys()
    profiles = {
        name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service
    }
    assert profiles == {"engine-cpu": ["cpu"], "engine-gpu": ["gpu"]}


@pytest.mark.parametrize("name", LASTING)
def test_lasting_services_have_a_health_check(name: str) -> None:
    """With a command, an interval and a time-out."""
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= check.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_runs_as_root(name: str) -> None:
    """Nor may it become root."""
    service = SERVICES[name]
    assert not str(service["user"]).startswith(("0", "root"))
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_built_can_be_built(name: str) -> None:
    """The container file exists, and everything that it copies; what is not built is pinned."""
    service = SERVICES[name]
    if "build" not in service:
        assert re.search(r":v?\d+\.\d+", service["image"])
        return
    recipe = (ROOT / service["build"]["dockerfile"]).read_text()
    for line in re.findall(r"^COPY (.+)$", recipe, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert re.search(r"^USER 10001", recipe, re.MULTILINE)


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_on_loopback_only(name: str) -> None:
    """Opening them is a decision of the user."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_are_declared_and_files_exist(name: str) -> None:
    """Named volumes for what lasts, files of this repository for what is configured."""
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).exists()
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_dependencies_exist(name: str) -> None:
    """And those that must be healthy have a health check."""
    for other, wanted in SERVICES[name].get("depends_on", {}).items():
        if wanted["condition"] == "service_healthy":
            assert other in LASTING
        else:
            assert SERVICES[other]["restart"] == "no"


@pytest.mark.parametrize("name", ["gateway", "store", "model", "engine-cpu", "engine-gpu"])
def test_our_commands_are_understood(name: str) -> None:
    """By the command line of this very version."""
    assert (
        build_parser().parse_args(SERVICES[name]["command"]).command == SERVICES[name]["command"][0]
    )


@pytest.mark.parametrize("name", ["gateway", "store", "engine-cpu", "engine-gpu"])
def test_sockets_are_shared(name: str) -> None:
    """Everybody mounts the runtime directory of the configuration."""
    config = load_config(ROOT / "examples/compose.yaml")
    assert f"runtime:{config.runtime_dir}" in SERVICES[name]["volumes"]


def test_configuration_fits_the_services() -> None:
    """Addresses, and the arena within the store's memory."""
    config = load_config(ROOT / "examples/compose.yaml")
    assert config.host == "0.0.0.0"
    assert f"127.0.0.1:8080:{config.port}" in SERVICES["gateway"]["ports"]
    for name in ("engine-cpu", "engine-gpu"):
        assert SERVICES[name]["networks"]["default"]["aliases"] == ["engine"]
    assert [engine.url for engine in config.engines] == ["http://engine:8000"]
    assert config.store is not None
    limit = int(SERVICES["store"]["mem_limit"].removesuffix("m")) * 2**20
    assert config.store.memory.capacity + 256 * 2**20 <= limit


def test_tiers_fit_the_services() -> None:
    """The disk tier lies in a volume of the store alone; Redis evicts nothing by itself and has
    room for what the store may keep there."""
    store = load_config(ROOT / "examples/compose.yaml").store
    assert store is not None
    assert store.disk is not None
    assert store.redis is not None
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["store"]["volumes"])
    assert Path(store.disk.path).is_relative_to(mounts["blocks"])
    users = [name for name in SERVICES if "blocks" in str(SERVICES[name].get("volumes"))]
    assert users == ["store"]
    assert store.redis.url == "redis://redis:6379/0"
    command = SERVICES["redis"]["command"]
    limit = int(command[command.index("--maxmemory") + 1].removesuffix("gb")) * 2**30
    assert store.redis.capacity <= 0.75 * limit
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_prometheus_asks_gateway_and_engine() -> None:
    """By the names and ports of the services."""
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    targets = [each["static_configs"][0]["targets"][0] for each in scraped]
    assert targets == ["gateway:8080", "engine:8000"]


def exposed_metrics() -> set[str]:
    """The names on the gateway's /metrics when everything is there."""
    counts = dict.fromkeys(StoreGauges.model_fields, 0)
    tier = dict.fromkeys(TierGauges.model_fields, 0)
    tier |= {"name": "disk", "breaker": "closed", "evicted_blocks": {"capacity": 0}}
    store = StoreGauges.model_validate(
        counts
        | {
            "id": "store-0",
            "engines": [],
            "evicted_blocks": {"capacity": 0},
            "tiers": [tier],
            "policies": None,
        }
    )
    events = EventGauges(connected=True, lag_s=0.0, gaps=0, resyncs=0)
    gauges = Gauges(
        in_flight=0,
        waiting=0,
        loop_lag_s=0.0,
        store=store,
        store_events=events,
        index=IndexGauges(blocks=0, used_bytes=0, capacity_bytes=0),
        memo=MemoGauges(tokens_from_memo=0, tokens_tokenized=0, used_bytes=0),
        replicas={
            "a": ReplicaGauges(
                condition="ready", ejections=0, in_flight=0, waiting=0, kv_free=1.0, events=events
            )
        },
        routing=RoutingGauges(
            kind="least_ttft",
            by_evidence={"exact": 1},
            by_reason={"its turn": 1},
            retries={"EngineLostError": 0},
            joined=0,
            recent=[],
        ),
    )
    accounting = Accounting(["a"], model="m", version="0", block_size=32)
    metrics = Metrics()
    metrics.add_replica("a")
    page = at_once(metrics.exposing(at_once(accounting.snapshot(gauges=gauges)))).decode()
    return set(re.findall(r"^(headstart_\w+)", page, re.MULTILINE))


def test_dashboard_shows_metrics_that_exist() -> None:
    """A renamed metric would leave an empty panel."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/headstart.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"headstart_\w+", target["expr"])
    }
    assert len(shown) > 15
    assert shown - exposed_metrics() == set()


def test_docker_itself_accepts_the_file() -> None:
    """Where a client with compose is installed."""
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run(
            [docker, "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no docker client with compose here")
    done = subprocess.run(
        [docker, "compose", "--profile", "cpu", "--profile", "gpu", "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
