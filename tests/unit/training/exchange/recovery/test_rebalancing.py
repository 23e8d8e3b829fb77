"""The rebalancer: which jobs a tick starts, and how a leaving node gives its shards away.

Jobs: one of a kind or target at a time, failures logged, and a tick after those that took time.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding.codecs import as_bytes
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.directory import shard_key
from p2pnode.training.exchange.messages import LocateOwnersAnswer, Push, decode
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ReplicasAnswer, TransferResult
from p2pnode.training.exchange.recovery.rebalancing import (
    RANKED_AT_ONCE,
    VALUES_TENURE_S,
    JobKind,
    Jobs,
    Rebalancer,
    duty,
)
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Term
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.value_table import ValueTable
from tests.harness.builders.stores import IDS, SUM, backup_of, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.loop_turns import counted_turns
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import (
    Answer,
    ExchangeContext,
    ScriptedSwarm,
    context_of,
    deltas_of,
    directory_of,
    records_of,
    until,
)
from tests.harness.stubs.exchange_services import failover_of, moves_of, publisher_of

ME, B, C = contact("a"), contact("b"), contact("c")
SETTINGS = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0, tenure_s=5.0)


def rebalancer_of(
    store: ShardStore, settings: ExchangeSettings = SETTINGS, **answers: Answer
) -> tuple[Rebalancer, ScriptedSwarm, ExchangeContext]:
    swarm = ScriptedSwarm(ME, [B, C])
    usual: dict[str, Answer] = {
        "where_is": LocateOwnersAnswer([]),
        "query_replicas": ReplicasAnswer([]),
        "learn": TransferResult([0], []),
        "state": TransferResult([0], []),
        "hand_over": TransferResult([0], []),
    }
    for name, answer in {**usual, **answers}.items():
        swarm.answers[name] = lambda *_, answer=answer: answer
    context = context_of(swarm, store, settings=settings)
    deltas, directory, publisher = deltas_of(context), directory_of(context), publisher_of(context)
    rebalancer = Rebalancer(
        swarm=context.swarm,
        store=store,
        view=context.view,
        run=context.run,
        rpc=context.rpc,
        rebalance=context.rebalance,
        directory=directory,
        publisher=publisher,
        moves=moves_of(context, publisher, deltas),
        failover=failover_of(context, directory),
        duties={},
        settings=settings,
        environment=context.environment,
    )
    return rebalancer, swarm, context


def test_an_owner_without_a_backup_adds_the_best_candidate_as_learner() -> None:
    """It becomes the backup, and its failure is watched for."""

    async def scenario() -> None:
        store = owner_of("a")
        rebalancer, swarm, _ = rebalancer_of(store)
        swarm.suspects = [IDS["b"]]
        await rebalancer.tick()
        await until(lambda: store.owned[0].backup == C)
        await rebalancer.tick()
        assert swarm.watched == [IDS["c"]]

    run(scenario())


def test_copies_wait_until_the_joiners_have_the_vector_or_a_delta_comes() -> None:
    """They share the line of the founder, and nothing is lost without them before the first delta."""

    async def scenario() -> None:
        for change in ("ready", "delta", "added"):
            store = owner_of("a")
            rebalancer, swarm, context = rebalancer_of(store)
            swarm.peers[IDS["c"]].activity = Activity.JOINING
            await rebalancer.tick()
            await asyncio.sleep(0.5)
            assert swarm.sent("learn", Learn) == []
            if change == "ready":
                swarm.peers[IDS["c"]].activity = Activity.READY
            elif change == "delta":
                values = np.ones(4, np.float32)
                push = Push(IDS["x"], 1, 1, 0, 1.0, [0])
                item = IncomingDelta(0, values, bytes(as_bytes(values)), "float32")
                [result] = await deltas_of(context).accept(push, [item])
                assert result.reason == "no_backup_yet"
            else:
                store.add(0, delta(1))
            await rebalancer.tick()
            await until(lambda store=store: store.owned[0].backup == B)

    run(scenario())


def test_shards_without_a_backup_come_first_and_others_are_copied_to_one_node_at_a_time() -> None:
    """Deltas wait for the former; the latter would only share the line with them."""

    async def scenario() -> None:
        store = owner_of("a")
        for shard in (1, 2, 3):
            store.own(shard, zeros(store, shard), term(1, "a"), ME, 0.0, by_handover=False)
        store.owned[0].backup, store.owned[1].backup = B, C
        best = [[ME, C, B], [ME, B, C], [ME, B, C], [ME, C, B]]
        rebalancer, swarm, context = rebalancer_of(store, learn=TransferResult([0, 1, 2, 3], []))
        keys = {shard_key(context.genesis, shard): shard for shard in range(4)}

        async def candidates(key: bytes) -> list[Contact]:
            return best[keys[key]]

        def asked() -> list[tuple[Contact, list[int]]]:
            of = [(to, decode(payload, Learn)) for name, to, payload in swarm.requests if name == "learn"]
            return [(to, [info.shard for info in learn.shards]) for to, learn in of]

        swarm.candidates = candidates  # type: ignore[method-assign]
        swarm.answers["state"] = lambda *_: TransferResult([0, 1, 2, 3], [])
        swarm.request_s = 1.0
        await rebalancer.tick()
        await asyncio.sleep(1.5)
        assert asked() == [(C, [3]), (B, [2])]
        await rebalancer.tick()
        await until(lambda: store.owned[2].backup == B and store.owned[3].backup == C)
        assert asked() == [(C, [3]), (B, [2])]
        await rebalancer.tick()
        await asyncio.sleep(1.5)
        await rebalancer.tick()
        await until(lambda: store.owned[0].backup == C)
        assert asked()[2:] == [(C, [0])]
        await rebalancer.tick()
        await until(lambda: store.owned[1].backup == B)
        assert asked()[3:] == [(B, [1])]

    run(scenario())


def test_without_replicas_no_backup_is_made() -> None:
    """`replicas = 0`, and this node is the best candidate: nothing is sent."""

    async def scenario() -> None:
        store = owner_of("a")
        rebalancer, swarm, _ = rebalancer_of(store, msgspec.structs.replace(SETTINGS, replicas=0))
        await rebalancer.tick()
        await asyncio.sleep(0.5)
        assert not [name for name, _, _ in swarm.requests if name == "learn"]

    run(scenario())


def test_a_shard_moves_to_its_best_candidate_after_its_tenure() -> None:
    """The candidate is the backup; within `tenure_s` of the last change the shard stays."""

    async def scenario() -> None:
        store = store_of("a")
        rebalancer, swarm, context = rebalancer_of(store)
        now = context.environment.clock.monotonic()
        store.own(0, zeros(store), term(1, "a"), ME, now, by_handover=True, backup=B)
        swarm.candidate_list = [B, ME, C]

        await rebalancer.tick()
        await asyncio.sleep(1.0)
        assert 0 in store.owned

        await asyncio.sleep(SETTINGS.tenure_s)
        await rebalancer.tick()
        await until(lambda: 0 not in store.owned)
        assert store.backed[0].owner == B

    run(scenario())


def test_a_dead_backup_is_dropped_under_a_new_term() -> None:
    """What it has ranks below what is added from now on; another node becomes the backup."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        rebalancer, swarm, _ = rebalancer_of(store)
        swarm.gone.append(IDS["b"])
        await rebalancer.tick()
        assert store.owned[0].term > term(1, "a")
        await until(lambda: store.owned[0].backup == C)

    run(scenario())


