"""Secrets are removed from text in whatever form they stand there."""

from __future__ import annotations

import base64
import json

import pytest

from p2pnode.bundle import REMOVED, Redactor
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

KEY = SwarmKey(bytes(range(7, 39)))
LINE = Invitation.of("digits", ["10.0.0.5:8468"], KeyRing((KEY,))).line
SECRET = bytes(range(100, 132))


@pytest.mark.parametrize(
    "text",
    [
        KEY.text,
        KEY.text.upper().replace("P2PKEY1", "p2pkey1"),
        LINE,
        LINE[:60],
        SECRET.hex(),
        base64.b64encode(SECRET).decode(),
        base64.urlsafe_b64encode(SECRET).decode().rstrip("="),
        base64.b32encode(SECRET).decode().lower(),
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN\n-----END PRIVATE KEY-----",
        "Authorization: Bearer aGVsbG8gd29ybGQ",
        "http://127.0.0.1:8080/#token=aGVsbG8gd29ybGQ",
        "etcd://root:hunter2hunter2@10.0.0.1:2379",
        'api_key = "aGVsbG8gd29ybGQ"',
        '{"wandb_api_key": "aGVsbG8gd29ybGQ", "x": 1}',
        "--password=aGVsbG8gd29ybGQ",
        "hf_token: aGVsbG8gd29ybGQ",
    ],
)
def test_no_form_of_a_secret_stays(text: str) -> None:
    """Known ones by their contents, unknown ones by their form or the name in front."""
    before, after = "step 7 at 10.0.0.5:8468 ", " and goes on"
    cleaned = Redactor([SECRET]).clean(before + text + after)
    assert REMOVED in cleaned
    assert cleaned.startswith(before)
    for part in (KEY.text[12:30], LINE[12:40], SECRET.hex()[:16], "aGVsbG8", "hunter2", "MIIEvQ"):
        assert part not in cleaned
    assert base64.b64encode(SECRET).decode()[:16] not in cleaned


def test_json_stays_json_and_ordinary_text_as_it_is() -> None:
    """Paths of files with secrets, fingerprints and counts of tokens are no secrets."""
    clean = Redactor([SECRET, b"ab"]).clean
    text = json.dumps({"secret": 'a"b', "token_file": "/home/a/status.token", "keys": ["a1b2c3d4"], "tokens": 4096})
    assert json.loads(clean(text)) == json.loads(text) | {"secret": REMOVED}
    for plain in ("swarm.key_file = '/home/a/swarm.key'", 'token = ""', "the tokenizer has 4096 tokens", "ab cab"):
        assert clean(plain) == plain
