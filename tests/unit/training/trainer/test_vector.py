"""A model as a vector: what is in it, in which order, and what a delta is measured from."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

from training.manifest import NOTHING_FROZEN
from training.trainer.vector import ModelVector, bare_model, canonical_name
from training.trainer_link.interface import TrainerFailed


def names(vector: ModelVector) -> list[str]:
    return [entry.name for entry in vector.layout.entries]


def test_parameters_come_first_sorted_by_name() -> None:
    """Parameters by name, then persistent floating-point buffers by name; integer buffers are the node's own."""
    vector = ModelVector(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))

    assert names(vector) == ["0.bias", "0.weight", "1.bias", "1.weight", "1.running_mean", "1.running_var"]
    assert [entry.kind for entry in vector.layout.entries] == ["parameter"] * 4 + ["buffer"] * 2
    assert vector.layout.total == 8 + 32 + 8 + 8 + 8 + 8
    assert vector.layout.parameter_total == 56
    assert list(vector.local_buffers) == ["1.num_batches_tracked"]


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module.layer.weight", "layer.weight"),
        ("_orig_mod.module.layer.weight", "layer.weight"),
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("layers.module.weight", "layers.module.weight"),
        ("module", "module"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name: str, bare: str) -> None:
    """Wrapped and bare models have the same layout, so nodes may wrap as they like."""
    assert canonical_name(name) == bare


@pytest.mark.worker_group("compiler")  # as in tests/simulated/test_models.py: the import takes three seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_wrapped_model_has_the_layout_of_the_bare_one() -> None:
    """DataParallel and torch.compile change neither the layout nor the digest."""
    bare = nn.Linear(3, 2)
    compiled = torch.compile(bare)

    assert ModelVector(nn.DataParallel(bare)).layout == ModelVector(bare).layout == ModelVector(compiled).layout
    assert bare_model(nn.DataParallel(bare)) is bare_model(compiled) is bare


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.Linear(3, 5, bias=False)
        self.reader = nn.Embedding(5, 3)
        self.writer.weight = self.reader.weight


def test_tied_parameters_are_in_the_vector_once() -> None:
    """A shared storage has the smallest of its names."""
    vector = ModelVector(Tied())

    assert names(vector) == ["reader.weight"]
    assert vector.layout.total == 15


def test_parameters_that_share_a_storage_without_being_one_object_count_once() -> None:
    """Two parameters over the same memory are tied, however that came about."""
    model = Tied()
    model.writer.weight = nn.Parameter(model.reader.weight.data)

    assert names(ModelVector(model)) == ["reader.weight"]


def test_frozen_parameters_are_covered_by_the_digest() -> None:
    """They are not in the vector; another value is another digest, and a trained value is not."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    first = ModelVector(model)
    with torch.no_grad():
        model[1].weight.add_(1)
    trained = ModelVector(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    other = ModelVector(model)

    assert names(first) == ["1.bias", "1.weight"]
    assert first.frozen_digest == trained.frozen_digest != other.frozen_digest
    assert list(first.frozen) == ["0.bias", "0.weight"]
    assert first.frozen["0.weight"].startswith("float32 [2, 2] ")
    assert [name for name in first.frozen if first.frozen[name] != other.frozen[name]] == ["0.weight"]


def test_a_model_with_nothing_frozen_has_the_digest_of_nothing() -> None:
    """The manifest recognises it (`training.manifest.NOTHING_FROZEN`)."""
    vector = ModelVector(nn.Linear(2, 2))

    assert (vector.frozen, vector.frozen_digest) == ({}, NOTHING_FROZEN)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("average", torch.ones(3))
        self.register_buffer("volatile", torch.ones(3), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("count", torch.tensor(0))


def test_only_finite_persistent_buffers_are_shared() -> None:
    """A mask of infinities would make every delta not finite: it belongs to the digest, as a frozen tensor."""
    vector = ModelVector(Buffered())

    assert names(vector) == ["weight", "average"]
    assert list(vector.local_buffers) == ["count"]


def test_load_and_read_are_inverse() -> None:
    """What is loaded into the model is read from it, in the model's own memory format."""
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    vector = ModelVector(model)
    wanted = np.arange(vector.layout.total, dtype=np.float32)
    got = np.zeros_like(wanted)

    vector.load(wanted)
    vector.read(got)

    assert np.array_equal(got, wanted)
    assert model.bias.tolist() == [0, 1, 2]


