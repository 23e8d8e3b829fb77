"""A node whose script uses an engine of named values: it joins the swarm without a model, and serves the script.

The swarm agrees on a manifest like any other; its layout is empty. There is no step loop, because the script has one.
The node leaves when the script ends, or when it is told to; its values are handed over as shards are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import get_args

import msgspec

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.environment import NodePart
from p2pnode.overlay.supervision import logged, supervised
from p2pnode.training.barriers.predicates import Barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.engines.calls import ScriptCalls
from p2pnode.training.engines.participation import Participation
from p2pnode.training.engines.script_service import EngineService
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.settings import BarrierMethod, BarrierSettings
from p2pnode.training.trainer_link.engine_messages import EngineOpened, EngineReady, TaskCounts
from p2pnode.training.trainer_link.interface import TrainerLeft
from p2pnode.training.trainer_link.messages import derive_start_seed

#: How often a node looks whether a checkpoint is due.
CHECKPOINT_POLL_S = 1.0
#: A node whose script has ended waits so long for the scripts of others that have finished too.
STAY_S = 20.0
#: The engine whose values live at the nodes with `role = "server"` alone.
SERVER_KIND = "server"


@dataclass(eq=False)
class EngineRun(NodePart):
    """`check`, `begin` with the exchange, `serve` once the node has entered it."""

    _service: EngineService | None = None
    _saving: asyncio.Task[None] | None = None
    _part: Participation | None = None

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the script has begun and fewer than `min_nodes` have."""
        return self._part is not None and self._part.waits_for_nodes

    @property
    def tasks(self) -> TaskCounts | None:
        """What the parameter server has done, if this node serves."""
        return None if self._service is None else self._service.tasks

    def check(self, opened: EngineOpened, *, founder: bool) -> bool:
        """Whether the node may own shards in a run of this engine. Raises `UserError` where it cannot take part."""
        owns = self._is_server or opened.kind != SERVER_KIND
        if founder and not owns:
            raise UserError(
                "a worker of a parameter server joins a swarm and founds none: the values are at its servers",
                "start a node with --set node.role=server first, and give its address with --bootstrap HOST:PORT; "
                "with --local N, add --servers 1",
                ExitCode.CONFIGURATION,
            )
        return owns

    @property
    def _is_server(self) -> bool:
        return self.config.node.role == "server"

    def begin(self, exchange: Exchange, gate: BarrierWaiter) -> None:
        """Answer the script from now on."""
        exchange.begin_at(0)  # the values go on, and the script's steps begin anew
        gate.exclude(exchange.view.score.is_quarantined)
        self._part = Participation(self.overlay, gate, self.config.training, self.progress, self.clock, self.log)
        calls = ScriptCalls(self.overlay, self.trainer.send_data, is_server=self._is_server)
        self._service = EngineService(self.trainer, self._part, exchange.values, self.log, calls)

    def ready(self, barrier: Barrier, incarnation: int, checkpoints: CheckpointWriter) -> None:
        """The node has entered the exchange: let the script go on."""
        assert self._part is not None
        node_id = self.overlay.node_id
        seed = derive_start_seed(self.config.training.seed, node_id, incarnation, 1)
        self.trainer.send_data(EngineReady(node_id, seed, barrier.synchronous, self._part.pause_s))
        saving = supervised("engine-checkpoints", lambda: self._keep_saving(checkpoints), logged(self.log))
        self._saving = asyncio.create_task(saving, name="engine-checkpoints")

    async def _keep_saving(self, checkpoints: CheckpointWriter) -> None:
        """Write the named values that this node holds, every `training.checkpoint_s`; until cancelled."""
        while True:
            await asyncio.sleep(CHECKPOINT_POLL_S)
            await checkpoints.write_if_due()

    async def serve(self) -> UserError | None:
        """Serve the script until it ends; what to report if it failed."""
        failure = await self.trainer.ended()
        if self._service is not None:
            self._service.script_gone()
        if self._part is not None:
            # Not all at one moment, where a script of another node takes long.
            longest_s = min(STAY_S, self.config.training.linger_s)
            await self._part.stay(longest_s * self.environment.entropy.random.uniform(0.8, 1.0))
        if isinstance(failure, TrainerLeft):
            return None
        return UserError(f"the script failed: {failure.reason}", failure.hint, ExitCode.TRAINER)

    def release(self) -> None:
        """The node leaves: let the script come to its end."""
        if self._service is not None:
            self._service.release()

    async def stop(self) -> None:
        """End what is under way; idempotent."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        if self._service is not None:
            await self._service.stop()


def barrier_of(settings: BarrierSettings, opened: EngineOpened) -> BarrierSettings:
    """The barrier of a run: that of the settings, unless the script names another. Raises `UserError`."""
    if not opened.method:
        return settings
    methods = get_args(BarrierMethod)
    if opened.method not in methods:
        raise UserError(
            f"the engine's barrier cannot be used: {opened.method!r} is none of {', '.join(methods)}",
            "",
            ExitCode.CONFIGURATION,
        )
    changes = {"method": opened.method, "staleness": opened.staleness, "sample": opened.sample}
    try:
        return msgspec.convert(msgspec.structs.asdict(settings) | changes, BarrierSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"the engine's barrier cannot be used: {error}", "", ExitCode.CONFIGURATION) from error
