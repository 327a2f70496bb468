"""Names over fleets that change: one name, one thing, wherever it is asked."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.served_models import ServedModels, ServedModelsError
from policies.config import ModelConfig
from policies.engine import AdapterConfig, EngineConfig

MODELS = ("small", "large")
NAMES = ("sql", "law", "small")
DIGESTS = ("a" * 32, "b" * 32)

adapters = st.lists(
    st.builds(AdapterConfig, name=st.sampled_from(NAMES), digest=st.sampled_from(DIGESTS)),
    max_size=3,
).map(tuple)
engines = st.builds(
    EngineConfig,
    id=st.sampled_from(["e0", "e1", "e2"]),
    model=st.sampled_from([None, *MODELS]),
    adapters=adapters,
    block_size=st.sampled_from([16, 32, 32, 32]),
)
steps = st.lists(st.one_of(engines, st.sampled_from(["e0", "e1", "e2"])), max_size=12)


async def play(changes: list[EngineConfig | str]) -> tuple[ServedModels, dict[str, EngineConfig]]:
    """The names after these changes, and the replicas that were accepted and are still there."""
    served = ServedModels(ModelConfig(name=name, path=f"/{name}") for name in MODELS)
    there: dict[str, EngineConfig] = {}
    for change in changes:
        if isinstance(change, str):
            served.remove_replica(change)
            there.pop(change, None)
            continue
        try:
            await served.add_replica(change)
        except ServedModelsError:
            continue
        there[change.id] = change
    return served, there


@given(steps)
def test_a_name_means_the_same_on_every_replica_that_serves_it(
    changes: list[EngineConfig | str],
) -> None:
    """Whatever came and went: exactly the accepted replicas serve, each under its own names; what
    a name means is what each of them means by it; equal roots are equal weights of one model."""
    served, there = asyncio.run(play(changes))
    meanings: dict[str, tuple[str, str]] = {}
    for engine in there.values():
        model = engine.model or MODELS[0]
        own = {model: ""} | {each.name: each.digest or "" for each in engine.adapters}
        for name in {*served.names, *own}:
            assert served.serves(engine.id, name) == (name in own)
        for name, digest in own.items():
            found = served.find(name)
            assert found is not None
            assert (found.model, found.adapter, found.block_size) == (
                model,
                digest,
                engine.block_size,
            )
            assert meanings.setdefault(name, (model, digest)) == (model, digest)
            assert served.root_of(engine.id)("s", None if name == model else name) == found.root(
                "s"
            )
    for name in set(served.names) - set(meanings):
        assert name in MODELS  # known since its first replica
    roots = {name: found.root("s") for name in meanings if (found := served.find(name))}
    assert len(set(roots.values())) == len(set(meanings.values()))
