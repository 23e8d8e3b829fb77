"""Random histories with many faults over the real exchange, and a check that every acknowledged delta is in the model.

`python -m tests.harness.histories.conservation --histories 2000` plays that many; `--seed 17` replays one, event by
event, with the same digest. In every history some nodes push about a delta a second to the owners of all shards.
Meanwhile nodes crash, also in the middle of a hand-over or a catch-up, return with the states on their disks, are
paused, are separated from the others, join and leave. Requests are lost, duplicated, delayed and torn. Then the faults
end, and after a while

* every shard has one owner, and a backup that has its state;
* both have every delta that any owner acknowledged, also its own, and their values are the sums of their deltas, each
  once (`tests.harness.histories.delta_ledger`);
* what a node has trained is acknowledged, refused, or its progress;
* every node has the owners' values after a last pull, and the same bits after the final one;
* and no node waited longer for an acknowledgement or a fresh value than the detection bound allows
  (`tests.harness.histories.progress_clocks`).

Codec, weight, momentum and barrier family vary with the seed. In some histories all nodes stop in order at the end, and
start again from their disks.

There are no exceptions. A node whose crash the guarantee does not cover is paused instead of killed. That is a node of
a pair that is not complete as far as its owner knows. Before a split is reconciled, it is also a node whose log has
deltas of that shard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from functools import partial

from p2pnode.training.shards.robust import Robust
from tests.harness.environment.simulated import digest
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.conservation_plan import Tally
from tests.harness.histories.history_checks import HistoryChecks
from tests.harness.swarms.light_network import Links

#: Steps of every worker after all nodes have been switched off and on.
STEPS_AFTER = 3


class History(HistoryChecks):
    """One history, from one seed."""

    async def play(self) -> Tally:
        plan, world = self.plan, self.world
        names = [f"n{number}" for number in range(plan.nodes)]
        workers = names[: plan.workers]
        await self.start(names[0], founder=True, works=True)
        for name in names[1:]:
            await self.start(name, works=name in workers)
        await asyncio.sleep(3.0)
        world.links = plan.links
        if plan.keeps_states:
            self._tasks.append(asyncio.create_task(self._keep_saving(), name="checkpoints"))
        self.strikes = plan.moment is not None
        faults = asyncio.create_task(self.faults(), name="faults")
        ends = self._now() + plan.train_s + 2.0
        while self._now() < ends:
            await asyncio.sleep(0.5)
            self._look(faults)
        await faults
        for task in self._tasks:
            if not task.done() and task.get_name() == "fault":
                await asyncio.wait([task], timeout=25.0)
        world.heal()
        world.links = Links()
        await self._calm()
        if plan.switches_off:
            await self._switch_off()
        await self._check()
        return self._done()

    async def _calm(self) -> None:
        """No more faults, and no more steps: wait until every delta has its answer and every shard its pair."""
        self._fault("calm")
        self.pushing = self.world.training = False
        await self._quiet()
        for name in self.clocks.names():
            self.clocks.stop(name)

    async def _switch_off(self) -> None:
        """All nodes stop in order, write their states, and start again; then every worker makes a few steps more."""
        names = [member.name for member in self.world.running()]
        exchanges = [member.exchange for member in self.world.running() if member.exchange is not None]
        await asyncio.gather(*(exchange.close(2.0) for exchange in exchanges))
        for member in self.world.running():
            self._save(member, clean=True)
        for name in names:
            await self.world.kill(name)
        await asyncio.sleep(1.0)
        self.pushing = self.world.training = True
        self.resumed_by = names[0]
        for name in names:
            works = name in names[: self.plan.workers]
            await self.start(name, founder=name == names[0], works=works, resumes=len(names) - 1)
        self._fault("switched off")
        before = self.tally.steps
        while self.tally.steps < before + STEPS_AFTER * self.plan.workers:
            await asyncio.sleep(0.5)
            self._look(None)
        await self._calm()

    def _done(self) -> Tally:
        tally = self.tally
        tally.acknowledged = sum(len(one) for one in self.ledger.acknowledged)
        exchanges = [member.exchange for member in self.world.running() if member.exchange is not None]
        tally.clipped = sum(exchange.counters.clipped for exchange in exchanges)
        tally.ambiguous, tally.refused = self.ledger.ambiguous, self.ledger.refused
        tally.forgotten = self.ledger.forgotten
        tally.longest_s, tally.longest_of_one_s = self.clocks.longest_s, self.clocks.longest_of_one_s
        tally.limit_s = self.clocks.limit_s()
        tally.requests = self.world.requests
        for record in self.world.records:
            assert record.event != "exchange_service_failed", record
            # No fault makes one member look to another as if it sent nonsense.
            assert record.event != "nonsense_received", record
            tally.taken_over += record.fields.get("count", 1) * (record.event == "shards_taken_over")
            tally.repaired += record.fields.get("count", 0) * (record.event == "deltas_repaired")
            tally.taken_back += record.event == "shard_taken_back"
        tally.digest = digest(self.world.records)
        return tally


def play(seed: int, nodes: int = 50, robust: Robust = "") -> Tally:
    """One history. Raises `Broken` when an invariant does not hold."""
    found: list[Tally] = []

    async def main() -> None:
        history = History(seed, nodes, robust)
        try:
            found.append(await history.play())
        finally:
            for task in history._tasks:
                task.cancel()
            await history.world.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    parser.add_argument("--seed", type=int, default=None, help="play this one alone, and print it")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--robust", choices=("", "clip"), default="")
    arguments = parser.parse_args()
    one_of = partial(
        play,
        nodes=arguments.nodes,
        robust=arguments.robust,
    )
    if arguments.seed is not None:
        print(json.dumps(vars(one_of(arguments.seed))))
        return 0
    began = time.perf_counter()
    tallies, broken = [], []
    for seed in range(arguments.first, arguments.first + arguments.histories):
        try:
            tallies.append(one_of(seed))
        except Exception as error:
            broken.append(seed)
            print(f"BROKEN {type(error).__name__}: {error}", flush=True)
    faults: dict[str, int] = {}
    for tally in tallies:
        for what, count in tally.faults.items():
            faults[what] = faults.get(what, 0) + count
    summary = {
        "histories": len(tallies) + len(broken),
        "broken": broken,
        "nodes": arguments.nodes,
        **{
            name: sum(getattr(tally, name) for tally in tallies)
            for name in (
                "steps",
                "acknowledged",
                "requests",
                "taken_over",
                "repaired",
                "taken_back",
                "ambiguous",
                "refused",
                "clipped",
                "followers",
            )
        },
        **{
            name: max((round(getattr(tally, name), 1) for tally in tallies), default=0.0)
            for name in ("longest_s", "longest_of_one_s", "quiet_s")
        },
        "faults": faults,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
