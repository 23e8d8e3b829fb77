"""The task `mnist`: the network of the PSP chapter on the 70,000 images of 28×28.

    input 28×28, normalisation (decay 0.9), convolution 5×5 with 32 maps, ReLU, max pooling 2×2, dropout 0.1,
    fully connected 1024, ReLU, linear 10, softmax

The normalisation is batch normalisation; its running mean and variance are buffers in the vector. The softmax is part
of the loss, cross entropy. The files are read from `training.data_dir`; see `training.tasks.idx`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks import idx
from p2pnode.training.tasks.batches import ShuffledBatches, divide, image_and_label
from p2pnode.training.tasks.task import TaskError, TrainSpec, read_options

_BRIGHTEST = 255.0
_EVALUATION_BATCH = 500


class MnistOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`part` of `parts` trains on its own share; it lacks `lacking` of the ten classes.

    `eval_samples` of the 10,000 test images are evaluated, or all with 0. `verify` checks the files' checksums, and
    `fetch` allows downloading missing ones.
    """

    part: Annotated[int, Meta(ge=0)] = 0
    parts: Annotated[int, Meta(ge=1)] = 1
    lacking: Annotated[int, Meta(ge=0, le=9)] = 0
    batch_size: Annotated[int, Meta(ge=1)] = 64
    learning_rate: Annotated[float, Meta(gt=0)] = 0.001
    optimizer: Annotated[str, Meta(pattern="^(adamw|sgd)$")] = "adamw"
    eval_samples: Annotated[int, Meta(ge=0)] = 0
    verify: bool = True
    fetch: bool = True


class Mnist:
    """The chapter's network; `evaluate` gives accuracy and loss on the test images."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(MnistOptions, options, "mnist")
        self._device = torch.device(device)
        self._node_seed = node_seed
        folder = Path(data_dir) if data_dir else default_folder()
        if data_dir and not folder.is_dir():
            raise TaskError(
                f"training.data_dir = {folder} is not a folder",
                "name the folder with the four MNIST files, or leave it empty to have them fetched",
            )
        images, labels = self._load(folder, "train")
        own = divide(labels, self._options.part, self._options.parts, self._options.lacking)
        # Bytes take a quarter of the memory of floats; each batch is scaled when it is used.
        self._train = (self._tensor(images[own]), self._tensor(labels[own].astype(np.int64)))
        images, labels = self._load(folder, "t10k")
        count = self._options.eval_samples or len(labels)
        self._test = (self._tensor(images[:count]), self._tensor(labels[:count].astype(np.int64)))

    def _load(self, folder: Path, kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        mirrors = idx.MIRRORS if self._options.fetch else ()
        images = idx.load(folder, f"{kind}-images-idx3-ubyte", verify=self._options.verify, mirrors=mirrors)
        labels = idx.load(folder, f"{kind}-labels-idx1-ubyte", verify=self._options.verify, mirrors=mirrors)
        if len(images) != len(labels) or images.shape[1:] != (28, 28):
            raise TaskError(f"images and labels of {kind} in {folder} do not match", "fetch them again")
        return images, labels

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self._device)

    def build(self) -> TrainSpec:
        model = network().to(self._device)
        rate = self._options.learning_rate
        if self._options.optimizer == "sgd":
            return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=rate))
        return TrainSpec(model, torch.optim.AdamW(model.parameters(), lr=rate, fused=True))

    @property
    def batch_size(self) -> int:
        """Of dispatched records too."""
        return self._options.batch_size

    def from_example(self, example: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """A sample of a dispatched record with an `images` of 28×28 bytes, and `labels`."""
        image, label = image_and_label(example, (28, 28))
        return torch.from_numpy(image), torch.tensor(label)

    def batches(self) -> ShuffledBatches:
        return ShuffledBatches(*self._train, self._options.batch_size, self._node_seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = (part.to(self._device) for part in batch)
        return functional.cross_entropy(model(_scaled(images)), labels)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        images, labels = self._test
        right, loss = 0, 0.0
        for start in range(0, len(labels), _EVALUATION_BATCH):
            wanted = labels[start : start + _EVALUATION_BATCH]
            scores = model(_scaled(images[start : start + _EVALUATION_BATCH]))
            right += int((scores.argmax(1) == wanted).sum())
            loss += float(functional.cross_entropy(scores, wanted, reduction="sum"))
        return {"accuracy": right / len(labels), "loss": loss / len(labels)}, len(labels)


def network() -> nn.Sequential:
    """`float32[batch, 1, 28, 28]` to scores `float32[batch, 10]`; 6.4 million parameters."""
    return nn.Sequential(
        nn.BatchNorm2d(1, momentum=0.1),  # the chapter's decay of 0.9
        nn.Conv2d(1, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def default_folder() -> Path:
    """The folder for downloads if none is configured."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "p2pnode" / "mnist"


def _scaled(images: Tensor) -> Tensor:
    return images.unsqueeze(1).float() / _BRIGHTEST
