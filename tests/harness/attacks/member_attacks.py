"""Attacks by one member of five: how long the others are held up, what is left of it, and how they start again.

Each attack runs against four honest nodes (`tests.harness.swarms.swarm`) for a minute, then its node is gone. The table
says

* `harmless`: seconds until the others make at least 80 % of their former steps again, and go on doing so;
* `rate`: their steps from the sixteenth second of the attack on, as a share of those before it;
* `lasting`: what is wrong twenty seconds after the node has gone, if anything is;
* `left out`: deltas of the others, by shard, that one shard lacks and another has, twenty seconds after it has gone;
* `restart`: their steps after all of them were killed and started again, as that share, or what is wrong then.

`python -m tests.harness.attacks` prints it as Markdown; `--only NAME` plays one. What takes the node's processor or its
line does not show here, because time is virtual: `tests/process/test_member_limits.py` has those with real sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from overlay.peers import Activity, Contact
from overlay.transport import Buffer, Response, TransportError
from tests.harness.attacks.lying_member import KINDS
from tests.harness.attacks.typed_values import Typed
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer
from training.encoding.frames import Part, frames
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.exchange.messages import decode, encode
from training.exchange.store.repair_log import identities_of, to_mend
from training.exchange.terms import GENERATION, Fence, OwnerInfo, Term
from training.shards.applied import DeltaId

HONEST = ("n0", "n1", "n2", "n3")
LIAR = "n4"
SIZE, SHARDS = 64, 4
BEFORE_S, ATTACK_S, AFTER_S, RESTART_S = 30.0, 60.0, 20.0, 30.0
#: From this second on the rate of the others counts; a window of so many seconds is looked at.
HARMLESS_AFTER_S, WINDOW_S = 15.0, 10.0
ENOUGH = 0.8

Attack = Callable[["Attacker"], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Enter an attack into the table."""

    def enter(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return enter


@dataclass
class Attacker:
    """What the member that attacks can do: send anything, announce anything, answer anything."""

    swarm: Swarm
    chance: random.Random

    @property
    def host(self) -> Host:
        return self.swarm.hosts[LIAR]

    @property
    def honest(self) -> list[Host]:
        return [self.swarm.hosts[name] for name in HONEST]

    @property
    def genesis(self) -> bytes:
        return self.host.living.exchange.context.genesis

    @property
    def me(self) -> Contact:
        return contact_of(self.host)

    def step(self) -> int:
        return max(host.living.progress.step for host in self.honest)

    def typed(self) -> Typed:
        ids = [host.living.overlay.node_id for host in (*self.honest, self.host)]
        return Typed(self.chance, [*ids, self.genesis])

    def owner_of(self, shard: int) -> Host | None:
        for host in self.honest:
            if shard in host.living.exchange.store.owned:
                return host
        return None

    def term(self, shard: int) -> Term:
        return max(host.living.exchange.store.ownership.fence(shard) for host in self.honest)

    async def ask(self, to: Host, name: str, message: msgspec.Struct, body: Iterable[Buffer] = ()) -> bytes | None:
        """The head of the answer; None if there is none."""
        try:
            request = self.host.living.overlay.request(contact_of(to), name, encode(message), list(body), timeout_s=5.0)
            async with request as answer:
                return answer.head
        except TransportError:
            return None

    async def tell_all(self, name: str, message: msgspec.Struct, body: Iterable[Buffer] = ()) -> None:
        buffers = list(body)
        await asyncio.gather(*(self.ask(host, name, message, buffers) for host in self.honest))

    async def push(self, values: np.ndarray[Any, Any], **changes: Any) -> None:
        """A delta of every shard to its owner, under a new step unless `changes` says otherwise."""
        living = self.host.living
        step = self.step() + self.chance.randrange(1, 100)
        for shard in range(SHARDS):
            if (owner := self.owner_of(shard)) is not None:
                push = steps.Push(self.genesis, self.me.node_id, living.incarnation, step, step, 0.2, [shard])
                await self.ask(owner, "push", msgspec.structs.replace(push, **changes), delta(shard, values))

    async def mend(self, values: np.ndarray[Any, Any], **changes: Any) -> None:
        """A repair of every shard to its owner."""
        for shard in range(SHARDS):
            if (owner := self.owner_of(shard)) is not None:
                step = self.chance.randrange(1, 1 << 20)
                logged = moves.LoggedDelta(shard, self.me.node_id, self.host.living.incarnation, step, 0.2, 5.0)
                logged = msgspec.structs.replace(logged, **changes)
                await self.ask(owner, "mend", moves.OfferedDeltas(self.genesis, [logged]), delta(shard, values))

    async def claim(self, shard: int, term: Term, owner: Contact) -> None:
        claim = OwnerInfo.of(shard, term, owner)
        await self.tell_all("where_is", steps.LocateOwners(self.genesis, [shard], [claim]))

    def announces(self, **fields: Any) -> None:
        """Whatever this node announces from now on, these fields are in it."""
        local: Any = self.host.living.overlay.local
        announce = local.announce
        local.announce = lambda **given: announce(**(given | fields))
        local.announce()

    def answers(self, name: str, change: Callable[[Any, list[bytes]], tuple[Any, list[bytes]]]) -> None:
        """Its answers to requests of this name are changed; `change` gets the message and the body."""
        handlers = self.host.living.overlay._requests._handlers
        honest = handlers[name]

        async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
            response = await honest(sender, payload, stream)
            body = response.body
            found = [bytes(one) async for one in body] if hasattr(body, "__aiter__") else [bytes(one) for one in body]
            message, found = change(decode(response.head, KINDS[name][1]), found)
            return Response(encode(message), found)

        handlers[name] = lie


def contact_of(host: Host) -> Contact:
    return Contact(host.living.overlay.node_id, host.living.overlay.address)


def delta(shard: int, values: np.ndarray[Any, Any]) -> list[Buffer]:
    return list(frames(shard, values.astype(np.float32), "float32", Part.DELTA))


def filled(value: float) -> np.ndarray[Any, Any]:
    return np.full(SIZE // SHARDS, value, np.float32)


async def for_ever(work: Callable[[], Awaitable[Any]], every_s: float = 0.5) -> None:
    while True:
        await work()
        await asyncio.sleep(every_s)


# -- what it announces -----------------------------------------------------------------------------------------------


@attack("announces that it trains, and never moves")
async def _never_moves(a: Attacker) -> None:
    assert a.host.trainer is not None
    a.host.trainer.hang()
    a.announces(activity=Activity.TRAINING, step_seconds=1e9, step=a.host.living.progress.step)
    await asyncio.sleep(ATTACK_S)


@attack("announces step 10⁹")
async def _far_step(a: Attacker) -> None:
    a.announces(activity=Activity.TRAINING, step=10**9)
    await asyncio.sleep(ATTACK_S)


@attack("announces the last step that a message takes")
async def _last_step(a: Attacker) -> None:
    a.announces(activity=Activity.TRAINING, step=(1 << 48) - 1)
    await asyncio.sleep(ATTACK_S)


@attack("announces a new activity all the time")
async def _flickers(a: Attacker) -> None:
    async def change() -> None:
        a.host.living.overlay.announce(activity=a.chance.choice(list(Activity)))

    await for_ever(change, 0.1)


@attack("announces 2⁴⁷ samples a step")
async def _many_samples(a: Attacker) -> None:
    a.announces(samples=1 << 47)
    await asyncio.sleep(ATTACK_S)


@attack("changes whether it may own all the time")
async def _willing(a: Attacker) -> None:
    async def change() -> None:
        a.host.living.overlay.set_willing(a.chance.random() < 0.5)

    await for_ever(change, 0.3)


# -- deltas ----------------------------------------------------------------------------------------------------------


def _pushes(name: str, values: Callable[[random.Random], np.ndarray[Any, Any]], **changes: Any) -> None:
    async def run(a: Attacker) -> None:
        await for_ever(lambda: a.push(values(a.chance), **changes))

    ATTACKS[name] = run


_pushes("pushes NaN", lambda _: filled(np.nan))
_pushes("pushes infinity", lambda _: filled(np.inf))
_pushes("pushes ±3·10³⁸", lambda chance: filled(chance.choice([3e38, -3e38])))
_pushes("pushes 10¹⁴", lambda _: filled(1e14))
_pushes("pushes with the weight 10⁶", lambda _: filled(0.01), weight=1e6)
_pushes("pushes with the weight 10⁻¹²", lambda _: filled(0.01), weight=1e-12)
_pushes("pushes too few values", lambda _: np.ones(3, np.float32))
_pushes("pushes under the last step", lambda _: filled(0.001), step=(1 << 48) - 1)
_pushes("pushes under the last start", lambda _: filled(0.001), incarnation=(1 << 48) - 1)
_pushes("pushes with a base of long ago", lambda _: filled(0.001), base_step=0)


@attack("pushes in another's name")
async def _in_another_name(a: Attacker) -> None:
    await for_ever(lambda: a.push(filled(0.01), node=contact_of(a.honest[0]).node_id))


@attack("replays one delta")
async def _replays(a: Attacker) -> None:
    step = a.step() + 5
    await for_ever(lambda: a.push(filled(0.001), step=step), 0.1)


# -- repairs ---------------------------------------------------------------------------------------------------------


def _mends(name: str, values: Callable[[random.Random], np.ndarray[Any, Any]], **changes: Any) -> None:
    async def run(a: Attacker) -> None:
        await for_ever(lambda: a.mend(values(a.chance), **changes))

    ATTACKS[name] = run


_mends("repairs with NaN", lambda _: filled(np.nan))
_mends("repairs with ±3·10³⁸", lambda chance: filled(chance.choice([3e38, -3e38])))
_mends("repairs with weight 10⁶ of 10⁹ workers", lambda _: filled(0.001), weight=1e6, workers=1e9)


@attack("repairs under the next steps of the others")
async def _mends_the_future(a: Attacker) -> None:
    async def work() -> None:
        for host in a.honest:
            step = host.living.progress.step + a.chance.randrange(1, 40)
            await a.mend(filled(0.0), node=contact_of(host).node_id, incarnation=host.living.incarnation, step=step)

    await for_ever(work)


@attack("repairs under identities of nobody")
async def _mends_of_nobody(a: Attacker) -> None:
    await for_ever(lambda: a.mend(filled(0.0), node=a.chance.randbytes(20)), 0.1)


# -- claims ----------------------------------------------------------------------------------------------------------


@attack("claims every shard under a term of 2⁶²")
async def _claims_highest(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(SHARDS):
            await a.claim(shard, Term((1 << 62) - 1, a.me.node_id), a.me)

    await for_ever(work)


@attack("claims every shard under the next term, twice a second")
async def _claims(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(SHARDS):
            await a.claim(shard, Term(a.term(shard).number + 1, a.me.node_id), a.me)

    await for_ever(work)


@attack("claims every shard for another node, twice a second")
async def _claims_for_another(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(SHARDS):
            await a.claim(shard, Term(a.term(shard).number + 1, a.me.node_id), contact_of(a.chance.choice(a.honest)))

    await for_ever(work)


def _fences(name: str, number: Callable[[int], int]) -> None:
    async def run(a: Attacker) -> None:
        async def work() -> None:
            found = [Fence(shard, number(a.term(shard).number), a.me.node_id) for shard in range(SHARDS)]
            await a.tell_all("where_is", steps.LocateOwners(a.genesis, [], [], found))

        await for_ever(work)

    ATTACKS[name] = run


_fences("has seen terms of 2⁶²", lambda _: (1 << 62) - 1)
_fences("has seen terms of 1,000 restarts", lambda number: number + 1000 * GENERATION)
_fences("has seen the next term, twice a second", lambda number: number + 1)


@attack("finds no owner of any shard")
async def _appeals(a: Attacker) -> None:
    await for_ever(lambda: a.tell_all("appeal", moves.TakeoverRequest(a.genesis, list(range(SHARDS)))))


def _orders(name: str, request: str, kind: Callable[..., msgspec.Struct]) -> None:
    async def run(a: Attacker) -> None:
        async def work() -> None:
            infos = [OwnerInfo.of(n, Term(a.term(n).number + 1, a.me.node_id), a.me) for n in range(SHARDS)]
            extra = () if kind is moves.Release else ([a.chance.randrange(1, 1 << 40)] * SHARDS,)
            await a.tell_all(request, kind(a.genesis, infos, *extra))

        await for_ever(work)

    ATTACKS[name] = run


_orders("makes all learn every shard", "learn", moves.Learn)
_orders("hands every shard over to all", "hand_over", moves.HandOver)
_orders("releases every backup", "release", moves.Release)


@attack("offers what it has recorded: a billion deltas of each node")
async def _records(a: Attacker) -> None:
    async def work() -> None:
        rows = [(contact_of(host).node_id, host.living.incarnation, [(0, 10**9)]) for host in a.honest]
        await a.tell_all("offer", moves.Offer(a.genesis, list(range(SHARDS)), rows))

    await for_ever(work)


# -- as an owner and a backup ----------------------------------------------------------------------------------------


def _spoils(name: str, requests: Iterable[str]) -> None:
    async def run(a: Attacker) -> None:
        for request in requests:
            a.answers(
                request,
                lambda message, body: (message, [one if len(one) == 32 else b"\xff" * len(one) for one in body]),
            )
        await asyncio.sleep(ATTACK_S)

    ATTACKS[name] = run


_spoils("serves NaN to all that pull", ["pull"])
_spoils("serves NaN to all that take over", ["fetch", "pull"])


@attack("says of every shard that nothing is new")
async def _stale(a: Attacker) -> None:
    def change(message: Any, _body: list[bytes]) -> tuple[Any, list[bytes]]:
        results = [steps.PullResult(one.shard, "same", *one.term, one.version) for one in message.results]
        return steps.PullAnswer(results), []

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("redirects every delta and every pull to itself")
async def _redirects(a: Attacker) -> None:
    def of(message: Any, kind: Any) -> Any:
        infos = [(one.shard, OwnerInfo.of(one.shard, a.term(one.shard), a.me)) for one in message.results]
        return [kind(shard, "redirect", owner_info=info) for shard, info in infos]

    a.answers("push", lambda message, body: (steps.PushAnswer(of(message, steps.PushResult)), []))
    a.answers("pull", lambda message, body: (steps.PullAnswer(of(message, steps.PullResult)), []))
    await asyncio.sleep(ATTACK_S)


@attack("acknowledges as a backup nothing, but answers")
async def _bad_backup(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        return steps.ForwardAnswer([steps.ForwardResult(one.shard, "unknown") for one in message.results]), body

    a.answers("forward", change)
    await asyncio.sleep(ATTACK_S)


@attack("fences every forward with a higher term")
async def _fencing_backup(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        fenced = [
            steps.ForwardResult(one.shard, "fenced", a.term(one.shard).number + 1, a.me.node_id)
            for one in message.results
        ]
        return steps.ForwardAnswer(fenced), body

    a.answers("forward", change)
    await asyncio.sleep(ATTACK_S)


@attack("has the best copy of every shard, in a survey")
async def _best_copies(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        best = [
            msgspec.structs.replace(one, role="backup", term_number=one.term_number + 5, version=1 << 40)
            for one in message.statuses
        ]
        return msgspec.structs.replace(message, statuses=best), body

    a.answers("survey", change)
    await for_ever(lambda: a.tell_all("appeal", moves.TakeoverRequest(a.genesis, list(range(SHARDS)))), 2.0)


async def _own(a: Attacker) -> list[int]:
    """The shards that it owns by right; where it has none, it takes one over as an owner does."""
    store, owner = a.host.living.exchange.store, a.owner_of(0)
    if not store.owned and owner is not None:
        term = Term(a.term(0).number + 1, a.me.node_id)
        state = owner.living.exchange.store.owned[0].state.copy()
        store.own(0, state, term, a.me, a.swarm.clock.monotonic(), by_handover=False)
        await a.claim(0, term, a.me)
        await asyncio.sleep(5.0)
    return list(store.owned)


@attack("owns a shard, and changes its values by a hundredth twice a second")
async def _wrong_values(a: Attacker) -> None:
    await _own(a)

    async def work() -> None:
        for owned in a.host.living.exchange.store.owned.values():
            signs = [a.chance.choice((-0.01, 0.01)) for _ in range(owned.state.value.size)]
            owned.state.value += np.array(signs, np.float32)

    await for_ever(work)


@attack("owns a shard, and acknowledges every delta without adding it")
async def _adds_nothing(a: Attacker) -> None:
    await _own(a)
    handlers, store = a.host.living.overlay._requests._handlers, a.host.living.exchange.store
    honest = handlers["push"]

    async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
        push = decode(payload, steps.Push)
        if not all(shard in store.owned for shard in push.shards):
            return await honest(sender, payload, stream)
        results = [steps.PushResult(shard, "ok", store.owned[shard].state.version) for shard in push.shards]
        return Response(encode(steps.PushAnswer(results)))

    handlers["push"] = lie
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and answers with versions of any time")
async def _any_versions(a: Attacker) -> None:
    await _own(a)

    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        found = [msgspec.structs.replace(one, version=a.chance.choice((0, 1, 1 << 40))) for one in message.results]
        return steps.PullAnswer(found), body

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and serves the chain of its first answer for ever")
async def _first_chain(a: Attacker) -> None:
    await _own(a)
    first: dict[tuple[int, ...], tuple[Any, list[bytes]]] = {}

    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        return first.setdefault(tuple(one.shard for one in message.results), (message, body))

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("takes every request and answers none")
async def _silent(a: Attacker) -> None:
    handlers = a.host.living.overlay._requests._handlers

    async def silent(_sender: Contact, _payload: bytes, _stream: Any) -> Response:
        await asyncio.sleep(3600.0)
        raise AssertionError

    for name in list(handlers):
        handlers[name] = silent
    await asyncio.sleep(ATTACK_S)


# -- anything --------------------------------------------------------------------------------------------------------


@attack("sends requests of every kind with any values")
async def _anything(a: Attacker) -> None:
    typed = a.typed()

    async def work() -> None:
        name = a.chance.choice(list(KINDS))
        message = msgspec.structs.replace(typed.value(KINDS[name][0]), genesis=a.genesis)
        await a.ask(a.chance.choice(a.honest), name, message)

    await for_ever(work, 0.05)


@attack("answers every request with any values")
async def _any_answer(a: Attacker) -> None:
    typed = a.typed()
    for name in KINDS:
        a.answers(name, lambda message, body: (typed.changed(message), body))
    await asyncio.sleep(ATTACK_S)


@attack("crashes and returns every ten seconds")
async def _flaps(a: Attacker) -> None:
    async def work() -> None:
        await a.swarm.kill(LIAR)
        await asyncio.sleep(5.0)
        a.swarm.start(LIAR, bootstrap="n0")

    await for_ever(work, 10.0)


@attack("is gone")
async def _gone(a: Attacker) -> None:
    await a.swarm.kill(LIAR)
    await asyncio.sleep(ATTACK_S)


# -- one history -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What an attack did to the others."""

    name: str
    harmless_s: float | None = None
    rate: float = 0.0
    lasting: str = ""
    after: float = 0.0
    left_out: int = 0
    restart: str = ""
    distrusted: int = 0
    #: Steps of the honest nodes, by second.
    log: list[float] = field(default_factory=list)

    def markdown(self) -> str:
        harmless = "not within a minute" if self.harmless_s is None else f"{self.harmless_s:.0f} s"
        lasting = self.lasting or "nothing"
        return f"| {self.name} | {harmless} | {self.rate:.0%} | {lasting} | {self.left_out} | {self.restart} |"


def wrong(swarm: Swarm) -> str:
    """What is not as it should be with the honest nodes; empty if nothing is."""
    stores = [swarm.hosts[name].living.exchange.store for name in HONEST]
    for shard in range(SHARDS):
        owners = [store.owned[shard] for store in stores if shard in store.owned]
        if len(owners) != 1:
            return f"shard {shard} has {len(owners)} owners"
        if owners[0].backup is None:
            return f"shard {shard} has no backup"
        if not owners[0].state.is_in_range():
            return f"the values of shard {shard} are out of range"
    for name in HONEST:
        exchange = swarm.hosts[name].living.exchange
        honest = [swarm.hosts[one].living.exchange.context.swarm.node_id for one in HONEST]
        if any(node not in exchange.view.trust for node in honest):
            return f"{name} leaves out honest nodes"
        if unsettled := to_mend(exchange.store.superseded):
            return f"copies of shards {unsettled} to be settled"
        if len(exchange.push_client.outstanding_steps) > 2:
            return f"{len(exchange.push_client.outstanding_steps)} steps wait for their owners"
        if not np.isfinite(exchange.context.replica.vector).all():
            return "a replica has values that are not finite"
    return ""


def left_out(swarm: Swarm) -> int:
    """How many deltas of the honest nodes the owners of some shards have, and those of others have not, by shard."""
    stores = [swarm.hosts[name].living.exchange.store for name in HONEST]
    states = [store.owned[shard].state for store in stores for shard in store.owned]
    known = [identities_of(state) for state in states]
    # What a replica had is not known by identity.
    first = max(state.era_step for state in states) + 1
    count = 0
    for name in HONEST:
        living = swarm.hosts[name].living
        on_its_way = living.exchange.push_client.outstanding_steps
        for step in range(first, living.progress.step - 3):
            has = sum(DeltaId(living.overlay.node_id, living.incarnation, step) in one for one in known)
            count += (len(known) - has) if has and step not in on_its_way else 0
    return count


async def _play(swarm: Swarm, row: Row, run: Attack) -> None:
    clock = swarm.clock

    def made() -> float:
        return sum(swarm.hosts[name].living.progress.step for name in HONEST) / len(HONEST)

    swarm.start_many(len(HONEST) + 1, training__checkpoint_s=5.0)
    await swarm.until(
        lambda: len(swarm.running()) == 5 and min(host.living.progress.step for host in swarm.running()) >= 3,
        within_s=100,
        what="three steps of all",
    )
    await asyncio.sleep(10.0)
    before = made()
    await asyncio.sleep(BEFORE_S)
    usual = (made() - before) / BEFORE_S
    first, began_s = made(), clock.monotonic()
    assault = asyncio.create_task(run(Attacker(swarm, random.Random(f"{row.name}"))), name=row.name)  # type: ignore[arg-type]
    while clock.monotonic() - began_s < ATTACK_S:
        await asyncio.sleep(1.0)
        row.log.append(made())
        assert max(swarm.hosts[name].living.progress.step for name in HONEST) < 10_000, "the others were taken along"
    assault.cancel()
    await asyncio.gather(assault, return_exceptions=True)
    row.rate = (row.log[-1] - row.log[int(HARMLESS_AFTER_S)]) / (ATTACK_S - HARMLESS_AFTER_S - 1.0) / usual
    row.harmless_s = _harmless_s([first, *row.log], usual)
    row.distrusted = sum(len(swarm.hosts[name].living.exchange.view.trust.distrusted()) for name in HONEST)
    if swarm.hosts[LIAR].task is not None:
        await swarm.kill(LIAR)
    await asyncio.sleep(AFTER_S)
    row.lasting, row.left_out = wrong(swarm), left_out(swarm)
    before = made()
    await asyncio.sleep(AFTER_S)
    row.after = (made() - before) / AFTER_S / usual
    if not row.lasting and row.after < ENOUGH:
        row.lasting = f"{row.after:.0%} of the steps"
    most = max(swarm.hosts[name].living.progress.step for name in HONEST)
    for name in HONEST:
        await swarm.kill(name)
    for name in HONEST:
        swarm.start(name, bootstrap=None if name == "n0" else "n0", training__checkpoint_s=5.0)
    await asyncio.sleep(RESTART_S)
    running = [host.name for host in swarm.running()]
    if sorted(running) != sorted(HONEST) or any(swarm.hosts[name].living.exchange is None for name in HONEST):
        row.restart = f"{len(running)} of {len(HONEST)} run"
        return
    before = made()
    await asyncio.sleep(AFTER_S)
    share = (made() - before) / AFTER_S / usual
    row.restart = wrong(swarm) or f"{share:.0%}"
    if max(swarm.hosts[name].living.progress.step for name in HONEST) > 3 * most + 100:
        row.restart = "steps that were never trained"


def _harmless_s(log: list[float], usual: float) -> float | None:
    """The first second from which on every window has enough steps; None if there is none."""
    window = int(WINDOW_S)
    good = [log[at + window] - log[at] >= ENOUGH * usual * WINDOW_S for at in range(len(log) - window)]
    bad = [at for at, is_good in enumerate(good) if not is_good]
    if not bad:
        return 0.0
    return None if bad[-1] == len(good) - 1 else float(bad[-1] + 1)


def _step_s(generator: random.Random, _step: int) -> float:
    """Nearly equal steps, so that few of them show a rate."""
    return generator.uniform(0.8, 1.2)


def play(name: str, *, seed: int = 1, method: str = "pbsp") -> Row:
    """Play one attack."""
    row = Row(name)

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings={"exchange.shards": SHARDS, "barrier.method": method},
            make_trainer=lambda host: StubTrainer(host, SIZE, step_s=_step_s, start_s=0.3),
        )
        try:
            await _play(swarm, row, ATTACKS[name])
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(ATTACKS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", default="pbsp")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("N", "OF"), help="Every OF-th attack.")
    chosen = parser.parse_args()
    print("| attack | harmless after | rate of the others | lasting | deltas left out | after a restart |")
    print("|---|---|---|---|---|---|")
    first, every = chosen.part
    for name in [chosen.only] if chosen.only else list(ATTACKS)[first::every]:
        try:
            print(play(name, seed=chosen.seed, method=chosen.method).markdown(), flush=True)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | | | |", flush=True)


if __name__ == "__main__":
    main()
