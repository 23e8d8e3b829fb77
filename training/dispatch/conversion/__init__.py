"""Turns files into records: text, JSON lines, CSV, and the arrays of IDX and NPZ files.

`sources` finds and opens files and tells their format; `lines`, `tables` and `arrays` convert a family of formats each.
Memory is bounded by one record or a block of rows, whatever the size of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2pnode.training.dispatch.conversion.arrays import idx_records, npz_records
from p2pnode.training.dispatch.conversion.lines import json_records, text_records
from p2pnode.training.dispatch.conversion.sources import BadSource, Source, SourceFormat, format_of
from p2pnode.training.dispatch.conversion.tables import TableFormat, table_records


def common_format(sources: Sequence[Source]) -> SourceFormat:
    """The format that all files have, by their names or first bytes. Raises `BadSource` if they differ or if one does
    not tell."""
    first = format_of(sources[0])
    for source in sources[1:]:
        if (found := format_of(source)) is not first:
            problem = f"it is {found}, and {sources[0].path} is {first}: convert one format at a time"
            raise BadSource(source.path, problem)
    return first


def records_of(sources: Sequence[Source], kind: SourceFormat, written: TableFormat) -> Iterator[bytes]:
    """The records of these files, in their order. Raises `BadSource` while it goes."""
    if kind is SourceFormat.CSV:
        yield from table_records(sources, written)
    elif kind is SourceFormat.IDX:
        yield from idx_records(sources)
    elif kind is SourceFormat.NPZ:
        yield from npz_records(sources)
    else:
        convert = json_records if kind is SourceFormat.JSONL else text_records
        for source in sources:
            yield from convert(source)
