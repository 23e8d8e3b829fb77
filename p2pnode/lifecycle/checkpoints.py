"""Decides when a node writes a checkpoint, and writes it beside training: vector, trainer's own state, held shards.

Between two steps a checkpoint only begins: the trainer copies its own state, and writes the copy while it trains on.
The vector is read shard by shard during the next step (`training.exchange.store.replica`), and the shards that the node
holds are copied a few at a time. The marker comes last (`training.files.checkpoint`). A full disk is logged and never
ends the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

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

#: The trainer is held while it copies its state. A hold longer than `SHORT_HOLD_S` makes checkpoints rarer, so that it
#: is at most one part in `HELD_PART` of the time; a shorter one may come from a busy machine.
HELD_PART, SHORT_HOLD_S = 50, 0.2
#: A leaving node waits this long for a trainer that writes its own state to a slow disk.
LAST_FILE_S = 60.0
#: Of float32.
VALUE_BYTES = 4
#: The pause before a shard of the replica is read again, because it was written meanwhile.
READ_AGAIN_S = 0.002
#: After this many copies that a delta spoilt, the next one is made on the loop, where no delta comes between.
ATTEMPTS = 3


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint that is being written. `saving` ends when the trainer's own state is saved, or cannot be. `state`
    and `reading` are there when the delta before it is counted."""

    folder: str
    began_s: float
    saving: asyncio.Task[None] | None = None
    #: How long the trainer copied its state; 0.0 before it has.
    held_s: float = 0.0
    state: CheckpointState | None = None
    reading: ReplicaReading | None = None

    async def give_up(self) -> None:
        if self.reading is not None:
            self.reading.close()
        if self.saving is not None:
            self.saving.cancel()
            await asyncio.gather(self.saving, return_exceptions=True)


@dataclass(slots=True)
class _Work:
    """The last checkpoint in bytes: all that are known, and those on disk."""

    began_s: float
    total: int
    done: int = 0


async def _at_once() -> None:
    """Wait for no delta: none is on its way."""


class BrokenValues(OSError):
    """The vector has values that no training makes: a checkpoint of them would push a good one off the disk."""


def _checked(slices: Iterable[Vector], work: _Work | None) -> Iterator[Vector]:
    """The same slices; each counts as written when the next one is asked for. Raises `BrokenValues`."""
    for values in slices:
        if not has_length(values, MAX_STATE_LENGTH):
            raise BrokenValues("the vector has values out of range")
        yield values
        if work is not None:
            work.done += values.nbytes


