"""`python -m tests.harness.attacks` plays every attack of one member and prints the table; `--only NAME` plays one."""

from __future__ import annotations

import argparse

from tests.harness.attacks.member_attacks import ATTACKS, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(ATTACKS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", default="pbsp")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("N", "OF"), help="Every OF-th attack.")
    chosen = parser.parse_args()
    print("| attack | harmless after | rate of the others | lasting | deltas left out | after a restart |")
    print("|---|---|---|---|---|---|")
    first, every = chosen.part
    for name in [chosen.only] if chosen.only else list(ATTACKS)[first::every]:
        try:
            print(play(name, seed=chosen.seed, method=chosen.method).markdown(), flush=True)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | | | |", flush=True)


if __name__ == "__main__":
    main()
