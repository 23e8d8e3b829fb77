"""Printing: answers to standard output, errors to standard error. The only module that prints for the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from p2pnode.screen import style_of
from p2pnode.terminal.lines import MIN_WIDTH, Line, Style, wrapped


def print_line(text: str) -> None:
    """Print a line and flush it, so that the reader of a pipe sees it at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_lines(make: Callable[[Style], Sequence[Line]]) -> None:
    """Print the lines that `make` gives for what standard output can show."""
    style = style_of(sys.stdout)
    sys.stdout.write("".join(f"{style.render(line)}\n" for line in make(style)))
    sys.stdout.flush()


def print_json(answer: Mapping[str, object]) -> None:
    """Print the answer of `--json`: one object, with the number of its schema before the keys of docs/terminal.md."""
    print_line(json.dumps({"schema": 1, **answer}, indent=2))


def print_answer(text: str, answer: Mapping[str, object], *, as_json: bool) -> int:
    """Print what a command has done, for a person or for a program; returns the exit code 0."""
    if as_json:
        print_json(answer)
    else:
        print_line(text)
    return 0


def print_error(message: str, hint: str) -> None:
    """Print what failed and what to do next to standard error."""
    _print_labelled("error: ", message)
    if hint:
        _print_labelled("hint: ", hint)


def print_notice(text: str) -> None:
    """Print something to know, which is not the answer, to standard error."""
    _print_labelled("note: ", text)


def _print_labelled(label: str, text: str) -> None:
    """Lines for a terminal are broken at spaces, and begin below the end of the label; a pipe gets one."""
    stream = sys.stderr
    style = style_of(stream)
    lines = [text]
    if style.width is not None:
        room = max(MIN_WIDTH, style.width - len(label))
        lines = [style.render([(line, "")]) for part in text.split("\n") for line in wrapped(part, room)]
    below = " " * len(label)
    stream.write("".join(f"{below if at else label}{line}\n" for at, line in enumerate(lines)))
    stream.flush()
