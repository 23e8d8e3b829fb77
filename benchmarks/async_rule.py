"""async_rule: barriers and outer rules on the character transformer, in one process with a virtual clock.

Three nodes, each with a third of a text (CPython's own reference, which every machine has), train with the real models
and optimisers. One authoritative vector has the owner's arithmetic (`training.shards.state`), and the barriers are the
daemon's (`training.barriers.predicates`). Every run repeats to the bit, so two rules are compared on equal seeds.

A way is a barrier, a rule and an option: `--ways "pssp 0.7/0.5"`, `--ways "asp 1/0 late=0.5"`.

* `late=a`: what a node pulls after the push of turn t enters its model when `a` of turn t + 1 has passed since the cut,
  between two optimiser steps (`benchmarks.virtual_worker`); 0: before the first one, as always under bsp.

And its scene, where the nodes are not of nearly equal speed, with equal turns of all ways of the scene:

* `slow=r`: the turns of the last node take r times as long.
* `shape=k`: turns are Gamma(k, 1/k) instead, with 1 exponential.

Beside the loss after equal steps there is that after equal time: where the first of the run's ways has ended.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.virtual_worker import ADDED, LATE, VirtualWorker, initial, metrics_of
from p2pnode.training.barriers.predicates import Barrier, BarrierNotFound, make_barrier
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import LEAST_LOSSY, CodecName
from p2pnode.training.settings import BarrierSettings, ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.tasks.text import TextOptions
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner

NODES = 3
OPTIONS = TextOptions(layers=4, width=160, heads=4, context=32, batch_size=8, learning_rate=1e-3, warmup=100)
LOCAL_STEPS = 10
STEPS = 60
SEEDS = 5
AIM = "≤ 1.02"
#: Nodes of nearly equal speed, as processes that share a machine: that of a node is log-normal, each turn takes up to
#: some tenths longer.
SPEED_SIGMA, TURN_SIGMA = 0.05, 0.15
#: With `--parameters 0.1`: for a search.
SMALL = TextOptions(layers=2, width=64, heads=4, context=32, batch_size=8, learning_rate=2e-3, warmup=100)
WAYS = ("bsp", "pssp", "asp")
SCENE_NAMES = ("slow", "shape")


class Corpus:
    """The text, cut into a part for each node and one for evaluation, as files for the task `text`.

    That task evaluates on the last tenth of its file. A file is therefore nine parts of training text and one part of
    the common text.
    """

    def __init__(self, folder: Path) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        part = len(text) // (9 * NODES + 1)
        common = text[-part:]
        self.files = []
        for node in range(NODES):
            self.files.append(folder / f"third-{node}.txt")
            self.files[-1].write_bytes(text[node * 9 * part : (node + 1) * 9 * part] + common)


class Way(NamedTuple):
    """A barrier, a rule, when values enter, and the scene; see the module."""

    barrier: Barrier
    rule: Rule
    late: float = LATE
    slow: float = 1.0
    shape: float = 0.0


def way_of(text: str) -> Way:
    """`"pssp 1/0 late=0.5"`; the rule is the default unless given. Raises `NotMeasured`. Pure."""
    words, usual = text.split(), ExchangeSettings()
    try:
        settings = BarrierSettings(method=words[0])
        rule = Rule(usual.outer_lr, usual.outer_momentum)
        options: dict[str, float] = {}
        for word in words[1:]:
            if "/" in word:
                rate, momentum = map(float, word.split("/"))
                rule = Rule(rate, momentum)
            else:
                name, value = word.split("=")
                names = ("late", *SCENE_NAMES)
                options[names[names.index(name)]] = float(value)
        barrier = make_barrier(settings)
    except (ValueError, IndexError, BarrierNotFound) as error:
        raise NotMeasured(f'--ways "{text}" is no barrier with a rule and options ({error})') from error
    if barrier.synchronous and "late" in options:
        raise NotMeasured(f'--ways "{text}": under bsp all nodes begin a step with the same values')
    if not 0.0 <= options.get("late", LATE) <= 1.0:
        raise NotMeasured(f'--ways "{text}": values enter in the turn after the cut, so late is from 0 to 1')
    return Way(barrier, rule, **({"late": 0.0 if barrier.synchronous else LATE} | options))


def turn_seconds(nodes: int, random: Random, slow: float = 1.0, shape: float = 0.0) -> Callable[[int], float]:
    """Virtual seconds of a node's next turn. Pure but for `random`."""
    is_usual = slow == 1.0 and not shape
    speeds = [random.lognormvariate(0.0, SPEED_SIGMA) if is_usual else 1.0 for _ in range(nodes)]
    speeds[-1] *= slow
    if is_usual:
        return lambda node: speeds[node] * (1 + TURN_SIGMA * abs(random.gauss(0.0, 1.0)))
    # Each node has its own draws, so that its turns are the same under every barrier.
    draws = [Random(random.random()) for _ in range(nodes)]
    if shape:
        return lambda node: speeds[node] * draws[node].gammavariate(shape, 1 / shape)
    return lambda node: speeds[node] * (1 + TURN_SIGMA * abs(draws[node].gauss(0.0, 1.0)))


