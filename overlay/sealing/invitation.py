"""An invitation: one line with everything a second machine needs to join, which is addresses, run and swarm key.

`p2pnode1:` and base64url of a MessagePack array with a checksum. Made to be pasted: white space that a terminal or a
mail put into it is taken out, a torn or changed line is told from a foreign one. No message repeats any of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from overlay.addresses import split_address
from overlay.errors import OverlayError
from overlay.sealing.swarm_key import KEY_BYTES, MOST_KEYS, BadKey, KeyRing, SwarmKey

MARK = "p2pnode"
VERSION = 1
PREFIX = f"{MARK}{VERSION}:"
CHECK_BYTES = 6
MOST_ADDRESSES = 8
#: Eight addresses with the longest names, a run, two keys; longer is something else.
MOST_CHARACTERS = 4096

_Secret = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class BadInvitation(OverlayError):
    """A text that is no invitation of ours; the message never repeats it."""


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`addresses` are "host:port" of nodes to dial; may be empty where the joiner knows one."""

    run: Annotated[str, Meta(min_length=1, max_length=64)]
    addresses: Annotated[list[Annotated[str, Meta(max_length=261)]], Meta(max_length=MOST_ADDRESSES)]
    secrets: Annotated[list[_Secret], Meta(min_length=1, max_length=MOST_KEYS)]

    def __repr__(self) -> str:
        return f"Invitation(run={self.run!r}, addresses={self.addresses!r}, keys={self.keys.fingerprints})"

    @property
    def keys(self) -> KeyRing:
        return KeyRing(tuple(SwarmKey(secret) for secret in self.secrets))

    @property
    def line(self) -> str:
        """The line to paste. Whoever shows it gives the swarm away."""
        content = msgspec.msgpack.encode(self)
        return PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode("ascii").rstrip("=")

    @classmethod
    def of(cls, run: str, addresses: list[str], keys: KeyRing) -> Invitation:
        return cls(run, addresses[:MOST_ADDRESSES], [key.secret for key in keys])

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """An invitation from a pasted line. Raises `BadInvitation` with what is wrong with it."""
        line = "".join(text.split()).strip("'\"")
        if not line:
            raise BadInvitation("it is empty")
        if len(line) > MOST_CHARACTERS:
            raise BadInvitation(f"it has {len(line)} characters, no invitation has more than {MOST_CHARACTERS}")
        if not line.startswith(PREFIX):
            raise BadInvitation(_foreign(line))
        coded = line[len(PREFIX) :]
        torn = f"it was torn or changed on the way ({len(line)} characters arrived): copy the whole line again"
        try:
            data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise BadInvitation(torn) from None
        content, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        if not content or check != _check(content):
            raise BadInvitation(torn)
        try:
            invitation = msgspec.msgpack.decode(content, type=cls)
            for address in invitation.addresses:
                split_address(address)
            _ = invitation.keys
        except (msgspec.MsgspecError, ValueError, BadKey):
            raise BadInvitation("it is whole, but not made by this version of p2pnode") from None
        return invitation


def _foreign(line: str) -> str:
    mark, colon, _ = line.partition(":")
    if colon and mark.startswith(MARK) and mark[len(MARK) :].isdigit():
        return f"it is of version {mark[len(MARK) :]}, this p2pnode reads version {VERSION}"
    if line.startswith("p2pkey"):
        return "it is a swarm key, not an invitation: put it into a file of mode 0600 and name that by swarm.key_file"
    return f"an invitation begins with {PREFIX}; `p2pnode key invite` on a member's machine prints one"


def _check(content: bytes) -> bytes:
    return hashlib.sha256(b"p2pnode invitation\0" + content).digest()[:CHECK_BYTES]
