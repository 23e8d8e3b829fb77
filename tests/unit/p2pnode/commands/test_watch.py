"""`p2pnode watch`: lines for a pipe, and the curves of the screen."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from p2pnode.client import NotReachable
from p2pnode.commands import watch
from p2pnode.commands.options import WhichNode
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
