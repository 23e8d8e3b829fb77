"""The task `text`: learning, and what it evaluates on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.standalone import train_alone


def test_text_learns_a_repeated_sentence(tmp_path: Path) -> None:
    """Bits per byte fall well below those of single bytes; bits are nats over ln 2."""
    (tmp_path / "book.txt").write_text("all nodes are equal, and none is first. " * 100)
    options = {"layers": 1, "width": 32, "heads": 2, "context": 32, "learning_rate": 0.01, "warmup": 5}

    metrics = train_alone("text", options, local_steps=10, steps=4, data_dir=str(tmp_path / "book.txt"))

    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / np.log(2))
    assert metrics["bits_per_byte"] < 2.5


def test_the_last_tenth_of_a_text_is_not_trained_on(tmp_path: Path) -> None:
    """Windows of training come from the first nine tenths."""
    (tmp_path / "book.txt").write_bytes(b"a" * 900 + b"b" * 100)
    task, _ = build_task("text", {"context": 8}, data_dir=str(tmp_path / "book.txt"), seed=0, node_seed=1, device="cpu")
    batches = iter(task.batches())

    seen = torch.cat([torch.cat(next(batches)).flatten() for _ in range(50)])

    assert seen.unique().tolist() == [ord("a")]
