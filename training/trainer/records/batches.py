"""Batches of dispatched records for a task class, which need not know where they come from.

The task's `decode(record)` makes a sample of the bytes of a record; or its `from_example(example)` does, of the named
values that `p2pnode records pack` wrote. Its `collate(samples)`, or torch's default, makes a batch of samples.
`batch_size` is the task's, or that of `[training.options]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from p2pnode.training.dispatch.recordio import decode_example
from p2pnode.training.tasks.task import TaskError
from p2pnode.training.trainer.records.record_draws import Decode, RecordDraws
from p2pnode.training.trainer.records.task_source import TaskSource

BATCH_SIZE = 32


class RecordBatches:
    """The batches of one task. A batch is smaller where no further record can be had now."""

    def __init__(self, task: Any, options: dict[str, Any], tasks: TaskSource) -> None:
        """Raises `TaskError` for a task without `decode` and `from_example`."""
        self._draws = RecordDraws(tasks, _decoder(task))
        self._tasks = tasks
        self._collate: Callable[[list[Any]], Any] = getattr(task, "collate", default_collate)
        own = getattr(task, "batch_size", None)
        self._size = int(own if own is not None else options.get("batch_size", BATCH_SIZE))
        self._ready: list[Any] = []

    def prepare(self, *, wait: bool, interrupted: Callable[[], bool]) -> bool:
        """Have a batch ready; False: there is none now, or, where this may `wait`, the order was interrupted."""
        while not self._ready:
            found = self._draws.draw(wait=wait)
            if found is not None:
                self._ready = [found[0]]
            elif not wait or interrupted() or self._tasks.stopped:
                return False
            else:
                self._tasks.idle()
        while len(self._ready) < self._size and (found := self._draws.draw(wait=False)) is not None:
            self._ready.append(found[0])
        return True

    def idle(self) -> None:
        """Wait a moment, as a trainer that has nothing to do."""
        self._tasks.idle()

    def take(self) -> Any:
        """The batch that is ready."""
        samples, self._ready = self._ready, []
        return self._collate(samples)

    def count(self) -> None:
        """An optimiser step has used all batches that were taken. One that is ready is not trained."""
        self._draws.count(self._draws.untrained - len(self._ready))

    def report(self, turn: int, step: int) -> None:
        """The delta of this turn is about to be reported. Raises `DaemonGone`."""
        self._draws.report(turn, step)

    def state_dict(self) -> dict[str, str]:
        """The position; empty where the daemon keeps it."""
        state = self._tasks.state()
        return {} if state is None else {"records": state}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on from a saved position. Raises `ValueError` for one of other files."""
        if "records" in state:
            self._tasks.restore(state["records"])


def _decoder(task: Any) -> Decode:
    decode: Decode | None = getattr(task, "decode", None)
    if decode is not None:
        return decode
    from_example: Callable[[Any], Any] | None = getattr(task, "from_example", None)
    if from_example is not None:
        return lambda record: from_example(decode_example(record))
    raise TaskError(
        f"dispatch.records is set, and the task {type(task).__name__} has neither decode(record) nor "
        "from_example(example)",
        "add decode(self, record: bytes) to it, which returns a sample, or from_example(self, example: dict) for files "
        "of `p2pnode records pack`; or leave dispatch.records empty, so that its own batches() is used",
    )
