"""The memory of a daemon in `/status`."""

from __future__ import annotations

from msgspec import Struct

from p2pnode.status.device_schema import Count


class MemoryStatus(Struct, frozen=True, kw_only=True):
    """The daemon's memory. `parts` are its budget, as estimated before anything is allocated, and `budget_bytes` their
    sum; `available_bytes`: what this process may still take. The trainer's own is in `trainer_bytes` only: gradients,
    optimiser, and the optimiser's copy for a checkpoint, as estimated at its start.

    `held` is what is there now, part by part. `replica_bytes` and `delta_bytes` are shared with the trainer;
    `process_bytes` is what the daemon had before the model, and `free_heap_bytes` what its allocator keeps for the next
    buffers. `held_bytes_per_parameter` has the same over the number of values. `on_disk`: what is in the files of
    `exchange.on_disk` and `training.delta_on_disk`. `private_bytes`: the resident memory of this process that is
    neither shared nor a file's, as the kernel counts it; null where it does not tell.
    All are at most a second old.
    """

    budget_bytes: Count | None
    parts: dict[str, Count]
    available_bytes: Count | None
    trainer_bytes: Count | None = None
    held: dict[str, Count] = {}
    held_bytes_per_parameter: dict[str, float] = {}
    on_disk: dict[str, Count] = {}
    private_bytes: Count | None = None
