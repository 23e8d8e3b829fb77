"""Files as data sets."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.dispatch.recordio import create_records
from p2pnode.training.engines.mapreduce.engine import MapReduce
from p2pnode.training.engines.mapreduce.errors import BadRequest, SourceFailed


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=12), st.booleans(), st.data()
)
def test_every_line_is_read_once_whatever_the_parts(lines: list[str], ends: bool, data: st.DataObject) -> None:
    """Parts of any size cut lines, multi-byte characters and line ends, and each line is in one part."""
    import tempfile

    text = "\n".join(lines) + ("\n" if ends and lines else "")
    part_bytes = data.draw(st.integers(1, max(1, len(text.encode()) + 2)))
    with tempfile.TemporaryDirectory() as folder, MapReduce() as engine:
        path = Path(folder) / "a.txt"
        path.write_bytes(text.encode())
        expected = text.split("\n")[: -1 if text.endswith("\n") or not text else None]

        assert engine.load(path, part_bytes=part_bytes).collect() == expected


def test_globs_lists_and_urls_name_files(tmp_path: Path) -> None:
    """Files come in the order of their names; a URL of fsspec is read as a path is."""
    for name in ("b.txt", "a.txt", "c.log"):
        (tmp_path / name).write_text(f"{name}\r\n")
    with MapReduce() as engine:
        assert engine.load(f"{tmp_path}/*.txt").collect() == ["a.txt", "b.txt"]
        assert engine.load([tmp_path / "c.log", f"unix://{tmp_path}/a.txt"]).collect() == ["c.log", "a.txt"]
        assert engine.load(f"local://{tmp_path}/b.txt").collect() == ["b.txt"]
        (tmp_path / "empty").write_text("")
        assert engine.load(tmp_path / "empty").count() == 0


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", content)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".GZ", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".lzma", lambda content: lzma.compress(content, lzma.FORMAT_ALONE)),
        (".zip", zipped),
    ],
)
def test_a_compressed_file_is_one_part_with_all_its_lines(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    """A line cannot be found from the middle of a packed text, and none behind the packed size is left out."""
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b"1\n2\n" * 100))
    with MapReduce() as engine:
        data = engine.load(path, part_bytes=10)

        assert data.partitions == 1
        assert data.collect() == [1, 2] * 100


def test_what_a_missing_package_would_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed text is not read as if it were plain, and a URL whose file system is not there is named."""
    monkeypatch.setattr("fsspec.utils.compressions", {})
    (tmp_path / "a.txt.zst").write_bytes(b"packed")
    with MapReduce() as engine:
        with pytest.raises(BadRequest, match=r"a.txt.zst is compressed, and needs .* pip install zstandard"):
            engine.load(tmp_path / "a.txt.zst")
        with pytest.raises(BadRequest, match=r"nowhere://a\.txt cannot be read: Protocol not known"):
            engine.load("nowhere://a.txt")


def test_records_are_split_by_chunks(tmp_path: Path) -> None:
    """Each chunk is read by one task, and small chunks share one; empty records stay."""
    path = tmp_path / "a.recordio"
    with create_records(path, records_per_chunk=2) as records:
        for number in range(7):
            records.write(b"x" * number)
    with MapReduce() as engine:
        assert engine.load(path, part_bytes=1).partitions == 4
        assert engine.load(path).partitions == 1
        assert engine.load(path, part_bytes=1).map(len).collect() == list(range(7))


def test_json_lines_are_values(tmp_path: Path) -> None:
    """A value per line; blank lines are none."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    with MapReduce() as engine:
        assert engine.load(path).collect() == [{"a": 1}, [2]]


def test_parquet_is_split_by_row_groups(tmp_path: Path) -> None:
    """A row is a dict, a row group a partition."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with `make test-frameworks`")
    from pyarrow import parquet

    table = pyarrow.table({"word": ["a", "b", "c"], "count": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with MapReduce() as engine:
        data = engine.load(tmp_path / "a.parquet")
        assert data.partitions == 2
        assert data.map(lambda row: row["word"] * row["count"]).collect() == ["a", "bb", "ccc"]
        (tmp_path / "b.parquet").write_bytes(b"junk")
        with pytest.raises(SourceFailed, match=r"b.parquet cannot be read as Parquet"):
            engine.load(tmp_path / "b.parquet")


def test_parquet_files_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the number of row groups, and one for each: a data set of thousands would run out of descriptors."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with `make test-frameworks`")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"word": ["a", "b", "c"]}), tmp_path / "a.parquet", row_group_size=2)
    opened: list[BinaryIO] = []
    real = parquet.ParquetFile

    def open_table(stream: BinaryIO) -> Any:
        opened.append(stream)
        return real(stream)

    monkeypatch.setattr(parquet, "ParquetFile", open_table)
    with MapReduce() as engine:
        assert engine.load(tmp_path / "a.parquet").count() == 3
    assert [stream.closed for stream in opened] == [True] * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nb\xffd\n", "line at byte 5 is no UTF-8"),
        ("a.jsonl", b"1\n{\n", "line at byte 2 is no JSON"),
        ("a.recordio", b"junk" * 10, "a.recordio"),
        ("a.txt.gz", b"junk", "a.txt.gz cannot be read"),
    ],
)
def test_wrong_contents_name_file_and_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """What is not of the format is an error at the first wrong byte's line, not a wrong element."""
    (tmp_path / name).write_bytes(content)
    with MapReduce() as engine, pytest.raises(SourceFailed, match=message):
        engine.load(tmp_path / name).collect()


@pytest.mark.parametrize(
    ("wrong", "message"), [("none.txt", "no file"), ("*.none", "of such a name"), (".", "is a folder")]
)
def test_a_missing_file_is_named_before_anything_runs(tmp_path: Path, wrong: str, message: str) -> None:
    """`load` itself raises, not the action much later."""
    with MapReduce() as engine, pytest.raises(SourceFailed, match=message):
        engine.load(f"{tmp_path}/{wrong}")


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    """A part of no bytes, and a format that does not exist."""
    (tmp_path / "a").write_text("x")
    with MapReduce() as engine:
        with pytest.raises(BadRequest, match="part_bytes=0"):
            engine.load(tmp_path / "a", part_bytes=0)
        with pytest.raises(BadRequest, match="no format 'xml'"):
            engine.load(tmp_path / "a", "xml")  # type: ignore[arg-type]
