"""Lines for a terminal: spans with a tone, cut or wrapped to a width, aligned in columns, in colour or in plain ASCII.

Text of peers may hold anything: control characters, which could move the cursor or change the title of the window, are
replaced in the one place where spans become text (`Style.render`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Tone = Literal["", "ok", "warn", "bad", "dim", "bold"]
Span = tuple[str, Tone]
Line = list[Span]

#: SGR parameters (ECMA-48, 8.3.117); the colours are of the eight that every terminal has.
_CODES: dict[Tone, str] = {"ok": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1"}
#: One character each, so that columns stay aligned.
_ASCII = str.maketrans("…●▲✖·→─│█░▁▂▃▄▅▆▇×", "~*!x.>-|#._.-=+*%x")
#: Narrower than this nothing readable fits, and no line is cut further.
MIN_WIDTH = 10


class Style(NamedTuple):
    """What a terminal can show. `width` in cells; None: lines are not cut (a pipe). `encoding`: of its characters."""

    width: int | None = None
    colour: bool = False
    encoding: str = "utf-8"

    def render(self, line: Iterable[Span]) -> str:
        """The text of a line, cut to the width."""
        left = None if self.width is None else max(MIN_WIDTH, self.width)
        parts = []
        spans = [(self._plain(text), tone) for text, tone in line]
        if left is not None and sum(cells(text) for text, _ in spans) > left:
            left -= 1
            spans = [*_cut(spans, left), (self._plain("…"), "dim")]
        for text, tone in spans:
            code = _CODES.get(tone, "") if self.colour and text.strip() else ""
            parts.append(f"\x1b[{code}m{text}\x1b[0m" if code else text)
        return "".join(parts) if self.colour else "".join(parts).rstrip()

    def _plain(self, text: str) -> str:
        text = "".join("?" if unicodedata.category(letter)[0] == "C" else letter for letter in text)
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
        return text


def cells(text: str) -> int:
    """How many cells of a terminal the text takes: two for East Asian wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _cut(spans: Sequence[Span], limit: int) -> list[Span]:
    kept: list[Span] = []
    for text, tone in spans:
        taken = prefix(text, limit)
        kept.append((taken, tone))
        limit -= cells(taken)
        if len(taken) < len(text):
            break
    return kept


def prefix(text: str, limit: int) -> str:
    """The longest beginning of the text that takes at most `limit` cells."""
    used = 0
    for position, letter in enumerate(text):
        used += cells(letter)
        if used > limit:
            return text[:position]
    return text


def clipped(text: str, limit: int) -> str:
    """The text in at most `limit` cells, with an ellipsis where something is left out."""
    return text if cells(text) <= limit else prefix(text, max(0, limit - 1)) + "…"


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` cells, broken at spaces; longer words are broken where they must."""
    lines, current = [], ""
    for word in text.split(" "):
        rest = word
        joined = f"{current} {rest}" if current else rest
        if cells(joined) <= width:
            current = joined
            continue
        if current:
            lines.append(current)
        while cells(rest) > width:
            head = prefix(rest, width) or rest[:1]
            lines.append(head)
            rest = rest[len(head) :]
        current = rest
    return [*lines, current] if current or not lines else lines


def labelled(label: str, text: str, style: Style, *, indent: int = 11, tone: Tone = "") -> list[Line]:
    """A label and its text; further lines of the text are indented below the first."""
    width = None if style.width is None else max(MIN_WIDTH, style.width - indent)
    pieces = [text] if width is None else wrapped(text, width)
    return [
        [(f"{label if position == 0 else '':<{indent}}", "dim"), (piece, tone)] for position, piece in enumerate(pieces)
    ]


class Column(NamedTuple):
    """A column of a table. `keep`: those with the lowest number go first where the width does not do. `least`: cells to
    which it may be narrowed before that; 0: never. `most`: cells that its contents usually take, so nothing jumps."""

    name: str
    right: bool = False
    keep: int = 9
    least: int = 0
    most: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span]], style: Style, *, gap: int = 2) -> list[Line]:
    """A header and aligned rows that fit the width: columns are narrowed first, then left out."""
    widths = [
        max([cells(column.name), column.most, *(cells(row[at][0]) for row in rows)])
        for at, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    if style.width is not None:
        limit = max(MIN_WIDTH, style.width)

        def excess() -> int:
            return sum(widths[at] for at in shown) + gap * (len(shown) - 1) - limit

        for at in sorted(shown, key=lambda at: columns[at].keep):
            if (over := excess()) > 0 and columns[at].least:
                widths[at] = max(min(columns[at].least, widths[at]), widths[at] - over)
        while len(shown) > 1 and excess() > 0:
            shown.remove(min(shown, key=lambda at: columns[at].keep))
    header: list[Span] = [(column.name, "dim") for column in columns]
    return [_row(columns, cells_of, widths, shown, gap) for cells_of in (header, *rows)]


def _row(columns: Sequence[Column], row: Sequence[Span], widths: Sequence[int], shown: Sequence[int], gap: int) -> Line:
    line: Line = []
    for position, at in enumerate(shown):
        text, tone = clipped(row[at][0], widths[at]), row[at][1]
        padding = " " * (widths[at] - cells(text))
        is_last = position == len(shown) - 1
        if columns[at].right:
            line += [(padding, ""), (text, tone)]
        else:
            line += [(text, tone), ("" if is_last else padding, "")]
        if not is_last:
            line.append((" " * gap, ""))
    return line


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns without limit and colour, one line per row, for grep and awk."""
    plain: list[list[Span]] = [[(cell, "") for cell in row] for row in rows]
    style = Style()
    return "\n".join(style.render(line) for line in table([Column(name) for name in header], plain, style))
