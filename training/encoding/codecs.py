"""Encodes and decodes float32 values by the name of a codec (`training.encoding.table`).

With error feedback (Seide et al., Interspeech 2014) what one delta lacks goes out with the next, so that none is lost:
it stays progress of the trainer (`training.exchange.client.push`). Pure.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module

import numpy as np

from p2pnode.overlay.transport import Buffer
from p2pnode.training.encoding.arithmetic import Arithmetic, Encoded, Vector, all_finite
from p2pnode.training.encoding.table import CODECS, Codec, CodecName

__all__ = ["Encoded", "Vector", "all_finite", "arithmetic", "as_bytes", "decode", "decoded", "encode"]


def arithmetic(codec: CodecName) -> Arithmetic:
    """The arithmetic of a codec of the table."""
    return _arithmetic(CODECS[codec])


@cache
def _arithmetic(codec: Codec) -> Arithmetic:
    module, _, name = codec.arithmetic.partition(":")
    found: type[Arithmetic] = getattr(import_module(module), name)
    return found(codec)


@lru_cache(maxsize=64)
def values_within(codec: CodecName, limit_bytes: int) -> int:
    """The largest number of values that always fits into `limit_bytes` and after which an encoding may be cut."""
    unit = CODECS[codec].block_values
    return limit_bytes // arithmetic(codec).max_bytes(unit) * unit


def encode(values: Vector, codec: CodecName) -> Encoded:
    """Encode values, little-endian. Only for finite input: rounding would turn a NaN into infinity."""
    return arithmetic(codec).encode(values)


def encode_with_feedback(delta: Vector, residual: Vector, codec: CodecName, *, is_last: bool = False) -> Encoded:
    """As `Arithmetic.encode_with_feedback`."""
    return arithmetic(codec).encode_with_feedback(delta, residual, is_last=is_last)


def as_bytes(values: Vector) -> memoryview:
    """Values as float32 on the wire: the array's own memory, not a copy, if it is contiguous."""
    return np.ascontiguousarray(values, dtype="<f4").data.cast("B")


def decode(data: Buffer, codec: CodecName, into: Vector) -> None:
    """Decode into `into`, which has exactly as many values. Raises `ValueError` if the sizes differ, or the bytes are
    no valid encoding; then nothing is written."""
    arithmetic(codec).decode(memoryview(data).cast("B"), into)


def decoded(data: Buffer, codec: CodecName, values: int) -> Vector:
    """Decode to float32; values in that codec stay in the buffer's own memory. Raises `ValueError` as `decode` does."""
    return arithmetic(codec).decoded(data, values)
