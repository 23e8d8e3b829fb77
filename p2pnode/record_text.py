"""How records are shown: as a line for a person, or as JSON.

What a record is, its bytes tell: an example of named values (`training.dispatch.recordio.examples`), else UTF-8 text,
else bytes. A terminal gets no control characters from a file of somebody else.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

from p2pnode.training.dispatch.recordio import BadExample, decode_example

_SHOWN_BYTES = 32
_FIRST_OF_MAP = 0x80


def as_text(record: bytes) -> str:
    """One line: text with its control characters escaped, an example with its arrays as type and shape, or the first
    bytes in hexadecimal."""
    example = _example(record)
    if example is not None:
        return json.dumps(_outline(example), ensure_ascii=False)
    try:
        text = record.decode()
    except UnicodeDecodeError:
        more = "…" if len(record) > _SHOWN_BYTES else ""
        return f"{record[:_SHOWN_BYTES].hex(' ')}{more} ({len(record)} bytes)"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def as_json(record: bytes) -> dict[str, Any]:
    """The record under the key `value` (an example, or what JSON text says), `text` or `base64`. Numbers that JSON does
    not have are the text "nan", "inf" and "-inf"."""
    example = _example(record)
    if example is not None:
        return {"value": _plain(example)}
    try:
        text = record.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(record).decode()}
    if text[:1] in ("{", "["):
        try:
            return {"value": decode_example(record)}
        except BadExample:
            pass
    return {"text": text}


def _example(record: bytes) -> dict[str, Any] | None:
    if not record or record[0] < _FIRST_OF_MAP:
        return None
    try:
        found: dict[str, Any] = decode_example(record)
    except BadExample:
        return None
    return found


def _outline(value: Any) -> Any:
    """For a person: an array is its type and shape, a NumPy scalar its value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {'×'.join(map(str, value.shape))}"
    return _walked(value, _outline)


def _plain(value: Any) -> Any:
    """For a program: an array is its type, shape and values."""
    if isinstance(value, np.ndarray):
        return {"type": str(value.dtype), "shape": list(value.shape), "values": _walked(value.tolist(), _plain)}
    return _walked(value, _plain)


def _walked(value: Any, each: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): each(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [each(inner) for inner in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if isinstance(value, bool | int | float | str | None) else str(value)
