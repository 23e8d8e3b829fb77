"""No key, token or invitation is in a bundle, wherever they were written."""

from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path

import pytest

from p2pnode.bundle import REMOVED, Redactor
from p2pnode.client import STATUS_FILE, RunningNode
from p2pnode.commands import bundle as command
from p2pnode.commands.bundle import bundle
from p2pnode.errors import UserError
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

KEY, OTHER = SwarmKey(bytes(range(32))), SwarmKey(bytes(range(1, 33)))
LINE = Invitation.of("digits", ["10.0.0.5:8468"], KeyRing((OTHER,))).line
IDENTITY = bytes(range(64, 96))
TOKEN = "a-token-that-somebody-wrote-by-hand"
PASSWORD = "hunter2hunter2"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a node, and of one that `--local` started, with secrets in every text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_findings", lambda *_: [{"what": f"the key {KEY.text} is open", "do": ""}])
    folder = tmp_path / "state"
    everything = " ".join([KEY.text, LINE, TOKEN, IDENTITY.hex(), base64.b64encode(IDENTITY).decode()])
    for place in (folder, folder / "local" / "1"):
        place.mkdir(parents=True)
        for name, content in (
            ("identity.key", IDENTITY),
            ("swarm.key", f"# the key\n{KEY.text}\n".encode()),
            ("status.token", f"{TOKEN}\n".encode()),
        ):
            (place / name).write_bytes(content)
            (place / name).chmod(0o600)
        for name in ("node.log", "node.log.1", "trainer.log", "trainer.log.1"):
            (place / name).write_text(f"at step 7 of {name}: {everything}\n")
        (place / "dashboard.html").write_text(f"<a href='#token={TOKEN}'>")
        settings = {
            "training.options": {"api_key": PASSWORD, "note": LINE},
            "dispatch.store": f"etcd://a:{PASSWORD}@h:1",
        }
        (place / "node.json").write_text(json.dumps({"run": "digits", "settings": settings}))
    return folder


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {member.name.removeprefix("p2pnode-bundle/"): archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_bundle_has_the_facts_and_no_secret(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs, settings and the list of files are in it, of each node; only its owner reads it."""
    assert bundle(tmp_path / "b.tar.gz", state_dir=str(state), as_json=True) == 0

    found = contents(tmp_path / "b.tar.gz")
    names = ["files.txt", "node.json", "node.log", "node.log.1", "trainer.log", "trainer.log.1"]
    assert sorted(found) == sorted(
        ["about.json", "config.toml", "doctor.json", *names, *(f"local/1/{name}" for name in names)]
    )
    assert json.loads(capsys.readouterr().out)["names"] == list(found)
    everything = "\n".join(found.values())
    for secret in (
        KEY.text,
        KEY.text[8:],
        LINE,
        LINE[9:],
        TOKEN,
        IDENTITY.hex(),
        base64.b64encode(IDENTITY).decode(),
        PASSWORD,
    ):
        assert secret not in everything
    assert "at step 7 of trainer.log" in found["local/1/trainer.log"]
    assert "0600" in found["files.txt"]
    assert json.loads(found["node.json"])["run"] == "digits"
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o077 == 0


def test_what_a_node_answers_is_cleaned_too(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may give a metric, an error or an event any text; a node that does not answer is said."""

    class Client:
        def status(self) -> dict[str, str]:
            return {"summary": f"failed: {LINE}"}

        def peers(self) -> list[dict[str, str]]:
            return [{"address": "10.0.0.5:8468"}]

        def steps(self, _count: int) -> list[object]:
            return []

        def events(self) -> dict[str, object]:
            raise UserError("it does not answer")

    from p2pnode import bundle as packing

    monkeypatch.setattr(packing.NodeClient, "of", lambda _: Client())
    (state / STATUS_FILE).write_text("{}")
    monkeypatch.setattr(command, "running_in", lambda place: RunningNode("h:1", 1, "a") if place == state else None)
    assert bundle(tmp_path / "b.tar.gz", state_dir=str(state)) == 0
    found = contents(tmp_path / "b.tar.gz")
    assert LINE not in found["status.json"]
    assert "10.0.0.5:8468" in found["peers.json"]
    assert json.loads(found["events.json"]) == {"error": "it does not answer"}
    assert "local/1/status.json" not in found


def test_a_file_that_is_there_is_not_replaced_unasked(state: Path, tmp_path: Path) -> None:
    """As with `export`."""
    (tmp_path / "b.tar.gz").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        bundle(tmp_path / "b.tar.gz", state_dir=str(state))
    assert (tmp_path / "b.tar.gz").read_text() == "mine"


KEY = SwarmKey(bytes(range(7, 39)))
INVITED = Invitation.of("digits", ["10.0.0.5:8468"], KeyRing((KEY,))).line
SECRET = bytes(range(100, 132))


@pytest.mark.parametrize(
    "text",
    [
        KEY.text,
        KEY.text.upper().replace("P2PKEY1", "p2pkey1"),
        INVITED,
        INVITED[:60],
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
    for part in (KEY.text[12:30], INVITED[12:40], SECRET.hex()[:16], "aGVsbG8", "hunter2", "MIIEvQ"):
        assert part not in cleaned
    assert base64.b64encode(SECRET).decode()[:16] not in cleaned


def test_json_stays_json_and_ordinary_text_as_it_is() -> None:
    """Paths of files with secrets, fingerprints and counts of tokens are no secrets."""
    clean = Redactor([SECRET, b"ab"]).clean
    text = json.dumps({"secret": 'a"b', "token_file": "/home/a/status.token", "keys": ["a1b2c3d4"], "tokens": 4096})
    assert json.loads(clean(text)) == json.loads(text) | {"secret": REMOVED}
    for plain in ("swarm.key_file = '/home/a/swarm.key'", 'token = ""', "the tokenizer has 4096 tokens", "ab cab"):
        assert clean(plain) == plain
