"""Printing: answers and errors go to different streams."""

from __future__ import annotations

import io
import sys

import pytest

from p2pnode.commands.output import print_error, print_line


class Pipe(io.StringIO):
    """A stream that records when it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_an_answer_is_a_line_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is flushed, so that the reader of a pipe sees it at once."""
    out, err = Pipe(), Pipe()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    print_line("step 7")

    assert (out.flushed, err.getvalue()) == ("step 7\n", "")


def test_an_error_names_what_failed_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty hint has no line."""
    out, err = Pipe(), Pipe()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    print_error("no node reachable", "start one")
    print_error("interrupted", "")

    assert (out.getvalue(), err.flushed) == ("", "error: no node reachable\nhint: start one\nerror: interrupted\n")
