"""Prompts of token ids, made from a seed: no two tests share a prefix unless they want to."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import pytest

_serial = itertools.count(1)

Prompt = list[int]


@pytest.fixture
def new_prompt(request: pytest.FixtureRequest) -> Callable[[int], Prompt]:
    """Makes prompts of a given length; the words of the model's vocabulary, no special tokens."""
    name = re.sub(r"\W", "_", request.node.nodeid)

    def make(num_tokens: int) -> Prompt:
        chooser = random.Random(f"{name}/{next(_serial)}")
        return [chooser.randrange(300, 40_000) for _ in range(num_tokens)]

    return make
