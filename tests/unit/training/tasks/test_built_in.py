"""The built-in tasks and the files that they read: IDX, digits, text, MNIST."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pnode.training.tasks import idx
from p2pnode.training.tasks.digits import load_digits
from p2pnode.training.tasks.mnist import network
from p2pnode.training.tasks.task import TaskError
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer.standalone import train_alone
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import DeltaEncoded, ValuesArrived
from tests.harness.project.repository import ROOT


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    """Shape and values as they were written."""
    values = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", values)

    got = idx.load(tmp_path, "t10k-images-idx3-ubyte", verify=False, mirrors=())

    assert np.array_equal(got, values)


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """The SHA-256 of the content is compared; the sentence names the file, the hint how to use it all the same."""
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(5))

    with pytest.raises(TaskError, match="is not the MNIST file of that name") as error:
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", mirrors=())
    assert "verify = false" in error.value.hint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an IDX file"),
        (b"<html>not found</html>", "not an IDX file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 1, 2]), "truncated"),
        (b"\x1f\x8b\x08\x00broken", "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    """Empty, a web page, truncated, or with broken compression."""
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)

    with pytest.raises(TaskError, match=reason):
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", verify=False, mirrors=())


def test_missing_files_are_named_with_what_was_tried(tmp_path: Path) -> None:
    """The folder, the file, each mirror with its reason, and what to do; nothing is left behind."""
    mirror = (tmp_path / "nothing_here").as_uri() + "/"

    with pytest.raises(TaskError, match=r"finds no t10k-labels-idx1-ubyte\.gz in .*nothing_here") as error:
        idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", mirrors=[mirror])
    assert "training.data_dir" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_with_another_file_is_refused(tmp_path: Path) -> None:
    """A download whose sum is wrong is not kept."""
    (tmp_path / "mirror").mkdir()
    write_idx(tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz", np.zeros(3))

    with pytest.raises(TaskError, match="its file has another checksum"):
        idx.load(tmp_path, "t10k-labels-idx1-ubyte", mirrors=[(tmp_path / "mirror").as_uri() + "/"])
    assert [path.name for path in tmp_path.iterdir()] == ["mirror"]


def test_a_missing_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mirror is used if the first fails; the downloaded file is kept and used the next time."""
    (tmp_path / "mirror").mkdir()
    source = tmp_path / "mirror" / "t10k-labels-idx1-ubyte.gz"
    write_idx(source, np.arange(3))
    content = gzip.decompress(source.read_bytes())
    monkeypatch.setitem(idx.KNOWN, "t10k-labels-idx1-ubyte", hashlib.sha256(content).hexdigest())
    mirrors = [(tmp_path / "gone").as_uri() + "/", (tmp_path / "mirror").as_uri() + "/"]

    first = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=mirrors)
    again = idx.load(tmp_path / "data", "t10k-labels-idx1-ubyte", verify=False, mirrors=())

    assert first.tolist() == again.tolist() == [0, 1, 2]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [source.name]


# -- the task `digits`


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
    for node, delta in zip(nodes, deltas, strict=True):
        node.use(vector, delta)

    for step in range(1, 21):
        for node in nodes:
            node.train(StepOrder(step, 10, 4.0, step == 1))
        vector += 0.7 * np.mean(deltas, axis=0)
        for node in nodes:
            node.apply(DeltaEncoded())
            node.apply(ValuesArrived(step))
    together = nodes[0].evaluate(20)

    assert all(0.6 < accuracy < 0.75 for accuracy in alone), alone
    assert together is not None
    assert together.metrics["accuracy"] >= 0.955
    assert together.samples == 360


# -- the task `text`


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


# -- the task `mnist`


def build(task: str, options: dict[str, Any], data_dir: str = "") -> TaskRunner:
    return TaskRunner(task, *build_task(task, options, data_dir=data_dir, seed=0, node_seed=1, device="cpu"))


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
    """A few steps on a few images that are easy to distinguish; `eval_samples` bounds the evaluation."""
    write_mnist(tmp_path)
    runner = build("mnist", {"verify": False, "eval_samples": 30, "batch_size": 20}, str(tmp_path))
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    delta = np.zeros_like(vector)
    runner.model_vector.read(vector)

    runner.use(vector, delta)
    runner.train(StepOrder(1, 8, 1.0, True))
    vector += delta
    runner.apply(DeltaEncoded())
    runner.apply(ValuesArrived(1))
    evaluation = runner.evaluate(1)

    assert [entry.name for entry in runner.model_vector.layout.entries][-2:] == ["0.running_mean", "0.running_var"]
    assert evaluation is not None
    assert evaluation.samples == 30
    assert evaluation.metrics["accuracy"] > 0.5


def test_mnist_without_its_files_says_so(tmp_path: Path) -> None:
    """The folder is there, the files are not, and fetching is not allowed."""
    with pytest.raises(TrainerFailed, match=r"finds no train-images-idx3-ubyte\.gz in") as failure:
        build("mnist", {"fetch": False}, str(tmp_path))
    assert "training.data_dir" in failure.value.hint
