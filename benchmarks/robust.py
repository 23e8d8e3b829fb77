"""robust: eight members on the bundled digits, one of which sends its deltas ten times as long and sign-flipped.

As in `outer_rule` one process and a virtual clock stand for the network: real models and optimisers, the deltas as
their owner gets them, and the owner's real code (`training.exchange.store.shard_store`, `training.shards.robust`), all
shards here. Either every member sees all images, as `p2pnode start --task digits` has it, or each its own eighth: then
the liar's images are lost to the others, and honest deltas differ more. Beside the accuracy, what the owner's work
costs: seconds per delta, against the plain rule in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from benchmarks.outer_rule import VirtualNode, completions
from benchmarks.record import Outcome, Series
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.codec_choice import LEAST_LOSSY
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Term
from p2pnode.training.layout import shard_bounds
from p2pnode.training.settings import ExchangeSettings, TrainingSettings
from p2pnode.training.shard_count import shard_count
from p2pnode.training.shards import robust
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.robust import FirstNorms, Robust
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner

MEMBERS = 8
LIAR = 3
LIE = -10.0
STEPS = 120
SEEDS = 3
RULES: tuple[Robust, ...] = ("", "clip")
#: For the cost: values of a vector in as many shards as by default, and deltas added.
COST_VALUES = 1 << 20
COST_ROUNDS = 6
ME = Contact(b"o" * 20, Address("127.0.0.1", 1))


@dataclass
class Owner:
    """The owner of all shards: the decisions of `owner/validation.py` and `owner/deltas.py`, without messages."""

    kind: Robust
    value: Vector
    parameters: int
    adding_s: float = 0.0
    judged: int = 0
    clipped: int = 0
    first: FirstNorms = field(default_factory=FirstNorms)
    #: Deltas that came before there was a median; their members try again.
    early: list[tuple[int, int, Vector]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = ExchangeSettings()
        bounds = shard_bounds(self.value.size, shard_count(self.value.size))
        rule = Rule(settings.outer_lr, settings.outer_momentum, self.kind)
        self.store = ShardStore(ME.node_id, bounds, self.parameters, rule)
        for shard, (start, stop) in enumerate(bounds):
            state = self.store.fresh_state(shard, self.value[start:stop])
            self.store.own(shard, state, Term(1, ME.node_id), ME, 0.0, by_handover=False)

    def take(self, member: int, step: int, delta: Vector) -> None:
        """One delta of a member, and those that wait."""
        began = time.perf_counter()
        if not self._add(member, step, delta):
            self.early.append((member, step, delta))
        elif self.early:
            early, self.early = self.early, []
            for one in early:
                self._add(*one)
        self.adding_s += time.perf_counter() - began

    def _add(self, member: int, step: int, delta: Vector) -> bool:
        node = bytes([member + 1]) * 20
        judged = []
        for shard, (start, stop) in enumerate(self.store.bounds):
            part = delta[start:stop]
            norm, reference = robust.norm_of(part), self.store.owned[shard].state.norms.reference()
            if self.kind == "clip" and reference is None:
                reference = self.first.reference(shard, node, norm, MEMBERS)
                if reference is None:
                    judged.append(None)
                    continue
            scale = robust.clip_factor(norm, reference) if self.kind == "clip" and reference is not None else 1.0
            judged.append((part, norm, scale))
        if None in judged:
            return False
        for shard, found in enumerate(judged):
            assert found is not None
            part, norm, scale = found
            self.judged += member != LIAR
            self.clipped += member != LIAR and scale < 1.0
            item = BufferedDelta(DeltaId(node, 1, step), scale / MEMBERS, part, synchronous=False, norm=norm)
            self.store.add(shard, item)
        return True

    def read(self) -> Vector:
        """The vector as its owners have it."""
        for shard, (start, stop) in enumerate(self.store.bounds):
            self.value[start:stop] = self.store.owned[shard].state.value
        return self.value


@dataclass(frozen=True)
class Run:
    """Accuracy in percent after the last step, and the share of honest shards of deltas that were clipped."""

    accuracy: float
    clipped: float


def train(kind: Robust, seed: int, *, lie: bool, parts: int) -> Run:
    """Eight members, asynchronous; the images go to each, or to as many parts."""
    local_steps, codec = TrainingSettings().local_steps, LEAST_LOSSY
    runners = [_runner(seed, member, parts) for member in range(MEMBERS)]
    layout = runners[0].model_vector.layout
    initial = np.zeros(layout.total, np.float32)
    runners[0].model_vector.read(initial)
    owner = Owner(kind, initial, layout.parameter_total)
    members = [VirtualNode(runner, initial) for runner in runners]
    for done, member in enumerate(completions(MEMBERS, Random(1000 * seed)), 1):
        node = members[member]
        delta = node.train(MEMBERS, local_steps)
        if lie and member == LIAR:
            delta = delta * np.float32(LIE)
        owner.take(member, node.step, node.encoded(delta, codec))
        node.pull(owner.read())
        if done == STEPS * MEMBERS:
            break
    return Run(members[0].accuracy(owner.read()), owner.clipped / max(1, owner.judged))


def _runner(seed: int, member: int, parts: int) -> TaskRunner:
    task, spec = build_task(
        "digits",
        {"part": member % parts, "parts": parts},
        data_dir="",
        seed=seed,
        node_seed=100 * seed + member + 1,
        device="cpu",
    )
    return TaskRunner("digits", task, spec)


def cost(repetition: int) -> dict[Robust, float]:
    """Seconds of the owner's work per delta of `COST_VALUES`, rules in turn, so that all have the same machine."""
    rng = np.random.default_rng(repetition)
    deltas = [rng.normal(size=COST_VALUES).astype(np.float32) for _ in range(MEMBERS)]
    owners = {kind: Owner(kind, np.zeros(COST_VALUES, np.float32), COST_VALUES) for kind in RULES}
    for step in range(1, COST_ROUNDS + 1):
        for owner in owners.values():
            for member, delta in enumerate(deltas):
                owner.take(member, step, delta)
            if step == 1:
                owner.adding_s = 0.0  # the first round pays for fresh memory
    return {kind: owner.adding_s / ((COST_ROUNDS - 1) * MEMBERS) for kind, owner in owners.items()}


