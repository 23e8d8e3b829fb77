"""What changes about this node while its exchange runs: phase, incarnation, and steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """How far a node has withdrawn from the exchange. Each phase includes the restrictions of the earlier ones."""

    RUNNING = 0
    #: Accepts no shard, neither as owner nor as backup.
    LEAVING = 1
    #: Starts no delta.
    CLOSED = 2
    #: Adds no delta: what it holds now is what it writes to disk.
    DRAINED = 3


@dataclass(slots=True)
class RunState:
    """`step` is the last step this node completed, `passed_step` the last one whose barrier it passed."""

    incarnation: int
    step: int = 0
    passed_step: int = 0
    #: Whether it trains: a node that has not begun has no step to compare with those of others.
    has_begun: bool = False
    phase: Phase = Phase.RUNNING

    @property
    def is_leaving(self) -> bool:
        return self.phase >= Phase.LEAVING

    @property
    def is_closed(self) -> bool:
        return self.phase >= Phase.CLOSED

    @property
    def is_drained(self) -> bool:
        return self.phase >= Phase.DRAINED

    def enter(self, phase: Phase) -> None:
        """Move on to a phase; an earlier one than the present changes nothing."""
        self.phase = max(self.phase, phase)

    def advance(self, step: int) -> None:
        """This node has completed a step, or begins after it."""
        self.step, self.has_begun = step, True

    def pass_barrier(self, step: int) -> None:
        self.passed_step = max(self.passed_step, step)
