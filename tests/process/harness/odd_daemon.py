"""A real daemon whose memory can be broken: `python -m tests.process.harness.odd_daemon --config node.toml`.

Everything is `p2pnode.daemon`, with a trainer that sleeps (`sleeping_daemon.py`). SIGUSR2 overwrites the values of
every shard that it owns, in the memory of this process.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from p2pnode import daemon
from p2pnode.config.load import load
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


def main(arguments: list[str]) -> int:
    config = load(Path(arguments[arguments.index("--config") + 1]), {}, []).config
    daemon.Node = KnownNode  # type: ignore[misc]
    return daemon.run(config, make_trainer=OddTrainer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
