"""What a shard goes on with whose values have become useless: identities decide what is added, and what is lost."""

from __future__ import annotations

import numpy as np

from tests.harness.builders.stores import IDS, SUM, delta, owner_of, term, zeros
from training.exchange.store.good_copies import PulledValue, add_missing, agreed, has_all_of, state_at
from training.exchange.store.repair_log import RepairLog
from training.shards.outer_rule import Rule


def pulled(version: int, value: float = 0.0, digest: bytes = b"a", owner: str = "a") -> PulledValue:
    return PulledValue(term(1, owner), version, np.full(4, value, np.float32), digest)


def broken_owner(added: int = 5, *, log_bytes: int = 1 << 20, log_from: int = 1):
    """A store that owns shard 0 with the deltas 1 to `added` of value 1, of which the log has those from `log_from`."""
    store = owner_of("a")
    for step in range(1, added + 1):
        store.log = store.log if store.log.seconds else RepairLog(log_bytes, 60.0 if step >= log_from else 0.0)
        store.add(0, delta(step))
    store.owned[0].state.value[:] = np.nan
    store.owned[0].is_broken = True
    return store


def test_a_pulled_value_lists_the_deltas_that_it_had() -> None:
    """Version 3 had the first three; the later two come from the log, each once."""
    store = broken_owner()
    owned = store.owned[0]
    state = state_at(owned, pulled(3, 3.0))
    assert state is not None
    assert [state.knows(delta(step).identity) for step in range(1, 6)] == [True] * 3 + [False] * 2

    added, lost = add_missing(state, owned.state, store.log.entries(0), SUM, is_listed=True)

    assert (added, lost.count(), state.version) == (2, 0, 5)
    assert state.value.tolist() == [5.0] * 4
    assert has_all_of(state, owned.state)


def test_what_the_log_lacks_is_lost_by_name() -> None:
    """Version 1 had the first delta, the log has the fourth and the fifth."""
    store = broken_owner(log_from=4)
    owned = store.owned[0]
    state = state_at(owned, pulled(1, 1.0))
    assert state is not None

    added, lost = add_missing(state, owned.state, store.log.entries(0), SUM, is_listed=True)

    assert (added, state.value.tolist()) == (2, [3.0] * 4)
    assert lost.rows() == [(IDS["x"], 1, [(2, 3)])]
    assert not has_all_of(state, owned.state)


def test_a_value_of_another_ownership_or_one_being_written_lists_nothing() -> None:
    """Its order of deltas is not this owner's; version 0 may be half of a value."""
    owned = broken_owner().owned[0]
    assert state_at(owned, PulledValue(term(0, "b"), 3, np.zeros(4, np.float32), b"")) is None
    assert state_at(owned, pulled(0)) is None
    assert state_at(owned, pulled(6)) is None


def test_a_value_of_unknown_deltas_gets_none_added_and_the_rest_is_lost() -> None:
    """Of five deltas the value has three, it is not known which."""
    store = broken_owner()
    state = zeros(store)
    state.unlisted = 3

    added, lost = add_missing(state, store.owned[0].state, store.log.entries(0), SUM, is_listed=False)

    assert (added, state.value.tolist()) == (0, [0.0] * 4)
    assert lost.rows() == [(IDS["x"], 1, [(1, 5)])]


def test_a_good_momentum_is_kept_and_takes_no_delta_twice() -> None:
    """It has taken the later deltas already: they are added to the value alone. A broken one begins anew."""
    rule = Rule(outer_lr=1.0, outer_momentum=0.5)
    for spoilt in (False, True):
        store = broken_owner()
        owned = store.owned[0]
        owned.state.momentum = np.full(4, np.inf if spoilt else 7.0, np.float32)
        owned.state.sum_weight = 0.25
        state = state_at(owned, pulled(3, 3.0))
        assert state is not None
        assert state.sum_weight == (0.0 if spoilt else 0.25)
        before = None if state.momentum is None else state.momentum.tolist()
        add_missing(state, owned.state, store.log.entries(0), rule, is_listed=True)
        assert before == (None if spoilt else [7.0] * 4)
        assert state.momentum is not None
        assert (state.momentum.tolist() == [7.0] * 4) is not spoilt


def test_pending_deltas_stay_pending() -> None:
    """Those of a step whose barrier has not passed were never in the value."""
    store = broken_owner(2)
    owned = store.owned[0]
    store.add(0, delta(9, synchronous=True))
    state = state_at(owned, pulled(2, 2.0))
    assert state is not None
    add_missing(state, owned.state, store.log.entries(0), SUM, is_listed=True)
    assert [one.identity.step for one in state.pending_deltas()] == [9]
    assert state.value.tolist() == [2.0] * 4


def test_most_nodes_decide_which_bits_a_value_has() -> None:
    """One liar of three is outvoted, also with a newer version; of as many votes the newest counts."""
    assert agreed([]) is None
    honest, lie = pulled(4, digest=b"a"), pulled(9, digest=b"lie")
    found = agreed([lie, honest, pulled(4, digest=b"a")])
    assert found is not None
    assert found.digest == b"a"
    newest = agreed([pulled(4), pulled(5, digest=b"b")])
    assert newest is not None
    assert newest.version == 5
