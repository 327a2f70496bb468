"""Fixtures that all tests share."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from live_stack import LiveStack

from gateway.model.fetch import ensure_demo_model

settings.register_profile("headstart", deadline=None)  # machines are busy at times
settings.load_profile("headstart")


def pytest_configure() -> None:
    """Background jobs of a shell ignore Ctrl-C, and so would what tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The other processes would wait for a long one that comes last."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The real model, fetched into the user's cache at the first use."""
    return ensure_demo_model()


@dataclass(frozen=True)
class Engines:
    """Two engines at one store. They start together: most of that time they import on one core."""

    plain: LiveStack
    adapted: LiveStack | None
    """With LoRA adapters; None where no test wants it."""


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Engines]:
    wanted = any("adapted" in getattr(item, "fixturenames", ()) for item in request.session.items)
    with contextlib.ExitStack() as opened:
        plain = opened.enter_context(contextlib.closing(LiveStack(model_dir)))
        plain.start_store()
        plain.launch_engine()
        adapted = None
        if wanted:
            from adapters import engine_with_adapters  # it imports torch

            root = opened.enter_context(tempfile.TemporaryDirectory(prefix="headstart-test-"))
            adapted = opened.enter_context(
                contextlib.closing(engine_with_adapters(model_dir, Path(root), plain))
            )
            adapted.launch_engine()
            adapted.await_engine()
        plain.await_engine()
        plain.await_connector()
        yield Engines(plain, adapted)


@pytest.fixture(scope="session")
def engine_stack(engines: Engines) -> LiveStack:
    """Store and engine, shared by all tests."""
    return engines.plain


@pytest.fixture
def adapted(engines: Engines) -> LiveStack:
    """Another engine at the same store, with the adapters of tests/adapters.py."""
    assert engines.adapted is not None
    engines.adapted.await_connector()
    return engines.adapted


@pytest.fixture(scope="session")
def engine_url(engine_stack: LiveStack) -> str:
    """Base URL of the running engine."""
    return engine_stack.engine_url


@pytest.fixture(scope="session")
def stack(engine_stack: LiveStack) -> LiveStack:
    """Store, engine and gateway."""
    engine_stack.start_gateway()
    return engine_stack
