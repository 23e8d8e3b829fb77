"""IDX and NPZ: one record for each index of the first axis, with the row of each array under its name.

A record is `recordio.encode_example` of them; `recordio.decode_example` gives the rows back with their types. Files are
read in blocks of rows. The arrays of one NPZ file, or all IDX files together, must have the same number of rows.
Source of IDX: the MNIST page of Y. LeCun.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from p2pnode.training.dispatch.conversion.sources import BadSource, Source, open_source
from p2pnode.training.dispatch.recordio import BadExample, encode_example

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_BLOCK_BYTES = 1 << 20
#: What zipfile raises for damaged archives, and for encrypted or strangely compressed ones (RuntimeError).
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class _Array(NamedTuple):
    """An array that is read row by row: its shape with the rows first, its type, and where its values are."""

    source: Source
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: BinaryIO
    in_memory: np.ndarray[Any, Any] | None = None


def idx_records(sources: Sequence[Source]) -> Iterator[bytes]:
    """The rows of IDX files, joined by their number. Raises `BadSource`."""
    with contextlib.ExitStack() as stack:
        arrays = [_idx_array(source, stack.enter_context(open_source(source.path))) for source in sources]
        yield from _joined(arrays)


def npz_records(sources: Sequence[Source]) -> Iterator[bytes]:
    """The rows of NPZ files, one file after the other; all have the same names, types and shapes of rows. Arrays in
    Fortran's order are read as a whole. Raises `BadSource`."""
    form: dict[str, tuple[str, tuple[int, ...]]] | None = None
    for source in sources:
        try:
            with contextlib.ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(source.path))
                arrays = [_npz_array(source, archive, stack, name) for name in archive.namelist()]
                found = {array.name: (array.dtype.str, array.shape[1:]) for array in arrays}
                if form is not None and found != form:
                    raise BadSource(
                        source.path, f"its arrays ({_form(found)}) differ from those before ({_form(form)})"
                    )
                form = found
                yield from _joined(arrays)
        except _DAMAGED as error:
            raise BadSource(source.path, f"it cannot be read as NPZ: {error}") from None
        except OSError as error:
            raise BadSource(source.path, f"it cannot be read: {error.strerror or error}") from None


def _joined(arrays: Sequence[_Array]) -> Iterator[bytes]:
    if not arrays:
        return
    names = [array.name for array in arrays]
    for array in arrays:
        if names.count(array.name) > 1:
            problem = f'two arrays are named "{array.name}"; name each file: images=PATH labels=PATH'
            raise BadSource(array.source.path, problem)
        if array.shape[0] != arrays[0].shape[0]:
            problem = f"{array.name} has {array.shape[0]} rows, and {arrays[0].name} has {arrays[0].shape[0]}"
            raise BadSource(array.source.path, problem)
    rows = [_rows(array) for array in arrays]
    for values in zip(*rows, strict=True):
        example = dict(zip(names, values, strict=True))
        try:
            yield encode_example(example)
        except BadExample as error:
            raise BadSource(arrays[0].source.path, str(error)) from None


def _rows(array: _Array) -> Iterator[Any]:
    """The rows, read in blocks; rows without dimensions are NumPy scalars, or text and bytes."""
    count, shape = array.shape[0], array.shape[1:]
    row_bytes = math.prod(shape) * array.dtype.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, count, step):
        rows = min(step, count - start)
        if array.in_memory is not None:
            block = array.in_memory[start : start + rows]
        else:
            data = array.file.read(rows * row_bytes)
            if len(data) < rows * row_bytes:
                problem = f"it ends inside row {start + len(data) // max(1, row_bytes)} of {count}"
                raise BadSource(array.source.path, problem, array.name)
            block = np.ndarray((rows, *shape), array.dtype, data)
        yield from block.tolist() if array.dtype.kind in "SU" else block
    if array.file.read(1):
        problem = f"more values follow those of shape {_shape(array.shape)} that its head announces"
        raise BadSource(array.source.path, problem, array.name)


def _idx_array(source: Source, file: BinaryIO) -> _Array:
    """Two zero bytes, the type, the number of dimensions, the dimensions (u32, big-endian), the values."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\x00\x00" or head[2] not in _IDX_TYPES or not head[3]:
        raise BadSource(source.path, "it is not an IDX file of at least one dimension")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise BadSource(source.path, "it ends inside its head")
    return _Array(source, source.array_name, struct.unpack(f">{head[3]}I", sizes), np.dtype(_IDX_TYPES[head[2]]), file)


def _npz_array(source: Source, archive: zipfile.ZipFile, stack: contextlib.ExitStack, member: str) -> _Array:
    name = member.removesuffix(".npy") if source.name is None else source.name
    file = cast(BinaryIO, stack.enter_context(archive.open(member)))
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"version {version} of its format is for structured types")
        shape, fortran_order, dtype = read_header[version](file)
    except (ValueError, SyntaxError) as error:
        raise BadSource(source.path, f"it is not an array: {error}", name) from None
    if dtype.hasobject:
        raise BadSource(source.path, "it has Python objects, which are not unpickled", name)
    if dtype.kind in "SU" and len(shape) > 1:
        raise BadSource(source.path, f"text of shape {_shape(shape)} is not supported, only one text a row", name)
    if not shape:
        raise BadSource(source.path, "it is a single value: each array needs a first axis for the records", name)
    whole = None
    if fortran_order and len(shape) > 1:
        data = file.read()
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise BadSource(source.path, f"it has {len(data)} bytes of values instead of {_shape(shape)}", name)
        whole = np.ndarray(shape, dtype, data, order="F")
    return _Array(source, name, shape, dtype, file, whole)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _form(form: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{name}: {np.dtype(kind).name} {_shape(shape) or 'a row'}" for name, (kind, shape) in form.items()
    )
