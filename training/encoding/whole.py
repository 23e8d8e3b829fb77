"""Codecs that are exact enough for values: float32, little-endian, and bfloat16, rounded to nearest even. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pnode.overlay.transport import Buffer
from p2pnode.training import kernels
from p2pnode.training.encoding.arithmetic import Arithmetic, Encoded, Vector


class Float32(Arithmetic):
    """The values as they are."""

    def pack(self, values: Vector) -> bytes:
        return values.astype("<f4", copy=False).tobytes()

    def unpack(self, view: memoryview, into: Vector) -> None:
        into[:] = np.frombuffer(view, dtype="<f4")

    def decoded(self, data: Buffer, values: int) -> Vector:
        if len(data) != self.codec.size_bytes(values):
            raise ValueError(f"{len(data)} bytes of float32 are not {values} values")
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


class BFloat16(Arithmetic):
    """The upper halves of the bit patterns, because NumPy has no bfloat16."""

    is_compiled = True

    def pack(self, values: Vector) -> bytes:
        return upper_halves(values).astype("<u2").tobytes()

    def unpack(self, view: memoryview, into: Vector) -> None:
        into.view(np.uint32)[:] = np.frombuffer(view, dtype="<u2")
        into.view(np.uint32)[:] <<= np.uint32(16)

    def encode(self, values: Vector) -> Encoded:
        if (compiled := self._compiled(values)) is None:
            return super().encode(values)
        encoded = np.empty(2 * values.size, dtype=np.uint8)
        compiled.encode_bfloat16(values, encoded)
        return encoded.data

    def is_within(self, encoded: Encoded, values: int, most: float) -> bool:
        if kernels.COMPILED is None:
            return super().is_within(encoded, values, most)
        limit = int(np.float32(most).view(np.uint32)) >> 16
        return kernels.COMPILED.largest_bfloat16(np.frombuffer(encoded, dtype=np.uint8)) <= limit


def upper_halves(values: Vector) -> npt.NDArray[np.uint32]:
    """The bits of the values as bfloat16, rounded to nearest, ties to even; a NaN may become an infinity."""
    bits = values.view(np.uint32)
    # Add half of the dropped range, plus one if the kept part is odd.
    raised = bits >> np.uint32(16)
    raised &= np.uint32(1)
    raised += np.uint32(0x7FFF)
    raised += bits
    raised >>= np.uint32(16)
    return raised
