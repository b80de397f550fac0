"""The official images in the daemon that testcontainers uses."""

from __future__ import annotations

import docker
from docker.errors import ImageNotFound
from script.images.recipes import RECIPES
from testcontainers.core.config import testcontainers_config

from onceflow.integration.servers.container import docker_client
from onceflow.integration.servers.kafka_jars import Progress

# Docker answers a pull when it is done.
_PULL_TIMEOUT_S = 900


def official_images(tell: Progress) -> None:
    """Return once the daemon has every official image.

    Raises:
        ServerError: No daemon answers, or an image is missing and cannot be pulled.
    """
    names = [recipe.name for recipe in RECIPES]
    if not testcontainers_config.ryuk_disabled:
        names.append(testcontainers_config.ryuk_image)
    with docker_client(timeout_s=_PULL_TIMEOUT_S) as client:
        for name in names:
            _ensure(client, name, tell)


def _ensure(client: docker.DockerClient, name: str, tell: Progress) -> None:
    try:
        client.images.get(name)
    except ImageNotFound:
        tell(f"pulling {name}")
        repository, _, tag = name.rpartition(":")
        client.images.pull(repository, tag)


def remove_containers() -> None:
    """Remove every container of the daemon with its volumes, running or not.

    For a daemon that is the tests' own.

    Raises:
        ServerError: The daemon does not answer.
    """
    with docker_client() as client:
        for container in client.containers.list(all=True):
            container.remove(v=True, force=True)


__all__ = ["official_images", "remove_containers"]
