"""What a seed of a conservation history decides before the first event: size, faults, settings; and its counts."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CODECS
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.robust import Robust
from tests.harness.builders.codec_kinds import KINDS
from tests.harness.swarms.light_network import Links

SHARDS = 4
VALUES = 16
#: Requests at whose moment a node is killed: those that move a shard, or a delta on its way to the backup.
MOMENTS = ("hand_over", "hand_over", "state", "learn", "forward", "query_replicas", "repair", "push")


def delta_of(name: str, incarnation: int, step: int) -> Vector:
    """float32[VALUES], multiples of 1/1024 from a quarter to one: their sums are exact, also of what bfloat16 makes of
    them, and few sets of them have the same sum."""
    chance = random.Random(zlib.crc32(f"{name}/{incarnation}/{step}".encode()))
    return np.array([chance.randrange(2**8, 2**10) / 1024.0 for _ in range(VALUES)], np.float32)


@dataclass
class Plan:
    """What a seed decides before the first event."""

    nodes: int
    workers: int
    synchronous: bool
    train_s: float
    faults: int
    links: Links
    #: With the codec "auto" every node draws another one for each step, as if its line changed all the time.
    settings: ExchangeSettings
    #: The request at whose moment a node is killed, which of those requests, and how much later.
    moment: tuple[str, int, float] | None
    #: Whether a node trains on while its last step is exchanged.
    overlaps: bool
    keeps_states: bool
    switches_off: bool

    @classmethod
    def of(cls, seed: int, nodes: int, robust: Robust) -> Plan:
        chance = random.Random(f"{seed}/plan")
        return cls(
            nodes=nodes,
            workers=max(2, min(nodes // 3, chance.randint(4, 10))),
            synchronous=chance.random() < 0.3,
            train_s=chance.uniform(14.0, 26.0),
            faults=chance.randint(2, 7),
            links=Links(
                loss=chance.choice([0.0, 0.0, 0.01, 0.05]),
                duplicate=chance.choice([0.0, 0.0, 0.02, 0.1]),
                slow=chance.choice([0.0, 0.01, 0.05]),
                torn=chance.choice([0.0, 0.0, 0.03]),
                state_s=chance.choice([0.0, 1.5]),
            ),
            settings=exchange_settings(chance, robust, changes=random.Random(f"{seed}/codec").random() < 0.25),
            moment=(chance.choice(MOMENTS), chance.randint(1, 8), chance.choice([0.0, 0.01, 0.05]))
            if chance.random() < 0.5
            else None,
            overlaps=chance.random() < 0.3,
            keeps_states=chance.random() < 0.5,
            switches_off=chance.random() < 0.25,
        )

    @property
    def is_exact(self) -> bool:
        """Whether sums of deltas are equal to the bit in any order."""
        settings = self.settings
        is_plain = settings.weight == "sum" and settings.outer_lr == 1.0 and not settings.outer_momentum
        return is_plain and settings.codec in ("float32", "bfloat16") and not settings.robust


def exchange_settings(chance: random.Random, robust: Robust, *, changes: bool) -> ExchangeSettings:
    codec = chance.choice([name for name in KINDS for _ in range(2 if CODECS[name].is_whole else 1)])
    pulls = chance.choice(["auto", "auto", *KINDS])
    weight: Literal["sum", "population"] = chance.choice(["sum", "sum", "population"])
    lr, momentum = chance.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.5), (0.5, 0.9)])
    if CODECS[codec].is_partial:
        lr, momentum = 1.0, 0.0
    return ExchangeSettings(
        codec="auto" if changes else codec,
        pull_codec=pulls,
        shards=SHARDS,
        weight=weight,
        outer_lr=lr,
        outer_momentum=momentum,
        robust=robust,
    )


@dataclass
class Tally:
    """The counts of a history."""

    seed: int
    acknowledged: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    taken_over: int = 0
    repaired: int = 0
    taken_back: int = 0
    #: Deltas that a split gave two weights or two forms, so that their share of a sum is known between two bounds.
    ambiguous: int = 0
    refused: int = 0
    #: Identities that states do not list any more.
    forgotten: int = 0
    clipped: int = 0
    #: Shards of replicas that were compared because they follow the same publication.
    followers: int = 0
    #: Longest wait for an acknowledgement or a fresh value: of all, and of those that one fault at most had struck.
    longest_s: float = 0.0
    longest_of_one_s: float = 0.0
    #: The most that a clock of the latter kind may have shown.
    limit_s: float = 0.0
    quiet_s: float = 0.0
    digest: str = ""
