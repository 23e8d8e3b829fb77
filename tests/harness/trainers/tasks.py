"""Small tasks for the tests of the trainer, each with one property or fault. Importable in any process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.batches import ShuffledBatches
from p2pnode.training.tasks.task import TaskError, TrainSpec
from p2pnode.training.trainer import joining
from tests.harness.trainers.optimizers import FusedMasters, Lookahead, SGDScheduleFree


class Line:
    """A small network with dropout that learns a fixed map from 4 numbers to 2; plain SGD."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:
        self.options = options
        self.data_dir = data_dir
        self.node_seed = node_seed
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(64, 4, generator=generator)
        outputs = inputs @ torch.randn(4, 2, generator=generator)
        self.device = torch.device(device)
        self.inputs, self.outputs = inputs.to(self.device), outputs.to(self.device)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    def build(self) -> TrainSpec:
        model = self.model()
        return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ShuffledBatches(self.inputs, self.outputs, int(self.options.get("batch_size", 8)), self.node_seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, outputs = batch
        return functional.mse_loss(model(inputs).float(), outputs)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        return {"error": float(functional.mse_loss(model(self.inputs).float(), self.outputs))}, len(self.inputs)


class Adaptive(Line):
    """AdamW with a cosine schedule: everything a snapshot has to hold."""

    def build(self) -> TrainSpec:
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return TrainSpec(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100))


class SlowWeights(Line):
    """Lookahead, whose state has a position."""

    def build(self) -> TrainSpec:
        model = self.model()
        return TrainSpec(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.05), k=3, alpha=0.3))


class ScheduleFree(Line):
    """Schedule-free, whose state has a position, and which has two modes."""

    def build(self) -> TrainSpec:
        model = self.model()
        optimizer = SGDScheduleFree(model.parameters(), lr=0.05)
        optimizer.train()
        return TrainSpec(model, optimizer)


class Copying(Line):
    """AdamW on copies of the weights; without `told` nobody tells it what is loaded."""

    def build(self) -> TrainSpec:
        model = self.model()
        optimizer = FusedMasters(model.parameters(), lambda copies: torch.optim.AdamW(copies, lr=0.01))
        return TrainSpec(model, optimizer, on_load=optimizer.copy_in if self.options.get("told", True) else None)


class Halves(Line):
    """An optimiser and a schedule for each half of the model."""

    def build(self) -> TrainSpec:
        model: Any = self.model()
        first, second = model[0].parameters(), model[3].parameters()
        optimizers = [torch.optim.SGD(first, lr=0.05, momentum=0.9), torch.optim.AdamW(second, lr=0.01)]
        return TrainSpec(model, optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in optimizers])


class Swapping(Line):
    """Replaces its layer while it trains."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if not hasattr(self, "swapped"):
            self.swapped = True
            model.get_submodule("0").extra = nn.Linear(1, 1)
        return loss


class OneCycle(Line):
    """A schedule that ends after six optimiser steps."""

    def build(self) -> TrainSpec:
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return TrainSpec(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6))


class Plateau(Line):
    """A schedule that depends on the node's own loss."""

    def build(self) -> TrainSpec:
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return TrainSpec(model, optimizer, scheduler)


class Plain(Line):
    """No dropout, plain SGD; `accumulate` from the options."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def build(self) -> TrainSpec:
        model = self.model().to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainSpec(model, optimizer, accumulate=int(self.options.get("accumulate", 1)))


class Normed(Plain):
    """Batch normalisation: floating-point buffers that training changes, and an integer one."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class Scaled(Plain):
    """A gradient scaler whose first scale is far too high, so that it skips steps."""

    def build(self) -> TrainSpec:
        spec = super().build()
        spec.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        spec.optimizer.param_groups[0]["lr"] = 0.0005
        return spec

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * 100


class Infinite(Plain):
    """Every loss is infinite."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * float("inf")


class Finite(Plain):
    """`batches` ends after three."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(self.inputs[:8], self.outputs[:8])] * 3)


class Empty(Plain):
    """`batches` yields nothing."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([])


class Noisy(Line):
    """Its evaluation draws random numbers and leaves the model in another mode."""

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        torch.rand(7)
        model.train()
        return super().evaluate(model)


class Vectorial(Plain):
    """Its loss is not a scalar."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])


