"""What both planes share on their Flight streams: who may speak, and the metadata of messages.

One secret an attempt authenticates the control plane and the data plane. The driver draws it, Spark
carries it to the slots inside the task, and every Flight call presents it. It is never logged and
never stored. With TLS each end shows a certificate besides.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from onceflow.core.runtime.transport.tls import TlsIdentity

_MIDDLEWARE = "authentication"
_HEADER = "authorization"


def new_token() -> str:
    """Return a fresh secret of 256 bits."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Credentials:
    """With what a process of the attempt shows who it is and tells who others are."""

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
            return flight.FlightClient(address)
        return flight.FlightClient(
            address,
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
        """Return when the call presents the token.

        Raises:
            flight.FlightUnauthenticatedError: It does not.
        """
        given = headers.get(_HEADER, [b""])[0]
        presented = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(presented, self._expected):
            raise flight.FlightUnauthenticatedError(
                "this address belongs to a onceflow job; the call presented no token of its attempt"
            )


def metadata_of(chunk: flight.FlightStreamChunk) -> bytes:
    """Return the metadata of one message of a stream; empty when it has none."""
    metadata = chunk.app_metadata
    return b"" if metadata is None else metadata.to_pybytes()
