"""Which trainers a node gets: one process, or one for each device, with their folders, threads and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.training.devices import gpus
from p2pnode.training.devices.gpus import resolved_devices
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.node_step import DeviceGroups
from p2pnode.training.devices.opening import joint_hello, start_all
from p2pnode.training.devices.start import PATIENCE, make_trainer
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.silence import HANG_S
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import Restored, TrainerFailed, TrainerHello, TrainerLeft
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

NODE = NodeStart(b"n" * 20, 3)


def made(
    folder: Path,
    device: str | Sequence[str] = "auto",
    settings: Any = None,
    *,
    hang_s: float = HANG_S,
    gloo: bool = False,
    **training: Any,
) -> Any:
    """The trainer of a node with these settings; no process is started."""
    found: list[Any] = []

    async def main() -> None:
        states: list[str] = []
        trainer = make_trainer(
            TrainingSettings(device=device, **training),  # type: ignore[arg-type]
            settings or DevicesSettings(),
            command=None,
            node=NODE,
            state_dir=folder,
            environment=make_environment(),
            on_state=states.append,
            on_output=None,
            hang_s=hang_s,
            merges_by_gloo=gloo,
        )
        found.extend((trainer, states))

    run(main())
    found[0].reported = found[1]
    return found[0]


@pytest.mark.parametrize("device", ["auto", "cpu", ["cuda:1"]])
def test_one_device_is_one_process(tmp_path: Path, device: str | list[str]) -> None:
    """With all threads, in the state directory itself, and told of no other trainer."""
    trainer = made(tmp_path, device, threads=6)
    assert type(trainer) is ProcessTrainer
    assert trainer._settings.device == (device if isinstance(device, str) else device[0])
    assert (trainer._settings.threads, trainer._state_dir, trainer._node) == (6, tmp_path, NODE)


def test_each_of_several_devices_has_a_process_of_its_own(tmp_path: Path) -> None:
    """They share the threads, and know which of how many they are. The first one's files are where a single one's
    would be, those of the others below."""
    trainer = made(tmp_path, "cpu*3", threads=7)
    assert isinstance(trainer, HostTrainer)
    processes: list[Any] = [device.trainer for device in trainer._devices]
    assert all(type(one) is ProcessTrainer for one in processes)
    assert [one._settings.device for one in processes] == ["cpu"] * 3
    assert [one._settings.threads for one in processes] == [2, 2, 2]
    assert [(one._node.device, one._node.devices) for one in processes] == [(0, 3), (1, 3), (2, 3)]
    assert [one._state_dir for one in processes] == [tmp_path, tmp_path / "devices/1", tmp_path / "devices/2"]
    assert all(one._node.node_id == NODE.node_id and one._node.incarnation == 3 for one in processes)
    assert len({id(one._memory) for one in processes}) == 1
    assert all(one.on_state == trainer.trainer_state_changed for one in processes)


def test_one_device_that_is_coordinated_globally_is_a_host(tmp_path: Path) -> None:
    """Its steps are asked for, as those of several are."""
    trainer = made(tmp_path, "cpu", DevicesSettings(coordination="global"))
    assert isinstance(trainer, HostTrainer)
    assert len(trainer._devices) == 1


@pytest.mark.parametrize(
    ("step", "coordination", "leaders"),
    [("average", "none", 0), ("leader", "none", 1), ("leader", "global", 2), ("average", "global", 0)],
)
def test_the_memory_has_room_for_the_leaders_that_there_are(
    tmp_path: Path, step: Any, coordination: Any, leaders: int
) -> None:
    """None for an average; the node's; or that and the swarm's."""
    trainer = made(tmp_path, "cpu*2", DevicesSettings(step=step, coordination=coordination))
    assert trainer._devices[0].trainer._memory._counts == (2, leaders)


def test_trainers_that_merge_by_a_group_meet_in_a_folder_without_old_files(tmp_path: Path) -> None:
    """The numbers of an earlier process's groups come again. A merge is given up before a silent trainer counts as
    hung."""
    folder = tmp_path / "devices"
    folder.mkdir()
    for name in ("group.1", "group.2", "other"):
        (folder / name).touch()
    trainer = made(tmp_path, "cpu*2", hang_s=40.0, gloo=True)
    assert sorted(path.name for path in folder.iterdir()) == ["other"]
    groups = trainer._groups
    assert isinstance(groups, DeviceGroups)
    order = groups.orders({0: 1.0, 1: 1.0})[0]
    assert (order.backend, order.timeout_s, order.place) == ("gloo", PATIENCE * 40.0, str(folder / "group.1"))
    assert made(tmp_path, "cpu*2", hang_s=1.0, gloo=True)._groups.timeout_s == 1.0
    assert made(tmp_path, "cpu*2")._groups is None
    assert made(tmp_path, "cuda:0,cuda:1")._groups is not None
    assert made(tmp_path, "cuda:0,cuda:1", DevicesSettings(step="leader"))._groups is None


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the environment leaves visible, otherwise the driver's folders; none without a driver."""
    for visible, count in (("", 0), ("0", 1), ("0,2", 2), ("-1", 0), (" 1 , ,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert resolved_devices("all") == ([f"cuda:{number}" for number in range(count)] or ["auto"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "NVIDIA_GPUS", tmp_path / "gpus")
    assert resolved_devices("all") == ["auto"]
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    trainer = made(tmp_path, "all")
    assert [device.name for device in trainer._devices] == ["cuda:0", "cuda:1"]


# -- the first start of all trainers of a node


def hello(pid: int, layout: Layout | None = None, engine: EngineOpened | None = None) -> TrainerHello:
    return TrainerHello(layout or Layout(()), "digits", "1", "", f"stub:{pid}", pid=pid, host_bytes=100, engine=engine)


class Trainer:
    """Starts after `start_s`; keeps what it was restored from."""

    def __init__(self, index: int, start_s: float = 0.0, failure: Exception | None = None) -> None:
        self.index, self.start_s, self.failure = index, start_s, failure
        self.restored: Restored | None = None
        self.is_cancelled = False

    async def start(self, *, resume: Any) -> TrainerHello:
        try:
            await asyncio.sleep(self.start_s)
            if self.failure is not None:
                raise self.failure
            self.restored = await resume(hello(self.index), np.zeros(1, np.float32))
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return hello(self.index)


def devices(*trainers: Trainer) -> list[Any]:
    return [SimpleNamespace(index=one.index, name=f"stub:{one.index}", trainer=one, pid=None) for one in trainers]


@run_by(run, strict=True)
async def test_the_first_fills_the_vector_and_the_others_wait_for_it() -> None:
    """They are restored from the files that belong to the first's, in the order of the devices."""
    trainers = [Trainer(0, 5.0), Trainer(1), Trainer(2, 1.0)]

    async def resume(_hello: TrainerHello, _vector: Any) -> Restored:
        return Restored(has_vector=True, file="saved")

    hellos, file = await start_all(devices(*trainers), resume)
    assert ([one.pid for one in hellos], file) == ([0, 1, 2], "saved")
    assert [one.restored.file for one in trainers if one.restored is not None] == ["saved", "saved.1", "saved.2"]
    assert all(one.restored is not None and one.restored.has_vector for one in trainers)


@run_by(run, strict=True)
async def test_without_anything_to_resume_the_first_begins_with_its_own_values() -> None:
    """The others load these, and have no file."""
    trainers = [Trainer(0), Trainer(1)]
    _, file = await start_all(devices(*trainers), None)
    assert file == ""
    assert [one.restored for one in trainers] == [Restored(), Restored(has_vector=True, file="")]


@pytest.mark.parametrize("index", [0, 1])
@run_by(run, strict=True)
async def test_a_trainer_that_cannot_start_is_named_and_the_others_are_given_up(index: int) -> None:
    """Also where those wait for the first."""
    trainers = [Trainer(0, 5.0), Trainer(1, 5.0)]
    trainers[index].start_s, trainers[index].failure = 1.0, TrainerFailed("no memory", "less", fatal=True)
    with pytest.raises(TrainerFailed) as failed:
        await start_all(devices(*trainers), None)
    assert (failed.value.reason, failed.value.hint, failed.value.fatal) == (
        f"device stub:{index}: no memory",
        "less",
        True,
    )
    assert trainers[1 - index].is_cancelled


@run_by(run, strict=True)
async def test_a_script_that_has_left_is_no_failure_of_a_device() -> None:
    """Its reason stays as it is."""
    with pytest.raises(TrainerLeft, match="it has returned"):
        await start_all(devices(Trainer(0), Trainer(1, 0.0, TrainerLeft("it has returned"))), None)


def test_the_trainers_as_one() -> None:
    """All devices by name, the memory of all and of the node's own delta; each device knows its process."""
    layout = Layout((LayoutEntry("w", (3,), "float32", "parameter", 0, 3),))
    found = devices(Trainer(0), Trainer(1))
    joint = joint_hello(found, [hello(10, layout), hello(11, layout)])

    assert (joint.device, joint.pid, joint.host_bytes) == ("stub:10,stub:11", 10, 200 + 8 * 4 * 3)
    leader = joint_hello(found, [hello(10, layout), hello(11, layout)], positions=2)
    assert leader.host_bytes == joint.host_bytes + 2 * 4 * 3
    assert [one.pid for one in found] == [10, 11]
    with pytest.raises(TrainerFailed, match="stub:1 built another model than the one on stub:0"):
        joint_hello(found, [hello(10, layout), hello(11)])
    quantised = [
        msgspec.structs.replace(hello(pid, layout), frozen={"mask": "bool [2] 1", "codes": f"uint8 [2] {pid}"})
        for pid in (1, 2)
    ]
    with pytest.raises(TrainerFailed, match="the tensor codes, which is not exchanged, is another on stub:"):
        joint_hello(found, quantised)


def test_an_engine_wants_one_process() -> None:
    """Of several devices it is refused, for good."""
    with pytest.raises(TrainerFailed, match="engine of named values is one process") as failed:
        joint_hello(devices(Trainer(0), Trainer(1)), [hello(0, engine=EngineOpened("p2p", 1)), hello(1)])
    assert failed.value.fatal
