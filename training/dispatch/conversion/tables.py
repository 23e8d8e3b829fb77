"""CSV: one record a row, a JSON object of column and value.

The first row names the columns. What a column is, all cells of all files decide, in a first pass: integers (of 64 bits,
without leading zeros), else numbers, else text. An empty cell or "nan" in a column of numbers is null. So a column has
the same type in every record.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from p2pnode.training.dispatch.conversion.lines import MAX_RECORD_BYTES
from p2pnode.training.dispatch.conversion.sources import BadSource, Source, open_source

_INTEGER = re.compile(r"\s*-?(?:0|[1-9][0-9]{0,18})\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*", re.ASCII)
_MISSING = frozenset({"", "nan"})
_INT64 = range(-(2**63), 2**63)
#: What a column is so far, in the order in which more cells can change it.
_NOTHING, _INTEGERS, _NUMBERS, _TEXT = range(4)


class TableFormat(NamedTuple):
    """How CSV files are written, and which columns stay text whatever is in them."""

    delimiter: str | None = None
    header: bool = True
    text_columns: Collection[str] = ()

    def delimiter_of(self, source: Source) -> str:
        """As given; else a tab for .tsv, and a comma."""
        return self.delimiter or ("\t" if source.bare_name.lower().endswith(".tsv") else ",")


def table_records(sources: Sequence[Source], written: TableFormat) -> Iterator[bytes]:
    """The rows of CSV files with the same columns. Each file is read twice. Raises `BadSource` with the number of the
    line."""
    columns, converters = _columns(sources, written)
    for source in sources:
        for cells in _rows(source, written, columns):
            values = [convert(cell) for convert, cell in zip(converters, cells, strict=True)]
            yield msgspec.json.encode(dict(zip(columns, values, strict=True)))


def _columns(
    sources: Sequence[Source], written: TableFormat
) -> tuple[list[str], list[Callable[[str], int | float | str | None]]]:
    """The names of the columns, and what turns their cells into values."""
    columns: list[str] | None = None
    kinds: list[int] = []
    for source in sources:
        with _reader(source, written) as reader:
            first = next(reader, None)
        if first is None:
            continue  # an empty file
        named = first if written.header else [f"column_{number}" for number in range(len(first))]
        _check_names(source, named, columns)
        if columns is None:
            columns = named
            kinds = [_TEXT if name in written.text_columns else _NOTHING for name in columns]
        for cells in _rows(source, written, columns):
            for position, cell in enumerate(cells):
                if kinds[position] != _TEXT:
                    kinds[position] = max(kinds[position], _kind(cell))
    unknown = set(written.text_columns).difference(columns or ())
    if unknown and columns is not None:
        raise BadSource(sources[0].path, f"it has no column {sorted(unknown)[0]}; it has {', '.join(columns)}")
    converters = {_NOTHING: _nothing, _INTEGERS: _integer, _NUMBERS: _number, _TEXT: _text}
    return columns or [], [converters[kind] for kind in kinds]


def _check_names(source: Source, named: list[str], columns: list[str] | None) -> None:
    if columns is not None and named != columns:
        problem = f"it has the columns {', '.join(named)}, and the files before it have {', '.join(columns)}"
        raise BadSource(source.path, problem, "line 1")
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise BadSource(source.path, f'two columns are named "{twice[0]}"', "line 1")


def _rows(source: Source, written: TableFormat, columns: Sequence[str]) -> Iterator[list[str]]:
    """The cells of each row below the header. Empty lines are no rows."""
    with _reader(source, written) as reader:
        if written.header:
            next(reader, None)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(columns):
                problem = f"it has {len(cells)} cells, and there are {len(columns)} columns"
                raise BadSource(source.path, problem, f"line {reader.line_num}")
            yield cells


@contextmanager
def _reader(source: Source, written: TableFormat) -> Iterator[Any]:
    """A reader of the rows; what it raises becomes `BadSource`."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    line = 0
    with open_source(source.path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=written.delimiter_of(source), strict=True)
        try:
            yield reader
        except csv.Error as error:
            raise BadSource(source.path, f"it is not CSV: {error}", f"line {reader.line_num}") from None
        except UnicodeDecodeError as error:
            line = reader.line_num + 1
            problem = f"it is not UTF-8 ({error.reason}); convert it first, such as with iconv -f LATIN1 -t UTF-8"
            raise BadSource(source.path, problem, f"at or after line {line}") from None
        finally:
            text.detach()


def _kind(cell: str) -> int:
    if cell.strip().lower() in _MISSING:
        return _NOTHING
    if _INTEGER.fullmatch(cell) and int(cell) in _INT64:
        return _INTEGERS
    if _NUMBER.fullmatch(cell) and not _INTEGER.fullmatch(cell) and math.isfinite(float(cell)):
        return _NUMBERS
    return _TEXT


def _nothing(_cell: str) -> None:
    return None


def _integer(cell: str) -> int | None:
    return None if cell.strip().lower() in _MISSING else int(cell)


def _number(cell: str) -> float | None:
    return None if cell.strip().lower() in _MISSING else float(cell)


def _text(cell: str) -> str:
    return cell