class Node:
    """A worker and its place in time, in virtual seconds."""

    def __init__(self, worker: VirtualWorker, seconds: float) -> None:
        self.worker = worker
        #: Of its present turn, or of the next one.
        self.seconds = seconds
        self.ended_at = 0.0
        #: When its last delta is exchanged, and how many optimiser steps of the present turn come before that.
        self.enters_at = 0.0
        self.before = 0


class Swarm:
    """One run: events of a virtual clock, in which a node ends a turn, or its delta is added."""

    def __init__(self, runners: list[TaskRunner], way: Way, seed: int, codec: CodecName) -> None:
        first = initial(runners[0])
        self.state = ShardState(first.copy(), runners[0].model_vector.layout.parameter_total)
        self._way = way
        self._seconds = turn_seconds(len(runners), Random(1000 * seed + len(runners)), way.slow, way.shape)
        self._nodes = [Node(VirtualWorker(runner, first), self._seconds(node)) for node, runner in enumerate(runners)]
        self._codec = codec
        self._waiting: list[int] = []
        #: (when, node, ends): its turn ends, or its last delta is added.
        self._due: list[tuple[float, int, bool]] = []
        #: Virtual seconds in which all nodes together trained, and waited.
        self.trained_s = self.waited_s = 0.0
        self.now = 0.0

    def run(self, steps: int) -> Iterator[int]:
        """Train every node for so many steps; yields the number of deltas that have been added, after each."""
        for node in range(len(self._nodes)):
            self._begin(node)
        added = 0
        while self._due:
            self.now, node, ends = heapq.heappop(self._due)
            if ends:
                self._end(node, steps)
                continue
            self._exchange(node)
            added += 1
            yield added

    def _end(self, node: int, steps: int) -> None:
        """Its turn has ended: train it, and begin the exchange of its delta."""
        one = self._nodes[node]
        one.worker.train(len(self._nodes), LOCAL_STEPS, one.before)
        one.worker.encode(self._codec)
        one.ended_at = self.now
        if self._way.barrier.synchronous:
            self.state.add_pending(*self._pushed(node))
        one.seconds = self._seconds(node)
        late_s = self._way.late * one.seconds
        one.enters_at = self.now + late_s
        heapq.heappush(self._due, (self.now + ADDED * late_s, node, False))
        self._waiting.append(node)
        self._pass_barriers(steps)

    def _exchange(self, node: int) -> None:
        """Its delta is added, and the value read; under bsp that is done when its barrier passes."""
        if not self._way.barrier.synchronous:
            self.state.apply(*self._pushed(node), self._way.rule)
            self._nodes[node].worker.pulled = self.state.value.copy()

    def _pushed(self, node: int) -> tuple[DeltaId, float, Vector]:
        worker = self._nodes[node].worker
        return DeltaId(bytes([node]) * 20, 1, worker.step), 1 / len(self._nodes), worker.delta.copy()

    def _pass_barriers(self, steps: int) -> None:
        """Let every node go on whose barrier passes; one that has finished counts for none."""
        for node in list(self._waiting):
            one = self._nodes[node]
            step = one.worker.step
            others = [other.worker.step for other in self._nodes if other is not one and other.worker.step < steps]
            if not self._way.barrier.passes(step, others):
                continue
            self._waiting.remove(node)
            self.waited_s += self.now - one.ended_at
            if self._way.barrier.synchronous:
                self.state.fold(step, self._way.rule)
                one.worker.pulled = self.state.value.copy()
            if step < steps:
                self._begin(node)

    def _begin(self, node: int) -> None:
        one = self._nodes[node]
        one.before = max(0, round(LOCAL_STEPS * (one.enters_at - self.now) / one.seconds))
        self.trained_s += one.seconds
        heapq.heappush(self._due, (self.now + one.seconds, node, True))


