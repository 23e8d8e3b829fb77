"""`p2pnode logs`: one event per line, wrapped below its name on a terminal, whole in a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from p2pnode.terminal.lines import Line, Span, Style, Tone, cells, clipped, wrapped
from p2pnode.terminal.numbers import number

_TONES: Mapping[str, Tone] = {"debug": "dim", "info": "", "warning": "warn", "error": "bad"}
#: Ids and digests; a terminal shows eight digits of them, a pipe all.
_LONG_HEX = re.compile(r"\b[0-9a-f]{32,}\b")
_SHOWN_DIGITS = 8
#: Below an event, its fields begin here.
_INDENT = 4
#: Longest field on a terminal, in cells; /events and a pipe have all of it.
_MAX_FIELD_CELLS = 400


def clock_text(time_s: float | None, now_s: float, *, whole: bool) -> str:
    """Local time: of today without a date, unless the `whole` is asked for."""
    if time_s is None:
        return ""
    when, now = (datetime.fromtimestamp(one, UTC).astimezone() for one in (time_s, now_s))
    if whole:
        return when.isoformat(timespec="milliseconds")
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%m-%d %H:%M:%S")


def log_lines(time: str, level: str, event: str, fields: Mapping[str, Any], style: Style) -> list[Line]:
    """One event. `time` as text; an event without a name is a line of text."""
    if not event:
        return [[(str(fields.get("text", "")), _TONES.get(level, ""))]]
    tone = _TONES.get(level, "")
    head: list[Span] = [(f"{time}  ", "dim"), (f"{level:<7}  ", tone), (event, tone if tone != "dim" else "")]
    if style.width is None:
        return [[*head, *((f"  {name}={_value(value)}", "") for name, value in fields.items())]]
    pairs = [clipped(f"{name}={_short(_value(value))}", _MAX_FIELD_CELLS) for name, value in fields.items()]
    used = sum(cells(text) for text, _ in head)
    room = style.width - used - 2
    text = "  ".join(pairs)
    if cells(text) <= room:
        return [[*head, (f"  {text}" if text else "", "")]]
    below = _packed(pairs, max(10, style.width - _INDENT))
    lines: list[Line] = [head]
    lines += [[(" " * _INDENT + line, "")] for line in below]
    return lines


def _packed(pairs: list[str], width: int) -> list[str]:
    """As many fields to a line as fit; a longer one is wrapped."""
    lines: list[str] = []
    for pair in pairs:
        if lines and cells(lines[-1]) + 2 + cells(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines += wrapped(pair, width)
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return _LONG_HEX.sub(lambda found: found[0][:_SHOWN_DIGITS], text)
