"""The end of a node: linger until the others have finished, write the last checkpoint, hand over, leave.

The node has left the swarm within five seconds; each part has a limit of its own. The last checkpoint of a large model
takes longer on most disks. It is finished when no other node needs this one any more.
"""

from __future__ import annotations

import asyncio
import contextlib

from overlay.overlay import Overlay
from overlay.peers import Activity
from p2pnode.config.settings import Config
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.environment import NodeEnvironment
from training.exchange.exchange import Exchange
from training.progress import Progress
from training.trainer_link.interface import Trainer

LAST_PUSH_S = 1.0
HAND_OVER_S = 2.0
#: The trainer has this long to come to the end of an optimiser step and copy its state; the node leaves meanwhile.
LAST_CHECKPOINT_S = 10.0
DRAIN_S = 0.5
#: For deltas that wait in the outbox for a new owner: longer than it takes to replace a dead one.
FLUSH_S = 20.0
#: A finished node that another waits for may itself wait for the successor of a dead owner.
STAY_S = 20.0
POLL_INTERVAL_S = 0.05


class Shutdown:
    """Ends one node: `finish` after its last step, then `leave` in every case."""

    def __init__(
        self, config: Config, environment: NodeEnvironment, overlay: Overlay, trainer: Trainer, progress: Progress
    ) -> None:
        self._config = config
        self._log = environment.log
        self._overlay = overlay
        self._trainer = trainer
        self._progress = progress

    async def finish(self, exchange: Exchange) -> int:
        """Continue to own shards until the others have finished or `linger_s` has passed; returns how many train on.

        A node announces that it has finished when the owners have all its deltas: then the values are final when all
        nodes have announced it.
        """
        if self._config.exchange.enabled and (steps := await exchange.flush(FLUSH_S)):
            self._log.warning("left_behind", steps_unacknowledged=steps, shards_owned=0)
        self._overlay.announce(activity=Activity.FINISHED)
        return await self._linger()

    async def stay_for_others(self, exchange: Exchange) -> None:
        """Own shards until the others that have finished have their final values, or `STAY_S` have passed.

        Otherwise the node that was to receive them might die during the hand-over.
        """
        if not self._config.exchange.enabled:
            return
        await exchange.announce_final()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(STAY_S, self._config.training.linger_s)):
                while self._others_fetch(exchange):  # noqa: ASYNC110 - it follows from heartbeats, which set no event
                    await asyncio.sleep(POLL_INTERVAL_S)

    def _others_fetch(self, exchange: Exchange) -> bool:
        finished = (peer for peer in self._overlay.members() if peer.activity is Activity.FINISHED)
        return any(exchange.is_needed_by(peer.node_id) for peer in finished)

    async def _linger(self) -> int:
        try:
            async with asyncio.timeout(self._config.training.linger_s):
                while True:
                    if not self._others_at_work():
                        return 0
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            self._log.info("linger_over", seconds=self._config.training.linger_s)
        return self._others_at_work()

    def _others_at_work(self) -> int:
        """Live peers that train, or are about to fetch the vector, of which this node may have the last copy.

        A long step is no reason not to wait: a trainer that hangs is announced as stalled.
        """
        at_work = (Activity.JOINING, Activity.READY, Activity.TRAINING)
        return sum(peer.activity in at_work for peer in self._overlay.members())

    async def leave(self, exchange: Exchange | None, checkpoints: CheckpointWriter | None) -> None:
        """Write the last checkpoint, hand the shards over, and announce the departure."""
        self._log.info("leaving", step=self._progress.step)
        self._overlay.set_willing(False)  # so that no shard is handed to this node any more
        if exchange is not None:
            if checkpoints is not None:
                await checkpoints.begin_last(LAST_CHECKPOINT_S)
            steps_left, shards_left = await exchange.leave(HAND_OVER_S)
            if steps_left or (shards_left and len(self._overlay.members())):
                self._log.warning("left_behind", steps_unacknowledged=steps_left, shards_owned=shards_left)
            await exchange.close(DRAIN_S)
        # Now, for nobody needs this node while its disk is slow.
        await self._overlay.leave()
        if checkpoints is not None:
            await checkpoints.finish_last()
