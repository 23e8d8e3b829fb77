"""Why shards do not come: by owner and reason, the longest first."""

from __future__ import annotations

from overlay.addresses import Address
from overlay.peers import Contact
from training.exchange.client.step_wait import Obstacles

B, C = Contact(b"b" * 20, Address("10.0.0.2", 1)), Contact(b"c" * 20, Address("10.0.0.3", 1))


def test_what_has_waited_long_enough_is_grouped() -> None:
    """The number of shards, and since when the first of them waits."""
    found = Obstacles()
    found.note([1, 2], B, "refused", 5.0)
    found.note([3], B, "refused", 7.0)
    found.note([4], C, "was silent", 3.0)
    found.note([5], C, "was silent", 9.5)

    assert [(one.owner, one.since_s, count) for one, count in found.since(9.0).items()] == [(C, 3.0, 1), (B, 5.0, 3)]
    assert found.since(2.0) == {}


def test_a_shard_waits_since_the_first_request_in_vain_and_shows_the_last_reason() -> None:
    """Until it comes; after that it waits anew."""
    found = Obstacles()
    found.note([1], B, "refused", 5.0)
    found.note([1], None, "no owner is known", 8.0)
    ((one, _),) = found.since(99.0).items()
    assert one == (5.0, None, "no owner is known")
    assert 1 in found
    found.clear(1)
    assert (1 in found, found.since(99.0)) == (False, {})
    found.note([1], C, "refused", 20.0)
    ((one, _),) = found.since(99.0).items()
    assert one.since_s == 20.0
