"""Codecs for float32 values: unchanged, as bfloat16, as int8 or int4 with a scale per block, or the largest alone.

The daemon has no torch and NumPy has no bfloat16, so the conversion works on bit patterns. Compiled kernels
(`training.kernels`) need one pass; without them NumPy makes several, with the same bits. bfloat16 is rounded to nearest
even. An int8 block is a little-endian float32 scale, max|x| / 127, and up to `BLOCK_VALUES` signed bytes. The error of
a value is at most half a scale. `training.encoding.int4` and `training.encoding.sparse` describe the others. The size
of a sparse encoding depends on the values. With error feedback (Seide et al., Interspeech 2014) what one delta lacks
goes out with the next, so that none is lost: it stays progress of the trainer (`training.exchange.client.push`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from p2pnode.overlay.transport import Buffer
from p2pnode.training import kernels
from p2pnode.training.encoding import int4, sparse

CodecName = Literal["float32", "bfloat16", "int8", "int4", "sparse"]
Vector = npt.NDArray[np.float32]
Encoded = bytes | bytearray | memoryview

#: The codecs' numbers in a frame header.
CODES: dict[CodecName, int] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "sparse": 4}
NAMES: dict[int, CodecName] = {number: name for name, number in CODES.items()}

#: Values that share a scale: an outlier spoils only these, and the scales are 0.4 % of the bytes.
BLOCK_VALUES = kernels.BLOCK_VALUES
_LEVELS = 127
_BLOCK = np.dtype([("scale", "<f4"), ("levels", "i1", (BLOCK_VALUES,))])
#: A block whose largest value is below this is encoded as zeros: its scale would be a denormal.
_MIN_VALUE = np.float32(1e-30)
#: Values encoded at a time, so that all passes over a piece find it in the cache.
_PIECE_VALUES = 32 * BLOCK_VALUES

#: Values of each block of 4,096 that sparse sends by default.
SPARSE_VALUES = sparse.PER_BLOCK

_CUT_VALUES = {"int8": BLOCK_VALUES, "int4": int4.BLOCK_VALUES, "sparse": sparse.BLOCK_VALUES}


def has_fixed_size(codec: CodecName) -> bool:
    """Whether the number of values alone determines the bytes of an encoding (`size_bytes`)."""
    return codec != "sparse"


def size_bytes(codec: CodecName, values: int) -> int:
    """Bytes on the wire for this number of values. Raises `ValueError` for sparse, whose size depends on the values."""
    if codec == "sparse":
        raise ValueError("the size of a sparse encoding depends on the values")
    return kernels.size_bytes(codec, values)


def max_bytes(codec: CodecName, values: int, sparse_values: int = sparse.BLOCK_VALUES) -> int:
    """The most bytes for this number of values, with so many values sent of each sparse block: by default all."""
    return sparse.max_bytes(values, sparse_values) if codec == "sparse" else size_bytes(codec, values)


def count_values(codec: CodecName, payload_bytes: int) -> int:
    """Values in this number of bytes, of int4 one too many where their number is odd. Raises `ValueError` if it is not
    a whole number of values, and for sparse."""
    if codec in ("int8", "int4"):
        unit = cut_values(codec)
        head = size_bytes(codec, unit) - unit // (1 if codec == "int8" else 2)
        blocks, rest = divmod(payload_bytes, size_bytes(codec, unit))
        if 0 < rest <= head:
            raise ValueError(f"{payload_bytes} bytes of {codec} end inside a block")
        return blocks * unit + max(0, rest - head) * (1 if codec == "int8" else 2)
    count, rest = divmod(payload_bytes, size_bytes(codec, 1))
    if rest:
        raise ValueError(f"{payload_bytes} bytes of {codec} end inside a value")
    return count


def count_sparse(data: memoryview, most: int) -> int:
    """How many of the next `most` values of an array a sparse encoding has. Raises `ValueError` if it is none."""
    return min(most, sparse.check(data, most) * sparse.BLOCK_VALUES)


def cuts(data: memoryview, codec: CodecName, unit: int) -> Iterator[tuple[int, int]]:
    """Where to cut an encoding, in bytes, after every `unit` values, a multiple of `cut_values`."""
    start = stop = 0
    if has_fixed_size(codec):
        unit_bytes = size_bytes(codec, unit)
        for start in range(0, len(data), unit_bytes):
            yield start, start + unit_bytes
        return
    while stop < len(data):
        start = stop
        for _ in range(unit // sparse.BLOCK_VALUES):
            if stop < len(data):
                stop = sparse.block_end(data, stop)
        yield start, stop


def cut_values(codec: CodecName) -> int:
    """An encoding may be cut after any multiple of this number of values."""
    return _CUT_VALUES.get(codec, 1)


@lru_cache(maxsize=64)
def values_within(codec: CodecName, limit_bytes: int) -> int:
    """The largest number of values that always fits into `limit_bytes` and after which an encoding may be cut."""
    unit = cut_values(codec)
    return limit_bytes // max_bytes(codec, unit) * unit


def encode(values: Vector, codec: CodecName, sparse_values: int = SPARSE_VALUES) -> Encoded:
    """Encode values, little-endian. Only for finite input: rounding would turn a NaN into infinity."""
    if codec == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if codec == "bfloat16" and kernels.COMPILED is not None and kernels.fits(values):
        encoded = np.empty(size_bytes(codec, values.size), dtype=np.uint8)  # a bytearray would be zeroed first
        kernels.COMPILED.encode_bfloat16(values, encoded)
        return encoded.data
    if codec == "sparse" or (kernels.COMPILED is not None and kernels.fits(values)):
        return encode_with_feedback(values, np.zeros(values.size, dtype=np.float32), codec, sparse_values)
    data = bytearray(size_bytes(codec, values.size))
    for start in range(0, values.size, _PIECE_VALUES):
        piece = np.ascontiguousarray(values[start : start + _PIECE_VALUES])
        _encode_piece(piece, codec, data, size_bytes(codec, start), None)
    return data


def is_within(encoded: Encoded, codec: Literal["float32", "bfloat16"], most: float) -> bool:
    """Whether every encoded value is a number of at most this magnitude. It decodes nothing: it reads the bits, unless
    the sum of the squares shows it in half the time."""
    if codec == "float32" and _squares(np.frombuffer(encoded, dtype="<f4")) <= most * most:
        return True
    word, bits = ("<u4", 32) if codec == "float32" else ("<u2", 16)
    sign_less = (1 << (bits - 1)) - 1
    limit = int(np.float32(most).view(np.uint32)) >> (32 - bits)
    if codec == "bfloat16" and kernels.COMPILED is not None:
        return kernels.COMPILED.largest_bfloat16(np.frombuffer(encoded, dtype=np.uint8)) <= limit
    words = np.frombuffer(encoded, dtype=word)
    pieces = (words[start : start + _PIECE_VALUES] for start in range(0, words.size, _PIECE_VALUES))
    return all(int((piece & piece.dtype.type(sign_less)).max()) <= limit for piece in pieces)


def as_bytes(values: Vector) -> memoryview:
    """Values as float32 on the wire: the array's own memory, not a copy, if it is contiguous."""
    return np.ascontiguousarray(values, dtype="<f4").data.cast("B")


