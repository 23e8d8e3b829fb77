"""Records that hold a value: JSON text, or named arrays with their types. Pure.

`decode_example` returns what either kind holds; `encode_example` makes the second, a MessagePack map. The first byte
tells them apart: JSON text begins below 0x80, a map does not. Text lines are neither: `record.decode()` is their line.

An array is packed as in `training.values.encoding`. Records come from files of strangers: everything is checked, and
nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from p2pnode.training.values.encoding import array_of, extension_of

_FIRST_OF_MAP = 0x80


class BadExample(ValueError):
    """A record is not a value as packed here, or a value cannot be packed; the text says why."""


def encode_example(example: Mapping[str, Any]) -> bytes:
    """A record of named values: arrays, numbers, text, bytes, booleans, None, and lists and maps of them.

    NumPy scalars are kept with their type, as arrays without dimensions. Raises `BadExample` for other types, for
    arrays of objects, and for integers of more than 64 bits.
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


def _unpack(code: int, data: memoryview) -> Any:
    array = array_of(code, data)
    return array if array.ndim else array[()]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=extension_of)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_unpack)
