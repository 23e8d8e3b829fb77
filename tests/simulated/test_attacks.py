"""What one member of five can do to the others (`tests.harness.attacks`): some attacks slow them down, none lasts."""

from __future__ import annotations

import pytest

from tests.harness.attacks import asked, forked_attacks, membership_lies
from tests.harness.attacks import member_attacks as attacks
from tests.harness.attacks.member_attacks import ATTACKS, ENOUGH

#: Attacks that slow the others down as long as their member is there, and the least rate that is left to them.
HOLDS_UP = {
    "redirects every delta and every pull to itself": 0.6,
    "answers every request with any values": 0.5,
    # As a member behind a slow line does.
    "answers every request as late as it may": 0.45,
    # Until one node has seen enough, and another something.
    "owns a shard, and says that nobody backs it up": 0.6,
}
#: Without a backup, which the attack has dropped, what was acknowledged last is in one node's memory only.
LEAVES_OUT = {
    "owns a shard, and says that nobody backs it up": 20,
    "redirects every delta and every pull to itself": 20,
    # One delta of each node is on its way until the owner is gone, and is late then.
    "owns a shard, and says for ever that it is at work on each delta": 20,
    "owns a shard, and takes each delta a byte a second": 20,
    # One on its way to an owner whose shard another is made to learn may be late: one or two with four of ten seeds.
    "makes all learn every shard": 5,
    # A refusal is final (SECURITY.md).
    "owns a shard, and refuses each delta as late": 500,
}


#: Owners that an audit finds, within so many seconds of their first lie.
FOUND_S = {
    "owns a shard, and acknowledges every delta without adding it": 20.0,
    "owns a shard, and adds one delta in ten": 20.0,
    "owns a shard, and adds a tenth of every delta": 30.0,
    "owns a shard, and adds and forwards zeros in place of the deltas": 40.0,
    "owns a shard, and adds the deltas of its backups alone": 55.0,
    "owns a shard, and publishes values without the deltas of one member": 55.0,
    "owns a shard, and serves the chain of its first answer for ever": 55.0,
}


#: Those that were harmless from the first second on, and cost the long run a minute: `python -m tests.harness.attacks`.
BY_HAND = {
    *asked.ATTACKS,
    *membership_lies.ATTACKS,
    "sends deltas byte by byte, a hundred at a time",
    "pulls every shard a hundred times at once, and takes a piece a second",
    "agrees to learn every shard, and takes each state a byte a second",
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in BY_HAND])
def test_an_attack_leaves_nothing_behind(name: str) -> None:
    """The others make at least four fifths of their steps, but under a few attacks, while the member is there. Once it
    has gone nothing is wrong, nor after all others were started again."""
    row = forked_attacks.play(name)
    print(row.markdown())
    assert row.lasting == ""
    assert row.restart.endswith("%")
    assert int(row.restart[:-1]) >= 100 * ENOUGH
    assert row.rate >= HOLDS_UP.get(name, ENOUGH)
    assert bool(row.found_s[1]) or name not in FOUND_S
    assert row.found_s[1] <= FOUND_S.get(name, 60.0)
    assert row.left_out <= LEAVES_OUT.get(name, 0)


def test_the_table_has_at_least_forty_attacks() -> None:
    """And every exception is one of them."""
    assert len(ATTACKS) >= 40
    assert {*HOLDS_UP, *FOUND_S, *LEAVES_OUT, *BY_HAND} <= set(ATTACKS)


def test_an_attack_is_harmless_from_the_last_slow_window_on() -> None:
    """Steps are counted each second: nothing for twenty seconds, then the usual rate."""
    usual = [float(second) for second in range(61)]
    assert attacks._harmless_s(usual, 1.0) == 0.0
    stopped = [0.0] * 20 + [float(second) for second in range(41)]
    assert attacks._harmless_s(stopped, 1.0) == pytest.approx(18.0, abs=2.0)
    assert attacks._harmless_s([0.0] * 61, 1.0) is None
