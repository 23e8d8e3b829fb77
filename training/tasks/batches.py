"""Endless batches over data in memory, shuffled in each epoch and resumable by two numbers.

Also divides a data set among nodes, optionally with classes missing on each, as a function of the labels only. Takes
images and labels from records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pnode.training.tasks.task import TaskError

Indices = npt.NDArray[np.int64]


class ShuffledBatches(Iterator[tuple[Tensor, Tensor]]):
    """Pairs of `inputs[batch, …]` and `labels[batch]`; the order of an epoch is a function of seed and epoch alone.

    Every epoch has the same number of batches; the samples of an incomplete one are left out, others in each epoch.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, batch_size: int, seed: int) -> None:
        if not len(labels):
            raise TaskError("this node has no training data", "see part, parts and lacking in [training.options]")
        self._inputs = inputs
        self._labels = labels
        self._batch_size = min(batch_size, len(labels))
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def _permutation(self) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._epoch]))
        return torch.from_numpy(generator.permutation(len(self._labels)))

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._position + self._batch_size > len(self._labels):
            self._epoch += 1
            self._position = 0
            self._order = self._permutation()
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return self._inputs[chosen], self._labels[chosen]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation()


def lacking_classes(part: int, lacking: int, classes: int = 10) -> list[int]:
    """The classes missing in `part`: shifted by three, so that neighbouring parts lack different ones."""
    return sorted({(3 * part + index) % classes for index in range(lacking)})


def divide(labels: npt.NDArray[np.integer], part: int, parts: int, lacking: int, classes: int = 10) -> Indices:
    """The samples that belong to `part` of `parts`, ascending.

    The samples of each class are divided evenly among the parts that do not lack it: every sample belongs to exactly
    one part. Raises `TaskError` if that is impossible.
    """
    if not 0 <= part < parts:
        raise TaskError(f"part = {part} of parts = {parts} does not exist", f"part goes from 0 to {parts - 1}")
    if not 0 <= lacking < classes:
        raise TaskError(f"lacking = {lacking} leaves no class", f"it goes from 0 to {classes - 1}")
    mine = []
    for label in range(classes):
        holders = [other for other in range(parts) if label not in lacking_classes(other, lacking, classes)]
        if not holders:
            raise TaskError(
                f"with parts = {parts} and lacking = {lacking} no part would hold class {label}",
                "take more parts or let each lack fewer classes",
            )
        if part in holders:
            mine.append(np.flatnonzero(labels == label)[holders.index(part) :: len(holders)])
    return np.sort(np.concatenate(mine)).astype(np.int64)


def image_and_label(example: dict[str, Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], int]:
    """The image, of this shape, and the label, of a record that `p2pnode records pack` wrote. Raises `TaskError`."""
    try:
        return np.ascontiguousarray(example["images"]).reshape(shape), int(example["labels"])
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(map(str, example)) if isinstance(example, dict) else type(example).__name__
        raise TaskError(
            f"a record must have images and labels, an image of {' x '.join(map(str, shape))}; this one has {names}",
            "pack an NPZ file with the arrays images and labels with `p2pnode records pack`",
        ) from error
