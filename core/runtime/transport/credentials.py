"""The credentials of driver and slots: a token, and with TLS a certificate each.

One secret an attempt authenticates the control plane and the data plane. The driver draws it, Spark
carries it to the slots inside the task, and every Flight call presents it. It is never logged and
never stored.

Certificates are drawn or read from files. Drawn ones last for one attempt: the driver makes an
authority, signs one certificate for itself and one for all slots, and forgets the authority's key.
The slots' certificate and key go inside Spark's task, beside the token: who reads one reads the
other, so a key that each slot made for itself, and had signed over a connection that only the token
protects, would be no safer. Only the driver's certificate bears the driver's name, so a slot cannot
pose as the driver.
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
"""Both ways: every stream is opened when slots start, and the clocks of machines differ."""


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What one end of a connection shows, and whom it trusts. All PEM."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    """Who has signed the certificates of both ends."""
    driver_name: str | None
    """What the driver's certificate must be for; None: the host at which it is dialled."""
    slot_name: str | None


def draw_identities() -> tuple[TlsIdentity, TlsIdentity]:
    """Return fresh identities of one attempt: (the driver's, the slots')."""
    # Importing it takes a seventh of a second, which slots and jobs without TLS need not spend.
    from onceflow.core.runtime.transport.certificates import Authority

    now = datetime.now(timezone.utc)
    # The authority's key lives in this call only.
    authority = Authority(now - _VALID_FOR, now + _VALID_FOR)
    driver, slot = (
        TlsIdentity(*authority.issue(name), authority.certificate, _DRIVER, _SLOT)
        for name in (_DRIVER, _SLOT)
    )
    return driver, slot


def identity_in(files: TlsFiles) -> TlsIdentity:
    """Return the identity that `files` hold on this machine, now.

    Raises:
        SettingsRefused: One of them cannot be read here.
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
"""gRPC dials the proxy of the variables grpc_proxy, https_proxy and http_proxy, also for loopback.
A proxy of the web does not reach driver and slots, and without TLS it would see the token."""
_MIDDLEWARE = "authentication"
_HEADER = "authorization"


def new_token() -> str:
    """Return a fresh secret of 256 bits."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process of the attempt shows as its identity, and checks others by."""

    token: str = field(repr=False)
    tls: TlsIdentity | None = None

    @property
    def scheme(self) -> str:
        """How addresses of the attempt begin."""
        return "grpc+tls" if self.tls else "grpc"

    def of_server(self) -> dict[str, Any]:
        """Return the arguments of a Flight server that serves nobody else."""
        options: dict[str, Any] = {"middleware": {_MIDDLEWARE: TokenCheck(self.token)}}
        if self.tls:
            options |= {
                "tls_certificates": [(self.tls.certificate, self.tls.key)],
                "verify_client": True,
                "root_certificates": self.tls.authority,
            }
        return options

    def of_call(self) -> flight.FlightCallOptions:
        """Return the options with which a call presents the token."""
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
    """Refuses every call that does not present the token, before its handler runs."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> None:
        """Raise FlightUnauthenticatedError unless the call presents the token."""
        given = headers.get(_HEADER, [b""])[0]
        presented = given.encode() if isinstance(given, str) else given
        # In constant time: how long a refusal takes must not tell how much of a guess is right.
        if not hmac.compare_digest(presented, self._expected):
            raise flight.FlightUnauthenticatedError(
                "this address belongs to a onceflow job; the call presented no token of its attempt"
            )


def metadata_of(chunk: flight.FlightStreamChunk) -> bytes:
    """Return the metadata of one message of a stream; empty when it has none."""
    metadata = chunk.app_metadata
    return b"" if metadata is None else metadata.to_pybytes()
