"""Addresses that did not answer lately."""

from __future__ import annotations

from overlay.membership.negative_cache import NegativeCache
from tests.harness.peers import contact


def test_silent_addresses_are_left_alone_and_forgiven() -> None:
    """Keyed by id and address, longer each time, ended by an answer."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    assert cache.is_silent(one, 4.9)
    assert not cache.is_silent(one, 5.1)
    assert not cache.is_silent(contact(b"a" * 20, port=1), 1.0)
    cache.add(one, 6.0)
    assert cache.is_silent(one, 15.9)
    cache.discard(one)
    assert not cache.is_silent(one, 7.0)
