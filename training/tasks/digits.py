"""The task `digits`: 1,797 real 8×8 images of handwritten digits, bundled; a small network; seconds to train.

The images are UCI's "Optical Recognition of Handwritten Digits" (`data/LICENSE-digits.txt`). Every fifth one is a test
image: 1,437 for training and 360 for the test, the same on every node.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.batches import ShuffledBatches, divide, image_and_label
from p2pnode.training.tasks.task import TaskError, TrainSpec, read_options

DATA = Path(__file__).with_name("data") / "digits.csv.gz"
_TEST_EVERY = 5

#: Pixels range from 0 to 16. The network gets 0 to 2, a standard deviation of about one, and learns fastest so.
_SCALE = 8.0


class DigitsOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`part` of `parts` trains on its own share; it lacks `lacking` of the ten classes."""

    part: Annotated[int, Meta(ge=0)] = 0
    parts: Annotated[int, Meta(ge=1)] = 1
    lacking: Annotated[int, Meta(ge=0, le=9)] = 0
    batch_size: Annotated[int, Meta(ge=1)] = 32
    hidden: Annotated[int, Meta(ge=1)] = 256
    learning_rate: Annotated[float, Meta(gt=0)] = 0.005


class Digits:
    """A multi-layer perceptron on the bundled images; `evaluate` gives accuracy and loss over the 360."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(DigitsOptions, options, "digits")
        self._device = torch.device(device)
        self._node_seed = node_seed
        images, labels = load_digits(Path(data_dir) if data_dir else DATA)
        test = np.arange(len(labels)) % _TEST_EVERY == 0
        own = divide(labels[~test], self._options.part, self._options.parts, self._options.lacking)
        self._train = (self._tensor(images[~test][own]), self._tensor(labels[~test][own]))
        self._test = (self._tensor(images[test]), self._tensor(labels[test]))

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def build(self) -> TrainSpec:
        hidden = self._options.hidden
        model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(self._device)
        return TrainSpec(model, torch.optim.AdamW(model.parameters(), lr=self._options.learning_rate))

    @property
    def batch_size(self) -> int:
        """Of dispatched records too."""
        return self._options.batch_size

    def from_example(self, example: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """A sample of a dispatched record with an `images` of 64 values from 0 to 2, and `labels`."""
        image, label = image_and_label(example, (64,))
        return torch.from_numpy(image.astype(np.float32)), torch.tensor(label)

    def batches(self) -> ShuffledBatches:
        return ShuffledBatches(*self._train, self._options.batch_size, self._node_seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = (part.to(self._device) for part in batch)
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        images, labels = self._test
        scores = model(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        return {"accuracy": float(accuracy), "loss": float(functional.cross_entropy(scores, labels))}, len(labels)


def load_digits(path: Path = DATA) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Images `float32[1797, 64]` from 0 to 2, and digits `int64[1797]`. Raises `TaskError`."""
    if path.is_dir():
        path /= DATA.name
    try:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    except FileNotFoundError as error:
        raise TaskError(
            f"the task digits finds no file {path}", "leave training.data_dir empty to use the bundled images"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        raise TaskError(f"{path} is not the digits' file: {error}", "leave training.data_dir empty") from error
    if table.ndim != 2 or table.shape[1] != 65:
        raise TaskError(f"{path} is not the digits' file: 65 columns are expected", "leave training.data_dir empty")
    return table[:, :64] / np.float32(_SCALE), table[:, 64].astype(np.int64)
