"""`p2pnode watch`: follows one node, on a screen that is redrawn every second, or with one line per second."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from p2pnode.client import NodeClient, NotReachable
from p2pnode.commands.options import JsonOption, WhichNode, takes
from p2pnode.commands.output import print_line
from p2pnode.errors import UserError
from p2pnode.screen import Redrawn, is_redrawable
from p2pnode.terminal.status_view import part, status_line
from p2pnode.terminal.watch_view import Seen, watch_lines

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
