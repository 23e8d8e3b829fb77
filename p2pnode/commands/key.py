"""`p2pnode key`: create, show, pass on, accept and rotate the swarm key. Only `invite` and `show --reveal` print it.

No command needs a running node; `invite` asks one for its addresses if there is one. A running node notices by itself
when its key file changes. Modules with cryptography are imported inside functions, so that other commands start fast.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2pnode.client import NodeClient
from p2pnode.commands.options import (
    ConfigOption,
    JsonOption,
    Place,
    StateDirOption,
    loaded,
    place_flags,
    running_in,
    takes,
)
from p2pnode.commands.output import print_answer, print_line, print_notice
from p2pnode.config.load import Loaded
from p2pnode.config.settings import Config
from p2pnode.config.state_folders import has_been_in_swarm, run_of
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import IN_ENVIRONMENT, KEY_FILE, STANDARD_INPUT, dialable, own_host, read_swarm
from p2pnode.overlay.addresses import is_literal, is_loopback, split_address, usable_host

if TYPE_CHECKING:
    from p2pnode.overlay.sealing.invitation import Invitation
    from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

key_app = typer.Typer(
    help="Make, show, pass on and rotate the swarm key: anyone with the key is a member.", rich_markup_mode=None
)

FileArgument = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Key file; default: swarm.key in the state directory.")
]
#: Peers whose addresses an invitation contains, besides the node's own.
PEERS_INVITED_TO = 3


@key_app.command("new")
@takes(Place)
def new(
    place: Place,
    file: FileArgument = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a key: the old one is lost.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Make a swarm key, in a file that only you can read.

    Example: p2pnode key new --run digits && p2pnode start --run digits --set node.host=0.0.0.0
    """
    found = _settings(place)
    path = file or found.state_folder / KEY_FILE
    if path.exists() and not force:
        hint = "keep it; to change the key of a running swarm see `p2pnode key rotate`, to replace it anyway --force"
        raise UserError(f"there is a swarm key in {path} already", hint, ExitCode.STATE_DIRECTORY)
    if file is None and has_been_in_swarm(found.state_folder) and not force:
        raise UserError(
            f'{found.state_folder} is of a node in run "{run_of(found.state_folder)}": with a key made now it would no '
            "longer meet the members of its swarm",
            "for another swarm name its run: p2pnode key new --run NAME; to close this one, --force, and give every "
            "member the key",
            ExitCode.MISMATCH,
        )
    from p2pnode.keys.key_files import write_key_file
    from p2pnode.overlay.sealing.swarm_key import KeyRing

    keys = KeyRing((_fresh(),))
    write_key_file(path, keys)
    then = "start the first node, then `p2pnode key invite` for the others"
    text = f"wrote {path}, key {keys.primary.fingerprint}; {then}"
    return print_answer(text, {"file": str(path), "keys": keys.fingerprints}, as_json=as_json)


