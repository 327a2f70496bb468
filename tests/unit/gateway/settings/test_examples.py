"""Every example is a configuration that this version accepts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from store_engine import Engine, Prompt

from gateway.settings.config_file import load_config, parse_config
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.client import StoreClient

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_is_valid(path: Path) -> None:
    """Examples that do not run teach the wrong thing."""
    assert load_config(path) != HeadstartConfig()


def test_full_example_names_every_common_key() -> None:
    """The reader sees what there is; the values shown are the defaults unless said otherwise."""
    config = load_config(EXAMPLES / "headstart.yaml")
    default = HeadstartConfig()
    assert config.listen == default.listen
    assert config.limits == default.limits
    assert config.engines == (EngineConfig(),)
    assert config.model_fields_set >= {"listen", "model", "engines", "store", "limits"}


def test_the_store_of_three_tiers_starts_with_its_policies(
    start_store: Any, tmp_path: Path
) -> None:
    """As it stands there, but for its size and the directory; without a Redis it waits for one."""
    keys = yaml.safe_load((EXAMPLES / "tiers.yaml").read_text())["store"]
    keys["memory"] |= {"capacity": "4MiB", "pin_budget": "1MiB"}
    keys["disk"] |= {"capacity": "8MiB", "path": str(tmp_path / "blocks")}
    keys["redis"] |= {"url": "redis://127.0.0.1:1"}
    client = StoreClient.connect(start_store(**keys).socket, timeout_s=5)
    engine = Engine(client)
    pinned = Prompt(1, 8)
    assert engine.serve(pinned, tenant="acme", prefix="contract-7", num_tokens=300) == 0
    assert engine.serve(pinned, tenant="acme", prefix="contract-7", num_tokens=300) == 8
    for seed in range(2, 20):
        engine.serve(Prompt(seed, 8), session="batch-1")
    assert [(pin.prefix, pin.num_blocks) for pin in client.pins().pins] == [("contract-7", 8)]
    assert engine.load(pinned) == 8
    assert [tier.name for tier in client.stats().tiers] == ["disk", "redis"]
    client.close()


def test_the_example_of_tiers_names_every_kind_of_decision() -> None:
    """Whoever copies it sees what there is to decide."""
    store = load_config(EXAMPLES / "tiers.yaml").store
    assert store is not None
    assert store.model_fields_set >= {"memory", "disk", "redis", "loading", "retention"}
    for tier in (store.memory, store.disk, store.redis):
        assert tier is not None
        assert tier.model_fields_set >= {"capacity", "eviction", "admission"}


def test_the_readme_shows_a_configuration_that_is_valid() -> None:
    """It is what people paste first."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    (snippet,) = re.findall(r"^    store:\n(?:     +.+\n)+", readme, re.MULTILINE)
    store = parse_config(textwrap.dedent(snippet), source="README.md").store
    assert store is not None
    assert store.redis is not None


def test_engines_on_one_host_have_ports_of_their_own() -> None:
    """Two engines cannot share one."""
    urls = [engine.url for engine in load_config(EXAMPLES / "two-engines.yaml").engines]
    assert len(set(urls)) == 2
