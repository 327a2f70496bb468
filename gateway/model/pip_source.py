"""Asks pip where a package comes from, so that the user's own index settings hold here too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.settings.user_error import UserError


class PipError(UserError):
    """pip did not find the package."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One wheel of one package."""

    name: str
    version: str
    wheel: str
    """The file's name."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


_SELECT = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")


def find_url(requirement: Requirement) -> str:
    """Where pip would download the wheel from. Raises PipError."""
    report = _pip(
        "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-",
        *_SELECT, str(requirement),
    )  # fmt: skip
    try:
        return str(json.loads(report)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise PipError(f"pip did not say where {requirement} is; upgrade pip") from error


def download_with_pip(requirement: Requirement, directory: Path) -> Path:
    """Let pip download the wheel: slower to resume, but it knows every kind of index."""
    _pip("download", "--quiet", "--dest", str(directory), *_SELECT, str(requirement))
    return directory / requirement.wheel


def _pip(*arguments: str) -> str:
    command: Sequence[str] = (sys.executable, "-m", "pip", *arguments)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise PipError(f"pip found no {arguments[-1]}: {reason.removeprefix('ERROR: ')}")
    return done.stdout
