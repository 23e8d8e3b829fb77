"""What the exchange computes from the list of peers: median step, number of workers, whether others may own shards.

Each answer takes a pass over all peers, so it is cached for `VIEW_TTL_S`. In a small swarm every change of membership
invalidates the cache.

The number of workers is compared with what other members send. The weight of a delta is its node's share of the nodes
that train, so nodes that count differently make a sum of shares that is not one. A push names the count that its weight
was made with, and its owner lowers the weight to its own count (`training.exchange.owner.validation`); the answer names
the owner's count. Two views differ for a moment after each change. Where they differ for long one of the nodes does not
know all that train, and what its script divides by that number is wrong: `/status` names it.
"""

from __future__ import annotations

from overlay.environment import Clock
from overlay.peers import Peer
from training.exchange.peer_score import PeerScore
from training.exchange.run_state import RunState
from training.exchange.store.state_stream import PlausibleSteps
from training.exchange.terms import MAX_BELIEVED
from training.swarm import Swarm

#: Counts that differ by this factor are no matter of chance: of nodes that are known one by one, and of an estimate.
COUNTED_FACTOR, ESTIMATED_FACTOR = 1.2, 1.5
#: Views that differ for so long do not differ because somebody has just come or gone: three times the detection bound.
LASTING_S = 30.0
#: Members whose counts are remembered.
MAX_MEMBERS = 1024


def factor_of(*, exact: bool) -> float:
    """By which factor counts have to differ, where this node's is exact or an estimate."""
    return COUNTED_FACTOR if exact else ESTIMATED_FACTOR


def corrected(weight: float, theirs: float, mine: float, *, exact: bool) -> float:
    """A weight that was made with the count `theirs`, as the count `mine` makes it if that is larger. Nobody counts
    nodes that are not there for longer than it takes to miss one, so the larger count is the better one."""
    return weight * theirs / mine if 0.0 < theirs * factor_of(exact=exact) <= mine else weight


class CountComparison:
    """The members whose counts differ from this node's, and since when."""

    def __init__(self) -> None:
        #: Since when and until when, in monotonic seconds, and the last count of each.
        self._differing: dict[bytes, tuple[float, float, float]] = {}

    def note(self, node: bytes, theirs: float, mine: float, *, exact: bool, now: float) -> None:
        """A member has sent its count; 0: it sent none."""
        since, _, _ = self._differing.pop(node, (now, 0.0, 0.0))
        factor = factor_of(exact=exact)
        if theirs > 0.0 and (theirs * factor <= mine or mine * factor <= theirs):
            self._differing[node] = since, now, theirs
            if len(self._differing) > MAX_MEMBERS:
                del self._differing[next(iter(self._differing))]

    def lasting(self) -> list[tuple[bytes, float]]:
        """The members whose counts have differed for `LASTING_S`, with their counts."""
        return [
            (node, theirs) for node, (since, until, theirs) in self._differing.items() if until - since >= LASTING_S
        ]


#: How long a computed answer is used.
VIEW_TTL_S = 0.2
#: With at most this many peers every change of membership counts at once.
SMALL_SWARM = 50
#: A step beyond this many times the median, plus so many steps, is implausible: a message with it is refused. The
#: factor is large, because without a barrier a fast node may be far ahead.
FURTHEST_FACTOR, FURTHEST_AT_FIRST = 1000, 1_000_000
#: The tighter bound for an era: all deltas of steps before an era are refused, so a false one would stop the others.
LIKELY_FACTOR, LIKELY_AT_FIRST = 100, 1000
#: Under bulk-synchronous rules: what this node has heard of the others is that much behind at most.
PASSABLE_STEPS = 8
#: An unknown node that did not answer counts as gone for this long; for a known one the failure detector decides.
UNKNOWN_FAILED_S = 5.0


