"""One large history from one seed.

`python -m tests.harness.histories.swarm_history --nodes 200 --steps 100 --crash 0.1 --seed 7` plays it.

Real nodes with stub trainers train while some of them are killed. Prints one JSON line with the digest of the event
log of all nodes: equal digests mean equal histories, event by event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

from tests.harness.environment.quick_identity import quick_identities
from tests.harness.environment.simulated import digest
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential

STEP_S = 0.15


def settings(steps: int) -> dict[str, Any]:
    return {
        "training.max_steps": steps,
        "training.linger_s": 60.0,
        "exchange.shards": 1,  # the vector has 64 values
        "exchange.codec": "float32",
        "barrier.method": "pssp",
    }


async def history(nodes: int, steps: int, crash: float, seed: int) -> dict[str, Any]:
    """Raise the swarm, kill a share of it at seeded moments, wait until the survivors have finished."""
    swarm = Swarm(
        seed=seed,
        settings=settings(steps),
        make_trainer=lambda name: StubTrainer(name, 64, step_s=exponential(STEP_S), start_s=0.2),
    )
    chance = random.Random(f"{seed}/crashes")
    swarm.start_many(nodes)
    victims = chance.sample([f"n{number}" for number in range(1, nodes)], round(crash * nodes))
    moments = sorted(chance.uniform(2.0, 0.8 * steps * STEP_S) for _ in victims)
    started = swarm.clock.monotonic()
    for victim, moment in zip(victims, moments, strict=True):
        await asyncio.sleep(max(0.0, started + moment - swarm.clock.monotonic()))
        await swarm.kill(victim)

    def ended(host: Host) -> bool:
        return host.living.progress.step >= steps

    await swarm.until(lambda: all(map(ended, swarm.running())), within_s=20 * steps, what="the survivors finish")
    survivors = swarm.running()
    result = {
        "nodes": nodes,
        "crashed": len(victims),
        "steps": sum(host.living.progress.step for host in survivors),
        "virtual_seconds": round(swarm.clock.monotonic() - started, 3),
        "events": len(swarm.records),
        "digest": digest(swarm.records),
    }
    await swarm.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--crash", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    began = time.perf_counter()
    with quick_identities():
        result = VirtualLoop().run(history(**vars(arguments)), limit_s=36000)
    print(json.dumps({**result, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
