"""What changes about this node while its exchange runs: phase, incarnation, and steps. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

#: A node may be this many times as fast as another.
FASTER = 10.0


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
    #: The step with which this node began, until two others have confirmed it; 0: nothing is in doubt. Whether it is
    #: what a single other node said.
    first_step: int = 0
    told_by_one: bool = False
    #: When this node completed its last steps, in monotonic seconds, and how long a step takes it; 0: unknown.
    advanced_s: deque[float] = field(default_factory=lambda: deque(maxlen=4))
    pace_s: float = 0.0
    phase: Phase = Phase.RUNNING
    #: After the end of training: the integer buffers of the model that all nodes take, as far as this node knows.
    final_buffers: bytes | None = None
    #: Nodes that have their final values.
    final_done: dict[bytes, None] = field(default_factory=dict)

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

    def advance(self, step: int, now_s: float) -> None:
        """A step is completed. A pause before it does not count: a step takes at most twice as long as those before."""
        took_s = now_s - self.advanced_s[-1] if self.advanced_s else 0.0
        if took_s > 0.0:
            self.pace_s = min(took_s, 2.0 * self.pace_s) if self.pace_s else took_s
        self.step = step
        self.advanced_s.append(now_s)

    def begins_at(self, step: int, *, told_by_one: bool) -> None:
        """This node begins with this step, from its disk or as the others said. `told_by_one`: a single one did."""
        self.first_step, self.told_by_one = step, told_by_one

    def return_to(self, step: int, incarnation: int) -> None:
        """Go on from an earlier step, under identities that were not used before."""
        self.step = self.passed_step = step
        self.incarnation = incarnation
        self.advanced_s.clear()
        self.first_step, self.told_by_one = 0, False

    def explained_step(self, now_s: float) -> float:
        """The furthest step that another node can have reached, as far as this one's own steps explain it; infinite
        before the second step. A pause is one of the last steps by the time that this node compares itself."""
        if not self.pace_s:
            return math.inf
        return self.step + FASTER * (1.0 + (now_s - self.advanced_s[0]) / self.pace_s)

    def pass_barrier(self, step: int) -> None:
        self.passed_step = max(self.passed_step, step)
