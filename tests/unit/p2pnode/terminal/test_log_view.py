"""One event per line; on a terminal its fields are wrapped below it."""

from __future__ import annotations

import pytest

from p2pnode.terminal.lines import Style, cells
from p2pnode.terminal.log_view import clock_text, log_lines

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
