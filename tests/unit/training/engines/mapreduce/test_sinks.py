"""Data sets in folders: a file per partition, a folder that appears when it is whole, and what cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.training.engines.mapreduce.engine import MapReduce
from p2pnode.training.engines.mapreduce.errors import BadRequest, MapReduceError, SinkFailed
from p2pnode.training.engines.mapreduce.sinks import FolderSink


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    """Text, JSON and RecordIO come back as they were, a file per partition."""
    with MapReduce() as engine:
        words = engine.from_items(["ä", "b", "c"], 2)
        assert words.save(tmp_path / "text") == 3
        assert engine.load(f"{tmp_path}/text/*").collect() == ["ä", "b", "c"]
        assert words.map(lambda word: {"word": word}).save(tmp_path / "json", "json") == 3
        assert engine.load(f"{tmp_path}/json/*.jsonl").collect()[0] == {"word": "ä"}
        assert words.map(str.encode).save(tmp_path / "records", "recordio") == 3
        assert engine.load(f"{tmp_path}/records/*").collect() == ["ä".encode(), b"b", b"c"]

        assert engine.from_items([], 2).save(tmp_path / "nothing") == 0
        assert engine.load(f"{tmp_path}/nothing/*").collect() == []

    assert sorted(path.name for path in (tmp_path / "text").iterdir()) == ["part-00000.txt", "part-00001.txt"]
    assert len(list((tmp_path / "nothing").iterdir())) == 2


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """No folder, no part of one; a folder that exists is not touched."""
    with MapReduce() as engine:
        with pytest.raises(MapReduceError, match="is no line of text"):
            engine.from_items(["a", 3], 2).save(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "out").mkdir()
        with pytest.raises(MapReduceError, match="exists"):
            engine.from_items(["a"]).save(tmp_path / "out")
        with pytest.raises(BadRequest, match="local or mounted"):
            engine.from_items(["a"]).save("s3://bucket/out")


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    """Until `finish` nobody can take a part of it for the whole; a partition that was written twice is there once."""
    sink = FolderSink(tmp_path / "out", "text")
    sink.begin()
    assert sink.write(["a", "b"], 0) == 2
    assert sink.write(["c", "d"], 1) == 2
    assert sink.write(["c", "d"], 1) == 2
    assert not (tmp_path / "out").exists()

    sink.finish()

    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "part-00000.txt": "a\nb\n",
        "part-00001.txt": "c\nd\n",
    }


def test_what_a_lost_worker_left_is_not_in_the_folder(tmp_path: Path) -> None:
    """A task that ended in the middle has written under another name; the one after it has written the partition."""

    def dies() -> Iterator[str]:
        yield "a"
        raise RuntimeError

    sink = FolderSink(tmp_path / "out", "text")
    sink.begin()
    with pytest.raises(RuntimeError):
        sink.write(dies(), 0)
    sink.write(["a", "b"], 0)
    sink.finish()

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["part-00000.txt"]


@pytest.mark.parametrize(
    ("form", "item", "problem"),
    [
        ("text", 3, "partition 7: 3 is no line of text: use map"),
        ("text", "a\nb", "is no line of text"),
        ("json", {1, 2}, r"partition 7: \{1, 2\} is no JSON"),
        ("recordio", "a", "partition 7: 'a' is no record: a record is bytes"),
    ],
)
def test_an_element_that_does_not_fit_is_named(form: str, item: object, problem: str, tmp_path: Path) -> None:
    """With its partition, and what would help."""
    sink = FolderSink(tmp_path / "out", form)  # type: ignore[arg-type]
    sink.begin()
    with pytest.raises(SinkFailed, match=problem):
        sink.write([item], 7)
    sink.abandon()
    sink.abandon()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """An unknown format, and a file where the folder's parent should be; `file://` is a local folder."""
    with pytest.raises(BadRequest, match="no format 'xml': use text, json or recordio"):
        FolderSink(tmp_path / "out", "xml")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(SinkFailed, match="cannot be made"):
        FolderSink(tmp_path / "file" / "out", "text").begin()
    sink = FolderSink(f"file://{tmp_path}/out", "json")
    sink.begin()
    sink.finish()

    assert (tmp_path / "out").is_dir()


def test_a_folder_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """The error says so, and what was there stays."""
    sink = FolderSink(tmp_path / "out", "text")
    sink.begin()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(SinkFailed, match="out cannot be made"):
        sink.finish()

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
