"""`p2pnode watch`: lines for a pipe, and the curves of the screen."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from p2pnode.client import NotReachable
from p2pnode.commands import watch
from p2pnode.commands.options import WhichNode
from p2pnode.commands.watch import Seen, watch_lines
from p2pnode.terminal.lines import Style, cells
from p2pnode.terminal.status_view import status_line

STATUS: dict[str, Any] = {"schema": 1, "summary": "training at step 7", "state": "training", "step": 7}

Output = pytest.CaptureFixture[str]


class Client:
    """In the place of `NodeClient`."""

    address = "127.0.0.1:8080"

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | Exception] = []
        self.past: list[dict[str, Any]] | Exception = []

    def status(self) -> dict[str, Any]:
        answer = self.answers.pop(0) if self.answers else STATUS
        if isinstance(answer, Exception):
            raise answer
        return answer

    def peers(self) -> list[dict[str, Any]]:
        return [{"id": "ab" * 20, "address": "10.0.0.2:8468"}]

    def steps(self, limit: int) -> list[dict[str, Any]]:
        if isinstance(self.past, Exception):
            raise self.past
        return self.past

    def events(self) -> dict[str, Any]:
        return {"events": [{"event": "evaluated", "fields": {"step": 5, "samples": 9, "accuracy": 0.5}}]}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(WhichNode, "client", lambda _: made)
    return made


def interrupted_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """Let the command pause so many times until Ctrl-C; returns its pauses."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) % count == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    return pauses


def test_watch_prints_a_line_a_second_until_interrupted(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Ctrl-C is no error; --json prints each answer on a line; an unreachable node is one."""
    pauses = interrupted_after(monkeypatch, 3)
    assert watch.watch() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.endswith(status_line(STATUS)) for line in lines)
    assert watch.watch(as_json=True) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [STATUS] * 3
    assert set(pauses) == {watch.WATCH_INTERVAL_S}

    client.answers = [STATUS, NotReachable("no node reachable", "start one")]
    with pytest.raises(NotReachable):
        watch.watch()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("past", [[{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], NotReachable("no /steps", "")])
def test_the_screen_goes_on_when_the_node_does_not_answer(
    past: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says since when, takes the screen back at the end, and works with a node that has no /steps."""
    interrupted_after(monkeypatch, 3)
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watch.sys, "stdout", stream)
    gone = NotReachable("no node reachable at 127.0.0.1:8080", "")
    client.answers = [STATUS, gone, gone]
    client.past = past

    assert watch.watch() == 0

    text = stream.getvalue()
    assert text.count("no node reachable at 127.0.0.1:8080; last seen ") == 2
    assert text.startswith("\x1b[?1049h")
    assert text.endswith("\x1b[?25h\x1b[?1049l")


def test_curves_have_each_step_once_and_begin_in_the_past() -> None:
    """The rows of /steps and the evaluations in /events come first; an answer for the same step adds nothing."""
    curves = watch.Curves()
    evaluated = {"event": "evaluated", "fields": {"step": 1, "samples": 9, "accuracy": 0.5}}
    curves.note_past([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], [evaluated, {"event": "started"}])
    status = {"step": 3, "training": {"loss": 1.0, "metrics": {"accuracy": 0.6}, "evaluated_step": 2}}
    for answer in (status, status, {"step": 4}, {"training": {"loss": True}}):
        curves.note(answer)
    assert {name: list(values) for name, values in curves.values.items()} == {
        "loss": [2.0, 1.0],
        "accuracy": [0.5, 0.6],
    }


SHOWN: dict[str, Any] = {
    "summary": "training at step 7 with 3 peers; waiting for no peer",
    "state": "training",
    "step": 7,
    "run": "digits",
    "node": {"id": "cd" * 20, "address": "127.0.0.1:8468", "uptime_seconds": 65.0},
    "training": {"loss": 0.31, "metrics": {"accuracy": 0.93}, "step_seconds": 0.016},
    "population": {"estimate": 4.0, "exact": True},
    "exchange": {"bytes_sent": 1_234_567, "bytes_received": 5, "shards_owned": 8},
    "lost": [{"id": "ee" * 20, "address": "10.0.0.9:1", "how": "left", "step": 3, "seconds_ago": 4.0}],
}
PEERS = [{"id": f"{at:02x}" * 20, "address": f"10.0.0.{at}:8468", "state": "training", "step": at} for at in range(200)]
CURVES = {"loss": [3.0, 2.0, 1.0, 0.31], "accuracy": [0.1, 0.93]}


def drawn(seen: Seen, width: int = 80, height: int = 23) -> list[str]:
    style = Style(width=width)
    return [style.render(line) for line in watch_lines(seen, style, height)]


def test_the_own_node_its_curves_its_peers_and_whom_it_lost_are_on_one_screen() -> None:
    """With as many peers as fit, and the number of the others."""
    lines = drawn(Seen(SHOWN, PEERS, CURVES, "09:12:04"))
    text = "\n".join(lines)
    for words in (
        "digits  cdcdcdcd at 127.0.0.1:8468",
        "● training at step 7 with 3 peers",
        "training  step 7  16.0 ms a step  up 1 min 5 s",
        "loss        0.310  █▆▃▁",
        "accuracy    0.930  ▁█",
        "4 nodes  1.23 MB sent",
        "eeeeeeee at 10.0.0.9:1 left 4.0 s ago",
        "more; `p2pnode peers` lists all",
        "00000000  10.0.0.0:8468",
    ):
        assert words in text
    assert len(lines) <= 23


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [5, 10, 23, 60])
def test_every_screen_is_kept_to(width: int, height: int) -> None:
    """Neither more lines nor wider ones than the screen has, also with many findings, and with half a status."""
    health = [{"level": "warning", "what": "w" * 50, "do": "d " * 60}] * 9
    for status in (SHOWN, SHOWN | {"health": health}, {}, {"training": None, "health": None}):
        for peers in ([], PEERS[:2], PEERS):
            lines = drawn(Seen(status, peers, CURVES, "09:12:04", "no node reachable"), width, height)
            assert len(lines) <= height
            assert all(cells(line) <= width for line in lines)


def test_findings_have_room_beside_many_peers() -> None:
    """A warning is on the screen although 200 peers would fill it, and some peers are too."""
    text = "\n".join(drawn(Seen(SHOWN | {"health": [{"level": "error", "what": "bad", "do": "act"}]}, PEERS, {})))
    assert "error: bad" in text
    assert "do: act" in text
    assert "10.0.0.0:8468" in text