def test_a_backup_takes_over_from_a_dead_owner_and_not_while_it_lives() -> None:
    """Its copy is the best of the survey: it owns the shard under a higher term."""

    async def scenario() -> None:
        store = backup_of("a", "b", 3)
        rebalancer, swarm, _ = rebalancer_of(store)
        await rebalancer.tick()
        await asyncio.sleep(1.0)
        assert 0 in store.backed

        swarm.gone.append(IDS["b"])
        await rebalancer.tick()
        await until(lambda: 0 in store.owned)
        assert store.owned[0].term > term(3, "b")

    run(scenario())


def test_orphans_wait_while_take_overs_are_delayed() -> None:
    """A node that has just started takes over nothing that it is asked to, until it is allowed."""

    async def scenario() -> None:
        store = store_of("a")
        rebalancer, swarm, context = rebalancer_of(store)
        context.replica.set_version(0, term(1, "x"), 1)
        rebalancer.delay_takeover(30.0)
        context.rebalance.take_over(0)
        await rebalancer.tick()
        await asyncio.sleep(0.5)
        assert not [name for name, _, _ in swarm.requests if name == "query_replicas"]

        rebalancer.allow_takeover()
        context.rebalance.take_over(0)
        await rebalancer.tick()
        await until(lambda: any(name == "query_replicas" for name, _, _ in swarm.requests))

    run(scenario())


