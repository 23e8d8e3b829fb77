"""outer_rule: the swarm's default outer rule against the bare loop, on MNIST, at equal local steps per node.

One process and a virtual clock stand for the network: N trainers with the real models and optimisers, one authoritative
vector with the real owner's arithmetic (`training.shards.state`) and codec, and no barrier (asp). A node pulls, trains
`local_steps`, pushes what it gained since its pull, and pulls again; meanwhile others have pushed. Step times are those
of reference section 12: a log-normal speed per node, times Gamma(4, 1/4), plus 0.1.

Every node sees all the data, in an order of its own. The swarm is evaluated when N·k deltas are in, the bare loop after
k turns of `local_steps` optimiser steps, so that each node has trained as long as the bare loop.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch

from benchmarks.record import Outcome, Series
from benchmarks.virtual_worker import metrics_of
from p2pnode.training.codec_choice import LEAST_LOSSY
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.settings import ExchangeSettings, TrainingSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule, is_plain
from p2pnode.training.shards.state import ShardState
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder

CHECKPOINTS = (10, 20, 50, 100)
NODES = (1, 2, 4)
SEEDS = 3
#: As in the reference: small batches make many, small steps, where a poor outer rule shows.
BATCH_SIZE = 32
SPEED_SIGMA, STEP_SHAPE, OVERHEAD = 0.3, 4.0, 0.1
TASKS = {"mlp": "benchmarks.tasks:Mlp", "conv": "mnist"}

#: Accuracy in percent of the shared model at each checkpoint.
Curve = dict[int, float]


def completions(nodes: int, random: Random) -> Iterator[int]:
    """Which node completes a step next, without end, in the order of a virtual clock. Pure."""
    speeds = [random.lognormvariate(0.0, SPEED_SIGMA) for _ in range(nodes)]

    def duration(node: int) -> float:
        return speeds[node] * random.gammavariate(STEP_SHAPE, 1 / STEP_SHAPE) + OVERHEAD

    due = [(duration(node), node) for node in range(nodes)]
    heapq.heapify(due)
    while True:
        now, node = due[0]
        yield node
        heapq.heapreplace(due, (now + duration(node), node))


class VirtualNode:
    """A worker: its trainer, the vector as it last pulled it, and what the codec rounded off its deltas so far."""

    def __init__(self, runner: TaskRunner, vector: Vector) -> None:
        self.step = 0
        self._runner = runner
        self._base = vector.copy()
        self._delta = np.zeros_like(vector)
        self._residual = np.zeros_like(vector)

    def train(self, workers: int, local_steps: int) -> Vector:
        """One step from the base; the delta, `float32[total]`, is exact."""
        self.step += 1
        self._runner.use(self._base, self._delta)
        self._runner.begin_anew()
        self._runner.train(StepOrder(self.step, local_steps, workers, is_first=False))
        return self._delta

    def encoded(self, delta: Vector, codec: codecs.CodecName) -> Vector:
        """The delta as its owner gets it, with error feedback."""
        if codec == "float32":
            return delta.copy()
        rounded = np.empty_like(delta)
        codecs.decode(codecs.encode_with_feedback(delta, self._residual, codec), codec, rounded)
        return rounded

    def pull(self, value: Vector) -> None:
        self._base[:] = value

    def accuracy(self, value: Vector) -> float:
        """Of any vector, in percent."""
        return 100 * metrics_of(self._runner, value)["accuracy"]


class Study:
    """Runs bare loops and swarms from equal beginnings."""

    def __init__(
        self, network: str, data_dir: Path | None, device: str, settings: ExchangeSettings | None = None
    ) -> None:
        self._task = TASKS[network]
        self._data_dir = str(data_dir.resolve()) if data_dir else ""
        self._device = device
        self._local_steps = TrainingSettings().local_steps
        self._settings = settings or ExchangeSettings(codec=LEAST_LOSSY)

    def bare(self, seed: int) -> Curve:
        """One torch loop: each turn's delta is added as it is, which is the loop itself."""
        runner = self.runner(seed, 0)
        vector = initial(runner)
        node = VirtualNode(runner, vector)
        curve = {}
        for step in range(1, max(CHECKPOINTS) + 1):
            vector += node.train(1, self._local_steps)
            node.pull(vector)
            if step in CHECKPOINTS:
                curve[step] = node.accuracy(vector)
        return curve

    def swarm(self, nodes: int, seed: int, rule: Rule) -> Curve:
        """N asynchronous nodes and one authoritative vector."""
        runners = [self.runner(seed, index) for index in range(nodes)]
        state = ShardState(initial(runners[0]), runners[0].model_vector.layout.parameter_total)
        workers = [VirtualNode(runner, state.value) for runner in runners]
        curve: Curve = {}
        for count, index in enumerate(completions(nodes, Random(1000 * seed + nodes)), 1):
            node = workers[index]
            delta = node.encoded(node.train(nodes, self._local_steps), self._settings.codec)
            plain = is_plain(self._settings.codec)
            state.apply(DeltaId(bytes([index]) * 20, 1, node.step), 1 / nodes, delta, rule, plain=plain)
            node.pull(state.value)
            step, remainder = divmod(count, nodes)
            if not remainder and step in CHECKPOINTS:
                curve[step] = node.accuracy(state.value)
                if step == max(CHECKPOINTS):
                    return curve
        raise AssertionError("completions never end")

    def runner(self, seed: int, index: int) -> TaskRunner:
        """One node's trainer; all nodes of a seed begin with the same model."""
        task, spec = build_task(
            self._task,
            {"batch_size": BATCH_SIZE},
            data_dir=self._data_dir,
            seed=seed,
            node_seed=100 * seed + index + 1,
            device=self._device,
        )
        return TaskRunner(self._task, task, spec)


