"""Two ranks of one node, under DistributedDataParallel: each is restored, to the bit, whatever has ended it."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.rank_states import rank_file
from p2pnode.training.trainer_link.interface import Restored, StepOrder, TrainerFailed, TrainerHello, Vector
from tests.harness.runner.long_run import more
from tests.process.harness.forked_python import with_distributed
from tests.process.harness.sharded_ranks import LAUNCHER
from tests.process.harness.trainer_world import World, add
from tests.process.harness.trainer_world import until as until_true

#: Everything that a rank can have of its own: generators, a state, a counter, and noise that its optimiser adds.
RANKS = """
import hashlib, json, os, random, sys, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import p2pnode
folder, kind, world, step_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank, store = int(os.environ["RANK"]), os.environ.get("STORE")
(folder / f"pid.{rank}").write_text(str(os.getpid()))
if world > 1:
    own = {"init_method": "file://" + store, "rank": rank, "world_size": world} if store else {}
    dist.init_process_group("gloo", **own)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
model.register_buffer("masks", torch.ones(4, dtype=torch.bool))
model.register_buffer("codes", torch.full((4,), rank if kind == "codes" else 0))
torch.manual_seed(10 + rank)
random.seed(10 + rank)
np.random.seed(10 + rank)
wrapped = DistributedDataParallel(model) if kind != "codes" and world > 1 else model

# All with a large eps, so that what rounding changes stays small.
class Noisy(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for parameter, state in self.state.items():
            state["own_error"] = state.get("own_error", 0) + torch.randn(3)

if kind == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, eps=0.01)
elif kind == "noisy":
    optimizer = Noisy(model.parameters(), lr=0.01, eps=0.01)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
state = {"drawn": 0.0}
swarm = p2pnode.attach(wrapped, optimizer, scheduler, scaler, state=state)
while not swarm.done:
    state["drawn"] += random.random() + float(np.random.rand())
    inputs = torch.randn(8, 4)
    loss = nn.functional.mse_loss(wrapped(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if kind == "apart":
        for parameter in model.parameters():
            parameter.grad.mul_(1 - 2 * rank)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if swarm.step_number == 2:
        model.masks[1] = False
    time.sleep(step_s)
    swarm.step(samples=8, loss=loss)

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [found for item in items for found in tensors(item)]

def digest(value):
    content = b"".join(found.detach().numpy().tobytes() for found in tensors(value))
    return hashlib.sha256(content).hexdigest()[:12]

def numbers(value):
    return [number for found in tensors(value) for number in found.detach().double().flatten().tolist()]

held = list(model.parameters()), list(model.buffers()), (optimizer.optim if kind == "zero" else optimizer).state_dict()
result = {
    "numbers": numbers(held),
    "weights": digest(list(model.parameters())),
    "buffers": digest(list(model.buffers())),
    "optimizer": digest((optimizer.optim if kind == "zero" else optimizer).state_dict()["state"]),
    "scale": scaler.get_scale(),
    "rate": scheduler.get_last_lr(),
    "samples": swarm.samples_seen,
    "drawn": state["drawn"],
    "next": [torch.rand(1).item(), random.random(), float(np.random.rand())],
}
(folder / f"result.{rank}").write_text(json.dumps(result))
dist.destroy_process_group() if world > 1 else None
"""

SAVED_AT, STEPS, LOCAL_STEPS = 2, 4, 2
#: What a restored rank has to the bit.
EXACT = ("scale", "rate", "samples", "drawn", "next")
#: What is the same on all ranks.
SAME = ("weights", "optimizer", "scale", "rate", "samples", "buffers")


class Node:
    """The script in one or more ranks, and what each of them was in the end."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        folder.mkdir()
        (folder / "ranks.py").write_text(RANKS)
        (folder / "launcher.py").write_text(LAUNCHER)
        self.saved = folder / "saved"
        self.world = World(folder / "state", server=with_distributed)

    def trainer(self, ranks: int = 2) -> ProcessTrainer:
        launcher, program = str(self.folder / "launcher.py"), str(self.folder / "ranks.py")
        return self.world.trainer(
            command=[sys.executable, launcher, program, str(self.folder), self.kind, str(ranks), "0"]
        )

    async def train(self, trainer: ProcessTrainer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            await trainer.train(StepOrder(step, LOCAL_STEPS, 1.0, True))
            await add(trainer, step)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def results(self, ranks: int = 2) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"result.{rank}").read_text()) for rank in range(ranks)]

    def warned(self, event: str) -> list[str]:
        return [fields["message"] for fields in self.world.log.fields("trainer_warned") if fields["about"] == event]


async def kill_rank(node: Node, trainer: ProcessTrainer) -> None:
    os.kill(node.pid(1), signal.SIGKILL)
    with pytest.raises(TrainerFailed):
        await node.train(trainer, SAVED_AT + 1, STEPS)


async def kill_launcher(_node: Node, trainer: ProcessTrainer) -> None:
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGKILL)
    await until_true(lambda: trainer.state == "crashed")


def trained(folder: Path, kind: str, end: Callable[[Node, ProcessTrainer], Awaitable[None]] | None) -> Node:
    """A run of all steps. Behind `SAVED_AT` the state is saved, and `end` may end the processes."""
    node = Node(folder, kind)

    async def scenario(_world: World) -> None:
        trainer = node.trainer()
        await trainer.start()
        await node.train(trainer, 1, SAVED_AT)
        await (await trainer.save(str(node.saved)))
        if end is not None:
            await end(node, trainer)
            await trainer.start(str(node.saved))
        await node.train(trainer, SAVED_AT + 1, STEPS)
        await trainer.finish("max_steps", 60.0)

    node.world.run(scenario)
    return node


