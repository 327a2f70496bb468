"""The configuration model: defaults, units, refusals."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from policies.config import HeadstartConfig


def test_an_empty_file_is_valid() -> None:
    """Every key has a default."""
    config = HeadstartConfig.model_validate({})
    assert (config.host, config.port) == ("127.0.0.1", 8080)
    assert config.store is not None


def test_sizes_and_durations_take_units() -> None:
    """4GiB and 30s mean what they say."""
    config = HeadstartConfig.model_validate(
        {"store": {"memory": {"capacity": "4GiB"}, "lease": "1m"}, "limits": {"max_wait": 2}}
    )
    assert config.store is not None
    assert config.store.memory.capacity == 4 * 2**30
    assert config.store.lease == 60.0
    assert config.limits.max_wait == 2.0


def test_the_yaml_chooses_the_eviction_policy() -> None:
    """The validated model is the policy object."""
    config = HeadstartConfig.model_validate({"store": {"memory": {"eviction": {"kind": "fifo"}}}})
    assert config.store is not None
    assert config.store.memory.eviction.kind == "fifo"
    assert len(config.store.memory.eviction.queue()) == 0


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "listen"),
        ({"engines": []}, "engines"),
        ({"engines": [{"url": "ftp://x"}]}, "engines.0.vllm.url"),
        ({"engines": [{}, {}]}, ""),
        ({"store": {"memory": {"capcity": 1}}}, "store.memory.capcity"),
        ({"store": {"memory": {"eviction": {"kind": "lrux"}}}}, "store.memory.eviction"),
        ({"store": {"lease": "soon"}}, "store.lease"),
        ({"limits": {"max_body": 3}}, "limits.max_body"),
        ({"limits": {"max_body": "1GiB"}}, "limits"),
    ],
)
def test_impossible_values_are_refused_with_their_path(data: object, path: str) -> None:
    """Unknown keys and impossible values name the key."""
    with pytest.raises(ValidationError) as caught:
        HeadstartConfig.model_validate(data)
    found = {".".join(str(part) for part in error["loc"]) for error in caught.value.errors()}
    assert path in found or path.replace(".vllm", "") in found


EVENTS = {"events": "tcp://{ip}:5557", "events_replay": "tcp://{ip}:5558"}


@pytest.mark.parametrize(
    ("discovery", "reason"),
    [
        ({"kind": "dns", "name": "vllm"}, 'events is missing: write events: "tcp://{ip}:5557"'),
        (
            {"kind": "dns", "name": "vllm", "engine": {"events": "tcp://{ip}:1"}},
            "events_replay is missing",
        ),
        (
            {"kind": "dns", "name": "vllm", "engine": {**EVENTS, "events": "tcp://10.0.0.1:1"}},
            "is the same place for all replicas",
        ),
        (
            {"kind": "dns", "name": "vllm", "engine": {**EVENTS, "events": "tcp://{ip}:{port}"}},
            "only {ip} can be filled in",
        ),
        (
            {"kind": "dns", "name": "vllm", "engine": {**EVENTS, "events_bind": "gateway"}},
            "events_bind: must be engine",
        ),
        (
            {"kind": "dns", "name": "vllm", "engine": {**EVENTS, "url": "http://10.0.0.1:1"}},
            "id and url come from the address",
        ),
        ({"kind": "file", "path": "x", "engine": {"id": "a"}}, "id and url stand in the file"),
        (
            {"kind": "dns", "name": "vllm", "engine": {**EVENTS, "model": "other"}},
            "fleet.discovery.engine: the model 'other' is not among",
        ),
        (
            {"kind": "kubernetes", "selector": "a=b", "engine": EVENTS, "port": "A port"},
            "'A port' is neither a number up to 65535 nor the name of a port",
        ),
        (
            {"kind": "kubernetes", "selector": "a=b", "engine": EVENTS, "namespace": "a/b"},
            "'a/b' is not the name of a namespace",
        ),
        (
            {"kind": "kubernetes", "selector": "a=b", "engine": EVENTS, "server": "api"},
            "'api' is not an http(s) URL",
        ),
    ],
)
def test_a_discovery_that_cannot_work_is_refused(discovery: object, reason: str) -> None:
    """Before it finds nothing and nobody knows why."""
    with pytest.raises(ValidationError) as refused:
        HeadstartConfig.model_validate({"fleet": {"discovery": discovery}})
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "discovery",
    [
        {"kind": "dns", "name": "vllm", "engine": EVENTS},
        {"kind": "dns", "name": "vllm", "engine": {"report_events": False}},
        {"kind": "file", "path": "replicas.yaml", "engine": {"block_size": 16}},
        {"kind": "kubernetes", "selector": "a=b", "engine": EVENTS, "port": "http"},
    ],
)
def test_a_discovery_survives_being_written_and_read_again(discovery: object) -> None:
    """As it is handed to a store, with `engines` as they are by default."""
    config = HeadstartConfig.model_validate({"fleet": {"discovery": discovery}})
    assert HeadstartConfig.model_validate_json(config.model_dump_json()) == config


def test_replicas_are_listed_or_discovered() -> None:
    """Both would leave open which count."""
    discovery = {"kind": "file", "path": "replicas.yaml"}
    with pytest.raises(
        ValidationError, match=r"engines: not used with fleet\.discovery\.kind: file"
    ):
        HeadstartConfig.model_validate(
            {"engines": [{"id": "a"}], "fleet": {"discovery": discovery}}
        )
