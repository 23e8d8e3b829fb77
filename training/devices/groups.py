"""Which trainers of a node merge their deltas by `torch.distributed`, and what each is told. Pure.

A group has a number and a file by which its members find one another. With other members, or after a failure, there is
another group.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from p2pnode.training.trainer_link.interface import MergeOrder

Backend = Literal["nccl", "gloo"]


def backend_of(setting: str, names: Sequence[str]) -> Backend | None:
    """How the trainers on these devices merge by `devices.merge`; None: in shared memory. NCCL wants a GPU for each."""
    have_gpus = all(name.startswith("cuda:") for name in names) and len(set(names)) == len(names)
    if len(names) == 1 or setting == "memory" or (setting == "auto" and not have_gpus):
        return None
    return "nccl" if have_gpus else "gloo"


class DeviceGroups:
    """`place`: the beginning of the name of each group's file, in a folder that exists. `timeout_s`: the longest that a
    member waits for the others."""

    def __init__(self, backend: Backend, place: str, timeout_s: float) -> None:
        self._backend = backend
        self._place = place
        self._timeout_s = timeout_s
        self._members: tuple[int, ...] = ()
        self._numbers = itertools.count(1)
        self._number = 0

    def orders(self, weights: Mapping[int, float]) -> dict[int, MergeOrder]:
        """What the trainers with these weights, two at least, are told; the first writes the mean."""
        members = tuple(sorted(weights))
        if members != self._members:
            self._members, self._number = members, next(self._numbers)
        return {
            index: MergeOrder(
                index=index,
                members=members,
                group=self._number,
                place=f"{self._place}.{self._number}",
                backend=self._backend,
                weight=weights[index],
                writes=index == members[0],
                timeout_s=self._timeout_s,
            )
            for index in members
        }

    def failed(self) -> None:
        """The next merge is one of a new group."""
        self._members = ()

    def alone(self, index: int) -> MergeOrder:
        """What a trainer is told that is to write its own delta."""
        return MergeOrder(index=index, members=(index,), group=0, place="", backend=self._backend)
