"""Compares manifests when a node joins: the joiner sends its own, the peer answers with the swarm's and the mismatches.

Both sides compare. The joiner decides from the fields of the answer alone, never from text. It refuses the swarm if the
manifests differ, or if the peer names mismatches in fields that the joiner's version does not have. A peer of an older
version may reject the joiner with a text only. That decides nothing, and the next peer is asked.

The number of shards is the swarm's: a joiner that was given none (`exchange.shards = 0`) takes it over from the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response, TransportError, gathered, in_parts
from training.errors import TrainingError
from training.manifest import Manifest, Mismatch, compare, explain
from training.shard_count import MAX_SHARDS
from training.swarm import Swarm

QUESTION_TIMEOUT_S = 3.0
#: A model of ten thousand tensors has a megabyte of names and shapes.
MAX_MANIFEST_BYTES = 8 << 20


class ManifestRefused(TrainingError):
    """This node and the swarm disagree; the text names the fields with both sides' values, and so does `fields`."""

    def __init__(self, mismatches: list[Mismatch], peer: str) -> None:
        super().__init__(explain(mismatches, peer=peer))
        self.fields = [item.field for item in mismatches]


class ManifestAnswer(Manifest, frozen=True, kw_only=True):
    """The swarm's manifest, and where the joiner's differs; `mine` of a mismatch is the joiner's value.

    A joiner of an older version decodes it as a `Manifest` and compares by itself.
    """

    mismatches: tuple[Mismatch, ...] = ()


def register(swarm: Swarm, manifest: Manifest) -> None:
    """Answer joiners with this node's manifest and the mismatches."""

    async def handler(_sender: Contact, _payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        try:
            proposal = msgspec.msgpack.decode(await gathered(stream, MAX_MANIFEST_BYTES), type=Manifest)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed manifest: {error}") from error
        mismatches = tuple(compare(proposal, manifest))
        answer = ManifestAnswer(**msgspec.structs.asdict(manifest), mismatches=mismatches) if mismatches else manifest
        return Response(b"", in_parts(msgspec.msgpack.encode(answer)))

    swarm.register("manifest", handler)


async def compare_with(swarm: Swarm, peer: Contact, proposal: Manifest, *, adopts_shards: bool = False) -> Manifest:
    """Compare this node's proposal with a peer's manifest; returns the one that both have. Raises `ManifestRefused`
    where they differ.

    `adopts_shards`: it takes the swarm's number of shards. Raises `TransportError` when the peer has no manifest yet,
    has one that no node can have, rejects the request or cannot be reached: ask another.
    """
    try:
        body = in_parts(msgspec.msgpack.encode(proposal))
        async with swarm.request(peer, "manifest", b"", body, timeout_s=QUESTION_TIMEOUT_S) as response:
            answer = msgspec.msgpack.decode(await gathered(response.body, MAX_MANIFEST_BYTES), type=ManifestAnswer)
    except (ValueError, RecursionError) as error:
        raise TransportError("foreign", peer.address, f"gave a malformed manifest: {error}") from error
    told = list(answer.mismatches)
    if adopts_shards:
        if not 1 <= answer.shards <= MAX_SHARDS:
            raise TransportError("foreign", peer.address, f"gave a manifest with {answer.shards} shards")
        proposal = msgspec.structs.replace(proposal, shards=answer.shards)
        told = [item for item in told if item.field != "shards"]
    if mismatches := compare(proposal, answer) or told:
        raise ManifestRefused(mismatches, peer.node_id.hex()[:8])
    return proposal
