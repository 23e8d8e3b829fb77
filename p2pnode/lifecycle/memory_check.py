"""Compares the memory that a node will need with what is free, before any of it is allocated, and claims its files.

Counted is what comes after the trainer has built its model: shards, buffers, outbox, repair log and checkpoint of this
daemon, gradients and optimiser of its trainer, and the same for each other node on this machine that has not begun.
"""

from __future__ import annotations

from pathlib import Path

from overlay.environment import Log
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from training.budget import budget
from training.exchange.disk_parts import keep_on_disk
from training.exchange.exchange import Exchange
from training.settings import ExchangeSettings


def check_memory(
    available: int | None,
    values: int,
    settings: ExchangeSettings,
    nodes: float,
    log: Log,
    *,
    checkpoints: bool,
    trainer_bytes: int = 0,
    others_here: int = 0,
) -> None:
    """Raise `UserError` if this node among `nodes` nodes, its trainer and `others_here` more like it do not fit into
    `available` bytes.

    A share that fits only while other nodes hold theirs is a warning. `available` None: unknown, so nothing is checked.
    """
    if available is None:
        return
    nodes = max(nodes, 1.0 + others_here)
    needed = budget(values, settings, nodes, checkpoints=checkpoints).to_come + trainer_bytes
    if needed * (1 + others_here) > available:
        others = f", and {others_here} more on this machine as much each" if others_here else ""
        raise UserError(
            f"this node will take {_mb(needed)} more memory ({_mb(needed - trainer_bytes)} for the exchange, "
            f"{_mb(trainer_bytes)} for gradients and optimiser){others}; {_mb(available)} are free",
            hint="give the machine or its container more, or start fewer nodes on it; replicas = 0, "
            "outer_momentum = 0, a smaller log_bytes and checkpoint_s = 0 need less of it, and exchange.on_disk puts "
            "parts of it into files",
            exit_code=ExitCode.TRAINER,
        )
    # Of all numbers of nodes, one or two need most per node.
    most = max(budget(values, settings, count, checkpoints=checkpoints).to_come for count in (1, 2)) + trainer_bytes
    if most * (1 + others_here) > available:
        log.warning(
            "memory_tight",
            free_bytes=available,
            alone_bytes=most,
            hint="enough among as many nodes as there are; not for this node alone or with one other",
        )


async def claim_disk(exchange: Exchange, folder: Path) -> None:
    """Claim the files of `exchange.on_disk` in the state directory. Raises `UserError` where they do not fit."""
    try:
        await keep_on_disk(exchange)
    except OSError as error:
        raise state_directory_unusable(folder, error) from error


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
