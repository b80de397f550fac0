"""Builds images by `RECIPES` into the daemon that testcontainers uses.

Nothing is pulled, and no Dockerfile is run: packages are unpacked as for the embedded servers, and
the root is imported. An image whose recipe has not changed is kept. Debian's own image, in which
packages can be installed, is made by mmdebstrap.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Protocol, cast

import docker
from docker.errors import ImageNotFound
from script.images.recipes import DEBIAN, RECIPES, Recipe
from tests.support.servers.debian import PackageArchive, debian_mirror

from onceflow.core.local_files import cache_directory
from onceflow.integration.servers.container import docker_client
from onceflow.integration.servers.kafka_jars import Progress
from onceflow.integration.servers.process import ServerError, exclusive

_BUILD_TIMEOUT_S = 900.0
_IMPORT_TIMEOUT_S = 180
_FINGERPRINT = "ONCEFLOW_RECIPE"


class _ImageImport(Protocol):
    """The parts of the client that its stubs leave untyped."""

    def import_image_from_stream(
        self, stream: IO[bytes] | None, *, repository: str, tag: str, changes: list[str]
    ) -> str: ...


class ImageBuilder:
    """Builds images; close it when done. Fetches the lists of a suite once."""

    def __init__(self, client: docker.DockerClient, prefix: str, tell: Progress) -> None:
        """Build into the daemon of `client`, under the official names with `prefix` before."""
        self._client = client
        self._prefix = prefix
        self._tell = tell
        self._archives: dict[str | None, PackageArchive] = {}
        self._resources = ExitStack()

    def close(self) -> None:
        """Delete what was fetched."""
        self._resources.close()

    def build(self, recipe: Recipe) -> None:
        """Return once the image is there, built by this very recipe.

        Raises:
            ServerError: No suite has the server in the right version, or it could not be fetched.
        """
        tag = self._prefix + recipe.name
        if self._is_built(tag, recipe):
            self._tell(f"{tag}: there already")
            return
        started = time.monotonic()
        archive, server, version = self._find(recipe)
        root = Path(tempfile.mkdtemp(prefix="image-", dir=cache_directory()))
        try:
            archive.unpack(recipe.packages(server), root)
            recipe.complete(root)
            self._import(root, tag, recipe)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        self._tell(f"{tag}: built of {server} {version} in {time.monotonic() - started:.1f} s")

    def _is_built(self, tag: str, recipe: Recipe) -> bool:
        try:
            image = self._client.images.get(tag)
        except ImageNotFound:
            return False
        return f"{_FINGERPRINT}={recipe.fingerprint()}" in image.attrs["Config"]["Env"]

    def _find(self, recipe: Recipe) -> tuple[PackageArchive, str, str]:
        failures: list[str] = []
        for suite in recipe.suites:
            name = suite or "this machine's release"
            try:
                archive = self._archive(suite)
            except (ServerError, OSError, subprocess.SubprocessError) as error:
                failures.append(f"{name}: {error}")
                continue
            versions = {
                package: archive.version(package) for package in archive.names(recipe.package)
            }
            for package, version in versions.items():
                if recipe.accepts(version):
                    return archive, package, version
            failures.append(f"{name}: {versions or 'no package'}")
        raise ServerError(
            f"no package {recipe.package} of major version {recipe.major} for {recipe.name}: "
            + "; ".join(failures)
        )

    def _archive(self, suite: str | None) -> PackageArchive:
        if suite not in self._archives:
            self._archives[suite] = self._resources.enter_context(closing(PackageArchive(suite)))
        return self._archives[suite]

    def _import(self, root: Path, tag: str, recipe: Recipe) -> None:
        tar = ("tar", "-C", str(root), "--numeric-owner", "--owner=0", "--group=0", "-c", ".")
        changes = (*recipe.changes, f"ENV {_FINGERPRINT}={recipe.fingerprint()}")
        _import_output(tar, self._client, tag, changes)


def _import_output(
    command: Sequence[str], client: docker.DockerClient, tag: str, changes: Sequence[str]
) -> None:
    """Make an image of the archive that `command` writes to its standard output.

    Raises:
        ServerError: The command or the daemon has failed.
    """
    repository, version = tag.rsplit(":", 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
        answer = cast("_ImageImport", client.api).import_image_from_stream(
            archive.stdout, repository=repository, tag=version, changes=list(changes)
        )
    if archive.returncode != 0 or "error" in str(answer).lower():
        raise ServerError(f"{tag} could not be imported from {command[0]}: {answer}")


def build_images(prefix: str, tell: Progress, recipes: Iterable[Recipe] = RECIPES) -> None:
    """Return once every image is there; a process that builds at the same time is waited for.

    Raises:
        ServerError: One could not be built, or no daemon answers.
    """
    with (
        exclusive(cache_directory() / "images.lock", _BUILD_TIMEOUT_S),
        docker_client(timeout_s=_IMPORT_TIMEOUT_S) as client,
        closing(ImageBuilder(client, prefix, tell)) as builder,
    ):
        for recipe in recipes:
            builder.build(recipe)


def build_debian(prefix: str, tell: Progress) -> None:
    """Return once the image of Debian is there, with what its official one has installed.

    Needs root. Installs mmdebstrap if it is missing.

    Raises:
        ServerError: It could not be made, or no daemon answers.
    """
    with (
        exclusive(cache_directory() / "images.lock", _BUILD_TIMEOUT_S),
        docker_client(timeout_s=_IMPORT_TIMEOUT_S) as client,
    ):
        tag = prefix + DEBIAN
        with suppress(ImageNotFound):
            client.images.get(tag)
            tell(f"{tag}: there already")
            return
        started = time.monotonic()
        if shutil.which("mmdebstrap") is None:
            install = ("apt-get", "install", "--yes", "--no-install-recommends", "mmdebstrap")
            subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        suite = DEBIAN.partition(":")[2].removesuffix("-slim")
        # A frozen mirror serves lists that have outlived their date.
        options = ("--quiet", "--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"')
        _import_output(("mmdebstrap", *options, suite, "-", debian_mirror()), client, tag, ())
        tell(f"{tag}: built in {time.monotonic() - started:.1f} s")


__all__ = ["ImageBuilder", "build_debian", "build_images"]
