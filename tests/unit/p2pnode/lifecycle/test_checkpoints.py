"""When checkpoints are written, beside training, and a disk or a trainer that refuses them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.config.settings import Config
from p2pnode.lifecycle.checkpoints import ATTEMPTS, CheckpointWriter, copied
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.exchange.store.replica import Replica, ReplicaReading
from p2pnode.training.exchange.terms import ZERO_TERM, Term
from p2pnode.training.files import checkpoint
from p2pnode.training.files.checkpoint import Checkpoint
from p2pnode.training.layout import shard_bounds
from p2pnode.training.progress import Progress
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.builders.stores import delta, owner_of
from tests.harness.environment.simulated import InlineExecutor, ListLog, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.status_swarm import simulate
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, plain_layout

GENESIS = b"g" * 16
SIZE, SHARDS = 64, 4
TERM = Term(3, b"n" * 20)
PERIOD_S = 10.0


class SavingTrainer(StubTrainer):
    """Its file is written `write_s` after the copy; `copy_s` is the time until it has the copy, as in a long step."""

    copy_s = 0.0
    write_s = 0.0
    refuses = False

    async def save(self, path: str) -> Awaitable[None]:
        await asyncio.sleep(self.copy_s)
        return asyncio.create_task(self._written(Path(path), f"state of {self.samples}"))

    async def _written(self, path: Path, content: str) -> None:
        await asyncio.sleep(self.write_s)
        if self.refuses:
            raise TrainerFailed("the optimiser's state has values that are not finite")
        FolderDisk(path.parent).write(path.name, content.encode())


class World:
    """A writer over a real folder, a stub trainer, and an exchange that holds the states of four shards."""

    def __init__(self, folder: Path, *, disk_s: float = 0.0, trainer_state: str = "", **training: Any) -> None:
        self.disk = FolderDisk(folder)
        self.clock = VirtualClock()
        self.records: list[Any] = []
        self.trainer = SavingTrainer("t", SIZE)
        self.trainer._state = "running"
        self.progress = Progress()
        self.saved: list[str] = []
        self.replica = Replica(np.zeros(SIZE, np.float32), shard_bounds(SIZE, SHARDS))
        self.states = [
            ShardState(np.full(SIZE // SHARDS, float(shard), np.float32), SIZE // SHARDS) for shard in range(SHARDS)
        ]
        self.held = range(SHARDS)
        exchange: Any = SimpleNamespace(
            versions=self.replica.versions,
            reading=lambda pause: ReplicaReading(self.replica, pause),
            store=SimpleNamespace(states_to_save=lambda: [(shard, TERM, self.states[shard]) for shard in self.held]),
            is_clean=lambda: True,
        )
        manifest: Any = SimpleNamespace(genesis=GENESIS.hex(), layout=plain_layout(SIZE))
        environment: Any = SimpleNamespace(
            clock=self.clock,
            disk=self.disk,
            executor=InlineExecutor(disk_s),
            log=ListLog(self.records, "", self.clock),
            state_path=folder,
        )
        config = Config(training=TrainingSettings(**({"checkpoint_s": PERIOD_S} | training)))
        self.writer = CheckpointWriter(
            config,
            exchange,
            manifest,
            self.trainer,
            self.progress,
            environment,
            on_saved=self.saved.append,
            trainer_state=trainer_state,
        )

    async def periodic(self, step: int) -> None:
        """The checkpoint of a step, when one is due; returns when it is written."""
        await asyncio.sleep(PERIOD_S)
        self.progress.step = self.trainer.samples = step
        await self.writer.write_if_due()
        assert self.writer._writing is not None
        await self.writer._writing

    async def leave(self, step: int, trainer_s: float = 1.0) -> None:
        self.progress.step = step
        await self.writer.begin_last(trainer_s)
        await self.writer.finish_last()

    def newest(self) -> Checkpoint:
        found = checkpoint.newest(self.disk, ListLog(self.records, "", self.clock))
        assert found is not None
        return found

    def trainer_state(self) -> str:
        """The trainer's own state that a start would restore."""
        name = checkpoint.trainer_state(self.disk, self.newest())
        return (self.disk.read(name) or b"").decode() if name else ""

    def vector(self) -> np.ndarray:
        into = np.zeros(SIZE, np.float32)
        checkpoint.read_vector(self.disk, self.newest().folder, plain_layout(SIZE), into)
        return into

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record.fields for record in self.records if record.event == name]


