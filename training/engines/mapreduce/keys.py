"""In which bucket a key goes: the same in every process, and for keys that are equal. Pure.

Python's own `hash` of a string differs from process to process.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from training.engines.mapreduce.errors import BadRequest, shown


def bucket_of(key: Any, buckets: int) -> int:
    """The bucket of a key, from 0 to `buckets` - 1. Raises `BadRequest` for a key of another type than those below."""
    return zlib.crc32(_canonical(key)) % buckets


def _canonical(key: Any) -> bytes:
    """Bytes that are equal for equal keys: 1, 1.0 and True are one key in Python, so also here."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if key is None:
        return b"n"
    if isinstance(key, tuple):
        parts = [_canonical(part) for part in key]
        return b"t" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    if hasattr(key, "item") and getattr(key, "ndim", None) == 0:  # a number of NumPy
        key = key.item()
    if isinstance(key, float):
        if math.isnan(key):
            raise BadRequest("nan is no key: it is not equal to itself")
        if not key.is_integer():
            return b"f" + repr(key).encode()
        key = int(key)
    if isinstance(key, int):
        return b"i%d" % int(key)
    raise BadRequest(
        f"{shown(key)} of type {type(key).__name__} is no key: "
        "use str, bytes, int, float, bool, None or a tuple of these"
    )
