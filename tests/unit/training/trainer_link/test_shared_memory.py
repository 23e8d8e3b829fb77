"""The shared buffers: both sides see the same values, and too little memory is reported."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from p2pnode.training.trainer_link import shared_memory
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.shared_memory import NodeMemory, SharedVectors, map_vectors
from tests.harness.runner.stories import run_by


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


@run_by(asyncio.run)
async def test_the_memory_of_all_trainers_is_made_once() -> None:
    """However many ask for it at the same time: one vector, a delta for each, and the leaders' values."""
    memory = NodeMemory(3, leaders=2)
    found = await asyncio.gather(*(memory.of(index, 8) for index in range(3)))
    found[0].vector[3] = 5.0
    found[1].delta[:] = 7.0
    assert [one.vector[3] for one in found] == [5.0] * 3
    assert [one.delta[0] for one in found] == [0.0, 7.0, 0.0]
    assert [one.size for one in memory.leaders] == [8, 8]
    # The descriptors: the vector, the own delta, the leaders.
    assert [len(one.descriptors) for one in found] == [4] * 3
    assert len({one.descriptors[1] for one in found}) == 3
    assert len({(one.descriptors[0], *one.descriptors[2:]) for one in found}) == 1


@run_by(asyncio.run)
async def test_memory_that_could_not_be_made_is_asked_for_again() -> None:
    """A model without values is the failure of that start alone, and would fail in the same way again."""
    memory = NodeMemory(2)
    for total in (0, -1):
        with pytest.raises(TrainerFailed, match="no trainable parameter") as failed:
            await memory.of(0, total)
        assert failed.value.fatal
    assert (await memory.of(1, 8)).delta.dtype == np.float32
