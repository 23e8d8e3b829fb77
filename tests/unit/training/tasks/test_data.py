"""Batches, the division of data among nodes, and the MNIST files."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from training.tasks import idx
from training.tasks.batches import ShuffledBatches, divide, lacking_classes
from training.tasks.digits import load_digits
from training.tasks.task import TaskError


@pytest.mark.parametrize(("parts", "lacking"), [(1, 0), (3, 0), (4, 3), (6, 3), (10, 5)])
def test_every_sample_belongs_to_exactly_one_part(parts: int, lacking: int) -> None:
    """The parts are disjoint and together the whole, and each lacks its own classes."""
    _, labels = load_digits()

    shares = [divide(labels, part, parts, lacking) for part in range(parts)]

    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    for part, share in enumerate(shares):
        assert set(labels[share]) == set(range(10)) - set(lacking_classes(part, lacking))


def test_each_class_is_dealt_out_evenly() -> None:
    """The parts that hold a class hold equally much of it, to one sample."""
    _, labels = load_digits()
    shares = [divide(labels, part, 4, 3) for part in range(4)]

    for label in range(10):
        counts = [
            int((labels[share] == label).sum())
            for part, share in enumerate(shares)
            if label not in lacking_classes(part, 3)
        ]
        assert max(counts) - min(counts) <= 1


def test_the_classes_lacked_are_three_apart() -> None:
    """(3·part + j) mod 10."""
    assert [lacking_classes(part, 3) for part in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]


@pytest.mark.parametrize(
    ("part", "parts", "lacking", "reason"),
    [(4, 4, 0, "part = 4 of parts = 4"), (0, 1, 10, "leaves no class"), (0, 1, 3, "no part would hold class 0")],
)
def test_a_division_that_cannot_be_is_refused(part: int, parts: int, lacking: int, reason: str) -> None:
    """A part that does not exist, and classes that nobody would hold."""
    with pytest.raises(TaskError, match=reason):
        divide(np.arange(10), part, parts, lacking)


def test_batches_go_through_everything_in_a_new_order_each_epoch() -> None:
    """An epoch has each sample at most once; the next one has another order; the seed decides both."""
    data = torch.arange(10)

    batches = ShuffledBatches(data, data, 5, seed=4)
    first, second, third = (torch.cat([next(batches)[0], next(batches)[0]]) for _ in range(3))
    again = next(ShuffledBatches(data, data, 5, seed=4))[0]

    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(third.tolist()) == list(range(10))
    assert first.tolist() != second.tolist() != third.tolist()
    assert again.tolist() == first[:5].tolist()


def test_batches_resume_where_they_were() -> None:
    """Two numbers restore the position, in the middle of any epoch."""
    data = torch.arange(10)
    batches, resumed = ShuffledBatches(data, data, 3, seed=4), ShuffledBatches(data, data, 3, seed=4)
    for _ in range(5):
        next(batches)

    resumed.load_state_dict(batches.state_dict())

    assert [next(resumed)[0].tolist() for _ in range(5)] == [next(batches)[0].tolist() for _ in range(5)]


def test_a_share_smaller_than_a_batch_is_one_batch() -> None:
    """Few data do not stop a node; none at all do."""
    data = torch.arange(3)

    assert len(next(ShuffledBatches(data, data, 32, seed=1))[0]) == 3
    with pytest.raises(TaskError, match="no training data"):
        ShuffledBatches(data[:0], data[:0], 32, seed=1)


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
    """Empty, a web page, cut off, or not to be decompressed."""
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


def test_a_mirror_with_another_file_is_not_believed(tmp_path: Path) -> None:
    """A download whose sum is wrong is not kept."""
    (tmp_path / "mirror").mkdir()
    write_idx(tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz", np.zeros(3))

    with pytest.raises(TaskError, match="its file has another checksum"):
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", mirrors=[(tmp_path / "mirror").as_uri() + "/"])
    assert [path.name for path in tmp_path.iterdir()] == ["mirror"]


def test_a_missing_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mirror is asked when the first fails; what was fetched is kept and used the next time."""
    (tmp_path / "mirror").mkdir()
    source = tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz"
    write_idx(source, np.arange(3))
    monkeypatch.setitem(idx.KNOWN_GZ, "t10k-labels-idx1-ubyte", hashlib.sha256(source.read_bytes()).hexdigest())
    mirrors = [(tmp_path / "gone").as_uri() + "/", (tmp_path / "mirror").as_uri() + "/"]

    first = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=mirrors)
    again = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=())

    assert first.tolist() == again.tolist() == [0, 1, 2]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [source.name]
