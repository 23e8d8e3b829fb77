"""`p2pnode simulate reproduce`: every figure as PNG and CSV beside the published values, and one table of verdicts.

`progress_figures`, `sequence_figures` and `learning_figures` execute the runs, one process per core, and write the
files. Figures that need the MNIST images are left out if their folder is not given; the table then has a row for that.
"""

from __future__ import annotations

from p2pnode.training.simulation.figures.learning_figures import STUDY_FIGURES, learning_rows
from p2pnode.training.simulation.figures.progress_figures import POINT_FIGURES, progress_rows
from p2pnode.training.simulation.figures.sequence_figures import bound_rows, inconsistency_rows
from p2pnode.training.simulation.figures.tables import ReproductionRequest, Row, write_csv

FIGURES = (*POINT_FIGURES, "inconsistency", "bounds", *STUDY_FIGURES)


def reproduce(request: ReproductionRequest) -> list[Row]:
    """Make the requested figures. Raises `NoMatplotlib`, `BadData`, and `OSError` if a file cannot be written."""
    request.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    rows += progress_rows(request)
    if "inconsistency" in request.names:
        request.on_progress("inconsistency", 0.0)
        rows += inconsistency_rows(request)
    if "bounds" in request.names:
        rows += bound_rows(request)
    rows += learning_rows(request)
    write_csv(
        request.folder / "table.csv",
        ("figure", "what", "published", "ours", "tolerance", "within"),
        [(row.figure, row.what, row.published, row.ours, row.tolerance, row.within) for row in rows],
    )
    return rows
