"""What only a GPU can show: the same bits as on a processor, memory that its driver has registered, captured steps."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.supervisor.gpu_errors import explained
from p2pnode.training.trainer.connection import DaemonConnection, ScriptWarnings
from p2pnode.training.trainer.device_turns import DeviceTurns
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.pinned import register
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.state_writer import StateWriter
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.shared_memory import SharedVectors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda", 0)


def exchanged(device: torch.device, dtype: torch.dtype) -> bytes:
    """Two exchanges through shared memory: all values that were seen."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(7, 11)).to(dtype)
    model = model.to(device, memory_format=torch.channels_last)
    vector = ModelVector(model, chunk=40)
    memory = SharedVectors(vector.layout.total)
    shared, delta = torch.from_numpy(memory.vector), torch.from_numpy(memory.delta)
    assert register([shared, delta, *vector.on_host()], device) == ""
    seen: list[Any] = []
    generator = np.random.default_rng(3)
    vector.load(generator.standard_normal(vector.layout.total, dtype=np.float32))
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert vector.cut(memory.delta)
        vector.add_to_base(delta)
        shared.copy_(torch.from_numpy(generator.standard_normal(vector.layout.total, dtype=np.float32)))
        vector.enter(shared, delta.clone())
        seen += [delta.clone(), vector.base.cpu().clone()]
        vector.load_shared()
        vector.read(memory.vector)
        seen.append(shared.clone())
    return b"".join(each.numpy().tobytes() for each in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_exchange_has_the_bits_of_a_processor(dtype: torch.dtype) -> None:
    """In chunks, through registered memory; the base of half precision is on the host."""
    assert exchanged(GPU, dtype) == exchanged(torch.device("cpu"), dtype)


def test_the_vector_says_where_it_is() -> None:
    """The base of a model in float32 is on the GPU, which the driver knows by its identity."""
    single, half = ModelVector(nn.Linear(3, 2).to(GPU)), ModelVector(nn.Linear(3, 2).to(GPU, torch.bfloat16))
    assert (single.device_bytes, half.device_bytes) == (32, 0)
    assert list(single.gpus) == ["cuda:0"]
    assert single.gpus["cuda:0"].startswith("GPU-")


def test_a_captured_optimizer_follows_its_schedule() -> None:
    """It reads the rate from the tensor with which it was captured, also when the schedule goes back."""
    weight = nn.Parameter(torch.zeros(1, device=GPU))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(1.0, device=GPU), capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    given = ScriptArguments.of(optimizer, schedule, None, ScriptWarnings())
    weight.grad = -torch.ones(1, device=GPU)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    moved = []
    for position in (2, 1, 3):
        given.seek(position)
        before = float(weight.detach())
        graph.replay()
        moved.append(float(weight.detach()) - before)
    assert moved == pytest.approx([0.25, 0.5, 0.125], rel=0.01)  # Adam moves by the rate where gradients are equal


def test_a_checkpoint_is_copied_into_registered_memory(tmp_path: Path) -> None:
    """From the second one on, with the values of its moment."""
    layer = nn.Linear(64, 64).to(GPU)
    optimizer = torch.optim.Adam(layer.parameters())
    written = threading.Event()
    writer = StateWriter(lambda message: written.set() if isinstance(message, messages.Written) else None)
    for turn in range(3):
        layer(torch.ones(1, 64, device=GPU)).sum().backward()
        optimizer.step()
        wanted = optimizer.state_dict()["state"][0]["exp_avg_sq"].cpu()
        written.clear()
        writer.save(turn, tmp_path / "state", {"optimizer": optimizer.state_dict()})
        assert written.wait(60)
        assert torch.equal(snapshot.load(tmp_path / "state")["optimizer"]["state"][0]["exp_avg_sq"], wanted)
    assert torch.frombuffer(writer._pool._memory, dtype=torch.uint8).is_pinned()


def test_a_script_launches_one_step_ahead_of_its_device() -> None:
    """The step before the last one is done when it asks."""
    ahead = DeviceTurns(ModelVector(nn.Linear(1, 1).to(GPU)), cast(DaemonConnection, SimpleNamespace(next_step=list)))
    ahead.order = StepOrder(1, 4, 1.0, is_first=False, asks=True)
    ends = []
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        ends.append(torch.cuda.Event())
        ends[-1].record()
        ahead.next_step(is_due=True)
        assert all(end.query() for end in ends[:-1])
    assert not ends[-1].query()


def test_memory_that_is_full_is_named() -> None:
    """As torch says it on this machine."""
    with pytest.raises(torch.OutOfMemoryError) as full:
        torch.empty(1 << 50, device=GPU)
    assert "too little memory" in explained(TrainerFailed(str(full.value))).reason
