"""async_rule: barriers and outer rules on the character transformer, in one process with a virtual clock.

Three nodes, each with a third of the text of `benchmarks.characters`, train with the real models and optimisers. One
authoritative vector has the owner's arithmetic (`training.shards.state`) and the codec with its error feedback, and the
barriers are the daemon's (`training.barriers.predicates`). Every run repeats to the bit, so two rules are compared on
equal seeds.

A way is a barrier, a rule and options: `--ways "pssp 0.7/0.5"`, `--ways "asp 1/0 carry=0.33"`.

* `carry=c`: `exchange.carry`. A node begins its turn with `v + c·(1 − 1/N)·d`, v the pulled value, d its last delta.
* `correct=b`: `exchange.correct`. It pulls before it pushes too, and pushes `d − b·(v − base)`, without b times what
  the others have moved.
* `grace=g`: `barrier.grace`, with the credit of `training.barriers.grace`. A node whose barrier passes waits g of its
  turn for those that train the same one.
* `overlap=a`: it begins turn t + 1 when turn t ends; what it pulls after the push of t is the base of turn t + 2, with
  `a` times the delta of t + 1 added.

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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from training.barriers.grace import GraceCredit, is_nearly_as_fast, share_abreast

from benchmarks.characters import LOCAL_STEPS, NODES, OPTIONS, STEPS, Corpus
from benchmarks.outer_rule import initial
from benchmarks.record import NotMeasured, Outcome, Series
from training.barriers.predicates import Barrier, is_abreast, make_barrier, trains_same_step
from training.encoding import codecs
from training.encoding.codecs import Vector
from training.exchange.codec_choice import LEAST_LOSSY
from training.settings import BarrierSettings, ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState
from training.step_rules import base_of, correct, own_carry
from training.tasks.text import TextOptions
from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner
from training.trainer_link.interface import StepOrder

SEEDS = 5
AIM = "≤ 1.02"
#: Nodes of nearly equal speed, as processes that share a machine: that of a node is log-normal, each turn takes up to
#: some tenths longer.
SPEED_SIGMA, TURN_SIGMA = 0.05, 0.15
#: With `--parameters 0.1`: for a search.
SMALL = TextOptions(layers=2, width=64, heads=4, context=32, batch_size=8, learning_rate=2e-3, warmup=100)
WAYS = ("bsp", "pssp", "pssp grace=0")
#: In the place of a node: one has waited long enough.
GRACE_ENDS = -1
OPTION_NAMES = ("carry", "correct", "overlap", "grace")
SCENE_NAMES = ("slow", "shape")
#: A node's step time is the median of so many turns, as in the daemon (`training.step_loop`).
RECENT_TURNS = 20


class Way(NamedTuple):
    """A barrier, a rule, and what of its last delta a node keeps; see the module. `carry` is `exchange.carry`."""

    barrier: Barrier
    rule: Rule
    carry: float
    correct: float = 0.0
    overlap: float | None = None
    grace: float = 0.0
    slow: float = 1.0
    shape: float = 0.0


def way_of(text: str) -> Way:
    """`"pssp 1/0 carry=0.33"`; rule and carry are the defaults unless given. Raises `NotMeasured`. Pure."""
    words, usual = text.split(), ExchangeSettings()
    try:
        settings = msgspec.convert({"method": words[0]}, BarrierSettings)
        rule = Rule(usual.outer_lr, usual.outer_momentum)
        options: dict[str, float] = {}
        for word in words[1:]:
            if "/" in word:
                rate, momentum = map(float, word.split("/"))
                rule = Rule(rate, momentum)
            else:
                name, value = word.split("=")
                names = OPTION_NAMES + SCENE_NAMES
                options[names[names.index(name)]] = float(value)
    except (ValueError, IndexError, msgspec.ValidationError) as error:
        raise NotMeasured(f'--ways "{text}" is no barrier with a rule and options ({error})') from error
    if settings.method == "bsp" and not options.keys() <= set(SCENE_NAMES):
        raise NotMeasured(f'--ways "{text}": under bsp all nodes begin a step with the same values')
    barrier = make_barrier(settings)
    has_grace = barrier.samples and not barrier.synchronous and "overlap" not in options
    grace = settings.grace if has_grace else 0.0
    return Way(barrier, rule, **({"carry": usual.carry, "grace": grace} | options))


@dataclass
class Worker:
    """A node: its trainer, the values it began its turn with, and what the codec rounded off its deltas so far."""

    runner: TaskRunner
    base: Vector
    step: int = 0
    delta: Vector = field(init=False)
    residual: Vector = field(init=False)
    #: With `overlap`: what was pulled after the last push.
    pulled: Vector | None = None
    #: Of its last turn, in virtual seconds.
    ended_at: float = 0.0
    seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TURNS))
    credit: GraceCredit = field(default_factory=GraceCredit)
    #: When its barrier passed, and until when it waits for others then; None: the barrier has not passed.
    passed_at: float = 0.0
    patient_until: float | None = None
    is_abreast: bool = False

    def __post_init__(self) -> None:
        self.delta = np.zeros_like(self.base)
        self.residual = np.zeros_like(self.base)

    @property
    def step_seconds(self) -> float:
        """What it announces."""
        return median(self.recent) if self.recent else 0.0

    def train(self) -> None:
        self.step += 1
        self.runner.train(StepOrder(self.step, LOCAL_STEPS, NODES, is_first=False), self.base, self.delta)

    def sent(self, codec: codecs.CodecName) -> Vector:
        """The delta as its owner gets it, with error feedback."""
        if codec == "float32":
            return self.delta.copy()
        rounded = np.empty_like(self.delta)
        codecs.decode(codecs.encode_with_feedback(self.delta, self.residual, codec), codec, rounded)
        return rounded


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


class Swarm:
    """One run: events of a virtual clock, in which a node ends a turn or passes its barrier."""

    def __init__(self, runners: list[TaskRunner], way: Way, seed: int, codec: codecs.CodecName) -> None:
        self._settings = ExchangeSettings(carry=way.carry, codec=codec)
        first = initial(runners[0])
        self.state = ShardState(first.copy(), runners[0].model_vector.layout.parameter_total)
        self._way = way
        self._workers = [Worker(runner, first.copy()) for runner in runners]
        self._seconds = turn_seconds(len(runners), Random(1000 * seed + len(runners)), way.slow, way.shape)
        self._codec = codec
        self._waiting: list[int] = []
        self._ends: list[tuple[float, int]] = []
        #: Virtual seconds in which all nodes together trained, and waited.
        self.trained_s = self.waited_s = 0.0
        #: Turns of all nodes that began together with the others, by `barrier.grace`.
        self.abreast = 0
        self.now = 0.0

    def run(self, steps: int) -> Iterator[int]:
        """Train every node for so many steps; yields the number of deltas that have been pushed, after each."""
        for node in range(len(self._workers)):
            self._begin(0.0, node)
        pushed = 0
        while self._ends:
            now, node = heapq.heappop(self._ends)
            self.now = now
            if node == GRACE_ENDS:
                self._pass_barriers(now, steps)
                continue
            worker = self._workers[node]
            worker.ended_at = now
            worker.recent.append(worker.seconds)
            worker.train()
            self._push(node)
            pushed += 1
            yield pushed
            if self._way.overlap is not None:
                self._load_overlapped(worker, self._way.overlap)
            self._waiting.append(node)
            self._pass_barriers(now, steps)
        for step in sorted(self.state.pending):
            self.state.fold(step, self._way.rule)

    def _push(self, node: int) -> None:
        worker, way = self._workers[node], self._way
        if way.correct:
            correct(worker.delta, worker.base.copy(), self.state.value, way.correct)
        identity, weight = DeltaId(bytes([node]) * 20, 1, worker.step), 1 / len(self._workers)
        if way.barrier.synchronous:
            self.state.add_pending(identity, weight, worker.sent(self._codec))
        else:
            self.state.apply(identity, weight, worker.sent(self._codec), way.rule)

    def _pass_barriers(self, now: float, steps: int) -> None:
        """Let every node go on whose barrier passes; one that has finished counts for none."""
        for node in list(self._waiting):
            worker = self._workers[node]
            others = [other for other in self._workers if other is not worker and other.step < steps]
            if worker.patient_until is None:
                if not self._way.barrier.passes(worker.step, [other.step for other in others]):
                    continue
                worker.patient_until = self._has_passed(worker, now)
            if now < worker.patient_until and any(_is_awaited(worker, other) for other in others):
                continue
            self._waiting.remove(node)
            self._note_grace(worker, now, [other.step for other in others])
            self.waited_s += now - worker.ended_at
            if self._way.barrier.synchronous:
                self.state.fold(worker.step, self._way.rule)
            if worker.step < steps:
                self._begin(now, node)

    def _has_passed(self, worker: Worker, now: float) -> float:
        """Its barrier has passed: returns until when it waits for those that train the same turn."""
        worker.passed_at = now
        if not self._way.grace or not worker.credit.earn():
            return now
        ends = now + self._way.grace * worker.step_seconds
        heapq.heappush(self._ends, (ends, GRACE_ENDS))
        return ends

    def _note_grace(self, worker: Worker, now: float, others: list[int]) -> None:
        """As `BarrierWaiter` does after its grace."""
        had_grace = worker.patient_until is not None and worker.patient_until > worker.passed_at
        worker.patient_until = None
        worker.is_abreast = had_grace and is_abreast(worker.step, others)
        self.abreast += worker.is_abreast
        if had_grace:
            worker.credit.pay((now - worker.passed_at) / worker.step_seconds, share_abreast(worker.step, others))

    def _begin(self, now: float, node: int) -> None:
        worker, way = self._workers[node], self._way
        if way.overlap is None:
            weight = 1 / len(self._workers)
            together = way.barrier.synchronous or worker.is_abreast
            share = own_carry(self._settings, weight, together=together)
            worker.base = base_of(self.state.value, worker.delta, share if worker.step else 0.0)
        worker.seconds = self._seconds(node)
        self.trained_s += worker.seconds
        heapq.heappush(self._ends, (now + worker.seconds, node))

    def _load_overlapped(self, worker: Worker, carry: float) -> None:
        """The turn that begins now: what was pulled after the push before this one, and the delta that it lacks."""
        before, worker.pulled = worker.pulled, self.state.value.copy()
        ended_at = worker.base + worker.delta
        worker.base = ended_at if before is None else before + np.float32(carry) * worker.delta


def _is_awaited(worker: Worker, other: Worker) -> bool:
    return trains_same_step(worker.step, other.step) and is_nearly_as_fast(other.step_seconds, worker.step_seconds)


class Course(NamedTuple):
    """One run: (step, validation loss of the shared vector) and when that was, in virtual seconds; the time waited over
    that trained; and the share of the turns that began together."""

    curve: list[tuple[int, float]]
    seconds: list[float]
    waited: float
    abreast: float

    def loss_at(self, seconds: float) -> float:
        """Between two looks it falls evenly."""
        return float(np.interp(seconds, self.seconds, [loss for _, loss in self.curve]))


def study(options: TextOptions, corpus: Corpus, way: Way, seed: int, steps: int) -> Course:
    runners = [_runner(options, corpus.files[node], seed, node) for node in range(NODES)]
    swarm = Swarm(runners, way, seed, LEAST_LOSSY)
    curve, seconds = [], []
    for pushed in swarm.run(steps):
        step, others = divmod(pushed, NODES)
        if not others and step % 10 == 0 and step < steps:
            curve.append((step, _loss(runners[0], swarm.state.value)))
            seconds.append(swarm.now)
    curve.append((steps, _loss(runners[0], swarm.state.value)))
    turns = NODES * steps
    return Course(curve, [*seconds, swarm.now], swarm.waited_s / swarm.trained_s, swarm.abreast / turns)


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


def _loss(runner: TaskRunner, value: Vector) -> float:
    evaluation = runner.evaluate(0, value)
    assert evaluation is not None
    return evaluation.metrics["loss"]


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
                told = f"waited {course.waited:.3f}, abreast {course.abreast:.2f}, {course.seconds[-1]:.1f} s"
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
        series.append(
            Series(f"turns that {name} begins together{at}", "", [course.abreast for course in courses[name]])
        )
    return Outcome(
        "async_rule",
        f"bytes of CPython's reference, a third for each of {NODES} nodes, transformer of {options.layers} layers of "
        f"{options.width}, AdamW {options.learning_rate:g}, {STEPS} steps of {LOCAL_STEPS} optimiser steps with "
        f"batches of {options.batch_size} × {options.context} bytes per node, {LEAST_LOSSY} deltas, "
        f"simulated step times of nearly equal nodes; validation loss of the shared model",
        series,
    )
