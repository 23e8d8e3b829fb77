"""Servers and workers of a parameter server on a virtual clock: kills at any moment, lost answers, all barriers."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import numpy as np
import pytest

from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.messages import NoServer, Poll, decode_told, encode
from p2pnode.training.engines.server.program import ServerVerbs, UpdatesLost
from p2pnode.training.engines.server.record import RECORD_KEY, Pending, ServerRecord, WorkerProgress, encode_record
from p2pnode.training.engines.server.tasks import MAX_KEYS
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.long_run import more
from tests.harness.swarms.server_swarm import World

#: Histories per test; each has its own kills, losses and times.
SEEDS = range(8)
KINDS = {
    "bsp": ServerOptions(barrier="bsp", min_workers=2),
    "ssp": ServerOptions(barrier="ssp", staleness=1, min_workers=2),
    "asp": ServerOptions(barrier="asp"),
    "pbsp": ServerOptions(barrier="pbsp", sample=1),
    "pssp": ServerOptions(barrier="pssp", staleness=1, sample=2),
}
#: Those that differ most, and the others.
QUICK = ["bsp", "asp", "pssp", *more("ssp", "pbsp")]


class Ledger:
    """A program whose every task is an item: its update adds the item to two values."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.numbers = itertools.count()
        self.pushed: dict[str, list[int]] = {}

    def verbs(self, node: str) -> ServerVerbs:
        verbs = ServerVerbs()

        @verbs.register_schedule
        def schedule(ctx, workers):
            return {worker: [("item", next(self.numbers)), "a"] for worker in workers}

        @verbs.register_push
        def push(ctx, params):
            item = params[0][1]
            self.pushed.setdefault(node, []).append(item)
            return [("a", [item]), ("b", [item])]

        @verbs.register_pull
        def pull(ctx, updates):
            found = {one.key: list(ctx.get(one.key, []).value) for one in updates}
            for one in updates:
                found[one.key] += one.value
            return [(key, value, 0) for key, value in found.items()]

        @verbs.register_stop
        def stop(ctx):
            return ctx.version >= self.items

        return verbs


async def chaos(kind: str, seed: int, *, kills: int) -> tuple[World, Ledger]:
    """A run of two to four servers and three workers or more, in which nodes are killed and others join."""
    ledger = Ledger(40)
    world = World(KINDS[kind], ledger.verbs, seed, lost=0.1)
    draw = world.random
    world.push_s = lambda _: draw.uniform(0.02, 0.6)
    for _ in range(3):
        world.add(server=True)
    for _ in range(4):
        world.add(server=False)
    for _ in range(kills):
        await asyncio.sleep(draw.uniform(0.05, 1.0))
        is_server = draw.random() < 0.5
        living = world.live(server=is_server)
        if not living or (is_server and len(living) == 1):
            continue
        world.kill(draw.choice(living))
        await asyncio.sleep(draw.uniform(3.0, 8.0))
        world.add(server=is_server)
    await world.ends()
    return world, ledger


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.promise(15)
def test_every_task_counts_once_whoever_is_killed(kind):
    """Servers and workers are killed one after the other, and answers get lost: what was pushed counts exactly once."""
    for seed in (9, 15, 18, 21, 29, 36, 37, 44):  # between them they die at every place that matters
        print("seed", seed)
        world, ledger = run(chaos(kind, seed, kills=3), limit_s=900.0)
        found = {key: Counter(asyncio.run(world.store.get(key)).value) for key in "ab"}
        assert max(found["a"].values()) == 1
        assert found["a"] == found["b"]
        dead = {node.name for node in world.nodes.values() if node.node_id in world.died_at}
        pushed = {item for name, items in ledger.pushed.items() if name not in dead for item in items}
        assert pushed <= found["a"].keys()
        assert len(found["a"]) >= ledger.items


