"""How a trainer and its daemon begin: the model is described, memory is shared, and saved state is restored."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from p2pnode.training.devices.gpus import unused_gpu
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.loading import resolve_device
from p2pnode.training.trainer.pinned import register
from p2pnode.training.trainer.turns import Turns
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello
from p2pnode.training.trainer_link.messages import Hello, Memory, Ready, Start
from p2pnode.training.trainer_link.shared_memory import map_vectors


def join(turns: Turns, start: Start | None = None) -> None:
    """Describe the model to the daemon, whose first message is `start`, or is received here by rank 0. All ranks have
    to call it. Raises `TrainerFailed`, and as the connection does."""
    vector, connection, ranks = turns.model_vector, turns.connection, turns.ranks
    ranks.require_equal(vector.layout.digest(), vector.frozen)
    gpus = {name: identity for found in ranks.gather(vector.gpus) for name, identity in found.items()}
    memory: Memory | None = None
    descriptors: tuple[int, ...] = ()
    if connection is not None:
        start = connection.receive_start() if start is None else start
        memory, descriptors = _greet(turns, connection, start, gpus)
    start, memory = ranks.share((start, memory))
    assert start is not None
    assert memory is not None
    _map(turns, memory, ranks.share_descriptors(descriptors))
    turns.start, turns.device = start, resolve_device(start.device)
    if unused := unused_gpu(start.device, torch.version.cuda or "", is_available=torch.cuda.is_available()):
        turns.warn("gpu_not_used", *unused)
    turns.data.begin(start)
    if start.threads:
        torch.set_num_threads(start.threads)
    if memory.restore:
        turns.restore(turns.rank_states.load(Path(memory.restore)), Path(memory.restore))
    if connection is not None:
        connection.send(Ready())


def _greet(
    turns: Turns, connection: DaemonConnection, start: Start, gpus: dict[str, str]
) -> tuple[Memory, tuple[int, ...]]:
    """Describe the model; returns what the daemon says of the memory, and its descriptors."""
    refuse_ranks(start, turns.ranks.count)
    vector = turns.model_vector
    hello = TrainerHello(
        layout=vector.layout,
        task=turns.task,
        task_version=turns.version,
        frozen_digest=vector.frozen_digest,
        device=str(vector.device),
        pid=os.getpid(),
        host_bytes=turns.given.host_bytes(),
        device_bytes=vector.device_bytes,
        gpus=gpus,
        frozen=vector.frozen,
    )
    connection.send(Hello(hello))
    return connection.receive_memory()


def _map(turns: Turns, memory: Memory, descriptors: tuple[int, ...]) -> None:
    """On all ranks: map the memory, and fill the vector with the model's initial values where that is asked for."""
    vector = turns.model_vector
    shared, delta, *leaders = map_vectors(descriptors, memory.total)
    turns.entry.use(shared, delta)
    turns.devices.follow(tuple(leaders))
    pageable = register([*map(torch.from_numpy, (shared, delta)), *vector.on_host()], vector.device)
    if pageable:
        turns.warn("copies_slow", f"{pageable}: values are copied to the GPU through pageable memory")
    if memory.initialise:
        with turns.loads.exchanging():
            vector.read(shared)
        turns.ranks.gather_numbers(0.0)  # all have written


def refuse_ranks(start: Start, ranks: int) -> None:
    """Raises `TrainerFailed` for a script with ranks of its own on a node with several trainers."""
    if start.device_count > 1 and ranks > 1:
        raise TrainerFailed(
            "training.device starts a process for each device, and this script has ranks of its own (torchrun)",
            "use one of the two: name one device in training.device, or start the script without torchrun",
            fatal=True,
        )
