"""What one transaction holds: which finished file gets which public name. A JSON file."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import TransactionId


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    staged: str
    """Where it was written, and is until it is published; relative to the sink's url."""
    path: str
    """What readers find it under; relative to the sink's url."""
    rows: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One transaction; holds no secret."""

    transaction: str
    staged_at: datetime
    """By the clock of the machine that staged it."""
    files: tuple[ManifestFile, ...]
    version: Literal[1] = 1

    def encode(self) -> bytes:
        """Return the manifest as it is written."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes, transaction: TransactionId, location: str) -> Manifest:
        """Return the manifest of `transaction`, which `location` holds.

        Raises:
            SinkError: It is not what was written.
        """
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SinkError(
                f"{location} is damaged: {error}. Restore it from a copy; transaction "
                f"{transaction} cannot be committed without it"
            ) from error
        if manifest.transaction != str(transaction):
            raise SinkError(
                f"{location} is damaged: it is of transaction {manifest.transaction}, and its name "
                f"says {transaction}"
            )
        return manifest
