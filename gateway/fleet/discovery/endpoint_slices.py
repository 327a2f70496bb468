"""EndpointSlices of Kubernetes (discovery.k8s.io/v1), as far as they say where ready pods are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gateway.fleet.discovery.template import replica_at
from policies.engine import EngineConfig
from policies.fleet import KubernetesDiscovery


class Meta(msgspec.Struct, rename="camel"):
    """Of an object or of a list."""

    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct):
    """Of an endpoint. What is not said counts as true."""

    ready: bool | None = None


class Target(msgspec.Struct):
    """What is behind an endpoint."""

    kind: str = ""
    name: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """Its addresses are interchangeable."""

    addresses: list[str] | None = None
    conditions: Conditions | None = None
    target_ref: Target | None = None


class Port(msgspec.Struct):
    """Of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """Some of the endpoints of a service, with addresses of one kind."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    """What a list request answers."""

    metadata: Meta
    items: list[EndpointSlice] | None = None


class Told(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw
    """A slice; for ERROR a Status."""


class Change(msgspec.Struct):
    """What became of a slice."""

    type: str
    """ADDED, MODIFIED, DELETED; BOOKMARK: nothing but the version is news."""
    slice: EndpointSlice


class Status(msgspec.Struct):
    """How the API server says what is wrong."""

    code: int = 0
    message: str = ""


class SliceTable:
    """All slices of one selector as they are now: a list, and the changes since."""

    def __init__(self, listed: SliceList) -> None:
        self._slices = {each.metadata.name: each for each in listed.items or ()}
        self.version = listed.metadata.resource_version
        """Where to watch on from."""

    def apply(self, change: Change) -> None:
        """Changes come in the order in which they were made."""
        changed, name = change.slice, change.slice.metadata.name
        if change.type in ("ADDED", "MODIFIED"):
            self._slices[name] = changed
        elif change.type == "DELETED":
            self._slices.pop(name, None)
        elif change.type != "BOOKMARK":  # nothing that is known: the next list says what it was
            return
        self.version = changed.metadata.resource_version

    def replicas(self, settings: KubernetesDiscovery) -> Sequence[EngineConfig]:
        """One for each ready pod, by its name, whatever the number of slices that list it; at its
        IPv4 address where it has one of each kind."""
        found: dict[str, EngineConfig] = {}
        for each in sorted(self._slices.values(), key=_order):
            for engine in _replicas_of(each, settings):
                found.setdefault(engine.id, engine)
        return list(found.values())


def _order(each: EndpointSlice) -> tuple[bool, str]:
    return (each.address_type != "IPv4", each.metadata.name)


def _replicas_of(each: EndpointSlice, settings: KubernetesDiscovery) -> Iterable[EngineConfig]:
    port = _port_of(each, settings.port)
    if port is None:
        return
    for endpoint in each.endpoints or ():
        if not endpoint.addresses or (
            endpoint.conditions is not None and endpoint.conditions.ready is False
        ):
            continue
        target = endpoint.target_ref
        pod = target.name if target is not None and target.kind == "Pod" else None
        engine = replica_at(settings.engine, endpoint.addresses[0], port, name=pod)
        if engine is not None:
            yield engine


def _port_of(each: EndpointSlice, wanted: int | str) -> int | None:
    """None where the slice has no port of that name."""
    if isinstance(wanted, int):
        return wanted
    return next((port.port for port in each.ports or () if port.name == wanted), None)
