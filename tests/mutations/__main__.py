"""`make mutations`: every deliberate fault must be found by its test.

`make mutations ARGS=client` tries those of the client, `ARGS="--rows"` prints the rows of docs/faults.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.mutations.runner import copy_tree, run
from tests.mutations.table import MUTATIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="part of a fault's text, or the role whose code has it")
    parser.add_argument("--rows", action="store_true", help="print the rows of the table in docs/faults.md")
    arguments = parser.parse_args()
    only = arguments.only
    if arguments.rows:
        print("\n".join(one.row() for one in MUTATIONS))
        return 0
    chosen = [one for one in MUTATIONS if only in one.fault or only == one.part]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="p2pnode-mutations-") as folder:
        copy_tree(Path(folder))
        for verdict in run(Path(folder), chosen):
            alive += verdict.outcome != "killed"
            part, fault = verdict.mutation.part, verdict.mutation.fault
            print(f"{verdict.outcome:9}{verdict.seconds:6.1f} s  {part}: {fault}", flush=True)
            print(f"{'':19}{verdict.detail[:140]}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} faults killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
