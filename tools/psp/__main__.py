"""`python -m tools.psp`: every published figure as PNG and CSV beside the published values, and a table of verdicts.

`progress_figures`, `sequence_figures` and `learning_figures` execute the runs, one process per core, and write the
files. Figures that need the MNIST images are left out if their folder is not given; the table then has a row for that.
The exit code is 0 when every value is within its tolerance and every order holds, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Set before NumPy is loaded, here and in the processes: on small matrices a second thread only waits.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from p2pnode.terminal.lines import columns
from tools.psp.learning_figures import NEED_IMAGES, STUDY_FIGURES, learning_rows
from tools.psp.progress_figures import POINT_FIGURES, progress_rows
from tools.psp.sequence_figures import bound_rows, inconsistency_rows
from tools.psp.tables import ReproductionRequest, Row, write_csv

FIGURES = (*POINT_FIGURES, "inconsistency", "bounds", *STUDY_FIGURES)


def reproduce(request: ReproductionRequest) -> list[Row]:
    """Make the requested figures. Raises `NoMatplotlib`, `BadData`, and `OSError` if a file cannot be written."""
    request.folder.mkdir(parents=True, exist_ok=True)
    rows = progress_rows(request)
    if "inconsistency" in request.names:
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


def main(arguments: Sequence[str]) -> int:
    """Parse the arguments, make the figures, and print the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.psp", description="Make the published figures of PSP again.")
    parser.add_argument("names", nargs="+", choices=(*FIGURES, "all"), metavar="all|FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the PNG and CSV files")
    parser.add_argument("--data-dir", type=Path, help=f"folder with the MNIST files, for {' and '.join(NEED_IMAGES)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    names = FIGURES if "all" in options.names else options.names
    began = time.monotonic()
    show = lambda what, share: print(f"\r{what}: {share:.0%} ", end="", file=sys.stderr)  # noqa: E731
    rows = reproduce(ReproductionRequest(names, options.out, options.data_dir, options.processes, show))
    verdict = {True: "within", False: "NOT WITHIN", None: ""}
    cells = [(row.figure, row.what, row.published, row.ours, row.tolerance, verdict[row.within]) for row in rows]
    print("\r" + columns(("figure", "what", "published", "ours", "tolerance", "verdict"), cells))
    judged, missed = (sum(row.within in which for row in rows) for which in ((True, False), (False,)))
    seconds = time.monotonic() - began
    print(f"{judged - missed} of {judged} within tolerance; {seconds:.0f} s; files in {options.out}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
