"""Rows for devices, named values, a parameter server and repairs, and none where there is nothing of the kind."""

from __future__ import annotations

import msgspec

from p2pnode.status.schema import CoordinationStatus, DeviceStatus, ExchangeStatus, ServerStatus, ValuesStatus
from p2pnode.terminal.status_view import device_rows, repair_rows, server_rows, status_text, value_rows

DEVICES = [
    msgspec.to_builtins(
        DeviceStatus(
            index=index,
            device=f"cuda:{index}",
            state=state,
            pid=1,
            failures=index,
            optimizer_steps=40,
            samples=1280,
            loss=0.31234,
            step_seconds=0.8,
            leads=index == 0,
        )
    )
    for index, state in enumerate(("running", "crashed"))
]
VALUES = ValuesStatus(
    keys=7,
    bytes=700,
    limit_bytes=9000,
    updates=5,
    refused=2,
    reads=3,
    batches=1,
    waiting=4,
    waiting_bytes=64,
    unanswered=1,
)
SERVER = ServerStatus(version=9, workers=3, given=20, done=15, held=3, waiting=2, again=1, refused=0)


def test_each_device_is_named_with_its_state() -> None:
    """The one that leads, the one that failed; many are counted by state, and a node with one has no row."""
    assert device_rows(DEVICES, {}) == [
        ("devices", "cuda:0 (0): running, leads, loss 0.312, 40 steps at 800 ms, 1280 samples"),
        ("", "cuda:1 (1): crashed, loss 0.312, 40 steps at 800 ms, 1280 samples, failed 1 times"),
    ]
    assert device_rows(DEVICES * 5, {}) == [("devices", "10: 5 running, 5 crashed")]
    assert device_rows([], {}) == []


def test_what_the_nodes_decide_together_is_said_below_the_devices() -> None:
    """Who divides the local steps, and that nobody does; the leader where there is one."""
    assert device_rows(
        [], msgspec.to_builtins(CoordinationStatus(server="ab", serves=True, trainers=6, leader=None))
    ) == [("devices", "this node divides the local steps, among 6 trainers")]
    alone = CoordinationStatus(server=None, serves=False, trainers=0, leader=None)
    assert device_rows([], msgspec.to_builtins(alone)) == [
        ("devices", "no node answers that divides the local steps: this one takes its own share")
    ]
    together = CoordinationStatus(server="ab" * 20, serves=False, trainers=0, leader="cd" * 20)
    assert device_rows([], msgspec.to_builtins(together)) == [
        ("devices", "abababab divides the local steps; the leader of all is at cdcdcdcd")
    ]


def test_values_and_tasks_of_a_server_are_counted() -> None:
    """What waits, is refused or given again is named only where there is any."""
    assert value_rows(msgspec.to_builtins(VALUES)) == [
        ("values", "7 keys owned, 700 B of 9.00 kB"),
        ("", "5 updates applied, 3 keys read, 2 refused, 4 wait here (64 B), 1 of this node have no answer yet"),
    ]
    quiet = msgspec.structs.replace(VALUES, refused=0, waiting=0, unanswered=0)
    assert value_rows(msgspec.to_builtins(quiet))[1] == ("", "5 updates applied, 3 keys read")
    assert server_rows(msgspec.to_builtins(SERVER)) == [
        ("server", "version 9, 3 workers"),
        ("", "20 tasks given, 15 done, 3 with workers, 2 wait for one, 1 given again"),
    ]
    assert value_rows({}) == server_rows({}) == []


def test_what_was_lost_or_repaired_has_a_row() -> None:
    """And a node to which nothing has happened has none; all keys are those of the schema."""
    assert repair_rows(msgspec.to_builtins(ExchangeStatus(arithmetic="numpy"))) == []
    found = ExchangeStatus(arithmetic="numpy", shards_resigned=2, shards_to_mend=1)
    assert repair_rows(msgspec.to_builtins(found)) == [
        (
            "",
            "2 broken shards left to their backups; 1 superseded copy waits for its owner",
        )
    ]
    everything = dict.fromkeys(ExchangeStatus.__struct_fields__, 1)
    assert repair_rows(everything)[0][1].count(";") == 5


def test_the_status_shows_them_and_an_object_of_another_version() -> None:
    """Each has its label; missing keys are no error."""
    status = {
        "devices": DEVICES,
        "exchange": {"shards_resigned": 1},
        "values": msgspec.to_builtins(VALUES),
        "server": msgspec.to_builtins(SERVER),
        "coordination": {"server": None, "serves": False, "trainers": 0, "leader": None},
    }
    text = status_text(status)
    assert "no node answers that divides the local steps" in text
    assert all(
        label in text
        for label in ("devices    cuda:0", "1 broken shard left to its backup", "values     7", "server     v")
    )
    assert "devices    ? (?): ?" in status_text({"devices": [{}, 3], "values": {"x": 1}, "server": {"x": 1}})