#: Those of a checkpoint, in the order in which they are written.
FILES = ("vector.safetensors", "states-000000.bin", "state.json")


def in_world(scenario: Callable[[World], Awaitable[None]], folder: Path, **options: Any) -> None:
    async def main() -> None:
        await scenario(World(folder, **options))

    run(main(), limit_s=600)


@played_by(in_world, Fixture("tmp_path"))
async def test_a_trainer_that_saves_too_late_leaves_its_earlier_state(world: World) -> None:
    """SIGTERM in an optimiser step of 9 s: the last checkpoint has the last step and every shard, and the optimiser,
    the samples and the user's state of the checkpoint before, instead of none."""
    await world.periodic(3)
    world.trainer.copy_s = 9.0
    for step in (4, 5, 6):  # so that the checkpoint of step 3 itself is gone
        await world.leave(step, trainer_s=1.0)

    assert world.newest().state.step == 6
    assert world.trainer_state() == "state of 3"
    assert world.events("trainer_state_not_saved") == [
        {"step": step, "reason": "the trainer is busy"} for step in (4, 5, 6)
    ]


@pytest.mark.parametrize(("copy_s", "period_s"), [(0.1, PERIOD_S), (3.0, 150.0)])
@played_by(in_world, Fixture("tmp_path"))
async def test_checkpoints_that_hold_training_are_rarer(world: World, *, copy_s: float, period_s: float) -> None:
    """A copy of three seconds, as of a large optimiser: every 150 s, and not every ten."""
    world.trainer.copy_s = copy_s
    await world.periodic(1)
    written = world.clock.monotonic()
    while world.writer._writing is None or world.writer._writing.done():
        await asyncio.sleep(1.0)
        await world.writer.write_if_due()
    assert world.clock.monotonic() - written == pytest.approx(period_s, abs=1.5)


def test_the_state_that_the_node_started_with_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    """A node that leaves before its trainer has saved anything keeps what the checkpoint before had."""
    before = checkpoint.new_folder(FolderDisk(tmp_path), 1) + "/trainer.state"
    FolderDisk(tmp_path).write(before, b"of the run before")

    async def scenario(world: World) -> None:
        world.trainer.copy_s = 9.0
        await world.leave(2)
        assert world.trainer_state() == "of the run before"

        world.trainer.copy_s = 0.0
        await world.leave(3)
        assert world.trainer_state() == "state of 0"
        await world.leave(4)
        assert world.disk.read(before) is None

    in_world(scenario, tmp_path, trainer_state=before)


@played_by(in_world, Fixture("tmp_path"))
async def test_a_trainers_state_that_is_not_finite_does_not_replace_a_good_one(world: World) -> None:
    """The trainer refuses to write it; a restart takes the last good one, and so does the next start."""
    await world.periodic(1)
    world.trainer.refuses = True
    await world.periodic(2)

    assert world.newest().state.step == 2
    assert world.trainer_state() == "state of 1"
    assert len(world.saved) == 1
    assert "not finite" in world.events("trainer_state_not_saved")[0]["reason"]


@played_by(in_world, Fixture("tmp_path"))
async def test_a_checkpoint_that_has_a_fault_is_logged_and_the_next_one_is_written(world: World) -> None:
    """The one before stays until then."""
    await world.periodic(1)
    world.held = range(SHARDS + 1)  # a shard of which there is no state
    await world.periodic(2)
    assert world.newest().state.step == 1
    assert world.events("checkpoint_not_written") == [{"step": 2, "reason": "IndexError('list index out of range')"}]

    world.held = range(SHARDS)
    await world.periodic(3)
    assert world.newest().state.step == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@played_by(in_world, Fixture("tmp_path"))
