"""Printing: answers and errors go to different streams."""

from __future__ import annotations

import io
import sys

import pytest

from p2pnode.commands.output import print_error, print_notice, print_text


class Terminal(io.StringIO):
    """A terminal of 80 cells."""

    def isatty(self) -> bool:
        return True


LONG = "keys, tokens and invitations are removed; addresses of peers, paths and what your script prints are in it"


def test_words_for_people_are_broken_at_spaces_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the end of the label, and without what could move the cursor."""
    errors, answers = Terminal(), Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "stdout", answers)
    print_notice(LONG)
    print_error("no \x1b[2J", f"{LONG}\nand more")
    print_text("", LONG)
    assert errors.getvalue().splitlines() == [
        "note: keys, tokens and invitations are removed; addresses of peers, paths and",
        "      what your script prints are in it",
        "error: no ?[2J",
        "hint: keys, tokens and invitations are removed; addresses of peers, paths and",
        "      what your script prints are in it",
        "      and more",
    ]
    assert answers.getvalue().splitlines() == [
        "keys, tokens and invitations are removed; addresses of peers, paths and what",
        "your script prints are in it",
    ]


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs look for what they know in one line."""
    print_error(LONG, LONG)
    print_error("interrupted", "")
    print_notice(LONG)
    print_text("", LONG)
    found = capsys.readouterr()
    assert found.err == f"error: {LONG}\nhint: {LONG}\nerror: interrupted\nnote: {LONG}\n"
    assert found.out == f"{LONG}\n"
