"""Updates at the server that owns their keys."""

import pytest

from p2pnode.training.engines.server.core import RECORD_KEY, ServerRecord, decode_record, encode_record
from p2pnode.training.engines.server.program import ServerVerbs
from p2pnode.training.engines.server.pulling import ServerPull
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, ValueUpdate
from tests.harness.swarms.server_swarm import TableSurroundings


def adding(bad: str = "") -> tuple[ServerPull, list]:
    verbs = ServerVerbs()
    calls = []

    @verbs.register_pull
    def pull(ctx, updates):
        calls.append([one.key for one in updates])
        if bad in calls[-1]:
            raise RuntimeError("bang")
        found = {one.key: ctx.get(one.key, 0).value for one in updates}
        for one in updates:
            found[one.key] += one.value
        return [(key, value, -1) for key, value in found.items()]

    return ServerPull(verbs, TableSurroundings({})), calls


def test_only_what_is_new_reaches_the_program():
    """A repeated commit changes the keys that lack it; the timestamp is that of the last update."""
    pull, calls = adding()
    present = {"a": Stamped(5, 3), "b": Stamped(7, 1)}
    updates = [ValueUpdate("a", 1, 2), ValueUpdate("a", 1, 3), ValueUpdate("b", 1, 2), ValueUpdate("b", 1, 3)]
    assert pull.apply(updates, present) == [NewValue("b", 9, 3)]
    assert calls == [["b", "b"]]
    assert pull.apply(updates, {"a": Stamped(5, 3), "b": Stamped(9, 3)}) == []


def test_an_error_names_the_key_that_made_it():
    """The others of the batch are computed, so that the store can refuse one key alone."""
    pull, _ = adding("bad")
    with pytest.raises(PullFailed) as caught:
        pull.apply([ValueUpdate("good", 1, 1), ValueUpdate("bad", 1, 1)], {})
    assert caught.value.key == "bad"
    assert "RuntimeError: bang" in caught.value.reason


LAST = ServerRecord(epoch=2, server=b"A", version=5, stored=7)


@pytest.mark.parametrize(
    "record",
    [
        LAST,  # its answer was lost
        ServerRecord(epoch=2, server=b"A", version=6, stored=8),
        ServerRecord(epoch=3, server=b"B", stored=8),
    ],
)
def test_a_server_replaces_its_own_record_and_that_of_a_lower_epoch(record: ServerRecord):
    """A server of a higher epoch has read the last record if it counts more of them."""
    pull, calls = adding()
    present = {RECORD_KEY: Stamped(encode_record(LAST), 0)}
    update = ValueUpdate(RECORD_KEY, encode_record(record), 4)
    assert pull.apply([update], present) == [NewValue(RECORD_KEY, update.value, 4)]
    assert pull.apply([update], {}) == [NewValue(RECORD_KEY, update.value, 4)]
    assert calls == []


@pytest.mark.parametrize(
    "record",
    [
        ServerRecord(epoch=2, server=b"B", stored=8),
        ServerRecord(epoch=1, server=b"A", stored=8),
        ServerRecord(epoch=3, server=b"B", stored=7),
    ],
)
def test_a_server_that_was_replaced_or_has_not_read_the_last_record_is_refused(record: ServerRecord):
    """The error names the key of the record, and says who serves."""
    pull, _ = adding()
    with pytest.raises(PullFailed, match="serves since epoch 2") as caught:
        pull.apply([ValueUpdate(RECORD_KEY, encode_record(record), 4)], {RECORD_KEY: Stamped(encode_record(LAST), 0)})
    assert caught.value.key == RECORD_KEY
    assert decode_record(None) == ServerRecord()


@pytest.mark.parametrize(("reducer", "expected"), [("add", 6), ("replace", 2)])
def test_a_built_in_reducer_needs_no_function(reducer, expected):
    """`add` adds all updates to the value, `replace` keeps the last one; each counts once."""
    verbs = ServerVerbs()
    verbs.register_pull(reducer)
    pull = ServerPull(verbs, TableSurroundings({}))
    present = {"w": Stamped(3, 1)}
    updates = [ValueUpdate("w", 9, 1), ValueUpdate("w", 1, 2), ValueUpdate("w", 2, 3)]
    assert pull.apply(updates, present) == [NewValue("w", expected, 3)]
