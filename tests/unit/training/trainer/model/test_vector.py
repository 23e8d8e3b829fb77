"""A model as a vector: what is in it, in which order, and what a delta is measured from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.shards.delta_range import MAX_LENGTH
from p2pnode.training.trainer.model.value_entry import ValueEntry
from p2pnode.training.trainer.model.vector import ModelVector, bare_model, canonical_name
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer_link.interface import TrainerFailed


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


@pytest.mark.worker_group("compiler")  # the import takes three seconds
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


def test_the_base_of_a_rounded_model_is_its_own() -> None:
    """What a half-precision model took over is the base, whatever becomes of the vector it came from."""
    vector = ModelVector(nn.Linear(3, 2).to(torch.bfloat16))
    shared = np.ones(vector.layout.total, np.float32)
    delta = np.full_like(shared, 9)

    vector.load(shared)
    shared[:] = 5
    vector.cut(delta)

    assert not delta.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_never_pushed(dtype: torch.dtype) -> None:
    """Without training the delta is zero, though the model cannot hold the vector's values in its own type."""
    vector = ModelVector(nn.Linear(30, 20).to(dtype))
    shared = np.random.default_rng(3).standard_normal(vector.layout.total).astype(np.float32)
    delta = np.full_like(shared, 9)

    vector.load(shared)
    vector.cut(delta)

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

    with pytest.raises(TrainerFailed, match="FullyShardedDataParallel") as failure:
        ModelVector(nn.Sequential(wrapped))
    assert failure.value.fatal


def test_parameters_without_values_are_refused() -> None:
    """Lazy ones have no shape, meta ones no values, complex ones no place in a vector of reals."""
    with pytest.raises(TrainerFailed, match="bias is on the meta device"):
        ModelVector(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TrainerFailed, match="has no shape yet"):
        ModelVector(nn.LazyLinear(2))
    with pytest.raises(TrainerFailed, match="only dense real numbers"):
        ModelVector(nn.Linear(2, 2, dtype=torch.complex64))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


def stepped(model: nn.Module, by: float) -> None:
    """An optimiser step moves every value by this."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def values_of(vector: ModelVector) -> list[float]:
    got = np.zeros(vector.layout.total, np.float32)
    vector.read(got)
    return got.tolist()


@DTYPES
def test_values_that_enter_move_the_model_and_its_base_and_leave_the_progress(dtype: torch.dtype) -> None:
    """A step trained after the cut is in the next delta, once, whatever others have done to the values."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared, delta = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    vector.load(shared)
    stepped(model, 2.0)
    vector.cut(delta)
    assert delta.tolist() == [2.0] * 8
    stepped(model, 1.0)
    vector.add_to_base(torch.from_numpy(delta))
    stepped(model, 1.0)
    vector.enter(torch.from_numpy(shared + 10.0))  # of which 8 are of other nodes
    assert values_of(vector) == (shared + 12.0).tolist()
    stepped(model, 1.0)
    vector.cut(delta)
    assert delta.tolist() == [3.0] * 8


