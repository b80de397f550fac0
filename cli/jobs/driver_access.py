"""The rules for which token is sent to which machine.

The address of a driver is a file in checkpoint storage, which many users may be able to write. So
the address alone determines neither the token nor the machine that gets the token:

- The token comes from `--token-file`, or from the file next to the address.
- A request without TLS is only sent to the loopback interface.
- A request to another machine needs the user's consent: `--driver-host`, or the answer to a
  question, asked once for each pair of host and certificate authority.

    known_drivers     one line for each pair: HOST SHA256-OF-THE-AUTHORITY-FILE
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from onceflow.core.errors import CheckpointCorrupt, ConfigError
from onceflow.core.settings.pipeline_settings import is_loopback
from onceflow.core.storage.log.driver_files import EXPECTED_FORM, DriverAddress, is_token

_TOKEN_BYTES_MAX = 4096
_SYSTEM = "system"
"""The placeholder for the authorities that the machine itself trusts."""


@dataclass(frozen=True, slots=True)
class DriverAccess:
    """The options of a command for connecting to drivers."""

    token_file: Path | None = None
    authority: Path | None = None
    """The PEM file of the authority that signed the drivers' certificates."""
    hosts: tuple[str, ...] = ()
    """The other machines to which the token may be sent."""


@dataclass(frozen=True, slots=True)
class DriverTarget:
    """The checked address of a driver."""

    host: str
    port: int
    is_encrypted: bool
    authority: str
    """The PEM file of the authority, or "" for the authorities that the machine trusts."""


class UnknownDriverHost(ConfigError):
    """Raised when the user has not consented to send the token to the machine of the address."""

    def __init__(self, message: str, host: str = "", authority: str = "") -> None:
        """`host` and the file `authority` are the pair that needs consent."""
        super().__init__(message)
        self.host = host
        self.authority = authority


def parse_target(address: DriverAddress, access: DriverAccess) -> DriverTarget:
    """Return the machine to which requests for the driver are sent.

    Raises:
        CheckpointCorrupt: The address is not a URL of a driver.
        UnknownDriverHost: The address is another machine, and the user has not consented.
    """
    try:
        url = urlsplit(address.url)
        host, port = url.hostname or "", url.port
    except ValueError as error:
        raise _not_a_driver(address, str(error)) from None
    if url.scheme not in {"http", "https"} or not host or not port:
        raise _not_a_driver(address, "it is not http(s)://host:port")
    if url.path.strip("/") or url.query or url.fragment or url.username is not None:
        raise _not_a_driver(address, "it has more than a host and a port")
    if not all(character.isprintable() and character != " " for character in host):
        raise _not_a_driver(address, "its host has characters that no host has")
    is_encrypted = url.scheme == "https"
    if is_loopback(host):
        return DriverTarget(host, port, is_encrypted, str(access.authority or address.authority))
    if not is_encrypted:
        raise _not_a_driver(address, "without TLS a driver is only asked on its own machine")
    authority = str(access.authority or address.authority)
    is_own = host in {socket.gethostname().lower(), socket.getfqdn().lower()}
    is_trusted = is_own or host in map(str.lower, access.hosts)
    if not is_trusted and _make_line(host, authority) not in _read_consents():
        raise UnknownDriverHost(
            f"checkpoint storage says that the driver of job {address.job!r} is on host {host!r},"
            f" with the certificate authority {authority or 'of this system'!r}. The token was not"
            f" sent. If the host is right, add --driver-host {host}, or run `onceflow status` in a"
            " terminal, which asks once",
            host,
            authority,
        )
    return DriverTarget(host, port, is_encrypted, authority)


def remember_host(host: str, authority: str) -> None:
    """Record the user's consent to send tokens to `host` with a certificate by `authority`.

    Raises:
        ConfigError: The file of consents cannot be written.
    """
    path, line = _find_consents(), _make_line(host, authority)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise ConfigError(
            f"{path}, the list of hosts that may receive a token, cannot be written"
            f" ({error.strerror}). The token was not sent: use --driver-host {host}"
        ) from error


def read_token_file(path: Path) -> str:
    """Return the token in `path`.

    Raises:
        ConfigError: The file cannot be read, or is not a token. The message does not quote the
            file.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"--token-file {path} cannot be read ({error.strerror}): give a copy of the file that"
            " holds the driver's token"
        ) from error
    if not is_token(text):
        raise ConfigError(
            f"--token-file {path} does not hold a token: {EXPECTED_FORM}. No request was sent"
        )
    return text


def _not_a_driver(address: DriverAddress, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"driver.json of job {address.job!r} in checkpoint storage names the address"
        f" {address.url[:200]!r}: {reason}. No request was sent. Run the command on the driver's"
        " own machine; the next start of the job replaces the file"
    )


def _find_consents() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "onceflow" / "known_drivers"


def _read_consents() -> frozenset[str]:
    try:
        return frozenset(_find_consents().read_text("utf-8", "replace").splitlines())
    except OSError:
        # Without the file, the user is asked about every host.
        return frozenset()


def _make_line(host: str, authority: str) -> str:
    if not authority:
        return f"{host} {_SYSTEM}"
    try:
        return f"{host} {hashlib.sha256(Path(authority).read_bytes()).hexdigest()}"
    except OSError as error:
        raise ConfigError(
            f"{authority!r}, the file of the authority that signed the driver's certificate,"
            f" cannot be read ({error.strerror}): give a copy with --authority"
        ) from error
