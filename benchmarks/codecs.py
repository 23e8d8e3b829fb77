"""codecs: the loss of accuracy from lossy codecs of deltas, against exact deltas, on MNIST with four nodes.

The simulated swarm of `benchmarks.outer_rule` runs once per codec with the same seeds, hence the same batches, step
times and arithmetic. Bytes are those of a delta on the wire.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

import msgspec
import torch

from benchmarks.outer_rule import BATCH_SIZE, CHECKPOINTS, SEEDS, Curve, Study, default_rule, differences
from benchmarks.record import Outcome, Series
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import CodecName
from p2pnode.training.settings import ExchangeSettings

NODES = 4
LOSSY: tuple[CodecName, ...] = tuple(name for name in get_args(CodecName) if name != "float32")
#: Values of a vector large enough for a share of bytes.
MANY_VALUES = 1 << 20


def measure(arguments: argparse.Namespace) -> Outcome:
    """One figure per lossy codec: its accuracy minus that of float32, in points, where it is worst."""
    torch.set_num_threads(1)
    seeds = range(arguments.repetitions or SEEDS)
    curves = {name: _curves(arguments, name, seeds) for name in get_args(CodecName)}
    series = [
        Series(
            f"accuracy with {name} deltas minus float32's, {_share(name):.3g} of the bytes",
            "points",
            differences(curves[name], curves["float32"]),
            aim="≥ -1",
            details={name: curves[name], "float32": curves["float32"]},
        )
        for name in LOSSY
    ]
    rule = default_rule()
    conditions = (
        f"MNIST, {NODES} nodes, AdamW 1e-3, batch {BATCH_SIZE}, asp, outer rule {rule.outer_lr:g} / "
        f"{rule.outer_momentum:g}, sparse deltas as they are, error feedback; per seed the worst of the steps "
        f"{', '.join(str(step) for step in CHECKPOINTS)}, all 10,000 test images"
    )
    return Outcome("codecs", conditions, series)


def _curves(arguments: argparse.Namespace, codec: CodecName, seeds: Sequence[int]) -> list[Curve]:
    settings = msgspec.structs.replace(ExchangeSettings(), codec=codec)
    study = Study(arguments.network, arguments.data_dir, arguments.device, settings)
    return [study.swarm(NODES, seed, default_rule()) for seed in seeds]


def _share(codec: CodecName) -> float:
    return codecs.max_bytes(codec, MANY_VALUES, codecs.SPARSE_VALUES) / codecs.size_bytes("float32", MANY_VALUES)
