"""From a data set to tasks: what runs in one stage, and what has to be exchanged before it.

The operations between two exchanges are one stage, and a stage is one task per partition. `Planner` computes the
exchanges a data set needs, deepest first, each once for an action, and returns the stages of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from training.engines.mapreduce import stages
from training.engines.mapreduce.backends import Backend, StageTask
from training.engines.mapreduce.stages import Begin, Function, Stage, Transformation


class Origin(Protocol):
    """Where a stage begins."""

    @property
    def partitions(self) -> int: ...

    @property
    def depth(self) -> int:
        """Operations before it, to number those that follow."""
        ...


class Lineage(NamedTuple):
    """A data set without its methods."""

    origin: Origin
    operations: tuple[Transformation, ...]

    @property
    def depth(self) -> int:
        """Operations up to its end."""
        return self.origin.depth + len(self.operations)


@dataclass(frozen=True, eq=False)
class LoadedParts:
    """Parts of sources."""

    parts: tuple[Begin, ...]
    depth: int = 0

    @property
    def partitions(self) -> int:
        """A partition per part."""
        return len(self.parts)


@dataclass(frozen=True, eq=False)
class UnitedPartitions:
    """The partitions of several data sets."""

    inputs: tuple[Lineage, ...]

    @property
    def partitions(self) -> int:
        """All of theirs."""
        return sum(one.origin.partitions for one in self.inputs)

    @property
    def depth(self) -> int:
        """One behind the longest."""
        return 1 + max(one.depth for one in self.inputs)


@dataclass(frozen=True, eq=False)
class ExchangedPairs:
    """Pairs in the partitions of their keys; with a function the values of a key are combined."""

    source: Lineage
    partitions: int
    name: str
    function: Function | None

    @property
    def depth(self) -> int:
        """One behind its source."""
        return 1 + self.source.depth


@dataclass(frozen=True, eq=False)
class JoinedPairs:
    """Pairs of two data sets that have one key."""

    left: Lineage
    right: Lineage
    partitions: int
    name: str

    @property
    def depth(self) -> int:
        """One behind the longer."""
        return 1 + max(self.left.depth, self.right.depth)


@dataclass(frozen=True, eq=False)
class AppliedFunction:
    """What a function made of the partitions of several data sets."""

    inputs: tuple[Lineage, ...]
    outputs: int
    name: str
    function: Function
    partitions: int = 0
    depth: int = 0

    def output(self, place: int) -> AppliedOutput:
        """One of the data sets it returns."""
        return AppliedOutput(self, place)


@dataclass(frozen=True, eq=False)
class AppliedOutput:
    """One output of `AppliedFunction`."""

    whole: AppliedFunction
    place: int

    @property
    def partitions(self) -> int:
        """As many as each of its inputs."""
        return self.whole.inputs[0].origin.partitions

    @property
    def depth(self) -> int:
        """One behind the longest."""
        return 1 + max(one.depth for one in self.whole.inputs)


class PartitionSource(NamedTuple):
    """How a partition begins, and the handles it needs for that."""

    begin: Begin
    inputs: list[Any]


class PlannedPartition(NamedTuple):
    """A partition of a data set, ready to be computed."""

    stage: Stage
    inputs: list[Any]


class Planner:
    """Plans one action. An exchange that several data sets share is computed once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buckets: dict[tuple[int, bool], list[list[Any]]] = {}
        self._outputs: dict[int, list[Any]] = {}

    def ready(self, dataset: Lineage) -> list[PlannedPartition]:
        """The partitions of a data set; what they need of other stages is computed now, or on its way."""
        return [
            PlannedPartition(Stage(source.begin, dataset.operations, partition, self._backend.is_remote), source.inputs)
            for partition, source in enumerate(self._sources(dataset.origin))
        ]

    def _sources(self, origin: Origin) -> list[PartitionSource]:
        match origin:
            case LoadedParts(parts=parts):
                return [PartitionSource(part, []) for part in parts]
            case UnitedPartitions(inputs=inputs):
                # The operations of each input are part of the begin.
                return [
                    PartitionSource(partial(_inner, ready.stage), [ready.inputs])
                    for one in inputs
                    for ready in self.ready(one)
                ]
            case ExchangedPairs(source=source, partitions=count, name=name, function=function):
                buckets = self._exchange(origin, source, count, name, function)
                if function is None:
                    return [PartitionSource(stages.chained, [blocks]) for blocks in buckets]
                return [
                    PartitionSource(partial(stages.merged, function=function, name=name, partition=number), [blocks])
                    for number, blocks in enumerate(buckets)
                ]
            case JoinedPairs(left=left, right=right, partitions=count, name=name):
                ours = self._exchange(origin, left, count, name, None)
                theirs = self._exchange(origin, right, count, name, None, is_right=True)
                return [PartitionSource(stages.joined, [one, other]) for one, other in zip(ours, theirs, strict=True)]
            case AppliedOutput(whole=whole, place=place):
                handles = self._apply(whole)
                return [PartitionSource(stages.decoded, [self._backend.pick(handle, place)]) for handle in handles]
        raise TypeError(f"no origin of a data set: {origin!r}")

    def _exchange(
        self,
        origin: Origin,
        source: Lineage,
        count: int,
        name: str,
        function: Function | None,
        *,
        is_right: bool = False,
    ) -> list[list[Any]]:
        """Per bucket the blocks of all partitions, in their order."""
        key = id(origin), is_right
        if key not in self._buckets:
            tasks = [
                StageTask(
                    partial(stages.split, stage=ready.stage, buckets=count, name=name, function=function),
                    ready.inputs,
                    name,
                )
                for ready in self.ready(source)
            ]
            handles = self._backend.run(tasks)
            self._buckets[key] = [[self._backend.pick(handle, place) for handle in handles] for place in range(count)]
        return self._buckets[key]

    def _apply(self, whole: AppliedFunction) -> list[Any]:
        if id(whole) not in self._outputs:
            inputs: Sequence[list[PlannedPartition]] = [self.ready(one) for one in whole.inputs]
            tasks = []
            for partition in zip(*inputs, strict=True):
                run = partial(
                    stages.applied,
                    stages=[ready.stage for ready in partition],
                    outputs=whole.outputs,
                    name=whole.name,
                    function=whole.function,
                )
                tasks.append(StageTask(run, [ready.inputs for ready in partition], whole.name))
            self._outputs[id(whole)] = self._backend.run(tasks)
        return self._outputs[id(whole)]


def _inner(stage: Stage, inputs: list[Any]) -> Any:
    return stages.elements(stage, inputs)
