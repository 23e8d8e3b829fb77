"""Whether the exchange of a model fits into free memory."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.memory_check import check_memory
from tests.harness.environment.simulated import NoLog
from training.budget import budget
from training.settings import ExchangeSettings

VALUES = 1_000_000
NODES = 8.0
SETTINGS = ExchangeSettings()


class Warnings(NoLog):
    """Keeps the names of warnings."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_fields: Any) -> None:
        self.events.append(event)


def events(available: int | None, *, trainer_bytes: int = 0, others_here: int = 0) -> list[str]:
    log = Warnings()
    check_memory(
        available,
        VALUES,
        SETTINGS,
        NODES,
        log,
        checkpoints=True,
        trainer_bytes=trainer_bytes,
        others_here=others_here,
    )
    return log.events


def needed(nodes: float) -> int:
    """All that is not allocated yet: log, outbox, buffers and checkpoint are in it."""
    share = budget(VALUES, SETTINGS, nodes)
    exchange = (share.residual, share.owned, share.backed, share.published, share.outbox, share.repair_log)
    parts = (*exchange, share.buffers, share.checkpoint, share.base)
    assert min(parts) > 0
    return sum(parts)


@pytest.mark.parametrize(("trainer_bytes", "others_here"), [(0, 0), (16_000_000, 0), (0, 1), (16_000_000, 3)], ids=str)
def test_what_does_not_fit_is_refused(trainer_bytes: int, others_here: int) -> None:
    """One byte too little is an error with the trainer's exit code; exactly enough is none. The optimiser of the
    trainer is counted before it exists, and so are the other nodes on the machine that have not begun."""
    enough = (needed(NODES) + trainer_bytes) * (1 + others_here)
    events(enough, trainer_bytes=trainer_bytes, others_here=others_here)

    with pytest.raises(UserError, match="are free") as refused:
        events(enough - 1, trainer_bytes=trainer_bytes, others_here=others_here)

    assert refused.value.exit_code == ExitCode.TRAINER
    assert ("more on this machine" in str(refused.value)) == (others_here > 0)
    assert "checkpoint_s" in refused.value.hint


def test_a_share_that_fits_only_beside_others_is_a_warning() -> None:
    """With memory for its share alone or with one other there is no warning, with a byte less there is."""
    most = max(needed_alone(), needed(2))

    assert events(needed(NODES)) == ["memory_tight"]
    assert events(most - 1) == ["memory_tight"]
    assert events(most) == []


def needed_alone() -> int:
    return budget(VALUES, SETTINGS, 1).to_come


def test_unknown_memory_is_not_checked() -> None:
    """Where the system does not report free memory, the node starts."""
    assert events(None) == []
