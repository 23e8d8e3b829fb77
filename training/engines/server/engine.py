"""`p2pnode.engine("server")`: the parameter server, as a script uses it.

    engine = p2pnode.engine("server")

    @engine.register_schedule
    def schedule(ctx, workers): ...

    engine.start(barrier="pssp", staleness=4, sample=10)

The same script runs at every node: `p2pnode run --set node.role=server -- python script.py` at a server,
`p2pnode run -- python script.py` at a worker.
"""

from __future__ import annotations

from typing import Any

from p2pnode.training.engines.link import EngineLink
from p2pnode.training.engines.server.acceptance import BarrierName, ServerOptions
from p2pnode.training.engines.server.core import RECORD_KEY
from p2pnode.training.engines.server.host import ScriptHost
from p2pnode.training.engines.server.program import (
    ServerProgram,
    ServerPull,
    ServerVerbs,
    UpdatesLost,
    set_value,
)
from p2pnode.training.engines.server.succession import run_server
from p2pnode.training.engines.server.worker import run_worker
from p2pnode.training.engines.values_link import ScriptEngine, answer_pull, immediate
from p2pnode.training.trainer_link.engine_messages import (
    AbandonRun,
    BeginRun,
    EngineReady,
    FinishRun,
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
