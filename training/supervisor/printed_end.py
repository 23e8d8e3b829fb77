"""Finds in what a trainer prints why it ended: the script's exception, or the exit code of a launcher's child. Pure.

Launchers (torchrun, `accelerate launch`) print an exception of their own after the script's, and a banner. Of several
ranks the first to raise is named: the others fail after it, because it is gone. torch marks the uncaught exceptions of
ranks by a prefix (`[rank1]: `).
"""

from __future__ import annotations

import re
from signal import SIGABRT, SIGTERM

#: Uncaught exceptions are printed last; after one of a child a launcher prints some fifty lines.
MAX_LINES_AFTER = 100
#: Of a longer exception no more is shown.
MAX_CHARACTERS = 400

_HEADER = "Traceback (most recent call last)"
#: Of a rank, as torch's hook and `torchrun --tee` print it.
_SOURCE = re.compile(r"(?:\[(?:rank|default)\d+\]: ?)+")
#: A group of exceptions is indented.
_GROUP = re.compile(r"^\s+\| ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.<>]*(: .*|:?)")
#: Printed without the header.
_SYNTAX = re.compile(r"(SyntaxError|IndentationError|TabError): ")
#: A traceback with such a frame is a launcher's own.
_LAUNCHERS = ("/accelerate/commands/launch.py", "/torch/distributed/run.py", "/torch/distributed/launcher/")
_FIRST_CHILD = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank")
_FURTHER_CHILD = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid")
_EXIT_STATUS = re.compile(r" returned non-zero exit status (\d+)\.$")
_SIGNAL = re.compile(r" (?:died with <Signals\.\w+: |got signal: )(\d+)")


class PrintedEnd:
    """Of one process and its children; `read` every line."""

    def __init__(self) -> None:
        #: Sources of a traceback whose last line has not come yet, and whether it is a launcher's.
        self._open: dict[str, bool] = {}
        self._plain = ""
        #: Uncaught exceptions by rank, the first to raise first.
        self._ranks: dict[str, str] = {}
        self._lines_after = 0
        self._codes: list[int] = []

    def read(self, line: str) -> None:
        """The next line, without its end."""
        source = found.group() if (found := _SOURCE.match(line)) else ""
        text = _GROUP.sub("", line[len(source) :])
        if _HEADER in text:
            # A progress bar leaves the cursor behind itself.
            if (late := _SOURCE.search(text)) is not None:
                source = late.group()
            self._open[source] = False
        elif source in self._open and text.startswith("  File ") and any(frame in text for frame in _LAUNCHERS):
            self._open[source] = True
        elif (source in self._open and _EXCEPTION.fullmatch(text)) or _SYNTAX.match(text):
            if not self._open.pop(source, False):
                self._note(source, text[:MAX_CHARACTERS])
                return
            self._read_child_of(text)
        self._lines_after += 1
        if found := _FIRST_CHILD.search(line):
            self._codes = [int(found[1])]
        elif found := _FURTHER_CHILD.match(line):
            self._codes.append(int(found[1]))

    def _note(self, source: str, text: str) -> None:
        if "rank" in source:
            if self._codes:  # the launcher has started its ranks anew
                self._ranks.clear()
                self._codes.clear()
            self._ranks[source] = text
        else:
            self._plain = text
        self._lines_after = 0

    def _read_child_of(self, launcher_exception: str) -> None:
        if found := _EXIT_STATUS.search(launcher_exception):
            self._codes = [int(found[1])]
        elif found := _SIGNAL.search(launcher_exception):
            self._codes = [-int(found[1])]

    def exit_code(self, code: int) -> int:
        """That of the script itself, where its process ended with `code`: a launcher or a shell has its own. Minus the
        number of a signal."""
        if self._codes:
            # A rank that crashed comes before those that failed, or were ended, because it was gone.
            return next((one for one in self._codes if one < 0 and -one not in (SIGABRT, SIGTERM)), self._codes[0])
        return 128 - code if 128 < code <= 128 + 64 else code

    def exception(self, code: int) -> str:
        """The last line of the traceback of a script that ended with `code`; empty if no exception ended it."""
        if code <= 0 or self._lines_after > (MAX_LINES_AFTER if code == 1 else 0):
            return ""
        return next(iter(self._ranks.values()), self._plain)
