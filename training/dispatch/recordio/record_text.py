"""Shows a record as one line for a person, or as JSON for a program.

A record has no type, so its bytes decide how it is shown. The first of these forms that the bytes fit is taken: an
example, which is a map of named values (`training.dispatch.recordio.examples`), then UTF-8 text, then bytes. The line
for a person has no control characters, because a record from an untrusted file could otherwise control the terminal.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pnode.training.dispatch.recordio import BadExample, decode_example

#: Bytes of a record that are shown in hexadecimal: with their count they fit on one line.
_SHOWN_BYTES = 32
#: An encoded example is a MessagePack map, whose first byte is at least this. The first byte of JSON text is smaller.
_FIRST_OF_MAP = 0x80


def as_text(record: bytes) -> str:
    """One line for a person.

    An example is shown as JSON, in which an array is its type and shape. Text is shown with its control characters
    escaped, and other records by their first bytes in hexadecimal.
    """
    example = _example(record)
    if example is not None:
        return json.dumps(_without_values(example), ensure_ascii=False)
    try:
        text = record.decode()
    except UnicodeDecodeError:
        ellipsis = "…" if len(record) > _SHOWN_BYTES else ""
        return f"{record[:_SHOWN_BYTES].hex(' ')}{ellipsis} ({len(record)} bytes)"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def as_json(record: bytes) -> dict[str, Any]:
    """A dict with one key, for a program.

    The key is `value` for an example and for text that is a JSON map or list, `text` for other text, and `base64` for
    other bytes. In an example, JSON has no number for NaN and infinity: they are the texts "nan", "inf" and "-inf".
    """
    example = _example(record)
    if example is not None:
        return {"value": _with_values(example)}
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
    """The named values of the record; None if it is no example."""
    if not record or record[0] < _FIRST_OF_MAP:
        return None
    try:
        example: dict[str, Any] = decode_example(record)
    except BadExample:
        return None
    return example


def _without_values(value: Any) -> Any:
    """The value for a person: an array becomes its type and shape."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {'×'.join(map(str, value.shape))}"
    return _as_json_type(value, _without_values)


def _with_values(value: Any) -> Any:
    """The value for a program: an array becomes its type, shape and values."""
    if isinstance(value, np.ndarray):
        values = _as_json_type(value.tolist(), _with_values)
        return {"type": str(value.dtype), "shape": list(value.shape), "values": values}
    return _as_json_type(value, _with_values)


def _as_json_type(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A value that is no array, as a type that JSON has; `convert` is applied to the elements of a map or list."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): convert(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [convert(element) for element in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN or infinity
    return value if isinstance(value, bool | int | float | str | None) else str(value)
