"""Counts the letters of a text, with the engine that is named; every engine finds the same.

    p2pnode run --local 3 -- python examples/three_engines.py p2p TEXT
    p2pnode run --local 3 --servers 1 -- python examples/three_engines.py server TEXT
    python examples/three_engines.py mapreduce TEXT

The peer-to-peer engine and the parameter server take the same program. Which parts are counted is in the values: a node
that dies takes nothing with it, and a part that is counted twice has the same counts.
"""

import argparse
import operator
import time
from collections import Counter
from pathlib import Path

import p2pnode

PARTS = [f"part {number}" for number in range(12)]


def letters(text, part):
    """The counts of one part of the text."""
    return dict(Counter(text[PARTS.index(part) :: len(PARTS)]))


def by_updates(engine, text, pause_s):
    """All counts, by the four verbs; None at a worker of a parameter server, which has no values."""

    @engine.register_schedule
    def schedule(ctx, workers=None):
        missing = [part for part in PARTS if part not in ctx.keys()]  # noqa: SIM118 - no mapping
        ctx.rng.shuffle(missing)
        if workers is None:  # peer to peer: for this node alone
            return missing[:1]
        return {worker: [part] for worker, part in zip(workers, missing, strict=False)}

    @engine.register_push
    def push(ctx, params):
        time.sleep(pause_s * ctx.rng.random())
        return [(part, letters(text, part)) for part, _ in params]

    @engine.register_stop
    def stop(ctx):
        return set(PARTS) <= set(ctx.keys())

    engine.register_pull("replace")
    engine.start()
    if not getattr(engine, "is_server", True):
        return None
    return sum((Counter(engine.get(part).value) for part in PARTS), Counter())


def by_map_reduce(engine, text):
    """All counts, by transformations of a data set."""
    pairs = engine.from_items(PARTS, 3).flatmap(lambda part: list(letters(text, part).items()))
    return dict(pairs.reduce_by_key(operator.add).collect())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("p2p", "server", "mapreduce"))
    parser.add_argument("text")
    parser.add_argument("--pause", type=float, default=0.0, help="most seconds that a part takes longer")
    arguments = parser.parse_args()
    text = Path(arguments.text).read_text(encoding="utf-8")
    with p2pnode.engine(arguments.engine) as engine:
        mapped = arguments.engine == "mapreduce"
        found = by_map_reduce(engine, text) if mapped else by_updates(engine, text, arguments.pause)
    if found is not None:
        print(" ".join(f"{letter}{count}" for letter, count in sorted(found.items()) if letter.isalpha()))


if __name__ == "__main__":
    main()
