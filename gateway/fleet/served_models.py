"""The names that clients may send as `model`: what each means, and which replicas serve it.

A LoRA adapter is what its weights say: two replicas may serve one adapter under two names, which
share all predictions; one name always means one thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.adapters import AdapterError, adapter_digest
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig, ModelConfig
from policies.engine import AdapterConfig, EngineConfig
from policies.fleet import StaticDiscovery
from prefix_store.base import BlockHash
from prefix_store.event_source import RootOf
from prefix_store.hashing import routing_root
from prefix_store.prompt_label import PromptLabel


class ServedModelsError(UserError):
    """Names of models contradict one another; the message says where."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a name means."""

    name: str
    model: str
    """Of the base model, whose tokenizer and chat template render its prompts."""
    block_size: int
    """Tokens per block, on all replicas of the base model."""
    max_model_len: int
    adapter: str = ""
    """Digest of the adapter's weights; empty for the base model itself."""

    def root(self, salt: str) -> BlockHash:
        """Where the chains of its prompts begin in the index. The name is not in it."""
        return routing_root(self.model, salt, self.adapter)


class ServedModels:
    """Names -> what they mean -> who serves them. Replicas come and go; what a model's block size
    is stays as it was first seen. Use it from one thread."""

    def __init__(self, models: Iterable[ModelConfig], store_id: str | None = None) -> None:
        """The base models that replicas may serve, the usual one first; the store of replicas
        that name none."""
        self._store_id = store_id
        self._models = {model.name: model for model in models}
        self._first = next(iter(self._models))
        self._block_sizes: dict[str, int] = {}
        self._declared: dict[str, Served] = {}
        self._replicas: dict[str, _Replica] = {}
        self._known: dict[str, Served] = {}

    @classmethod
    def of(cls, config: HeadstartConfig) -> ServedModels:
        """The models of a configuration. The engines in it are its replicas unless others are
        discovered. Reads adapters: call it in a thread. Raises ServedModelsError."""
        served = cls(config.models, config.store.id if config.store is not None else None)
        discovery = config.fleet.discovery
        if isinstance(discovery, StaticDiscovery):
            for engine in config.engines:
                served._add(engine, _digests(engine))
        else:
            served._declare(discovery.engine, _digests(discovery.engine))
        return served

    @property
    def names(self) -> tuple[str, ...]:
        """All that `find` knows, base models first."""
        return tuple(self._known)

    def find(self, name: str) -> Served | None:
        """What a name means; None: nothing. A base model is known since its first replica, and
        after its last one; an adapter only while a replica serves it."""
        return self._known.get(name)

    def serves(self, engine_id: str, name: str) -> bool:
        """Whether a request for `name` may go to this replica."""
        replica = self._replicas.get(engine_id)
        return replica is not None and name in replica.names

    async def add_replica(self, engine: EngineConfig) -> None:
        """A replica is there, or is another one now. Raises ServedModelsError and changes nothing
        when its names contradict those of others."""
        self._add(engine, await asyncio.to_thread(_digests, engine))

    def remove_replica(self, engine_id: str) -> None:
        """A replica is gone; unknown ones are ignored."""
        if self._replicas.pop(engine_id, None) is not None:
            self._known = self._names_without(engine_id)

    def root_of(self, engine_id: str) -> RootOf:
        """For the events of this replica, as it is when they come."""

        def root(salt: str, lora_name: str | None) -> BlockHash | None:
            replica = self._replicas.get(engine_id)
            served = replica.names.get(lora_name or replica.model) if replica else None
            return None if served is None else served.root(salt)

        return root

    def root_of_store(self, store_id: str) -> RootOf:
        """For the events of this store: they name an adapter by its digest, and the base model
        where the store's engines were started with several."""

        def root(salt: str, lora_name: str | None) -> BlockHash | None:
            label = PromptLabel.of_event(salt, lora_name)
            model = label.model or self._model_of_store(store_id)
            if model not in self._models:
                return None
            return routing_root(model, label.salt, label.adapter)

        return root

    def _model_of_store(self, store_id: str) -> str | None:
        """None where its replicas have several."""
        models = {each.model for each in self._replicas.values() if each.store_id == store_id}
        models = models or set(self._models)
        return models.pop() if len(models) == 1 else None

    def _add(self, engine: EngineConfig, digests: Mapping[str, str]) -> None:
        known = self._names_without(engine.id)
        replica = self._replica(engine, digests, known)
        self._block_sizes[replica.model] = engine.block_size
        self._replicas[engine.id] = replica
        self._known = self._names_without(None)

    def _declare(self, engine: EngineConfig, digests: Mapping[str, str]) -> None:
        """What replicas that are yet to be found have in common."""
        replica = self._replica(engine, digests, self._known)
        self._block_sizes[replica.model] = engine.block_size
        self._declared = dict(replica.names)
        self._known = self._names_without(None)

    def _replica(
        self, engine: EngineConfig, digests: Mapping[str, str], known: Mapping[str, Served]
    ) -> _Replica:
        model = self._models.get(engine.model or self._first)
        if model is None:
            raise ServedModelsError(
                f"engines: {engine.id}: the model {engine.model!r} is not among "
                f"{sorted(self._models)}"
            )
        block_size = self._block_sizes.get(model.name, engine.block_size)
        if block_size != engine.block_size:
            raise ServedModelsError(
                f"engines: {engine.id}: block_size is {engine.block_size}, but other replicas of "
                f"{model.name} have {block_size}: it must be the same for all replicas of a model"
            )
        base = _served(model, block_size)
        names = {model.name: base}
        for adapter in engine.adapters:
            served = _served(model, block_size, adapter.name, digests[adapter.name])
            self._check_name(engine.id, served, names, known)
            names[served.name] = served
        return _Replica(model.name, engine.store or self._store_id, names)

    def _check_name(
        self, engine_id: str, served: Served, own: Mapping[str, Served], known: Mapping[str, Served]
    ) -> None:
        where = f"engines: {engine_id}: the adapter {served.name!r}"
        if served.name in self._models:
            raise ServedModelsError(f"{where} has the name of a model; give it another one")
        if served.name in own:
            raise ServedModelsError(f"{where} stands twice; names must differ")
        other = known.get(served.name)
        if other is None or other == served:
            return
        if other.model != served.model:
            raise ServedModelsError(
                f"{where} is one for {served.model}, and elsewhere one for {other.model}: "
                "give them different names"
            )
        raise ServedModelsError(
            f"{where} has the weights {served.adapter}, and elsewhere {other.adapter}: "
            "give different adapters different names"
        )

    def _names_without(self, engine_id: str | None) -> dict[str, Served]:
        """What names mean to all replicas but one."""
        names = {
            name: _served(self._models[name], size) for name, size in self._block_sizes.items()
        }
        names |= self._declared
        for each, replica in self._replicas.items():
            if each != engine_id:
                names |= replica.names
        return names


@dataclass(frozen=True, slots=True)
class _Replica:
    model: str
    store_id: str | None
    names: Mapping[str, Served]


def _served(model: ModelConfig, block_size: int, name: str = "", adapter: str = "") -> Served:
    return Served(name or model.name, model.name, block_size, model.max_model_len, adapter)


def _digests(engine: EngineConfig) -> dict[str, str]:
    """By the adapters' names; of the last one where a name stands twice."""
    return {each.name: _digest(engine.id, each) for each in engine.adapters}


def _digest(engine_id: str, adapter: AdapterConfig) -> str:
    if adapter.digest is not None:
        return adapter.digest
    try:
        return adapter_digest(Path(adapter.path or "").expanduser())
    except AdapterError as error:
        raise ServedModelsError(
            f"engines: {engine_id}: the adapter {adapter.name!r}: {error}; where its files cannot "
            "be read, give its digest (`headstart model digest DIR` prints it)"
        ) from error
