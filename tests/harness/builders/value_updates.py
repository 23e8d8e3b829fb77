"""Updates of named values, and the batches of an owner that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from p2pnode.training.shards.value_batch import KeyUpdate, ValueBatch
from p2pnode.training.shards.value_table import ValueTable
from p2pnode.training.shards.value_updates import applied
from p2pnode.training.values.encoding import decode_value, encode_key, encode_value

NODE, OTHER = b"n" * 20, b"o" * 20
ROOM = 1 << 30

#: Key, value, reducer and timestamp of some updates.
UPDATES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-5, 5), st.sampled_from(["add", "replace"]), st.integers(0, 9)),
    max_size=24,
)


def update(
    number: int, key: str = "k", value: Any = 1, reducer: Any = "add", stamp: int = 0, node: bytes = NODE
) -> KeyUpdate:
    return KeyUpdate(node, 1, number, encode_key(key), reducer, encode_value(key, value), stamp)


def value_of(table: ValueTable, key: str) -> tuple[Any, int]:
    entry = table.entries[encode_key(key)]
    return decode_value(entry.value), entry.timestamp


def batches_of(rows: Sequence[tuple[str, int, str, int]], cut: int) -> tuple[ValueTable, list[ValueBatch]]:
    """The table of an owner that applies these updates, `cut` at a time, and the batches."""
    table, batches = ValueTable(), []
    updates = [update(number, key, value, reducer, stamp) for number, (key, value, reducer, stamp) in enumerate(rows)]
    for first in range(0, len(updates), cut):
        batches.append(applied(table, updates[first : first + cut], ROOM))
        table.apply(batches[-1])
    return table, batches
