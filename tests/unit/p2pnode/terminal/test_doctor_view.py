"""A finding of the doctor as lines: its mark, its text beside the name, and the next step below."""

from __future__ import annotations

import pytest

from p2pnode.commands.doctor import finding_lines
from p2pnode.terminal.lines import Style

PIPE = Style()


def shown(level: str, what: str, do: str, style: Style = PIPE) -> list[str]:
    return ["".join(text for text, _ in line) for line in finding_lines("disk", level, what, do, style)]


def test_a_finding_without_a_next_step_is_one_line() -> None:
    """The next step is a line of its own, below the text."""
    assert shown("ok", "enough space", "") == ["● disk        enough space"]
    assert shown("error", "full", "tidy up") == ["✖ disk        full", " " * 14 + "do: tidy up"]


def test_long_texts_are_wrapped_beside_the_name_on_a_terminal_alone() -> None:
    """No line is wider than the terminal; in a pipe a line stays whole."""
    long = "the folder is on a disk that has little space left"
    lines = shown("warning", long, long, Style(width=40))

    assert len(lines) >= 4
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith(" " * 14) for line in lines[1:])
    assert " ".join(line[14:].strip() for line in lines) == f"{long} do: {long}"
    assert shown("warning", long, "") == [f"▲ disk        {long}"]
    assert all(len(line) <= 24 for line in shown("warning", "so it is", "", Style(width=5)))


@pytest.mark.parametrize(("level", "tone"), [("ok", ""), ("info", ""), ("warning", "warn"), ("error", "bad")])
def test_what_needs_attention_is_coloured_as_a_whole(level: str, tone: str) -> None:
    """Of the others only the mark is; a level of a later version has a mark too."""
    ((_, _, (_, found)),) = finding_lines("disk", level, "text", "", PIPE)

    assert found == tone
    assert shown("dire", "text", "") == ["? disk        text"]
