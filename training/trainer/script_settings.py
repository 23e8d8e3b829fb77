"""The node's settings as a training script sees them on the object that `p2pnode.attach` returns.

`p2pnode run` builds no model and loads no data, so these settings have no effect of their own: the script uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training.trainer.loading import resolve_device
from training.trainer_link.messages import Start


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """`seed` differs on every node and at every start. `device` is one that torch takes, such as "cuda:0". `data_dir`
    is absolute, or empty."""

    seed: int = 0
    device: str = "cpu"
    data_dir: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Start) -> ScriptSettings:
        """Those of the daemon's first message. Raises `TrainerFailed` for a device that this machine has not."""
        return cls(start.start_seed, resolve_device(start.device), start.data_dir, dict(start.options))
