"""A node joins through a member that lies, and knows no other: it believes it, and takes all back once it meets others.

The liar names itself the owner of every shard under a term that no history explains. It serves values of nobody,
acknowledges every delta, announces a step of a billion, and tells the joiner of no other node. The joiner reaches the
honest nodes later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from overlay.addresses import Address
from overlay.kademlia.messages import FindNode, Nodes
from overlay.peers import Activity, Contact, Heartbeat
from overlay.transport import Response
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer
from training import manifest_check
from training.encoding.frames import Part, frames
from training.exchange import messages
from training.exchange.messages import decode, encode
from training.exchange.terms import OwnerInfo, Term
from training.manifest import Manifest

HONEST = ("n0", "n1", "n2")
LIAR, JOINER = "n3", "n4"
SIZE, SHARDS = 64, 4
FAR = 10**9
#: What the liar serves. The values of the honest nodes are far below it.
SERVED = 12345.0
ALONE_S, CORRECTED_S = 8.0, 30.0


def step_s(generator: Any, _step: int) -> float:
    return float(generator.uniform(0.8, 1.2))


class Liar:
    """What the member answers to the joiner; it serves the others honestly."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.swarm = swarm
        self.living = swarm.hosts[LIAR].living
        self.me = Contact(self.living.overlay.node_id, self.living.overlay.address)
        self.term = Term(number, self.me.node_id)
        self.answers("where_is", self._owners)
        self.answers("pull", self._values)
        self.answers("push", self._taken)
        self._names_nobody()

    def _names_nobody(self) -> None:
        """The joiner would count the nodes that the liar names, and ask for them."""
        procedures: dict[type, Any] = self.living.overlay._protocol._procedures
        honest = procedures[FindNode]

        def answer(body: FindNode, heartbeat: Heartbeat, source: Address, message_id: bytes) -> Nodes:
            found = honest(body, heartbeat, source, message_id)
            return Nodes(b"", b"") if source.host == self.swarm.hosts[JOINER].address else found

        procedures[FindNode] = answer

    def answers(self, name: str, lie: Callable[[bytes], Response]) -> None:
        handlers: dict[str, Any] = self.living.overlay._requests._handlers
        honest = handlers[name]

        async def answer(sender: Contact, payload: bytes, stream: Any) -> Response:
            if sender.address.host != self.swarm.hosts[JOINER].address:
                return await honest(sender, payload, stream)
            async for _ in stream:
                pass
            return lie(payload)

        handlers[name] = answer

    def _owners(self, _payload: bytes) -> Response:
        return Response(
            encode(messages.LocateOwnersAnswer([OwnerInfo.of(shard, self.term, self.me) for shard in range(SHARDS)]))
        )

    def _values(self, payload: bytes) -> Response:
        pull = decode(payload, messages.Pull)
        served = np.full(SIZE // SHARDS, SERVED, np.float32)
        results, body = [], []
        for wanted in pull.shards:
            results.append(messages.PullResult(wanted.shard, "value", *self.term, wanted.version + 1))
            body += list(frames(wanted.shard, served, "float32", Part.VALUE, has_checksum=pull.has_checksums))
        return Response(encode(messages.PullAnswer(results)), body)

    def _taken(self, payload: bytes) -> Response:
        push = decode(payload, messages.Push)
        return Response(encode(messages.PushAnswer([messages.PushResult(shard, "ok", 1) for shard in push.shards])))

    def announces(self, step: int) -> None:
        """A step far ahead, at which the liar seems to move."""
        local: Any = self.living.overlay.local
        announce = local.announce
        moved = [step]

        def lie(**fields: Any) -> None:
            moved[0] += 1
            announce(**(fields | {"step": moved[0], "activity": Activity.TRAINING}))

        local.announce = lie
        lie()


def part(swarm: Swarm) -> None:
    """The joiner reaches the liar only, and only the liar reaches it."""
    joiner = f"10.0.0.{len(swarm.hosts) + 2}"  # as `Swarm.start` will name it
    for name in HONEST:
        swarm.network.cut(joiner, swarm.hosts[name].address)
        swarm.network.cut(swarm.hosts[name].address, joiner)


def owners_seen(host: Host, swarm: Swarm) -> set[str]:
    names = {one.living.overlay.node_id: one.name for one in swarm.running()}
    known = host.living.exchange.store.ownership.known_owners
    return {names[one.owner.node_id] for one in known.values()}


def play(
    scenario: Callable[[Swarm, Liar], Awaitable[None]], *, seed: int, number: int, step: int = FAR, **settings: Any
) -> Swarm:
    """Three honest nodes and the liar train; the joiner begins through the liar."""
    print(f"seed {seed}")
    swarms = []
    keys = {"exchange.shards": SHARDS, "training.checkpoint_s": 5.0}

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings=keys | {key.replace("__", "."): value for key, value in settings.items()},
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=step_s, start_s=0.3),
        )
        swarms.append(swarm)
        try:
            swarm.start_many(len(HONEST), **keys)
            swarm.start(LIAR, bootstrap="n0", node__client_only=True, **keys)  # it owns nothing in truth
            await swarm.until(
                lambda: len(swarm.running()) == 4 and min(one.living.progress.step for one in swarm.running()) >= 8,
                within_s=100,
                what="eight steps of all",
            )
            part(swarm)
            liar = Liar(swarm, number)
            liar.announces(step)
            assert swarm.start(JOINER, bootstrap=LIAR, **keys).address == f"10.0.0.{len(swarm.hosts) + 1}"
            await scenario(swarm, liar)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return swarms[0]


