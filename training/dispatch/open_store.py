"""From `dispatch.store` to a store: "sqlite", "sqlite:PATH" or "etcd://host:port,host:port/prefix?option=value"."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from p2pnode.overlay.environment import Environment
from p2pnode.training.dispatch.etcd_gateway import EtcdGateway
from p2pnode.training.dispatch.etcd_store import TTL_S, EtcdStore
from p2pnode.training.dispatch.sqlite_store import SqliteStore
from p2pnode.training.dispatch.store import Store
from p2pnode.training.errors import TrainingError

#: The file in the state directory where the setting names none.
FILE_NAME = "dispatch.sqlite"
ETCD_PORT = 2379
#: Of an etcd setting: `tls` (true or false), files of a certificate authority, of a certificate and its key, of the
#: password of the user before the @, and the time after which a standby may replace a silent master.
ETCD_OPTIONS = frozenset({"tls", "ca", "cert", "key", "password_file", "ttl_s"})


class BadStoreSetting(TrainingError):
    """`dispatch.store` names no store; the text says what is wrong and what is right."""


def open_store(spec: str, folder: Path, environment: Environment, name: str = "master") -> Store:
    """The store that a setting names, not opened yet. Raises `BadStoreSetting`; reads certificates and passwords.

    `folder` is the state directory. `name` is shown to masters that wait in etcd. Runs that share an etcd need
    prefixes of their own.
    """
    kind, _, rest = spec.partition(":")
    if kind == "sqlite":
        path = Path(rest) if rest else Path(FILE_NAME)
        return SqliteStore(path if path.is_absolute() else folder / path, environment.executor)
    if kind == "etcd":
        return _etcd_store(spec, environment, name)
    raise BadStoreSetting(
        f'dispatch.store = "{spec}" names no store: give "sqlite", "sqlite:PATH" or "etcd://host:port/prefix"'
    )


def _etcd_store(spec: str, environment: Environment, name: str) -> EtcdStore:
    parts = urlsplit(spec)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - ETCD_OPTIONS)
    if unknown:
        raise BadStoreSetting(
            f"dispatch.store: unknown option {unknown[0]}; known are {', '.join(sorted(ETCD_OPTIONS))}"
        )
    user, _, hosts = parts.netloc.rpartition("@")
    prefix = parts.path.rstrip("/")
    if not prefix:
        raise BadStoreSetting(f'dispatch.store = "{spec}" has no prefix: add one, such as "/p2pnode/RUN"')
    tls = _tls(options)
    scheme = "http" if tls is None else "https"
    endpoints = [f"{scheme}://{_with_port(host, spec)}" for host in hosts.split(",")]
    try:
        ttl_s = float(options.get("ttl_s", TTL_S))
    except ValueError:
        ttl_s = 0.0
    if not 2 <= ttl_s <= 3600:
        raise BadStoreSetting("dispatch.store: ttl_s is a number of seconds, from 2 to 3600")
    gateway = EtcdGateway(endpoints, tls, _login(user, options))
    return EtcdStore(gateway, prefix, name, environment, ttl_s)


def _with_port(host: str, spec: str) -> str:
    try:
        found = urlsplit(f"//{host}")
        port = found.port or ETCD_PORT
    except ValueError as error:
        raise BadStoreSetting(f'dispatch.store = "{spec}": {host} is no host and port: {error}') from error
    if not found.hostname or found.username is not None or found.path:
        raise BadStoreSetting(f'dispatch.store = "{spec}": "{host}" is no host and port')
    return f"[{found.hostname}]:{port}" if ":" in found.hostname else f"{found.hostname}:{port}"


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    wanted = options.get("tls", "true" if "ca" in options or "cert" in options else "false")
    if wanted not in ("true", "false"):
        raise BadStoreSetting("dispatch.store: tls is true or false")
    if wanted == "false":
        if "ca" in options or "cert" in options:
            raise BadStoreSetting("dispatch.store: tls=false contradicts a certificate")
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except OSError as error:  # ssl.SSLError is one
        raise BadStoreSetting(f"dispatch.store: the certificates cannot be read: {error}") from error
    return context


def _login(user: str, options: dict[str, str]) -> tuple[str, str] | None:
    if ":" in user:
        raise BadStoreSetting("dispatch.store: name a password_file; a password in a setting is shown in listings")
    if bool(user) != ("password_file" in options):
        raise BadStoreSetting("dispatch.store: a user needs a password_file, and a password_file a user (user@host)")
    if not user:
        return None
    try:
        return user, Path(options["password_file"]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadStoreSetting(f"dispatch.store: the password cannot be read: {error}") from error
