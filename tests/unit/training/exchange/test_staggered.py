"""When the next request to a receiver begins: with the answer of the last, or after a moment; never too many."""

from __future__ import annotations

from math import inf

import pytest

from training.exchange.shard_tasks import STAGGER_S, Staggered


def test_the_next_begins_with_the_answer_or_after_a_moment() -> None:
    """The moment counts from the last that has begun; of another receiver nothing is waited for."""
    requests = Staggered(3)
    assert requests.wait_s("a", 5.0) == 0.0
    first_s = requests.begin("a", 5.0)
    assert requests.wait_s("a", 5.0) == pytest.approx(STAGGER_S)
    assert requests.wait_s("a", 5.0 + STAGGER_S / 4) == pytest.approx(0.75 * STAGGER_S)
    assert requests.wait_s("a", 5.0 + 2 * STAGGER_S) == 0.0
    assert requests.wait_s("b", 5.0) == 0.0
    requests.begin("a", 6.0)
    assert requests.wait_s("a", 6.0) == pytest.approx(STAGGER_S)
    requests.end("a", first_s)
    assert requests.wait_s("a", 6.0) == pytest.approx(STAGGER_S)
    requests.end("a", 6.0)
    assert requests.wait_s("a", 6.0) == 0.0


def test_there_are_never_too_many() -> None:
    """However long they take; two that began in one moment are two."""
    requests = Staggered(2)
    for _ in range(2):
        requests.begin("a", 1.0)
    assert requests.wait_s("a", 100.0) == inf
    requests.end("a", 1.0)
    assert requests.wait_s("a", 100.0) == 0.0