class Course(NamedTuple):
    """One run: (step, validation loss of the shared vector) and when that was, in virtual seconds; and the time waited
    over that trained."""

    curve: list[tuple[int, float]]
    seconds: list[float]
    waited: float

    def loss_at(self, seconds: float) -> float:
        """Between two looks it falls evenly."""
        return float(np.interp(seconds, self.seconds, [loss for _, loss in self.curve]))


def study(options: TextOptions, corpus: Corpus, way: Way, seed: int, steps: int) -> Course:
    evaluator, *runners = [_runner(options, corpus.files[node], seed, node) for node in (0, *range(NODES))]
    swarm = Swarm(runners, way, seed, LEAST_LOSSY)
    curve, seconds = [], []
    for added in swarm.run(steps):
        step, others = divmod(added, NODES)
        if not others and step % 10 == 0 and step < steps:
            curve.append((step, metrics_of(evaluator, swarm.state.value)["loss"]))
            seconds.append(swarm.now)
    curve.append((steps, metrics_of(evaluator, swarm.state.value)["loss"]))
    return Course(curve, [*seconds, swarm.now], swarm.waited_s / swarm.trained_s)


def _runner(options: TextOptions, file: Path, seed: int, node: int) -> TaskRunner:
    task, spec = build_task(
        "text",
        msgspec.to_builtins(options),
        data_dir=str(file),
        seed=seed,
        node_seed=100 * seed + node + 1,
        device="cpu",
    )
    return TaskRunner("text", task, spec)


def measure(arguments: argparse.Namespace) -> Outcome:
    """With `--ways` those beside bsp, shown with the same figures."""
    torch.set_num_threads(1)
    options = SMALL if arguments.parameters and arguments.parameters[0] < 1.0 else OPTIONS
    at = "" if options is SMALL else ", 1.3 M parameters"
    names = ["bsp", *arguments.ways] if arguments.ways else list(WAYS)
    ways = {name: way_of(name) for name in names}
    courses: dict[str, list[Course]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="p2pnode-async-rule-") as folder:
        corpus = Corpus(Path(folder))
        for seed in range(arguments.repetitions or SEEDS):
            for name in names:
                course = study(options, corpus, ways[name], seed, STEPS)
                courses[name].append(course)
                shown = " ".join(f"{loss:.3f}" for _, loss in course.curve)
                told = f"waited {course.waited:.3f}, {course.seconds[-1]:.1f} s"
                print(f"  seed {seed}, {name}: {shown}, {told}", file=sys.stderr, flush=True)
    series = [
        Series(
            f"loss of {name}{at}",
            "nats per byte",
            [course.curve[-1][1] for course in courses[name]],
            details={"curves": [course.curve for course in courses[name]]},
        )
        for name in names
    ]
    #: For each seed, when the first way had ended.
    ends = [min(course.seconds[-1] for course in of_seed) for of_seed in zip(*courses.values(), strict=True)]
    for name in names[1:]:
        pairs = list(zip(courses[name], courses["bsp"], ends, strict=True))
        ratios = [course.curve[-1][1] / of_bsp.curve[-1][1] for course, of_bsp, _ in pairs]
        at_once = [course.loss_at(end) / of_bsp.loss_at(end) for course, of_bsp, end in pairs]
        waited = [course.waited for course in courses[name]]
        series.append(Series(f"loss of {name} over bsp's{at}", "times", ratios, AIM if name.startswith("pssp") else ""))
        series.append(Series(f"loss of {name} over bsp's, after equal time{at}", "times", at_once))
        series.append(Series(f"time that {name} waits over the time it trains{at}", "", waited))
    return Outcome(
        "async_rule",
        f"bytes of CPython's reference, a third for each of {NODES} nodes, transformer of {options.layers} layers of "
        f"{options.width}, AdamW {options.learning_rate:g}, {STEPS} steps of {LOCAL_STEPS} optimiser steps with "
        f"batches of {options.batch_size} × {options.context} bytes per node, {LEAST_LOSSY} deltas, "
        f"simulated step times of nearly equal nodes; validation loss of the shared model",
        series,
    )
