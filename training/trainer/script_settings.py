"""The node's settings as a training script sees them on the object that `p2pnode.attach` returns.

`p2pnode run` builds no model and loads no data, so these settings have no effect of their own: the script uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2pnode.training.trainer.loading import resolve_device
from p2pnode.training.trainer_link.messages import Start


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """`seed` differs on every node and at every start. `device` is one that torch takes, such as "cuda:0". `data_dir`
    is absolute, or empty."""

    seed: int = 0
    device: str = "cpu"
    data_dir: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    device_index: int = 0
    device_count: int = 1

    @classmethod
    def of(cls, start: Start) -> ScriptSettings:
        """Those of the daemon's first message. Raises `TrainerFailed` for a device that this machine has not."""
        device, options = resolve_device(start.device), dict(start.options)
        return cls(start.start_seed, device, start.data_dir, options, start.device_index, start.device_count)


class NodeKnowledge:
    """What `AttachedSwarm` says of the node that the script runs in."""

    _settings: ScriptSettings

    @property
    def seed(self) -> int:
        """A seed for this script's own shuffling and dropout: it differs on every node and at every start."""
        return self._settings.seed

    @property
    def device_index(self) -> int:
        """This process's place among the trainers of its node (`training.devices`); 0 with a single one."""
        return self._settings.device_index

    @property
    def device_count(self) -> int:
        """The trainers of this node; `workers` and `node_index` count trainers, not nodes, where there are several."""
        return self._settings.device_count

    @property
    def device(self) -> str:
        """`training.device` as torch takes it, such as "cuda:0"."""
        return self._settings.device

    @property
    def data_dir(self) -> str:
        """`training.data_dir`, absolute; empty if it is not set."""
        return self._settings.data_dir

    @property
    def options(self) -> dict[str, Any]:
        """`[training.options]`."""
        return self._settings.options
