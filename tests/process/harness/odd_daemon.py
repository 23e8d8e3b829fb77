"""A real daemon whose memory can be broken: `python -m tests.process.harness.odd_daemon start …` is `p2pnode start …`.

Everything is `p2pnode.daemon`, with a trainer that sleeps (`sleeping_daemon.py`). SIGUSR2 overwrites the values of
every shard that it owns, in the memory of this process.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from typing import Any

import numpy as np

from p2pnode import daemon
from p2pnode.__main__ import main
from p2pnode.lifecycle.node import Node
from p2pnode.training.trainer_link.interface import Resume, TrainerHello
from tests.process.harness.sleeping_daemon import SleepingTrainer

#: The node of this process.
NODES: list[Node] = []


class KnownNode(Node):
    """A node that the signals of its process can find."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        NODES.append(self)


class OddTrainer(SleepingTrainer):
    """Installs the signal when the node starts its trainer."""

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, break_owned)
        return await super().start(restore, resume=resume)


def break_owned() -> None:
    """Overwrite the values of this node's shards, as a fault of the memory would."""
    for owned in NODES[-1].exchange.store.owned.values():
        owned.state.value[:] = np.nan


if __name__ == "__main__":
    daemon.Node = KnownNode
    daemon.run = functools.partial(daemon.run, make_trainer=OddTrainer)
    sys.exit(main())
