"""A model whose parameters are divided over the processes of a machine (FSDP2), in a loop like torchtitan's.

    p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/fsdp.py

The vector of the swarm is that of the whole model, so `examples/ddp.py` and a single process with the same network are
nodes of the same swarm.
"""

import torch
import torch.distributed
from own_loop import network, spirals
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import p2pnode

ACCUMULATED = 2  # batches of an optimiser step

torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

torch.manual_seed(0)  # The same initial values in all processes.
model = network().to(device)
mesh = init_device_mesh(device.type, (processes,))
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# As long as the run, in optimiser steps.
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=600)
swarm = p2pnode.attach(model, optimizer, schedule)  # After fully_shard.

data = spirals(4096, seed=0)
sampler = DistributedSampler(data, seed=swarm.seed)
loader = DataLoader(data, batch_size=32 // ACCUMULATED, sampler=sampler, drop_last=True)


def train_step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    optimizer.zero_grad()
    losses = []
    for number, (points, which) in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        loss = functional.cross_entropy(model(points.to(device)), which.to(device)) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return torch.stack(losses).sum()


epoch = 0
while not swarm.done:
    sampler.set_epoch(epoch)
    epoch += 1
    waiting = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) == ACCUMULATED:
            swarm.step(samples=32, loss=train_step(waiting))
            waiting = []
        if swarm.done:
            break

with torch.no_grad():  # All processes: each gathers what it has not.
    points, which = (values.to(device) for values in spirals(1024, seed=1).tensors)
    accuracy = float((model(points).argmax(1) == which).float().mean())
if rank == 0:
    print(f"the shared model: accuracy {accuracy:.3f}")
torch.distributed.destroy_process_group()
