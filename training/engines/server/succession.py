"""Which server serves: one does, the others stand by and ask it, as workers do.

The lowest of the living serves, unless another one serves already. When that is dead, the lowest takes over: it reads
the record of the dead one and stores its own with a higher epoch. Two that take over at once are told apart by the
owner of the record: one of them is refused, and stands by.

A run that is over is not begun again, unless its record is from an earlier process of this server: then all nodes have
been started anew, with the values that their state directories have kept, and the program runs again.
"""

from __future__ import annotations

from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.core import ServerRecord, ServerReplaced
from p2pnode.training.engines.server.host import ScriptHost, stored_record
from p2pnode.training.engines.server.messages import NoServer, Poll, Told
from p2pnode.training.engines.server.program import ServerVerbs, raise_end
from p2pnode.training.engines.server.service import MEMBERS_S, Serving
from p2pnode.training.trainer_link.engine_messages import NotAnswered


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
            await asked.answer(messages.encode(Told(epoch=0, server=serving)))
    poll = Poll(run, 0, options.text(), wants=False, is_standby=True)
    try:
        return messages.decode_told(await host.call(serving, messages.encode(poll)))
    except (NotAnswered, messages.BadPoll):
        return None
