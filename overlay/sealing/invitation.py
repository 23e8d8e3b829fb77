"""An invitation: addresses, run and swarm key in one line of text, all that another machine needs to join.

The line is `p2pnode1:` and the base64url of a MessagePack array with a checksum. It is made to be pasted: parsing drops
white space, and reports a damaged line differently from text that is no invitation. Error messages never contain any
part of the line. Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import split_address
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.sealing.swarm_key import KEY_BYTES, MAX_KEYS, BadKey, KeyRing, SwarmKey

MARK = "p2pnode"
VERSION = 1
PREFIX = f"{MARK}{VERSION}:"
CHECK_BYTES = 6
MAX_ADDRESSES = 8
#: Enough for eight addresses with the longest names, a run and two keys.
MAX_CHARACTERS = 4096

_Secret = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class BadInvitation(OverlayError):
    """The text is no invitation; the message never contains it."""


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`addresses` are "host:port" of nodes to dial; empty if the joining node knows one already."""

    run: Annotated[str, Meta(min_length=1, max_length=64)]
    addresses: Annotated[list[Annotated[str, Meta(max_length=261)]], Meta(max_length=MAX_ADDRESSES)]
    secrets: Annotated[list[_Secret], Meta(min_length=1, max_length=MAX_KEYS)]

    def __repr__(self) -> str:
        return f"Invitation(run={self.run!r}, addresses={self.addresses!r}, keys={self.keys.fingerprints})"

    @property
    def keys(self) -> KeyRing:
        return KeyRing(tuple(SwarmKey(secret) for secret in self.secrets))

    @property
    def line(self) -> str:
        """The line to paste. It contains the swarm key."""
        content = msgspec.msgpack.encode(self)
        return PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode("ascii").rstrip("=")

    @classmethod
    def of(cls, run: str, addresses: list[str], keys: KeyRing) -> Invitation:
        return cls(run, addresses[:MAX_ADDRESSES], [key.secret for key in keys])

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Parse a pasted line. Raises `BadInvitation` with the reason."""
        line = "".join(text.split()).strip("'\"")
        if not line:
            raise BadInvitation("it is empty")
        if len(line) > MAX_CHARACTERS:
            raise BadInvitation(f"it has {len(line)} characters, no invitation has more than {MAX_CHARACTERS}")
        if not line.startswith(PREFIX):
            raise BadInvitation(_why_foreign(line))
        coded = line[len(PREFIX) :]
        damaged = f"it was torn or changed on the way ({len(line)} characters arrived): copy the whole line again"
        try:
            data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise BadInvitation(damaged) from None
        content, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        if not content or check != _check(content):
            raise BadInvitation(damaged)
        try:
            invitation = msgspec.msgpack.decode(content, type=cls)
            for address in invitation.addresses:
                split_address(address)
            _ = invitation.keys
        except (msgspec.MsgspecError, ValueError, BadKey):
            raise BadInvitation("it is whole, but not made by this version of p2pnode") from None
        return invitation


def _why_foreign(line: str) -> str:
    mark, colon, _ = line.partition(":")
    if colon and mark.startswith(MARK) and mark[len(MARK) :].isdigit():
        return f"it is of version {mark[len(MARK) :]}, this p2pnode reads version {VERSION}"
    if line.startswith("p2pkey"):
        return "it is a swarm key, not an invitation: put it into a file of mode 0600 and name that by swarm.key_file"
    return f"an invitation begins with {PREFIX}; `p2pnode key invite` on a member's machine prints one"


def _check(content: bytes) -> bytes:
    return hashlib.sha256(b"p2pnode invitation\0" + content).digest()[:CHECK_BYTES]
