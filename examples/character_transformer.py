"""A character transformer on a text that every machine has: the source of Python's standard library.

    p2pnode run --set training.max_steps=600 -- python examples/character_transformer.py --width 128 --layers 6

It has 1.2 million parameters then. `--text FILE` takes another text.
"""

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import p2pnode

#: Printable ASCII, line feed and one sign for everything else: the same vocabulary on every machine.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\x7f"
CONTEXT = 64


class Transformer(nn.Module):
    """Predicts the next character: int64 (batch, length) to logits (batch, length, characters)."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, len(CHARACTERS), bias=False)
        self.out.weight = self.characters.weight

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        embedded = self.characters(text) * math.sqrt(self.out.weight.shape[1]) + self.positions.weight[: text.shape[1]]
        return self.out(self.layers(embedded, mask=mask, is_causal=True))


def encoded(path: str) -> Tensor:
    files = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return torch.tensor([CHARACTERS.find(character) % len(CHARACTERS) for character in text])


parser = argparse.ArgumentParser()
parser.add_argument("--text", default="")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=6)
arguments = parser.parse_args()

text = encoded(arguments.text)
training, held_out = text[: int(0.95 * len(text))], text[int(0.95 * len(text)) :]
torch.manual_seed(0)
model = Transformer(arguments.width, arguments.layers, CONTEXT)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
swarm = p2pnode.attach(model, optimizer)
generator = torch.Generator().manual_seed(swarm.seed)  # Another one on each node: each draws other windows.


def loss_on(source: Tensor, windows: int) -> Tensor:
    starts = torch.randint(0, len(source) - CONTEXT - 1, (windows,), generator=generator)
    batch = torch.stack([source[start : start + CONTEXT + 1] for start in starts])
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


evaluated = 0
while not swarm.done:
    loss = loss_on(training, 8)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    swarm.step(samples=8, loss=loss)
    if swarm.step_number >= evaluated + 50 or swarm.done:
        evaluated = swarm.step_number
        with swarm.shared_weights(), torch.no_grad():
            swarm.evaluate(samples=64, bits=float(loss_on(held_out, 64)) / math.log(2))
