"""Examples in records: what goes in comes out, with its types, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from p2pnode.training.dispatch.recordio import BadExample, decode_example, encode_example, stack_examples

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=100)
NUMBERS = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?"),
    arrays.complex_number_dtypes(endianness="?"),
    arrays.datetime64_dtypes(endianness="?"),
)


@FIXED
@given(arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_an_array_comes_back_with_its_type_shape_and_values(array: np.ndarray[Any, Any]) -> None:
    """Any array of numbers, of any byte order and shape, is decoded to the same values, its own memory."""
    found = decode_example(encode_example({"x": array}))["x"]

    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)
    assert not isinstance(found, np.ndarray) or found.flags.writeable


def test_plain_values_come_back() -> None:
    """Numbers, text, bytes, lists and maps come back as they were, beside arrays inside of them."""
    example = {"label": 7, "name": "größe", "raw": b"\x00\xff", "none": None, "nested": {"list": [1, 2.5, True]}}

    assert decode_example(encode_example(example)) == example
    found = decode_example(encode_example({"deep": [{"x": np.arange(3, dtype=np.int16)}]}))
    assert (found["deep"][0]["x"].tolist(), found["deep"][0]["x"].dtype) == ([0, 1, 2], np.int16)
    label = decode_example(encode_example({"label": np.uint8(200)}))["label"]
    assert (type(label), label) == (np.uint8, 200)


@pytest.mark.parametrize("text", ['{"a": [1, 2]}', "[1]", '"text"', "5", "-1.5", "null", ' {"a": "ö"}'])
def test_json_text_is_decoded_too(text: str) -> None:
    """A record of JSON text gives what the text says, whatever its type."""
    assert decode_example(text.encode()) == msgspec.json.decode(text)


@pytest.mark.parametrize("value", [np.array([object()]), object(), 2**70, np.zeros(2, [("a", "i4")]), {1, 2, object()}])
def test_other_values_are_refused(value: object) -> None:
    """Objects, arrays of objects or structures, and large integers are errors, not pickles."""
    with pytest.raises(BadExample, match="cannot be packed"):
        encode_example({"x": value})


def packed(data: bytes, code: int = 1) -> bytes:
    """A record with one extension."""
    return msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(code, data)})


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b"", "empty"),
        (b"not json", "holds no value"),
        (b"\x93\x01\x02\x03", "neither JSON text nor a map"),
        (b"\x81\xa1x", "holds no value"),
        (packed(b"", 2), "an unknown extension 2"),
    ],
)
def test_other_records_are_refused(record: bytes, problem: str) -> None:
    """What is neither JSON text nor a whole map of values is an error that says why."""
    with pytest.raises(BadExample, match=problem):
        decode_example(record)


@FIXED
@given(st.binary(max_size=60), st.integers(0, 8 * 40))
def test_any_bytes_give_a_value_or_the_one_error(data: bytes, bit: int) -> None:
    """Arbitrary bytes, and a valid record with a flipped bit, decode or raise BadExample, nothing else."""
    valid = bytearray(encode_example({"x": np.arange(4, dtype=np.int32), "y": 1}))
    valid[bit // 8 % len(valid)] ^= 1 << bit % 8
    for record in (data, b"\x81" + data, packed(data), bytes(valid)):
        try:
            decode_example(record)
        except BadExample:
            continue


def test_examples_are_stacked_to_a_batch() -> None:
    """A batch has one array for each name, with the records as first axis, from both kinds of records."""
    records = [encode_example({"x": np.full((2, 2), number, np.float32), "y": number}) for number in range(3)]
    batch = stack_examples(records)

    assert (batch["x"].shape, batch["x"].dtype, batch["y"].tolist()) == ((3, 2, 2), np.float32, [0, 1, 2])
    assert stack_examples([b'{"a": 1, "b": "x"}', b'{"b": "y", "a": 2}'])["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "records",
    [[], [b"5"], [b'{"a": 1}', b'{"b": 1}'], [b'{"a": [1]}', b'{"a": [1, 2]}'], [b'{"a": 1}', b"[1]"]],
)
def test_what_is_no_batch_is_refused(records: list[bytes]) -> None:
    """No record, records without names, and records of different names or shapes are errors."""
    with pytest.raises(BadExample):
        stack_examples(records)
