"""Lightning's real `Trainer` in two nodes, on a model of five parameters."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="make test-frameworks installs it")

from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint  # noqa: E402

from p2pnode.integrations.lightning import SwarmCallback  # noqa: E402
from p2pnode.training.settings import ExchangeSettings  # noqa: E402
from p2pnode.training.trainer.attach import NotAttached  # noqa: E402
from p2pnode.training.trainer_link.messages import Measurement, Warned  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

LOCAL_STEPS = 3


class Sums(lightning.LightningModule):
    """Learns the sum of four numbers. `interval` is that of its schedule."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.interval = interval
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_error", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def data(seed: int, size: int = 64) -> TensorDataset:
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def fit(folder: Path, number: int, module: Any = None, **chosen: Any) -> Any:
    """Train until something ends it; the Trainer."""
    torch.manual_seed(number)
    callbacks = [SwarmCallback(**chosen.pop("swarm", {})), *chosen.pop("callbacks", [])]
    settings = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "accumulate_grad_batches": 2,
        "val_check_interval": 5,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **chosen,
    }
    trainer = lightning.Trainer(default_root_dir=folder / str(number), callbacks=callbacks, **settings)
    trainer.fit(module or Sums(), DataLoader(data(number), 8, shuffle=True), DataLoader(data(9, 50), 32))
    return trainer


def scripts(folder: Path, make: Callable[[int], dict[str, Any]] = lambda number: {}) -> list[Callable[[], Any]]:
    return [lambda number=number: fit(folder, number, **make(number)) for number in range(2)]


def weights(trainer: Any) -> list[torch.Tensor]:
    return [value.detach() for value in trainer.lightning_module.parameters()]


def measured(trainer: Any) -> list[Measurement]:
    return [message for message in trainer.heard if isinstance(message, Measurement)]


def test_fit_returns_when_the_swarm_is_done_with_its_weights(in_two_nodes: Any, tmp_path: Path) -> None:
    """Ten turns of three optimiser steps of two batches: samples, losses and the schedule are Lightning's own, whatever
    `min_steps` asks, and both nodes end with one model."""
    together = in_two_nodes(*scripts(tmp_path, lambda number: {"min_steps": 500}))

    first, second = together.results.values()
    assert all(torch.equal(one, two) for one, two in zip(weights(first), weights(second), strict=True))
    assert first.global_step == 10 * LOCAL_STEPS
    reports = together.trainers["n0"].reports
    assert [report.samples for report in reports] == [LOCAL_STEPS * 2 * 8] * 10
    losses = first.lightning_module.losses
    for turn, report in enumerate(reports):
        assert report.loss == pytest.approx(sum(losses[turn * 6 : turn * 6 + 6]) / 6, rel=1e-4)
        assert report.metrics["learning_rate"] == pytest.approx(0.1 * 0.99 ** ((turn + 1) * LOCAL_STEPS))
    assert reports[-1].loss < 0.01 * reports[0].loss


def test_validation_and_its_checkpoints_are_of_the_shared_weights(in_two_nodes: Any, tmp_path: Path) -> None:
    """In the middle of turns too: both nodes measure the same, report it under its own name and without what training
    logs, and the checkpoint of the best validation has the same weights on both."""

    def chosen(number: int) -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path / f"kept{number}", monitor="val_error", save_top_k=1)]}

    together = in_two_nodes(*scripts(tmp_path, chosen))

    first, second = (measured(trainer) for trainer in together.trainers.values())
    assert len(first) > 5
    assert [message.metrics for message in first] == [message.metrics for message in second]
    assert {name for message in first for name in message.metrics} == {"error"}
    assert {message.samples for message in first} == {50}
    saved = [
        torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
        for trainer in together.results.values()
    ]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


def test_a_trainer_that_ends_first_leaves_with_the_shared_weights(in_two_nodes: Any, tmp_path: Path) -> None:
    """By `max_steps` in the middle of a turn, or by early stopping: the node leaves cleanly."""

    def chosen(number: int) -> dict[str, Any]:
        if number:
            return {"max_steps": 7}
        return {"callbacks": [EarlyStopping("val_error", stopping_threshold=1e9)]}

    together = in_two_nodes(*scripts(tmp_path, chosen), steps=1000, **{"barrier.method": "asp"})

    for trainer in together.results.values():
        assert trainer.callbacks[0].swarm.done
    assert together.results["n1"].global_step == 7
    vector = together.trainers["n1"].vector
    assert torch.equal(
        torch.cat([value.flatten() for value in weights(together.results["n1"])]).sort().values,
        torch.tensor(vector).sort().values,
    )


class Unfrozen(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, train_bn=False)


class Deep(Sums):
    def __init__(self) -> None:
        super().__init__("epoch")
        torch.manual_seed(5)
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.net = nn.Sequential(body, nn.Linear(8, 1))  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.01)


def test_layers_that_a_callback_unfreezes_are_shared(in_two_nodes: Any, tmp_path: Path) -> None:
    """With `include_frozen`, from the step on at which Lightning's own callback unfreezes them. BatchNorm is unfrozen
    too, but not given to the optimiser."""

    def made(number: int) -> dict[str, Any]:
        return {"module": Deep(), "callbacks": [Unfrozen()], "swarm": {"include_frozen": True}}

    together = in_two_nodes(*scripts(tmp_path, made))

    first, second = together.results.values()
    assert all(torch.equal(one, two) for one, two in zip(weights(first), weights(second), strict=True))
    assert not torch.equal(weights(first)[0], next(Deep().parameters()))


