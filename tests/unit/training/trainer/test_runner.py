"""The training loop of a task, in this process: equality with a bare loop, schedules, snapshots, faults."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.tasks.task import TrainSpec
from p2pnode.training.trainer.model.contract import ModelChanged
from p2pnode.training.trainer.state.snapshot import seed_all
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed, Vector
from p2pnode.training.trainer_link.messages import DeltaEncoded, StepAnswer, ValuesArrived
from tests.harness.trainers import tasks
from tests.harness.trainers.task_node import TaskNode as Node


def several(given: Any) -> list[Any]:
    return [] if given is None else given if isinstance(given, list) else [given]


def bare(kind: str, steps: int, **options: Any) -> Vector:
    """The same task in a loop that knows nothing of steps, vectors and deltas."""
    seed_all(3)
    task = getattr(tasks, kind)(options, data_dir="", seed=3, node_seed=11, device="cpu")
    spec: TrainSpec = task.build()
    seed_all(11)
    batches = iter(task.batches())
    for _ in range(steps):
        spec.model.zero_grad()
        task.loss(spec.model, next(batches)).backward()
        for each in [*several(spec.optimizer), *several(spec.scheduler)]:
            each.step()
    named = sorted(spec.model.named_parameters())
    buffers = sorted(item for item in spec.model.named_buffers() if item[1].is_floating_point())
    return np.concatenate([value.detach().numpy().ravel() for _, value in named + buffers])


@pytest.mark.parametrize(("kind", "local_steps"), [("Line", 1), ("Adaptive", 5), ("Normed", 1), ("Halves", 5)])
def test_one_node_gives_the_weights_of_the_bare_loop(kind: str, local_steps: int) -> None:
    """200 optimiser steps with plain sum agree to 1e-6 with the same torch loop without any of this."""
    node = Node(kind)

    node.train(range(1, 200 // local_steps + 1), local_steps)

    np.testing.assert_allclose(node.vector, bare(kind, 200), rtol=0, atol=1e-6)


def test_the_seed_gives_all_nodes_the_same_weights_and_the_node_its_own_data() -> None:
    """Initial vectors are equal whatever the node's seed; what is learnt is not."""
    first, second = Node("Line", 11), Node("Line", 12)
    same = np.array_equal(first.vector, second.vector)

    first.train(range(1, 2))
    second.train(range(1, 2))

    assert same
    assert not np.array_equal(first.vector, second.vector)


def test_a_report_counts_optimiser_steps_and_samples() -> None:
    """Samples are those of all batches; the loss is their mean; every optimiser step but the last, which is reported,
    is a sign of life."""
    node = Node("Plain")

    (report,) = node.train(range(4, 5), local_steps=3)

    assert (report.step, report.optimizer_steps, report.samples) == (4, 3, 24)
    assert 0 < report.loss < 100
    assert report.seconds > 0
    assert report.metrics == {"learning_rate": 0.05}
    assert node.beats == 2
    assert node.runner.samples_seen == 24


def test_accumulated_batches_make_one_optimiser_step() -> None:
    """Four batches of 8 accumulated move the weights as one of 32, and count as one step of 32 samples."""
    small, large = Node("Plain", batch_size=16, accumulate=4), Node("Plain", batch_size=64)

    (report,) = small.train(range(1, 2), local_steps=1)
    large.train(range(1, 2), local_steps=1)

    assert (report.optimizer_steps, report.samples) == (1, 64)
    np.testing.assert_allclose(small.vector, large.vector, atol=1e-6)


def test_steps_that_the_scaler_skips_are_not_counted() -> None:
    """The order's optimiser steps are taken in full after the scaler has found its scale."""
    node = Node("Scaled")
    scaler = node.spec.scaler
    assert scaler is not None
    first_scale = scaler.get_scale()

    (report,) = node.train(range(1, 2), local_steps=5)

    assert report.optimizer_steps == 5
    assert scaler.get_scale() < first_scale
    assert np.isfinite(node.vector).all()


def test_a_scaler_that_only_skips_does_not_train_for_ever() -> None:
    """Others would wait for its turn: the trainer fails after a bounded number of skipped steps, and says why."""
    node = Node("Scaled")
    node.runner.task.loss = tasks.Infinite({}, data_dir="", seed=0, node_seed=0, device="cpu").loss  # type: ignore[method-assign]

    with pytest.raises(TrainerFailed, match="has skipped 51 optimiser steps in a row") as caught:
        node.train(range(1, 2), local_steps=5)

    assert not caught.value.fatal


