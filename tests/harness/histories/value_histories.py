"""Random histories with many faults over the store of named values, and a check that every update counts once.

`python -m tests.harness.histories.value_histories --histories 200` plays that many; `--seed 17` replays one. The faults
are those of `tests.harness.histories.conservation`: nodes crash, return, are paused, parted, join and leave; requests
are lost, duplicated and delayed. Meanwhile workers update shared keys: `pull` appends the token of each update to a
list, `add` counts, and `replace` sets keys of one worker each. When the faults have ended

* the list of a key has every acknowledged token exactly once, and no other token twice;
* of one worker's start the tokens of a key are in the order in which it made them;
* a count is at least the number of acknowledged updates, and at most that of all;
* a key that one worker sets has the value it set last, or a later one whose acknowledgement it has not seen;
* owner and backup have the same table, and all nodes read the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.values.encoding import decode_key, decode_value, encode_value
from p2pnode.training.values.store import (
    EncodedResult,
    EncodedUpdate,
    EncodedValue,
    PullFailed,
    StoreUnavailable,
    UpdateFailed,
    ValueUpdate,
)
from tests.harness.environment.simulated import digest
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.conservation import History
from tests.harness.histories.conservation_plan import SHARDS, Tally
from tests.harness.histories.delta_ledger import Sent
from tests.harness.swarms.decoded_values import DecodedValues
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Member

LISTS = [f"list{number}" for number in range(4)]
COUNTS = ["count0", "count1"]
#: A token that the `pull` of these histories refuses.
POISON = "poison"


class Broken(AssertionError):
    """A promise of the store does not hold in a history."""


class _NoLedger:
    """In the place of the ledger of deltas: here there are none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def watch(self, *_: Any) -> Sent | None:
        return None

    def forwarded(self, *_: Any) -> None: ...

    def check_node(self, *_: Any) -> None: ...

    def broken(self, what: str) -> Broken:
        return Broken(f"{self.name}: {what}")


async def append(updates: Sequence[EncodedUpdate], present: Mapping[bytes, EncodedValue]) -> list[EncodedResult]:
    """The user's `pull` of these histories: takes a moment, and appends every token."""
    await asyncio.sleep(0.03)
    lists: dict[bytes, list[Any]] = {}
    stamps: dict[bytes, int] = {}
    for one in updates:
        token = decode_value(one.value)
        if token[-1] == POISON:
            raise PullFailed(one.key, "poisoned")
        if one.key not in lists:
            lists[one.key] = decode_value(present[one.key][0]) if one.key in present else []
            stamps[one.key] = present[one.key][1] if one.key in present else 0
        lists[one.key].append(token)
        stamps[one.key] = max(stamps[one.key], one.timestamp)
    return [(key, encode_value("list", values), stamps[key]) for key, values in lists.items()]