def initial(runner: TaskRunner) -> Vector:
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    runner.model_vector.read(vector)
    return vector


def differences(swarms: Sequence[Curve], bares: Sequence[Curve]) -> list[float]:
    """Per seed the swarm's accuracy minus the bare loop's, in points, where it is worst. Pure."""
    return [min(swarm[step] - bare[step] for step in bare) for swarm, bare in zip(swarms, bares, strict=True)]


def default_rule() -> Rule:
    settings = ExchangeSettings()
    return Rule(settings.outer_lr, settings.outer_momentum)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Figures of the default rule; with `--rule` tables of others on standard error as well."""
    torch.set_num_threads(1)  # two threads gain nothing on matrices this small, and one is repeatable
    study = Study(arguments.network, arguments.data_dir, arguments.device)
    seeds = range(arguments.repetitions or SEEDS)
    bares = [study.bare(seed) for seed in seeds]
    _show("bare loop", bares)
    rule = default_rule()
    series = [_series(study, nodes, rule, bares) for nodes in NODES]
    for outer_lr, momentum in arguments.rule:
        for nodes in NODES:
            _series(study, nodes, Rule(outer_lr, momentum), bares)
    network = "MLP 784-128-10" if arguments.network == "mlp" else "the network of the task mnist"
    conditions = (
        f"MNIST, {network}, AdamW 1e-3, batch {BATCH_SIZE}, {TrainingSettings().local_steps} local steps, asp, "
        f"outer rule {rule.outer_lr:g} / {rule.outer_momentum:g}, {LEAST_LOSSY} deltas, simulated "
        f"asynchronous step times, every node sees all data; per seed the worst of the steps "
        f"{', '.join(str(step) for step in CHECKPOINTS)}, all 10,000 test images"
    )
    return Outcome("outer_rule", conditions, series)


def _series(study: Study, nodes: int, rule: Rule, bares: Sequence[Curve]) -> Series:
    swarms = [study.swarm(nodes, seed, rule) for seed in range(len(bares))]
    _show(f"N = {nodes}, {rule.outer_lr:g} / {rule.outer_momentum:g}", swarms)
    return Series(
        f"accuracy of {nodes} node{'s' * (nodes > 1)} minus the bare loop's",
        "points",
        differences(swarms, bares),
        aim="≥ -1",
        details={"swarm": swarms, "bare": list(bares)},
    )


def _show(name: str, curves: Sequence[Curve]) -> None:
    cells = [
        f"{step}: {np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for step in CHECKPOINTS
        if (values := [curve[step] for curve in curves])
    ]
    print(f"  {name:<20} {'   '.join(cells)}", file=sys.stderr, flush=True)
