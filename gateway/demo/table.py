"""The demo's result as a table, and what is missing from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from gateway.demo.request import Measured


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All requests in order; the last one came after the engine's restart."""

    requests: Sequence[Measured]
    system_tokens: int
    """In full blocks of the system prompt that all requests share."""

    def missing(self) -> list[str]:
        """A sentence for each reuse that did not happen; empty when all did."""
        _, *warm, restarted = self.requests
        sentences = [
            f"{each.label}: {each.from_device} tokens came from the engine's own cache, "
            f"at least {self.system_tokens} should have"
            for each in warm
            if each.from_device < self.system_tokens
        ]
        if restarted.from_memory < self.system_tokens:
            sentences.append(
                f"{restarted.label}: {restarted.from_memory} tokens came from the store, "
                f"at least {self.system_tokens} should have"
            )
        sentences += [
            f"{each.label}: the engine reports {each.answer.cached_tokens} reused tokens, the "
            f"gateway counts {each.from_device + each.from_memory}"
            for each in self.requests
            if each.answer.cached_tokens != each.from_device + each.from_memory
        ]
        return sentences


def table(result: DemoResult) -> Table:
    """One row a request."""
    view = Table(title="Prompt tokens reused, as the engine reports them", title_justify="left")
    view.add_column("request")
    for heading in ("prompt\ntokens", "from\ndevice", "from\nstore", "com-\nputed", "TTFT"):
        view.add_column(heading, justify="right")
    view.add_column("prefill\nsaved", justify="right")
    for each in result.requests:
        total, reused = each.answer.prompt_tokens, each.answer.cached_tokens
        view.add_row(
            each.label,
            str(total),
            str(each.from_device),
            str(each.from_memory),
            str(total - reused),
            _time(each.answer.ttft_s),
            "-" if each.saved_s is None else _time(each.saved_s),
        )
    return view


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
