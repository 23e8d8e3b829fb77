"""Tasks for measuring: `Load`, whose optimiser step can be made as long as wanted, `PacedDigits`, `Wide`, and `Gpt`.

The trainer's process imports them by name (`benchmarks.tasks:Load`); the harness itself needs no torch for that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.digits import Digits
from p2pnode.training.tasks.task import TrainSpec, read_options
from p2pnode.training.tasks.text import ByteTransformer, TextOptions


class LoadOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`layers` square layers of `width`, passed through `rounds` times: load grows with rounds, the vector does not."""

    width: Annotated[int, Meta(ge=1)] = 512
    layers: Annotated[int, Meta(ge=1)] = 4
    batch_size: Annotated[int, Meta(ge=1)] = 32
    rounds: Annotated[int, Meta(ge=1)] = 1


class Load:
    """Matrix products on noise, and nothing that sleeps: the processor is busy for the whole of a step."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(LoadOptions, options, "load")
        self._device = torch.device(device)

    def build(self) -> TrainSpec:
        width = self._options.width
        layers = [part for _ in range(self._options.layers) for part in (nn.Linear(width, width), nn.Tanh())]
        model = nn.Sequential(*layers).to(self._device)
        return TrainSpec(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def batches(self) -> Iterator[Tensor]:
        batch = torch.randn(self._options.batch_size, self._options.width, device=self._device)
        while True:
            yield batch

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        values = batch
        for _ in range(self._options.rounds):
            values = model(values)
        return functional.mse_loss(values, batch)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        batch = next(self.batches())
        return {"loss": float(self.loss(model, batch))}, len(batch)


class PacedDigits(Digits):
    """The task `digits` with a rest of 20 ms in each optimiser step, as where a device computes: six of them leave a
    machine with two cores time to answer."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return super().loss(model, batch)


class WideOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`values` parameters; an optimiser step rests for `seconds`."""

    values: Annotated[int, Meta(ge=1)] = 25_000_000
    seconds: Annotated[float, Meta(ge=0)] = 2.0


class Wide:
    """Many parameters and next to no arithmetic: what is left of a step is the exchange."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(WideOptions, options, "wide")
        self._generator = torch.Generator().manual_seed(node_seed % (1 << 32))

    def build(self) -> TrainSpec:
        model = nn.Module()
        model.values = nn.Parameter(torch.zeros(self._options.values))
        return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def batches(self) -> Iterator[float]:
        while True:
            yield float(torch.rand((), generator=self._generator))

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        time.sleep(self._options.seconds)
        values: Tensor = model.values  # type: ignore[assignment]
        return batch * values.sum()

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        return {"sum": float(sum(part.sum() for part in model.parameters()))}, 1


class GptOptions(msgspec.Struct, forbid_unknown_fields=True):
    """A transformer of words. `accumulate` batches of `batch_size` windows make an optimiser step. `fault`, once for
    the file `mark`: the name of one in `Gpt._fail`."""

    layers: Annotated[int, Meta(ge=1)] = 12
    width: Annotated[int, Meta(ge=8)] = 768
    heads: Annotated[int, Meta(ge=1)] = 12
    context: Annotated[int, Meta(ge=2)] = 1024
    vocabulary: Annotated[int, Meta(ge=2)] = 50304
    batch_size: Annotated[int, Meta(ge=1)] = 32
    accumulate: Annotated[int, Meta(ge=1)] = 2
    compiled: bool = False
    fault: str = ""
    mark: str = ""


class Gpt:
    """Random words, weights in float32, and passes in bfloat16, as models are trained."""

    version = "1"
    #: Optimiser steps before a fault: the trainer has been in a turn then.
    FAULT_AT = 25

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:  # noqa: ARG002
        self._options = read_options(GptOptions, options, "gpt")
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(node_seed % (1 << 32))
        self._batches = 0

    def build(self) -> TrainSpec:
        options = self._options
        with self._device:  # the processor would take a quarter of a minute to make up the values of a large one
            model = gpt(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self._device.type == "cuda")
        if options.compiled:
            model = torch.compile(model)  # type: ignore[assignment]
        return TrainSpec(model, optimizer, accumulate=options.accumulate)

    def batches(self) -> Iterator[Tensor]:
        shape = (self._options.batch_size, self._options.context + 1)
        batch = torch.randint(0, self._options.vocabulary, shape, generator=self._generator).to(self._device)
        while True:
            self._batches += 1
            if self._options.fault and self._batches == self.FAULT_AT * self._options.accumulate:
                self._fail()
            yield batch

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            scores = model(batch[:, :-1])
            return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        batch = next(self.batches())
        return {"loss": float(self.loss(model, batch))}, len(batch)

    def _fail(self) -> None:
        mark = Path(self._options.mark)
        if mark.exists():
            return
        mark.touch()
        has_gpu = self._device.type == "cuda"
        match self._options.fault:
            case "memory" if has_gpu:
                torch.empty(1 << 50, device=self._device)
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "assert" if has_gpu:
                functional.embedding(torch.tensor([9], device=self._device), torch.zeros(2, 2, device=self._device))
                torch.cuda.synchronize()
            case "assert":
                raise RuntimeError("CUDA error: device-side assert triggered")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def gpt(options: GptOptions) -> nn.Module:
    """Windows of words `int64[batch, time]` to scores `float[batch, time, vocabulary]`."""
    text = TextOptions(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context, dropout=0.0
    )
    model = ByteTransformer(text)
    model.bytes = nn.Embedding(options.vocabulary, options.width)
    model.scores = nn.Linear(options.width, options.vocabulary, bias=False)
    nn.init.normal_(model.bytes.weight, std=0.02)
    model.scores.weight = model.bytes.weight
    return model