class SwarmView:
    """A cached view of the peers of one node."""

    def __init__(
        self,
        swarm: Swarm,
        clock: Clock,
        run: RunState,
        score: PeerScore,
        *,
        has_steps: bool = True,
        has_backups: bool = True,
        stale_limit: int | None = None,
    ) -> None:
        """`has_steps`: deltas are numbered by the steps of their nodes, so the median step bounds these numbers.
        `has_backups`: a shard has a backup where another node can be one. `stale_limit`: the most steps by which the
        barrier lets nodes differ; None: there is no such limit."""
        self._swarm = swarm
        self.has_steps = has_steps
        self._has_backups = has_backups
        #: Members that send nonsense, and those that are alive and answer no requests, count as gone.
        self.score = score
        #: Members that count the workers differently.
        self.counts = CountComparison()
        self._clock = clock
        self._run = run
        self._stale_limit = stale_limit
        self._has_met_others = False
        #: Answers, each with the time at which it was computed; a negative time: not computed yet.
        self._eligible_others: tuple[float, bool] = (-1.0, False)
        self._median: tuple[float, int] = (-1.0, 0)
        self._worker_count: tuple[float, float] = (-1.0, 1.0)
        self._step_seconds: tuple[float, float] = (-1.0, 0.0)

    def is_gone(self, node_id: bytes) -> bool:
        """Whether a node is dead, has left, is ignored or silent, or is unknown and failed to answer a moment ago.

        In a large swarm the owner of a shard may be a node that this one has never met, so an unknown node is not dead.
        Nor is one that another member reaches: there is a hole between it and this node.
        """
        if self.score.is_ignored(node_id):
            return True
        if self.score.relay(node_id):
            return False
        if self.score.is_silent(node_id):
            return True
        if node_id == self._swarm.node_id or self._swarm.is_alive(node_id):
            return False
        return self.score.failed_within(node_id, UNKNOWN_FAILED_S) or self._swarm.is_gone(node_id)

    def heeded(self) -> list[Peer]:
        """The members that this node does not ignore."""
        return [peer for peer in self._swarm.members() if not self.score.is_ignored(peer.node_id)]

    def median_step(self) -> int:
        """The median completed step of the known workers, this node included.

        With two nodes it is the larger step, but no more than this node's own pace explains: no third node confirms it.
        """
        now = self._clock.monotonic()
        computed_at, median = self._median
        if now - computed_at > VIEW_TTL_S or computed_at < 0:
            median = self.median_step_of_those_heard(0.0)
            self._median = (now, median)
        return median

    def median_step_of_those_heard(self, since: float) -> int:
        """`median_step` among the workers that were heard since then: a dead one is at its last step for as long as
        nobody has missed it."""
        now = self._clock.monotonic()
        others = [peer.step for peer in self.heeded() if peer.last_heard >= since and peer.is_worker(now)]
        if len(others) == 1:
            others = [int(min(others[0], self._run.explained_step(now)))]
        steps = sorted([self._run.step, *others])
        return steps[len(steps) // 2]

    def step_of_others(self) -> int | None:
        """The step to go back to if most other workers, and at least two, are far behind this node's first step.

        Then that step was false: it came from a single node, or from this node's disk. None otherwise.
        """
        first = self._run.first_step
        if not first or not self.has_steps:
            return None
        now = self._clock.monotonic()
        others = sorted(peer.step for peer in self.heeded() if peer.is_worker(now))
        behind = [step for step in others if first > self._reach(step)]
        if len(others) - len(behind) >= 2:
            self._run.first_step = 0  # confirmed
        if len(behind) < 2 or 2 * len(behind) <= len(others):
            return None
        return behind[len(behind) // 2]

    def _reach(self, step: int) -> int:
        """The largest plausible first step of a node beside another one that is at `step` now. A step from the disk may
        be ahead of the others, because they may have lost some steps since."""
        if self._stale_limit is None:
            return LIKELY_AT_FIRST + LIKELY_FACTOR * step
        return step + 4 * self._stale_limit if self._run.told_by_one else 2 * step + LIKELY_AT_FIRST

    def furthest_step(self) -> int:
        """The largest plausible step of any node; messages with later ones are refused.

        Before the first step there is no such bound: a node that starts does not know the others' steps yet.
        """
        median = self.median_step() if self.has_steps else 0
        return min(FURTHEST_AT_FIRST + FURTHEST_FACTOR * median, MAX_BELIEVED) if median else MAX_BELIEVED

    def passable_step(self) -> int:
        """Under bulk-synchronous rules no node has passed the barrier of a later step than this: all others have come
        as far then, and each has told its owners so with its last pull. Where fewer than two others are known, as
        `furthest_step`."""
        now = self._clock.monotonic()
        others = sorted(peer.step for peer in self.heeded() if peer.is_worker(now))
        if len(others) < 2:
            return self.furthest_step()
        return max(self._run.step, others[(len(others) - 1) // 2]) + PASSABLE_STEPS

    def likely_step(self) -> int:
        """The latest plausible first step of an era. A false one would make owners refuse the others' deltas."""
        median = self.median_step() if self.has_steps else 0
        return min(LIKELY_AT_FIRST + LIKELY_FACTOR * median, MAX_BELIEVED) if median else MAX_BELIEVED

    def plausible_steps(self) -> PlausibleSteps:
        """Bounds for the steps in another node's state: twice this node's own, because the views differ a little."""
        most = min(2 * self.furthest_step(), MAX_BELIEVED), min(2 * self.likely_step(), MAX_BELIEVED)
        return PlausibleSteps(*most)

    def worker_count(self) -> float:
        """`Swarm.workers`, cached."""
        now = self._clock.monotonic()
        computed_at, count = self._worker_count
        if now - computed_at > VIEW_TTL_S or computed_at < 0:
            count = self._swarm.workers()
            self._worker_count = (now, count)
        return count

    def merged_weight(self, weight: float, workers: float) -> float:
        """What a delta weighs here that was trained apart from this node, and weighed among so many workers:
        `w · N_side / N_merged`."""
        return weight * workers / max(workers, self.worker_count())

    def corrected(self, weight: float, workers: float) -> float:
        """A weight that was made with this number of workers, as this node's larger number makes it."""
        return corrected(weight, workers, self.worker_count(), exact=self._swarm.population().exact)

    def compare_count(self, node_id: bytes, workers: float) -> None:
        """A member has sent the number of workers by its count."""
        exact, now = self._swarm.population().exact, self._clock.monotonic()
        self.counts.note(node_id, workers, self.worker_count(), exact=exact, now=now)

    def median_step_seconds(self) -> float:
        """The median step time that the other workers announce; 0 while none has."""
        now = self._clock.monotonic()
        computed_at, median = self._step_seconds
        if now - computed_at > VIEW_TTL_S or not median:  # who has just come asks for the first one
            peers = [peer for peer in self.heeded() if peer.step_seconds > 0.0 and peer.is_worker(now)]
            known = sorted(peer.step_seconds for peer in peers)
            median = known[len(known) // 2] if known else 0.0
            self._step_seconds = (now, median)
        return median

    def has_met_others(self) -> bool:
        """Whether this swarm has or had another node; remembered peers of earlier starts count."""
        if not self._has_met_others:
            self._has_met_others = bool(self._swarm.members() or self._swarm.remembered())
        return self._has_met_others

    def expects_backups(self) -> bool:
        """Whether every shard has a backup, or is about to get one."""
        return self._has_backups and self.has_eligible_others()

    def has_eligible_others(self) -> bool:
        """Whether another known node could own or back up a shard."""
        now = self._clock.monotonic()
        computed_at, answer = self._eligible_others
        if now - computed_at > VIEW_TTL_S or computed_at < 0:
            silent = self.score.is_silent
            answer = any(self._swarm.may_own(peer) and not silent(peer.node_id) for peer in self.heeded())
            self._eligible_others = (now, answer)
        return answer

    def invalidate(self) -> None:
        """Compute again, because membership or this node's step has changed.

        In a large swarm the cached answers stay, because one change matters little there. Otherwise each of a thousand
        simultaneous joins would take a pass over a thousand peers.
        """
        if len(self._swarm.peers) > SMALL_SWARM:
            return
        self._eligible_others = (-1.0, False)
        self._median = (-1.0, 0)
        self._worker_count = (-1.0, 1.0)
        self._step_seconds = (-1.0, 0.0)
