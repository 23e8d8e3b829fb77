"""The leases of a parameter server's tasks."""

from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.engines.server.tasks import TaskLeases

RULES = QueueRules(max_failures=1, max_losses=2, lease_floor_s=10.0, lease_ceiling_s=60.0)


def leases() -> TaskLeases[str]:
    return TaskLeases(RULES)


def test_a_dead_workers_task_is_given_again_under_a_new_attempt():
    """The task of a worker that is gone comes back, and only the new attempt of it counts."""
    tasks = leases()
    first = tasks.issue(b"a", 1, "work", 0.0)
    tasks.worker_gone(b"a")
    assert [one.task for one in tasks.orphans()] == [first.task]
    second = tasks.take(first.task, b"b", 1.0)
    assert (second.attempt, second.work, second.step) == (2, "work", 1)
    assert tasks.held(b"a", first.task, 1) is None
    assert tasks.held(b"b", first.task, 2) == second
    tasks.finish(second, 2.0)
    assert tasks.held(b"b", first.task, 2) is None
    assert (tasks.issued, tasks.done, len(tasks)) == (1, 1, 0)


def test_a_lease_ends_unless_it_is_renewed():
    """A silent worker loses its task at the deadline; one that renews keeps it."""
    tasks = leases()
    silent = tasks.issue(b"a", 1, "", 0.0)
    busy = tasks.issue(b"b", 1, "", 0.0)
    assert silent.deadline == 60.0  # no task time is known yet
    assert tasks.renew(b"b", busy.task, 1, 50.0)
    assert tasks.expire(59.9) == []
    assert tasks.expire(60.0) == [b"a"]
    assert not tasks.renew(b"a", silent.task, 1, 61.0)
    assert tasks.of(b"b").deadline == 110.0


def test_lease_times_follow_the_tasks():
    """A lease lasts three mean task times, from the floor on."""
    tasks = leases()
    assert tasks.lease_s == 60.0
    for _ in range(40):
        tasks.finish(tasks.issue(b"a", 1, "", 0.0), 5.0)
    assert tasks.lease_s == 15.0
    for _ in range(400):
        tasks.finish(tasks.issue(b"a", 1, "", 0.0), 0.1)
    assert tasks.lease_s == 10.0


def test_a_task_that_fails_too_often_is_given_up():
    """Errors of the function and lost workers have budgets of their own; the last attempt is named."""
    tasks = leases()
    lease = tasks.issue(b"a", 3, "x", 0.0)
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
    lost = tasks.issue(b"a", 3, "x", 0.0)
    for worker in (b"a", b"b", b"c"):
        tasks.worker_gone(worker)
        if tasks.orphans():
            tasks.take(lost.task, {b"a": b"b", b"b": b"c"}[worker], 0.0)
    assert len(tasks.given_up) == 2


def test_a_refused_update_leaves_the_task_until_the_budget_is_spent():
    """The worker tries again so many times; then its task has failed and goes to the next one."""
    tasks = leases()
    lease = tasks.issue(b"a", 1, "", 0.0)
    assert [tasks.refuse(tasks.of(b"a"), 3) for _ in range(3)] == [True, True, False]
    assert [one.task for one in tasks.orphans()] == [lease.task]
    tasks.take(lease.task, b"b", 0.0)
    assert tasks.of(b"b").errors == 1
    assert tasks.refuse(tasks.of(b"b"), 3)  # the next worker has the whole count again
    assert tasks.held(b"a", lease.task, 1) is None  # the former holder has nothing to say


def test_reports_of_strangers_have_no_effect():
    """About another worker's task, a task that never was, or an attempt that never was."""
    tasks = leases()
    lease = tasks.issue(b"a", 1, "", 0.0)
    assert tasks.held(b"a", lease.task, 1) == lease
    for worker, task, attempt in ((b"b", lease.task, 1), (b"a", lease.task, 2), (b"a", lease.task + 1, 1)):
        assert tasks.held(worker, task, attempt) is None


def test_a_task_of_the_server_before_is_adopted_once():
    """The worker that holds it keeps its attempt; after it is done nobody brings it again."""
    before = leases()
    lease = before.issue(b"a", 4, "old", 0.0)
    tasks: TaskLeases[str] = TaskLeases(RULES, first_task=1000)
    assert tasks.adopt(lease, 5.0)
    assert (tasks.of(b"a").attempt, tasks.of(b"a").step) == (1, 4)
    tasks.finish(tasks.of(b"a"), 6.0)
    assert tasks.adopt(before.issue(b"b", 4, "", 0.0), 7.0)
    assert not tasks.adopt(lease, 8.0)
    assert tasks.of(b"a") is None
    assert tasks.issue(b"c", 5, "new", 9.0).task == 1000
