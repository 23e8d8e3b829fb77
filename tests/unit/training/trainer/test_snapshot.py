"""Snapshots of the trainer's own state: content, atomic writing, and files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.trainer import snapshot
from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner
from training.trainer.snapshot import CannotWrite
from training.trainer_link.interface import StepOrder, TrainerFailed


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums over threads are not reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Node:
    """A task with a vector of its own; deltas are added as they are."""

    def __init__(self, kind: str, node_seed: int = 11, **options: Any) -> None:
        self.warnings: list[str] = []
        self.beats: list[int] = []
        task, spec = build_task(
            f"tests.harness.tasks:{kind}", options, data_dir="", seed=3, node_seed=node_seed, device="cpu"
        )
        self.spec = spec
        self.runner = TaskRunner(
            kind, task, spec, progress=self.beats.append, warn=lambda event, _: self.warnings.append(event)
        )
        self.vector = np.zeros(self.runner.model_vector.layout.total, np.float32)
        self.delta = np.zeros_like(self.vector)
        self.runner.model_vector.read(self.vector)

    def train(self, steps: range, local_steps: int = 5) -> list[Any]:
        reports = []
        for step in steps:
            reports.append(self.runner.train(StepOrder(step, local_steps, 1.0, True), self.vector, self.delta))
            self.vector += self.delta
        return reports


def test_integer_buffers_are_in_the_snapshot(tmp_path: Path) -> None:
    """They are the node's own and in no vector, so they are saved with its state."""
    node = Node("Normed")
    node.train(range(1, 3))
    node.runner.save(tmp_path / "state")
    fresh = Node("Normed")

    fresh.runner.restore(tmp_path / "state")

    assert int(fresh.spec.model[1].num_batches_tracked) == 10  # type: ignore[index,union-attr,arg-type]


def test_a_snapshot_is_read_without_running_anything(tmp_path: Path) -> None:
    """It holds tensors and plain values only."""
    node = Node("Adaptive")
    node.train(range(1, 2))
    node.runner.save(tmp_path / "state")

    assert torch.load(tmp_path / "state", weights_only=True)["format"] == snapshot.FORMAT


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """The sentence names the path; the old file stays and no half-written one is left."""
    node = Node("Plain")
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CannotWrite, match="could not be written"):
        node.runner.save(tmp_path / "file" / "state")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("content", [b"", b"no snapshot", None])
def test_a_snapshot_that_does_not_fit_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Junk, and the state of another task, are refused with the path and what to do."""
    path = tmp_path / "state"
    if content is None:
        Node("Line").runner.save(path)
    else:
        path.write_bytes(content)

    with pytest.raises(TrainerFailed, match=str(path)) as failure:
        Node("Normed").runner.restore(path)
    assert failure.value.fatal
    assert "remove the file" in failure.value.hint
