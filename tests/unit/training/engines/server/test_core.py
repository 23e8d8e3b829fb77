"""The decisions of a server: reports, tasks, commits and the record."""

import random

from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.engines.server.acceptance import Contribution, EachAtOnce, Quota, WholeStep
from p2pnode.training.engines.server.core import ServerCore, ServerRecord, WorkerProgress
from p2pnode.training.engines.server.options import ServerOptions

A, B, C = b"a", b"b", b"c"
RULES = QueueRules(max_failures=1, lease_floor_s=10.0, lease_ceiling_s=60.0)


def server(barrier: str, policy, workers=(A, B), *, record: ServerRecord | None = None) -> ServerCore:
    core = ServerCore(
        ServerOptions(barrier=barrier, staleness=1).make_barrier(),
        policy,
        RULES,
        random.Random(1),
        record or ServerRecord(),
        server=b"S",
        max_report_count=2,
    )
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


def test_a_worker_is_told_that_its_update_counts_when_it_is_committed():
    """Before the commit the report waits, after it, repeated, it counts; a second commit does not happen."""
    core = server("asp", EachAtOnce(), [A])
    lease = give(core)[A]
    assert core.report(done(lease), 1.0) == "waits"
    assert core.report(done(lease), 1.0) == "waits"
    assert core.idle() == []
    assert commit_all(core) == [[A]]
    assert core.report(done(lease), 2.0) == "counted"
    assert commit_all(core) == []
    assert (core.version, core.counted, core.idle()) == (1, 1, [A])


def test_an_update_that_waits_need_not_be_sent_again():
    """It is kept from its acceptance to its commit; a worker that counted as gone sends it whole, and is refused."""
    core = server("bsp", WholeStep())
    leases = give(core)
    assert core.repeated(A, done(leases[A]).name) == "unknown"
    assert core.report(done(leases[A]), 1.0) == "waits"
    assert core.repeated(A, done(leases[A]).name) == "kept"
    assert core.repeated(B, done(leases[A]).name) == "unknown"
    core.report(done(leases[B]), 1.0)
    assert commit_all(core) == [[A, B]]
    assert core.repeated(A, done(leases[A]).name) == "counted"
    core.leave(A)
    assert core.repeated(A, done(leases[A]).name) == "unknown"


def test_an_update_beyond_the_quota_is_not_kept():
    """It waits for the next version at its worker, which sends it whole again."""
    core = server("asp", Quota(1))
    leases = give(core)
    assert core.report(done(leases[A]), 1.0) == "waits"
    assert core.report(done(leases[B]), 1.0) == "waits"
    assert [core.repeated(one, done(leases[one]).name) for one in (A, B)] == ["kept", "unknown"]


def test_what_a_worker_does_not_repeat_it_knows():
    """The list of committed updates stays short."""
    core = server("asp", EachAtOnce(), [A])
    lease = give(core)[A]
    core.report(done(lease), 1.0)
    commit_all(core)
    core.told(A, [(lease.task, 1)])
    assert core.repeated(A, (lease.task, 1)) == "counted"
    core.told(A, [])
    assert core.repeated(A, (lease.task, 1)) != "counted"


def test_bsp_commits_a_step_when_all_have_completed_it():
    """No update of a step is committed before its last one, and nobody passes before the commit."""
    core = server("bsp", WholeStep())
    leases = give(core)
    core.report(done(leases[A]), 1.0)
    assert commit_all(core) == []
    assert core.passed(1.0) == []
    core.report(done(leases[B]), 2.0)
    commit = core.due()
    assert core.passed(2.0) == []  # the values have no version while they change
    core.committed(commit)
    assert core.passed(2.0) == [A, B]
    assert core.version == 2


def test_a_task_of_a_dead_worker_goes_to_one_that_waits_for_the_step():
    """Under bsp all others wait; one of them completes the step of the dead one, and then it is committed."""
    core = server("bsp", WholeStep(), [A, B, C])
    leases = give(core)
    for worker in (A, B):
        core.report(done(leases[worker]), 1.0)
    core.leave(C)
    assert commit_all(core) == []
    [again] = core.reassign(2.0)
    assert (again.task, again.attempt, again.step) == (leases[C].task, 2, 1)
    assert core.report(done(leases[C]), 2.0) == "superseded"
    assert core.report(done(again), 3.0) == "waits"
    assert commit_all(core) == [[A, B, again.worker]]
    assert core.workers == {A: 1, B: 1}


