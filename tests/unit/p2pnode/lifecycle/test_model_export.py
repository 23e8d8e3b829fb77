"""The model's file at the end of a run and from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from p2pnode import cli
from p2pnode.config.settings import Config
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.lifecycle.model_export import CannotExport, ModelExport, export_path, watched
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer.model.model_description import ModelDescriber
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer_link.interface import ModelDescription, Trainer, TrainerFailed
from tests.harness.environment.simulated import InlineExecutor, ListLog, VirtualClock
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import run_by
from tests.harness.trainers.conversion import conversion_here


class Adapted(nn.Module):
    """A frozen layer, BatchNorm, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.embed = nn.Embedding(4, 4)
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.embed.weight


class Describing:
    """The part of a trainer that describes its model; `failing` makes it fail."""

    def __init__(self, model: nn.Module) -> None:
        self.vector = ModelVector(model)
        self.values = np.zeros(self.vector.layout.total, np.float32)
        self.vector.read(self.values)
        self.describer = ModelDescriber(model, self.vector, lambda *_: None, Ranks())
        self.failing = False

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        if self.failing:
            raise TrainerFailed("the trainer is busy")
        return self.describer.describe(folder, wait=wait)


def exporting(folder: Path, trainer: Describing, export: str) -> tuple[ModelExport, ListLog]:
    log = ListLog([], clock=cast(VirtualClock, SimpleNamespace(monotonic=lambda: 0.0)))
    environment = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: 5.0),
        disk=FolderDisk(folder),
        executor=InlineExecutor(),
        log=log,
        state_path=folder,
    )
    config = Config(training=TrainingSettings(export=export))
    nothing: Any = None
    return ModelExport(config, cast(NodeEnvironment, environment), nothing, cast(Trainer, trainer), nothing), log


def exported(folder: Path, model: nn.Module, export: str) -> tuple[Path, str]:
    async def main() -> tuple[str, str]:
        trainer = Describing(model)
        export_, _ = exporting(folder, trainer, export)
        description = await export_.describe_last()
        assert description is not None
        return await export_.write(description, trainer.vector.layout, trainer.values)

    path, digest = asyncio.run(main())
    return Path(path), digest


def test_a_finished_model_loads_strictly_from_both_formats(tmp_path: Path) -> None:
    """The file is in the state directory, its digest is that of the safetensors file, and nothing else is left."""
    torch.manual_seed(1)
    model = Adapted()
    path, digest = exported(tmp_path, model, "model.safetensors")
    other, same = exported(tmp_path, model, str(tmp_path / "elsewhere" / "model.pt"))

    assert path == tmp_path / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest == same
    assert [entry.name for entry in other.parent.iterdir()] == ["model.pt"]
    for state in (load_file(path), torch.load(other, weights_only=True)):
        fresh = Adapted()
        fresh.load_state_dict(state, strict=True)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_pt_files_of_two_nodes_are_the_same_bytes(tmp_path: Path) -> None:
    """torch would write the file's name into the file."""
    torch.manual_seed(1)
    model = Adapted()
    with conversion_here():
        first, _ = exported(tmp_path / "a", model, "one.pt")
        second, _ = exported(tmp_path / "b", model, "another.pt")

    assert first.read_bytes() == second.read_bytes()


@run_by(asyncio.run)
async def test_a_trainer_that_does_not_answer_at_the_end_costs_nothing_already_described(tmp_path: Path) -> None:
    """The description of the last steps is used; without one there is none, and the log says why."""
    trainer = Describing(Adapted())
    export, log = exporting(tmp_path, trainer, "m.safetensors")
    trainer.failing = True
    assert await export.describe_last() is None
    await export.describe_if_due()
    trainer.failing = False
    export, _ = exporting(tmp_path, trainer, "m.safetensors")
    await export.describe_if_due()
    trainer.failing = True
    assert await export.describe_last() == export.description is not None
    assert [record.event for record in log.records] == ["model_not_described"] * 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """So is one whose frozen tensors were damaged on disk: their digest is checked."""
    torch.manual_seed(1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotExport, match=r"file/m\.safetensors could not be written"):
        exported(tmp_path, Adapted(), "file/m.safetensors")

    torch.manual_seed(1)
    exported(tmp_path, Adapted(), "m.safetensors")
    (fixed,) = (tmp_path / "model").glob("fixed-*")
    fixed.write_bytes(fixed.read_bytes()[:-1] + b"\x7f")
    torch.manual_seed(1)
    with pytest.raises(CannotExport, match="is damaged"):
        exported(tmp_path, Adapted(), "m.safetensors")


