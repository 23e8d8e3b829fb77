"""Removes secrets from text that leaves the machine: known ones, and whatever has the form of one. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

from overlay.sealing import invitation, swarm_key

REMOVED = "[removed]"
#: A shorter text would be found in words; no secret of this program is.
LEAST_CHARACTERS = 8

_FORMS = (
    re.compile(re.escape(swarm_key.PREFIX) + r"[A-Za-z2-7=]+"),
    re.compile(re.escape(invitation.MARK) + r"\d+:[A-Za-z0-9_=-]{8,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=Bearer )[^\s\"',]+", re.IGNORECASE),
    re.compile(r"(?<=#token=)[^\s\"'<>]+"),
    re.compile(r"(?<=://)[^/@\s:\"]+:[^/@\s\"]+(?=@)"),
)
#: A name that says that its value is secret, and the value: in TOML, JSON, a command line or an assignment.
_NAMED = re.compile(
    r"((?:\b|_|-)(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)[\"']?\s*[=:]\s*)"
    r"(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;&\"'}\]]+)",
    re.IGNORECASE,
)


class Redactor:
    """`clean` removes the given secrets in each of their forms, and everything that looks like one."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        forms = {form for secret in secrets for form in _forms_of(secret) if len(form) >= LEAST_CHARACTERS}
        # The longest first: a part of one may be another.
        self._known = [re.compile(re.escape(form)) for form in sorted(forms, key=lambda form: (-len(form), form))]

    def clean(self, text: str) -> str:
        for form in (*self._known, *_FORMS):
            text = form.sub(REMOVED, text)
        return _NAMED.sub(lambda found: found[1] + _in_place_of(found[2]), text)


def _in_place_of(value: str) -> str:
    """Keeps the quotes, so that JSON and TOML stay valid; an empty value says that none is set."""
    if value in ('""', "''", "null", "None"):
        return value
    return f'"{REMOVED}"' if value.startswith('"') else f"'{REMOVED}'" if value.startswith("'") else REMOVED


def _forms_of(secret: bytes) -> set[str]:
    """As text, hexadecimal, and in the alphabets of base64 and base32."""
    found = {secret.hex(), secret.hex().upper()}
    for coded in (base64.b64encode(secret), base64.urlsafe_b64encode(secret), base64.b32encode(secret)):
        text = coded.decode("ascii").rstrip("=")
        found |= {text, text.lower()} if coded.isupper() else {text}
    try:
        text = secret.decode("utf-8")
    except UnicodeDecodeError:
        return found
    return found | {line.strip() for line in text.splitlines() if not line.startswith("#")}
