"""Batches of records for a task class that does not know where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from p2pnode.training.dispatch.recordio import encode_example
from p2pnode.training.tasks.digits import Digits, load_digits
from p2pnode.training.tasks.task import TaskError
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records.batches import RecordBatches
from p2pnode.training.trainer.records.task_source import DispatchedTasks, LocalTasks
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import ValuesArrived
from p2pnode.training.trainer_link.record_messages import RecordSource
from tests.harness.builders.record_files import RecordConnection, tasks_of, write_records
from tests.harness.trainers.tasks import Line

VALUES = np.arange(40 * 6, dtype=np.float32).reshape(40, 6) / 240


class Decoding(Line):
    """Takes its samples from records of six float32: four inputs, two outputs."""

    batch_size = 8

    def batches(self) -> Any:
        raise AssertionError("the records are used instead")

    def decode(self, record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.frombuffer(bytearray(record), dtype=torch.float32)
        return values[:4], values[4:]


def runner_of(tasks: Any, kind: type[Line] = Decoding, **options: Any) -> TaskRunner:
    task = kind(options, data_dir="", seed=0, node_seed=1, device="cpu")
    return TaskRunner("test", task, task.build(), records=RecordBatches(task, options, tasks))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_records(tmp_path / "train.recordio", [row.tobytes() for row in VALUES], 5)


def trained(runner: TaskRunner, step: int, local_steps: int = 3, **more: Any) -> Any:
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    runner.model_vector.read(vector)
    runner.use(vector, np.zeros_like(vector))
    return runner.train(StepOrder(step, local_steps, 1.0, True), **more)


def test_a_task_class_trains_on_records_and_reports_them(path: Path) -> None:
    """Turns of three batches of eight; the last turn ends early, where there is no further record now."""
    connection = RecordConnection(tasks_of(path, 2))
    runner = runner_of(DispatchedTasks(cast(DaemonConnection, connection)))
    assert runner.records is not None

    first = trained(runner, 1)
    runner.records.report(1, 1)
    second = trained(runner, 2)
    runner.records.report(2, 2)

    assert (first.samples, first.optimizer_steps) == (24, 3)
    assert (second.samples, second.optimizer_steps) == (16, 2)
    assert connection.trained == {0: 10, 1: 10, 2: 10, 3: 10}


def test_what_is_ready_and_not_trained_is_not_reported(path: Path) -> None:
    """A batch that was prepared for the next step is trained later."""
    connection = RecordConnection(tasks_of(path, 8))
    runner = runner_of(DispatchedTasks(cast(DaemonConnection, connection)))
    assert runner.records is not None
    trained(runner, 1, 2)
    assert runner.records.prepare(wait=False, interrupted=lambda: False)

    runner.records.report(1, 1)

    assert connection.trained == {0: 16}


def test_a_turn_that_waits_for_records_ends_when_it_is_cancelled(path: Path) -> None:
    """Without a record, and without one to come, the order is abandoned as soon as the daemon cancels it."""
    connection = RecordConnection([], ends=True)
    runner = runner_of(DispatchedTasks(cast(DaemonConnection, connection)))
    asked = iter([False, False, True])

    assert trained(runner, 1, interrupted=lambda: next(asked, True)) is None


class Exchanging:
    """A daemon that says after some looks that the values of the last delta are there."""

    def __init__(self) -> None:
        self.looks = self.entered_count = 0

    def next_step(self) -> Any:
        raise AssertionError("a single trainer asks nobody")

    def news(self) -> ValuesArrived | None:
        self.looks += 1
        return ValuesArrived(1) if self.looks == 6 else None

    def entered(self) -> None:
        self.entered_count += 1


def test_a_turn_that_waits_for_records_hands_over_what_has_added_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last records are trained while a delta is exchanged: their master waits for the next delta, and the trainer
    would wait for its master."""
    connection = RecordConnection(tasks_of(path, 8))
    tasks = DispatchedTasks(cast(DaemonConnection, connection))
    monkeypatch.setattr(tasks, "idle", lambda: None)
    runner = runner_of(tasks)
    link = Exchanging()

    assert trained(runner, 1, 3).has_delta
    second = trained(runner, 2, 3, link=link)
    assert (second.optimizer_steps, second.has_delta) == (2, False)
    third = runner.train(StepOrder(3, 3, 1.0, True), link=link)

    assert third is not None
    assert (third.optimizer_steps, third.has_delta, link.entered_count) == (0, True, 1)
    connection.cancelled = True
    assert runner.train(StepOrder(4, 3, 1.0, True), connection.interrupted, link) is None


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
        connection = RecordConnection(tasks_of(path, 8))
        runner = runner_of(DispatchedTasks(cast(DaemonConnection, connection)), kind)

        report = trained(runner, 1, 5)

        assert (report.samples, report.optimizer_steps) == (40, 2)
        deltas.append(runner._delta)
    np.testing.assert_allclose(*deltas, atol=1e-6)


def test_a_task_without_decode_is_told(path: Path) -> None:
    """The message names the method to add."""
    with pytest.raises(TaskError, match=r"neither decode\(record\) nor"):
        runner_of(DispatchedTasks(cast(DaemonConnection, RecordConnection([]))), Line)


def test_local_records_are_all_read_in_each_pass_and_resumed(path: Path) -> None:
    """`source = "local"`: every record in each pass, another order in the next, and a saved position goes on."""
    source = RecordSource("local", [path.name], str(path.parent), True, 3, 0)

    def inputs(runner: TaskRunner, turns: int) -> list[float]:
        seen = []
        assert runner.records is not None
        take = runner.records.take

        def remember() -> Any:
            batch = take()
            seen.extend(batch[0][:, 0].tolist())
            return batch

        runner.records.take = remember  # type: ignore[method-assign]
        for turn in range(turns):
            trained(runner, turn + 1, 1)
            runner.records.report(turn + 1, turn + 1)
        return seen

    runner = runner_of(LocalTasks(source, 5))
    seen = inputs(runner, 7)
    state = runner.state()["data"]
    again = runner_of(LocalTasks(source, 5))
    again._restore_data(state)
    seen += inputs(again, 8)

    every = sorted(VALUES[:, 0].tolist())
    assert [sorted(seen[at : at + 40]) for at in (0, 40, 80)] == [every] * 3
    assert seen[:40] != seen[40:80]


def test_the_built_in_digits_train_on_packed_images(tmp_path: Path) -> None:
    """Rows of the arrays `images` and `labels`, as `p2pnode records pack` writes them, become the task's batches."""
    images, labels = load_digits()
    examples = [encode_example({"images": images[row], "labels": labels[row]}) for row in range(40)]
    path = write_records(tmp_path / "digits.recordio", examples, 8)
    connection = RecordConnection(tasks_of(path, 5))
    task = Digits({"batch_size": 10}, data_dir="", seed=0, node_seed=1, device="cpu")
    records = RecordBatches(task, {}, DispatchedTasks(cast(DaemonConnection, connection)))
    runner = TaskRunner("digits", task, task.build(), records=records)

    report = trained(runner, 1, 4)

    assert (report.samples, report.optimizer_steps) == (40, 4)
    assert report.loss < 3.0
    with pytest.raises(TaskError, match="images and labels"):
        task.from_example({"image": images[0], "labels": labels[0]})
