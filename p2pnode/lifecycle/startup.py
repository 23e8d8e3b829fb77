"""The start of a node: enter the swarm, start the trainer, agree on the manifest, and get the current vector.

The steps are called in order by `p2pnode.lifecycle.node.Node`. A checkpoint on disk fills the replica first; the
swarm's state then replaces it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.entry import SwarmEntry
from p2pnode.lifecycle.environment import NodePart
from p2pnode.lifecycle.memory_budget import check_memory
from p2pnode.lifecycle.state_directory import StateDirectory
from p2pnode.overlay.addresses import is_loopback
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training import manifest as manifests
from p2pnode.training.exchange.exchange import VALUE_BYTES, Exchange
from p2pnode.training.files import checkpoint
from p2pnode.training.files.checkpoint import Checkpoint
from p2pnode.training.manifest import Manifest, ManifestRefused, answer_joiners, propose
from p2pnode.training.settings import BarrierSettings, ExchangeSettings
from p2pnode.training.shard_count import ChosenBy, ShardsFixed
from p2pnode.training.shard_count import choose as choose_shards
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH, has_length
from p2pnode.training.trainer_link.interface import Restored, TrainerFailed, TrainerHello, TrainerLeft, Vector

#: After the whole swarm was switched off, its founder waits this long for remembered nodes before it resumes from the
#: states it has. Machines started together come up within it; a node that comes later with newer states is still used.
RESUME_WAIT_S = 15.0
#: A peer that still rejects the manifest after this long is logged as a warning.
MANIFEST_WARNING_S = 5.0
MANIFEST_RETRY_S = 0.2
#: A node that was just started takes no shard over for this long, or until it has what its swarm has.
TAKEOVER_DELAY_S = 30.0
#: A node that may open its swarm again does so when no member has had a manifest for this long: those that have entered
#: it before their trainer runs, and masters, have none.
NO_MODEL_S = 10.0
NEW_SWARM_HINT = "start this node again: it has no model yet, and joins the swarm that is there now"
FROZEN_HINT = (
    "load the same file on all nodes; exchange what is made anew or follows the model, as a teacher, with "
    "include_frozen=True on all nodes (docs/own-model.md)"
)
SHARDS_HINT = (
    "leave exchange.shards out (0): the run's number is taken; for another number start another run, with the model of "
    "this one"
)
#: A node owns named values of at most this part of its free memory: a quarter.
VALUES_PART = 4


class Agreement(NamedTuple):
    """The manifest that this node and its swarm have, and the peer that has confirmed it; None for a founder."""

    manifest: Manifest
    source: Contact | None


@dataclass(eq=False)
class Startup(NodePart):
    """Takes one node from its state directory to the swarm's vector."""

    directory: StateDirectory
    entry: SwarmEntry
    #: The file of the trainer's own state that belongs to the loaded checkpoint, below the state directory.
    trainer_state: str = ""
    #: Why the run has as many shards as it has; None before that is known.
    shards_by: ChosenBy | None = None
    _checkpoint: Checkpoint | None = None

    async def _remember(self, manifest: Manifest) -> None:
        """This node and its swarm agree: from now on the state directory belongs to this run and this model."""
        await self.directory.remember(
            manifest.run,
            bytes.fromhex(manifest.genesis),
            manifest.layout,
            founder=self.entry.founder,
            given=self.environment.given,
            shards=manifest.shards,
            frozen=manifest.frozen_digest,
        )

    async def begin(self) -> TrainerHello:
        """Enter the swarm and start the trainer side by side."""
        entering = asyncio.create_task(self.entry.connect(), name="connect")
        starting = asyncio.create_task(self._start_trainer(), name="start-trainer")
        try:
            # The first failure is reported at once: a wrong bootstrap need not wait for the import of torch.
            await asyncio.wait([entering, starting], return_when=asyncio.FIRST_EXCEPTION)
            for task in (entering, starting):
                if task.done():
                    task.result()
            await entering
            return await starting
        finally:
            for task in (entering, starting):
                task.cancel()
            await asyncio.gather(entering, starting, return_exceptions=True)

    # -- the trainer and the checkpoint -------------------------------------------------------------------------

    async def _start_trainer(self) -> TrainerHello:
        """Start the trainer from the newest checkpoint, if there is one. Raises `UserError`, and `TrainerLeft` for a
        script that has ended and needed no model."""
        try:
            return await self.trainer.start(resume=self._resume)
        except TrainerLeft:
            raise
        except TrainerFailed as error:
            raise UserError(
                f"the trainer cannot start: {error.reason}", hint=error.hint, exit_code=ExitCode.TRAINER
            ) from error

    async def _resume(self, hello: TrainerHello, vector: Vector) -> Restored:
        """Load the newest complete checkpoint of this swarm and this model. One that is passed over gives nothing:
        neither its vector nor its optimiser. Raises `UserError` if the state directory belongs to another model."""
        self.directory.check_model(hello.layout, hello.frozen_digest)
        disk, run = self.environment.disk, self.environment.executor.run
        layout, genesis = hello.layout, (self.directory.genesis or b"").hex()
        try:
            complete = await run(lambda: list(checkpoint.complete(disk, self.log)))
        except OSError as error:
            self.log.warning("checkpoint_unreadable", folder=checkpoint.FOLDER, reason=str(error))
            return Restored()
        for found in complete:
            step = found.state.step
            if found.state.layout_digest != layout.digest() or found.state.genesis != genesis:
                self.log.warning("checkpoint_passed_over", step=step, reason="another model or another swarm")
                continue
            try:
                await run(checkpoint.read_vector, disk, found.folder, layout, vector)
                self.trainer_state = await run(checkpoint.trainer_state, disk, found)
            except (ValueError, OSError) as error:
                self.log.warning("checkpoint_unreadable", step=step, reason=str(error))
                continue
            if not await run(has_length, vector, MAX_STATE_LENGTH):
                self.log.warning("checkpoint_passed_over", step=step, reason="its values are out of range")
                continue
            self._checkpoint = found
            progress = self.progress
            progress.step, progress.samples = step, found.state.samples
            progress.optimizer_steps = found.state.optimizer_steps
            self.log.info("checkpoint_loaded", step=step, trainer_state=self.trainer_state)
            return Restored(has_vector=True, file=self.trainer_file)
        return Restored()

    async def restore_values(self, hello: TrainerHello, vector: Vector) -> None:
        """For a run without a model: find the newest checkpoint, whose named values `make_exchange` offers. The
        script's steps begin anew. Raises `UserError` if the state directory belongs to a model."""
        await self._resume(hello, vector)
        self.progress.step = self.progress.samples = self.progress.optimizer_steps = 0

    @property
    def trainer_file(self) -> str:
        """The path of the trainer's own state that belongs to the loaded checkpoint; empty if there is none."""
        folder = self.environment.state_path
        return str(folder / self.trainer_state) if folder is not None and self.trainer_state else ""

    def settings_of(self, manifest: Manifest) -> ExchangeSettings:
        """The settings of the exchange, with the number of shards that the run has."""
        return msgspec.structs.replace(self.config.exchange, shards=manifest.shards)

    def check_memory(self, manifest: Manifest, hello: TrainerHello) -> None:
        """Raise `UserError` if this node, its trainer and those about to begin beside it need more than is free."""
        training = self.config.training
        check_memory(
            self.environment.available_memory(),
            manifest.layout.total,
            self.settings_of(manifest),
            max(self.overlay.population().estimate, training.min_nodes),
            self.log,
            checkpoints=training.checkpoint_s > 0.0,
            base_on_device=hello.device_bytes > 0,
            trainer_bytes=hello.host_bytes,
            others_here=self._others_about_to_begin(),
        )

    def _others_about_to_begin(self) -> int:
        """Other nodes on this machine that have joined and not begun: what they will take is free still."""
        begins = (Activity.JOINING, Activity.READY)
        mine = self.overlay.address.host
        return sum(
            peer.activity in begins and (peer.contact.address.host == mine or is_loopback(peer.contact.address.host))
            for peer in self.overlay.members()
        )

    async def make_exchange(self, manifest: Manifest, staleness: int | None) -> Exchange:
        """The exchange of the run that this node and its swarm agree on; from now on the state directory belongs to
        it. The checkpoint of an earlier start is on offer."""
        exchange = Exchange(
            swarm=self.overlay,
            manifest=manifest,
            settings=self.config.exchange,
            staleness=staleness,
            replica=self.trainer.vector,
            incarnation=self.directory.incarnation,
            environment=self.environment,
            value_bytes=max(VALUE_BYTES, (self.environment.available_memory() or 0) // VALUES_PART),
        )
        await self._remember(manifest)
        await self._offer_checkpoint(exchange, manifest)
        return exchange

    async def enter(self, exchange: Exchange, source: Contact | None, *, owns: bool = True) -> None:
        """Take part in the exchange: others ask this node for its manifest, and it gets the vector. `source` and
        `owns` as in `_get_vector`."""
        exchange.rebalancer.delay_takeover(TAKEOVER_DELAY_S)
        await exchange.start()
        answer_joiners(self.overlay, exchange.manifest)
        await self._get_vector(exchange, source, owns=owns)

    async def _offer_checkpoint(self, exchange: Exchange, manifest: Manifest) -> None:
        """Offer what the checkpoint holds: the replica, and the shards that this node owned and backed up then."""
        if self._checkpoint is None:
            return
        states = await self.environment.executor.run(
            checkpoint.read_states,
            self.environment.disk,
            self._checkpoint,
            manifest.bounds(),
            manifest.layout.parameter_total,
            self.log,
        )
        exchange.offer(self._checkpoint.state.step, self._checkpoint.state.marks, states)

    # -- the manifest and the vector ----------------------------------------------------------------------------

    def propose(self, hello: TrainerHello, barrier: BarrierSettings) -> Manifest:
        """The manifest of this node's model and settings, with the shards that its run had. Raises `UserError` if
        `exchange.shards` names another number."""
        config, total = self.config, hello.layout.total
        stored = self.directory.record.shards
        try:
            choice = choose_shards(total, config.exchange.shards, stored, config.training.min_nodes)
        except ShardsFixed as error:
            raise UserError(str(error), hint=SHARDS_HINT, exit_code=ExitCode.MISMATCH) from error
        assert self.overlay.genesis is not None
        self.shards_by = choice.by
        return propose(
            run=config.swarm.run,
            genesis=self.overlay.genesis,
            hello=hello,
            training=config.training,
            barrier=barrier,
            exchange=config.exchange,
            shards=choice.shards,
        )

    async def agree(self, proposal: Manifest) -> Agreement:
        """As the founder, the proposal. Otherwise ask peers until one has a manifest equal to it, but for the number of
        shards where none was given: that is the swarm's. Raises `UserError`.

        `source` None: no node of the swarm has one, and this node opens it again, or has founded it.
        """
        found = Agreement(proposal, None)
        if not self.entry.founder:
            found = await self._ask_members(proposal, adopts_shards=self.config.exchange.shards == 0)
        manifest = found.manifest
        is_given = self.config.exchange.shards != 0
        if found.source is not None and (not is_given or manifest.shards != proposal.shards):
            self.shards_by = "swarm"
        largest = -(-manifest.layout.total // manifest.shards)
        self.log.info("shards_chosen", shards=manifest.shards, shard_values=largest, by=self.shards_by)
        return found

    async def _ask_members(self, proposal: Manifest, *, adopts_shards: bool) -> Agreement:
        began = self.environment.clock.monotonic()
        warned: set[bytes] = set()
        with_model_s = began
        while True:
            # Eligible peers first: a stream to one behind a NAT may take its whole time to fail.
            members, lacking = sorted(self.overlay.members(), key=lambda peer: not peer.eligible), 0
            peers = [peer.contact for peer in members]  # a peer must not be read after a wait: it may be gone
            for peer in peers:
                try:
                    manifest = await manifests.compare_with(self.overlay, peer, proposal, adopts_shards=adopts_shards)
                    return Agreement(manifest, peer)
                except ManifestRefused as error:
                    hint = "take over the swarm's settings and model, or join another run"
                    if error.fields == ["shards"]:
                        hint = SHARDS_HINT
                    elif {*error.fields} <= {"frozen", "frozen_digest"}:
                        hint = FROZEN_HINT
                    raise UserError(str(error), hint=hint, exit_code=ExitCode.MISMATCH) from error
                except TransportError as error:
                    # A peer that has just started has no manifest yet.
                    lacking += error.is_not_served
                    has_waited = self.environment.clock.monotonic() - began > MANIFEST_WARNING_S
                    log = self.log.debug
                    if has_waited and error.kind == "rejected" and peer.node_id not in warned:
                        warned.add(peer.node_id)
                        log = self.log.warning
                    log("manifest_not_had", peer=peer.node_id.hex()[:8], reason=str(error))
            if self.overlay.refusal and self.directory.genesis is None:
                # Its swarm was given up before it had a model, and nothing of it is kept here.
                raise UserError(self.overlay.refusal, NEW_SWARM_HINT, ExitCode.MISMATCH)
            now = self.environment.clock.monotonic()
            if lacking < len(peers) or (not peers and self.config.swarm.bootstrap):
                with_model_s = now  # one that is silent may have it, and so may the node that was named
            if self._may_open and now - with_model_s >= NO_MODEL_S:
                self.log.warning("swarm_without_model", waited_s=NO_MODEL_S, peers=len(peers))
                self.entry.founder = self.entry.resumes = True
                return Agreement(proposal, None)
            await asyncio.sleep(MANIFEST_RETRY_S)

    @property
    def _may_open(self) -> bool:
        """Whether this node may open the swarm of an earlier start again."""
        may = self.environment.reopens or self.directory.record.founder is not False
        return may and self.directory.genesis is not None

    async def _get_vector(self, exchange: Exchange, source: Contact | None, *, owns: bool) -> None:
        """Fetch the vector through `source`, or, as the founder (`source` None), found or resume it. `owns`: this node
        may own shards in this run."""
        willing = owns and not self.config.node.client_only
        if source is None:
            self.overlay.set_willing(willing)
            if self.entry.resumes:
                await exchange.resume(len(self.overlay.remembered()), RESUME_WAIT_S)
            else:
                await exchange.found()
        else:
            await self._fetch_vector(exchange, source)
            self.progress.step = max(self.progress.step, exchange.view.median_step())
        # Not earlier: a node that becomes a backup while it loads receives all forwarded deltas on the same link.
        self.overlay.set_willing(willing)

    async def _fetch_vector(self, exchange: Exchange, source: Contact) -> None:
        clock = self.environment.clock
        started, failed = clock.monotonic(), (source, "")
        while True:
            try:
                report = await exchange.join(source)
                break
            except TransportError as error:
                if failed != (source, str(error)):  # it is tried five times a second
                    self.log.warning("vector_not_had", peer=source.node_id.hex()[:8], reason=str(error))
                failed = source, str(error)
                await asyncio.sleep(MANIFEST_RETRY_S)
                found = await self._ask_members(exchange.manifest, adopts_shards=False)  # the exchange has its shards
                if found.source is None:
                    await exchange.resume(len(self.overlay.remembered()), RESUME_WAIT_S)
                    return
                source = found.source
        self.log.info("vector_fetched", shards=report.changed, seconds=round(clock.monotonic() - started, 3))
