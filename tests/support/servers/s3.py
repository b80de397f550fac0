"""A real S3 server as a process of this machine; its objects are files below its directory.

Versity's S3 gateway, built once from its public Go module. It locks a key while it is written, so
that of any number of conditional creations one wins, and its tests hold it to that. Apache-2.0.

    python -m tests.support.servers.s3    builds it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.support.servers.installer import run_installer
from typing_extensions import override

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.process import LOOPBACK, ServerProcess, exclusive
from onceflow.integration.servers.server import ServerError

VERSION = "v1.8.0"
PROGRAM_VARIABLE = "ONCEFLOW_VERSITYGW"
BUILD_TIMEOUT_S = 1200.0
"""About three minutes of processor time, on a machine that others may use as well."""

_MODULE = "github.com/versity/versitygw/cmd/versitygw"

REGION = "us-east-1"
ACCESS_KEY = "onceflow-root"
SECRET_KEY = "onceflow-root-secret"

_COMMAND_TIMEOUT_S = 60.0
_READY_TIMEOUT_S = 1.0
_NO_OPTIONS: Mapping[str, str] = {}


def find_s3_program() -> Path | None:
    """Return the program: ONCEFLOW_VERSITYGW, or that on PATH, or in the cache; or None."""
    named = os.environ.get(PROGRAM_VARIABLE) or shutil.which("versitygw")
    program = Path(named) if named else _cached_program()
    return program if named or program.exists() else None


def _cached_program() -> Path:
    return cache_directory() / f"versitygw-{VERSION}" / "versitygw"


def s3_program(
    *, progress: Callable[[str], None] | None = None, timeout_s: float = BUILD_TIMEOUT_S
) -> Path:
    """Return the program that `find_s3_program` finds, or build it into the cache.

    Processes that ask at the same time wait for the first. A crash leaves nothing half built.

    Raises:
        ServerError: There is no Go to build it with, or it could not be built; quotes the end of
            what Go said.
    """
    found = find_s3_program()
    if found is not None:
        return found
    program = _cached_program()
    target = program.parent
    go = shutil.which("go")
    if go is None:
        raise ServerError(
            "the S3 server of the tests (versitygw) is built from its Go module, and no `go` is on"
            f" PATH: install Go 1.25 or newer, or name the program in {PROGRAM_VARIABLE}"
        )
    with exclusive(target.with_name(f"{target.name}.lock"), timeout_s):
        if not program.exists():
            if progress is not None:
                progress(f"building versitygw {VERSION} (a few minutes, once) into {target}")
            with publish(target) as fresh:
                _build(go, fresh, timeout_s)
    return program


def _build(go: str, into: Path, timeout_s: float) -> None:
    flags = f"{os.environ.get('GOFLAGS', '')} -buildvcs=false".strip()
    environment = {**os.environ, "GOBIN": str(into), "CGO_ENABLED": "0", "GOFLAGS": flags}
    command = [go, "install", "-trimpath", "-ldflags=-s -w", f"{_MODULE}@{VERSION}"]
    overdue = (
        f"versitygw {VERSION} was not built in {timeout_s:g} s; try again: what Go has compiled so"
        " far is kept"
    )
    run_installer(command, timeout_s, overdue, env=environment)
    if not (into / "versitygw").exists():
        raise ServerError(f"{' '.join(command)} succeeded, and there is no versitygw in {into}")


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
        """The environment variables by which a process reaches the server with all rights."""
        return environment_of(self.endpoint, ACCESS_KEY, SECRET_KEY)

    @property
    def objects(self) -> Path:
        """The directory in which buckets are directories, and objects files."""
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


class S3Factory(Protocol):
    """The factory that the fixture `s3_server` returns."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> EmbeddedS3:
        """Return a running server that is this test's own, as `start_s3` does."""
        ...


def start_s3(options: Mapping[str, str] = _NO_OPTIONS, *, proxied: bool = False) -> EmbeddedS3:
    """Return a running server. Skips the test where none is built yet, which takes minutes.

    With ONCEFLOW_REQUIRE_S3 it is built then, and the test fails where it cannot be.
    """
    if find_s3_program() is None and not os.environ.get("ONCEFLOW_REQUIRE_S3"):
        import pytest  # not there where the demo runs

        pytest.skip("no S3 server: `script/test --servers` builds one, for which it needs Go")
    return EmbeddedS3(options, proxied=proxied).start()


if __name__ == "__main__":
    s3_program(progress=print)
