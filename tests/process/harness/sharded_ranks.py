"""Two ranks of one node that hold parts of its model (FSDP2, HSDP, tensor parallel), and one process that holds it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.process.harness.forked_python import with_distributed
from tests.process.harness.trainer_world import World, add

LOCAL_STEPS = 2

#: Odd shapes, a layer of one row, tied weights, a frozen layer, a buffer, and a `state_dict` that gathers. Every
#: optimiser step has a batch of 8, of which each rank of data parallel takes a half.
RANKS = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import p2pnode
folder, kind, world, step_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank, store = int(os.environ.get("RANK", 0)), os.environ.get("STORE")
(folder / f"pid.{rank}").write_text(str(os.getpid()))
if world > 1:
    own = {"init_method": "file://" + store, "rank": rank, "world_size": world} if store else {}
    dist.init_process_group("gloo", **own)

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def add_total(module, state, prefix, _):
    state[prefix + "total"] = whole(module.wide.weight.detach()).sum()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(add_total)
        self.first = nn.Linear(3, 5)
        self.middle = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.middle.weight
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.wide = nn.Linear(5, 8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs):
        hidden = self.middle(self.first(inputs * self.scale).tanh()).tanh()
        return self.last(self.wide(self.base(self.tied(hidden))).tanh())

torch.manual_seed(3)
model = Model()
if kind == "fsdp" or kind == "hsdp":
    from torch.distributed.fsdp import fully_shard
    shape, names = ((2,), ("shard",)) if kind == "fsdp" else ((2, 1), ("copy", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (model.first, model.base, model):
        fully_shard(part, mesh=mesh)
elif kind == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {"wide": ColwiseParallel(), "last": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
elif kind == "ddp":
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model)
# With a large eps, so that what rounding changes stays small.
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01, eps=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
torch.manual_seed(10 + rank)
state = {"drawn": 0.0, "steps": 0}
swarm = p2pnode.attach(model, optimizer, scheduler, state=state)

def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    inputs = torch.randn(8, 3, generator=generator)
    return inputs if kind in ("plain", "tp") else inputs[4 * rank : 4 * rank + 4]

def loss_of(inputs):
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

shared = []
while not swarm.done:
    inputs = batch(state["steps"])
    loss = loss_of(inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    state["steps"] += 1
    state["drawn"] += torch.rand(1).item()
    time.sleep(step_s)
    swarm.step(samples=len(inputs), loss=loss)
    with torch.no_grad(), swarm.shared_weights():
        shared.append(float(loss_of(batch(0))))
    with torch.no_grad():
        loss_of(inputs)  # what it leaves unsharded must not be trained on

def numbers(tensors):
    return [number for tensor in tensors for number in whole(tensor.detach()).double().flatten().tolist()]

moments = [value for moments in optimizer.state.values() for value in moments.values()]
result = {
    "weights": numbers(model.parameters()),
    "moments": numbers(moments),
    "rate": scheduler.get_last_lr(),
    "samples": swarm.samples_seen,
    "shared": shared,
    "state": state,
    "next": torch.rand(1).item(),
}
(folder / f"result.{rank}").write_text(json.dumps(result))
if world > 1:
    dist.destroy_process_group()
    # gloo's threads of a mesh outlive that, and may abort an interpreter that ends (pytorch/pytorch#190489).
    sys.stdout.flush()
    os._exit(0)
"""

#: Forks instead of starting, as its own process is a fork that has imported what the ranks need. The number of ranks is
#: the third of the script's arguments.
LAUNCHER = """
import os, runpy, sys
del sys.argv[0]
program, folder, _, count, _ = sys.argv
os.environ["STORE"] = f"{folder}/store.{os.getpid()}"
for rank in range(int(count)):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        runpy.run_path(program, run_name="__main__")
        sys.exit()
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(count))))
"""


class Node:
    """The script as a trainer, whose daemon is the test."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.ranks = 1 if kind == "plain" else 2
        folder.mkdir()
        (folder / "ranks.py").write_text(RANKS)
        (folder / "launcher.py").write_text(LAUNCHER)
        self.saved = folder / "saved"
        self.world = World(folder / "state", server=with_distributed)

    def trainer(self) -> ProcessTrainer:
        launcher, program = str(self.folder / "launcher.py"), str(self.folder / "ranks.py")
        own = [str(self.folder), self.kind, str(self.ranks), "0"]
        return self.world.trainer(command=[sys.executable, launcher, program, *own])

    async def train(self, trainer: ProcessTrainer, step: int) -> StepReport:
        """One step of the swarm, to which this node's delta belongs alone."""
        report = await trainer.train(StepOrder(step, LOCAL_STEPS, 1.0, True))
        await add(trainer, step)
        return report

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"result.{rank}").read_text()) for rank in range(self.ranks)]
