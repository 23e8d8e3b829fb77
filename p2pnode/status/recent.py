"""A value that takes long to find: asked for often, found once a second."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

#: How old an answer may be, in seconds.
FRESH_S = 1.0


class Recent(Generic[T]):
    """What `find` has returned within the last second, for as long as `key()` is the same."""

    def __init__(
        self, find: Callable[[], T], monotonic: Callable[[], float], key: Callable[[], Hashable] = lambda: None
    ) -> None:
        self._find, self._monotonic, self._key = find, monotonic, key
        self._found: tuple[Hashable, float, T] | None = None

    def get(self) -> T:
        """The value, at most `FRESH_S` old."""
        key, now = self._key(), self._monotonic()
        if self._found is None or self._found[0] != key or now - self._found[1] >= FRESH_S:
            self._found = key, now, self._find()
        return self._found[2]
