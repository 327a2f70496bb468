"""The one error that is the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """The message is a plain sentence that says what to change: it is shown without a traceback."""