async def meet(swarm: Swarm) -> None:
    """The network is whole again, and an honest node asks the joiner whether it lives."""
    swarm.network.heal()
    overlay, asking = swarm.hosts[JOINER].living.overlay, swarm.hosts["n0"].living.overlay

    def is_met() -> bool:
        # One question a second at most goes out: the last one may have been asked while the line was cut.
        asking._membership.verify(Contact(overlay.node_id, overlay.address))
        return overlay.node_id in asking.peers

    await swarm.until(is_met, within_s=5.0, what="an honest node meets the joiner")


async def fooled(swarm: Swarm) -> Host:
    """The joiner trains, and has believed all."""
    host = swarm.hosts[JOINER]
    await swarm.until(
        lambda: host.living.exchange is not None and host.living.progress.step >= FAR + 5,
        within_s=60,
        what="a lie believed",
    )
    assert host.living.exchange.context.replica.vector.max() > SERVED / 2
    await asyncio.sleep(ALONE_S)
    return host


async def corrected(swarm: Swarm, host: Host) -> None:
    """It trains beside the honest nodes, on their values, and they take its deltas."""
    others = [swarm.hosts[name] for name in HONEST]

    def furthest() -> int:
        return max(one.living.progress.step for one in others)

    await swarm.until(
        lambda: host.living.exchange is not None and 0 < host.living.progress.step <= furthest() + 2,
        within_s=CORRECTED_S,
        what="the joiner's step is one of the others",
    )
    await asyncio.sleep(6.0)
    exchange = host.living.exchange
    assert exchange is not None
    assert owners_seen(host, swarm) <= {*HONEST, JOINER, LIAR}
    assert np.abs(exchange.context.replica.vector).max() < 100.0
    for one in others:
        peer = one.living.overlay.peers.get(host.living.overlay.node_id)
        assert peer is not None
        assert peer.step <= furthest() + 2
        assert peer.is_worker(swarm.clock.monotonic())
        assert all(other.living.overlay.node_id in one.living.exchange.view.trust for other in [*others, host])
    before, began = host.living.progress.step, furthest()
    acknowledged = len(host.living.progress.steps)
    await asyncio.sleep(10.0)
    assert host.living.progress.step >= before + 6
    assert began + 6 <= furthest() < 1000
    rows = list(host.living.progress.steps)[acknowledged:]
    assert all(row.get("acknowledged") == SHARDS for row in rows[:-1]), rows
    assert np.abs(swarm.value()).max() < 100.0


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(
    ("seed", "number", "method"),
    [(1, (1 << 61) - 9, "pbsp"), *more((2, (1 << 61) - 9, "asp"), (3, 1 << 44, "bsp"), (4, 1 << 44, "ssp"))],
)
def test_a_joiner_takes_back_what_its_only_member_made_it_believe(
    seed: int, number: int, method: str, stays: bool
) -> None:
    """Terms, values and steps; while the liar goes on, and after it has gone."""

    async def scenario(swarm: Swarm, _liar: Liar) -> None:
        host = await fooled(swarm)
        if not stays:
            await swarm.kill(LIAR)
        await meet(swarm)
        await corrected(swarm, host)

    swarm = play(scenario, seed=seed, number=number, barrier__method=method)
    assert {record.node for record in swarm.of("terms_taken_back")} == {JOINER}
    assert [record.node for record in swarm.of("step_taken_back")] == [JOINER]


