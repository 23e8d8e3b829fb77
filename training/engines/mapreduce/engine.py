"""The map-reduce engine: makes data sets, and knows where they are computed."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import cloudpickle

from p2pnode.training.engines.mapreduce.backends import make_backend
from p2pnode.training.engines.mapreduce.dataset import Dataset, applied, block, loaded
from p2pnode.training.engines.mapreduce.errors import BadRequest, NotEncodable, shown
from p2pnode.training.engines.mapreduce.sources import PART_BYTES, Format, parts_of
from p2pnode.training.engines.mapreduce.stages import decoded

T = TypeVar("T")

#: BroadcastValue values that this process has received, by their ids.
_received: dict[str, Any] = {}
#: So many are kept.
MAX_RECEIVED = 64


class BroadcastValue(Generic[T]):
    """A value that functions read with `value` wherever they run. A process decodes it once."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._id = uuid.uuid4().hex
        self._payload: bytes | None = None

    def __reduce__(self) -> tuple[object, ...]:
        if self._payload is None:
            self._payload = cloudpickle.dumps(self.value)
        return _receive, (self._id, self._payload)


def _receive(identity: str, payload: bytes) -> BroadcastValue[Any]:
    if identity not in _received:
        while len(_received) >= MAX_RECEIVED:
            del _received[next(iter(_received))]
        _received[identity] = BroadcastValue(cloudpickle.loads(payload))
    found: BroadcastValue[Any] = _received[identity]
    return found


class MapReduce:
    """Transforms data sets in this process, in processes of this machine, or on a Dask cluster.

    Use it in a `with` block, or call `close`. Functions are sent with cloudpickle, so lambdas and functions of the
    script are fine; what they refer to has to be sendable too.
    """

    def __init__(self, *, processes: int = 0, address: str | None = None) -> None:
        """`processes`: 0 computes in this process, otherwise so many are started with the first action; `address`: a
        Dask scheduler, such as `tcp://host:8786`. Raises `BadRequest`."""
        self._backend = make_backend(processes, address)

    def __enter__(self) -> MapReduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of this engine, or leave the cluster."""
        self._backend.close()

    @property
    def workers(self) -> int:
        """How many tasks run at a time."""
        return self._backend.workers()

    def load(
        self, paths: str | Path | Sequence[str | Path], form: Format | None = None, *, part_bytes: int = PART_BYTES
    ) -> Dataset[Any]:
        """The contents of files: local paths, globs or fsspec URLs, one or several.

        `form`, by default by the file's name: `text` has a str per line, without its end; `json` a value per line;
        `recordio` bytes; `parquet` a dict per row. A partition has about `part_bytes`; each byte is read once. Raises
        `SourceFailed` if there is no such file, and an action raises it where the contents are not of the format.
        """
        return loaded(self._backend, parts_of(paths, form, part_bytes))

    def from_items(self, items: Iterable[T], partitions: int | None = None) -> Dataset[T]:
        """Elements of this process, in equal partitions: by default one per worker. Raises `NotEncodable`."""
        held = list(items)
        count = partitions if partitions is not None else max(1, min(self.workers, len(held)))
        if count < 1:
            raise BadRequest(f"partitions={partitions}: there is at least one")
        cuts = [len(held) * number // count for number in range(count + 1)]
        blocks = [block(held[low:high], "from_items", self._backend) for low, high in itertools.pairwise(cuts)]
        return loaded(self._backend, [partial(decoded, one) for one in blocks])

    def broadcast(self, value: T) -> BroadcastValue[T]:
        """A value for functions to read wherever they run. Raises `NotEncodable`."""
        handle = BroadcastValue(value)
        if self._backend.is_remote:
            try:
                handle.__reduce__()
            except Exception as error:
                raise NotEncodable("broadcast", "the value", f"{type(error).__name__}: {error}") from None
        return handle

    @staticmethod
    def get_value(handle: BroadcastValue[T]) -> T:
        """The value of a broadcast; the same as `handle.value`."""
        if not isinstance(handle, BroadcastValue):
            raise BadRequest(f"get_value needs what broadcast returned, not {shown(handle)}")
        return handle.value

    def apply(
        self,
        function: Callable[[list[list[Any]]], Iterable[Iterable[Any]]],
        inputs: Sequence[Dataset[Any]],
        outputs: int = 1,
    ) -> list[Dataset[Any]]:
        """A function of several data sets, partition by partition: it gets the list of the elements of each, and
        returns a list of elements for each of `outputs` data sets. All must have equally many partitions."""
        return applied(self._backend, function, list(inputs), outputs)

    @staticmethod
    def myself() -> str:
        """The process that runs the calling function: host and process id."""
        return f"{os.uname().nodename}:{os.getpid()}"
