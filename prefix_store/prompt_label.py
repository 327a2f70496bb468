"""Whose prompts a store's blocks belong to, in words that a gateway knows.

The root of a chain in a store is a digest, from which nobody can tell salt, adapter or model. So
they are kept beside the first block of each prompt, as one text, and its event says them.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MODEL_BYTES = 256
_BETWEEN = "\0"
"""In no salt: vLLM refuses it in `cache_salt`."""

_OF = "@"
"""In no digest."""


@dataclass(frozen=True, slots=True)
class PromptLabel:
    """What distinguishes equal token ids."""

    salt: str
    """The tenant's."""
    adapter: str = ""
    """Digest of the LoRA adapter; empty for none."""
    model: str = ""
    """Name of the base model; empty where the store's engines all have the same."""

    def encode(self) -> str:
        """As it is kept: the salt alone where there is nothing else to say."""
        lora_name = self.lora_name
        return self.salt if lora_name is None else f"{self.salt}{_BETWEEN}{lora_name}"

    @classmethod
    def decode(cls, text: str) -> PromptLabel:
        """Of what `encode` made."""
        salt, _, lora_name = text.partition(_BETWEEN)
        return cls.of_event(salt, lora_name)

    @property
    def lora_name(self) -> str | None:
        """As events say it, in the field that vLLM has for the name: `adapter`, `adapter@model` or
        `@model`."""
        model = self.model if len(self.model.encode()) <= MAX_MODEL_BYTES else ""
        return f"{self.adapter}{_OF}{model}" if model else self.adapter or None

    @classmethod
    def of_event(cls, salt: str, lora_name: str | None) -> PromptLabel:
        """Of what an event of a store says."""
        adapter, _, model = (lora_name or "").partition(_OF)
        return cls(salt, adapter, model)
