"""Text and JSON lines become records: ends of lines, Unicode, empty files, and errors with the number of the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.dispatch.conversion import lines
from p2pnode.training.dispatch.conversion.lines import json_records, text_records
from p2pnode.training.dispatch.conversion.sources import BadSource, Source


def written(folder: Path, content: bytes) -> Source:
    path = folder / "file"
    path.write_bytes(content)
    return Source(path)


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


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=6), st.booleans())
def test_any_text_comes_back_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], windows: bool
) -> None:
    """Whatever the characters, each line comes back as it was, with the ends of either system."""
    texts = [text.lstrip("\ufeff").rstrip("\r") for text in texts]
    end = "\r\n" if windows else "\n"
    source = written(tmp_path_factory.mktemp("text"), "".join(text + end for text in texts).encode())

    assert [record.decode() for record in text_records(source)] == texts


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
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 10)
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
        list(text_records(Source(tmp_path / "missing")))
    with pytest.raises(BadSource, match="it cannot be read: Is a directory"):
        list(text_records(Source(tmp_path)))