def test_a_relative_path_is_inside_the_state_directory(tmp_path: Path) -> None:
    """An absolute one is where it says."""
    assert export_path("m.pt", tmp_path) == tmp_path / "m.pt"
    assert export_path("/srv/m.pt", tmp_path) == Path("/srv/m.pt")


def checkpoint(folder: Path, trainer: Describing, *, layout: str | None = None) -> None:
    """A checkpoint of the trainer's vector."""
    step = folder / "checkpoints" / "00000001-step-0000000004"
    step.mkdir(parents=True)
    entries = trainer.vector.layout.entries
    tensors = {
        entry.name: torch.from_numpy(trainer.values[entry.offset : entry.offset + entry.size]).reshape(entry.shape)
        for entry in entries
    }
    save_file(tensors, step / "vector.safetensors")
    digest = trainer.vector.layout.digest() if layout is None else layout
    (step / "state.json").write_bytes(msgspec.json.encode({"layout_digest": digest}))


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_the_command_exports_the_whole_model_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Frozen parameters, counters and tied names included, though the checkpoint has the vector only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torch.manual_seed(1)
    model = Adapted()
    model.norm.num_batches_tracked += 8
    trainer = Describing(model)
    asyncio.run(exporting(tmp_path / "state", trainer, "")[0].describe_last())
    checkpoint(tmp_path / "state", trainer)

    with conversion_here():
        assert cli.main(["export", name, "--state-dir", "state"]) == 0

    state: Any = load_file(name) if name.endswith("safetensors") else torch.load(name, weights_only=True)
    fresh = Adapted()
    fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items())
    assert "warning" not in capsys.readouterr().err


def test_without_a_description_that_fits_the_trained_tensors_are_exported_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of an earlier version has none, and another model's must not be mixed in."""
    monkeypatch.chdir(tmp_path)
    trainer = Describing(Adapted())
    asyncio.run(exporting(tmp_path / "state", trainer, "")[0].describe_last())
    checkpoint(tmp_path / "state", trainer, layout="another")

    assert cli.main(["export", "m.safetensors", "--state-dir", "state"]) == 0

    assert "the description of another model" in capsys.readouterr().err
    assert load_file("m.safetensors").keys() == {entry.name for entry in trainer.vector.layout.entries}


def test_frozen_tensors_that_are_missing_are_an_error_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without them would not load."""
    monkeypatch.chdir(tmp_path)
    trainer = Describing(Adapted())
    asyncio.run(exporting(tmp_path / "state", trainer, "")[0].describe_last())
    checkpoint(tmp_path / "state", trainer)
    for file in (tmp_path / "state" / "model").glob("fixed-*"):
        file.unlink()

    assert cli.main(["export", "m.safetensors", "--state-dir", "state"]) == 8

    assert "frozen tensors, cannot be read" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_watched_program_is_heard_of_until_it_ends_and_is_killed_with_its_caller(tmp_path: Path) -> None:
    """It ends when a tick tells it to, with its code and its errors; Ctrl-C in a tick does not leave it behind."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        f"import signal, sys; signal.alarm(20); open({str(fifo)!r}).read(); print('why', file=sys.stderr); sys.exit(3)"
    )
    command = [sys.executable, "-S", "-c", program]

    def tell() -> None:
        with contextlib.suppress(OSError):  # it does not read yet, or not any more
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))

    done = watched(command, dict(os.environ), tell)
    assert (done.returncode, done.stderr) == (3, "why\n")

    writing: list[int] = []

    def break_off() -> None:
        writing.append(os.open(fifo, os.O_WRONLY))  # returns when the program reads
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        watched(command, dict(os.environ), break_off)
    with pytest.raises(BrokenPipeError):  # nobody reads any more
        os.write(writing[0], b"x")
    os.close(writing[0])
