"""Input and output of `reproduce`: the request, the rows of its table of verdicts, and CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The verdict on a claim that the runs confirm; the other is "fails".
HOLDS = "holds"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; `within` is None if there is no published value to compare with."""

    figure: str
    what: str
    published: str
    ours: str
    tolerance: str
    within: bool | None


@dataclass(frozen=True, slots=True)
class ReproductionRequest:
    """The figures to make, and where. `on_progress` is called with the name of the stage and the share done."""

    names: Sequence[str]
    folder: Path
    data_dir: Path | None
    processes: int
    on_progress: Callable[[str, float], None]


def order_row(figure: str, text: str, holds: bool) -> Row:
    """A row for a claim about the order of several results; `holds`: whether the runs confirm it."""
    return Row(figure, text, HOLDS, HOLDS if holds else "fails", "order", holds)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a header and rows. Raises `OSError`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
