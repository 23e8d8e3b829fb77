"""Text, JSON lines and the arrays of NPZ files become records; errors name the file, and the line or the array."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.dispatch import conversion
from p2pnode.training.dispatch.conversion import BadSource, find_paths, json_records, npz_records, text_records
from p2pnode.training.dispatch.recordio import decode_example


def test_patterns_give_files_in_sorted_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose name looks like a pattern is that file; folders are left out."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "[1].txt"):
        Path(name).touch()
    Path("folder.txt").mkdir()

    assert find_paths(["[1].txt", "*.txt", "gone"]) == [
        Path(each) for each in ("[1].txt", "[1].txt", "a.txt", "b.txt", "gone")
    ]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "records"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\n\n\nb\n", [b"a", b"", b"", b"b"]),
        (b"a\rb\n\rc\r", [b"a\rb", b"\rc\r"]),
        ("ü\x0b\x85\u2028x\x00\n".encode(), ["ü\x0b\x85\u2028x\x00".encode()]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [b"a", b"\xef\xbb\xbfb"]),
    ],
)
def test_a_line_is_a_record(content: bytes, records: list[bytes], tmp_path: Path) -> None:
    """Lines end with LF or CR LF alone; the last one needs no end; empty lines are kept; one mark is left out."""
    assert list(text_records(written(tmp_path, content))) == records
    assert list(text_records(written(tmp_path, gzip.compress(content)))) == records


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"good\nna\xefve\n", r"line 2: byte 3 of it \(0xef\) is not UTF-8"),
        (b"\xff\xfea\x00\n\x00", "line 1: it is UTF-16"),
        (b"a\n" + b"x" * 11, "line 2: it has more than 10 bytes"),
    ],
)
def test_what_is_no_text_is_refused(
    content: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other encodings and endless lines are errors that name the line and what to do."""
    monkeypatch.setattr(conversion, "MAX_RECORD_BYTES", 10)
    with pytest.raises(BadSource, match=problem):
        list(text_records(written(tmp_path, content)))


def test_json_lines_are_kept_as_they_are(tmp_path: Path) -> None:
    """A record is the text of the value, without the spaces around it; empty lines are no records."""
    content = b'{"a": 1.0,  "b": "\\u00fc"}\r\n\n  [1]\t\n"x"\n \n5'

    assert list(json_records(written(tmp_path, content))) == [
        b'{"a": 1.0,  "b": "\\u00fc"}',
        b"[1]",
        b'"x"',
        b"5",
    ]


@pytest.mark.parametrize("line", [b'{"a": }', b"{} {}", b"nan", b'{"a": 1', b'"\xff"', b"[" * 100_000])
def test_what_is_not_json_is_refused(line: bytes, tmp_path: Path) -> None:
    """A line that is no JSON value is an error with its number."""
    with pytest.raises(BadSource, match="line 2: "):
        list(json_records(written(tmp_path, b"{}\n" + line + b"\n")))


def test_a_damaged_archive_and_a_missing_file_are_named(tmp_path: Path) -> None:
    """Torn gzip and a missing file are errors with the path."""
    torn = written(tmp_path, gzip.compress(b"line\n" * 1000)[:-9])

    with pytest.raises(BadSource, match="file: it cannot be decompressed"):
        list(text_records(torn))
    with pytest.raises(BadSource, match="missing: it cannot be read: No such file"):
        list(text_records(tmp_path / "missing"))
    with pytest.raises(BadSource, match="it cannot be read: Is a directory"):
        list(text_records(tmp_path))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a few rows."""
    monkeypatch.setattr(conversion, "_BLOCK_BYTES", 50)


def npz(path: Path, compressed: bool = False, **content: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **content)
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_npz_files_come_back(compressed: bool, tmp_path: Path) -> None:
    """Each array gives its rows under its name, with type and shape, whatever its order in memory; files follow each
    other."""
    content = {
        "image": np.arange(60, dtype=np.float32).reshape(5, 3, 4),
        "columns": np.asfortranarray(np.arange(10, dtype=">i2").reshape(5, 2)),
        "label": np.arange(5, dtype=np.int64),
        "name": np.array(["a", "bb", "", "ö", "e"]),
        "words": np.array([["a", "b"]] * 5),
        "raw": np.array([b"\x01", b"\xff\x02", b"", b"a", b"b"]),
        "flag": np.array([True, False, True, True, False]),
        "empty": np.zeros((5, 0), np.float64),
    }
    first = npz(tmp_path / "a.npz", compressed, **content)
    found = [decode_example(record) for record in npz_records([first, first])]

    assert len(found) == 10
    for number, example in enumerate(found):
        assert set(example) == set(content)
        for name, array in content.items():
            np.testing.assert_array_equal(example[name], array[number % 5])
    assert (found[0]["image"].dtype, found[0]["columns"].dtype) == (np.float32, np.dtype("<i2"))
    assert (found[3]["name"], found[1]["raw"]) == ("ö", b"\xff\x02")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, "b has 4 rows, and a has 3"),
        ({"a": np.float32(1)}, "a: it is a single value"),
        ({"a": np.array([object()])}, "a: it has Python objects, which are not unpickled"),
        ({"a": np.zeros(2, [("x", "i4")])}, "cannot be packed"),
    ],
)
def test_an_npz_file_without_rows_is_refused(content: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Arrays of different lengths, single values, objects and structures are errors that name the array."""
    with pytest.raises(BadSource, match=problem):
        list(npz_records([npz(tmp_path / "a.npz", **content)]))


def test_npz_files_of_other_forms_are_refused(tmp_path: Path) -> None:
    """A second file with other types or shapes is an error with both forms."""
    first = npz(tmp_path / "a.npz", x=np.zeros((2, 3), np.float32))
    second = npz(tmp_path / "b.npz", x=np.zeros((2, 4), np.float32))
    with pytest.raises(BadSource, match=r"b\.npz: its arrays \(x: float32 4\) differ from those before"):
        list(npz_records([first, second]))


def test_a_damaged_npz_file_is_refused(tmp_path: Path) -> None:
    """No flipped byte of an NPZ file gives other rows: it is an error, or the rows are the same."""
    source = npz(tmp_path / "a.npz", x=np.arange(40, dtype=np.int32).reshape(10, 4))
    whole, data = list(npz_records([source])), bytearray(source.read_bytes())
    for position in range(0, len(data), 3):
        data[position] ^= 0x11
        source.write_bytes(data)
        data[position] ^= 0x11
        try:
            found = list(npz_records([source]))
        except BadSource:
            continue
        assert [next(iter(decode_example(record).values())).tolist() for record in found] == [
            decode_example(record)["x"].tolist() for record in whole
        ]
