"""Which updates count, and when they reach the values: the policies of the parameter server, and its options.

The *version* of the values is the number of updates made to them. Three policies:

`EachAtOnce`: every update counts at once.

`WholeStep` (bsp): the updates of a step wait until all its tasks are done and reach the values together, in the order
of their tasks. Nobody sees an update of a step before the barrier of that step, so the result is that of a sequential
run.

`Quota` (synchronous SGD, ElasticDL's design): an update counts if it was computed from the current version, or from one
at most `version_tolerance` older; `grads_to_wait` of them, each of another worker, are averaged to one update. A worker
whose update was refused tries again with the new values.

`EachAtOnce` and `WholeStep` refuse nothing. Every update of a key in a commit has a version of its own as its
timestamp: that tells an owner which of them it has, when the next server repeats a commit. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from p2pnode.training.barriers.predicates import Barrier, make_barrier
from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.reducers import reduced
from p2pnode.training.values.store import ValueUpdate

BarrierName = Literal["bsp", "ssp", "asp", "pbsp", "pssp"]
#: What a worker computed, by key.
KeyedUpdates = Sequence[tuple[Key, Any]]
#: `waits`: there is no place for it now. It is judged again after the next commit.
Verdict = Literal["accepted", "stale", "waits"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one attempt of a task has computed: `version` is that of the values which it was computed from."""

    worker: bytes
    task: int
    attempt: int
    step: int
    version: int
    updates: KeyedUpdates

    @property
    def name(self) -> tuple[int, int]:
        """The fencing token: task and attempt."""
        return self.task, self.attempt


@dataclass(frozen=True, slots=True)
class Commit:
    """Contributions that reach the values together, and lead to `version`. Each has a timestamp; those of one timestamp
    are multiplied by `weight`, and added to one update."""

    version: int
    contributions: tuple[Contribution, ...]
    stamps: tuple[int, ...]
    weight: float = 1.0


class EachAtOnce:
    """Asynchronous, and the base of the others: what has come in since the last commit is one commit."""

    def __init__(self) -> None:
        self._held: list[Contribution] = []

    def judge(self, contribution: Contribution, version: int) -> Verdict:  # noqa: ARG002
        """Whether it counts; it is in the buffer then."""
        self._held.append(contribution)
        return "accepted"

    def due(self, version: int, open_steps: Sequence[int], lowest: int) -> Commit | None:  # noqa: ARG002
        """The next commit, which leaves the buffer. `open_steps` are those of the tasks that are not done, `lowest` the
        step that all live workers have completed."""
        held, self._held = self._held, []
        return self.commit_of(held, version) if held else None

    def commit_of(self, contributions: Sequence[Contribution], version: int, places: Sequence[int] = ()) -> Commit:
        """These as one commit on top of `version`. `places`: where they were in the commit of a former server, which
        may have had others beside them."""
        stamps = tuple(version + place + 1 for place in places or range(len(contributions)))
        return Commit(max(stamps), tuple(contributions), stamps)


class WholeStep(EachAtOnce):
    """Bulk-synchronous visibility."""

    def due(self, version: int, open_steps: Sequence[int], lowest: int) -> Commit | None:
        if not self._held:
            return None
        step = min(one.step for one in self._held)
        if lowest < step or any(other <= step for other in open_steps):
            return None
        ready = sorted((one for one in self._held if one.step == step), key=lambda one: one.task)
        self._held = [one for one in self._held if one.step != step]
        return self.commit_of(ready, version)


class Quota(EachAtOnce):
    """Version-checked synchronous SGD."""

    def __init__(self, grads_to_wait: int, version_tolerance: int = 0) -> None:
        super().__init__()
        self.grads_to_wait = grads_to_wait
        self.version_tolerance = version_tolerance

    def judge(self, contribution: Contribution, version: int) -> Verdict:
        if not version - self.version_tolerance <= contribution.version <= version:
            return "stale"
        if len(self._held) >= self.grads_to_wait or any(one.worker == contribution.worker for one in self._held):
            return "waits"  # the quota is full, or its worker is in it: the quota counts workers
        return super().judge(contribution, version)

    def due(self, version: int, open_steps: Sequence[int], lowest: int) -> Commit | None:
        return super().due(version, open_steps, lowest) if len(self._held) >= self.grads_to_wait else None

    def commit_of(self, contributions: Sequence[Contribution], version: int, places: Sequence[int] = ()) -> Commit:
        del places  # one update: all have the same timestamp
        stamps = (version + 1,) * len(contributions)
        return Commit(version + 1, tuple(contributions), stamps, 1.0 / self.grads_to_wait)


class NotWeighable(TypeError):
    """An update that is to be averaged is no number and no array. `key` and `worker` say which."""

    def __init__(self, key: Key, worker: bytes, update: object) -> None:
        super().__init__(
            f"the update of {key!r} by {worker.hex()[:8]} is a {type(update).__name__}; only numbers and arrays can be "
            "averaged"
        )
        self.key = key
        self.worker = worker


def updates_of(commit: Commit) -> list[ValueUpdate]:
    """What the owners of the keys get, in the order of the timestamps. Raises `NotWeighable`."""
    found: dict[tuple[int, Key], Any] = {}
    for one, stamp in zip(commit.contributions, commit.stamps, strict=True):
        for key, update in one.updates:
            weighed = _weighed(key, one.worker, update, commit.weight)
            place = stamp, key
            if place not in found:
                found[place] = weighed
                continue
            try:
                found[place] = reduced("add", found[place], weighed)
            except (TypeError, ValueError) as error:
                raise NotWeighable(key, one.worker, update) from error
    return [ValueUpdate(key, update, stamp) for (stamp, key), update in found.items()]


def _weighed(key: Key, worker: bytes, update: Any, weight: float) -> Any:
    if weight == 1.0:
        return update
    if isinstance(update, bool) or not isinstance(update, int | float | np.ndarray | np.generic):
        raise NotWeighable(key, worker, update)
    # A float32 stays one: the factor has the update's own type where that has fractions.
    array = np.asarray(update)
    factor: Any = array.dtype.type(weight) if array.dtype.kind in "fc" else weight
    return update * factor


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
