"""Finds optimiser, schedule and scaler in what Hugging Face's `Accelerator.prepare` returns, without importing it.

Its wrappers skip calls while gradients accumulate. Turns are counted on what is inside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Inner(NamedTuple):
    """What `attach` works with. One optimiser step moves the scheduler on by `stride`."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: GradScaler | None
    stride: int


def unwrapped(optimizer: Any, scheduler: Any, scaler: GradScaler | None) -> Inner:
    """Accept an `AcceleratedOptimizer` and an `AcceleratedScheduler`, and anything else as it is."""
    stride = 1
    if _is_accelerated(optimizer, "AcceleratedOptimizer"):
        scaler = scaler or optimizer.scaler
        optimizer = optimizer.optimizer
    if _is_accelerated(scheduler, "AcceleratedScheduler"):
        if scheduler.step_with_optimizer and not scheduler.split_batches:
            # It counts the batches of all processes: each optimiser step is one step per process.
            stride = scheduler.optimizers[0].accelerator_state.num_processes
        scheduler = scheduler.scheduler
    return Inner(optimizer, scheduler, scaler, stride)


def _is_accelerated(value: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("accelerate.") for kind in type(value).__mro__)
