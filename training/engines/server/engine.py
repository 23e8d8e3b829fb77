"""`p2pnode.engine("server")`: the parameter server, as a script uses it.

    engine = p2pnode.engine("server")

    @engine.register_schedule
    def schedule(ctx, workers): ...

    engine.start(barrier="pssp", staleness=4, sample=10)

The same script runs at every node: `p2pnode run --set node.role=server -- python script.py` at a server,
`p2pnode run -- python script.py` at a worker.

One server serves, the others stand by and ask it, as workers do (`run_server`). The lowest of the living serves, unless
another one serves already. When that is dead, the lowest takes over: it reads the record of the dead one and stores its
own with a higher epoch. Two that take over at once are told apart by the owner of the record: one of them is refused,
and stands by.

A run that is over is not begun again, unless its record is from an earlier process of this server: then all nodes have
been started anew, with the values that their state directories have kept, and the program runs again.
"""

from __future__ import annotations

from typing import Any

from p2pnode.training.engines.link import EngineLink
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import BarrierName, ServerOptions
from p2pnode.training.engines.server.host import ScriptHost, stored_record
from p2pnode.training.engines.server.messages import NoServer, Poll, Told
from p2pnode.training.engines.server.program import (
    ServerProgram,
    ServerPull,
    ServerVerbs,
    UpdatesLost,
    raise_end,
    set_value,
)
from p2pnode.training.engines.server.record import RECORD_KEY, ServerRecord, ServerReplaced
from p2pnode.training.engines.server.service import MEMBERS_S, Serving
from p2pnode.training.engines.server.worker import run_worker
from p2pnode.training.engines.values_link import ScriptEngine, answer_pull, immediate
from p2pnode.training.trainer_link.engine_messages import (
    AbandonRun,
    BeginRun,
    EngineReady,
    FinishRun,
    NotAnswered,
    PullAsked,
    PullDone,
)
from p2pnode.training.values.encoding import Key


class ParameterServer(ScriptEngine, ServerVerbs):
    """Named values at the nodes with `role = "server"`, and a program that gives tasks to all others."""

    def __init__(self, link: EngineLink, ready: EngineReady) -> None:
        ScriptEngine.__init__(self, link, ready)
        ServerVerbs.__init__(self)
        self._host = ScriptHost(link, ready.node_id, self._script)
        self._pull = ServerPull(self, self._script)
        self._starts = 0
        #: Whether this node is a server.
        self.is_server = ready.node_id in immediate(self._host.members()).servers
        link.on_pull(self._on_pull)

    @classmethod
    def open(cls) -> ParameterServer:
        """Join the swarm of the node that has started this script; see `p2pnode.engine`."""
        return cls(*EngineLink.connect("server"))

    def start(
        self,
        program: ServerProgram | None = None,
        *,
        barrier: BarrierName = "bsp",
        staleness: int = 4,
        sample: int = 0,
        **options: Any,
    ) -> int:
        """Run the program, or what was registered, until `stop` says so: at a server, give tasks, or stand by for the
        server that does; at a worker, compute them. All nodes start with the same options (`ServerOptions`).

        It begins when `training.min_nodes` nodes have called it, servers included. Returns the version of the values at
        a server, and the number of its updates that counted at a worker. Raises at every node `VerbFailed` for the
        function that ended the run, or `UpdatesLost` where servers and workers died together; and `NoServer`,
        `StoreUnavailable`, `NoNode`, `ValueError` for options that cannot be. After an error the values can be used,
        and `start` be called again.
        """
        chosen = ServerOptions(barrier=barrier, staleness=staleness, sample=sample, **options)
        if program is not None:
            self.use(program)
        self._starts += 1
        try:
            self._link.ask(BeginRun())
            run = run_server if self.is_server else run_worker
            found = immediate(run(self, self._host, chosen, self._starts))
        except UpdatesLost:
            self._link.ask(FinishRun())  # the run is over all the same, and others may read the values
            raise
        except BaseException:
            if not self._link.is_stopping:
                self._link.ask(AbandonRun())
            raise
        self._link.ask(FinishRun())
        return found

    def set(self, key: Key, value: object) -> None:
        """Replace a value: a NumPy array, or what msgspec encodes, up to 1 MiB. Returns when its server and that one's
        backup have it. Raises `ValueNotEncodable`, which names the key."""
        set_value(self._script, key, value, 0)

    def keys(self) -> list[Key]:
        """All keys of the run."""
        return [key for key in super().keys() if key != RECORD_KEY]  # noqa: SIM118 - no mapping

    @property
    def worker_num(self) -> int:
        """How many live nodes work for the servers, this one included if it does."""
        return max(0, self._script.worker_num() - len(immediate(self._host.members()).servers))

    def _on_pull(self, asked: PullAsked) -> PullDone:
        return answer_pull(asked, self._pull.apply)


async def run_server(verbs: ServerVerbs, host: ScriptHost, options: ServerOptions, run: int = 1) -> int:
    """Serve, or stand by, until the run is over; the version of the values. Raises `VerbFailed` and `UpdatesLost`."""
    made, late_s = 0, host.clock() + messages.LATE_S
    while True:
        record = await stored_record(host)
        over: ServerRecord | None = None
        servers = (await host.members()).servers
        if record.ended and record.run >= run:
            if run == 1 and record.server == host.node_id:
                over, record = record, _begun_anew(record)
            elif run > 1 or record.server not in servers or host.clock() >= late_s:
                raise_end(record.failure, record.lost, record.version)
                return record.version
        if record.run > run and not record.ended:
            raise NoServer(f"start number {record.run} of the program is under way, and this is number {run} here")
        if over is not None:
            serving = host.node_id
        elif record.run >= run and record.server != host.node_id and record.server in servers:
            serving = record.server
        else:
            serving = min(servers, default=host.node_id)
        if serving == host.node_id:
            try:
                return await Serving(verbs, host, options, record, run, made, over).run()
            except ServerReplaced:
                continue
        told = await _stand_by(host, options, serving, run)
        if told is not None and not told.refused:
            made = max(made, told.made)
        if told is not None and told.ended:
            raise_end(told.failure, told.lost, told.version)
            return told.version
        if host.is_stopping:
            return record.version


def _begun_anew(record: ServerRecord) -> ServerRecord:
    """What goes on of a run that is over: its values."""
    return ServerRecord(epoch=record.epoch, server=record.server, version=record.version, stored=record.stored)


async def _stand_by(host: ScriptHost, options: ServerOptions, serving: bytes, run: int) -> Told | None:
    """Answer those that ask here, and ask the one that serves; its answer, if it gave one."""
    deadline = host.clock() + MEMBERS_S
    while (left_s := deadline - host.clock()) > 0:
        asked = await host.receive(left_s)
        if asked is not None:
            await host.answer(asked, messages.encode(Told(epoch=0, server=serving)))
    poll = Poll(run, 0, options.text(), is_standby=True)
    try:
        return messages.decode_told(await host.call(serving, messages.encode(poll)))
    except (NotAnswered, messages.BadPoll):
        return None
