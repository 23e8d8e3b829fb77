"""Encodes keys and values for the wire: MessagePack through msgspec, NumPy arrays as an extension type. Pure.

A value is anything that msgspec encodes without help, or a NumPy array or scalar of numbers, booleans, dates or
text of a fixed size, alone or inside lists and dicts. Decoding gives plain data back: tuples and sets as lists, structs
and dataclasses as dicts, arrays as new writable arrays of the same dtype and shape.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from p2pnode.training.errors import TrainingError

#: Bytes of a key, as UTF-8 for text.
MAX_KEY_BYTES = 256
#: Bytes of one encoded value, by default and at most.
MAX_VALUE_BYTES = 1024 * 1024

Key = str | bytes

_ARRAY = 1
#: Kinds of dtypes whose bytes are the values: booleans, numbers, dates, and text of a fixed size.
_PLAIN_KINDS = "biufcmMSU"
_TEXT, _RAW = b"s", b"b"
#: What to do about a value of another type.
ENCODABLE = "A value is a number, text, bytes, a NumPy array, or a list or dict of such: convert it before it is set."


class InvalidKey(TrainingError, ValueError):
    """A key is neither text nor bytes, is empty, or is too long."""


class ValueNotEncodable(TrainingError, ValueError):
    """A value cannot be sent to another node. `key` is the one it was for."""

    def __init__(self, key: Key, reason: str) -> None:
        super().__init__(f"the value of {key!r} cannot be encoded: {reason}")
        self.key = key
        self.reason = reason


class BadValue(TrainingError, ValueError):
    """Bytes that are no encoded value, or an encoded key that is none."""


def encode_key(key: Key) -> bytes:
    """A key as bytes; text and bytes of the same content are two keys. Raises `InvalidKey`."""
    if isinstance(key, str):
        encoded = _TEXT + key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        encoded = _RAW + key
    else:
        raise InvalidKey(f"a key is str or bytes, not {type(key).__name__}: {key!r:.100}")
    if not 1 < len(encoded) <= MAX_KEY_BYTES + 1:
        raise InvalidKey(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(encoded) - 1}: {key!r:.100}")
    return encoded


def decode_key(encoded: bytes) -> Key:
    """The key of `encode_key`. Raises `BadValue`."""
    kind, raw = encoded[:1], encoded[1:]
    if kind == _TEXT:
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise BadValue(f"no key: {error}") from error
    if kind == _RAW:
        return raw
    raise BadValue(f"no key: {encoded[:20]!r}")


def encode_value(key: Key, value: object, limit_bytes: int = MAX_VALUE_BYTES) -> bytes:
    """A value as bytes, at most `limit_bytes`. Raises `ValueNotEncodable`, which names the key."""
    try:
        encoded = msgspec.msgpack.encode(value, enc_hook=extension_of)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        what = str(error) or type(error).__name__
        raise ValueNotEncodable(key, f"{what.removesuffix('.')}. {ENCODABLE}") from error
    if len(encoded) > limit_bytes:
        most = f"at most {limit_bytes:,} are allowed. Put it under several keys."
        raise ValueNotEncodable(key, f"it takes {len(encoded):,} bytes, and {most}")
    return encoded


def decode_value(encoded: bytes | memoryview) -> Any:
    """The value of `encode_value`. Raises `BadValue`."""
    try:
        return _DECODER.decode(encoded)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadValue(f"no encoded value: {error}") from error


def extension_of(value: object) -> object:
    """For `msgspec`: an array or a NumPy scalar as an extension. Raises `TypeError` for anything else."""
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"objects of type {type(value).__name__} are not supported")
    array = np.asarray(value)
    if array.dtype.kind not in _PLAIN_KINDS:
        raise TypeError(f"an array of dtype {array.dtype} is not supported")
    head = msgspec.msgpack.encode((array.dtype.newbyteorder("<").str, array.shape))
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "big") + head + little.tobytes())


def array_of(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    """The array of `extension_of`, writable. Raises `ValueError` or `msgspec.DecodeError` for anything else."""
    if code != _ARRAY or len(data) < 2:
        raise ValueError(f"an unknown extension {code}")
    stop = 2 + int.from_bytes(data[:2], "big")
    name, shape = msgspec.msgpack.decode(data[2:stop], type=tuple[str, tuple[int, ...]])
    try:
        dtype = np.dtype(name)
    except (TypeError, SyntaxError) as error:  # NumPy parses some names as Python
        raise ValueError(f"no dtype {name}") from error
    if dtype.kind not in _PLAIN_KINDS or dtype.itemsize == 0:
        raise ValueError(f"an array of dtype {name}")
    # Copied: the message's memory is freed, and the array is the caller's own, writable.
    return np.frombuffer(data, dtype, offset=stop).reshape(shape).astype(dtype.newbyteorder("="))


_DECODER = msgspec.msgpack.Decoder(ext_hook=array_of)
