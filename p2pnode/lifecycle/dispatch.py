"""The parts of a node that records are dispatched with: it keeps the master's record, may be the master, and may draw
tasks for its trainer. Which of the last two it has depends on `[dispatch]` and `node.role`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.environment import NodePart
from p2pnode.overlay.peers import Activity
from p2pnode.training.dispatch.answers import Answer
from p2pnode.training.dispatch.client import MasterClient, MasterDirectory
from p2pnode.training.dispatch.master import MasterFacts, MasterService
from p2pnode.training.dispatch.worker import RecordsFacts, RecordsService
from p2pnode.training.sharing.service import DataService
from p2pnode.training.trainer_link.data_messages import DataFromTrainer, DataOpened, DataTrained, DataWanted
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer, RecordsGranted, RecordsWanted

#: How long workers that have not heard of the end of the job still get it from a master whose job is done.
STAY_S = 10.0


@dataclass(eq=False)
class NodeDispatch(NodePart):
    """Belongs to one node; `enter` once it is in its swarm."""

    data: DataService
    master: MasterService | None = field(init=False, default=None)
    records: RecordsService | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        config, overlay, environment, trainer = self.config, self.overlay, self.environment, self.trainer
        directory = MasterDirectory(overlay, environment)
        settings = config.dispatch
        if config.node.role in ("master", "peer+master"):
            self.master = MasterService(
                overlay, directory, settings, config.training.seed, environment.make_store, environment
            )
        if config.node.role != "master" and settings.source == "master":
            local = None if self.master is None else self.master.answer_own
            client = MasterClient(overlay, directory, environment, local)
            self.records = RecordsService(client, trainer, environment.read_dataset, environment)
        trainer.on_data(self._on_trainer)

    def enter(self, genesis: bytes) -> None:
        """The node is in its swarm."""
        if self.master is not None:
            self.master.start(genesis)
        if self.records is not None:
            self.records.start(genesis)

    async def leave(self, timeout_s: float) -> None:
        """Give this node's tasks back."""
        if self.records is not None:
            await self.records.leave(timeout_s)

    async def stop(self) -> None:
        """End its services; idempotent."""
        if self.records is not None:
            await self.records.stop()
        if self.master is not None:
            await self.master.stop()

    def _on_trainer(self, message: DataFromTrainer | RecordsFromTrainer) -> None:
        if isinstance(message, DataOpened | DataWanted | DataTrained):
            self.data.on_trainer(message)
        elif self.records is not None:
            self.records.on_trainer(message)
        elif isinstance(message, RecordsWanted):
            self.trainer.send_data(RecordsGranted(message.number, None, is_over=True))

    def facts(self) -> tuple[MasterFacts | None, RecordsFacts | None]:
        """For `/status`."""
        return (
            None if self.master is None else self.master.facts(),
            None if self.records is None else self.records.facts(),
        )

    # -- the end of a job ----------------------------------------------------------------------------------------

    def stay_s(self) -> float | None:
        """How long the master of a job that has ended stays for others; None: the job goes on, or others train on it.

        A node that is joining may still become a worker that has to hear of the end.
        """
        if self.master is None or not self.master.is_done:
            return None
        activities = {peer.activity for peer in self.overlay.members()}
        if activities & {Activity.READY, Activity.TRAINING}:
            return None
        return max(STAY_S, self.config.training.linger_s) if Activity.JOINING in activities else STAY_S

    def failure(self) -> UserError | None:
        """What a run that ended with its last pass has to report."""
        if self.records is None or self.records.ended != Answer.ALL_FAILED:
            return None
        return UserError(
            "the run ended because every task of the last pass failed: no record could be trained on",
            "see dispatch_task_discarded in the master's log; `p2pnode records check` looks at the files",
            ExitCode.TRAINER,
        )
