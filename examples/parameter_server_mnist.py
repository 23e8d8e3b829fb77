"""The MNIST network on a parameter server, with gamma-distributed delays: the experiment of the PSP chapter.

    p2pnode run --set node.role=server -- python examples/parameter_server_mnist.py --barrier pssp

Every worker joins with the address of the server (six in the chapter):

    p2pnode run --bootstrap HOST:PORT -- python examples/parameter_server_mnist.py --barrier pssp

Without `--data FOLDER` (the four MNIST files) it learns the 1,797 bundled digits, enlarged. With `--quota N` it is a
synchronous SGD: N gradients of one version of the model, each of another worker, are averaged to one update.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import p2pnode
from p2pnode.training.tasks import idx
from p2pnode.training.tasks.digits import load_digits


def load(folder: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (samples, 1, 28, 28) from 0 to 1, and labels; `part` is "train" or "t10k"."""
    if folder:
        images, labels = (idx.load(Path(folder), f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        return torch.from_numpy(images / np.float32(255)).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))
    small, labels = load_digits()
    chosen = (np.arange(len(labels)) % 5 == 0) == (part == "t10k")
    large = np.kron(small[chosen].reshape(-1, 8, 8) / 2, np.ones((3, 3), np.float32))
    return torch.from_numpy(np.pad(large, ((0, 0), (2, 2), (2, 2)))).unsqueeze(1), torch.from_numpy(labels[chosen])


parser = argparse.ArgumentParser()
options = {"barrier": "pssp", "quota": 0, "updates": 300, "delay": 1.0, "maps": 32, "hidden": 1024, "data": ""}
for name, default in options.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
chosen = parser.parse_args()

torch.manual_seed(0)  # every server begins with the same weights
convolution = nn.Sequential(nn.Conv2d(1, chosen.maps, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1))
dense = nn.Sequential(nn.Linear(196 * chosen.maps, chosen.hidden), nn.ReLU(), nn.Linear(chosen.hidden, 10))
model = nn.Sequential(convolution, nn.Flatten(), dense)
values = p2pnode.ModelValues(model)
images, labels = load(chosen.data, "train")
engine = p2pnode.engine("server")


class Training(p2pnode.ServerProgram):
    reducer = "add"

    def schedule(self, ctx, workers):
        for key, value in values.values() if ctx.version == 0 else ():
            if ctx.get(key, None).value is None:
                ctx.set(key, value)
        return dict.fromkeys(workers, values.names)

    def push(self, ctx, params):
        time.sleep(ctx.rng.gammavariate(1.0, chosen.delay))
        values.load(params)
        model.zero_grad()
        batch = torch.tensor(ctx.rng.sample(range(len(labels)), 100))
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        return [(key, -0.05 * gradient) for key, gradient in values.gradients()]

    def stop(self, ctx):
        return ctx.version >= chosen.updates


quota = {"barrier": "asp", "grads_to_wait": chosen.quota} if chosen.quota else {"barrier": chosen.barrier}
updates = engine.start(Training(), staleness=4, sample=2, **quota)
if engine.is_server:
    values.load((key, engine.get(key).value) for key in values.names)
    images, labels = load(chosen.data, "t10k")
    print(f"accuracy {float((model.eval()(images).argmax(1) == labels).float().mean()):.3f} after {updates} updates")
