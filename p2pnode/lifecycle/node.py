"""A node: the composition of overlay, exchange, trainer and step loop, and its way through life.

joining → waiting_for_nodes → training ⇄ waiting → finished → leaving. Everything that touches the world comes in as a
door, so the same class runs as a daemon (`p2pnode.daemon`) and, hundreds of times, in the simulated network.
"""

from __future__ import annotations

import asyncio

from overlay.identity import UnreadableIdentity, keep_incarnation, load_identity, next_incarnation
from overlay.ids import short
from overlay.overlay import NotThisSwarm, Overlay
from overlay.peers import Activity, Contact, PeerChange
from overlay.transport import TransportError
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from p2pnode.lifecycle.checkpoints import CheckpointWriter
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.lifecycle.state import State
from training import checkpoint, manifest_check
from training.barriers.predicates import BarrierNotFound, make_barrier
from training.barriers.waiter import BarrierWaiter
from training.budget import Budget, budget
from training.checkpoint import CheckpointState
from training.exchange.exchange import Exchange
from training.goal import End
from training.manifest import Manifest, propose
from training.manifest_check import ManifestRefused
from training.progress import Progress
from training.step_loop import StepLoop
from training.trainer_link.interface import TrainerFailed, TrainerHello

#: A founder that restarts looks for its swarm among remembered peers this long before it opens the swarm again.
SETTLE_S = 5.0
#: Leaving: everything together stays under the five seconds that people wait.
LAST_PUSH_S = 1.0
HAND_OVER_S = 2.0
LAST_SAVE_S = 1.0
DRAIN_S = 0.5
#: A swarm that was switched off comes together again: its founder waits this long for those it remembers before it
#: goes on from what there is. Machines of one room start within it; who comes later with more is heard all the same.
RESUME_WAIT_S = 15.0
#: A node that has just been started takes nothing over for this long, or until it has the vector.
HOLD_BACK_S = 2 * RESUME_WAIT_S
#: How often a node looks whether enough others are ready, for hours perhaps; and whether the others have finished.
WAITING_LOOK_S, LINGER_LOOK_S = 0.2, 0.05
MANIFEST_RETRY_S = 0.2
GENESIS_FILE = "genesis"


