"""How a connection is encrypted, in the words of MySQL's own programs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from onceflow.core.errors import ConfigError


class TlsMode(Enum):
    """MySQL's --ssl-mode."""

    DISABLED = "disabled"
    PREFERRED = "preferred"
    """Encrypted where the server can; whom one talks to is not verified."""
    REQUIRED = "required"
    VERIFY_CA = "verify_ca"
    VERIFY_IDENTITY = "verify_identity"


# Of MySQL's programs and its JDBC driver, and of MariaDB's.
_WORDS = {
    **{mode.value: mode for mode in TlsMode},
    "disable": TlsMode.DISABLED,
    "trust": TlsMode.REQUIRED,
    "verify_full": TlsMode.VERIFY_IDENTITY,
}


@dataclass(frozen=True, slots=True)
class Tls:
    """What a connection asks of encryption."""

    mode: TlsMode = TlsMode.PREFERRED
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)

    @classmethod
    def of(cls, word: str, *, ca: str, certificate: str, key: str, key_password: str) -> Tls:
        """Return what the settings of a URL say; `word` may be empty.

        Raises:
            ConfigError: There is no such mode, or it verifies against nothing.
        """
        mode = TlsMode.VERIFY_CA if ca else TlsMode.PREFERRED
        if word:
            found = _WORDS.get(word.lower().replace("-", "_"))
            if found is None:
                raise ConfigError(
                    f"ssl_mode={word!r}: choose one of {', '.join(one.value for one in TlsMode)}"
                )
            mode = found
        return cls(mode, ca, certificate, key, key_password)

    def arguments(self) -> dict[str, Any]:
        """Return what PyMySQL is given.

        Raises:
            OSError: A file cannot be read.
        """
        if self.mode is TlsMode.DISABLED:
            return {"ssl_disabled": True}
        if self.mode is TlsMode.PREFERRED and not self.certificate:
            # PyMySQL's own default.
            return {}
        verifies = self.mode in (TlsMode.VERIFY_CA, TlsMode.VERIFY_IDENTITY)
        context = ssl.create_default_context(cafile=self.ca or None)
        context.check_hostname = self.mode is TlsMode.VERIFY_IDENTITY
        context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None, self.key_password or None)
        return {"ssl": context}