@key_app.command("show")
@takes(Place)
def show(
    place: Place,
    reveal: Annotated[bool, typer.Option("--reveal", help="Print the key itself, as its file has it.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show which swarm key this node uses, by its fingerprint."""
    found = _settings(place)
    keys = _keys(found)
    if reveal:
        print_line(keys.text.rstrip())
        return 0
    accepted = "".join(f", {fingerprint} accepted too" for fingerprint in keys.fingerprints[1:])
    text = f"{found.swarm.key_file}: key {keys.primary.fingerprint} used{accepted}, run {found.swarm.run}"
    answer = {"file": found.swarm.key_file, "run": found.swarm.run, "keys": keys.fingerprints}
    return print_answer(text, answer, as_json=as_json)


@key_app.command("invite")
@takes(Place)
def invite(
    place: Place,
    address: Annotated[
        list[str] | None,
        typer.Option("--address", metavar="HOST:PORT", help="Where a node listens; default: what the node here knows."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there, readable by you alone, instead.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print one line with addresses, run and key: anyone with the line is a member.

    Example: p2pnode key invite --out invitation.txt, or: p2pnode key invite | ssh other p2pnode start --invite -
    """
    from p2pnode.keys.key_files import write_invitation
    from p2pnode.overlay.sealing.invitation import Invitation

    loading = place.loaded(joining=True, for_running=True)
    found = loading.config
    running = running_in(found.state_folder)
    client = NodeClient.of(running) if running is not None else None
    name = _run_of_swarm(loading, client)
    keys = _keys(found)
    addresses = _given_addresses(address) if address else _known_addresses(found, client)
    line = Invitation.of(name, addresses, keys).line
    if out is not None:
        write_invitation(out, line)
    text, shown, file = line, line, ""
    if out is not None:  # the line has the key: it is not printed as well
        text = f"wrote {out}: anyone who reads it is a member of run {name}, joining at {', '.join(addresses)}"
        shown, file = "", str(out)
    answer = {"run": name, "addresses": addresses, "invitation": shown or None, "file": file or None}
    return print_answer(text, answer, as_json=as_json)


@key_app.command("join")
def join(
    invitation: Annotated[
        str, typer.Argument(metavar="LINE|FILE|-", help="The invitation, a file with it, or - for standard input.")
    ] = STANDARD_INPUT,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> int:
    """Keep an invitation in the state directory of its run; the next `p2pnode start` joins that swarm.

    Example: p2pnode key join - < invitation.txt && p2pnode start
    """
    from p2pnode.keys.key_files import save_invitation

    taken = read_invitation(invitation)
    folder = loaded(config, None, place_flags(state_dir, taken.run), joining=True).config.state_folder
    changed = save_invitation(folder, taken.run, list(taken.addresses), taken.keys)
    what = "joins" if changed else "joined already"
    place = f"--state-dir {folder}" if state_dir else f"--run {shlex.quote(taken.run)}"
    key = f"key {taken.keys.primary.fingerprint}"
    text = f"the node on {folder} {what} run {taken.run}, {key}; start it: p2pnode start {place}"
    answer = {"state_dir": str(folder), "run": taken.run, "keys": taken.keys.fingerprints, "changed": changed}
    return print_answer(text, answer, as_json=as_json)


class Step(StrEnum):
    """The three steps of a rotation."""

    PREPARE = "prepare"
    SWITCH = "switch"
    FINISH = "finish"


@key_app.command("rotate")
@takes(Place)
def rotate(
    place: Place,
    step: Annotated[
        Step, typer.Argument(help="prepare, then switch, then finish; each on every node before the next.")
    ],
    as_json: JsonOption = False,
) -> int:
    """Change the swarm key without stopping the swarm.

    prepare makes a second key, accepted beside the first: do it once, and take the file, or a fresh `key invite`, to
    every node. switch uses the second, on every node. finish forgets the first. Running nodes notice by themselves.
    """
    from p2pnode.keys.key_files import read_key_file, write_key_file
    from p2pnode.overlay.sealing.swarm_key import BadKey

    found = _settings(place)
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
    text = f"{path}: key {after.primary.fingerprint} is used, {len(after.keys)} valid; {then}"
    answer = {"file": str(path), "step": step.value, "keys": after.fingerprints}
    return print_answer(text, answer, as_json=as_json)


# --- invitations --------------------------------------------------------------------------------------------------


def is_inline(text: str) -> bool:
    """Whether an argument is the invitation itself rather than a file or standard input."""
    return text != STANDARD_INPUT and not _is_file(text)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a file name
        return False


def read_invitation(text: str) -> Invitation:
    """The invitation that an argument is or names. Raises `UserError`, which contains no part of it."""
    from p2pnode.keys.key_files import MAX_FILE_BYTES, own_input
    from p2pnode.overlay.sealing.invitation import BadInvitation, Invitation

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
        return Invitation.parse(content.decode("utf-8", "replace"))
    except BadInvitation as error:
        hint = "`p2pnode key invite` on a member's machine prints an invitation, one line"
        raise UserError(f"{where} is no invitation: {error}", hint, ExitCode.CONFIGURATION) from None


def _run_of_swarm(loading: Loaded, client: NodeClient | None) -> str:
    """The run that the node here really has: of the running node, or of the state directory, or named by hand."""
    config = loading.config
    known = run_of(config.state_folder) if client is None else str(client.status()["run"])
    named = config.swarm.run if "swarm.run" in loading.chosen else ""
    if known and named and known != named:
        raise UserError(
            f'the node of {config.state_folder} is in run "{known}", and the invitation was to name "{named}"',
            "leave --run out, or name the state directory of that run with --state-dir",
            ExitCode.MISMATCH,
        )
    if not known and not named:
        raise UserError(
            f"no node has run on {config.state_folder} yet, so the run to invite to is not known",
            "start the node first, or name the run with --run",
            ExitCode.USAGE,
        )
    return known or named


def _given_addresses(addresses: list[str]) -> list[str]:
    """The addresses of --address, if others can dial them; a loopback address is taken, with a warning."""
    from p2pnode.overlay.sealing.invitation import MAX_ADDRESSES

    for address in addresses:
        try:
            host, _ = split_address(address)
        except ValueError as error:
            raise UserError(f"--address: {error}", "write --address 10.0.0.5:8468", ExitCode.USAGE) from None
        if is_literal(host) and usable_host(host) is None:
            raise UserError(
                f"--address {address}: nobody can dial {host}",
                "give the address at which others reach the machine, such as --address 10.0.0.5:8468",
                ExitCode.USAGE,
            )
    if len(addresses) > MAX_ADDRESSES:
        hint = f"name the {MAX_ADDRESSES} that are up most"
        raise UserError(f"an invitation holds {MAX_ADDRESSES} addresses, not {len(addresses)}", hint, ExitCode.USAGE)
    if all(is_loopback(split_address(address)[0]) for address in addresses):
        print_notice(f"{', '.join(addresses)} can be dialled from this machine only")
    return addresses


def _known_addresses(config: Config, client: NodeClient | None) -> list[str]:
    """Those of the running node and some of its peers, or else those of the accepted invitation; only such as others
    can dial."""
    if client is not None:
        known = [str(client.status()["node"]["address"])]
        known += [str(peer["address"]) for peer in client.peers() if peer["eligible"]]
    else:
        known = read_swarm(config.state_folder)[1]
    if not known:
        raise UserError(
            "an invitation needs the address of a node, and none runs here to be asked",
            "start the node first, or give its address with --address HOST:PORT",
            ExitCode.NOT_REACHABLE,
        )
    chosen = dialable(known, own_host())
    for before, after in chosen.replaced:
        print_notice(f"{before} is no address that others can dial; the invitation has {after}, this machine's own")
    if not chosen.addresses:
        raise UserError(
            f"others cannot dial {', '.join(known)}, where this node listens",
            "start the node with --set node.host=0.0.0.0, or give the address that others reach with --address "
            "HOST:PORT; nodes on this machine need no invitation: p2pnode start --local",
            ExitCode.CONFIGURATION,
        )
    return list(chosen.addresses[: 1 + PEERS_INVITED_TO])


# --- keys ---------------------------------------------------------------------------------------------------------


def _fresh() -> SwarmKey:
    from p2pnode.overlay.sealing.swarm_key import KEY_BYTES, SwarmKey

    return SwarmKey(secrets.token_bytes(KEY_BYTES))


def _settings(place: Place) -> Config:
    # As if a key existed: the configuration of a node that listens beyond the loopback is invalid without one.
    return place.loaded(joining=True).config


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