def test_a_schedule_by_epochs_is_left_to_lightning(in_two_nodes: Any, tmp_path: Path) -> None:
    """It counts this node's own data, of which it is warned; the swarm does not move it."""

    def script(number: int) -> Any:
        with pytest.warns(UserWarning, match="counts epochs of this node's own data"):
            return fit(tmp_path, number, Sums(interval="epoch"))

    together = in_two_nodes(lambda: script(0), lambda: script(1))

    epochs = len(together.results["n0"].lightning_module.losses) // 8
    assert together.trainers["n0"].reports[-1].metrics["learning_rate"] == pytest.approx(0.1 * 0.99**epochs)


class Adversaries(lightning.LightningModule):
    """Two halves with an optimiser and a schedule each; the first steps twice for each step of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic, self.generator = nn.Linear(4, 1), nn.Linear(4, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        optimizers, schedules = self.optimizers(), self.lr_schedulers()
        loss = torch.zeros(())
        for optimizer, schedule, half, times in zip(
            optimizers, schedules, (self.critic, self.generator), (2, 1), strict=True
        ):
            for _ in range(times):
                loss = nn.functional.mse_loss(half(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        found = []
        for half, rate in ((self.critic, 0.1), (self.generator, 0.05)):
            optimizer = torch.optim.SGD(half.parameters(), lr=rate)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
            found.append({"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}})
        return tuple(found)


def test_several_optimisers_train_one_model(in_two_nodes: Any, tmp_path: Path) -> None:
    """With manual optimisation a batch is a step of the swarm, however often each optimiser steps."""

    def made(number: int) -> Any:
        return fit(tmp_path, number, Adversaries(), accumulate_grad_batches=1, val_check_interval=None)

    together = in_two_nodes(lambda: made(0), lambda: made(1))

    first, second = together.results.values()
    assert all(torch.equal(one, two) for one, two in zip(weights(first), weights(second), strict=True))
    reports = together.trainers["n0"].reports
    assert [report.optimizer_steps for report in reports] == [LOCAL_STEPS] * 10
    assert [report.samples for report in reports] == [LOCAL_STEPS * 8] * 10
    rates = [optimizer.param_groups[0]["lr"] for optimizer in first.optimizers]
    assert rates == pytest.approx([rate * 0.99 ** (10 * LOCAL_STEPS) for rate in (0.1, 0.05)])
    told = [one for one in together.trainers["n0"].heard if isinstance(one, Warned)]
    assert told == []


class Backwards(torch.utils.data.Sampler[int]):
    """A user's own order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size)[::-1])


class Read(torch.utils.data.Dataset[Any]):
    """Pairs of 32 numbers and their sum; notes what is read, in order."""

    def __init__(self, size: int) -> None:
        self.inputs = torch.randn(size, 32, generator=torch.Generator().manual_seed(1))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)


class Wide(Sums):
    """A model of values enough to compare deltas."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("kind", ["shuffled", "in order", "own sampler", "not shared"])
def test_nodes_with_one_data_set_divide_it(kind: str, in_two_nodes: Any, tmp_path: Path) -> None:
    """Whether the loader shuffles or not, each sample is read by one of them in an epoch, all batches are full, and an
    epoch of the Trainer has as many as before. A sampler of the user's own stays, and both nodes are told."""

    def script(number: int) -> tuple[list[int], int]:
        torch.manual_seed(0)
        rows = Read(66)
        sampler = Backwards(66) if kind == "own sampler" else None
        loader = DataLoader(rows, batch_size=4, shuffle=kind == "shuffled", sampler=sampler)
        trainer = lightning.Trainer(
            max_epochs=-1, callbacks=[SwarmCallback(share_data=kind != "not shared")], accelerator="cpu",
            default_root_dir=tmp_path / str(number), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Wide(), loader)
        return rows.read, trainer.global_step

    together = in_two_nodes(lambda: script(0), lambda: script(1), **{"exchange.codec": ExchangeSettings().codec})

    (first, steps), (second, _) = together.results.values()
    is_divided = kind in ("shuffled", "in order")
    assert steps == 30
    assert (first == second) != is_divided
    counts = Counter(first + second)
    assert len(counts) == 66
    assert max(counts.values()) - min(counts.values()) <= (1 if is_divided else 2)
    samples = {report.samples for trainer in together.trainers.values() for report in trainer.reports}
    assert samples == ({LOCAL_STEPS * 4} if is_divided else {LOCAL_STEPS * 4, LOCAL_STEPS * 4 - 2})
    told = {record.node: record.fields["node"] for record in together.swarm.of("same_data")}
    assert len(told) == (0 if is_divided else 2)


@pytest.mark.long
def test_workers_read_what_the_nodes_have_divided(in_two_nodes: Any, tmp_path: Path) -> None:
    """They are given batches when the loader is made, before the node attaches: such an epoch was not divided."""
    # A fork while the other node's thread computes may end by a segmentation fault in the worker. One process imports
    # what the workers of all epochs need.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["lightning", "torch"])

    class Noted(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen += [round(float(one), 4) for one in batch[1]]
            return super().training_step(batch, index)

    def script(number: int) -> list[float]:
        module = Noted()
        trainer = lightning.Trainer(
            max_epochs=-1, callbacks=[SwarmCallback()], accelerator="cpu", logger=False, enable_checkpointing=False,
            default_root_dir=tmp_path / str(number), enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader(Read(48), batch_size=4, num_workers=1, multiprocessing_context=server)
        trainer.fit(module, loader)
        return module.seen

    first, second = in_two_nodes(lambda: script(0), lambda: script(1), steps=4).results.values()
    assert len(first) == len(second) == 48
    assert first != second


def test_outside_of_a_node_fit_says_how_to_start_the_script(tmp_path: Path) -> None:
    """The error of `p2pnode.attach`, from `fit`."""
    with pytest.raises(NotAttached, match="p2pnode run -- python"):
        fit(tmp_path, 0)
