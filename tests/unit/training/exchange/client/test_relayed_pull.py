"""Asking another node than the owner: what is taken, what is left for others, and whom is asked no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from overlay.transport import NOT_SERVED, RequestRejected, TransportError
from tests.harness.builders.stores import BOUNDS, PARAMETERS, SUM
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.encoding.frames import Part, encoded_frames
from training.exchange.aggregation.follow_messages import Follow, FollowAnswer
from training.exchange.aggregation.pull_sources import WAIT_LEAST_S
from training.exchange.aggregation.relays import AVOIDED_S, UNABLE_S
from training.exchange.client.follower import ChainFollower
from training.exchange.client.relayed_pull import PullRelays, RelayedPull
from training.exchange.messages import PullResult, Wanted
from training.exchange.owner.published import ApproximatedState, Published, begin, tick
from training.exchange.step_wait import StepWait
from training.exchange.store.replica import NO_POSITION, Position
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import Term
from training.settings import ExchangeSettings

#: The owner and the node on the way to it begin with another digit than the one that pulls; `NEAR` does not.
ME, NEAR, RELAY, OWNER = (
    Contact(bytes([first]) + bytes(19), Address("10.0.0.1", 9 + first)) for first in (0, 1, 128, 255)
)
TERM, SHARD, SIZE = Term(3, OWNER.node_id), 1, 4
SETTINGS = ExchangeSettings(codec="int8", relay_above=1, relay_bits=1)


def chain(versions: int) -> list[Published]:
    chance = np.random.default_rng(1)
    x = chance.standard_normal(SIZE).astype(np.float32)
    found = [begin(b"c" * 8, x, ApproximatedState(TERM, 10))]
    for number in range(versions):
        x = x + chance.standard_normal(SIZE).astype(np.float32)
        found.append(tick(found[-1], x, ApproximatedState(TERM, 11 + number), "int8"))
    return found


VALUES = chain(4)


def result(at: int, status: Any, changes: int = 0) -> PullResult:
    one = VALUES[at]
    return PullResult(
        SHARD, status, *TERM, one.source.version, chain=one.chain, published=at, digest=one.digest, changes=changes
    )


def body(first: int, last: int) -> list[bytes]:
    changes = [VALUES[at].changes[-1] for at in range(first, last + 1)]
    sent = [encoded_frames(SHARD, one.payload, one.codec, Part.CHANGE, version=one.version) for one in changes]
    return [bytes(buffer) for buffers in sent for buffer in buffers]


class Pulling:
    """A node, one of four, whose shard 1 is in version 1 of its owner's chain, and one pull of it."""

    def __init__(self, settings: ExchangeSettings = SETTINGS, *, synchronous: bool = False) -> None:
        self.swarm = ScriptedSwarm(ME, [NEAR, RELAY, OWNER])
        self.store = ShardStore(ME.node_id, BOUNDS, PARAMETERS, SUM)
        self.store.note_owner(SHARD, TERM, OWNER)
        self.context = context_of(self.swarm, self.store, settings=settings, synchronous=synchronous)
        reads: Any = SimpleNamespace(followed=self._followed)
        self.relays = PullRelays(self.context, ChainFollower(self.context), reads)
        self.relays.register()
        self.replica = self.context.replica
        with self.replica.writing(SHARD) as values:
            values[:] = VALUES[1].value
        self.replica.set_version(SHARD, TERM, 11, Position(VALUES[1].chain, 1))
        self.waiting = {SHARD: None}
        self.changed: list[bool] = []
        self.pull = RelayedPull(StepWait(None), self.waiting, self._settle)

    async def _followed(self, _sender: object, _asked: object) -> dict[int, Any]:
        return {}

    def _settle(self, shard: int, changed: bool) -> None:
        del self.waiting[shard]
        self.changed.append(changed)
        self.relays.settled(shard)

    def answer(self, *results: PullResult, age_s: float = 0.0, sent: list[bytes] | None = None) -> None:
        head = FollowAnswer(list(results), [int(1000 * age_s)] * len(results))
        self.swarm.answers["follow"] = lambda *_: (head, sent or [])

    async def ask(self) -> bool:
        """Ask the relay; whether the shard is settled."""
        self.waiting[SHARD] = None
        await self.relays.ask(RELAY, [SHARD], self.pull)
        return SHARD not in self.waiting

    def holds(self, at: int) -> bool:
        is_same = self.replica.slice_of(SHARD).tobytes() == VALUES[at].value.tobytes()
        return is_same and self.replica.position_of(SHARD) == (VALUES[at].chain, at)

    def avoided_s(self) -> float:
        now_s, is_avoided = self.context.environment.clock.monotonic(), self.relays.sources.is_avoided
        found = (seconds for seconds in (UNABLE_S, AVOIDED_S) if is_avoided(RELAY.node_id, now_s + seconds - 0.1))
        return next(found, 0.0)


