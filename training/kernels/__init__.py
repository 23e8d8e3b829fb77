"""The passes over values that cost most, compiled from `kernels.c` where the installation found a C compiler.

`COMPILED` is the library, or None: then `training.encoding.codecs` and `training.shards.state` do the same with NumPy,
in three to ten passes for each of these and to the same bits (tests/property/test_kernels.py). Called through ctypes:
the library knows nothing of Python, and other threads run meanwhile.

Arrays are float32, aligned, in one piece and do not overlap: `fits` tells what can be seen of it. Sizes that do not go
together raise `ValueError` before anything is touched. Pure. Memory in, memory out.
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

#: What the functions mean: that of `kernels.c`. A library that is left over from another version is not used.
CONTRACT = 2
#: Values that share a scale in int8: `codecs.BLOCK_VALUES`, `BLOCK` in C.
BLOCK_VALUES = 1024
#: Below so many values a call through ctypes costs more than NumPy's passes.
FEWEST_VALUES = 256

_FLOAT32 = np.dtype(np.float32)
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "encode_bfloat16": (None, [_POINTER, _POINTER, _SIZE]),
    "encode_bfloat16_with_feedback": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _SIZE]),
    "encode_int8_with_feedback": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _SIZE]),
    "decode_bfloat16": (None, [_POINTER, _POINTER, _SIZE]),
    "decode_int8": (None, [_POINTER, _POINTER, _SIZE]),
    "add": (None, [_POINTER, _POINTER, _FLOAT, _FLOAT, _SIZE]),
    "add_and_accumulate": (None, [_POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT, _SIZE]),
    "add_with_momentum": (None, [_POINTER] * 4 + [_FLOAT] * 4 + [_SIZE]),
    "add_with_momentum_alone": (None, [_POINTER] * 3 + [_FLOAT] * 4 + [_SIZE]),
}


class CompiledKernels:
    """The functions of the library at `path`. Raises `OSError` where it cannot be loaded or is of another version."""

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

    def encode_bfloat16(self, values: Vector, data: Data) -> None:
        """Round to nearest, ties to even."""
        count = _count(values)
        _check_size(data, "bfloat16", count)
        self._library.encode_bfloat16(_at(values), _into(data), count)

    def encode_with_feedback(self, delta: Vector, residual: Vector, codec: str, data: Data) -> bool:
        """The bytes of `delta + residual` as bfloat16 or int8; `residual` becomes what was rounded off. Returns whether
        all of that is finite."""
        count = _count(delta, residual)
        _check_size(data, codec, count)
        encode = (
            self._library.encode_bfloat16_with_feedback
            if codec == "bfloat16"
            else self._library.encode_int8_with_feedback
        )
        return bool(encode(_at(delta), _into(residual), _into(data), count))

    def decode(self, data: Data, codec: str, into: Vector) -> None:
        """bfloat16 or int8 to float32."""
        count = _count(into)
        _check_size(data, codec, count)
        decode = self._library.decode_bfloat16 if codec == "bfloat16" else self._library.decode_int8
        decode(_at(data), _into(into), count)

    def add(self, value: Vector, delta: Vector, weight: float, lr: float) -> None:
        """value += lr · (weight · delta)"""
        count = _count(value, delta)
        self._library.add(_into(value), _at(delta), weight, lr, count)

    def add_and_accumulate(self, value: Vector, accumulated: Vector, delta: Vector, weight: float, lr: float) -> None:
        """The same, and accumulated += weight · delta."""
        count = _count(value, accumulated, delta)
        self._library.add_and_accumulate(_into(value), _into(accumulated), _at(delta), weight, lr, count)

    def add_with_momentum(
        self,
        value: Vector,
        momentum: Vector,
        accumulated: Vector | None,
        delta: Vector,
        weight: float,
        lr: float,
        mu: float,
        lr_mu: float,
    ) -> None:
        """momentum = mu · momentum + (accumulated + weight · delta), and accumulated = 0.
        Then value += lr_mu · momentum and value += lr · (weight · delta).

        None for `accumulated` where it is all zeros.
        """
        given = (weight, lr, mu, lr_mu)
        if accumulated is None:
            count = _count(value, momentum, delta)
            self._library.add_with_momentum_alone(_into(value), _into(momentum), _at(delta), *given, count)
        else:
            count = _count(value, momentum, accumulated, delta)
            self._library.add_with_momentum(
                _into(value), _into(momentum), _into(accumulated), _at(delta), *given, count
            )


def fits(*vectors: Vector) -> bool:
    """Whether these are aligned float32 in one piece each, and the first long enough to be worth a call."""
    if vectors[0].size < FEWEST_VALUES:
        return False
    for vector in vectors:  # no generator: on the path of every shard of every delta
        flags = vector.flags
        if vector.dtype != _FLOAT32 or not flags.c_contiguous or not flags.aligned:
            return False
    return True


def name() -> str:
    """What does the arithmetic here, for people: `compiled` or `numpy`."""
    return "numpy" if COMPILED is None else "compiled"


def find(folder: Path) -> CompiledKernels | None:
    """The library in this folder; None where there is none that is usable."""
    if sys.byteorder != "little":  # the wire is, and the library does not swap
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
    """How many values each of them has. What NumPy would find itself, C would not."""
    count = vectors[0].size
    for vector in vectors:
        if vector.size != count:
            sizes = ", ".join(str(vector.size) for vector in vectors)
            raise ValueError(f"arrays of {sizes} values do not go together")
    return count


def _check_size(data: Data, codec: str, count: int) -> None:
    wanted = 2 * count if codec == "bfloat16" else count + 4 * -(-count // BLOCK_VALUES)
    if data.nbytes != wanted:
        raise ValueError(f"{data.nbytes} bytes of {codec} are not {count} values")


def _into(array: Data) -> int:
    """Where to write. Raises `TypeError` for what NumPy would not let anybody write to either."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # eight times as quick as asking the array


def _at(array: Data) -> int:
    """Where to read."""
    return _into(array) if array.flags.writeable else int(array.__array_interface__["data"][0])


COMPILED = find(Path(__file__).parent)
