"""Compares manifests when a node joins: the joiner sends its own, the peer answers with the swarm's and the mismatches.

Both sides compare. The joiner decides from the fields of the answer alone, never from text. It refuses the swarm if the
manifests differ, or if the peer names mismatches in fields that the joiner's version does not have. A peer of an older
version may reject the joiner with a text only. That decides nothing, and the next peer is asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response, TransportError
from training.errors import TrainingError
from training.manifest import Manifest, Mismatch, compare, explain
from training.swarm import Swarm

QUESTION_TIMEOUT_S = 3.0


class ManifestRefused(TrainingError):
    """This node and the swarm disagree; the text names the fields with both sides' values."""


class ManifestAnswer(Manifest, frozen=True, kw_only=True):
    """The swarm's manifest, and where the joiner's differs; `mine` of a mismatch is the joiner's value.

    A joiner of an older version decodes it as a `Manifest` and compares by itself.
    """

    mismatches: tuple[Mismatch, ...] = ()


def register(swarm: Swarm, manifest: Manifest) -> None:
    """Answer joiners with this node's manifest and the mismatches."""

    async def handler(_sender: Contact, payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        try:
            proposal = msgspec.msgpack.decode(payload, type=Manifest)
        except msgspec.DecodeError as error:
            raise RequestRejected(f"malformed manifest: {error}") from error
        mismatches = tuple(compare(proposal, manifest))
        answer = ManifestAnswer(**msgspec.structs.asdict(manifest), mismatches=mismatches) if mismatches else manifest
        return Response(msgspec.msgpack.encode(answer))

    swarm.register("manifest", handler)


async def compare_with(swarm: Swarm, peer: Contact, proposal: Manifest) -> None:
    """Compare this node's proposal with a peer's manifest. Raises `ManifestRefused` where they differ.

    Raises `TransportError` when the peer has no manifest yet, rejects the request or cannot be reached: ask another.
    """
    try:
        async with swarm.request(
            peer, "manifest", msgspec.msgpack.encode(proposal), timeout_s=QUESTION_TIMEOUT_S
        ) as response:
            answer = msgspec.msgpack.decode(response.head, type=ManifestAnswer)
    except msgspec.DecodeError as error:
        raise TransportError("foreign", peer.address, f"gave a malformed manifest: {error}") from error
    mismatches = compare(proposal, answer) or list(answer.mismatches)
    if mismatches:
        raise ManifestRefused(explain(mismatches, peer=peer.node_id.hex()[:8]))
