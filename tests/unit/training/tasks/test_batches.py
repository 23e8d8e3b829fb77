"""Endless batches, and the division of data among nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from p2pnode.training.tasks.batches import ShuffledBatches, divide, image_and_label, lacking_classes
from p2pnode.training.tasks.digits import load_digits
from p2pnode.training.tasks.task import TaskError
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import TrainerFailed


@pytest.mark.parametrize(("parts", "lacking"), [(1, 0), (3, 0), (4, 3), (6, 3), (10, 5)])
def test_every_sample_belongs_to_exactly_one_part(parts: int, lacking: int) -> None:
    """The parts are disjoint and together the whole, and each lacks its own classes."""
    _, labels = load_digits()

    shares = [divide(labels, part, parts, lacking) for part in range(parts)]

    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    for part, share in enumerate(shares):
        assert set(labels[share]) == set(range(10)) - set(lacking_classes(part, lacking))


def test_each_class_is_divided_evenly() -> None:
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
    """A part that does not exist, and classes that no part would hold."""
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
    """A node can train on few samples, but not on none."""
    data = torch.arange(3)

    assert len(next(ShuffledBatches(data, data, 32, seed=1))[0]) == 3
    with pytest.raises(TaskError, match="no training data"):
        ShuffledBatches(data[:0], data[:0], 32, seed=1)


def test_the_image_has_the_shape_that_the_task_wants() -> None:
    """Whatever shape it was packed in; its bytes are contiguous, and the label is an int."""
    packed = np.arange(12, dtype=np.uint8).reshape(4, 3).T
    image, label = image_and_label({"images": packed, "labels": np.uint8(7)}, (2, 6))
    np.testing.assert_array_equal(image, packed.reshape(2, 6))
    assert image.flags.c_contiguous
    assert (image.dtype, label, type(label)) == (np.uint8, 7, int)


@pytest.mark.parametrize(
    ("example", "has"),
    [
        ({"images": np.zeros(4), "label": 1}, "this one has images, label"),
        ({"images": np.zeros(5), "labels": 1}, "this one has images, labels"),
        ({"images": np.zeros(4), "labels": "seven"}, "this one has images, labels"),
        ({"images": np.zeros(4), "labels": None}, "this one has images, labels"),
        ({}, "this one has "),
        (b"raw bytes", "this one has bytes"),
        (None, "this one has NoneType"),
    ],
)
def test_any_other_record_says_what_it_has_and_what_to_do(example: Any, has: str) -> None:
    """The names of a record of values, or the type of any other; the hint names the command that packs a good one."""
    with pytest.raises(TaskError) as failure:
        image_and_label(example, (2, 2))
    assert str(failure.value).startswith("a record must have images and labels, an image of 2 x 2; ")
    assert str(failure.value).endswith(has)
    assert "p2pnode records pack" in failure.value.hint


# -- options of the built-in tasks that are refused


def build(task: str, options: dict[str, Any], data_dir: str = "") -> TaskRunner:
    return TaskRunner(task, *build_task(task, options, data_dir=data_dir, seed=0, node_seed=1, device="cpu"))


@pytest.mark.parametrize(
    ("task", "options", "data_dir", "reason"),
    [
        ("digits", {"parts": 4, "lackign": 3}, "", "unknown field `lackign`"),
        ("digits", {"part": "one"}, "", "Expected `int`"),
        ("digits", {"part": 7, "parts": 4}, "", "part = 7 of parts = 4"),
        ("digits", {}, "/nowhere/digits", "finds no file /nowhere/digits"),
        ("mnist", {}, "/nowhere/mnist", "training.data_dir = /nowhere/mnist is not a folder"),
        ("mnist", {"optimizer": "lion"}, "", "optimizer"),
        ("text", {}, "", "training.data_dir is empty"),
        ("text", {}, "/nowhere/book.txt", "finds no file /nowhere/book.txt"),
        ("text", {}, "/", "is a folder"),
        ("text", {"width": 10, "heads": 3}, "", "cannot be divided"),
        ("text", {"context": 100000}, __file__, "too few"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    task: str, options: dict[str, Any], data_dir: str, reason: str
) -> None:
    """Misspelt options, impossible values and missing files; each has a hint."""
    with pytest.raises(TrainerFailed) as failure:
        build(task, options, data_dir)

    assert reason in failure.value.reason
    assert failure.value.hint
    assert failure.value.fatal