def assert_alike(restored: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> None:
    """Weights, buffers and moments to the rounding of a delta, which stays progress where nothing is loaded; all else
    to the bit."""
    for again, as_before in zip(restored, undisturbed, strict=True):
        assert again["numbers"] == pytest.approx(as_before["numbers"], rel=1e-5, abs=1e-6)
        assert {name: again[name] for name in EXACT} == {name: as_before[name] for name in EXACT}


@pytest.mark.parametrize(("kind", "end"), [("noisy", kill_rank), *more(("zero", kill_launcher))])
def test_every_rank_is_restored(
    tmp_path: Path, kind: str, end: Callable[[Node, ProcessTrainer], Awaitable[None]]
) -> None:
    """Weights, buffers, optimiser, scale, rate, samples, state and all generators of both ranks are those of an
    undisturbed run: with errors of its own on each, and with parts of one optimiser on each."""
    undisturbed = trained(tmp_path / "undisturbed", kind, None)
    disturbed = trained(tmp_path / "disturbed", kind, end)

    assert_alike(disturbed.results(), undisturbed.results())
    first, second = undisturbed.results()
    assert first["next"] != second["next"]
    assert first["drawn"] != second["drawn"]
    assert first["weights"] == second["weights"]
    assert first["optimizer"] != second["optimizer"]
    # Two copies of one optimiser are one on disk.
    assert (snapshot.load(rank_file(disturbed.saved, 1))["optimizer"] == [None]) == (kind != "noisy")
    assert [node.warned("ranks_not_restored") for node in (undisturbed, disturbed)] == [[], []]
    assert [node.warned("ranks_apart") for node in (undisturbed, disturbed)] == [[], []]


@pytest.mark.parametrize("damage", ["missing", *more("one process")])
def test_a_set_that_is_not_whole_gives_all_ranks_the_state_of_the_first(tmp_path: Path, damage: str) -> None:
    """They are told, and train in step: no rank begins with what the others do not have."""
    node = Node(tmp_path / "node", "plain")
    ranks = 1 if damage == "one process" else 2

    async def scenario(_world: World) -> None:
        trainer = node.trainer()
        await trainer.start()
        await node.train(trainer, 1, 1)
        await (await trainer.save(str(node.saved)))
        await node.train(trainer, 2, SAVED_AT)
        await (await trainer.save(str(node.saved)))
        await trainer.stop(10.0)
        if damage == "missing":
            rank_file(node.saved, 1).unlink()
        base = trainer.vector.copy()

        async def resume(_hello: TrainerHello, vector: Vector) -> Restored:
            vector[:] = base
            return Restored(has_vector=True, file=str(node.saved))

        again = node.trainer(ranks)
        await again.start(resume=resume)
        await node.train(again, SAVED_AT + 1, STEPS)
        await again.finish("max_steps", 60.0)

    node.world.run(scenario)
    [warned] = node.warned("ranks_not_restored")
    assert ("by 2 processes" if ranks == 1 else "rank 1 is missing or of another moment") in warned
    results = node.results(ranks)
    assert all(result[name] == results[0][name] for result in results for name in SAME)
    assert results[0]["samples"] == 8 * LOCAL_STEPS * (2 * SAVED_AT + ranks * (STEPS - SAVED_AT))
    assert node.warned("ranks_apart") == []


def test_a_rank_with_other_fixed_values_is_refused_by_name(tmp_path: Path) -> None:
    """Only those of rank 0 are compared with other nodes; without DistributedDataParallel nothing makes them equal."""
    node = Node(tmp_path / "node", "codes")

    async def scenario(_world: World) -> None:
        with pytest.raises(TrainerFailed, match="rank 1 has other values of codes than rank 0") as failure:
            await node.trainer().start()
        assert failure.value.fatal

    node.world.run(scenario)


@pytest.mark.long
def test_the_ranks_of_a_late_joiner_begin_alike(tmp_path: Path) -> None:
    """Without a saved state, in the middle of a run: at the same place of the schedule, with the same weights."""
    node = Node(tmp_path / "node", "plain")

    async def scenario(_world: World) -> None:
        trainer = node.trainer()
        await trainer.start()
        trainer.vector[:] = 0.5
        await node.train(trainer, 25, 26)
        await trainer.finish("max_steps", 60.0)

    node.world.run(scenario)
    results = node.results()
    assert all(result[name] == results[0][name] for result in results for name in SAME)
    assert results[0]["rate"] == [pytest.approx(0.01 * (1 + math.cos(math.pi * 0.52)) / 2)]
    assert results[0]["next"] != results[1]["next"]
    assert node.warned("ranks_apart") == []


def test_ranks_that_train_apart_are_found(tmp_path: Path) -> None:
    """Each in its own direction: the delta has a part of each."""
    node = Node(tmp_path / "node", "apart")

    async def scenario(_world: World) -> None:
        trainer = node.trainer()
        await trainer.start()
        await node.train(trainer, 1, 2)
        await trainer.finish("max_steps", 60.0)

    node.world.run(scenario)
    [warned] = node.warned("ranks_apart")
    assert "rank 1 trains its weights to other values than rank 0" in warned
