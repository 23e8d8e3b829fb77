"""Lossless encoding of float32 values for a receiver that holds them rounded to bfloat16: two bytes a value. Pure.

The receiver has the upper half of each bit pattern, up to rounding. So the difference of both bit patterns, as signed
integers, fits into 16 bits, except where the value was halfway between two and was rounded up in magnitude. Such
differences are listed as exceptions. Any base works; one that differs much has many exceptions, and is no help.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pnode.training.encoding.codecs import Encoded, Vector

#: With more exceptions than one value of so many, the base is too far away, and the whole is sent instead.
VALUES_PER_EXCEPTION = 1024
#: Exceptions of a small array.
MIN_EXCEPTIONS = 4
#: Exceptions of any array: they travel in a message, which is to be decoded in little time.
MAX_EXCEPTIONS = 1 << 17
#: Bytes per value.
LOW_BYTES = 2


class LowBits(NamedTuple):
    """`low`: per value the lower 16 bits, little-endian. `exceptions`: place, and all 32 bits of the value."""

    low: Encoded
    exceptions: list[tuple[int, int]]


def max_exceptions(values: int) -> int:
    """The most exceptions of an array."""
    return min(MIN_EXCEPTIONS + values // VALUES_PER_EXCEPTION, MAX_EXCEPTIONS)


def encode(value: Vector, base: Vector) -> LowBits | None:
    """What a holder of `base`, `float32[n]`, lacks of `value`, `float32[n]`; None if there are too many exceptions."""
    bits, held = _bits(value), _bits(base)
    difference = bits - held  # wraps, and decoding wraps back
    places = np.flatnonzero(difference != difference.astype(np.int16))
    if places.size > max_exceptions(value.size):
        return None
    low = bits.astype("<u2").data.cast("B")
    return LowBits(low, [(int(place), int(bits[place]) & 0xFFFFFFFF) for place in places])


def decode(low: Encoded, exceptions: list[tuple[int, int]], base: Vector) -> Vector:
    """The value, bit by bit. Raises `ValueError` for another number of values, or an exception outside them."""
    if len(low) != LOW_BYTES * base.size:
        raise ValueError(f"{len(low)} bytes for {base.size} values")
    held = _bits(base)
    difference = (np.frombuffer(low, dtype="<u2").astype(np.int32) - held).astype(np.int16)
    bits = held + difference
    for place, exact in exceptions:
        if not 0 <= place < base.size:
            raise ValueError(f"an exception at {place} of {base.size} values")
        bits[place] = np.uint32(exact).astype(np.int32)
    return bits.view(np.float32)


def _bits(values: Vector) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
