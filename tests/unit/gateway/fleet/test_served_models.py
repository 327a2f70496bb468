"""Names of models and adapters over a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.served_models import Served, ServedModels, ServedModelsError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.base import BlockHash
from prefix_store.event_source import EventSource
from prefix_store.events import MEDIUM_MEMORY, BlockStored, EventBatch, decode_batch, encode
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.prompt_label import PromptLabel
from prefix_store.residency import Residency
from prefix_store.tier_events import Announced, stored_events

X, Y = "a" * 32, "b" * 32
"""Digests of two adapters."""


def engine(number: int, *, adapters: dict[str, str] | None = None, **keys: Any) -> dict[str, Any]:
    listed = [{"name": name, "digest": digest} for name, digest in (adapters or {}).items()]
    return {"id": f"engine-{number}", "adapters": listed, **keys}


def config_of(*engines: dict[str, Any], **keys: Any) -> HeadstartConfig:
    return HeadstartConfig.model_validate(
        {
            "model": {"name": "small", "max_model_len": 4096},
            "more_models": [{"name": "large", "path": "/large", "max_model_len": 8192}],
            "engines": list(engines),
            **keys,
        }
    )


def served_by(*engines: dict[str, Any], **keys: Any) -> ServedModels:
    return ServedModels.of(config_of(*engines, **keys))


def test_a_name_means_a_model_with_its_limits() -> None:
    """Block size from the replicas, the context from the model; what nobody serves is unknown."""
    models = served_by(engine(0, block_size=64))
    small = models.find("small")
    assert small is not None
    assert (small.model, small.block_size, small.max_model_len) == ("small", 64, 4096)
    assert small.root("salt") == routing_root("small", "salt")
    assert models.find("large") is None
    assert models.names == ("small",)


def test_an_adapter_is_its_weights_whatever_it_is_called() -> None:
    """Two names of one adapter share their predictions; the base and others have their own."""
    models = served_by(engine(0, adapters={"sql": X, "law": Y}), engine(1, adapters={"sql-v2": X}))
    roots = {name: served.root("s") for name in models.names if (served := models.find(name))}
    assert set(roots) == {"small", "sql", "law", "sql-v2"}
    assert roots["sql"] == roots["sql-v2"]
    assert len(set(roots.values())) == 3


def test_a_request_goes_only_where_its_name_is_served() -> None:
    """The engine is asked by that name, so another name of the same weights does not help."""
    models = served_by(
        engine(0, adapters={"sql": X}), engine(1, adapters={"sql-v2": X}), engine(2, model="large")
    )
    serving = {
        name: [n for n in range(3) if models.serves(f"engine-{n}", name)] for name in models.names
    }
    assert serving == {"small": [0, 1], "large": [2], "sql": [0], "sql-v2": [1]}
    assert not models.serves("engine-9", "small")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"adapters": {"sql": Y}}, r"engine-1: the adapter 'sql' has the weights b+, and .* a+:"),
        (
            {"adapters": {"sql": X}, "model": "large"},
            "'sql' is one for large, and elsewhere one for small",
        ),
        ({"adapters": {"small": X}}, "'small' has the name of a model"),
        ({"block_size": 64}, "block_size is 64, but other replicas of small have 32"),
    ],
)
def test_a_name_that_means_two_things_is_refused(second: dict[str, Any], reason: str) -> None:
    """Nobody could say which one a client asks for."""
    with pytest.raises(ServedModelsError, match=reason):
        served_by(engine(0, adapters={"sql": X}), engine(1, **second))


def test_an_adapter_that_stands_twice_is_refused() -> None:
    """Also with equal weights: it is a slip."""
    twice = engine(0)
    twice["adapters"] = [{"name": "sql", "digest": X}, {"name": "sql", "digest": Y}]
    with pytest.raises(ServedModelsError, match="'sql' stands twice"):
        served_by(twice)


def test_different_models_may_have_different_block_sizes() -> None:
    """Their blocks never meet."""
    models = served_by(engine(0), engine(1, model="large", block_size=128))
    large = models.find("large")
    assert large is not None
    assert large.block_size == 128


def test_an_adapter_without_files_says_what_to_do(tmp_path: Path) -> None:
    """A gateway elsewhere cannot read them and needs the digest."""
    broken = engine(0)
    broken["adapters"] = [{"name": "sql", "path": str(tmp_path)}]
    with pytest.raises(ServedModelsError, match=r"engine-0: .*'sql'.*headstart model digest"):
        served_by(broken)


async def test_replicas_come_and_go() -> None:
    """An adapter is known while somebody serves it; a base model stays."""
    models = served_by(engine(0))
    await models.add_replica(EngineConfig.model_validate(engine(1, adapters={"sql": X})))
    assert models.find("sql") is not None
    assert models.serves("engine-1", "sql")
    models.remove_replica("engine-1")
    models.remove_replica("engine-1")
    assert models.find("sql") is None
    models.remove_replica("engine-0")
    assert models.find("small") is not None
    assert not models.serves("engine-0", "small")


async def test_a_replica_that_contradicts_others_changes_nothing() -> None:
    """It is refused, and what was there goes on."""
    models = served_by(engine(0, adapters={"sql": X}), engine(1))
    for keys in ({"adapters": {"sql": Y}}, {"block_size": 64}):
        with pytest.raises(ServedModelsError):
            await models.add_replica(EngineConfig.model_validate(engine(1, **keys)))
    with pytest.raises(ServedModelsError, match="'huge' is not among"):
        await models.add_replica(EngineConfig.model_validate(engine(2, model="huge")))
    assert models.names == ("small", "sql")
    assert models.serves("engine-1", "small")
    assert not models.serves("engine-2", "small")


async def test_a_replica_may_be_given_other_adapters() -> None:
    """Its old names do not count against its new ones."""
    models = served_by(engine(0, adapters={"sql": X}))
    await models.add_replica(EngineConfig.model_validate(engine(0, adapters={"sql": Y})))
    sql = models.find("sql")
    assert sql is not None
    assert sql.adapter == Y


def test_events_of_a_replica_are_keyed_by_what_its_names_mean() -> None:
    """The names in an engine's events are its own. Adapters that are not in the configuration are
    nobody's, and so is everything of a replica that left."""
    models = served_by(
        engine(0, adapters={"sql": X}), engine(1, adapters={"law": Y}), engine(2, model="large")
    )
    root, other = models.root_of("engine-0"), models.root_of("engine-2")
    assert root("s", None) == routing_root("small", "s")
    assert root("s", "sql") == routing_root("small", "s", X)
    assert root("s", "law") is None
    assert other("s", None) == routing_root("large", "s")
    models.remove_replica("engine-0")
    assert root("s", None) is None


