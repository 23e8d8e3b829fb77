"""`p2pnode records`: what is packed can be listed, checked and printed, and what is wrong is said."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode import cli
from p2pnode.commands import records as command
from p2pnode.training.dispatch.recordio import RecordFile, decode_example, read_index, stack_examples, writer

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str) -> int:
    return cli.main(["records", *arguments])


def records(name: str = "out.recordio") -> list[bytes]:
    with RecordFile(name) as file:
        return list(file)


def everything() -> set[str]:
    return {entry.name for entry in Path().iterdir()}


def test_text_goes_there_and_back(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Lines of several files become records in order; cat --raw prints the lines again."""
    Path("b.txt").write_bytes("zwei\r\ndrei ü".encode())
    Path("a.txt").write_bytes(b"one\n\n")
    Path("c.txt.gz").write_bytes(gzip.compress(b"vier\n"))

    assert run("pack", "*.txt", "c.txt.gz", "--out", "out.recordio") == 0
    assert b"wrote out.recordio: 5 records in 1 chunk, " in capfdbinary.readouterr().out
    assert records() == [b"one", b"", b"zwei", "drei ü".encode(), b"vier"]
    assert run("cat", "out.recordio", "--raw") == 0
    assert capfdbinary.readouterr().out == "one\n\nzwei\ndrei ü\nvier\n".encode()


def test_json_lines_and_npz_are_packed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each format is told by its name, and the answer in JSON says what was written."""
    Path("a.jsonl").write_text('{"x": [1]}\n"text"\n')
    np.savez("a.npz", x=np.eye(3, dtype=np.float32))
    for name, kind, count in (("a.jsonl", "jsonl", 2), ("a.npz", "npz", 3)):
        assert run("pack", name, "-o", f"{kind}.recordio", "--compressor", "gzip", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        path = Path(f"{kind}.recordio")
        assert answer == {
            "schema": 1,
            "format": kind,
            "files": [str(path)],
            "records": count,
            "chunks": 1,
            "bytes": path.stat().st_size,
        }
    assert [decode_example(record) for record in records("jsonl.recordio")] == [{"x": [1]}, "text"]
    assert stack_examples(records("npz.recordio"))["x"].tolist() == np.eye(3).tolist()


def test_sizes_of_chunks_are_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks are cut by bytes and records; index lists all of them."""
    Path("a.txt").write_text("".join(f"{number:03d}\n" for number in range(100)))
    assert run("pack", "a.txt", "-o", "small.recordio", "--chunk-bytes", "30", "--compressor", "none") == 0
    assert {chunk.records for chunk in read_index("small.recordio").chunks} == {10}
    assert run("pack", "a.txt", "-o", "s.recordio", "--records-per-chunk", "9") == 0
    capsys.readouterr()

    assert run("index", "s*.recordio") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:3] == ["s.recordio", "100", "12"]
    assert shown[-1] == "200 records in 22 chunks of 2 files"
    assert run("index", "small.recordio", "--chunks", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert (found["records"], found["chunks"], found["compressors"], found["torn"]) == (100, 10, ["none"], None)
    assert found["places"][1] == {
        "chunk": 1,
        "offset": 90,
        "records": 10,
        "payload_bytes": 70,
        "compressor": "none",
    }
    assert run("index", "small.recordio", "--chunks") == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["small.recordio", "1", "90", "10", "70", "none"]


def test_few_chunks_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of one chunk that many nodes could not share gets a note with the option that helps."""
    Path("a.txt").write_text("x\n" * 100)
    assert run("pack", "a.txt", "-o", "a") == 0
    assert "--records-per-chunk" in capsys.readouterr().err
    assert run("pack", "a.txt", "-o", "b", "--records-per-chunk", "5") == 0
    assert capsys.readouterr().err == ""


def test_records_are_printed_as_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, of all files or of a chunk; as JSON with their place. `test_record_text` has what a line shows."""
    from p2pnode.training.dispatch.recordio import create_records

    with create_records("a", records_per_chunk=2) as out:
        out.write_all(["ü\x1b[31m\nx".encode(), b'{"a": 1}', b"\xff"])
    assert run("cat", "a") == 0
    assert capsys.readouterr().out.splitlines() == ["ü\\x1b[31m\\nx", '{"a": 1}', "ff (1 bytes)"]
    assert run("cat", "a", "--chunk", "0", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"file": "a", "chunk": 0, "record": 0, "bytes": 9, "text": "ü\x1b[31m\nx"},
        {"file": "a", "chunk": 0, "record": 1, "bytes": 8, "value": {"a": 1}},
    ]
    assert run("cat", "a", "a", "--limit", "4") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_torn_chunk_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """check, index and cat say where the file is torn; cat prints the records before."""
    Path("a.txt").write_text("one\ntwo\n")
    assert run("pack", "a.txt", "-o", "out.recordio", "--records-per-chunk", "1") == 0
    data = Path("out.recordio").read_bytes()
    Path("out.recordio").write_bytes(data[:-1])
    capsys.readouterr()

    assert run("check", "out.recordio") == 13
    shown = capsys.readouterr()
    assert "out.recordio: damaged, 1 record in 1 good chunk" in shown.out
    assert f"chunk 1, offset {len(data) // 2}" in shown.err
    assert run("index", "out.recordio") == 0
    assert f"torn at offset {len(data) // 2}" in capsys.readouterr().out
    assert run("cat", "out.recordio") == 13
    assert capsys.readouterr().out == "one\n"


