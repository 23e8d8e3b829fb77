"""word_count: the words of 50 MB of text by map-reduce, in one process and in two, beside `collections.Counter`.

The text is made of a seed, with word frequencies as in English (Zipf). The ways are timed in turns, with processes that
were started before; the counts must be equal.
"""

from __future__ import annotations

import argparse
import operator
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.record import Outcome, Series
from p2pnode.training.engines.mapreduce.engine import MapReduce

TEXT_BYTES = 50_000_000
WORDS = 50_000
PART_BYTES = 4 << 20
TURNS = 3


def write_text(path: Path, size: int, seed: int = 1) -> None:
    """Lines of 12 words, word number r as frequent as 1/r."""
    chance = np.random.default_rng(seed)
    words = [f"{'aeiou'[number % 5]}{number:x}" for number in range(WORDS)]
    odds = 1.0 / np.arange(1, WORDS + 1)
    odds /= odds.sum()
    written = 0
    with path.open("w") as stream:
        while written < size:
            drawn = chance.choice(WORDS, size=120_000, p=odds)
            block = "\n".join(" ".join(words[number] for number in line) for line in drawn.reshape(-1, 12)) + "\n"
            written += stream.write(block)


def counted(engine: MapReduce, path: Path) -> dict[str, int]:
    """The words by the engine, as examples/word_count.py has them."""
    words = engine.load(path, part_bytes=PART_BYTES).flatmap(str.split)
    return dict(words.map(lambda word: (word, 1)).reduce_by_key(operator.add).collect())


def measure(arguments: argparse.Namespace) -> Outcome:
    seconds: dict[str, list[float]] = {"Counter": [], "one": [], "two": []}
    with tempfile.TemporaryDirectory() as folder, MapReduce(processes=1) as one, MapReduce(processes=2) as two:
        path = Path(folder) / "text.txt"
        write_text(path, TEXT_BYTES)
        for engine in (one, two):
            engine.from_items(range(4), 4).map(str).count()
        for turn in range(arguments.repetitions or TURNS):
            order = ["Counter", "one", "two"]
            random.Random(turn).shuffle(order)
            found: dict[str, dict[str, int]] = {}
            for way in order:
                began = time.perf_counter()
                if way == "Counter":
                    with path.open() as stream:
                        found[way] = dict(Counter(word for line in stream for word in line.split()))
                else:
                    found[way] = counted(one if way == "one" else two, path)
                seconds[way].append(time.perf_counter() - began)
            if found["one"] != found["Counter"] or found["two"] != found["Counter"]:
                raise AssertionError("the counts differ from those of collections.Counter")
    ratios = [one_s / two_s for one_s, two_s in zip(seconds["one"], seconds["two"], strict=True)]
    return Outcome(
        "word_count",
        f"{TEXT_BYTES / 1e6:.0f} MB of text, {WORDS:,} words, parts of {PART_BYTES >> 20} MiB; in turns",
        [
            Series("map-reduce, word count: two processes against one", "x", ratios, "≥ 1.5"),
            Series("map-reduce, word count: seconds on two processes", "s", seconds["two"]),
            Series("map-reduce, word count: seconds on one process", "s", seconds["one"]),
            Series("map-reduce, word count: seconds of collections.Counter", "s", seconds["Counter"]),
        ],
    )
