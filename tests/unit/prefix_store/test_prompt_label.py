"""What is kept beside a prompt's first block."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_store.base import BlockHash
from prefix_store.events import BlockStored
from prefix_store.prompt_label import PromptLabel
from prefix_store.tier_events import Announced, stored_events

ADAPTER = "a" * 32


@pytest.mark.parametrize("salt", ["", "secret"])
@pytest.mark.parametrize("adapter", ["", ADAPTER])
@pytest.mark.parametrize("model", ["", "small", "org/large@v2"])
def test_a_label_is_what_it_was(salt: str, adapter: str, model: str) -> None:
    """As a text in a tier, and as the fields of an event."""
    label = PromptLabel(salt, adapter, model)
    assert PromptLabel.decode(label.encode()) == label
    assert PromptLabel.of_event(salt, label.lora_name) == label


def test_a_salt_alone_is_its_own_label() -> None:
    """As stores kept it before there were labels."""
    assert PromptLabel("secret").encode() == "secret"
    assert PromptLabel("secret").lora_name is None


def test_a_name_that_is_too_long_is_left_out() -> None:
    """Tiers bound what they keep beside a block."""
    label = PromptLabel("s", ADAPTER, "m" * 257)
    assert PromptLabel.decode(label.encode()) == PromptLabel("s", ADAPTER)


def test_events_say_the_label_with_the_first_block() -> None:
    """The adapter's digest in the field for its name, so that its blocks are never taken for
    those of the base model."""
    tokens = np.arange(4, dtype="<i4").tobytes()
    first, second = BlockHash(b"1" * 16), BlockHash(b"2" * 16)
    label = PromptLabel("secret", ADAPTER).encode()
    run = [Announced(first, None, tokens, label), Announced(second, first, tokens, "")]
    [event] = stored_events(run, "CPU")
    assert isinstance(event, BlockStored)
    assert event.lora_name == ADAPTER
    assert event.extra_keys == [["secret"], None]
    [plain] = stored_events([Announced(first, None, tokens, "secret")], "CPU")
    assert isinstance(plain, BlockStored)
    assert plain.lora_name is None
