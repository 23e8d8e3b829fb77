"""Which rows are forgotten, and which are kept."""

from __future__ import annotations

from training.shards.applied import Applied, DeltaId
from training.shards.forgetting import Present, SilenceWatch

NODES = [bytes([letter]) * 20 for letter in b"abcd"]


class Bench:
    """A set that is looked at with a clock of its own; silent is what has not grown for 10 s."""

    def __init__(self) -> None:
        self.applied, self.watch, self.now_s = Applied(), SilenceWatch(), 0.0
        self.living: dict[bytes, int] = {}

    def add(self, node: int, incarnation: int, *steps: int) -> None:
        for step in steps:
            self.applied.add(DeltaId(NODES[node], incarnation, step))

    def look(self, now_s: float, *, settled: int | None = None, most_gone: int = 1) -> list[tuple[str, int]]:
        """What is listed afterwards."""
        present = Present(now_s, 10.0, self.living.get, settled_step=settled, most_gone=most_gone)
        before = self.applied.row_count - len(self.applied.forgotten.floors)
        count = self.watch.forget(self.applied, present)
        rows = [(chr(node[0]), incarnation) for node, incarnation, _ in self.applied.rows()]
        assert count == before - len(rows)
        return rows


def test_an_earlier_start_is_forgotten_when_it_is_silent_and_a_later_one_is_not_new() -> None:
    """Start 1 still gets a delta at 8 s, and start 2 comes at 12 s: both are listed until 22 s."""
    bench = Bench()
    bench.add(0, 1, 1)
    assert bench.look(0.0) == [("a", 1)]
    bench.add(0, 1, 2)
    assert bench.look(8.0) == [("a", 1)]
    bench.add(0, 2, 3)
    assert bench.look(12.0) == [("a", 1), ("a", 2)]
    assert bench.look(21.0) == [("a", 1), ("a", 2)]
    assert bench.look(22.0) == [("a", 2)]
    assert bench.applied.may_have_forgotten(DeltaId(NODES[0], 1, 99))


def test_a_start_that_still_gets_deltas_is_kept() -> None:
    """A repair brings deltas of an earlier start: it is not silent, however old it is."""
    bench = Bench()
    bench.add(0, 1, 1)
    bench.add(0, 2, 2)
    bench.look(0.0)
    bench.add(0, 1, 3)
    assert bench.look(11.0) == [("a", 1), ("a", 2)]
    bench.add(0, 1, 5)
    assert bench.look(20.0) == [("a", 1), ("a", 2)]
    assert bench.look(30.0) == [("a", 2)]


def test_the_present_start_of_a_living_node_is_kept() -> None:
    """A row of a later start that nobody has seen alive does not displace it."""
    bench = Bench()
    bench.living[NODES[0]] = 1
    bench.add(0, 1, 1)
    bench.add(0, 9, 1)
    bench.look(0.0)
    assert bench.look(60.0) == [("a", 1), ("a", 9)]


def test_of_nodes_that_are_gone_the_furthest_are_kept() -> None:
    """Not those that are alive, nor those that the swarm is not far beyond."""
    bench = Bench()
    for node, last in enumerate((5, 6, 30, 2)):
        bench.add(node, 1, last)
    bench.living[NODES[3]] = 1
    bench.look(0.0, settled=20)
    assert bench.look(9.0, settled=20) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    assert bench.look(10.0, settled=None) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    assert bench.look(10.0, settled=6) == [("b", 1), ("c", 1), ("d", 1)]
    assert bench.look(10.0, settled=20) == [("c", 1), ("d", 1)]
    assert bench.look(10.0, settled=31, most_gone=0) == [("d", 1)]
    assert [bench.applied.may_have_forgotten(DeltaId(b"n" * 20, 1, step)) for step in (30, 31)] == [True, False]
    assert not bench.applied.may_have_forgotten(DeltaId(NODES[3], 1, 3))


def test_a_node_is_kept_while_its_earlier_start_came_too_far() -> None:
    """Its forgotten start has had steps which the swarm has not left behind: they would be taken for new ones."""
    bench = Bench()
    bench.add(0, 1, 50)
    bench.add(0, 2, 3)
    bench.look(0.0)
    assert bench.look(10.0, settled=20, most_gone=0) == [("a", 2)]
    assert bench.look(20.0, settled=20, most_gone=0) == [("a", 2)]
    assert bench.look(20.0, settled=51, most_gone=0) == []
    assert bench.applied.may_have_forgotten(DeltaId(NODES[0], 1, 50))
