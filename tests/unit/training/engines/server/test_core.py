"""The decisions of a server that its histories do not show: counts, budgets, and what is kept.

Which updates count, and what the next server takes over: tests/property/test_parameter_server.py.
"""

import random

import pytest

from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.engines.server.acceptance import Contribution, EachAtOnce, Quota, ServerOptions, WholeStep
from p2pnode.training.engines.server.core import ServerCore
from p2pnode.training.engines.server.record import Pending, ServerRecord, Takeover, WorkerProgress
from p2pnode.training.engines.server.tasks import TaskLeases

A, B = b"a", b"b"


def server(barrier: str, policy, workers=(A, B)) -> ServerCore:
    options = ServerOptions(barrier=barrier, staleness=1, max_failures=1, max_report_count=2)
    core = ServerCore(options, policy, random.Random(1), ServerRecord(), b"S")
    for worker in workers:
        core.join(worker)
    return core


def give(core: ServerCore, now: float = 0.0) -> dict:
    return {worker: core.give(worker, [], now) for worker in core.passed(now)}


def done(lease, version: int = 0) -> Contribution:
    return Contribution(lease.worker, lease.task, lease.attempt, lease.step, version, [("w", 1.0)])


def commit_all(core: ServerCore) -> list:
    found = []
    while (commit := core.due()) is not None:
        core.committed(commit)
        found.append([one.worker for one in commit.contributions])
    return found


def test_the_record_names_what_a_worker_may_not_know():
    """What it does not repeat it has heard of: the list of committed updates stays short."""
    core = server("asp", EachAtOnce(), [A])
    name = give(core)[A].name
    core.report(done(core.leases.of(A)), 1.0)
    commit_all(core)
    core.told(A, [name])
    assert core.record().workers[0].counted == [name]
    core.told(A, [])
    assert core.record().workers[0].counted == []


def test_a_worker_without_a_task_completes_the_step():
    """The schedule may leave a worker out: nobody waits for it."""
    core = server("bsp", WholeStep())
    core.skip(B)
    lease = core.give(A, [], 0.0)
    core.report(done(lease), 1.0)
    assert commit_all(core) == [[A]]
    assert core.workers == {A: 1, B: 1}


def test_the_counts_follow_every_task():
    """Given, held, waiting, given again, done, refused: each is counted where it happens, and once."""
    core = server("asp", Quota(1, 0), [A, B])
    first = give(core)
    counts = core.counts()
    assert (counts.workers, counts.given, counts.held, counts.waiting, counts.done) == (2, 2, 2, 0, 0)
    core.leave(A)
    assert (core.counts().held, core.counts().waiting, core.counts().workers) == (1, 1, 1)
    assert core.report(done(first[B]), 1.0) == "waits"
    commit_all(core)
    assert (core.counts().done, core.counts().version) == (1, 1)
    (again,) = core.reassign(2.0)
    assert (core.counts().again, core.counts().waiting, core.counts().given) == (1, 0, 2)
    assert core.report(done(again, version=0), 3.0) == "stale"
    assert (core.counts().refused, core.counts().held) == (1, 1)


RULES = QueueRules(max_failures=1, max_losses=2, lease_floor_s=10.0, lease_ceiling_s=60.0)


def leases() -> TaskLeases:
    return TaskLeases(RULES)


def test_lease_times_follow_the_tasks():
    """A lease lasts three mean task times, from the floor on."""
    tasks = leases()
    assert tasks.lease_s == 60.0
    for _ in range(40):
        tasks.finish(tasks.issue(b"a", 1, [], 0.0), 5.0)
    assert tasks.lease_s == 15.0
    for _ in range(400):
        tasks.finish(tasks.issue(b"a", 1, [], 0.0), 0.1)
    assert tasks.lease_s == 10.0


def test_a_task_that_fails_too_often_is_given_up():
    """Errors of the function and lost workers have budgets of their own; the last attempt is named."""
    tasks = leases()
    lease = tasks.issue(b"a", 3, [], 0.0)
    tasks.fail(b"a", lease.task, 1, "bang")
    tasks.take(lease.task, b"b", 0.0)
    tasks.worker_gone(b"b")
    tasks.take(lease.task, b"c", 0.0)
    assert tasks.given_up == []
    tasks.fail(b"b", lease.task, 2, "the former holder")
    assert len(tasks) == 1
    tasks.fail(b"c", lease.task, 3, "bang again")
    assert [(given_up.worker, reason) for given_up, reason in tasks.given_up] == [(b"c", "bang again")]
    assert len(tasks) == 0
    lost = tasks.issue(b"a", 3, [], 0.0)
    for worker in (b"a", b"b", b"c"):
        tasks.worker_gone(worker)
        if tasks.orphans():
            tasks.take(lost.task, {b"a": b"b", b"b": b"c"}[worker], 0.0)
    assert len(tasks.given_up) == 2


def test_a_refused_update_leaves_the_task_until_the_budget_is_spent():
    """The worker tries again so many times; then its task has failed and goes to the next one."""
    tasks = leases()
    lease = tasks.issue(b"a", 1, [], 0.0)
    assert [tasks.refuse(tasks.of(b"a"), 3) for _ in range(3)] == [True, True, False]
    assert [one.task for one in tasks.orphans()] == [lease.task]
    tasks.take(lease.task, b"b", 0.0)
    assert tasks.of(b"b").errors == 1
    assert tasks.refuse(tasks.of(b"b"), 3)  # the next worker has the whole count again
    assert tasks.held(b"a", lease.task, 1) is None  # the former holder has nothing to say


@pytest.mark.parametrize("dead", [A, B])
def test_what_died_with_its_worker_is_no_step_of_it(dead):
    """The rest of the commit of a dead server is made again, at its places: owners know by these what they have."""
    names = {A: (7, 1), B: (8, 2)}
    living = B if dead == A else A
    record = ServerRecord(
        version=10,
        workers=[WorkerProgress(A, 5), WorkerProgress(B, 5)],
        pending=[Pending(worker, 6, name) for worker, name in names.items()],
        pending_version=12,
    )
    takeover = Takeover(record)
    takeover.heard(living, [Contribution(living, *names[living], 6, 10, [("w", 1.0)])], 10)
    takeover.gone(dead)
    assert takeover.commit(EachAtOnce()).stamps == ((11,) if living == A else (12,))
    assert [one.worker for one in takeover.lost] == [dead]
    assert {one.worker: one.step for one in takeover.settled().workers} == {living: 6, dead: 5}
