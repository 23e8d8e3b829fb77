"""What a script may do with its model and its optimisers after it has attached, and what stops it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.trainer.model.contract import ModelContract, roundings
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import TrainerFailed


class Net(nn.Module):
    """A trainable body and head, a frozen stem, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.stem = nn.Linear(4, 4).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.extra = nn.Module()


class Attached:
    """A model, its optimiser and its contract, as after `attach`."""

    def __init__(self, *, include_frozen: bool = False) -> None:
        self.warned: list[str] = []
        self.net = Net()
        trained = [value for value in self.net.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.vector = ModelVector(self.net, include_frozen=include_frozen)
        self.contract = ModelContract(
            self.net, self.vector, [self.optimizer], lambda event, text, *_: self.warned.append(f"{event}: {text}")
        )

    def refused(self) -> str:
        with pytest.raises(TrainerFailed) as caught:
            self.contract.check()
        assert caught.value.fatal
        assert caught.value.hint
        return caught.value.reason


def assign_state(net: Any) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def replace_head(net: Any) -> None:
    net.head = nn.Linear(4, 2)


def replace_in_a_list(net: Any) -> None:
    net.body[0] = nn.Linear(4, 4)


def resize_by_module(net: Any) -> None:
    net.embedding = nn.Embedding(12, 4)


def resize_by_data(net: Any) -> None:
    net.embedding.weight.data = torch.zeros(12, 4)


def new_parameter(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.zeros(2, 4))


def added_parameter(net: Any) -> None:
    net.extra.scale = nn.Parameter(torch.zeros(2))


def added_module(net: Any) -> None:
    net.body.append(nn.Linear(4, 4))


def added_to_an_empty_module(net: Any) -> None:
    net.extra.inner = nn.Linear(2, 2)


def removed(net: Any) -> None:
    del net.head.bias


def set_to_none(net: Any) -> None:
    net.head.bias = None


def tied(net: Any) -> None:
    net.body[0].weight = net.stem.weight


def parametrized(net: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.head)


def quantized(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (assign_state, "embedding.weight"),
        (replace_head, "head.weight"),
        (replace_in_a_list, "body.0.weight"),
        (resize_by_module, "embedding.weight"),
        (resize_by_data, r"embedding.weight is float32 \[12, 4\] on cpu, and was float32 \[8, 4\]"),
        (new_parameter, "head.weight"),
        (added_parameter, "extra.scale is new"),
        (added_module, "body.3.weight is new"),
        (added_to_an_empty_module, "extra.inner.weight is new"),
        (removed, "head.bias is no longer"),
        (set_to_none, "head.bias is no longer"),
        (tied, "body.0.weight is another"),
        (parametrized, "head.weight is no longer"),
        (quantized, "head.weight is another"),
        (lambda net: net.half(), "float16.*float32"),
        (lambda net: net.bfloat16(), "bfloat16.*float32"),
        (lambda net: net.double(), "float64.*float32"),
        (lambda net: net.to("meta"), "embedding.weight"),
        (lambda net: net.stem.requires_grad_(True), "stem.bias and 1 more was frozen"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.promise(21)
def test_every_way_to_replace_a_parameter_is_named(change: Callable[[Any], Any], name: str) -> None:
    """At the next turn, with the name of the parameter: its values would no longer be exchanged."""
    attached = Attached()
    attached.contract.check()

    change(attached.net)

    assert re.search(name, attached.refused())


def same_values(net: Any) -> None:
    net.load_state_dict(net.state_dict())


def other_memory(net: Any) -> None:
    net.head.weight.data = torch.ones(2, 4)


def other_activation(net: Any) -> None:
    net.body[2] = nn.GELU()


def cleared_gradients(net: Any) -> None:
    net.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    "change",
    [
        same_values,
        other_memory,
        other_activation,
        cleared_gradients,
        lambda net: net.eval(),
        lambda net: net.head.requires_grad_(False),
        lambda net: net.share_memory(),
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_keeps_the_parameters_is_allowed(change: Callable[[Any], Any]) -> None:
    """Values, memory, modes and modules without parameters may change; so may a trained layer be frozen for a while."""
    attached = Attached()

    change(attached.net)

    for _ in range(4):
        attached.contract.check()
    assert attached.warned == []


def test_values_in_other_memory_are_exchanged() -> None:
    """The vector holds the parameters, wherever their values are."""
    attached = Attached()
    attached.net.head.weight.data = torch.full((2, 4), 7.0)
    attached.contract.check()

    into = np.zeros(attached.vector.layout.total, np.float32)
    attached.vector.read(into)

    entry = next(entry for entry in attached.vector.layout.entries if entry.name == "head.weight")
    assert into[entry.offset : entry.offset + entry.size].tolist() == [7.0] * 8


def test_a_frozen_layer_may_be_unfrozen_where_it_was_included() -> None:
    """It is in the vector from the start; the optimiser has to hold it as soon as it is trained."""
    attached = Attached(include_frozen=True)
    assert "stem.weight" in {entry.name for entry in attached.vector.layout.entries}
    attached.contract.check()

    attached.net.stem.requires_grad_(True)
    attached.optimizer.add_param_group({"params": list(attached.net.stem.parameters())})

    attached.contract.check()


def test_an_unfrozen_layer_without_an_optimiser_is_warned_of() -> None:
    """Nobody trains it, and its values stay those of the swarm: Lightning unfreezes BatchNorm so."""
    attached = Attached(include_frozen=True)

    attached.net.stem.requires_grad_(True)
    attached.contract.check()

    assert attached.warned == [
        "unfrozen_not_trained: the parameter stem.weight and 1 more are unfrozen, "
        "but in no optimiser: no node trains it"
    ]


def test_a_buffer_that_is_assigned_anew_is_followed() -> None:
    """As a running mean that a forward pass replaces: the vector has the new tensor."""
    attached = Attached()
    mean: Any = attached.net.body[1]

    mean.running_mean = torch.full((4,), 3.0)
    attached.contract.check()

    named = dict(attached.vector.named_tensors())
    assert named["body.1.running_mean"] is mean.running_mean


def test_a_buffer_of_another_shape_is_named_and_a_new_one_warned_of() -> None:
    """The first cannot be exchanged any more, the second stays with the node."""
    attached = Attached()
    attached.net.extra.register_buffer("cache", torch.zeros(3))
    attached.contract.check()
    assert attached.warned == [
        "buffer_not_shared: the buffer extra.cache was added after p2pnode.attach(): it stays with this node"
    ]

    mean: Any = attached.net.body[1]
    mean.running_mean = torch.zeros(5)

    assert attached.refused().startswith("the buffer body.1.running_mean has another shape")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_that_no_owner_takes_are_refused(value: float, dtype: torch.dtype) -> None:
    """The founder of a swarm would stand at its first step for ever."""
    net = Net().to(dtype)
    with torch.no_grad():
        net.head.bias[0] = value

    with pytest.raises(TrainerFailed, match=r"head\.bias has (NaN|infinity) among its initial values"):
        ModelContract(net, ModelVector(net), [torch.optim.SGD(net.parameters(), lr=0.1)], lambda *_: None)


def test_large_finite_values_are_taken() -> None:
    """Their sum overflows."""
    net = nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.fill_(3e38)

    ModelContract(net, ModelVector(net), [torch.optim.SGD(net.parameters(), lr=0.1)], lambda *_: None)


def of(net: nn.Module, *optimizers: torch.optim.Optimizer) -> ModelContract:
    return ModelContract(net, ModelVector(net), optimizers, lambda *_: None)


def test_an_optimiser_of_another_model_is_refused() -> None:
    """None of its tensors is a parameter of the model."""
    net, other = Net(), Net()

    with pytest.raises(TrainerFailed, match="SGD holds no parameter of the model"):
        of(net, torch.optim.SGD(other.parameters(), lr=0.1))


def test_an_optimiser_of_half_of_the_model_is_refused() -> None:
    """The first parameter that nobody trains is named; frozen ones need no optimiser, and may have one."""
    net = Net()

    with pytest.raises(TrainerFailed, match=r"body\.0\.weight and 4 more are in no optimiser"):
        of(net, torch.optim.SGD([*net.embedding.parameters(), net.head.weight], lr=0.1))
    of(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused() -> None:
    """As a learnt temperature beside the model: it would be trained by each node alone."""
    net = Net()
    temperature = nn.Parameter(torch.ones(1))

    with pytest.raises(TrainerFailed, match=r"no parameter of the model .*float32 \[1\]"):
        of(net, torch.optim.SGD([*net.parameters(), temperature], lr=0.1))


def test_two_optimisers_hold_the_model_together() -> None:
    """Or one of them twice, as with Adam first and LBFGS later."""
    net = Net()
    matrices = [value for value in net.parameters() if value.ndim == 2 and value.requires_grad]
    rest = [value for value in net.parameters() if value.ndim != 2 and value.requires_grad]

    of(net, torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest)).check()
    of(net, torch.optim.Adam(net.parameters()), torch.optim.LBFGS(net.parameters())).check()


def test_an_optimiser_that_loses_its_tensors_is_named() -> None:
    """A script may replace its groups; to add a frozen parameter changes nothing."""
    attached = Attached()
    attached.optimizer.add_param_group({"params": list(attached.net.stem.parameters())})
    attached.contract.check()

    attached.optimizer.param_groups[0]["params"] = attached.optimizer.param_groups[0]["params"][:1]

    assert "in no optimiser" in attached.refused()


def test_tied_parameters_need_one_optimiser_entry() -> None:
    """Two parameters in the same memory are one tensor."""
    net = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    net[1].weight = nn.Parameter(net[0].weight.detach())

    of(net, torch.optim.SGD([net[0].weight], lr=0.1)).check()


def test_each_type_that_is_rounded_is_named_once() -> None:
    """float64 loses digits in every turn, bfloat16 small changes; float32 is not mentioned."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.BatchNorm1d(2).bfloat16(), nn.Embedding(2, 2))

    wide, narrow = sorted(roundings(ModelVector(model).named_tensors()))

    assert wide.startswith("1.bias and 1 more tensors are float64: the swarm's values are float32")
    assert narrow.startswith("2.bias and 3 more tensors are bfloat16: a turn begins with the swarm's float32 values")
    assert roundings(ModelVector(nn.Linear(2, 2)).named_tensors()) == []
    assert roundings([("a", torch.zeros(1, dtype=torch.float16))])[0].startswith("a is float16: ")
