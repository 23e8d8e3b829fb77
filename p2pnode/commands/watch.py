"""`p2pnode watch`: follows one node, on a screen that is redrawn every second, or with one line per second."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from p2pnode.client import NodeClient, NotReachable
from p2pnode.commands.options import JsonOption, WhichNode, takes
from p2pnode.commands.output import print_line
from p2pnode.errors import UserError
from p2pnode.screen import Redrawn, is_redrawable
from p2pnode.terminal.lines import Line, Style, cells
from p2pnode.terminal.numbers import curve, duration, number, share, short, size
from p2pnode.terminal.status_view import (
    STATE_TONES,
    headline,
    health_lines,
    lost_peer,
    objects,
    part,
    peers_lines,
    population,
    progress_lines,
    state_name,
    status_line,
)

#: Seconds between two requests.
WATCH_INTERVAL_S = 1.0
#: Values kept of each curve.
CURVE_VALUES = 400


@takes(WhichNode)
def watch(
    which: WhichNode,
    as_json: JsonOption = False,
) -> int:
    """Follow a node until Ctrl-C: a screen on a terminal, otherwise one line per second.

    Example: p2pnode watch --run digits
    """
    client = which.client()
    try:
        if is_redrawable(sys.stdout) and not as_json:
            _watch_screen(client)
        else:
            _watch_lines(client, as_json)
    except KeyboardInterrupt:
        return 0


class Curves:
    """The values of the loss and of each metric, oldest first."""

    def __init__(self) -> None:
        self.values: dict[str, deque[float]] = {}
        self._step: dict[str, int] = {}

    def note_past(self, steps: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
        """What the node still knows of the time before: the rows of `/steps`, and its evaluations in `/events`."""
        for row in steps:
            self._note("loss", row.get("loss"), row.get("step"))
        for event in events:
            if event.get("event") == "evaluated":
                fields = part(event, "fields")
                for name, value in fields.items():
                    if name not in ("step", "samples", "seconds", "loss"):
                        self._note(name, value, fields.get("step"))

    def note(self, status: Mapping[str, Any]) -> None:
        """One answer of `/status`; the same step adds nothing."""
        training = part(status, "training")
        self._note("loss", training.get("loss"), status.get("step"))
        for name, value in part(training, "metrics").items():
            self._note(name, value, training.get("evaluated_step") or status.get("step"))

    def _note(self, name: str, value: Any, step: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(step, int):
            return
        if step > self._step.get(name, -1):
            self._step[name] = step
            self.values.setdefault(name, deque(maxlen=CURVE_VALUES)).append(float(value))


def _watch_lines(client: NodeClient, as_json: bool) -> NoReturn:
    while True:
        answer = client.status()
        print_line(json.dumps(answer) if as_json else f"{time.strftime('%H:%M:%S')} {status_line(answer)}")
        time.sleep(WATCH_INTERVAL_S)


def _watch_screen(client: NodeClient) -> NoReturn:
    curves = Curves()
    status, peers = client.status(), client.peers()  # if the node is unreachable, fail before the screen is taken
    with contextlib.suppress(UserError, KeyError, TypeError):  # of a node of another version: the curves begin now
        curves.note_past(client.steps(CURVE_VALUES), client.events()["events"])
    trouble = ""
    with Redrawn(sys.stdout, whole_screen=True) as screen:
        while True:
            curves.note(status)
            seen = Seen(status, peers, curves.values, time.strftime("%H:%M:%S"), trouble)
            screen.draw(lambda style, seen=seen: watch_lines(seen, style, screen.size.height - 1))  # type: ignore[misc]
            time.sleep(WATCH_INTERVAL_S)
            try:
                status, peers, trouble = client.status(), client.peers(), ""
            except NotReachable as error:
                since = seen.clock if not trouble else trouble.partition("; last seen ")[2].partition(";")[0]
                trouble = f"{error.message}; last seen {since}; still trying"


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
    if lost := objects(status, "lost"):
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
