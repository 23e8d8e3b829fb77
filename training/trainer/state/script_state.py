"""What a training script keeps besides the model: optimiser, schedule, scaler, local buffers, the position in shared
data, and the user's own state.

Written by the daemon's order (`training.trainer.state.state_writer`) and restored when the script is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pnode.training.trainer.connection import Warn
from p2pnode.training.trainer.model.unshared_tensors import UnsharedTensors
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer_link.interface import TrainerFailed


@dataclass(frozen=True, slots=True)
class ScriptState:
    """Entries of the script's own state with `state_dict` and `load_state_dict` are saved by these."""

    given: ScriptArguments
    unshared: UnsharedTensors
    data: SharedData
    loads: WeightLoads
    warn: Warn

    def content(self, samples_seen: int, local_steps: int) -> dict[str, Any]:
        """What is to be saved, inside `WeightLoads.saving`; its tensors are the live ones."""
        own = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in self.given.own.items()
        }
        return {
            **self.given.state(),
            "loads": self.loads.state(),
            "local_buffers": self.unshared.own(),
            "state": own,
            "data": self.data.state(),
            "samples_seen": samples_seen,
            "local_steps": local_steps,
        }

    def restore(self, saved: dict[str, Any], path: Path, local_steps: int) -> int:
        """Restore what was saved in the file `path`; returns `samples_seen`. A learning rate or a number of
        `local_steps` that was another one then is warned of. Raises `TrainerFailed`."""
        try:
            asked = self._rates()
            with self.loads.restoring(saved["loads"]):
                self.given.restore(saved)
            self._compare_rates(asked)
            self._compare_local_steps(int(saved.get("local_steps", local_steps)), local_steps)
            self.unshared.restore(saved["local_buffers"])
            for name, value in saved["state"].items():
                own: Any = self.given.own.get(name)
                if hasattr(own, "load_state_dict"):
                    own.load_state_dict(value)
                else:
                    self.given.own[name] = value
            self.data.restore(saved.get("data"))
            samples_seen = int(saved["samples_seen"])
            if "random" in saved:
                snapshot.restore_random_state(saved["random"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise TrainerFailed(
                f"the saved state {path} does not fit the script: {error}",
                "remove the file to continue with a fresh optimiser",
                fatal=True,
            ) from error
        return samples_seen

    def _rates(self) -> list[float]:
        """The learning rate of each parameter group, as it was before any schedule."""
        groups = [group for optimizer in self.given.optimizers for group in optimizer.param_groups]
        return [float(group.get("initial_lr", group["lr"])) for group in groups]

    def _compare_rates(self, asked: list[float]) -> None:
        """Say that the restored optimiser's learning rates are not those that the script has asked for."""
        restored = self._rates()
        differing = [pair for pair in zip(asked, restored, strict=False) if pair[0] != pair[1]]
        if differing:
            mine, theirs = differing[0]
            what = f"the script asks for lr = {mine:g}, but the restored optimiser has {theirs:g}, which is used"
            self.warn("learning_rate_restored", f"{what}: to change it, set optimizer.param_groups after attach()")

    def _compare_local_steps(self, before: int, now: int) -> None:
        if before != now:
            what = f"training.local_steps was {before} when this state was saved, and is {now}"
            self.warn("local_steps_changed", f"{what}: a step of the swarm is another number of optimiser steps now")
