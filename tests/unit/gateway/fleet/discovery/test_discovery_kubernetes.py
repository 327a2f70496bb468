"""Ready pods, as an API server tells them: what counts, and what is done when it breaks."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from discovered import Listener, short_pause
from fake_cluster import FakeCluster, endpoint, endpoint_slice
from waiting import until

from gateway.fleet.discovery import discovery_of
from gateway.fleet.discovery.cluster_api import ClusterAccess
from gateway.fleet.discovery.endpoint_slices import SliceList, SliceTable
from gateway.fleet.discovery.kubernetes import KubernetesDiscovery
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.fleet import KubernetesDiscovery as Settings

ENGINE = EngineConfig(events="tcp://{ip}:5557", events_replay="tcp://{ip}:5558")


def settings(**keys: object) -> Settings:
    return Settings.model_validate({"selector": "app=vllm", "engine": ENGINE, **keys})


def replicas(slices: Sequence[dict[str, Any]], **keys: object) -> list[tuple[str, str]]:
    """Ids and URLs, by what was listed."""
    listed = json.dumps({"metadata": {"resourceVersion": "1"}, "items": slices})
    table = SliceTable(msgspec.json.decode(listed, type=SliceList))
    return [(each.id, each.url) for each in table.replicas(settings(**keys))]


@asynccontextmanager
async def listening(
    cluster: FakeCluster, access: ClusterAccess | None = None
) -> AsyncIterator[Listener]:
    discovery = KubernetesDiscovery(
        settings(), access or ClusterAccess(cluster.url, "models"), pause=short_pause
    )
    async with Listener(discovery).listening() as listener:
        yield listener


def test_only_ready_endpoints_count() -> None:
    """What does not say whether it is ready is."""
    found = replicas(
        [
            endpoint_slice("a", []),
            endpoint_slice(
                "b",
                [
                    endpoint("10.0.0.1", pod="vllm-0"),
                    endpoint("10.0.0.2", ready=False, pod="vllm-1"),
                    endpoint("10.0.0.3", ready=None),
                    {"addresses": ["10.0.0.4"]},
                ],
            ),
        ]
    )
    assert found == [
        ("vllm-0", "http://10.0.0.1:8000"),
        ("10.0.0.3:8000", "http://10.0.0.3:8000"),
        ("10.0.0.4:8000", "http://10.0.0.4:8000"),
    ]


def test_a_pod_counts_once() -> None:
    """In two slices while they are rewritten, and in one of each kind in a cluster with both."""
    found = replicas(
        [
            endpoint_slice("a", [endpoint("fd00::1", pod="vllm-0")], address_type="IPv6"),
            endpoint_slice("b", [endpoint("10.0.0.1", pod="vllm-0")]),
            endpoint_slice("c", [endpoint("10.0.0.1", pod="vllm-0")]),
            endpoint_slice("d", [endpoint("fd00::2", pod="vllm-1")], address_type="IPv6"),
            endpoint_slice("e", [endpoint("db.example", pod="x")], address_type="FQDN"),
        ]
    )
    assert found == [("vllm-0", "http://10.0.0.1:8000"), ("vllm-1", "http://[fd00::2]:8000")]


def test_a_port_has_a_number_or_a_name() -> None:
    """A named one may differ between slices; without it there is nothing to reach."""
    slices = [
        endpoint_slice("a", [endpoint("10.0.0.1")], ports=[{"name": "http", "port": 8001}]),
        endpoint_slice("b", [endpoint("10.0.0.2")], ports=[{"name": "http", "port": 8002}]),
        endpoint_slice("c", [endpoint("10.0.0.3")], ports=[{"name": "metrics", "port": 8003}]),
    ]
    assert [url for _, url in replicas(slices, port="http")] == [
        "http://10.0.0.1:8001",
        "http://10.0.0.2:8002",
    ]
    assert [url for _, url in replicas(slices, port=9000)][2] == "http://10.0.0.3:9000"


def test_a_name_that_is_too_long_for_an_id_gives_way_to_the_address() -> None:
    """Kubernetes allows 253 characters."""
    slices = [endpoint_slice("a", [endpoint("10.0.0.1", pod="p" * 200)])]
    assert replicas(slices) == [("10.0.0.1:8000", "http://10.0.0.1:8000")]


async def test_changes_are_told_as_they_come() -> None:
    """New slices, changed ones, and ones that are gone; events are filled in."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        async with listening(cluster) as listener:
            assert await listener.urls(1) == {"http://10.0.0.1:8000"}
            cluster.put("b", [endpoint("10.0.0.2")])
            assert len(await listener.urls(2)) == 2
            cluster.put("b", [endpoint("10.0.0.2", ready=False)])
            assert await listener.urls(3) == {"http://10.0.0.1:8000"}
            cluster.delete("a")
            assert await listener.urls(4) == set()
    assert listener.lists[0][0].events == "tcp://10.0.0.1:5557"
    assert {request.query["labelSelector"] for request in cluster.requests} == {"app=vllm"}
    assert len([each for each in cluster.requests if "watch" not in each.query]) == 1


