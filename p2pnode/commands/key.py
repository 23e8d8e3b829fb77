"""`p2pnode key`: create, show, pass on, accept and rotate the swarm key. Only `invite` and `show --reveal` print it.

No command needs a running node; `invite` asks one for its addresses if there is one. A running node notices by itself
when its key file changes. Modules with cryptography are imported inside functions, so that other commands start fast.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlay.addresses import is_loopback, split_address
from p2pnode.client import NodeClient, find
from p2pnode.commands.options import ConfigOption, JsonOption, SetOption, StateDirOption, loaded
from p2pnode.commands.output import print_line
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import IN_ENVIRONMENT, KEY_FILE, STANDARD_INPUT, read_swarm

if TYPE_CHECKING:
    from overlay.sealing.invitation import Invitation
    from overlay.sealing.swarm_key import KeyRing, SwarmKey

key_app = typer.Typer(
    help="Make, show, pass on and rotate the swarm key: anyone with the key is a member.", rich_markup_mode=None
)

FileArgument = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Key file; default: swarm.key in the state directory.")
]
#: Peers whose addresses an invitation contains, besides the node's own.
PEERS_INVITED_TO = 3


@key_app.command("new")
def new(
    file: FileArgument = None,
    state_dir: StateDirOption = None,
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a key: the old one is lost.")] = False,
) -> int:
    """Make a swarm key, in a file that only you can read.

    Example: p2pnode key new && p2pnode start --set node.host=0.0.0.0
    """
    path = file or _settings(config, state_dir).state_folder / KEY_FILE
    if path.exists() and not force:
        hint = "keep it; to change the key of a running swarm see `p2pnode key rotate`, to replace it anyway --force"
        raise UserError(f"there is a swarm key in {path} already", hint, ExitCode.STATE_DIRECTORY)
    from overlay.sealing.swarm_key import KeyRing
    from p2pnode.keys.key_files import write_key_file

    keys = KeyRing((_fresh(),))
    write_key_file(path, keys)
    print_line(
        f"wrote {path}, key {keys.primary.fingerprint}; start the first node, then `p2pnode key invite` for the others"
    )
    return 0


@key_app.command("show")
def show(
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    settings: SetOption = None,
    reveal: Annotated[bool, typer.Option("--reveal", help="Print the key itself, as its file has it.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show which swarm key this node uses, by its fingerprint."""
    found = _settings(config, state_dir, settings)
    keys = _keys(found)
    if reveal:
        print_line(keys.text.rstrip())
    elif as_json:
        print_line(
            json.dumps({"schema": 1, "file": found.swarm.key_file, "run": found.swarm.run, "keys": keys.fingerprints})
        )
    else:
        accepted = "".join(f", {fingerprint} accepted too" for fingerprint in keys.fingerprints[1:])
        print_line(f"{found.swarm.key_file}: key {keys.primary.fingerprint} used{accepted}, run {found.swarm.run}")
    return 0