def test_the_delta_is_what_training_changed() -> None:
    """Every element's change, and nothing else."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.zero_()  # the change of any other value is rounded
    vector = ModelVector(model)
    base = np.zeros(vector.layout.total, np.float32)
    vector.read(base)
    delta = np.zeros_like(base)

    vector.load(base)
    with torch.no_grad():
        model.bias.add_(2)
    vector.delta(delta)

    assert delta.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]


def test_the_base_of_a_rounded_model_is_its_own() -> None:
    """What a half-precision model took over is the base, whatever becomes of the vector it came from."""
    vector = ModelVector(nn.Linear(3, 2).to(torch.bfloat16))
    shared = np.ones(vector.layout.total, np.float32)
    delta = np.full_like(shared, 9)

    vector.load(shared)
    shared[:] = 5
    vector.delta(delta)

    assert not delta.any()


def test_vectors_may_change_between_loads() -> None:
    """A delta is relative to the vector loaded last and is written into the given array, for a float32 model too."""
    model = nn.Linear(3, 2)
    vector = ModelVector(model)
    for base in (1.0, 4.0):
        shared = np.full(vector.layout.total, base, np.float32)
        delta = np.zeros_like(shared)
        vector.load(shared)
        with torch.no_grad():
            model.weight += 2.0
        vector.delta(delta)

        assert sorted(delta.tolist()) == [0.0] * 2 + [2.0] * 6
        assert (shared == base).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_never_pushed(dtype: torch.dtype) -> None:
    """Without training the delta is zero, though the model cannot hold the vector's values in its own type."""
    vector = ModelVector(nn.Linear(30, 20).to(dtype))
    shared = np.random.default_rng(3).standard_normal(vector.layout.total).astype(np.float32)
    delta = np.full_like(shared, 9)

    vector.load(shared)
    vector.delta(delta)

    assert not delta.any()
    assert vector.layout.entries[0].dtype == str(dtype).removeprefix("torch.")


def test_a_model_without_trainable_parameter_is_refused() -> None:
    """There is nothing to share; modules in a plain list are a known reason, which `requires_grad` would not mend."""
    hidden = nn.Module()
    hidden.layers = [nn.Linear(2, 2)]
    for model, hint in ((nn.Linear(2, 2).requires_grad_(False), "requires_grad"), (hidden, "ModuleList")):
        with pytest.raises(TrainerFailed, match="no trainable parameter") as failure:
            ModelVector(model)
        assert failure.value.fatal
        assert hint in failure.value.hint


def test_a_sharded_model_is_refused() -> None:
    """A module that FSDP wrapped holds only a part of the model."""
    wrapped = type("FullyShardedDataParallel", (nn.Module,), {})()
    wrapped.inner = nn.Linear(2, 2)

    with pytest.raises(TrainerFailed, match="FSDP") as failure:
        ModelVector(nn.Sequential(wrapped))
    assert failure.value.fatal


def test_a_distributed_tensor_is_refused() -> None:
    """A parameter that fully_shard spread over processes is named."""
    # Two seconds of imports, which only the process with this test needs.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

        with pytest.raises(TrainerFailed, match="bias is sharded over processes") as failure:
            ModelVector(model)
    finally:
        torch.distributed.destroy_process_group()
    assert failure.value.fatal


