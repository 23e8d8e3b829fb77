"""What all codecs compute alike; a codec adds how it packs values and unpacks them. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2pnode.overlay.transport import Buffer
from p2pnode.training import kernels
from p2pnode.training.encoding.table import Codec

Vector = npt.NDArray[np.float32]
Encoded = bytes | bytearray | memoryview

#: Values encoded at a time, so that all passes over a piece find it in the cache.
_PIECE_VALUES = 32 * 1024


class Arithmetic(ABC):
    """The arithmetic of one codec. A subclass has `pack` and `unpack`; where `training.kernels` has the same functions,
    with the same bits, it is `is_compiled`."""

    is_compiled = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abstractmethod
    def pack(self, values: Vector) -> bytes:
        """Encode contiguous values, little-endian, from the beginning of a block. A block with a value that is not
        finite, or beyond what the codec can express, decodes to one that is not finite: its owner refuses the delta."""

    @abstractmethod
    def unpack(self, view: memoryview, into: Vector) -> None:
        """Decode into `into`, whose encoded size was checked."""

    def encode(self, values: Vector) -> Encoded:
        """Encode finite values."""
        if self._compiled(values) is not None:
            return self.encode_with_feedback(values, np.zeros(values.size, dtype=np.float32))
        return b"".join(self.pack(np.ascontiguousarray(values[piece])) for piece in self._pieces(values.size))

    def encode_with_feedback(
        self,
        delta: Vector,
        residual: Vector,
        *,
        is_last: bool = False,  # noqa: ARG002 - for codecs that send a part
    ) -> Encoded:
        """Encode `delta + residual`, both `float32[n]`; `residual` becomes what the encoding lacks. `is_last`: no later
        delta brings it. A delta that is not finite is encoded too, for its owner to refuse, and sets the residual to
        zero."""
        if (compiled := self._compiled(delta, residual)) is not None:
            encoded = np.empty(self.codec.size_bytes(delta.size), dtype=np.uint8)  # a bytearray would be zeroed first
            if not compiled.encode_with_feedback(delta, residual, self.codec.name, encoded):
                residual[:] = 0.0
            return encoded.data
        parts = []
        with np.errstate(invalid="ignore", over="ignore"):
            for piece in self._pieces(delta.size):
                total = residual[piece]
                total += delta[piece]
                packed = self.pack(np.ascontiguousarray(total))
                rounded = np.empty(total.size, dtype=np.float32)
                self.unpack(memoryview(packed), rounded)
                total -= rounded
                total += np.float32(0.0)  # a residual of −0 becomes 0, as in the compiled functions
                parts.append(packed)
        if not all_finite(residual):
            residual[:] = 0.0
        return b"".join(parts)

    def decode(self, view: memoryview, into: Vector) -> None:
        """Decode into `into`. Raises `ValueError` if the bytes are not so many values; then nothing is written."""
        if len(view) != self.codec.size_bytes(into.size):
            raise ValueError(f"{len(view)} bytes of {self.codec.name} are not {into.size} values")
        if (compiled := self._compiled(into)) is not None:
            compiled.decode(np.frombuffer(view, dtype=np.uint8), self.codec.name, into)
        else:
            self.unpack(view, into)

    def decoded(self, data: Buffer, values: int) -> Vector:
        """The values, which may be the buffer's own memory. Raises `ValueError` as `decode`."""
        into = np.empty(values, dtype=np.float32)
        self.decode(memoryview(data).cast("B"), into)
        return into

    def is_within(self, encoded: Encoded, values: int, most: float) -> bool:
        """Whether all of `values` encoded values are numbers of at most this magnitude."""
        found = self.decoded(encoded, values)
        return _squares(found) <= most * most or bool((np.abs(found) <= most).all())

    def max_bytes(self, values: int) -> int:
        """The most bytes of this number of values."""
        return self.codec.size_bytes(values)

    def count_values(self, view: memoryview, most: int) -> int:
        """How many of the next `most` values of an array these bytes are. Raises `ValueError` if they are none."""
        return self.codec.count_values(len(view), most)

    def cuts(self, view: memoryview, unit: int) -> Iterator[tuple[int, int]]:
        """Where to cut an encoding, in bytes, after every `unit` values, which are whole blocks."""
        unit_bytes = self.codec.size_bytes(unit)
        return ((start, start + unit_bytes) for start in range(0, len(view), unit_bytes))

    def _compiled(self, *vectors: Vector) -> kernels.CompiledKernels | None:
        return kernels.COMPILED if self.is_compiled and kernels.fits(*vectors) else None

    def _pieces(self, values: int) -> Iterator[slice]:
        step = -(-_PIECE_VALUES // self.codec.block_values) * self.codec.block_values
        return (slice(start, start + step) for start in range(0, values, step))


def all_finite(values: Vector) -> bool:
    """Whether no value is NaN or infinite.

    A finite sum of squares proves it, thirty times faster than a test of each value; an infinite one may be overflow.
    """
    return math.isfinite(_squares(values)) or bool(np.isfinite(values).all())


def _squares(values: Vector) -> float:
    """The sum of the squares; infinite or NaN if a value is, and infinite where it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))
