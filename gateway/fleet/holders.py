"""Where blocks may lie that a replica can reuse."""

from __future__ import annotations

from policies.config import HeadstartConfig, StoreConfig
from policies.engine import EngineConfig
from prefix_store.residency import Holder, Medium


def holders_of(config: HeadstartConfig, engine: EngineConfig) -> tuple[Holder, ...]:
    """The engine's own memory first, then the tiers that the store on its host can load from. A
    Redis that stores share holds blocks of all of them."""
    device = Holder(engine.id, Medium.DEVICE)
    store_id = store_of(config, engine)
    if store_id is None:
        return (device,)
    own, sharing = config.store, _sharing_redis(config)
    if own is not None and own.id == store_id:
        tiers = _tiers(own)
    else:  # how a remote store is set up is not known here; tiers that it lacks stay empty
        tiers = [Medium.MEMORY, Medium.DISK, Medium.REDIS]
    holders = [device, *(Holder(store_id, medium) for medium in tiers)]
    if store_id in sharing:
        holders += [Holder(other, Medium.REDIS) for other in sharing if other != store_id]
    return tuple(holders)


def store_of(config: HeadstartConfig, engine: EngineConfig) -> str | None:
    """Id of the store on the engine's host; None: it has none."""
    if engine.store is not None:
        return engine.store
    return config.store.id if config.store is not None else None


def _tiers(store: StoreConfig) -> list[Medium]:
    tiers = [Medium.MEMORY]
    tiers += [Medium.DISK] if store.disk is not None else []
    tiers += [Medium.REDIS] if store.redis is not None else []
    return tiers


def _sharing_redis(config: HeadstartConfig) -> list[str]:
    """The stores with one Redis."""
    sharing = [remote.id for remote in config.remote_stores if remote.shares_redis]
    if config.store is not None and config.store.redis is not None:
        sharing.insert(0, config.store.id)
    return sharing
