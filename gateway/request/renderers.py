"""One prompt renderer for each base model that a replica serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from engine_adapter.base import RenderingError
from engine_adapter.rendering import PromptRenderer
from policies.config import HeadstartConfig, ModelConfig

log = logging.getLogger(__name__)


class Renderers:
    """Each is loaded when the first replica of its model is there, and closed by `close`."""

    def __init__(self, config: HeadstartConfig, default_path: Callable[[], Path]) -> None:
        """`default_path`: where the model lies that the configuration names no path for; called in
        a thread."""
        self._models = {model.name: model for model in config.models}
        self._memo_bytes = int(config.limits.memo_memory) // len(config.models)
        self._default_path = default_path
        self._loaded: dict[str, PromptRenderer] = {}
        self._tried: set[str] = set()
        self._loading = asyncio.Lock()

    @property
    def by_model(self) -> Mapping[str, PromptRenderer]:
        """Those that there are now; grows as models come."""
        return self._loaded

    async def load(self, model: str, block_size: int) -> None:
        """Be ready for prompts of a model. What cannot be rendered exactly is forwarded without
        prediction, with a warning, once."""
        async with self._loading:
            if model in self._tried:
                return
            self._tried.add(model)
            try:
                renderer = await asyncio.to_thread(self._load, self._models[model], block_size)
            except RenderingError as error:
                log.warning("%s: prompts are forwarded without prediction: %s", model, error)
            else:
                self._loaded[model] = renderer

    def close(self) -> None:
        """End their threads."""
        for renderer in self._loaded.values():
            renderer.close()

    def _load(self, model: ModelConfig, block_size: int) -> PromptRenderer:
        path = self._default_path() if model.path is None else Path(model.path).expanduser()
        return PromptRenderer.load(path, block_size=block_size, memo_bytes=self._memo_bytes)
