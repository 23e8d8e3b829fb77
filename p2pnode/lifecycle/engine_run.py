"""A node whose script uses an engine of named values: it joins the swarm without a model, and serves the script.

The swarm agrees on a manifest like any other; its layout is empty. There is no step loop, because the script has one.
The node leaves when the script ends, or when it is told to; its values are handed over as shards are.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.engine_service import EngineService
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.lifecycle.startup import Startup
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.supervision import logged, supervised
from p2pnode.training.barriers.predicates import Barrier, make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.engines.calls import ScriptCalls
from p2pnode.training.engines.participation import Participation
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.manifest import Manifest
from p2pnode.training.progress import Progress
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.trainer_link.engine_messages import EngineOpened, EngineReady, TaskCounts
from p2pnode.training.trainer_link.interface import Trainer, TrainerHello, TrainerLeft
from p2pnode.training.trainer_link.messages import derive_start_seed

#: How often a node looks whether a checkpoint is due.
CHECKPOINT_POLL_S = 1.0
#: A node whose script has ended waits so long for the scripts of others that have finished too.
STAY_S = 20.0
#: The engine whose values live at the nodes with `role = "server"` alone.
SERVER_KIND = "server"


class EngineParts(NamedTuple):
    """What a node has instead of a step loop."""

    manifest: Manifest
    exchange: Exchange
    barrier: Barrier
    gate: BarrierWaiter
    checkpoints: CheckpointWriter


class EngineRun:
    """Belongs to one node; `join`, then `serve`."""

    def __init__(
        self,
        config: Config,
        environment: NodeEnvironment,
        startup: Startup,
        overlay: Overlay,
        trainer: Trainer,
        progress: Progress,
    ) -> None:
        self._config = config
        self._environment = environment
        self._startup = startup
        self._overlay = overlay
        self._trainer = trainer
        self._progress = progress
        self._service: EngineService | None = None
        self._saving: asyncio.Task[None] | None = None
        self._part: Participation | None = None

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the script has begun and fewer than `min_nodes` have."""
        return self._part is not None and self._part.waits_for_nodes

    @property
    def tasks(self) -> TaskCounts | None:
        """What the parameter server has done, if this node serves."""
        return None if self._service is None else self._service.tasks

    async def join(self, hello: TrainerHello, incarnation: int) -> EngineParts:
        """Agree on the manifest, make the exchange, and enter it. Raises `UserError`."""
        config, environment, overlay = self._config, self._environment, self._overlay
        assert overlay.genesis is not None
        assert hello.engine is not None
        settings = barrier_of(config.barrier, hello.engine)
        barrier = make_barrier(settings)
        if not config.exchange.enabled:
            raise UserError(
                "exchange.enabled is off, and the values of an engine live in the exchange",
                "leave the setting out",
                ExitCode.CONFIGURATION,
            )
        await self._startup.restore_values(hello, self._trainer.vector)
        proposal = self._startup.propose(hello, settings)
        is_server = config.node.role == "server"
        owns = is_server or hello.engine.kind != SERVER_KIND
        if self._startup.founder and not owns:
            raise UserError(
                "a worker of a parameter server joins a swarm and founds none: the values are at its servers",
                "start a node with --set node.role=server first, and give its address with --bootstrap HOST:PORT; "
                "with --local N, add --servers 1",
                ExitCode.CONFIGURATION,
            )
        manifest, source = await self._startup.agree(proposal)
        exchange = await self._startup.make_exchange(manifest, barrier.staleness)
        exchange.begin_at(0)  # the values go on, and the script's steps begin anew
        gate = BarrierWaiter(overlay, barrier, settings, environment.clock)
        gate.exclude(exchange.view.score.is_quarantined)
        part = self._part = Participation(
            overlay, gate, config.training, self._progress, environment.clock, environment.log
        )
        calls = ScriptCalls(overlay, self._trainer.send_data, is_server=is_server)
        self._service = EngineService(self._trainer, part, exchange.values, environment.log, calls)
        await self._startup.enter(exchange, source, owns=owns)
        node_id = overlay.node_id
        seed = derive_start_seed(config.training.seed, node_id, incarnation, 1)
        self._trainer.send_data(EngineReady(node_id, seed, barrier.synchronous, part.pause_s))
        checkpoints = CheckpointWriter(config, exchange, manifest, None, self._progress, environment, on_saved=_ignore)
        saving = supervised("engine-checkpoints", lambda: self._keep_saving(checkpoints), logged(environment.log))
        self._saving = asyncio.create_task(saving, name="engine-checkpoints")
        return EngineParts(manifest, exchange, barrier, gate, checkpoints)

    async def _keep_saving(self, checkpoints: CheckpointWriter) -> None:
        """Write the named values that this node holds, every `training.checkpoint_s`; until cancelled."""
        while True:
            await asyncio.sleep(CHECKPOINT_POLL_S)
            await checkpoints.write_if_due()

    async def serve(self) -> UserError | None:
        """Serve the script until it ends; what to report if it failed."""
        failure = await self._trainer.ended()
        if self._service is not None:
            self._service.script_gone()
        if self._part is not None:
            # Not all at one moment, where a script of another node takes long.
            longest_s = min(STAY_S, self._config.training.linger_s)
            await self._part.stay(longest_s * self._environment.entropy.random.uniform(0.8, 1.0))
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


def _ignore(_: str) -> None:
    """There is no state of a trainer to restart from."""


def barrier_of(settings: BarrierSettings, opened: EngineOpened) -> BarrierSettings:
    """The barrier of a run: that of the settings, unless the script names another. Raises `UserError`."""
    if not opened.method:
        return settings
    changes = {"method": opened.method, "staleness": opened.staleness, "sample": opened.sample}
    try:
        return msgspec.convert(msgspec.structs.asdict(settings) | changes, BarrierSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"the engine's barrier cannot be used: {error}", "", ExitCode.CONFIGURATION) from error
