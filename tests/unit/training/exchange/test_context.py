"""What the parts of the exchange see of the peers at a glance (`training.exchange.context`)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from training.exchange.context import FEW, GLANCE_S, ExchangeContext
from training.settings import ExchangeSettings


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Crowd:
    """An overlay of so many peers, all workers, that counts how often it is asked for the number."""

    def __init__(self, peers: int) -> None:
        self.peers = dict.fromkeys(range(peers))
        self.asked = 0

    def workers(self) -> float:
        self.asked += 1
        return len(self.peers) + 1.0


def core_among(crowd: Crowd, clock: Clock) -> ExchangeContext:
    nobody: Any = None
    return ExchangeContext(
        overlay=cast(Any, crowd),
        store=nobody,
        genesis=b"",
        settings=ExchangeSettings(),
        synchronous=False,
        stale_limit=None,
        clock=cast(Any, clock),
        workers=nobody,
        log=nobody,
        incarnation=1,
        random=nobody,
        replica=np.zeros(1, np.float32),
        marks=[],
    )


@pytest.mark.parametrize(("peers", "counts_at_once"), [(FEW, True), (FEW + 1, False)])
def test_one_change_among_many_waits_for_the_next_glance(peers: int, counts_at_once: bool) -> None:
    """Among few peers a change of membership counts at once; among many the number is a moment old at most, and however
    many changes there are in that moment, the peers are counted once."""
    clock, crowd = Clock(), Crowd(peers)
    core = core_among(crowd, clock)
    assert core.worker_count() == peers + 1

    crowd.peers.popitem()
    if not counts_at_once:
        crowd.peers["another"] = crowd.peers["one more"] = None  # still many
    for _ in range(10):
        core.look_again()
        core.worker_count()
    now = len(crowd.peers) + 1
    assert core.worker_count() == (now if counts_at_once else peers + 1)
    assert crowd.asked == (11 if counts_at_once else 1)

    clock.now += 1.01 * GLANCE_S
    assert core.worker_count() == now
