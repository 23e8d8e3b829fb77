"""The whole model as the trainer describes it: with the vector it loads strictly into a fresh model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from p2pnode.training.files.model_file import TensorFile, model_pieces, open_fixed
from p2pnode.training.trainer.convert import convert
from p2pnode.training.trainer.model import model_description
from p2pnode.training.trainer.model.model_description import MAX_LOCAL_BYTES, ModelDescriber
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.state.snapshot import CannotWrite
from p2pnode.training.trainer_link.interface import ModelDescription


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, under a name that sorts first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.inner.weight


class LowRank(nn.Module):
    """A frozen bfloat16 layer with a trained low-rank correction, as LoRA has, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))
        self.register_buffer("positions", torch.arange(12))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Hooked(nn.Linear):
    """A layer whose `state_dict` returns copies, as some libraries' layers do."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self._register_state_dict_hook(self._copies)  # type: ignore[no-untyped-call]

    @staticmethod
    def _copies(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in list(state):
            state[name] = state[name].clone()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2).to(torch.float64))


MODELS = {"normed": normed, "tied": Tied, "low rank": LowRank, "hooked": Hooked}


class Described:
    """A model, its vector, and what was warned of."""

    def __init__(self, model: nn.Module) -> None:
        self.warned: list[str] = []
        self.vector = ModelVector(model)
        self.values = np.zeros(self.vector.layout.total, np.float32)
        self.vector.read(self.values)
        self.describer = ModelDescriber(
            model, self.vector, lambda _event, text, do="": self.warned.append(text), Ranks()
        )

    def write(self, folder: Path, description: ModelDescription) -> Path:
        """The model's file, as a daemon writes it."""
        entries = {entry.name: entry for entry in self.vector.layout.entries}
        file = open_fixed(folder, description)
        fixed = None if file is None else TensorFile.of(file)
        if fixed is not None:
            assert fixed.digest() == description.fixed_digest

        def values(name: str) -> list[Any]:
            return [self.values[entries[name].offset : entries[name].offset + entries[name].size]]

        (folder / "m.safetensors").write_bytes(b"".join(map(bytes, model_pieces(description, values, fixed))))
        if file is not None:
            file.close()
        return folder / "m.safetensors"