class Frozen(Plain):
    """Nothing to train."""

    def build(self) -> TrainSpec:
        spec = super().build()
        spec.model.requires_grad_(False)
        return spec


class RaisesInInit(Plain):
    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:
        raise KeyError("no such column")


class RaisesInBuild(Plain):
    def build(self) -> TrainSpec:
        raise ValueError("width must be even\nand so on")


class BuildsNothing(Plain):
    def build(self) -> TrainSpec:
        return None


class MissesData(Plain):
    def build(self) -> TrainSpec:
        Path(self.data_dir, "images.bin").read_bytes()
        return super().build()


class SaysWhatToDo(Plain):
    def build(self) -> TrainSpec:
        raise TaskError("the corpus is empty", "download it first")


class NoTask:
    """Has none of the methods of a task."""


not_a_class = 7


class Dying(Plain):
    """Ends its process at the optimiser step `dies_at` of the process, in the way that `how` names."""

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:
        super().__init__(options, data_dir=data_dir, seed=seed, node_seed=node_seed, device=device)
        self.calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.options["dies_at"]:
            match self.options["how"]:
                case "raise":
                    raise RuntimeError("out of memory")
                case "exit":
                    os.write(2, b"the driver has gone\n")
                    os._exit(17)
                case "signal":
                    os.kill(os.getpid(), signal.SIGSEGV)
        return super().loss(model, batch)


class DiesAtStart(Plain):
    def build(self) -> TrainSpec:
        os.write(2, b"library version mismatch\n")
        os._exit(5)


class Slow(Plain):
    """Each optimiser step, and each evaluation, takes `seconds`."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self.options["seconds"])
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        for _ in range(10):
            time.sleep(self.options["seconds"])
            model(self.inputs)
        return super().evaluate(model)


class BuildsOnce(Plain):
    """Its second start fails, as when a device's memory is not free yet."""

    def build(self) -> TrainSpec:
        mark = Path(self.options["mark"])
        if mark.exists():
            raise RuntimeError("out of memory")
        mark.touch()
        return super().build()


class Growing(Plain):
    """Each start builds a larger model than the one before."""

    def model(self) -> nn.Module:
        mark = Path(self.options["mark"])
        mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
        return nn.Sequential(nn.Linear(4, len(mark.read_text())), nn.Tanh(), nn.Linear(len(mark.read_text()), 2))


class LosesItsGpu(Plain):
    """The first start says that its model is on a GPU; a later one finds none."""

    def model(self) -> nn.Module:
        mark = Path(self.options["mark"])
        if not mark.exists():
            mark.touch()
            joining.TrainerHello = partial(_hello_from_a_gpu, joining.TrainerHello)
        return super().model()


def _hello_from_a_gpu(kind: Any, **fields: Any) -> Any:
    return kind(**fields | {"device": "cuda:0"})


class OnABadDriver(Plain):
    """As on a machine whose driver neither registers memory nor answers torch."""

    def model(self) -> nn.Module:
        joining.register = lambda *_: "the driver cannot register 1 MB"
        joining.unused_gpu = lambda *_, **__: ("the GPU of this machine is not used", "see nvidia-smi")
        return super().model()


class Requantised(Plain):
    """Each start builds other packed weights than the one before."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("codes", torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8))
        return model


class Ledger:
    """A model that counts: row `part` of `rows` loses 1/1024 in each optimiser step of this node, exactly, and the
    others' rows stay. With plain sums and local_steps = 1 the shared model shows how many steps of each node are in it.
    A step takes `seconds`."""

    version = "1"

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:
        self.options = options

    def build(self) -> TrainSpec:
        model = nn.Module()
        model.rows = nn.Parameter(torch.zeros(int(self.options["parts"]), 64))
        return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=1.0 / 1024))

    def batches(self) -> Iterator[int]:
        while True:
            yield 1

    def loss(self, model: nn.Module, batch: int) -> Tensor:
        time.sleep(self.options["seconds"])
        return model.rows[int(self.options["part"])].sum()

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        return {"steps": float(-1024 * model.rows.sum() / 64)}, 1
