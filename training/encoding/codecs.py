"""How float32 values travel: as they are, as bfloat16 rounded to nearest even, or as int8 with a scale per block.

The daemon has no torch, and NumPy has no bfloat16, so that conversion works on the bit patterns: in one pass where
there are compiled kernels (`training.kernels`), else in several of NumPy's, to the same bits.
An int8 block is a little-endian float32 scale, max|x| / 127, and up to `BLOCK_VALUES` signed bytes; a value is off by
half a scale at most. A lossy codec is made exact over time by error feedback: what it rounds off one delta is added to
the next (Seide et al., Interspeech 2014); the sender keeps it (`training.exchange.client.push`). Pure.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from overlay.transport import Buffer
from training import kernels

CodecName = Literal["float32", "bfloat16", "int8"]
Vector = npt.NDArray[np.float32]
Encoded = bytes | bytearray | memoryview

#: The codec's number in a frame header.
CODES: dict[CodecName, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
NAMES: dict[int, CodecName] = {number: name for name, number in CODES.items()}

#: Values that share a scale: few enough for an outlier to spoil little, so many that scales are 0.4 % of the bytes.
BLOCK_VALUES = kernels.BLOCK_VALUES
_LEVELS = 127
_BLOCK = np.dtype([("scale", "<f4"), ("levels", "i1", (BLOCK_VALUES,))])
#: Below this a block's largest value is not worth a scale: its levels would be denormals. All of it is rounded off.
_SMALLEST = np.float32(1e-30)
#: Values encoded at a time: the passes over a piece find it in the processor's cache.
_PIECE_VALUES = 32 * BLOCK_VALUES

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def size_bytes(codec: CodecName, values: int) -> int:
    """Bytes that so many values take on the wire."""
    if codec == "int8":
        return values + 4 * -(-values // BLOCK_VALUES)
    return values * _VALUE_BYTES[codec]


def count_values(codec: CodecName, payload_bytes: int) -> int:
    """How many values so many bytes are. `ValueError` where they are no whole number of values."""
    if codec == "int8":
        blocks, rest = divmod(payload_bytes, _BLOCK.itemsize)
        if 0 < rest <= 4:
            raise ValueError(f"{payload_bytes} bytes of int8 end inside a block")
        return blocks * BLOCK_VALUES + max(0, rest - 4)
    count, rest = divmod(payload_bytes, _VALUE_BYTES[codec])
    if rest:
        raise ValueError(f"{payload_bytes} bytes of {codec} end inside a value")
    return count


def cut_values(codec: CodecName) -> int:
    """An encoding may be cut after any multiple of so many values."""
    return BLOCK_VALUES if codec == "int8" else 1


def values_within(codec: CodecName, limit_bytes: int) -> int:
    """The most values that fit in so many bytes and after which an encoding may be cut."""
    unit = cut_values(codec)
    return limit_bytes // size_bytes(codec, unit) * unit


def encode(values: Vector, codec: CodecName) -> Encoded:
    """The values' bytes on the wire, little-endian. Finite input only: rounding would turn a NaN into infinity."""
    if codec == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if codec == "bfloat16" and kernels.COMPILED is not None and kernels.fits(values):
        room = np.empty(size_bytes(codec, values.size), dtype=np.uint8)  # a bytearray would be cleared first
        kernels.COMPILED.encode_bfloat16(values, room)
        return room.data
    data = bytearray(size_bytes(codec, values.size))
    for start in range(0, values.size, _PIECE_VALUES):
        piece = np.ascontiguousarray(values[start : start + _PIECE_VALUES])
        _encode_piece(piece, codec, data, size_bytes(codec, start), None)
    return data


def as_bytes(values: Vector) -> memoryview:
    """Values as float32 on the wire: the array's own memory where it lies in one piece, and not a copy of it."""
    return np.ascontiguousarray(values, dtype="<f4").data.cast("B")


def encode_with_feedback(delta: Vector, residual: Vector, codec: CodecName) -> Encoded:
    """The bytes of `delta + residual` on the wire, for a lossy codec; both are `float32[n]`.

    `residual` becomes what was rounded off. A delta that is not finite is encoded all the same, to be refused by its
    owner, and leaves the residual at zero.
    """
    if kernels.COMPILED is not None and kernels.fits(delta, residual):
        room = np.empty(size_bytes(codec, delta.size), dtype=np.uint8)
        if not kernels.COMPILED.encode_with_feedback(delta, residual, codec, room):
            residual[:] = 0.0
        return room.data
    data = bytearray(size_bytes(codec, delta.size))
    scratch = np.empty(min(_PIECE_VALUES, delta.size), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, delta.size, _PIECE_VALUES):
            owed = residual[start : start + _PIECE_VALUES]
            owed += delta[start : start + _PIECE_VALUES]
            rounded = scratch[: owed.size]
            _encode_piece(owed, codec, data, size_bytes(codec, start), rounded)
            owed -= rounded
    if not all_finite(residual):
        residual[:] = 0.0
    return data


