"""Turns files into records: lines of text and JSON, and the arrays of NPZ files.

A line ends with LF or CR LF and with nothing else, so a record may contain any other character. The last line needs no
end. A byte order mark at the beginning of a file is left out. Text must be UTF-8, so that `record.decode()` never
fails. Empty lines are empty records of text; JSON lines has no value there, and they are left out.

Arrays give a record for each index of the first axis: `recordio.encode_example` of the row of each array under its
name. Memory is bounded by one record or a block of rows, whatever the size of a file.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from p2pnode.training.dispatch.recordio import BadExample, encode_example
from p2pnode.training.errors import TrainingError

#: The largest record: what readers accept by default, with its length.
MAX_RECORD_BYTES = 2**28 - 4
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
#: Rows of an array are read in blocks of so many bytes.
_BLOCK_BYTES = 1 << 20
#: What zipfile raises for damaged archives, and for encrypted or strangely compressed ones (RuntimeError).
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class SourceFormat(StrEnum):
    """What a file to convert is."""

    TEXT = "text"
    JSONL = "jsonl"
    NPZ = "npz"


_SUFFIXES = {
    ".txt": SourceFormat.TEXT,
    ".text": SourceFormat.TEXT,
    ".jsonl": SourceFormat.JSONL,
    ".ndjson": SourceFormat.JSONL,
    ".npz": SourceFormat.NPZ,
}


class BadSource(TrainingError):
    """A file cannot be converted. `path` is the file, `place` the line or array in it (may be empty)."""

    def __init__(self, path: Path, problem: str, place: str = "") -> None:
        self.path, self.problem, self.place = path, problem, place
        super().__init__(": ".join(part for part in (str(path), place, problem) if part))


def find_paths(arguments: Sequence[str]) -> list[Path]:
    """The files that paths and patterns such as `logs/*.txt` mean; those of a pattern in sorted order.

    Raises `BadSource` for a pattern that fits no file; a missing file is found when it is opened.
    """
    found: list[Path] = []
    for argument in arguments:
        if Path(argument).exists() or not glob.has_magic(argument):
            found.append(Path(argument))
            continue
        paths = sorted(Path(each) for each in glob.glob(argument, recursive=True) if Path(each).is_file())  # noqa: PTH207
        if not paths:
            raise BadSource(Path(argument), "no file fits this pattern")
        found += paths
    return found


def common_format(paths: Sequence[Path]) -> SourceFormat:
    """The format that all files have, by their names. Raises `BadSource` if they differ or if a name does not tell."""
    first = _format_of(paths[0])
    for path in paths[1:]:
        if (found := _format_of(path)) is not first:
            raise BadSource(path, f"it is {found}, and {paths[0]} is {first}: convert one format at a time")
    return first


def _format_of(path: Path) -> SourceFormat:
    found = _SUFFIXES.get(Path(path.name.removesuffix(".gz")).suffix.lower())
    if found is None:
        raise BadSource(path, f"its name does not tell its format; it may be {', '.join(SourceFormat)}")
    return found


def records_of(paths: Sequence[Path], kind: SourceFormat) -> Iterator[bytes]:
    """The records of these files, in their order. Raises `BadSource` while it goes."""
    if kind is SourceFormat.NPZ:
        yield from npz_records(paths)
        return
    convert = json_records if kind is SourceFormat.JSONL else text_records
    for path in paths:
        yield from convert(path)


# -- lines


def text_records(path: Path) -> Iterator[bytes]:
    """The lines of a text file. Raises `BadSource` with the number of the line."""
    for number, line in _lines(path):
        _check_text(line, path, number)
        yield line


def json_records(path: Path) -> Iterator[bytes]:
    """The lines of a JSON lines file, each a valid JSON value without spaces around it. Raises as `text_records`."""
    for number, line in _lines(path):
        text = line.strip()
        if not text:
            continue
        _check_text(text, path, number)
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadSource(path, f"it is not JSON: {error}", f"line {number}") from None
        yield text


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line without its end, and its number from 1."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(MAX_RECORD_BYTES + 3):
            number += 1
            if number == 1:
                if line.startswith(_UTF16_MARKS):
                    raise BadSource(path, "it is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8", "line 1")
                line = line.removeprefix(_UTF8_MARK)
            line = line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
            if len(line) > MAX_RECORD_BYTES:
                problem = f"it has more than {MAX_RECORD_BYTES} bytes, the most for a record"
                raise BadSource(path, problem, f"line {number}")
            yield number, line


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if it is gzip. Raises `BadSource` if it cannot be opened or read, also where
    the caller reads it."""
    try:
        with path.open("rb") as raw:
            compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if not compressed:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as file:
                yield cast(BinaryIO, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadSource(path, f"it cannot be decompressed: {error}") from None
    except OSError as error:
        raise BadSource(path, f"it cannot be read: {error.strerror or error}") from None


def _check_text(line: bytes, path: Path, number: int) -> None:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        problem = (
            f"byte {error.start + 1} of it ({line[error.start]:#04x}) is not UTF-8; convert the file first, such as"
        )
        raise BadSource(path, f"{problem} with iconv -f LATIN1 -t UTF-8", f"line {number}") from None


# -- arrays


class _Array(NamedTuple):
    """An array that is read row by row: its shape with the rows first, its type, and where its values are."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: BinaryIO
    in_memory: np.ndarray[Any, Any] | None = None


def npz_records(paths: Sequence[Path]) -> Iterator[bytes]:
    """The rows of NPZ files, one file after the other; all have the same names, types and shapes of rows, and the
    arrays of a file the same number of rows. Arrays in Fortran's order are read as a whole. Raises `BadSource`."""
    form: dict[str, tuple[str, tuple[int, ...]]] | None = None
    for path in paths:
        try:
            with contextlib.ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(path))
                arrays = [_array(path, archive, stack, member) for member in archive.namelist()]
                found = {array.name: (array.dtype.str, array.shape[1:]) for array in arrays}
                if form is not None and found != form:
                    raise BadSource(path, f"its arrays ({_form(found)}) differ from those before ({_form(form)})")
                form = found
                yield from _joined(arrays)
        except _DAMAGED as error:
            raise BadSource(path, f"it cannot be read as NPZ: {error}") from None
        except OSError as error:
            raise BadSource(path, f"it cannot be read: {error.strerror or error}") from None


