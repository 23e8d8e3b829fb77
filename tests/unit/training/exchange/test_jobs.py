"""Background jobs: one of a kind and target at a time, failures logged, and a tick after those that took time.

Requests to the rebalancer: they are collected once, and waking ends its wait.
"""

from __future__ import annotations

import asyncio

from overlay.transport import TransportError
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.context import ExchangeContext
from training.exchange.jobs import JobKind, Jobs, RebalanceRequests
from training.exchange.terms import Fence


def jobs_of(context: ExchangeContext) -> Jobs:
    return Jobs(context.rebalance, context.environment)


def test_a_target_has_one_job_and_a_kind_without_target_too() -> None:
    """The second is ignored until the first has ended and was forgotten."""

    async def scenario() -> None:
        jobs = jobs_of(context_of(ScriptedSwarm(contact("a")), store_of("a")))
        ran: list[str] = []

        def work(name: str) -> None:
            async def one() -> None:
                ran.append(name)
                await asyncio.sleep(1.0)

            jobs.start(JobKind(name), b"b" if name in ("release", "teach") else b"", one)

        for name in ("teach", "release", "mend", "mend", "confirm"):
            work(name)
        await asyncio.sleep(2.0)
        assert ran == ["teach", "mend", "confirm"]

        work("release")
        jobs.forget_done()
        work("release")
        await asyncio.sleep(0.1)
        assert ran == ["teach", "mend", "confirm", "release"]
        await jobs.stop()

    run(scenario())


def test_a_failed_job_is_logged_and_only_one_that_took_time_wakes_the_rebalancer() -> None:
    """A job that fails at once would otherwise be started again without end."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs, clock = jobs_of(context), context.environment.clock

        async def fails(after_s: float) -> None:
            if after_s:
                await asyncio.sleep(after_s)
            raise TransportError("timeout", contact("b").address, "was silent")

        jobs.start(JobKind.ADD_LEARNER, b"b", lambda: fails(0.0))
        began = clock.monotonic()
        await context.rebalance.wait(3.0)
        assert clock.monotonic() - began == 3.0

        jobs.start(JobKind.HAND_OVER, b"c", lambda: fails(1.0))
        await context.rebalance.wait(3.0)
        assert clock.monotonic() - began == 4.0
        failed = [record.fields["kind"] for record in records_of(context) if record.event == "shard_move_failed"]
        assert failed == ["teach", "hand_over"]

    run(scenario())


def test_every_job_that_took_time_wakes_the_rebalancer() -> None:
    """The next tick finds what it has changed."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs, clock = jobs_of(context), context.environment.clock
        for kind in JobKind:
            began = clock.monotonic()
            jobs.start(kind, b"", lambda: asyncio.sleep(0.5))
            await context.rebalance.wait(3.0)
            assert clock.monotonic() - began == 0.5

    run(scenario())


def test_stop_cancels_what_is_running() -> None:
    """Nothing is left behind."""

    async def scenario() -> None:
        jobs = jobs_of(context_of(ScriptedSwarm(contact("a")), store_of("a")))
        ended = []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        jobs.start(JobKind.RECONCILE, b"", forever)
        await asyncio.sleep(0.1)
        await jobs.stop()
        assert ended == [True]

    run(scenario(), strict=True)


def test_a_job_with_a_fault_of_this_node_is_logged_and_may_begin_again() -> None:
    """It is an error that names the job: a fault of another node is only a warning."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs = jobs_of(context)
        for _ in range(2):

            async def fails() -> None:
                raise KeyError(3)

            jobs.start(JobKind.HAND_OVER, b"b", fails)
            await asyncio.sleep(0.1)
            jobs.forget_done()

        found = [(record.event, record.level, record.fields) for record in records_of(context)]
        fields = {"service": "hand_over", "error": "KeyError(3)"}
        assert found == [("exchange_service_failed", "error", fields)] * 2

    run(scenario())


def test_a_wake_ends_the_wait_and_counts_once() -> None:
    """Without one the wait lasts its whole time; a wake before the wait counts too."""

    async def scenario() -> None:
        requests, clock = RebalanceRequests(owner_of("a")), asyncio.get_running_loop().time
        began = clock()
        requests.wake()
        await requests.wait(5.0)
        assert clock() == began

        await requests.wait(5.0)
        assert clock() - began == 5.0

    run(scenario())


def test_only_a_higher_term_challenges_an_owner() -> None:
    """Of several fences the highest counts; a shard that is not owned here cannot be challenged."""

    async def scenario() -> None:
        requests = RebalanceRequests(owner_of("a", 3))
        requests.challenge([Fence(0, term(3, "a")), Fence(0, term(2, "x")), Fence(1, term(9, "x"))])
        assert not requests.has_challenges

        requests.challenge([Fence(0, term(5, "x")), Fence(0, term(4, "x"))])
        assert requests.has_challenges
        assert requests.collect_challenges() == {0: term(5, "x")}
        assert not requests.has_challenges

    run(scenario())


def test_orphans_are_collected_once_and_in_order() -> None:
    """A shard that is reported twice is collected once."""

    async def scenario() -> None:
        requests = RebalanceRequests(owner_of("a"))
        for shard in (2, 0, 2):
            requests.take_over(shard)

        assert requests.collect_orphans() == [2, 0]
        assert requests.collect_orphans() == []

    run(scenario())


def test_an_owner_is_challenged_by_a_fence_of_its_own() -> None:
    """Somebody has claimed a term for it that it never had. Nobody need tell it so, and no tick follows at once: while
    the shard moves the same would be found again and again."""

    async def scenario() -> None:
        store = owner_of("a", 3)
        requests, clock = RebalanceRequests(store), asyncio.get_running_loop().time
        requests.challenge_own()
        assert not requests.has_challenges

        store.note_owner(0, term(5, "x"), contact("a"))
        requests.challenge_own()
        assert requests.collect_challenges() == {0: term(5, "x")}
        began = clock()
        await requests.wait(5.0)
        assert clock() - began == 5.0
        store.owned[0].begin_move()
        requests.challenge_own()
        assert not requests.has_challenges

    run(scenario())
