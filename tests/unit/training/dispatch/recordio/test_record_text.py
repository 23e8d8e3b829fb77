"""Records as people and programs see them: text, examples, bytes; no control characters, and JSON that every reader
takes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from p2pnode.training.dispatch.recordio import encode_example
from p2pnode.training.dispatch.recordio.record_text import as_json, as_text


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (b"", ""),
        (b"plain text", "plain text"),
        ("größer → 日本".encode(), "größer → 日本"),
        (b"a\x1b[31mb\rc\n", "a\\x1b[31mb\\rc\\n"),
        ("\u202eabc".encode(), "\\u202eabc"),
        (b"\xff\xfe", "ff fe (2 bytes)"),
        (b"\xff" * 33, " ".join(["ff"] * 32) + "… (33 bytes)"),
        (b"\xff" * 32, " ".join(["ff"] * 32) + " (32 bytes)"),
    ],
)
def test_a_record_is_one_line_without_control_characters(record: bytes, shown: str) -> None:
    """What is no text is shown by its first bytes, and how many there are."""
    assert as_text(record) == shown


def test_an_example_is_shown_with_its_arrays_as_type_and_shape() -> None:
    """Scalars by their value; other values as they are."""
    record = encode_example({"x": np.zeros((2, 3), np.float32), "y": np.int64(7), "name": "ä", "raw": b"\x01"})

    assert json.loads(as_text(record)) == {"x": "float32 2×3", "y": 7, "name": "ä", "raw": {"base64": "AQ=="}}
    assert "ä" in as_text(record)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (b"text", {"text": "text"}),
        (b"", {"text": ""}),
        (b"7", {"text": "7"}),
        (b'{"a": 1}', {"value": {"a": 1}}),
        (b"[1, 2]", {"value": [1, 2]}),
        (b"{broken", {"text": "{broken"}),
        (b"\xff\xfe", {"base64": "//4="}),
    ],
)
def test_a_program_is_told_what_a_record_is(record: bytes, found: dict[str, Any]) -> None:
    """Text that is a map or a list of JSON is its value; bytes are coded."""
    assert as_json(record) == found


def test_the_arrays_of_an_example_have_type_shape_and_values() -> None:
    """Nested ones too; a scalar is a number."""
    example = {"x": np.array([[1, 2]], np.int8), "s": np.float32(0.5), "deep": [{"b": b"\x00"}, None, True]}

    assert as_json(encode_example(example)) == {
        "value": {
            "x": {"type": "int8", "shape": [1, 2], "values": [[1, 2]]},
            "s": 0.5,
            "deep": [{"b": {"base64": "AA=="}}, None, True],
        }
    }


def test_numbers_that_json_does_not_have_are_text() -> None:
    """`NaN` as a bare word is no JSON, and most readers refuse the whole line."""
    record = encode_example(
        {"x": np.array([np.nan, np.inf, 1.0], np.float32), "y": float("-inf"), "z": np.float64("nan")}
    )

    found = json.loads(json.dumps(as_json(record), allow_nan=False))["value"]

    assert (found["x"]["values"], found["y"], found["z"]) == (["nan", "inf", 1.0], "-inf", "nan")
    assert json.dumps(json.loads(as_text(record)), allow_nan=False)
