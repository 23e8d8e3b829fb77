"""Whole nodes that train what a master dispatches, on the simulated network: deaths, failovers, lost answers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.status.events import EventRing
from p2pnode.status.prometheus import render
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.terminal.lines import Style
from p2pnode.terminal.status_view import status_lines
from p2pnode.training.dispatch.answers import QueueRules
from tests.harness.environment.memory_store import MemoryStore
from tests.harness.runner.stories import played_by
from tests.harness.swarms.dispatch_swarm import DispatchSwarm, dataset, every_place, simulate


@pytest.mark.promise(14)
def test_workers_share_every_pass_and_the_job_ends() -> None:
    """Three workers train every record of both passes once; then all nodes end by themselves, the master too."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        await swarm.until_ended(["w0", "w1", "w2", "m"], 600)
        for name in ("w0", "w1", "w2", "m"):
            task = swarm.hosts[name].task
            assert task.result() == "passes"

    swarm = simulate(scenario, seed=1)

    assert swarm.counts() == every_place(2)
    assert all(trainer.places for trainer in swarm.trainers if trainer.name != "m")


def test_no_record_comes_twice_where_trainers_crash_and_messages_are_lost() -> None:
    """A twentieth of all datagrams and requests is lost, and trainers crash: a new trainer gets the records of the
    turn that crashed again, and no other."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        for name in ("w0", "w1", "w1"):
            await swarm.until(lambda name=name: len(swarm.trainer(name).places) > 8, within_s=300, what="some training")
            swarm.trainer(name).crash_next()
            await asyncio.sleep(2.0)
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=2, loss=0.05, passes=2)

    assert swarm.counts() == every_place(2)
    assert sum(trainer.starts for trainer in swarm.trainers) >= 3 + 1 + 3 - 1


def test_a_record_counts_with_its_own_step() -> None:
    """Steps are trained while the one before is exchanged, and a trainer crashes meanwhile: every record comes once."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(2)
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 20, within_s=300, what="some training")
        swarm.trainer("w1").crash_next()
        await swarm.until_ended(["w0", "w1"], 600)

    swarm = simulate(scenario, seed=3)

    assert swarm.counts() == every_place(2)


@pytest.mark.promise(14)
def test_leases_of_a_worker_that_dies_come_back_at_once() -> None:
    """Long leases are given back when the overlay finds the death, and only what the dead node had not reported comes
    twice."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 12, within_s=300, what="some training")
        await swarm.kill("w1")
        killed = swarm.clock.monotonic()
        await swarm.until(lambda: swarm.of("dispatch_worker_gone") != [], within_s=15, what="the leases are back")
        print(f"after {swarm.clock.monotonic() - killed:.1f} s")
        await swarm.until_ended(["w0", "w2"], 900)

    swarm = simulate(scenario, seed=4, rules=QueueRules(lease_floor_s=600.0))

    found = swarm.counts()
    dead = next(trainer for trainer in swarm.trainers if trainer.name == "w1")
    twice = {place for place, count in found.items() if count > 1}
    assert found.keys() == every_place(2).keys()
    assert twice <= set(dead.places)
    # What it trained in its last two seconds, of which the master had not been told, and the step under way.
    assert len(twice) <= 20


def test_a_daemon_that_starts_again_in_time_goes_on_in_its_tasks() -> None:
    """A node is killed and starts again before anybody has noticed: its leases stand, and it goes on where it was."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(2)
        swarm.start_master("m")
        for _ in range(3):
            before = len(swarm.trainer("w1").places)
            await swarm.until(
                lambda before=before: len(swarm.trainer("w1").places) > before + 5, within_s=300, what="…"
            )
            await swarm.kill("w1")
            swarm.start("w1", bootstrap="w0")
        await swarm.until_ended(["w0", "w1"], 900)

    swarm = simulate(scenario, seed=5, passes=2)

    found = swarm.counts()
    assert found.keys() == every_place(2).keys()
    assert len(swarm.of("dispatch_resumed")) >= 3
    assert swarm.of("dispatch_worker_gone") == []
    # A step that was trained and not yet counted, and the one after it, for each of the three kills.
    assert sum(count - 1 for count in found.values()) <= 3 * 2 * 4


def test_a_daemon_that_starts_again_too_late_does_not_train_what_others_have() -> None:
    """Its leases were given to others: it says that they are superseded, and takes new tasks."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 8, within_s=300, what="some training")
        await swarm.kill("w1")
        await swarm.until(lambda: swarm.of("dispatch_worker_gone") != [], within_s=15, what="the leases are back")
        await asyncio.sleep(4.0)
        swarm.start("w1", bootstrap="w0")
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=6, passes=3)

    assert swarm.counts().keys() == every_place(3).keys()
    assert [record for record in swarm.of("dispatch_superseded") if record.node == "w1"] != []


def test_a_master_that_starts_again_loses_nothing() -> None:
    """The master is killed again and again, and starts from its store: every record comes once, no pass is stuck."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        for _ in range(2):
            await asyncio.sleep(7.0)
            await swarm.kill_master("m")
            await asyncio.sleep(1.0)
            swarm.start_master("m")
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=7, passes=2)

    assert swarm.counts() == every_place(2)


