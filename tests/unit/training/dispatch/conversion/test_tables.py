"""Rows of CSV become JSON objects with one type for each column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.dispatch.conversion.sources import BadSource, Source
from p2pnode.training.dispatch.conversion.tables import TableFormat, table_records


def converted(folder: Path, *contents: str | bytes, written: TableFormat | None = None) -> list[Any]:
    """The values of the records of these files."""
    sources = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        sources.append(Source(path))
    return [json.loads(record) for record in table_records(sources, written or TableFormat())]


def test_a_column_has_the_type_of_all_its_cells(tmp_path: Path) -> None:
    """Integers, numbers and text are told by every cell of every file, so that a column has one type."""
    first = "i,f,t,zip,none,big,e\r\n1,1,a,007,,9223372036854775807,1e5\r\n-2, 2.5 ,3,123,nan,1,\r\n"
    second = '\ufeffi,f,t,zip,none,big,e\n0,.5,"x, ""y""\nz",5,,9223372036854775808,NaN'

    assert converted(tmp_path, first, second) == [
        {"i": 1, "f": 1.0, "t": "a", "zip": "007", "none": None, "big": "9223372036854775807", "e": 1e5},
        {"i": -2, "f": 2.5, "t": "3", "zip": "123", "none": None, "big": "1", "e": None},
        {"i": 0, "f": 0.5, "t": 'x, "y"\nz', "zip": "5", "none": None, "big": "9223372036854775808", "e": None},
    ]


@pytest.mark.parametrize("cell", ["1e999", "inf", "+", "1_000", "0x10", "٣", "1 2", "--1", ".", "1e", "00"])
def test_what_is_no_number_is_text(cell: str, tmp_path: Path) -> None:
    """Infinities, other digits, separators and leading zeros leave a column text."""
    assert converted(tmp_path, f"a\n1\n{cell}\n") == [{"a": "1"}, {"a": cell}]


def test_a_column_may_be_kept_as_text(tmp_path: Path) -> None:
    """A column named as text keeps its cells as they are, empty ones included; an unknown name is an error."""
    assert converted(tmp_path, "a,b\n1,\n2,nan\n", written=TableFormat(text_columns=["a", "b"])) == [
        {"a": "1", "b": ""},
        {"a": "2", "b": "nan"},
    ]
    with pytest.raises(BadSource, match="it has no column c; it has a, b"):
        converted(tmp_path, "a,b\n", written=TableFormat(text_columns=["c"]))


def test_a_table_may_have_no_header_and_another_delimiter(tmp_path: Path) -> None:
    """Without a header the columns are numbered; a tab separates the cells of .tsv files."""
    path = tmp_path / "a.tsv"
    path.write_text("1\ta,b\n2\tc\n")
    records = list(table_records([Source(path)], TableFormat(header=False)))

    assert [json.loads(record) for record in records] == [
        {"column_0": 1, "column_1": "a,b"},
        {"column_0": 2, "column_1": "c"},
    ]
    assert converted(tmp_path, "a;b\n1;2\n", written=TableFormat(delimiter=";")) == [{"a": 1, "b": 2}]


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (["a,b\n1,2\n3\n"], "line 3: it has 1 cells, and there are 2 columns"),
        (["a,b\n1,2\n", "a,c\n1,2\n"], "1.csv: line 1: it has the columns a, c, and the files before it have a, b"),
        (["a,a\n1,2\n"], 'line 1: two columns are named "a"'),
        (['a\n"open\n'], "it is not CSV: unexpected end of data"),
        (['a\n"x"y\n'], "line 2: it is not CSV"),
        ([b"a\nna\xefve\n"], "it is not UTF-8"),
    ],
)
def test_what_is_no_table_is_refused(contents: list[Any], problem: str, tmp_path: Path) -> None:
    """Rows of another length, other columns, and broken quotes are errors with file and line."""
    with pytest.raises(BadSource, match=problem):
        converted(tmp_path, *contents)


def test_empty_tables_have_no_record(tmp_path: Path) -> None:
    """Files without rows give no records, beside others too; empty lines are no rows."""
    assert converted(tmp_path, "") == []
    assert converted(tmp_path, "a,b\n") == []
    assert converted(tmp_path, "", "a\n\n1\n\n") == [{"a": 1}]
