"""barriers: time to accuracy on MNIST among six nodes of which one is four times slower, by barrier.

One process and a virtual clock stand for the network; real models and optimisers train (`benchmarks.outer_rule`). The
owner's arithmetic is `training.shards.state`, the barrier is `training.barriers.predicates`. A waiting node draws a
fresh sample at every re-poll, and under bsp no node gets a delta before the barrier of its step. An exchange takes no
time: values enter where a step begins. Step times are Gamma(4, 1/4), one second on average; so every figure is in
virtual seconds and does not depend on this machine.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Iterator, Sequence
from random import Random

import torch

from benchmarks.outer_rule import BATCH_SIZE, Study, VirtualNode, default_rule, initial
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.barriers.predicates import Barrier, make_barrier, resample_after
from p2pnode.training.codec_choice import LEAST_LOSSY
from p2pnode.training.settings import BarrierMethod, BarrierSettings, TrainingSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.state import ShardState

NODES = 6
SLOWER = 4.0
STEP_SHAPE = 4.0
SEEDS = 5
METHODS: tuple[BarrierMethod, ...] = ("asp", "bsp", "ssp", "pbsp", "pssp")
SAMPLE = 2
#: Percent of the test images, above what the first steps reach and below where the curve is flat.
TARGET = 92.0
LOOK_S = 1.0
LONGEST_S = 400.0
AIM = "≥ 1.5"


def measure(arguments: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    study = Study("mlp", arguments.data_dir, arguments.device)
    seeds = range(arguments.repetitions or SEEDS)
    times: dict[str, list[float]] = {}
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for name in METHODS:
        curves[name] = [_curve(study, settings_of(name), seed) for seed in seeds]
        times[name] = [curve[-1][0] for curve in curves[name]]
        print(f"  {name}: {times[name]} s", file=sys.stderr, flush=True)
    series = [
        Series(f"virtual seconds to {TARGET:g} %, {name}", "s", times[name], details={"curves": curves[name]})
        for name in METHODS
    ]
    for name in METHODS:
        if name != "bsp":
            sooner = [theirs / ours for theirs, ours in zip(times["bsp"], times[name], strict=True)]
            series.append(Series(f"{name} sooner than bsp", "times", sooner, AIM if name == "pssp" else ""))
    rule = default_rule()
    return Outcome(
        "barriers",
        f"MNIST, MLP 784-128-10, AdamW 1e-3, batch {BATCH_SIZE}, {TrainingSettings().local_steps} local steps, "
        f"{NODES} nodes of which one is {SLOWER:g} times slower, steps of Gamma({STEP_SHAPE:g}, 1/{STEP_SHAPE:g}) "
        f"virtual seconds, β = {SAMPLE} for pbsp and pssp, staleness {BarrierSettings().staleness}, outer rule "
        f"{rule.outer_lr:g} / {rule.outer_momentum:g}, {LEAST_LOSSY} deltas; every node sees all data, "
        f"all 10,000 test images every {LOOK_S:g} virtual seconds",
        series,
    )


def settings_of(method: BarrierMethod) -> BarrierSettings:
    return BarrierSettings(method=method, sample=SAMPLE)


def durations(seed: int) -> list[Iterator[float]]:
    """Seconds of the steps of each node, the last one's four times as long; the same for every barrier."""

    def draw(node: int) -> Iterator[float]:
        random = Random(f"{seed}/{node}")
        factor = SLOWER if node == NODES - 1 else 1.0
        while True:
            yield factor * random.gammavariate(STEP_SHAPE, 1 / STEP_SHAPE)

    return [draw(node) for node in range(NODES)]


class Race:
    """Who completes a step and who passes a barrier, in the order of a virtual clock. Trains nothing."""

    def __init__(self, barrier: Barrier, settings: BarrierSettings, seed: int) -> None:
        self.steps = [0] * NODES
        self._barrier = barrier
        self._sample = settings.sample
        self._pause_s = resample_after(settings.resample_s, 1.0)
        self._random = Random(f"{seed}/samples")
        self._durations = durations(seed)
        #: (when, node, completed): a step is completed, or a barrier is looked at again.
        self._due: list[tuple[float, int, bool]] = []
        for node in range(NODES):
            self._begin(0.0, node)

    def events(self) -> Iterator[tuple[float, int, bool]]:
        """(when, node, completed): first that its step is done, later that its barrier has passed."""
        while True:
            now_s, node, completed = heapq.heappop(self._due)
            if completed:
                self.steps[node] += 1
                yield now_s, node, True
            if self._passes(node):
                yield now_s, node, False
                self._begin(now_s, node)
            else:
                heapq.heappush(self._due, (now_s + self._pause_s, node, False))

    def _begin(self, now_s: float, node: int) -> None:
        heapq.heappush(self._due, (now_s + next(self._durations[node]), node, True))

    def _passes(self, node: int) -> bool:
        others = [step for other, step in enumerate(self.steps) if other != node]
        seen = others if self._barrier.complete else self._random.sample(others, self._sample)
        return not self._barrier.samples or self._barrier.passes(self.steps[node], seen)


def _curve(study: Study, settings: BarrierSettings, seed: int) -> list[tuple[float, float]]:
    """(virtual seconds, percent) until the target is reached."""
    barrier, rule = make_barrier(settings), default_rule()
    runners = [study.runner(seed, index) for index in range(NODES)]
    state = ShardState(initial(runners[0]), runners[0].model_vector.layout.parameter_total)
    workers = [VirtualNode(runner, state.value) for runner in runners]
    curve: list[tuple[float, float]] = []
    look_s = LOOK_S
    race = Race(barrier, settings, seed)
    for now_s, index, completed in race.events():
        while look_s <= now_s:
            curve.append((look_s, round(workers[0].accuracy(state.value), 2)))
            if curve[-1][1] >= TARGET:
                return curve
            look_s += LOOK_S
        if now_s > LONGEST_S:
            raise NotMeasured(f"{settings.method} did not reach {TARGET:g} % within {LONGEST_S:g} virtual seconds")
        node = workers[index]
        if completed:
            delta = node.encoded(node.train(NODES, TrainingSettings().local_steps), LEAST_LOSSY)
            identity = DeltaId(bytes([index]) * 20, 1, node.step)
            if barrier.synchronous:
                state.add_pending(identity, 1 / NODES, delta)
            else:
                state.apply(identity, 1 / NODES, delta, rule)
        else:
            if barrier.synchronous:
                state.fold(node.step, rule)
            node.pull(state.value)
    raise AssertionError("a race never ends")


def median_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The median accuracy at each look that every curve has. Pure."""
    shortest = min(len(curve) for curve in curves)
    return [(curves[0][look][0], statistics.median(curve[look][1] for curve in curves)) for look in range(shortest)]
