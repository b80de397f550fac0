"""Azurite, Microsoft's own emulator of Azure Blob Storage, as a process of this machine.

It keeps conditional writes. What it has acknowledged in the last five seconds it forgets when it is
killed, containers too: it writes its catalog to the disk no more often.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import ClassVar

from tests.support.servers.installer import run_installer
from typing_extensions import override

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.process import LOOPBACK, ServerProcess, exclusive
from onceflow.integration.servers.server import ServerError

VERSION = "3.35.0"
"""The last one that runs on Node.js 20."""
INSTALL_TIMEOUT_S = 600.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Everybody's: Azurite has this account unless it is told of others."""

_PROTOCOL = "2023-11-03"
_TIMEOUT_S = 10.0
_READY_TIMEOUT_S = 1.0


def azurite_program(*, timeout_s: float = INSTALL_TIMEOUT_S) -> Path:
    """Return the script that Node.js runs, installed by npm into the cache when it is first asked.

    Processes that ask at the same time wait for the first. A crash leaves nothing half installed.

    Raises:
        ServerError: Node.js or npm is missing, or it could not be installed; quotes the end of what
            npm said.
    """
    target = cache_directory() / f"azurite-{VERSION}"
    script = target / "node_modules/azurite/dist/src/blob/main.js"
    _find_program("node")
    if not script.exists():
        npm = _find_program("npm")
        with exclusive(target.with_name(f"{target.name}.lock"), timeout_s):
            if not script.exists():
                with publish(target) as fresh:
                    _install(npm, fresh, timeout_s)
    return script


def _find_program(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise ServerError(
            f"the Azure server of the tests (Azurite) needs Node.js, and no `{program}` is on PATH"
        )
    return path


def _install(npm: str, into: Path, timeout_s: float) -> None:
    # The package comes compiled; scripts of what it depends on are not needed.
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    command = [npm, "install", "--prefix", str(into), *quiet, f"azurite@{VERSION}"]
    overdue = f"azurite {VERSION} was not installed in {timeout_s:g} s"
    run_installer(command, timeout_s, overdue, cwd=into)


class EmbeddedAzurite(ServerProcess):
    """An Azure Blob Storage with one account, on the loopback."""

    name: ClassVar[str] = "azurite"

    @property
    def endpoint(self) -> str:
        """The account's URL."""
        host, port = self.client_address
        return f"http://{host}:{port}/{ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which a process reaches the account with all rights."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def create_container(self, name: str) -> str:
        """Return `name`, of a container that exists then."""
        path = f"/{ACCOUNT}/{name}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _PROTOCOL}
        listed = "".join(f"{header}:{value}\n" for header, value in headers.items())
        # Between the verb and these headers stand eleven others, which are not sent.
        signed = f"PUT{12 * chr(10)}{listed}/{ACCOUNT}{path}\nrestype:container"
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
        signature = base64.b64encode(digest).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        connection = HTTPConnection(LOOPBACK, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("PUT", f"{path}?restype=container", headers=headers)
            reply = connection.getresponse()
            body = reply.read()
        finally:
            connection.close()
        if reply.status != 201 and b"ContainerAlreadyExists" not in body:
            raise ServerError(f"container {name}: {reply.status} {body.decode(errors='replace')}")
        return name

    @override
    def _initialize(self) -> None:
        (self.directory / "blobs").mkdir()
        azurite_program()

    @override
    def _command(self) -> Sequence[str | Path]:
        return [
            *(_find_program("node"), azurite_program(), "--silent", "--disableTelemetry"),
            *("--blobHost", LOOPBACK, "--blobPort", str(self.port)),
            *("--location", self.directory / "blobs"),
        ]

    @override
    def _is_ready(self) -> bool:
        # Nobody may do this: it says so, and who it is.
        url = f"http://{LOOPBACK}:{self.port}/{ACCOUNT}?comp=list"
        try:
            urllib.request.urlopen(url, timeout=_READY_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            return str(error.headers.get("Server", "")).startswith("Azurite-Blob/")
        except OSError:
            return False
        raise ServerError(f"something else answers on port {self.port}")
