"""The loop of a task class that trains on dispatched records; `test_runner` has what it does with its own batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pnode.training.dispatch.recordio import encode_example
from p2pnode.training.tasks.digits import Digits, load_digits
from p2pnode.training.tasks.task import Task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder, StepReport, TrainerFailed
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.record_messages import RecordSource
from tests.harness.builders.record_files import write_records
from tests.harness.trainers.tasks import Line

VALUES = np.arange(40 * 6, dtype=np.float32).reshape(40, 6) / 240


class Decoding(Line):
    """Takes its samples from records of six float32: four inputs, two outputs."""

    batch_size = 8

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(options, **settings)
        self.seen: list[float] = []

    def batches(self) -> Any:
        raise AssertionError("the records are used instead")

    def decode(self, record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.frombuffer(bytearray(record), dtype=torch.float32)
        return values[:4], values[4:]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return super().loss(model, batch)


class Records:
    """A task on the records of a file, with a vector of its own, which stays as it is."""

    def __init__(
        self, kind: type[Task], path: Path, *, passes: int = 0, position: str | None = None, **options: Any
    ) -> None:
        self.task: Any = kind(options, data_dir="", seed=0, node_seed=1, device="cpu")
        self.runner = TaskRunner("test", self.task, self.task.build(), records_options=options)
        source = RecordSource("local", [path.name], str(path.parent), True, passes, 0)
        data = self.runner._turns.data
        data.begin(Start("test", "", options, "cpu", 0, 0, 1, 1, records=source))
        data.restore(position)
        self.runner._loop.open_records()
        total = self.runner.model_vector.layout.total
        self.delta = np.zeros(total, np.float32)
        vector = np.zeros(total, np.float32)
        self.runner.model_vector.read(vector)
        self.runner.use(vector, self.delta)

    def train(self, step: int, local_steps: int) -> StepReport:
        report = self.runner.train(StepOrder(step, local_steps, 1.0, True))
        assert report is not None
        return report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_records(tmp_path / "train.recordio", [row.tobytes() for row in VALUES], 5)


def test_a_turn_ends_early_where_the_records_do(path: Path) -> None:
    """Turns of three batches of eight of 40 records; the last batch that can be had ends the second turn."""
    node = Records(Decoding, path, passes=1)

    first, second = node.train(1, 3), node.train(2, 3)

    assert (first.samples, first.optimizer_steps) == (24, 3)
    assert (second.samples, second.optimizer_steps) == (16, 2)


def test_accumulated_batches_end_where_the_records_do(path: Path) -> None:
    """An optimiser step of three batches takes two, if there are no more now, with the mean of their losses."""

    class InOneBatch(Decoding):
        batch_size = 24

        def model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 2)

    class Accumulating(InOneBatch):
        batch_size = 8

        def build(self) -> Any:
            spec = super().build()
            spec.accumulate = 3
            return spec

    deltas = []
    for kind in (Accumulating, InOneBatch):
        torch.manual_seed(0)
        node = Records(kind, path, passes=1)

        report = node.train(1, 5)

        assert (report.samples, report.optimizer_steps) == (40, 2)
        deltas.append(node.delta)
    np.testing.assert_allclose(*deltas, atol=1e-6)


def test_all_records_are_read_in_each_pass_and_resumed(path: Path, tmp_path: Path) -> None:
    """Every record in each pass, another order in the next, and a saved position goes on."""
    node = Records(Decoding, path)
    for turn in range(1, 8):
        node.train(turn, 1)
    again = Records(Decoding, path, position=node.runner.state()["data"])
    for turn in range(8, 16):
        again.train(turn, 1)

    seen, every = node.task.seen + again.task.seen, sorted(VALUES[:, 0].tolist())
    assert [sorted(seen[at : at + 40]) for at in (0, 40, 80)] == [every] * 3
    assert seen[:40] != seen[40:80]


def test_a_task_without_decode_is_told(path: Path) -> None:
    """The message names the method to add."""
    with pytest.raises(TrainerFailed, match=r"neither decode\(record\) nor"):
        Records(Line, path)


def test_the_built_in_digits_train_on_packed_images(tmp_path: Path) -> None:
    """Rows of the arrays `images` and `labels`, as `p2pnode records pack` writes them, become the task's batches."""
    images, labels = load_digits()
    examples = [encode_example({"images": images[row], "labels": labels[row]}) for row in range(40)]
    node = Records(Digits, write_records(tmp_path / "digits.recordio", examples, 8), batch_size=10)

    report = node.train(1, 4)

    assert (report.samples, report.optimizer_steps) == (40, 4)
    assert report.loss < 3.0