def encode_with_feedback(
    delta: Vector, residual: Vector, codec: CodecName, sparse_values: int = SPARSE_VALUES
) -> Encoded:
    """Encode `delta + residual` with a lossy codec, both `float32[n]`. Sparse sends the `sparse_values` largest of each
    4,096 values, and adds `sparse.DECAY · residual`.

    `residual` becomes what the encoding lacks. A delta that is not finite is encoded too, for its owner to refuse, and
    sets the residual to zero.
    """
    if codec == "sparse":
        return _encode_sparse(delta, residual, sparse_values)
    if kernels.COMPILED is not None and kernels.fits(delta, residual):
        encoded = np.empty(size_bytes(codec, delta.size), dtype=np.uint8)
        if not kernels.COMPILED.encode_with_feedback(delta, residual, codec, encoded):
            residual[:] = 0.0
        return encoded.data
    data = bytearray(size_bytes(codec, delta.size))
    scratch = np.empty(min(_PIECE_VALUES, delta.size), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, delta.size, _PIECE_VALUES):
            total = residual[start : start + _PIECE_VALUES]
            total += delta[start : start + _PIECE_VALUES]
            rounded = scratch[: total.size]
            _encode_piece(total, codec, data, size_bytes(codec, start), rounded)
            total -= rounded
    if not all_finite(residual):
        residual[:] = 0.0
    return data


