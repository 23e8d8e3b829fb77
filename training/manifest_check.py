"""Agreeing on the manifest: a joiner asks a peer, both sides compare, and a misfit is told both sides' values."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response, TransportError
from training.manifest import Manifest, compare, explain
from training.swarm import Swarm

QUESTION_TIMEOUT_S = 3.0


class ManifestRefused(Exception):
    """This node and the swarm disagree; the text names the fields with both sides' values."""


def register(overlay: Swarm, manifest: Manifest) -> None:
    """Answer joiners with our manifest, or with what does not fit."""

    async def handler(_sender: Contact, payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        try:
            theirs = msgspec.msgpack.decode(payload, type=Manifest)
        except msgspec.DecodeError as error:
            raise RequestRejected(f"malformed manifest: {error}") from error
        # Told in the joiner's words: "mine" is the joiner's side, it is the joiner who reads it.
        mismatches = compare(theirs, manifest)
        if mismatches:
            raise RequestRejected(explain(mismatches, peer=overlay.node_id.hex()[:8]))
        return Response(msgspec.msgpack.encode(manifest))

    overlay.register("manifest", handler)


async def compare_with(overlay: Swarm, peer: Contact, proposal: Manifest) -> None:
    """Compare our proposal with a peer's manifest. Raises `ManifestRefused`, or `TransportError` when it has none
    (yet) or cannot be reached: another peer may do."""
    try:
        async with overlay.request(
            peer, "manifest", msgspec.msgpack.encode(proposal), timeout_s=QUESTION_TIMEOUT_S
        ) as answer:
            theirs = msgspec.msgpack.decode(answer.head, type=Manifest)
    except msgspec.DecodeError as error:
        raise TransportError("foreign", peer.address, f"gave a malformed manifest: {error}") from error
    except TransportError as error:
        if error.kind == "rejected" and "does not fit" in error.detail:
            raise ManifestRefused(error.detail) from error
        raise
    mismatches = compare(proposal, theirs)
    if mismatches:
        raise ManifestRefused(explain(mismatches, peer=peer.node_id.hex()[:8]))