@DTYPES
def test_what_a_codec_leaves_out_and_what_was_not_sent_goes_out_with_the_next_delta(dtype: torch.dtype) -> None:
    """The rest stays progress by itself."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared, delta = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    vector.load(shared)
    stepped(model, 2.0)
    vector.cut(delta)
    sent = torch.zeros(8)
    sent[:4] = 1.5
    vector.add_to_base(sent)
    part = torch.zeros(8)
    part[:2] = 1.5
    vector.take_back(part)
    vector.enter(torch.from_numpy(shared) + sent - part)
    vector.cut(delta)
    assert delta.tolist() == [2.0, 2.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]


@DTYPES
def test_the_shared_values_can_be_had_at_any_time(dtype: torch.dtype) -> None:
    """Before the delta is on its way, while it is, and when the values that contain it have entered."""
    model = nn.Linear(3, 2).to(dtype)
    vector = ModelVector(model)
    shared, delta = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)

    def known() -> list[float]:
        own = vector.keep()
        vector.load_shared()
        found = values_of(vector)
        vector.put_back(own)
        return found

    vector.load(shared)
    stepped(model, 2.0)
    vector.cut(delta)
    assert known() == shared.tolist()
    vector.add_to_base(torch.from_numpy(delta))
    assert vector.is_ahead
    assert known() == shared.tolist()
    lacks = torch.from_numpy(delta.copy())
    vector.enter(torch.from_numpy(shared + 5.0), lacks)
    assert vector.is_ahead
    assert known() == (shared + 5.0).tolist()
    assert values_of(vector) == (shared + 7.0).tolist()
    stepped(model, 1.0)
    vector.cut(delta)
    vector.add_to_base(torch.from_numpy(delta))
    assert known() == (shared + 5.0).tolist()
    stepped(model, -1.0)
    vector.take_back(torch.from_numpy(delta))
    vector.enter(torch.from_numpy(shared + 7.0))
    assert not vector.is_ahead
    assert known() == (shared + 7.0).tolist()
    keeps = torch.arange(8) < 4
    for step in (9.0, 11.0):  # an owner that is silent for two exchanges
        stepped(model, 1.0)
        vector.cut(delta)
        vector.add_to_base(torch.from_numpy(delta.copy()))
        vector.enter(torch.from_numpy(shared + step), keeps_base=keeps)
        assert vector.is_ahead
        assert known() == [*(shared[:4] + 7.0), *(shared[4:] + step)]
    vector.enter(torch.from_numpy(shared + 13.0))
    assert not vector.is_ahead
    assert known() == (shared + 13.0).tolist()
    vector.enter(torch.from_numpy(shared + 15.0), keeps_base=keeps)
    assert not vector.is_ahead


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**127])
def test_progress_that_no_owner_would_add_is_taken_back(value: float) -> None:
    """The model is at its base again, and the next delta is what is trained from there."""
    model = nn.Linear(3, 2)
    vector = ModelVector(model)
    entry = ValueEntry(vector, Ranks())
    copies: list[list[float]] = []
    loads = WeightLoads(vector, [], on_load=lambda: copies.append(values_of(vector)))
    shared, delta = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    entry.use(shared, delta)
    vector.load(shared)
    stepped(model, value)
    assert entry.cut(loads) == (False, True)
    assert not entry.is_exchanging
    assert values_of(vector) == shared.tolist()
    assert copies == [shared.tolist()]  # else a copy of the script's would bring them back
    stepped(model, 1.0)
    assert entry.cut(loads) == (True, True)
    assert not entry.has_rest
    assert entry.cut(loads) == (True, False)
    assert entry.has_rest
    assert delta.tolist() == [1.0] * 8


def test_rounding_in_a_model_of_half_precision_does_not_add_up() -> None:
    """A hundred moves that bfloat16 cannot show, of values that it can: the model is where they are, to one rounding,
    and nothing of it is pushed."""
    model = nn.Linear(3, 2).to(torch.bfloat16)
    vector = ModelVector(model)
    shared, delta = np.full(8, 1.0, np.float32), np.zeros(8, np.float32)
    vector.load(shared)
    for _ in range(100):
        shared += np.float32(0.001)
        vector.enter(torch.from_numpy(shared))
    assert np.abs(np.array(values_of(vector)) - 1.1).max() < 2**-8
    vector.cut(delta)
    assert delta.tolist() == [0.0] * 8


class Mixed(nn.Module):
    """Types, memory formats and shapes that are cut in all ways: rows, single rows, parts of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(5, 3).to(torch.bfloat16)
        self.long = nn.Linear(7, 1, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0))


def exchanged(chunk: int, *, is_on_host: bool = True) -> tuple[list[bool], bytes]:
    """Three exchanges: what every cut says, and all values that were seen."""
    generator = np.random.default_rng(5)
    model = Mixed()
    vector = ModelVector(model, chunk=chunk)
    vector.is_on_host = is_on_host
    total, found, seen = vector.layout.total, [], []
    delta = np.zeros(total, np.float32)
    vector.load(generator.standard_normal(total).astype(np.float32))
    for turn in range(3):
        stepped(model, 0.1 * (turn + 1))
        found.append(vector.cut(delta) < MAX_LENGTH)
        sent = delta.round(1)
        vector.add_to_base(torch.from_numpy(sent))
        stepped(model, 0.01)
        part = np.where(np.arange(total) % 2, sent, 0).astype(np.float32)
        vector.take_back(torch.from_numpy(part))
        lacking = torch.from_numpy(generator.standard_normal(total).astype(np.float32))
        vector.enter(torch.from_numpy(generator.standard_normal(total).astype(np.float32)), lacking)
        own = vector.keep()
        seen += [*delta.tolist(), *vector.base.tolist(), *values_of(vector)]
        vector.load_shared()
        seen += values_of(vector)
        vector.put_back(own)
    vector.keep_delta()
    seen += vector.kept.tolist()
    return found, np.array(seen).tobytes()


@pytest.mark.parametrize("chunk", [1, 5, 27, 60])
def test_values_that_pass_in_chunks_are_the_same_to_the_bit(chunk: int) -> None:
    """As they do between a host and a device, where a whole model has no room for a copy."""
    whole = exchanged(1 << 20)

    assert exchanged(chunk) == exchanged(chunk, is_on_host=False) == whole
    assert whole[0] == [True] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**127])
def test_a_device_finds_the_progress_that_no_owner_would_add(value: float) -> None:
    """It is not read once more by the processor of the host, which says the same of it."""
    model = nn.Linear(3, 2)
    vector = ModelVector(model, chunk=3)
    vector.is_on_host = False
    vector.load(np.arange(8, dtype=np.float32))
    with torch.no_grad():
        model.weight[1, 1] = value

    assert not vector.cut(np.zeros(8, np.float32)) < MAX_LENGTH


def test_one_of_several_trainers_begins_at_a_delta_that_is_finite() -> None:
    """No owner adds another one; the shared values lack it."""
    model = nn.Linear(3, 2)
    vector = ModelVector(model)
    shared = np.arange(8, dtype=np.float32)
    for value, is_ahead in ((np.nan, False), (np.inf, False), (0.5, True)):
        vector.load_at_delta(shared, np.full(8, value, np.float32))
        assert vector.is_ahead is is_ahead
        assert values_of(vector) == (shared + (0.5 if is_ahead else 0.0)).tolist()
