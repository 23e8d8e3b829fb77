"""One reachable node and five behind routers learn the digits as six in one network do, with real torch."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from p2pnode.training.tasks.digits import Digits, load_digits
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.network.nat import Nat
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers import real_trainer
from tests.harness.trainers.real_trainer import InlineTrainer

NODES, STEPS = 6, 48
#: The first evaluations are of the start.
WARM_UP = 12
#: Each node has a sixth of the images and lacks three digits: too heavy a sum of deltas shows at once.
OPTIONS = {"parts": NODES, "lacking": 3, "learning_rate": 0.002}
SETTINGS = {
    "exchange.shards": 8,
    "training.local_steps": 20,
    "training.max_steps": STEPS,
    "training.eval_steps": 4,
    "training.linger_s": 5.0,
}


class AllDigits(Digits):
    """Evaluates on all 1,797 images: of the 360 test images one is 0.28 points."""

    def __init__(self, part: int, seed: int) -> None:
        super().__init__({**OPTIONS, "part": part}, data_dir="", seed=seed, node_seed=100 * seed + part, device="cpu")
        images, labels = load_digits()
        self._test = (self._tensor(images), self._tensor(labels))


def curve(seed: int, network: str) -> tuple[float, float]:
    """The lowest accuracy that any node has seen after the start, and the mean of their last three.

    `network`: five are `hidden`, or in one network, where only the first may own (`one owner`).
    """
    accuracies: dict[str, list[float]] = {}

    async def story() -> None:
        def make(name: str) -> Any:
            return InlineTrainer(AllDigits(int(name[1:]), seed), seed)

        swarm = Swarm(seed=seed, settings=SETTINGS, make_trainer=make)
        swarm.start("n0")
        for number in range(1, NODES):
            if network == "hidden":
                swarm.network.behind(Nat(f"203.0.113.{number}", symmetric=True), f"10.0.0.{number + 2}")
            swarm.start(f"n{number}", bootstrap="n0", node__client_only=network == "one owner")
        await swarm.until(lambda: len(swarm.of("training_ended")) == NODES, within_s=600, what="all end")
        for record in swarm.of("evaluated"):
            if record.fields["step"] > WARM_UP:
                accuracies.setdefault(record.node, []).append(record.fields["accuracy"])
        await swarm.stop()

    VirtualLoop().run(story(), limit_s=3600)
    assert len(accuracies) == NODES
    lowest = min(min(seen) for seen in accuracies.values())
    last = statistics.mean(statistics.mean(seen[-3:]) for seen in accuracies.values())
    print(f"seed {seed}, {network}: lowest {lowest:.4f}, last {last:.4f}")
    return lowest, last


@pytest.fixture(autouse=True)
def steps_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip by way of another node is short beside a step."""
    monkeypatch.setattr(real_trainer, "STEP_S", 1.0)


@pytest.mark.long
def test_hidden_nodes_learn_as_in_one_network() -> None:
    """At the end within half a point, and never two points below the lowest there. Nodes behind routers own nothing, so
    in the other network one node owns as well."""
    lowest, last = curve(1, "hidden")
    control_lowest, control_last = curve(1, "one owner")
    assert lowest >= control_lowest - 0.02
    assert abs(last - control_last) <= 0.005
