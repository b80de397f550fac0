"""Finds the driver of a job through checkpoint storage, and asks it.

An address in storage may be of a driver that was killed. So every request names the instance that
left it, and an answer counts only if it names the same: anything else says who answers instead.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

from onceflow.core.errors import CheckpointError, ConfigError, StateIncompatible, StorageError
from onceflow.core.runtime.driver.job_api import INSTANCE_HEADER
from onceflow.core.storage import CheckpointStorage, JobStorage, checkpoint_storage
from onceflow.core.storage.driver_address import DriverAddress

Answer = dict[str, Any]


class DriverGone(Exception):
    """Nobody answers for the job: no address, nobody at it, or somebody else."""


class DriverRefused(Exception):
    """The driver has heard, and will not do it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is, as the options say it."""

    storage: str
    name: str
    timeout_s: float
    token_file: Path | None = None
    authority: Path | None = None

    @property
    def described(self) -> CheckpointStorage:
        """The checkpoint storage; raises ConfigError when there is none of that name."""
        described = checkpoint_storage(self.storage)
        root = getattr(described, "root", None)
        if root is not None and not Path(root).is_dir():
            raise ConfigError(f"--storage {root}: there is no such directory on this machine")
        return described

    def open(self) -> JobStorage:
        """Return the job's storage.

        Raises:
            ConfigError: It has no such job.
        """
        storage = self.described.open(self.name)
        jobs = storage.jobs()
        if self.name not in jobs:
            there = ", ".join(jobs) or "none"
            raise ConfigError(f"--storage {self.storage} has no job {self.name!r} (there: {there})")
        return storage


class Driver:
    """One driver, to be asked over HTTP. Each request has a connection of its own."""

    def __init__(self, place: Place, storage: JobStorage) -> None:
        self._place = place
        self._storage = storage
        address = storage.driver_address.read()
        if address is None:
            raise DriverGone(
                f"no driver of job {place.name!r} can be asked: none has left its address in"
                f" {storage}, so it has ended, or was started with endpoint=None."
                f" {last_decision_of(storage)}"
            )
        self.address: DriverAddress = address
        self._token = self._read_token()

    def get(self, path: str) -> Answer:
        """Return what the driver says at `path`.

        Raises:
            DriverGone: Nobody answers for the job.
            DriverRefused: The driver does not do it.
        """
        return self._ask("GET", path)

    def post(self, what: str, **body: Any) -> Answer:
        """Ask the driver to do something; return the operation. Raises as `get`."""
        return self._ask("POST", what, {name: value for name, value in body.items() if value})

    def outcome(self, operation: Answer, timeout_s: float) -> Answer:
        """Wait for the end of `operation`; return how it ended.

        Raises:
            DriverGone: The driver has died meanwhile.
            TimeoutError: It was pending still after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        wait_s = 0.02
        while True:
            found = self.get(f"operations/{quote(str(operation['operation']))}")
            if found["state"] != "pending":
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{operation['what']} of job {self._place.name!r} is pending after"
                    f" {timeout_s:.0f} s, and goes on; ask again with --timeout"
                )
            time.sleep(wait_s)
            wait_s = min(0.5, wait_s * 1.5)

    def _ask(self, method: str, path: str, body: Answer | None = None) -> Answer:
        connection = self._connection()
        headers = {
            INSTANCE_HEADER: self.address.instance,
            "Authorization": f"Bearer {self._token}",
        }
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"/v1/{path}", data, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(f"{self.address.url} does not answer ({error})") from error
        finally:
            connection.close()
        answers = response.getheader(INSTANCE_HEADER, "")
        if response.status == http.client.MISDIRECTED_REQUEST or answers != self.address.instance:
            who = f"driver {answers}" if answers else "a program that is no driver of onceflow"
            raise self._gone(f"at {self.address.url} {who} answers now")
        try:
            said = cast("Answer", json.loads(content))
        except ValueError as error:
            raise self._gone(f"{self.address.url} answers with no JSON") from error
        if response.status == http.client.UNAUTHORIZED:
            raise DriverRefused(
                f"the driver of job {self._place.name!r} at {self.address.url} does not take the"
                f" token of {self._token_place()}: it is an old one, or another driver's"
            )
        if response.status >= 400:
            raise DriverRefused(str(said.get("error", response.status)))
        return said

    def _connection(self) -> http.client.HTTPConnection:
        url, timeout_s = urlsplit(self.address.url), self._place.timeout_s
        if url.scheme == "http":
            return http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
        authority = self._place.authority or Path(self.address.authority)
        try:
            context = ssl.create_default_context(cafile=str(authority))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{authority}, who has signed the driver's certificate, cannot be read ({error}):"
                " name a copy by --authority"
            ) from error
        host = url.hostname or ""
        return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)

    def _gone(self, why: str) -> DriverGone:
        address = self.address
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(address.since_ms / 1000))
        who = f"process {address.pid} on {address.host}, since {since}"
        if address.loopback and address.host != socket.gethostname():
            return DriverGone(
                f"the driver of job {address.job!r} ({who}) listens at {address.url}, on its own"
                f" machine alone: run this on {address.host}; or it is not there any more"
            )
        return DriverGone(
            f"the driver of job {address.job!r} ({who}) is not there any more: {why}."
            f" {last_decision_of(self._storage)}"
        )

    def _token_place(self) -> str:
        return str(self._place.token_file or self.address.token_file or f"{self._storage}")

    def _read_token(self) -> str:
        path = self._place.token_file or self.address.token_file
        if not path:
            token = self._storage.driver_address.read_token()
            if token is None:
                raise self._gone("its token is gone")
            return token
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the driver's token is in {path}, which cannot be read here ({error}): name a"
                " copy by --token-file"
            ) from error


def last_decision_of(storage: JobStorage) -> str:
    """Return a sentence on how far the job is, by its log."""
    with contextlib.suppress(CheckpointError, StorageError, StateIncompatible):
        view = storage.log.read()
        if view.decided:
            last = view.completed[-1]
            how = "the job ended with it" if last.final else "a start goes on from there"
            return f"Its last decision is checkpoint {last.checkpoint}; {how}."
    return "Its decision log cannot be read, or holds no decision."
