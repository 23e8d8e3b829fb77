"""`node.log`, the log of a node in the background: its writer bounds it, and readers follow it and select entries.

The file is the standard output and error of its process. When it is full it becomes `node.log.1` and the next one
begins, so the two take about twice `MAX_BYTES`. Entries come from its lines or from `/events`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Self

#: The log in the state directory, and the one before it.
LOG_FILE, FORMER_FILE = "node.log", "node.log.1"
#: An ordinary node writes as much in some days.
MAX_BYTES = 16 << 20
#: Only its owner reads it: a script may print anything.
MODE = 0o600

LEVELS = ("debug", "info", "warning", "error")
#: With `--local` the lines of each node begin with its number.
_NUMBERED = re.compile(r"\[(\d+)\] ")
#: Held while a log is checked and replaced: all threads of a process write to it.
_replacing = threading.Lock()


def open_log(folder: Path) -> int:
    """A descriptor that appends to the log of a state directory. Raises `OSError`."""
    return os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)


def is_log_of(folder: Path, descriptor: int) -> bool:
    """Whether a descriptor is open on the log of this directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / LOG_FILE).stat())
    except OSError:
        return False


def bounded(
    folder: Path, write: Callable[[bytes], object], descriptors: tuple[int, ...] = (1, 2), *, max_bytes: int = MAX_BYTES
) -> Callable[[bytes], object]:
    """`write` with a new log begun before it, when the present one is full; any thread may call it. `descriptors`: the
    standard output and error of this process. Where neither is the log of this directory, nothing is added."""
    logs = [one for one in descriptors if is_log_of(folder, one)]
    if not logs:
        return write

    def put(data: bytes) -> None:
        with _replacing, contextlib.suppress(OSError):  # on a full disk the present file goes on
            if os.fstat(logs[0]).st_size >= max_bytes:
                _begin_anew(folder, logs)
        write(data)

    return put


def _begin_anew(folder: Path, descriptors: Sequence[int]) -> None:
    if is_log_of(folder, descriptors[0]):  # otherwise another process has replaced the file already
        (folder / LOG_FILE).replace(folder / FORMER_FILE)
    opened = open_log(folder)
    try:
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    finally:
        os.close(opened)


def former_lines(file: Path) -> Iterator[str]:
    """The lines of the log before this one, if there is one."""
    with contextlib.suppress(FileNotFoundError), file.with_name(FORMER_FILE).open(errors="replace") as former:
        for line in former:
            yield line.rstrip("\n")


class Follower:
    """Reads whole lines as they are written, also after the file has been replaced. Leaving its context closes it."""

    def __init__(self, file: Path) -> None:
        """Raises `OSError`."""
        self._path = file
        self._file = file.open("rb")
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self) -> list[str]:
        """The whole lines since the last call. Raises `OSError`."""
        found = self._lines()
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                found += self._lines()  # what was written before the file was replaced
                self._file.close()
                self._file = self._path.open("rb")
                found += self._lines()
        return found

    def _lines(self) -> list[str]:
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]


# -- entries -----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One event. `time_s`: seconds since 1970, None where a line has none. For a line that is no event, as a message of
    the interpreter, `event` is empty and `fields` has its `text`."""

    time_s: float | None
    level: str
    event: str
    fields: Mapping[str, Any]

    @property
    def as_json(self) -> dict[str, Any]:
        return {"time": self.time_s, "level": self.level, "event": self.event, "fields": dict(self.fields)}


class EntryFilter(NamedTuple):
    """Takes entries of `level` and above. `events`: only these, where any are named; `*` stands for any characters.
    `node`: only those of this node of `--local`, by its number."""

    level: str = "info"
    events: Sequence[str] = ()
    node: str = ""

    def takes(self, entry: Entry) -> bool:
        # A line that is no event passes every level: a traceback says why a node has ended.
        rank = LEVELS.index(entry.level) if entry.level in LEVELS else len(LEVELS)
        if rank < LEVELS.index(self.level) or (self.node and self.node != str(entry.fields.get("node"))):
            return False
        return not self.events or any(fnmatchcase(entry.event, pattern) for pattern in self.events)


def event_entry(event: Mapping[str, Any]) -> Entry:
    """The entry of an event of `/events`."""
    time_s, fields = event.get("time"), event.get("fields")
    return Entry(
        float(time_s) if isinstance(time_s, int | float) else None,
        str(event.get("level", "info")),
        str(event.get("event", "")),
        fields if isinstance(fields, dict) else {},
    )


def line_entry(line: str) -> Entry:
    """The entry of a line of the log: an event in JSON, with the number of its node if it has one; or any text."""
    numbered = _NUMBERED.match(line)
    text = line if numbered is None else line[numbered.end() :]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return Entry(None, "error" if text.startswith("error:") else "", "", {"text": line})
    fields = {} if numbered is None else {"node": int(numbered[1])}
    fields |= {key: value for key, value in found.items() if key not in ("event", "level", "timestamp")}
    return Entry(_time_s(found.get("timestamp")), str(found.get("level", "info")), found["event"], fields)


def _time_s(timestamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None


def last(entries: Iterable[Entry], wanted: EntryFilter, count: int) -> list[Entry]:
    """The newest `count` of the wanted entries, the oldest of them first."""
    taken = [entry for entry in entries if wanted.takes(entry)]
    return taken[-count:] if count else []
