"""When may a node start its next step? Two predicates, and combinators that decide what the predicates see.

`bsp` and `ssp` look at completed steps only and never change. Probabilistic Synchronous Parallel is not a third
predicate: it applies one of them to a sample instead of all nodes. See Wang, Catterall and Mortier, arXiv 1709.07772,
and `docs/psp.md`. Pure. This module draws nothing and waits for nothing; `training.barriers.waiter` runs it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from p2pnode.training.settings import BarrierMethod, BarrierSettings

Predicate = Callable[[int, Sequence[int]], bool]

#: A sample of √N̂, from 1 to 10: in a smaller swarm the sample is all nodes (docs/psp.md).
LARGEST_SAMPLE = 10
#: A waiting barrier looks again after this share of the median step time …
RESAMPLE_SHARE = 1 / 20
#: … but never more often than this, in seconds.
RESAMPLE_FLOOR_S = 0.02


def asp(_mine: int, _others: Sequence[int]) -> bool:
    """Asynchronous parallel: always on."""
    return True


def ssp(mine: int, others: Sequence[int], staleness: int) -> bool:
    """Stale synchronous parallel: no peer is more than `staleness` completed steps behind.

    One-sided: a peer that is ahead never blocks.
    """
    return all(mine - other <= staleness for other in others)


def bsp(mine: int, others: Sequence[int]) -> bool:
    """Bulk synchronous parallel: no peer is behind."""
    return ssp(mine, others, 0)


def quantile_of(predicate: Predicate, quantile: float) -> Predicate:
    """The predicate on that share of the steps which is furthest ahead: "most of the system has passed"."""
    if quantile >= 1.0:
        return predicate

    def quorum(mine: int, others: Sequence[int]) -> bool:
        needed = math.ceil(quantile * len(others) - 1e-9)  # 0.28 · 25 is 7, whatever floats make of it
        return predicate(mine, sorted(others, reverse=True)[:needed])

    return quorum


def sample_size(configured: int, population: float) -> int:
    """β: as configured, or `clamp(⌈√N̂⌉, 1, 10)` when that is 0."""
    if configured > 0:
        return configured
    return max(1, math.ceil(min(LARGEST_SAMPLE, math.sqrt(max(population, 1.0)))))


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier ready for use: `passes(mine, others)`, on all nodes (`complete`) or on a sample.

    A peer that has completed `enough(mine)` steps need not be asked again: steps never go back within an incarnation.
    """

    #: "custom" for a function of the user's own.
    method: str
    passes: Predicate
    complete: bool
    samples: bool
    staleness: int | None
    quantile: float

    @property
    def synchronous(self) -> bool:
        """Bulk-synchronous visibility: deltas of a step show only after its barrier. Only bsp has it, and not pbsp,
        which looks at a sample. For the exchange the manifest says the same (`Manifest.barrier_family`): all nodes
        agree."""
        return self.method == "bsp"

    def enough(self, mine: int) -> int | None:
        """The step from which a peer satisfies the predicate for sure; None when only the predicate knows."""
        return None if self.staleness is None else mine - self.staleness


class BarrierNotFound(Exception):
    """`barrier.method` names nothing that can be called."""


def make_barrier(settings: BarrierSettings) -> Barrier:
    """The barrier of the settings. Raises `BarrierNotFound` for a custom one that does not import."""
    method, staleness = settings.method, settings.staleness
    if method == "asp":
        return Barrier(method, asp, complete=False, samples=False, staleness=None, quantile=1.0)
    if method not in get_args(BarrierMethod):
        predicate = quantile_of(_imported(method), settings.quantile)
        return Barrier("custom", predicate, complete=False, samples=True, staleness=None, quantile=settings.quantile)
    lag = 0 if method in ("bsp", "pbsp") else staleness
    complete = method in ("bsp", "ssp")
    predicate = quantile_of(partial(ssp, staleness=lag), settings.quantile)
    return Barrier(method, predicate, complete=complete, samples=True, staleness=lag, quantile=settings.quantile)


def resample_after(step_seconds: float) -> float:
    """Seconds until a waiting barrier draws its next, fresh sample."""
    return max(RESAMPLE_FLOOR_S, RESAMPLE_SHARE * step_seconds)


def _imported(path: str) -> Predicate:
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the user's module may raise whatever it likes
        raise BarrierNotFound(f"barrier.method = {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise BarrierNotFound(f"barrier.method = {path!r} is not callable")

    def custom(mine: int, others: Sequence[int]) -> bool:
        return bool(function(mine, others))

    return custom