async def test_values_that_are_broken_push_no_good_checkpoint_off_the_disk(world: World, *, bad: float) -> None:
    """Neither while the node trains nor when it leaves; the next good ones are written."""
    await world.periodic(1)
    world.replica.vector[20] = bad
    await world.periodic(2)
    await world.leave(3)
    assert world.newest().state.step == 1
    assert [one["step"] for one in world.events("checkpoint_not_written")] == [2, 3]

    world.replica.vector[20] = 1.0
    await world.periodic(4)
    assert world.newest().state.step == 4


@played_by(in_world, Fixture("tmp_path"), disk_s=1.0)
async def test_the_next_step_waits_for_no_disk(world: World) -> None:
    """A checkpoint begins between two steps, within the time of the copy. On a disk that takes a second for every file
    the next pull changes the vector before it is written: what is written has the versions of the pull."""
    world.trainer.copy_s, world.trainer.write_s = 0.2, 30.0
    await asyncio.sleep(PERIOD_S)
    world.progress.step = 7
    began = world.clock.monotonic()
    await world.writer.write_if_due()
    assert world.clock.monotonic() - began < 1.5  # one look into the folder; none of the files
    assert world.writer._writing is not None
    await asyncio.sleep(0)  # it begins to read
    assert not world.writer._writing.done()

    with world.replica.writing(0) as values:
        values[:] = 5.0
        world.replica.set_version(0, TERM, 9)
    world.progress.step = 8
    await world.writer.write_if_due()  # the first one is still being written
    await world.writer._writing
    assert world.newest().state.step == 7
    assert world.vector().tolist() == [5.0] * (SIZE // SHARDS) + [0.0] * (SIZE - SIZE // SHARDS)
    assert world.newest().state.marks[:2] == [(TERM, 9), (ZERO_TERM, 0)]
    assert world.events("checkpoint_written")[0]["seconds"] > 30.0


@played_by(in_world, Fixture("tmp_path"))
async def test_a_checkpoint_has_the_delta_that_its_trainer_has_trained(world: World) -> None:
    """The trainer copies its state at once and trains on; vector and step are those when its delta is counted."""
    world.progress.step = 7
    counted = asyncio.Event()
    await asyncio.sleep(PERIOD_S)
    await world.writer.write_if_due(counted.wait)
    await asyncio.sleep(5.0)
    assert len(world.saved) == 1, "the trainer's state is copied when its delta is cut"

    with world.replica.writing(0) as values:
        values[:] = 5.0
        world.replica.set_version(0, TERM, 9)
    world.progress.step = 8
    counted.set()
    assert world.writer._writing is not None
    await world.writer._writing
    assert world.newest().state.step == 8
    assert world.vector()[0] == 5.0


def test_a_delta_that_is_added_while_a_shard_is_copied_is_in_all_of_it(tmp_path: Path) -> None:
    """The copy is made again: value, momentum and identities on the disk belong together."""

    async def scenario(world: World) -> None:
        rule, number = Rule(0.7, 0.5), 0

        async def add() -> None:
            nonlocal number
            while True:
                await asyncio.sleep(0.7)
                number += 1
                world.states[0].apply(DeltaId(b"n" * 20, 1, number), 1.0, np.ones(SIZE // SHARDS, np.float32), rule)

        adding = asyncio.create_task(add())
        await world.leave(1)
        adding.cancel()
        bounds = shard_bounds(SIZE, SHARDS)
        stored = checkpoint.read_states(world.disk, world.newest(), bounds, SIZE, ListLog([], "", world.clock))
        assert sorted(stored) == list(range(SHARDS))
        found = stored[0].state
        again = ShardState(np.zeros(SIZE // SHARDS, np.float32), SIZE // SHARDS)
        for step in range(1, found.version + 1):
            again.apply(DeltaId(b"n" * 20, 1, step), 1.0, np.ones(SIZE // SHARDS, np.float32), rule)
        assert found.version > 0
        np.testing.assert_array_equal(found.value, again.value)
        np.testing.assert_array_equal(found.momentum, again.momentum)

    in_world(scenario, tmp_path, disk_s=0.5)


@played_by(in_world, Fixture("tmp_path"))
async def test_on_leaving_everything_is_written_once(world: World) -> None:
    """The shards after the hand-over only: those that a peer took are not on this disk, and the marker comes last."""
    written: list[str] = []
    create, write = world.disk.create, world.disk.write
    world.disk.create = lambda name: written.append(name) or create(name)  # type: ignore[assignment,func-returns-value,method-assign]
    world.disk.write = lambda name, data, **more: written.append(name) or write(name, data, **more)  # type: ignore[assignment,func-returns-value,method-assign]
    world.progress.step = 4
    await world.writer.begin_last(1.0)
    world.held = range(2, 3)  # the others have been handed over meanwhile
    await world.writer.finish_last()

    folder = world.newest().folder
    assert written == [f"{folder}/{name}" for name in FILES]
    stored = checkpoint.read_states(
        world.disk, world.newest(), shard_bounds(SIZE, SHARDS), SIZE, ListLog([], "", world.clock)
    )
    assert list(stored) == [2]


@played_by(in_world, Fixture("tmp_path"), disk_s=1.0)
async def test_a_node_that_leaves_gives_up_the_checkpoint_that_is_being_written(world: World) -> None:
    """It writes the last one instead, and nothing of the other is left."""
    world.trainer.write_s = 30.0
    await asyncio.sleep(PERIOD_S)
    world.progress.step = 1
    await world.writer.write_if_due()
    await asyncio.sleep(3.0)
    world.trainer.write_s = 0.0
    await world.leave(2)

    assert [fields["step"] for fields in world.events("checkpoint_written")] == [2]
    assert {name.rpartition("/")[0] for name in world.disk.names("checkpoints")} == {world.newest().folder}


@played_by(simulate)
async def test_checkpoints_are_written_regularly_and_on_leaving(swarm: Swarm) -> None:
    """One per period while steps are made, the last at the step of leaving."""
    host = swarm.start("n0", training__checkpoint_s=2.0)
    node = host.living
    await swarm.until(lambda: node.progress.step >= 10, within_s=60, what="it trains")
    written = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_written"]
    assert len(written) >= 2

    node.leave()
    assert host.task is not None
    await host.task
    steps = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_written"]
    assert steps[-1] == node.progress.step
    assert steps == sorted(steps)


@played_by(simulate)
async def test_a_full_disk_is_logged_and_training_continues(swarm: Swarm) -> None:
    """Each failed checkpoint is an event; no step is lost, and the node leaves in order."""
    host = swarm.start("n0", training__checkpoint_s=1.0)
    node = host.living
    await swarm.until(lambda: node.progress.step >= 1, within_s=60, what="a step")

    host.disk.full = True
    step = node.progress.step
    await swarm.until(lambda: node.progress.step >= step + 5, within_s=60, what="five more steps")

    refused = [record for record in swarm.records if record.event == "checkpoint_not_written"]
    assert refused
    assert "No space left" in refused[0].fields["reason"]
    node.leave()
    assert host.task is not None
    assert await host.task == "leave"


def test_no_checkpoint_is_read_or_written_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All access to the files of checkpoints, in training, on leaving and at the next start, is in the executor."""
    in_executor = False
    outside: list[str] = []

    class MarkingExecutor(InlineExecutor):
        async def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            def marked(*args: Any, **kwargs: Any) -> Any:
                nonlocal in_executor
                in_executor = True
                try:
                    return function(*args, **kwargs)
                finally:
                    in_executor = False

            return await super().run(marked, *args, **kwargs)

    def watched(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: str = "", *args: Any, **kwargs: Any) -> Any:
            if name.startswith("checkpoints") and not in_executor:
                outside.append(f"{access.__name__} {name}")
            return access(name, *args, **kwargs)

        return call

    async def scenario(swarm: Swarm) -> None:
        swarm.state_path = Path("/state")
        host = swarm.start("n0", training__checkpoint_s=2.0)
        for access in ("read", "write", "create", "size", "read_at", "remove", "names"):
            setattr(host.disk, access, watched(getattr(host.disk, access)))
        await swarm.until(lambda: host.living.progress.step >= 10, within_s=60, what="it trains")
        host.living.leave()
        assert host.task is not None
        await host.task
        again = swarm.start("n0", training__checkpoint_s=2.0)
        await swarm.until(lambda: again.living.progress.step >= 12, within_s=60, what="it goes on")

        events = [record.event for record in swarm.records]
        assert events.count("checkpoint_written") >= 3
        assert "checkpoint_loaded" in events
        assert outside == []

    monkeypatch.setattr("tests.harness.swarms.swarm.InlineExecutor", MarkingExecutor)
    simulate(scenario)


@played_by(simulate)
async def test_a_disk_that_cannot_be_read_ends_no_node(swarm: Swarm) -> None:
    """Neither in training, nor on leaving, nor at the next start: each time there is an event that says why."""

    def broken(_folder: str = "") -> list[str]:
        raise OSError(5, "Input/output error")

    host = swarm.start("n0", training__checkpoint_s=1.0)
    host.disk.names = broken  # type: ignore[method-assign]
    await swarm.until(lambda: host.living.progress.step >= 5, within_s=60, what="five steps")
    host.living.leave()
    assert host.task is not None
    assert await host.task == "leave"
    again = swarm.start("n0")
    await swarm.until(lambda: again.living.progress.step >= 1, within_s=60, what="it trains")

    refused = [record for record in swarm.records if record.event == "checkpoint_not_written"]
    assert len(refused) >= 3
    assert "Input/output error" in refused[0].fields["reason"]
    unreadable = [record for record in swarm.records if record.event == "checkpoint_unreadable"]
    assert [record.fields["folder"] for record in unreadable] == ["checkpoints"] * 2


def test_the_last_checkpoint_says_how_far_it_is(tmp_path: Path) -> None:
    """Bytes of the vector and of the held shards, on a slow disk; nothing before, after, and of a periodic one."""
    seen: list[tuple[int, int, float]] = []

    async def scenario() -> None:
        world = World(tmp_path, disk_s=1.0)
        await world.periodic(1)
        assert world.writer.progress_of_last is None
        leaving = asyncio.create_task(world.leave(2))
        while not leaving.done():
            await asyncio.sleep(0.25)
            if (now := world.writer.progress_of_last) is not None:
                seen.append(now)
        await leaving
        assert world.writer.progress_of_last is None

    run(scenario())
    done = [row[0] for row in seen]
    states = sum(ShardState(np.zeros(SIZE // SHARDS, np.float32), SIZE // SHARDS).size_bytes for _ in range(SHARDS))
    assert done == sorted(done)
    assert done[0] == 0
    assert 4 * SIZE in done
    assert seen[-1][:2] == (4 * SIZE + states, 4 * SIZE + states)
    assert seen[-1][2] > seen[0][2]


class Executor:
    """Runs a function, and adds a delta to the state after it as often as it is told."""

    def __init__(self, add: Callable[[], None], times: int) -> None:
        self.add, self.times, self.calls = add, times, 0

    async def run(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        result = function(*arguments, **named)
        if self.calls <= self.times:
            self.add()
        return result

    def pause(self) -> None: ...


@pytest.mark.parametrize("times", [0, 1, ATTEMPTS - 1, ATTEMPTS, 10])
def test_the_copy_is_of_one_moment_however_many_deltas_come(times: int) -> None:
    """It is begun again after each, and at last made at once; the state goes on by itself."""
    store = owner_of("a")
    state, steps = store.owned[0].state, iter(range(1, 100))
    executor = Executor(lambda: store.add(0, delta(next(steps))), times)

    copy = asyncio.run(copied(state, executor))  # type: ignore[arg-type]

    assert executor.calls == min(times + 1, ATTEMPTS)
    assert (copy.version, copy.value.tolist()) == (state.version, state.value.tolist())
    store.add(0, delta(next(steps)))
    assert copy.version == state.version - 1
    assert copy.value.tolist() != state.value.tolist()
