"""Files that hold keys of whoever may ask."""

from __future__ import annotations

from pathlib import Path

from gateway.settings.user_error import UserError


def read_keys(file: str, setting: str) -> list[str]:
    """Keys, one a line; empty lines and lines that begin with # are skipped. At least one.

    Raises UserError, which names the `setting` that the file's name comes from.
    """
    path = Path(file).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}: {path} cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"{setting}: {path} holds no key")
    return keys