def test_what_was_believed_does_not_last_over_a_restart() -> None:
    """The joiner is killed before it meets anybody else: terms and step are on its disk. It starts again among the
    honest nodes."""

    async def scenario(swarm: Swarm, _liar: Liar) -> None:
        await fooled(swarm)
        await swarm.kill(JOINER)
        await swarm.kill(LIAR)
        swarm.network.heal()
        await corrected(swarm, swarm.start(JOINER, bootstrap="n0", training__checkpoint_s=5.0))

    play(scenario, seed=5, number=(1 << 61) - 9)


def test_what_a_single_member_says_ends_no_run() -> None:
    """Its step is beyond the last one of the run. The joiner waits for half a minute, meets the others, and trains."""

    async def scenario(swarm: Swarm, _liar: Liar) -> None:
        host = swarm.hosts[JOINER]
        await swarm.until(
            lambda: host.living.exchange is not None and host.living.progress.step >= FAR, within_s=60, what="the lie"
        )
        await asyncio.sleep(3.0)
        await meet(swarm)
        await corrected(swarm, host)

    play(scenario, seed=6, number=(1 << 61) - 9, training__max_steps=5000)


def test_a_joiner_that_knows_several_believes_no_terms_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member that it asks lies; two others are asked beside it."""
    monkeypatch.setattr("tests.simulated.test_first_member_lies.part", lambda _swarm: None)

    async def scenario(swarm: Swarm, liar: Liar) -> None:
        host = swarm.hosts[JOINER]
        await corrected(swarm, host)
        highest = max(term.number for term in host.living.exchange.store.ownership.fences.values())
        assert highest < liar.term.number

    swarm = play(scenario, seed=7, number=(1 << 61) - 9)
    assert not swarm.of("step_taken_back")


@pytest.mark.parametrize("first", [True, False])
def test_one_member_alone_gives_no_number_of_shards(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where it is asked first. The joiner was given none, and two members say the same."""
    honest, asked = manifest_check.compare_with, []

    async def lying(swarm: Any, peer: Contact, proposal: Manifest, **given: Any) -> Manifest:
        asked.append(peer)
        manifest = await honest(swarm, peer, proposal, **given)
        return msgspec.structs.replace(manifest, shards=5) if (len(asked) == 1) is first else manifest

    async def main() -> None:
        swarm = Swarm(
            seed=9,
            settings={"exchange.shards": SHARDS},
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=step_s, start_s=0.3),
        )
        try:
            swarm.start_many(4)
            await swarm.until(
                lambda: all(one.living.progress.step >= 2 for one in swarm.running()), within_s=60, what="two steps"
            )
            monkeypatch.setattr(manifest_check, "compare_with", lying)
            joiner = swarm.start("n4", bootstrap="n3", exchange__shards=0)
            await swarm.until(lambda: joiner.living.exchange is not None, within_s=20, what="it has joined")
            assert len(asked) == 3
            assert len(joiner.living.exchange.store) == (SHARDS if first else 5)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)


@pytest.mark.parametrize(("liars", "changes"), [(1, {"local_steps": 77}), (4, {"local_steps": 77})])
def test_one_member_with_another_manifest_keeps_nobody_out(liars: int, changes: dict[str, Any]) -> None:
    """Where all have another manifest it is this node that differs."""

    async def main() -> None:
        swarm = Swarm(
            seed=8,
            settings={"exchange.shards": SHARDS},
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=step_s, start_s=0.3),
        )
        try:
            swarm.start_many(4)
            await swarm.until(
                lambda: all(one.living.progress.step >= 2 for one in swarm.running()), within_s=60, what="two steps"
            )
            for name in ("n3", "n2", "n1", "n0")[:liars]:
                handlers: dict[str, Any] = swarm.hosts[name].living.overlay._requests._handlers

                async def another(_sender: Contact, payload: bytes, _stream: Any) -> Response:
                    mine = decode(payload, Manifest)
                    return Response(encode(Manifest(**{**_fields(mine), **changes})))

                handlers["manifest"] = another
            joiner = swarm.start("n4", bootstrap="n3", exchange__shards=0)
            await asyncio.sleep(12.0)
            assert joiner.task is not None
            if liars == 1:
                assert not joiner.task.done()
                assert joiner.living.progress.step >= 4
                assert len(joiner.living.exchange.store) == SHARDS
            else:
                assert "local_steps" in str(joiner.task.exception())
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}
