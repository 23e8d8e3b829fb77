"""Decides when a node writes a checkpoint, and writes it beside training: vector, trainer's own state, held shards.

Between two steps a checkpoint only begins. The trainer copies its own state and a thread of it writes the copy; the
vector is read shard by shard while the next step trains (`training.exchange.store.replica`), and the shards that the
node holds are copied a few at a time. The marker comes last (`training.files.checkpoint`). A full disk is logged and
never ends the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from p2pnode.config.settings import Config
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.overlay.environment import Executor
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.replica import ReplicaReading
from p2pnode.training.files import checkpoint
from p2pnode.training.files.checkpoint import CheckpointState
from p2pnode.training.manifest import Manifest
from p2pnode.training.progress import Progress
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH, has_length
from p2pnode.training.shards.state import ShardState
from p2pnode.training.trainer_link.interface import Trainer, TrainerFailed

#: A leaving node waits this long for a trainer that writes its own state to a slow disk.
LAST_FILE_S = 60.0
#: Of float32.
VALUE_BYTES = 4
#: A shard that is being written is read again after so long.
READ_AGAIN_S = 0.002
#: After so many copies that a delta spoilt, the next one is made on the loop.
ATTEMPTS = 3


class _Saving(NamedTuple):
    """The first part of a checkpoint. `task` ends when the trainer's own state is saved, or cannot be."""

    folder: str
    began_s: float
    task: asyncio.Task[None]
    #: When the trainer was free for its next order; empty until then.
    copied_s: list[float]


class _Begun(NamedTuple):
    """A checkpoint that is being written."""

    saving: _Saving
    state: CheckpointState
    reading: ReplicaReading


@dataclass(slots=True)
class _Work:
    """Bytes of the last checkpoint: on disk, and all that are known to follow."""

    began_s: float
    total: int
    done: int = 0


async def _at_once() -> None:
    """No delta is on its way."""


class BrokenValues(OSError):
    """The vector has values that no training makes: a checkpoint of them would push a good one off the disk."""


def _counted(slices: Iterable[Vector], work: _Work | None) -> Iterator[Vector]:
    """The same slices; each counts as written when the next one is asked for. Raises `BrokenValues`."""
    for values in slices:
        if not has_length(values, MAX_STATE_LENGTH):
            raise BrokenValues("the vector has values out of range")
        yield values
        if work is not None:
            work.done += values.nbytes


