"""The context that the services of one exchange share."""

from __future__ import annotations

import dataclasses

import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from tests.harness.builders.stores import contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.terms import OwnerInfo


def test_the_context_does_not_change_but_the_own_address_may() -> None:
    """No field can be assigned; `me` follows the address of the overlay."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"))
        context = context_of(swarm, store_of("a"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            context.synchronous = True  # type: ignore[misc]

        swarm.address = Address("203.0.113.7", 9000)
        assert context.me() == Contact(swarm.node_id, swarm.address)

    run(scenario())


def test_jitter_spreads_by_half_in_both_directions() -> None:
    """Retries of many nodes must not come at the same moments."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        drawn = [context.jitter() for _ in range(1000)]
        assert 0.5 <= min(drawn) < 0.6
        assert 1.4 < max(drawn) <= 1.5

    run(scenario())


def test_what_a_member_says_of_a_third_is_checked_where_an_owner_lives() -> None:
    """It is believed of itself, and of shards without a living owner. Of others nothing is changed, and the node that
    it names is asked, also where it has owned the shard; this node knows about itself. Lower terms tell nothing."""

    async def scenario() -> None:
        a, b, c, d = contact("a"), contact("b"), contact("c"), contact("d")
        swarm, store = ScriptedSwarm(a, [b, c, d]), store_of("a")
        context = context_of(swarm, store)
        store.note_owner(0, term(3, "b"), b)

        def believed(teller: Contact, shard: int, number: int, owner: Contact) -> bool:
            return bool(context.believed(teller.node_id, [OwnerInfo.of(shard, term(number, "c"), owner)]))

        assert not believed(d, 0, 4, c)
        assert not believed(d, 0, 4, b)
        assert not believed(d, 0, 4, a)
        asked = [(to, [info.shard for info in infos]) for to, infos in context.rebalance.collect_unchecked()]
        assert asked == [(c, [0]), (b, [0])]
        assert believed(d, 0, 2, c)  # and then ignored, for its term
        assert believed(d, 1, 4, c)
        assert believed(c, 0, 4, c)
        assert not context.rebalance.has_unchecked
        assert not believed(b, 0, 4, a)
        assert not context.rebalance.has_unchecked
        assert not believed(b, 0, 4, c)
        assert [to for to, _ in context.rebalance.collect_unchecked()] == [c]
        swarm.gone.append(b.node_id)
        context.view.invalidate()
        assert believed(d, 0, 4, c)

    run(scenario())
