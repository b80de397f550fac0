"""The Docker daemon that testcontainers uses, and the error when it cannot be reached."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import DockerException
from testcontainers.core.docker_client import DockerClient, get_docker_host

from onceflow.integration.servers.server import ServerError

DEFAULT_TIMEOUT_S = 60
_DEFAULT_SOCKET = "unix:///var/run/docker.sock"
# The message of a read that times out is of requests, below docker: both are OSErrors.
REFUSALS = (DockerException, OSError)
"""What Docker raises."""


def check_socket() -> None:
    """Return if the daemon's socket exists, where it is one of this machine.

    Asked before the client is: that leaves a socket open when it finds nobody.

    Raises:
        ServerError: It does not.
    """
    host = get_docker_host() or _DEFAULT_SOCKET
    path = host.removeprefix("unix://")
    if path != host and not Path(path).exists():
        raise ServerError(f"no Docker daemon answers: {path} does not exist")


@contextmanager
def docker_client(
    *, timeout_s: int = DEFAULT_TIMEOUT_S
) -> Generator[docker.DockerClient, None, None]:
    """Yield a client of the daemon.

    Raises:
        ServerError: It does not answer, or refuses what is asked in the block.
    """
    check_socket()
    try:
        client = DockerClient(timeout=timeout_s).client
        try:
            client.ping()
            yield client
        finally:
            client.close()
    except REFUSALS as error:
        raise ServerError(f"the Docker daemon does not do it: {error}") from error


__all__ = ["REFUSALS", "check_socket", "docker_client"]
