"""Lazy data sets: what a script transforms and asks for results.

A transformation returns a new data set and computes nothing. An action computes what it needs, from the sources on, and
returns a value. Elements keep their order: partition after partition, and within one as they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from training.engines.mapreduce.errors import BadRequest, shown
from training.engines.mapreduce.plan import (
    AppliedFunction,
    ExchangedPairs,
    JoinedPairs,
    Lineage,
    LoadedParts,
    Origin,
    UnitedPartitions,
)
from training.engines.mapreduce.sinks import SaveFormat
from training.engines.mapreduce.stages import Begin, Function, Transformation, named

if TYPE_CHECKING:
    from training.engines.mapreduce.actions import Actions

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")


@dataclass(frozen=True, slots=True, eq=False)
class Dataset(Generic[T]):
    """Elements of type T in partitions. Made by `MapReduce.load` and `MapReduce.from_items`, and by transformations."""

    _actions: Actions
    _origin: Origin
    _operations: tuple[Transformation, ...] = ()

    @property
    def partitions(self) -> int:
        """How many partitions there are: so many tasks can run at a time."""
        return self._origin.partitions

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
        return self._then("flatten", None)

    def map_partition(self, function: Callable[[list[T]], Iterable[U]]) -> Dataset[U]:
        """`function(list of all elements)` of each partition; what it returns are the elements of the new one."""
        return cast("Dataset[U]", self._then("map_partition", function))

    def _then(self, kind: Any, function: Function | None) -> Dataset[Any]:
        if kind != "flatten":
            checked_function(kind, function)
        operation = Transformation(
            kind, named(kind, self._origin.depth + len(self._operations) + 1, function), function
        )
        return Dataset(self._actions, self._origin, (*self._operations, operation))

    # -- transformations of several data sets, and across partitions ----------------------------------------------

    def union(self, *others: Dataset[T]) -> Dataset[T]:
        """The elements of this data set, then those of the others, also the equal ones."""
        return Dataset(self._actions, UnitedPartitions(tuple(self._same_engine(one).split for one in (self, *others))))

    def shuffle(self: Dataset[tuple[K, V]], partitions: int | None = None) -> Dataset[tuple[K, V]]:
        """The same pairs, all those of one key in one partition. Keys are str, bytes, numbers, None or tuples."""
        return Dataset(self._actions, self._exchange("shuffle", None, partitions))

    def reduce_by_key(
        self: Dataset[tuple[K, V]], function: Callable[[V, V], V], partitions: int | None = None
    ) -> Dataset[tuple[K, V]]:
        """One pair for each key: its values combined by `function`, which must be associative. Values are combined in
        the partitions first, so that few of them travel."""
        checked_function("reduce_by_key", function)  # without one it would be a shuffle
        return Dataset(self._actions, self._exchange("reduce_by_key", function, partitions))

    def join(
        self: Dataset[tuple[K, V]], other: Dataset[tuple[K, W]], partitions: int | None = None
    ) -> Dataset[tuple[K, tuple[V, W]]]:
        """`(key, (left, right))` for each pair of a value here and a value there that have one key."""
        right = self._same_engine(other)
        chosen = _checked(partitions, max(self.partitions, right.partitions))
        name = named("join", self._origin.depth + len(self._operations) + 1, None)
        return Dataset(self._actions, JoinedPairs(self.split, right.split, chosen, name))

    def _exchange(self, kind: str, function: Function | None, partitions: int | None) -> ExchangedPairs:
        name = named(kind, self._origin.depth + len(self._operations) + 1, function)
        return ExchangedPairs(self.split, _checked(partitions, self.partitions), name, function)

    @property
    def split(self) -> Lineage:
        """This data set for the planner."""
        return Lineage(self._origin, self._operations)

    def _same_engine(self, other: Dataset[Any]) -> Dataset[Any]:
        if not isinstance(other, Dataset) or other._actions is not self._actions:
            raise BadRequest(f"{shown(other)} is no data set of this engine: make one with load or from_items")
        return other

    # -- actions --------------------------------------------------------------------------------------------------

    def collect(self) -> list[T]:
        """All elements, in this process."""
        return self._actions.collect(self.split)

    def count(self) -> int:
        """How many elements there are."""
        return self._actions.count(self.split)

    def reduce(self, function: Callable[[T, T], T]) -> T | None:
        """All elements combined by `function`, which must be associative; None for no element."""
        checked_function("reduce", function)
        name = named("reduce", self._origin.depth + len(self._operations) + 1, function)
        return cast("T | None", self._actions.reduce(self.split, function, name))

    def fold(self, function: Callable[[U, T], U], initial: U, combine: Callable[[U, U], U] | None = None) -> U:
        """`function(…function(function(initial, first), second)…, last)`.

        `initial` is applied once. So the partitions are folded one after the other, each from the result of the one
        before. With `combine` they are folded at the same time, each from `initial`, which then must be neutral:
        `combine(initial, x) == x`.
        """
        checked_function("fold", function)
        if combine is not None:
            checked_function("combine of fold", combine)
        name = named("fold", self._origin.depth + len(self._operations) + 1, function)
        return cast("U", self._actions.fold(self.split, function, initial, combine, name))

    def save(self, folder: str | Path, form: Literal["text", "json", "recordio"] = "text") -> int:
        """Write a file per partition into a new folder; returns the number of elements.

        `text` takes strings without line ends, `json` anything that JSON has, `recordio` bytes. The folder appears when
        all of it is written. Raises `SinkFailed` if there is one already.
        """
        wanted: SaveFormat = form
        return self._actions.save(self.split, folder, wanted)


def loaded(actions: Actions, parts: Iterable[Begin]) -> Dataset[Any]:
    """The data set of these parts, one partition each."""
    return Dataset(actions, LoadedParts(tuple(parts)))


def applied(actions: Actions, function: Function, inputs: list[Dataset[Any]], outputs: int) -> list[Dataset[Any]]:
    """See `MapReduce.apply`."""
    checked_function("apply", function)
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
    whole = AppliedFunction(tuple(one.split for one in inputs), outputs, named("apply", 1, function), function)
    return [Dataset(actions, whole.output(place)) for place in range(outputs)]


def checked_function(user: str, function: object) -> None:
    """Raises `BadRequest` for what cannot be called, before anything runs."""
    if not callable(function):
        raise BadRequest(f"{user} needs a function, not {shown(function)}")


def _checked(partitions: int | None, default: int) -> int:
    if partitions is not None and partitions < 1:
        raise BadRequest(f"partitions={partitions}: there is at least one")
    return partitions or default
