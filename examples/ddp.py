"""Several processes of one machine as one node, by torchrun and DistributedDataParallel.

    p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/ddp.py

Every rank makes the same calls. Rank 0 alone is connected to the node; samples are added up over the ranks.
"""

import torch
import torch.distributed
from own_loop import accuracy, network, spirals
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import p2pnode

torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = torch.distributed.get_rank()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

model = network().to(device)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
swarm = p2pnode.attach(wrapped, optimizer)  # After init_process_group.
data = spirals(4096, seed=0)
sampler = DistributedSampler(data, seed=swarm.seed)
loader = DataLoader(data, batch_size=32, sampler=sampler)
epoch = 0
while not swarm.done:
    sampler.set_epoch(epoch)
    epoch += 1
    for points, which in loader:
        loss = functional.cross_entropy(wrapped(points.to(device)), which.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        swarm.step(samples=len(points), loss=loss)
        if swarm.done:
            break
if rank == 0:
    print(f"the shared model: accuracy {accuracy(model, spirals(1024, seed=1)):.3f}")
torch.distributed.destroy_process_group()
