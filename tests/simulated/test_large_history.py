"""Hundreds of nodes with shards of a real size: the code of `python -m benchmarks exchange_history`, in small."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import exchange_history
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM
from tests.harness.histories.delta_ledger import Broken
from tests.harness.histories.large_history import play_large
from tests.harness.histories.large_plan import LargePlan, LargeTally

#: Six nodes of which two are killed.
SMALL = LargePlan(nodes=6, steps=8, shards=16, values_per_shard=64, crash=0.34)


def counts(tally: LargeTally) -> dict[str, object]:
    """What the seed decides."""
    return {name: value for name, value in vars(tally).items() if "processor" not in name and name != "peak_bytes"}


def test_a_small_one_conserves_what_it_has_trained_and_is_the_same_again() -> None:
    """Nodes are killed and start again, shards are taken over, and every delta is in the model once. A second run of
    the seed counts the same, and the figures are those of the tallies."""
    print("seed 1")
    tally = play_large(1, SMALL)

    assert tally.crashed == 2
    assert tally.taken_over >= 1
    assert tally.steps >= 4 * SMALL.steps
    assert tally.acknowledged + 16 * tally.crashed >= 16 * tally.steps
    assert tally.longest_of_one_s <= tally.limit_s
    assert counts(play_large(1, SMALL)) == counts(tally)

    half = dataclasses.replace(tally, processor_trained_s=tally.processor_trained_s / 2)
    found = exchange_history.outcome([dataclasses.replace(SMALL, nodes=3), SMALL], [[half], [tally]])
    (growth,) = [one for one in found.series if "over" in one.name]
    assert (list(growth.values), growth.aim) == ([2.0], "≤ 2")
    assert len(found.series) == len({one.name for one in found.series}) == 9


def test_an_owner_that_forgets_a_delta_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that acknowledges a delta and does not add it, once in the history, breaks it."""
    add, dropped = ShardStore.add, list[int]()

    def forgetful(store: ShardStore, shard: int, item: object, state: object = None) -> int:
        if state is None and not dropped and shard in store.owned and store.ownership.fence(shard) > ZERO_TERM:
            dropped.append(shard)
            return store.owned[shard].state.version
        return add(store, shard, item, state)

    monkeypatch.setattr(ShardStore, "add", forgetful)
    with pytest.raises(Broken, match="lost 1"):
        play_large(1, dataclasses.replace(SMALL, nodes=4, steps=3, crash=0.0, loss=0.0))
    assert len(dropped) == 1


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "nodes"), [(1, 150), (2, 100)])
def test_a_large_one_conserves_what_it_has_trained(seed: int, nodes: int) -> None:
    """256 shards of 16 KiB and 12 steps of 150 nodes, a tenth of them killed, 2 % of the messages lost."""
    print(f"seed {seed}: {nodes} nodes")
    tally = play_large(seed, LargePlan(nodes=nodes, steps=12))

    print(tally)
    assert tally.crashed == nodes // 10
    assert tally.taken_over >= nodes // 20
    assert tally.longest_of_one_s <= tally.limit_s
