"""Decides when a node writes a checkpoint and collects its content: vector, step, trainer's state, and held shards.

`training.checkpoint` writes the files atomically. A full disk is logged and never ends the node.
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
    """Writes the checkpoints of a node that has the vector. `on_saved` gets the path of the trainer's state file after
    each successful save."""

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

    async def write_if_due(self) -> None:
        """Write a checkpoint if the last one is `training.checkpoint_s` old."""
        period_s = self._config.training.checkpoint_s
        if period_s and self._clock.monotonic() - self._last >= period_s:
            await self._write(trainer_s=None)

    async def write_last(self, trainer_s: float) -> None:
        """Write the last checkpoint; the trainer has `trainer_s` to save its state."""
        if self._config.training.checkpoint_s:
            await self._write(trainer_s=trainer_s)

    async def write_remaining_states(self) -> None:
        """Write the shards that no peer took over: if all nodes leave together, the next start has nothing else."""
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
            marks=[(term.number, term.node.hex(), version) for term, version in self._exchange.versions()],
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
        """Write what this node owns and backs up, a few shards at a time, so that few copies wait for the disk."""
        clean = self._exchange.is_clean()
        folder, disk = checkpoint.folder_of(step), self._disk
        held = {shard: (shard, term, state) for shard, term, state in self._exchange.states_to_save()}
        if not self._config.exchange.enabled:
            held = {}
        files = state_files.batches([(shard, state.size_bytes) for shard, (_, _, state) in held.items()])
        for number, shards in enumerate(files):
            copies = []
            for shard in shards:
                _, term, state = held[shard]
                copies.append((shard, term, state.copy()))
                await asyncio.sleep(0)
            raw = await self._executor.run(state_files.encode, self._exchange.context.genesis, copies, clean=clean)
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
