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
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer.attached_swarm import AttachedSwarm
from p2pnode.training.trainer.connection import (
    DaemonConnection,
    DaemonGone,
    ScriptWarnings,
    StopAsked,
    SwarmLost,
    end_with_daemon,
    report_failure,
)
from p2pnode.training.trainer.joining import join
from p2pnode.training.trainer.model.contract import ModelChanged
from p2pnode.training.trainer.model.vector import bare_model
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.script_arguments import ScriptArguments, require_model
from p2pnode.training.trainer.turns import Turns
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed

__all__ = ["AttachedSwarm", "ModelChanged", "NotAttached", "SwarmLost", "attach"]

#: What this process has attached, by the path of its node's socket: at most one entry, for it has one node.
_attached: dict[str, tuple[nn.Module, Turns, AttachedSwarm]] = {}


class NotAttached(TrainingError, RuntimeError):
    """`attach` was called outside of a node, or the daemon refused the script."""


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    state: MutableMapping[str, Any] | None = None,
    *,
    on_load: Callable[[], object] | None = None,
    include_frozen: bool = False,
) -> AttachedSwarm:
    """Join the daemon that started this script; returns with the swarm's weights in `model`.

    `optimizer` is one or several, and so is `scheduler`: each counts optimiser steps and is moved to the swarm's
    position. Together the optimisers hold all that is trained. `state` is saved and restored too: entries with
    `state_dict` and `load_state_dict` by these methods, others as plain values, replaced in the mapping. With
    `include_frozen`, on all nodes, frozen parameters are exchanged too, so that they may be unfrozen at any step.
    `on_load` is called whenever weights were loaded into the model, on all ranks: for an optimiser that steps on copies
    of its own, it copies them there (own-model.md).

    A second call with the same model returns the same swarm, which goes on with the optimisers that are given now.
    Raises `NotAttached`.
    """
    path = os.environ.get(messages.SOCKET_VARIABLE, "")
    if not path:
        raise NotAttached(
            "p2pnode.attach() was called outside of a node: start the script with "
            f"`p2pnode run -- python {Path(sys.argv[0]).name or 'train.py'}`"
        )
    connection: DaemonConnection | None = None
    warnings = ScriptWarnings()
    try:
        ranks = Ranks.find()
        if path in _attached:
            known, turns, swarm = _attached[path]
            connection = turns.connection
            _require_same(known, model)
            turns.take(ScriptArguments.of(optimizer, scheduler, scaler, turns.warn, state, on_load))
            return swarm
        connection = _connect(path) if ranks.is_first else None
        require_model(model)
        given = ScriptArguments.of(optimizer, scheduler, scaler, warnings, state, on_load)
        turns = Turns(model, given, ranks, connection, warnings, include_frozen=include_frozen)
        join(turns)
        turns.take_order()
    except TrainerFailed as failure:
        if connection is not None:
            report_failure(connection, failure)
        raise NotAttached(f"{failure.reason}: {failure.hint}" if failure.hint else failure.reason) from failure
    except (DaemonGone, StopAsked) as gone:
        raise NotAttached(str(gone) or "the p2pnode daemon has ended while the script was starting") from gone
    swarm = AttachedSwarm(turns)
    _attached[path] = bare_model(model), turns, swarm
    return swarm


def _require_same(known: nn.Module, model: nn.Module) -> None:
    """Raises `TrainerFailed` for another model than this process has attached."""
    if bare_model(model) is not known:
        raise TrainerFailed(
            f"this script has attached another model ({type(known).__name__}) before, and a node trains one",
            "attach the same model again, or one module that contains both; to begin anew, start the script again",
            fatal=True,
        )


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
