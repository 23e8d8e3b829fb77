"""What one task does with one partition: the operations of a stage, and what follows at its end.

A stage begins with a part of a source or with blocks of the stage before. It passes the elements through its operations
one by one, and ends with an action or with buckets for the next stage. Between processes a block travels encoded, so
that a process which only passes it on never decodes it.
"""

from __future__ import annotations

import itertools
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import cloudpickle

from p2pnode.training.engines.mapreduce.errors import BadRequest, NotEncodable, function_failed, shown

Function = Callable[..., Any]
#: An encoded partition; the list itself where nothing leaves the process.
Block = bytes | list[Any]


#: What makes the elements at the begin of a stage, of its inputs.
Begin = Callable[..., Iterable[Any]]


class Transformation(NamedTuple):
    """One transformation. `name` is what an error calls it: the operation, its place and its function."""

    kind: Literal["map", "filter", "flatmap", "flatten", "map_partition"]
    name: str
    function: Function


class Stage(NamedTuple):
    """One partition of a data set: how it begins, and the operations up to the next exchange. `is_remote`: its result
    leaves the process."""

    begin: Begin
    operations: tuple[Transformation, ...]
    partition: int
    is_remote: bool

    @property
    def name(self) -> str:
        """What an error calls the elements that come out."""
        return self.operations[-1].name if self.operations else "the source"


def check_sendable(function: Function, name: str) -> None:
    """Raises `NotEncodable` for a function that no other process can have."""
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise NotEncodable(name, "a function, or what it refers to,", f"{type(error).__name__}: {error}") from None


# -- elements -----------------------------------------------------------------------------------------------------


def elements(stage: Stage, inputs: list[Any]) -> Iterator[Any]:
    """The elements of a partition behind its operations."""
    items = stage.begin(*inputs)
    for operation in stage.operations:
        items = _APPLY[operation.kind](items, operation, stage.partition)
    return iter(items)


def _map(items: Iterable[Any], operation: Transformation, partition: int) -> Iterator[Any]:
    function = operation.function
    for item in items:
        try:
            value = function(item)
        except Exception as error:
            raise function_failed(operation.name, item, partition, error) from None
        yield value


def _filter(items: Iterable[Any], operation: Transformation, partition: int) -> Iterator[Any]:
    function = operation.function
    for item in items:
        try:
            passes = bool(function(item))
        except Exception as error:
            raise function_failed(operation.name, item, partition, error) from None
        if passes:
            yield item


def _flatmap(items: Iterable[Any], operation: Transformation, partition: int) -> Iterator[Any]:
    function = operation.function
    for item in items:
        try:
            values = list(function(item))
        except Exception as error:
            raise function_failed(operation.name, item, partition, error) from None
        yield from values


def _map_partition(items: Iterable[Any], operation: Transformation, partition: int) -> Iterator[Any]:
    given = list(items)
    try:
        values = list(operation.function(given))
    except Exception as error:
        raise function_failed(operation.name, _All(len(given)), partition, error) from None
    yield from values


class _All:
    """Stands for the elements of a partition in an error."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def __repr__(self) -> str:
        return f"all {self._elements} elements"


_APPLY = {"map": _map, "filter": _filter, "flatmap": _flatmap, "flatten": _flatmap, "map_partition": _map_partition}


# -- between stages -----------------------------------------------------------------------------------------------


def encoded(items: Iterable[Any], stage: Stage) -> Block:
    """A block for another task. Raises `NotEncodable`, which names the first element that cannot be sent."""
    block = list(items)
    if not stage.is_remote:
        return block
    try:
        return bytes(cloudpickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        for item in block:
            try:
                cloudpickle.dumps(item)
            except Exception as problem:
                raise NotEncodable(stage.name, shown(item), f"{type(problem).__name__}: {problem}") from None
        raise NotEncodable(stage.name, "its elements", f"{type(error).__name__}: {error}") from None


def decoded(block: Block) -> Iterator[Any]:
    """The elements of a block."""
    if isinstance(block, bytes):
        return iter(pickle.loads(block))  # noqa: S301 - made by this program, in a task of the same action
    return iter(block)


def chained(blocks: list[Block]) -> Iterator[Any]:
    """The elements of blocks, in their order."""
    return itertools.chain.from_iterable(map(decoded, blocks))


def pairs(items: Iterable[Any], user: str) -> Iterator[tuple[Any, Any]]:
    """Elements that have to be pairs of key and value. Raises `BadRequest`, which names the first that is not."""
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise BadRequest(f"{user} needs pairs (key, value), and there is {shown(item)}")
        yield item[0], item[1]


def bucket_of(key: Any, buckets: int) -> int:
    """The bucket of a key, from 0 to `buckets` - 1: the same for equal keys and in every process, unlike Python's own
    hash of a string. Raises `BadRequest` for a key of another type than those below."""
    return zlib.crc32(_canonical(key)) % buckets


def _canonical(key: Any) -> bytes:
    """Bytes that are equal for equal keys: 1, 1.0 and True are one key in Python, so also here."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if key is None:
        return b"n"
    if isinstance(key, tuple):
        parts = [_canonical(part) for part in key]
        return b"t" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    if hasattr(key, "item") and getattr(key, "ndim", None) == 0:  # a number of NumPy
        key = key.item()
    if isinstance(key, float):
        if math.isnan(key):
            raise BadRequest("nan is no key: it is not equal to itself")
        if not key.is_integer():
            return b"f" + repr(key).encode()
        key = int(key)
    if isinstance(key, int):
        return b"i%d" % int(key)
    raise BadRequest(
        f"{shown(key)} of type {type(key).__name__} is no key: "
        "use str, bytes, int, float, bool, None or a tuple of these"
    )


