"""A watched file that lists replicas: what may stand in it, and what happens when it is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from discovered import Listener
from waiting import until

from gateway.fleet.discovery.engine_list import read_engines
from gateway.fleet.discovery.file import FileDiscovery
from gateway.settings.config_errors import ConfigError
from gateway.settings.config_file import load_config, parse_config
from policies import fleet
from policies.config import HeadstartConfig, ModelConfig
from policies.engine import EngineConfig

CONFIG = HeadstartConfig(model=ModelConfig(name="small"), more_models=(ModelConfig(name="large"),))
TEMPLATE = EngineConfig(model="large", block_size=16, max_running=32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replicas.yaml"


def mistake_in(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_engines(path, CONFIG, EngineConfig())
    return str(refused.value)


def write(path: Path, text: str) -> None:
    path.write_text(text)


def discovery(path: Path) -> FileDiscovery:
    return FileDiscovery(fleet.FileDiscovery(path=str(path)), CONFIG, poll_s=0.005)


def test_entries_say_what_differs(path: Path) -> None:
    """The rest comes from the template, but for their places."""
    path.write_text(
        "- {id: a, url: http://a:1}\n- {id: b, url: http://b:1, model: small, block_size: 32}\n"
    )
    a, b = read_engines(path, CONFIG, TEMPLATE)
    assert (a.model, a.block_size, a.max_running) == ("large", 16, 32)
    assert (b.id, b.url, b.block_size, b.max_running) == ("b", "http://b:1", 32, 32)


@pytest.mark.parametrize(
    "entry",
    [
        "{id: a, urll: http://a}",
        "{id: a, url: nowhere}",
        "{id: a, max_running: none}",
        "{id: a, adapters: [{name: x}]}",
        "text",
        "{id: a, id: b}",
    ],
)
def test_errors_are_those_of_the_configuration(path: Path, entry: str) -> None:
    """The same sentence, with the line of this file."""
    with pytest.raises(ConfigError) as refused:
        parse_config(f"engines:\n- {{id: z}}\n- {entry}\n", source="F")
    wanted = str(refused.value).replace("F line 3", f"{path} line 2")
    assert mistake_in(path, f"- {{id: z}}\n- {entry}\n") == wanted.replace("line 3", "line 2")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; write [] when there are no replicas"),
        ("# nothing\n", "is empty; write [] when there are no replicas"),
        ("engines: []", "must be a list like `engines`"),
        ("- {id: [", "line 1: not valid YAML"),
        (
            "- id: a\n- url: http://b\n  id: a\n",
            "line 3: engines: a: stands twice (first in line 1)",
        ),
        (
            "- id: a\n  model: huge\n",
            "engines: a: the model 'huge' is not among ['large', 'small']",
        ),
        ("- id: a\n  block_size: 16\n", "block_size is 16, but fleet.discovery.engine says 32"),
        ("- id: a\n  store: s\n", "engines: a: the store 's' is not among ['store-0']"),
    ],
)
def test_what_else_is_refused(path: Path, text: str, sentence: str) -> None:
    """Each with what to mend; an empty file may be one that is being written."""
    assert sentence in mistake_in(path, text)


def test_a_file_that_cannot_be_read_is_said_to_be(path: Path) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=r"replicas\.yaml: cannot be read \(No such file"):
        read_engines(path, CONFIG, EngineConfig())


async def test_a_file_that_is_replaced_is_noticed(path: Path) -> None:
    """Also by one that is as large and as old."""
    write(path, "- {id: a}")
    os.utime(path, (1, 1))
    async with Listener(discovery(path)).listening() as listener:
        await listener.urls(1)
        other = path.with_suffix(".new")
        write(other, "- {id: b}")
        os.utime(other, (1, 1))
        os.replace(other, path)
        await listener.urls(2)
    assert [each.id for (each,) in listener.lists] == ["a", "b"]


async def test_each_wrong_file_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever changes it wants to see that it is still wrong; nobody wants to see it twice."""
    write(path, "- {id: a}")
    async with Listener(discovery(path)).listening() as listener:
        await listener.urls(1)
        for count, text in enumerate(("- {id: ''}", "- {id: ''} # mended?", "-"), start=1):
            write(path, text)
            await until(lambda count=count: len(caplog.messages) == count)  # type: ignore[misc]
        os.unlink(path)
        await until(lambda: "cannot be read" in caplog.text)
        write(path, "- {id: b}")
        await listener.urls(2)
    assert len(caplog.messages) == 4


def test_the_example_of_a_list_fits_the_example_that_names_it() -> None:
    """Whoever copies both has a fleet."""
    examples = Path(__file__).parents[5] / "examples"
    config = load_config(examples / "fleet.yaml")
    assert isinstance(config.fleet.discovery, fleet.FileDiscovery)
    listed = examples / "fleet-replicas/replicas.yaml"
    engines = read_engines(listed, config, config.fleet.discovery.engine)
    assert {(each.block_size, each.publisher_binds) for each in engines} == {(16, True)}