def measure(arguments: argparse.Namespace) -> Outcome:
    """Accuracy of the clean run, and of each rule with the liar; the cost of each rule as a ratio to none."""
    torch.set_num_threads(1)  # two threads gain nothing on matrices this small, and one is repeatable
    seeds = range(arguments.repetitions or SEEDS)
    series = []
    for parts in (1, MEMBERS):
        data = ", an eighth of the images each" if parts > 1 else ""
        clean = [train("", seed, lie=False, parts=parts) for seed in seeds]
        _show(f"clean{data}", clean)
        for kind in RULES:
            runs = [train(kind, seed, lie=True, parts=parts) for seed in seeds]
            _show(f"{kind or 'plain'}, liar{data}", runs)
            quiet = [train(kind, seed, lie=False, parts=parts) for seed in seeds] if kind else clean
            series.append(
                Series(
                    f"accuracy with 1 of 8 lying, {kind or 'no rule'}, minus the clean run's{data}",
                    "points",
                    [run.accuracy - base.accuracy for run, base in zip(runs, clean, strict=True)],
                    aim="≥ -2" if kind and parts == 1 else "",
                    details={
                        "lied to": [run.accuracy for run in runs],
                        "clean": [base.accuracy for base in clean],
                        "clean, with the rule": [run.accuracy for run in quiet],
                        "honest shards clipped without a liar": [run.clipped for run in quiet],
                    },
                )
            )
    costs = [cost(seed) for seed in seeds]
    series += [
        Series(
            f"owner's time per delta, {kind}, over no rule's",
            "",
            [one[kind] / one[""] for one in costs],
            details={"seconds": [one[kind] for one in costs], "seconds without": [one[""] for one in costs]},
        )
        for kind in RULES
        if kind
    ]
    conditions = (
        f"digits, {MEMBERS} members, {TrainingSettings().local_steps} local steps, "
        f"asp, {STEPS} steps, outer rule {ExchangeSettings().outer_lr:g} / {ExchangeSettings().outer_momentum:g}, "
        f"{LEAST_LOSSY} deltas, simulated asynchronous step times; the liar sends {LIE:g} times its "
        f"delta; cost: {COST_VALUES / 1e6:.2g} M values in {shard_count(COST_VALUES)} shards, one core"
    )
    return Outcome("robust", conditions, series)


def _show(name: str, runs: list[Run]) -> None:
    values = [run.accuracy for run in runs]
    print(f"  {name:<48} {np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})", file=sys.stderr, flush=True)
