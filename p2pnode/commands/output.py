"""Printing: answers to standard output, errors to standard error. The only module that prints for the commands."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """One answer, flushed, so that a reader of a pipe sees it now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_error(message: str, hint: str) -> None:
    """What went wrong and what to do next."""
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    sys.stderr.flush()
