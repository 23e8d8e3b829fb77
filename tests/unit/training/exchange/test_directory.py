"""Finding owners: groups, denials, questions to candidates, requests to take over, and fences."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import NOT_SERVED, TransportError
from p2pnode.training.exchange.directory import DENIAL_S, OwnerDirectory, shard_key
from p2pnode.training.exchange.messages import LocateOwners, LocateOwnersAnswer, PushResult, decode
from p2pnode.training.exchange.ownership_messages import ShardList, TransferResult
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import OwnerInfo
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ScriptedSwarm, context_of, directory_of

ME, B, C = contact("a"), contact("b"), contact("c")


def built(store: ShardStore) -> tuple[OwnerDirectory, ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(ME, [B, C])
    swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
    swarm.answers["request_takeover"] = lambda *_: TransferResult([], [])
    context = context_of(swarm, store)
    return directory_of(context), swarm, context


def test_shards_are_grouped_by_living_owner() -> None:
    """Each owner once, starting at the own id; shards of a dead or unknown owner are returned apart."""

    async def scenario() -> None:
        store = owner_of("b")  # this store is that of node b
        swarm = ScriptedSwarm(contact("b"), [contact("a"), contact("c")])
        context = context_of(swarm, store)
        store.note_owner(1, term(1, "a"), contact("a"))
        store.note_owner(2, term(1, "c"), contact("c"))
        directory = directory_of(context)

        groups, unknown = directory.by_owner(range(4))
        assert [(owner.node_id[:1], shards) for owner, shards in groups] == [(b"b", [0]), (b"c", [2]), (b"a", [1])]
        assert unknown == [3]

        swarm.gone.append(IDS["c"])
        groups, unknown = directory.by_owner(range(4))
        assert [owner.node_id[:1] for owner, _ in groups] == [b"b", b"a"]
        assert unknown == [2, 3]

    run(scenario())


def test_an_owner_that_redirects_without_a_higher_term_is_not_asked_again() -> None:
    """Two nodes that redirect to each other would form a cycle; after some seconds the claim counts again."""

    async def scenario() -> None:
        store = store_of("a")
        directory, _, _ = built(store)
        store.note_owner(0, term(2, "b"), B)
        redirect = PushResult(0, "redirect", owner_info=OwnerInfo.of(0, term(1, "c"), C))

        directory.answered(B, [redirect])
        assert directory.by_owner([0]) == ([], [0])

        await asyncio.sleep(DENIAL_S)
        assert directory.by_owner([0]) == ([(B, [0])], [])

    run(scenario())


def test_an_owner_that_serves_no_exchange_denies_what_it_owned() -> None:
    """It was started again: another node is asked to take its shards over. A failure alone denies nothing."""

    async def scenario() -> None:
        store = store_of("a")
        directory, _, context = built(store)
        store.note_owner(0, term(2, "b"), B)
        store.note_owner(1, term(2, "c"), C)

        directory.failed(B, TransportError("reset", B.address, "broke"))
        assert directory.by_owner([0]) == ([(B, [0])], [])

        directory.failed(B, TransportError("rejected", B.address, f"{NOT_SERVED} 'push'"))
        assert directory.by_owner([0, 1]) == ([(C, [1])], [0])
        await directory.refresh([0])
        assert context.rebalance.collect_orphans() == [0]

    run(scenario())


def test_a_redirect_to_a_higher_term_is_followed() -> None:
    """The new owner is known at once."""

    async def scenario() -> None:
        store = store_of("a")
        directory, _, _ = built(store)
        store.note_owner(0, term(2, "b"), B)

        directory.answered(B, [PushResult(0, "redirect", owner_info=OwnerInfo.of(0, term(3, "c"), C))])

        assert directory.by_owner([0]) == ([(C, [0])], [])

    run(scenario())


def test_a_shard_without_an_owner_is_asked_for_and_its_first_candidate_takes_over() -> None:
    """No candidate knows an owner: the first one, another node, receives a request to take over."""

    async def scenario() -> None:
        directory, swarm, context = built(store_of("a"))
        swarm.candidate_list = [B, C, ME]

        await directory.refresh([2])

        assert sorted(to.node_id for name, to, _ in swarm.requests if name == "where_is") == [IDS["b"], IDS["c"]]
        assert [(to, decode(payload, ShardList).shards) for name, to, payload in swarm.requests[2:]] == [(B, [2])]
        assert context.rebalance.collect_orphans() == []

    run(scenario())


def test_this_node_takes_over_where_it_is_the_first_candidate() -> None:
    """The shard is left to the rebalancer, which is woken."""

    async def scenario() -> None:
        directory, swarm, context = built(store_of("a"))
        swarm.suspects = [IDS["b"]]
        swarm.candidate_list = [B, ME, C]

        await directory.refresh([3])

        assert context.rebalance.collect_orphans() == [3]
        assert not [one for one in swarm.requests if one[0] == "request_takeover"]

    run(scenario())


def test_an_answer_of_a_candidate_names_the_owner() -> None:
    """It is known then, and no take-over is requested."""

    async def scenario() -> None:
        store = store_of("a")
        directory, swarm, _ = built(store)
        known = LocateOwnersAnswer([OwnerInfo.of(1, term(4, "c"), C)])
        swarm.answers["where_is"] = lambda *_: known

        await directory.refresh([1])

        assert directory.by_owner([1]) == ([(C, [1])], [])
        assert not [one for one in swarm.requests if one[0] == "request_takeover"]

    run(scenario())


def test_another_node_is_asked_about_a_shard_without_a_candidate() -> None:
    """Near the shard all nodes are joining; its owner is known elsewhere, and nothing is taken over."""

    async def scenario() -> None:
        directory, swarm, context = built(store_of("a"))
        swarm.candidate_list = []
        swarm.peers[IDS["b"]].eligible = False
        swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([OwnerInfo.of(1, term(4, "b"), B)])

        await directory.refresh([1])

        assert [(name, to) for name, to, _ in swarm.requests] == [("where_is", C)]
        assert directory.by_owner([1]) == ([(B, [1])], [])
        assert context.rebalance.collect_orphans() == []

    run(scenario())


def test_an_owner_below_the_fence_receives_the_fence() -> None:
    """It cannot know that this node rejects its term, so it is sent the higher one."""

    async def scenario() -> None:
        store = store_of("a")
        directory, swarm, _ = built(store)
        store.ownership.raise_fence(1, term(9, "x"))
        swarm.candidate_list = [B]

        def answer(to: Contact, _payload: bytes) -> Answer:
            if to == C:
                return TransportError("timeout", C.address, "was silent")
            return LocateOwnersAnswer([OwnerInfo.of(1, term(4, "c"), C)])

        swarm.answers["where_is"] = answer

        await directory.refresh([1])

        (to_owner,) = [decode(payload, LocateOwners) for _, to, payload in swarm.requests if to == C]
        assert [(fence.shard, fence.term) for fence in to_owner.fences] == [(1, term(9, "x"))]

    run(scenario())


def test_the_keys_of_shards_differ_by_swarm_and_shard() -> None:
    """The candidates of one shard are not those of all shards, nor those of another swarm."""
    keys = {shard_key(genesis, shard) for genesis in (b"g" * 16, b"h" * 16) for shard in range(8)}
    assert len(keys) == 16
    assert {len(key) for key in keys} == {20}


@pytest.mark.parametrize("is_eligible", [True, False])
def test_a_node_that_others_cannot_dial_takes_nothing_over_that_it_has_no_state_of(is_eligible: bool) -> None:
    """No candidate is left. Who has a state, from its disk as the former owner, goes on with it; the others wait."""

    async def scenario() -> None:
        store = store_of("a")
        directory, swarm, context = built(store)
        swarm.gone += [IDS["b"], IDS["c"]]
        swarm.candidate_list, swarm.is_eligible = [ME] if is_eligible else [], is_eligible
        store.note_owner(0, term(2, "b"), B)
        store.note_owner(1, term(2, "b"), B)
        store.stored = {1: StoredState(term(1, "a"), zeros(store, 1), clean=False)}
        await directory.refresh([0, 1])
        assert context.rebalance.collect_orphans() == ([0, 1] if is_eligible else [1])

    run(scenario())


def test_a_node_is_apart_while_nobody_is_in_reach_that_could_own() -> None:
    """Not where it could itself, nor where the owner or another candidate lives. One that joins is not in reach yet."""

    async def scenario() -> None:
        store = store_of("a")
        directory, swarm, _ = built(store)
        for peer in swarm.peers.values():
            peer.eligible = False
        assert not directory.is_apart(), "it may own itself"
        swarm.is_eligible = False
        assert directory.is_apart()
        swarm.peers[IDS["c"]].eligible = True
        assert not directory.is_apart(), "another node may"
        swarm.peers[IDS["c"]].activity = Activity.JOINING
        assert directory.is_apart(), "it has no vector yet"
        store.note_owner(3, term(1, "b"), B)
        assert not directory.is_apart(), "an owner lives, whatever it announces"
        swarm.gone.append(IDS["b"])
        assert directory.is_apart()
        store.own(0, zeros(store), term(1, "a"), ME, 0.0, by_handover=False)
        assert not directory.is_apart(), "it owns a shard"

    run(scenario())
