"""disturbed: three nodes learn from a third of a text each while one joins late, one is killed and one is stopped.

Real nodes (`p2pnode.lifecycle.node`) with the real model and optimiser on the simulated network, so that a stop of 20 s
is as many steps on any machine, and every run of a seed begins with the same weights, data and speeds. A stopped node
goes on at the step of the others: what it would have trained meanwhile is gone, as is what the killed one would have
trained. The reference has the same late node, a node that leaves in order where the other is killed, and one that is
paused in order where the other is stopped. Beside it stands the same without the pause, which has more data.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.async_rule import SMALL, turn_seconds
from benchmarks.characters import KILL_AT, LATE_AT, LOCAL_STEPS, OPTIONS, STEPS, STOP_AT, STOPPED_S, Corpus
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.tasks.text import Text, TextOptions
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.harness.environment.virtual_loop import OWNER, VirtualLoop
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.real_trainer import InlineTrainer

SEEDS = 5
AIM = "≤ 1.01"
NODES = ("n0", "n1", "n2")
#: Virtual seconds between two looks at the nodes' steps.
LOOK_S = 0.1
#: Virtual seconds after which a run cannot end any more.
LIMIT_S = 3600.0
REFERENCE, WITHOUT_PAUSE, DISTURBED = (
    "one late, one leaves, one paused",
    "one late, one leaves",
    "one late, one killed, one stopped",
)
WAYS = (WITHOUT_PAUSE, REFERENCE, DISTURBED)


class TimedTrainer(InlineTrainer):
    """A real trainer whose turns take virtual seconds, each another."""

    def __init__(self, task: Text, seed: int, seconds: Any) -> None:
        super().__init__(task, seed)
        self._seconds = seconds

    async def train(self, order: StepOrder) -> StepReport:
        self.orders.append(order)
        seconds = self._seconds()
        await asyncio.sleep(seconds)
        report = self.runner.train(order)
        # The nodes tell each other how long a step takes: by the clock of this machine no two runs would be the same.
        return msgspec.structs.replace(report, seconds=seconds)


class Story:
    """One run of three nodes."""

    def __init__(self, options: TextOptions, corpus: Corpus, way: str, seed: int) -> None:
        self._options, self._corpus, self._way, self._seed = options, corpus, way, seed
        self.trainers: dict[str, TimedTrainer] = {}

    def losses(self) -> list[float]:
        """Of the final model, as each node that has finished holds it."""
        VirtualLoop().run(self._run(), limit_s=LIMIT_S)
        found = []
        for name in (NODES[0], NODES[2]):
            trainer = self.trainers[name]
            evaluation = trainer.runner.evaluate(0)
            assert evaluation is not None
            found.append(evaluation.metrics["loss"])
        return found

    def _trainer(self, name: str) -> Any:
        place = NODES.index(name)
        task = Text(
            msgspec.to_builtins(self._options),
            data_dir=str(self._corpus.files[place]),
            seed=self._seed,
            node_seed=100 * self._seed + place + 1,
            device="cpu",
        )
        seconds = turn_seconds(1, Random(1000 * self._seed + place))
        self.trainers[name] = TimedTrainer(task, self._seed, lambda: seconds(0))
        return self.trainers[name]

    def _start(self, swarm: Swarm, place: int, min_nodes: int) -> Host:
        """In a context of its own, so that all of a node can be stopped."""
        context = copy_context()
        context.run(OWNER.set, NODES[place])
        bootstrap = NODES[0] if place else None
        return context.run(lambda: swarm.start(NODES[place], bootstrap=bootstrap, training__min_nodes=min_nodes))

    async def _run(self) -> None:
        settings = {
            "training.max_steps": STEPS,
            "training.local_steps": LOCAL_STEPS,
            "training.linger_s": LIMIT_S,
        }
        swarm = Swarm(seed=self._seed, settings=settings, make_trainer=self._trainer)
        for place in range(2):
            self._start(swarm, place, 2)
        await self._reached(swarm, LATE_AT)
        self._start(swarm, 2, 1)
        stopping = asyncio.create_task(self._stop_one(swarm))
        await self._reached(swarm, KILL_AT)
        if self._way == DISTURBED:
            await swarm.kill(NODES[1])
        else:
            swarm.hosts[NODES[1]].living.leave()
        await stopping
        for host in (swarm.hosts[NODES[0]], swarm.hosts[NODES[2]]):
            assert host.task is not None
            await host.task
        await swarm.stop()

    async def _stop_one(self, swarm: Swarm) -> None:
        """Stop or pause the first node for a while."""
        if self._way == WITHOUT_PAUSE:
            return
        await self._reached(swarm, STOP_AT)
        node = swarm.hosts[NODES[0]].living
        if self._way == REFERENCE:
            node.pause()
            await asyncio.sleep(STOPPED_S)
            node.resume()
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        swarm.network.pause(node.overlay.address)
        loop.stall(NODES[0], STOPPED_S)
        await asyncio.sleep(STOPPED_S)
        swarm.network.resume(node.overlay.address)

    async def _reached(self, swarm: Swarm, step: int) -> None:
        """Wait for the first node with so many steps."""

        def is_reached() -> bool:
            for host in swarm.hosts.values():
                if host.task is not None and host.task.done():
                    host.task.result()  # raises what ended it
            return max((host.living.progress.step for host in swarm.running()), default=0) >= step

        await swarm.until(is_reached, within_s=LIMIT_S, what=f"step {step}", every_s=LOOK_S)


def measure(arguments: argparse.Namespace) -> Outcome:
    """With `--parameters 0.1` a small model, which learns the same in an eighth of the time."""
    torch.set_num_threads(1)
    options = SMALL if arguments.parameters and arguments.parameters[0] < 1.0 else OPTIONS
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="p2pnode-disturbed-") as folder:
        corpus = Corpus(Path(folder))
        for seed in range(arguments.repetitions or SEEDS):
            for way in WAYS:
                story = Story(options, corpus, way, seed)
                found = story.losses()
                if max(found) != min(found):
                    raise NotMeasured(f"seed {seed}, {way}: the nodes ended with other models: {found}")
                losses[way].append(found[0])
                turns = {name: len(trainer.orders) for name, trainer in story.trainers.items()}
                print(f"  seed {seed}, {way}: {found[0]:.4f}, turns {turns}", file=sys.stderr, flush=True)
    series = [Series(f"loss of three nodes, {way}", "nats per byte", losses[way]) for way in WAYS]
    for other, aim in ((REFERENCE, AIM), (WITHOUT_PAUSE, "")):
        ratios = [one / of for one, of in zip(losses[DISTURBED], losses[other], strict=True)]
        mean, error = float(np.mean(ratios)), float(np.std(ratios, ddof=1) / len(ratios) ** 0.5) if ratios[1:] else 0.0
        series.append(
            Series(
                f"loss of the disturbed nodes over that of {other}",
                "times",
                ratios,
                aim,
                {"mean": mean, "standard_error": error},
            )
        )
    return Outcome(
        "disturbed",
        f"bytes of CPython's reference, a third for each of three nodes, transformer of {options.layers} layers of "
        f"{options.width}, AdamW {options.learning_rate:g}, {STEPS} steps of {LOCAL_STEPS} optimiser steps with "
        f"batches of {options.batch_size} × {options.context} bytes per node, default exchange, pssp, real nodes on "
        f"the simulated network, steps of about 1 virtual second; late: joins at step {LATE_AT}; killed or leaving at "
        f"step {KILL_AT}; stopped or paused for {STOPPED_S:g} s at step {STOP_AT}; ratios of equal seeds",
        series,
    )
