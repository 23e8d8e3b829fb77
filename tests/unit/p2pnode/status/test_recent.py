"""A value that is found once a second, however often it is asked for."""

from __future__ import annotations

from p2pnode.status.recent import FRESH_S, Recent


class Finder:
    def __init__(self) -> None:
        self.found, self.now, self.key = 0, 100.0, "a"

    def find(self) -> int:
        self.found += 1
        return self.found


def test_a_value_is_found_once_a_second() -> None:
    """Asked for within a second it is the same; after it, it is found again."""
    finder = Finder()
    recent = Recent(finder.find, lambda: finder.now)

    assert [recent.get(), recent.get()] == [1, 1]
    finder.now += FRESH_S - 0.01
    assert recent.get() == 1
    finder.now += 0.01
    assert [recent.get(), recent.get()] == [2, 2]


def test_another_key_finds_the_value_at_once() -> None:
    """What belonged to another key is not given."""
    finder = Finder()
    recent = Recent(finder.find, lambda: finder.now, lambda: finder.key)
    recent.get()

    finder.key = "b"

    assert [recent.get(), recent.get()] == [2, 2]
