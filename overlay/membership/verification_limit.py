"""Bounds the verification pings that datagrams with invented senders can cause. Pure."""

from __future__ import annotations

from collections import Counter

from p2pnode.overlay.peers import Contact

#: One contact is verified at most once in this time.
VERIFY_PAUSE_S = 1.0
#: Contacts whose pause is remembered.
MAX_PAUSED = 1024
#: Verification pings under way: bounds the cost of a flood of invented senders, for this node and for the nodes it
#: names.
MAX_CONCURRENT_VERIFICATIONS = 512


class VerificationLimit:
    """Admits a verification ping when its contact was not verified just now and few are under way."""

    def __init__(self, counters: Counter[str]) -> None:
        self.under_way = 0
        self._counters = counters
        self._next: dict[Contact, float] = {}

    def __len__(self) -> int:
        """Contacts whose pause is remembered."""
        return len(self._next)

    def begin(self, contact: Contact, now: float) -> bool:
        """Whether to ping this contact now; after True, `end` must follow."""
        if now < self._next.get(contact, 0.0):
            return False
        if self.under_way >= MAX_CONCURRENT_VERIFICATIONS:
            self._counters["strangers_not_asked"] += 1
            return False
        self._next.pop(contact, None)
        self.expire(now)
        self._next[contact] = now + VERIFY_PAUSE_S
        if len(self._next) > MAX_PAUSED:
            del self._next[next(iter(self._next))]
        self.under_way += 1
        return True

    def expire(self, now: float) -> None:
        """Forget the pauses that are over; the oldest is the first, because all are of the same length."""
        while self._next:
            oldest = next(iter(self._next))
            if now < self._next[oldest]:
                return
            del self._next[oldest]
        self._next.clear()  # an empty dictionary keeps the places of all it had

    def end(self) -> None:
        """A verification was answered, or timed out."""
        self.under_way -= 1
