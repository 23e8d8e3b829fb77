"""Pulling over links that are slow, cut or corrupt: what has arrived stays, and every shard has its turn."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer
from p2pnode.training.codec_choice import CodecChoice
from p2pnode.training.cooperative import LoopTurns
from p2pnode.training.encoding.frames import HEADER_BYTES, Part, frames
from p2pnode.training.exchange.client.joiner_relief import LOOK_INTERVAL_S, MIN_RELIEF_DELAY_S
from p2pnode.training.exchange.client.pull import PullClient
from p2pnode.training.exchange.messages import Pull, PullAnswer, PullResult, decode, encode
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState
from p2pnode.training.exchange.store.ownership import KnownOwner, Ownership
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.swarm_view import SwarmView
from p2pnode.training.exchange.terms import Term
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import PLAIN
from p2pnode.training.shards.state import ShardState
from tests.harness.environment.simulated import InlineExecutor, VirtualClock
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.stubs.exchange_context import ExchangeContext
from tests.harness.stubs.exchange_services import pull_client_of
from tests.unit.training.test_checkpoint import Lines

SHARDS, SIZE = 6, 4
OWNER = Contact(b"o" * 20, Address("10.0.0.1", 1))
TERM = Term(3, OWNER.node_id)


class Line:
    """An owner of all shards whose link transfers so many shards and then stalls."""

    def __init__(self, through: int, *, damaged: int = -1, shard_s: float = 0.0) -> None:
        self.through = through
        self.shard_s = shard_s
        self.damaged = damaged
        self.version = 1
        self.asked: list[Pull] = []

    @asynccontextmanager
    async def request(self, _kind: str, _to: Contact, pull: Pull) -> AsyncIterator[Any]:
        self.asked.append(pull)
        fresh = [one for one in pull.shards if (one.term, one.version) != (TERM, self.version)]
        results = [
            PullResult(one.shard, "value" if one in fresh else "same", TERM, self.version) for one in pull.shards
        ]
        yield SimpleNamespace(head=encode(PullAnswer(results)), body=self._body([one.shard for one in fresh]))

    async def _body(self, shards: list[int]) -> AsyncIterator[Buffer]:
        for number, shard in enumerate(shards):
            if number == self.through:
                await asyncio.Event().wait()
            await asyncio.sleep(self.shard_s)
            values = np.full(SIZE, 10 * self.version + shard, np.float32)
            for buffer in frames(shard, values, "float32", Part.VALUE):
                damaged = shard == self.damaged and len(buffer) == HEADER_BYTES
                if damaged:
                    self.damaged = -1  # once
                yield bytes([buffer[0] ^ 1]) + bytes(buffer[1:]) if damaged else buffer


class Store:
    """The part of a `ShardStore` that pulling uses."""

    bounds = tuple((shard * SIZE, (shard + 1) * SIZE) for shard in range(SHARDS))

    def __init__(self) -> None:
        self.ownership = Ownership(SHARDS)
        self.owned: dict[int, Owned] = {}
        self.backed: dict[int, Any] = {}

    def __len__(self) -> int:
        return SHARDS

    def size(self, _shard: int) -> int:
        return SIZE

    def resign(self, shard: int) -> None:
        del self.owned[shard]

    def note_owner(self, *_: Any) -> bool:
        return True


def pulling_over(line: Line) -> tuple[PullClient, ExchangeContext, Lines]:
    log = Lines()
    replica = np.zeros(SHARDS * SIZE, np.float32)
    store: Any = Store()
    swarm: Any = SimpleNamespace(node_id=b"m" * 20)
    clock: Any = SimpleNamespace(monotonic=time.monotonic)

    def decoded(_source: Contact, head: bytes, kind: type[PullAnswer]) -> PullAnswer:
        return decode(head, kind)

    context = ExchangeContext(
        swarm=swarm,
        environment=cast(
            Any,
            SimpleNamespace(
                clock=clock, log=log, entropy=SimpleNamespace(random=random.Random(1)), executor=InlineExecutor()
            ),
        ),
        genesis=b"g" * 16,
        settings=(settings := ExchangeSettings(pull_codec="float32")),
        synchronous=False,
        stale_limit=None,
        store=store,
        replica=Replica(replica, store.bounds),
        run=(run := RunState(incarnation=1)),
        view=SwarmView(swarm, clock, run, PeerScore(swarm.node_id, clock, cast(Any, log))),
        rpc=cast(Any, SimpleNamespace(request=line.request, decoded=decoded, turns=LoopTurns())),
        rebalance=RebalanceRequests(store),
        codec=CodecChoice(settings),
    )

    async def refresh(_shards: list[int], *, after_s: float) -> None:
        await asyncio.sleep(after_s)

    finding: Any = SimpleNamespace(
        is_apart=lambda: False,
        by_owner=lambda shards: ([(OWNER, list(shards))] if shards else [], []),
        answered=lambda *_: None,
        failed=lambda *_: None,
        refresh=refresh,
    )
    return pull_client_of(context, finding), context, log


def test_on_a_slow_line_every_shard_has_its_turn() -> None:
    """Two of six shards fit into the time of a pull, and all change every step: after three pulls all are updated."""
    line = Line(through=2)
    pulling, context, _ = pulling_over(line)

    async def story() -> list[list[int]]:
        missing = []
        for step in range(1, 4):
            line.version = step
            missing.append((await pulling.pull(step, deadline_s=0.05)).missing)
        return missing

    missing = asyncio.run(story())

    assert missing == [[2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3]]
    assert [version for _, version in context.replica.versions()] == [1, 1, 2, 2, 3, 3]
    assert context.replica.vector[::SIZE].tolist() == [10, 11, 22, 23, 34, 35]


def test_a_pull_ends_when_nothing_moves_and_not_before() -> None:
    """Four shards of 0.8 s each pass a limit of 1 s by far; the pull ends 1 s after the last of them, or one look of
    eight before."""
    line = Line(through=4, shard_s=0.8)
    pulling, _, log = pulling_over(line)

    async def story() -> tuple[list[int], float]:
        began = asyncio.get_running_loop().time()
        report = await pulling.pull(1, deadline_s=1.0)
        return report.missing, asyncio.get_running_loop().time() - began

    missing, took_s = VirtualLoop().run(story())

    assert missing == [4, 5]
    assert 4 * 0.8 + 1.0 * 7 / 8 <= took_s <= 4 * 0.8 + 1.01
    assert [event for event, _ in log.lines] == ["pull_unfinished"]


def test_a_pull_that_was_cut_off_goes_on_where_it_was() -> None:
    """A shard that has arrived is requested with its version, and not sent again."""
    line = Line(through=4)
    pulling, context, _ = pulling_over(line)

    async def story() -> list[Any]:
        first = await pulling.pull(1, deadline_s=0.05)
        second = await pulling.pull(2, deadline_s=0.05)
        return [first, second]

    first, second = asyncio.run(story())

    assert (first.changed, first.unchanged, first.missing) == (4, [], [4, 5])
    assert (second.changed, len(second.unchanged), second.missing) == (2, 4, [])
    assert context.counters.bytes_received == 6 * 4 * SIZE


def test_own_shards_are_copied_in_turns_and_what_is_added_meanwhile_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run after every two values; a shard that changes during its copy keeps the older version."""
    monkeypatch.setattr("p2pnode.training.cooperative.LIGHT_PASSES", 1)
    for name in ("cooperative.VALUES_PER_TURN", "exchange.client.subscriber.VALUES_PER_COPY"):
        monkeypatch.setattr(f"p2pnode.training.{name}", 2)
    pulling, context, _ = pulling_over(Line(through=0))
    me = Contact(context.swarm.node_id, Address("10.0.0.2", 1))
    states = [ShardState(np.full(SIZE, shard + 1, np.float32), SIZE, version=1) for shard in range(SHARDS)]
    cast(Any, context.store).owned = {
        shard: SimpleNamespace(state=state, rank_term=TERM) for shard, state in enumerate(states)
    }
    pulling.directory.by_owner = lambda shards: ([(me, list(shards))] if shards else [], [])  # type: ignore[method-assign]
    turns = 0

    async def meanwhile() -> None:
        nonlocal turns
        while True:
            turns += 1
            if (context.replica.vector[1], context.replica.vector[2]) == (1.0, 0.0):  # the first half of shard 0
                states[0].value[:] = 7.0
                states[0].version = 2
            await asyncio.sleep(0)

    async def story() -> list[Any]:
        task = asyncio.create_task(meanwhile())
        first = await pulling.pull(1, deadline_s=1.0)
        marks = context.replica.versions()
        second = await pulling.pull(2, deadline_s=1.0)
        task.cancel()
        return [first, marks, second]

    first, marks, second = asyncio.run(story())

    assert turns >= SHARDS * SIZE // 2
    assert (first.changed, first.missing) == (SHARDS, [])
    assert marks == [(TERM, 1)] * SHARDS
    assert (second.changed, len(second.unchanged)) == (1, SHARDS - 1)
    assert context.replica.version_of(0) == (TERM, 2)
    assert context.replica.vector[::SIZE].tolist() == [7.0, *range(2, SHARDS + 1)]


