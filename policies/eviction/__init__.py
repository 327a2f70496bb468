"""Eviction policies. Add one: a class with a `kind` and a `queue()`, its name here, its tests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.eviction.arc import ArcEviction
from policies.eviction.base import Block, EvictionQueue
from policies.eviction.fifo import FifoEviction
from policies.eviction.gdsf import GdsfEviction
from policies.eviction.lfu_da import LfuDaEviction
from policies.eviction.lru import LruEviction
from policies.eviction.reuse_aware import ReuseAwareEviction
from policies.eviction.s3_fifo import S3FifoEviction

Eviction = Annotated[
    LruEviction
    | FifoEviction
    | LfuDaEviction
    | GdsfEviction
    | ArcEviction
    | S3FifoEviction
    | ReuseAwareEviction,
    Field(discriminator="kind"),
]

__all__ = [
    "ArcEviction",
    "Block",
    "Eviction",
    "EvictionQueue",
    "FifoEviction",
    "GdsfEviction",
    "LfuDaEviction",
    "LruEviction",
    "ReuseAwareEviction",
    "S3FifoEviction",
]
