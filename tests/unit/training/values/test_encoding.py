"""Keys and values on the wire."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.values.encoding import (
    MAX_KEY_BYTES,
    BadValue,
    InvalidKey,
    ValueNotEncodable,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(["f4", "f8", ">f8", "i1", "u2", "i8", "?", "c8", "S3", "U2"])


@given(st.text(min_size=1, max_size=60) | st.binary(min_size=1, max_size=MAX_KEY_BYTES))
def test_a_key_returns_as_it_was(key):
    """Every key survives its encoding, and keeps its type."""
    assert decode_key(encode_key(key)) == key


def test_text_and_bytes_are_two_keys():
    """The key "a" is not the key b"a"."""
    assert encode_key("a") != encode_key(b"a")


@pytest.mark.parametrize("key", ["", b"", "é" * 129, b"x" * 257, 7, ("a", 1), None])
def test_a_bad_key_is_refused_with_its_reason(key):
    """An empty or long key and one of another type raise InvalidKey."""
    with pytest.raises(InvalidKey, match="a key"):
        encode_key(key)


@pytest.mark.parametrize("raw", [b"", b"x", b"xabc", b"s\xff"])
def test_bytes_that_are_no_key_are_refused(raw):
    """What another node sends as a key raises BadValue if it is none."""
    with pytest.raises(BadValue):
        decode_key(raw)


@given(PLAIN)
def test_plain_values_return_as_they_were(value):
    """Numbers, text, bytes, lists and dicts survive."""
    assert decode_value(encode_value("k", value)) == value


@given(SHAPES, DTYPES, st.integers(0, 100))
def test_an_array_returns_with_its_dtype_and_shape(shape, dtype, first):
    """Arrays survive with every dtype and shape, in the machine's order of bytes, and can be written to."""
    array = np.arange(first, first + math.prod(shape)).astype(dtype).reshape(shape)
    found = decode_value(encode_value("k", {"w": [array, 1]}))["w"][0]
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == shape
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_a_view_that_is_not_contiguous_returns_whole():
    """A transposed slice arrives with its own values."""
    array = np.arange(24.0).reshape(4, 6).T[::2]
    np.testing.assert_array_equal(decode_value(encode_value("k", array)), array)


def test_a_numpy_scalar_becomes_an_array_without_dimensions():
    """np.float32 keeps its precision."""
    found = decode_value(encode_value("k", np.float32(0.1)))
    assert found.dtype == np.float32
    assert found == np.float32(0.1)


class Opaque:
    """Nothing that msgspec knows."""


@pytest.mark.parametrize(
    "value", [Opaque(), [1, Opaque()], 2**70, np.array([Opaque()]), np.zeros(2, [("a", "i4")]), lambda: 0]
)
def test_a_value_that_cannot_be_sent_is_named_by_its_key(value):
    """The error names the key and says why."""
    with pytest.raises(ValueNotEncodable, match="'weights'") as caught:
        encode_value("weights", value)
    assert caught.value.key == "weights"
    assert caught.value.reason


def test_the_limit_counts_encoded_bytes():
    """A value of exactly the limit passes, one byte more does not."""
    size = len(encode_value("k", b"x" * 1000))
    encode_value("k", b"x" * 1000, size)
    with pytest.raises(ValueNotEncodable, match=r"1,003 bytes.*at most 1,002"):
        encode_value("k", b"x" * 1000, size - 1)


def test_a_list_that_contains_itself_is_refused():
    """Endless nesting is an error of the value, not of the process."""
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueNotEncodable):
        encode_value("k", endless)


@given(st.binary(max_size=40))
def test_foreign_bytes_never_raise_anything_else(raw):
    """Whatever arrives is a value or a BadValue."""
    try:
        decode_value(raw)
    except BadValue:
        pass


@pytest.mark.parametrize("dtype", ["O", "|V8", "<f4x", "S0", "i4,i4", ")i4,"])
def test_an_array_of_a_dangerous_dtype_is_refused(dtype):
    """Objects are never made from the network's bytes."""
    head = msgspec.msgpack.encode((dtype, (1,)))
    raw = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, len(head).to_bytes(2, "big") + head + b"\0" * 8))
    with pytest.raises(BadValue):
        decode_value(raw)
