"""A node: the composition of overlay, exchange, trainer and step loop, and the order of its states.

joining → waiting_for_nodes → training ⇄ waiting → finished → leaving. All access to the outside goes through
`NodeEnvironment`, so the same class runs as a daemon (`p2pnode.daemon`) and, many times over, in the simulated network.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from p2pnode import __version__
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError, code_of_script
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.dispatch import NodeDispatch
from p2pnode.lifecycle.engine_run import EngineRun, barrier_of
from p2pnode.lifecycle.entry import SwarmEntry
from p2pnode.lifecycle.environment import NodeEnvironment, State
from p2pnode.lifecycle.memory_budget import Budget, budget
from p2pnode.lifecycle.model_export import ModelExport
from p2pnode.lifecycle.run_result import RunEnding, RunResult
from p2pnode.lifecycle.shutdown import LAST_PUSH_S, Shutdown
from p2pnode.lifecycle.side_services import SideServices
from p2pnode.lifecycle.startup import Startup
from p2pnode.lifecycle.state_directory import StateDirectory
from p2pnode.overlay.ids import short
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Activity, PeerChange
from p2pnode.overlay.settings import OverlaySettings
from p2pnode.training.barriers.predicates import BarrierNotFound, make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.devices.gpus import SEE_DRIVER
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.goal import End
from p2pnode.training.manifest import Manifest
from p2pnode.training.progress import Progress
from p2pnode.training.sharing.service import DataService
from p2pnode.training.step_loop import StepLoop
from p2pnode.training.supervisor.gpu_monitor import GpuMonitor
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello, TrainerLeft

#: Telling the others how far this node has come with the data that they share.
TELL_DATA_S = 1.0
#: A node may wait for others for hours, so it only polls.
POLL_INTERVAL_S = 0.2


class Node:
    """One node of a swarm. `run` is its whole life; the other methods may be called at any time from the same loop."""

    def __init__(self, config: Config, environment: NodeEnvironment) -> None:
        self.config = config
        self.environment = environment
        self.log = environment.log
        self._directory = StateDirectory(str(config.state_folder), environment)
        self.identity = self._directory.identity
        self.overlay = Overlay(
            identity=self.identity,
            incarnation=self.incarnation,
            boot_id=int.from_bytes(environment.entropy.token(4), "big"),
            settings=OverlaySettings(config.node, config.swarm, version=__version__),
            transport=environment.transport,
            environment=environment,
            gateway=environment.gateway,
            lan=environment.lan,
        )
        try:
            self.barrier = make_barrier(config.barrier)
        except BarrierNotFound as error:
            raise UserError(
                str(error), hint="it needs the form package.module:function", exit_code=ExitCode.CONFIGURATION
            ) from error
        self.gate = BarrierWaiter(self.overlay, self.barrier, config.barrier, environment.clock)
        self.progress = Progress()
        self.trainer = environment.make_trainer(self.identity.node_id, self.incarnation, self.trainer_state_changed)
        self.data = DataService(self.overlay, self.trainer, self.incarnation, environment)
        parts = (config, environment, self.overlay, self.trainer, self.progress)
        self.dispatch = NodeDispatch(*parts, self.data)
        self.exchange: Exchange | None = None
        self.loop: StepLoop | None = None
        self.manifest: Manifest | None = None
        #: What the trainer will take besides its model, as it has estimated.
        self.trainer_bytes: int | None = None
        self._device_bytes = 0
        self.gpus = GpuMonitor({})
        self.phase: State = "joining"
        self.entry = SwarmEntry(*parts, self._directory)
        self.startup = Startup(*parts, self._directory, self.entry)
        self.engine = EngineRun(*parts)
        self._result: RunResult | None = None
        self.beside = SideServices(*parts)
        self._export = ModelExport(*parts)
        self._ending = RunEnding(*parts, self._export)
        self._shutdown = Shutdown(*parts)
        self.checkpoints: CheckpointWriter | None = None
        self._leave_requested = asyncio.Event()
        self._failure: UserError | None = None
        self.overlay.on_change(self._on_change)

    # -- queries and requests -----------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self._directory.incarnation

    @property
    def state(self) -> State:
        """The state shown in `/status`."""
        if self.phase != "training":
            return self.phase
        if self.engine.waits_for_nodes:
            return "waiting_for_nodes"
        if self.progress.stalled:
            return "stalled"
        if self.progress.paused:
            return "paused"
        return "waiting" if self.gate.waiting is not None and not self.progress.is_training else "training"

    @property
    def exit_code(self) -> int:
        """The daemon's exit code after `run` has returned: 0, or what became of the script."""
        end = self._shutdown.trainer_end
        return code_of_script(end.exit_code, cut_short=end.cut_short)

    def nodes_ready(self) -> int:
        """Nodes that are ready, train or have finished, this one included.

        One that has nothing left to train, as after a restart, would otherwise keep the others waiting.
        """
        ready = (Activity.READY, Activity.TRAINING, Activity.FINISHED)
        return 1 + sum(peer.activity in ready for peer in self.overlay.members())

    @property
    def result(self) -> RunResult | None:
        """What came of the run, once it has ended and the model is written."""
        if self._result is None or self.loop is None:
            return None
        self.loop.take_measured()  # a script may evaluate once more after the end
        return replace(self._result, best=self.loop.best.best(), first_step=self.loop.first_step)

    def _note_gpu(self, device: str, reason: str) -> None:
        self.log.error("gpu_error", device=device, reason=reason, hint=SEE_DRIVER)

    def budget(self) -> Budget | None:
        """Memory of this daemon among as many nodes as there are; None before the model is known."""
        if self.manifest is None:
            return None
        return budget(
            self.manifest.layout.total,
            self.startup.settings_of(self.manifest),
            self.overlay.population().estimate,
            checkpoints=self.config.training.checkpoint_s > 0.0,
            base_on_device=self._device_bytes > 0,
        )

    def leave(self) -> None:
        """Ask the node to leave the swarm and end."""
        self._leave_requested.set()

    def pause(self) -> None:
        if self.loop is None:
            self.progress.paused = True
        else:
            self.loop.pause()

    def resume(self) -> None:
        if self.loop is None:
            self.progress.paused = False
        else:
            self.loop.resume()

    def trainer_state_changed(self, state: str) -> None:
        """Callback of the trainer's supervisor."""
        if self.loop is not None and state in ("hung", "running"):
            self.loop.set_stalled(state == "hung")

    def _on_change(self, change: PeerChange) -> None:
        """Stop on proof of a second process with this identity: the two would undo each other's steps."""
        if change.kind == "twin" and self._failure is None:
            self._failure = UserError(
                f"this node's identity {short(self.identity.node_id)} is in use elsewhere: {change.reason}",
                hint="a state directory is for one machine; where this one is a copy, remove identity.key and "
                f"incarnation from {self.config.state_folder} and start again: it will be a node of its own",
                exit_code=ExitCode.IDENTITY_IN_USE,
            )
            self._leave_requested.set()

    # -- the course of a run ------------------------------------------------------------------------------------

    async def run(self) -> End:
        """Join or found, train, leave. Raises `UserError` for what the user can fix."""
        self.overlay.set_willing(False)  # until the exchange is ready
        await self.overlay.start()
        await self.data.start()
        is_master = self.config.node.role == "master"
        training = asyncio.create_task(self._serve() if is_master else self._run_training(), name="training")
        leaving = asyncio.create_task(self._leave_requested.wait(), name="leave-request")
        try:
            await asyncio.wait([training, leaving], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                if error := training.exception():
                    # A duplicate identity explains a refusal better than the refusal itself.
                    raise self._failure or error
                end = training.result()
            else:
                end = "leave"
                if self.loop is not None:
                    await self.loop.finish_push(LAST_PUSH_S)
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
            await self._leave()
            if self._failure is not None:
                raise self._failure
            return end
        except BaseException:
            self.phase = "failed"
            raise
        finally:
            for task in (training, leaving):
                task.cancel()
            await asyncio.gather(training, leaving, return_exceptions=True)
            await self._close()
            await self.entry.keep_founded()

    async def _run_training(self) -> End:
        try:
            hello = await self.startup.begin()
        except TrainerLeft:
            return "script"  # it needed no model, as with map-reduce
        exchange = await self._join(hello)
        if self.loop is None:
            return await self._serve_engine()
        loop = self.loop
        await self._wait_for_nodes()
        self.phase = "training"
        try:
            end = await loop.run(self.progress.step, self._after_step)
        except TrainerFailed as error:
            # The trainer will not restart, but the shards are intact: hand them over before the error is reported.
            errors = "".join(f"; the driver reports of {name}: {one.error}" for name, one in self.gpus.errors())
            self._failure = UserError(f"the trainer gave up: {error.reason}{errors}", error.hint, ExitCode.TRAINER)
            return "trainer_failed"
        self.phase = "finished"
        await asyncio.gather(self.data.leave(TELL_DATA_S), self.dispatch.leave(TELL_DATA_S))
        self._failure = self.dispatch.failure() if end == "passes" else None
        if end == "until":
            await self.beside.announce_goal(self.progress.step)
        await self._finish(end, exchange)
        return end

    async def _serve_engine(self) -> End:
        """A script with an engine of named values has its own loop."""
        assert self.checkpoints is not None
        self.engine.ready(self.barrier, self.incarnation, self.checkpoints)
        self.phase = "training"
        self._failure = await self.engine.serve()
        return "script" if self._failure is None else "trainer_failed"

    async def _serve(self) -> End:
        """The life of a master that trains nothing: until its job has ended and nobody trains, or it is to leave."""
        await self.entry.connect()
        assert self.overlay.genesis is not None
        await self.entry.remember_swarm()
        # No barrier, hand-over or finishing node waits for a node that is paused.
        self.overlay.announce(activity=Activity.PAUSED)
        self.dispatch.enter(self.overlay.genesis)
        self.phase = "serving"
        quiet_since: float | None = None
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = self.environment.clock.monotonic()
            stay_s = self.dispatch.stay_s()
            quiet_since = None if stay_s is None else quiet_since or now
            if stay_s is not None and quiet_since is not None and now - quiet_since >= stay_s:
                self.phase = "finished"
                return "passes"

    async def _finish(self, end: End, exchange: Exchange) -> None:
        assert self.manifest is not None
        assert self.checkpoints is not None
        layout = self.manifest.layout
        # A script has ended when the others have finished, and describes its model no more.
        is_there = self.trainer.is_script and end != "script"
        description = await self._export.describe_last() if is_there else None

        async def conclude(left: int) -> None:
            vector = self.trainer.vector
            self._result = await self._ending.conclude(end, exchange, layout, vector, left, description)

        await self._shutdown.finish(exchange, self.checkpoints, end, conclude)

    async def _after_step(self) -> None:
        assert self.checkpoints is not None
        assert self.loop is not None
        await self._export.describe_if_due()
        await self.checkpoints.write_if_due(self.loop.counted)

    async def _join(self, hello: TrainerHello) -> Exchange:
        """Agree on the manifest, build the exchange and what uses it, and get the vector."""
        assert self.overlay.genesis is not None
        config, environment, engine = self.config, self.environment, hello.engine
        settings, owns = config.barrier, True
        if engine is not None:
            settings = barrier_of(settings, engine)
            self.barrier = make_barrier(settings)
            self.gate = BarrierWaiter(self.overlay, self.barrier, settings, environment.clock)
            owns = self.engine.check(engine, founder=self.entry.founder)
            await self.startup.restore_values(hello, self.trainer.vector)
        self.manifest = self.startup.propose(hello, settings)
        self.trainer_bytes, self._device_bytes = hello.host_bytes, hello.device_bytes
        loop = asyncio.get_running_loop()
        self.gpus = GpuMonitor(hello.gpus, lambda *error: loop.call_soon_threadsafe(self._note_gpu, *error))
        self.gpus.start()
        manifest, source = await self.startup.agree(self.manifest)
        self.manifest = manifest
        self.startup.check_memory(manifest, hello)
        self.exchange = exchange = await self.startup.make_exchange(manifest, self.barrier.staleness)
        self.checkpoints = CheckpointWriter(
            config,
            exchange,
            manifest,
            self.trainer if engine is None else None,
            self.progress,
            environment,
            on_saved=self._restart_from,
            trainer_state=self.startup.trainer_state,
        )
        if engine is None:
            self._make_loop(exchange)
        else:
            self.engine.begin(exchange, self.gate)
        await self.startup.enter(exchange, source, owns=owns)
        return exchange

    def _make_loop(self, exchange: Exchange) -> None:
        assert self.overlay.genesis is not None
        self.loop = loop = StepLoop(
            swarm=self.overlay,
            exchange=exchange,
            trainer=self.trainer,
            waiter=self.gate,
            training=self.config.training,
            settings=self.config.exchange,
            environment=self.environment,
            progress=self.progress,
        )
        loop.restart_from(self.startup.trainer_file)
        if self.dispatch.records is not None:
            loop.follow(self.dispatch.records)
        self.dispatch.enter(self.overlay.genesis)
        if self.progress.paused:
            loop.pause()
        self.beside.start(self.overlay.genesis, loop, exchange.manifest.layout)

    def _restart_from(self, file: str) -> None:
        """The trainer's own state is in this file."""
        if self.loop is not None:
            self.loop.restart_from(file)

    async def _wait_for_nodes(self) -> None:
        self.overlay.announce(activity=Activity.READY, step=self.progress.step)
        needed = self.config.training.min_nodes
        if self.nodes_ready() < needed:
            self.phase = "waiting_for_nodes"
            self.log.info("waiting_for_nodes", have=self.nodes_ready(), need=needed)
        while self.nodes_ready() < needed:  # noqa: ASYNC110 - it follows from heartbeats, which set no event
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _leave(self) -> None:
        self.phase = "leaving"
        self.engine.release()
        await asyncio.gather(
            self.data.leave(TELL_DATA_S),
            self.dispatch.leave(TELL_DATA_S),
            self._shutdown.leave(self.exchange, self.checkpoints),
        )

    async def _close(self) -> None:
        if self.checkpoints is not None:
            await self.checkpoints.stop()
        for part in (self.engine, self.data, self.dispatch, self.beside):
            await part.stop()
        if self.exchange is not None:
            await self.exchange.stop()
        await self.trainer.stop()
        await self.overlay.stop()
