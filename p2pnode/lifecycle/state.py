"""The states a node goes through, as `/status` shows them."""

from __future__ import annotations

from typing import Literal

State = Literal[
    "joining",
    "waiting_for_nodes",
    "training",
    "waiting",
    "paused",
    "stalled",
    "serving",
    "finished",
    "leaving",
    "failed",
]
