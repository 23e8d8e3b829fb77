"""What other parts of the exchange ask of the rebalancer, and the jobs that it runs in the background.

The parts that ask are below the rebalancer and do not import it; it collects the requests in its next tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum

from overlay.environment import Environment
from overlay.transport import TransportError
from training.encoding.frames import BadFrame
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM, Fence, Term


class RebalanceRequests:
    """The requests of one node since the rebalancer last collected them."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._awake = asyncio.Event()
        self._orphans: dict[int, None] = {}
        self._challenges: dict[int, Term] = {}
        #: Whether a delta has waited for a backup of its shard.
        self.has_waiting_deltas = False

    def wake_for_delta(self) -> None:
        """A delta waits until its shard has a backup."""
        self.has_waiting_deltas = True
        self.wake()

    def wake(self) -> None:
        """Start the next tick at once."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `wake`, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._awake.wait()
        except TimeoutError:
            pass
        self._awake.clear()

    def take_over(self, shard: int) -> None:
        """This shard has no living owner and this node is the first living candidate."""
        self._orphans[shard] = None

    def collect_orphans(self) -> list[int]:
        orphans = list(self._orphans)
        self._orphans.clear()
        return orphans

    @property
    def has_orphans(self) -> bool:
        return bool(self._orphans)

    def challenge(self, fences: Iterable[Fence]) -> None:
        """Another node has seen these terms: an owner below one of them has to yield, or to raise its term above."""
        for fence in fences:
            owned = self._store.owned.get(fence.shard)
            if owned is not None and fence.term > owned.term and self._store.ownership.is_plausible(fence.term):
                self._challenges[fence.shard] = max(fence.term, self._challenges.get(fence.shard, ZERO_TERM))
                self.wake()

    def challenge_own(self) -> None:
        """Others have claimed terms for this owner that it never had. Whoever believes them takes nothing from it."""
        ownership = self._store.ownership
        for shard, owned in self._store.owned.items():
            fence = ownership.fence(shard)
            if fence > owned.term and not owned.moving and ownership.is_plausible(fence):
                self._challenges[shard] = max(fence, self._challenges.get(shard, ZERO_TERM))

    @property
    def has_challenges(self) -> bool:
        return bool(self._challenges)

    def collect_challenges(self) -> dict[int, Term]:
        """Shards owned here for which another node has seen a higher term, with that term."""
        challenges, self._challenges = self._challenges, {}
        return challenges


#: Called when the job starts, so that a job cancelled earlier leaves nothing behind.
Work = Callable[[], Awaitable[None]]


class JobKind(StrEnum):
    """What a job does. The values appear in the log."""

    ADD_LEARNER = "teach"
    HAND_OVER = "hand_over"
    TAKE_OVER = "take_over"
    ANSWER_FENCES = "challenge"
    RECONCILE = "mend"
    CONFIRM_BACKUP = "confirm"
    RELEASE_BACKUP = "release"
    RESEND = "resend"
    FIND_ROUTES = "route"


class Jobs:
    """The running jobs of one node."""

    def __init__(self, rebalance: RebalanceRequests, environment: Environment) -> None:
        self._rebalance = rebalance
        self._clock = environment.clock
        self._log = environment.log
        self._tasks: dict[tuple[JobKind, bytes], asyncio.Task[None]] = {}

    def start(self, kind: JobKind, target: bytes, work: Work) -> None:
        """Start a job, unless one of its kind, or any with the same non-empty target, is running."""
        if (kind, target) in self._tasks or (target and any(node == target for _, node in self._tasks)):
            return
        task = asyncio.create_task(self._guarded(kind, work), name=f"{kind}-{target.hex()[:8]}")
        self._tasks[kind, target] = task

    def is_running(self, kind: JobKind) -> bool:
        """Whether a job of this kind is running, whatever its target."""
        return any(running is kind for running, _ in self._tasks)

    def forget_done(self) -> None:
        """Allow the jobs that have ended to be started again."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, kind: JobKind, work: Work) -> None:
        began = self._clock.monotonic()
        try:
            await work()
        except (TransportError, BadFrame, ValueError) as error:
            self._log.warning("shard_move_failed", kind=kind.value, reason=str(error))
        except Exception as error:
            self._log.error("exchange_service_failed", service=kind.value, error=repr(error))
        finally:
            # A job that took no time asked no node: another tick at once would start the same job, without end.
            if self._clock.monotonic() > began:
                self._rebalance.wake()
