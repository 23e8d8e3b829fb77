"""Files of safetensors, in pieces, and a complete model as one: the vector's values, and what the model has beside it.

The library reads and writes a file as a whole, and holds the GIL. A `state_dict` has more entries than the vector:
frozen parameters, constant and integer buffers, and every name of a tied tensor, all in the model's own dtypes. The
trainer describes them (`ModelDescription`) and writes what training does not change to a file of its own, once.
`model_pieces` joins description, vector and that file. Equal inputs give equal bytes on every node: the order of the
tensors, the header and the rounding depend on nothing else. No torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec
import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.interface import ModelDescription

#: dtype names of torch: the code in a safetensors header, and bytes per value.
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in DTYPES.items()}
#: Values of the vector can be written in these.
VECTOR_DTYPES = ("float64", "float32", "float16", "bfloat16")

#: Values converted, and bytes copied, at a time.
PIECE_VALUES = 1 << 20
PIECE_BYTES = 1 << 22
#: A longer header is no model's, and the library does not read it.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
Natural = Annotated[int, msgspec.Meta(ge=0)]

Piece = bytes | bytearray | memoryview


class BadModelFile(TrainingError):
    """A file of tensors is damaged, or does not belong to this model."""


class TensorInfo(NamedTuple):
    """One tensor of a file; `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class _Entry(msgspec.Struct, frozen=True):
    """One tensor of a header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


def header(infos: Iterable[TensorInfo]) -> bytes:
    """What a safetensors file has before its tensors, which follow in this order, without gaps."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for info in infos:
        stop = start + info.size_bytes
        entries[info.name] = _Entry(DTYPES[info.dtype][0], info.shape, (start, stop))
        start = stop
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def file_pieces(infos: Iterable[TensorInfo], read: Callable[[TensorInfo], Iterable[Piece]]) -> Iterator[Piece]:
    """The bytes of a safetensors file; `read` yields those of one tensor. Wide dtypes come first, so that all align."""
    ordered = sorted(infos, key=lambda info: (-DTYPES[info.dtype][1], info.name))
    yield header(ordered)
    for info in ordered:
        yield from read(info)


class TensorFile:
    """A safetensors file of `size_bytes` for reading, one piece of a tensor at a time; `read_at` reads a piece of the
    file, by offset and length."""

    def __init__(self, read_at: Callable[[int, int], bytes], size_bytes: int) -> None:
        """Read the header. Raises `BadModelFile`, and `OSError`."""
        self._read_at = read_at
        self._offsets: dict[str, int] = {}
        self.infos: dict[str, TensorInfo] = {}
        length = int.from_bytes(read_at(0, _LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise BadModelFile("it has no header of safetensors")
        try:
            raw = msgspec.json.decode(read_at(_LENGTH_BYTES, length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            for name, entry in raw.items():
                found = msgspec.json.decode(entry, type=_Entry)
                info = self.infos[name] = TensorInfo(name, _NAMES[found.dtype], found.shape)
                first, last = found.data_offsets
                if last - first != info.size_bytes:
                    raise BadModelFile(f"the size of its tensor {name} is wrong")
                if _LENGTH_BYTES + length + last > size_bytes:
                    raise BadModelFile(f"it ends before its tensor {name} does")
                self._offsets[name] = _LENGTH_BYTES + length + first
        except (msgspec.DecodeError, KeyError) as error:
            raise BadModelFile(f"its header cannot be read: {error}") from error

    @classmethod
    def of(cls, file: IO[bytes]) -> TensorFile:
        """An open file."""

        def read_at(offset: int, size_bytes: int) -> bytes:
            file.seek(offset)
            return file.read(size_bytes)

        return cls(read_at, file.seek(0, os.SEEK_END))

    def read(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor, in pieces of whole values. Raises `BadModelFile` if it has no such tensor."""
        info = self.infos.get(name)
        if info is None:
            raise BadModelFile(f"the tensor {name} is missing")
        at, left = self._offsets[name], info.size_bytes
        while left:
            piece = self._read_at(at, min(left, PIECE_BYTES))
            if len(piece) < min(left, PIECE_BYTES):
                raise BadModelFile(f"it ends within the tensor {name}")
            at, left = at + len(piece), left - len(piece)
            yield piece

    def values(self, name: str) -> Iterator[Vector]:
        """The values of one float32 tensor, in pieces."""
        for piece in self.read(name):
            if self.infos[name].dtype != "float32":
                raise BadModelFile(f"the tensor {name} is {self.infos[name].dtype}, not float32")
            yield np.frombuffer(piece, dtype="<f4")

    def digest(self) -> str:
        """That of `ModelDescription.fixed_digest`."""
        return tensors_digest(
            {
                name: fingerprint(info.dtype, info.shape, checksum_of(self.read(name)))
                for name, info in self.infos.items()
            }
        )


#: A checksum is that of words of 8 bytes in rows: of the sums of all columns and of all rows, which a GPU makes as fast
#: as it reads, and of what is left. Sums of rows and of columns change when words are exchanged, as that of the whole
#: would not.
ROW, WORD_BYTES = 1024, 8


def checksum_of(pieces: Iterable[Piece]) -> int:
    """Of the bytes of a tensor, in pieces of whole rows but for the last: that of
    `training.trainer.model.unshared_tensors.checksum`."""
    columns, rows, rest = np.zeros(ROW, np.int64), [], b""
    for piece in pieces:
        whole = len(piece) - len(piece) % (ROW * WORD_BYTES)
        words = np.frombuffer(piece, "<i8", whole // WORD_BYTES).reshape(-1, ROW)
        columns += words.sum(0)
        rows.append(words.sum(1))
        rest = bytes(piece[whole:])
    found = zlib.crc32(columns.tobytes())
    return zlib.crc32(rest, zlib.crc32(b"".join(each.tobytes() for each in rows), found))


def fingerprint(dtype: str, shape: Sequence[int], checksum: int) -> str:
    """Of a tensor, as two nodes compare it."""
    return f"{dtype} {list(shape)} {checksum:08x}"


def tensors_digest(fingerprints: Mapping[str, str]) -> str:
    """Hex SHA-256 of names and fingerprints of tensors."""
    text = "".join(f"{name} {fingerprints[name]}\n" for name in sorted(fingerprints))
    return hashlib.sha256(text.encode()).hexdigest()


def fixed_name(digest: str) -> str:
    """The file name of the tensors with this digest, in the folder of the model's files."""
    return f"fixed-{digest[:16]}.safetensors"


def model_pieces(
    description: ModelDescription, values: Callable[[str], Iterable[Vector]], fixed: TensorFile | None
) -> Iterator[Piece]:
    """The bytes of the model's file. `values` yields the values of one of the vector's tensors, float32.

    `fixed` is needed if the description names fixed tensors. Raises `BadModelFile` if a part is missing or of another
    size; then some pieces may have been yielded.
    """
    sources = {tensor.name: tensor for tensor in description.tensors}

    def read(info: TensorInfo) -> Iterator[Piece]:
        source = sources[info.name]
        if source.kind == "vector":
            for piece in values(source.source):
                for start in range(0, piece.size, PIECE_VALUES):
                    yield converted(piece[start : start + PIECE_VALUES], info.dtype)
        elif source.kind == "fixed":
            if fixed is None:
                raise BadModelFile("the file with the frozen tensors is missing")
            yield from fixed.read(source.source)
        else:
            yield description.local[source.source]

    def checked(info: TensorInfo) -> Iterator[Piece]:
        count = 0
        for piece in read(info):
            count += memoryview(piece).nbytes
            yield piece
        if count != info.size_bytes:
            raise BadModelFile(f"the tensor {info.name} has {count} bytes, and {info.size_bytes} are needed")

    yield from file_pieces((TensorInfo(each.name, each.dtype, each.shape) for each in description.tensors), checked)


def converted(values: Vector, dtype: str) -> Piece:
    """Float32 values in another dtype, rounded to nearest, ties to even, as torch rounds them."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        rounded[np.isnan(values)] = 0x7FC0
        return rounded.tobytes()
    kind = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}.get(dtype)
    if kind is None:
        raise BadModelFile(f"values of the vector cannot be written as {dtype}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=kind).data.cast("B") if values.size else b""


def open_fixed(folder: Path, description: ModelDescription) -> IO[bytes] | None:
    """The file with the fixed tensors of a description; None if it has none. Raises `BadModelFile`."""
    if not description.fixed_digest:
        return None
    path = folder / fixed_name(description.fixed_digest)
    try:
        return path.open("rb")
    except OSError as error:
        raise BadModelFile(f"{path}, which has the frozen tensors, cannot be read: {error.strerror}") from error