class CheckpointWriter:
    """Writes the checkpoints of a node that has the vector. `on_saved` gets the path of the trainer's state file after
    each successful save. `trainer_state` is that of the checkpoint the node started from, below its state directory.
    Without a `trainer` there is no such state: a script with an engine keeps its own."""

    def __init__(
        self,
        config: Config,
        exchange: Exchange,
        manifest: Manifest,
        trainer: Trainer | None,
        progress: Progress,
        environment: NodeEnvironment,
        *,
        on_saved: Callable[[str], None],
        trainer_state: str = "",
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
        self._trainer_state = trainer_state
        self._ended_s = environment.clock.monotonic()
        self._writing: asyncio.Task[None] | None = None
        self._last: _Begun | None = None
        self._work: _Work | None = None

    @property
    def last_written(self) -> tuple[int, int, float] | None:
        """The last checkpoint, while it is written: bytes on disk, all of them, and the seconds since it began; None
        otherwise. The trainer's own state is not counted: only its process knows how much it is."""
        work = self._work
        return None if work is None else (work.done, work.total, self._clock.monotonic() - work.began_s)

    async def write_if_due(self, counted: Callable[[], Awaitable[object]] = _at_once) -> None:
        """Begin a checkpoint if the last one was written `training.checkpoint_s` ago.

        The trainer has just handed over a delta, and copies its own state before it trains on. `counted` waits until
        that delta is in the shared values, which are read then: a restart neither loses nor repeats training."""
        period_s = self._config.training.checkpoint_s
        if not period_s or self._clock.monotonic() - self._ended_s < period_s:
            return
        if self._writing is None or self._writing.done():
            saving = await self._begin_saving(trainer_s=None)
            if saving is not None:
                self._writing = asyncio.create_task(self._write(saving, counted), name="checkpoint")

    async def begin_last(self, trainer_s: float) -> None:
        """Begin the last checkpoint; the trainer has `trainer_s` to copy its state, while the node leaves."""
        if not self._config.training.checkpoint_s:
            return
        await self.stop()
        saving = await self._begin_saving(trainer_s=trainer_s)
        if saving is not None:
            self._last = begun = self._begin_reading(saving)
            self._work = _Work(saving.began_s, VALUE_BYTES * self._manifest.layout.total)
            self._writing = asyncio.create_task(self._write_vector(begun), name="last-checkpoint")

    async def finish_last(self) -> None:
        """Finish it when nothing changes any more, with the shards that no peer took over: if all nodes leave together,
        the next start has nothing else."""
        begun, self._last = self._last, None
        if begun is None or self._writing is None:
            return
        try:
            await asyncio.wait([self._writing])
            self._writing.result()
            await self._finish(begun, LAST_FILE_S)
        except OSError as error:
            self._not_written(begun.state.step, error)
        finally:
            self._work = None
            await self._abandon(begun)

    async def stop(self) -> None:
        """Give up the checkpoint that is being written, if there is one; the one before it stays."""
        if self._last is not None:
            await self._abandon(self._last)
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    # -- one checkpoint -----------------------------------------------------------------------------------------

    async def _begin_saving(self, trainer_s: float | None) -> _Saving | None:
        """What the next step must not change; the step waits for this. None if the disk cannot be read."""
        began_s, progress = self._clock.monotonic(), self._progress
        try:
            folder = await self._executor.run(checkpoint.new_folder, self._disk, progress.step)
        except OSError as error:
            self._not_written(progress.step, error)
            return None
        copied_s: list[float] = []
        saving = asyncio.create_task(self._save_trainer(folder, trainer_s, copied_s), name="save-trainer")
        await asyncio.sleep(0)  # the order to save reaches the trainer before that of the next step
        return _Saving(folder, began_s, saving, copied_s)

    def _begin_reading(self, saving: _Saving) -> _Begun:
        progress = self._progress
        state = CheckpointState(
            run=self._config.swarm.run,
            genesis=self._manifest.genesis,
            layout_digest=self._manifest.layout.digest(),
            step=progress.step,
            samples=progress.samples,
            optimizer_steps=progress.optimizer_steps,
            marks=[],
        )
        reading = self._exchange.reading(partial(time.sleep, READ_AGAIN_S))
        return _Begun(saving, state, reading)

    async def _write(self, saving: _Saving, counted: Callable[[], Awaitable[object]]) -> None:
        begun = None
        try:
            await counted()
            begun = self._begin_reading(saving)
            await self._write_vector(begun)
            await self._finish(begun, None)
        except Exception as error:  # training goes on, and the next checkpoint may be written
            self._not_written(self._progress.step, error)
        finally:
            self._ended_s = self._clock.monotonic()
            if begun is not None:
                begun.reading.close()
            await self._give_up(saving)

    def _not_written(self, step: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, OSError) else repr(error)
        self._log.error("checkpoint_not_written", step=step, reason=reason)
        self._ended_s = self._clock.monotonic()

    async def _abandon(self, begun: _Begun) -> None:
        begun.reading.close()
        await self._give_up(begun.saving)

    async def _give_up(self, saving: _Saving) -> None:
        saving.task.cancel()
        await asyncio.gather(saving.task, return_exceptions=True)

    async def _write_vector(self, begun: _Begun) -> None:
        slices, layout = begun.reading.slices(), self._manifest.layout
        try:
            await self._executor.run(
                checkpoint.write_vector, self._disk, begun.saving.folder, layout, _counted(slices, self._work)
            )
        finally:
            begun.reading.close()

    async def _finish(self, begun: _Begun, trainer_s: float | None) -> None:
        """Write the shards, wait for the trainer's file, and write the marker. Raises `OSError`."""
        await self._write_states(begun.saving.folder)
        try:
            async with asyncio.timeout(trainer_s):
                await asyncio.shield(begun.saving.task)
        except TimeoutError:
            self._log.warning("trainer_state_not_saved", step=begun.state.step, reason="the disk is slow")
        marks = begun.reading.versions
        state = msgspec.structs.replace(begun.state, trainer_state=self._trainer_state, marks=marks)
        keep = self._config.training.keep_checkpoints
        await self._executor.run(checkpoint.finish, self._disk, begun.saving.folder, state, keep)
        began_s, ended_s = begun.saving.began_s, self._clock.monotonic()
        held_s = (begun.saving.copied_s or [began_s])[0] - began_s
        self._log.info(
            "checkpoint_written", step=state.step, seconds=round(ended_s - began_s, 3), held_seconds=round(held_s, 3)
        )

    async def _write_states(self, folder: str) -> None:
        """Write what this node owns and backs up, a few shards at a time, so that few copies wait for the disk."""
        if not self._config.exchange.enabled:
            return
        genesis, clean = bytes.fromhex(self._manifest.genesis), self._exchange.is_clean()
        held = {shard: (term, state) for shard, term, state in self._exchange.store.states_to_save()}
        files = shard_states.batches([(shard, state.size_bytes) for shard, (_, state) in held.items()])
        if self._work is not None:
            self._work.total += sum(state.size_bytes for _, state in held.values())
        for number, shards in enumerate(files):
            copies = [(shard, held[shard][0], await copied(held[shard][1], self._executor)) for shard in shards]
            parts = await self._executor.run(shard_states.encode, genesis, copies, clean=clean)
            await self._executor.run(checkpoint.write_states, self._disk, folder, number, parts)
            if self._work is not None:
                self._work.done += sum(held[shard][1].size_bytes for shard in shards)

    async def _save_trainer(self, folder: str, copy_s: float | None, copied_s: list[float]) -> None:
        """Have the trainer save its own state. `copy_s` limits the time until it has a copy of it, which is noted."""
        if self._state_path is None or self._trainer is None:
            return
        name = f"{folder}/{checkpoint.TRAINER_FILE}"
        file = self._state_path / name
        try:
            async with asyncio.timeout(copy_s):
                written = await self._trainer.save(str(file))
            copied_s.append(self._clock.monotonic())
            await written
        except (TimeoutError, TrainerFailed) as error:
            reason = str(error) or "the trainer is busy"
            self._log.warning("trainer_state_not_saved", step=self._progress.step, reason=reason)
            return
        self._trainer_state = name
        self._on_saved(str(file))


async def copied(state: ShardState, executor: Executor) -> ShardState:
    """An independent copy, made in a thread: begun again if a delta was added while the arrays were copied."""
    for _ in range(ATTEMPTS):
        copy = state.unfilled_copy()
        await executor.run(copy.fill_from, state)
        if copy.is_copy_of(state):
            return copy
    return state.copy()
