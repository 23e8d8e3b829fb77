"""The MNIST files: reading, checksums, downloads."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.tasks import idx
from p2pnode.training.tasks.task import TaskError


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    """Shape and values as they were written."""
    values = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", values)

    got = idx.load(tmp_path, "t10k-images-idx3-ubyte", verify=False, mirrors=())

    assert np.array_equal(got, values)


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """The SHA-256 of the content is compared; the sentence names the file, the hint how to use it all the same."""
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(5))

    with pytest.raises(TaskError, match="is not the MNIST file of that name") as error:
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", mirrors=())
    assert "verify = false" in error.value.hint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an IDX file"),
        (b"<html>not found</html>", "not an IDX file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 1, 2]), "truncated"),
        (b"\x1f\x8b\x08\x00broken", "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    """Empty, a web page, truncated, or with broken compression."""
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)

    with pytest.raises(TaskError, match=reason):
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", verify=False, mirrors=())


def test_missing_files_are_named_with_what_was_tried(tmp_path: Path) -> None:
    """The folder, the file, each mirror with its reason, and what to do; nothing is left behind."""
    mirror = (tmp_path / "nothing_here").as_uri() + "/"

    with pytest.raises(TaskError, match=r"finds no t10k-labels-idx1-ubyte\.gz in .*nothing_here") as error:
        idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", mirrors=[mirror])
    assert "training.data_dir" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_with_another_file_is_refused(tmp_path: Path) -> None:
    """A download whose sum is wrong is not kept."""
    (tmp_path / "mirror").mkdir()
    write_idx(tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz", np.zeros(3))

    with pytest.raises(TaskError, match="its file has another checksum"):
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", mirrors=[(tmp_path / "mirror").as_uri() + "/"])
    assert [path.name for path in tmp_path.iterdir()] == ["mirror"]


def test_a_missing_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mirror is used if the first fails; the downloaded file is kept and used the next time."""
    (tmp_path / "mirror").mkdir()
    source = tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz"
    write_idx(source, np.arange(3))
    monkeypatch.setitem(idx.KNOWN_GZ, "t10k-labels-idx1-ubyte", hashlib.sha256(source.read_bytes()).hexdigest())
    mirrors = [(tmp_path / "gone").as_uri() + "/", (tmp_path / "mirror").as_uri() + "/"]

    first = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=mirrors)
    again = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=())

    assert first.tolist() == again.tolist() == [0, 1, 2]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [source.name]