def test_a_leaving_node_hands_over_to_any_backup() -> None:
    """The backup need not be the best candidate; without another node the shards stay, and `leave` returns at once."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = C
        rebalancer, _, context = rebalancer_of(store)
        running = asyncio.create_task(rebalancer.run())
        assert await rebalancer.leave(5.0) == 0
        assert context.run.is_leaving
        running.cancel()

        alone = owner_of("a")
        lonely, swarm, context = rebalancer_of(alone)
        swarm.gone += [IDS["b"], IDS["c"]]
        began = context.environment.clock.monotonic()
        assert await lonely.leave(5.0) == 1
        assert context.environment.clock.monotonic() == began

    run(scenario())


def test_a_slow_owner_gives_a_shard_to_its_faster_backup_and_copies_nothing() -> None:
    """The best candidate is a third node, which the backup supplies; nodes of one class copy to the best one first."""

    async def scenario(capacities: dict[bytes, int]) -> list[str]:
        store = store_of("a")
        rebalancer, swarm, context = rebalancer_of(store)
        now = context.environment.clock.monotonic()
        store.own(0, zeros(store), term(1, "a"), ME, now, by_handover=False, backup=B)
        swarm.candidate_list = [C, B, ME]
        swarm.capacities = capacities
        await rebalancer.tick()
        await until(lambda: any(name in ("hand_over", "state") for name, _, _ in swarm.requests))
        return [f"{name} {to.node_id[:1]!r}" for name, to, _ in swarm.requests if name in ("hand_over", "state")]

    slow, fast, fastest = (IDS[name] for name in "abc")
    assert run(scenario({slow: 5, fast: 9, fastest: 9})) == [f"hand_over {fast[:1]!r}"]
    for equal in ({}, dict.fromkeys(IDS.values(), 9), {slow: 9, fast: 9, fastest: 11}):
        assert run(scenario(equal)) == [f"state {fastest[:1]!r}"]


def test_a_table_of_values_is_handed_over_soon() -> None:
    """A joiner has its share of small tables after a moment."""

    async def scenario() -> None:
        store = store_of("a")
        rebalancer, _, context = rebalancer_of(store)
        state, now = zeros(store), context.environment.clock.monotonic()
        state.table = ValueTable()
        owned = store.own(0, state, term(1, "a"), ME, now, by_handover=True, backup=B)
        assert rebalancer._is_kept(owned)
        await asyncio.sleep(VALUES_TENURE_S)
        assert not rebalancer._is_kept(owned)

    run(scenario())


def test_others_run_while_the_candidates_of_all_shards_are_ranked() -> None:
    """After a change of membership that takes a few tenths of a millisecond for each shard."""

    async def scenario() -> None:
        shards = 40
        store = ShardStore(ME.node_id, [(0, 0)] * shards, 0, SUM)
        for shard in range(shards):
            state = store.fresh_state(shard, np.zeros(0, np.float32))
            store.own(shard, state, term(1, "a"), ME, 0.0, by_handover=False)
        rebalancer, _, _ = rebalancer_of(store)
        with counted_turns() as turns:
            await rebalancer.tick()
        assert turns.count >= shards // RANKED_AT_ONCE - 1

    run(scenario())


def test_a_shard_that_is_lost_while_moves_are_planned_ends_nothing() -> None:
    """Other tasks run between two rankings: a claim may take a shard for which a copy is planned already. The tick
    copies the others."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(len(store)):
            store.own(shard, zeros(store, shard), term(1, "a"), ME, 0.0, by_handover=False)
        rebalancer, swarm, _ = rebalancer_of(store)
        ticking = asyncio.create_task(rebalancer.tick())
        await asyncio.sleep(0)
        assert not ticking.done()
        assert store.note_owner(0, term(2, "b"), B)
        await ticking
        await until(lambda: swarm.sent("learn", Learn) != [])
        (learn,) = swarm.sent("learn", Learn)
        assert 0 not in [info.shard for info in learn.shards]

    run(scenario())


def test_a_backup_that_nobody_can_dial_is_given_up_where_no_other_could_be_one() -> None:
    """It answers probes, so nobody misses it; each delta would wait for it. A candidate takes its place instead."""

    async def scenario() -> None:
        for others in ([], [C]):
            store = owner_of("a")
            rebalancer, swarm, _ = rebalancer_of(store)
            store.promote_learner(0, B, Term(2, ME.node_id), ME, 0.0)
            swarm.candidate_list, swarm.hidden = [ME, *others], [IDS["b"]]
            await rebalancer.tick()
            assert store.owned[0].backup == (B if others else None)
            await until(lambda store=store, others=others: store.owned[0].backup == (C if others else None))

    run(scenario())