@pytest.mark.promise(14)
def test_a_standby_takes_over_and_the_workers_follow() -> None:
    """Of two masters one waits for the lock; the first is killed, then paused for longer than its lease. Workers find
    the other within seconds, and no record comes twice."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m1")
        await swarm.until(lambda: swarm.master_of("m1").facts().queue is not None, within_s=60, what="m1 serves")
        swarm.start_master("m2")
        await asyncio.sleep(6.0)
        assert swarm.master_of("m2").facts().serves_since is None
        await swarm.kill_master("m1")
        killed = swarm.clock.monotonic()
        trained = sum(swarm.counts().values())
        await swarm.until(lambda: swarm.master_of("m2").facts().queue is not None, within_s=20, what="m2 serves")
        serving = swarm.clock.monotonic()
        await swarm.until(
            lambda: sum(swarm.counts().values()) > trained + 40, within_s=30, what="the workers go on with m2"
        )
        print(f"m2 serves after {serving - killed:.1f} s, workers go on after {swarm.clock.monotonic() - killed:.1f} s")
        swarm.start_master("m1")
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=8, passes=4)

    assert swarm.counts() == every_place(4)


def test_a_worker_that_cannot_reach_the_master_for_long_loses_its_leases_only() -> None:
    """A worker and the master cannot reach each other for longer than a lease: the others train on, and afterwards the
    worker does too. What it had trained is not lost, and only its tasks come twice."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 8, within_s=300, what="some training")
        one, other = swarm.hosts["w1"].address, swarm.hosts["m"].address
        swarm.network.cut(one, other)
        swarm.network.cut(other, one)
        await asyncio.sleep(40.0)
        swarm.network.heal()
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=9, passes=6, rules=QueueRules(lease_floor_s=5.0, lease_ceiling_s=10.0))

    found = swarm.counts()
    assert found.keys() == every_place(6).keys()
    # Two tasks that it held, and one that it had finished and could not report.
    assert len([place for place, count in found.items() if count > 1]) <= 3 * 10


def test_a_file_that_one_worker_lacks_is_trained_by_another() -> None:
    """A worker that cannot read some tasks gives them back once; nothing is discarded, and nothing is missing."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.trainer("w1").cannot_read = dict.fromkeys(range(0, 15, 2), True)
        swarm.start_master("m")
        await swarm.until_ended(["w0", "w1", "w2"], 900)

    swarm = simulate(scenario, seed=10, passes=2)

    assert swarm.counts() == every_place(2)
    assert swarm.of("dispatch_task_discarded") == []
    assert [record for record in swarm.of("dispatch_task_failed") if record.fields["cause"] == "missing"] != []


def test_a_task_that_nobody_can_train_is_discarded_and_the_pass_goes_on() -> None:
    """A task that fails by its own fault is given up after some failures, one that no node can read after a while; an
    event says so, and the passes roll."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(2)
        for name in ("w0", "w1"):
            swarm.trainer(name).cannot_read = {3: False, 7: True}
        swarm.start_master("m")
        await swarm.until_ended(["w0", "w1", "m"], 900)

    swarm = simulate(scenario, seed=11, passes=2, rules=QueueRules(max_failures=2))

    expected = every_place(2)
    assert swarm.counts() == {place: 1 for place in expected if place[1] not in (3, 7)}
    discarded = swarm.of("dispatch_task_discarded")
    assert sorted(record.fields["task"] for record in discarded) == [3, 3, 7, 7]
    assert "none of 2 nodes can read it" in next(r.fields["reason"] for r in discarded if r.fields["task"] == 7)


def test_a_run_whose_last_pass_trains_nothing_is_a_failure() -> None:
    """Every task fails, so nothing was learned: workers end with the code of the trainer, and the master cleanly."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(2)
        for name in ("w0", "w1"):
            swarm.trainer(name).cannot_read = dict.fromkeys(range(15), False)
        swarm.start_master("m")
        await swarm.until_ended(["w0", "w1", "m"], 900)
        for name in ("w0", "w1"):
            task = swarm.hosts[name].task
            assert task is not None
            error = task.exception()
            assert isinstance(error, UserError)
            assert (error.exit_code, "no record could be trained on" in str(error)) == (ExitCode.TRAINER, True)
        assert (master := swarm.hosts["m"].task) is not None
        assert master.result() == "passes"

    simulate(scenario, seed=17, passes=1, rules=QueueRules(max_failures=1))


def test_every_node_of_a_small_swarm_may_serve_and_one_does() -> None:
    """Two peers that train and would both serve, each with a store of its own, and one of them is killed: first one
    serves, then the other, with a new queue, and the job ends."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.make_store = lambda _name: MemoryStore()
        swarm.start_workers(3, node__role="peer+master")
        await swarm.until(lambda: sum(swarm.counts().values()) > 20, within_s=120, what="some training")
        serving = [name for name in swarm.hosts if swarm.master_of(name).facts().serves_since is not None]
        assert len(serving) == 1
        identities = {swarm.hosts[name].living.dispatch.records._identity for name in swarm.hosts}
        assert len(identities) == 1
        await swarm.kill(serving[0])
        rest = [name for name in swarm.hosts if name != serving[0]]
        await swarm.until_ended(rest, 900)

    swarm = simulate(scenario, seed=12, passes=1)

    # The queue died with its master: the other one began the pass anew.
    assert swarm.counts().keys() == every_place(1).keys()
    assert len(swarm.of("dispatch_dataset_registered")) == 2


