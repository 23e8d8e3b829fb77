"""The swarm key: 256 bits that every member has, how they are written down, and what is derived from them.

Everything is derived with HKDF-SHA256 (RFC 5869) for one run, so that a key used for two runs opens neither from the
other. One key is one *epoch*; a `KeyRing` holds the epoch in use and, while keys are rotated, a second one that is
accepted too. A key shows itself in no `repr`, no message of an error, no log: what may be shown is its fingerprint.

Pure. Reading and writing the file is the caller's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from overlay.errors import OverlayError

KEY_BYTES = 32
CHECK_BYTES = 3
#: Marks the text form, and its version. With 35 bytes in base32 a key is 64 characters long.
PREFIX = "p2pkey1-"
TEXT_CHARACTERS = len(PREFIX) + 8 * (KEY_BYTES + CHECK_BYTES) // 5
#: The one in use, and one that is accepted too.
MOST_KEYS = 2
FINGERPRINT_BYTES = 4


class BadKey(OverlayError):
    """A text that is no swarm key; the message never repeats it."""


@dataclass(frozen=True)
class SwarmKey:
    """One epoch's key."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise BadKey(f"a swarm key has {KEY_BYTES} bytes, not {len(self.secret)}")

    def derive(self, run: str, purpose: str, size_bytes: int = 32) -> bytes:
        """Independent bytes for one purpose in one run."""
        info = b"p2pnode 1\0" + purpose.encode() + b"\0" + run.encode()
        return HKDF(SHA256(), size_bytes, salt=None, info=info).derive(self.secret)

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that tell keys apart and give nothing away."""
        return self.derive("", "fingerprint", FINGERPRINT_BYTES).hex()

    @property
    def text(self) -> str:
        """The form in files and invitations. Whoever shows it gives the swarm away."""
        coded = base64.b32encode(self.secret + _check(self.secret)).decode("ascii").lower()
        return PREFIX + coded

    @classmethod
    def parse(cls, text: str) -> SwarmKey:
        """A key from its text form. Raises `BadKey`, which says what is wrong without repeating the text."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise BadKey(f"a swarm key begins with {PREFIX}")
        if len(text) != TEXT_CHARACTERS:
            what = "a part is missing" if len(text) < TEXT_CHARACTERS else "there is too much"
            raise BadKey(f"a swarm key has {TEXT_CHARACTERS} characters, this has {len(text)}: {what}")
        try:
            data = base64.b32decode(text[len(PREFIX) :].upper())
        except (binascii.Error, ValueError):
            raise BadKey("it has characters that no swarm key has") from None
        secret, check = data[:KEY_BYTES], data[KEY_BYTES:]
        if check != _check(secret):
            raise BadKey("its check does not fit: a character was changed on the way")
        return cls(secret)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"p2pnode swarm key\0" + secret).digest()[:CHECK_BYTES]


@dataclass(frozen=True)
class KeyRing:
    """The keys that are valid now: the first is used, all are accepted."""

    keys: tuple[SwarmKey, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise BadKey("there is no swarm key in it")
        if len(self.keys) > MOST_KEYS:
            raise BadKey(f"there are {len(self.keys)} swarm keys in it; at most {MOST_KEYS} are valid at a time")
        if len(set(self.keys)) != len(self.keys):
            raise BadKey("the same swarm key stands in it twice")

    def __iter__(self) -> Iterator[SwarmKey]:
        return iter(self.keys)

    @property
    def primary(self) -> SwarmKey:
        return self.keys[0]

    @property
    def fingerprints(self) -> list[str]:
        """Of all keys, the one in use first."""
        return [key.fingerprint for key in self.keys]

    @property
    def text(self) -> str:
        """The content of a key file."""
        lines = ["# Swarm key of p2pnode. Whoever has this file is a member: keep it as you keep an ssh key."]
        for number, key in enumerate(self.keys):
            lines.append(f"# {key.fingerprint}: {'used' if number == 0 else 'accepted too, while keys are rotated'}")
            lines.append(key.text)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """The keys of a file: one per line, lines that begin with # are comments. Raises `BadKey`."""
        keys = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                keys.append(SwarmKey.parse(line))
            except BadKey as error:
                raise BadKey(f"line {number} is no swarm key: {error}") from None
        return cls(tuple(keys))

    # -- rotation ------------------------------------------------------------------------------------------------

    def prepared(self, fresh: SwarmKey) -> KeyRing:
        """Step 1, on every node: the next key is accepted, not yet used."""
        if len(self.keys) == MOST_KEYS:
            raise BadKey("a rotation is under way already: switch or finish it first")
        return KeyRing((self.primary, fresh))

    def switched(self) -> KeyRing:
        """Step 2, when every node accepts both: the next key is used, the old one still accepted."""
        if len(self.keys) != MOST_KEYS:
            raise BadKey("there is no second key to switch to: prepare the rotation first")
        return KeyRing((self.keys[1], self.keys[0]))

    def finished(self) -> KeyRing:
        """Step 3, when every node uses the new key: the old one is worth nothing any more."""
        if len(self.keys) != MOST_KEYS:
            raise BadKey("there is no rotation to finish: one key alone is valid")
        return KeyRing((self.primary,))
