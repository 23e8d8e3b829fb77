"""A real daemon that can be told to do what none does: `python -m tests.process.harness.odd_daemon --config node.toml`.

Everything is `p2pnode.daemon`, with a trainer that sleeps (`benchmarks.stub_daemon`). SIGUSR1 begins the attack that
`[training.options]` names (`tests.harness.attacks`, `tests.process.harness.head_attacks`), against all others that it
knows. SIGUSR2 overwrites the values of every shard that it owns, in the memory of this process: memory that has failed.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.stub_daemon import SIZE, SleepingTrainer
from p2pnode import daemon
from p2pnode.config.load import load
from p2pnode.lifecycle.node import Node
from tests.harness.attacks.attacker import Attacker
from tests.harness.attacks.member_attacks import ATTACKS
from tests.process.harness.head_attacks import HEAD_ATTACKS
from training.settings import TrainingSettings
from training.trainer_link.interface import Resume, TrainerHello

#: The node of this process.
NODES: list[Node] = []


def this_node() -> Node:
    """The node of this process."""
    return NODES[-1]


class KnownNode(Node):
    """A node that the signals of its process can find."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        NODES.append(self)


class RemoteAttacker(Attacker):
    """What an attack does, over sockets: of the others it knows what every member knows."""

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self.chance = random.Random(name)
        self.shards, self.size = len(node.exchange.store), SIZE
        self.trainer: Any = SimpleNamespace(hang=lambda: None)

    @property
    def host(self) -> Any:
        return SimpleNamespace(living=self._node, trainer=self.trainer)

    @property
    def honest(self) -> list[Any]:
        return [self._seen(peer) for peer in self._node.overlay.members()]

    def _seen(self, peer: Any) -> Any:
        """A host as the attacks of simulated swarms use it."""
        ownership = self._node.exchange.store.ownership
        owned = {shard: known for shard, known in ownership.known_owners.items() if known.owner.node_id == peer.node_id}
        overlay = SimpleNamespace(node_id=peer.node_id, address=peer.contact.address)
        store = SimpleNamespace(owned=owned, ownership=ownership)
        return SimpleNamespace(
            living=SimpleNamespace(
                overlay=overlay,
                progress=SimpleNamespace(step=peer.step),
                incarnation=peer.incarnation,
                exchange=SimpleNamespace(store=store),
            )
        )


class OddTrainer(SleepingTrainer):
    """Installs the two signals when the node starts its trainer."""

    def __init__(self, settings: TrainingSettings, *_: Any, **given: Any) -> None:
        super().__init__(settings, **given)
        self._attack = str(settings.options.get("attack", ""))
        self._assault: asyncio.Task[Any] | None = None

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._begin)
        loop.add_signal_handler(signal.SIGUSR2, break_owned)
        return await super().start(restore, resume=resume)

    def _begin(self) -> None:
        work = (ATTACKS | HEAD_ATTACKS)[self._attack](RemoteAttacker(this_node(), self._attack))
        self._assault = asyncio.ensure_future(work)


def break_owned() -> None:
    """Overwrite the values of this node's shards, as a fault of the memory would."""
    for owned in this_node().exchange.store.owned.values():
        owned.state.value[:] = np.nan


def main(arguments: list[str]) -> int:
    config = load(Path(arguments[arguments.index("--config") + 1]), {}, []).config
    daemon.Node = KnownNode  # type: ignore[misc]
    return daemon.run(config, make_trainer=OddTrainer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
