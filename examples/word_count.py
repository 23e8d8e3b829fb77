"""Counts the words of files, the most frequent first, without the most common ones.

Paths, globs and URLs name files:

    python examples/word_count.py --processes 2 "texts/*.txt"
"""

from __future__ import annotations

import argparse
import operator
import re

import p2pnode

STOP_WORDS = """
a an and are can for in is it of on so that the this to which will with
"""


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="paths, globs or URLs of text files")
    parser.add_argument("--processes", type=int, default=0, help="0: compute in this process")
    parser.add_argument("--address", help="scheduler of a Dask cluster, for example tcp://host:8786")
    parser.add_argument("--top", type=int, default=10)
    arguments = parser.parse_args()

    with p2pnode.engine("mapreduce", processes=arguments.processes, address=arguments.address) as engine:
        stop_words = engine.broadcast(frozenset(STOP_WORDS.split()))
        counts = (
            engine.load(arguments.files)
            .flatmap(lambda line: re.split(r"\W+", line.lower()))
            .filter(lambda word: word and word not in stop_words.value)
            .map(lambda word: (word, 1))
            .reduce_by_key(operator.add)
            .collect()
        )
    for word, count in sorted(counts, key=lambda pair: (-pair[1], pair[0]))[: arguments.top]:
        print(f"{count:8} {word}")


if __name__ == "__main__":
    main()
