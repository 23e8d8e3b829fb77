"""Synchronous SGD as a plain model: histories of versions with lost answers, retries, deaths and servers that take
over.

The model keeps what every gradient was computed from. It allows a commit only if it has exactly `grads_to_wait`
gradients of different workers, each of the version before it or of one at most `version_tolerance` older, and no
gradient twice.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from training.dispatch.answers import QueueRules
from training.engines.server.acceptance import Commit, Contribution, Policy, Quota, updates_of
from training.engines.server.core import ServerCore, ServerRecord
from training.engines.server.fencing import not_yet_applied
from training.engines.server.options import ServerOptions
from training.engines.server.takeover import Takeover
from training.engines.server.tasks import LeasedTask
from training.values.store import Stamped, ValueUpdate

WORKERS = [bytes([number]) for number in range(4)]
KEYS = ("a", "b", "c")
RULES = QueueRules(max_failures=255, max_losses=255, lease_floor_s=10.0, lease_ceiling_s=10.0)


class Worker:
    """What a worker knows: its task, the version that it computes from, and the report that it repeats."""

    def __init__(self) -> None:
        self.lease: LeasedTask | None = None
        self.report: Contribution | None = None


class SynchronousSgd(RuleBasedStateMachine):
    """One server at a time, four workers, three keys at owners that never forget."""

    @initialize(grads=st.integers(1, 3), tolerance=st.integers(0, 2), limit=st.integers(1, 4))
    def begin(self, grads: int, tolerance: int, limit: int) -> None:
        self.grads, self.tolerance, self.limit = grads, tolerance, limit
        self.now = 0.0
        self.policy: Policy = Quota(grads, tolerance)
        self.record = ServerRecord()
        self.core = self.new_core(self.record)
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
        #: Workers that have died since all that was due was in the values. One that begins anew, and has no report, is
        #: taken for one that knows of the commit under way.
        self.anew: dict[bytes, None] = {}

    def new_core(self, record: ServerRecord) -> ServerCore:
        self.policy = Quota(self.grads, self.tolerance)
        barrier = ServerOptions(barrier="asp").make_barrier()
        return ServerCore(
            barrier, self.policy, RULES, random.Random(1), record, server=b"S", max_report_count=self.limit
        )

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
        held = {one.task: one.attempt for one in (worker.lease, worker.report) if one is not None}
        core.told(name, list(held.items()))
        core.reassign(self.now)
        for passed in core.passed(self.now):
            core.give(passed, [], self.now)
        lease = core.leases.of(name)
        if is_lost:
            return
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
        if lease is not None and not self.core.is_committing:
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
        self.dead[name] = self.anew[name] = None

    @precondition(lambda self: self.takeover is None)
    @rule()
    def leases_end(self) -> None:
        """Nobody has asked for long."""
        self.now += 11.0
        self.core.expire(self.now)

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
        self.anew.clear()

    @precondition(lambda self: self.takeover is None)
    @rule(keys=st.integers(0, len(KEYS)), is_new=st.booleans())
    def server_dies(self, keys: int, is_new: bool) -> None:
        """It may be in a commit, which some keys have; or its last record names a commit that it has made since."""
        commit = self.core.due()
        if commit is not None or is_new:
            self.record = self.core.record()
        if commit is not None:
            self.check(commit)
            self.apply(commit, keys)
        self.takeover = Takeover(self.record)
        self.now += 1.0

    @precondition(lambda self: self.takeover is not None)
    @rule()
    def next_server(self) -> None:
        """It hears all workers of the commit, makes it again, and goes on."""
        takeover = self.takeover
        self.has_lost = self.has_lost or any(name in self.anew for name in takeover.awaited)
        for name in takeover.awaited:
            report = self.workers[name].report
            if name in self.dead:
                takeover.gone(name)
            else:
                takeover.heard(name, [] if report is None else [report])
        assert takeover.is_settled
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
        self.takeover = None

    @invariant()
    def all_values_have_every_update_once(self) -> None:
        """As many updates as versions, at every key, unless a server died within one."""
        if getattr(self, "takeover", None) is None and hasattr(self, "core"):
            for key in KEYS if not self.has_lost else ():
                assert self.values.get(key, (0, 0)) == (self.core.version, self.core.version)


TestSynchronousSgd = SynchronousSgd.TestCase
TestSynchronousSgd.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
