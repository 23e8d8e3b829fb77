"""int4 with NumPy: blocks of 64 values, each a bfloat16 scale and a level from −7 to 7 for each value.

A block is its scale, little-endian, and ⌈n / 2⌉ bytes for n values: byte i has the level of value i in its lower half,
and that of value i + ⌈n / 2⌉ in its upper half, as two's complement. The scale is max|x| / 7, rounded to bfloat16. The
error of a value is at most half a scale. The compiled kernels give the same bits. Pure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pnode.training import kernels
from p2pnode.training.encoding.arithmetic import Arithmetic, Vector
from p2pnode.training.encoding.whole import upper_halves

BLOCK_VALUES = kernels.INT4_BLOCK_VALUES
_LEVELS = np.float32(7)
_HALF = BLOCK_VALUES // 2
_BLOCK = np.dtype([("scale", "<u2"), ("levels", "u1", (_HALF,))])
#: A block whose largest value is below this is encoded as zeros: its scale would be a denormal.
_MIN_VALUE = np.float32(1e-30)
_INFINITE = np.uint32(0x7F800000)


class Int4(Arithmetic):
    """A scale per block, and four bits a value."""

    is_compiled = True

    def pack(self, values: Vector) -> bytes:
        whole = values.size // BLOCK_VALUES * BLOCK_VALUES
        blocks = np.empty(whole // BLOCK_VALUES, dtype=_BLOCK)
        scales, levels = _quantised(values[:whole].reshape(-1, BLOCK_VALUES))
        blocks["scale"], blocks["levels"] = upper_halves(scales[:, 0]), _packed(levels)
        if whole == values.size:
            return blocks.tobytes()
        scales, levels = _quantised(values[whole:].reshape(1, -1))
        levels = np.pad(levels, ((0, 0), (0, levels.size % 2)))
        return blocks.tobytes() + upper_halves(scales).astype("<u2").tobytes() + _packed(levels).tobytes()

    def unpack(self, view: memoryview, into: Vector) -> None:
        whole = into.size // BLOCK_VALUES * BLOCK_VALUES
        blocks = np.frombuffer(view, dtype=_BLOCK, count=whole // BLOCK_VALUES)
        with np.errstate(invalid="ignore"):
            target = into[:whole].reshape(-1, BLOCK_VALUES)
            np.multiply(_unpacked(blocks["levels"]), _scales(blocks["scale"])[:, None], out=target)
            if whole < into.size:
                rest = np.frombuffer(view[blocks.nbytes :], dtype=np.uint8)
                levels = _unpacked(rest[None, 2:])[0, : into.size - whole]
                np.multiply(levels, _scales(rest[:2].view("<u2")), out=into[whole:])


def _quantised(blocks: Vector) -> tuple[Vector, Vector]:
    """Scales, `float32[n, 1]`, and levels −7…7 as float32, `[n, m]`. A block with a value that is not finite has an
    infinite scale and levels of 0."""
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    is_finite = largest < np.inf  # false for a NaN
    usual = np.where(is_finite, largest, np.float32(0.0)) / _LEVELS
    raised = upper_halves(usual.astype(np.float32, copy=False)) << np.uint32(16)
    raised[largest < _MIN_VALUE] = 0
    usable = raised != 0
    scales = raised.view(np.float32)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        levels = blocks * np.where(usable, np.float32(1.0) / scales, np.float32(0.0))
        levels = np.rint(np.where(is_finite, levels, np.float32(0.0)))
    raised[~is_finite] = _INFINITE
    return scales, levels


def _packed(levels: Vector) -> npt.NDArray[np.uint8]:
    """Levels, `[n, 2 m]`, as `uint8[n, m]`."""
    codes = levels.astype(np.int8).view(np.uint8) & np.uint8(15)
    half = levels.shape[1] // 2
    return codes[:, :half] | codes[:, half:] << np.uint8(4)


def _scales(codes: npt.NDArray[np.uint16]) -> Vector:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _unpacked(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """`uint8[n, m]` as levels, `int8[n, 2 m]`."""
    signed = data.view(np.int8)
    return np.concatenate([(data << np.uint8(4)).view(np.int8) >> np.int8(4), signed >> np.int8(4)], axis=1)
