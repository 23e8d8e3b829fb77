"""Whether the exchange of a model fits into free memory."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.memory_check import check_memory
from tests.harness.environment import NoLog
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


def events(available: int | None) -> list[str]:
    log = Warnings()
    check_memory(available, VALUES, SETTINGS, NODES, log)
    return log.events


def needed(nodes: float) -> int:
    share = budget(VALUES, SETTINGS, nodes)
    return share.total - share.shared - share.outbox - share.repair_log


def test_a_share_that_does_not_fit_is_refused() -> None:
    """One byte too little is an error with the trainer's exit code; exactly enough is none."""
    events(needed(NODES))
    with pytest.raises(UserError, match="more memory") as refused:
        events(needed(NODES) - 1)

    assert refused.value.exit_code == ExitCode.TRAINER


def test_a_share_that_fits_only_beside_others_is_a_warning() -> None:
    """With memory for all shards there is no warning, with memory for its own share alone there is one."""
    alone = budget(VALUES, SETTINGS, 1)

    assert events(needed(NODES)) == ["memory_tight"]
    assert events(alone.total - alone.shared) == []


def test_unknown_memory_is_not_checked() -> None:
    """Where the system does not report free memory, the node starts."""
    assert events(None) == []
