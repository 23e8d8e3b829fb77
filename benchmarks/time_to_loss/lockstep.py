"""What a rule of exchange teaches, without network and clock: nodes in lockstep on one clock of optimiser steps.

`python -m benchmarks.time_to_loss.lockstep "steps=10 delta=256 change=256 age=7" …` prints a line of losses for each
way: optimiser steps per delta, the largest of 4,096 values that a delta and a change of values have (0: all of them),
the optimiser steps from the cut of a delta to the arrival of the values that contain it (0: one), and the rate by which
a delta is added: as the nodes agree, or a number. A rest stays with who has it. A third of a second per optimiser step
on an idle core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from benchmarks.time_to_loss.learning import (
    BATCH,
    RATE,
    Given,
    batch,
    common_text,
    judged,
    loss_of,
    new_model,
    own_text,
    warm_up,
)
from p2pnode.training.shards.agreement import Agreement

BLOCK_VALUES = 4096
STEP_S = 0.5


def largest(values: Tensor, count: int) -> Tensor:
    """`values`, float32[n], with only the `count` largest of each block; all of them for 0."""
    if not count:
        return values.clone()
    padded = nn.functional.pad(values, (0, -values.numel() % BLOCK_VALUES)).view(-1, BLOCK_VALUES)
    places = padded.abs().topk(count, dim=1).indices
    kept = torch.zeros_like(padded).scatter_(1, places, padded.gather(1, places))
    return kept.view(-1)[: values.numel()]


class _Node:
    """One node. `base`: the shared model as it knows it, and its own deltas that are not in that."""

    def __init__(self, given: Given, rank: int) -> None:
        self.model = new_model(given)
        self.vector = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        place = 0
        for parameter in self.model.parameters():
            parameter.data = self.vector[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
        self.base = self.vector.clone()
        self.under_way: list[tuple[int, Tensor]] = []
        self.agreement, self._known = Agreement(), self.vector.clone()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self._text = own_text(given, rank)
        self._generator = torch.Generator().manual_seed(given.seed * 100 + rank)

    def train(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * warm_up(step)
        self._optimizer.zero_grad()
        loss_of(self.model, *batch(self._text, self._generator, BATCH)).backward()
        self._optimizer.step()

    def cut(self, step: int, count: int) -> Tensor:
        sent = largest(self.vector - self.base, count)
        self.base += sent
        self.under_way.append((step, sent))
        self.agreement.begin_step(sent.numpy())
        return sent

    def enter(self, shared: Tensor, cut: int) -> None:
        """Move to the shared model, which has this node's deltas up to that of step `cut`."""
        self.under_way = [(step, sent) for step, sent in self.under_way if step > cut]
        self.agreement.note(0, self._known.numpy(), shared.numpy())
        self._known.copy_(shared)
        known = shared + sum((sent for _, sent in self.under_way), torch.zeros(()))
        self.vector += known - self.base
        self.base.copy_(known)


@torch.no_grad()
def played(
    given: Given, *, steps: int, delta: int, change: int, age: int, rate: float | None = None
) -> dict[int, float]:
    """The loss of the shared model at each `given.snapshot_s` seconds of training. `rate`: None as the nodes agree."""
    nodes = [_Node(given, rank) for rank in range(given.nodes)]
    value, shared, judge = nodes[0].vector.clone(), nodes[0].vector.clone(), new_model(given)
    arrivals: list[tuple[int, int, list[Tensor], list[float]]] = []
    losses: dict[int, float] = {}
    for step in range(1, round(given.wall_s / STEP_S) + 1):
        with torch.enable_grad():
            for node in nodes:
                node.train(step - 1)
        if arrivals and arrivals[0][0] <= step:
            _, cut, sent, rates = arrivals.pop(0)
            value += torch.stack([one * own for one, own in zip(rates, sent, strict=True)]).mean(0)
            shared += largest(value - shared, change)
            for node in nodes:
                node.enter(shared, cut)
        if step % steps == 0:
            rates = [node.agreement.rate(len(nodes)) if rate is None else rate for node in nodes]
            arrivals.append((step + age, step, [node.cut(step, delta) for node in nodes], rates))
        if step * STEP_S % given.snapshot_s == 0:
            nn.utils.vector_to_parameters(shared, judge.parameters())
            losses[round(step * STEP_S)] = round(judged(judge, common_text(given)), 3)
    return losses


def main() -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("ways", nargs="+", metavar="WAY")
    line.add_argument("--nodes", type=int, default=4)
    line.add_argument("--seed", type=int, default=0)
    line.add_argument("--seconds", type=float, default=180.0)
    found = line.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
        given = Given(0, found.nodes, found.seed, STEP_S, found.seconds, 60.0, folder, str(text), "", "")
        for way in found.ways:
            settings = {"steps": 10, "delta": 0, "change": 0, "age": 3} | {
                name: int(number) for name, number in (one.split("=") for one in way.split()) if name != "rate"
            }
            rate = next((float(one[5:]) for one in way.split() if one.startswith("rate=")), None)
            print(json.dumps({"way": way, "losses": played(given, **settings, rate=rate)}), flush=True)


if __name__ == "__main__":
    main()
