"""What owners accept from servers."""

import pytest

from p2pnode.training.engines.server.core import ServerRecord, WorkerProgress
from p2pnode.training.engines.server.fencing import (
    RECORD_KEY,
    ServerReplaced,
    decode_record,
    encode_record,
    not_yet_applied,
    replaced_record,
)
from p2pnode.training.values.store import Stamped, ValueUpdate


def stored(record: ServerRecord) -> Stamped:
    return Stamped(encode_record(record), 1)


def update(record: ServerRecord) -> ValueUpdate:
    return ValueUpdate(RECORD_KEY, encode_record(record), 2)


def test_an_update_is_applied_by_its_timestamp_once():
    """What the value has already is dropped; a key without a value has nothing."""
    updates = [ValueUpdate("w", "x", 4), ValueUpdate("w", "y", 5), ValueUpdate("new", "z", 1)]
    fresh = not_yet_applied(updates, {"w": Stamped(0, 4)})
    assert [one.value for one in fresh] == ["y", "z"]


def test_the_record_of_a_higher_epoch_replaces_a_lower_one():
    """And one of the same server replaces its own; nothing else is accepted."""
    record = ServerRecord(epoch=2, server=b"A", version=5, workers=[WorkerProgress(b"w", 1, [(2, 3)])])
    assert decode_record(Stamped(replaced_record(update(record), None), 0)) == record
    replaced_record(update(ServerRecord(epoch=2, server=b"A", version=6)), stored(record))
    replaced_record(update(ServerRecord(epoch=3, server=b"B")), stored(record))
    for other in (ServerRecord(epoch=2, server=b"B"), ServerRecord(epoch=1, server=b"A")):
        with pytest.raises(ServerReplaced) as caught:
            replaced_record(update(other), stored(record))
        assert caught.value.record == record


def test_a_server_that_has_not_read_the_last_record_replaces_none():
    """A server that was taken for dead stores another record while the next one begins: that one reads again."""
    last = ServerRecord(epoch=2, server=b"A", version=5, stored=7)
    for seen in (5, 6):
        with pytest.raises(ServerReplaced) as caught:
            replaced_record(update(ServerRecord(epoch=3, server=b"B", stored=seen + 1)), stored(last))
        assert caught.value.record == last
    replaced_record(update(ServerRecord(epoch=3, server=b"B", stored=8)), stored(last))
    # Repeated because its answer was lost, or by the server itself.
    replaced_record(update(last), stored(last))


def test_there_may_be_no_record():
    """The first server begins with an empty one."""
    assert decode_record(None) == ServerRecord()
