"""The swarm key: 256 bits shared by all members, its text form, and the keys derived from it.

Every other key is derived with HKDF-SHA256 (RFC 5869) for one run and one purpose, so keys of two runs are independent.
One swarm key is one *epoch*. A `KeyRing` holds the epoch in use and, during a rotation, a second one that is accepted.
No `repr`, error message or log entry contains a key; its fingerprint may be shown.

Pure. The caller reads and writes the file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pnode.overlay.errors import OverlayError

KEY_BYTES = 32
CHECK_BYTES = 3
#: Of the text form, with its version. 35 bytes in base32 make it 64 characters long.
PREFIX = "p2pkey1-"
TEXT_CHARACTERS = len(PREFIX) + 8 * (KEY_BYTES + CHECK_BYTES) // 5
#: The key in use, and during a rotation one more that is accepted.
MAX_KEYS = 2
FINGERPRINT_BYTES = 4


class BadKey(OverlayError):
    """The text is no swarm key; the message never contains it."""


@dataclass(frozen=True)
class SwarmKey:
    """The key of one epoch."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise BadKey(f"a swarm key has {KEY_BYTES} bytes, not {len(self.secret)}")

    def derive(self, run: str, purpose: str, size_bytes: int = 32) -> bytes:
        """A key for one purpose in one run, independent of all others."""
        info = b"p2pnode 1\0" + purpose.encode() + b"\0" + run.encode()
        return HKDF(SHA256(), size_bytes, salt=None, info=info).derive(self.secret)

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that identify a key and do not reveal it."""
        return self.derive("", "fingerprint", FINGERPRINT_BYTES).hex()

    @property
    def text(self) -> str:
        """The form in key files. It is the secret itself."""
        coded = base64.b32encode(self.secret + _check(self.secret)).decode("ascii").lower()
        return PREFIX + coded

    @classmethod
    def parse(cls, text: str) -> SwarmKey:
        """Parse the text form. Raises `BadKey` with the reason, which does not contain the text."""
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
    """The keys that are valid now: the first is in use, all are accepted."""

    keys: tuple[SwarmKey, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise BadKey("there is no swarm key in it")
        if len(self.keys) > MAX_KEYS:
            raise BadKey(f"there are {len(self.keys)} swarm keys in it; at most {MAX_KEYS} are valid at a time")
        if len(set(self.keys)) != len(self.keys):
            raise BadKey("the same swarm key stands in it twice")

    def __iter__(self) -> Iterator[SwarmKey]:
        return iter(self.keys)

    @property
    def primary(self) -> SwarmKey:
        return self.keys[0]

    @property
    def fingerprints(self) -> list[str]:
        """Of all keys; the one in use comes first."""
        return [key.fingerprint for key in self.keys]

    @property
    def text(self) -> str:
        """The content of a key file."""
        lines = ["# Swarm key of p2pnode. Anyone with this file is a member: protect it like an ssh key."]
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

    # --- rotation -------------------------------------------------------------------------------------------------

    def prepared(self, fresh: SwarmKey) -> KeyRing:
        """Step 1, on every node: accept the next key, but do not use it yet."""
        if len(self.keys) == MAX_KEYS:
            raise BadKey("a rotation is under way already: switch or finish it first")
        return KeyRing((self.primary, fresh))

    def switched(self) -> KeyRing:
        """Step 2, when every node accepts both: use the next key, still accept the old one."""
        if len(self.keys) != MAX_KEYS:
            raise BadKey("there is no second key to switch to: prepare the rotation first")
        return KeyRing((self.keys[1], self.keys[0]))

    def finished(self) -> KeyRing:
        """Step 3, when every node uses the next key: stop accepting the old one."""
        if len(self.keys) != MAX_KEYS:
            raise BadKey("there is no rotation to finish: one key alone is valid")
        return KeyRing((self.primary,))
