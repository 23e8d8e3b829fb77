"""What `/status` and `/metrics` say of named values, and of the tasks of a parameter server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from p2pnode.status.prometheus import Family, Sample, single
from p2pnode.status.schema import ServerStatus, ValuesStatus
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.trainer_link.engine_messages import TaskCounts


def values_status(exchange: Exchange | None) -> ValuesStatus | None:
    """The named values of this node; None in a run of a model, and before the exchange has begun."""
    if exchange is None or not exchange.store.holds_values:
        return None
    handler = exchange.values.handler
    rounds = handler.rounds
    tables = [owned.state.table for owned in exchange.store.owned.values() if owned.state.table is not None]
    return ValuesStatus(
        keys=sum(len(table.entries) for table in tables),
        bytes=sum(table.size_bytes for table in tables),
        limit_bytes=exchange.settings.value_bytes,
        updates=rounds.applied,
        refused=rounds.refused,
        reads=handler.reads,
        batches=rounds.batches,
        waiting=rounds.waiting,
        waiting_bytes=rounds.waiting_bytes,
        unanswered=exchange.values.waiting(),
    )


def server_status(tasks: TaskCounts | None) -> ServerStatus | None:
    """The tasks of the parameter server, where this node serves."""
    return None if tasks is None else ServerStatus(**msgspec.structs.asdict(tasks))


def values_metrics(status: ValuesStatus | None) -> Iterator[Family]:
    """The named values that this node owns, and what was done with them."""
    if status is None:
        return
    yield single("p2pnode_values_keys", "gauge", "Keys of the shards owned here.", status.keys)
    yield single("p2pnode_values_bytes", "gauge", "Memory of the values owned here.", status.bytes)
    fates: list[Sample] = [({"fate": "applied"}, status.updates), ({"fate": "refused"}, status.refused)]
    yield Family("p2pnode_values_updates_total", "counter", "Updates of values owned here.", fates)
    yield single("p2pnode_values_reads_total", "counter", "Keys owned here that were read.", status.reads)
    yield single("p2pnode_values_batches_total", "counter", "Batches of updates added here.", status.batches)
    places: list[Sample] = [({"at": "owner"}, status.waiting), ({"at": "origin"}, status.unanswered)]
    text = "Updates that wait: here for their batch, or this node's own for their owners."
    yield Family("p2pnode_values_waiting_updates", "gauge", text, places)
    yield single("p2pnode_values_waiting_bytes", "gauge", "Bytes of updates that wait here.", status.waiting_bytes)


def server_metrics(status: ServerStatus | None) -> Iterator[Family]:
    """The tasks of a parameter server."""
    if status is None:
        return
    yield single("p2pnode_server_version", "gauge", "Updates in the values of the parameter server.", status.version)
    yield single("p2pnode_server_workers", "gauge", "Workers of the parameter server.", status.workers)
    states: list[Sample] = [({"state": "held"}, status.held), ({"state": "waiting"}, status.waiting)]
    yield Family("p2pnode_server_open_tasks", "gauge", "Tasks with workers, and those that came back.", states)
    yield single("p2pnode_server_tasks_given_total", "counter", "Tasks given for the first time.", status.given)
    yield single("p2pnode_server_tasks_done_total", "counter", "Tasks whose update counts.", status.done)
    text = "Tasks given again, after an error, a death, or the end of their lease."
    yield single("p2pnode_server_tasks_again_total", "counter", text, status.again)
    yield single("p2pnode_server_updates_refused_total", "counter", "Updates that were too old.", status.refused)
    yield single("p2pnode_server_updates_lost", "gauge", "Updates that died with worker and server.", status.lost)
