"""What goes wrong with a fleet by the doing of whoever changes it."""

from __future__ import annotations

from gateway.settings.user_error import UserError


class UnknownReplicaError(UserError):
    """No replica has this id."""


class ReplicaExistsError(UserError):
    """A replica has this id already."""
