"""What one member of five can do to the others (`tests.harness.attacks`): some attacks slow them down, none lasts."""

from __future__ import annotations

import pytest

from tests.harness.attacks import member_attacks as attacks
from tests.harness.attacks.member_attacks import ATTACKS, ENOUGH

#: Attacks that slow the others down as long as their member is there, and the least rate that is left to them.
HOLDS_UP = {
    "redirects every delta and every pull to itself": 0.6,
    "answers every request with any values": 0.5,
}
#: What nobody sees, and is not defended against (SECURITY.md): an owner that acknowledges deltas and leaves them out.
LEAVES_OUT = "owns a shard, and acknowledges every delta without adding it"


@pytest.mark.long
@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_leaves_nothing_behind(name: str) -> None:
    """The others make at least four fifths of their steps, but under a few attacks, while the member is there. Once it
    has gone nothing is wrong, nor after all others were started again (docs/attacks.md)."""
    row = attacks.play(name)
    print(row.markdown())
    assert row.lasting == ""
    assert row.restart.endswith("%")
    assert int(row.restart[:-1]) >= 100 * ENOUGH
    assert row.rate >= HOLDS_UP.get(name, ENOUGH)
    assert row.left_out or name != LEAVES_OUT


def test_the_table_has_at_least_forty_attacks() -> None:
    """And every exception is one of them."""
    assert len(ATTACKS) >= 40
    assert set(HOLDS_UP) <= set(ATTACKS)


def test_an_attack_is_harmless_from_the_last_slow_window_on() -> None:
    """Steps are counted each second: nothing for twenty seconds, then the usual rate."""
    usual = [float(second) for second in range(61)]
    assert attacks._harmless_s(usual, 1.0) == 0.0
    stopped = [0.0] * 20 + [float(second) for second in range(41)]
    assert attacks._harmless_s(stopped, 1.0) == pytest.approx(18.0, abs=2.0)
    assert attacks._harmless_s([0.0] * 61, 1.0) is None
