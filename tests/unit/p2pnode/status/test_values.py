"""What `/status` and `/metrics` say of named values and of a parameter server's tasks."""

from __future__ import annotations

from p2pnode.status.prometheus import render
from p2pnode.status.schema import ServerStatus, ValuesStatus
from p2pnode.status.values import server_metrics, server_status, values_metrics, values_status
from p2pnode.training.trainer_link.engine_messages import TaskCounts


def test_a_node_without_values_says_nothing_of_them() -> None:
    """Neither does one that does not serve; both have no metrics."""
    assert values_status(None) is None
    assert server_status(None) is None
    assert [*values_metrics(None), *server_metrics(None)] == []


def test_every_number_has_its_own_place() -> None:
    """No two keys of `/status`, and no two metrics, show the same number."""
    status = server_status(TaskCounts(1, 2, 3, 4, 5, 6, 7, 8, 9))

    assert status == ServerStatus(version=1, workers=2, given=3, done=4, held=5, waiting=6, again=7, refused=8, lost=9)
    page = render(list(server_metrics(status)))
    for line in (
        "p2pnode_server_version 1",
        "p2pnode_server_workers 2",
        "p2pnode_server_tasks_given_total 3",
        "p2pnode_server_tasks_done_total 4",
        'p2pnode_server_open_tasks{state="held"} 5',
        'p2pnode_server_open_tasks{state="waiting"} 6',
        "p2pnode_server_tasks_again_total 7",
        "p2pnode_server_updates_refused_total 8",
        "p2pnode_server_updates_lost 9",
    ):
        assert line in page.splitlines()


def test_values_have_metrics_for_all_they_count() -> None:
    """Keys, bytes, updates by their fate, reads, batches, and what waits where."""
    status = ValuesStatus(
        keys=1,
        bytes=2,
        limit_bytes=3,
        updates=4,
        refused=5,
        reads=6,
        batches=7,
        waiting=8,
        waiting_bytes=9,
        unanswered=10,
    )
    page = render(list(values_metrics(status))).splitlines()

    for line in (
        "p2pnode_values_keys 1",
        "p2pnode_values_bytes 2",
        'p2pnode_values_updates_total{fate="applied"} 4',
        'p2pnode_values_updates_total{fate="refused"} 5',
        "p2pnode_values_reads_total 6",
        "p2pnode_values_batches_total 7",
        'p2pnode_values_waiting_updates{at="owner"} 8',
        "p2pnode_values_waiting_bytes 9",
        'p2pnode_values_waiting_updates{at="origin"} 10',
    ):
        assert line in page
