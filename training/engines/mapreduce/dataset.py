"""Lazy data sets: what a script transforms and asks for results.

A transformation returns a new data set and computes nothing. An action computes what it needs, from the sources on, and
returns a value. Elements keep their order: partition after partition, and within one as they were read.

The operations between two exchanges of pairs are one stage, and a stage is one task per partition. An action computes
the exchanges that it needs, deepest first, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from p2pnode.training.engines.mapreduce import stages
from p2pnode.training.engines.mapreduce.backends import Backend, StageTask
from p2pnode.training.engines.mapreduce.errors import BadRequest, shown
from p2pnode.training.engines.mapreduce.sinks import FolderSink, SaveFormat
from p2pnode.training.engines.mapreduce.stages import (
    Begin,
    Block,
    Function,
    Stage,
    Transformation,
    chained,
    decoded,
)

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")

#: In errors, the process of the script has this partition: it combines what the others made.
OF_SCRIPT = -1
#: Per bucket the handles of the blocks of all partitions.
Buckets = list[list[Any]]


class Source(NamedTuple):
    """How a partition begins: a function, and handles of the results that it takes."""

    begin: Begin
    inputs: list[Any]


class Action:
    """One action, in which each exchange is computed once, however many data sets begin with it."""

    def __init__(self) -> None:
        self._found: dict[Callable[[Action], Any], Any] = {}

    def once(self, compute: Callable[[Action], U]) -> U:
        """What `compute` returns."""
        if compute not in self._found:
            self._found[compute] = compute(self)
        return cast("U", self._found[compute])


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """A data set without its methods: how its partitions begin, and the operations of the stage behind that. `before`
    counts the operations before it, to number those that follow."""

    backend: Backend
    partitions: int
    sources: Callable[[Action], Sequence[Source]]
    before: int = 0
    operations: tuple[Transformation, ...] = ()

    @property
    def depth(self) -> int:
        """Operations up to its end."""
        return self.before + len(self.operations)

    def name(self, kind: str) -> str:
        """What errors call the next operation, which has no function."""
        return f"{kind} {self.depth + 1}"

    def named(self, kind: str, function: Function) -> str:
        """What errors call the next operation. Raises `BadRequest` for a function that cannot be called, and
        `NotEncodable` for one that cannot be sent where it has to be."""
        checked_function(kind, function)
        name = f"{self.name(kind)} ({getattr(function, '__name__', type(function).__name__)})"
        if self.backend.is_remote:
            stages.check_sendable(function, name)
        return name

    def ready(self, action: Action) -> list[tuple[Stage, list[Any]]]:
        """What computes each partition, and the handles that it needs; exchanges before it are computed now."""
        return [
            (Stage(source.begin, self.operations, number, self.backend.is_remote), source.inputs)
            for number, source in enumerate(self.sources(action))
        ]

    def tasks(self, action: Action, run: Function) -> list[StageTask]:
        return [StageTask(partial(run, stage=stage), inputs) for stage, inputs in self.ready(action)]

    def exchanged(self, action: Action, count: int, name: str, function: Function | None) -> Buckets:
        """Pairs in the buckets of their keys; with a function the values of a key are combined first."""
        tasks = self.tasks(action, partial(stages.split, buckets=count, name=name, function=function))
        handles = self.backend.run(tasks)
        return [[self.backend.pick(handle, place) for handle in handles] for place in range(count)]

    def run(self, run: Function) -> list[Any]:
        """The results of an action."""
        return self.backend.values(self.backend.run(self.tasks(Action(), run)))


class Dataset(Generic[T]):
    """Elements of type T in partitions. Made by `MapReduce.load` and `MapReduce.from_items`, and by transformations."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage

    @property
    def partitions(self) -> int:
        """How many partitions there are: so many tasks can run at a time."""
        return self.lineage.partitions

    # -- transformations of single elements -----------------------------------------------------------------------

    def map(self, function: Callable[[T], U]) -> Dataset[U]:
        """`function(element)` for each element."""
        return cast("Dataset[U]", self._then("map", function))

    def filter(self, function: Callable[[T], object]) -> Dataset[T]:
        """The elements for which `function(element)` is true."""
        return self._then("filter", function)

    def flatmap(self, function: Callable[[T], Iterable[U]]) -> Dataset[U]:
        """All values of the iterables `function(element)`."""
        return cast("Dataset[U]", self._then("flatmap", function))

    def flatten(self) -> Dataset[Any]:
        """All values of elements that are iterables."""
        return self._then("flatten", iter)

    def map_partition(self, function: Callable[[list[T]], Iterable[U]]) -> Dataset[U]:
        """`function(list of all elements)` of each partition; what it returns are the elements of the new one."""
        return cast("Dataset[U]", self._then("map_partition", function))

    def _then(self, kind: Any, function: Function) -> Dataset[Any]:
        lineage = self.lineage
        name = lineage.name(kind) if kind == "flatten" else lineage.named(kind, function)
        operation = Transformation(kind, name, function)
        return Dataset(replace(lineage, operations=(*lineage.operations, operation)))

    # -- transformations of several data sets, and across partitions ----------------------------------------------

    def union(self, *others: Dataset[T]) -> Dataset[T]:
        """The elements of this data set, then those of the others, also the equal ones."""
        all_of = [self.lineage, *map(self._same_engine, others)]

        def sources(action: Action) -> list[Source]:
            # The operations of each are part of the begin.
            return [
                Source(partial(stages.elements, stage), [inputs])
                for one in all_of
                for stage, inputs in one.ready(action)
            ]

        return _behind(all_of, sum(one.partitions for one in all_of), sources)

    def shuffle(self: Dataset[tuple[K, V]], partitions: int | None = None) -> Dataset[tuple[K, V]]:
        """The same pairs, all those of one key in one partition. Keys are str, bytes, numbers, None or tuples."""
        count, name = _checked(partitions, self.partitions), self.lineage.name("shuffle")
        buckets = partial(self.lineage.exchanged, count=count, name=name, function=None)

        def sources(action: Action) -> list[Source]:
            return [Source(chained, [blocks]) for blocks in action.once(buckets)]

        return _behind([self.lineage], count, sources)

    def reduce_by_key(
        self: Dataset[tuple[K, V]], function: Callable[[V, V], V], partitions: int | None = None
    ) -> Dataset[tuple[K, V]]:
        """One pair for each key: its values combined by `function`, which must be associative. Values are combined in
        the partitions first, so that few of them travel."""
        count, name = _checked(partitions, self.partitions), self.lineage.named("reduce_by_key", function)
        buckets = partial(self.lineage.exchanged, count=count, name=name, function=function)

        def sources(action: Action) -> list[Source]:
            return [
                Source(partial(stages.merged, function=function, name=name, partition=number), [blocks])
                for number, blocks in enumerate(action.once(buckets))
            ]

        return _behind([self.lineage], count, sources)

    def join(
        self: Dataset[tuple[K, V]], other: Dataset[tuple[K, W]], partitions: int | None = None
    ) -> Dataset[tuple[K, tuple[V, W]]]:
        """`(key, (left, right))` for each pair of a value here and a value there that have one key."""
        right = self._same_engine(other)
        count, name = _checked(partitions, max(self.partitions, right.partitions)), self.lineage.name("join")
        sides = [partial(side.exchanged, count=count, name=name, function=None) for side in (self.lineage, right)]

        def sources(action: Action) -> list[Source]:
            ours, theirs = map(action.once, sides)
            return [Source(stages.joined, [one, another]) for one, another in zip(ours, theirs, strict=True)]

        return _behind([self.lineage, right], count, sources)

    def _same_engine(self, other: Dataset[Any]) -> Lineage:
        if not isinstance(other, Dataset) or other.lineage.backend is not self.lineage.backend:
            raise BadRequest(f"{shown(other)} is no data set of this engine: make one with load or from_items")
        return other.lineage

    # -- actions --------------------------------------------------------------------------------------------------

    def collect(self) -> list[T]:
        """All elements, in this process."""
        return list(chained(self.lineage.run(stages.collect)))

    def count(self) -> int:
        """How many elements there are."""
        return sum(self.lineage.run(stages.count))

    def reduce(self, function: Callable[[T, T], T]) -> T | None:
        """All elements combined by `function`, which must be associative; None for no element."""
        name = self.lineage.named("reduce", function)
        blocks = self.lineage.run(partial(stages.reduce, function=function, name=name))
        found = stages.reduced(chained(blocks), function, name, OF_SCRIPT)
        return found[0] if found else None

    def fold(self, function: Callable[[U, T], U], initial: U, combine: Callable[[U, U], U] | None = None) -> U:
        """`function(…function(function(initial, first), second)…, last)`.

        `initial` is applied once. So the partitions are folded one after the other, each from the result of the one
        before. With `combine` they are folded at the same time, each from `initial`, which then must be neutral:
        `combine(initial, x) == x`.
        """
        if combine is not None:
            checked_function("combine of fold", combine)
        name, backend = self.lineage.named("fold", function), self.lineage.backend
        state = block([initial], name, backend)
        tasks = self.lineage.tasks(Action(), partial(stages.fold, function=function, name=name))
        if combine is None:
            for task in tasks:
                (state,) = backend.run([task._replace(inputs=(state, task.inputs))])
            (state,) = backend.values([state])
            return cast("U", next(decoded(state)))
        handles = backend.run([task._replace(inputs=(state, task.inputs)) for task in tasks])
        found = stages.folded(chained(backend.values(handles)), initial, combine, f"{name}: combine", OF_SCRIPT)
        return cast("U", found)

    def save(self, folder: str | Path, form: Literal["text", "json", "recordio"] = "text") -> int:
        """Write a file per partition into a new folder; returns the number of elements.

        `text` takes strings without line ends, `json` anything that JSON has, `recordio` bytes. The folder appears when
        all of it is written. Raises `SinkFailed` if there is one already.
        """
        wanted: SaveFormat = form
        sink = FolderSink(folder, wanted)
        sink.begin()
        try:
            counts = self.lineage.run(partial(stages.write, write_part=sink.write))
            sink.finish()
        except BaseException:
            sink.abandon()
            raise
        return sum(counts)


