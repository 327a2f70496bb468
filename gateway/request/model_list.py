"""The lists of models of several engines as one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _Card(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]
    object: str = "list"


def merged(bodies: Sequence[bytes]) -> bytes:
    """Every model once, in the words of the first engine that lists it. What is no list of models
    is left out; a single body stays as it is."""
    if len(bodies) == 1:
        return bodies[0]
    cards: dict[str, msgspec.Raw] = {}
    for body in bodies:
        for name, card in _cards(body).items():
            cards.setdefault(name, card)
    return msgspec.json.encode(_ModelList(list(cards.values())))


def _cards(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        data = msgspec.json.decode(body, type=_ModelList).data
        return {msgspec.json.decode(card, type=_Card).id: card for card in data}
    except (msgspec.DecodeError, RecursionError):
        return {}
