"""Finding files and telling their format."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.training.dispatch.conversion.sources import (
    BadSource,
    Source,
    SourceFormat,
    find_paths,
    find_sources,
    format_of,
)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", b"", SourceFormat.TEXT),
        ("a.TXT.gz", b"", SourceFormat.TEXT),
        ("a.jsonl", b"", SourceFormat.JSONL),
        ("a.ndjson", b"", SourceFormat.JSONL),
        ("a.tsv", b"", SourceFormat.CSV),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x03", SourceFormat.IDX),
        ("archive", b"PK\x03\x04rest", SourceFormat.NPZ),
    ],
)
def test_a_format_is_told_by_name_or_first_bytes(name: str, content: bytes, kind: SourceFormat, tmp_path: Path) -> None:
    """Known endings tell the format, .gz aside; without one the first bytes do."""
    path = tmp_path / name
    path.write_bytes(content)

    assert format_of(Source(path)) is kind


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    """A file that does not tell its format is an error, with the formats that there are."""
    (tmp_path / "notes").write_bytes(b"some notes")

    with pytest.raises(BadSource, match="notes: its name does not tell its format; it may be text, jsonl"):
        format_of(Source(tmp_path / "notes"))


def test_patterns_and_names_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns give files in sorted order; NAME=FILE names arrays, unless a file has that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "x=y", "[1].txt"):
        Path(name).touch()
    Path("folder.txt").mkdir()

    assert find_sources(["?.txt", "x=y", "label=a.txt", "gone"]) == [
        Source(Path("a.txt")),
        Source(Path("b.txt")),
        Source(Path("x=y")),
        Source(Path("a.txt"), "label"),
        Source(Path("gone")),
    ]
    assert find_paths(["[1].txt", "*.txt"]) == [Path(each) for each in ("[1].txt", "[1].txt", "a.txt", "b.txt")]
    with pytest.raises(BadSource, match="no file fits this pattern"):
        find_sources(["*.csv"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train-images-idx3-ubyte.gz", "images"),
        ("t10k-labels.idx1-ubyte", "labels"),
        ("emnist-letters-train-images-idx3-ubyte", "images"),
        ("data.npz", "data"),
    ],
)
def test_arrays_are_named_by_their_file(name: str, expected: str) -> None:
    """The name of an array in IDX files is the word before the format; else the name of the file."""
    assert Source(Path(name)).array_name == expected
