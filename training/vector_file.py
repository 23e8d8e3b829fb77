"""The format of `vector.safetensors`: a header, written and checked here, and the vector as it is in memory. Pure.

The tensors of a layout follow each other without gaps, as safetensors demands. So the file is a header and the bytes of
the vector, and can be written and read in pieces; the library writes and reads it as a whole, and holds the GIL.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from training.layout import Layout, LayoutEntry

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_FLOAT32_BYTES = 4
#: What the library accepts (100 MB).
MAX_HEADER_BYTES = 100_000_000


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class Place(NamedTuple):
    """Where a tensor is in the file: `offset` in bytes from its beginning."""

    entry: LayoutEntry
    offset: int


def header(layout: Layout) -> bytes:
    """The bytes before the vector."""
    tensors = {
        entry.name: _Tensor(
            "F32", list(entry.shape), (entry.offset * _FLOAT32_BYTES, (entry.offset + entry.size) * _FLOAT32_BYTES)
        )
        for entry in layout.entries
    }
    text = msgspec.json.encode(tensors)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_bytes(first: bytes, file_bytes: int) -> int:
    """The length of the header in a file that begins with `first` (8 bytes). Raises `ValueError`."""
    length = int.from_bytes(first, "little")
    if len(first) < _LENGTH_BYTES or not 0 < length <= min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise ValueError("vector.safetensors is damaged: it has no header")
    return _LENGTH_BYTES + length


def places(head: bytes, file_bytes: int, layout: Layout) -> list[Place]:
    """Where the tensors of the layout are. `head` is the file up to the end of its header. Raises `ValueError` if the
    file is damaged, or if a tensor is missing or of another size."""
    try:
        raw: dict[str, Any] = msgspec.json.decode(head[_LENGTH_BYTES:], type=dict[str, Any])
        raw.pop("__metadata__", None)
        tensors = msgspec.convert(raw, dict[str, _Tensor])
    except msgspec.DecodeError as error:
        raise ValueError(f"vector.safetensors is damaged: {error}") from error
    if any(len(head) + tensor.data_offsets[1] > file_bytes for tensor in tensors.values()):
        raise ValueError("vector.safetensors is damaged: it is shorter than its header says")
    found = []
    for entry in layout.entries:
        tensor = tensors.get(entry.name)
        if tensor is None or tensor.dtype != "F32" or _size_bytes(tensor) != entry.size * _FLOAT32_BYTES:
            raise ValueError(f"tensor {entry.name} is missing or of another size")
        found.append(Place(entry, len(head) + tensor.data_offsets[0]))
    return found


def _size_bytes(tensor: _Tensor) -> int:
    return tensor.data_offsets[1] - tensor.data_offsets[0]
