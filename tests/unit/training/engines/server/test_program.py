"""The verbs of a parameter server's program, and the checks of what they return."""

import pickle

import numpy as np
import pytest

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server.program import ServerContext, ServerProgram, ServerPull, ServerVerbs, UpdatesLost
from p2pnode.training.engines.server.record import RECORD_KEY, ServerRecord, decode_record, encode_record
from p2pnode.training.engines.server.tasks import MAX_KEYS
from p2pnode.training.values.encoding import decode_key, decode_value
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, ValueUpdate
from tests.harness.swarms.server_swarm import TableSurroundings


def context(**values) -> ServerContext:
    return ServerContext(TableSurroundings(values), 4, 7, {"aa": 4, "bb": 5})


def test_a_schedule_names_keys_and_pairs():
    """A key is filled from the store later, a pair comes as it is; workers without a key get no task."""
    verbs = ServerVerbs()
    verbs.register_schedule(lambda ctx, workers: {"aa": ["w", ("batch", 3)], "bb": []})
    found = verbs.assigned(context(), ["aa", "bb"])
    assert list(found) == ["aa"]
    decoded = [(decode_key(key), value if value is None else decode_value(value)) for key, value in found["aa"]]
    assert decoded == [("w", None), ("batch", 3)]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"cc": ["w"]}, "has not passed"),
        (["w"], "a list instead of"),
        ({"aa": "w"}, "a list of keys"),
        ({"aa": [3]}, "str or bytes"),
        ({"aa": [("w", object())]}, "cannot be encoded"),
    ],
)
def test_a_wrong_schedule_is_an_error_of_the_function(returned, said):
    """The error names the verb, the node and the step."""
    verbs = ServerVerbs()
    verbs.register_schedule(lambda ctx, workers: returned)
    with pytest.raises(VerbFailed, match=said) as caught:
        verbs.assigned(context(), ["aa"])
    assert (caught.value.verb, caught.value.step) == ("schedule", 4)


def test_a_program_may_be_a_class():
    """Its methods are the verbs; a barrier counts only if it is overridden."""

    class Own(ServerProgram):
        def schedule(self, ctx, workers):
            return {worker: ["w"] for worker in workers}

        def barrier(self, ctx, idle):
            return idle[:1]

    verbs = ServerVerbs()
    verbs.use(ServerProgram())
    assert verbs.barrier is None
    assert verbs.assigned(context(), ["aa"]) == {}
    verbs.use(Own())
    assert verbs.allowed(context(), ["aa", "bb"]) == ["aa"]
    assert list(verbs.assigned(context(), ["bb"])) == ["bb"]


@pytest.mark.parametrize("strange", ["zz", 1, b"aa"])
def test_a_barrier_that_names_no_worker_is_an_error_of_the_function(strange):
    """One that names a worker at work, or one twice, is not: those that are idle may go on."""
    verbs = ServerVerbs()
    verbs.register_barrier(lambda ctx, idle: [*idle, *ctx.steps])
    assert verbs.allowed(context(), ["bb"]) == ["bb"]
    verbs.register_barrier(lambda ctx, idle: [strange])
    with pytest.raises(VerbFailed, match=rf"barrier failed .* it lets {strange!r} pass, which is no worker"):
        verbs.allowed(context(), ["bb"])


def test_a_task_of_too_many_keys_is_an_error_of_the_function():
    """The server would take what a worker reports of it for no message."""
    verbs = ServerVerbs()
    verbs.register_schedule(lambda ctx, workers: {"aa": map(str, range(MAX_KEYS))})
    assert len(verbs.assigned(context(), ["aa"])["aa"]) == MAX_KEYS
    verbs.register_schedule(lambda ctx, workers: {"aa": map(str, range(MAX_KEYS + 1))})
    with pytest.raises(VerbFailed, match="a task has 65,537 keys, and at most 65,536 are allowed: make smaller tasks"):
        verbs.assigned(context(), ["aa"])


def test_the_context_knows_the_run():
    """Version, steps of the workers, their number; keys without the engine's own."""
    ctx = context(w=1, x=2)
    ctx._surroundings.set(RECORD_KEY, b"", 0)
    assert (ctx.version, ctx.steps, ctx.worker_num, ctx.keys()) == (7, {"aa": 4, "bb": 5}, 2, ["w", "x"])
    assert ServerContext(TableSurroundings({}), 0, 0, {}).worker_num == 0
    assert ServerContext(TableSurroundings({}), 0, 0, workers=3).worker_num == 3


def test_set_never_lowers_a_timestamp():
    """A timestamp says which updates are in the value, so a new value keeps at least that of the former one."""
    ctx = context()
    ctx._surroundings.set("w", 1.0, 12)
    ctx.set("w", np.zeros(2))
    assert ctx.get("w").timestamp == 12
    ctx.set("new", 1)
    assert ctx.get("new").timestamp == 7
    with pytest.raises(ValueError, match="belongs to the engine"):
        ctx.set(RECORD_KEY, 1)


def test_the_error_about_lost_updates_crosses_processes():
    """With its text and its numbers."""
    copy = pickle.loads(pickle.dumps(UpdatesLost(1, 7)))
    assert (copy.count, copy.version, str(copy)) == (1, 7, str(UpdatesLost(1, 7)))


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
