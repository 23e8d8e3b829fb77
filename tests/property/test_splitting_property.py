"""Divided shards against whole ones: the same deltas, at any moments, and the parts have the bits of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.encoding.codecs import Vector
from training.shards.applied import Applied, DeltaId
from training.shards.outer_rule import Rule
from training.shards.splitting import split
from training.shards.state import ShardState
from training.shards.value_table import ValueTable

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=80)
NODES = [b"a" * 20, b"b" * 20, b"c" * 20, b"d" * 20]
SIZE = 24

IDENTITIES = st.builds(DeltaId, st.sampled_from(NODES), st.integers(0, 1), st.integers(1, 9))
#: A delta that is added at once, one that waits for its step, and the end of a step.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDENTITIES, st.sampled_from([0.25, 0.5, 1.0]), st.booleans()),
        st.tuples(st.just("hold"), IDENTITIES, st.sampled_from([0.25, 0.5, 1.0]), st.booleans()),
        st.tuples(st.just("fold"), st.integers(1, 9)),
    ),
    max_size=30,
)
SIZES = st.sampled_from([[12, 12], [8, 8, 8], [6, 6, 6, 6], [5, 7, 5, 7], [24], [1, 22, 1]])


def delta_of(identity: DeltaId) -> Vector:
    rng = np.random.default_rng([NODES.index(identity.node), identity.incarnation, identity.step])
    return rng.normal(size=SIZE).astype(np.float32)


def play(state: ShardState, part: slice, event: Any, rule: Rule) -> None:
    """One event at the whole, or at a part of it. What is known is left out, as an owner does."""
    if event[0] == "fold":
        state.fold(event[1], rule)
    elif not state.knows(event[1]):
        _, identity, weight, plain = event
        delta = delta_of(identity)[part]
        if event[0] == "add":
            state.apply(identity, weight, delta, rule, plain=plain)
        else:
            state.add_pending(identity, weight, delta, plain=plain)


@FIXED
@given(
    events=EVENTS,
    when=st.integers(0, 30),
    sizes=SIZES,
    parameters=st.integers(0, SIZE),
    momentum=st.sampled_from([0.0, 0.5]),
    unlisted=st.sampled_from([0, 2]),
)
def test_parts_go_on_as_the_whole_would_have(
    events: list[Any], when: int, sizes: list[int], parameters: int, momentum: float, unlisted: int
) -> None:
    """Wherever among the deltas and folds the shard is divided: values and momentum are the same bits, and the
    identities of every part are those of the whole, so that each knows which deltas it has."""
    rule = Rule(0.7, momentum)
    whole = ShardState(value=np.linspace(-1, 1, SIZE, dtype=np.float32), parameters=parameters)
    for event in events[:when]:
        play(whole, slice(None), event, rule)
    whole.era_step, whole.unlisted = 3, unlisted

    parts = split(whole, sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    for event in events[when:]:
        play(whole, slice(None), event, rule)
        for part, place in zip(parts, slices, strict=True):
            play(part, place, event, rule)

    assert b"".join(part.value.tobytes() for part in parts) == whole.value.tobytes()
    moving = whole.momentum if whole.momentum is not None else np.zeros(parameters, np.float32)
    for part, place in zip(parts, slices, strict=True):
        assert part.parameters == len(range(parameters)[place])
        if part.parameters:
            mine = part.momentum if part.momentum is not None else np.zeros(part.parameters, np.float32)
            assert mine.tobytes() == moving[place].tobytes()
            assert part.sum_weight == whole.sum_weight
        assert part.applied.rows() == whole.applied.rows()
        assert (part.version, part.known_count) == (whole.version, whole.known_count)
        assert (part.folded_step, part.era_step, part.unlisted) == (whole.folded_step, 3, unlisted)
        held = {one.identity: one for one in whole.pending_deltas()}
        assert [one.identity for one in part.pending_deltas()] == list(held)
        for one in part.pending_deltas():
            assert one.delta.tobytes() == held[one.identity].delta[place].tobytes()
            assert (one.weight, one.plain) == (held[one.identity].weight, held[one.identity].plain)


def rows(known: Applied | None) -> Any:
    return None if known is None else known.rows()


@FIXED
@given(sizes=SIZES, events=EVENTS)
def test_parts_share_nothing(sizes: list[int], events: list[Any]) -> None:
    """What is added to a part changes neither the whole nor another part."""
    rule = Rule(0.7, 0.5)
    whole = ShardState(value=np.ones(SIZE, dtype=np.float32), parameters=SIZE)
    play(whole, slice(None), ("add", DeltaId(NODES[0], 2, 1), 0.5, False), rule)
    play(whole, slice(None), ("hold", DeltaId(NODES[0], 2, 2), 0.5, False), rule)
    assert whole.momentum is not None
    before = (whole.value.tobytes(), whole.momentum.tobytes(), whole.known_count)

    first, *others = split(whole, sizes)

    def shown() -> list[Any]:
        return [(one.value.tobytes(), one.applied.rows(), one.known_count) for one in others]

    kept = shown()
    for event in [*events, ("fold", 9)]:
        play(first, slice(0, sizes[0]), event, rule)

    assert (whole.value.tobytes(), whole.momentum.tobytes(), whole.known_count) == before
    assert shown() == kept
    assert not any(np.shares_memory(part.value, whole.value) for part in (first, *others))


def test_lengths_of_deltas_are_estimated_for_the_parts() -> None:
    """Those of a quarter are half of the whole's, by member, as of a delta spread evenly."""
    whole = ShardState(value=np.zeros(SIZE, np.float32), parameters=SIZE)
    whole.norms.note(NODES[0], 1, 7, 3.0)
    whole.norms.note(NODES[1], 1, 8, 5.0)

    for part in split(whole, [6, 6, 6, 6]):
        assert part.norms.rows() == [(NODES[0], 1, 7, 1.5), (NODES[1], 1, 8, 2.5)]


@pytest.mark.parametrize("sizes", [[12, 11], [12, 13], [24, 0], [0, 24]])
def test_parts_must_be_those_of_the_whole(sizes: list[int]) -> None:
    """The sizes are named."""
    with pytest.raises(ValueError, match=r"a shard of 24 values in parts of \[\d+, \d+\]"):
        split(ShardState(value=np.zeros(SIZE, np.float32), parameters=SIZE), sizes)


def test_named_values_are_not_divided() -> None:
    """Their keys would have to be looked up in the parts."""
    state = ShardState(value=np.zeros(0, np.float32), parameters=0, table=ValueTable())

    with pytest.raises(ValueError, match="a key belongs to one shard"):
        split(state, [0, 0])
