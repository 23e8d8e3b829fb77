"""The commit that a dead server had under way: was it made, and if not, what is left of it?

The server stored a record that names the contributions before it sent them to the owners of the keys. It told their
workers that they count when all owners had them. So the next server asks all living workers of that commit, which
repeat what they have not been told of:

* one of them has been told: the whole commit is in the values;
* none has: the contributions are here again, and the commit is made again. An owner that has an update already knows it
  by its timestamp, so nothing counts twice;
* one has died, with this server's predecessor, before it was told: its contribution may be in some values and not in
  others. That is reported as lost.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from training.engines.server.acceptance import Commit, Contribution, Policy
from training.engines.server.core import TASKS_PER_EPOCH, Pending, ServerRecord, WorkerProgress


class Takeover:
    """What the next server waits for before it gives tasks. `record` is that of the server before."""

    def __init__(self, record: ServerRecord) -> None:
        self._record = record
        self._awaited: dict[bytes, list[Pending]] = {}
        self._again: dict[tuple[int, int], Contribution] = {}
        #: Contributions that died with their worker; nobody knows which values have them.
        self.lost: list[Pending] = []
        self._was_made = not record.pending
        for one in record.pending:
            self._awaited.setdefault(one.worker, []).append(one)

    @property
    def awaited(self) -> list[bytes]:
        """The workers that have to ask first."""
        return [] if self._was_made else list(self._awaited)

    @property
    def is_settled(self) -> bool:
        return self._was_made or not self._awaited

    def heard(self, worker: bytes, repeated: Sequence[Contribution], known: Collection[tuple[int, int]] = ()) -> None:
        """A worker has asked, and repeats these reports. `known` are tasks that it has still to compute."""
        awaited = self._awaited.pop(worker, [])
        again = {one.name: one for one in repeated}
        for one in awaited:
            if one.name in again:
                self._again[one.name] = again[one.name]
            elif one.name not in known:
                self._was_made = True

    def gone(self, worker: bytes) -> None:
        """A worker is dead."""
        self.lost += self._awaited.pop(worker, [])

    def commit(self, policy: Policy) -> Commit | None:
        """What has to be made again, when it is settled; None: nothing."""
        if self._was_made or not self._again:
            return None
        pending = [(place, one) for place, one in enumerate(self._record.pending) if one.name in self._again]
        return policy.commit_of(
            [self._again[one.name] for _, one in pending], self._record.version, [place for place, _ in pending]
        )

    def losses(self) -> list[str]:
        """What is lost, for people."""
        return [
            f"the update of task {one.name[0] % TASKS_PER_EPOCH}, step {one.step}, by worker {one.worker.hex()[:8]} is "
            "lost, or in some values only: its worker died together with the server before"
            for one in ([] if self._was_made else self.lost)
        ]

    def settled(self) -> ServerRecord:
        """The record as it is once the commit is in the values."""
        record = self._record
        if not record.pending:
            return record
        missing = {one.name for one in self.lost} if not self._was_made else set()
        counted: dict[bytes, list[Pending]] = {}
        for one in record.pending:
            if one.name not in missing:
                counted.setdefault(one.worker, []).append(one)
        workers = [_with(progress, counted.get(progress.worker, [])) for progress in record.workers]
        return msgspec.structs.replace(
            record, version=record.pending_version, workers=workers, pending=[], pending_version=0
        )


def _with(progress: WorkerProgress, counted: list[Pending]) -> WorkerProgress:
    """A worker's row after these updates of it are in the values."""
    step = max([progress.step, *(one.step for one in counted)])
    names = [*progress.counted, *(one.name for one in counted)]
    return WorkerProgress(progress.worker, step, list(dict.fromkeys(names)), progress.outdated)
