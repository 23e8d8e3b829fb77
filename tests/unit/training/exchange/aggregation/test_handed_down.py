"""What a node hands down: changes that lead another follower to the owner's bits, as many as an owner keeps, dated."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.harness.builders.stores import term
from training.exchange.aggregation.handed_down import MAX_AGE_S, VALUE_BYTES, HandedDown
from training.exchange.messages import PullResult, Wanted
from training.exchange.owner.published import ApproximatedState, Published, apply_all, begin, tick

SHARD, SIZE = 3, 64
RANK = term(2, "a")


def chain(versions: int, codec: Any = "int4") -> list[Published]:
    """The published values of a chain, one after the other."""
    chance = np.random.default_rng(1)
    x = chance.standard_normal(SIZE).astype(np.float32)
    found = [begin(b"c" * 8, x, ApproximatedState(RANK, 10))]
    for number in range(versions):
        x = x + chance.standard_normal(SIZE).astype(np.float32)
        found.append(tick(found[-1], x, ApproximatedState(RANK, 11 + number), codec))
    return found


def result(published: Published, status: Any, changes: int = 0) -> PullResult:
    return PullResult(
        SHARD,
        status,
        *RANK,
        published.source.version,
        chain=published.chain,
        published=published.version,
        digest=published.digest,
        changes=changes,
    )


def wanted(published: Published) -> Wanted:
    return Wanted(SHARD, *RANK, published.source.version, published.chain, published.version)


def followed(values: list[Published], step: int = 1, *, date_s: float = 100.0) -> HandedDown:
    """What a node has that entered the chain at its beginning, and has pulled every so many versions."""
    handed = HandedDown()
    handed.note(result(values[0], "value"), date_s, SIZE)
    for at in range(step, len(values), step):
        arrays = [(value.changes[-1].codec, value.changes[-1].payload) for value in values[at - step + 1 : at + 1]]
        handed.note(result(values[at], "changes", step), date_s + at, SIZE, arrays)
    return handed


@pytest.mark.parametrize("step", [1, 2])
def test_another_follower_comes_to_the_owners_bits(step: int) -> None:
    """From wherever it is, if the changes since are kept: to the same value, with the digest, version and term of the
    owner."""
    values = chain(4)
    handed = followed(values, step)
    for at in range(4):
        answer = handed.answer(wanted(values[at]), 104.0)
        assert (answer.result.status, answer.result.changes, len(answer.changes)) == ("changes", 4 - at, 4 - at)
        assert [change.version for change in answer.changes] == list(range(at + 1, 5))
        value, digest = apply_all(values[at].value.copy(), [(one.codec, one.payload) for one in answer.changes])
        assert digest == answer.result.digest == values[4].digest
        assert value.tobytes() == values[4].value.tobytes()
        assert (answer.result.term, answer.result.version) == (RANK, 14)
    assert handed.answer(wanted(values[4]), 104.0).result.status == "same"


def test_it_cannot_help_who_is_elsewhere() -> None:
    """In another chain, ahead, or further behind than the changes reach; then it names what it has."""
    values = chain(5)
    handed = HandedDown()
    assert handed.answer(wanted(values[1]), 1.0).result == PullResult(SHARD, "retry")
    assert handed.answer(wanted(values[1]), 1.0).age_s == MAX_AGE_S
    handed.note(result(values[2], "value"), 100.0, SIZE)
    handed.note(
        result(values[4], "changes", 2),
        101.0,
        SIZE,
        [(value.changes[-1].codec, value.changes[-1].payload) for value in values[3:5]],
    )
    other = msgspec.structs.replace(wanted(values[4]), chain=b"d" * 8)
    for one in (wanted(values[1]), wanted(values[5]), other):
        answer = handed.answer(one, 101.0)
        assert (answer.result.status, answer.result.published, answer.result.changes) == ("retry", 4, 0)
        assert answer.changes == ()


def test_a_gap_ends_what_was_kept() -> None:
    """Changes before one that this node has not got lead nowhere. The same for a whole value, and another chain."""
    values = chain(6)
    last = [(values[6].changes[-1].codec, values[6].changes[-1].payload)]
    handed = followed(values[:4])
    handed.note(result(values[6], "changes", 1), 200.0, SIZE, last)
    assert handed.answer(wanted(values[3]), 200.0).result.status == "retry"
    assert handed.answer(wanted(values[5]), 200.0).result.changes == 1

    for status, name in (("value", values[0].chain), ("changes", b"d" * 8)):
        handed = followed(values[:4])
        handed.note(
            msgspec.structs.replace(result(values[6], status, 1), chain=name), 200.0, SIZE, last[: status != "value"]
        )
        assert handed.answer(wanted(values[3]), 200.0).result.status == "retry"


def test_as_many_changes_are_kept_as_an_owner_keeps() -> None:
    """Together smaller than the value; it counts their bytes, and none of what was forgotten."""
    values = chain(40)
    handed = followed(values)
    assert handed.size_bytes == values[40].change_bytes
    assert 0 < handed.size_bytes < VALUE_BYTES * SIZE
    assert handed.answer(wanted(values[40 - len(values[40].changes)]), 140.0).result.status == "changes"
    assert handed.answer(wanted(values[39 - len(values[40].changes)]), 140.0).result.status == "retry"
    handed.forget(SHARD)
    assert handed.size_bytes == 0
    assert handed.answer(wanted(values[40]), 140.0).result.status == "retry"


def test_a_value_is_as_old_as_its_date() -> None:
    """An answer that nothing is new makes it younger; an older answer changes nothing."""
    values = chain(2)
    handed = followed(values, date_s=100.0)
    assert handed.answer(wanted(values[2]), 110.0).age_s == 8.0
    handed.note(result(values[2], "same"), 107.0, SIZE)
    handed.note(result(values[2], "same"), 105.0, SIZE)
    handed.note(result(values[1], "value"), 109.0, SIZE)
    answer = handed.answer(wanted(values[1]), 110.0)
    assert (answer.age_s, answer.result.changes) == (3.0, 1)
    assert handed.answer(wanted(values[1]), 10.0**9).age_s == MAX_AGE_S


def test_the_latest_words_of_an_owner_are_passed_on() -> None:
    """After a hand-over the chain goes on under a higher term: nothing is new but that."""
    values = chain(1)
    handed = followed(values)
    handed.note(msgspec.structs.replace(result(values[1], "same"), term_number=7), 200.0, SIZE)
    assert handed.answer(wanted(values[0]), 200.0).result.term == (7, RANK.node)