def test_a_loss_that_is_not_finite_is_reported_and_warned_of() -> None:
    """The daemon refuses or takes the delta, not the trainer."""
    node = Node("Infinite")

    (report,) = node.train(range(1, 2), local_steps=2)

    assert not math.isfinite(report.loss)
    assert node.warnings == ["loss_not_finite"]


@pytest.mark.parametrize(("kind", "difference"), [("Adaptive", 1e-6), ("SlowWeights", 1e-6), ("ScheduleFree", 1e-6)])
def test_a_resumed_node_equals_one_that_was_not_interrupted(tmp_path: Path, kind: str, difference: float) -> None:
    """Optimiser, schedule, dropout's generator and data position: nothing is lost in a save and a restore. Positions
    are saved relative to the weights, which rounds them."""
    whole = Node(kind)
    whole.train(range(1, 9))
    first = Node(kind)
    first.train(range(1, 5))
    first.save(tmp_path / "state")
    resumed = Node(kind, node_seed=999)  # Nothing may come from the new process itself.
    resumed.runner.task.node_seed = 11  # type: ignore[attr-defined]
    resumed.runner._loop._batches = iter(resumed.runner.task.batches())

    resumed.runner.restore(tmp_path / "state")
    resumed.vector[:] = first.vector
    resumed.train(range(5, 9))

    np.testing.assert_allclose(resumed.vector, whole.vector, rtol=0, atol=difference)
    assert resumed.runner.samples_seen == whole.runner.samples_seen


@pytest.mark.parametrize("kind", ["Adaptive", "SlowWeights", "ScheduleFree"])
def test_a_node_that_was_saved_in_the_middle_of_an_exchange_goes_on_from_its_end(tmp_path: Path, kind: str) -> None:
    """The trainer's state is that of the cut; the values of the exchange come from the swarm."""
    whole = Node(kind)
    whole.train(range(1, 9))
    first = Node(kind)
    first.train(range(1, 4))
    assert first.runner.train(StepOrder(4, 5, 1.0, True)).has_delta
    first.runner.apply(DeltaEncoded())
    first.save(tmp_path / "state")
    first.vector += first.delta
    resumed = Node(kind)

    resumed.runner.restore(tmp_path / "state")
    resumed.vector[:] = first.vector
    resumed.train(range(5, 9))

    np.testing.assert_allclose(resumed.vector, whole.vector, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["SlowWeights", "ScheduleFree", "Copying"])
def test_an_evaluation_between_two_turns_changes_no_training(kind: str) -> None:
    """It loads the shared weights too: positions go there and back, and copies are those of the weights that count."""
    plain = Node(kind)
    plain.train(range(1, 9))
    evaluating = Node(kind)

    for step in range(1, 9):
        evaluating.train(range(step, step + 1))
        found = evaluating.runner.evaluate(step)
        assert found is not None
        evaluating.runner.evaluate(step)

    np.testing.assert_allclose(evaluating.vector, plain.vector, rtol=0, atol=1e-5)
    assert np.abs(plain.vector).max() > 0.1


def test_copies_of_the_weights_follow_what_is_loaded() -> None:
    """With `on_load` the task trains; without it the turn that shows it for the third time ends in an error."""
    told = Node("Copying")
    others = np.random.default_rng(2).normal(0.0, 0.05, told.vector.size).astype(np.float32)

    def turn(node: Node, step: int, workers: float) -> None:
        assert node.runner.train(StepOrder(step, 5, workers, True)) is not None
        node.vector += node.delta + others * (1 if step % 2 else -1)
        node.runner.apply(DeltaEncoded())
        node.runner.apply(ValuesArrived(step))

    for step in range(1, 9):
        turn(told, step, 2.0)
    assert not np.allclose(told.delta, 0.0)

    untold = Node("Copying", told=False)
    for step in range(1, 4):
        turn(untold, step, 2.0)
    with pytest.raises(ModelChanged, match="FusedMasters steps on weights of its own"):
        turn(untold, 4, 2.0)


