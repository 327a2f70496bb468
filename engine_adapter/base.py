"""What the gateway knows of engines: rendered prompts and the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefix_store.base import BlockHash
from prefix_store.hashing import TokenIds


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine will see it."""

    num_tokens: int
    block_hashes: Sequence[BlockHash]
    """The chain of its full blocks, below the routing root of the tenant."""
    pieces: Sequence[TokenIds]
    """Its tokens, in pieces; at least one."""

    @property
    def token_ids(self) -> TokenIds:
        """Shape (num_tokens,), int32. Put together when it is asked for: requests only need the
        hashes."""
        return np.concatenate(self.pieces)


class EngineAdapterError(Exception):
    """Base of every error of this package."""


class RenderingError(EngineAdapterError):
    """The prompt cannot be rendered here (the engine may still answer it, or refuse it)."""


class EngineUnreachableError(EngineAdapterError):
    """No connection to the engine."""


class EngineRefusedError(EngineUnreachableError):
    """Its host answers, and nothing listens there: the engine is certainly not running."""


class EngineTimeoutError(EngineAdapterError):
    """The engine accepted the request and then fell silent."""


class EngineLostError(EngineAdapterError):
    """The engine broke the connection before its answer was complete."""


class LaunchError(EngineAdapterError):
    """An engine could not be started; the message says what to change."""
