"""Saves and reads the own state of every rank: one file a rank, all written between the same two turns.

The file of rank r has `.r` after the name of rank 0's, which is written last: it is there only if all are. An optimiser
whose state is the same on all ranks, as under DistributedDataParallel, is in the file of rank 0 alone; so is one that
keeps its state in parts, which are put together (`ZeroRedundancyOptimizer`). A set that is not whole, or of another
number of ranks, is not restored as if it were: all ranks then begin with what rank 0 had, and with generators as the
script has seeded them. Then optimisers of sharded parameters begin anew: rank 0 has only its own part of their state.

Of a DTensor a rank saves its own part, as a plain tensor beside its place. A device mesh belongs to running processes,
so it is not saved: what is read gets that of the model's own parameters which has the same ranks in the same order.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Size, Tensor

from p2pnode.training.trainer.model.local_part import is_distributed, local_of
from p2pnode.training.trainer.model.unshared_tensors import checksum
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.state_writer import StateWriter, mapped, tensor_bytes, tensors_of
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed

#: The key of a dictionary that stands for a DTensor.
_SPREAD = "p2pnode.spread"
_REPLICATED = -1


class RankStates:
    """Of one script. All ranks call its methods at the same points of their programs; with one process it is all of the
    state. `send` goes to the daemon, from rank 0; `warn` gets an event and a text; `tensors` are those of the model."""

    def __init__(
        self,
        ranks: Ranks,
        send: Callable[[messages.FromTrainer], None] | None,
        warn: Callable[[str, str], None],
        tensors: Iterable[Tensor] = (),
    ) -> None:
        self._ranks = ranks
        meshes = [getattr(tensor, "device_mesh", None) for tensor in tensors]
        #: Those over which the tensors are spread, by their ranks.
        self._meshes = {_ranks_of(mesh): mesh for mesh in meshes if mesh is not None}
        self._warn = warn
        self._writer = StateWriter(send or self._show)

    def save(self, turn: int, path: str, content: dict[str, Any]) -> None:
        """Save the content, whose "optimizer" is a list of states. Turn and path are those that rank 0 gives. Raises
        `DaemonGone` there."""
        ranks = self._ranks
        turn, path, moment = ranks.share((turn, path, time.time_ns()))
        content = mapped(content, _plain)
        content = content | {"ranks": ranks.count, "moment": moment, "optimizer": self._parted(content["optimizer"])}
        # All copies are in the memory of one host.
        size_bytes = sum(ranks.gather(tensor_bytes(content)))
        others = [rank_file(path, rank) for rank in range(1, ranks.count)] if ranks.is_first else []
        self._writer.save(turn, rank_file(path, ranks.rank), content, size_bytes, others)

    def _parted(self, states: list[Any]) -> list[Any]:
        """The optimisers' states without those that rank 0 has too."""
        if self._ranks.count == 1:
            return states
        mine = [None if state is None else _digest(state) for state in states]
        first = self._ranks.gather(mine)[0]
        is_kept = [self._ranks.is_first or own not in (None, theirs) for own, theirs in zip(mine, first, strict=True)]
        return [state if kept else None for state, kept in zip(states, is_kept, strict=True)]

    def load(self, path: Path) -> dict[str, Any]:
        """What this rank is to be restored from; without "random" where generators are to stay as they are. Raises
        `TrainerFailed`."""
        ranks = self._ranks
        own = self._own(path)
        sets = ranks.gather(None if own is None else (own.get("ranks", 1), own.get("moment", 0)))
        first = own if own is not None and ranks.is_first else snapshot.load(path, mapped=not ranks.is_first)
        if own is None or sets != [(ranks.count, first.get("moment", 0))] * ranks.count:
            self._warn("ranks_not_restored", _why(sets, ranks.count))
            whole = {name: _whole(value) for name, value in first.items() if name != "random"}
            return whole | {"optimizer": list(map(_begun_anew, first["optimizer"]))}
        states = zip(own["optimizer"], first["optimizer"], strict=True)
        optimizer = [theirs if mine is None else mine for mine, theirs in states]
        # The position in shared data is known to rank 0 alone.
        restored: dict[str, Any] = mapped(
            own | {"optimizer": optimizer, "data": first.get("data")}, lambda value: _spread(value, self._meshes)
        )
        return restored

    def _own(self, path: Path) -> dict[str, Any] | None:
        """The file of this rank; None if it is missing or damaged. Raises `TrainerFailed` for that of rank 0."""
        try:
            return snapshot.load(rank_file(path, self._ranks.rank))
        except TrainerFailed:
            if self._ranks.is_first:
                raise
            return None

    def _show(self, message: messages.FromTrainer) -> None:
        """What a rank without a connection has to say; rank 0 finds that the file is missing."""
        if isinstance(message, messages.NotWritten):
            sys.stderr.write(f"rank {self._ranks.rank}: {message.reason}; {message.hint}\n")


