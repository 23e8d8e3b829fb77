"""Updates, reads, lists and repairs of named values at their owner: what each is answered, and the limits of all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.transport import RequestRejected
from p2pnode.training.encoding.frames import FrameReader, Part, blob_frames
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import PushResult, read_record
from p2pnode.training.exchange.run_state import Phase
from p2pnode.training.exchange.terms import OwnerInfo
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import KeyUpdate, ValueBatch, encode_batch
from p2pnode.training.shards.value_updates import applied
from p2pnode.training.values import owner as module
from p2pnode.training.values.encoding import MAX_VALUE_BYTES, decode_value, encode_key, encode_value
from p2pnode.training.values.owner import (
    UPDATES,
    ReadResult,
    ReadValues,
    ReadValuesAnswer,
    UpdateValues,
    UpdateValuesAnswer,
)
from p2pnode.training.values.rounds import LATER
from tests.harness.builders.stores import IDS, contact, term
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exchange_overlay import chunks, collected
from tests.unit.training.values.value_owner import ValueOwner


def update(number: int, value: object = 1, *, key: str = "k", reducer: str = "add", node: str = "x") -> KeyUpdate:
    return KeyUpdate(IDS[node], 1, number, encode_key(key), reducer, encode_value(key, value), 0)  # type: ignore[arg-type]


def play(scenario: Callable[[ValueOwner], Awaitable[None]], replicas: int = 0) -> None:
    async def main() -> None:
        await scenario(ValueOwner(replicas))

    run(main())


def answer(results: list[PushResult]) -> list[tuple[str, str]]:
    return [(one.status, one.reason) for one in results]


@played_by(play)
async def test_updates_are_answered_in_their_order_and_counted_once(owner: ValueOwner) -> None:
    """Applied together, and not again when they are repeated, alone or twice in one request."""
    first, second = update(1, 5), update(2, 7)
    assert answer(await owner.accept(first, second, first)) == [("ok", "")] * 3
    assert answer(await owner.accept(second)) == [("ok", "")]
    assert owner.value() == 12


@played_by(play)
async def test_what_cannot_be_applied_is_refused_with_the_reason(owner: ValueOwner) -> None:
    """Another's update, a shard that there is not, and a value beyond the limit; the largest value is accepted."""
    assert answer(await owner.accept(update(1, node="c"))) == [("refused", "not_yours")]
    assert answer(await owner.accept(update(1), shard=3)) == [("refused", "shape")]
    whole = update(1, reducer="replace")
    largest = msgspec.structs.replace(whole, update=bytes(MAX_VALUE_BYTES))
    assert answer(await owner.accept(msgspec.structs.replace(whole, update=bytes(MAX_VALUE_BYTES + 1)))) == [
        ("refused", "more than 1,048,576 bytes")
    ]
    assert answer(await owner.accept(largest)) != [("refused", "more than 1,048,576 bytes")]


@played_by(play)
async def test_a_shard_of_another_owner_is_answered_with_its_address(owner: ValueOwner) -> None:
    """An update and a read; a shard that moves is asked for again."""
    (result,) = await owner.accept(update(1), shard=2)
    where = OwnerInfo.of(2, term(1, "b"), contact("b"))
    assert (result.status, result.owner_info) == ("redirect", where)
    (read,) = await owner.values.read([(2, encode_key("k"))])
    assert (read.status, read.owner_info) == ("redirect", where)
    (keys,) = await owner.values.list_keys([(2, b"")])
    assert (keys.status, keys.owner_info) == ("redirect", where)

    owner.store.owned[0].moving = True
    assert answer(await owner.accept(update(1))) == [("retry", "moving")]
    assert (await owner.values.read([(0, encode_key("k"))]))[0].status == "retry"
    owner.store.owned[0].moving = False
    owner.context.run.phase = Phase.CLOSED
    assert answer(await owner.accept(update(1))) == [("retry", "leaving")]
    assert (await owner.values.read([(3, encode_key("k"))]))[0].status == "retry", "there is no such shard yet"


