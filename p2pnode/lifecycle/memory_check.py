"""Compares the memory that the exchange of a model needs with what is free, before any of it is allocated."""

from __future__ import annotations

from overlay.environment import Log
from p2pnode.errors import ExitCode, UserError
from training.budget import budget
from training.settings import ExchangeSettings


def check_memory(available: int | None, values: int, settings: ExchangeSettings, nodes: float, log: Log) -> None:
    """Raise `UserError` if this node's share among `nodes` nodes cannot fit into `available` bytes.

    A share that fits only while other nodes hold theirs is a warning. `available` None: unknown, so nothing is checked.
    Replica and delta are allocated already; outbox and repair log fill later and have limits of their own.
    """
    if available is None:
        return
    share, alone = budget(values, settings, nodes), budget(values, settings, nodes=1)
    needed = share.total - share.shared - share.outbox - share.repair_log
    if needed > available:
        raise UserError(
            f"the exchange of this model takes {needed / 1e6:,.1f} MB more memory, "
            f"and {available / 1e6:,.1f} MB are free",
            hint="give the machine or its container more; replicas = 0 and outer_momentum = 0 need less of it",
            exit_code=ExitCode.TRAINER,
        )
    if alone.total - alone.shared > available:
        log.warning(
            "memory_tight",
            free_bytes=available,
            alone_bytes=alone.total - alone.shared,
            hint="enough while other nodes hold their shares of the model; not for this node alone",
        )
