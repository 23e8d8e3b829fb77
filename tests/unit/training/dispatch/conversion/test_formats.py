"""The one format of several files, and their records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.dispatch.conversion import common_format, records_of
from p2pnode.training.dispatch.conversion.sources import BadSource, Source, SourceFormat
from p2pnode.training.dispatch.conversion.tables import TableFormat
from p2pnode.training.dispatch.recordio import decode_example


def sources(folder: Path, **contents: bytes) -> list[Source]:
    """Files of these contents; in the names an underline stands for a dot."""
    found = []
    for name, content in contents.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content)
        found.append(Source(path))
    return found


def test_files_of_one_format_have_it(tmp_path: Path) -> None:
    """One file, and several of which one is compressed by its name."""
    files = sources(tmp_path, a_txt=b"", b_text=b"", c_txt_gz=b"")

    assert common_format(files[:1]) is SourceFormat.TEXT
    assert common_format(files) is SourceFormat.TEXT


def test_a_mixture_is_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    """The error names both files and both formats; a file that tells none is named too."""
    files = sources(tmp_path, a_txt=b"notes", b_txt=b"notes", c_csv=b"notes", d_jsonl=b"{}")
    with pytest.raises(BadSource, match=r"c\.csv: it is csv, and .*a\.txt is text: convert one format at a time"):
        common_format(files)
    with pytest.raises(BadSource, match="does not tell its format"):
        common_format(sources(tmp_path, a_txt=b"", notes=b"some notes"))


def test_each_format_gives_its_records_in_the_order_of_the_files(tmp_path: Path) -> None:
    """Lines of text and of JSON as they are; rows of tables and arrays as examples."""
    table = TableFormat()
    texts = sources(tmp_path, b_txt=b"one\ntwo\n", a_txt=b"three\n")
    lines = sources(tmp_path, a_jsonl=b'{"x": 1}\n', b_jsonl=b'{"x": 2}\n')
    tables = sources(tmp_path, a_csv=b"x,y\n1,a\n", b_csv=b"x,y\n2,b\n")
    np.savez(tmp_path / "a.npz", x=np.arange(3, dtype=np.uint8))
    idx = sources(tmp_path, a_idx=b"\0\0\x08\x01\0\0\0\x02\x07\x09")

    assert list(records_of(texts, SourceFormat.TEXT, table)) == [b"one", b"two", b"three"]
    assert [json.loads(one) for one in records_of(lines, SourceFormat.JSONL, table)] == [{"x": 1}, {"x": 2}]
    rows = [decode_example(one) for one in records_of(tables, SourceFormat.CSV, table)]
    assert [(int(row["x"]), row["y"]) for row in rows] == [(1, "a"), (2, "b")]
    arrays = list(records_of([Source(tmp_path / "a.npz")], SourceFormat.NPZ, table))
    assert [int(decode_example(one)["x"]) for one in arrays] == [0, 1, 2]
    assert [int(decode_example(one)["a"]) for one in records_of(idx, SourceFormat.IDX, table)] == [7, 9]


def test_a_bad_file_is_named_when_its_turn_comes(tmp_path: Path) -> None:
    """What came before it was given."""
    records = records_of(sources(tmp_path, a_jsonl=b"1\n", b_jsonl=b"{\n"), SourceFormat.JSONL, TableFormat())

    assert next(records) == b"1"
    with pytest.raises(BadSource, match=r"b\.jsonl"):
        next(records)
