"""Token ids of the simulated engine without a tokenizer."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter.base import RenderingError
from engine_adapter.simulated.words import HashedWords, answer_to
from prefix_store.hashing import as_token_ids

WORDS = HashedWords()


def chat(*messages: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


async def test_a_word_is_a_token() -> None:
    """The same one whatever is around it."""
    one = await WORDS.completion("the cat and the dog")
    assert one.size == 5
    assert one[0] == one[3]
    assert (await WORDS.completion("  dog\n")).tolist() == [one[4]]


async def test_the_next_turn_continues_prompt_and_answer() -> None:
    """A client that sends the answer back gets a prompt that begins with both."""
    first = await WORDS.chat(chat(("user", "what is it")))
    answer = answer_to(first, 20, 1, WORDS.answer_ids)
    second = await WORDS.chat(
        chat(("user", "what is it"), ("assistant", WORDS.text(answer)), ("user", "why"))
    )
    assert second[: first.size + 20].tolist() == [*first.tolist(), *answer.tolist()]


async def test_roles_and_tools_are_part_of_the_prompt() -> None:
    """Equal words of another role, or with other tools, are another prompt."""
    user = await WORDS.chat(chat(("user", "a b")))
    system = await WORDS.chat(chat(("system", "a b")))
    assert user[0] != system[0]
    assert user[1:].tolist() == system[1:].tolist()
    tools = await WORDS.chat({**chat(("user", "a b")), "tools": [{"type": "function"}]})
    assert tools.size > user.size


async def test_parts_are_joined() -> None:
    """Content in parts is its text."""
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    one = await WORDS.chat({"messages": [{"role": "user", "content": parts}]})
    assert one.tolist() == (await WORDS.chat(chat(("user", "a b c")))).tolist()


@pytest.mark.parametrize("prompt", [[-1], [2**31], ["x"], [1.5, {}]])
async def test_what_is_no_token_is_refused(prompt: list[int]) -> None:
    """Rather than computed."""
    with pytest.raises(RenderingError):
        await WORDS.completion(prompt)


async def test_a_message_needs_a_role() -> None:
    """As the engine's own check says."""
    with pytest.raises(RenderingError):
        await WORDS.chat({"messages": [{"content": "x"}]})


def test_answers_depend_on_prompt_and_seed_only() -> None:
    """Longer ones begin with the shorter ones."""
    prompt = as_token_ids([5, 6, 7])
    answer = answer_to(prompt, 50, 3, WORDS.answer_ids)
    assert answer_to(prompt, 10, 3, WORDS.answer_ids).tolist() == answer[:10].tolist()
    assert answer_to(prompt, 50, 4, WORDS.answer_ids).tolist() != answer.tolist()
    assert answer_to(as_token_ids([5, 6]), 50, 3, WORDS.answer_ids).tolist() != answer.tolist()
    assert np.isin(answer, np.array(WORDS.answer_ids)).all()
