"""Compares manifests when a node joins: a member answers with the swarm's, and the joiner refuses one that differs.

The number of shards is the swarm's: a joiner that was given none (`exchange.shards = 0`) takes it over from the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError, gathered, in_parts
from p2pnode.training.errors import TrainingError
from p2pnode.training.manifest import Manifest, Mismatch, compare, explain
from p2pnode.training.shard_count import MAX_SHARDS
from p2pnode.training.swarm import Swarm

QUESTION_TIMEOUT_S = 3.0
#: A model of ten thousand tensors has a megabyte of names and shapes.
MAX_MANIFEST_BYTES = 8 << 20


class ManifestRefused(TrainingError):
    """This node and the swarm disagree; the text names the fields with both sides' values, and so does `fields`."""

    def __init__(self, mismatches: list[Mismatch], peer: str) -> None:
        super().__init__(explain(mismatches, peer=peer))
        self.fields = [item.field for item in mismatches]


def register(swarm: Swarm, manifest: Manifest) -> None:
    """Answer joiners with this node's manifest."""

    async def handler(_sender: Contact, _payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(b"", in_parts(msgspec.msgpack.encode(manifest)))

    swarm.register("manifest", handler)


async def compare_with(swarm: Swarm, peer: Contact, proposal: Manifest, *, adopts_shards: bool = False) -> Manifest:
    """Compare this node's proposal with a peer's manifest; returns the one that both have. Raises `ManifestRefused`
    where they differ.

    `adopts_shards`: it takes the swarm's number of shards. Raises `TransportError` when the peer has no manifest yet,
    has one that no node can have, or cannot be reached: ask another.
    """
    try:
        async with swarm.request(peer, "manifest", b"", timeout_s=QUESTION_TIMEOUT_S) as response:
            answer = msgspec.msgpack.decode(await gathered(response.body, MAX_MANIFEST_BYTES), type=Manifest)
    except (ValueError, RecursionError) as error:
        raise TransportError("foreign", peer.address, f"gave a malformed manifest: {error}") from error
    if adopts_shards:
        if not 1 <= answer.shards <= MAX_SHARDS:
            raise TransportError("foreign", peer.address, f"gave a manifest with {answer.shards} shards")
        proposal = msgspec.structs.replace(proposal, shards=answer.shards)
    if mismatches := compare(proposal, answer):
        raise ManifestRefused(mismatches, peer.node_id.hex()[:8])
    return proposal
