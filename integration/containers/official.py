"""The official images in the daemon that DOCKER_HOST names."""

from __future__ import annotations

from contextlib import closing

import docker
from docker.errors import DockerException, ImageNotFound
from testcontainers.core.config import testcontainers_config

from onceflow.integration.containers.recipes import RECIPES
from onceflow.integration.servers.kafka_jars import Progress
from onceflow.integration.servers.server import ServerError

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
    try:
        with closing(docker.from_env(timeout=_PULL_TIMEOUT_S)) as client:
            client.ping()
            for name in names:
                _ensure(client, name, tell)
    except (DockerException, OSError) as error:
        raise ServerError(f"no Docker daemon with the official images: {error}") from error


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
    try:
        with closing(docker.from_env(timeout=60)) as client:
            for container in client.containers.list(all=True):
                container.remove(v=True, force=True)
    except (DockerException, OSError) as error:
        raise ServerError(f"containers could not be removed: {error}") from error


__all__ = ["official_images", "remove_containers"]
