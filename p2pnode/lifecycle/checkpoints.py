"""When a node writes a checkpoint, and what goes into it: vector, step, trainer's state, and the shards it answers for.

How each is written, whole or not at all, is `training.checkpoint`. A full disk is an event, never the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pnode.config.settings import Config
from p2pnode.lifecycle.environment import NodeEnvironment
from training import checkpoint
from training.checkpoint import CheckpointState
from training.exchange.exchange import Exchange
from training.exchange.store import state_files
from training.manifest import Manifest
from training.progress import Progress
from training.trainer_link.interface import Trainer, TrainerFailed


class CheckpointWriter:
    """The checkpoints of a node that has the vector. The trainer writes its own state under `environment.state_path`;
    `on_saved` is called with the name of that file."""

    def __init__(
        self,
        config: Config,
        exchange: Exchange,
        manifest: Manifest,
        trainer: Trainer,
        progress: Progress,
        environment: NodeEnvironment,
        *,
        on_saved: Callable[[str], None],
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._manifest = manifest
        self._trainer = trainer
        self._progress = progress
        self._clock = environment.clock
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._state_path = environment.state_path
        self._on_saved = on_saved
        self._last = environment.clock.monotonic()

    async def when_due(self) -> None:
        """Write one if the last is `training.checkpoint_s` old."""
        period_s = self._config.training.checkpoint_s
        if period_s and self._clock.monotonic() - self._last >= period_s:
            await self._write(trainer_s=None)

    async def at_the_end(self, trainer_s: float) -> None:
        """Write the last one; the trainer has so long for its part."""
        if self._config.training.checkpoint_s:
            await self._write(trainer_s=trainer_s)

    async def what_is_left(self) -> None:
        """Shards that nobody took: where all leave together, they are all there is for the next start."""
        if not self._config.training.checkpoint_s:
            return
        try:
            await self._write_states(self._progress.step)
        except OSError as error:
            self._log.error("states_not_written", step=self._progress.step, reason=str(error))

    async def _write(self, *, trainer_s: float | None) -> None:
        self._last = self._clock.monotonic()
        layout, progress = self._manifest.layout, self._progress
        state = CheckpointState(
            run=self._config.swarm.run,
            genesis=self._manifest.genesis,
            layout_digest=layout.digest(),
            step=progress.step,
            samples=progress.samples,
            optimizer_steps=progress.optimizer_steps,
            marks=[(term.number, term.node.hex(), version) for term, version in self._exchange.core.marks],
        )
        keep = self._config.training.keep_checkpoints
        try:
            await self._save_trainer(state.step, trainer_s)
            await self._write_states(state.step)
            await self._executor.run(checkpoint.write, self._disk, state, layout, self._trainer.vector, keep)
        except OSError as error:
            self._log.error("checkpoint_not_written", step=state.step, reason=str(error))
            return
        self._log.info("checkpoint_written", step=state.step)

    async def _write_states(self, step: int) -> None:
        """Write what this node owns and backs up, a few shards at a time: what is copied waits for the disk."""
        clean = self._exchange.is_clean()
        folder, disk = checkpoint.folder_of(step), self._disk
        held = {shard: (shard, term, state) for shard, term, state in self._exchange.held()}
        if not self._config.exchange.enabled:
            held = {}
        files = state_files.batches([(shard, state.size_bytes) for shard, (_, _, state) in held.items()])
        for number, shards in enumerate(files):
            copies = []
            for shard in shards:
                _, term, state = held[shard]
                copies.append((shard, term, state.copy()))
                await asyncio.sleep(0)
            raw = await self._executor.run(state_files.encode, self._exchange.core.genesis, copies, clean=clean)
            await self._executor.run(checkpoint.write_states, disk, folder, number, raw)
        await self._executor.run(checkpoint.keep_states, disk, folder, len(files))

    async def _save_trainer(self, step: int, timeout_s: float | None) -> None:
        if self._state_path is None:
            return
        file = self._state_path / checkpoint.folder_of(step) / "trainer.state"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._trainer.save(str(file))
        except (TimeoutError, TrainerFailed) as error:
            self._log.warning("trainer_state_not_saved", step=step, reason=str(error) or "the trainer is busy")
            return
        self._on_saved(str(file))