@pytest.mark.parametrize("name", list(MODELS))
def test_a_strict_load_finds_every_tensor(tmp_path: Path, name: str) -> None:
    """BatchNorm, tied and LoRA-like models load from safetensors and .pt without a missing or an unexpected name, with
    the vector's values, their own dtypes, and what was frozen or counted."""
    torch.manual_seed(1)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.num_batches_tracked += 41
    described = Described(model)
    described.values += np.float32(0.25)  # others have trained since

    description = described.describer.describe(str(tmp_path), wait=True)
    path = described.write(tmp_path, description)
    convert(str(path), str(tmp_path / "m.pt"))
    described.vector.load(described.values)
    wanted = model.state_dict()

    for state in (load_file(path), torch.load(tmp_path / "m.pt", weights_only=True)):
        torch.manual_seed(2)
        fresh = MODELS[name]()
        fresh.load_state_dict(state, strict=True)
        assert fresh.state_dict().keys() == wanted.keys()
        for key, value in fresh.state_dict().items():
            assert value.dtype == wanted[key].dtype == state[key].dtype
            assert torch.equal(value, wanted[key]), key
            assert torch.equal(state[key], wanted[key]), key  # of tied tensors a load shows the last one only
    assert described.warned == []


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    """A compiled model inside DataParallel is described under the bare model's names."""

    class Compiled(nn.Module):
        """As `torch.compile` wraps a module; importing the compiler takes seconds."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    model = normed()
    described = Described(nn.DataParallel(Compiled(model)))

    state = load_file(described.write(tmp_path, described.describer.describe(str(tmp_path), wait=True)))

    assert state.keys() == model.state_dict().keys()


def test_fixed_tensors_are_written_once_and_named_by_their_digest(tmp_path: Path) -> None:
    """A second description, and one of a restarted trainer, find the file; without frozen tensors there is none."""
    torch.manual_seed(1)
    first = Described(LowRank())
    described = first.describer.describe(str(tmp_path), wait=True)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns

    again = first.describer.describe(str(tmp_path), wait=True)
    torch.manual_seed(1)
    restarted = Described(LowRank()).describer.describe(str(tmp_path), wait=False)

    assert again == restarted == described
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [written]
    assert file.name == f"fixed-{described.fixed_digest[:16]}.safetensors"
    (tmp_path / "plain").mkdir()
    assert Described(Tied()).describer.describe(str(tmp_path / "plain"), wait=True).fixed_digest == ""
    assert not list((tmp_path / "plain").iterdir())


@pytest.mark.parametrize("name", ["positions", "mask", "base.weight"])
def test_a_fixed_tensor_that_changes_is_sent_with_the_description(tmp_path: Path, name: str) -> None:
    """Until then it is in the file that is written once; a table of integers, a mask and a frozen parameter (of a
    teacher, say) alike. The user is told its name, once."""
    described = Described(LowRank())
    tensor = described.vector.fixed[name]
    before = described.describer.describe(str(tmp_path), wait=True)

    with torch.no_grad():
        tensor.data[0] = 7
    after = described.describer.describe(str(tmp_path), wait=True)
    again = described.describer.describe(str(tmp_path), wait=True)

    assert (list(before.local), list(after.local)) == ([], [name])
    assert after == again
    assert before.fixed_digest != after.fixed_digest
    assert torch.equal(load_file(described.write(tmp_path, after))[name], tensor)
    assert [text.split(":")[0] for text in described.warned] == [name]


def test_a_changed_tensor_that_is_too_large_to_send_is_named_and_left_out(tmp_path: Path) -> None:
    """A file with its first values would pass for a whole one. What is smaller is in the file."""
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.zeros(MAX_LOCAL_BYTES, dtype=torch.uint8))
    model.register_buffer("queue", torch.zeros(8, dtype=torch.uint8))
    described = Described(model)
    model.table += 1
    model.queue += 1

    state = load_file(described.write(tmp_path, described.describer.describe(str(tmp_path), wait=True)))

    assert sorted(state) == ["bias", "queue", "weight"]
    assert state["queue"].tolist() == [1] * 8
    changed, left_out = described.warned
    assert changed.startswith("queue, table: training changes")
    assert left_out.startswith("table: ")
    assert "32 MiB" in left_out


def test_a_copy_of_a_fixed_tensor_is_found_by_its_name(tmp_path: Path) -> None:
    """A frozen layer whose `state_dict` returns copies is in the file that is written once, whatever its size."""
    model = nn.Sequential(nn.Linear(1, 1), Hooked().requires_grad_(requires_grad=False))

    description = Described(model).describer.describe(str(tmp_path), wait=True)

    assert {source.name: source.kind for source in description.tensors}["1.weight"] == "fixed"
    assert description.local == {}


def test_a_folder_that_cannot_be_written_is_reported_when_it_is_waited_for(tmp_path: Path) -> None:
    """In the background it fails silently, and is tried again."""
    (tmp_path / "file").write_text("in the way")
    described = Described(LowRank())

    described.describer.describe(str(tmp_path / "file" / "model"), wait=False)
    with pytest.raises(CannotWrite, match="could not be written"):
        described.describer.describe(str(tmp_path / "file" / "model"), wait=True)
    (tmp_path / "file").unlink()

    assert described.describer.describe(str(tmp_path / "file" / "model"), wait=True).fixed_digest
    assert list((tmp_path / "file" / "model").iterdir())


def test_who_waits_for_the_file_hears_from_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes take longer than a trainer may be silent."""
    written = threading.Event()
    monkeypatch.setattr(model_description, "ALIVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(model_description, "write_whole", lambda _path, _write: written.wait(60))
    heard: list[int] = []

    def alive() -> None:
        heard.append(1)
        if len(heard) == 3:
            written.set()

    Described(LowRank()).describer.describe(str(tmp_path), wait=True, alive=alive)

    assert len(heard) >= 3


def test_what_is_no_tensor_is_named_once(tmp_path: Path) -> None:
    """A module's extra state cannot be in a safetensors file."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    described = Described(Extra(1, 1))
    for _ in range(2):
        described.describer.describe(str(tmp_path), wait=True)

    (warned,) = described.warned
    assert "_extra_state" in warned