def _encode_piece(values: Vector, codec: CodecName, into: bytearray, at_byte: int, rounded: Vector | None) -> None:
    """Encode contiguous values into the buffer; whole blocks, but for the last piece. `rounded` gets them decoded."""
    if codec == "bfloat16":
        bits = values.view(np.uint32)
        # Round to nearest, ties to even: add half of the dropped range, plus one if the kept part is odd.
        raised = bits >> np.uint32(16)
        raised &= np.uint32(1)
        raised += np.uint32(0x7FFF)
        raised += bits
        if rounded is not None:
            np.bitwise_and(raised, np.uint32(0xFFFF0000), out=rounded.view(np.uint32))
        raised >>= np.uint32(16)
        np.frombuffer(into, dtype="<u2", count=values.size, offset=at_byte)[:] = raised
        return
    blocks = values.size // BLOCK_VALUES
    whole = blocks * BLOCK_VALUES
    if blocks:
        target = np.frombuffer(into, dtype=_BLOCK, count=blocks, offset=at_byte)
        scales, levels = _quantised(values[:whole].reshape(blocks, BLOCK_VALUES))
        with np.errstate(invalid="ignore"):  # any level will do where the scale is not finite
            target["scale"], target["levels"] = scales[:, 0], levels
        if rounded is not None:
            np.multiply(levels, scales, out=rounded[:whole].reshape(blocks, BLOCK_VALUES))
    if whole < values.size:
        scales, levels = _quantised(values[whole:].reshape(1, -1))
        at_byte += blocks * _BLOCK.itemsize
        into[at_byte : at_byte + 4] = scales.astype("<f4").tobytes()
        with np.errstate(invalid="ignore"):
            into[at_byte + 4 : at_byte + 4 + levels.size] = levels.astype(np.int8).tobytes()
        if rounded is not None:
            np.multiply(levels[0], scales[0], out=rounded[whole:])


def _quantised(blocks: Vector) -> tuple[Vector, Vector]:
    """Scales, `float32[n, 1]`, and levels −127…127 as float32, `[n, m]`; one value not finite spoils its block."""
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    usable = ~(largest < _SMALLEST)  # true for a NaN
    scales = np.where(usable, largest / np.float32(_LEVELS), np.float32(0.0))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # of the factors that are not usable
        levels = blocks * np.where(usable, np.float32(_LEVELS) / largest, np.float32(0.0))
    return scales, np.rint(levels, out=levels)


def decode(data: Buffer, codec: CodecName, into: Vector) -> None:
    """Write the encoded values over `into`, which has exactly as many. `ValueError` when the sizes differ."""
    view = memoryview(data).cast("B")
    if len(view) != size_bytes(codec, into.size):
        raise ValueError(f"{len(view)} bytes of {codec} are not {into.size} values")
    if codec == "float32":
        into[:] = np.frombuffer(view, dtype="<f4")
    elif kernels.COMPILED is not None and kernels.fits(into):
        kernels.COMPILED.decode(np.frombuffer(view, dtype=np.uint8), codec, into)
    elif codec == "bfloat16":
        bits = into.view(np.uint32)
        bits[:] = np.frombuffer(view, dtype="<u2")
        bits <<= np.uint32(16)
    else:
        _decode_blocks(view, into)


def decoded(data: Buffer, codec: CodecName, values: int) -> Vector:
    """So many values as float32; those that came as such are the buffer's own memory. `ValueError` as in `decode`."""
    if codec == "float32":
        if len(data) != 4 * values:
            raise ValueError(f"{len(data)} bytes of {codec} are not {values} values")
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    into = np.empty(values, dtype=np.float32)
    decode(data, codec, into)
    return into


def _decode_blocks(view: memoryview, into: Vector) -> None:
    blocks = into.size // BLOCK_VALUES
    whole = blocks * BLOCK_VALUES
    with np.errstate(invalid="ignore"):
        if blocks:
            source = np.frombuffer(view, dtype=_BLOCK, count=blocks)
            np.multiply(source["levels"], source["scale"][:, None], out=into[:whole].reshape(blocks, BLOCK_VALUES))
        if whole < into.size:
            rest = view[blocks * _BLOCK.itemsize :]
            levels = np.frombuffer(rest, dtype=np.int8, offset=4)
            np.multiply(levels, np.frombuffer(rest, dtype="<f4", count=1), out=into[whole:])


def all_finite(values: Vector) -> bool:
    """True when no value is NaN or infinite.

    A finite sum of squares proves it thirty times faster than looking at each; an infinite one may be overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(values, values)):
            return True
    return bool(np.isfinite(values).all())
