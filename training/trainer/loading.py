"""Resolves the device, imports the task class, and builds task and model; every fault becomes a `TrainerFailed`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from p2pnode.training.tasks import BUILT_IN
from p2pnode.training.tasks.task import Task, TaskError, TrainSpec
from p2pnode.training.trainer.connection import DaemonGone, StopAsked
from p2pnode.training.trainer.state.snapshot import seed_all
from p2pnode.training.trainer_link.interface import TrainerFailed

_METHODS = ("build", "batches", "loss", "evaluate")


def resolve_device(device: str) -> str:
    """Check the device; "auto" is the first CUDA device, else the CPU. Raises `TrainerFailed`."""
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        have = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise TrainerFailed(
            f'training.device = "{device}" is not available: {_first_line(error)}',
            f'this machine has {have}; "auto" takes the best',
            fatal=True,
        ) from error
    return "cuda:0" if device == "cuda" else device


def load_task(name: str) -> type[Task]:
    """Import the task class. Raises `TrainerFailed`."""
    target = BUILT_IN.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        known = ", ".join(BUILT_IN)
        raise TrainerFailed(
            f'training.task = "{name}" names no task', f'write one of {known}, or "package.module:Class"', fatal=True
        )
    _import_from_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        traceback.print_exc()
        raise _not_imported(name, error) from error
    found: object = module
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise TrainerFailed(
            f'training.task = "{name}": the module {module_name} has no {class_name}',
            f"see {getattr(module, '__file__', module_name)}",
            fatal=True,
        )
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is not a class"
        raise TrainerFailed(
            f'training.task = "{name}" is not a task: {lacks}',
            "the protocol of a task is described in training/tasks/task.py",
            fatal=True,
        )
    return cast(type[Task], found)


def build_task(
    name: str, options: dict[str, object], *, data_dir: str, seed: int, node_seed: int, device: str
) -> tuple[Task, TrainSpec]:
    """Build task and model, seeded with `seed`; then seed the generators with `node_seed`. Raises `TrainerFailed`."""
    kind = load_task(name)
    seed_all(seed)
    with user_code_errors(name, "__init__()"):
        task = kind(options, data_dir=data_dir, seed=seed, node_seed=node_seed, device=device)
    with user_code_errors(name, "build()"):
        spec = task.build()
    if not isinstance(spec, TrainSpec):
        raise TrainerFailed(
            f"build() of the task {name} returned {type(spec).__name__}, not a TrainSpec",
            "return p2pnode.training.tasks.task.TrainSpec(model, optimizer)",
            fatal=True,
        )
    if spec.accumulate < 1:
        raise TrainerFailed(f"the task {name} asks for accumulate = {spec.accumulate}", "1 is the least", fatal=True)
    seed_all(node_seed)
    return task, spec


@contextmanager
def user_code_errors(name: str, what: str, *, fatal: bool = True) -> Iterator[None]:
    """Turn any exception of the task into a `TrainerFailed`; the traceback goes to standard error."""
    try:
        yield
    except (TrainerFailed, StopAsked, DaemonGone):
        raise
    except TaskError as error:
        raise TrainerFailed(error.reason, error.hint, fatal=True) from error
    except FileNotFoundError as error:
        raise TrainerFailed(
            f"{what} of the task {name} finds no file {error.filename}", "see training.data_dir", fatal=fatal
        ) from error
    except Exception as error:
        traceback.print_exc()
        raise TrainerFailed(
            f"{what} of the task {name} raised {type(error).__name__}: {_first_line(error)}",
            "the traceback is in trainer.log, in the state directory",
            fatal=fatal,
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _import_from_here() -> None:
    """Find the user's modules in the folder where the daemon was started, as with any `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _not_imported(name: str, error: Exception) -> TrainerFailed:
    hint = f"Python looks in {Path.cwd()} and on PYTHONPATH; the traceback is in trainer.log, in the state directory"
    return TrainerFailed(
        f'training.task = "{name}" does not import: {type(error).__name__}: {_first_line(error)}', hint, fatal=True
    )
