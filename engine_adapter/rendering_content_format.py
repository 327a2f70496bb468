"""Which shape of message content a chat template expects.

A template that loops over the parts of a message's content gets a list of parts ("openai"), any
other gets one string ("string"). The engine finds out by looking for such a loop in the template's
syntax tree; this follows vLLM 0.32, vllm/renderers/hf.py (Apache-2.0), so that both decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


def content_format(template: nodes.Template) -> ContentFormat:
    """The format the engine would detect for this parsed template."""
    try:
        return "openai" if any(_loops_over_content(template)) else "string"
    except (
        AttributeError,
        TypeError,
    ):  # a loop target that is no plain name: the engine gives up too
        return "string"


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return (
            _is_name(node.node, name)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is_access(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` reads the variable `name` (or its `key`), also through filters and slices."""
    if node is None:
        return False
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return _is_access(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, key)
    return _is_attribute(node, name, key) if key else _is_name(node, name)


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise TypeError(f"line {node.lineno}: not a plain variable")
    return node.name


def _names_of_messages(template: nodes.Template) -> Iterator[str]:
    """`messages` and every variable that is assigned from it."""
    yield "messages"
    pending = deque(["messages"])
    while pending:
        name = pending.popleft()
        for assign in template.find_all(nodes.Assign):
            if _is_access(assign.node, name):
                target = _target(assign.target)
                yield target
                if target != name:
                    pending.append(target)


def _names_of_message(template: nodes.Template) -> list[str]:
    """The loop variables that run over the messages."""
    lists = list(_names_of_messages(template))
    return [
        _target(loop.target)
        for loop in template.find_all(nodes.For)
        if any(_is_access(loop.iter, name) for name in lists)
    ]


def _content_parameters(
    template: nodes.Template, macro: nodes.Macro, messages: list[str]
) -> set[str]:
    """Parameters of `macro` that some call fills with a message's content."""
    found: set[str] = set()
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = list(zip(names, call.args, strict=False))
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        found.update(
            name
            for name, value in given
            if any(_is_access(value, message, "content") for message in messages)
        )
    return found


def _loops_over_content(template: nodes.Template) -> Iterator[bool]:
    messages = _names_of_message(template)
    in_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        names = _content_parameters(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if names:
                parameters[id(loop)] = names
    for loop in template.find_all(nodes.For):
        over = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_is_access(loop.iter, message, "content") for message in messages)
            or over in parameters.get(id(loop), ())
            or (over == "content" and id(loop) not in in_macros)
        ):
            _target(loop.target)
            yield True
