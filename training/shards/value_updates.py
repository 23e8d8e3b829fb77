"""Applies updates to a table of values, as its owner does: the batch that comes of them. Pure.

Updates are applied in order. One that cannot be applied is refused with its reason, and the others go on. The results
of the user's `pull` enter by `pulled`; the built-in reducers are computed here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from training.shards.value_batch import MAX_REASON, MAX_TIMESTAMP, KeyResult, KeyUpdate, ValueBatch
from training.shards.value_table import ENTRY_BYTES, ValueTable
from training.values.encoding import MAX_VALUE_BYTES, decode_key, decode_value, encode_value
from training.values.reducers import BUILT_IN, reduced
from training.values.store import EncodedResult

FULL = "the store of its owner is full (exchange.value_bytes)"
TOO_LARGE = f"a value takes at most {MAX_VALUE_BYTES:,} bytes"


def is_built_in(update: KeyUpdate) -> bool:
    """Whether the daemon applies it, and not the user's script."""
    return update.reducer in BUILT_IN


def applied(table: ValueTable, updates: Sequence[KeyUpdate], room_bytes: int, late: Container[int] = ()) -> ValueBatch:
    """The batch of updates by built-in reducers. `room_bytes`: how much larger the table may become; what would take
    more is refused. `late`: places of those that come after others which were made later, as from the other side of a
    split. A value that one of them sets with a timestamp below the present one changes nothing."""
    latest: dict[bytes, KeyResult] = {}
    refused: list[tuple[int, str]] = []
    batch = ValueBatch(table.order + 1, list(updates), [], refused)
    for place, update in enumerate(updates):
        present = latest.get(update.key)
        former = table.entries.get(update.key)
        try:
            newest = present if present is not None else former
            is_late = place in late and update.reducer == "replace"
            if is_late and newest is not None and update.timestamp < newest.timestamp:
                continue
            if update.reducer == "replace":
                result, size = KeyResult(update.key, update.timestamp, None, place), len(update.update)
            else:
                stamp = update.timestamp
                if present is not None:
                    raw, stamp = batch.value_of(present), max(stamp, present.timestamp)
                elif former is not None:
                    raw, stamp = former.value, max(stamp, former.timestamp)
                else:
                    raw = None
                value = None if raw is None else decode_value(raw)
                total = reduced(update.reducer, value, decode_value(update.update))
                encoded = encode_value(decode_key(update.key), total)
                result, size = KeyResult(update.key, stamp, encoded), len(encoded)
        except (TypeError, ValueError) as error:
            refused.append((place, cut(str(error))))
            continue
        before = _size(batch, present) if present is not None else 0 if former is None else len(former.value)
        added = size - before + (len(update.key) + ENTRY_BYTES if present is None and former is None else 0)
        if added > max(0, room_bytes):
            refused.append((place, FULL))
            continue
        room_bytes -= added
        latest[update.key] = result
    batch.results.extend(latest.values())
    return batch


def _size(batch: ValueBatch, result: KeyResult) -> int:
    return len(batch.value_of(result))


def pulled(
    table: ValueTable,
    updates: Sequence[KeyUpdate],
    results: Sequence[EncodedResult],
    failed: Mapping[int, str],
    room_bytes: int,
) -> ValueBatch:
    """The batch of updates that the user's `pull` has combined: its results, the last one of a key, and the updates
    that failed, by their place and with the reason."""
    refused = dict(failed)
    by_key: dict[bytes, list[int]] = {}
    for place, update in enumerate(updates):
        by_key.setdefault(update.key, []).append(place)
    latest: dict[bytes, KeyResult] = {}
    for key, value, timestamp in results:
        former, earlier = table.entries.get(key), latest.get(key)
        before = len(earlier.value or b"") if earlier is not None else 0 if former is None else len(former.value)
        added = len(value) - before + (len(key) + ENTRY_BYTES if former is None and earlier is None else 0)
        if len(value) > MAX_VALUE_BYTES or added > max(0, room_bytes):
            reason = TOO_LARGE if len(value) > MAX_VALUE_BYTES else FULL
            refused |= dict.fromkeys(by_key[key], reason)
            continue
        latest[key] = KeyResult(key, timestamp, value)
        room_bytes -= added
    kept = [result for key, result in latest.items() if any(place not in refused for place in by_key[key])]
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
