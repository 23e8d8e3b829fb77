"""What a server stores before each commit, and what the next one makes of it.

The record names the contributions of a commit before they are sent to the owners of the keys. When all owners have
them, the server tells everybody who asks that the values have that version (`Told.made`). So the next server asks all
living workers of a commit that was under way. Each says what it was told, and repeats the reports that do not count yet
as far as it knows:

* one of them, or this server itself, was told of the version: the whole commit is in the values;
* nobody was: the contributions are here again, and the commit is made again. An owner that has an update already knows
  it by its timestamp, so nothing counts twice;
* a contribution is with nobody, because its worker died, or began anew without it: it may be in some values and not in
  others. It is reported as lost.

A worker that does not repeat a contribution proves nothing: one that began anew knows neither of it nor of its end.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from p2pnode.training.engines.server.acceptance import Commit, Contribution, EachAtOnce
from p2pnode.training.engines.server.tasks import Name
from p2pnode.training.values.store import Stamped

#: The key of the record. No key of a program: it is refused by `checked_key`.
RECORD_KEY = b"\0p2pnode server"


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """A worker in the record: its completed steps, and its last committed updates, of which it may not know.
    `outdated`: attempts that it has lost, perhaps without knowing."""

    worker: bytes
    step: int
    counted: list[Name] = []
    outdated: list[Name] = []


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A contribution to the commit that the record was stored for."""

    worker: bytes
    step: int
    name: Name


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A function of the user that ended the run."""

    verb: str
    keys: list[bytes]
    node: str
    step: int
    cause: str


class ServerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a server stores before a commit. `epoch` rises with each server, `run` counts the
    starts of the program; `pending` leads from `version` to
    `pending_version`. `ended`: the run is over,
    with a `failure` by an error. `lost` counts the contributions to earlier commits that died with worker and server,
    `stored` the records. `done`: tasks of servers before this one that are finished, while workers have not asked that
    may have later attempts of them."""

    epoch: int = 0
    server: bytes = b""
    run: int = 0
    version: int = 0
    workers: list[WorkerProgress] = []
    pending: list[Pending] = []
    pending_version: int = 0
    ended: str = ""
    failure: Failure | None = None
    lost: int = 0
    stored: int = 0
    done: list[int] = []


class ServerReplaced(Exception):
    """Another server has a higher epoch, or has stored a record that this one has not read: it gives no tasks."""

    def __init__(self, record: ServerRecord) -> None:
        super().__init__(f"the server {record.server.hex()[:8]} serves since epoch {record.epoch}")
        self.record = record


def encode_record(record: ServerRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_record(found: Stamped | None) -> ServerRecord:
    """The record in the store; an empty one where there is none."""
    return ServerRecord() if found is None else msgspec.msgpack.decode(found.value, type=ServerRecord)


class Takeover:
    """What the next server waits for before it gives tasks. `record` is that of the server before, `made` the highest
    version that this server knows the values to have."""

    def __init__(self, record: ServerRecord, made: int = 0) -> None:
        self._record = record
        self._awaited: dict[bytes, list[Pending]] = {}
        self._again: dict[tuple[int, int], Contribution] = {}
        self._lost: list[Pending] = []
        self._was_made = not record.pending or made >= record.pending_version
        for one in record.pending:
            self._awaited.setdefault(one.worker, []).append(one)

    @property
    def awaited(self) -> list[bytes]:
        """The workers that have to ask first."""
        return [] if self._was_made else list(self._awaited)

    @property
    def is_settled(self) -> bool:
        return self._was_made or not self._awaited

    @property
    def lost(self) -> list[Pending]:
        """Contributions that nobody has; some values may have them."""
        return [] if self._was_made else list(self._lost)

    def heard(self, worker: bytes, repeated: Sequence[Contribution], made: int) -> None:
        """A worker has asked, and repeats these reports. `made`: the highest version that it knows of (`Told.made`)."""
        if made >= self._record.pending_version:
            self._was_made = True
        again = {one.name: one for one in repeated}
        for one in self._awaited.pop(worker, []):
            if one.name in again:
                self._again[one.name] = again[one.name]
            else:
                self._lost.append(one)

    def gone(self, worker: bytes) -> None:
        """A worker is dead."""
        self._lost += self._awaited.pop(worker, [])

    def commit(self, policy: EachAtOnce) -> Commit | None:
        """What has to be made again, when it is settled; None: nothing."""
        if self._was_made or not self._again:
            return None
        pending = [(place, one) for place, one in enumerate(self._record.pending) if one.name in self._again]
        return policy.commit_of(
            [self._again[one.name] for _, one in pending], self._record.version, [place for place, _ in pending]
        )

    def settled(self) -> ServerRecord:
        """The record as it is once the commit is in the values, with what was lost of it."""
        record = self._record
        if not record.pending:
            return record
        missing = {one.name for one in self.lost}
        counted: dict[bytes, list[Pending]] = {}
        for one in record.pending:
            if one.name not in missing:
                counted.setdefault(one.worker, []).append(one)
        workers = [_with(progress, counted.get(progress.worker, [])) for progress in record.workers]
        return msgspec.structs.replace(
            record,
            version=record.pending_version,
            workers=workers,
            pending=[],
            pending_version=0,
            lost=record.lost + len(self.lost),
        )


def _with(progress: WorkerProgress, counted: list[Pending]) -> WorkerProgress:
    """A worker's row after these updates of it are in the values."""
    step = max([progress.step, *(one.step for one in counted)])
    names = [*progress.counted, *(one.name for one in counted)]
    return WorkerProgress(progress.worker, step, list(dict.fromkeys(names)), progress.outdated)
