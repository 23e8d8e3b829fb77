"""What a script and its node agree on when it attaches: which tensors are trained, and by which optimisers.

A script may break it afterwards without an error of its own: it unfreezes a layer, replaces a submodule, loads a
`state_dict` by assignment, converts the model. What it trains then is not what is exchanged, and the model's file has
the values of the start. So `check` looks at every turn whether all is as it was, and raises the first difference, with
its name. It compares identities and addresses, so that it takes some microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer.connection import Warn
from p2pnode.training.trainer.model.unshared_tensors import is_finite
from p2pnode.training.trainer.model.vector import ModelVector, dtype_name, named_parameters, storage_key
from p2pnode.training.trainer_link.interface import TrainerFailed

_INCLUDE = "p2pnode.attach or SwarmCallback with include_frozen=True"


class ModelChanged(TrainingError, RuntimeError):
    """This node would train alone: its model or its optimisers are not those that the script attached, or undo what is
    loaded."""


class ModelContract:
    """Of one model. Raises `TrainerFailed` for optimisers that do not train it.

    With `own_copies` the optimisers step on copies of the parameters, so that their tensors are not looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        vector: ModelVector,
        optimizers: Sequence[Any],
        warn: Warn,
        *,
        own_copies: bool = False,
    ) -> None:
        self._model = model
        self._vector = vector
        self._optimizers = optimizers
        self._warn = warn
        self._own_copies = own_copies
        self._has_warned = False
        _refuse_values(model)
        for text in roundings(vector.named_tensors()):
            warn("values_rounded", text)
        self._remember()
        self._was_frozen = {name for name, tensor in self._named.items() if not tensor.requires_grad}
        if not own_copies:
            self._require_optimizers()

    def take(self, optimizers: Sequence[Any], *, own_copies: bool = False) -> None:
        """The script trains the same model with other optimisers from now on. Raises `TrainerFailed`."""
        self._optimizers = optimizers
        self._own_copies = own_copies
        self._in_groups = self._grouped()
        if not self._own_copies:
            self._require_optimizers()

    def _remember(self) -> None:
        """What `check` compares with."""
        self._named = dict(named_parameters(self._model))
        self._facts = {name: _facts(parameter) for name, parameter in self._named.items()}
        #: Views of the dictionaries of all modules, and what they contain.
        self._places: list[Iterable[Any]] = [
            place.values()
            for module in self._model.modules()
            for place in (module._modules, module._parameters, module._buffers)  # noqa: SLF001 - torch has no faster way
        ]
        self._contents = list(chain.from_iterable(self._places))
        self._tensors = list(dict.fromkeys(self._named.values()))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._frozen = [tensor for tensor in self._tensors if not tensor.requires_grad]
        self._in_groups = self._grouped()

    def check(self) -> None:
        """Raises `TrainerFailed` if the model or its optimisers are not those of the start."""
        self._vector.reshard()
        contents = list(chain.from_iterable(self._places))
        if not _are_same(contents, self._contents) or list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            self._compare_model()
        is_unfrozen = any(map(_REQUIRES_GRAD, self._frozen))
        if is_unfrozen:
            self._require_included()
            self._frozen = [tensor for tensor in self._frozen if not tensor.requires_grad]
        if not self._own_copies and (is_unfrozen or not _are_same(self._grouped(), self._in_groups)):
            self._require_optimizers()
            self._in_groups = self._grouped()

    # --- the model ----------------------------------------------------------------------------------------------

    def _compare_model(self) -> None:
        now = dict(named_parameters(self._model))
        for name, parameter in self._named.items():
            found = now.get(name)
            if found is None:
                raise _changed(f"the parameter {name} is no longer in the model")
            if found is not parameter:
                raise _changed(f"the parameter {name} is another tensor than it was")
            if (facts := _facts(found)) != self._facts[name]:
                raise _changed(f"the parameter {name} is {_text(facts)}, and was {_text(self._facts[name])}")
        if new := [name for name in now if name not in self._named]:
            raise _changed(f"the parameter {new[0]} is new in the model")
        self._follow_buffers()
        self._remember()

    def _follow_buffers(self) -> None:
        """A forward pass may assign a new tensor to a buffer: the vector has it from now on."""
        new = self._vector.follow_buffers(self._model)
        if new and not self._has_warned:
            self._has_warned = True
            self._warn(
                "buffer_not_shared",
                f"the buffer {new[0]} was added after p2pnode.attach(): it stays with this node",
            )

    def _require_included(self) -> None:
        names = [name for name, tensor in self._vector.fixed.items() if tensor.requires_grad]
        if not names:
            return
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise TrainerFailed(
            f"the parameter {names[0]}{more} was frozen when the script attached, and is trained now",
            f"unfreeze it before p2pnode.attach(), or call {_INCLUDE} on all nodes",
            fatal=True,
        )

    # --- optimisers ---------------------------------------------------------------------------------------------

    def _grouped(self) -> list[Tensor]:
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return list(chain.from_iterable(groups))

    def _require_optimizers(self) -> None:
        """They hold each trainable parameter, and nothing but parameters of the model. Raises `TrainerFailed`."""
        names = {id(tensor): name for name, tensor in self._named.items()}
        kind = " and ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        grouped = self._grouped()
        strangers = [tensor for tensor in grouped if id(tensor) not in names]
        if len(strangers) == len(grouped):
            raise TrainerFailed(
                f"{kind} holds no parameter of the model" + (_shape_of(strangers[0]) if strangers else ""),
                "make the optimiser from the parameters of the model that you give to p2pnode.attach(); one that "
                "steps on copies of its own needs on_load (docs/own-model.md)",
                fatal=True,
            )
        if strangers:
            raise TrainerFailed(
                f"{kind} holds a tensor that is no parameter of the model{_shape_of(strangers[0])}",
                "attach one module that has all that is trained; an optimiser with copies of its own needs on_load "
                "(docs/own-model.md)",
                fatal=True,
            )
        held = {storage_key(tensor) for tensor in grouped}
        missing = [
            name for name, tensor in self._named.items() if tensor.requires_grad and storage_key(tensor) not in held
        ]
        if lost := [name for name in missing if name not in self._was_frozen]:
            raise TrainerFailed(
                f"the trainable parameter {lost[0]}{_are(len(lost))} in no optimiser that was given",
                "give p2pnode.attach() all optimisers, as [muon, adamw], or freeze what is not trained before it",
                fatal=True,
            )
        if missing:
            # Lightning's BaseFinetuning unfreezes BatchNorm so, and does not mean it to be trained.
            self._warn(
                "unfrozen_not_trained",
                f"the parameter {missing[0]}{_are(len(missing))} unfrozen, but in no optimiser: no node trains it",
                "add what is unfrozen to an optimiser (add_param_group); if it is not to be trained, do nothing",
            )


