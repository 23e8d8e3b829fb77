"""`p2pnode.attach`: makes a user's own training loop a trainer of the swarm.

    swarm = p2pnode.attach(model, optimizer, scheduler)
    while not swarm.done:
        for batch in loader:
            ...                       # forward, backward, optimizer.step(), scheduler.step()
            swarm.step(samples=len(batch), loss=loss)
            if swarm.done:
                break

`attach` restores saved state, and returns when the model holds the swarm's weights. What the script calls afterwards is
in `training.trainer.attached_swarm`. The script is started with `p2pnode run -- python train.py`. Under torchrun every
rank makes the same calls; only rank 0 is connected (`Ranks`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from training.errors import TrainingError
from training.trainer.attached_swarm import AttachedSwarm, SwarmLost
from training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon, report_failure
from training.trainer.ranks import Ranks
from training.trainer_link import messages
from training.trainer_link.interface import TrainerFailed

__all__ = ["AttachedSwarm", "NotAttached", "SwarmLost", "attach"]


class NotAttached(TrainingError, RuntimeError):
    """`attach` was called outside of a node, or the daemon refused the script."""


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    state: MutableMapping[str, Any] | None = None,
) -> AttachedSwarm:
    """Join the daemon that started this script; returns with the swarm's weights in `model`.

    `scheduler` counts optimiser steps and is moved to the swarm's position. `state` is saved and restored too: entries
    with `state_dict` and `load_state_dict` by these methods, others as plain values, replaced in the mapping. Raises
    `NotAttached`.
    """
    path = os.environ.get(messages.SOCKET_VARIABLE, "")
    if not path:
        raise NotAttached(
            "p2pnode.attach() was called outside of a node: start the script with "
            f"`p2pnode run -- python {Path(sys.argv[0]).name or 'train.py'}`"
        )
    connection: DaemonConnection | None = None
    try:
        ranks = Ranks.find()
        connection = _connect(path) if ranks.is_first else None
        own = state if state is not None else {}
        swarm = AttachedSwarm(model, optimizer, scheduler, scaler, own, ranks, connection)
        swarm._open()  # noqa: SLF001 - the only place that constructs one
    except TrainerFailed as failure:
        if connection is not None:
            report_failure(connection, failure)
        raise NotAttached(f"{failure.reason}: {failure.hint}" if failure.hint else failure.reason) from failure
    except (DaemonGone, StopAsked) as gone:
        raise NotAttached("the p2pnode daemon has ended while the script was starting") from gone
    return swarm


def _connect(path: str) -> DaemonConnection:
    try:
        connection = DaemonConnection.connect(path)
    except OSError as error:
        raise NotAttached(
            f"no p2pnode daemon listens at {path} ({error.strerror}): it has ended, or another process of this "
            "script has attached already; under torchrun call torch.distributed.init_process_group() first"
        ) from error
    end_with_daemon(signal.SIGTERM)
    return connection
