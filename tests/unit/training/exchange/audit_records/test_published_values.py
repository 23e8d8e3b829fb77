"""A backup compares what its owner publishes with its own copy: honest delays and rounding fit, lies do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.exchange.audit_records.published_values import (
    STALE_S,
    STEPS,
    UNADDED,
    BackedCopy,
    CopyVerdict,
    PublishedValues,
)

SIZE = 8192
Lie = Callable[[Vector, Vector], Vector]
#: Student's t is slow to draw: a delta's noise is the part of this that begins at a random place.
NOISE = np.random.default_rng(7).standard_t(3, 128 * SIZE).astype(np.float32)


class History:
    """An owner and its backup: each second one delta; the owner publishes what it has, in changes of a codec, as
    `training.exchange.owner.published` does it, and some steps late."""

    def __init__(self, seed: int, codec: CodecName, *, drift: float = 1.0, late: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.codec: CodecName = codec
        self.late = late
        self.direction = self.random.standard_normal(SIZE).astype(np.float32) * drift
        self.copy = self.random.standard_normal(SIZE).astype(np.float32)
        self.owned = self.copy.copy()
        self.past = [self.owned.copy()]
        self.published = self._rounded(self.copy)
        self.values = PublishedValues()
        self.values.begin(0, self, self.copy, np.sort(self.random.choice(SIZE, 1024, replace=False)))

    def _rounded(self, value: Vector) -> Vector:
        return codecs.decoded(codecs.encode(value, "bfloat16"), "bfloat16", value.size).copy()

    def _sent(self, difference: Vector) -> Vector:
        if self.codec == "float32":
            return difference
        payload = codecs.encode_with_feedback(difference, np.zeros(SIZE, np.float32), self.codec, codecs.SPARSE_VALUES)
        return codecs.decoded(payload, self.codec, SIZE)

    def delta(self, step: int) -> Vector:
        # Few values are large, most are small, and the length changes with time.
        begin = self.random.integers(NOISE.size - SIZE)
        noise = NOISE[begin : begin + SIZE]
        return np.asarray((self.direction + noise) * 0.01 * (1.0 + 0.5 * np.sin(step / 5)), np.float32)

    def play(self, steps: int, lie: Lie | None = None, *, publishes: bool = True) -> list[CopyVerdict]:
        found = []
        for step in range(steps):
            delta = self.delta(step)
            self.copy += delta
            self.owned = self.owned + delta if lie is None else lie(self.owned, delta)
            self.past.append(self.owned)
            if publishes:
                difference = self.past[max(0, len(self.past) - 1 - self.late)] - self.published
                self.published = self.published + self._sent(difference)
            found.append(
                self.values.compare(
                    0, BackedCopy(self.copy, 1), self.published, 1, float(step), 1.0, is_sparse=self.codec == "sparse"
                )
            )
        return found


CODECS: list[CodecName] = ["float32", "bfloat16", "int8", "int4", "sparse"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("drift", [0.0, 0.3, 3.0])
def test_an_honest_owner_fits(codec: CodecName, drift: float) -> None:
    """Whatever the codec, with deltas that go one way and ones that go to and fro, and some steps late."""
    for seed, late in enumerate([0, 1, 2]):
        found = History(seed, codec, drift=drift, late=late).play(150)
        assert dict.fromkeys(found) == {CopyVerdict.FITS: None}, f"seed {seed}, {late} steps late"


@pytest.mark.parametrize(
    ("lie", "drift", "most"),
    [
        (lambda value, delta: value, 1.0, 20),
        (lambda value, delta: value + np.float32(0.1) * delta, 1.0, 25),
        (lambda value, delta: value - delta, 1.0, 15),
        (lambda value, delta: value + np.float32(0.1) * delta, 0.0, 200),
        (lambda value, delta: value + delta + np.float32(0.05), 0.0, 25),
    ],
)
@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
def test_an_owner_that_adds_something_else_is_found(lie: Lie, drift: float, most: int, codec: CodecName) -> None:
    """It forwards every delta, and adds nothing, a tenth, the opposite, or something of its own."""
    history = History(1, codec, drift=drift)
    assert dict.fromkeys(history.play(20)) == {CopyVerdict.FITS: None}
    found = history.play(220, lie)
    print(codec, found.index(CopyVerdict.DIFFERS))
    assert found.index(CopyVerdict.DIFFERS) <= most


def test_sparse_changes_are_given_more_time() -> None:
    """A value may wait for many of them: the lie is found all the same, later."""
    history = History(1, "sparse", drift=1.0)
    assert dict.fromkeys(history.play(100)) == {CopyVerdict.FITS: None}
    found = history.play(400, lambda value, delta: value)
    print(found.index(CopyVerdict.DIFFERS))
    assert 64 < found.index(CopyVerdict.DIFFERS) < 300


def test_nothing_is_said_before_enough_was_compared() -> None:
    """Nor of a chain that began far away, with another owner, and comes nearer."""
    history = History(1, "int8")
    history.published += 10.0
    found = history.play(STEPS)
    assert dict.fromkeys(found) == {CopyVerdict.FITS: None}
    assert dict.fromkeys(history.play(100)) == {CopyVerdict.FITS: None}


def test_one_large_step_accuses_nobody() -> None:
    """The copy has it before it is published: the distance is large in one comparison."""
    history = History(1, "float32", late=1)
    history.play(20)
    jump = np.full(SIZE, 50.0, np.float32)
    history.copy += jump
    history.owned = history.owned + jump
    assert dict.fromkeys(history.play(20)) == {CopyVerdict.FITS: None}


def test_a_published_value_that_lacks_old_deltas_is_stale() -> None:
    """As long as an honest owner may take, it is not; and it is dated by versions, not by values."""
    values = PublishedValues()
    values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
    found = [values.date(0, second, 3, float(second), 1.0) for second in range(30)]
    assert found.index(CopyVerdict.STALE) == 4 + STALE_S + UNADDED
    values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
    honest = [values.date(0, second, max(0, second - 9), float(second), 1.0) for second in range(60)]
    assert dict.fromkeys(honest) == {CopyVerdict.FITS: None}


def test_slow_steps_are_given_their_time() -> None:
    """Ten median steps, where these are long; and a node that did not look for long judges by what it had then."""
    values = PublishedValues()
    values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
    slow = [values.date(0, second, 3, float(second), 10.0) for second in range(120)]
    assert slow.index(CopyVerdict.STALE) == 104 + UNADDED
    values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
    assert values.date(0, 5, 5, 0.0, 1.0) is CopyVerdict.FITS
    assert values.date(0, 90, 70, 1000.0, 1.0) is CopyVerdict.FITS


def test_an_answer_that_leads_to_nothing_leaves_the_last_published_version() -> None:
    values = PublishedValues()
    values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
    values.date(0, 5, 5, 0.0, 1.0)
    assert values.date(0, 6 + UNADDED, None, 1.0, 1.0) is CopyVerdict.FITS
    assert values.date(0, 20, None, 30.0, 1.0) is CopyVerdict.STALE


def test_a_delta_whose_origin_crashed_may_be_in_the_copy_alone() -> None:
    """It was forwarded and never added: that its owner lacks it says nothing, however long nothing else comes, nor when
    others come again. Of more such deltas than `UNADDED` not all are of that kind."""
    for alone, found in [(1, CopyVerdict.FITS), (UNADDED, CopyVerdict.FITS), (UNADDED + 1, CopyVerdict.STALE)]:
        values = PublishedValues()
        values.begin(0, "copy", np.zeros(4, np.float32), np.arange(4))
        at_rest = [values.date(0, 20 + alone, 20, float(second), 1.0) for second in range(60)]
        assert at_rest[-1] is found
        assert values.date(0, 23 + alone, 20, 60.0, 1.0) is found


def test_another_copy_of_a_shard_begins_anew() -> None:
    values = PublishedValues()
    first, second = object(), object()
    assert not values.is_begun(0, first)
    values.begin(0, first, np.zeros(4, np.float32), np.arange(4))
    assert values.is_begun(0, first)
    assert not values.is_begun(0, second)
    values.forget(0)
    assert not values.is_begun(0, first)


def test_a_copy_with_pending_deltas_is_compared_when_it_has_come_as_far() -> None:
    """The owner has made them visible already, at a barrier: its value of before is compared with the copy of now."""
    for share, found in [(1.0, CopyVerdict.FITS), (0.5, CopyVerdict.DIFFERS)]:
        values, copy = PublishedValues(), np.zeros(4, np.float32)
        values.begin(0, "copy", copy, np.arange(4))
        seen = []
        for step in range(1, 40):
            copy = copy + np.float32(1.0)
            published = np.full(4, share * (step + 1), np.float32)
            seen.append(values.compare(0, BackedCopy(copy, 3 * step, 3), published, 3 * (step + 1), float(step), 1.0))
        assert seen[-1] is found


def test_a_value_of_more_deltas_than_the_copy_was_sent_is_ahead() -> None:
    """By its version, with those that are pending."""
    values, copy = PublishedValues(), np.zeros(4, np.float32)
    values.begin(0, "copy", copy, np.arange(4))
    assert values.compare(0, BackedCopy(copy, 5, 2), copy, 7, 0.0, 1.0) is CopyVerdict.FITS
    assert values.compare(0, BackedCopy(copy, 5, 2), copy, 8, 1.0, 1.0) is CopyVerdict.AHEAD
