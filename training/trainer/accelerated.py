"""Finds optimiser, schedule and scaler in what Hugging Face's `Accelerator.prepare` returns, without importing it.

Its wrappers skip calls while gradients accumulate. Turns are counted on what is inside them.
"""

from __future__ import annotations

from typing import Any

from torch.amp import GradScaler


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