class Node:
    """One node of a swarm. `run` lives its whole life; the other calls may come at any time from the same loop."""

    def __init__(self, config: Config, environment: NodeEnvironment) -> None:
        self.config = config
        self.environment = environment
        self.log = environment.log
        try:
            self.identity = load_identity(environment.disk, environment.entropy)
            self.incarnation = next_incarnation(environment.disk)
            self._stored_genesis = environment.disk.read(GENESIS_FILE)
        except (UnreadableIdentity, OSError) as error:
            raise state_directory_unusable(config.node.state_dir, error) from error
        self.overlay = Overlay(
            identity=self.identity,
            incarnation=self.incarnation,
            boot=int.from_bytes(environment.entropy.token(4), "big"),
            node=config.node,
            swarm=config.swarm,
            liveness=config.liveness,
            transport=environment.transport,
            clock=environment.clock,
            entropy=environment.entropy,
            disk=environment.disk,
            log=environment.log,
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
        self.trainer = environment.make_trainer(self.identity.node_id, self.trainer_state_changed)
        self.exchange: Exchange | None = None
        self.loop: StepLoop | None = None
        self.manifest: Manifest | None = None
        self.phase: State = "joining"
        self.founder = False
        #: The founder of a swarm that nobody else of keeps alive: it goes on from what its nodes have on disk.
        self.resumes = False
        self._leave = asyncio.Event()
        self._finished = asyncio.Event()
        self.saving: CheckpointWriter | None = None
        self._restored: CheckpointState | None = None
        self._failure: UserError | None = None
        self.overlay.on_change(self._on_change)

    # -- what can be asked of a node ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the node to leave the swarm and end."""
        self._leave.set()

    def pause(self) -> None:
        if self.loop is not None:
            self.loop.pause()
        self.progress.paused = True

    def resume(self) -> None:
        if self.loop is not None:
            self.loop.resume()
        self.progress.paused = False

    def trainer_state_changed(self, state: str) -> None:
        """Told by the trainer's supervision."""
        if self.loop is not None and state in ("hung", "running"):
            self.loop.set_stalled(state == "hung")

    @property
    def state(self) -> State:
        """The word shown in `/status`."""
        if self.phase != "training":
            return self.phase
        if self.progress.stalled:
            return "stalled"
        if self.progress.paused:
            return "paused"
        return "waiting" if self.gate.waiting is not None else "training"

    def _on_change(self, change: PeerChange) -> None:
        """Two processes of one identity would undo each other's steps: whoever learns of it, with proof, stops."""
        if change.kind == "twin" and self._failure is None:
            self._failure = UserError(
                f"this node's identity {short(self.identity.node_id)} is in use elsewhere: {change.reason}",
                hint="a state directory is for one machine; where this one is a copy, remove identity.key and "
                f"incarnation from {self.config.node.state_dir} and start again: it will be a node of its own",
                exit_code=ExitCode.IDENTITY_IN_USE,
            )
            self._leave.set()

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> End:
        """Join or found, train, leave. Raises `UserError` for what the user must mend."""
        self.overlay.set_willing(False)  # until the exchange stands
        await self.overlay.start()
        living = asyncio.create_task(self._live(), name="life")
        leaving = asyncio.create_task(self._leave.wait(), name="leave-request")
        try:
            await asyncio.wait([living, leaving], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                end = living.result()
            else:
                end = "leave"
                if self.loop is not None:
                    await self.loop.finish_push(LAST_PUSH_S)
                living.cancel()
                await asyncio.gather(living, return_exceptions=True)
            await self._depart()
            if self._failure is not None:
                raise self._failure
            return end
        except BaseException:
            self.phase = "failed"
            raise
        finally:
            for task in (living, leaving):
                task.cancel()
            await asyncio.gather(living, leaving, return_exceptions=True)
            await self._close()

    async def _live(self) -> End:
        connecting = asyncio.create_task(self._connect(), name="connect")
        starting = asyncio.create_task(self._start_trainer(), name="start-trainer")
        try:
            # Whichever fails first is told at once: a wrong bootstrap need not wait for torch to be imported.
            await asyncio.wait([connecting, starting], return_when=asyncio.FIRST_EXCEPTION)
            for task in (connecting, starting):
                if task.done():
                    task.result()
            await connecting
            hello = await starting
        finally:
            for task in (connecting, starting):
                task.cancel()
            await asyncio.gather(connecting, starting, return_exceptions=True)
        await self._enter(hello)
        await self._wait_for_nodes()
        self.phase = "training"
        assert self.loop is not None
        assert self.saving is not None
        try:
            end = await self.loop.run(self.progress.step, self.saving.when_due)
        except TrainerFailed as error:
            # The trainer will not come back, but the shards are in good order: hand them over before saying so.
            self._failure = UserError(f"the trainer gave up: {error.reason}", error.hint, ExitCode.TRAINER)
            return "trainer_failed"
        await self._finish()
        return end

    async def _start_trainer(self) -> TrainerHello:
        restore = ""
        try:
            found = checkpoint.newest(self.environment.disk, self.log)
            if found is not None and self.environment.state_path is not None:
                file = self.environment.state_path / checkpoint.folder_of(found.step) / "trainer.state"
                restore = str(file) if file.exists() else ""
            hello = await self.trainer.start(restore)
        except TrainerFailed as error:
            raise UserError(
                f"the trainer cannot start: {error.reason}", hint=error.hint, exit_code=ExitCode.TRAINER
            ) from error
        if found is not None:
            self._restore(found, hello)
        return hello

    def _restore(self, found: CheckpointState, hello: TrainerHello) -> None:
        if found.layout_digest != hello.layout.digest() or found.genesis != (self._stored_genesis or b"").hex():
            self.log.warning("checkpoint_passed_over", step=found.step, reason="another model or another swarm")
            return
        try:
            checkpoint.read_vector(self.environment.disk, found, hello.layout, self.trainer.vector)
        except (ValueError, OSError) as error:
            self.log.warning("checkpoint_unreadable", step=found.step, reason=str(error))
            return
        self._restored = found
        self.progress.step, self.progress.samples = found.step, found.samples
        self.progress.optimizer_steps = found.optimizer_steps
        self.log.info("checkpoint_loaded", step=found.step)

    async def _connect(self) -> None:
        """Join through any peer, or found: a node without bootstrap and without memory founds, nobody else does."""
        bootstraps = self.config.swarm.bootstrap
        try:
            if bootstraps or self._stored_genesis is None:
                if not bootstraps and not self.overlay.remembered() and not await self.overlay.join_near():
                    self._found(self.environment.entropy.token(16))
                    return
                if self.overlay.genesis is None:
                    await self.overlay.join(bootstraps, genesis=self._stored_genesis)
            else:
                await self._find_again(self._stored_genesis)
                return
        except NotThisSwarm as error:
            if self._failure is not None:
                raise self._failure from error
            raise UserError(
                str(error),
                hint="check swarm.bootstrap and swarm.run; a state directory belongs to one swarm for good",
                exit_code=ExitCode.MISMATCH,
            ) from error
        if self.overlay.genesis is not None and self._stored_genesis is None:
            self._store_genesis(self.overlay.genesis)

    async def _find_again(self, genesis: bytes) -> None:
        """A founder that comes back: its swarm may live on without it."""
        if self.overlay.remembered() or await self.overlay.somebody_near():
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self.overlay.join([], genesis=genesis)
                return
            except (TimeoutError, NotThisSwarm):
                self.log.warning("swarm_not_found_again", waited_s=SETTLE_S, peers=self.overlay.remembered())
        self.resumes = True
        self._found(genesis)

    def _found(self, genesis: bytes) -> None:
        self.founder = True
        self.overlay.found(genesis)
        self._store_genesis(genesis)

    def _store_genesis(self, genesis: bytes) -> None:
        """Without it the next start would not know its swarm."""
        try:
            self.environment.disk.write(GENESIS_FILE, genesis)
        except OSError as error:
            raise state_directory_unusable(self.config.node.state_dir, error) from error
        self._stored_genesis = genesis

    async def _enter(self, hello: TrainerHello) -> None:
        """Agree on the manifest, then come to the vector."""
        assert self.overlay.genesis is not None
        config = self.config
        self.manifest = propose(
            run=config.swarm.run,
            genesis=self.overlay.genesis,
            hello=hello,
            training=config.training,
            barrier=config.barrier,
            exchange=config.exchange,
        )
        peer = None if self.founder else await self._agree(self.manifest)
        self._check_memory()
        self.exchange = Exchange(
            overlay=self.overlay,
            manifest=self.manifest,
            settings=config.exchange,
            staleness=self.barrier.staleness,
            replica=self.trainer.vector,
            incarnation=self.incarnation,
            environment=self.environment,
        )
        if self._restored is not None:
            await self._offer(self._restored)
        self.loop = StepLoop(
            overlay=self.overlay,
            exchange=self.exchange,
            trainer=self.trainer,
            gate=self.gate,
            training=config.training,
            settings=config.exchange,
            environment=self.environment,
            progress=self.progress,
        )
        self.saving = CheckpointWriter(
            config,
            self.exchange,
            self.manifest,
            self.trainer,
            self.progress,
            self.environment,
            on_saved=self.loop.restart_from,
        )
        if self.progress.paused:
            self.loop.pause()
        self.exchange.hold_back(HOLD_BACK_S)
        await self.exchange.start()
        manifest_check.register(self.overlay, self.manifest)
        if peer is None:
            self.overlay.set_willing(not config.node.client_only)
        if peer is None and self.resumes:
            await self.exchange.resume(len(self.overlay.remembered()), RESUME_WAIT_S)
        elif peer is None:
            self.exchange.found()
        elif config.exchange.enabled:
            await self._fetch_vector(peer)
            self.progress.step = max(self.progress.step, self.exchange.core.median_step())
        # Not before: who is taught shards while it loads has every delta of the others on its line as well.
        self.overlay.set_willing(not config.node.client_only)
        await self._mind_own_past()

    async def _offer(self, found: CheckpointState) -> None:
        """Show what the checkpoint holds: the replica, and the shards owned and backed up then."""
        assert self.exchange is not None
        assert self.manifest is not None
        self.exchange.core.step = found.step
        self.exchange.offer(found.terms())
        if self.config.exchange.enabled:
            states = await self.environment.executor.run(
                checkpoint.read_states,
                self.environment.disk,
                found,
                self.exchange.store.bounds,
                self.manifest.layout.parameter_total,
                self.log,
            )
            self.exchange.offer_states(states)

    async def _mind_own_past(self) -> None:
        """Use no identity of a delta twice, and count no step twice, whatever state directory this start was given."""
        assert self.exchange is not None
        incarnation, step = await self.exchange.past()
        if incarnation >= self.incarnation:
            self.log.warning("incarnation_raised", counted=self.incarnation, seen=incarnation)
            try:
                self.incarnation = keep_incarnation(self.environment.disk, incarnation + 1)
            except OSError as error:
                raise state_directory_unusable(self.config.node.state_dir, error) from error
            self.exchange.core.incarnation = self.incarnation
        if step > self.progress.step:
            # Trained after the last checkpoint: the model has some of it, and it is not to be trained again.
            self.log.info("steps_passed_over", checkpoint=self.progress.step, step=step)
            self.progress.step = step

    def budget(self, nodes: float | None = None) -> Budget | None:
        """Memory of the exchange among so many nodes, or as many as there are; None while the model is not known."""
        if self.manifest is None:
            return None
        nodes = self.overlay.population().estimate if nodes is None else nodes
        return budget(self.manifest.layout.total, self.config.exchange, nodes)

    def _check_memory(self) -> None:
        """Raises `UserError` where this node's share cannot fit; a share that only fits while others live is a warning.

        Replica and delta are claimed already; outbox and repair log fill later and have limits of their own.
        """
        available = self.environment.available_memory()
        share, alone = self.budget(), self.budget(nodes=1)
        if available is None or share is None or alone is None:
            return
        needed = share.total - share.shared - share.outbox - share.repair_log
        if needed > available:
            free = f"{available / 1e6:,.1f} MB are free"
            raise UserError(
                f"the exchange of this model takes {needed / 1e6:,.1f} MB more memory, and {free}",
                hint="give the machine or its container more; replicas = 0 and outer_momentum = 0 need less of it",
                exit_code=ExitCode.TRAINER,
            )
        if alone.total - alone.shared > available:
            self.log.warning(
                "memory_tight",
                free_bytes=available,
                alone_bytes=alone.total - alone.shared,
                hint="enough while other nodes hold their shares of the model; not for this node alone",
            )

    async def _agree(self, proposal: Manifest) -> Contact:
        """Ask peers until one has a manifest to compare with."""
        while True:
            # Those that can be asked first: a stream to one behind a NAT may take its whole time to fail.
            for peer in sorted(self.overlay.members(), key=lambda peer: not peer.eligible):
                try:
                    await manifest_check.compare_with(self.overlay, peer.contact, proposal)
                except ManifestRefused as error:
                    raise UserError(
                        str(error),
                        hint="take over the swarm's settings and model, or join another run",
                        exit_code=ExitCode.MISMATCH,
                    ) from error
                except TransportError as error:
                    self.log.debug("manifest_not_had", peer=peer.node_id.hex()[:8], reason=str(error))
                    continue
                return peer.contact
            await asyncio.sleep(MANIFEST_RETRY_S)

    async def _fetch_vector(self, peer: Contact) -> None:
        assert self.exchange is not None
        began = self.environment.clock.monotonic()
        while True:
            try:
                report = await self.exchange.join(peer)
                break
            except TransportError as error:
                self.log.warning("vector_not_had", peer=peer.node_id.hex()[:8], reason=str(error))
                await asyncio.sleep(MANIFEST_RETRY_S)
                assert self.manifest is not None
                peer = await self._agree(self.manifest)
        seconds = self.environment.clock.monotonic() - began
        self.log.info("vector_fetched", shards=report.changed, seconds=round(seconds, 3))

    async def _wait_for_nodes(self) -> None:
        self.overlay.announce(activity=Activity.READY, step=self.progress.step)
        needed = self.config.training.min_nodes
        if self.nodes_ready() < needed:
            self.phase = "waiting_for_nodes"
            self.log.info("waiting_for_nodes", have=self.nodes_ready(), need=needed)
        while True:
            if self.nodes_ready() >= needed:
                return
            await asyncio.sleep(WAITING_LOOK_S)

    def nodes_ready(self) -> int:
        """Nodes that are ready or train, this one included."""
        ready = (Activity.READY, Activity.TRAINING)
        return 1 + sum(peer.activity in ready for peer in self.overlay.members())

    # -- the end ------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Go on owning until the others have finished too, or `linger_s` has passed; what they added meanwhile
        belongs to the model that this node exports."""
        self.phase = "finished"
        self.overlay.announce(activity=Activity.FINISHED)
        await self._linger()
        assert self.exchange is not None
        if self.config.exchange.enabled:
            await self.exchange.pull(self.progress.step)
        if self.config.training.export:
            await self._export(self.config.training.export)

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(self.config.training.linger_s):
                while True:
                    if not self._others_need_us():
                        return
                    await asyncio.sleep(LINGER_LOOK_S)
        except TimeoutError:
            self.log.info("linger_over", seconds=self.config.training.linger_s)

    def _others_need_us(self) -> bool:
        """Somebody trains, or is on its way to the vector that this node may be the last to have."""
        now = self.environment.clock.monotonic()
        on_the_way = (Activity.JOINING, Activity.READY)
        return any(peer.is_worker(now) or peer.activity in on_the_way for peer in self.overlay.members())

    async def _export(self, path: str) -> None:
        try:
            await self.trainer.export(path)
        except (TrainerFailed, OSError) as error:
            self.log.error("export_failed", path=path, reason=str(error))
        else:
            self.log.info("exported", path=path, step=self.progress.step)

    async def _depart(self) -> None:
        """Save, hand over, say goodbye."""
        self.phase = "leaving"
        self.log.info("leaving", step=self.progress.step)
        self.overlay.set_willing(False)  # nobody should hand anything to a node that goes
        if self.exchange is not None:
            if self.saving is not None:
                await self.saving.at_the_end(LAST_SAVE_S)
            steps_left, shards_left = await self.exchange.leave(HAND_OVER_S)
            if steps_left or (shards_left and len(self.overlay.members())):
                self.log.warning("left_behind", steps_unacknowledged=steps_left, shards_owned=shards_left)
            await self.exchange.close(DRAIN_S)
            if self.saving is not None:
                await self.saving.what_is_left()
        await self.overlay.leave()

    async def _close(self) -> None:
        if self.exchange is not None:
            await self.exchange.stop()
        await self.trainer.stop()
        await self.overlay.stop()
