"""int8 with NumPy: blocks of 1,024 values, each a float32 scale, max|x| / 127, and a signed byte for each value.

An outlier spoils only its own block, and the scales are 0.4 % of the bytes. The error of a value is at most half a
scale. The compiled kernels give the same bits. Pure.
"""

from __future__ import annotations

import numpy as np

from p2pnode.training import kernels
from p2pnode.training.encoding.arithmetic import Arithmetic, Vector

_BLOCK_VALUES = kernels.BLOCK_VALUES
_LEVELS = np.float32(127)
_BLOCK = np.dtype([("scale", "<f4"), ("levels", "i1", (_BLOCK_VALUES,))])
#: A block whose largest value is below this is encoded as zeros: its scale would be a denormal.
_MIN_VALUE = np.float32(1e-30)


class Int8(Arithmetic):
    """A scale per block, and signed bytes."""

    is_compiled = True

    def pack(self, values: Vector) -> bytes:
        # The last block is the beginning of a whole one, with zeros behind its values.
        padded = np.pad(values, (0, -values.size % _BLOCK_VALUES))
        blocks = np.empty(padded.size // _BLOCK_VALUES, dtype=_BLOCK)
        with np.errstate(invalid="ignore"):  # if the scale is not finite the levels do not matter
            scales, blocks["levels"] = _quantised(padded.reshape(-1, _BLOCK_VALUES))
            blocks["scale"] = scales[:, 0]
        return blocks.tobytes()[: self.codec.size_bytes(values.size)]

    def unpack(self, view: memoryview, into: Vector) -> None:
        whole = into.size // _BLOCK_VALUES * _BLOCK_VALUES
        blocks = np.frombuffer(view, dtype=_BLOCK, count=whole // _BLOCK_VALUES)
        with np.errstate(invalid="ignore"):
            np.multiply(blocks["levels"], blocks["scale"][:, None], out=into[:whole].reshape(-1, _BLOCK_VALUES))
            if whole < into.size:
                rest = view[blocks.nbytes :]
                levels = np.frombuffer(rest, dtype=np.int8, offset=4)
                np.multiply(levels, np.frombuffer(rest, dtype="<f4", count=1), out=into[whole:])


def _quantised(blocks: Vector) -> tuple[Vector, Vector]:
    """Scales, `float32[n, 1]`, and levels −127…127 as float32, `[n, m]`; a non-finite value spoils its block."""
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    usable = ~(largest < _MIN_VALUE)  # true for a NaN
    scales = np.where(usable, largest / _LEVELS, np.float32(0.0))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # from blocks that are not usable
        levels = blocks * np.where(usable, _LEVELS / largest, np.float32(0.0))
    return scales, np.rint(levels, out=levels)
