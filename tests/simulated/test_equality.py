"""Proof by equality: through owners, codecs, barriers and pulls, the arithmetic is that of a bare torch loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pnode.training.progress import Progress
from p2pnode.training.tasks.task import TrainSpec
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.harness.builders.codec_kinds import LOSSY
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers import tasks as world_tasks
from tests.harness.trainers.real_trainer import InlineTrainer

PLAIN_SUM: dict[str, Any] = {
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.codec": "float32",
    "exchange.shards": 4,
    "training.linger_s": 1.0,
}
OPTIONS: dict[str, Any] = {"data_dir": "", "seed": 3, "device": "cpu"}


class Fixed(world_tasks.Plain):
    """Plain SGD on fixed batches: node *i* of *n* sees every n-th row of the joined batch."""

    rows = 16

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        part, parts = int(self.options["part"]), int(self.options["parts"])
        step = 0
        while True:
            start = step * self.rows % len(self.inputs)
            chosen = torch.arange(start, start + self.rows)[part::parts]
            yield self.inputs[chosen], self.outputs[chosen]
            step += 1


class FixedNormed(Fixed):
    """The same with batch normalisation."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class Still(Fixed):
    """With a learning rate of 0: what it pushes is what it has not trained, namely nothing."""

    def build(self) -> TrainSpec:
        model = self.model()
        return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=0.0))


def reached(progress: Progress, step: int) -> bool:
    return progress.step >= step


def swarm_of(
    tasks: dict[str, Any], steps: int, late: dict[str, int] | None = None, **settings: Any
) -> tuple[np.ndarray, dict[str, InlineTrainer]]:
    """Train until all nodes have `steps`; the vector as the owners have it, and the trainers."""
    trainers: dict[str, InlineTrainer] = {}
    values: list[np.ndarray] = []

    async def main() -> None:
        def make(name: str) -> Any:
            trainers[name] = InlineTrainer(tasks[name], seed=3)
            return trainers[name]

        chosen = {**PLAIN_SUM, **settings, "training.max_steps": steps}
        swarm = Swarm(seed=5, settings=chosen, make_trainer=make)
        for name in tasks:
            if not late or name not in late:
                swarm.start(name, bootstrap=None if not swarm.hosts else next(iter(swarm.hosts)))
        for name, step in (late or {}).items():
            first = swarm.running()[0].living.progress
            await swarm.until(partial(reached, first, step), within_s=600, what="the late one's turn")
            swarm.start(name, bootstrap=next(iter(swarm.hosts)))

        def done() -> bool:
            return all(host.node is not None and host.node.progress.step >= steps for host in swarm.hosts.values())

        await swarm.until(done, within_s=600, what="all steps")
        await swarm.until(
            lambda: all(host.node.exchange.run.passed_step >= steps for host in swarm.hosts.values()),
            within_s=30,
            what="the last barrier",
        )
        values.append(swarm.model())
        await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return values[0], trainers


def bare(task: Any, steps: int) -> np.ndarray:
    """The task in a loop without any of this."""
    torch.manual_seed(3)
    spec = task.build()
    batches = iter(task.batches())
    for _ in range(steps):
        spec.optimizer.zero_grad()
        task.loss(spec.model, next(batches)).backward()
        spec.optimizer.step()
    named = sorted(spec.model.named_parameters())
    buffers = sorted(item for item in spec.model.named_buffers() if item[1].is_floating_point())
    return np.concatenate([value.detach().numpy().ravel() for _, value in named + buffers])


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        (world_tasks.Plain, "bfloat16"),
        (world_tasks.Normed, "float32"),
    ],
)
def test_one_node_gives_the_weights_of_the_bare_loop(kind: Any, codec: str) -> None:
    """One node with plain sum, outer_lr 1, μ 0: the torch loop's weights to 1e-6 after 200 steps, whatever the codec.
    What a node owns alone is not sent, and so not rounded."""
    value, _ = swarm_of(
        {"n0": kind({}, node_seed=11, **OPTIONS)},
        200,
        **{"training.local_steps": 1, "exchange.weight": "sum", "exchange.codec": codec},
    )

    np.testing.assert_allclose(value, bare(kind({}, node_seed=11, **OPTIONS), 200), rtol=0, atol=1e-6)


