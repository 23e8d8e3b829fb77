"""accuracy: what slow lines cost in accuracy: sparse deltas and pulled changes, beside the defaults.

One process and a virtual clock stand for the network. The models, optimisers, codecs, the owner's arithmetic
(`training.shards.state`) and its published value (`training.exchange.owner.published`) are the real ones. What a delta
lacks stays progress of its node, and values enter while it trains (`benchmarks.virtual_worker`). The last delta of a
node leaves little out, as that of a run does.

`--parameters 0` trains a perceptron on MNIST alone, `--parameters 3` the character transformer alone. `--ways` names
others of the ways, such as "sparse".
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import NamedTuple

import msgspec
import torch

from benchmarks.characters import Corpus
from benchmarks.outer_rule import BATCH_SIZE, OVERHEAD, SPEED_SIGMA, STEP_SHAPE, default_rule, initial
from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.virtual_worker import ADDED, LATE, VirtualWorker, metrics_of
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import CodecName, Vector
from p2pnode.training.encoding.pull_codecs import WHOLE, pull_codec
from p2pnode.training.exchange.client.push import LAST_SPARSE_VALUES
from p2pnode.training.exchange.owner import published
from p2pnode.training.exchange.owner.published import ApproximatedState, Published
from p2pnode.training.exchange.owner.publishing import BYTES_PER_STEP
from p2pnode.training.exchange.terms import ZERO_TERM
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.shards.state import ShardState
from p2pnode.training.step_rules import pushed_weight
from p2pnode.training.tasks.mnist import Mnist
from p2pnode.training.tasks.text import TextOptions
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner

SEEDS = 5
SETTINGS = ExchangeSettings()
#: 3.2 M parameters.
CHARACTERS = TextOptions(layers=4, width=256, heads=4, context=32, batch_size=4, learning_rate=1e-3, warmup=30)
CHARACTER_STEPS, CHARACTER_LOCAL_STEPS, CHARACTER_NODES = 60, 5, 3
DIGIT_STEPS, DIGIT_LOCAL_STEPS, DIGIT_NODES = 36, 30, 4


class Way(NamedTuple):
    """How deltas and values travel."""

    codec: CodecName
    pull: CodecName


def way_of(codec: CodecName) -> Way:
    """With the pulls that the settings choose for these deltas."""
    return Way(codec, pull_codec(ExchangeSettings(codec=codec), codec))


#: `defaults` are those that the others are held against, whatever the settings' own defaults are.
WAYS: dict[str, Way] = {
    "defaults": Way("bfloat16", "bfloat16"),
    "sparse": way_of("sparse"),
    "int8": way_of("int8"),
    "int4": way_of("int4"),
}
STANDARD = ("defaults", "sparse")


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
        self._workers = [VirtualWorker(runner, first) for runner in runners]
        #: The published version that each has.
        self._versions = [0] * len(runners)
        self._random = Random(1000 * seed + len(runners))
        self._speeds = [self._random.lognormvariate(0.0, SPEED_SIGMA) for _ in runners]

    def run(self, steps: int) -> Iterator[int]:
        """Train every node for so many steps; yields the number of deltas that have been added, after each."""
        nodes = len(self._workers)
        before = round(LATE * self._local_steps)
        #: (when, node, ends): its turn ends, or its last delta is added.
        due = [(self._seconds(node), node, True) for node in range(nodes)]
        heapq.heapify(due)
        added = 0
        while due:
            now, node, ends = heapq.heappop(due)
            worker = self._workers[node]
            if not ends:
                self._add(node, worker)
                worker.pulled = self._pull(node)
                added += 1
                yield added
                continue
            worker.train(nodes, self._local_steps, before)
            is_last = worker.step == steps
            self.pushed_bytes += worker.encode(
                self._way.codec, LAST_SPARSE_VALUES if is_last else SETTINGS.sparse_values
            )
            took_s = self._seconds(node)
            heapq.heappush(due, (now + ADDED * LATE * took_s, node, False))
            if not is_last:
                heapq.heappush(due, (now + took_s, node, True))

    def _seconds(self, node: int) -> float:
        return self._speeds[node] * self._random.gammavariate(STEP_SHAPE, 1 / STEP_SHAPE) + OVERHEAD

    def _add(self, node: int, worker: VirtualWorker) -> None:
        identity = DeltaId(bytes([node]) * 20, 1, worker.step)
        self.state.apply(identity, self._weight, worker.delta.copy(), self._rule, plain=is_plain(self._way.codec))

    def _pull(self, node: int) -> Vector:
        """What a node gets: the value, rounded, or the published value, which ticks as often as an owner's does."""
        if self._published is None:
            encoded = codecs.encode(self.state.value, self._way.pull)
            self.pulled_bytes += len(encoded)
            return codecs.decoded(encoded, self._way.pull, self.state.value.size)
        share = min(1.0, self._published.last_bytes_per_value / BYTES_PER_STEP)
        if self._versions[node] == self._published.version:
            share /= 2
        # As many additions as all nodes make in that share of a step.
        if self.state.version - self._published.source.version >= share * len(self._workers):
            source = ApproximatedState(ZERO_TERM, self.state.version)
            self._published = published.tick(self._published, self.state.value, source, self._way.pull)
        for change in self._published.since(self._versions[node]) or ():
            self.pulled_bytes += len(change.payload)
        self._versions[node] = self._published.version
        return self._published.value


class Study(NamedTuple):
    """One data set and its division among the nodes; `metric` of the shared vector is shown and compared. The first
    runner evaluates, each other one is a node."""

    name: str
    metric: str
    nodes: int
    steps: int
    local_steps: int
    runners: list[TaskRunner]


def digits(data_dir: Path | None, seed: int, *, disjoint: bool) -> Study:
    """Four nodes; disjoint: of the ten classes each has its own two or three."""
    runners = []
    for node in (0, *range(DIGIT_NODES)):
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
    for node in (0, *range(CHARACTER_NODES)):
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
    evaluator, *runners = study.runners
    swarm = Swarm(runners, way, seed, study.local_steps)
    points = [study.steps * part // 6 for part in range(1, 7)]
    curve: list[tuple[int, float]] = []
    for added in swarm.run(study.steps):
        step, rest = divmod(added, study.nodes)
        if not rest and step in points:
            curve.append((step, metrics_of(evaluator, swarm.state.value)[study.metric]))
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
