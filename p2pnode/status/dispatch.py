"""What `/status` and `/metrics` say of the dispatched records: the queue, who serves it, and what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from p2pnode.status.prometheus import Family, Sample, single
from p2pnode.status.schema import DispatchStatus, Finding
from p2pnode.training.dispatch.client import TROUBLE_S
from p2pnode.training.dispatch.facts import MasterFacts, RecordsFacts
from p2pnode.training.dispatch.messages import QueueCounts


def dispatch_status(
    source: str, master: MasterFacts | None, records: RecordsFacts | None, now: float
) -> DispatchStatus | None:
    """The records of this node; None for a node that neither serves nor draws any. `now`: monotonic seconds."""
    if master is None and records is None:
        return None
    counts: QueueCounts | None = None if records is None else records.counts
    trouble = None if records is None else records.trouble
    queue = None if master is None else master.queue
    return DispatchStatus(
        source=source,
        serves=master is not None and master.serves_since is not None,
        serves_seconds=None if master is None or master.serves_since is None else round(now - master.serves_since, 3),
        master=None if records is None or records.master is None else records.master.hex(),
        store=master.store if master is not None else (counts.store if counts is not None else ""),
        epoch=0 if master is None else master.epoch,
        pass_number=_of(queue, counts, "pass_number"),
        passes=_of(queue, counts, "passes"),
        tasks=_of(queue, counts, "tasks"),
        todo=_of(queue, counts, "todo"),
        leased=_of(queue, counts, "leased"),
        done=_of(queue, counts, "done"),
        failed=_of(queue, counts, "failed"),
        discarded=master.discarded if master is not None else (counts.discarded if counts is not None else 0),
        held=0 if records is None else records.held,
        records_trained=0 if records is None else records.trained,
        tasks_finished=0 if records is None else records.finished,
        tasks_superseded=0 if records is None else records.superseded,
        ended=records is not None and records.ended,
        last_error=_last_error(master, records),
        unanswered_seconds=None if trouble is None else round(max(0.0, now - trouble.since), 3),
    )


def _of(queue: object, counts: QueueCounts | None, name: str) -> int | None:
    found = queue if queue is not None else counts
    return None if found is None else int(getattr(found, name))


def _last_error(master: MasterFacts | None, records: RecordsFacts | None) -> str:
    if records is not None and records.refused is not None:
        return records.refused[0]
    if records is not None and records.trouble is not None:
        return records.trouble.reason
    return "" if master is None else master.reason


def dispatch_findings(
    status: DispatchStatus | None, master: MasterFacts | None, records: RecordsFacts | None
) -> list[Finding]:
    """What is wrong with the records, and what to do."""
    if status is None:
        return []
    found = []
    if records is not None and records.refused is not None:
        what, do = records.refused
        found.append(Finding(level="error", what=what, do=do))
    waited_s = status.unanswered_seconds
    if records is not None and records.trouble is not None and waited_s is not None and waited_s >= TROUBLE_S:
        found.append(
            Finding(
                level="error",
                what=f"no master of the records has answered for {waited_s:.0f} s: {records.trouble.reason}",
                do='see whether a node with node.role = "master" or dispatch.serve = true runs, and its log; training '
                "goes on by itself when one serves",
            )
        )
    if master is not None and master.serves_since is None and master.reason:
        found.append(
            Finding(
                level="warning",
                what=f"this node is a master and does not serve: {master.reason}",
                do="a master on etcd stands by while another serves; otherwise see dispatch.store",
            )
        )
    if status.discarded:
        found.append(
            Finding(
                level="error",
                what=f"{status.discarded} tasks were discarded: their records are left out of a pass",
                do="see dispatch_task_discarded in the master's log; `p2pnode records check` looks at the files",
            )
        )
    return found


def dispatch_metrics(status: DispatchStatus | None) -> Iterator[Family]:
    """The queue as this node last saw it."""
    if status is None:
        return
    states: list[Sample] = [
        ({"state": state}, getattr(status, state)) for state in ("todo", "leased", "done", "failed")
    ]
    yield Family("p2pnode_dispatch_tasks", "gauge", "Tasks of the pass by state.", states)
    yield single("p2pnode_dispatch_pass", "gauge", "The present pass over the records.", status.pass_number)
    yield single("p2pnode_dispatch_serves", "gauge", "1 when this node serves the queue.", int(status.serves))
    yield single("p2pnode_dispatch_discarded_total", "counter", "Tasks that were given up.", status.discarded)
    text = "Dispatched records that this node trained, in steps that are counted."
    yield single("p2pnode_dispatch_records_total", "counter", text, status.records_trained)
    text = "Tasks of this node that others had when it reported them."
    yield single("p2pnode_dispatch_superseded_total", "counter", text, status.tasks_superseded)