def test_events_of_a_store_name_adapters_by_their_content() -> None:
    """One name for all replicas on its host; what is known to no replica here may be asked for
    later."""
    models = served_by(engine(0, adapters={"sql": X}))
    root = models.root_of_store("store-0")
    sql = models.find("sql")
    assert sql is not None
    assert root("s", X) == sql.root("s")
    assert root("s", None) == routing_root("small", "s")
    assert root("s", Y) == routing_root("small", "s", Y)


def test_events_of_a_store_that_serves_several_models_name_them() -> None:
    """Without a name it must be clear from the replicas on its host."""
    remote = [{"id": "far", "events": "tcp://far:1", "events_replay": "tcp://far:2"}]
    models = served_by(
        engine(0), engine(1, model="large"), engine(2, model="large", store="far"),
        remote_stores=remote,
    )  # fmt: skip
    near, far = models.root_of_store("store-0"), models.root_of_store("far")
    assert near("s", None) is None
    assert near("s", "@large") == routing_root("large", "s")
    assert near("s", f"{X}@small") == routing_root("small", "s", X)
    assert near("s", "@unknown") is None
    assert far("s", None) == routing_root("large", "s")


def blocks_found(residency: Residency, served: Served, salt: str) -> int:
    prompt = extend_chain(served.root(salt), as_token_ids(range(64)), 32)
    return residency.match(prompt).available_blocks


def test_what_engines_and_stores_say_of_an_adapter_is_found_under_each_of_its_names() -> None:
    """An engine says its own name for it, a store the digest, as a connector labelled it there;
    the base model and other adapters find nothing."""
    models = served_by(engine(0, adapters={"sql": X, "law": Y}), engine(1, adapters={"sql-v2": X}))
    tokens = as_token_ids(range(64))
    label = PromptLabel("salt", X).encode()
    announced = [
        Announced(BlockHash(bytes([i + 1]) * 16), BlockHash(b"\1" * 16) if i else None,
                  tokens[32 * i : 32 * i + 32].tobytes(), "" if i else label)
        for i in range(2)
    ]  # fmt: skip
    from_store = stored_events(announced, MEDIUM_MEMORY)
    keys: list[list[Any] | None] = [["sql-v2", "salt"], ["sql-v2"]]
    from_engine = BlockStored(
        [1, 2], None, list(range(64)), 32, lora_name="sql-v2", extra_keys=keys, group_idx=0
    )
    for root_of, events in (
        (models.root_of_store("store-0"), from_store),
        (models.root_of("engine-1"), [from_engine]),
    ):
        residency = Residency(1024**2)
        source = EventSource("source", residency, model="small", block_size=32, root_of=root_of)
        source.apply(decode_batch(encode(EventBatch(1.0, events))))
        found = {
            name: blocks_found(residency, served, "salt")
            for name in models.names
            if (served := models.find(name))
        }
        assert found == {"small": 0, "sql": 2, "law": 0, "sql-v2": 2}


def test_what_will_be_discovered_is_known_before() -> None:
    """A discovered fleet serves what its common description says, before the first replica."""
    described = {**engine(0, adapters={"sql": X}, block_size=16), "report_events": False}
    place = {"dns": {"name": "vllm"}, "file": {"path": "replicas.yaml"}}
    for kind, keys in place.items():
        discovery = {"kind": kind, "engine": described, **keys}
        models = served_by({}, fleet={"discovery": discovery})
        sql = models.find("sql")
        assert sql is not None
        assert sql.block_size == 16
        assert models.names == ("small", "sql")
        assert not models.serves("engine-0", "sql")
