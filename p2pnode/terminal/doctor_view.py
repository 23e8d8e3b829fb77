"""`p2pnode doctor`: a finding with its mark, and the next step below it."""

from __future__ import annotations

from collections.abc import Mapping

from p2pnode.terminal.lines import Line, Style, Tone, wrapped

_MARKS: Mapping[str, tuple[str, Tone]] = {
    "ok": ("●", "ok"),
    "info": ("·", "dim"),
    "warning": ("▲", "warn"),
    "error": ("✖", "bad"),
}
#: The widest name of a check, and the mark before it.
_NAME_CELLS, _INDENT = 11, 14


def finding_lines(name: str, level: str, what: str, do: str, style: Style) -> list[Line]:
    """Mark, name and text; on a terminal wrapped beside the name."""
    mark, tone = _MARKS.get(level, ("?", ""))
    width = None if style.width is None else max(10, style.width - _INDENT)
    texts = [(piece, tone if level in ("warning", "error") else "") for piece in _pieces(what, width)]
    lines: list[Line] = []
    for at, (piece, shade) in enumerate(texts):
        head: Line = [(f"{mark} ", tone), (f"{name:<{_NAME_CELLS}} ", "dim")] if at == 0 else [(" " * _INDENT, "")]
        lines.append([*head, (piece, shade)])
    for piece in _pieces(f"do: {do}", width) if do else []:
        lines.append([(" " * _INDENT, ""), (piece, "")])  # noqa: PERF401 -- a comprehension would not fit the type
    return lines


def _pieces(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrapped(text, width)
