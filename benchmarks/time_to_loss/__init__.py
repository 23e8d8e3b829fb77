"""time_to_loss: how fast does a shared model learn over slow lines, beside torchft, hivemind, one node and the limit?

Four nodes in network namespaces train one byte model, each on its own quarter of a text. An optimiser step takes half
a second by the clock. The losses are those of the *shared* model on a part of the text that no node has. Modules named
`…_node` run in the environment of their contestant and import `learning` alone.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.record import Outcome


def measure(arguments: argparse.Namespace) -> Outcome:
    from benchmarks.time_to_loss import plan  # the contestants' environments lack what it imports

    return plan.measure(arguments)
