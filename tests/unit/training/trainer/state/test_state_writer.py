"""Saving a trainer's own state beside its training: the copy, the thread, and states that are not to be kept."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pnode.training.trainer.connection import DaemonGone
from p2pnode.training.trainer.pinned import CopyPool, register
from p2pnode.training.trainer.state import snapshot, state_writer
from p2pnode.training.trainer.state.state_writer import StateWriter, not_finite, tensor_bytes
from p2pnode.training.trainer_link import messages


class Link:
    """Collects what is sent, and waits for it."""

    def __init__(self) -> None:
        self.sent: list[messages.FromTrainer] = []
        self._changed = threading.Condition()

    def send(self, message: messages.FromTrainer) -> None:
        with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    def wait(self, count: int) -> list[messages.FromTrainer]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sent) >= count, timeout=30)
            return self.sent


def trained(steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer, **own: Any) -> dict[str, Any]:
    return {"optimizer": optimizer.state_dict(), "state": own}


def test_the_file_has_the_state_at_the_moment_of_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Copied` is sent before anything is written; the next step then changes tensors, lists and objects, and the file
    has them as they were."""
    model, optimizer = trained()
    link, may_write = Link(), threading.Event()
    write = snapshot.write
    monkeypatch.setattr(snapshot, "write", lambda *args: (may_write.wait(30), write(*args)))
    epochs = {"seen": [1, 2], "best": torch.ones(2)}
    before = torch.clone(optimizer.state_dict()["state"][0]["exp_avg"])
    StateWriter(link.send).save(7, tmp_path / "state", state_of(optimizer, epochs=epochs))
    assert link.sent == [messages.Copied(7)]

    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    epochs["seen"].append(3)  # type: ignore[attr-defined]
    epochs["best"].zero_()  # type: ignore[attr-defined]
    may_write.set()

    assert link.wait(2)[1:] == [messages.Written(7)]
    found = snapshot.load(tmp_path / "state")
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], before)
    assert found["state"]["epochs"]["seen"] == [1, 2]
    assert found["state"]["epochs"]["best"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_written(tmp_path: Path, value: float) -> None:
    """The earlier file stays; the answer names the tensor and what to do."""
    _, optimizer = trained()
    (tmp_path / "state").write_text("earlier")
    optimizer.state_dict()["state"][1]["exp_avg_sq"][1] = value
    link = Link()
    StateWriter(link.send).save(1, tmp_path / "state", state_of(optimizer))

    answer = link.wait(2)[1]
    assert isinstance(answer, messages.NotWritten)
    assert "state.1.exp_avg_sq has values that are not finite" in answer.reason
    assert "learning rate" in answer.hint
    assert (tmp_path / "state").read_text() == "earlier"


def test_a_sum_that_overflows_is_finite() -> None:
    """Only the values count."""
    assert not_finite({"a": [torch.full((4,), 3e38)], "steps": torch.tensor(3)}) is None
    assert not_finite({"a": [torch.tensor([3e38, 3e38, float("inf")])]}) == "a.0"


def test_without_memory_for_a_copy_the_step_waits_for_the_disk(tmp_path: Path) -> None:
    """The file is whole when the next order is taken, and the user is told why the step took longer."""
    _, optimizer = trained()
    link = Link()
    StateWriter(link.send, available_bytes=lambda: 100).save(1, tmp_path / "state", state_of(optimizer))

    assert [type(message) for message in link.sent] == [messages.Copied, messages.Written, messages.Warned]
    assert snapshot.load(tmp_path / "state")["optimizer"]["state"]


class Pooled:
    """A writer whose pool takes tensors of the CPU, and the memory in which the copies were that it has written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.places = Link(), []
        self.may_write = threading.Event()
        self.may_write.set()
        self._folder = folder
        write = snapshot.write

        def noting(path: Path, content: dict[str, Any]) -> None:
            self.places.append(content["optimizer"]["state"][0]["exp_avg"].data_ptr())
            assert self.may_write.wait(30)
            write(path, content)

        monkeypatch.setattr(snapshot, "write", noting)
        self.writer = StateWriter(self.link.send, pool=CopyPool(lambda tensor: tensor.numel() > 1))

    def save(self, turn: int, optimizer: torch.optim.Optimizer, *, waits: bool = True) -> None:
        self.writer.save(turn, self._folder / str(turn), state_of(optimizer))
        if waits:
            self.wait(turn)

    def wait(self, turn: int) -> None:
        while messages.Written(turn) not in self.link.wait(len(self.link.sent)):
            self.link.wait(len(self.link.sent) + 1)

    def saved(self, turn: int) -> dict[str, Any]:
        found: dict[str, Any] = snapshot.load(self._folder / str(turn))["optimizer"]["state"]
        return found


def test_the_memory_of_a_copy_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second checkpoint on, until the state grows; each file has the values of its own moment, and no more."""
    pooled = Pooled(tmp_path, monkeypatch)
    model, optimizer = trained()
    values = []
    for turn in (1, 2, 3):
        pooled.save(turn, optimizer)
        values.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    assert pooled.places[0] != pooled.places[1] == pooled.places[2]
    assert [pooled.saved(turn)[0]["exp_avg"].tolist() for turn in (1, 2, 3)] == [each.tolist() for each in values]
    assert pooled.saved(3)[0]["exp_avg"].untyped_storage().nbytes() == values[0].untyped_storage().nbytes()

    larger = nn.Linear(400, 2)
    optimizer.add_param_group({"params": larger.parameters()})
    larger(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    for turn in (4, 5, 6):
        pooled.save(turn, optimizer)
    assert len({pooled.places[2], pooled.places[3], pooled.places[4]}) == 3
    assert pooled.places[4] == pooled.places[5]
    assert torch.equal(pooled.saved(6)[2]["exp_avg"], optimizer.state_dict()["state"][2]["exp_avg"])


class Quantised(Tensor):
    """Keeps its values in another tensor, as those of eight bits do; this one is all zeros."""


def test_only_plain_dense_tensors_are_copied_into_the_memory() -> None:
    """What a copy of others would hold is not what they stand for."""
    pool = CopyPool(lambda _: True)
    wide = torch.zeros(4, 4)
    assert pool.takes(wide)
    assert pool.takes(nn.Parameter(wide))
    for other in (wide.as_subclass(Quantised), wide.T[:, :2], wide.to_sparse(), torch.zeros(0)):
        assert not pool.takes(other)


def test_memory_that_is_being_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint of a node may begin before the one before it is in its file."""
    pooled = Pooled(tmp_path, monkeypatch)
    model, optimizer = trained()
    pooled.save(1, optimizer)
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    pooled.may_write.clear()
    pooled.save(2, optimizer, waits=False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    pooled.save(3, optimizer, waits=False)
    pooled.may_write.set()
    for turn in (2, 3):
        pooled.wait(turn)

    assert torch.equal(pooled.saved(2)[0]["exp_avg"], before)
    assert not torch.equal(pooled.saved(3)[0]["exp_avg"], before)


def test_memory_that_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the error; a processor has no driver. (What a driver takes: test_cuda.py.)"""
    driver = SimpleNamespace(cudaHostRegister=lambda _address, size_bytes, _flags: 2 if size_bytes > 99 else 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)

    assert register([torch.zeros(2), torch.zeros(25)], torch.device("cuda", 0)).endswith("(cudaError 2)")
    assert register([torch.zeros(25)], torch.device("cpu")) == ""


def test_what_cannot_be_written_is_answered(tmp_path: Path) -> None:
    """A folder that is a file, and an object of the user's own that cannot be pickled: the trainer goes on."""
    _, optimizer = trained()
    (tmp_path / "file").touch()
    link = Link()
    writer = StateWriter(link.send)
    writer.save(1, tmp_path / "file" / "state", state_of(optimizer))
    link.wait(2)
    writer.save(2, tmp_path / "state", state_of(optimizer, own=threading.Lock()))

    answers = [message for message in link.wait(4) if isinstance(message, messages.NotWritten)]
    assert [answer.turn for answer in answers] == [1, 2]
    assert "could not be written" in answers[0].reason
    assert "cannot be saved" in answers[1].reason
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_daemon_that_ends_meanwhile_is_no_error_of_the_thread(tmp_path: Path) -> None:
    """The file is written all the same."""
    _, optimizer = trained()
    gone = threading.Event()

    def send(message: messages.FromTrainer) -> None:
        if isinstance(message, messages.Written):
            gone.set()
            raise DaemonGone

    StateWriter(send).save(1, tmp_path / "state", state_of(optimizer))

    assert gone.wait(30)
    assert snapshot.load(tmp_path / "state")["optimizer"]["state"]


def test_the_file_of_the_first_rank_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for the whole set: without the file of another rank there is none, and the reason names that file. A
    file that grows is waited for."""
    _, optimizer = trained()
    link = Link()
    others = [tmp_path / "state.1", tmp_path / "state.2"]
    others[1].touch()

    monkeypatch.setattr(state_writer, "RANKS_S", 0.0)
    StateWriter(link.send).save(5, tmp_path / "state", state_of(optimizer), 0, others)
    assert isinstance(refused := link.wait(2)[1], messages.NotWritten)
    assert f"{others[0]} could not be written: another rank has written nothing of it" in refused.reason
    assert not (tmp_path / "state").exists()

    growing, now_s = tmp_path / "state.1.99.tmp", [0.0]

    def write_on(_: float) -> None:
        now_s[0] += 20.0
        growing.write_bytes(bytes(int(now_s[0])))
        if now_s[0] == 100.0:
            growing.rename(others[0])

    monkeypatch.setattr(state_writer, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=write_on))
    monkeypatch.setattr(state_writer, "RANKS_S", 30.0)
    StateWriter(link.send).save(6, tmp_path / "state", state_of(optimizer), 0, others)
    assert link.wait(4)[2:] == [messages.Copied(6), messages.Written(6)]
    assert now_s == [100.0]


def test_all_copies_of_a_host_have_to_fit(tmp_path: Path) -> None:
    """Each rank's would, but not those of all together: the step waits for the disk."""
    _, optimizer = trained()
    link = Link()
    available = 10 * tensor_bytes(snapshot.content_of(state_of(optimizer)))

    writer = StateWriter(link.send, lambda: available)
    writer.save(1, tmp_path / "alone", state_of(optimizer))
    assert link.wait(2) == [messages.Copied(1), messages.Written(1)]
    writer.save(2, tmp_path / "among others", state_of(optimizer), available)
    assert [type(message) for message in link.wait(5)[2:]] == [messages.Copied, messages.Written, messages.Warned]