_REQUIRES_GRAD = attrgetter("requires_grad")


def _are_same(found: list[Any], known: list[Any]) -> bool:
    """Whether both have the very same objects. Lists compare identities first, which takes a tenth of comparing them
    here; two other tensors have no truth value, unless they are of one value, which is found once it differs."""
    try:
        return found == known
    except RuntimeError:
        return False


def _are(count: int) -> str:
    return f" and {count - 1} more are" if count > 1 else " is"


def _facts(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    return dtype_name(tensor), tuple(tensor.shape), str(tensor.device)


def _text(facts: tuple[str, tuple[int, ...], str]) -> str:
    return f"{facts[0]} {list(facts[1])} on {facts[2]}"


def _shape_of(tensor: Tensor) -> str:
    return f" (its first tensor: {_text(_facts(tensor))})"


def _changed(what: str) -> TrainerFailed:
    return TrainerFailed(
        f"{what}; its values would no longer be exchanged",
        "change the model before p2pnode.attach(), and load values in place (load_state_dict without assign)",
        fatal=True,
    )


@torch.no_grad()
def _refuse_values(model: nn.Module) -> None:
    """Initial values that no owner takes. Raises `TrainerFailed`."""
    for name, parameter in named_parameters(model):
        if parameter.is_floating_point() and not is_finite(parameter):
            bad = "NaN" if bool(parameter.isnan().any()) else "infinity"
            raise TrainerFailed(
                f"the parameter {name} has {bad} among its initial values",
                "initialise it before p2pnode.attach()",
                fatal=True,
            )


WIDE = "the swarm's values are float32, to which these are rounded in every turn; keep the model in float32"
NARROW = (
    "a turn begins with the swarm's float32 values rounded to this type, which has no room for small changes; keep the "
    "weights in float32 and train under autocast"
)


def roundings(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """A sentence for each type other than float32 among the vector's tensors."""
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(tensor.dtype, []).append(name)
    names.pop(torch.float32, None)
    said = []
    for dtype, found in names.items():
        others = f" and {len(found) - 1} more tensors are" if len(found) > 1 else " is"
        why = WIDE if dtype == torch.float64 else NARROW
        said.append(f"{found[0]}{others} {str(dtype).removeprefix('torch.')}: {why}")
    return said
