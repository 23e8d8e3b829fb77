"""The end of a node: the final values, the script's own end, the last checkpoint, hand over, leave.

`finish` is for a run that has ended. Its script evaluates and saves on its own for up to `finish_s`; meanwhile the node
lingers, and owns its shards. `leave` follows in every case. The node has left the swarm within five seconds; each part
has a limit of its own. The last checkpoint of a large model takes longer on most disks, and a script has `stop_s`. Both
are waited for when no other node needs this one any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.environment import NodePart
from p2pnode.overlay.peers import Activity, Peer
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.goal import End
from p2pnode.training.progress import Finishing
from p2pnode.training.trainer_link.interface import TrainerEnd

LAST_PUSH_S = 1.0
HAND_OVER_S = 2.0
#: The trainer has this long to come to the end of an optimiser step and copy its state; the node leaves meanwhile.
LAST_CHECKPOINT_S = 10.0
#: At the end of a run nobody waits.
FINAL_CHECKPOINT_S = 60.0
DRAIN_S = 0.5
#: For deltas that wait in the outbox for a new owner: longer than it takes to replace a dead one.
FLUSH_S = 20.0
#: A finished node that another waits for may itself wait for the successor of a dead owner.
STAY_S = 20.0
#: The script waits for the last steps of the others at most this long, or four of the slowest one's steps: a barrier
#: keeps them closer than that. Under asp a slow node may need minutes, for which no script should wait.
SETTLE_S = 10.0
SETTLE_STEPS = 4.0
POLL_INTERVAL_S = 0.05

#: Gets the final values and writes the model; the argument is the number of nodes that train on.
Conclude = Callable[[int], Awaitable[None]]


@dataclass(eq=False)
class Shutdown(NodePart):
    """Ends one node: `finish` after its last step, then `leave` in every case."""

    #: How the last trainer process has ended.
    trainer_end: TrainerEnd = field(default_factory=TrainerEnd)
    _has_begun_checkpoint: bool = False

    # -- a run that has ended -----------------------------------------------------------------------------------

    async def finish(self, exchange: Exchange, checkpoints: CheckpointWriter, end: End, conclude: Conclude) -> None:
        """Own shards until the others have finished or `linger_s` has passed; let a script finish by itself meanwhile.

        A node announces that it has finished when the owners have all its deltas: then the values are final when all
        nodes have announced it. A script's weights at `done` are final if the others finish within a few of their
        steps. A script that ends its own node (`end` is `script`) leaves them training: only the script is waited for.
        """
        if steps := await exchange.flush(FLUSH_S):
            self.log.warning("left_behind", steps_unacknowledged=steps, shards_owned=0)
        self.overlay.announce(activity=Activity.FINISHED)
        began = self.clock.monotonic()
        if not self.trainer.is_script:
            await self._conclude_with_others(exchange, began, conclude)
            return
        is_final = end != "script" and not await self._settle()
        if is_final:
            await conclude(0)
        else:
            await exchange.pull(self.progress.step)
        await self._begin_checkpoint(checkpoints, FINAL_CHECKPOINT_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._let_script_finish(end), name="finish-script")
            if end != "script":
                await self._conclude_with_others(exchange, began, None if is_final else conclude)

    async def _conclude_with_others(self, exchange: Exchange, began: float, conclude: Conclude | None) -> None:
        left = await self._linger(began)
        if conclude is not None:
            await conclude(left)
        await self._stay_for_others(exchange)

    async def _settle(self) -> int:
        """Wait until nobody trains any more, but only for a few of their steps; returns how many train on."""
        slowest_s = max((peer.step_seconds for peer in self._training()), default=0.0)
        limit_s = min(self.config.training.linger_s, max(SETTLE_S, SETTLE_STEPS * slowest_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._training():  # noqa: ASYNC110 - it follows from heartbeats, which set no event
                    await asyncio.sleep(POLL_INTERVAL_S)
        return len(self._training())

    def _training(self) -> list[Peer]:
        return [peer for peer in self.overlay.members() if peer.activity is Activity.TRAINING]

    async def _let_script_finish(self, end: End) -> None:
        what = "the script ends its node" if end == "script" else f"the run has ended: {end}"
        finish_s = self.config.training.finish_s
        self._note_finishing(what, finish_s)
        self.trainer_end = await self.trainer.finish(end, finish_s)
        self.progress.finishing = None

    def _note_finishing(self, what: str, seconds: float) -> None:
        now = self.clock.monotonic()
        self.progress.finishing = Finishing(what, now, now + seconds)

    async def _stay_for_others(self, exchange: Exchange) -> None:
        """Own shards until the others that have finished have their final values, or `STAY_S` have passed.

        Otherwise the node that was to receive them might die during the hand-over.
        """
        await exchange.final_values.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(STAY_S, self.config.training.linger_s)):
                while self._others_fetch(exchange):  # noqa: ASYNC110 - it follows from heartbeats, which set no event
                    await asyncio.sleep(POLL_INTERVAL_S)

    def _others_fetch(self, exchange: Exchange) -> bool:
        finished = (peer for peer in self.overlay.members() if peer.activity is Activity.FINISHED)
        return any(exchange.is_needed_by(peer.node_id) for peer in finished)

    async def _linger(self, began: float) -> int:
        try:
            async with asyncio.timeout(began + self.config.training.linger_s - self.clock.monotonic()):
                while True:
                    if not self._others_at_work():
                        return 0
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            self.log.info("linger_over", seconds=self.config.training.linger_s)
        return self._others_at_work()

    def _others_at_work(self) -> int:
        """Live peers that train, or are about to fetch the vector, of which this node may have the last copy.

        A long step is no reason not to wait: a trainer that hangs is announced as stalled.
        """
        at_work = (Activity.JOINING, Activity.READY, Activity.TRAINING)
        return sum(peer.activity in at_work for peer in self.overlay.members())

    # -- leaving ------------------------------------------------------------------------------------------------

    async def leave(self, exchange: Exchange | None, checkpoints: CheckpointWriter | None) -> None:
        """Write the last checkpoint, hand the shards over while the script ends, and announce the departure."""
        self.log.info("leaving", step=self.progress.step)
        self.overlay.set_willing(False)  # so that no shard is handed to this node any more
        if exchange is not None and checkpoints is not None:
            await self._begin_checkpoint(checkpoints, LAST_CHECKPOINT_S)
        async with asyncio.TaskGroup() as tasks:
            if self.trainer.is_script:
                tasks.create_task(self._stop_script(), name="stop-script")
            if exchange is not None:
                await self._hand_over(exchange)
            # Now, for nobody needs this node while its disk is slow.
            await self.overlay.leave()
            if checkpoints is not None:
                await checkpoints.finish_last()

    async def _begin_checkpoint(self, checkpoints: CheckpointWriter, trainer_s: float) -> None:
        """Once: a script that finishes saves its state before, and is not there any more when the node leaves."""
        if not self._has_begun_checkpoint:
            self._has_begun_checkpoint = True
            await checkpoints.begin_last(trainer_s)

    async def _stop_script(self) -> None:
        if self.trainer.state == "stopped":
            return
        stop_s = self.config.training.stop_s
        self._note_finishing("the node leaves", stop_s)
        self.trainer_end = await self.trainer.stop(stop_s)
        self.progress.finishing = None

    async def _hand_over(self, exchange: Exchange) -> None:
        steps_left, shards_left = await exchange.leave(HAND_OVER_S)
        # With named values, nodes whose script has ended or not begun need none.
        idle = (Activity.PAUSED, Activity.LEAVING) if exchange.store.holds_values else ()
        others = [peer for peer in self.overlay.members() if peer.activity not in idle]
        if steps_left or (shards_left and others):
            self.log.warning("left_behind", steps_unacknowledged=steps_left, shards_owned=shards_left)
        await exchange.close(DRAIN_S)
