"""A task with GPT-2's shape and random weights and tokens, for the size and not for the learning.

Tied embedding, learned positions, pre-norm blocks: 12 layers of 768 are GPT-2's 124 M parameters, and 24 of
1,024 its 355 M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.task import TrainSpec, read_options

VOCABULARY, CONTEXT = 50_257, 1_024


class GptOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Layers and width of the model, and the tokens of a batch."""

    layers: int = 12
    width: int = 768
    batch_size: int = 1
    tokens: int = 16


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class GptModel(nn.Module):
    """Logits of shape (batch, tokens, vocabulary)."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.position = nn.Embedding(CONTEXT, options.width)
        self.blocks = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Gpt:
    """Implements `training.tasks.task.Task`, on the CPU."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, node_seed: int, **_: Any) -> None:
        self._options = read_options(GptOptions, options, "gpt")
        self._seed = node_seed

    def build(self) -> TrainSpec:
        model = GptModel(self._options)
        return TrainSpec(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        shape = (self._options.batch_size, self._options.tokens + 1)
        while True:
            yield torch.randint(VOCABULARY, shape, generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:  # noqa: ARG002
        return {}, 0