def test_a_task_that_replaces_a_layer_is_stopped() -> None:
    """At the end of the turn, with the name of what nobody would share."""
    with pytest.raises(ModelChanged, match=r"the parameter 0\.extra\.\w+ is new in the model"):
        Node("Swapping").train(range(1, 2))


def test_an_evaluation_changes_nothing() -> None:
    """Generators and the modules' modes are as before, whatever the task's evaluation does."""
    quiet = Node("Line")
    quiet.train(range(1, 4))
    noisy = Node("Noisy")
    noisy.spec.model[0].eval()  # type: ignore[index]

    for step in range(1, 4):
        noisy.train(range(step, step + 1))
        noisy.runner.evaluate(step)

    assert np.array_equal(quiet.vector, noisy.vector)
    assert [module.training for module in noisy.spec.model.children()] == [False, True, True, True]  # type: ignore[union-attr]


def test_an_evaluation_is_of_the_vector_and_does_not_touch_the_delta() -> None:
    """The daemon may still send what it has of the delta."""
    node = Node("Plain")
    node.train(range(1, 2))
    delta = node.delta.copy()
    node.vector[:] = 0.0
    node.runner.apply(ValuesArrived(1))

    evaluation = node.runner.evaluate(1)

    assert evaluation is not None
    assert evaluation.samples == 64
    assert evaluation.metrics["error"] == pytest.approx(float((node.runner.task.outputs**2).mean()))  # type: ignore[attr-defined]
    assert np.array_equal(node.delta, delta)


def test_batch_statistics_do_not_move_in_an_evaluation() -> None:
    """Running means are read, not written."""
    node = Node("Normed")
    node.train(range(1, 2))
    before = node.vector.copy()

    node.runner.evaluate(1)
    node.runner.model_vector.read(node.vector)

    np.testing.assert_allclose(node.vector, before, rtol=0, atol=1e-6)


def test_an_interrupted_order_ends_at_the_next_optimiser_step() -> None:
    """Nothing is reported and the delta is not written."""
    node = Node("Plain")
    calls = iter([False, False, True])

    report = node.runner.train(StepOrder(1, 100, 1.0, True), lambda: next(calls))

    assert report is None
    assert node.beats == 3
    assert not node.delta.any()


def test_an_interrupted_evaluation_gives_nothing() -> None:
    """It ends after the next pass through the model."""
    node = Node("Plain")

    assert node.runner.evaluate(1, lambda: True) is None


def test_batches_that_end_begin_anew() -> None:
    """`batches` is called again when its iterator ends."""
    (report,) = Node("Finite").train(range(1, 2), local_steps=7)

    assert report.optimizer_steps == 7