class ValueHistory(History):
    """One history of the store, from one seed."""

    def __init__(self, seed: int, nodes: int) -> None:
        super().__init__(seed, nodes)
        plan = self.plan
        self.world = World(seed, settings=plan.settings, shards=SHARDS, values=0, synchronous=False)
        self.world.observers.append(self._on_request)
        self.ledger = _NoLedger(f"seed {seed}")
        self.acknowledged: dict[str, list[tuple[Any, ...]]] = {key: [] for key in LISTS}
        self.made: dict[str, dict[tuple[Any, ...], None]] = {key: {} for key in LISTS}
        self.counts: dict[str, list[int]] = {key: [0, 0] for key in COUNTS}
        #: Per key the numbers that its worker set: all, and the last acknowledged.
        self.sets: dict[str, list[int]] = {}
        self.failed = 0
        self.poisoned = 0

    async def start(self, name: str, *, founder: bool = False, works: bool = False, resumes: int = 0) -> Member:
        member = await super().start(name, founder=founder, works=works, resumes=resumes)
        # Not every node has a script.
        if name != "n1":
            member.exchange.values.on_pull(append)
        return member

    async def _again(self, name: str, works: bool) -> None:
        await super()._again(name, works=True)

    async def _work(self, member: Member, sent: Sent) -> None:
        exchange = member.exchange
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/updates")
        calls: dict[asyncio.Task[None], None] = {}
        number = 0
        while self.pushing:
            await asyncio.sleep(0.05 + chance.expovariate(4.0))
            number += 1
            call = asyncio.create_task(self._call(member, exchange, number, chance.random(), chance))
            calls[call] = None
            call.add_done_callback(lambda done: calls.pop(done, None))
            member.overlay.tasks[call] = None
            self.tally.steps += 1
        while calls:
            await asyncio.wait(calls)

    async def _call(self, member: Member, exchange: Exchange, number: int, what: float, chance: random.Random) -> None:
        values = DecodedValues(exchange.values)
        if what < 0.5:
            await self._append(member, exchange, number, chance)
        elif what < 0.7:
            key = chance.choice(COUNTS)
            self.counts[key][1] += 1
            try:
                await values.update([ValueUpdate(key, 1, number, "add")])
            except StoreUnavailable:
                self.failed += 1
                return
            self.counts[key][0] += 1
        elif what < 0.85:
            key = f"own/{member.name}/{member.starts}"
            self.sets.setdefault(key, [0, 0])[1] = number
            try:
                await values.set(key, number, number)
            except StoreUnavailable:
                self.failed += 1
                return
            self.sets[key][0] = max(self.sets[key][0], number)
        else:
            try:
                await values.get(chance.choice(LISTS))
            except StoreUnavailable:
                self.failed += 1

    async def _append(self, member: Member, exchange: Exchange, number: int, chance: random.Random) -> None:
        if chance.random() < 0.1:
            key = chance.choice(LISTS)
            try:
                await DecodedValues(exchange.values).update(
                    [ValueUpdate(key, [member.name, member.starts, number, POISON], number)]
                )
            except UpdateFailed:
                self.poisoned += 1
            except StoreUnavailable:
                self.failed += 1
            else:
                raise Broken(f"seed {self.world.seed}: a poisoned update was acknowledged")
            return
        keys = chance.sample(LISTS, chance.choice([1, 1, 2]))
        token = (member.name, member.starts, number)
        for key in keys:
            self.made[key][token] = None
        try:
            await DecodedValues(exchange.values).update([ValueUpdate(key, list(token), number) for key in keys])
        except StoreUnavailable:
            self.failed += 1
            return
        except UpdateFailed as error:
            # It was in a batch with a poisoned one, or there was no script; some keys of the call may have it.
            self.failed += 1
            for key in keys:
                if key == error.key and token in self.made[key]:
                    self.made[key][token] = None
            return
        for key in keys:
            self.acknowledged[key].append(token)

    def _read(self, saved: Any) -> dict[int, StoredState]:
        found: dict[int, StoredState] = {}
        for raw in saved.states:
            genesis = bytes.fromhex(self.world.manifest.genesis)
            found |= shard_states.decode(raw, genesis, [(0, 0)] * SHARDS, 0)
        return found

    async def _calm(self) -> None:
        for member in self.world.running():
            member.exchange.values.on_pull(append)
        await super()._calm()

    def _unquiet(self) -> str:
        for member in self.world.running():
            if member.exchange is not None and member.exchange.values.waiting():
                return f"{member.name} has updates without an answer"
        return super()._unquiet()

    async def _check(self) -> None:
        await self._quiet()
        members = self.world.running()
        tables = {}
        for member in members:
            values = DecodedValues(member.exchange.values)
            tables[member.name] = {key: await values.get(key) for key in await values.keys()}
        first = tables[members[0].name]
        for name, table in tables.items():
            if table != first:
                raise self.ledger.broken(f"{name} reads other values than {members[0].name}")
        for key in LISTS:
            self._check_list(key, [tuple(token) for token in first[key].value] if key in first else [])
        for key, (acknowledged, made) in self.counts.items():
            count = first[key].value if key in first else 0
            if not acknowledged <= count <= made:
                raise self.ledger.broken(f"{key} is {count}; {acknowledged} of {made} updates are acknowledged")
        for key, (acknowledged, made) in self.sets.items():
            value = first[key].value if key in first else 0
            if not acknowledged <= value <= made:
                raise self.ledger.broken(f"{key} is {value}; {acknowledged} was acknowledged, {made} the last")
        self._check_backups()

    def _check_list(self, key: str, tokens: list[tuple[Any, ...]]) -> None:
        if len(dict.fromkeys(tokens)) != len(tokens):
            twice = [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]
            raise self.ledger.broken(f"{key} has twice: {twice[:5]}")
        if missing := [token for token in self.acknowledged[key] if token not in tokens]:
            raise self.ledger.broken(f"{key} has lost {missing[:5]} of {len(self.acknowledged[key])}")
        if strange := [token for token in tokens if token not in self.made[key]]:
            raise self.ledger.broken(f"{key} has {strange[:5]}, which nobody made")
        self.tally.acknowledged += len(self.acknowledged[key])

    def _done(self) -> Tally:
        tally = self.tally
        tally.requests = self.world.requests
        for record in self.world.records:
            tally.taken_over += record.fields.get("count", 1) * (record.event == "shards_taken_over")
            tally.repaired += record.fields.get("count", 0) * (record.event == "deltas_repaired")
            tally.taken_back += record.event == "shard_taken_back"
        tally.digest = digest(self.world.records)
        return tally

    def _check_backups(self) -> None:
        for shard in range(SHARDS):
            owner, state = self._owner(shard)
            backup = owner.exchange.store.owned[shard].backup
            member = None if backup is None else self.world.members[self.names[backup.node_id]]
            if member is None or member.exchange is None or (copy := member.exchange.store.backed[shard].state) is None:
                raise self.ledger.broken(f"shard {shard} of {owner.name} has no backup")
            if state.table is None or copy.table is None or copy.table.entries != state.table.entries:
                raise self.ledger.broken(f"the backup of shard {shard} of {owner.name} has other values")
            if copy.table.known != state.table.known:
                raise self.ledger.broken(f"the backup of shard {shard} of {owner.name} knows other updates")
            for key, entry in state.table.entries.items():
                decode_key(key)
                decode_value(entry.value)


def play(seed: int, nodes: int = 5) -> ValueHistory:
    """One history; raises `Broken`."""
    found: list[ValueHistory] = []

    async def main() -> None:
        history = ValueHistory(seed, nodes)
        found.append(history)
        try:
            await history.play()
        finally:
            for task in history._tasks:
                task.cancel()
            await history.world.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=50)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--nodes", type=int, default=5)
    arguments = parser.parse_args()
    seeds = [arguments.seed] if arguments.seed else range(arguments.first, arguments.first + arguments.histories)
    broken = 0
    for seed in seeds:
        began = time.perf_counter()
        try:
            history = play(seed, arguments.nodes)
        except Exception as error:
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            continue
        tally = history.tally
        if arguments.seed or seed % 10 == 0:
            print(
                f"seed {seed}: {tally.acknowledged} tokens, {history.failed} failed, {history.poisoned} poisoned, "
                f"faults {tally.faults}, repaired {tally.repaired}, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