def test_an_owner_that_nobody_can_dial_any_more_gives_its_shards_away_at_once() -> None:
    """It keeps them for no minimum time."""

    async def scenario() -> None:
        store = owner_of("a")
        rebalancer, swarm, context = rebalancer_of(store)
        store.promote_learner(0, B, Term(2, ME.node_id), ME, context.environment.clock.monotonic())
        store.owned[0].by_handover = True
        swarm.candidate_list = [B, C]
        await rebalancer.tick()
        await asyncio.sleep(0.1)
        assert not swarm.sent("hand_over", HandOver)
        swarm.is_eligible = False
        await rebalancer.tick()
        await until(lambda: bool(swarm.sent("hand_over", HandOver)))

    run(scenario())


def test_a_duty_is_done_with_what_is_due() -> None:
    """Nothing is due: no job begins."""

    async def scenario() -> None:
        found, done = ["this"], []

        async def work(what: list[str]) -> None:
            done.append(what)

        due = duty(lambda: found, work)
        job = due()
        assert job is not None
        await job()
        assert done == [["this"]]
        found.clear()
        assert due() is None

    run(scenario())


# -- jobs -------------------------------------------------------------------------------------------------------------


def jobs_of_a_node() -> Jobs:
    context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
    return Jobs(context.rebalance, context.environment)


def test_a_target_has_one_job_and_a_kind_without_target_too() -> None:
    """The second is ignored until the first has ended."""

    async def scenario() -> None:
        jobs = jobs_of_a_node()
        ran: list[str] = []

        def work(name: str) -> None:
            async def one() -> None:
                ran.append(name)
                await asyncio.sleep(1.0)

            jobs.start(JobKind(name), one, b"b" if name in ("hand_over", "teach") else b"")

        for name in ("teach", "hand_over", "repair", "repair", "confirm"):
            work(name)
        await asyncio.sleep(2.0)
        assert ran == ["teach", "repair", "confirm"]

        work("hand_over")
        await asyncio.sleep(0.1)
        assert ran == ["teach", "repair", "confirm", "hand_over"]
        await jobs.stop()

    run(scenario())


def test_a_failed_job_is_logged_and_only_one_that_took_time_wakes_the_rebalancer() -> None:
    """A job that fails at once would otherwise be started again without end."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs, clock = Jobs(context.rebalance, context.environment), context.environment.clock

        async def fails(after_s: float) -> None:
            if after_s:
                await asyncio.sleep(after_s)
            raise TransportError("timeout", contact("b").address, "was silent")

        jobs.start(JobKind.ADD_LEARNER, lambda: fails(0.0), b"b")
        began = clock.monotonic()
        await context.rebalance.wait(3.0)
        assert clock.monotonic() - began == 3.0

        jobs.start(JobKind.HAND_OVER, lambda: fails(1.0), b"c")
        await context.rebalance.wait(3.0)
        assert clock.monotonic() - began == 4.0
        failed = [record.fields["kind"] for record in records_of(context) if record.event == "shard_move_failed"]
        assert failed == ["teach", "hand_over"]

    run(scenario())


def test_every_job_that_took_time_wakes_the_rebalancer() -> None:
    """The next tick finds what it has changed."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs, clock = Jobs(context.rebalance, context.environment), context.environment.clock
        for kind in JobKind:
            began = clock.monotonic()
            jobs.start(kind, lambda: asyncio.sleep(0.5))
            await context.rebalance.wait(3.0)
            assert clock.monotonic() - began == 0.5

    run(scenario())


def test_stop_cancels_what_is_running() -> None:
    """Nothing is left behind."""

    async def scenario() -> None:
        jobs = jobs_of_a_node()
        ended = []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        jobs.start(JobKind.RECONCILE, forever)
        await asyncio.sleep(0.1)
        await jobs.stop()
        assert ended == [True]

    run(scenario(), strict=True)


def test_a_job_with_a_fault_of_this_node_is_logged_and_may_begin_again() -> None:
    """It is an error that names the job: a fault of another node is only a warning."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        jobs = Jobs(context.rebalance, context.environment)
        for _ in range(2):

            async def fails() -> None:
                raise KeyError(3)

            jobs.start(JobKind.HAND_OVER, fails, b"b")
            await asyncio.sleep(0.1)

        found = [(record.event, record.level, record.fields) for record in records_of(context)]
        fields = {"service": "hand_over", "error": "KeyError(3)"}
        assert found == [("exchange_service_failed", "error", fields)] * 2

    run(scenario())
