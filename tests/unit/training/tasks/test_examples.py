"""The image and the label of a record, or an error that says what the record has instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from p2pnode.training.tasks.batches import image_and_label
from p2pnode.training.tasks.task import TaskError


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
