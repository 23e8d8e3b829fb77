"""The tasks that come with the program: what they learn, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.tasks.digits import load_digits
from training.tasks.mnist import network
from training.trainer import standalone
from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner
from training.trainer.standalone import train_alone
from training.trainer_link.interface import StepOrder, TrainerFailed

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(task: str, options: dict[str, Any], data_dir: str = "") -> TaskRunner:
    return TaskRunner(task, *build_task(task, options, data_dir=data_dir, seed=0, node_seed=1, device="cpu"))


# --- digits -----------------------------------------------------------------------------------------------------


def test_the_digits_are_the_known_1797() -> None:
    """1,797 images of 64 values from 0 to 2, and about as many of each digit; with a licence beside the file."""
    images, labels = load_digits()

    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 2)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    licence = (ROOT / "training" / "tasks" / "data" / "LICENSE-digits.txt").read_text()
    assert "CC BY 4.0" in licence
    assert "doi.org" in licence


def test_a_node_alone_stays_near_070_and_four_together_reach_095() -> None:
    """Quarters that lack three classes each: plain averaging of four nodes knows all ten digits, none alone does."""
    options = [{"part": part, "parts": 4, "lacking": 3} for part in range(4)]
    alone = [train_alone("digits", option, local_steps=10, steps=20)["accuracy"] for option in options]
    nodes = [
        TaskRunner("digits", *build_task("digits", option, data_dir="", seed=0, node_seed=part, device="cpu"))
        for part, option in enumerate(options)
    ]
    vector = np.zeros(nodes[0].model_vector.layout.total, np.float32)
    nodes[0].model_vector.read(vector)
    deltas = [np.zeros_like(vector) for _ in nodes]

    for step in range(1, 21):
        for node, delta in zip(nodes, deltas, strict=True):
            node.train(StepOrder(step, 10, 4.0, step == 1), vector, delta)
        vector += 0.7 * np.mean(deltas, axis=0)
    together = nodes[0].evaluate(20, vector)

    assert all(0.6 < accuracy < 0.75 for accuracy in alone), alone
    assert together is not None
    assert together.metrics["accuracy"] >= 0.955
    assert together.samples == 360


def test_alone_prints_one_json_object() -> None:
    """`python -m training.trainer.standalone --json`: what the demo shows beside the swarm."""
    options = json.dumps({"part": 1, "parts": 4, "lacking": 3})
    command = [sys.executable, "-m", "training.trainer.standalone", "--task", "digits", "--options", options]

    done = subprocess.run(
        [*command, "--steps", "20", "--threads", "1", "--json"], capture_output=True, text=True, cwd=ROOT, check=True
    )

    assert 0.5 < json.loads(done.stdout)["accuracy"] < 0.75
    assert done.stderr == ""


def test_alone_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 8 and one sentence."""
    monkeypatch.setattr(standalone, "import_later", lambda: None)  # the compiler of this process stays as it is
    monkeypatch.setattr(sys, "argv", ["standalone", "--task", "text"])

    assert standalone.main() == 8
    error = capsys.readouterr().err
    assert "training.data_dir is empty" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("task", "options", "data_dir", "reason"),
    [
        ("digits", {"parts": 4, "lackign": 3}, "", "unknown field `lackign`"),
        ("digits", {"part": "one"}, "", "Expected `int`"),
        ("digits", {"part": 7, "parts": 4}, "", "part = 7 of parts = 4"),
        ("digits", {}, "/nowhere/digits", "finds no file /nowhere/digits"),
        ("mnist", {}, "/nowhere/mnist", "training.data_dir = /nowhere/mnist is not a folder"),
        ("mnist", {"optimizer": "lion"}, "", "optimizer"),
        ("text", {}, "", "training.data_dir is empty"),
        ("text", {}, "/nowhere/book.txt", "finds no file /nowhere/book.txt"),
        ("text", {}, "/", "is a folder"),
        ("text", {"width": 10, "heads": 3}, "", "cannot be divided"),
        ("text", {"context": 100000}, __file__, "too few"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    task: str, options: dict[str, Any], data_dir: str, reason: str
) -> None:
    """Misspelt options, impossible values and missing files; the hint says what to do."""
    with pytest.raises(TrainerFailed) as failure:
        build(task, options, data_dir)

    assert reason in failure.value.reason
    assert failure.value.hint
    assert failure.value.fatal


# --- mnist ------------------------------------------------------------------------------------------------------


def write_mnist(folder: Path, count: int = 40) -> None:
    generator = np.random.default_rng(1)
    for kind in ("train", "t10k"):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = generator.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), labels] = 255  # Row k is bright in the images of class k.
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{kind}-{name}-ubyte").write_bytes(head + values.tobytes())


def test_the_network_is_the_chapters() -> None:
    """Normalisation, 5×5 convolution of 32 maps, pooling, 1024, 10; normalisation has shared running statistics."""
    model = network()

    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 + 832 + (6272 * 1024 + 1024) + 10250


def test_mnist_learns(tmp_path: Path) -> None:
    """A few steps on a few images that are easy to tell apart; `eval_samples` bounds the evaluation."""
    write_mnist(tmp_path)
    runner = build("mnist", {"verify": False, "eval_samples": 30, "batch_size": 20}, str(tmp_path))
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    delta = np.zeros_like(vector)
    runner.model_vector.read(vector)

    runner.train(StepOrder(1, 8, 1.0, True), vector, delta)
    vector += delta
    evaluation = runner.evaluate(1, vector)

    assert [entry.name for entry in runner.model_vector.layout.entries][-2:] == ["0.running_mean", "0.running_var"]
    assert evaluation is not None
    assert evaluation.samples == 30
    assert evaluation.metrics["accuracy"] > 0.5


def test_mnist_without_its_files_says_so(tmp_path: Path) -> None:
    """The folder is there, the files are not, and fetching is not allowed."""
    with pytest.raises(TrainerFailed, match=r"finds no train-images-idx3-ubyte\.gz in") as failure:
        build("mnist", {"fetch": False}, str(tmp_path))
    assert "training.data_dir" in failure.value.hint


# --- text -------------------------------------------------------------------------------------------------------


def test_text_learns_a_repeated_sentence(tmp_path: Path) -> None:
    """Bits per byte fall well below those of single bytes; bits are nats over ln 2."""
    (tmp_path / "book.txt").write_text("all nodes are equal, and none is first. " * 100)
    options = {"layers": 1, "width": 32, "heads": 2, "context": 32, "learning_rate": 0.01, "warmup": 5}

    metrics = train_alone("text", options, local_steps=10, steps=4, data_dir=str(tmp_path / "book.txt"))

    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / np.log(2))
    assert metrics["bits_per_byte"] < 2.5


def test_the_last_tenth_of_a_text_is_not_trained_on(tmp_path: Path) -> None:
    """Windows of training come from the first nine tenths."""
    (tmp_path / "book.txt").write_bytes(b"a" * 900 + b"b" * 100)
    task, _ = build_task("text", {"context": 8}, data_dir=str(tmp_path / "book.txt"), seed=0, node_seed=1, device="cpu")
    batches = iter(task.batches())

    seen = torch.cat([torch.cat(next(batches)).flatten() for _ in range(50)])

    assert seen.unique().tolist() == [ord("a")]