def test_a_task_that_came_back_goes_to_an_idle_worker_first():
    """A worker whose own update waits gets it only if there is no other."""
    core = server("ssp", EachAtOnce(), [A, B, C])
    leases = give(core)
    core.report(done(leases[A]), 1.0)
    core.leave(C)
    core.report(done(leases[B]), 1.0)
    commit = core.due()
    assert {one.worker for one in commit.contributions} == {A, B}
    core.committed(commit)
    [again] = core.reassign(2.0)
    assert again.worker in (A, B)


def test_a_stale_update_is_computed_again_by_its_worker():
    """It keeps the task, with new values; after `max_report_count` the task goes to another one."""
    core = server("asp", Quota(1), [A, B])
    leases = give(core)
    core.report(done(leases[A], 0), 1.0)
    commit_all(core)
    assert core.report(done(leases[B], 0), 1.0) == "stale"
    assert core.leases.of(B).task == leases[B].task
    assert core.report(done(leases[B], 0), 1.0) == "failed"
    assert core.leases.of(B) is None
    assert core.refused == 2
    [again] = core.reassign(2.0)
    assert core.report(done(again, 1), 2.0) == "waits"
    assert commit_all(core) == [[again.worker]]


def test_updates_are_judged_by_the_version_of_the_commit_under_way():
    """What comes in during a commit was computed from the values before it, so it is stale."""
    core = server("asp", Quota(1), [A, B])
    leases = give(core)
    core.report(done(leases[A], 0), 1.0)
    commit = core.due()
    assert core.report(done(leases[B], 0), 1.0) == "stale"
    core.committed(commit)


def test_a_worker_without_a_task_completes_the_step():
    """The schedule may leave a worker out: nobody waits for it."""
    core = server("bsp", WholeStep())
    core.skip(B)
    lease = core.give(A, [], 0.0)
    core.report(done(lease), 1.0)
    assert commit_all(core) == [[A]]
    assert core.workers == {A: 1, B: 1}


def test_the_record_names_the_commit_under_way():
    """It has the version and the steps before it, and who contributes; afterwards, who may not know."""
    core = server("bsp", WholeStep())
    leases = give(core)
    for worker in (A, B):
        core.report(done(leases[worker]), 1.0)
    commit = core.due()
    record = core.record()
    assert (record.version, record.pending_version, record.epoch, record.server) == (0, 2, 1, b"S")
    assert [one.worker for one in record.pending] == [A, B]
    assert record.workers == [WorkerProgress(A, 0), WorkerProgress(B, 0)]
    core.committed(commit)
    record = core.record("stopped")
    assert (record.version, record.pending, record.ended) == (2, [], "stopped")
    assert record.workers == [WorkerProgress(A, 1, [(leases[A].task, 1)]), WorkerProgress(B, 1, [(leases[B].task, 1)])]


def test_the_next_server_goes_on_where_the_record_ends():
    """Steps, version and committed updates come from the record; tasks come from the workers that hold them."""
    before = server("ssp", EachAtOnce())
    leases = give(before)
    before.report(done(leases[A]), 1.0)
    commit_all(before)
    core = server("ssp", EachAtOnce(), [], record=before.record())
    assert (core.epoch, core.version, core.workers) == (2, 1, {A: 1, B: 0})
    assert core.passed(0.0) == []  # nobody has asked yet
    assert core.unheard == [A, B]
    core.join(A)
    assert core.report(done(leases[A]), 5.0) == "counted"
    core.join(B)
    core.claim(leases[B], 5.0)
    assert core.report(done(leases[B]), 6.0) == "waits"
    assert commit_all(core) == [[B]]
    assert core.version == 2
    assert min(lease.task for lease in give(core, 7.0).values()) > max(one.task for one in leases.values())