def test_a_node_with_other_files_is_told_and_gets_no_tasks() -> None:
    """The first data set counts; a node with another one names the difference, and goes on when it has the same."""

    async def scenario(swarm: DispatchSwarm) -> None:
        other = dataset(29, 5)
        swarm.read_dataset = lambda name: other if name == "w1" and not mended else swarm.files
        swarm.start_workers(1)
        swarm.start_master("m")
        await swarm.until(lambda: sum(swarm.counts().values()) > 8, within_s=120, what="some training")
        swarm.start("w1", bootstrap="w0")
        await swarm.until(lambda: swarm.of("dispatch_refused") != [], within_s=60, what="the refusal")
        status = StatusReport(swarm.hosts["w1"].living, EventRing(), LoopDelay(swarm.clock), keys=list).status()
        found = [finding for finding in status.health if "records differ" in finding.what]
        assert "train.recordio has 29 chunks, the registered one has 30" in found[0].what
        assert swarm.trainer("w1").places == []
        mended.append(True)
        await swarm.until_ended(["w0", "w1"], 900)

    mended: list[bool] = []
    swarm = simulate(scenario, seed=13, passes=3)

    assert swarm.counts() == every_place(3)
    assert next(trainer for trainer in swarm.trainers if trainer.name == "w1").places != []


def test_a_missing_master_is_shown_until_one_serves() -> None:
    """Without a master `/status` says since when and what to do; training goes on by itself when one comes."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(2)
        await asyncio.sleep(12.0)
        report = StatusReport(swarm.hosts["w1"].living, EventRing(), LoopDelay(swarm.clock), keys=list)
        status = report.status()
        assert status.dispatch is not None
        assert (status.dispatch.unanswered_seconds or 0.0) > 8.0
        assert any("no master of the records" in finding.what for finding in status.health)
        assert len(swarm.of("dispatch_master_missing")) == 2
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 8, within_s=60, what="some training")
        status = report.status()
        assert status.dispatch is not None
        assert (status.dispatch.tasks, status.dispatch.passes, status.dispatch.last_error) == (15, 2, "")
        dispatch = status.dispatch
        assert (dispatch.todo or 0) + (dispatch.leased or 0) + (dispatch.done or 0) + (dispatch.failed or 0) == 15
        text = "\n".join(map(Style().render, status_lines(msgspec.to_builtins(status), Style())))
        assert f"pass {dispatch.pass_number} of 2: {dispatch.todo} todo, {dispatch.leased} leased" in text
        assert not any("master" in finding.what for finding in status.health)
        assert 'p2pnode_dispatch_tasks{state="done"}' in render(report.metrics())
        master = StatusReport(swarm.hosts["m"].living, EventRing(), LoopDelay(swarm.clock), keys=list).status()
        assert (master.state, master.node.role) == ("serving", "master")
        assert master.summary.startswith("master of the records, with 2 peers; pass 1: ")
        await swarm.until_ended(["w0", "w1", "m"], 900)

    swarm = simulate(scenario, seed=14)

    assert swarm.counts() == every_place(2)


def test_a_trainer_that_hangs_loses_its_lease() -> None:
    """Its daemon lives, and renews the lease no more: others train the task, and a record that was not reported comes
    once."""

    async def scenario(swarm: DispatchSwarm) -> None:
        swarm.start_workers(3)
        swarm.start_master("m")
        await swarm.until(lambda: len(swarm.trainer("w1").places) > 8, within_s=300, what="some training")
        swarm.trainer("w1").hang()
        await swarm.until(lambda: timeouts(swarm) != [], within_s=35, what="the end of its lease")
        await swarm.until_ended(["w0", "w2"], 900)

    def timeouts(swarm: DispatchSwarm) -> list[object]:
        return [record for record in swarm.of("dispatch_lease_ended") if record.fields["cause"] == "timeout"]

    swarm = simulate(scenario, seed=15, passes=1, rules=QueueRules(lease_floor_s=5.0, lease_ceiling_s=10.0))

    assert swarm.counts() == every_place(1)


@played_by(simulate, seed=16, chunks=80_000, chunks_per_task=80_000)
async def test_a_task_of_very_many_chunks_reaches_its_worker(swarm: DispatchSwarm) -> None:
    """What the master answers is longer than the head of a message may be."""
    swarm.start_workers(1)
    swarm.start_master("m")
    await swarm.until(lambda: len(swarm.trainer("w0").places) > 20, within_s=120, what="some training")