def test_changes_that_lead_to_the_owners_bits_are_taken() -> None:
    """The question names what is held; the owner is not asked, and nothing is said of it."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(result(3, "changes", 2), sent=body(2, 3), age_s=0.2)
        assert await pulling.ask()
        assert pulling.holds(3)
        assert pulling.changed == [True]
        assert pulling.pull.age_s == pytest.approx(0.2, abs=0.01)
        assert pulling.swarm.sent("follow", Follow) == [Follow(GENESIS, [Wanted(SHARD, *TERM, 11, VALUES[1].chain, 1)])]
        pulling.answer(result(3, "same"))
        assert await pulling.ask()
        assert pulling.changed == [True, False]
        assert [name for name, _, _ in pulling.swarm.requests] == ["follow", "follow"]

    run(scenario())


def test_what_is_too_old_is_taken_and_asked_for_again() -> None:
    """It is a step on the way, but the pull goes on with somebody else."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(result(2, "changes", 1), sent=body(2, 2), age_s=60.0)
        assert not await pulling.ask()
        assert pulling.holds(2)
        assert pulling.pull.age_s == 0.0
        assert pulling.avoided_s() == 0.0

    run(scenario())


@pytest.mark.parametrize("what", ["nothing", "another term", "no owner", "left out"])
def test_what_the_other_node_has_not_is_left(what: str) -> None:
    """It has nothing that helps, another owner's word, or this node knows no owner; then nothing changes, and nobody is
    blamed."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(result(1, "retry") if what == "nothing" else result(1, "same"))
        if what == "another term":
            pulling.store.note_owner(SHARD, Term(4, RELAY.node_id), RELAY)
        elif what == "no owner":
            pulling.store.ownership.known_owners.clear()
        elif what == "left out":
            pulling.answer()
        assert not await pulling.ask()
        assert pulling.holds(1)
        assert pulling.avoided_s() == 0.0

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "seconds"),
    [
        (TransportError("timeout", RELAY.address, "was silent"), AVOIDED_S),
        (TransportError("rejected", RELAY.address, f"{NOT_SERVED} 'follow'"), UNABLE_S),
    ],
)
def test_a_node_that_fails_is_left_out_for_a_while(failure: TransportError, seconds: float) -> None:
    """One of an earlier version for longer, and nobody suspects it."""

    async def scenario() -> None:
        pulling = Pulling()
        routes = pulling.relays.routes()
        assert routes is not None
        assert routes.hop(OWNER.node_id) is not None
        pulling.swarm.answers["follow"] = lambda *_: failure
        assert not await pulling.ask()
        assert pulling.avoided_s() == seconds
        assert bool(pulling.swarm.suspected) is (failure.kind == "timeout")
        after = pulling.relays.routes()
        assert after is not None
        assert RELAY.node_id not in after.next_nodes()

    run(scenario())


def test_changes_that_lead_elsewhere_end_the_following() -> None:
    """The digest is another: the shard comes whole from its owner, and that node is not asked for a while."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(msgspec.structs.replace(result(2, "changes", 1), digest=b"other..."), sent=body(2, 2))
        assert not await pulling.ask()
        assert pulling.replica.position_of(SHARD) == NO_POSITION
        assert pulling.avoided_s() == AVOIDED_S

    run(scenario())


