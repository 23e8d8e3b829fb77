"""accuracy: what slow lines cost in accuracy: sparse deltas, overlapped steps and pulled changes, beside the defaults.

One process and a virtual clock stand for the network. The models, optimisers, codecs with their error feedback, the
owner's arithmetic (`training.shards.state`) and its published value (`training.exchange.owner.published`) are the real
ones. A sparse delta takes along what those before it lacked (`StepExchange.prepare`), and at the end each node sends
what is left, as the last delta of a run does. With overlap a node trains on from its own weights while its delta is
under way for half a step; what it then pulls, plus the delta that this lacks, is the base of the step after the next.
Without overlap nothing takes time.

`--parameters 0` trains a perceptron on MNIST alone, `--parameters 3` the character transformer alone. `--ways` names
others of the ways, such as "sparse".
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from training.exchange.client.error_feedback import LAST_SPARSE_VALUES

from benchmarks.characters import Corpus
from benchmarks.outer_rule import BATCH_SIZE, OVERHEAD, SPEED_SIGMA, STEP_SHAPE, default_rule, initial
from benchmarks.record import NotMeasured, Outcome, Series
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.encoding.pull_codecs import WHOLE, pull_codec
from training.exchange.owner import published
from training.exchange.owner.published import ApproximatedState, Published
from training.exchange.owner.publishing import BYTES_PER_STEP
from training.exchange.terms import ZERO_TERM
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import is_plain
from training.shards.state import ShardState
from training.step_rules import CARRY, own_carry, pushed_weight
from training.tasks.mnist import Mnist
from training.tasks.text import TextOptions
from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner
from training.trainer_link.interface import StepOrder

SEEDS = 5
SETTINGS = ExchangeSettings()
#: Share of a step that a delta is under way with overlap.
UNDER_WAY = 0.5
#: 3.2 M parameters.
CHARACTERS = TextOptions(layers=4, width=256, heads=4, context=32, batch_size=4, learning_rate=1e-3, warmup=30)
CHARACTER_STEPS, CHARACTER_LOCAL_STEPS, CHARACTER_NODES = 60, 5, 3
DIGIT_STEPS, DIGIT_LOCAL_STEPS, DIGIT_NODES = 36, 30, 4


class Way(NamedTuple):
    """How deltas and values travel."""

    codec: CodecName
    pull: CodecName
    overlap: bool


def way_of(codec: CodecName, *, overlap: bool) -> Way:
    """With the pulls that the settings choose for these deltas."""
    return Way(codec, pull_codec(ExchangeSettings(codec=codec), codec), overlap)


#: `defaults` are those that the others are held against, whatever the settings' own defaults are.
WAYS: dict[str, Way] = {
    "defaults": Way("bfloat16", "bfloat16", overlap=False),
    "sparse + overlap + chain": way_of("sparse", overlap=True),
    "sparse": way_of("sparse", overlap=False),
    "overlap": Way("bfloat16", "bfloat16", overlap=True),
    "int8": way_of("int8", overlap=False),
    "int4": way_of("int4", overlap=False),
}
STANDARD = ("defaults", "sparse + overlap + chain")


@dataclass
class Worker:
    """A node: its trainer, the values it began its step with, and what its deltas still owe."""

    runner: TaskRunner
    base: Vector
    step: int = 0
    delta: Vector = field(init=False)
    residual: Vector = field(init=False)
    #: With overlap: what was pulled after the last delta had been added.
    pulled: Vector | None = None
    #: The published version that it has.
    version: int = 0

    def __post_init__(self) -> None:
        self.delta = np.zeros_like(self.base)
        self.residual = np.zeros_like(self.base)

    def train(self, nodes: int, local_steps: int) -> None:
        """One step."""
        self.step += 1
        self.runner.train(StepOrder(self.step, local_steps, nodes, is_first=False), self.base, self.delta)

    def take_residual(self) -> None:
        """As `ErrorFeedback.move_to`."""
        self.delta += np.float32(codecs.decay("sparse")) * self.residual
        self.residual[:] = 0.0


class Swarm:
    """One asynchronous run of several nodes."""

    def __init__(self, runners: list[TaskRunner], way: Way, seed: int, local_steps: int) -> None:
        first = initial(runners[0])
        self.state = ShardState(first.copy(), runners[0].model_vector.layout.parameter_total)
        self.pushed_bytes = self.pulled_bytes = 0
        self._way = way
        self._rule = default_rule()
        self._weight = pushed_weight(SETTINGS, 1 / len(runners), way.codec, synchronous=False)
        self._local_steps = local_steps
        self._published: Published | None = None
        if way.pull not in WHOLE:
            self._published = published.begin(b"accuracy", first, ApproximatedState(ZERO_TERM, 0))
            first = self._published.value
        self._workers = [Worker(runner, first.copy()) for runner in runners]
        self._random = Random(1000 * seed + len(runners))
        self._speeds = [self._random.lognormvariate(0.0, SPEED_SIGMA) for _ in runners]

    def run(self) -> Iterator[int]:
        """Yields the number of deltas that have been added, after each, without end."""
        nodes = len(self._workers)
        events = [(self._seconds(node), 0, node) for node in range(nodes)]
        heapq.heapify(events)
        sent: list[tuple[int, Vector, float] | None] = [None] * nodes
        added = 0
        while True:
            now, kind, node = heapq.heappop(events)
            worker = self._workers[node]
            if kind == 0:
                worker.train(nodes, self._local_steps)
                if is_plain(self._way.codec):
                    worker.take_residual()
                ended_at = worker.base + worker.delta
                data = self._encode(worker)
                took_s = self._seconds(node)
                if self._way.overlap:
                    if worker.pulled is not None:
                        ended_at = worker.pulled + np.float32(CARRY) * worker.delta
                    worker.base = ended_at
                    heapq.heappush(events, (now + UNDER_WAY * took_s, 1, node))
                    sent[node] = (worker.step, data, 0.0)
                    heapq.heappush(events, (now + took_s, 0, node))
                    continue
                self._add(node, worker.step, data)
                worker.base = self._pull(worker) + np.float32(self._carry()) * worker.delta
                heapq.heappush(events, (now + took_s, 0, node))
            else:
                item = sent[node]
                assert item is not None
                self._add(node, item[0], item[1])
                worker.pulled = self._pull(worker).copy()
            added += 1
            yield added

    def _carry(self) -> float:
        """What a step begins with of the delta before it, without overlap. The ways with other codecs have none, as the
        defaults that they are held against."""
        if not is_plain(self._way.codec):
            return 0.0
        return own_carry(SETTINGS, self._weight, together=False)

    def flush(self) -> None:
        """Every node's last delta, which leaves little of the residual out; here without training before it."""
        for node, worker in enumerate(self._workers):
            worker.delta[:] = 0.0
            worker.take_residual()
            encoded = codecs.encode_with_feedback(worker.delta, worker.residual, self._way.codec, LAST_SPARSE_VALUES)
            self.pushed_bytes += len(encoded)
            self._add(node, worker.step + 1, codecs.decoded(encoded, self._way.codec, worker.delta.size))

    def _seconds(self, node: int) -> float:
        return self._speeds[node] * self._random.gammavariate(STEP_SHAPE, 1 / STEP_SHAPE) + OVERHEAD

    def _encode(self, worker: Worker) -> Vector:
        """A delta as its owner gets it."""
        encoded = codecs.encode_with_feedback(worker.delta, worker.residual, self._way.codec)
        self.pushed_bytes += len(encoded)
        return codecs.decoded(encoded, self._way.codec, worker.delta.size)

    def _add(self, node: int, step: int, delta: Vector) -> None:
        identity = DeltaId(bytes([node]) * 20, 1, step)
        self.state.apply(identity, self._weight, delta, self._rule, plain=is_plain(self._way.codec))

    def _pull(self, worker: Worker) -> Vector:
        """What a node gets: the value, rounded, or the published value, which ticks as often as an owner's does."""
        if self._published is None:
            encoded = codecs.encode(self.state.value, self._way.pull)
            self.pulled_bytes += len(encoded)
            return codecs.decoded(encoded, self._way.pull, self.state.value.size)
        share = min(1.0, self._published.last_bytes_per_value / BYTES_PER_STEP)
        if worker.version == self._published.version:
            share /= 2
        # As many additions as all nodes make in that share of a step.
        if self.state.version - self._published.source.version >= share * len(self._workers):
            source = ApproximatedState(ZERO_TERM, self.state.version)
            self._published = published.tick(self._published, self.state.value, source, self._way.pull)
        for change in self._published.since(worker.version) or ():
            self.pulled_bytes += len(change.payload)
        worker.version = self._published.version
        return self._published.value


