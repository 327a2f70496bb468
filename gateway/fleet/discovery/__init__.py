"""How replicas are found without naming each of them. Add one: a class with `lists`, its settings
in policies/fleet.py, its name in `discovery_of`, the contract suite."""

from __future__ import annotations

import os

from gateway.fleet.discovery.base import Discovery
from gateway.fleet.discovery.cluster_api import ClusterAccess
from gateway.fleet.discovery.dns import DnsDiscovery
from gateway.fleet.discovery.file import FileDiscovery
from gateway.fleet.discovery.kubernetes import KubernetesDiscovery
from policies import fleet
from policies.config import HeadstartConfig

__all__ = ["Discovery", "discovery_of"]


def discovery_of(config: HeadstartConfig) -> Discovery | None:
    """None where the replicas are those of the configuration. Raises UserError for what cannot
    work here."""
    match config.fleet.discovery:
        case fleet.StaticDiscovery():
            return None
        case fleet.FileDiscovery() as settings:
            return FileDiscovery(settings, config)
        case fleet.DnsDiscovery() as settings:
            return DnsDiscovery(settings)
        case fleet.KubernetesDiscovery() as settings:
            return KubernetesDiscovery(settings, ClusterAccess.of(settings, os.environ))
