"""Finds the files to convert, tells their format, and opens them, compressed with gzip or not."""

from __future__ import annotations

import contextlib
import glob
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from p2pnode.training.errors import TrainingError

_GZIP_MAGIC = b"\x1f\x8b"
_ZIP_MAGIC = b"PK\x03\x04"
#: `images=train-images-idx3-ubyte.gz`. A path with an equals sign is written as ./a=b.
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
_IDX_NAME = re.compile(r"(?:.*[-_.])?(\w+)[-.]idx\d-\w+")


class SourceFormat(StrEnum):
    """What a file to convert is."""

    TEXT = "text"
    JSONL = "jsonl"
    CSV = "csv"
    IDX = "idx"
    NPZ = "npz"


_SUFFIXES = {
    ".txt": SourceFormat.TEXT,
    ".text": SourceFormat.TEXT,
    ".jsonl": SourceFormat.JSONL,
    ".ndjson": SourceFormat.JSONL,
    ".csv": SourceFormat.CSV,
    ".tsv": SourceFormat.CSV,
    ".idx": SourceFormat.IDX,
    ".npz": SourceFormat.NPZ,
}


class BadSource(TrainingError):
    """A file cannot be converted. `path` is the file, `place` the line, row or array in it (may be empty)."""

    def __init__(self, path: Path, problem: str, place: str = "") -> None:
        self.path, self.problem, self.place = path, problem, place
        super().__init__(": ".join(part for part in (str(path), place, problem) if part))


class Source(NamedTuple):
    """A file to convert, and the name of its arrays, if one was given."""

    path: Path
    name: str | None = None

    @property
    def bare_name(self) -> str:
        """The name of the file without the suffix of gzip."""
        return self.path.name.removesuffix(".gz")

    @property
    def array_name(self) -> str:
        """The name of its arrays: as given, or from the name of the file ("train-images-idx3-ubyte": images)."""
        if self.name is not None:
            return self.name
        match = _IDX_NAME.fullmatch(self.bare_name)
        return match[1] if match else Path(self.bare_name).stem


def find_sources(arguments: Sequence[str]) -> list[Source]:
    """The files that `PATH`, `NAME=PATH` and patterns such as `logs/*.txt` mean; those of a pattern in sorted order.

    Raises `BadSource` for a pattern that fits no file; a missing file is found when it is opened.
    """
    found: list[Source] = []
    for argument in arguments:
        match = None if Path(argument).exists() else _NAMED.fullmatch(argument)
        name, text = (match[1], match[2]) if match else (None, argument)
        found += [Source(path, name) for path in find_paths([text])]
    return found


def find_paths(arguments: Sequence[str]) -> list[Path]:
    """The files that paths and patterns mean. Raises `BadSource` for a pattern that fits no file."""
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


def format_of(source: Source) -> SourceFormat:
    """The format of a file by its name, else by its first bytes. Raises `BadSource` if neither tells."""
    by_suffix = _SUFFIXES.get(Path(source.bare_name).suffix.lower())
    if by_suffix is not None:
        return by_suffix
    with open_source(source.path) as file:
        head = file.read(4)
    if head == _ZIP_MAGIC:
        return SourceFormat.NPZ
    if len(head) == 4 and head[:2] == b"\x00\x00" and 0x08 <= head[2] <= 0x0E:
        return SourceFormat.IDX
    raise BadSource(source.path, f"its name does not tell its format; it may be {', '.join(SourceFormat)}")


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
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