def _encode_sparse(delta: Vector, residual: Vector, per_block: int) -> Encoded:
    if kernels.COMPILED is not None and kernels.fits(delta, residual):
        buffer = np.empty(sparse.max_bytes(delta.size, per_block), dtype=np.uint8)
        written, is_finite = kernels.COMPILED.encode_sparse_with_feedback(
            delta, residual, sparse.DECAY, buffer, per_block
        )
        # A slice would keep the whole buffer, of which an encoding with many zeros needs little.
        encoded: Encoded = buffer.data[:written] if 2 * written > buffer.size else bytes(buffer.data[:written])
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            residual *= np.float32(sparse.DECAY)
            residual += delta
        encoded, is_finite = sparse.encode(residual, per_block)
    if not is_finite:
        residual[:] = 0.0
    return encoded


def _encode_piece(values: Vector, codec: CodecName, into: bytearray, at_byte: int, rounded: Vector | None) -> None:
    """Encode contiguous values, whole blocks except in the last piece; `rounded` receives them decoded."""
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
    if codec == "int4":
        int4.encode_piece(values, into, at_byte, rounded)
        return
    assert codec == "int8", codec
    blocks = values.size // BLOCK_VALUES
    whole = blocks * BLOCK_VALUES
    if blocks:
        target = np.frombuffer(into, dtype=_BLOCK, count=blocks, offset=at_byte)
        scales, levels = _quantised(values[:whole].reshape(blocks, BLOCK_VALUES))
        with np.errstate(invalid="ignore"):  # if the scale is not finite the levels do not matter
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
    """Scales, `float32[n, 1]`, and levels −127…127 as float32, `[n, m]`; a non-finite value spoils its block."""
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    usable = ~(largest < _MIN_VALUE)  # true for a NaN
    scales = np.where(usable, largest / np.float32(_LEVELS), np.float32(0.0))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # from blocks that are not usable
        levels = blocks * np.where(usable, np.float32(_LEVELS) / largest, np.float32(0.0))
    return scales, np.rint(levels, out=levels)


def decode(data: Buffer, codec: CodecName, into: Vector) -> None:
    """Decode into `into`, which has exactly as many values. Raises `ValueError` if the sizes differ, or the bytes are
    no valid encoding; then nothing is written."""
    view = memoryview(data).cast("B")
    if codec == "sparse":
        sparse.decode(view, into)
        return
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
    elif codec == "int4":
        int4.decode(view, into)
    else:
        assert codec == "int8", codec
        _decode_blocks(view, into)


def decoded(data: Buffer, codec: CodecName, values: int) -> Vector:
    """Decode to float32; values in that codec stay in the buffer's own memory. Raises `ValueError` as `decode` does."""
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
    """Whether no value is NaN or infinite.

    A finite sum of squares proves it, thirty times faster than a test of each value; an infinite one may be overflow.
    """
    return math.isfinite(_squares(values)) or bool(np.isfinite(values).all())


def _squares(values: Vector) -> float:
    """The sum of the squares; infinite or NaN if a value is, and infinite where it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))
