"""What the statistics' tables are made of."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.accounts.stats_schema import WindowsStats, WindowStats
from gateway.accounts.windows import Window

UNKNOWN = "-"
_BAR_WIDTH = 28


def window_of(windows: WindowsStats, window: Window) -> WindowStats:
    """The numbers of one window."""
    chosen: WindowStats = getattr(windows, window.value)
    return chosen


def plain_table() -> Table:
    """Without lines and padding at the edge."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)


def section(title: str, body: Table | Text, *, header: bool = False) -> RenderableType:
    """A title and what stands below it."""
    if isinstance(body, Table):
        body.show_header = header
        body.header_style = "dim"
    return Group(Text(title, style="bold"), body)


def bar(share: float) -> str:
    """Eighths of a cell, so that a small share is still seen."""
    eighths = round(share * _BAR_WIDTH * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "\N{FULL BLOCK}" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def requests_of(count: int) -> str:
    """In words."""
    return "1 request" if count == 1 else f"{count:,} requests"


def percent(share: float | None) -> str:
    """A share with one decimal."""
    return UNKNOWN if share is None else f"{share:.1%}"


def seconds(value: float | None) -> str:
    """In ms below one second."""
    if value is None:
        return UNKNOWN
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:,.2f} s"