@key_app.command("invite")
def invite(
    address: Annotated[
        list[str] | None,
        typer.Option("--address", metavar="HOST:PORT", help="Where a node listens; default: what the node here knows."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there, readable by you alone, instead.")
    ] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    settings: SetOption = None,
) -> int:
    """Print one line with addresses, run and key: anyone with the line is a member.

    Example: p2pnode key invite --out invitation.txt, or: p2pnode key invite | ssh other p2pnode start --invite -
    """
    from overlay.sealing.invitation import Invitation
    from p2pnode.keys.key_files import write_invitation

    found = _settings(config, state_dir, settings)
    keys = _keys(found)
    running = find(found.state_folder)
    client = NodeClient(running.address) if running is not None and running.alive else None
    # The run of the running node takes precedence over the flags of this command.
    run = str(client.status()["run"]) if client is not None else found.swarm.run
    addresses = _checked(address) if address else _known_addresses(found, client)
    if all(is_loopback(split_address(known)[0]) for known in addresses):
        sys.stderr.write(
            f"warning: {', '.join(addresses)} can be dialled from this machine only\n"
            "hint: give the address that others reach with --address HOST:PORT\n"
        )
    line = Invitation.of(run, addresses, keys).line
    if out is None:
        print_line(line)
    else:
        write_invitation(out, line)
        print_line(f"wrote {out}: anyone who reads it is a member")
    return 0


@key_app.command("join")
def join(
    invitation: Annotated[
        str, typer.Argument(metavar="LINE|FILE|-", help="The invitation, a file with it, or - for standard input.")
    ] = STANDARD_INPUT,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> int:
    """Keep an invitation in the state directory; the next `p2pnode start` joins that swarm.

    Example: p2pnode key join - < invitation.txt && p2pnode start
    """
    folder = loaded(config, None, {"node.state_dir": ("--state-dir", state_dir)}, joining=True).config.state_folder
    taken, changed = take(invitation, folder)
    what = "joins" if changed else "joined already"
    print_line(
        f"the node on {folder} {what} run {taken.run}, key {taken.keys.primary.fingerprint}; start it: p2pnode start"
    )
    return 0


class Step(StrEnum):
    """The three steps of a rotation."""

    PREPARE = "prepare"
    SWITCH = "switch"
    FINISH = "finish"


@key_app.command("rotate")
def rotate(
    step: Annotated[
        Step, typer.Argument(help="prepare, then switch, then finish; each on every node before the next.")
    ],
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    settings: SetOption = None,
) -> int:
    """Change the swarm key without stopping the swarm.

    prepare makes a second key, accepted beside the first: do it once, and take the file, or a fresh `key invite`, to
    every node. switch uses the second, on every node. finish forgets the first. Running nodes notice by themselves.
    """
    from overlay.sealing.swarm_key import BadKey
    from p2pnode.keys.key_files import read_key_file, write_key_file

    found = _settings(config, state_dir, settings)
    path = _own_file(found)
    keys = read_key_file(path)
    try:
        match step:
            case Step.PREPARE:
                after = keys.prepared(_fresh())
                then = "take the file, or a fresh `p2pnode key invite`, to every node; then `p2pnode key rotate switch`"
            case Step.SWITCH:
                after = keys.switched()
                then = "when every node has switched: `p2pnode key rotate finish`"
            case Step.FINISH:
                after = keys.finished()
                then = "the old key opens nothing here any more"
    except BadKey as error:
        raise UserError(f"{path}: {error}", "`p2pnode key show` shows which keys are valid", ExitCode.USAGE) from None
    write_key_file(path, after)
    print_line(f"{path}: key {after.primary.fingerprint} is used, {len(after.keys)} valid; {then}")
    return 0


# --- invitations --------------------------------------------------------------------------------------------------


def is_inline(text: str) -> bool:
    """Whether an argument is the invitation itself rather than a file or standard input."""
    return text != STANDARD_INPUT and not _is_file(text)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a file name
        return False


def take(text: str, folder: Path) -> tuple[Invitation, bool]:
    """Read an invitation and write it to a state directory; also whether anything changed. Raises `UserError`."""
    from overlay.sealing.invitation import BadInvitation, Invitation
    from p2pnode.keys.key_files import MAX_FILE_BYTES, own_input, save_invitation

    if text == STANDARD_INPUT:
        if sys.stdin.isatty():
            sys.stderr.write("paste the invitation and press Enter:\n")
            content = own_input().readline(MAX_FILE_BYTES)
        else:
            content = own_input().read(MAX_FILE_BYTES)
        where = "standard input"
    elif _is_file(text):
        content, where = Path(text).read_bytes()[:MAX_FILE_BYTES], f"the file {text}"
    else:
        content, where = text.encode("utf-8", "replace"), "the line given"
    try:
        invitation = Invitation.parse(content.decode("utf-8", "replace"))
    except BadInvitation as error:
        hint = "`p2pnode key invite` on a member's machine prints an invitation, one line"
        raise UserError(f"{where} is no invitation: {error}", hint, ExitCode.CONFIGURATION) from None
    changed = save_invitation(folder, invitation.run, list(invitation.addresses), invitation.keys)
    return invitation, changed


def _checked(addresses: list[str]) -> list[str]:
    from overlay.sealing.invitation import MAX_ADDRESSES

    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise UserError(f"--address: {error}", "write --address 10.0.0.5:8468", ExitCode.USAGE) from None
    if len(addresses) > MAX_ADDRESSES:
        hint = f"name the {MAX_ADDRESSES} that are up most"
        raise UserError(f"an invitation holds {MAX_ADDRESSES} addresses, not {len(addresses)}", hint, ExitCode.USAGE)
    return addresses


def _known_addresses(config: Config, client: NodeClient | None) -> list[str]:
    """Those of the running node and some of its peers, or else those of the accepted invitation."""
    if client is not None:
        known = [str(client.status()["node"]["address"])]
        return known + [str(peer["address"]) for peer in client.peers() if peer["eligible"]][:PEERS_INVITED_TO]
    addresses = read_swarm(config.state_folder)[1]
    if not addresses:
        raise UserError(
            "an invitation needs the address of a node, and none runs here to be asked",
            "start the node first, or give its address with --address HOST:PORT",
            ExitCode.NOT_REACHABLE,
        )
    return addresses


# --- keys ---------------------------------------------------------------------------------------------------------


def _fresh() -> SwarmKey:
    from overlay.sealing.swarm_key import KEY_BYTES, SwarmKey

    return SwarmKey(secrets.token_bytes(KEY_BYTES))


def _settings(config: Path | None, state_dir: str | None, settings: list[str] | None = None) -> Config:
    # As if a key existed: the configuration of a node that listens beyond the loopback is invalid without one.
    return loaded(config, settings, {"node.state_dir": ("--state-dir", state_dir)}, joining=True).config


def _keys(config: Config) -> KeyRing:
    from p2pnode.keys.key_files import find_keys, own_input

    keys = find_keys(config, dict(os.environ), own_input())
    if keys is None:
        raise UserError(
            "this node has no swarm key: swarm.key_file is set to an empty text",
            "remove the setting to use the key of the state directory, or make a key with `p2pnode key new`",
            ExitCode.CONFIGURATION,
        )
    return keys


def _own_file(config: Config) -> Path:
    if config.swarm.key_file in (STANDARD_INPUT, IN_ENVIRONMENT):
        hint = "rotate it where the key is kept; a file named by swarm.key_file can be rotated here"
        raise UserError("this node's swarm key is in no file", hint, ExitCode.USAGE)
    return Path(config.swarm.key_file).expanduser()
