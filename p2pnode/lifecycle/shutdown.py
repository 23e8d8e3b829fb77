"""The end of a node: linger until the others have finished, export, write the last checkpoint, hand over, leave.

The node has left the swarm within five seconds; each part has a limit of its own. The last checkpoint of a large model
takes longer on most disks. It is finished when no other node needs this one any more.
"""

from __future__ import annotations

import asyncio

from overlay.overlay import Overlay
from overlay.peers import Activity
from p2pnode.config.settings import Config
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.environment import NodeEnvironment
from training.exchange.exchange import Exchange
from training.progress import Progress
from training.trainer_link.interface import Trainer, TrainerFailed

LAST_PUSH_S = 1.0
HAND_OVER_S = 2.0
#: The trainer has this long to come to the end of an optimiser step and copy its state; the node leaves meanwhile.
LAST_CHECKPOINT_S = 10.0
DRAIN_S = 0.5
POLL_INTERVAL_S = 0.05


class Shutdown:
    """Ends one node: `finish` after its last step, then `leave` in every case."""

    def __init__(
        self, config: Config, environment: NodeEnvironment, overlay: Overlay, trainer: Trainer, progress: Progress
    ) -> None:
        self._config = config
        self._clock = environment.clock
        self._log = environment.log
        self._overlay = overlay
        self._trainer = trainer
        self._progress = progress

    async def finish(self, exchange: Exchange) -> None:
        """Continue to own shards until the others have finished or `linger_s` has passed, then pull and export.

        The exported model contains what the others added meanwhile.
        """
        self._overlay.announce(activity=Activity.FINISHED)
        await self._linger()
        if self._config.exchange.enabled:
            await exchange.pull(self._progress.step)
        if self._config.training.export:
            await self._export(self._config.training.export)

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(self._config.training.linger_s):
                while True:
                    if not self._is_needed():
                        return
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            self._log.info("linger_over", seconds=self._config.training.linger_s)

    def _is_needed(self) -> bool:
        """Whether a peer trains, or is about to fetch the vector, of which this node may have the last copy."""
        now = self._clock.monotonic()
        joining = (Activity.JOINING, Activity.READY)
        return any(peer.is_worker(now) or peer.activity in joining for peer in self._overlay.members())

    async def _export(self, path: str) -> None:
        try:
            await self._trainer.export(path)
        except (TrainerFailed, OSError) as error:
            self._log.error("export_failed", path=path, reason=str(error))
        else:
            self._log.info("exported", path=path, step=self._progress.step)

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
