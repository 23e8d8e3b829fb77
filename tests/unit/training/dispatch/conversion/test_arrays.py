"""Arrays of IDX and NPZ files become records that decode to their rows."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.dispatch.conversion import arrays
from p2pnode.training.dispatch.conversion.arrays import idx_records, npz_records
from p2pnode.training.dispatch.conversion.sources import BadSource, Source
from p2pnode.training.dispatch.recordio import decode_example

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """The array as an IDX file."""
    head = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def put(path: Path, content: bytes, name: str | None = None) -> Source:
    path.write_bytes(content)
    return Source(path, name)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a few rows."""
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 50)


@pytest.mark.parametrize("kind", list(CODES))
def test_rows_of_idx_files_come_back(kind: str, tmp_path: Path) -> None:
    """Each type of IDX gives records with the rows, little-endian, compressed or not."""
    values = (np.arange(7 * 3 * 4) % 100).reshape(7, 3, 4).astype(kind)
    for content in (idx(values), gzip.compress(idx(values))):
        found = [decode_example(record) for record in idx_records([put(tmp_path / "x-images-idx3-ubyte", content)])]
        assert [list(example) for example in found] == [["images"]] * 7
        np.testing.assert_array_equal(np.stack([example["images"] for example in found]), values)
        assert found[0]["images"].dtype == np.dtype(f"<{kind}")


def test_images_and_labels_are_joined(tmp_path: Path) -> None:
    """Several IDX files give one record for each row, with the name of each file or a given one."""
    images, labels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2), np.array([7, 8, 9], np.uint8)
    sources = [
        put(tmp_path / "t10k-images-idx3-ubyte", idx(images)),
        put(tmp_path / "t10k-labels-idx1-ubyte.gz", gzip.compress(idx(labels)), "label"),
    ]
    found = [decode_example(record) for record in idx_records(sources)]

    assert [(example["images"].tolist(), int(example["label"])) for example in found] == [
        (image.tolist(), int(label)) for image, label in zip(images, labels, strict=True)
    ]
    assert type(found[0]["label"]) is np.uint8


GOOD = idx(np.arange(6, dtype=np.uint8).reshape(3, 2))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00\x0a\x01\x00\x00\x00\x01a", "not an IDX file"),
        (b"\x00\x00\x08\x00a", "not an IDX file of at least one dimension"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "ends inside its head"),
        (GOOD[:-3], "ends inside row 1 of 3"),
        (GOOD + b"x", "more values follow those of shape 3×2"),
    ],
)
def test_a_damaged_idx_file_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    """What is no IDX file, or has fewer or more values than its head says, is an error."""
    with pytest.raises(BadSource, match=problem):
        list(idx_records([put(tmp_path / "file", content)]))


def test_arrays_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Different numbers of rows and equal names are errors that name the files."""
    three, two = idx(np.zeros(3, np.uint8)), idx(np.zeros(2, np.uint8))
    with pytest.raises(BadSource, match="b: labels has 2 rows, and images has 3"):
        list(idx_records([put(tmp_path / "a", three, "images"), put(tmp_path / "b", two, "labels")]))
    with pytest.raises(BadSource, match='two arrays are named "x"'):
        list(idx_records([put(tmp_path / "a", three, "x"), put(tmp_path / "b", three, "x")]))


def npz(path: Path, compressed: bool = False, **content: Any) -> Source:
    (np.savez_compressed if compressed else np.savez)(path, **content)
    return Source(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_npz_files_come_back(compressed: bool, tmp_path: Path) -> None:
    """Each array gives its rows under its name, with type and shape, whatever its order in memory; files follow each
    other."""
    content = {
        "image": np.arange(60, dtype=np.float32).reshape(5, 3, 4),
        "columns": np.asfortranarray(np.arange(10, dtype=">i2").reshape(5, 2)),
        "label": np.arange(5, dtype=np.int64),
        "name": np.array(["a", "bb", "", "ö", "e"]),
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
        ({"a": np.zeros((2, 2), "U3")}, "only one text a row"),
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
    whole, data = list(npz_records([source])), bytearray(source.path.read_bytes())
    for position in range(0, len(data), 3):
        data[position] ^= 0x11
        source.path.write_bytes(data)
        data[position] ^= 0x11
        try:
            found = list(npz_records([source]))
        except BadSource:
            continue
        assert [next(iter(decode_example(record).values())).tolist() for record in found] == [
            decode_example(record)["x"].tolist() for record in whole
        ]
