"""How a parameter server runs: its barrier, and which updates it accepts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from p2pnode.training.barriers.predicates import Barrier, make_barrier
from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.engines.server.acceptance import EachAtOnce, Quota, WholeStep
from p2pnode.training.settings import BarrierSettings

BarrierName = Literal["bsp", "ssp", "asp", "pbsp", "pssp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Equal at all nodes of a run.

    `barrier`, `staleness`, `sample`: as in `[barrier]`; `sample` 0 is √P, from 1 to 10. `min_workers` have to be
    there before the first task. With `grads_to_wait` the server is a synchronous SGD: so many updates of one version,
    or of one `version_tolerance` older, are averaged to one; a refused one is computed `max_report_count` times, then
    its task goes to another worker. A task whose function raised more than `max_failures` times ends the run. A lease
    lasts three mean task times, but from `lease_floor_s` on.
    """

    barrier: BarrierName = "bsp"
    staleness: int = 4
    sample: int = 0
    min_workers: int = 1
    grads_to_wait: int = 0
    version_tolerance: int = 0
    max_report_count: int = 64
    max_failures: int = 3
    lease_floor_s: float = 10.0

    def __post_init__(self) -> None:
        if self.barrier not in get_args(BarrierName):
            raise ValueError(f"no barrier {self.barrier!r}; there are {', '.join(get_args(BarrierName))}")
        for name in ("staleness", "sample", "grads_to_wait", "version_tolerance"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.min_workers < 1 or self.max_report_count < 1:
            raise ValueError("min_workers and max_report_count must be 1 or more")
        if self.version_tolerance and not self.grads_to_wait:
            raise ValueError("version_tolerance needs grads_to_wait")
        if self.grads_to_wait and self.barrier != "asp":
            raise ValueError('grads_to_wait needs barrier = "asp": the quota is what holds workers together')

    def text(self) -> str:
        """For the comparison with those of other nodes."""
        return msgspec.json.encode(self).decode()

    def make_barrier(self) -> Barrier:
        return make_barrier(BarrierSettings(method=self.barrier, staleness=self.staleness, sample=self.sample))

    def make_policy(self) -> EachAtOnce:
        if self.grads_to_wait:
            return Quota(self.grads_to_wait, self.version_tolerance)
        return WholeStep() if self.barrier == "bsp" else EachAtOnce()

    def rules(self) -> QueueRules:
        return QueueRules(
            max_failures=self.max_failures,
            lease_floor_s=self.lease_floor_s,
            lease_ceiling_s=max(60.0, self.lease_floor_s),
        )