@pytest.mark.parametrize(
    ("kind", "message"), [("Empty", "yields nothing"), ("Vectorial", r"scalar tensor is expected.*\(8, 2\)")]
)
def test_a_task_that_cannot_train_is_named(kind: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A task without data, or whose loss is not a scalar, is named in the message."""
    with pytest.raises(TrainerFailed, match=message):
        Node(kind).train(range(1, 2))


class Late:
    """A daemon whose values enter in the middle of the next turn."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.due: list[DeltaEncoded | ValuesArrived] = []
        self.entered_count = 0
        self._asked = 0

    def train(self, steps: range, local_steps: int = 5) -> list[Any]:
        reports = []
        for step in steps:
            self._asked = 0
            reports.append(self.node.runner.train(StepOrder(step, local_steps, 1.0, True), link=self))
            self.node.vector += self.node.delta
            self.due += [DeltaEncoded(), ValuesArrived(step)]
        while (news := self.news()) is not None:
            self.node.runner.apply(news, self)
        return reports

    def next_step(self) -> StepAnswer:
        raise AssertionError("a single trainer asks nobody")

    def news(self) -> DeltaEncoded | ValuesArrived | None:
        self._asked += 1
        return self.due.pop(0) if self.due and self._asked > 2 else None

    def entered(self) -> None:
        self.entered_count += 1


@pytest.mark.parametrize(
    ("kind", "options", "rounding"),
    [
        ("Line", {}, 1e-6),
        ("Plain", {"batch_size": 8, "accumulate": 4}, 1e-6),
        ("Adaptive", {}, 1e-6),
        ("Normed", {}, 1e-6),
        ("SlowWeights", {}, 1e-5),
        ("ScheduleFree", {}, 1e-5),
        ("Copying", {}, 1e-5),
        ("OneCycle", {}, 1e-5),
        ("Halves", {}, 1e-5),
    ],
)
def test_a_node_alone_whose_values_enter_late_trains_as_the_bare_loop(
    kind: str, options: dict[str, Any], rounding: float
) -> None:
    """Its values are its own deltas: when they enter, they move nothing but by rounding, and positions and copies
    neither."""
    plain = Node(kind, **options)
    plain.train(range(1, 11))
    node = Node(kind, **options)
    late = Late(node)
    reports = late.train(range(1, 11))

    np.testing.assert_allclose(node.vector, plain.vector, rtol=0, atol=rounding)
    assert all(report.seconds > 0 and report.has_delta for report in reports)
    assert late.entered_count == 10


def test_a_turn_has_no_delta_while_the_last_one_is_exchanged() -> None:
    """Its progress adds up, and is wanted without training at the end."""
    node = Node("Line")
    order = partial(StepOrder, workers=1.0, is_first=True)
    assert node.runner.train(order(1, 5)).has_delta
    node.vector += node.delta
    first = node.delta.copy()
    assert not node.runner.train(order(2, 5)).has_delta
    assert np.array_equal(node.delta, first)
    node.runner.apply(DeltaEncoded())
    node.runner.apply(ValuesArrived(1))
    rest = node.runner.train(order(2, 0))
    assert rest.has_delta
    assert rest.optimizer_steps == 0
    node.vector += node.delta
    plain = Node("Line")
    plain.train(range(1, 3))
    np.testing.assert_allclose(node.vector, plain.vector, rtol=0, atol=1e-6)


def test_an_order_that_trains_nothing_leaves_schedules_where_they_are() -> None:
    """It only takes what has added up; a checkpoint after it has the schedule of the last step."""
    node = Node("OneCycle")
    order = partial(StepOrder, workers=1.0, is_first=True)
    node.runner.train(order(3, 5))
    (optimizer,) = node.runner.given.optimizers
    before = optimizer.param_groups[0]["lr"]
    node.runner.apply(DeltaEncoded())
    node.runner.apply(ValuesArrived(3))
    assert node.runner.train(order(3, 0)) is not None
    assert optimizer.param_groups[0]["lr"] == before


def test_values_that_lack_the_delta_enter_with_it() -> None:
    """What the node has trained stays in its model, though the value that was pulled is older."""
    node = Node("Line")
    order = partial(StepOrder, workers=1.0, is_first=True)
    node.runner.train(order(1, 5))
    before, first = node.vector.copy(), node.delta.copy()
    node.vector += 100.0
    total = len(node.vector)
    node.runner.apply(DeltaEncoded())
    node.runner.apply(ValuesArrived(1, adds_delta=[(1, total)]))
    node.runner.train(order(1, 0))
    model = np.zeros_like(before)
    node.runner.model_vector.read(model)
    np.testing.assert_allclose(model[0], before[0] + 100.0, atol=1e-4)
    np.testing.assert_allclose(model[1:], before[1:] + 100.0 + first[1:], atol=1e-4)
    np.testing.assert_allclose(node.delta, np.zeros(total), atol=1e-4)


def test_values_that_are_held_stay_out_and_what_was_returned_stays_progress() -> None:
    """Per range of values: the last that the daemon has said of it counts."""
    node = Node("Line")
    order = partial(StepOrder, workers=1.0, is_first=True)
    node.runner.train(order(1, 5))
    before, first = node.vector.copy(), node.delta.copy()
    node.vector += 100.0
    total = len(node.vector)
    node.runner.apply(DeltaEncoded())
    node.runner.apply(ValuesArrived(1, keeps_base=[(0, 1)], takes_back=[(1, total)]))
    node.runner.train(order(1, 0))
    model = np.zeros_like(before)
    node.runner.model_vector.read(model)
    np.testing.assert_allclose(model[0], before[0] + first[0], atol=1e-6)
    np.testing.assert_allclose(model[1:], before[1:] + 100.0 + first[1:], atol=1e-4)
    np.testing.assert_allclose(node.delta, np.where(np.arange(total) < 1, 0.0, first), atol=1e-4)
