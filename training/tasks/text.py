"""The task `text`: a small byte-level transformer on the file that `training.data_dir` names.

The first nine tenths are for training, the last tenth for evaluation, as loss in nats and as bits per byte. Windows are
drawn at random with the node's own seed; there are no epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.task import TaskError, TrainSpec, read_options

_BYTES = 256
_MAX_EVALUATION_WINDOWS = 200
_EVALUATION_BATCH = 20


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The size of the transformer and its training. `warmup` counts optimiser steps."""

    layers: Annotated[int, Meta(ge=1)] = 4
    width: Annotated[int, Meta(ge=8)] = 128
    heads: Annotated[int, Meta(ge=1)] = 4
    context: Annotated[int, Meta(ge=2)] = 128
    batch_size: Annotated[int, Meta(ge=1)] = 16
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    learning_rate: Annotated[float, Meta(gt=0)] = 0.001
    warmup: Annotated[int, Meta(ge=0)] = 100


class RandomWindows(Iterator[tuple[Tensor, Tensor]]):
    """Pairs of `int64[batch, context]`: bytes, and the byte that follows each."""

    def __init__(self, data: np.ndarray[Any, Any], context: int, batch_size: int, seed: int) -> None:
        self._data = data
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._batch = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._batch]))
        self._batch += 1
        starts = generator.integers(0, len(self._data) - self._context, self._batch_size)
        return windows(self._data, starts, self._context)

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._batch = state["batch"]


class Text:
    """A transformer that predicts the next byte."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(TextOptions, options, "text")
        if self._options.width % self._options.heads:
            raise TaskError(
                f"width = {self._options.width} cannot be divided among heads = {self._options.heads}",
                "choose a width that is a multiple of heads",
            )
        self._device = torch.device(device)
        self._node_seed = node_seed
        self._train, self._validation = _read(data_dir, self._options.context)

    def build(self) -> TrainSpec:
        model = ByteTransformer(self._options).to(self._device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self._options.learning_rate, betas=(0.9, 0.95))
        warmup = self._options.warmup
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
        return TrainSpec(model, optimizer, scheduler, clip_norm=1.0)

    def batches(self) -> RandomWindows:
        return RandomWindows(self._train, self._options.context, self._options.batch_size, self._node_seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        read, wanted = (part.to(self._device) for part in batch)
        return functional.cross_entropy(model(read).flatten(0, 1), wanted.flatten())

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        context = self._options.context
        count = min(_MAX_EVALUATION_WINDOWS, (len(self._validation) - 1) // context)
        starts = np.linspace(0, len(self._validation) - 1 - context, count).astype(np.int64)
        total = 0.0
        for first in range(0, count, _EVALUATION_BATCH):
            batch = windows(self._validation, starts[first : first + _EVALUATION_BATCH], context)
            total += float(self.loss(model, batch)) * len(batch[0])
        loss = total / count
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}, count


class ByteTransformer(nn.Module):
    """Bytes `int64[batch, time]` to scores `float32[batch, time, 256]`; input and output share their weights."""

    def __init__(self, options: TextOptions) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, options.width)
        self.places = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(_Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.scores = nn.Linear(options.width, _BYTES, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.scores.weight = self.bytes.weight

    def forward(self, read: Tensor) -> Tensor:
        hidden = self.bytes(read) + self.places.weight[: read.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


class _Block(nn.Module):
    """Causal attention, then a perceptron; each is residual, with normalisation before."""

    def __init__(self, options: TextOptions) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.dropout = options.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden)).view(batch, time, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        hidden = hidden + functional.dropout(mixed, self.dropout, self.training)
        return hidden + functional.dropout(self.perceptron(hidden), self.dropout, self.training)


def windows(data: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], context: int) -> tuple[Tensor, Tensor]:
    """Windows from each start, and the same shifted by one byte: `int64[starts, context]` each."""
    cut = torch.from_numpy(np.stack([data[start : start + context + 1] for start in starts]).astype(np.int64))
    return cut[:, :-1], cut[:, 1:]


def _read(data_dir: str, context: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    hint = "name a text file in training.data_dir"
    if not data_dir:
        raise TaskError("the task text needs a file, and training.data_dir is empty", hint)
    path = Path(data_dir)
    if path.is_dir():
        raise TaskError(f"training.data_dir = {path} is a folder, and the task text needs one file", hint)
    try:
        data = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError as error:
        raise TaskError(f"the task text finds no file {path}", hint) from error
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}", hint) from error
    cut = len(data) * 9 // 10
    if len(data) - cut < context + 2:
        raise TaskError(
            f"{path} has {len(data)} bytes, too few for windows of {context}: its last tenth is for evaluation",
            f"take a file of {10 * (context + 2)} bytes or more, or a smaller context in [training.options]",
        )
    return data[:cut], data[cut:]
