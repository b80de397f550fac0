"""The TLS context of onceflow's own HTTP servers."""

from __future__ import annotations

import ssl
from pathlib import Path


def load_server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context of a server with the PEM files `certificate` and `key`.

    Raises:
        OSError: A file cannot be read or used, or the key is encrypted. The message names the
            files.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for path in (certificate, key):
        with Path(path).open("rb"):
            pass
    try:
        # OpenSSL asks a terminal for the password of a key if it gets no function.
        context.load_cert_chain(certificate, key, lambda: "")
    except OSError as error:
        raise OSError(f"{certificate} and {key}: {error} (is the key encrypted?)") from error
    return context
