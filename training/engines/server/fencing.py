"""What an owner of keys accepts from servers: nothing twice, and nothing from a server that another one has replaced.

Every update of a commit has a timestamp of its own, and the value of a key has that of its last one. A server that
repeats the commit of a dead one sends the same timestamps, so an owner knows which updates it has.

The record of the servers is a value like others, under `RECORD_KEY`. Its owner replaces it by one of the same server,
or by one of a higher epoch that counts more stored records. The count shows that the next server has read the last
one: a server that was taken for dead may have stored another meanwhile, and begun the commit that it names. A server
stores its record before each commit, so one that was replaced is refused there, before it has changed a value. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from p2pnode.training.engines.server.core import ServerRecord
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.store import Stamped, ValueUpdate

#: No key of a program: it is refused by `checked_key`.
RECORD_KEY = b"\0p2pnode server"


class ServerReplaced(Exception):
    """Another server has a higher epoch, or has stored a record that this one has not read: it gives no tasks."""

    def __init__(self, record: ServerRecord) -> None:
        super().__init__(f"the server {record.server.hex()[:8]} serves since epoch {record.epoch}")
        self.record = record


def not_yet_applied(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> list[ValueUpdate]:
    """The updates that the values of their keys do not have."""
    return [one for one in updates if one.key not in present or one.timestamp > present[one.key].timestamp]


def encode_record(record: ServerRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_record(found: Stamped | None) -> ServerRecord:
    """The record in the store; an empty one where there is none."""
    return ServerRecord() if found is None else msgspec.msgpack.decode(found.value, type=ServerRecord)


def replaced_record(update: ValueUpdate, present: Stamped | None) -> Any:
    """The record after a server stored its own. Raises `ServerReplaced`."""
    mine = decode_record(Stamped(update.value, 0))
    theirs = decode_record(present)
    if mine.epoch < theirs.epoch or (mine.epoch == theirs.epoch and mine.server != theirs.server):
        raise ServerReplaced(theirs)
    # 0: a server of the last release, which counts none.
    if mine.epoch > theirs.epoch and 0 < mine.stored <= theirs.stored:
        raise ServerReplaced(theirs)
    return update.value