def _joined(arrays: Sequence[_Array]) -> Iterator[bytes]:
    for array in arrays:
        if array.shape[0] != arrays[0].shape[0]:
            problem = f"{array.name} has {array.shape[0]} rows, and {arrays[0].name} has {arrays[0].shape[0]}"
            raise BadSource(array.path, problem)
    names = [array.name for array in arrays]
    for values in zip(*map(_rows, arrays), strict=True):
        try:
            yield encode_example(dict(zip(names, values, strict=True)))
        except BadExample as error:
            raise BadSource(arrays[0].path, str(error)) from None


def _rows(array: _Array) -> Iterator[Any]:
    """The rows, read in blocks; rows without dimensions are NumPy scalars, and text is text or lists of it."""
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
                raise BadSource(array.path, problem, array.name)
            block = np.ndarray((rows, *shape), array.dtype, data)
        yield from block.tolist() if array.dtype.kind in "SU" else block
    if array.file.read(1):
        problem = f"more values follow those of shape {_shape(array.shape)} that its head announces"
        raise BadSource(array.path, problem, array.name)


def _array(path: Path, archive: zipfile.ZipFile, stack: contextlib.ExitStack, member: str) -> _Array:
    name = member.removesuffix(".npy")
    file = cast(BinaryIO, stack.enter_context(archive.open(member)))
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"version {version} of its format is for structured types")
        shape, fortran_order, dtype = read_header[version](file)
    except (ValueError, SyntaxError) as error:
        raise BadSource(path, f"it is not an array: {error}", name) from None
    if dtype.hasobject:
        raise BadSource(path, "it has Python objects, which are not unpickled", name)
    if not shape:
        raise BadSource(path, "it is a single value: each array needs a first axis for the records", name)
    whole = None
    if fortran_order and len(shape) > 1:
        data = file.read()
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise BadSource(path, f"it has {len(data)} bytes of values instead of {_shape(shape)}", name)
        whole = np.ndarray(shape, dtype, data, order="F")
    return _Array(path, name, shape, dtype, file, whole)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _form(form: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{name}: {np.dtype(kind).name} {_shape(shape) or 'a row'}" for name, (kind, shape) in form.items()
    )
