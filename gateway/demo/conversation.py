"""What the demo says: two customers of a shop whose assistant has a long system prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_RULES = """You are the friendly assistant of Northwind Lamps, a shop for lamps and small furniture.
You help customers to find what they need. Prices include tax. Orders over 100 euros ship free of
charge, others cost 4.90 euros. Customers may return an article within 30 days when it is unused.
This is what we sell:"""

_ARTICLES = (
    ("desk lamp", "oak and brass", "reading and close work at a desk"),
    ("floor lamp", "black steel", "the corner beside a sofa"),
    ("ceiling lamp", "white glass", "kitchens and dining tables"),
    ("night light", "frosted acrylic", "the rooms of small children"),
    ("wall lamp", "brushed copper", "halls and stairs"),
    ("side table", "ash wood", "books and a cup of tea"),
    ("stool", "birch and cork", "a workshop or a kitchen bar"),
    ("shelf", "walnut veneer", "plants and picture frames"),
)
_MAKERS = ("Alder", "Birk", "Corvin", "Dahl", "Elmo")


def system_prompt() -> str:
    """About 1,500 tokens: rules and a catalogue."""
    lines = [_RULES, ""]
    for number, (article, material, use) in enumerate(_ARTICLES):
        for place, maker in enumerate(_MAKERS):
            serial = 10 * number + place + 101
            price = 19 + 7 * number + 5 * place
            days = 1 + (number + place) % 5
            lines.append(
                f"No. {serial}: {maker} {article}, {material}, for {use}, {price} euros, "
                f"ships in {days} days."
            )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of one customer."""

    label: str
    customer: int
    question: str


FIRST_CUSTOMER = (
    Turn("customer 1, turn 1", 1, "Which lamp is good for reading at my desk?"),
    Turn("customer 1, turn 2", 1, "Tell me about the Birk desk lamp."),
    Turn("customer 1, turn 3", 1, "Can I return a lamp?"),
)
SECOND_CUSTOMER = Turn("customer 2", 2, "Do you have a night light for a child's room?")


class Conversations:
    """What each customer and the assistant have said so far."""

    def __init__(self) -> None:
        self._said: dict[int, list[dict[str, Any]]] = {}

    def messages(self, turn: Turn) -> list[dict[str, Any]]:
        """The messages of the request for this turn."""
        system = {"role": "system", "content": system_prompt()}
        return [system, *self._said.get(turn.customer, []), _user(turn)]

    def answered(self, turn: Turn, answer: str) -> None:
        """The next turn of this customer contains this one."""
        said = self._said.setdefault(turn.customer, [])
        said += [_user(turn), {"role": "assistant", "content": answer}]


def _user(turn: Turn) -> dict[str, Any]:
    return {"role": "user", "content": turn.question}
