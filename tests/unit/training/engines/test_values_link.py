"""Named values over a link that the test answers: parts of requests, the order of keys, and what `pull` may do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.engines.program import Verbs
from p2pnode.training.engines.values_link import (
    LinkedStore,
    LinkedValues,
    Pulling,
    Script,
    answer_pull,
    immediate,
    in_parts,
)
from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.engine_messages import (
    MESSAGE_VALUES_BYTES,
    ApplyUpdates,
    AskKeys,
    Done,
    EngineReady,
    GetValues,
    KeysFound,
    ListPeers,
    PeerSteps,
    PullAsked,
    PullDone,
    SetValue,
    ValuesFound,
)
from p2pnode.training.values.encoding import ValueNotEncodable, decode_value, encode_key, encode_value
from p2pnode.training.values.store import NewValue, Stamped, ValueUpdate


class Link:
    """Answers questions by a function, and keeps them."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def ask(self, question: Any) -> Any:
        self.asked.append(question)
        return self.answer(question)

    def ask_all(self, questions: Any) -> list[Any]:
        return [self.ask(one) for one in questions]

    def ask_in_parts(self, question: Any) -> list[Any]:
        return list(self.ask(question))


def values(answer: Callable[[Any], Any] = lambda _: Done()) -> tuple[LinkedValues, Link]:
    link = Link(answer)
    return LinkedValues(link), link  # type: ignore[arg-type]


def test_values_are_asked_for_until_all_are_there() -> None:
    """The daemon answers by as many as fit; keys without a value are left out, and no key asks nothing."""
    table = {encode_key(number_key): (encode_value(number_key, at), at) for at, number_key in enumerate("abde")}
    linked, link = values(lambda asked: ValuesFound([table.get(key) for key in asked.keys[:2]]))

    assert linked.get_many(list("abcde")) == {
        "a": Stamped(0, 0),
        "b": Stamped(1, 1),
        "d": Stamped(2, 2),
        "e": Stamped(3, 3),
    }
    assert [len(one.keys) for one in link.asked if isinstance(one, GetValues)] == [5, 3, 1]
    assert linked.get_many([]) == {}
    assert len(link.asked) == 3


def test_nothing_is_sent_if_one_value_cannot_be() -> None:
    """The update before it is not applied either."""
    linked, link = values()
    with pytest.raises(ValueNotEncodable, match="'bad'"):
        linked.update([ValueUpdate("good", 1, 1), ValueUpdate("bad", object(), 1)])
    assert link.asked == []

    linked.update([ValueUpdate("good", 1, 5, "add")])
    linked.set("k", 2, 6)
    assert link.asked == [
        ApplyUpdates([(encode_key("good"), encode_value("good", 1), 5, "add")]),
        SetValue(encode_key("k"), encode_value("k", 2), 6),
    ]


def test_keys_are_sorted_with_text_first() -> None:
    """All parts together; keys of bytes come behind those of text."""
    parts = [KeysFound([encode_key(b"a"), encode_key("z")], False), KeysFound([encode_key("b")], True)]
    linked, link = values(lambda _: parts)

    assert linked.keys() == ["b", "z", b"a"]
    assert link.asked == [AskKeys()]