async def together(kind: str, seed: int) -> tuple[World, Ledger, list[UpdatesLost]]:
    """Servers die, and workers begin anew at the same moment; answers get lost."""
    ledger = Ledger(30)
    world = World(KINDS[kind], ledger.verbs, seed, lost=0.1)
    draw = world.random
    world.push_s = lambda _: draw.uniform(0.02, 0.6)
    for _ in range(4):
        world.add(server=True)
    for _ in range(3):
        world.add(server=False)
    for _ in range(3):
        await asyncio.sleep(draw.uniform(0.3, 3.0))
        serving = world.nodes.get((await world.record()).server)
        if serving is None or serving.node_id in world.died_at or serving.task.done():
            continue
        world.kill(serving)
        workers = world.live(server=False)
        for node in draw.sample(workers, min(len(workers), draw.choice([0, 1, 1, 2]))):
            world.begin_anew(node)
        await asyncio.sleep(draw.uniform(2.5, 4.0))
    living = [node.task for node in world.nodes.values() if node.node_id not in world.died_at]
    ends = await asyncio.gather(*living, return_exceptions=True)
    assert [one for one in ends if isinstance(one, BaseException) and not isinstance(one, UpdatesLost)] == []
    lost = [one for one in ends if isinstance(one, UpdatesLost)]
    assert len(lost) in (0, len(ends)), "all nodes hear of it, or none"
    return world, ledger, lost


@pytest.mark.parametrize("kind", QUICK)
def test_what_dies_with_a_server_and_a_worker_that_begins_anew_is_named(kind):
    """A worker that begins anew knows of no commit. Without a loss all values have all updates once; with one, no more
    updates are in some of them only than the error counts."""
    losses = 0
    for seed in range(12):
        print("seed", seed)
        world, _, lost = run(together(kind, seed), limit_s=900.0)
        found = {key: Counter(asyncio.run(world.store.get(key)).value) for key in "ab"}
        assert max(found["a"].values()) == 1
        assert max(found["b"].values()) == 1
        named = lost[0].count if lost else 0
        torn = (found["a"] - found["b"]) + (found["b"] - found["a"])
        assert torn.total() <= named
        version = asyncio.run(world.record()).version
        assert version - named <= len(found["a"] | found["b"]) <= version
        losses += named
    assert losses > 0


def test_a_worker_that_begins_anew_within_a_commit_vouches_for_nothing():
    """The server dies when one of two values has the update, and its worker begins anew: at the end every node raises
    the error, which counts the update, and the values can be used."""
    ledger = Ledger(5)

    async def history():
        world = World(KINDS["asp"], ledger.verbs)
        servers = [world.add(server=True), world.add(server=True)]
        worker = world.add(server=False)
        while await world.store.get("a") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await world.store.get("b") is None
        world.kill(servers[0])
        worker = world.begin_anew(worker)
        ends = await asyncio.gather(servers[1].task, worker.task, return_exceptions=True)
        return ends, (await world.store.get("a")).value, (await world.store.get("b")).value

    ends, first, second = run(history(), limit_s=300.0)
    assert [type(one) for one in ends] == [UpdatesLost, UpdatesLost]
    for error in ends:
        assert error.count == 1
        assert "1 update may be missing in its values" in str(error)
        assert error.version == len(first) == len(second) + 1


def test_a_server_that_stood_by_knows_of_a_commit_that_nobody_else_can_vouch_for():
    """The only worker begins anew when the server dies after a commit, and the next server has asked meanwhile: nothing
    is lost, and nothing is said to be."""
    ledger = Ledger(5)

    async def history():
        world = World(KINDS["asp"], ledger.verbs, push_s=lambda _: 3.0)
        servers = [world.add(server=True), world.add(server=True)]
        worker = world.add(server=False)
        while await world.store.get("b") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(1.5)
        world.kill(servers[0])
        worker = world.begin_anew(worker)
        await asyncio.gather(servers[1].task, worker.task)
        return (await world.store.get("a")).value, (await world.store.get("b")).value

    first, second = run(history(), limit_s=300.0)
    assert len(first) == 5
    assert first == second


