"""`p2pnode logs`: from a node, from its file, and what follows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from p2pnode.client import NotReachable, RunningNode
from p2pnode.commands import logs
from p2pnode.commands.logs import clock_text, log_lines
from p2pnode.commands.options import WhichNode
from p2pnode.errors import ExitCode, UserError
from p2pnode.log_file import LOG_FILE
from p2pnode.terminal.lines import Style, cells

Output = pytest.CaptureFixture[str]


def event(number: int, name: str, level: str = "info") -> dict[str, Any]:
    return {"id": number, "time": 60.0, "level": level, "event": name, "fields": {"n": number}}


class Client:
    """In the place of `NodeClient`."""

    def __init__(self, *pages: list[dict[str, Any]] | Exception) -> None:
        self.pages = list(pages)
        self.asked: list[int] = []

    def events(self, since: int = 0) -> dict[str, Any]:
        self.asked.append(since)
        if not self.pages:
            raise KeyboardInterrupt
        page = self.pages.pop(0)
        if isinstance(page, Exception):
            raise page
        return {"events": page, "dropped": 0, "last": page[-1]["id"] if page else since}


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(logs, "running_in", lambda _: None)
    monkeypatch.setattr(logs, "ASK_S", 0.0)
    monkeypatch.setattr(logs, "LOOK_S", 0.0)


def names(output: str) -> list[str]:
    return [json.loads(line)["event"] for line in output.splitlines()]


def test_a_node_is_asked_and_followed(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The last ones first, then what comes, filtered; a node that is away for a moment is said once."""
    away = NotReachable("no node reachable", "")
    client = Client(
        [event(1, "one"), event(2, "two", "debug"), event(3, "three"), event(4, "four")],
        [event(5, "five", "warning")],
        away,
        away,
        [event(6, "six", "debug"), event(7, "seven")],
    )
    monkeypatch.setattr(WhichNode, "client", lambda _: client)

    assert logs.logs(follow=True, lines=2, level="info", event=None, as_json=True) == 0

    shown = capsys.readouterr()
    assert names(shown.out) == ["three", "four", "five", "seven"]
    assert client.asked == [0, 4, 5, 5, 5, 7]
    assert shown.err.count("no node reachable") == 1


def test_a_log_file_is_read_where_no_node_runs(tmp_path: Path, capsys: Output) -> None:
    """Why a node in the background has ended is in it; lines that are no events are shown."""
    (tmp_path / LOG_FILE).write_text(
        '{"event": "started", "level": "info"}\n{"event": "step", "level": "debug"}\nerror: no\n'
    )
    assert logs.logs(follow=False, lines=10, level="info", event=None, state_dir=str(tmp_path)) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["started", "no"]


def test_a_file_is_followed_until_the_node_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    """Debug events come from the file; what was written just before the end is not lost."""
    file = tmp_path / LOG_FILE
    file.write_text('{"event": "first", "level": "debug"}\n')

    class Ending(RunningNode):
        @property
        def alive(self) -> bool:
            with file.open("a") as log:
                log.write('{"event": "last_words", "level": "debug"}\n')
            return False

    monkeypatch.setattr(logs, "running_in", lambda _: Ending("127.0.0.1:1", os.getpid(), "ab"))
    assert logs.logs(follow=True, lines=10, level="debug", event=None, state_dir=str(tmp_path), as_json=True) == 0
    shown = capsys.readouterr()
    assert names(shown.out) == ["first", "last_words"]
    assert "has ended" in shown.err


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """A directory in its place stands for what cannot be read."""
    with pytest.raises(UserError, match="cannot read the log file") as error:
        logs._from_file(tmp_path, logs.EntryFilter(), 1, lambda _: None, None)
    assert error.value.exit_code == ExitCode.STATE_DIRECTORY


def test_a_local_node_has_its_part_of_the_common_log(tmp_path: Path, capsys: Output) -> None:
    """The nodes of `--local` in the background write one file; that of node 2 is asked for."""
    folder = tmp_path / "local" / "2"
    folder.mkdir(parents=True)
    (folder.parent / LOG_FILE).write_text(
        '[1] {"event": "one", "level": "info"}\n[2] {"event": "two", "level": "info"}\n'
    )
    assert logs.logs(follow=False, lines=9, level="info", event=None, state_dir=str(folder), as_json=True) == 0
    assert names(capsys.readouterr().out) == ["two"]


FIELDS = {
    "peer": "ab" * 20,
    "reason": "did not answer within 5 s",
    "tried": ["10.0.0.5:8468 refused", "b"],
    "share": 0.123456,
}


def text(style: Style, fields: dict[str, object], event: str = "peer_dead", level: str = "warning") -> list[str]:
    return [style.render(line) for line in log_lines("12:00:00", level, event, fields, style)]


def test_a_pipe_gets_one_line_with_everything() -> None:
    """Whole ids, lists as JSON, three digits of numbers."""
    (line,) = text(Style(), FIELDS)
    assert line.startswith(f"12:00:00  warning  peer_dead  peer={'ab' * 20}  reason=did not answer within 5 s  tried=[")
    assert line.endswith("share=0.123")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_terminal_gets_lines_that_fit(width: int) -> None:
    """Ids have eight digits; every field is there, wrapped below the event."""
    lines = text(Style(width=width), FIELDS | {"long": "word " * 60})
    assert all(cells(line) <= width for line in lines)
    assert "abababab" in " ".join(lines)
    assert "ab" * 5 not in "".join(lines)
    assert "".join(lines).count("word") == 60
    assert all(line.startswith("    ") for line in lines[1:])


def test_few_fields_stand_behind_the_event() -> None:
    """One line where there is room; a line that is no event is shown as it is."""
    assert text(Style(width=80), {"step": 3}) == ["12:00:00  warning  peer_dead  step=3"]
    assert text(Style(width=80), {"text": "Traceback"}, event="", level="") == ["Traceback"]
    assert text(Style(width=80), {}) == ["12:00:00  warning  peer_dead"]


def test_times_of_today_have_no_date() -> None:
    """Of another day the date is in front; a pipe gets both, and a line without a time none."""
    now = 1_700_000_000.0
    assert len(clock_text(now - 1, now, whole=False)) == len("12:00:00")
    assert len(clock_text(now - 90_000, now, whole=False)) == len("11-22 12:00:00")
    assert clock_text(now, now, whole=True).startswith("2023-11-1")
    assert clock_text(None, now, whole=True) == ""
