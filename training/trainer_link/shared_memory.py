"""The float32 buffers that daemon and trainers share: `vector`, to the trainer, and `delta`, from it.

The daemon creates them when the first trainer has reported the vector's length, and keeps them across restarts of the
trainer. They have no name in a file system (a memfd, or an unlinked temporary file), so nothing is left behind however
either process ends. All pages are allocated at once: a machine with too little memory fails here, not in training.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from p2pnode.overlay.system import claim, in_thread
from p2pnode.training.trainer_link.interface import TrainerFailed, Vector

_FLOAT32_BYTES = 4


class TrainerMemory(NamedTuple):
    """What one trainer shares with the daemon: `vector` and `delta`, and the descriptors of all its buffers."""

    vector: Vector
    delta: Vector
    descriptors: tuple[int, ...]


class SharedVectors:
    """The daemon's side, for the `trainers` of a node: one `vector` for all, a `delta` for each, and the values of so
    many `leaders`, of the node's and of the swarm's. All are `float32[total]`. `vector`, `delta` and `descriptors` are
    those of the first trainer.

    Allocating takes seconds for gigabytes: construct it outside the event loop. Raises `TrainerFailed`.
    """

    def __init__(self, total: int, trainers: int = 1, leaders: int = 0) -> None:
        names = ["vector", *("leader", "swarm-leader")[:leaders], *["delta"] * trainers]
        descriptors = _files(names, total)
        shared = 1 + leaders
        vector, *self.leaders = [_map(descriptor, total) for descriptor in descriptors[:shared]]
        self.trainers = [
            TrainerMemory(vector, _map(own, total), (descriptors[0], own, *descriptors[1:shared]))
            for own in descriptors[shared:]
        ]
        self.vector, self.delta, self.descriptors = self.trainers[0]
        # The arrays stay valid after the descriptors are closed.
        weakref.finalize(self, _close, tuple(descriptors))


class NodeMemory:
    """The memory of all trainers of a node, allocated when the first of them knows the size of its model."""

    def __init__(self, trainers: int = 1, leaders: int = 0) -> None:
        self._counts = trainers, leaders
        self._vectors: SharedVectors | None = None
        self._one_at_a_time = asyncio.Lock()

    async def of(self, index: int, total: int) -> TrainerMemory:
        """The memory of one trainer. Raises `TrainerFailed`."""
        async with self._one_at_a_time:
            if self._vectors is None:
                self._vectors = await in_thread(SharedVectors, total, *self._counts)
        return self._vectors.trainers[index]

    @property
    def leaders(self) -> list[Vector]:
        """The values of the leaders that there are; once they are allocated."""
        assert self._vectors is not None
        return self._vectors.leaders


def map_vectors(descriptors: tuple[int, ...], total: int) -> tuple[Vector, ...]:
    """The trainer's side: maps the same `vector` and `delta`, and the leaders' values where they follow, all
    `float32[total]`, and closes the descriptors."""
    try:
        return tuple(_map(descriptor, total) for descriptor in descriptors)
    finally:
        _close(descriptors)


def _files(names: Sequence[str], total: int) -> list[int]:
    if total < 1:
        raise TrainerFailed("the model has no trainable parameter", "see requires_grad of its parameters", fatal=True)
    size_bytes, count = total * _FLOAT32_BYTES, len(names)
    available_bytes = available_memory_bytes()
    if available_bytes is not None and count * size_bytes > available_bytes:
        raise _too_little(count, size_bytes, f"{_megabytes(available_bytes)} are free")
    descriptors: list[int] = []
    try:
        for name in names:
            descriptors.append(_anonymous_file(name))
            claim(descriptors[-1], size_bytes)
    except OSError as error:
        _close(tuple(descriptors))
        raise _too_little(count, size_bytes, f"allocating it failed: {error.strerror}") from error
    return descriptors


def available_memory_bytes() -> int | None:
    """Memory this process may still allocate, by the machine and by its control group; None if neither is known."""
    found = [value for value in (_machine_memory_bytes(), _group_memory_bytes()) if value is not None]
    return min(found, default=None)


def _machine_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_memory_bytes() -> int | None:
    """What the limit of the control group (version 2) leaves; reclaimable page cache does not count as used."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics.get("inactive_file", "0")))
    except (OSError, ValueError):
        return None


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"p2pnode-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=f"p2pnode-{name}-") as file:
        return os.dup(file.fileno())


def _map(descriptor: int, total: int) -> Vector:
    return np.frombuffer(mmap.mmap(descriptor, total * _FLOAT32_BYTES), dtype=np.float32)


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _too_little(count: int, size_bytes: int, what: str) -> TrainerFailed:
    return TrainerFailed(
        f"sharing the model with the trainer takes {count} × {_megabytes(size_bytes)} of memory, and {what}",
        "give the machine or its container more memory, or train a smaller model",
        fatal=True,
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
