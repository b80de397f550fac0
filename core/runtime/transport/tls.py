"""Mutual TLS between driver and slots: the certificates of both ends, drawn or read from files.

Drawn ones last for one attempt. The driver makes an authority, signs one certificate for itself and
one for all slots, and forgets the authority's key. The slots' certificate and key go inside Spark's
task, beside the attempt's token: who reads one reads the other, so a key that each slot made for
itself, and had signed over a connection that only the token protects, would be no safer.

Only the driver's certificate bears the driver's name, so a slot cannot pose as the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from onceflow.core.config import TlsFiles
from onceflow.core.errors import ConfigError

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


def drawn_identities() -> tuple[TlsIdentity, TlsIdentity]:
    """Return fresh identities of one attempt: (the driver's, the slots')."""
    # A seventh of a second, of which slots and jobs without TLS have no use.
    from onceflow.core.runtime.transport.certificates import Authority

    now = datetime.now(timezone.utc)
    authority = Authority(now - _VALID_FOR, now + _VALID_FOR)
    driver, slot = (
        TlsIdentity(*authority.issue(name), authority.certificate, _DRIVER, _SLOT)
        for name in (_DRIVER, _SLOT)
    )
    return driver, slot


def identity_in(files: TlsFiles) -> TlsIdentity:
    """Return the identity that `files` hold on this machine, now.

    Raises:
        ConfigError: One of them cannot be read here.
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
        raise ConfigError(
            f"TlsFiles({name}={path!r}) cannot be read here: {error.strerror}; it must be readable"
            " under this path where the driver and where every executor runs"
        ) from error