def test_two_nodes_under_bsp_agree_with_one_process_on_the_joined_batch() -> None:
    """Two nodes under bsp with local_steps 1 and plain SGD: the joined batch's weights to 1e-5 after 50 steps."""
    tasks = {f"n{part}": Fixed({"part": part, "parts": 2}, node_seed=part, **OPTIONS) for part in range(2)}

    value, _ = swarm_of(
        tasks,
        50,
        **{"training.local_steps": 1, "barrier.method": "bsp", "training.min_nodes": 2},
    )

    joined = bare(Fixed({"part": 0, "parts": 1}, node_seed=0, **OPTIONS), 50)
    np.testing.assert_allclose(value, joined, rtol=0, atol=1e-5)


def test_batch_normalisation_is_averaged_by_its_own_rule() -> None:
    """With outer momentum on the weights, running variances stay positive and the nodes end with one set of them."""
    tasks = {f"n{part}": FixedNormed({"part": part, "parts": 2}, node_seed=part, **OPTIONS) for part in range(2)}

    value, trainers = swarm_of(
        tasks,
        40,
        **{"training.local_steps": 2, "exchange.outer_momentum": 0.5, "exchange.outer_lr": 0.7},
    )

    vector = trainers["n0"].runner.model_vector
    variance = next(entry for entry in vector.layout.entries if entry.name.endswith("running_var"))
    assert (value[variance.offset : variance.offset + variance.size] > 0).all()
    counted = [trainer.runner.model_vector.local_buffers for trainer in trainers.values()]
    assert all(len(buffers) == 1 for buffers in counted)


def test_a_late_joiner_stands_where_the_schedule_of_the_others_stands() -> None:
    """A cosine schedule is a function of the swarm's step: a node that joins later has the others' learning rate."""
    tasks = {f"n{number}": world_tasks.Adaptive({}, node_seed=number, **OPTIONS) for number in range(2)}

    _, trainers = swarm_of(tasks, 30, late={"n1": 15}, **{"training.local_steps": 2})

    by_step = {order.step: rate for order, rate in zip(trainers["n0"].orders, trainers["n0"].rates, strict=True)}
    joined = [(order.step, rate) for order, rate in zip(trainers["n1"].orders, trainers["n1"].rates, strict=True)]
    assert joined[0][0] >= 14
    assert all(rate == pytest.approx(by_step[step]) for step, rate in joined if step in by_step)


@pytest.mark.parametrize("pull_codec", LOSSY)
def test_what_pulls_round_off_is_never_pushed_back(pull_codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes that learn nothing: after eight steps every owner has the bits of the initial weights, although what
    the nodes load differs from them. A delta counts from what was loaded."""
    loaded: list[np.ndarray] = []
    train = InlineTrainer.train

    async def noting(trainer: InlineTrainer, order: StepOrder) -> StepReport:
        loaded.append(trainer.vector.copy())
        return await train(trainer, order)

    monkeypatch.setattr(InlineTrainer, "train", noting)
    monkeypatch.setattr("p2pnode.training.exchange.exchange.PUBLISHED_AT_START", 0)  # so it begins with rounded values
    tasks = {f"n{part}": Still({"part": part, "parts": 3}, node_seed=part, **OPTIONS) for part in range(3)}

    value, _ = swarm_of(
        tasks,
        8,
        **{
            "training.local_steps": 1,
            "barrier.method": "bsp",
            "training.min_nodes": 3,
            "exchange.pull_codec": pull_codec,
        },
    )

    initial = bare(Still({"part": 0, "parts": 1}, node_seed=0, **OPTIONS), 1)
    assert value.tobytes() == initial.tobytes()
    assert len(loaded) >= 24
    assert sum((vector != initial).any() for vector in loaded) >= 4


@pytest.mark.parametrize(("codec", "within"), [("bfloat16", 2e-4), *more(("int4", 2e-3))])
def test_a_lossy_codec_stays_beside_the_joined_batch(codec: str, within: float) -> None:
    """Rounded deltas with error feedback end where exact ones end, to a ten-thousandth of what the weights moved."""
    tasks = {f"n{part}": Fixed({"part": part, "parts": 2}, node_seed=part, **OPTIONS) for part in range(2)}

    value, _ = swarm_of(
        tasks,
        50,
        **{
            "training.local_steps": 1,
            "barrier.method": "bsp",
            "training.min_nodes": 2,
            "exchange.codec": codec,
        },
    )

    joined = bare(Fixed({"part": 0, "parts": 1}, node_seed=0, **OPTIONS), 50)
    difference = np.abs(value - joined).max()
    print(f"{codec}: {difference:.6f} off; the weights moved by {np.abs(joined).max():.3f} at most")
    assert 0.0 < difference < within