@dataclass(eq=False)
class CheckpointWriter:
    """Writes the checkpoints of a node that has the vector. `trainer_state` is the trainer's state file that was saved
    last, below the state directory: at first that of the checkpoint from which the node started. `on_saved` gets its
    path after each save. Without a `trainer` there is no such file: a script with an engine keeps its own state."""

    config: Config
    exchange: Exchange
    manifest: Manifest
    trainer: Trainer | None
    progress: Progress
    environment: NodeEnvironment
    on_saved: Callable[[str], None]
    trainer_state: str = ""
    _writing: asyncio.Task[None] | None = None
    _last: _Checkpoint | None = None
    _work: _Work | None = None
    #: How long the trainer copied its state for the newest checkpoint that has it.
    _held_s: float = 0.0

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._disk = self.environment.disk
        self._executor = self.environment.executor
        self._log = self.environment.log
        self._ended_s = self._clock.monotonic()

    @property
    def progress_of_last(self) -> tuple[int, int, float] | None:
        """While the last checkpoint is written: its bytes on disk, all of them, and the seconds since it began. None
        otherwise. The trainer's own state is not among them: only its process knows its size."""
        work = self._work
        return None if work is None else (work.done, work.total, self._clock.monotonic() - work.began_s)

    async def write_if_due(self, counted: Callable[[], Awaitable[object]] = _at_once) -> None:
        """Begin a checkpoint if the one before was written `training.checkpoint_s` ago.

        The trainer has just handed over a delta, and copies its own state before it trains on. `counted` waits until
        that delta is in the shared values, which are read then: a restart neither loses nor repeats training."""
        period_s = self.config.training.checkpoint_s
        if not period_s:
            return
        if self._held_s > SHORT_HOLD_S:
            period_s = max(period_s, HELD_PART * self._held_s)
        if self._clock.monotonic() - self._ended_s < period_s:
            return
        if self._writing is None or self._writing.done():
            begun = await self._begin(copy_s=None)
            if begun is not None:
                self._writing = asyncio.create_task(self._write(begun, counted), name="checkpoint")

    async def begin_last(self, copy_s: float) -> None:
        """Begin the last checkpoint; the trainer has `copy_s` to copy its state, while the node leaves."""
        if not self.config.training.checkpoint_s:
            return
        await self.stop()
        begun = await self._begin(copy_s=copy_s)
        if begun is not None:
            self._last = begun
            self._work = _Work(begun.began_s, VALUE_BYTES * self.manifest.layout.total)
            self._writing = asyncio.create_task(self._write_vector(begun), name="last-checkpoint")

    async def finish_last(self) -> None:
        """Finish the last checkpoint when nothing changes any more, with the shards that no peer took over: if all
        nodes leave together, the next start has nothing else."""
        begun, self._last = self._last, None
        if begun is None or self._writing is None:
            return
        try:
            await asyncio.wait([self._writing])
            self._writing.result()
            await self._finish(begun, file_s=LAST_FILE_S)
        except OSError as error:
            self._not_written(self.progress.step, error)
        finally:
            self._work = None
            await begun.give_up()

    async def stop(self) -> None:
        """Give up the checkpoint that is being written, if any; the one before it stays."""
        if self._last is not None:
            await self._last.give_up()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    # -- one checkpoint -----------------------------------------------------------------------------------------

    async def _begin(self, copy_s: float | None) -> _Checkpoint | None:
        """Order the trainer to save its state before it gets the next step. None if the disk fails."""
        began_s, progress = self._clock.monotonic(), self.progress
        try:
            folder = await self._executor.run(checkpoint.new_folder, self._disk, progress.step)
        except OSError as error:
            self._not_written(progress.step, error)
            return None
        begun = _Checkpoint(folder, began_s)
        begun.saving = asyncio.create_task(self._save_trainer(begun, copy_s), name="save-trainer")
        await asyncio.sleep(0)  # the order to save reaches the trainer before that of the next step
        return begun

    async def _write(self, begun: _Checkpoint, counted: Callable[[], Awaitable[object]]) -> None:
        try:
            await counted()
            await self._write_vector(begun)
            await self._finish(begun, file_s=None)
        except Exception as error:  # training goes on, and the next checkpoint may be written
            self._not_written(self.progress.step, error)
        finally:
            self._ended_s = self._clock.monotonic()
            await begun.give_up()

    def _not_written(self, step: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, OSError) else repr(error)
        self._log.error("checkpoint_not_written", step=step, reason=reason)
        self._ended_s = self._clock.monotonic()

    async def _write_vector(self, begun: _Checkpoint) -> None:
        progress, layout = self.progress, self.manifest.layout
        begun.state = CheckpointState(
            run=self.config.swarm.run,
            genesis=self.manifest.genesis,
            layout_digest=layout.digest(),
            step=progress.step,
            samples=progress.samples,
            optimizer_steps=progress.optimizer_steps,
            marks=[],
        )
        begun.reading = reading = self.exchange.reading(partial(time.sleep, READ_AGAIN_S))
        slices = _checked(reading.slices(), self._work)
        try:
            await self._executor.run(checkpoint.write_vector, self._disk, begun.folder, layout, slices)
        finally:
            reading.close()

    async def _finish(self, begun: _Checkpoint, *, file_s: float | None) -> None:
        """Write the held shards, wait `file_s` for the trainer's file, and write the marker. Raises `OSError`."""
        assert begun.state is not None
        assert begun.reading is not None
        assert begun.saving is not None
        await self._write_states(begun.folder)
        try:
            async with asyncio.timeout(file_s):
                await asyncio.shield(begun.saving)
        except TimeoutError:
            self._log.warning("trainer_state_not_saved", step=begun.state.step, reason="the disk is slow")
        marks = begun.reading.versions
        state = msgspec.structs.replace(begun.state, trainer_state=self.trainer_state, marks=marks)
        await self._executor.run(checkpoint.finish, self._disk, begun.folder, state)
        ended_s = self._clock.monotonic()
        self._log.info(
            "checkpoint_written",
            step=state.step,
            seconds=round(ended_s - begun.began_s, 3),
            held_seconds=round(begun.held_s, 3),
        )

    async def _write_states(self, folder: str) -> None:
        """Write what this node owns and backs up, a few shards at a time, so that few copies wait for the disk."""
        genesis, clean = bytes.fromhex(self.manifest.genesis), self.exchange.is_clean()
        held = {shard: (term, state) for shard, term, state in self.exchange.store.states_to_save()}
        files = shard_states.batches([(shard, state.size_bytes) for shard, (_, state) in held.items()])
        if self._work is not None:
            self._work.total += sum(state.size_bytes for _, state in held.values())
        for number, shards in enumerate(files):
            copies = [(shard, held[shard][0], await copied(held[shard][1], self._executor)) for shard in shards]
            parts = await self._executor.run(shard_states.encode, genesis, copies, clean=clean)
            await self._executor.run(checkpoint.write_states, self._disk, folder, number, parts)
            if self._work is not None:
                self._work.done += sum(held[shard][1].size_bytes for shard in shards)

    async def _save_trainer(self, begun: _Checkpoint, copy_s: float | None) -> None:
        """Have the trainer save its own state. `copy_s` limits the time until it has copied it, which is noted."""
        if self.environment.state_path is None or self.trainer is None:
            return
        name = f"{begun.folder}/{checkpoint.TRAINER_FILE}"
        file = self.environment.state_path / name
        try:
            async with asyncio.timeout(copy_s):
                written = await self.trainer.save(str(file))
            self._held_s = begun.held_s = self._clock.monotonic() - begun.began_s
            await written
        except (TimeoutError, TrainerFailed) as error:
            reason = str(error) or "the trainer is busy"
            self._log.warning("trainer_state_not_saved", step=self.progress.step, reason=reason)
            return
        self.trainer_state = name
        self.on_saved(str(file))


async def copied(state: ShardState, executor: Executor) -> ShardState:
    """An independent copy, made in a thread; made again if a delta was added meanwhile."""
    for _ in range(ATTEMPTS):
        copy = state.unfilled_copy()
        await executor.run(copy.fill_from, state)
        if copy.is_copy_of(state):
            return copy
    return state.copy()
