"""Splits files into parts that tasks read by themselves: text by bytes, RecordIO by chunks, Parquet by row groups.

A path is a local one, a glob, or a URL of fsspec (`s3://…`, `https://…`). Lines of a compressed text file cannot be
found from its middle: such a file is one part. A `zip` file has one text in it.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import fsspec

from p2pnode.training.dispatch.recordio import RecordFileError, read_chunk, read_index
from p2pnode.training.engines.mapreduce.errors import BadRequest, SourceFailed, shown
from p2pnode.training.engines.mapreduce.stages import Begin

Format = Literal["text", "json", "recordio", "parquet"]
#: Bytes of text in a part, unless asked otherwise.
PART_BYTES = 32 << 20
_SUFFIXES: dict[str, Format] = {".jsonl": "json", ".ndjson": "json", ".recordio": "recordio", ".parquet": "parquet"}
#: Suffix of a packed text, and the package that unpacks it where Python does not.
_COMPRESSED = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".lzma", ".zip"), ""),
    ".zst": "zstandard",
    ".lz4": "lz4",
    ".snappy": "python-snappy",
}


def parts_of(paths: str | Path | Sequence[str | Path], form: Format | None, part_bytes: int) -> list[Begin]:
    """What each task reads, file after file. Raises `SourceFailed` if there is no such file, `BadRequest` for an
    unknown format."""
    if part_bytes < 1:
        raise BadRequest(f"part_bytes={part_bytes}: a part has at least one byte")
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in given for file in _files(str(path))]
    if not files:
        raise SourceFailed("no file was named")
    return [part for file in files for part in _parts(file, form or _format(file), part_bytes)]


def _files(path: str) -> list[str]:
    for local in ("unix://", "file://"):
        path = path.removeprefix(local)
    if "://" in path:
        try:
            system, inside = fsspec.core.url_to_fs(path)
            found = sorted(system.glob(inside)) if glob.has_magic(inside) else [inside] if system.exists(inside) else []
        except (ImportError, ValueError) as error:  # a package of fsspec's, or the protocol, is not there
            raise BadRequest(f"{path} cannot be read: {error}") from error
        except OSError as error:
            raise SourceFailed(f"{path} cannot be read: {error}") from error
        files = [system.unstrip_protocol(one) for one in found]
    else:
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]  # noqa: PTH207 - not below one folder
        files = [one for one in found if Path(one).is_file()]
        if Path(path).is_dir():
            raise SourceFailed(f"{path} is a folder: name its files, for example {path.rstrip('/')}/*")
    if not files:
        raise SourceFailed(f"there is no file {path}" + (" of such a name" if glob.has_magic(path) else ""))
    return files


def _format(file: str) -> Format:
    bare = str(Path(file).with_suffix("")) if Path(file).suffix.lower() in _COMPRESSED else file
    return _SUFFIXES.get(Path(bare).suffix, "text")


def _parts(file: str, form: Format, part_bytes: int) -> list[Begin]:
    match form:
        case "text" | "json":
            read = _text if form == "text" else _json
            if _is_compressed(file):
                return [partial(read, file, 0, None)]
            size = _size(file)
            cuts = [*range(0, size, part_bytes), size] if size else [0, 0]
            return [partial(read, file, start, stop) for start, stop in itertools.pairwise(cuts)]
        case "recordio":
            if "://" in file:
                raise BadRequest(f"{file}: RecordIO files are read from a local or mounted path")
            try:
                chunks = read_index(file).chunks
            except RecordFileError as error:
                raise SourceFailed(str(error)) from error
            runs: list[list[tuple[int, int, int]]] = []
            room = 0
            for chunk in chunks:  # chunks are grouped up to the bytes of a part
                if not runs or chunk.header.payload_bytes > room:
                    runs.append([])
                    room = part_bytes
                runs[-1].append((chunk.offset, chunk.records, chunk.number))
                room -= chunk.header.payload_bytes
            return [partial(_records, file, run) for run in runs] or [partial(_records, file, [])]
        case "parquet":
            with _parquet(file) as table:
                groups = table.num_row_groups
            return [partial(_rows, file, group) for group in range(groups)] or [partial(_records, file, [])]
    raise BadRequest(f"there is no format {form!r}: use text, json, recordio or parquet")


def _is_compressed(file: str) -> bool:
    """Whether `_lines` unpacks the file as it reads it. Then its bytes are not those of its lines, and it is one part:
    parts by bytes would leave out what is behind the packed size. Raises `BadRequest` where a package is missing."""
    if fsspec.utils.infer_compression(file) is not None:
        return True
    package = _COMPRESSED.get(Path(file).suffix.lower())
    if package:
        raise BadRequest(f"{file} is compressed, and needs the package {package}: pip install {package}")
    return package is not None


def _size(file: str) -> int:
    try:
        with fsspec.open(file, "rb") as stream:
            return int(stream.seek(0, 2))
    except OSError as error:
        raise SourceFailed(f"{file} cannot be read: {error}") from error


# -- reading, in a task -------------------------------------------------------------------------------------------


def _lines(file: str, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of the lines that begin at `start` or behind it, and before `stop`."""
    try:
        with fsspec.open(file, "rb", compression="infer") as stream:
            yield from _lines_of(stream, start, stop)
    except (OSError, EOFError) as error:
        raise SourceFailed(f"{file} cannot be read: {error}") from error


def _lines_of(stream: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    offset = start
    if start:
        stream.seek(start - 1)
        offset = start - 1 + len(stream.readline())  # the line before, which belongs to another part
    while stop is None or offset < stop:
        line = stream.readline()
        if not line:
            return
        yield offset, line
        offset += len(line)


def _text(file: str, start: int, stop: int | None) -> Iterator[str]:
    for offset, line in _lines(file, start, stop):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise SourceFailed(f"{file}: the line at byte {offset} is no UTF-8: {error.reason}") from None
        yield text.removesuffix("\n").removesuffix("\r")


def _json(file: str, start: int, stop: int | None) -> Iterator[Any]:
    for offset, line in _lines(file, start, stop):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise SourceFailed(f"{file}: the line at byte {offset} is no JSON ({error}): {shown(line)}") from None
        yield value


def _records(file: str, places: list[tuple[int, int, int]]) -> Iterator[bytes]:
    for offset, records, number in places:
        try:
            chunk = read_chunk(file, offset, records=records, number=number)
        except RecordFileError as error:
            raise SourceFailed(str(error)) from error
        yield from chunk.records()


@contextlib.contextmanager
def _parquet(file: str) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise BadRequest("Parquet files need the package pyarrow: pip install 'p2pnode[mapreduce,parquet]'") from None
    try:
        with fsspec.open(file, "rb") as stream:
            yield parquet.ParquetFile(stream)
    except (OSError, ValueError) as error:
        raise SourceFailed(f"{file} cannot be read as Parquet: {error}") from error


def _rows(file: str, group: int) -> Iterator[dict[str, Any]]:
    with _parquet(file) as table:
        rows = table.read_row_group(group).to_pylist()
    yield from rows
