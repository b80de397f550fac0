"""A real S3 server as a process of this machine; its objects are files below its directory."""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from onceflow.integration.servers.process import LOOPBACK, ServerProcess
from onceflow.integration.servers.s3_program import s3_program
from onceflow.integration.servers.server import ServerError

REGION = "us-east-1"
ACCESS_KEY = "onceflow-root"
SECRET_KEY = "onceflow-root-secret"  # noqa: S105 - of a server on the loopback, for a test

_COMMAND_TIMEOUT_S = 60.0
_READY_TIMEOUT_S = 1.0
_NO_OPTIONS: Mapping[str, str] = {}


class EmbeddedS3(ServerProcess):
    """Versity's S3 gateway on the loopback, with conditional writes and users of its own."""

    name = "s3"

    def __init__(
        self,
        options: Mapping[str, str] = _NO_OPTIONS,
        directory: Path | None = None,
        *,
        proxied: bool = False,
    ) -> None:
        """Choose a port; nothing runs before `start`.

        Args:
            options: Options of the server's program without their dashes: `max-requests`, …
            directory: As in `ServerProcess`.
            proxied: As in `Server`.
        """
        super().__init__(directory, proxied=proxied)
        self._options = dict(options)

    @property
    def endpoint(self) -> str:
        """The URL that clients are given."""
        host, port = self.client_address
        return f"http://{host}:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to reach the server with all rights."""
        return environment_of(self.endpoint, ACCESS_KEY, SECRET_KEY)

    @property
    def objects(self) -> Path:
        """Where buckets are directories, and objects files."""
        return self.directory / "objects"

    def create_bucket(self, name: str) -> str:
        """Return `name`, of a bucket that exists then."""
        (self.objects / name).mkdir(exist_ok=True)
        return name

    def create_user(self, access_key: str, secret_key: str) -> None:
        """Make a user without any right in the buckets that exist."""
        self._admin(
            *("create-user", "--access", access_key, "--secret", secret_key, "--role", "user")
        )

    def delete_user(self, access_key: str) -> None:
        """Make the user's credentials worthless from the next request on."""
        self._admin("delete-user", "--access", access_key)

    def give_bucket(self, name: str, access_key: str) -> None:
        """Make the user the owner of the bucket `name`."""
        self._admin("change-bucket-owner", "--bucket", name, "--owner", access_key)

    @override
    def _initialize(self) -> None:
        for directory in (self.objects, self.directory / "users", self.directory / "metadata"):
            directory.mkdir()

    @override
    def _command(self) -> Sequence[str | Path]:
        options = [part for name, value in self._options.items() for part in (f"--{name}", value)]
        keeps = () if _has_attributes(self.objects) else ("--sidecar", self.directory / "metadata")
        return [
            *(s3_program(), "--port", f"{LOOPBACK}:{self.port}", "--quiet"),
            *("--access", ACCESS_KEY, "--secret", SECRET_KEY, "--region", REGION),
            *("--iam-dir", self.directory / "users", "--iam-cache-disable"),
            *(*options, "posix", *keeps, self.objects),
        ]

    @override
    def _is_ready(self) -> bool:
        # Nobody may do this: an S3 server says so, in its own words.
        try:
            urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/", timeout=_READY_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            return b"<Code>AccessDenied" in error.read()
        except OSError:
            return False
        raise ServerError(f"something else answers on port {self.port}")

    def _admin(self, *arguments: str) -> None:
        command: list[str | Path] = [
            *(s3_program(), "admin", "--access", ACCESS_KEY, "--secret", SECRET_KEY),
            *("--endpoint-url", f"http://{LOOPBACK}:{self.port}", *arguments),
        ]
        try:
            subprocess.run(
                command, check=True, capture_output=True, timeout=_COMMAND_TIMEOUT_S, text=True
            )
        except subprocess.CalledProcessError as error:
            raise ServerError(f"versitygw {arguments[0]}: {error.stderr}") from error


def environment_of(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Return what every S3 client reads from its environment."""
    return {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
    }


def _has_attributes(directory: Path) -> bool:
    """Return whether files there may have attributes, in which the server keeps what it knows."""
    try:
        os.setxattr(directory, "user.onceflow", b"1")
    except (OSError, AttributeError):
        return False
    return True
