"""What `/status` says of the memory of this daemon: budget, parts held now, and what the kernel counts."""

from __future__ import annotations

from p2pnode.lifecycle.node import Node
from p2pnode.status.memory_schema import MemoryStatus
from training.exchange.held_memory import disk_bytes, held_memory


def memory_status(node: Node) -> MemoryStatus:
    """The memory of a node; of one without a model yet only what is free and what its process has."""
    budget, own = node.budget(), node.environment.own_memory()
    held: dict[str, int] = {}
    on_disk: dict[str, int] = {}
    per_parameter: dict[str, float] = {}
    if node.exchange is not None:
        held, on_disk = held_memory(node.exchange).parts(), disk_bytes(node.exchange)
        (on_disk if node.config.training.delta_on_disk else held)["delta_bytes"] = node.trainer.delta.nbytes
        values = max(1, node.exchange.context.replica.vector.size)
        per_parameter = {name.removesuffix("_bytes"): round(size / values, 3) for name, size in held.items()}
        if own is not None:
            held |= {"process_bytes": node.process_bytes, "free_heap_bytes": own.free_heap_bytes}
            per_parameter["private"] = round(own.private_bytes / values, 3)
    return MemoryStatus(
        budget_bytes=None if budget is None else budget.total,
        parts={} if budget is None else budget.parts(),
        available_bytes=node.environment.available_memory(),
        trainer_bytes=node.trainer_bytes,
        held=held,
        on_disk=on_disk,
        held_bytes_per_parameter=per_parameter,
        private_bytes=None if own is None else own.private_bytes,
    )
