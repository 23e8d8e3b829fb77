"""Rules of a master beside those of its queue: which of two goes on, and the order of a task's records. Pure."""

from __future__ import annotations

import hashlib

from overlay.ids import short
from training.dispatch.answers import Registration
from training.dispatch.messages import MasterRecord


def rank_of(record: MasterRecord) -> tuple[int, bool, bytes]:
    """Of two masters with stores of their own the higher one goes on: the later epoch, the one with a data set."""
    return record.epoch, bool(record.identity), record.contact


def two_masters(other: bytes) -> str:
    """Why this node does not serve."""
    return (
        f"the node {short(other)} is the master of this run, with a store of its own: one master at a time can keep "
        'its queue in SQLite; use dispatch.store = "etcd://…" for more than one'
    )


def is_of(registration: Registration | None, identity: bytes) -> bool:
    """Whether a request is about the tasks of this queue."""
    return registration is not None and registration.identity == identity


def order_of(seed: int, pass_number: int, task: int) -> int:
    """The seed of the order of a task's records in one pass; never 0."""
    digest = hashlib.blake2b(f"{seed}/{pass_number}/{task}/records".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 1
