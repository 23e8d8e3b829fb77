"""Text and JSON lines: one record a line, without the end of the line.

A line ends with LF or CR LF and with nothing else, so a record may contain any other character. The last line needs no
end. A byte order mark at the beginning of a file is left out. Text must be UTF-8, so that `record.decode()` never
fails. Empty lines are empty records of text; JSON lines has no value there, and they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2pnode.training.dispatch.conversion.sources import BadSource, Source, open_source

#: The largest record: what readers accept by default, with its length.
MAX_RECORD_BYTES = 2**28 - 4
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def text_records(source: Source) -> Iterator[bytes]:
    """The lines of a text file. Raises `BadSource` with the number of the line."""
    with open_source(source.path) as file:
        for number, line in _lines(file, source.path):
            _check_text(line, source.path, number)
            yield line


def json_records(source: Source) -> Iterator[bytes]:
    """The lines of a JSON lines file, each a valid JSON value without spaces around it. Raises as `text_records`."""
    with open_source(source.path) as file:
        for number, line in _lines(file, source.path):
            text = line.strip()
            if not text:
                continue
            _check_text(text, source.path, number)
            try:
                msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadSource(source.path, f"it is not JSON: {error}", f"line {number}") from None
            yield text


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line without its end, and its number from 1."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 3):
        number += 1
        if number == 1:
            if line.startswith(_UTF16_MARKS):
                raise BadSource(path, "it is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8", "line 1")
            line = line.removeprefix(_UTF8_MARK)
        line = line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
        if len(line) > MAX_RECORD_BYTES:
            raise BadSource(path, f"it has more than {MAX_RECORD_BYTES} bytes, the most for a record", f"line {number}")
        yield number, line


def _check_text(line: bytes, path: Path, number: int) -> None:
    if line.isascii():
        return
    try:
        line.decode()
    except UnicodeDecodeError as error:
        problem = (
            f"byte {error.start + 1} of it ({line[error.start]:#04x}) is not UTF-8; convert the file first, such as"
        )
        raise BadSource(path, f"{problem} with iconv -f LATIN1 -t UTF-8", f"line {number}") from None