def test_check_lists_all_damage(capsys: pytest.CaptureFixture[str]) -> None:
    """Every damaged chunk of every file is listed, and the good ones are counted."""
    Path("a.txt").write_text("".join(f"line {number}\n" for number in range(6)))
    assert run("pack", "a.txt", "-o", "a.recordio", "--records-per-chunk", "2", "--compressor", "none") == 0
    assert run("pack", "a.txt", "-o", "b.recordio") == 0
    data = bytearray(Path("a.recordio").read_bytes())
    data[25] ^= 1
    data[-1] ^= 1
    Path("a.recordio").write_bytes(data)
    capsys.readouterr()

    assert run("check", "a.recordio", "b.recordio", "--json") == 13
    answer = json.loads(capsys.readouterr().out)
    assert not answer["whole"]
    assert [(each["records"], len(each["problems"])) for each in answer["files"]] == [(2, 2), (6, 0)]
    assert [each["chunk"] for each in answer["files"][0]["problems"]] == [0, 2]
    assert run("check", "b.recordio") == 0
    assert capsys.readouterr().out == "b.recordio: whole, 6 records in 1 good chunk\n"
    assert run("cat", "a.recordio") == 13
    assert "chunk 0, offset 0: the checksum of the payload is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["pack", "gone.txt", "-o", "o"], 13, "gone.txt: it cannot be read: No such file or directory"),
        (["pack", "*.tif", "-o", "o"], 13, "*.tif: no file fits this pattern"),
        (["pack", "notes", "-o", "o"], 13, "notes: its name does not tell its format"),
        (["pack", "notes", "-o", "o", "--format", "npz"], 13, "notes: it cannot be read as NPZ"),
        (["pack", "notes", "-o", "o", "--format", "jsonl"], 13, "notes: line 1: it is not JSON"),
        (["pack", "late.txt", "-o", "o"], 13, "late.txt: line 3: byte 1 of it (0xff) is not UTF-8"),
        (["pack", "empty.txt", "-o", "o"], 13, "the sources have no record"),
        (["pack", "a.txt", "-o", "old"], 7, "old exists already"),
        (["pack", "a.txt", "-o", "absent/o"], 7, "cannot write absent/o: No such file or directory"),
        (["pack", "a.txt", "-o", "o", "--chunk-bytes", "many"], 2, '"many" is not a size'),
        (["pack", "a.txt", "-o", "o", "--chunk-bytes", "1G"], 2, "it must be from 1 to 134217728"),
        (["pack", "a.txt", "b.jsonl", "-o", "o"], 13, "b.jsonl: it is jsonl, and a.txt is text"),
        (["index", "gone"], 13, "gone: No such file or directory"),
        (["check", "."], 13, "Is a directory"),
        (["cat", "notes"], 13, "notes: chunk 0, offset 0: the last 8 bytes are not a chunk"),
        (["cat", "old", "--chunk", "5"], 2, "old has 0 chunks: there is no chunk 5"),
        (["cat", "old", "--raw", "--json"], 2, "exclude each other"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_left(
    arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad sources, targets and options are an error with its exit code, and no file, draft or change is left."""
    for name, content in (
        ("notes", b"my notes"),
        ("a.txt", b"a\n"),
        ("late.txt", b"a\nb\n\xff\n"),
        ("empty.txt", b""),
        ("old", b""),
    ):
        Path(name).write_bytes(content)
    before = everything()

    assert run(*arguments) == code
    assert problem in capsys.readouterr().err
    assert everything() == before
    assert (Path("notes").read_bytes(), Path("old").read_bytes()) == (b"my notes", b"")


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """When the disk is full in the middle, the error says so and neither a file nor a part of one is left."""
    Path("a.txt").write_text("".join(f"line {number}\n" for number in range(100)))
    assert run("pack", "a.txt", "-o", "old.recordio") == 0
    old = Path("old.recordio").read_bytes()
    written = 0

    def full(self: Any, payload: bytes, *_rest: Any) -> bytes:
        nonlocal written
        written += len(payload)
        if written > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return payload

    monkeypatch.setattr(writer, "compress", lambda payload, _compressor: full(None, payload))
    options = ["--compressor", "none", "--records-per-chunk", "10", "--force"]
    assert run("pack", "a.txt", "-o", "old.recordio", *options) == 7
    assert "No space left on device" in capsys.readouterr().err
    assert everything() == {"a.txt", "old.recordio"}
    assert Path("old.recordio").read_bytes() == old


def test_an_interrupted_pack_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle ends with the code of a shell and leaves nothing."""
    Path("a.txt").write_text("a\nb\n")

    def interrupted(source: Any) -> Iterator[bytes]:
        yield b"a"
        raise KeyboardInterrupt

    monkeypatch.setattr("p2pnode.training.dispatch.conversion.text_records", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        assert run("pack", "a.txt", "-o", "new.recordio") == 130
    assert everything() == {"a.txt"}


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion that takes longer than the interval says how many records it has."""
    monkeypatch.setattr(command, "_PROGRESS_S", 0.0)
    Path("a.txt").write_text("x\n" * 2500)

    assert run("pack", "a.txt", "-o", "o", "--records-per-chunk", "100") == 0
    assert capsys.readouterr().err.splitlines() == ["note: 1000 records so far", "note: 2000 records so far"]
