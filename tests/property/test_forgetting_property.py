"""Histories of a shard whose set of identities forgets: bounded, nothing applied twice, and nothing refused that a
living node has trained.

A node starts again and again, others come and go for good. Deltas arrive twice, late, and long after their node has
started again. A second set, which forgets nothing, says what was applied.
"""

from __future__ import annotations

import random

import pytest

from tests.harness.runner.long_run import more
from training.shards.applied import Applied, DeltaId, Forgotten
from training.shards.forgetting import Present, SilenceWatch

SILENT_S = 100.0


class Shard:
    """An owner's set, and what it has ever applied."""

    def __init__(self, most_gone: int) -> None:
        self.applied, self.watch = Applied(), SilenceWatch()
        self.ever: set[DeltaId] = set()
        self.most_gone = most_gone
        self.now_s = 0.0
        self.living: dict[bytes, int] = {}
        self.most_rows = 0

    def push(self, identity: DeltaId) -> bool:
        """Whether the delta is in the shard afterwards, as far as the shard knows."""
        if identity in self.applied:
            assert identity in self.ever, f"{identity} is known, and was never applied"
            return True
        if self.applied.may_have_forgotten(identity):
            return False
        assert identity not in self.ever, f"{identity} is applied twice"
        self.applied.add(identity)
        self.ever.add(identity)
        return True

    def look(self, seconds: float, settled_step: int | None) -> None:
        self.now_s += seconds
        present = Present(self.now_s, SILENT_S, self.living.get, settled_step=settled_step, most_gone=self.most_gone)
        self.watch.forget(self.applied, present)
        self.most_rows = max(self.most_rows, self.applied.row_count)


def node_of(number: int) -> bytes:
    return number.to_bytes(20, "big")


@pytest.mark.parametrize("rounds", [10_000, *more(50_000)])
def test_tens_of_thousands_of_starts_leave_a_bounded_set(rounds: int) -> None:
    """Half of the starts are of nodes that come once, half of 40 nodes that start again: the set lists a few hundred,
    each living node's deltas are applied once, and everything that comes again is refused or known."""
    chance = random.Random(24)
    shard, step = Shard(most_gone=32), 0
    settled: list[DeltaId] = []
    regulars = {node_of(number): 0 for number in range(40)}
    for start in range(rounds):
        node = node_of(chance.randrange(40))
        regulars[node] += 1
        shard.living[node] = regulars[node]
        passing = node_of(1000 + start)
        shard.living[passing] = 1
        step += chance.randint(0, 2)
        for identity in (
            DeltaId(node, regulars[node], step),
            DeltaId(node, regulars[node], step + 1),
            DeltaId(passing, 1, step + chance.randint(0, 2)),
        ):
            assert shard.push(identity), f"{identity} is of a living node, and is refused"
            assert shard.push(identity)
            settled.append(identity)
        del shard.living[passing]
        if start % 12 == 11:
            shard.look(50.0, step - 50)
            for _ in range(3):
                shard.push(chance.choice(settled))
    assert shard.applied.count() == len(shard.ever) == 3 * rounds
    # 40 living nodes, 32 that are gone, and what has come within two or three times SILENT_S.
    assert shard.most_rows < 250
    assert len(shard.applied.forgotten.floors) <= 40


@pytest.mark.parametrize("seeds", [range(500), *more(range(500, 1500))], ids=len)
def test_no_order_of_events_applies_a_delta_twice(seeds: range) -> None:
    """Any identity may come at any time, also one that was forgotten, and one that was on its way while its node was:
    it is applied once at most. The set survives the wire, and what a set of before it forgot lists is not missing."""
    forgotten = 0
    print(f"seeds {seeds.start} to {seeds.stop - 1}")
    for seed in seeds:
        chance = random.Random(seed)
        shard = Shard(most_gone=chance.randint(0, 1))
        for _ in range(40):
            node = node_of(chance.randrange(3))
            match chance.choice(("push", "push", "push", "late", "start", "die", "look", "look", "send")):
                case "push":
                    shard.push(DeltaId(node, chance.randint(1, 3), chance.randint(0, 8)))
                case "late":
                    identity = DeltaId(node, chance.randint(1, 3), chance.randint(0, 8))
                    if identity not in shard.applied and not shard.applied.may_have_forgotten(identity):
                        shard.look(2 * SILENT_S, 9)
                        shard.look(2 * SILENT_S, 9)
                        assert identity not in shard.ever
                        shard.applied.add(identity)
                        shard.ever.add(identity)
                case "start":
                    shard.living[node] = min(3, shard.living.get(node, 0) + 1)
                case "die":
                    shard.living.pop(node, None)
                case "look":
                    before = shard.applied.copy()
                    shard.look(chance.uniform(0.3, 2.0) * SILENT_S, chance.randint(0, 9))
                    assert shard.applied.count() == len(shard.ever)
                    assert not before.without(shard.applied).rows()
                case _:
                    known = shard.applied.forgotten
                    again = Forgotten.of_rows(known.rows(), known.before, known.count)
                    shard.applied = Applied.of_rows(shard.applied.rows(), again)
                    assert shard.applied.count() == len(shard.ever)
        forgotten += shard.applied.forgotten.count
    assert forgotten > len(seeds)