def test_updates_are_cut_into_messages_of_about_a_megabyte() -> None:
    """None, one, and so many that the first message is full; one that is larger goes by itself."""
    large = (b"sk", bytes(MESSAGE_VALUES_BYTES), 0, "pull")
    half = (b"sk", bytes(MESSAGE_VALUES_BYTES // 2), 0, "pull")

    assert in_parts([]) == []  # type: ignore[arg-type]
    assert [len(part) for part in in_parts([half])] == [1]  # type: ignore[list-item]
    assert [len(part) for part in in_parts([half, half, half])] == [2, 1]  # type: ignore[list-item]
    assert [len(part) for part in in_parts([large, half, large, half])] == [1, 2, 1]  # type: ignore[list-item]


def test_the_store_of_a_script_never_suspends() -> None:
    """All its methods are run to their end at once; a coroutine that suspends is an error of the program."""
    linked, link = values(
        lambda asked: ValuesFound([(encode_value("a", 4), 9)]) if isinstance(asked, GetValues) else []
    )
    store = LinkedStore(linked)

    assert immediate(store.get("a")) == Stamped(4, 9)
    assert immediate(store.get_many(["a"])) == {"a": Stamped(4, 9)}
    assert immediate(store.keys()) == []
    immediate(store.set("a", 1))
    immediate(store.update([]))
    assert isinstance(link.asked[-1], SetValue)
    with pytest.raises(RuntimeError, match="never suspends"):
        immediate(asyncio.sleep(0))


def test_a_program_sees_its_node_and_its_peers() -> None:
    """Of all peers, or of a sample; its random numbers follow from the seed."""
    linked, link = values(lambda _: PeerSteps({b"\xab": 3}, 4))
    ready = EngineReady(b"\x01" * 20, 77, is_synchronous=False, pause_s=0.1)
    first, second = (Script(link, linked, ready) for _ in range(2))  # type: ignore[arg-type]

    assert (first.node_id, first.worker_num(), first.peers(None), first.peers(2)) == (
        "01" * 20,
        4,
        {"ab": 3},
        {"ab": 3},
    )
    assert link.asked == [ListPeers(0), ListPeers(0), ListPeers(2)]
    assert first.rng.random() == second.rng.random()


def surroundings(found: dict[Any, Stamped]) -> Any:
    return SimpleNamespace(
        node_id="n", rng=None, clock=None, keys=None, peers=None, worker_num=None, get=found.get, set=None
    )


def test_a_pull_reads_its_batch_without_a_request_and_sets_nothing() -> None:
    """A key of the batch that has no value has none; another key is asked for."""
    around = Pulling({"a": Stamped(1, 1)}, surroundings({"b": Stamped(2, 2), "c": Stamped(3, 3)}), ["a", "b"])

    assert (around.get("a"), around.get("b"), around.get("c")) == (Stamped(1, 1), None, Stamped(3, 3))
    with pytest.raises(TypeError, match="pull returns new values; it does not set 'a'"):
        around.set("a", 1, 1)


def asked(*keys: str) -> PullAsked:
    updates = [(encode_key(key), encode_value(key, 1), 5, "pull") for key in keys]
    return PullAsked(9, updates, {encode_key("a"): (encode_value("a", 10), 4)})  # type: ignore[arg-type]


def test_a_pull_is_given_updates_and_present_values_decoded() -> None:
    """Its new values are encoded with their timestamps."""

    def pull(updates: Any, present: Any) -> list[NewValue]:
        assert present == {"a": Stamped(10, 4)}
        return [NewValue(one.key, one.value + present["a"].value, one.timestamp) for one in updates]

    done = answer_pull(asked("a", "b"), pull)

    assert (done.number, done.failure) == (9, "")
    assert {key: (decode_value(value), stamp) for key, (value, stamp) in done.values.items()} == {
        b"sa": (11, 5),
        b"sb": (11, 5),
    }


def test_the_traceback_of_a_pull_is_logged_where_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when it is known which update raised: the sender is told in one line."""
    verbs: Any = Verbs()
    verbs.register_pull(lambda _ctx, _updates: 1 // 0)
    ctx: Any = SimpleNamespace(node_id="ab" * 20, step=3)

    def asked(*keys: str) -> PullDone:
        updates: list[Any] = [(encode_key(key), encode_value(key, 1), 0, "pull") for key in keys]
        return answer_pull(PullAsked(1, updates, {}), lambda found, _present: verbs.pulled(ctx, found))

    asked("a", "b")
    assert caplog.records == []
    done = asked("a")
    assert [record.name for record in caplog.records] == ["p2pnode.engine"]
    assert "pull failed for 'a':\nTraceback" in caplog.text
    assert "1 // 0" in caplog.text
    assert re.fullmatch(
        r"pull failed: ZeroDivisionError: integer division or modulo by zero \(test_values_link\.py, line \d+\)",
        done.failure,
    )


@pytest.mark.parametrize(("keys", "failed"), [(("a",), b"sa"), (("a", "a"), b"sa"), (("a", "b"), b"")])
def test_a_pull_that_raises_names_its_key_if_it_is_one(keys: tuple[str, ...], failed: bytes) -> None:
    """Otherwise the owner asks again for one update after the other. The program's own errors come with their type."""

    def wrong(*_: Any) -> Any:
        raise ValueError("wrong")

    def refuses(*_: Any) -> Any:
        raise TrainingError("refused")

    done = answer_pull(asked(*keys), wrong)
    assert (done.values, done.failure, done.failed) == ({}, "ValueError: wrong", failed)
    assert answer_pull(asked(*keys), refuses).failure == "refused"
    assert answer_pull(asked(*keys), lambda *_: [NewValue("a", object(), 1)]).failure.startswith("the value of 'a'")
