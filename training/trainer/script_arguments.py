"""What a script or a task gives beside its model: optimisers, the schedules of their rates, a scaler, its own state.

One of each or several: `attach(model, [muon, adamw], [warm_up, cosine])`. A schedule belongs to the optimiser that it
was made for. What Hugging Face's `Accelerator.prepare` returns is unwrapped, without importing it: its wrappers skip
calls while gradients accumulate, and turns are counted on what is inside them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from p2pnode.training.trainer.connection import ScriptWarnings, Warn
from p2pnode.training.trainer.model.weight_loads import OnLoad
from p2pnode.training.trainer.optimizers.schedule import Schedule, set_in_place
from p2pnode.training.trainer.state.rank_states import optimizer_state
from p2pnode.training.trainer.state.state_writer import tensor_bytes
from p2pnode.training.trainer_link.interface import TrainerFailed

#: What code of ours reads or calls of an optimiser. DeepSpeed's and Megatron's are no `torch.optim.Optimizer`.
_OF_OPTIMIZER = ("param_groups", "state_dict", "load_state_dict")
_OF_SCHEDULE = ("step", "state_dict", "load_state_dict")

_CALL = "the call is p2pnode.attach(model, optimizer, scheduler=None, scaler=None, state=None, on_load=None)"


class ScriptArguments(NamedTuple):
    """At least one optimiser; `schedules` are those that follow the swarm's step."""

    optimizers: tuple[Optimizer, ...]
    schedules: tuple[Schedule, ...]
    scaler: GradScaler | None
    #: A script's own state, which is saved and restored with the rest.
    own: MutableMapping[str, Any]
    #: Called after each load of weights.
    on_load: OnLoad | None

    @classmethod
    def of(
        cls,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        warn: Warn,
        own: MutableMapping[str, Any] | None = None,
        on_load: OnLoad | None = None,
    ) -> ScriptArguments:
        """Accept one of each, or sequences. Raises `TrainerFailed` for anything else."""
        optimizers, schedulers = _several(optimizer), _several(scheduler)
        if not optimizers:
            raise TrainerFailed("there is no optimiser", _CALL, fatal=True)
        for one in optimizers:
            _require(one, "an optimiser", _OF_OPTIMIZER)
            if getattr(one, "_overlap_with_ddp", False):
                raise TrainerFailed(
                    f"{_kind(one)} with overlap_with_ddp=True steps within the backward pass: its parts cannot be "
                    "put together for a checkpoint",
                    "make it without overlap_with_ddp",
                    fatal=True,
                )
        for one in schedulers:
            _require(one, "a schedule of the learning rate", _OF_SCHEDULE)
        if scaler is not None:
            _require(scaler, "a torch.amp.GradScaler", ("get_scale", "state_dict", "load_state_dict"))
        if own is not None and not isinstance(own, MutableMapping):
            raise TrainerFailed(f"{_kind(own)} was given as state, which is a dictionary", _CALL, fatal=True)
        if on_load is not None and not callable(on_load):
            raise TrainerFailed(f"{_kind(on_load)} was given as on_load, which is a function", _CALL, fatal=True)
        inner = [bare_optimizer(one) for one in optimizers]
        scaler = scaler or next((found for _, found in inner if found is not None), None)
        bare = tuple(one for one, _ in inner)
        schedules = tuple(_schedule(bare, one, warn) for one in schedulers)
        return cls(bare, schedules, scaler, {} if own is None else own, on_load)

    def host_bytes(self) -> int:
        """Bytes of the host that training and a checkpoint will take beside the model itself: gradients, the state of
        the optimisers, and the copy of it for a checkpoint, which is on the host wherever the state is."""
        return sum(map(_host_bytes, self.optimizers))

    def seek(self, position: int) -> None:
        """Move all schedules to `position` optimiser steps of the swarm."""
        for schedule in self.schedules:
            schedule.seek(position)

    def end_turn(self, steps: int, warnings: ScriptWarnings) -> None:
        """Compare the script's own calls of its schedules with the optimiser steps of the turn."""
        found = [schedule.differs(steps) for schedule in self.schedules]
        do = (
            "call it after each optimiser step, with lengths in optimiser steps of the swarm; leave a schedule that "
            "counts epochs out of attach"
        )
        warnings("schedule_steps_differ", next(filter(None, found), ""), do)

    def advance(self) -> None:
        """Move all schedules on by one optimiser step."""
        for schedule in self.schedules:
            schedule.advance()

    def state(self) -> dict[str, Any]:
        """What is to be saved; its tensors are the live ones. All ranks have to call it."""
        return {
            "optimizer": [optimizer_state(optimizer) for optimizer in self.optimizers],
            "schedule": [schedule.state() for schedule in self.schedules],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises `KeyError`, `ValueError`, `RuntimeError` if it does not fit."""
        for optimizer, saved in zip(self.optimizers, state["optimizer"], strict=True):
            _restore(optimizer, saved)
        for schedule, saved in zip(self.schedules, state["schedule"], strict=True):
            schedule.restore(saved)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _restore(optimizer: Any, saved: dict[str, Any]) -> None:
    """`load_state_dict`, which leaves the rates the tensors or the numbers that they are."""
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, known in zip(optimizer.param_groups, before, strict=True):
        restored = {name: value for name, value in group.items() if name != "params"}
        group.update((name, known[name]) for name in restored if name in known)
        set_in_place(group, restored)


def require_model(model: object) -> None:
    """Raises `TrainerFailed` for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TrainerFailed(f"the model is {_kind(model)}, not a torch.nn.Module", _CALL, fatal=True)


#: Values that an optimiser keeps per parameter, by the name of its class: its state is empty before the first step.
_KEPT = {
    "Adafactor": 0,  # one per row and column
    "Adagrad": 1,
    "ASGD": 1,
    "Muon": 1,
    "RMSprop": 1,
    "SGD": 0,
}
#: Options of a parameter group for which it keeps one more.
_KEPT_MORE = {"Adam": ["amsgrad"], "AdamW": ["amsgrad"], "RMSprop": ["momentum", "centered"], "SGD": ["momentum"]}
#: As most adaptive ones.
_KEPT_MOSTLY = 2


def _host_bytes(optimizer: Any) -> int:
    bare = getattr(optimizer, "optimizer", optimizer)  # a wrapper, such as Accelerate's, has it
    kind, total = type(bare).__name__, 0
    for group in bare.param_groups:
        kept = _KEPT.get(kind, _KEPT_MOSTLY) + sum(bool(group.get(option)) for option in _KEPT_MORE.get(kind, []))
        for parameter in group["params"]:
            size_bytes = parameter.numel() * parameter.element_size()
            existing = tensor_bytes(bare.state.get(parameter, {}))
            state = existing or kept * size_bytes
            total += state  # the copy for a checkpoint
            if parameter.device.type == "cpu":
                total += size_bytes if parameter.requires_grad and parameter.grad is None else 0
                total += 0 if existing else state
    return total


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _require(one: object, what: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(one, name)]
    if isinstance(one, type | nn.Module) or missing:
        lacks = f": it has no {missing[0]}" if missing and not isinstance(one, type) else ""
        raise TrainerFailed(f"{_kind(one)} was given as {what}{lacks}", _CALL, fatal=True)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _schedule(optimizers: tuple[Optimizer, ...], scheduler: Any, warn: Warn) -> Schedule:
    """With the optimiser that it was made for. Raises `TrainerFailed` if that is another one."""
    bare, stride = bare_scheduler(scheduler)
    made_for = _made_for(bare)
    if made_for is None and len(optimizers) == 1:
        made_for = optimizers[0]
    for optimizer in optimizers:
        if made_for is optimizer:
            return Schedule(optimizer, bare, warn, stride=stride)
    raise TrainerFailed(
        f"the schedule {type(bare).__name__} was made for another optimiser than those given",
        "make each schedule for an optimiser that you give to attach, and give both",
        fatal=True,
    )


def _made_for(scheduler: Any) -> Any:
    while (optimizer := getattr(scheduler, "optimizer", None)) is None:
        inner: Sequence[Any] = getattr(scheduler, "_schedulers", ())  # SequentialLR, ChainedScheduler
        if not inner:
            return None
        scheduler = inner[0]
    return bare_optimizer(optimizer)[0]


def bare_optimizer(optimizer: Any) -> tuple[Any, GradScaler | None]:
    """What is inside an `AcceleratedOptimizer`, and its scaler; anything else as it is."""
    if _is_accelerated(optimizer, "AcceleratedOptimizer"):
        return optimizer.optimizer, optimizer.scaler
    return optimizer, None


def bare_scheduler(scheduler: Any) -> tuple[Any, int]:
    """What is inside an `AcceleratedScheduler`, and by how much one optimiser step moves it on."""
    if not _is_accelerated(scheduler, "AcceleratedScheduler"):
        return scheduler, 1
    stride = 1
    if scheduler.step_with_optimizer and not scheduler.split_batches:
        # It counts the batches of all processes: each optimiser step is one step per process.
        stride = scheduler.optimizers[0].accelerator_state.num_processes
    return scheduler.scheduler, stride


def _is_accelerated(value: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("accelerate.") for kind in type(value).__mro__)