def combined(items: Iterable[Any], function: Function, name: str, partition: int) -> dict[Any, Any]:
    """Values by key, those of one key combined in their order."""
    found: dict[Any, Any] = {}
    for key, value in pairs(items, name):
        try:
            known = key in found
        except TypeError:
            raise BadRequest(f"{name}: {shown(key)} is no key: it cannot be hashed") from None
        if not known:
            found[key] = value
            continue
        try:
            found[key] = function(found[key], value)
        except Exception as error:
            raise function_failed(name, (key, value), partition, error) from None
    return found


def merged(blocks: list[Block], function: Function, name: str, partition: int) -> Iterable[Any]:
    """The begin of a stage after `reduce_by_key`: one value for each key of a bucket."""
    return combined(chained(blocks), function, name, partition).items()


def joined(left: list[Block], right: list[Block]) -> Iterator[Any]:
    """The begin of a stage after a join: (key, (left, right)) for each pair of values with one key."""
    others: dict[Any, list[Any]] = {}
    for key, value in chained(right):
        others.setdefault(key, []).append(value)
    return ((key, (value, other)) for key, value in chained(left) for other in others.get(key, ()))


# -- the ends of a stage ------------------------------------------------------------------------------------------


def split(inputs: list[Any], stage: Stage, buckets: int, name: str, function: Function | None) -> tuple[Block, ...]:
    """Pairs in buckets by their keys, for the next stage. With `function` those of one key are combined first, so that
    fewer travel."""
    items = elements(stage, inputs)
    if function is not None:
        items = iter(combined(items, function, name, stage.partition).items())
    found: list[list[Any]] = [[] for _ in range(buckets)]
    for key, value in pairs(items, name):
        found[bucket_of(key, buckets)].append((key, value))
    return tuple(encoded(bucket, stage) for bucket in found)


def applied(
    inputs: list[list[Any]], stages: list[Stage], outputs: int, name: str, function: Function
) -> tuple[Block, ...]:
    """The function gets a list of elements per data set, and returns one per output."""
    given = [list(elements(stage, ones)) for stage, ones in zip(stages, inputs, strict=True)]
    try:
        values = [list(value) for value in function(given)]
    except Exception as error:
        raise function_failed(name, _All(sum(map(len, given))), stages[0].partition, error) from None
    if len(values) != outputs:
        raise BadRequest(f"{name} returned {len(values)} lists, and outputs={outputs} was given")
    return tuple(encoded(value, stages[0]) for value in values)


def collect(inputs: list[Any], stage: Stage) -> Block:
    """All elements."""
    return encoded(elements(stage, inputs), stage)


def count(inputs: list[Any], stage: Stage) -> int:
    """How many elements."""
    return sum(1 for _ in elements(stage, inputs))


def reduce(inputs: list[Any], stage: Stage, function: Function, name: str) -> Block:
    """One element, or none of an empty partition."""
    return encoded(reduced(elements(stage, inputs), function, name, stage.partition), stage)


def reduced(items: Iterable[Any], function: Function, name: str, partition: int) -> list[Any]:
    """The elements combined in their order: a list of one, or of none."""
    rest = iter(items)
    for first in rest:
        return [folded(rest, first, function, name, partition)]
    return []


def folded(items: Iterable[Any], state: Any, function: Function, name: str, partition: int) -> Any:
    """The elements folded into a value, in their order."""
    for item in items:
        try:
            state = function(state, item)
        except Exception as error:
            raise function_failed(name, item, partition, error) from None
    return state


def fold(inputs: tuple[Block, list[Any]], stage: Stage, function: Function, name: str) -> Block:
    """The elements folded into the one value of a block, which is the first of the inputs."""
    before, own = inputs
    (state,) = decoded(before)
    return encoded([folded(elements(stage, own), state, function, name, stage.partition)], stage)


def write(inputs: list[Any], stage: Stage, write_part: Callable[[Iterable[Any], int], int]) -> int:
    """Write a partition; returns how many elements it has."""
    return write_part(elements(stage, inputs), stage.partition)
