"""When a joiner asks other members for copies, and whom first; `test_pull.py` has it in a whole pull."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.client.joiner_relief import LOOK_INTERVAL_S, MIN_RELIEF_DELAY_S, JoinerRelief
from tests.harness.builders.stores import contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, directory_of

ME, B, C, D = contact("a"), contact("b"), contact("c"), contact("d")


@dataclass
class Joiner:
    """Waits for four shards: nodes b and c own two each. Its candidates are b, d and c, in this order."""

    waiting: dict[int, None] = field(default_factory=lambda: dict.fromkeys(range(4)))
    is_receiving: bool = False
    #: Who gives copies.
    donors: tuple[Contact, ...] = (B, C, D)
    asked: list[tuple[float, Contact, list[int]]] = field(default_factory=list)

    def relief(self, *, owned: bool = True) -> JoinerRelief:
        swarm = ScriptedSwarm(ME, [B, C, D])
        swarm.candidate_list = [B, D, C, ME]
        store = store_of("a")
        for shard in range(4 if owned else 0):
            store.note_owner(shard, term(1, "bbcc"[shard]), contact("bbcc"[shard]))
        context = context_of(swarm, store)
        clock = context.environment.clock
        began_s = clock.monotonic()

        async def fetch(donor: Contact, shards: list[int]) -> None:
            self.asked.append((clock.monotonic() - began_s, donor, shards))
            if donor in self.donors:
                self.arrive(*shards)

        return JoinerRelief(
            swarm=context.swarm,
            store=store,
            view=context.view,
            directory=directory_of(context),
            environment=context.environment,
            waiting=self.waiting,
            is_receiving=lambda: self.is_receiving,
            fetch=fetch,
        )

    def arrive(self, *shards: int) -> None:
        for shard in shards:
            self.waiting.pop(shard, None)


OWNERS = [[0, 1], [2, 3]]


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=3 * LOOK_INTERVAL_S)


def test_failed_fetches_are_no_finished_ones() -> None:
    """No owner sends anything: the first candidates of each shard that do not own it are asked, in reverse order."""

    async def scenario() -> None:
        joiner = Joiner()
        await joiner.relief().run(OWNERS)
        assert joiner.asked == [(about(MIN_RELIEF_DELAY_S), B, [3, 2]), (about(MIN_RELIEF_DELAY_S), D, [1, 0])]

    run(scenario())


def test_the_next_members_are_asked_for_what_the_first_have_not() -> None:
    """Owners are not asked for their own shards."""

    async def scenario() -> None:
        joiner = Joiner(donors=(C,))
        joiner.arrive(2, 3)
        await joiner.relief().run(OWNERS)
        assert [(donor, shards) for _, donor, shards in joiner.asked] == [(D, [1, 0]), (C, [1, 0])]

    run(scenario())


def test_an_owner_that_sends_is_given_as_long_again_as_the_first_half_took() -> None:
    """One owner is done after 5 s; the other sends all the time."""

    async def scenario() -> None:
        joiner = Joiner(is_receiving=True)
        asyncio.get_running_loop().call_later(5.0, joiner.arrive, 0, 1)
        await joiner.relief().run(OWNERS)
        assert joiner.asked == [(about(10.0), B, [3, 2])]

    run(scenario())


def test_nobody_is_asked_while_owners_send_and_the_first_half_lasts() -> None:
    """The joiner's own line may be slow: copies would share it."""

    async def scenario() -> None:
        joiner = Joiner(is_receiving=True)
        asyncio.get_running_loop().call_later(60.0, joiner.arrive, 0, 1, 2, 3)
        await joiner.relief().run(OWNERS)
        assert joiner.asked == []

    run(scenario())


def test_what_nobody_owns_is_waited_for() -> None:
    """A swarm that is being started again has not decided yet which copies it goes on with."""

    async def scenario() -> None:
        joiner = Joiner()
        asyncio.get_running_loop().call_later(20.0, joiner.arrive, 0, 1, 2, 3)
        await joiner.relief(owned=False).run([])
        assert joiner.asked == []

    run(scenario())
