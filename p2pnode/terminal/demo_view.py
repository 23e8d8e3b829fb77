"""`p2pnode demo`: the table of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.terminal.curve import bar, curve
from p2pnode.terminal.lines import Column, Line, Span, Style, cells, labelled, table
from p2pnode.terminal.numbers import duration, number, short, size, whole
from p2pnode.terminal.status_view import STATE_TONES, part

DEMO_COLUMNS = (
    Column("node", keep=9),
    Column("state", keep=7, most=9),
    Column("step", right=True, keep=8),
    Column("loss", right=True, keep=6),
    Column("accuracy", right=True, keep=8),
    Column("waits for", keep=5),
    Column("nodes", right=True, keep=4),
    Column("sent", right=True, keep=3, most=7),
    Column("received", right=True, keep=2),
)
#: Shorter than in `status`, for the width of a terminal.
_STATES = {"waiting_for_nodes": "few nodes"}


def demo_row(name: str, status: Mapping[str, Any] | None, names: Mapping[str, str] | None = None) -> list[Span]:
    """The cells of one node of the demo, in the order of `DEMO_COLUMNS`. `names`: of the nodes, by id."""
    if status is None:
        missing: list[Span] = [("-", "dim")] * (len(DEMO_COLUMNS) - 2)
        return [(name, ""), ("starting", "warn"), *missing]
    training, exchange = part(status, "training"), part(status, "exchange")
    state = str(status.get("state", "?"))
    slowest = str(part(status, "waiting").get("slowest") or "")
    return [
        (name, ""),
        (_STATES.get(state, state), STATE_TONES.get(state, "")),
        (str(status.get("step", "?")), ""),
        (number(training.get("loss")), ""),
        (number(part(training, "metrics").get("accuracy")), "bold"),
        ((names or {}).get(slowest, short(slowest)), ""),
        (number(whole(part(status, "population").get("estimate"))), ""),
        (size(exchange.get("bytes_sent")), ""),
        (size(exchange.get("bytes_received")), ""),
    ]


def demo_lines(
    title: str,
    rows: Sequence[Sequence[Span]],
    goal: tuple[float | None, float],
    history: Sequence[float],
    times: tuple[float, float],
    style: Style,
) -> list[Line]:
    """The title, one line per node, and how far the worst of them is: `goal` is its accuracy and the one to reach,
    `history` its accuracies, `times` the seconds passed and those allowed."""
    worst, wanted = goal
    width = 80 if style.width is None else style.width
    counted = f"{number(worst)} of {number(wanted)}"
    clock = f"{duration(round(times[0]))} of at most {duration(times[1])}"
    room = max(0, min(24, width - 34 - cells(counted) - cells(clock)))
    share = 0.0 if worst is None or wanted <= 0 else worst / wanted
    return [
        *labelled("", title, style, indent=0, tone="bold"),
        [],
        *table(DEMO_COLUMNS, rows, style),
        [],
        [
            ("lowest accuracy  ", "dim"),
            (bar(share, 10), "ok" if worst is not None and worst >= wanted else "warn"),
            (f"  {counted}  ", "bold"),
            (curve(history, room), "ok"),
            ("  " if room and history else "", ""),
            (clock, "dim"),
        ],
    ]