def test_a_node_that_contradicts_itself_is_disbelieved() -> None:
    """What it handed down before does not fit what it hands down now."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(result(2, "changes", 1), sent=body(2, 2))
        assert await pulling.ask()
        pulling.answer(msgspec.structs.replace(result(2, "same"), digest=b"other..."))
        assert not await pulling.ask()
        assert pulling.avoided_s() == UNABLE_S
        assert [one.event for one in records_of(pulling.context) if "relay" in one.event] == ["relay_sent_wrong_values"]

    run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        [msgspec.structs.replace(result(1, "same"), shard=2)],
        [result(1, "same"), result(1, "same")],
        [result(1, "value")],
        [msgspec.structs.replace(result(1, "same"), term_number=1 << 61)],
        [msgspec.structs.replace(result(1, "same"), version=(1 << 48) - 1)],
    ],
)
def test_what_is_no_answer_counts_against_the_node(wrong: list[PullResult]) -> None:
    """Another shard, one twice, a whole value, a term or version that no history explains."""

    async def scenario() -> None:
        pulling = Pulling()
        pulling.answer(*wrong)
        assert not await pulling.ask()
        assert pulling.holds(1)
        assert pulling.avoided_s() == AVOIDED_S
        assert "bad_follow_answer" in [one.event for one in records_of(pulling.context)]

    run(scenario())


def test_others_are_asked_only_where_many_pull_changes() -> None:
    """Not in a small swarm, where whole values are pulled, nor under bsp. Shards without a published value, and those
    that this node backs up, come from their owners."""
    small, whole = (
        msgspec.structs.replace(SETTINGS, **one) for one in ({"relay_above": 4}, {"pull_codec": "bfloat16"})
    )

    async def scenario() -> None:
        groups = [(OWNER, [SHARD])]
        for pulling in (Pulling(small), Pulling(whole), Pulling(synchronous=True)):
            assert pulling.relays.routes() is None
            assert pulling.relays.divided(groups) == (groups, [])
        pulling = Pulling()
        assert pulling.relays.divided(groups, b"none") == ([], [(RELAY, [SHARD])])
        assert pulling.relays.divided([(ME, [0]), (OWNER, [2])], b"none") == ([(ME, [0]), (OWNER, [2])], [])
        pulling.store.backed[SHARD] = SimpleNamespace()  # type: ignore[assignment]
        assert pulling.relays.divided(groups, b"none") == (groups, [])

    run(scenario())


def test_one_shard_is_pulled_from_its_owner_for_a_check() -> None:
    """The only one here. Not again for those that are asked for a second time in the same pull; and of a slow node, or
    one that trains nothing, nobody asks for values."""

    async def scenario() -> None:
        pulling = Pulling()
        assert pulling.relays.divided([(OWNER, [SHARD])]) == ([(OWNER, [SHARD])], [])
        assert pulling.relays.divided([(OWNER, [SHARD])], b"none") == ([], [(RELAY, [SHARD])])
        assert pulling.relays.divided([(OWNER, [SHARD])], RELAY.node_id) == ([], [(OWNER, [SHARD])])
        for peer in pulling.swarm.peers.values():
            peer.step_seconds = 30.0 if peer.node_id == RELAY.node_id else 10.0
        pulling.relays._routes = None
        pulling.context.view.invalidate()
        assert pulling.relays.divided([(OWNER, [SHARD])], b"none") == ([], [(OWNER, [SHARD])])

    run(scenario())


# -- answers to others


async def asked(pulling: Pulling, at: int) -> FollowAnswer:
    question = Follow(GENESIS, [Wanted(SHARD, *TERM, 0, VALUES[at].chain, at)])
    found = await pulling.swarm.deliver("follow", RELAY, question, FollowAnswer)
    assert isinstance(found, FollowAnswer)
    return found


def test_a_node_hands_down_what_it_has_received() -> None:
    """From the owner or another node, for shards whose owner shares a digit with it; counted, and older by the time
    that it has had it."""

    async def scenario() -> None:
        pulling = Pulling()
        arrays = [(VALUES[2].changes[-1].codec, memoryview(VALUES[2].changes[-1].payload))]
        pulling.relays.heard(OWNER, result(2, "changes", 1), 0.0, arrays)
        assert (await asked(pulling, 1)).results == [PullResult(SHARD, "retry")]
        # As if the owner were near this node, which is on the way of others then.
        pulling.relays.heard(NEAR, result(2, "changes", 1), 0.0, arrays)
        answer, now_s = await asked(pulling, 1), pulling.context.environment.clock.monotonic()
        assert answer.results == [result(2, "changes", 1)]
        assert answer.ages_ms[0] >= 1000 * now_s
        assert pulling.context.counters.handed_down == 1
        assert pulling.relays.handed.size_bytes == len(VALUES[2].changes[-1].payload)
        assert (await asked(pulling, 0)).results == [result(2, "retry")]
        with pytest.raises(RequestRejected, match="beyond 4"):
            await pulling.swarm.deliver("follow", RELAY, Follow(GENESIS, [Wanted(9, 0, b"", 0)]), FollowAnswer)
        pulling.relays.heard(OWNER, result(3, "changes", 1), 0.0, arrays)
        assert pulling.relays.handed.size_bytes == 0

    run(scenario())


@pytest.mark.parametrize("end", ["settled", "ended", "waited"])
def test_who_asks_waits_a_moment_for_the_pull_of_this_node(end: str) -> None:
    """Until it has the shard, its pull has ended, or the time is over. For other shards nobody waits."""

    async def scenario() -> None:
        pulling = Pulling()
        clock = pulling.context.environment.clock
        pulling.relays.begin({0: None})
        began_s = clock.monotonic()
        await asked(pulling, 1)
        assert clock.monotonic() == began_s

        pulling.relays.begin(pulling.waiting)
        answer = asyncio.ensure_future(asked(pulling, 1))
        await asyncio.sleep(0.02)
        assert not answer.done()
        if end == "settled":
            pulling.relays.settled(SHARD)
        elif end == "ended":
            pulling.relays.end()
        await answer
        expected_s = WAIT_LEAST_S if end == "waited" else 0.02
        assert clock.monotonic() - began_s == pytest.approx(expected_s, abs=0.005)
        assert pulling.relays._waiters == {}

    run(scenario())
