"""One dictionary from ids to rows for several tables of columns, as those of the peers and of the failure detector.

Both hold the same nodes nearly always. A dictionary of two hundred ids takes 9 KB, the columns of one table as much.
A row belongs to an id until every table that has taken it has released it. Then it rests, and is given to another id
when `RESTING_ROWS` others have been released since, so that who still reads it for a moment reads of no other node.
Pure.
"""

from __future__ import annotations

#: Rows of removed ids that are not used again yet.
RESTING_ROWS = 64


class RowIndex:
    """Ids and their rows, in the order in which the ids came."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        #: How many tables hold a row. Its length is the number of rows that there are.
        self._holders = bytearray()
        self._free: list[int] = []  # the one that rests longest first

    def take(self, node_id: bytes) -> int:
        """The row of an id, for one table more. The columns of a table may be shorter than that."""
        row = self.rows.get(node_id)
        if row is None:
            row = self._free.pop(0) if len(self._free) > RESTING_ROWS else self._append_row()
            self.rows[node_id] = row
        self._holders[row] += 1
        return row

    def release(self, node_id: bytes) -> None:
        """One table that has taken the row of this id does not hold it any more."""
        row = self.rows[node_id]
        self._holders[row] -= 1
        if not self._holders[row]:
            del self.rows[node_id]
            self._free.append(row)

    def _append_row(self) -> int:
        self._holders.append(0)
        return len(self._holders) - 1
