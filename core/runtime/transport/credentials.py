"""The credentials of driver and slots: a token, and with TLS a certificate each.

One secret per attempt authenticates the control plane and the data plane. The driver draws the
token, Spark carries it to the slots in the task, and every Flight call presents it. It is never
logged and never stored.

Certificates are drawn or read from files. Drawn certificates last for one attempt: the driver
creates an authority, signs one certificate for itself and one for all slots, and forgets the
authority's key. The slots' certificate and key travel in Spark's task, together with the token. A
reader of one can read the other. So a key that each slot created itself would be no safer: only the
token would protect the connection over which it is signed. Only the driver's certificate has the
driver's name, so a slot cannot pose as the driver.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pyarrow import flight

from onceflow.core.errors import SettingsRefused
from onceflow.core.settings.pipeline_settings import TlsFiles

_DRIVER = "driver.onceflow.internal"
_SLOT = "slot.onceflow.internal"
_VALID_FOR = timedelta(days=2)
"""The validity before and after now: all streams are opened when slots start, and clocks differ."""


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The certificate and key of one end of a connection, and the authority it trusts, as PEM."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    """The authority that has signed the certificates of both ends."""
    driver_name: str | None
    """The required name in the driver's certificate; None means the host name used to connect."""
    slot_name: str | None


def draw_identities() -> tuple[TlsIdentity, TlsIdentity]:
    """Draw new identities for one attempt: (the driver's, the slots')."""
    # The import takes a seventh of a second, which slots and jobs without TLS do not need.
    from onceflow.core.runtime.transport.certificates import Authority

    now = datetime.now(timezone.utc)
    # Only this call has the authority's key.
    authority = Authority(now - _VALID_FOR, now + _VALID_FOR)
    driver, slot = (
        TlsIdentity(*authority.issue(name), authority.certificate, _DRIVER, _SLOT)
        for name in (_DRIVER, _SLOT)
    )
    return driver, slot


def identity_in(files: TlsFiles) -> TlsIdentity:
    """Read the identity from `files` on this machine.

    Raises:
        SettingsRefused: A file cannot be read on this machine.
    """
    certificate, key, authority = (
        _read(name, path)
        for name, path in (
            ("certificate", files.certificate),
            ("key", files.key),
            ("authority", files.authority),
        )
    )
    return TlsIdentity(certificate, key, authority, files.server_name, files.server_name)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsRefused(
            f"TlsFiles({name}={path!r}) cannot be read here: {error.strerror}; it must be readable"
            " under this path where the driver and where every executor runs"
        ) from error


_CLIENT_OPTIONS = (("grpc.enable_http_proxy", 0),)
"""gRPC would use the proxy from the variables grpc_proxy, https_proxy and http_proxy, even for
loopback. A web proxy does not reach driver and slots, and without TLS it would see the token.
"""
_MIDDLEWARE = "authentication"
_HEADER = "authorization"


def new_token() -> str:
    """Return a new secret of 256 bits."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The identity that a process of the attempt shows, and by which it checks other processes."""

    token: str = field(repr=False)
    tls: TlsIdentity | None = None

    @property
    def scheme(self) -> str:
        """The scheme of the attempt's addresses."""
        return "grpc+tls" if self.tls else "grpc"

    def of_server(self) -> dict[str, Any]:
        """Return the arguments of a Flight server that only accepts processes of the attempt."""
        options: dict[str, Any] = {"middleware": {_MIDDLEWARE: TokenCheck(self.token)}}
        if self.tls:
            options |= {
                "tls_certificates": [(self.tls.certificate, self.tls.key)],
                "verify_client": True,
                "root_certificates": self.tls.authority,
            }
        return options

    def of_call(self) -> flight.FlightCallOptions:
        """Return the options for a call, which contain the token."""
        return flight.FlightCallOptions(
            headers=[(_HEADER.encode(), f"Bearer {self.token}".encode())]
        )

    def driver_client(self, address: str) -> flight.FlightClient:
        """Return a client of the driver at `address`."""
        return self._client(address, self.tls.driver_name if self.tls else None)

    def slot_client(self, address: str) -> flight.FlightClient:
        """Return a client of the slot at `address`."""
        return self._client(address, self.tls.slot_name if self.tls else None)

    def _client(self, address: str, name: str | None) -> flight.FlightClient:
        if self.tls is None:
            return flight.FlightClient(address, generic_options=_CLIENT_OPTIONS)
        return flight.FlightClient(
            address,
            generic_options=_CLIENT_OPTIONS,
            tls_root_certs=self.tls.authority,
            cert_chain=self.tls.certificate,
            private_key=self.tls.key,
            override_hostname=name,
        )


class TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses every call without the token, before its handler runs."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> None:
        """Raise FlightUnauthenticatedError unless the call presents the token."""
        given = headers.get(_HEADER, [b""])[0]
        presented = given.encode() if isinstance(given, str) else given
        # Compare in constant time, so that the time of a refusal does not reveal a partial match.
        if not hmac.compare_digest(presented, self._expected):
            raise flight.FlightUnauthenticatedError(
                "this address belongs to a onceflow job, and the call did not send the token"
                " of its attempt"
            )


def metadata_of(chunk: flight.FlightStreamChunk) -> bytes:
    """Return the metadata of a message of a stream; empty if it has none."""
    metadata = chunk.app_metadata
    return b"" if metadata is None else metadata.to_pybytes()
