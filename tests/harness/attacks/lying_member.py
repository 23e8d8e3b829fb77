"""Histories of a swarm with one member that lies: whatever it sends fits the definition of its message, and nothing
else about it has to be true.

Four nodes train over the real exchange (`tests.harness.swarms.exchange_swarm`). After a while one of them lies: parts
of its requests and answers are replaced (`tests.harness.attacks.typed_values`), values that it serves are not finite,
and it sends requests of every kind that it made up. Then it is gone. The others must go on as if it had never been
there:

* no handler and no task has failed with anything but a refusal;
* every shard has one owner and a backup, and every value is finite;
* what a node has can be written and read back, and the next delta of every node is added by every owner;
* after all of them have been killed and started again, the same holds, and no node uses an absurd step or start.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange import ownership_messages as moves
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.store import state_files
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.state_stream import describe
from p2pnode.training.settings import ExchangeSettings
from tests.harness.attacks.lies import KINDS, SHARDS, VALUES, LyingMember, Tally
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import GENESIS, Member, World

BOUNDS = [(shard * VALUES // SHARDS, (shard + 1) * VALUES // SHARDS) for shard in range(SHARDS)]
HONEST, LIAR = ("a", "b", "c"), "liar"
#: Seconds of honest training, of lies, and until everything is as it should be.
BEFORE_S, LIES_S, SETTLED_S = 6.0, 12.0, 60.0
#: No node of a history makes more steps.
MOST_STEPS = 2000


@dataclass
class Saved:
    """What a checkpoint of a node has."""

    versions: Any
    replica: np.ndarray[Any, Any]
    states: bytes
    step: int


class History:
    """One history, from one seed."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally(seed)
        self._chance = random.Random(f"{seed}/lies")
        chance = random.Random(f"{seed}/plan")
        lr, momentum = chance.choice([(1.0, 0.0), (0.7, 0.5)])
        settings = ExchangeSettings(
            codec=chance.choice(["float32", "bfloat16", "int4"]),
            pull_codec=chance.choice(["auto", "float32", "int4"]),
            shards=SHARDS,
            weight=chance.choice(["sum", "population"]),
            outer_lr=lr,
            outer_momentum=momentum,
            tenure_s=4.0,
            robust=chance.choice(["", "", "clip"]),
        )
        is_synchronous = chance.random() < 0.3
        self.world = World(seed, settings=settings, shards=SHARDS, values=VALUES, synchronous=is_synchronous)
        self._steps: dict[str, int] = {}
        self._saved: dict[str, Saved] = {}

    async def play(self) -> Tally:
        world = self.world
        for name in (*HONEST, LIAR):
            await self._start(name, is_founder=name == HONEST[0])
        await asyncio.sleep(BEFORE_S)
        await self._lie()
        world.kill(LIAR, left=True)
        self.tally.settled_s = await self._settle("after the lies")
        await self._restart()
        self.tally.restarted_s = await self._settle("after a restart of all")
        self._no_errors()
        world.stop()
        return self.tally

    # -- nodes that train

    async def _start(self, name: str, *, is_founder: bool) -> None:
        member = await self.world.start(name, founder=is_founder)
        member.worker = asyncio.create_task(self._live(member, is_founder=is_founder), name=f"life-{name}")

    async def _live(self, member: Member, *, is_founder: bool) -> None:
        exchange, overlay = _running(member)
        if not is_founder:
            await self._join(exchange, overlay)
        await self._work(member)

    async def _join(self, exchange: Exchange, overlay: Any) -> None:
        overlay.eligible = False
        while True:
            sources = [one for one in overlay.members() if one.eligible]
            try:
                if sources:
                    await exchange.join(self._chance.choice(sources).contact)
                    break
            except TransportError:
                pass
            await asyncio.sleep(0.3)
        overlay.eligible = True
        self.world.spread(next(one for one in self.world.running() if one.overlay is overlay))

    async def _work(self, member: Member) -> None:
        exchange, overlay = _running(member)
        step = max(self._steps.get(member.name, 0), exchange.view.median_step())
        exchange.begin_at(step)
        overlay.step = step
        while True:
            await asyncio.sleep(self._chance.uniform(0.3, 0.7))
            step = await self._step(member, step)

    async def _step(self, member: Member, base: int) -> int:
        exchange, overlay = _running(member)
        step = base + 1
        delta = np.full(VALUES, self._chance.uniform(0.5, 1.0) / 1024, np.float32)
        weight = 1.0 if self.world.settings.weight == "sum" else 1.0 / max(1.0, exchange.view.worker_count())
        report = await exchange.push(step, base, weight, delta)
        self.tally.refused.update(report.refused)
        overlay.step = self._steps[member.name] = step
        exchange.advance(step)
        await exchange.pull(step)
        return step

    # -- lies

    async def _lie(self) -> None:
        world = self.world
        liar = LyingMember(world, world.members[LIAR], self._chance, self.tally)
        liar.begin()
        ends_s = world.clock.monotonic() + LIES_S
        while world.clock.monotonic() < ends_s:
            name = self._chance.choice(list(KINDS))
            await liar.invent(name, world.members[self._chance.choice(HONEST)].contact)
            await asyncio.sleep(0.05)

    # -- what must hold afterwards

    async def _settle(self, when: str) -> float:
        """Wait until all is in order, and three more steps of each node are; returns the seconds it took."""
        began_s = self.world.clock.monotonic()
        limit_s = began_s + SETTLED_S
        while (wrong := self._wrong()) and self.world.clock.monotonic() < limit_s:  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0.25)
        assert not wrong, f"{when}: {wrong} {self._where}"
        took_s = self.world.clock.monotonic() - began_s
        before = dict(self._steps)
        while min(self._steps[name] - before[name] for name in HONEST) < 3:
            assert self.world.clock.monotonic() < limit_s + SETTLED_S, f"{when}: no steps, {self._steps} {self._where}"
            await asyncio.sleep(0.25)
        await self._check_deltas_are_added(when)
        for name in HONEST:
            self._check_files(self.world.members[name])
            assert self._steps[name] < MOST_STEPS, f"{when}: {name} is at step {self._steps[name]} {self._where}"
        return took_s

    @property
    def _where(self) -> str:
        return f"(seed {self.tally.seed})"

    def _wrong(self) -> str:
        members = [self.world.members[name] for name in HONEST]
        for shard in range(SHARDS):
            owners = [one for one in members if shard in _running(one)[0].store.owned]
            if len(owners) != 1:
                return f"shard {shard} has {len(owners)} owners"
            owned = _running(owners[0])[0].store.owned[shard]
            if owned.backup is None:
                return f"shard {shard} has no backup"
            if not owned.state.is_in_range():
                return f"shard {shard} has the values {owned.state.value}"
        for one in members:
            exchange = _running(one)[0]
            if not np.isfinite(exchange.replica.vector).all():
                return f"the replica of {one.name} is {exchange.replica.vector}"
            if exchange.store.superseded:
                return f"{one.name} has superseded copies of {list(exchange.store.superseded)}"
            if len(exchange.outbox.steps) > 1:
                return f"{one.name} waits for answers to steps {exchange.outbox.steps}"
        return ""

    async def _check_deltas_are_added(self, when: str) -> None:
        for name in HONEST:
            exchange, _ = _running(self.world.members[name])
            worker, self.world.members[name].worker = self.world.members[name].worker, None
            assert worker is not None
            assert not worker.done(), f"{when}: {name} has stopped: {worker} {self._where}"
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        for name in HONEST:
            exchange, overlay = _running(self.world.members[name])
            step = overlay.step + 1
            report = await exchange.push(step, step, 1 / 3, np.full(VALUES, 1 / 1024, np.float32))
            assert report.acknowledged == SHARDS, f"{when}: step {step} of {name}: {report} {self._where}"
            overlay.step = self._steps[name] = step
            exchange.advance(step)
        for name in HONEST:
            member = self.world.members[name]
            member.worker = asyncio.create_task(self._work(member), name=f"life-{name}")

    def _check_files(self, member: Member) -> None:
        """Everything that a node would write or send can be read."""
        exchange, _ = _running(member)
        for shard, term, state in exchange.store.states_to_save():
            decode(encode(describe(shard, term, state)), moves.StateHead)
        found = self._read(self._save(member))
        assert len(found) == len(exchange.store.states_to_save()), (
            f"{member.name} could read {list(found)} {self._where}"
        )

    def _save(self, member: Member) -> Saved:
        exchange, overlay = _running(member)
        parts = state_files.encode(GENESIS, exchange.store.states_to_save(), clean=False)
        replica = exchange.replica
        return Saved(replica.versions(), replica.vector.copy(), b"".join(parts), overlay.step)

    def _read(self, saved: Saved) -> dict[int, StoredState]:
        return state_files.decode(saved.states, GENESIS, BOUNDS, VALUES)

    async def _restart(self) -> None:
        world = self.world
        for name in HONEST:
            self._saved[name] = self._save(world.members[name])
        for name in HONEST:
            world.kill(name)
        for name in HONEST:
            member = await world.start(name)
            exchange, overlay = _running(member)
            saved = self._saved[name]
            exchange.replica.vector[:] = saved.replica
            exchange.delay_takeover(30.0)
            exchange.offer(saved.step, saved.versions, self._read(saved))
            overlay.eligible = name == HONEST[0]
        for name in HONEST:
            member = world.members[name]
            member.worker = asyncio.create_task(self._again(member), name=f"life-{name}")

    async def _again(self, member: Member) -> None:
        exchange, overlay = _running(member)
        if member.name == HONEST[0]:
            await exchange.resume(len(HONEST) - 1, 5.0)
        else:
            await self._join(exchange, overlay)
        await self._work(member)

    def _no_errors(self) -> None:
        # A delta that it forged may be reported as lost.
        failed = [one for one in self.world.records if one.level == "error" and one.event != "deltas_lost_in_split"]
        assert not failed, f"{failed[0]} {self._where}"


def _running(member: Member) -> tuple[Exchange, Any]:
    assert member.exchange is not None
    return member.exchange, member.overlay


def play(seed: int) -> Tally:
    """Play one history. Raises what is wrong."""

    async def main() -> Tally:
        history = History(seed)
        try:
            return await history.play()
        finally:
            history.world.stop()

    return VirtualLoop().run(main(), limit_s=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--histories", type=int, default=100)
    chosen = parser.parse_args()
    wrong = 0
    for seed in range(chosen.seed, chosen.seed + chosen.histories):
        try:
            tally = play(seed)
        except Exception as error:
            wrong += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        else:
            print(
                f"seed {seed}: {sum(tally.lies.values())} lies, {tally.settled_s:.1f} s, {tally.restarted_s:.1f} s",
                flush=True,
            )
    print(f"{wrong} of {chosen.histories} histories failed")


if __name__ == "__main__":
    main()
