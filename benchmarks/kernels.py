"""kernels: nanoseconds of one core per value for each pass of an exchange, compiled and with NumPy alternately.

The functions are those that the daemon calls (`training.encoding.codecs`, `training.shards.state`), on shards of the
size of a model with 25 M parameters. There are 24 shards in turn, so that none is in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training import kernels
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.robust import norm_of
from p2pnode.training.shards.state import ShardState

VALUES = 390_000
SHARDS = 24
REPETITIONS = 9
LOSSY: tuple[CodecName, ...] = ("bfloat16", "int8", "int4", "sparse")
#: One delta in four: three are accumulated, the fourth updates the momentum.
WEIGHT = 0.25
RULE = Rule(0.7, 0.5)


def measure(arguments: argparse.Namespace) -> Outcome:
    compiled = kernels.COMPILED
    if compiled is None:
        raise NotMeasured("there are no compiled kernels here: install again with a C compiler at hand")
    taken: dict[str, dict[str, list[float]]] = {}
    try:
        for _ in range(arguments.repetitions or REPETITIONS):
            for name, library in (("compiled", compiled), ("NumPy", None)):
                kernels.COMPILED = library
                for what, job in _jobs():
                    for number in range(4 * SHARDS):  # allocates momentum and accumulators
                        job(number % SHARDS)
                    began_s = time.perf_counter()
                    for number in range(4 * SHARDS):
                        job(number % SHARDS)
                    seconds = time.perf_counter() - began_s
                    taken.setdefault(what, {}).setdefault(name, []).append(seconds * 1e9 / (4 * SHARDS * VALUES))
    finally:
        kernels.COMPILED = compiled
    return Outcome(
        "kernels",
        f"one thread, {SHARDS} shards of {VALUES} values by turns, weight {WEIGHT:g}, outer rule {RULE.outer_lr:g} / "
        f"{RULE.outer_momentum:g}; float32 deltas are not encoded and are their frame's own memory",
        [
            Series(f"{what}, {name}", "ns per value", values)
            for what, by_name in taken.items()
            for name, values in by_name.items()
        ],
    )


def _jobs() -> Iterator[tuple[str, Callable[[int], object]]]:
    """Each pass with the number of a shard."""
    deltas, residuals, targets = _vectors(1), [np.zeros(VALUES, np.float32) for _ in range(SHARDS)], _vectors(2)
    for codec in LOSSY:
        yield (
            f"a delta is encoded as {codec}, what is rounded off is kept",
            lambda number, codec=codec: codecs.encode_with_feedback(deltas[number], residuals[number], codec),
        )
        encoded = [codecs.encode(delta, codec) for delta in deltas]
        yield (
            f"its owner decodes {codec}",
            lambda number, codec=codec, encoded=encoded: codecs.decode(encoded[number], codec, targets[number]),
        )
    yield "its owner measures its length", lambda number: norm_of(deltas[number])
    states = [ShardState(value, VALUES) for value in _vectors(3)]
    steps = [0] * SHARDS

    def add(number: int) -> None:
        steps[number] += 1
        states[number].apply(DeltaId(b"a" * 20, 0, steps[number]), WEIGHT, deltas[number], RULE)

    yield "and adds it: value, momentum, accumulated delta", add

    def add_plain(number: int) -> None:
        steps[number] += 1
        states[number].apply(DeltaId(b"a" * 20, 0, steps[number]), WEIGHT, deltas[number], RULE, plain=True)

    yield "and adds it, if it is sparse: value alone", add_plain
    yield (
        "a value is encoded as bfloat16 for a pull",
        lambda number: codecs.encode(targets[number], "bfloat16"),
    )


def _vectors(seed: int) -> list[Vector]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(VALUES, np.float32) * np.float32(1e-3) for _ in range(SHARDS)]
