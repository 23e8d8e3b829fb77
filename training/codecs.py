"""How float32 values travel: as they are, or as bfloat16 rounded to nearest even.

NumPy only: the daemon has no torch, and NumPy has no bfloat16, so the conversion works on the bit patterns.
A lossy codec is made exact over time by error feedback, which the sender keeps (`training.exchange.pushing`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from overlay.transport import Buffer

CodecName = Literal["float32", "bfloat16"]
Vector = npt.NDArray[np.float32]

#: The codec's number in a frame header and its bytes per value.
CODES: dict[CodecName, int] = {"float32": 0, "bfloat16": 1}
NAMES: dict[int, CodecName] = {number: name for name, number in CODES.items()}
BYTES_PER_VALUE: dict[CodecName, int] = {"float32": 4, "bfloat16": 2}


def encode(values: Vector, codec: CodecName) -> bytes:
    """The values' bytes on the wire, little-endian. Finite input only: rounding would turn a NaN into infinity."""
    if codec == "float32":
        return values.astype("<f4", copy=False).tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Round to nearest, ties to even: add half of the dropped range, plus one if the kept part is odd.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def decode(data: Buffer, codec: CodecName, into: Vector) -> None:
    """Write the encoded values over `into`, which has exactly as many. `ValueError` when the sizes differ."""
    if len(memoryview(data).cast("B")) != into.size * BYTES_PER_VALUE[codec]:
        raise ValueError(f"{len(data)} bytes of {codec} are not {into.size} values")
    if codec == "float32":
        into[:] = np.frombuffer(data, dtype="<f4")
        return
    bits = into.view(np.uint32)
    bits[:] = np.frombuffer(data, dtype="<u2")
    bits <<= np.uint32(16)


def all_finite(values: Vector) -> bool:
    """True when no value is NaN or infinite.

    A finite sum of squares proves it thirty times faster than looking at each; an infinite one may be overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(values, values)):
            return True
    return bool(np.isfinite(values).all())
