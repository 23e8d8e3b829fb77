"""Hugging Face's real `Trainer` in two nodes, on tiny random models."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="make test-frameworks installs it")
pytest.importorskip("accelerate", reason="make test-frameworks installs it")

from p2pnode.integrations.transformers import SwarmCallback  # noqa: E402
from p2pnode.training.settings import ExchangeSettings  # noqa: E402
from p2pnode.training.trainer.attach import NotAttached  # noqa: E402
from p2pnode.training.trainer_link.messages import SOCKET_VARIABLE, Measurement  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

LOCAL_STEPS = 3


class Repeated(torch.utils.data.Dataset):
    """Sequences (12,) of one token each, which a model learns in a few steps."""

    def __init__(self, seed: int, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 8, (size, 1), generator=generator).repeat(1, 12)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def small_model(**chosen: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=8, n_positions=12, n_embd=16, n_layer=1, n_head=2, **chosen)
    return transformers.GPT2LMHeadModel(config)


def trainer_of(folder: Path, number: int, model: Any = None, kind: Any = None, **chosen: Any) -> Any:
    """A Trainer with one token less in its data on each node, and a callback."""
    settings = {
        "max_steps": 1000,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7 + number,
        **chosen,
    }
    return (kind or transformers.Trainer)(
        model if model is not None else small_model(),
        transformers.TrainingArguments(str(folder / f"out{number}"), **settings),
        train_dataset=Repeated(number),
        eval_dataset=Repeated(9),
        callbacks=[SwarmCallback()],
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def scripts(folder: Path, **chosen: Any) -> list[Callable[[], Any]]:
    """For two nodes: train, and return the Trainer."""

    def script(number: int) -> Any:
        trainer = trainer_of(folder, number, **chosen)
        trainer.train()
        return trainer

    return [lambda number=number: script(number) for number in range(2)]


def measured(trainer: Any) -> list[Measurement]:
    return [message for message in trainer.heard if isinstance(message, Measurement)]


def test_train_returns_when_the_swarm_is_done_with_its_weights(in_two_nodes: Any, tmp_path: Path) -> None:
    """Ten turns of three optimiser steps of two batches: samples, losses and the schedule are the Trainer's own, and
    both nodes end with one model."""
    together = in_two_nodes(*scripts(tmp_path, logging_steps=1))

    first, second = together.results.values()
    for name, value in weights(first.model).items():
        assert torch.equal(value, weights(second.model)[name])
    assert first.state.global_step == 10 * LOCAL_STEPS
    reports = together.trainers["n0"].reports
    assert [report.samples for report in reports] == [LOCAL_STEPS * 2 * 4] * 10
    assert reports[-1].loss < 0.2 * reports[0].loss
    logged = [row["loss"] for row in first.state.log_history if "loss" in row]
    for turn, report in enumerate(reports):
        of_turn = logged[turn * LOCAL_STEPS : (turn + 1) * LOCAL_STEPS]
        assert report.loss == pytest.approx(sum(of_turn) / LOCAL_STEPS, rel=1e-3)
        assert report.metrics["learning_rate"] == pytest.approx(1e-2 * (1 - (turn + 1) * LOCAL_STEPS / 1000))


def test_evaluation_and_checkpoints_are_of_the_shared_weights(in_two_nodes: Any, tmp_path: Path) -> None:
    """In the middle of turns too: both nodes measure the same, report it without timings, and save the same weights;
    the last evaluation and checkpoint are of the final model."""
    together = in_two_nodes(
        *scripts(tmp_path, eval_strategy="steps", eval_steps=7, save_strategy="steps", save_steps=14)
    )

    first, second = (measured(trainer) for trainer in together.trainers.values())
    assert [message.metrics for message in first] == [message.metrics for message in second]
    assert len(first) == 5  # After 7, 14, 21, 28 optimiser steps, and at the end.
    assert {name for message in first for name in message.metrics} == {"loss"}
    assert {message.samples for message in first} == {64}
    values = [message.metrics["loss"] for message in first]
    assert values == sorted(values, reverse=True)
    for step in (14, 28, 30):
        saved = [
            transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"out{number}" / f"checkpoint-{step}")
            for number in range(2)
        ]
        for name, value in weights(saved[0]).items():
            assert torch.equal(value, weights(saved[1])[name])
    final = weights(together.results["n0"].model)
    assert all(torch.equal(value, final[name]) for name, value in weights(saved[0]).items())


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_trainer_that_ends_first_leaves_with_the_shared_weights(
    strategy: str, in_two_nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`max_steps` in the middle of a turn: the node leaves, warns, and evaluates what the swarm has."""
    caplog.set_level(logging.WARNING, "p2pnode")
    chosen = {"max_steps": 7, "eval_strategy": strategy, "eval_steps": 100}

    together = in_two_nodes(*scripts(tmp_path, **chosen), steps=1000)

    first, second = together.results.values()
    assert "ends before the swarm" in caplog.text
    for trainer in (first, second):
        assert trainer.state.global_step == 7
        [swarm] = [one.swarm for one in trainer.callback_handler.callbacks if isinstance(one, SwarmCallback)]
        assert swarm.done
    for name, value in weights(first.model).items():
        assert torch.equal(value, weights(second.model)[name])
    [reported] = {tuple(measured(trainer)[-1].metrics.items()) for trainer in together.trainers.values()}
    found = first.evaluate()
    assert dict(reported)["loss"] == pytest.approx(found["eval_loss"], rel=1e-6)


