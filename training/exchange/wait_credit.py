"""How long the steps of a node wait for owners that give no results, though they live. Pure.

An owner may say `retry` or `later` to each attempt, or for ever that it is at work, or move a byte a second. None of it
is a lie: an honest one does the same while its backup is replaced. So nobody is blamed for it. But a step waits for it
only as long as it has credit: `FIRST_S` seconds, of which it earns `EARNED` in each second. A step pays for

* the time in which all shards that it still waits for are put off, as their owners have said in this wait;
* a wait that ended because nothing moved for its whole limit.

An owner without credit is waited for as long as `SPARE_SHARE` of a step, or twice as long as the others took, until it
has earned `AGAIN_S`. Its shards stay in the outbox, or as they were pulled last: what is trained meanwhile is added
later. So all waits for one owner, beyond those spares and the last wait, are at most FIRST_S and a share EARNED of the
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

FIRST_S, EARNED, AGAIN_S = 10.0, 0.05, 5.0
SPARE_SHARE, SPARE_FACTOR = 0.05, 2.0
#: Owners that are remembered; who paid longest ago is forgotten first.
MAX_OWNERS = 256


class WaitCredit:
    """What the steps of one node may wait for each owner; times in monotonic seconds."""

    def __init__(self) -> None:
        #: Seconds left, and when that was so.
        self._left: dict[bytes, tuple[float, float]] = {}
        self._spent: dict[bytes, None] = {}

    def left_s(self, owner: bytes, now_s: float) -> float:
        """What is left to an owner."""
        left, at_s = self._left.get(owner, (FIRST_S, now_s))
        return min(FIRST_S, left + EARNED * (now_s - at_s))

    def pay(self, owner: bytes, seconds: float, now_s: float) -> None:
        """A step has waited for an owner."""
        left = max(-FIRST_S, self.left_s(owner, now_s) - seconds)
        self._left.pop(owner, None)
        self._left[owner] = left, now_s
        if left <= 0.0:
            self._spent[owner] = None
        if len(self._left) > MAX_OWNERS:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._spent.pop(oldest, None)

    def forgive(self, owner: bytes) -> None:
        """It was started again, or is back after it was gone: it has held nobody up yet."""
        self._left.pop(owner, None)
        self._spent.pop(owner, None)

    def is_spent(self, owner: bytes, now_s: float) -> bool:
        """Whether an owner is not waited for now."""
        if owner in self._spent and self.left_s(owner, now_s) >= AGAIN_S:
            del self._spent[owner]
        return owner in self._spent

    @property
    def is_any_spent(self) -> bool:
        """Whether there may be an owner that is not waited for."""
        return bool(self._spent)


class OwnerWait:
    """One wait of a step: who holds it up. `owner_of`: the owner of a shard, empty where none is known, which is waited
    for; `step_s()`: the median step, in seconds."""

    def __init__(
        self, credit: WaitCredit, owner_of: Callable[[int], bytes], began_s: float, step_s: Callable[[], float]
    ) -> None:
        self._credit = credit
        self._owner_of = owner_of
        self._began_s = began_s
        self._step_s = step_s
        self._put_off: dict[int, None] = {}
        #: Since when only shards are awaited that are put off, or whose owners have no credit; None: others are too.
        self._alone_s: float | None = None
        self._looked_s = began_s
        self._paid_s: dict[bytes, float] = {}

    def put_off(self, shards: Collection[int]) -> None:
        """An owner has said that these are to be asked for again."""
        self._put_off |= dict.fromkeys(shards)

    @property
    def look_s(self) -> float:
        """When to look again at the latest."""
        is_close = self._put_off or self._credit.is_any_spent
        return max(0.01, SPARE_SHARE * self._step_s() / 4) if is_close else float("inf")

    def is_over(self, awaited: Collection[int], now_s: float) -> bool:
        """Whether nothing is awaited any more but from owners without credit. Others pay for what they put off."""
        looked_s, self._looked_s = self._looked_s, now_s
        owners = {shard: self._owner_of(shard) for shard in awaited}
        late = [shard for shard, owner in owners.items() if shard in self._put_off or self._has_none(owner, now_s)]
        if not owners or len(late) < len(owners) or b"" in owners.values():
            self._alone_s = None
            return False
        if self._alone_s is None:
            self._alone_s = now_s
        until_s = self._alone_s + max(SPARE_SHARE * self._step_s(), SPARE_FACTOR * (self._alone_s - self._began_s))
        if now_s < until_s:
            return False
        for owner in dict.fromkeys(owners.values()):
            if not self._has_none(owner, now_s):
                self._pay(owner, now_s - max(until_s, looked_s), now_s)
        return all(self._has_none(owner, now_s) for owner in owners.values())

    def ended_silent(self, awaited: Collection[int], limit_s: float, now_s: float) -> None:
        """Nothing of these shards has moved for the limit."""
        for owner in dict.fromkeys(map(self._owner_of, awaited)):
            if owner and not self._has_none(owner, now_s):
                self._pay(owner, max(0.0, limit_s - self._paid_s.get(owner, 0.0)), now_s)

    def _pay(self, owner: bytes, seconds: float, now_s: float) -> None:
        self._paid_s[owner] = self._paid_s.get(owner, 0.0) + seconds
        self._credit.pay(owner, seconds, now_s)

    def _has_none(self, owner: bytes, now_s: float) -> bool:
        return bool(owner) and self._credit.is_spent(owner, now_s)
