"""Printing: answers to standard output, errors to standard error. The only module that prints for the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from p2pnode.screen import style_of
from p2pnode.terminal.lines import Line, Style


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


def print_error(message: str, hint: str) -> None:
    """Print what failed and what to do next to standard error."""
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    sys.stderr.flush()


def print_notice(text: str) -> None:
    """Print something to know, which is not the answer, to standard error."""
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()
