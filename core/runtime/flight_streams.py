"""What both planes share on their Flight streams: the attempt's secret and message metadata.

One secret an attempt authenticates the control plane and the data plane.

The driver draws it, Spark carries it to the slots inside the task, and every Flight call presents
it. It is never logged and never stored.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from pyarrow import flight

MIDDLEWARE = "authentication"
_HEADER = "authorization"


def new_token() -> str:
    """Return a fresh secret of 256 bits."""
    return secrets.token_hex(32)


def call_options(token: str) -> flight.FlightCallOptions:
    """Return the options with which a call presents `token`."""
    return flight.FlightCallOptions(headers=[(_HEADER.encode(), f"Bearer {token}".encode())])


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