def regression(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a linear problem, and their targets."""
    draw = np.random.default_rng(seed)
    rows = draw.uniform(size=(60, 5))
    return rows, rows @ np.array([0.3, 0.5, 0.7, 0.4, 0.9])


def gradient(weights: np.ndarray, part: int, parts: int) -> np.ndarray:
    rows, targets = regression()
    mine = slice(part, None, parts)
    return 2.0 * rows[mine].T @ (rows[mine] @ weights - targets[mine]) / len(rows)


def sequential(steps: int, rate: float = 0.3) -> np.ndarray:
    weights = np.zeros(5)
    for _ in range(steps):
        weights -= rate * gradient(weights, 0, 1)
    return weights


def sgd(node: str, steps: int = 20, updates: int = 10**9, rate: float = 0.3) -> ServerVerbs:
    """Plain SGD: in each step every part of the rows is a task of one worker."""
    verbs = ServerVerbs()

    @verbs.register_schedule
    def schedule(ctx, workers):
        if ctx.version == 0 and "w" not in ctx.keys():  # noqa: SIM118
            ctx.set("w", np.zeros(5))
        names = sorted(ctx.steps)
        return {worker: ["w", ("part", [names.index(worker), len(names)])] for worker in workers}

    @verbs.register_push
    def push(ctx, params):
        values = dict(params)
        return [("w", gradient(values["w"], *values["part"]))]

    @verbs.register_pull
    def pull(ctx, updates):
        return [("w", ctx.get("w").value - rate * sum(one.value for one in updates), 0)]

    @verbs.register_stop
    def stop(ctx):
        return ctx.step >= steps or ctx.version >= updates

    return verbs


async def trained(
    options: ServerOptions, *, workers: int = 3, kill: str = "", push_s=None, steps: int = 20, updates: int = 10**9
) -> np.ndarray:
    world = World(options, lambda node: sgd(node, steps, updates), push_s=push_s or (lambda _: 0.2))
    servers = [world.add(server=True), world.add(server=True)]
    others = [world.add(server=False) for _ in range(workers)]
    if kill:
        await asyncio.sleep(1.3)
        world.kill(servers[0] if kill == "server" else others[-1])
    await world.ends()
    return (await world.store.get("w")).value


@pytest.mark.parametrize("workers", [1, 3])
def test_bsp_with_plain_sgd_equals_the_sequential_run(workers):
    """The parts of a step are computed from the same values and reach them together: the weights agree to 1e-5."""
    found = run(trained(ServerOptions(min_workers=workers), workers=workers), limit_s=300.0)
    assert np.abs(found - sequential(20)).max() < 1e-12


@pytest.mark.parametrize("kill", ["worker", "server"])
def test_bsp_equals_the_sequential_run_when_a_node_is_killed(kill):
    """The task of a dead worker is given again in its step, and the next server repeats what the dead one left."""
    found = run(trained(ServerOptions(min_workers=3), kill=kill), limit_s=300.0)
    assert np.abs(found - sequential(20)).max() < 1e-5


def test_asynchronous_sgd_reaches_the_solution_with_a_straggler():
    """Under asp and pssp the weights are learned, though a worker is ten times slower than the others."""
    for options in (
        ServerOptions(barrier="asp"),
        ServerOptions(barrier="pssp", staleness=2, sample=1),
    ):
        found = run(
            trained(options, push_s=lambda node: 1.0 if node.endswith("-5") else 0.1, updates=400), limit_s=900.0
        )
        assert np.abs(found - np.array([0.3, 0.5, 0.7, 0.4, 0.9])).max() < 0.05, options


# -- synchronous SGD


class Versions:
    """A program whose update says how many updates its values had: `pull` compares that with what they have now."""

    def __init__(self, updates: int, tolerance: int = 0) -> None:
        self.updates = updates
        self.tolerance = tolerance
        self.ages: list[float] = []

    def verbs(self, node: str) -> ServerVerbs:
        verbs = ServerVerbs()
        verbs.register_schedule(lambda ctx, workers: {worker: ["w"] for worker in workers})

        @verbs.register_push
        def push(ctx, params):
            seen = 0.0 if params[0][1] is None else params[0][1][0]
            return [("w", np.array([seen, 1.0]))]

        @verbs.register_pull
        def pull(ctx, updates):
            value = ctx.get("w", np.zeros(2)).value
            for one in updates:
                self.ages.append(value[0] - one.value[0])
                value = value + np.array([1.0, one.value[1]])
            return [("w", value, 0)]

        verbs.register_stop(lambda ctx: ctx.version >= self.updates)
        return verbs


@pytest.mark.parametrize(("grads", "tolerance"), [(2, 0), (2, 2)])
@pytest.mark.promise(15)
def test_no_stale_gradient_is_in_the_model_whatever_is_lost(grads, tolerance):
    """Every update is the mean of exactly `grads_to_wait` gradients of the version before it, or of the tolerance."""
    options = ServerOptions(barrier="asp", grads_to_wait=grads, version_tolerance=tolerance)
    for seed in SEEDS:
        print("seed", seed)
        program = Versions(25, tolerance)

        async def history(seed=seed, program=program):
            world = World(options, program.verbs, seed, lost=0.15)
            world.push_s = lambda _: world.random.uniform(0.02, 0.5)
            servers = [world.add(server=True) for _ in range(2)]
            workers = [world.add(server=False) for _ in range(5)]
            await asyncio.sleep(world.random.uniform(0.5, 2.0))
            world.kill(world.random.choice([servers[0], *workers]))
            await world.ends()
            return await world.store.get("w"), await world.record()

        value, record = run(history(), limit_s=900.0)
        assert record.version >= 25
        assert value.value[0] == record.version  # as many updates as versions
        assert abs(value.value[1] - record.version) < 1e-9  # each with a weight of 1 in all: none more, none fewer
        assert min(program.ages) >= -1e-9
        assert max(program.ages) <= tolerance + 1e-9


def test_a_quota_waits_for_workers_and_goes_on_when_they_come():
    """With fewer workers than `grads_to_wait` nothing is updated; no smaller batch is taken."""
    program = Versions(3)

    async def history():
        world = World(ServerOptions(barrier="asp", grads_to_wait=2), program.verbs)
        world.add(server=True)
        world.add(server=False)
        await asyncio.sleep(30.0)
        assert await world.store.get("w") is None
        world.add(server=False)
        await world.ends()
        return await world.record()

    assert run(history(), limit_s=300.0).version == 3


# -- errors, and what is empty


def simple(**functions) -> ServerVerbs:
    verbs = ServerVerbs()
    verbs.register_schedule(lambda ctx, workers: {worker: ["w"] for worker in workers})
    verbs.register_push(lambda ctx, params: [("w", 1)])
    verbs.register_pull("add")
    verbs.register_stop(lambda ctx: ctx.version >= 5)
    for name, function in functions.items():
        getattr(verbs, f"register_{name}")(function)
    return verbs


async def run_of(options: ServerOptions, verbs_of, *, workers: int = 2, servers: int = 1) -> tuple[World, list]:
    world = World(options, verbs_of)
    for _ in range(servers):
        world.add(server=True)
    for _ in range(workers):
        world.add(server=False)
    found = await asyncio.gather(*(node.task for node in world.nodes.values()), return_exceptions=True)
    return world, found


def bang(*_):
    raise ZeroDivisionError("bang")


@pytest.mark.parametrize(
    ("verb", "function", "keys"),
    [
        ("schedule", bang, ()),
        ("push", bang, ("w",)),
        ("pull", bang, ("w",)),
        ("stop", bang, ()),
        ("barrier", bang, ()),
    ],
)
def test_an_error_in_a_function_ends_the_run_everywhere(verb, function, keys):
    """Servers and workers raise it; it names verb, keys and node, and the values can still be used."""
    world, found = run(run_of(ServerOptions(), lambda _: simple(**{verb: function}), servers=2), limit_s=300.0)
    assert [type(one).__name__ for one in found] == ["VerbFailed"] * 4
    for error in found:
        assert (error.verb, error.keys) == (verb, keys)
        assert "bang" in str(error)
    at = {node.node_id.hex(): node.name for node in world.nodes.values()}
    if verb == "push":
        assert at[found[0].node].startswith("worker")
    elif verb != "pull":  # the store in memory is nobody's node
        assert at[found[0].node].startswith("server")

    async def again():
        await world.store.set("x", 1)
        return (await world.store.get("x")).value

    assert run(again()) == 1


def test_an_error_at_one_worker_moves_its_task_to_another():
    """A function that raises now and then ends nothing: the task is given again, up to `max_failures` times."""
    raised = []

    def push(ctx, params):
        if len(raised) < 3:
            raised.append(ctx.node_id)
            raise RuntimeError("now and then")
        return [("w", 1)]

    world, found = run(run_of(ServerOptions(), lambda _: simple(push=push)), limit_s=300.0)
    assert found[0] >= 5
    assert asyncio.run(world.store.get("w")).value == found[0]


@pytest.mark.parametrize(
    ("push", "cause"),
    [
        (lambda ctx, params: [("w", object())], "the value of 'w' cannot be encoded"),
        (
            lambda ctx, params: [(str(part), bytes((1 << 20) - 8)) for part in range(57)],
            "the 57 updates of push: they take 59,7",
        ),
        (
            lambda ctx, params: [(str(part), 0) for part in range(MAX_KEYS + 1)],
            "push returned 65,537 updates, and at most 65,536 are allowed: make smaller tasks",
        ),
    ],
    ids=["object", "large", "many"],
)
def test_an_update_that_cannot_be_sent_is_named(push, cause):
    """The error says what is wrong, and comes from `push`."""
    _, found = run(run_of(ServerOptions(max_failures=0), lambda _: simple(push=push)), limit_s=300.0)
    assert [(type(one).__name__, one.verb) for one in found] == [("VerbFailed", "push")] * 3
    assert cause in found[1].cause


def test_an_update_that_cannot_be_averaged_is_named():
    """Synchronous SGD needs numbers; the error names key and worker."""
    options = ServerOptions(barrier="asp", grads_to_wait=2)
    _, found = run(run_of(options, lambda _: simple(push=lambda ctx, params: [("w", "text")])), limit_s=300.0)
    assert [type(one).__name__ for one in found] == ["VerbFailed"] * 3
    assert found[0].keys == ("w",)
    assert "only numbers and arrays" in str(found[0])


def test_a_program_that_schedules_nothing_ends_when_it_stops():
    """No task, no update, no value: `stop` is asked all the same."""
    asked = []

    def stop(ctx):
        asked.append(ctx.worker_num)
        return len(asked) > 10

    world, found = run(
        run_of(ServerOptions(barrier="asp"), lambda _: simple(schedule=lambda ctx, workers: {}, stop=stop)),
        limit_s=300.0,
    )
    assert found == [0, 0, 0]
    assert asked[-1] == 2
    assert asyncio.run(world.store.keys()) == [RECORD_KEY]


def test_updates_of_nothing_complete_a_step():
    """A `push` without an update is counted, and no value changes."""
    world, found = run(run_of(ServerOptions(), lambda _: simple(push=lambda ctx, params: [])), limit_s=300.0)
    assert found[0] >= 5
    assert asyncio.run(world.store.get("w")) is None


def test_a_barrier_of_ones_own_replaces_the_named_one():
    """It lets one worker pass at a time, so only one works."""
    chosen = set()

    def barrier(ctx, idle):
        chosen.add(min(ctx.steps))
        return [one for one in idle if one == min(ctx.steps)]

    _, found = run(run_of(ServerOptions(barrier="asp"), lambda _: simple(barrier=barrier)), limit_s=300.0)
    assert len(chosen) == 1
    assert sorted(found[1:]) == [0, found[0]]


def test_other_options_are_refused():
    """A worker that was started with another barrier hears so, and the run goes on without it."""

    async def history():
        world = World(ServerOptions(), lambda _: simple())
        world.add(server=True)
        world.add(server=False)
        world.options = ServerOptions(staleness=7)
        other = world.add(server=False)
        found = await asyncio.gather(*(node.task for node in world.nodes.values()), return_exceptions=True)
        return found, other

    found, _ = run(history(), limit_s=300.0)
    assert found[:2] == [5, 5]
    assert type(found[2]).__name__ == "NoServer"
    assert '"staleness":7' in str(found[2])


def test_an_earlier_start_than_the_one_under_way_is_refused():
    """A worker and a server hear both numbers."""

    async def history():
        world = World(ServerOptions(), lambda _: simple(stop=lambda ctx: False))
        world.add(server=True, run=3)
        await asyncio.sleep(1.0)
        late = [world.add(server=server, run=2) for server in (True, False)]
        return await asyncio.gather(*(node.task for node in late), return_exceptions=True)

    for error in run(history(), limit_s=300.0):
        assert isinstance(error, NoServer)
        assert "start number 3 of the program is under way" in str(error)
        assert "number 2" in str(error)


def test_a_worker_whose_node_stops_takes_leave():
    """The server knows at once, and not only when the worker has been silent for long."""

    async def history():
        world = World(ServerOptions(barrier="asp"), lambda _: simple(stop=lambda ctx: False))
        server, *workers = [world.add(server=server) for server in (True, False, False)]
        await asyncio.sleep(1.0)
        before = server.counts.workers
        workers[0].is_stopping = True
        await asyncio.sleep(1.0)
        return before, workers[0].task.done(), server.counts.workers

    assert run(history(), limit_s=300.0) == (2, True, 1)


def test_a_second_start_goes_on_with_the_values():
    """Steps begin anew, the values and their versions go on."""

    async def history():
        world = World(ServerOptions(), lambda _: simple())
        first = [world.add(server=True), world.add(server=False)]
        await asyncio.gather(*(node.task for node in first))
        before = await world.record()
        world.verbs_of = lambda _: simple(stop=lambda ctx: ctx.step >= 3)
        for node in first:
            node.again(2)
        await asyncio.gather(*(node.task for node in first))
        return before, await world.record(), await world.store.get("w")

    before, after, value = run(history(), limit_s=300.0)
    assert (before.version, after.version, value.value) == (5, 8, 8)
    assert (after.run, after.epoch) == (2, before.epoch + 1)


@pytest.mark.parametrize("servers", [1, 2])
def test_nodes_that_are_all_started_anew_run_the_program_again(servers: int):
    """Also after an error that has been mended; the values and their versions go on."""

    async def history():
        world = World(ServerOptions(), lambda _: simple(push=lambda ctx, params: 1 // 0))
        first = [*(world.add(server=True) for _ in range(servers)), world.add(server=False)]
        await asyncio.gather(*(node.task for node in first), return_exceptions=True)
        failed = await world.record()
        world.verbs_of = lambda _: simple(stop=lambda ctx: ctx.step >= 5)
        for _ in range(2):
            first = [world.begin_anew(node) for node in reversed(first)]
            await asyncio.gather(*(node.task for node in first))
        return failed, await world.record(), await world.store.get("w")

    failed, after, value = run(history(), limit_s=300.0)
    assert (failed.ended, failed.version) == ("failed", 0)
    assert (after.ended, after.version, value.value) == ("stopped", 10, 10)


def test_a_worker_of_a_run_that_is_over_takes_no_part_in_the_next_one():
    """Its server has ended the run, died before it could tell it, and was started anew."""

    async def history():
        world = World(ServerOptions(), lambda _: simple(stop=lambda ctx: ctx.step >= 5))
        server, worker = world.add(server=True), world.add(server=False)
        while not (await world.record()).ended:  # noqa: ASYNC110 - the server says so nowhere else
            await asyncio.sleep(0.001)
        told = worker.task.done()
        world.begin_anew(server)
        completed = await worker.task
        return told, completed, (await world.store.get("w")).value

    told, completed, value = run(history(), limit_s=300.0)
    assert not told
    assert (completed, value) == (5, 5)


def test_a_worker_that_comes_too_late_hears_of_the_end():
    """Nobody serves any more, but the values say that the run is over."""

    async def history():
        world = World(ServerOptions(), lambda _: simple())
        world.add(server=True)
        world.add(server=False)
        await world.ends()
        return await world.add(server=False).task

    assert run(history(), limit_s=300.0) == 0


def test_a_worker_whose_only_server_died_says_what_is_lost():
    """After two minutes without a server the error names the last one and the version of its values; a worker that has
    never met one is told how to start one."""

    async def history():
        world = World(ServerOptions(), lambda _: simple(stop=lambda ctx: False))
        server, worker = world.add(server=True), world.add(server=False)
        await asyncio.sleep(2.0)
        version = (await world.record()).version
        world.kill(server)
        late = world.add(server=False)
        found = await asyncio.gather(worker.task, late.task, return_exceptions=True)
        return server.node_id.hex()[:8], version, [str(one) for one in found]

    name, version, (lost, never) = run(history(), limit_s=300.0)
    assert version > 5
    assert f"The last one, {name}, had version " in lost
    assert version <= int(lost.split("had version ")[1].split()[0]) <= version + 1
    assert "node.role=server" in never
    assert "had version" not in never


def test_what_died_with_worker_and_server_is_counted():
    """A server that finds a commit without its worker shows so, and goes on; at the end all nodes raise the error."""

    async def history():
        world = World(ServerOptions(), lambda _: simple())
        dead = world.add(server=False)
        await asyncio.sleep(0.1)
        world.kill(dead)
        record = ServerRecord(
            epoch=1,
            server=b"gone",
            run=1,
            version=3,
            workers=[WorkerProgress(dead.node_id, 3)],
            pending=[Pending(dead.node_id, 4, (17, 1))],
            pending_version=4,
        )
        await world.store.set(RECORD_KEY, encode_record(record), 4)
        server, worker = world.add(server=True), world.add(server=False)
        await asyncio.sleep(0.5)  # the server waits for the dead one still
        asked = Poll(1, 0, world.options.text(), is_standby=True)
        told = decode_told(await worker.call(server.node_id, encode(asked)))
        assert (told.epoch, told.made) == (2, 3), "the commit under way is not made yet"
        ends = await asyncio.gather(server.task, worker.task, return_exceptions=True)
        assert server.counts.lost == 1
        return ends, await world.record()

    ends, record = run(history(), limit_s=300.0)
    assert record.version >= 5
    assert record.lost == 1
    assert [(type(one), one.count) for one in ends] == [(UpdatesLost, 1)] * 2


def test_an_update_that_waits_is_sent_every_ten_seconds():
    """To the server that serves, and to the next one if that dies; it counts once."""
    options = ServerOptions(barrier="bsp", min_workers=2)
    large = np.ones(5000)

    async def history(is_killed):
        pushed = []

        def push(ctx, params):
            pushed.append(ctx.node_id)
            return [("w", large)]

        world = World(
            options,
            lambda _: simple(push=push, stop=lambda ctx: ctx.step >= 1),
            push_s=lambda name: 0.1 if name == "worker-3" else 20.0,
        )
        first, _second = world.add(server=True), world.add(server=True)
        waiting, _slow = world.add(server=False), world.add(server=False)
        whole = Counter()
        call = waiting.call

        async def counted(node, payload):
            answer = await call(node, payload)
            whole[node] += decode_told(answer).epoch > 0 and len(payload) > large.nbytes
            return answer

        waiting.call = counted
        await asyncio.sleep(15.0)
        if is_killed:
            world.kill(first)
        await world.ends()
        assert len(pushed) == 2
        return whole, await world.record(), await world.store.get("w")

    for is_killed, servers in ((False, 1), (True, 2)):
        whole, record, value = run(history(is_killed), limit_s=300.0)
        assert len(whole) == servers
        assert 2 <= whole.total() <= 3
        assert (record.version, value.value.tolist()) == (2, [2.0] * 5000)


def test_a_long_push_keeps_its_lease():
    """A task that takes three times its lease is not given to another worker, for its worker renews it."""
    options = ServerOptions(barrier="asp", lease_floor_s=2.0)
    pushed = []

    def push(ctx, params):
        pushed.append(ctx.node_id)
        return [("w", 1)]

    async def history():
        world = World(options, lambda _: simple(push=push, stop=lambda ctx: ctx.version >= 4), push_s=lambda _: 200.0)
        world.add(server=True)
        world.add(server=False)
        world.add(server=False)
        await world.ends()
        return await world.record()

    assert run(history(), limit_s=3000.0).version == len(pushed)


def test_a_server_that_was_taken_for_dead_stands_by():
    """The other server has a higher epoch, the first one is refused when it stores its record; nothing counts twice."""

    async def history():
        world = World(ServerOptions(barrier="asp"), lambda _: simple(stop=lambda ctx: ctx.version >= 60))
        first = world.add(server=True)
        world.add(server=True)
        for _ in range(3):
            world.add(server=False)
        await asyncio.sleep(1.0)
        first.is_cut_off = True  # the others cannot reach it; it can reach the store
        await asyncio.sleep(4.0)
        first.is_cut_off = False
        await world.ends()
        return await world.store.get("w"), await world.record()

    value, record = run(history(), limit_s=300.0)
    assert value.value == record.version
    assert record.epoch >= 2