def rank_file(path: str | Path, rank: int) -> Path:
    """Where a rank keeps the state that belongs to the file of rank 0."""
    return Path(f"{path}.{rank}" if rank else path)


def optimizer_state(optimizer: Any) -> dict[str, Any] | None:
    """The `state_dict`. Of an optimiser that keeps its state in parts, one a rank, rank 0 gets the whole and the others
    None; all of them have to call it."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return dict(optimizer.state_dict())
    optimizer.consolidate_state_dict(to=0)
    return dict(optimizer.state_dict()) if optimizer.rank == 0 else None


def _whole(value: Any) -> Any:
    """A state without the items that have a part of a sharded tensor."""
    return {key: item for key, item in value.items() if not _is_spread(item)} if isinstance(value, dict) else value


def _begun_anew(state: Any) -> Any:
    """The state of an optimiser; where it has parts of sharded tensors only its options."""
    return state | {"state": {}} if _is_spread(state) else state


def _digest(state: Any) -> str:
    """The same for two states with the same values."""

    def comparable(value: Any) -> Any:
        return (value.dtype, value.shape, checksum(value)) if isinstance(value, Tensor) else value

    return hashlib.sha256(repr(mapped(state, comparable)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A dictionary for a DTensor; other parts of a state as they are. Raises `ValueError` for one that is neither shard
    nor replica."""
    if not isinstance(value, Tensor) or not is_distributed(value):
        return value
    spread: Any = value
    return {
        _SPREAD: local_of(value.detach()),
        "placements": [_number(placement) for placement in spread.placements],
        "ranks": _ranks_of(spread.device_mesh),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _spread(value: Any, meshes: dict[str, Any]) -> Any:
    """The DTensor of which `_plain` made this. Raises `KeyError` for a mesh that the model has not."""
    if type(value) is not dict or _SPREAD not in value:
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if number == _REPLICATED else Shard(number) for number in value["placements"]]
    shape, stride = Size(value["shape"]), tuple(value["stride"])
    mesh = meshes[value["ranks"]]
    local = value[_SPREAD].to(mesh.device_type)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_spread(value: Any) -> bool:
    """Whether a state that was saved has a rank's part of a tensor."""
    return any(name.endswith(_SPREAD) for name, _ in tensors_of(value))


def _number(placement: Any) -> int:
    kind = type(placement).__name__
    if kind not in ("Shard", "Replicate"):
        raise ValueError(f"a tensor placed as {placement} cannot be saved; redistribute it as Shard or Replicate")
    return int(placement.dim) if kind == "Shard" else _REPLICATED


def _ranks_of(mesh: Any) -> str:
    return str(mesh.mesh.tolist())


def _why(sets: list[tuple[int, int] | None], count: int) -> str:
    saved = sets[0][0] if sets[0] is not None else 1
    if saved != count:
        what = f"the trainer's state was saved by {saved} processes, and there are {count} now"
    else:
        wrong = next(rank for rank, found in enumerate(sets) if found != sets[0])
        what = f"the saved state of rank {wrong} is missing or of another moment than that of rank 0"
    return f"{what}: all begin with that of rank 0, and with generators as the script has seeded them"