@played_by(play)
async def test_an_update_that_takes_longer_is_asked_for_again_and_applied_once(owner: ValueOwner) -> None:
    """The answer comes within a quarter of a second; the work goes on, and the next request waits for the same."""

    async def slow(updates: Any, _present: Any) -> Any:
        await asyncio.sleep(1.0)
        return [(updates[-1].key, updates[-1].value, 0)]

    owner.rounds.on_pull(slow)
    loop = asyncio.get_running_loop()
    began = loop.time()
    pulled = update(1, 9, reducer="pull")
    assert answer(await owner.accept(pulled)) == [("retry", LATER)]
    assert loop.time() - began == pytest.approx(module.ANSWER_S)
    await asyncio.sleep(2.0)
    assert answer(await owner.accept(pulled)) == [("ok", "")]
    assert owner.value() == 9


@played_by(play)
async def test_so_many_updates_wait_at_most(owner: ValueOwner, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is answered `busy`, and so is one with too many bytes."""
    monkeypatch.setattr(module, "MAX_WAITING_UPDATES", 2)
    results = await owner.accept(update(1), update(2), update(3))
    assert answer(results) == [("ok", ""), ("ok", ""), ("retry", "busy")]
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2 * update(6).size_bytes - 1)
    results = await owner.accept(update(6), update(7))
    assert answer(results) == [("ok", ""), ("retry", "busy")]


@played_by(play)
async def test_nothing_overtakes_an_update_that_is_to_come_again(
    owner: ValueOwner, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for it, and there would be for the next, smaller one of its shard."""
    large, small = update(1, b"x" * 500, reducer="replace"), update(2, 7, reducer="replace")
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", large.size_bytes - 1)
    assert answer(await owner.accept(large, small)) == [("retry", "busy")] * 2
    assert owner.value() is None
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1 << 20)
    assert answer(await owner.accept(large, small)) == [("ok", "")] * 2
    assert owner.value() == 7


@played_by(play, replicas=1)
async def test_an_update_without_a_backup_is_not_safe_yet(owner: ValueOwner) -> None:
    """With `replicas` its result is told again only when a backup has it, as after a hand-over."""
    owned = owner.store.owned[0]
    assert owned.state.table is not None
    once = update(1, 5)
    batch = applied(owned.state.table, [once], 1 << 20)
    owned.state.table.apply(batch)
    assert answer(await owner.accept(once)) == [("retry", "no_backup_yet")]
    owned.backup = contact("b")
    assert answer(await owner.accept(once)) == [("ok", "")]


