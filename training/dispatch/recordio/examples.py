"""Records that hold a value: JSON text, or named arrays with their types. Pure.

`decode_example` returns what either kind holds; `encode_example` makes the second, a MessagePack map. The first byte
tells them apart: JSON text begins below 0x80, a map does not. Text lines are neither: `record.decode()` is their line.

An array is MessagePack's extension type 1: the length of its NumPy type and the number of its dimensions (a byte each),
the type in ASCII, little-endian ("<f4"), the dimensions (u32, little-endian), then the values in C order. Records come
from files of strangers: everything is checked, and nothing is unpickled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_ARRAY = 1
#: Booleans, integers, floats, complex numbers, durations and dates: types of one size whose bytes are their values.
_KINDS = "biufcmM"
_MAX_TYPE_LENGTH = 16
#: The most that NumPy has had in every version.
_MAX_DIMENSIONS = 32
_FIRST_OF_MAP = 0x80


class BadExample(ValueError):
    """A record is not a value as packed here, or a value cannot be packed; the text says why."""


def encode_example(example: Mapping[str, Any]) -> bytes:
    """A record of named values: arrays, numbers, text, bytes, booleans, None, and lists and maps of them.

    NumPy scalars are kept with their type, as arrays without dimensions. Raises `BadExample` for other types, for
    arrays of objects or text, and for integers of more than 64 bits.
    """
    try:
        return _ENCODER.encode(dict(example))
    except (TypeError, OverflowError, ValueError) as error:
        raise BadExample(f"this example cannot be packed: {error}") from None


def decode_example(record: bytes | memoryview) -> Any:
    """The value of a record: whatever JSON text says, or a dict of what `encode_example` was given.

    Arrays are new and may be written to; those without dimensions are NumPy scalars. Raises `BadExample`.
    """
    if not record:
        raise BadExample("an empty record holds no value")
    try:
        if record[0] < _FIRST_OF_MAP:
            return msgspec.json.decode(record)
        found = _DECODER.decode(record)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadExample(f"this record holds no value: {error}") from None
    if not isinstance(found, dict):
        raise BadExample("this record is neither JSON text nor a map of named values")
    return found


def stack_examples(records: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
    """The examples of these records as one array for each name, with a first axis for the records: a batch.

    Raises `BadExample` if there is none, or if they do not have the same names, shapes and types of values.
    """
    examples = [decode_example(record) for record in records]
    if not examples or not isinstance(examples[0], dict):
        raise BadExample("a batch needs at least one record, and named values in each")
    names = examples[0].keys()
    for number, example in enumerate(examples):
        if not isinstance(example, dict) or example.keys() != names:
            raise BadExample(f"record {number} of the batch has other names than the first: {sorted(names)}")
    batch = {}
    for name in names:
        values = [np.asarray(example[name]) for example in examples]
        if any(value.shape != values[0].shape for value in values):
            raise BadExample(f"the values of {name} have different shapes, so they are no batch")
        batch[name] = np.stack(values)
    return batch


def _pack(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"values of type {type(value).__name__} are not supported")
    array = np.asarray(value)
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"arrays of type {array.dtype} are not supported: only those of numbers, booleans and dates")
    kind = array.dtype.newbyteorder("<").str.encode()
    head = struct.pack(f"<BB{len(kind)}s{array.ndim}I", len(kind), array.ndim, kind, *array.shape)
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return msgspec.msgpack.Ext(_ARRAY, head + values.tobytes())


def _unpack(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"its extension type {code} is unknown")
    length, dimensions = (data[0], data[1]) if len(data) >= 2 else (0, 0)
    start = 2 + length + 4 * dimensions
    if not 0 < length <= _MAX_TYPE_LENGTH or dimensions > _MAX_DIMENSIONS or start > len(data):
        raise ValueError("an array in it has no valid head")
    try:
        dtype = np.dtype(bytes(data[2 : 2 + length]).decode("ascii"))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"an array in it has no valid type: {error}") from None
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array in it is of type {dtype}, which is not allowed")
    shape = struct.unpack_from(f"<{dimensions}I", data, 2 + length)
    # Python's integers: the product of the dimensions of a damaged record does not wrap around.
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"an array in it has {len(data) - start} bytes, and its head says {dtype} of shape {shape}")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape).copy()
    return array if dimensions else array[()]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_unpack)