def test_a_worker_that_the_record_does_not_have_brings_no_task():
    """The server before had taken leave of it: its task was given to another one."""
    before = server("asp", EachAtOnce())
    lease = give(before)[A]
    before.leave(A)
    core = server("asp", EachAtOnce(), [], record=before.record())
    core.join(A)
    core.claim(lease, 0.0)
    assert core.report(done(lease), 0.0) == "superseded"


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


def test_a_task_that_another_worker_has_finished_is_not_taken_up_at_the_next_server():
    """A slow worker, which does not know that its lease ended, still holds it: its update would count a second time."""
    core = server("asp", EachAtOnce())
    leases = give(core)
    core.report(done(leases[A]), 1.0)
    commit_all(core)
    core.leases.expire(1000.0)
    (again,) = core.reassign(1000.0)
    assert (again.worker, again.task) == (A, leases[B].task)
    core.report(done(again, 1), 1001.0)
    commit_all(core)

    for _ in range(2):  # and at the one after that
        core = server("asp", EachAtOnce(), [A], record=core.record())
        core.claim(leases[B], 1002.0)
        core.join(B)
        assert core.leases.of(B) is None
        assert core.report(done(leases[B], 1), 1002.0) == "superseded"
        core.told(B, [done(leases[B]).name])
    assert core.leases.outdated(B) == [done(leases[B]).name]
    core.told(B, [])
    assert not any(one.outdated for one in core.record().workers)


def test_a_worker_that_was_taken_for_dead_has_lost_its_task_at_every_later_server():
    """The record of the server that it came back to says so, though the answer may never have reached the worker."""
    core = server("asp", EachAtOnce())
    leases = give(core)
    core.leave(B)
    core.join(B)
    for _ in range(3):
        core.claim(leases[B], 1.0)
        assert core.report(done(leases[B]), 1.0) == "superseded"
        core.told(B, [done(leases[B]).name])
        core = server("asp", EachAtOnce(), [A, B], record=core.record())


def test_a_worker_that_no_record_has_has_lost_its_task_at_every_later_server():
    """The first server died before its record named the worker: the second takes nothing up, and so does the third."""
    first = server("asp", EachAtOnce(), [])
    record = first.record()
    for one in (A, B):
        first.join(one)
    leases = give(first)
    for _ in range(2):
        core = server("asp", EachAtOnce(), [B], record=record)
        core.claim(leases[B], 1.0)
        assert core.report(done(leases[B]), 1.0) == "superseded"
        core.told(B, [done(leases[B]).name])
        record = core.record()


def test_a_later_attempt_is_not_taken_up_when_an_earlier_one_counts():
    """The worker that was slow reaches the next server first; the one that got its task asks the server after that."""
    core = server("asp", EachAtOnce())
    leases = give(core)
    core.report(done(leases[A]), 1.0)
    commit_all(core)
    core.leases.expire(1000.0)
    (again,) = core.reassign(1000.0)
    before = core.record()

    core = server("asp", EachAtOnce(), [B], record=before)
    core.claim(leases[B], 1001.0)
    assert core.report(done(leases[B], 1), 1001.0) == "waits"
    commit_all(core)
    assert core.record().done == [leases[B].task]

    core = server("asp", EachAtOnce(), [A, B], record=core.record())
    core.claim(again, 1002.0)
    assert core.report(done(again, 1), 1002.0) == "superseded"
    assert core.record().done == []  # all have asked


def test_the_version_that_is_made_is_not_the_one_under_way():
    """Who is told of it may rely on all values."""
    core = server("asp", EachAtOnce())
    leases = give(core)
    core.report(done(leases[A]), 1.0)
    commit = core.due()
    assert (core.made, core.version) == (0, 1)
    core.committed(commit)
    assert (core.made, core.version) == (1, 1)


def test_a_task_that_nobody_has_finished_is_taken_up_at_the_next_server():
    """Also by a worker whose lease had ended: it may be the only one that has it."""
    core = server("asp", EachAtOnce())
    leases = give(core)
    core.leases.expire(1000.0)
    core = server("asp", EachAtOnce(), [A], record=core.record())
    core.claim(leases[B], 1001.0)

    assert core.leases.of(B) is not None
    core.join(B)
    assert core.report(done(leases[B]), 1002.0) == "waits"
