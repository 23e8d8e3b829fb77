"""Mutated datagrams into a node of a small swarm."""

from __future__ import annotations

import pytest

from tests.harness.attacks.fuzz import Fuzz
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more

ROUNDS = 40


@pytest.mark.parametrize("seed", [1, *more(2)])
def test_nothing_that_arrives_harms_a_node(seed: int) -> None:
    """No exception, no task left, no invented node in a table, sizes within limits, others served (see the fuzzer)."""
    tally = VirtualLoop().run(Fuzz(seed).play(lambda tally: tally.rounds < ROUNDS))
    print(tally)

    assert tally.datagrams == 250 * ROUNDS
    # The fuzzer reaches what it is meant to reach: every reason to drop a datagram came up, and some were served.
    for reason in ("content", "short", "long", "kind", "other_swarm", "unasked", "unproven", "own_id", "own_echo"):
        assert tally.counters[f"dropped_{reason}"] > 0, reason
    assert tally.counters["proofs_made"] > 0
    assert tally.counters["malformed_contacts"] > 0
    assert 0 < tally.refused_heads < tally.heads


def test_the_same_seed_sends_the_same_bytes() -> None:
    """A failure is repeated by its seed: two runs of one seed count the same, two seeds do not."""
    first, again, other = (VirtualLoop().run(Fuzz(seed).play(lambda tally: tally.rounds < 3)) for seed in (4, 4, 5))

    assert first == again
    assert first.counters != other.counters
