"""Addresses that did not answer lately."""

from __future__ import annotations

from p2pnode.overlay.membership.members import MAX_ENTRIES, MAX_PAUSE_S, NegativeCache
from tests.harness.builders.peers import contact


def test_a_contact_that_timed_out_has_a_growing_pause_until_it_answers() -> None:
    """By id and address; twice as long each time; an answer ends it."""
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


def test_the_pause_and_the_cache_are_bounded() -> None:
    """No pause is longer than the maximum, and the oldest contact is dropped from a full cache."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    for _ in range(20):
        cache.add(one, 0.0)
    assert not cache.is_silent(one, MAX_PAUSE_S + 0.1)
    for port in range(1, MAX_ENTRIES + 1):
        cache.add(contact(b"b" * 20, port), 0.0)

    assert len(cache) == MAX_ENTRIES
    assert not cache.is_silent(one, 1.0)


def test_an_address_that_nobody_tries_again_is_forgotten() -> None:
    """Once its pause has been over for as long as the longest; until then the next pause is twice as long."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    cache.expire(5.0 + MAX_PAUSE_S)
    cache.add(one, 5.0 + MAX_PAUSE_S)
    assert cache.is_silent(one, 14.9 + MAX_PAUSE_S)
    cache.expire(15.1 + 2 * MAX_PAUSE_S)
    assert len(cache) == 0
