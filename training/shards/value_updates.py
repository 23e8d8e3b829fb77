"""Applies updates to a table of values, as its owner does: the batch that comes of them. Pure.

Updates are applied in order. One that cannot be applied is refused with its reason, and the others go on. The results
of the user's `pull` enter by `pulled`; the built-in reducers are computed here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from p2pnode.training.shards.value_batch import MAX_REASON, MAX_TIMESTAMP, KeyResult, KeyUpdate, ValueBatch
from p2pnode.training.shards.value_table import ENTRY_BYTES, ValueTable
from p2pnode.training.values.encoding import MAX_VALUE_BYTES, decode_key, decode_value, encode_value
from p2pnode.training.values.reducers import BUILT_IN, reduced
from p2pnode.training.values.store import EncodedResult, EncodedValue

FULL = "the store of its owner is full"
TOO_LARGE = f"a value takes at most {MAX_VALUE_BYTES:,} bytes"


def is_built_in(update: KeyUpdate) -> bool:
    """Whether the daemon applies it, and not the user's script."""
    return update.reducer in BUILT_IN


class _Results:
    """The results of a batch, as far as there is room: `room_bytes` is how much larger the table may become."""

    def __init__(self, table: ValueTable, updates: Sequence[KeyUpdate], room_bytes: int) -> None:
        self._entries = table.entries
        self._updates = updates
        self._room_bytes = room_bytes
        self.latest: dict[bytes, KeyResult] = {}

    def present(self, key: bytes) -> EncodedValue | None:
        """The value of a key after the results so far."""
        if (result := self.latest.get(key)) is not None:
            return self._value(result), result.timestamp
        entry = self._entries.get(key)
        return None if entry is None else (entry.value, entry.timestamp)

    def _value(self, result: KeyResult) -> bytes:
        return self._updates[result.place].update if result.value is None else result.value

    def add(self, result: KeyResult) -> str:
        """Take a result in place of the present one of its key; returns why not, or the empty text."""
        former = self.present(result.key)
        added = len(self._value(result)) - len(former[0] if former is not None else b"")
        added += 0 if former is not None else len(result.key) + ENTRY_BYTES
        if added > max(0, self._room_bytes):
            return FULL
        self._room_bytes -= added
        self.latest[result.key] = result
        return ""


def applied(table: ValueTable, updates: Sequence[KeyUpdate], room_bytes: int, late: Container[int] = ()) -> ValueBatch:
    """The batch of updates by built-in reducers. `room_bytes`: how much larger the table may become; what would take
    more is refused. `late`: places of those that come after others which were made later, as from the other side of a
    split. A value that one of them sets with a timestamp below the present one changes nothing."""
    results = _Results(table, updates, room_bytes)
    refused: list[tuple[int, str]] = []
    for place, update in enumerate(updates):
        former = results.present(update.key)
        if update.reducer == "replace":
            if place in late and former is not None and update.timestamp < former[1]:
                continue
            reason = results.add(KeyResult(update.key, update.timestamp, None, place))
        else:
            reason = _added(results, former, update)
        if reason:
            refused.append((place, reason))
    return ValueBatch(table.order + 1, list(updates), list(results.latest.values()), refused)


def _added(results: _Results, former: EncodedValue | None, update: KeyUpdate) -> str:
    """Reduce one update; returns why it is refused, or the empty text. No fault of one update may hold up the others:
    it would come again with each round."""
    try:
        value = None if former is None else decode_value(former[0])
        total = reduced(update.reducer, value, decode_value(update.update))
        encoded = encode_value(decode_key(update.key), total)
    except Exception as error:
        return cut(str(error) or repr(error))
    stamp = update.timestamp if former is None else max(update.timestamp, former[1])
    return results.add(KeyResult(update.key, stamp, encoded))


def pulled(
    table: ValueTable,
    updates: Sequence[KeyUpdate],
    results: Sequence[EncodedResult],
    failed: Mapping[int, str],
    room_bytes: int,
) -> ValueBatch:
    """The batch of updates that the user's `pull` has combined: its results, the last one of a key, and the updates
    that failed, by their place and with the reason."""
    taken, refused = _Results(table, updates, room_bytes), dict(failed)
    by_key: dict[bytes, list[int]] = {}
    for place, update in enumerate(updates):
        by_key.setdefault(update.key, []).append(place)
    for key, value, timestamp in results:
        reason = TOO_LARGE if len(value) > MAX_VALUE_BYTES else taken.add(KeyResult(key, timestamp, value))
        if reason:
            refused |= dict.fromkeys(by_key[key], reason)
    kept = [one for one in taken.latest.values() if any(place not in refused for place in by_key[one.key])]
    return ValueBatch(table.order + 1, list(updates), kept, sorted(refused.items()))


def wrong_result(updates: Sequence[KeyUpdate], results: Sequence[EncodedResult]) -> str:
    """Why the results of a `pull` cannot be used at all; empty: they can. One is of a key that the batch does not have,
    or is no value, or has no timestamp."""
    keys = {update.key: None for update in updates}
    for key, value, timestamp in results:
        if key not in keys:
            return cut(f"pull returned a value for {key[1:]!r}, of which its batch has no update")
        if not isinstance(value, bytes) or not value:
            return cut(f"pull returned no encoded value for {key[1:]!r}")
        if (wrong := wrong_timestamp(timestamp)) != "":
            return cut(f"pull returned for {key[1:]!r} {wrong}")
    return ""


def wrong_timestamp(timestamp: object) -> str:
    """Why a timestamp cannot be sent; empty: it can."""
    if isinstance(timestamp, int) and -MAX_TIMESTAMP <= timestamp < MAX_TIMESTAMP:
        return ""
    return f"the timestamp {timestamp!r:.50}: it takes a whole number below 2**62"


def cut(reason: str) -> str:
    """A reason, short enough for an answer."""
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
