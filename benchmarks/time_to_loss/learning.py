"""What all contestants share: the model, the text, the clock of an optimiser step, its notes, and the snapshots.

It needs torch alone. `python -m benchmarks.time_to_loss.SCRIPT FILE`: the JSON file has the fields of `Given`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, CONTEXT, RATE, WARM_STEPS = 8, 32, 1e-3, 100
#: Of a node's text to the part that all are judged by; and how many such texts there are.
PARTS, TEXTS = 9, 4
#: The nodes whose shared model is judged: two, because nodes may differ.
JUDGED = (0, 1)
VALIDATION_BATCHES, VALIDATION_BATCH = 20, 32


@dataclass(frozen=True, slots=True)
class Given:
    """What one node is told. `life`: how often it was killed before."""

    rank: int
    nodes: int
    seed: int
    step_s: float
    wall_s: float
    snapshot_s: float
    folder: str
    text: str
    address: str
    founder: str
    life: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_command_line(cls) -> Given:
        torch.set_num_threads(1)
        return cls(**json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")))


# -- the text -----------------------------------------------------------------------------------------------------


def own_text(given: Given, rank: int) -> Tensor:
    """The bytes that this node trains on. Beyond four nodes several have one text, and batches of their own."""
    text, part = _text(given)
    place = rank % TEXTS * PARTS * part
    return text[place : place + PARTS * part]


def common_text(given: Given) -> Tensor:
    """The bytes that all are judged by."""
    text, part = _text(given)
    return text[-part:]


def _text(given: Given) -> tuple[Tensor, int]:
    text = torch.frombuffer(bytearray(Path(given.text).read_bytes()), dtype=torch.uint8).long()
    return text, len(text) // (PARTS * TEXTS + 1)


def batch(text: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Random places: inputs and the bytes that follow them, each of `size` by `CONTEXT`."""
    places = torch.randint(0, len(text) - CONTEXT - 1, (size,), generator=generator)
    rows = torch.stack([text[place : place + CONTEXT + 1] for place in places])
    return rows[:, :-1], rows[:, 1:]


# -- the model ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A transformer of bytes with 1.3 M parameters."""

    def __init__(self, width: int = 160, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.blocks(self.bytes(x) + self.places(torch.arange(x.shape[1])))))
        return found


def new_model(given: Given) -> Model:
    """With the same initial values on all nodes."""
    torch.manual_seed(given.seed)
    return Model()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def judged(model: nn.Module, text: Tensor) -> float:
    """The loss on the common text, in nats per byte: always the same batches."""
    generator = torch.Generator().manual_seed(7)
    losses = [loss_of(model, *batch(text, generator, VALIDATION_BATCH)).item() for _ in range(VALIDATION_BATCHES)]
    return sum(losses) / len(losses)


def warm_up(step: int) -> float:
    """The part of the learning rate at this optimiser step."""
    return min(1.0, (step + 1) / WARM_STEPS)


def vector_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# -- the clock ----------------------------------------------------------------------------------------------------


class Clock:
    """One node's: `begin` waits for the common start, `train` takes `step_s`, `ended` notes the step."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._folder = Path(given.folder)
        self._text = own_text(given, given.rank)
        # A node that comes back draws other batches than before.
        self._generator = torch.Generator().manual_seed(given.seed * 100 + given.rank + 1000 * given.life)
        self._notes = (self._folder / f"steps-{given.rank}").open("a", buffering=1)
        self._next_snapshot_s = self._began_at = self._compute_s = 0.0
        self.started_at = 0.0
        self.steps = 0
        self.loss = 0.0

    def begin(self, idle: Callable[[], None] = lambda: None) -> None:
        """Say that this node is ready, and wait until all are; `idle` is called meanwhile."""
        given, start = self._given, self._folder / "start"
        (self._folder / f"ready-{given.rank}-{given.life}").touch()
        while not start.exists():
            idle()
            time.sleep(0.05)
        self.started_at = float(start.read_text())
        time.sleep(max(0.0, self.started_at - time.time()))
        self._next_snapshot_s = given.snapshot_s * (int(self.passed_s / given.snapshot_s) + 1)
        self._began_at = time.time()

    @property
    def passed_s(self) -> float:
        """Since the common start."""
        return time.time() - self.started_at

    @property
    def goes_on(self) -> bool:
        """A little longer than the run: the benchmark ends it."""
        return self.passed_s < self._given.wall_s + 3

    def train(self, model: nn.Module, optimizer: Any) -> None:
        """Forward and backward, and the rest of `step_s`. The optimiser's own step comes after it, for all alike."""
        inputs, targets = batch(self._text, self._generator, BATCH)
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        self.loss = loss.item()
        self._compute_s = time.time() - self._began_at
        time.sleep(max(0.0, self._given.step_s - self._compute_s))

    def ended(self) -> None:
        """All that belongs to an optimiser step is done: note when, and how long it computed."""
        now = time.time()
        self.steps += 1
        self._notes.write(f"{now - self.started_at:.3f} {self._compute_s:.4f}\n")
        self._began_at = now

    @property
    def is_snapshot_due(self) -> bool:
        return self.passed_s >= self._next_snapshot_s

    def save(self, shared: Tensor) -> None:
        """Keep the shared model of this moment, on the nodes that are judged."""
        given, second = self._given, round(self._next_snapshot_s)
        self._next_snapshot_s += given.snapshot_s
        if given.rank in JUDGED:
            file = self._folder / f"snapshot-{given.rank}-{second}"
            torch.save(shared, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)

    def save_in_background(self, shared: Callable[[], Tensor]) -> None:
        """A thread saves on time, also while the training waits."""

        def loop() -> None:
            while True:
                time.sleep(max(0.0, self._next_snapshot_s - self.passed_s))
                self.save(shared())

        threading.Thread(target=loop, daemon=True).start()
