"""The most expensive passes over values, compiled from `kernels.c` if the installation found a C compiler.

`COMPILED` is the library, or None. Without it `training.encoding` and `training.shards.state` compute the same
with NumPy, bit for bit, in three to ten passes each. The library is called through ctypes, which releases the GIL.

Arrays must be float32, aligned, contiguous, and must not overlap; `fits` checks all but the last. Sizes that do not
match raise `ValueError` before anything is written. Pure.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
#: Encoded values, of any type.
Data = npt.NDArray[Any]

#: The version of the functions, as in `kernels.c`. A library of another version is not used.
CONTRACT = 4
#: Values that share a scale in int8; `BLOCK` in C.
BLOCK_VALUES = 1024
#: The same for int4, and the values of which sparse sends the largest; `INT4_BLOCK` and `SPARSE_BLOCK` in C.
INT4_BLOCK_VALUES = 64
SPARSE_BLOCK_VALUES = 4096
#: For fewer values a call through ctypes costs more than NumPy's passes.
MIN_VALUES = 256

_FLOAT32 = np.dtype(np.float32)
_POINTER, _SIZE, _FLOAT, _BITS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "record_ends": (_SIZE, [ctypes.c_char_p, _SIZE, _SIZE, _POINTER]),
    "encode_bfloat16": (None, [_POINTER, _POINTER, _SIZE]),
    "encode_bfloat16_with_feedback": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _SIZE]),
    "encode_int8_with_feedback": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _SIZE]),
    "encode_int4_with_feedback": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _SIZE]),
    "encode_sparse_with_feedback": (ctypes.c_ssize_t, [_POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE]),
    "check_sparse": (ctypes.c_ssize_t, [_POINTER, _SIZE, _SIZE]),
    "decode_sparse": (ctypes.c_ssize_t, [_POINTER, _SIZE, _POINTER, _SIZE]),
    "decode_int4": (None, [_POINTER, _POINTER, _SIZE]),
    "decode_bfloat16": (None, [_POINTER, _POINTER, _SIZE]),
    "decode_int8": (None, [_POINTER, _POINTER, _SIZE]),
    "largest_bfloat16": (_BITS, [_POINTER, _SIZE]),
    "add": (_BITS, [_POINTER, _POINTER, _FLOAT, _FLOAT, _SIZE]),
    "add_and_accumulate": (_BITS, [_POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT, _SIZE]),
    "add_with_momentum_alone": (_BITS, [_POINTER] * 3 + [_FLOAT] * 4 + [_SIZE]),
}


class CompiledKernels:
    """The functions of the library at `path`. Raises `OSError` if it cannot be loaded or has another version."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        try:
            found = library.contract()
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise OSError(f"{path.name} is not the library of this version: {error}") from error
        if found != CONTRACT:
            raise OSError(f"{path.name} is of version {found}, not {CONTRACT}")
        self._library = library
        self._encoders = {
            "bfloat16": library.encode_bfloat16_with_feedback,
            "int8": library.encode_int8_with_feedback,
            "int4": library.encode_int4_with_feedback,
        }
        self._decoders = {
            "bfloat16": library.decode_bfloat16,
            "int8": library.decode_int8,
            "int4": library.decode_int4,
        }

    def record_ends(self, payload: bytes, count: int) -> npt.NDArray[np.int64]:
        """Where each of the first `count` records of a RecordIO payload ends; fewer if no length is left. The last end
        may lie behind the payload."""
        ends = np.empty(count, np.int64)
        return ends[: self._library.record_ends(payload, len(payload), count, _into(ends))]

    def encode_bfloat16(self, values: Vector, data: Data) -> None:
        """float32 to bfloat16, rounded to nearest, ties to even."""
        count = _count(values)
        _check_size(data, "bfloat16", count)
        self._library.encode_bfloat16(_at(values), _into(data), count)

    def encode_with_feedback(self, delta: Vector, residual: Vector, codec: str, data: Data) -> bool:
        """Encode `delta + residual` as bfloat16, int8 or int4; `residual` becomes the rounding error. Returns whether
        all of it is finite."""
        count = _count(delta, residual)
        _check_size(data, codec, count)
        encode = self._encoders[codec]
        return bool(encode(_at(delta), _into(residual), _into(data), count))

    def decode(self, data: Data, codec: str, into: Vector) -> None:
        """bfloat16, int8 or int4 to float32."""
        count = _count(into)
        _check_size(data, codec, count)
        self._decoders[codec](_at(data), _into(into), count)

    def encode_sparse_with_feedback(
        self, delta: Vector, residual: Vector, decay: float, data: Data, per_block: int
    ) -> tuple[int, bool]:
        """Encode `decay · residual + delta` as sparse, with `per_block` values of each whole block. `residual` becomes
        what was not sent. Returns the bytes written to `data`, and whether all of it is finite."""
        count = _count(delta, residual)
        if data.nbytes < sparse_bytes(count, per_block):
            raise ValueError(f"{data.nbytes} bytes are not enough for {count} values")
        encode = self._library.encode_sparse_with_feedback
        written = int(encode(_at(delta), _into(residual), decay, _into(data), per_block, count))
        return abs(written), written >= 0

    def check_sparse(self, data: Data, count: int) -> int:
        """How many whole blocks the sparse encoding of an array of `count` values, or its beginning, has. Negative if
        it is none: the number of the error."""
        return int(self._library.check_sparse(_at(data), data.nbytes, count))

    def decode_sparse(self, data: Data, into: Vector) -> int:
        """sparse to float32. Returns 0, or the negative number of an error: then nothing is written."""
        return int(self._library.decode_sparse(_at(data), data.nbytes, _into(into), _count(into)))

    def largest_bfloat16(self, data: Data) -> int:
        """The largest magnitude of bfloat16 values, as its 15 bits; a NaN is larger than all others."""
        return int(self._library.largest_bfloat16(_at(data), data.nbytes // 2))

    def add(self, value: Vector, delta: Vector, weight: float, lr: float) -> int:
        """value += lr · (weight · delta). Returns the largest magnitude of what was written, as the bits of a float32
        without its sign: they are ordered like the numbers, then infinity, then NaN."""
        count = _count(value, delta)
        return int(self._library.add(_into(value), _at(delta), weight, lr, count))

    def add_and_accumulate(self, value: Vector, momentum: Vector, delta: Vector, weight: float, lr: float) -> int:
        """The same, and momentum += weight · delta."""
        count = _count(value, momentum, delta)
        return int(self._library.add_and_accumulate(_into(value), _into(momentum), _at(delta), weight, lr, count))

    def add_with_momentum(
        self,
        value: Vector,
        momentum: Vector,
        delta: Vector,
        weight: float,
        lr: float,
        decay: float,
        moves: float,
    ) -> int:
        """momentum = decay · momentum + weight · delta. Then value += moves · momentum and
        value += lr · (weight · delta). Returns as `add` does."""
        given = (weight, lr, decay, moves, _count(value, momentum, delta))
        return int(self._library.add_with_momentum_alone(_into(value), _into(momentum), _at(delta), *given))


def fits(*vectors: Vector) -> bool:
    """Whether these are aligned, contiguous float32 arrays, and the first is long enough to be worth a call."""
    if vectors[0].size < MIN_VALUES:
        return False
    for vector in vectors:  # not a generator: called for every shard of every delta
        flags = vector.flags
        if vector.dtype != _FLOAT32 or not flags.c_contiguous or not flags.aligned:
            return False
    return True


def name() -> str:
    """What does the arithmetic, for messages: `compiled` or `numpy`."""
    return "numpy" if COMPILED is None else "compiled"


def find(folder: Path) -> CompiledKernels | None:
    """The library in this folder; None if there is no usable one."""
    if sys.byteorder != "little":  # the wire is little-endian, and the library does not swap
        return None
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_compiled{suffix}"
        if path.is_file():
            try:
                return CompiledKernels(path)
            except OSError:
                return None
    return None


def _count(*vectors: Vector) -> int:
    """The common number of values. C would not notice different sizes."""
    count = vectors[0].size
    for vector in vectors:
        if vector.size != count:
            sizes = ", ".join(str(vector.size) for vector in vectors)
            raise ValueError(f"arrays of {sizes} values do not match")
    return count


def size_bytes(codec: str, count: int) -> int:
    """Bytes of this number of values as bfloat16, int8 or int4."""
    if codec == "int8":
        return count + 4 * -(-count // BLOCK_VALUES)
    if codec == "int4":
        return -(-count // 2) + 2 * -(-count // INT4_BLOCK_VALUES)
    return 2 * count


def sparse_bytes(count: int, per_block: int) -> int:
    """The most bytes of this number of values as sparse, with `per_block` values of each whole block."""
    blocks, rest = divmod(count, SPARSE_BLOCK_VALUES)
    whole = _sparse_block_bytes(per_block)
    return blocks * whole + (_sparse_block_bytes(-(-per_block * rest // SPARSE_BLOCK_VALUES)) if rest else 0)


def _sparse_block_bytes(sent: int) -> int:
    """A count, two magnitudes, and an index of 12 bits and a code of 2 for each value."""
    return (1 if sent < 0x80 else 2) + 4 + (3 * sent + 1) // 2 + (sent + 3) // 4


def _check_size(data: Data, codec: str, count: int) -> None:
    wanted = size_bytes(codec, count)
    if data.nbytes != wanted:
        raise ValueError(f"{data.nbytes} bytes of {codec} are not {count} values")


def _into(array: Data) -> int:
    """The address to write to. Raises `TypeError` for a read-only array."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # eight times as fast as the array's own attribute


def _at(array: Data) -> int:
    """The address to read from."""
    return _into(array) if array.flags.writeable else int(array.__array_interface__["data"][0])


COMPILED = find(Path(__file__).parent)