def test_an_own_shard_whose_copy_was_cut_off_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes the half of it for the version before; the next pull copies it again, and a checkpoint waits."""
    for name in ("cooperative.VALUES_PER_TURN", "exchange.client.subscriber.VALUES_PER_COPY"):
        monkeypatch.setattr(f"p2pnode.training.{name}", 1)
    pulling, context, _ = pulling_over(Line(through=0))
    me = Contact(context.swarm.node_id, Address("10.0.0.2", 1))
    state = ShardState(np.ones(SIZE, np.float32), SIZE, version=2)
    cast(Any, context.store).owned = {0: SimpleNamespace(state=state, rank_term=TERM)}
    pulling.directory.by_owner = lambda shards: ([(me, list(shards))] if shards else [], [])  # type: ignore[method-assign]
    context.replica.set_version(0, TERM, 1)

    async def story() -> None:
        task = asyncio.create_task(pulling.pull(1, deadline_s=1.0))
        while context.replica.vector[0] == 0.0:  # noqa: ASYNC110 - a value sets no event
            await asyncio.sleep(0)
        assert context.replica.stamp(0) is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert set(context.replica.vector[:SIZE].tolist()) == {1.0, 0.0}
        assert context.replica.version_of(0) == (TERM, 0)
        await pulling.pull(2, deadline_s=0.05)
        assert context.replica.version_of(0) == (TERM, 2)
        assert context.replica.vector[:SIZE].tolist() == [1.0] * SIZE

    asyncio.run(story())


def test_a_joiner_asks_again_for_a_piece_that_was_damaged() -> None:
    """Its header names another shard. Those before it are not fetched again, and the damage is logged."""
    line = Line(through=SHARDS, damaged=3)
    pulling, context, log = pulling_over(line)

    report = asyncio.run(asyncio.wait_for(pulling.pull(1, deadline_s=None), 5))

    assert (report.changed, report.missing) == (6, [])
    assert context.replica.vector[::SIZE].tolist() == [10, 11, 12, 13, 14, 15]
    assert [one.shard for one in line.asked[1].shards] == [3, 4, 5]
    assert "expected shard 3" in next(fields["reason"] for event, fields in log.lines if event == "bad_pull_answer")


class Swarm:
    """A fast owner of half the shards, one of the other half whose link stalls after one, and a third node."""

    QUICK, SLOW, OTHER = (Contact(name * 20, Address("10.0.0.1", 1)) for name in (b"q", b"s", b"b"))

    def __init__(self) -> None:
        self.lines = {self.QUICK.node_id: Line(SHARDS), self.SLOW.node_id: Line(1), self.OTHER.node_id: Line(SHARDS)}
        self.asked: list[tuple[bytes, bool, list[int]]] = []

    @asynccontextmanager
    async def request(self, kind: str, to: Contact, pull: Pull) -> AsyncIterator[Any]:
        self.asked.append((to.node_id[:1], pull.takes_copies, [one.shard for one in pull.shards]))
        async with self.lines[to.node_id].request(kind, to, pull) as answer:
            if pull.takes_copies:
                results = [
                    PullResult(result.shard, "copy", TERM, 7) for result in decode(answer.head, PullAnswer).results
                ]
                answer.head = encode(PullAnswer(results))
            yield answer

    def pulling(self) -> tuple[PullClient, ExchangeContext, Lines]:
        pulling, context, log = pulling_over(self)  # type: ignore[arg-type]
        half = SHARDS // 2

        def by_owner(shards: Any) -> Any:
            parts = [
                (self.QUICK, [one for one in shards if one < half]),
                (self.SLOW, [one for one in shards if one >= half]),
            ]
            return [part for part in parts if part[1]], []

        pulling.directory.by_owner = by_owner  # type: ignore[method-assign]
        cast(Any, context.environment).clock = pulling._clock = VirtualClock()

        async def candidates_of_all(shards: list[int]) -> list[list[Contact]]:
            return [[self.SLOW, self.OTHER] for _ in shards]

        pulling.directory.candidates_of_all = candidates_of_all  # type: ignore[method-assign]
        for shard in range(half, SHARDS):
            context.store.ownership.known_owners[shard] = KnownOwner(TERM, self.SLOW)
        contacts = (self.QUICK, self.SLOW, self.OTHER)
        cast(Any, context.swarm).members = lambda: [
            SimpleNamespace(node_id=one.node_id, contact=one, is_worker=lambda now, one=one: one is not self.QUICK)
            for one in contacts
        ]
        cast(Any, context.swarm).is_suspect = cast(Any, context.swarm).is_gone = lambda node_id: False
        cast(Any, context.swarm).is_alive = lambda node_id: True
        return pulling, context, log


def test_a_joiner_changes_donors_when_an_owner_becomes_slow() -> None:
    """One owner's link stalls after one of three shards, and the other owner is done. After 2 s a third node is asked
    for copies of the two others, in reverse order. Copies count as old, so that the owner is asked again."""
    swarm = Swarm()

    async def story() -> tuple[Any, Any, Lines, float]:
        pulling, context, log = swarm.pulling()
        began = pulling._clock.monotonic()
        report = await pulling.pull(1, deadline_s=None)
        return report, context, log, pulling._clock.monotonic() - began

    report, context, log, took_s = VirtualLoop().run(story())

    assert (report.changed, report.missing) == (6, [])
    assert swarm.asked == [(b"q", False, [0, 1, 2]), (b"s", False, [3, 4, 5]), (b"b", True, [5, 4])]
    assert context.replica.vector[::SIZE].tolist() == [10, 11, 12, 13, 14, 15]
    assert context.replica.versions() == [(TERM, 1)] * 4 + [(TERM, 0)] * 2
    assert MIN_RELIEF_DELAY_S <= took_s < MIN_RELIEF_DELAY_S + 3 * LOOK_INTERVAL_S
    assert [fields["shards"] for event, fields in log.lines if event == "donor_changed"] == [2]


def test_a_pull_between_steps_asks_for_no_copies() -> None:
    """Only a joiner accepts copies, which may lack the latest deltas; a step continues with its own older copy."""
    swarm = Swarm()

    async def story() -> Any:
        pulling, _, _ = swarm.pulling()
        return await pulling.pull(1, deadline_s=10.0)

    report = VirtualLoop().run(story())

    assert report.missing == [4, 5]
    assert not any(copies for _, copies, _ in swarm.asked)


def pulling_from_an_owner(line: Line) -> PullClient:
    """Of a node that knows who owns all shards, and whose median step takes a second."""
    pulling, context, _ = pulling_over(line)
    context.view.median_step_seconds = lambda: 1.0  # type: ignore[method-assign]
    for shard in range(SHARDS):
        context.store.ownership.known_owners[shard] = KnownOwner(TERM, OWNER)
    return pulling


def test_a_broken_shard_of_this_node_is_not_given_to_its_trainer() -> None:
    """Not even where memory broke after a sound addition; the replica keeps the value and the version that it has."""
    pulling, context, _ = pulling_over(Line(through=0))
    me = Contact(context.swarm.node_id, Address("10.0.0.2", 1))
    state = ShardState(np.ones(SIZE, np.float32), SIZE, version=1)
    context.store.owned[0] = Owned(state, TERM, since=0.0)
    pulling.directory.by_owner = lambda shards: ([(me, list(shards))] if shards else [], [])  # type: ignore[method-assign]

    async def story() -> None:
        state.apply(DeltaId(b"a" * 20, 1, 1), 1.0, np.zeros(SIZE, np.float32), PLAIN)
        await pulling.pull(1, deadline_s=0.05)
        state.apply(DeltaId(b"a" * 20, 1, 2), 1.0, np.zeros(SIZE, np.float32), PLAIN)
        state.value[1] = np.nan
        report = await pulling.pull(2, deadline_s=0.05)
        assert 0 in report.missing

    asyncio.run(story())
    assert 0 not in context.store.owned
    assert context.replica.vector[:SIZE].tolist() == [1.0] * SIZE
    assert context.replica.version_of(0) == (TERM, 2)