class Study(NamedTuple):
    """One data set and its division among the nodes; `metric` of the shared vector is shown and compared."""

    name: str
    metric: str
    nodes: int
    steps: int
    local_steps: int
    runners: list[TaskRunner]


def digits(data_dir: Path | None, seed: int, *, disjoint: bool) -> Study:
    """Four nodes; disjoint: of the ten classes each has its own two or three."""
    runners = []
    for node in range(DIGIT_NODES):
        options = {"batch_size": BATCH_SIZE} | ({} if disjoint else {"part": node, "parts": DIGIT_NODES})
        task, spec = build_task(
            "benchmarks.tasks:Mlp",
            options,
            data_dir=str(data_dir.resolve()) if data_dir else "",
            seed=seed,
            node_seed=100 * seed + node + 1,
            device="cpu",
        )
        assert isinstance(task, Mnist)
        if disjoint:
            images, labels = task._train
            own = labels % DIGIT_NODES == node
            task._train = images[own], labels[own]
        runners.append(TaskRunner("mlp", task, spec))
    return Study("MNIST", "accuracy", DIGIT_NODES, DIGIT_STEPS, DIGIT_LOCAL_STEPS, runners)


def characters(folder: Path, seed: int, *, disjoint: bool) -> Study:
    """Three nodes; disjoint: each has its own third of the text."""
    corpus = Corpus(folder)
    whole = folder / "whole.txt"
    whole.write_bytes("\n".join(topics[name] for name in sorted(topics)).encode())
    runners = []
    for node in range(CHARACTER_NODES):
        task, spec = build_task(
            "text",
            msgspec.to_builtins(CHARACTERS),
            data_dir=str(corpus.files[node] if disjoint else whole),
            seed=seed,
            node_seed=100 * seed + node + 1,
            device="cpu",
        )
        runners.append(TaskRunner("text", task, spec))
    return Study("characters", "loss", CHARACTER_NODES, CHARACTER_STEPS, CHARACTER_LOCAL_STEPS, runners)


