"""Records that nodes share without a master, and what a script is told where `swarm.records` is not possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from p2pnode.training.dispatch.dataset import read_dataset
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.records.dataset import RecordFileStream
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.record_messages import RecordSource
from tests.harness.builders.record_files import RecordConnection, write_records
from tests.harness.stubs.shared_data import DirectConnection, Script
from tests.unit.training.trainer.sampling.test_sampler import epoch, meet

RECORDS = [b"%d" % number for number in range(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "a.recordio", RECORDS[:170], 20)
    write_records(tmp_path / "b.recordio", RECORDS[170:], 30)
    return tmp_path


def start(folder: Path, source: Any) -> Start:
    records = RecordSource(source, ["*.recordio"], str(folder), True, 0, 7)
    return Start("", "", {}, "cpu", 0, 7, 1, 1, 0, records)


def test_the_stream_skips_without_reading(folder: Path) -> None:
    """The records of all files in order, from any place; chunks before it are not opened."""
    stream = RecordFileStream(read_dataset(["*.recordio"], str(folder)), int)
    assert list(stream) == list(range(300))
    (folder / "a.recordio").unlink()

    assert list(stream.skip(170)) == list(range(170, 300))
    assert list(stream.skip(100).skip(185)) == list(range(285, 300))


def test_two_nodes_share_the_records_without_a_master(folder: Path) -> None:
    """`source = "shared"`: together every record once."""
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    for script in scripts:
        script.data.begin(start(folder, "shared"))
    loaders = [DataLoader(script.data.records(int, lambda: None), batch_size=10) for script in scripts]
    meet(*scripts)

    parts = [epoch(script, loader) for script, loader in zip(scripts, loaders, strict=True)]

    assert sorted(parts[0] + parts[1]) == list(range(300))
    assert all(parts)


@pytest.mark.parametrize(
    ("source", "ranks", "says"),
    [(None, 1, "no records are set"), ("master", 2, "under torchrun"), ("local", 1, "matches no file")],
)
def test_what_is_not_possible_is_said(tmp_path: Path, source: str | None, ranks: int, says: str) -> None:
    """Nothing set, several ranks, files that are not there; and a second data set beside the records."""
    data = SharedData(Ranks(0, ranks, "cpu"), cast(DaemonConnection, RecordConnection([])), lambda *_: None)
    if source is not None:
        data.begin(start(tmp_path, source))

    with pytest.raises(ValueError, match=says):
        data.records(None, lambda: None)


def test_records_are_the_only_data_of_a_script(folder: Path) -> None:
    """`swarm.step` counts one of them."""
    data = SharedData(Ranks(0, 1, "cpu"), cast(DaemonConnection, RecordConnection([])), lambda *_: None)
    data.begin(start(folder, "local"))
    data.records(None, lambda: None)

    with pytest.raises(ValueError, match="shares a data set already"):
        data.sampler(10, shuffle=True, nodes=1.0)