def test_lora_sends_the_adapters_alone(in_two_nodes: Any, tmp_path: Path) -> None:
    """The vector holds the adapters; the base stays as it is, and both nodes end with the same adapters."""
    peft = pytest.importorskip("peft", reason="make test-frameworks installs it")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(small_model(), config)

    def script(number: int) -> tuple[Any, Any]:
        model = adapted()
        before = weights(model)
        trainer_of(tmp_path, number, model).train()
        return before, weights(model)

    together = in_two_nodes(lambda: script(0), lambda: script(1))

    names = [entry.name for entry in together.trainers["n0"].layout.entries]
    assert len(names) == 2
    assert all("lora_" in name for name in names)
    (before, first), (_, second) = together.results.values()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, before[name]) != ("lora_" in name), name


def test_a_compiled_model_reports_loss_and_samples(in_two_nodes: Any, tmp_path: Path) -> None:
    """The hook that reads them survives `torch_compile`."""
    together = in_two_nodes(*scripts(tmp_path, torch_compile=True, torch_compile_backend="eager"), steps=2)

    [first, second] = together.trainers["n0"].reports
    assert first.samples == second.samples == LOCAL_STEPS * 2 * 4
    assert 0 < second.loss < first.loss


class Backwards(torch.utils.data.Sampler[int]):
    """A user's own order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size)[::-1])


class Read(Repeated):
    """Notes what is read, in order."""

    def __init__(self, seed: int, size: int = 64) -> None:
        super().__init__(seed, size)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["default", "own sampler", "not shared"])
def test_nodes_with_the_default_seed_divide_the_data(kind: str, in_two_nodes: Any, tmp_path: Path) -> None:
    """The same data and the seed 42 on both: each sample is read by one of them in an epoch, all batches are full, and
    an epoch of the Trainer has as many as before. Otherwise both read the same, and are told."""

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return Backwards(len(self.train_dataset)) if kind == "own sampler" else super()._get_train_sampler(dataset)

    def script(number: int) -> tuple[list[int], Any]:
        data = Read(0, 66)
        arguments = transformers.TrainingArguments(
            str(tmp_path / f"out{number}"), max_steps=1000, per_device_train_batch_size=4, learning_rate=1e-2,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        callbacks = [SwarmCallback(share_data=kind != "not shared")]
        # The nodes draw from one generator here: with dropout they would train different things in any case.
        model = small_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        return data.read, trainer.state

    together = in_two_nodes(lambda: script(0), lambda: script(1), **{"exchange.codec": ExchangeSettings().codec})

    (first, state), (second, _) = together.results.values()
    is_divided = kind == "default"
    assert (first == second) != is_divided
    counts = Counter(first + second)
    assert len(counts) == 66
    assert max(counts.values()) - min(counts.values()) <= (1 if is_divided else 2)
    assert (state.global_step, round(state.epoch, 3)) == (30, round(30 / 17, 3))
    samples = {report.samples for trainer in together.trainers.values() for report in trainer.reports}
    assert samples == ({LOCAL_STEPS * 4} if is_divided else {LOCAL_STEPS * 4, LOCAL_STEPS * 4 - 2})
    told = {record.node: record.fields["node"] for record in together.swarm.of("same_data")}
    assert len(told) == (0 if is_divided else 2)


def test_outside_of_a_node_train_says_how_to_start_the_script(tmp_path: Path) -> None:
    """The error of `p2pnode.attach`, from `train()`."""
    with pytest.raises(NotAttached, match="p2pnode run -- python"):
        trainer_of(tmp_path, 0).train()


@pytest.fixture
def in_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives a script, here a thread, the environment of its process once more."""
    return lambda number: monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / f"n{number}.socket"))


def test_a_second_train_call_goes_on_in_the_same_node(
    in_two_nodes: Any, in_its_process: Callable[[int], None], tmp_path: Path
) -> None:
    """The first `train()` ends with the swarm; the second takes no step more, and both nodes end with one model."""

    def made(number: int) -> Any:
        trainer = trainer_of(tmp_path, number)
        trainer.train()
        in_its_process(number)
        trainer.train()
        return trainer

    together = in_two_nodes(lambda: made(0), lambda: made(1))

    first, second = together.results.values()
    assert all(
        torch.equal(one, two) for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )


def test_a_smaller_batch_after_an_error_goes_on_in_the_same_node(
    in_two_nodes: Any, in_its_process: Callable[[int], None], tmp_path: Path
) -> None:
    """As with `auto_find_batch_size`: memory runs out in the first steps, and the Trainer begins anew with a new
    optimiser."""

    class Full(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._train_batch_size > 4 and self.state.global_step == 2:
                in_its_process(self.args.seed - 7)
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(*args, **kwargs)

    def made(number: int) -> Any:
        trainer = trainer_of(tmp_path, number, kind=Full, auto_find_batch_size=True, per_device_train_batch_size=8)
        trainer.train()
        return trainer

    together = in_two_nodes(lambda: made(0), lambda: made(1))

    first, second = together.results.values()
    assert all(
        torch.equal(one, two) for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    reports = together.trainers["n0"].reports
    assert [report.optimizer_steps for report in reports] == [LOCAL_STEPS] * 10
    # It begins anew four times, with one sample less in a batch each time. Each sample is counted once.
    assert [report.samples for report in reports][4:] == [LOCAL_STEPS * 2 * 4] * 6
