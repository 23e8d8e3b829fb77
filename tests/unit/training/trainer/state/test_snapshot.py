"""Snapshots of the trainer's own state: content, atomic writing, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.trainers.task_node import TaskNode as Node


def test_integer_buffers_are_in_the_snapshot(tmp_path: Path) -> None:
    """They are the node's own and in no vector, so they are saved with its state."""
    node = Node("Normed")
    node.train(range(1, 3))
    node.save(tmp_path / "state")
    fresh = Node("Normed")

    fresh.runner.restore(tmp_path / "state")

    assert int(fresh.spec.model[1].num_batches_tracked) == 10  # type: ignore[index,union-attr,arg-type]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_another_number_of_gpus_each_has_the_generator_of_its_number(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved on two; a trainer uses the first, on whatever machine it is restored."""
    state = snapshot.random_state() | {"cuda": ["first", "second"]}
    found: dict[int, str] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda saved, number: found.update({number: saved}))

    snapshot.restore_random_state(state)

    assert found == dict(list(enumerate(["first", "second"]))[:count])


def test_a_snapshot_is_read_without_running_anything(tmp_path: Path) -> None:
    """It holds tensors and plain values only."""
    node = Node("Adaptive")
    node.train(range(1, 2))
    node.save(tmp_path / "state")

    assert torch.load(tmp_path / "state", weights_only=True)["format"] == snapshot.FORMAT


@pytest.mark.parametrize("content", [b"", b"no snapshot", None])
def test_a_snapshot_that_does_not_fit_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Junk, and the state of another task, are refused with the path and what to do."""
    path = tmp_path / "state"
    if content is None:
        Node("Line").save(path)
    else:
        path.write_bytes(content)

    with pytest.raises(TrainerFailed, match=str(path)) as failure:
        Node("Normed").runner.restore(path)
    assert failure.value.fatal
    assert "remove the file" in failure.value.hint
