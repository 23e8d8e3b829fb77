"""What can go wrong in a map-reduce program. All of them cross processes with their text and their fields."""

from __future__ import annotations

import os
import socket
import traceback

from p2pnode.training.errors import TrainingError

#: An element is shown by so many characters of its representation.
SHOWN_CHARS = 120


class MapReduceError(TrainingError):
    """The root of the errors of this engine."""


class BadRequest(MapReduceError, ValueError):
    """An argument cannot be used; nothing was computed."""


class FunctionFailed(MapReduceError):
    """A function of the user raised. `operation` names the call, `element` the element, `partition` its partition, -1
    where all partitions are combined, and `node` the host and process; `cause` is the traceback as text. The engine
    stays usable."""

    def __init__(self, operation: str, element: str, partition: int, node: str, cause: str) -> None:
        self.operation, self.element, self.partition, self.node, self.cause = operation, element, partition, node, cause
        last = cause.strip().splitlines()[-1] if cause.strip() else "unknown"
        where = "" if partition < 0 else f" of partition {partition}"
        super().__init__(f"{operation} failed for {element}{where} on {node}: {last}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.element, self.partition, self.node, self.cause)


class NotEncodable(MapReduceError):
    """A value or a function cannot be sent to another process. `operation` made it or uses it."""

    def __init__(self, operation: str, what: str, problem: str) -> None:
        self.operation, self.what, self.problem = operation, what, problem
        super().__init__(f"{operation}: {what} cannot be sent to another process: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.what, self.problem)


class SourceFailed(MapReduceError):
    """A file cannot be read, or has other contents than its format allows."""


class SinkFailed(MapReduceError):
    """A data set cannot be written as asked; what was there before is unchanged."""


class WorkersLost(MapReduceError):
    """Workers ended in the middle of their tasks, more often than Dask tries again."""


def shown(value: object) -> str:
    """A value in an error, shortened; also one whose `repr` raises."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def function_failed(operation: str, element: object, partition: int, error: BaseException) -> FunctionFailed:
    """The error of a function at an element. A pair is named by its key as well."""
    cause = "".join(traceback.format_exception(error))
    named = shown(element)
    if isinstance(element, tuple) and len(element) == 2:
        named = f"key {shown(element[0])}, {named}"
    return FunctionFailed(operation, named, partition, f"{socket.gethostname()}, process {os.getpid()}", cause)
