"""Synchronous SGD as a plain model: histories of versions with lost answers, retries, deaths and servers that take
over.

The model keeps what every gradient was computed from. It allows a commit only if it has exactly `grads_to_wait`
gradients of different workers, each of the version before it or of one at most `version_tolerance` older, and no
gradient twice.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pnode.training.engines.server.acceptance import Commit, Contribution, Quota, ServerOptions, updates_of
from p2pnode.training.engines.server.core import ServerCore
from p2pnode.training.engines.server.program import not_yet_applied
from p2pnode.training.engines.server.record import ServerRecord, Takeover
from p2pnode.training.engines.server.tasks import LeasedTask
from p2pnode.training.values.store import Stamped, ValueUpdate
from tests.harness.runner.long_run import more

WORKERS = [bytes([number]) for number in range(4)]
KEYS = ("a", "b", "c")


class Worker:
    """What one start of a worker knows: its task, the version that it computes from, the report that it repeats, and
    the version that the values have."""

    def __init__(self) -> None:
        self.lease: LeasedTask | None = None
        self.report: Contribution | None = None
        self.made = 0


class SynchronousSgd(RuleBasedStateMachine):
    """One server at a time, four workers, three keys at owners that never forget."""

    @initialize(grads=st.integers(1, 3), tolerance=st.integers(0, 2), limit=st.integers(1, 4))
    def begin(self, grads: int, tolerance: int, limit: int) -> None:
        self.grads, self.tolerance, self.limit = grads, tolerance, limit
        self.now = 0.0
        self.policy = Quota(grads, tolerance)
        self.core = self.new_core(ServerRecord())
        self.record = self.core.record()
        self.workers = {name: Worker() for name in WORKERS}
        #: The values at their owners: the updates, and the timestamp of the last one.
        self.values: dict[str, tuple[int, int]] = {}
        self.counted: dict[tuple[int, int], int] = {}
        self.commits: dict[int, Commit] = {}
        self.takeover: Takeover | None = None
        #: A contribution has died with its worker and its server: the values may lack it.
        self.has_lost = False
        #: Workers that have died and not asked since.
        self.dead: dict[bytes, None] = {}
        #: What the servers that stand by know the values to have.
        self.standby_made = 0
        #: The starts of workers whose updates were accepted, and those that were then taken for dead.
        self.reporters: dict[tuple[int, int], Worker] = {}
        self.cut_off: dict[Worker, None] = {}

    def new_core(self, record: ServerRecord) -> ServerCore:
        self.policy = Quota(self.grads, self.tolerance)
        options = ServerOptions(barrier="asp", max_failures=255, max_report_count=self.limit)
        return ServerCore(options, self.policy, random.Random(1), record, b"S")

    # -- the owners

    def apply(self, commit: Commit, keys: int) -> None:
        """The first `keys` keys get the update; the server dies before the others."""
        for one in updates_of(commit)[:keys]:
            count, stamp = self.values.get(one.key, (0, 0))
            fresh = not_yet_applied([ValueUpdate(one.key, one.value, one.timestamp)], {one.key: Stamped(count, stamp)})
            assert self.has_lost or stamp == 0 or one.timestamp <= stamp + 1
            if fresh:
                assert self.has_lost or abs(one.value - 1.0) < 1e-9, "the weights of an update add up to one"
                self.values[one.key] = count + 1, one.timestamp

    def check(self, commit: Commit) -> None:
        base = commit.version - 1
        assert len(commit.contributions) == self.grads
        assert len({one.worker for one in commit.contributions}) == self.grads
        for one in commit.contributions:
            assert base - self.tolerance <= one.version <= base, "a stale gradient"
        assert commit.version not in self.commits
        self.commits[commit.version] = commit
        for one in commit.contributions:
            assert one.task not in [task for task, _ in self.counted], "a task counts twice"
            self.counted[one.name] = commit.version

    # -- the workers

    @precondition(lambda self: self.takeover is None)
    @rule(name=st.sampled_from(WORKERS), is_lost=st.booleans())
    def ask(self, name: bytes, is_lost: bool) -> None:
        """A worker reports and asks; the answer may be lost."""
        worker, core = self.workers[name], self.core
        core.join(name)
        self.dead.pop(name, None)
        outcome = ""
        if worker.lease is not None:
            core.claim(worker.lease, self.now)
        if worker.report is not None:
            outcome = core.report(worker.report, self.now)
            if worker.report.name in core._waiting.get(name, ()):
                self.reporters[worker.report.name] = worker
        held = {one.task: one.attempt for one in (worker.lease, worker.report) if one is not None}
        core.told(name, list(held.items()))
        if name not in [one.worker for one in self.record.workers]:
            self.record = core.record()  # before it gets a task
        core.reassign(self.now)
        for passed in core.passed(self.now):
            core.give(passed, [], self.now)
        lease = core.leases.of(name)
        if is_lost:
            return
        worker.made = max(worker.made, core.made)
        if outcome in ("counted", "failed", "superseded"):
            assert outcome != "counted" or worker.report.name in self.counted
            worker.report = worker.lease = None
        if worker.report is None or outcome == "stale":
            worker.report = None
            worker.lease = lease
            self.computes_from(worker)

    def computes_from(self, worker: Worker) -> None:
        """The worker has the values of the present version, unless they are changing."""
        lease = worker.lease
        if lease is not None and self.core._in_flight is None:
            updates = [(key, 1.0) for key in KEYS]
            worker.report = Contribution(
                lease.worker, lease.task, lease.attempt, lease.step, self.core.version, updates
            )

    @precondition(lambda self: self.takeover is None)
    @rule(name=st.sampled_from(WORKERS))
    def worker_dies(self, name: bytes) -> None:
        """It begins anew, without what it had."""
        self.core.leave(name)
        self.workers[name] = Worker()
        self.dead[name] = None

    @precondition(lambda self: self.takeover is None)
    @rule(name=st.sampled_from(WORKERS))
    def worker_is_cut_off(self, name: bytes) -> None:
        """It is taken for dead, and asks again later with what it has."""
        self.core.leave(name)
        self.cut_off[self.workers[name]] = None

    @precondition(lambda self: self.takeover is None)
    @rule()
    def standby_asks(self) -> None:
        """A server that stands by hears which version the values have."""
        self.standby_made = self.core.made

    @precondition(lambda self: self.takeover is None)
    @rule()
    def leases_end(self) -> None:
        """Nobody has asked for long."""
        self.now += 61.0
        self.core.leases.expire(self.now)

    # -- the server

    @precondition(lambda self: self.takeover is None)
    @rule()
    def commit(self) -> None:
        """What is due reaches the values."""
        while (commit := self.core.due()) is not None:
            self.record = self.core.record()
            self.check(commit)
            self.apply(commit, len(KEYS))
            self.core.committed(commit)

    @precondition(lambda self: self.takeover is None)
    @rule(
        keys=st.integers(0, len(KEYS)),
        is_new=st.booleans(),
        stood_by=st.booleans(),
        anew=st.sets(st.sampled_from(WORKERS), max_size=2),
    )
    def server_dies(self, keys: int, is_new: bool, stood_by: bool, anew: set[bytes]) -> None:
        """It may be in a commit, which some keys have; or its last record names a commit that it has made since. The
        next server may have stood by. Workers may die with it, and ask the next one as if they had never been there."""
        commit = self.core.due()
        if commit is not None or is_new:
            self.record = self.core.record()
        if commit is not None:
            self.check(commit)
            self.apply(commit, keys)
        self.takeover = Takeover(self.record, self.standby_made if stood_by else 0)
        for name in sorted(anew):
            self.workers[name] = Worker()
            self.dead.pop(name, None)
        self.now += 1.0

    @precondition(lambda self: self.takeover is not None)
    @rule()
    def next_server(self) -> None:
        """It hears all workers of the commit, makes it again, and goes on."""
        takeover = self.takeover
        for name, worker in self.workers.items():
            if name in self.dead:
                takeover.gone(name)
            else:
                takeover.heard(name, [] if worker.report is None else [worker.report], worker.made)
        assert takeover.is_settled
        assert takeover.awaited == []
        for one in takeover.lost:
            reporter = self.reporters[one.name]
            assert self.workers[one.worker] is not reporter or one.worker in self.dead or reporter in self.cut_off
        policy = Quota(self.grads, self.tolerance)
        commit = takeover.commit(policy)
        lost = {one.name for one in takeover.lost}
        self.has_lost = self.has_lost or bool(lost)
        if commit is not None:
            assert takeover.commit(policy) is not None
            whole = self.commits[commit.version].contributions
            assert [one.name for one in commit.contributions] == [one.name for one in whole if one.name not in lost]
            self.apply(commit, len(KEYS))
        self.core = self.new_core(takeover.settled())
        self.record = self.core.record()
        self.takeover = None

    @invariant()
    def all_values_have_every_update_once(self) -> None:
        """As many updates as versions, at every key, unless a server died within one."""
        if getattr(self, "takeover", None) is None and hasattr(self, "core"):
            for key in KEYS if not self.has_lost else ():
                assert self.values.get(key, (0, 0)) == (self.core.version, self.core.version)


TestSynchronousSgd = SynchronousSgd.TestCase
TestSynchronousSgd.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def history(seed: int) -> SynchronousSgd:
    """A history in which workers mostly work: choices without weights seldom reach a server that dies in a commit."""
    draw = random.Random(seed)
    machine = SynchronousSgd()
    machine.begin(grads=draw.randint(1, 3), tolerance=draw.randint(0, 2), limit=draw.randint(1, 4))
    for _ in range(80):
        chance = draw.random()
        if machine.takeover is not None:
            machine.next_server()
        elif chance < 0.75:
            machine.ask(draw.choice(WORKERS), is_lost=draw.random() < 0.3)
        elif chance < 0.88:
            machine.commit()
        elif chance < 0.93:
            anew = set(draw.sample(WORKERS, draw.choice([0, 0, 1, 2])))
            stood_by = draw.random() < 0.3
            machine.server_dies(draw.randint(0, len(KEYS)), is_new=draw.random() < 0.5, stood_by=stood_by, anew=anew)
        elif chance < 0.955:
            machine.worker_dies(draw.choice(WORKERS))
        elif chance < 0.975:
            machine.worker_is_cut_off(draw.choice(WORKERS))
        else:
            draw.choice([machine.standby_asks, machine.leases_end])()
        machine.all_values_have_every_update_once()
        if machine.has_lost:
            break
    return machine


@pytest.mark.parametrize("seeds", [range(800), *more(range(800, 2_000))])
def test_what_no_living_node_has_is_named_and_nothing_else_is_missing(seeds: range) -> None:
    """Servers die within commits, and workers begin anew with them: all values have every update once, or the next
    server names those that are missing."""
    commits = lost = 0
    for seed in seeds:
        try:
            machine = history(seed)
        except BaseException:
            print("seed", seed)
            raise
        commits += len(machine.commits)
        lost += machine.has_lost
    print(f"{len(seeds)} histories, {commits} commits; {lost} ended with a loss")
    assert commits > 3 * len(seeds)
    assert lost > len(seeds) / 100
