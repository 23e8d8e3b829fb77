"""`p2pnode watch`: the own node with small curves, what goes on, its peers and what needs attention, on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from p2pnode.terminal.lines import Line, Style, cells
from p2pnode.terminal.numbers import curve, duration, number, share, short, size
from p2pnode.terminal.peers_view import peers_lines
from p2pnode.terminal.status_view import (
    STATE_TONES,
    headline,
    health_lines,
    listed,
    lost_peer,
    part,
    population,
    progress_lines,
    state_name,
)

#: Metrics shown as curves beside the loss.
MAX_CURVES = 3
CURVE_CELLS = 40


class Seen(NamedTuple):
    """What `watch` has of a node: the last answers, and each curve's values by name, oldest first."""

    status: Mapping[str, Any]
    peers: Sequence[Mapping[str, Any]]
    curves: Mapping[str, Sequence[float]]
    clock: str = ""
    #: Why the last request failed; empty if it did not.
    trouble: str = ""


def watch_lines(seen: Seen, style: Style, height: int) -> list[Line]:
    """At most `height` lines; peers and findings share what the node itself leaves."""
    status = seen.status
    lines = [*_title(seen, style), *headline(status, style)]
    if seen.trouble:
        lines.append([(seen.trouble, "bad")])
    lines += [[], *_own(status), *_curves(seen, style), *progress_lines(status, style, "")]
    lost = [entry for entry in listed(status, "lost") if isinstance(entry, dict)]
    if lost:
        lines.append([("lost  ", "dim"), (lost_peer(lost[0]), "warn")])
    health = health_lines(status, style) if status.get("health") else []
    room = height - len(lines) - 1
    below = health[: max(0, min(len(health), room - min(len(seen.peers), 6) - 3))] or health[: max(0, room - 3)][:2]
    room -= len(below) + (1 if below else 0) + 1  # the blank lines, and the header of the peers
    if seen.peers and room > 0:
        limit = len(seen.peers) if len(seen.peers) <= room else max(0, room - 1)
        lines += [[], *peers_lines(seen.peers, style, limit)]
    if below:
        lines += [[], *below]
    return lines[:height]


def _title(seen: Seen, style: Style) -> list[Line]:
    node = part(seen.status, "node")
    left = f"{seen.status.get('run', '?')}  {short(node.get('id'))} at {node.get('address', '?')}"
    hint = f"{seen.clock}  Ctrl-C ends"
    width = 80 if style.width is None else style.width
    gap = width - cells(left) - cells(hint)
    return [[(left, "dim"), (" " * gap + hint if gap >= 2 else "", "dim")]]


def _own(status: Mapping[str, Any]) -> list[Line]:
    training, exchange = part(status, "training"), part(status, "exchange")
    state = str(status.get("state", "?"))
    busy = f", {share(training['training_share'])} training" if training.get("training_share") else ""
    return [
        [
            (state_name(state), STATE_TONES.get(state, "")),
            (f"  step {status.get('step', '?')}  {duration(training.get('step_seconds'))} a step{busy}", ""),
            (f"  up {duration(part(status, 'node').get('uptime_seconds'))}", "dim"),
        ],
        [
            (f"{population(status.get('population'))}  ", ""),
            (
                f"{size(exchange.get('bytes_sent'))} sent  {size(exchange.get('bytes_received'))} received  "
                f"{exchange.get('shards_owned', '?')} shards owned",
                "",
            ),
        ],
    ]


def _curves(seen: Seen, style: Style) -> list[Line]:
    training = part(seen.status, "training")
    values = {"loss": training.get("loss"), **part(training, "metrics")}
    names = list(values)[: MAX_CURVES + 1]
    width = 80 if style.width is None else style.width
    label = min(16, max((cells(name) for name in names), default=0))
    lines: list[Line] = []
    for name in names:
        drawn = curve(seen.curves.get(name, ()), min(CURVE_CELLS, max(0, width - label - 12)))
        lines.append([(f"{name[:label]:<{label}} ", "dim"), (f"{number(values[name]):>8}  ", "bold"), (drawn, "ok")])
    return lines
