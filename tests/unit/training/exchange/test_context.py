"""The context that the services of one exchange share."""

from __future__ import annotations

import dataclasses

import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from tests.harness.builders.stores import contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of


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