def _behind(inputs: list[Lineage], partitions: int, sources: Callable[[Action], list[Source]]) -> Dataset[Any]:
    return Dataset(Lineage(inputs[0].backend, partitions, sources, 1 + max(one.depth for one in inputs)))


def block(items: list[Any], name: str, backend: Backend) -> Block:
    """Elements of the script for a task."""
    stage = Stage(decoded, (Transformation("map", name, decoded),), OF_SCRIPT, backend.is_remote)
    return stages.encoded(items, stage)


def loaded(backend: Backend, parts: Iterable[Begin]) -> Dataset[Any]:
    """The data set of these parts, one partition each."""
    sources = [Source(part, []) for part in parts]
    return Dataset(Lineage(backend, len(sources), lambda _: sources))


def applied(backend: Backend, function: Function, inputs: list[Dataset[Any]], outputs: int) -> list[Dataset[Any]]:
    """See `MapReduce.apply`."""
    for one in inputs:
        if not isinstance(one, Dataset):
            raise BadRequest(f"apply needs data sets, not {shown(one)}: make one with load or from_items")
    counts = {one.partitions for one in inputs}
    if not inputs or len(counts) != 1:
        raise BadRequest(
            f"apply needs data sets with equally many partitions, not {[one.partitions for one in inputs]}"
        )
    if outputs < 1:
        raise BadRequest(f"outputs={outputs}: apply returns at least one data set")
    lineages = [one.lineage for one in inputs]
    name = lineages[0].named("apply", function)

    def results(action: Action) -> list[Any]:
        tasks = []
        for partitions in zip(*(one.ready(action) for one in lineages), strict=True):
            run = partial(
                stages.applied, stages=[stage for stage, _ in partitions], outputs=outputs, name=name, function=function
            )
            tasks.append(StageTask(run, [handles for _, handles in partitions]))
        return backend.run(tasks)

    def output(place: int) -> Callable[[Action], list[Source]]:
        return lambda action: [Source(decoded, [backend.pick(handle, place)]) for handle in action.once(results)]

    return [_behind(lineages, lineages[0].partitions, output(place)) for place in range(outputs)]


def checked_function(user: str, function: object) -> None:
    """Raises `BadRequest` for what cannot be called, before anything runs."""
    if not callable(function):
        raise BadRequest(f"{user} needs a function, not {shown(function)}")


def _checked(partitions: int | None, default: int) -> int:
    if partitions is not None and partitions < 1:
        raise BadRequest(f"partitions={partitions}: there is at least one")
    return partitions or default
