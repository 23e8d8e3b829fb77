"""The record files of a machine, by names that are equal on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.training.dispatch.dataset import RecordFilesMissing, find_files, path_of, read_dataset
from tests.harness.builders.record_files import write_records


def test_names_are_those_below_the_folder(tmp_path: Path) -> None:
    """Patterns are sorted within, follow each other as given, and a file counts once."""
    (tmp_path / "more").mkdir()
    for name in ("b.recordio", "a.recordio", "more/c.recordio"):
        write_records(tmp_path / name, [b"x"] * 7, 3)

    found = find_files(["more/*", "*.recordio", "a.recordio"], str(tmp_path))
    dataset = read_dataset(["**/*.recordio"], str(tmp_path))

    assert [file.name for file in found] == ["more/c.recordio", "a.recordio", "b.recordio"]
    assert [chunk.records for chunk in (dataset.table[number] for number in range(3))] == [3, 3, 1]
    assert dataset.paths["more/c.recordio"] == path_of("more/c.recordio", str(tmp_path))
    assert read_dataset([str(tmp_path / "a.recordio")], "/elsewhere").paths == {
        str(tmp_path / "a.recordio"): str(tmp_path / "a.recordio")
    }


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    """No pattern, a pattern without a file, and a file that is not whole."""
    path = write_records(tmp_path / "a.recordio", [b"abc"] * 7, 3)
    path.write_bytes(path.read_bytes()[:-2])

    for patterns, says in (
        ([], "names no file"),
        (["b*"], "matches no file in"),
        (["a*"], "is no whole RecordIO file"),
    ):
        with pytest.raises(RecordFilesMissing, match=says):
            read_dataset(patterns, str(tmp_path))
