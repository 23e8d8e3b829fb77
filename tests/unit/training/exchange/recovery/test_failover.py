"""Take-overs by the survey of the copies, and answers to fences."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import NOT_SERVED, TransportError
from p2pnode.training.exchange.messages import IndirectAnswer, LocateOwnersAnswer, decode, encode
from p2pnode.training.exchange.ownership_messages import CopyStatus, ReplicasAnswer, ShardList, TransferResult
from p2pnode.training.exchange.recovery.failover import REPLICA_GRACE_S, Failover
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.shard_states import describe
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import GENERATION, ZERO_TERM, Fence, OwnerInfo, Role, Term
from p2pnode.training.shards.applied import Applied
from tests.harness.builders.stores import IDS, backup_of, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import (
    ExchangeContext,
    ScriptedSwarm,
    context_of,
    directory_of,
    records_of,
    route_finder_of,
)

ME, B, C = contact("a"), contact("b"), contact("c")


def copy(role: Role, held: Term, version: int = 0) -> CopyStatus:
    return CopyStatus(0, role, held, version, ZERO_TERM, 0)


def failover_of(store: ShardStore, *copies: CopyStatus) -> tuple[Failover, ScriptedSwarm, ExchangeContext]:
    """Node b has these copies, node c has none."""
    swarm = ScriptedSwarm(ME, [B, C])
    swarm.answers["query_replicas"] = lambda to, _payload: ReplicasAnswer(list(copies) if to == B else [])
    swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
    swarm.answers["request_takeover"] = lambda *_: TransferResult([0], [])
    context = context_of(swarm, store)
    failover = Failover(
        swarm=context.swarm,
        store=store,
        replica=context.replica,
        run=context.run,
        view=context.view,
        rpc=context.rpc,
        rebalance=context.rebalance,
        directory=directory_of(context),
        routes=route_finder_of(context),
        environment=context.environment,
        is_synchronous=False,
    )
    return failover, swarm, context


def test_an_owner_that_another_member_reaches_is_not_replaced() -> None:
    """Its backup counts it as gone by itself: there is a hole between the two, and it goes on owning."""

    async def scenario() -> None:
        store = backup_of("a", "x", 3)
        failover, swarm, context = failover_of(store, copy("replica", term(3, "x"), 1))
        context.view.score.failed(contact("x"), "did not answer")
        owned = encode(ReplicasAnswer([copy("owner", term(3, "x"), 2)]))
        swarm.answers["indirect"] = lambda to, _: (
            IndirectAnswer(owned) if to == C else TransportError("timeout", to.address, "did not answer")
        )
        assert context.view.is_gone(IDS["x"])
        await failover.take_over([0])

        assert 0 not in store.owned
        assert not context.view.is_gone(IDS["x"])
        assert context.view.score.relay(IDS["x"]) == C.node_id

    run(scenario())


def test_a_backup_takes_over_and_announces_it() -> None:
    """Under a term above all that the survey found; the owner is announced to the other members."""

    async def scenario() -> None:
        store = backup_of("a", "x", 3)
        failover, swarm, context = failover_of(store, copy("replica", term(3, "x"), 1))
        swarm.gone.append(IDS["x"])
        await failover.take_over([0])

        assert store.owned[0].term == term(4, "a")
        assert sorted(to.node_id for name, to, _ in swarm.requests if name == "where_is") == [IDS["b"], IDS["c"]]
        assert [record.event for record in records_of(context)] == ["shards_taken_over"]

    run(scenario())


def test_a_living_owner_keeps_its_shard() -> None:
    """The survey finds an owner with a term that is not below the fence: it is known then, nothing is taken."""

    async def scenario() -> None:
        store = store_of("a")
        failover, _, context = failover_of(store, copy("owner", term(7, "b")))
        context.replica.set_version(0, term(3, "x"), 1)
        await failover.take_over([0])

        assert 0 not in store.owned
        known = store.ownership.owner_info(0)
        assert known is not None
        assert (known.owner, known.term) == (IDS["b"], term(7, "b"))

    run(scenario())


def test_a_better_copy_is_asked_to_take_over() -> None:
    """A backup on another node ranks above the replica here."""

    async def scenario() -> None:
        store = store_of("a")
        failover, swarm, context = failover_of(store, copy("backup", term(3, "x")))
        context.replica.set_version(0, term(3, "x"), 9)
        await failover.take_over([0])

        assert 0 not in store.owned
        assert [to for name, to, _ in swarm.requests if name == "request_takeover"] == [B]

    run(scenario())


def test_a_replica_is_used_only_after_a_grace_period() -> None:
    """A backup may appear in that time; then the replica begins a new era."""

    async def scenario() -> None:
        store = store_of("a")
        failover, _, context = failover_of(store)
        context.replica.set_version(0, term(3, "x"), 9)
        context.replica.slice_of(0)[:] = 2.0
        began = context.environment.clock.monotonic()
        while 0 not in store.owned:
            await failover.take_over([0])
            await asyncio.sleep(0.5)
            assert failover.waiting() == ([0] if 0 not in store.owned else [])

        assert context.environment.clock.monotonic() - began >= REPLICA_GRACE_S
        owned = store.owned[0]
        assert owned.state.value.tolist() == [2.0] * 4
        assert owned.state.era_step >= 1
        assert owned.term > term(3, "x")

    run(scenario())


def test_a_leaving_node_takes_no_replica() -> None:
    """It would go with the shard, under a higher term than the whole state on another disk."""

    async def scenario() -> None:
        store = store_of("a")
        failover, _, context = failover_of(store)
        context.replica.set_version(0, term(3, "x"), 9)
        context.run.enter(context.run.phase.LEAVING)
        for _ in range(10):
            await failover.take_over([0])
            await asyncio.sleep(0.5)
        assert 0 not in store.owned

    run(scenario())


def test_a_better_replica_is_fetched_from_its_holder() -> None:
    """After the grace period, and it is what the shard continues from."""

    async def scenario() -> None:
        store, theirs = store_of("a"), store_of("b")
        state = zeros(theirs)
        state.value[:] = 3.0
        failover, swarm, context = failover_of(store, copy("replica", term(3, "x"), 12))
        context.replica.set_version(0, term(3, "x"), 9)
        head = describe(0, term(3, "x"), state)
        frames = [bytes(buffer) for buffer in shard_states.body([(head, state)])]
        swarm.answers["fetch"] = lambda *_: (ShardList([0]), frames)
        for _ in range(8):
            await failover.take_over([0])
            await asyncio.sleep(0.5)

        assert np.all(store.owned[0].state.value == 3.0)

    run(scenario())


def test_a_restart_of_the_whole_swarm_waits_for_the_others_and_takes_replicas_at_once() -> None:
    """It returns how many answered, after the wait if there are fewer than expected."""

    async def scenario() -> None:
        store = store_of("a")
        failover, swarm, context = failover_of(store)
        swarm.gone.append(IDS["c"])
        for shard in range(4):
            context.replica.set_version(shard, term(3, "x"), 9)
        began = context.environment.clock.monotonic()

        assert await failover.resume(expected=2, wait_s=3.0) == 1
        assert 3.0 <= context.environment.clock.monotonic() - began < 4.0
        assert sorted(store.owned) == [0, 1, 2, 3]

        before = context.environment.clock.monotonic()
        assert await failover.resume(expected=1, wait_s=3.0) == 1
        assert context.environment.clock.monotonic() == before

    run(scenario())


def test_an_owner_raises_its_term_above_a_bare_fence() -> None:
    """No node owns the shard under that term, and no copy is better: otherwise the fence would shut it out."""

    async def scenario() -> None:
        store = owner_of("a", 3)
        failover, _, context = failover_of(store, copy("replica", term(3, "a"), 1))
        context.rebalance.challenge([Fence(0, term(8, "x"))])
        await failover.answer_challenges()
        assert store.owned[0].term > term(8, "x")

    run(scenario())


def test_an_owner_yields_to_a_better_copy_and_to_a_higher_owner() -> None:
    """A backup of a later pair has deltas that this owner lacks: it keeps its copy, to be offered."""

    async def scenario() -> None:
        for theirs in (copy("backup", term(8, "x")), copy("owner", term(8, "b"))):
            store = owner_of("a", 3)
            failover, _, context = failover_of(store, theirs)
            context.rebalance.challenge([Fence(0, term(8, "x"))])
            await failover.answer_challenges()
            assert 0 not in store.owned
            assert 0 in store.superseded

    run(scenario())


def test_a_request_to_take_over_has_the_known_owner_probed() -> None:
    """Nothing is assumed: the shard waits for the survey, and the answer names the owner that is known here."""

    async def scenario() -> None:
        store = store_of("a")
        _, swarm, context = failover_of(store)
        store.note_owner(0, term(2, "c"), C)

        answer = await swarm.deliver("request_takeover", B, ShardList([0, 99]), TransferResult)

        assert answer == TransferResult([0], [OwnerInfo.of(0, term(2, "c"), C)])
        assert context.rebalance.collect_orphans() == [0]
        assert swarm.suspected == [IDS["c"]]

    run(scenario())


def test_a_silent_node_does_not_stop_a_survey() -> None:
    """The others decide."""

    async def scenario() -> None:
        store = backup_of("a", "x", 3)
        failover, swarm, _ = failover_of(store)
        swarm.gone.append(IDS["x"])
        silence = TransportError("timeout", C.address, "was silent")
        swarm.answers["query_replicas"] = lambda to, _payload: silence if to == C else ReplicasAnswer([])
        await failover.take_over([0])
        assert 0 in store.owned

    run(scenario())


def test_an_owner_that_serves_no_exchange_owns_nothing() -> None:
    """It was started again and loads its model: its shard goes on from a replica. One that refuses for another reason
    may still own it."""

    async def scenario(detail: str) -> ShardStore:
        store = store_of("a")
        failover, swarm, context = failover_of(store)
        context.replica.set_version(0, term(3, "b"), 9)
        store.note_owner(0, term(3, "b"), B)
        rejected = TransportError("rejected", B.address, detail)
        swarm.answers["query_replicas"] = lambda to, _payload: rejected if to == B else ReplicasAnswer([])
        for _ in range(8):
            await failover.take_over([0])
            await asyncio.sleep(0.5)
        return store

    assert run(scenario(f"{NOT_SERVED} 'query_replicas'")).owned[0].term == term(4, "a")
    assert not run(scenario("you send more requests in a second than a member may")).owned


def test_a_restart_begins_a_generation_above_every_copy_of_before() -> None:
    """The term of a copy that no node of this restart has seen ranks below the first one of the new generation. A later
    take-over raises the term by one, as ever."""

    async def scenario() -> None:
        store = store_of("a")
        failover, swarm, context = failover_of(store)
        swarm.answers["query_replicas"] = lambda *_: ReplicasAnswer([])
        context.replica.set_version(0, term(3, "x"), 6)
        await failover.resume(2, 1.0)

        assert store.owned[0].term == Term(GENERATION, IDS["a"])
        assert store.owned[0].term > term(50_000, "x")
        assert store.next_term(0) == Term(GENERATION + 1, IDS["a"])
        assert store.next_term(0, begins_generation=True) == Term(2 * GENERATION, IDS["a"])

    run(scenario())


@pytest.mark.promise(6)
def test_what_a_restart_has_lost_is_counted_by_the_steps_that_the_disks_show() -> None:
    """This node had reached step 9, and two others that start with it steps 8 and 7; a fourth one trains on. The state
    from disk has steps 7, 8 and 5 of the three: what is lost is 2 + 0 + 2. Of a replica only its step is known."""

    async def scenario(*, from_disk: bool) -> dict[int, int]:
        store = store_of("a")
        steps = {"b": 8, "c": 7, "d": 99}
        failover, swarm, context = failover_of(store)
        swarm.peers[IDS["d"]] = ScriptedSwarm._peer(contact("d"))
        for name in steps:
            swarm.peers[IDS[name]].activity = Activity.TRAINING if name == "d" else Activity.JOINING

        def answer(to: Contact, payload: bytes) -> ReplicasAnswer:
            step = {IDS[name]: step for name, step in steps.items()}[to.node_id]
            shards = decode(payload, ShardList).shards
            return ReplicasAnswer([CopyStatus(shard, "none", ZERO_TERM, 0, ZERO_TERM, step) for shard in shards])

        swarm.answers["query_replicas"] = answer
        context.run.step = 9
        if from_disk:
            state = zeros(store)
            for name, last in (("a", 7), ("b", 8), ("c", 5)):
                state.applied = Applied.of_rows([*state.applied.rows(), (IDS[name], 1, [(1, last)])])
            state.version = 20
            store.offer_stored({0: StoredState(term(3, "x"), state, clean=False)})
        else:
            context.replica.set_version(0, term(3, "x"), 6)
        await failover.resume(3, 1.0)
        # No node that starts again is refused a delta.
        assert store.owned[0].state.era_step == (1 if from_disk else 7)
        return failover.lost_in_restart()

    assert run(scenario(from_disk=True)) == {0: 4}
    assert run(scenario(from_disk=False)) == {}


def test_a_survey_with_a_term_that_no_history_explains_changes_nothing() -> None:
    """Neither the term of a forged copy nor its fence raises that of a take-over, also when the whole swarm starts."""

    async def scenario() -> None:
        for forged in (
            copy("replica", Term((1 << 62) - 1, IDS["b"]), 9),
            copy("owner", Term((1 << 62) - 1, IDS["b"]), 9),
        ):
            store = store_of("a")
            failover, _, context = failover_of(store, forged)
            context.replica.set_version(0, term(3, "x"), 6)
            store.ownership.raise_fence(0, term(3, "x"))
            await failover.resume(2, 1.0)
            assert store.owned[0].term == Term(GENERATION, IDS["a"])

    run(scenario())


def test_an_appeal_makes_no_owner_of_a_node_that_others_cannot_dial() -> None:
    """What the sender knows of it is old. It takes what it has a state of."""

    async def scenario() -> None:
        store = backup_of("a", "x", 3)
        _, swarm, context = failover_of(store)
        swarm.is_eligible = False
        answer = await swarm.deliver("request_takeover", B, ShardList([0, 1]), TransferResult)
        assert answer.taken == [0]
        assert context.rebalance.collect_orphans() == [0]

    run(scenario())


def test_a_shard_that_goes_on_from_a_disk_begins_a_generation() -> None:
    """As after a restart of all: the deltas since then are lost unless they are sent again, and are to be counted."""

    async def scenario() -> None:
        store = store_of("a")
        failover, _, _ = failover_of(store)
        store.offer_stored({0: StoredState(term(3, "a"), zeros(store), clean=False)})
        await failover.take_over([0])
        await asyncio.sleep(REPLICA_GRACE_S)
        await failover.take_over([0])
        assert store.owned[0].term == Term(GENERATION, IDS["a"])

    run(scenario())


def test_a_swarm_that_starts_again_waits_for_no_node_that_trains_and_can_own_nothing() -> None:
    """It has no copy that is to be waited for, and may be behind a router where nobody can ask it."""

    async def scenario() -> None:
        failover, swarm, context = failover_of(store_of("a"))
        swarm.answers["query_replicas"] = lambda to, _payload: TransportError(
            "unreachable", to.address, "is behind a NAT"
        )
        for peer in swarm.peers.values():
            peer.activity, peer.eligible = Activity.TRAINING, False
        began_s = context.environment.clock.monotonic()
        assert await failover.resume(2, 10.0) == 2
        assert context.environment.clock.monotonic() - began_s < 1.0

    run(scenario())
