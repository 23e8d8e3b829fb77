"""The loop of a server, asked by hand: whom it hears, what it tells, and how its run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.messages import Computed, Poll, TaskGiven, Told
from p2pnode.training.engines.server.program import ServerVerbs
from p2pnode.training.engines.server.record import RECORD_KEY, ServerRecord, encode_record
from p2pnode.training.engines.server.service import CHECK_S, LONGEST_WAIT_S, MEMBERS_S, SILENT_S, STAY_S, STORE_S
from p2pnode.training.trainer_link.engine_messages import NotAnswered
from p2pnode.training.values.encoding import encode_key, encode_value
from p2pnode.training.values.store import StoreUnavailable
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.swarms.server_swarm import World, WorldNode

OPTIONS = ServerOptions(barrier="asp", max_failures=1)


def summing(stops_at: int = 1000) -> ServerVerbs:
    """Each task is the key `k`; updates are added to it."""
    verbs = ServerVerbs()
    verbs.register_schedule(lambda ctx, workers: {worker: ["k"] for worker in workers})
    verbs.register_stop(lambda ctx: ctx.version >= stops_at)
    verbs.reducer = "add"
    return verbs


def without_tasks() -> ServerVerbs:
    """Workers wait for ever."""
    verbs = summing()
    verbs.register_schedule(lambda ctx, workers: {})
    return verbs


class Worker:
    """A worker of which the test is the loop."""

    def __init__(self, world: World) -> None:
        world._count += 1
        self.node = WorldNode(world, bytes([2]) + world._count.to_bytes(19, "big"), is_server=False)
        world.nodes[self.node.node_id] = self.node
        self.node.task = asyncio.create_task(asyncio.sleep(10_000.0, 0))
        self.server = next(iter(world.nodes))
        self.world = world

    async def ask(self, *reports: Computed, **fields: Any) -> Told:
        poll = Poll(1, 0, self.world.options.text(), list(reports))
        return await self.send(messages.encode(msgspec.structs.replace(poll, **fields)))

    async def send(self, payload: bytes) -> Told:
        return messages.decode_told(await self.node.call(self.server, payload))

    async def task(self) -> TaskGiven:
        for _ in range(20):
            if (found := (await self.ask()).task) is not None:
                return found
        raise AssertionError("no task")


def computed(task: TaskGiven, value: int = 1, **fields: Any) -> Computed:
    return msgspec.structs.replace(
        Computed(task.held, task.version, [(encode_key("k"), encode_value("k", value))]), **fields
    )


def play(
    scenario: Callable[[World, WorldNode], Awaitable[None]],
    verbs: ServerVerbs | None = None,
    options: ServerOptions = OPTIONS,
) -> None:
    """A world of one server, which is cancelled at the end."""

    async def main() -> None:
        world = World(options, lambda _: verbs or summing())
        server = world.add(server=True)
        try:
            await scenario(world, server)
        finally:
            for node in world.nodes.values():
                node.task.cancel()
            await asyncio.gather(*(node.task for node in world.nodes.values()), return_exceptions=True)

    run(main())


async def value(world: World) -> object:
    found = await world.store.get("k")
    return None if found is None else found.value


@played_by(play, without_tasks())
async def test_a_worker_without_news_is_answered_after_ten_seconds(world: World, _: WorldNode) -> None:
    """Its next request shows that it lives. When it asks again meanwhile, its former request is answered at once."""
    worker = Worker(world)
    began = world.clock()
    assert (await worker.ask()).task is None
    assert LONGEST_WAIT_S <= world.clock() - began < LONGEST_WAIT_S + MEMBERS_S + 0.1
    former = asyncio.create_task(worker.ask())
    await asyncio.sleep(0.1)
    began = world.clock()
    asyncio.create_task(worker.ask())  # noqa: RUF006
    await former
    assert world.clock() - began < 0.1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run": 2}, "start number 1 of the program is under way here, not number 2"),
        ({"settings": "others"}, "this node with others"),
    ],
)
@played_by(play)
async def test_a_node_that_runs_something_else_is_refused(
    world: World, _: WorldNode, *, fields: dict[str, Any], reason: str
) -> None:
    """It is no worker then, and hears why; so does one whose message is malformed."""
    worker = Worker(world)
    told = await worker.ask(**fields)
    assert told.refused.endswith(reason)
    assert "malformed Poll" in (await worker.send(b"\xc1")).refused
    assert (await worker.ask(is_standby=True)).workers == 0


@played_by(play, options=ServerOptions(barrier="asp", min_workers=2))
async def test_no_task_is_given_before_there_are_enough_workers(world: World, _: WorldNode) -> None:
    """Then all get theirs; one that leaves afterwards stops nobody."""
    first, second = Worker(world), Worker(world)
    assert (await first.ask()).task is None
    waiting = asyncio.create_task(first.task())
    await asyncio.sleep(0.2)
    left = (await second.task()).held
    task = await waiting
    assert (await second.ask(leaves=True)).task is None
    told = await first.ask(computed(task))
    assert (told.workers, told.version) == (1, 1)
    held = (await first.task()).held
    assert (held.task, held.attempt) == (left.task, 2), "the task that was left"


@played_by(play)
async def test_a_worker_that_asks_no_more_is_taken_for_gone(world: World, _: WorldNode) -> None:
    """Its node may live: after twenty seconds it counts no longer; one whose node is dead, as soon as that is known."""
    first, second, third = Worker(world), Worker(world), Worker(world)
    held, *_ = [(await worker.task()).held for worker in (first, second, third)]
    began = world.clock()
    world.kill(third.node)
    counts = []
    while world.clock() - began < SILENT_S + 2.0:
        counts.append((world.clock() - began, (await first.ask(holds=held)).workers))
        await asyncio.sleep(0.5)
    assert counts[0][1] == 3
    assert {count for at, count in counts if 5.0 < at < SILENT_S - 3.0} == {2}
    assert counts[-1][1] == 1


def test_a_worker_that_waits_while_the_server_is_busy_is_not_taken_for_gone() -> None:
    """It asks no more because it has no answer: a commit takes half a minute, for no owner answers."""
    verbs = summing()
    verbs.register_schedule(lambda ctx, workers: {one: ["k"] for one in workers if one == min(ctx.steps)})

    async def scenario(world: World, _: WorldNode) -> None:
        first, second = Worker(world), Worker(world)
        task = await first.task()
        waiting = asyncio.create_task(second.ask())
        await asyncio.sleep(0.5)
        world.unavailable_until = world.clock() + SILENT_S + 5.0
        told = await first.ask(computed(task))
        assert (told.version, (await waiting).task) == (1, None)
        await asyncio.sleep(2 * MEMBERS_S)
        assert (await first.ask(holds=task.held)).workers == 2

    play(scenario, verbs)


@played_by(play, summing(stops_at=1))
async def test_a_run_that_is_over_completes_its_open_tasks_and_tells_everybody(world: World, server: WorldNode) -> None:
    """The server returns the version of the values, and stays while somebody has not heard of the end."""
    first, second = Worker(world), Worker(world)
    one, other = await first.task(), await second.task()
    told = await first.ask(computed(one))
    assert (told.ended, told.task) == ("", None)
    late = asyncio.create_task(second.ask(computed(other)))
    assert (await first.ask()).ended == "stopped"
    assert (await late).ended == "stopped"
    assert await server.task == 2
    assert (await world.record()).ended == "stopped"


def test_a_server_waits_no_longer_than_five_seconds_for_those_that_have_not_heard() -> None:
    """A worker that asks no more would hold it up otherwise."""
    verbs = summing(stops_at=2)
    verbs.register_schedule(lambda ctx, workers: {} if ctx.version else {worker: ["k"] for worker in workers})

    async def scenario(world: World, server: WorldNode) -> None:
        first, second = Worker(world), Worker(world)
        one, other = await first.task(), await second.task()
        await second.ask(computed(other))
        told = await first.ask(computed(one))
        while not told.ended:
            told = await first.ask()
        began = world.clock()
        await server.task
        assert STAY_S - 0.5 <= world.clock() - began <= STAY_S + 0.1

    play(scenario, verbs)


def test_a_task_whose_values_are_too_large_to_send_ends_the_run() -> None:
    """Otherwise its worker would wait for an answer that never comes."""
    verbs = summing()
    keys = [f"part {number}" for number in range(57)]
    verbs.register_schedule(lambda ctx, workers: dict.fromkeys(workers, keys))

    async def scenario(world: World, server: WorldNode) -> None:
        for key in keys:
            await world.store.set(key, bytes((1 << 20) - 5))
        told = await Worker(world).ask()
        assert told.failure is not None
        with pytest.raises(VerbFailed, match=r"schedule of .* the 57 values of a task: they take 59,7.*smaller tasks"):
            await server.task

    play(scenario, verbs)


@pytest.mark.parametrize(("away_s", "is_made"), [(STORE_S - 10.0, True), (STORE_S + 10.0, False)])
@played_by(play)
async def test_a_commit_is_repeated_while_no_owner_of_its_keys_answers(
    world: World, server: WorldNode, *, away_s: float, is_made: bool
) -> None:
    """For a minute: its backup takes over meanwhile. It counts once."""
    worker = Worker(world)
    report = computed(await worker.task(), 5)
    world.unavailable_until = world.clock() + away_s
    with pytest.raises(NotAnswered):
        await worker.ask(report)
    await asyncio.sleep(STORE_S - 15.0)
    assert (await value(world) == 5) == is_made
    assert server.task.done() != is_made
    if not is_made:
        with pytest.raises(StoreUnavailable):
            await server.task


@played_by(play, without_tasks())
async def test_a_server_that_another_has_replaced_tells_its_workers_where_to_ask(
    world: World, server: WorldNode
) -> None:
    """It looks for that also while it has nothing to store, and stands by from then on."""
    worker = Worker(world)
    asked = asyncio.create_task(worker.ask())
    await asyncio.sleep(0.1)
    theirs = (await world.record()).epoch + 1
    record = encode_record(ServerRecord(epoch=theirs, server=b"9" * 20, run=1))
    await world.store.set(RECORD_KEY, record, 1)
    began = world.clock()
    told = await asked
    assert (told.epoch, told.server) == (0, b"9" * 20)
    assert world.clock() - began <= CHECK_S + 2 * MEMBERS_S
