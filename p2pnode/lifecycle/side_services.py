"""What a node does beside its training loop: look at the deltas, and, together with others, compare the first of them,
end with those that have reached the goal, and share the decisions of `devices.coordination`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from p2pnode.lifecycle.environment import NodePart
from p2pnode.training.devices.coordination import Coordination
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.findings.duplicate_data import DuplicateData
from p2pnode.training.findings.few_changes import FewChanges
from p2pnode.training.goal_announcement import GoalAnnouncement
from p2pnode.training.layout import Layout
from p2pnode.training.step_loop import StepLoop
from p2pnode.training.trainer_link.interface import Vector


@dataclass(eq=False)
class SideServices(NodePart):
    """Of one node; `start` when its exchange is built."""

    duplicates: DuplicateData | None = None
    changes: FewChanges | None = None
    _goal_news: GoalAnnouncement | None = None
    _coordination: Coordination | None = None

    def start(self, genesis: bytes, loop: StepLoop, layout: Layout) -> None:
        """Begin, together with others."""
        config, overlay, log = self.config, self.overlay, self.log
        self.changes = FewChanges(layout)
        loop.on_trained(self._after_training)
        # Generators of their own: what is drawn here changes no sample of the barrier.
        me = overlay.node_id
        self.duplicates = DuplicateData(overlay, genesis, log, random.Random(me))
        if config.training.until:
            self._goal_news = GoalAnnouncement(
                overlay, genesis, config.training.until, log, random.Random(me), loop.end_by_goal
            )
        if config.devices.coordination == "global" and isinstance(self.trainer, HostTrainer):
            host = self.trainer
            self._coordination = Coordination(overlay, genesis, host.cycles, host.positions, self.environment)
            self._coordination.start()
            host.coordinate(self._coordination)

    def _after_training(self, delta: Vector) -> None:
        if self.changes is not None:
            self.changes.after_training(delta)
        if self.duplicates is not None:
            self.duplicates.after_training(delta)

    async def announce_goal(self, step: int) -> None:
        """This node ends because `training.until` holds."""
        if self._goal_news is not None:
            await self._goal_news.announce(step)

    async def stop(self) -> None:
        """Cancel all tasks; idempotent."""
        if self.duplicates is not None:
            await self.duplicates.stop()
        if self._coordination is not None:
            await self._coordination.stop()
