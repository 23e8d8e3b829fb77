"""What a relay hands on, and what it leaves to the origin; with other nodes: `tests/simulated/test_relays.py`."""

from __future__ import annotations

import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import BOUNDS, PARAMETERS, SUM
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.aggregation.bundles import Carried
from training.exchange.aggregation.relays import DeltaRelays, _names
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushResult
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import OwnerInfo, Term
from training.settings import ExchangeSettings

#: By the first bits that they share with `ME`: seven, one, none.
ME, NEAR, HALF, FAR = (Contact(bytes([first]) + bytes(19), Address("10.0.0.1", 9 + first)) for first in (0, 1, 64, 128))
SHARD = 1


@pytest.mark.parametrize(
    ("before", "owner", "is_handed_on"),
    [
        (FAR, HALF, True),
        (HALF, NEAR, True),
        (FAR, FAR, False),
        (HALF, HALF, False),
        (HALF, FAR, False),
        (None, FAR, True),
    ],
)
def test_a_relay_hands_on_to_a_node_that_shares_more_bits_with_it_than_the_one_before(
    before: Contact | None, owner: Contact, *, is_handed_on: bool
) -> None:
    """Otherwise the node before, which waits for it, may be waited for: where both have heard of other owners, a delta
    would go round, and everything that waits for one of them would wait for ever. Its origin sends it to the owner."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [NEAR, HALF, FAR])
        swarm.answers["relay"] = lambda to, _payload: TransportError("refused", to.address, "scripted")
        store = ShardStore(ME.node_id, BOUNDS, PARAMETERS, SUM)
        store.note_owner(SHARD, Term(1, owner.node_id), owner)
        context = context_of(swarm, store, settings=ExchangeSettings(codec="float32"))
        relays = DeltaRelays(context, OwnerDirectory(context), DeltaHandler(context))
        push, found = Push(GENESIS, NEAR.node_id, 1, 1, 0, 1.0, [SHARD]), list[PushResult]()
        item = Carried(SHARD, bytes(16), "float32", 4)

        await relays.deliver(push, [item], found.extend, 1, b"" if before is None else before.node_id)

        assert [to for name, to, _ in swarm.requests if name == "relay"] == ([owner] if is_handed_on else [])
        assert [(one.shard, one.status, one.reason) for one in found] == [(SHARD, "retry", "not_relayed")]

    run(scenario())


def test_what_another_node_said_of_a_relay_is_no_answer_of_its_own() -> None:
    """A relay passes on that a former owner has named it: it is not held to redirect to itself. What names others is
    its own, as far as it is the known owner."""
    relay, other = Contact(b"r" * 20, Address("10.0.0.1", 1)), Contact(b"o" * 20, Address("10.0.0.2", 1))
    to_relay, to_other = (OwnerInfo.of(3, Term(2, to.node_id), to) for to in (relay, other))

    assert _names(relay, PushResult(3, "redirect", owner_info=to_relay))
    assert not _names(relay, PushResult(3, "redirect", owner_info=to_other))
    assert not _names(relay, PushResult(3, "ok", 1))
