"""Every example is a configuration that this version accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config_file import load_config
from policies.config import EngineConfig, HeadstartConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


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


def test_engines_on_one_host_have_ports_of_their_own() -> None:
    """Two engines cannot share one."""
    urls = [engine.url for engine in load_config(EXAMPLES / "two-engines.yaml").engines]
    assert len(set(urls)) == 2
