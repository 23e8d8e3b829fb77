"""Predicts the memory that a node needs, part by part, and refuses a start that cannot fit. Pure.

The sizes follow from the length of the vector, the settings of the exchange, and the number of nodes that share the
shards. `python -m benchmarks memory` compares them with the peak of real daemons. What the trainer will need is its own
estimate (`TrainerHello.host_bytes`); its model and its activations are not counted.
"""

from __future__ import annotations

from functools import partial

import msgspec

from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.environment import Log
from p2pnode.training.encoding.pull_codecs import follows_changes
from p2pnode.training.encoding.table import CHANGES, CODECS, LEAST_LOSSY, CodecName
from p2pnode.training.exchange.published import KEPT_PART
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shard_count import shard_count
from p2pnode.training.shards.outer_rule import is_plain

_FLOAT32_BYTES = 4

#: Resident memory of a daemon without a model: interpreter, libraries, HTTP server (`python -m benchmarks start`).
PROCESS_BYTES = 71_000_000
#: Free memory that the allocator keeps (`p2pnode.own_memory`), and values encoded for several nodes that pull
#: (`training.exchange.owner.reads.MAX_ENCODED_BYTES`).
KEPT_BYTES, CACHE_BYTES = 64 << 20, 32 << 20
#: A delta is decoded and replicated in parts of so many values (`training.cooperative.VALUES_PER_PART`): one
#: of another node, as its owner, and one of its own.
PART_VALUES, PARTS = 1 << 22, 2
#: Shards are copied for a checkpoint in files of this size (`training.exchange.store.shard_states.FILE_BYTES`).
FILE_BYTES = 16 << 20
#: Steps a second that the estimate of the repair log assumes; its limit in bytes applies all the same.
LOGGED_STEPS_PER_S = 1.0


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part. `replica` and `delta` are shared with the trainer, which has a `base` of its own.

    `checkpoint`: copies of some shards.
    """

    replica: int
    delta: int
    owned: int = 0
    backed: int = 0
    outbox: int = 0
    repair_log: int = 0
    published: int = 0
    buffers: int = 0
    checkpoint: int = 0
    base: int = 0
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)

    @property
    def shared(self) -> int:
        """The part in shared memory (`training.trainer_link.shared_memory`)."""
        return self.replica + self.delta

    @property
    def to_come(self) -> int:
        """What is not allocated yet when the trainer has built its model: all but the shared part and the process."""
        return self.total - self.shared - self.process

    def parts(self) -> dict[str, int]:
        """Bytes by part, for `/status`."""
        return {f"{name}_bytes": getattr(self, name) for name in self.__struct_fields__}


def budget(
    values: int,
    settings: ExchangeSettings,
    nodes: float,
    *,
    checkpoints: bool = True,
    base_on_device: bool = False,
) -> Budget:
    """For a vector of `values` float32 whose shards are distributed over `nodes` nodes, this one included.

    A shard is its value and, where the codec's deltas have an outer momentum, the momentum. With one
    node, or with `replicas = 0`, there are no backups. `checkpoints`: are any written? With `shards = 0` there are as
    many as the model asks for. `base_on_device`: the trainer has its base in the memory of a GPU.
    """
    vector_bytes = values * _FLOAT32_BYTES
    nodes = max(1.0, nodes)
    alone = nodes < 1.5
    # auto uses any but float32; values are pulled as changes unless it is the most exact.
    largest: CodecName = LEAST_LOSSY if settings.codec == "auto" else settings.codec
    has_momentum = settings.outer_momentum != 0.0 and not is_plain(largest)
    state_bytes = vector_bytes * (2 if has_momentum else 1)
    share_bytes = round(state_bytes / nodes)
    shards = settings.shards or shard_count(values)
    shard_bytes = -(-state_bytes // shards)
    follows = follows_changes(settings, CHANGES if settings.codec == "auto" else settings.codec)
    encoded_bytes = round(CODECS[largest].bytes_per_value * values)
    # The replica is read one shard at a time, and held shards are copied before they are written.
    copied_bytes = -(-vector_bytes // shards) + min(max(FILE_BYTES, shard_bytes), share_bytes)
    # Each node's delta of a step is logged where it is added, at the owner and at the backup of a shard.
    logged_bytes = round(settings.log_seconds * LOGGED_STEPS_PER_S) * encoded_bytes * (1 + settings.replicas)
    return Budget(
        replica=vector_bytes,
        delta=vector_bytes,
        owned=share_bytes,
        backed=0 if alone else share_bytes * settings.replicas,
        # One delta; what its owners do not acknowledge of another stays too.
        outbox=0 if alone else encoded_bytes,
        repair_log=0 if alone else min(settings.log_bytes, logged_bytes),
        # The value that followers hold, and changes of it that have half of its size. A founder has it beforehand.
        published=round((1.0 + KEPT_PART) * vector_bytes / nodes) if follows else 0,
        buffers=0 if alone else _buffers_bytes(values, encoded_bytes),
        checkpoint=copied_bytes if checkpoints else 0,
        base=0 if base_on_device else vector_bytes,
    )


def check_memory(
    available: int | None,
    values: int,
    settings: ExchangeSettings,
    nodes: float,
    log: Log,
    *,
    checkpoints: bool,
    base_on_device: bool = False,
    trainer_bytes: int = 0,
    others_here: int = 0,
) -> None:
    """Raise `UserError` if this node among `nodes` nodes, its trainer and `others_here` more like it do not fit into
    `available` bytes.

    Counted is what comes after the trainer has built its model. A share that fits only while other nodes hold theirs is
    a warning. `available` None: unknown, so nothing is checked.
    """
    if available is None:
        return
    nodes = max(nodes, 1.0 + others_here)
    of = partial(budget, values, settings, checkpoints=checkpoints, base_on_device=base_on_device)
    needed = of(nodes).to_come + trainer_bytes
    if needed * (1 + others_here) > available:
        others = f", and {others_here} more on this machine as much each" if others_here else ""
        raise UserError(
            f"this node will take {_mb(needed)} more memory ({_mb(needed - trainer_bytes)} for the exchange, "
            f"{_mb(trainer_bytes)} for gradients and optimiser){others}; {_mb(available)} are free",
            hint="give the machine or its container more, or start fewer nodes on it; replicas = 0, "
            "outer_momentum = 0, a smaller log_bytes and checkpoint_s = 0 need less of it",
            exit_code=ExitCode.TRAINER,
        )
    # Of all numbers of nodes, one or two need most per node.
    most = max(of(count).to_come for count in (1, 2)) + trainer_bytes
    if most * (1 + others_here) > available:
        log.warning(
            "memory_tight",
            free_bytes=available,
            alone_bytes=most,
            hint="enough among as many nodes as there are; not for this node alone or with one other",
        )


def _buffers_bytes(values: int, encoded_bytes: int) -> int:
    """Parts of deltas as received and decoded, encoded values, and what the allocator keeps of all that."""
    part_bytes = min(PART_VALUES, values) * (_FLOAT32_BYTES + 2)
    return PARTS * part_bytes + min(CACHE_BYTES, encoded_bytes) + min(KEPT_BYTES, encoded_bytes)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