def test_parameters_without_values_are_refused() -> None:
    """Lazy ones have no shape, meta ones no values, complex ones no place in a vector of reals."""
    with pytest.raises(TrainerFailed, match="bias is on the meta device"):
        ModelVector(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TrainerFailed, match="has no shape yet"):
        ModelVector(nn.LazyLinear(2))
    with pytest.raises(TrainerFailed, match="only dense real numbers"):
        ModelVector(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_small_model_loads_and_subtracts_in_less_than_a_millisecond() -> None:
    """The best of twenty tries, so that another program on the machine does not decide."""
    vector = ModelVector(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    shared = np.zeros(vector.layout.total, np.float32)
    delta = np.zeros_like(shared)

    def once() -> float:
        began = time.perf_counter()
        vector.load(shared)
        vector.delta(delta)
        return time.perf_counter() - began

    assert min(once() for _ in range(20)) < 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_carried_delta_is_part_of_the_base_and_not_of_the_next_delta(dtype: torch.dtype) -> None:
    """The model holds vector + carry · delta; both may change then, and the next delta is what training adds."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared, delta = np.arange(8, dtype=np.float32), np.full(8, 0.5, np.float32)
    vector.load(shared)

    for carry in (1.0, 0.5):
        vector.load_carried(shared, delta, carry)
        assert model.weight.flatten().tolist() == (shared[2:] + carry * delta[2:]).tolist()
        kept, shared[:] = shared.copy(), np.nan  # a pull is half through
        with torch.no_grad():
            model.weight.add_(2.0)
        vector.delta(delta)
        assert delta.tolist() == [0.0] * 2 + [2.0] * 6
        shared[:] = kept
    vector.load(shared)
    assert model.weight.flatten().tolist() == shared[2:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_that_is_not_finite_is_not_carried(dtype: torch.dtype) -> None:
    """No owner adds it; a large one whose sum overflows is carried."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared = np.arange(8, dtype=np.float32)
    for value, carries in ((np.nan, False), (np.inf, False), (2.0**127, True)):
        delta = np.zeros(8, np.float32)
        delta[4:7] = value
        vector.load_carried(shared, delta, 1.0)

        assert vector.carries is carries
        assert model.weight.flatten().tolist()[-1] == 7.0
        assert model.weight.flatten().tolist()[2] == (2.0**127 if carries else 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shared_values_can_be_had_without_what_is_carried(dtype: torch.dtype) -> None:
    """For an evaluation in the middle of a turn, whatever is pulled meanwhile; a plain load carries nothing."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared, delta = np.arange(8, dtype=np.float32), np.full(8, 0.5, np.float32)
    vector.load_carried(shared, delta, 1.0)
    wanted, shared[:] = shared[2:].tolist(), -1.0
    own = vector.keep()

    vector.load_shared()
    assert model.weight.flatten().tolist() == wanted
    vector.put_back(own)
    assert model.weight.flatten().tolist() == [value + 0.5 for value in wanted]

    vector.load(shared)
    vector.load_shared()
    assert not vector.carries
    assert model.weight.flatten().tolist() == [-1.0] * 6


def test_other_ranks_know_what_is_carried() -> None:
    """Rank 0 broadcasts it beside its base: zeros where a delta was not finite, nothing in a turn that carries none."""
    first, other = ModelVector(nn.Linear(3, 2)), ModelVector(nn.Linear(3, 2))
    shared, delta = np.arange(8, dtype=np.float32), np.full(8, 0.5, np.float32)
    first.load_carried(shared, delta, 1.0)

    sent, received = first.carried_parts(1.0), other.carried_parts(1.0)
    assert sent is not None
    assert received is not None
    assert sent.tolist() == delta.tolist()
    other.base.copy_(first.base)
    received.copy_(sent)
    other.load_shared()
    got = np.zeros(8, np.float32)
    other.read(got)
    assert got.tolist() == shared.tolist()

    first.load_carried(shared, np.full(8, np.nan, np.float32), 1.0)
    sent = first.carried_parts(1.0)
    assert sent is not None
    assert not sent.any()
    assert other.carried_parts(0.0) is None
    assert not other.carries


def test_a_model_that_carries_nothing_takes_no_memory_for_it() -> None:
    """The base of a float32 model is the given vector until the first turn that carries a delta."""
    vector = ModelVector(nn.Linear(3, 2))
    shared = np.zeros(8, np.float32)
    vector.load(shared)
    assert vector.base.data_ptr() == shared.ctypes.data
    vector.load_carried(shared, np.ones(8, np.float32), 1.0)
    own = vector.base.data_ptr()
    assert own != shared.ctypes.data
    vector.load(shared)
    vector.load_carried(shared, np.ones(8, np.float32), 1.0)
    assert vector.base.data_ptr() == own


def test_a_base_that_is_kept_does_not_change_with_the_vector() -> None:
    """Of a vector that changes before the report, as under a trainer that hung, the delta is still the own way."""
    model = nn.Linear(2, 1)
    vector = ModelVector(model)
    shared, delta = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    vector.load(shared, keeps_base=True)
    shared += 100.0
    with torch.no_grad():
        model.bias += 0.5
    vector.delta(delta)
    assert delta.tolist() == [0.5, 0.0, 0.0]
    vector.load(shared)
    assert model.bias.item() == 100.0
    vector.delta(delta)
    assert delta.tolist() == [0.0, 0.0, 0.0]
