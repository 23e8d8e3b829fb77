"""Addresses that did not answer lately and are not tried again yet. Pure."""

from __future__ import annotations

from p2pnode.overlay.peers import Contact

#: The pause of an address after its first time-out; it doubles with each further one, up to the maximum.
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
MAX_ENTRIES = 4096


class NegativeCache:
    """Contacts that timed out, by id and address: a node that moved can be tried at once."""

    def __init__(self) -> None:
        self._until: dict[Contact, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, contact: Contact, now: float) -> None:
        """It answered neither a call nor its retry."""
        _, last = self._until.pop(contact, (0.0, FIRST_PAUSE_S / 2))
        pause = min(2 * last, MAX_PAUSE_S)
        self._until[contact] = (now + pause, pause)
        if len(self._until) > MAX_ENTRIES:
            del self._until[next(iter(self._until))]

    def discard(self, contact: Contact) -> None:
        """It answered."""
        if self._until:
            self._until.pop(contact, None)

    def expire(self, now: float) -> None:
        """Forget those whose pause has been over for as long as the longest."""
        self._until = {contact: entry for contact, entry in self._until.items() if now - entry[0] <= MAX_PAUSE_S}

    def is_silent(self, contact: Contact, now: float) -> bool:
        entry = self._until.get(contact)
        return entry is not None and now < entry[0]
