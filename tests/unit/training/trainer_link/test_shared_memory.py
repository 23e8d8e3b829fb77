"""The shared buffers: both sides see the same values, and too little memory is reported."""

from __future__ import annotations

import os

import numpy as np
import pytest

from p2pnode.training.trainer_link import shared_memory
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.shared_memory import SharedVectors, map_vectors


def test_both_sides_see_the_same_numbers() -> None:
    """What one side writes into a buffer the other side reads, both ways."""
    daemon = SharedVectors(5)
    vector, delta = map_vectors((os.dup(daemon.descriptors[0]), os.dup(daemon.descriptors[1])), 5)

    daemon.vector[:] = np.arange(5)
    delta[:] = -1

    assert vector.tolist() == [0, 1, 2, 3, 4]
    assert daemon.delta.tolist() == [-1] * 5


def test_the_arrays_outlive_the_descriptors() -> None:
    """A caller that kept an array may use it after the buffers' owner has gone."""
    daemon = SharedVectors(3)
    vector = daemon.vector
    del daemon

    vector[:] = 2

    assert vector.sum() == 6


def test_a_machine_without_anonymous_memory_takes_an_unlinked_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memfd_create and posix_fallocate the buffers are a file that has no name any more."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)

    daemon = SharedVectors(1000)

    assert os.fstat(daemon.descriptors[0]).st_nlink == 0
    assert daemon.vector.shape == daemon.delta.shape == (1000,)


def test_too_little_memory_names_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure names needed and available memory, and is fatal."""
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 100_000_000)

    with pytest.raises(TrainerFailed, match=r"2 × 200\.0 MB of memory, and 100\.0 MB are free") as failure:
        SharedVectors(50_000_000)

    assert failure.value.fatal
    assert failure.value.hint


def test_memory_that_cannot_be_claimed_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that only shows when pages are claimed gives the same sentence and closes what was opened."""
    opened: list[int] = []
    closed: list[int] = []
    anonymous_file, close = shared_memory._anonymous_file, os.close
    monkeypatch.setattr(
        shared_memory, "_anonymous_file", lambda name: opened.append(anonymous_file(name)) or opened[-1]
    )
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor))[1])

    def refuse(descriptor: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "claim", refuse)

    with pytest.raises(TrainerFailed, match="No space left on device"):
        SharedVectors(10)
    assert opened == closed != []