def curve_of(study: Study, way: Way, seed: int) -> tuple[list[tuple[int, float]], Swarm]:
    """(step, metric of the shared vector), six points."""
    swarm = Swarm(study.runners, way, seed, study.local_steps)
    points = [study.steps * part // 6 for part in range(1, 7)]
    curve: list[tuple[int, float]] = []
    for added in swarm.run():
        step, rest = divmod(added, study.nodes)
        if not rest and step in points:
            evaluation = study.runners[0].evaluate(step, swarm.state.value)
            assert evaluation is not None
            curve.append((step, evaluation.metrics[study.metric]))
            if step == study.steps and is_plain(way.codec):
                swarm.flush()
                evaluation = study.runners[0].evaluate(step, swarm.state.value)
                assert evaluation is not None
                curve[-1] = (step, evaluation.metrics[study.metric])
            if step == study.steps:
                break
    return curve, swarm


def measure(arguments: argparse.Namespace) -> Outcome:
    """Per data set and division the final metric of each way beside that of the defaults."""
    torch.set_num_threads(1)
    unknown = [name for name in arguments.ways if name not in WAYS]
    if unknown:
        raise NotMeasured(f"--ways {unknown[0]}: there are {', '.join(WAYS)}")
    names = ["defaults", *(name for name in arguments.ways or STANDARD if name != "defaults")]
    sizes = arguments.parameters or [0.0, 3.0]
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="p2pnode-accuracy-") as folder:
        for size in sizes:
            curves = _curves(arguments, Path(folder), names, is_text=size > 0)
            series += _compared(names, curves, is_text=size > 0)
    conditions = (
        f"asp, deltas weigh 1 / nodes, simulated asynchronous step times; MNIST: {DIGIT_NODES} nodes, MLP 784-128-10, "
        f"AdamW 1e-3, batch {BATCH_SIZE}, {DIGIT_STEPS} steps of {DIGIT_LOCAL_STEPS}, disjoint: two or "
        f"three classes per node; characters: {CHARACTER_NODES} nodes, transformer of {CHARACTERS.layers} layers of "
        f"{CHARACTERS.width}, AdamW {CHARACTERS.learning_rate:g}, batches of {CHARACTERS.batch_size} × "
        f"{CHARACTERS.context} bytes, {CHARACTER_STEPS} steps of {CHARACTER_LOCAL_STEPS}, disjoint: a third of the "
        f"text per node; defaults: bfloat16, outer rule of the settings"
    )
    return Outcome("accuracy", conditions, series)


