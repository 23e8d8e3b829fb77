"""Rows that several tables hold: an id keeps its row until the last table has released it."""

from __future__ import annotations

from p2pnode.overlay.row_index import RESTING_ROWS, RowIndex
from tests.harness.builders.peers import ids


def test_a_row_is_of_one_id_until_every_table_has_released_it() -> None:
    """A second table gets the row of the first, and the id goes with the last of them; ids are in order of coming."""
    one, two, three = ids(3)
    index = RowIndex()
    assert (index.take(one), index.take(two), index.take(one)) == (0, 1, 0)
    index.release(one)
    assert list(index.rows) == [one, two]
    index.release(one)
    assert (index.take(three), index.take(one)) == (2, 3), "the released row rests"
    assert list(index.rows) == [two, three, one]


def test_rows_rest_before_they_are_used_again_and_those_that_rest_longest_come_first() -> None:
    """Ids that come and go for ever take no more rows than rest and are held."""
    index = RowIndex()
    kept, *others = ids(4 * RESTING_ROWS)
    index.take(kept)
    taken = []
    for each in others:
        taken.append(index.take(each))
        index.release(each)
    assert taken == [1 + number % (RESTING_ROWS + 1) for number in range(len(others))]
    assert index.rows == {kept: 0}
