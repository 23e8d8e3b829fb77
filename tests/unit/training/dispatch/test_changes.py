"""The entries of the queue's log: what is written is read, an empty one is false, and damage has its clear error."""

from __future__ import annotations

import pytest

from training.dispatch.answers import Registration
from training.dispatch.changes import (
    Changes,
    HeadRow,
    LeaseRow,
    SaveRow,
    StateDamaged,
    TaskRow,
    decode,
    encode,
)

REGISTRATION = Registration(identity=b"i", digest=b"d", tasks=3, chunks_per_task=2, shuffle=True, seed=9)
PARTS = [
    Changes(registration=REGISTRATION),
    Changes(rolled=True),
    Changes(taken=1),
    Changes(rows=[TaskRow(1, 2, 3, 4, 5, 6, 7, 8)]),
    Changes(leases=[LeaseRow(1, b"worker", 2.5, 4)]),
    Changes(returned=[3, 1]),
    Changes(skips=[(1, 0)]),
    Changes(head=HeadRow(2, 1, "done", 0.5, 4)),
    Changes(save=SaveRow(b"holder", 3, 10.0)),
]


def test_nothing_changes_nothing() -> None:
    """An entry without a change is false, so nothing is written."""
    assert not Changes()


@pytest.mark.parametrize("changes", PARTS, ids=range(len(PARTS)))
def test_each_change_alone_makes_an_entry_that_is_read_as_it_was_written(changes: Changes) -> None:
    """Also a head or a save lease with nothing but default values counts."""
    assert changes
    assert decode(encode(changes)) == changes
    assert Changes(head=HeadRow())
    assert Changes(save=SaveRow())


@pytest.mark.parametrize("entry", [b"", b"\xc1", encode(PARTS[3])[:-1], encode(Changes()) + b"\0", b"\x91\xa1x"])
def test_an_entry_that_cannot_be_read_is_damage(entry: bytes) -> None:
    """Empty, cut, with bytes too many, or of another type."""
    with pytest.raises(StateDamaged, match="an entry of the log cannot be read"):
        decode(entry)


def test_an_entry_of_another_format_names_both() -> None:
    """A log of a later program is not guessed at."""
    with pytest.raises(StateDamaged, match="has format 2, this program reads 1"):
        decode(encode(Changes(format=2, taken=1)))
