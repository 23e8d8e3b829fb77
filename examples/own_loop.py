"""A training loop of your own, end to end: the nodes share the data, evaluate the shared model, and stop at a goal.

    p2pnode run --set 'training.until=accuracy >= 0.95' --set training.max_steps=400 -- python examples/own_loop.py

Start it on every machine; a joiner adds `--bootstrap HOST:PORT` or `--invite FILE`. At the end each has the same
model.safetensors in its state directory, which the script loads again:

    python examples/own_loop.py --load model.safetensors
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points (samples, 2) on two spirals, and which of the two each is on."""
    generator = torch.Generator().manual_seed(seed)
    along = torch.rand(samples, generator=generator).sqrt() * 2 * math.pi
    which = torch.randint(0, 2, (samples,), generator=generator)
    angle = along + which * math.pi
    points = torch.stack((along * angle.cos(), along * angle.sin()), dim=1) / math.pi
    return TensorDataset(points + 0.03 * torch.randn(samples, 2, generator=generator), which)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    device = next(model.parameters()).device
    points, which = (values.to(device) for values in data.tensors)
    return float((model(points).argmax(1) == which).float().mean())


def train() -> None:
    import p2pnode

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    swarm = p2pnode.attach(model, optimizer)
    # On every machine the same data: the sampler gives each node its own part of every epoch.
    training, held_out = spirals(4096, seed=0), spirals(1024, seed=1)
    loader = DataLoader(training, batch_size=32, sampler=swarm.sampler(training))
    evaluated = 0
    while not swarm.done:
        for points, which in loader:
            loss = functional.cross_entropy(model(points), which)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            swarm.step(samples=len(points), loss=loss)
            if swarm.step_number >= evaluated + 5 or swarm.done:
                evaluated = swarm.step_number
                with swarm.shared_weights():
                    swarm.evaluate(samples=1024, accuracy=accuracy(model, held_out))
            if swarm.done:
                break
    print(f"the shared model: accuracy {accuracy(model, held_out):.3f} after step {swarm.step_number}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", default="", help="evaluate this file instead of training")
    arguments = parser.parse_args()
    if arguments.load:
        from safetensors.torch import load_file

        model = network()
        model.load_state_dict(load_file(arguments.load))
        print(f"the loaded model: accuracy {accuracy(model, spirals(1024, seed=1)):.3f}")
    else:
        train()
