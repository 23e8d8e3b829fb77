"""The saved states of a node's ranks, as one rank reads and writes them (two: test_rank_states_process.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.rank_states import RankStates, optimizer_state, rank_file
from p2pnode.training.trainer_link.interface import TrainerFailed


class Recorded(Ranks):
    """One rank of two, alone: what the other would give is in `given`, by its turn."""

    def __init__(self, rank: int, given: list[Any]) -> None:
        super().__init__(rank, 2, "cpu")
        self.given = given

    def share(self, settings: Any) -> Any:
        return settings if self.rank == 0 else self.given.pop(0)

    def gather(self, value: Any) -> list[Any]:
        found = [value, self.given.pop(0)]
        return found if self.rank == 0 else found[::-1]


class Rank:
    """Rank `rank`, with what the other one gives when they gather."""

    def __init__(self, rank: int, *given: Any) -> None:
        self.warned: list[str] = []
        self.states = RankStates(Recorded(rank, list(given)), None, lambda _event, text: self.warned.append(text))


def write(path: Path, rank: int, **content: Any) -> None:
    saved = {"ranks": 2, "moment": 7, "data": f"data {rank}", "optimizer": [f"optimizer {rank}"], **content}
    snapshot.write(rank_file(path, rank), snapshot.content_of(saved))


def test_each_rank_reads_its_own_file_and_from_the_first_what_it_lacks(tmp_path: Path) -> None:
    """An optimiser that is the same on all ranks, and the position in shared data, which rank 0 alone knows."""
    write(tmp_path / "state", 0, optimizer=["same", "first's own"])
    write(tmp_path / "state", 1, optimizer=[None, "second's own"], state={"epoch": 3})

    second = Rank(1, (2, 7))
    found = second.states.load(tmp_path / "state")

    assert (found["optimizer"], found["data"]) == (["same", "second's own"], "data 0")
    assert found["state"] == {"epoch": 3}
    assert "random" in found
    assert second.warned == []


@pytest.mark.parametrize(
    ("own", "first", "reason"),
    [
        (None, (2, 7), "the saved state of rank 1 is missing or of another moment"),
        ((2, 6), (2, 7), "the saved state of rank 1 is missing or of another moment"),
        (None, (1, 7), "saved by 1 processes, and there are 2 now"),
        ((4, 7), (4, 7), "saved by 4 processes, and there are 2 now"),
    ],
)
def test_a_set_that_does_not_fit_gives_every_rank_what_the_first_had(
    tmp_path: Path, own: tuple[int, int] | None, first: tuple[int, int], reason: str
) -> None:
    """But for the generators: with those of rank 0 all ranks would draw the same."""
    write(tmp_path / "state", 0, ranks=first[0], moment=first[1])
    if own is not None:
        write(tmp_path / "state", 1, ranks=own[0], moment=own[1])

    for rank, given in ((0, own), (1, first)):
        reader = Rank(rank, given)
        found = reader.states.load(tmp_path / "state")
        assert found["optimizer"] == ["optimizer 0"]
        assert "random" not in found
        assert [reason in text for text in reader.warned] == [True]


def test_a_damaged_file_of_the_first_rank_is_an_error(tmp_path: Path) -> None:
    """That of another rank is one that is missing."""
    write(tmp_path / "state", 0)
    rank_file(tmp_path / "state", 1).write_text("torn")
    assert Rank(1, (2, 7)).states.load(tmp_path / "state")["optimizer"] == ["optimizer 0"]

    (tmp_path / "state").write_text("torn")
    with pytest.raises(TrainerFailed, match="cannot be read"):
        Rank(0, (2, 7)).states.load(tmp_path / "state")


def test_one_process_saves_and_reads_all_of_its_state(tmp_path: Path) -> None:
    """Nothing is left out; a state of an earlier version, which does not say of how many ranks it is, is of one."""
    states = RankStates(Ranks(), lambda _: None, lambda *_: None)
    for more in ({"ranks": 1}, {}):
        content = snapshot.content_of({"optimizer": [{"lr": 1}], "data": None, **more})
        snapshot.write(tmp_path / "state", content)
        found = states.load(tmp_path / "state")
        assert found["optimizer"] == [{"lr": 1}]
        assert "random" in found


def trained(scale: float) -> torch.optim.Optimizer:
    weights = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(weights.parameters())
    for parameter in weights.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("scale", "kept"), [(1.0, False), (2.0, True)])
def test_an_optimizer_is_in_the_file_of_another_rank_only_if_it_differs(
    tmp_path: Path, scale: float, kept: bool
) -> None:
    """By all its values. One in parts, of which this rank has none to save, is not."""
    states = [trained(1.0).state_dict(), None]
    digests: list[Any] = []
    other = Rank(0)
    other.states._ranks.gather = lambda value: digests.append(value) or [value]  # type: ignore[method-assign,func-returns-value]
    assert other.states._parted([trained(scale).state_dict(), None])[0] is not None

    second = Rank(1, digests[0], 0)
    [own, parts] = second.states._parted(states)
    assert (own is not None, parts) == (kept, None)


def test_the_state_of_an_optimizer_in_parts_is_put_together_on_the_first_rank() -> None:
    """`consolidate_state_dict` is called on all ranks, and the `state_dict` of others is never asked for."""
    asked: list[Any] = []
    for rank, found in ((0, {"all": 1}), (1, None)):
        optimizer = SimpleNamespace(
            rank=rank, consolidate_state_dict=lambda to: asked.append(to), state_dict=lambda: {"all": 1}
        )
        assert optimizer_state(optimizer) == found
    assert asked == [0, 0]
    assert optimizer_state(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5))["param_groups"][0]["lr"] == 0.5
