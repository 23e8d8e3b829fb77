"""Gives a script the engine that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from training.errors import TrainingError

if TYPE_CHECKING:
    from training.engines.mapreduce.engine import MapReduce

#: The engines of this version.
ENGINES = ("mapreduce",)


class EngineUnavailable(TrainingError, ValueError):
    """There is no such engine, or a package that it needs is missing."""


def engine(kind: Literal["mapreduce"], *, processes: int = 0, address: str | None = None) -> MapReduce:
    """An engine for an algorithm that is no training loop; close it, or use it in a `with` block.

    `mapreduce`: lazy data sets, computed in this process, in `processes` of this machine, or on the Dask cluster whose
    scheduler has this `address` (docs/engines.md). Raises `EngineUnavailable` for another kind and for a missing
    package, `ValueError` for options that cannot be met.
    """
    if kind not in ENGINES:
        raise EngineUnavailable(f"there is no engine {kind!r}; this version has: {', '.join(ENGINES)}")
    try:
        from training.engines.mapreduce.engine import MapReduce
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"the engine {kind!r} needs the package {error.name}: pip install 'p2pnode[mapreduce]'"
        ) from error
    return MapReduce(processes=processes, address=address)
