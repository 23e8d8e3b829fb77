"""How a run of a parameter server ends for its user: with a version, or with the error that says what is wrong.

A run that lost updates goes on, and says so at its end: the values can be used, but some of them may lack what is
named. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from p2pnode.training.engines.server.core import TASKS_PER_EPOCH, Failure, Pending
from p2pnode.training.engines.server.program import raise_failure
from p2pnode.training.errors import TrainingError

#: So many lost updates are named in the text of the error.
SHOWN = 3


class RunFailed(Exception):
    """A function of the user ended the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class LostUpdate(NamedTuple):
    """An update that a server was bringing into the values when it died. `step` is the one that its task completes,
    `worker` the id (hex) of the node that computed it."""

    task: int
    step: int
    worker: str

    def __str__(self) -> str:
        return f"that of task {self.task}, step {self.step}, by worker {self.worker[:8]}"


class UpdatesLost(TrainingError):
    """The run ended, and some of its updates are in no value, or in some of theirs only: the worker that had computed
    them died, or began anew, together with the server. `lost` names up to 256 of them, `count` is how many there are,
    `version` that of the values. The values can be used, and `start` be called again."""

    def __init__(self, lost: Sequence[LostUpdate], count: int, version: int) -> None:
        self.lost, self.count, self.version = tuple(lost), count, version
        named = "; ".join(map(str, lost[:SHOWN])) + ("; …" if count > SHOWN else "")
        super().__init__(
            f"the run ended at version {version}, and {count} update{'s' if count > 1 else ''} may be missing in its "
            f"values: {named}. Their workers died, or began anew, together with the server. Use the values as they "
            "are, or set them and call `start` again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.lost, self.count, self.version)


def lost_update(pending: Pending) -> LostUpdate:
    """A lost contribution, for people."""
    return LostUpdate(pending.name[0] % TASKS_PER_EPOCH, pending.step, pending.worker.hex())


def raise_end(failure: Failure | None, lost: Sequence[Pending], lost_count: int, version: int) -> None:
    """Raise what a run ended with, unless all is well. Raises `VerbFailed` or `UpdatesLost`."""
    raise_failure(failure)
    if lost_count:
        raise UpdatesLost([lost_update(one) for one in lost], lost_count, version)