@played_by(play)
async def test_reads_end_where_the_answer_is_full(owner: ValueOwner, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is asked for again. A key without a value is known to have none."""
    text = "x" * 50
    await owner.accept(*(update(number, text, key=f"k{number}", reducer="replace") for number in range(1, 5)))
    size = len(encode_value("k1", text))
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 2 * size)
    keys = [(0, encode_key(name)) for name in ("k1", "absent", "k2", "k3", "gone", "k4")]
    found = await owner.values.read(keys)
    assert [one.status for one in found] == ["ok", "ok", "ok", "retry", "ok", "retry"]
    assert [one.term for one in found if one.status == "ok"] == [term(1, "a")] * 4
    assert [one.value is None for one in found if one.status == "ok"] == [False, True, False, True]
    assert found[0].value == encode_value("k1", text)
    assert owner.values.reads == 6


@played_by(play)
async def test_keys_are_listed_in_order_and_from_where_the_last_answer_ended(
    owner: ValueOwner, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list says whether it is whole: an empty shard's is, and one from behind the last key."""
    names = [f"k{number}" for number in range(5)]
    await owner.accept(*(update(number + 1, key=name) for number, name in enumerate(names)))
    keys = sorted(encode_key(name) for name in names)
    (whole, empty) = await owner.values.list_keys([(0, b""), (1, b"")])
    assert (whole.keys, whole.is_whole, empty.keys, empty.is_whole) == (keys, True, [], True)

    monkeypatch.setattr(module, "MAX_KEYS", 2)
    found: list[bytes] = []
    for _ in range(3):
        (part,) = await owner.values.list_keys([(0, found[-1] if found else b"")])
        found += part.keys
        assert part.is_whole == (len(found) == len(keys))
    assert found == keys
    (behind,) = await owner.values.list_keys([(0, keys[-1])])
    assert (behind.keys, behind.is_whole) == ([], True)


@played_by(play)
async def test_a_repair_applies_what_is_not_known_here_and_no_more(owner: ValueOwner) -> None:
    """Of a batch of the other side of a split: known updates count once, those refused there are void here, and the
    batch itself is known afterwards."""
    await owner.accept(update(1, 5))
    batch = ValueBatch(1, [update(1, 5), update(2, 7), update(3, 9)], [], [(2, "poisoned")])
    identity = DeltaId(IDS["c"], 1, 40)
    item = IncomingDelta.of_batch(0, encode_batch(batch), batch, 1, owner.store.owned[0])
    assert answer([await owner.values.repair(identity, item)]) == [("ok", "")]
    assert owner.value() == 12
    assert owner.store.owned[0].state.knows(identity)
    version = owner.store.owned[0].state.version
    assert answer([await owner.values.repair(identity, item)]) == [("ok", "")]
    assert owner.store.owned[0].state.version == version
    assert answer(await owner.accept(update(3, 9))) == [("refused", "poisoned")]
    assert owner.value() == 12


@played_by(play)
async def test_a_repair_waits_for_a_shard_that_moves_or_has_gone(owner: ValueOwner) -> None:
    """Nothing of it is applied then."""
    batch = ValueBatch(1, [update(2, 7)], [])
    item = IncomingDelta.of_batch(0, encode_batch(batch), batch, 1, owner.store.owned[0])
    identity = DeltaId(IDS["c"], 1, 40)
    owner.store.owned[0].moving = True
    assert answer([await owner.values.repair(identity, item)]) == [("retry", "moving")]
    item.shard = 2
    assert (await owner.values.repair(identity, item)).status == "redirect"
    assert owner.value() is None


@played_by(play)
async def test_requests_of_others_are_answered_as_direct_ones(owner: ValueOwner) -> None:
    """Updates in the body, and keys in the head; a body that is no list of updates is refused."""
    raw = msgspec.msgpack.encode([(0, update(1, 5))])
    body = [bytes(one) for one in blob_frames(0, raw, Part.UPDATES)]
    told = await owner.swarm.deliver("update_values", contact("x"), UpdateValues(), UpdateValuesAnswer, body)
    assert answer(told.results) == [("ok", "")]
    response = await owner.swarm.respond("read_values", contact("x"), ReadValues([(0, encode_key("k"))]))
    read = await read_record(FrameReader(chunks(await collected(response.body))), 0, ReadValuesAnswer)
    assert [type(one) for one in read.results] == [ReadResult]
    assert decode_value(read.results[0].value) == 5
    response = await owner.swarm.respond("list_keys", contact("x"), ReadValues([(0, b"")]))
    listed = await read_record(FrameReader(chunks(await collected(response.body))), 0, ReadValuesAnswer)
    assert listed.results == [ReadResult(0, "ok", term=term(1, "a"), keys=[encode_key("k")])]
    bad = [bytes(one) for one in blob_frames(0, b"\xc1", Part.UPDATES)]
    with pytest.raises(RequestRejected, match="malformed updates"):
        await owner.swarm.deliver("update_values", contact("x"), UpdateValues(), UpdateValuesAnswer, bad)


def test_too_many_updates_of_a_body_are_refused() -> None:
    """None, the most, and one more; and bytes that are none."""
    one = (2, update(1))
    assert UPDATES.decode(msgspec.msgpack.encode([])) == []
    assert UPDATES.decode(msgspec.msgpack.encode([one] * module.MAX_ITEMS)) == [one] * module.MAX_ITEMS
    for raw in (msgspec.msgpack.encode([one] * (module.MAX_ITEMS + 1)), b"", b"\xff"):
        with pytest.raises(msgspec.DecodeError):
            UPDATES.decode(raw)
