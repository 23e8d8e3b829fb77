"""Two optimisers in one loop: Muon for the matrices, AdamW for the rest, each with a schedule of its own.

    p2pnode run --set training.max_steps=40 -- python examples/muon.py

Start it on every machine; a joiner adds `--bootstrap HOST:PORT` or `--invite FILE`. Both optimisers and both schedules
go to `attach`: they are saved, restored, and moved to where the swarm is.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

import p2pnode

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
matrices = [value for value in model.parameters() if value.ndim == 2]
others = [value for value in model.parameters() if value.ndim != 2]
muon = torch.optim.Muon(matrices, lr=0.02)
adamw = torch.optim.AdamW(others, lr=0.01)
schedules = [CosineAnnealingLR(muon, 1000), LinearLR(adamw, 0.1, 1.0, 20)]

swarm = p2pnode.attach(model, [muon, adamw], schedules)
torch.manual_seed(swarm.seed)  # each node draws batches of its own
teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
while not swarm.done:
    inputs = torch.randn(64, 16)
    loss = functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
    loss.backward()
    for optimizer, schedule in zip((muon, adamw), schedules, strict=True):
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    swarm.step(samples=64, loss=loss)
print(f"done at step {swarm.step_number}, loss {loss:.3f}")
