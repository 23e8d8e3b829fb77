"""Addresses that did not answer lately and need not be tried again yet. Pure."""

from __future__ import annotations

from overlay.peers import Contact

#: A silent address is left alone this long, and twice as long each time it stays silent, up to the last.
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
MAX_ENTRIES = 4096


class NegativeCache:
    """Contacts that stayed silent, keyed by id and address: a changed address is another chance at once."""

    def __init__(self) -> None:
        self._until: dict[Contact, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, contact: Contact, now: float) -> None:
        """It did not answer, with a retry."""
        _, last = self._until.pop(contact, (0.0, FIRST_PAUSE_S / 2))
        pause = min(2 * last, MAX_PAUSE_S)
        self._until[contact] = (now + pause, pause)
        if len(self._until) > MAX_ENTRIES:
            del self._until[next(iter(self._until))]

    def discard(self, contact: Contact) -> None:
        """It spoke to us itself."""
        if self._until:
            self._until.pop(contact, None)

    def is_silent(self, contact: Contact, now: float) -> bool:
        entry = self._until.get(contact)
        return entry is not None and now < entry[0]