async def test_a_watch_that_ends_is_begun_again_where_it_was() -> None:
    """Nothing between the two is missed, nothing is listed again."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        async with listening(cluster) as listener:
            await until(lambda: cluster.num_watches == 1)
            mark = {"metadata": {"resourceVersion": "77"}}
            cluster.tell("BOOKMARK", mark)
            cluster.tell("SOMETHING NEW", {"metadata": {"resourceVersion": "99"}})
            cluster.write(None)
            await until(lambda: len(cluster.requests) >= 3)
            assert cluster.requests[2].query["resourceVersion"] == "77"
            assert "timeoutSeconds" in cluster.requests[2].query
            assert len(listener.lists) == 1


@pytest.mark.parametrize("how", ["an event", "an answer"])
async def test_what_was_forgotten_is_listed_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """410: and that is no trouble to speak of."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        async with listening(cluster) as listener:
            await until(lambda: cluster.num_watches == 1)
            del cluster.slices["a"]
            if how == "an event":
                cluster.forgets = True
            else:
                cluster.refusals = [(410, "too old")]
            cluster.write(None)
            assert await listener.urls(2) == set()
            assert listener.discovery.problem is None
    assert "too old" not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": 3}\n',
        b"x" * 3_000_000,
    ],
    ids=["no json", "no object", "no slice", "endless"],
)
async def test_what_cannot_be_read_is_listed_again(line: bytes) -> None:
    """A change that is lost would never come again."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        async with listening(cluster) as listener:
            await until(lambda: cluster.num_watches == 1)
            cluster.slices["a"] = endpoint_slice("a", [endpoint("10.0.0.9")])
            cluster.write(line)
            assert await listener.urls(2) == {"http://10.0.0.9:8000"}


async def test_who_may_not_is_told_which_role_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    """Once, though it is tried again."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        message = "endpointslices is forbidden"
        cluster.refusals = [(403, message)] * 3
        async with listening(cluster) as listener:
            assert "get, list and watch endpointslices" in await listener.problem()
            assert await listener.urls(1) == {"http://10.0.0.1:8000"}
            await until(lambda: listener.discovery.problem is None)
    assert caplog.text.count(message) == 1


async def test_who_may_only_list_hears_of_changes_too(caplog: pytest.LogCaptureFixture) -> None:
    """Later than others, and is told once which role is missing."""
    async with FakeCluster().running() as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        cluster.forbids_watching = True
        async with listening(cluster) as listener:
            assert "watching is forbidden" in await listener.problem()
            cluster.put("a", [endpoint("10.0.0.2")])
            assert await listener.urls(2) == {"http://10.0.0.2:8000"}
            await until(lambda: len(cluster.requests) > 8)
    assert caplog.text.count("watching is forbidden") == 1


async def test_tries_are_further_and_further_apart() -> None:
    """Up to half a minute, a bit more or less."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async with FakeCluster().running() as cluster:
        cluster.is_broken = True
        discovery = KubernetesDiscovery(
            settings(), ClusterAccess(cluster.url, "models"), pause=pause
        )
        async with Listener(discovery).listening() as listener:
            await until(lambda: len(pauses) >= 9)
            assert "500: etcd is away" in await listener.problem()
    assert all(0.75 * 2**n <= pauses[n] <= 1.25 * 2**n for n in range(5))
    assert all(20 <= each <= 40 for each in pauses[5:])


async def test_nobody_listens_at_all() -> None:
    """The reason names the server."""
    listener = Listener(
        KubernetesDiscovery(
            settings(), ClusterAccess("http://127.0.0.1:1", "models"), pause=short_pause
        )
    )
    async with listener.listening():
        assert "no connection to the API server" in await listener.problem()


async def test_the_token_is_read_for_every_request(tmp_path: Path) -> None:
    """Kubernetes renews it about every hour."""
    token = tmp_path / "token"
    token.write_text("one\n")
    async with FakeCluster().running() as cluster:
        access = ClusterAccess(cluster.url, "models", token)
        async with listening(cluster, access):
            await until(lambda: cluster.num_watches == 1)
            token.write_text("two\n")
            cluster.write(None)
            await until(lambda: len(cluster.requests) >= 3)
    sent = [request.headers["authorization"] for request in cluster.requests]
    assert sent[:3] == ["Bearer one", "Bearer one", "Bearer two"]
    assert cluster.requests[0].match_info["namespace"] == "models"


async def test_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    """As other files of the service account."""
    access = ClusterAccess("https://127.0.0.1:1", "models", None, tmp_path / "ca.crt")
    async with FakeCluster().running() as cluster, listening(cluster, access) as listener:
        assert await listener.problem() == f"{access.ca_file}: No such file or directory"


async def test_the_server_is_known_by_the_authority_of_the_cluster(tmp_path: Path) -> None:
    """Nobody else gets the token."""
    authority, other, tls = trustme.CA(), trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    other.cert_pem.write_to_path(str(tmp_path / "other.crt"))
    async with FakeCluster().running(tls) as cluster:
        cluster.put("a", [endpoint("10.0.0.1")])
        access = ClusterAccess(cluster.url, "models", None, tmp_path / "other.crt")
        async with listening(cluster, access) as listener:
            assert "certificate" in await listener.problem()
        assert not cluster.requests
        access = ClusterAccess(cluster.url, "models", None, tmp_path / "ca.crt")
        async with listening(cluster, access) as listener:
            assert await listener.urls(1) == {"http://10.0.0.1:8000"}


def test_access_is_that_of_the_pod(tmp_path: Path) -> None:
    """Its namespace, too, unless another one is configured."""
    (tmp_path / "namespace").write_text("models")
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = ClusterAccess.of(settings(), pod, tmp_path)
    assert (access.url, access.namespace) == ("https://[fd00::1]:6443", "models")
    assert (access.token_file, access.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    assert ClusterAccess.of(settings(namespace="other"), pod, tmp_path).namespace == "other"


def test_a_server_that_is_named_is_asked_without_a_token() -> None:
    """Such as `kubectl proxy`, which adds its own."""
    access = ClusterAccess.of(settings(server="http://127.0.0.1:8001/"), {})
    assert access == ClusterAccess("http://127.0.0.1:8001", "default")


def test_outside_of_a_cluster_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start: that does not pass."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = HeadstartConfig.model_validate({"fleet": {"discovery": settings().model_dump()}})
    with pytest.raises(UserError, match="kubectl proxy"):
        discovery_of(config)
