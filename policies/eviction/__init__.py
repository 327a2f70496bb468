"""Eviction policies. Add one: a class with a `kind` and a `queue()`, its name here, its tests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.eviction.base import Block, EvictionQueue
from policies.eviction.fifo import FifoEviction
from policies.eviction.lru import LruEviction

Eviction = Annotated[LruEviction | FifoEviction, Field(discriminator="kind")]

__all__ = ["Block", "Eviction", "EvictionQueue", "FifoEviction", "LruEviction"]
