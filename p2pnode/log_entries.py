"""Entries of a node's log, from `/events` or from a line of its log file, and which of them somebody asks for. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

LEVELS = ("debug", "info", "warning", "error")
#: The nodes of `--local` have their number in front.
_NUMBERED = re.compile(r"\[(\d+)\] ")


class Entry(NamedTuple):
    """One event. `time_s`: seconds since 1970, None where a line has none. A line that is no event (a message of the
    interpreter) has an empty `event`, and its text in `fields`."""

    time_s: float | None
    level: str
    event: str
    fields: Mapping[str, Any]

    @property
    def as_json(self) -> dict[str, Any]:
        return {"time": self.time_s, "level": self.level, "event": self.event, "fields": dict(self.fields)}


class EntryFilter(NamedTuple):
    """Entries from `level` up, and of these events alone, where any are named; `*` stands for any characters. `node`:
    of this node of `--local` alone, by its number."""

    level: str = "info"
    events: Sequence[str] = ()
    node: str = ""

    def takes(self, entry: Entry) -> bool:
        rank = LEVELS.index(entry.level) if entry.level in LEVELS else len(LEVELS)
        if rank < LEVELS.index(self.level) or (self.node and self.node != str(entry.fields.get("node"))):
            return False
        return not self.events or any(fnmatchcase(entry.event, pattern) for pattern in self.events)


def of_event(event: Mapping[str, Any]) -> Entry:
    """An entry of `/events`."""
    time_s, fields = event.get("time"), event.get("fields")
    return Entry(
        float(time_s) if isinstance(time_s, int | float) else None,
        str(event.get("level", "info")),
        str(event.get("event", "")),
        fields if isinstance(fields, dict) else {},
    )


def of_line(line: str) -> Entry:
    """A line of a log in JSON, with the number of its node where it has one; another line is an entry with its text."""
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
    """The newest `count` of those that are wanted, oldest first."""
    taken = [entry for entry in entries if wanted.takes(entry)]
    return taken[-count:] if count else []