#: By division of the data and way, one curve per seed.
Curves = dict[tuple[str, str], list[list[tuple[int, float]]]]
DIVISIONS = ("mixed", "disjoint")


def _curves(arguments: argparse.Namespace, folder: Path, names: list[str], *, is_text: bool) -> Curves:
    curves: Curves = {(data, name): [] for data in DIVISIONS for name in names}
    for seed in range(arguments.repetitions or SEEDS):
        for data, name in curves:
            if is_text:
                study = characters(folder, seed, disjoint=data == "disjoint")
            else:
                study = digits(arguments.data_dir, seed, disjoint=data == "disjoint")
            curve, swarm = curve_of(study, WAYS[name], seed)
            curves[data, name].append(curve)
            deltas = study.nodes * study.steps * swarm.state.value.size
            print(
                f"  {study.name}, {data}, seed {seed}, {name}: {' '.join(f'{value:.4f}' for _, value in curve)}; "
                f"pushed {swarm.pushed_bytes / deltas:.3f}, pulled {swarm.pulled_bytes / deltas:.3f} bytes per value",
                file=sys.stderr,
                flush=True,
            )
    return curves


def _compared(names: list[str], curves: Curves, *, is_text: bool) -> list[Series]:
    """The last values of each way, and those beside the defaults' of the same seed."""
    found = []
    for (data, name), some in curves.items():
        label = f"{'loss' if is_text else 'accuracy'} of {name}, {data}"
        unit, factor = ("nats per byte", 1) if is_text else ("percent", 100)
        found.append(Series(label, unit, [factor * curve[-1][1] for curve in some], details={"curves": some}))
    for data in DIVISIONS:
        for name in names[1:]:
            pairs = [
                (one[-1][1], other[-1][1])
                for one, other in zip(curves[data, name], curves[data, "defaults"], strict=True)
            ]
            if is_text:
                aim = "≤ 1.005" if data == "mixed" else ""
                label = f"loss of {name} over that of the defaults, {data}"
                found.append(Series(label, "times", [one / other for one, other in pairs], aim))
            else:
                aim = "≥ -0.5" if data == "mixed" else "≥ 0"
                label = f"accuracy of {name} minus that of the defaults, {data}"
                found.append(Series(label, "points", [100 * (one - other) for one, other in pairs], aim))
    return found
