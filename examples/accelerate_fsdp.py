"""Accelerate's FSDP2: each process of a machine holds a part of the model. Needs `p2pnode[transformers]`.

    p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/accelerate_fsdp.py

Everything is as without p2pnode but for `attach`, `swarm.step` and the end of the loop. Another node may hold
the whole model, or divide it otherwise.
"""

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from own_loop import network, spirals
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import p2pnode

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)
accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
if not torch.cuda.is_available():  # Between processors Accelerate would replicate the model instead.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
model: nn.Module = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(spirals(4096, seed=0), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
swarm = p2pnode.attach(model, optimizer)  # After prepare.
while not swarm.done:
    for points, which in loader:
        loss = functional.cross_entropy(model(points), which)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        swarm.step(samples=len(points), loss=loss)
        if swarm.done:
            break

with torch.no_grad():  # All processes: each gathers the parameters that it has not.
    points, which = (values.to(accelerator.device) for values in spirals(1024, seed=1).tensors)
    accuracy = float((model(points).argmax(1) == which).float().mean())
accelerator.print(f"the shared model: accuracy {accuracy:.3f}")
accelerator.end_training()
