"""Local images stand for the official ones that the containers name, and for no other version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from script.images.recipes import RECIPES, Recipe

from onceflow.integration.servers.container import (
    ContainerKafka,
    ContainerMariaDB,
    ContainerMySQL,
    ContainerPostgres,
)


def _recipe(name: str) -> Recipe:
    (found,) = (recipe for recipe in RECIPES if recipe.name == name)
    return found


def test_every_official_image_has_a_recipe() -> None:
    servers = (ContainerPostgres, ContainerMySQL, ContainerMariaDB, ContainerKafka)
    assert {recipe.name for recipe in RECIPES} == {server.official_image for server in servers}


@pytest.mark.parametrize(
    ("name", "version", "accepted"),
    [
        ("postgres:18", "18.1-1", True),
        ("postgres:18", "18~beta1-1", True),
        ("postgres:18", "180.1-1", False),
        ("mysql:9", "9.7.4-2", True),
        ("mysql:9", "8.0.44-0ubuntu1", False),
        ("mariadb:11", "11.8.3-0+deb13u1", True),
        ("mariadb:11", "10.11.19-0+deb12u1", False),
        ("mariadb:11", "", False),
    ],
)
def test_package_of_another_major_version_is_refused(
    name: str, version: str, accepted: bool
) -> None:
    assert _recipe(name).accepts(version) is accepted


def test_changed_recipe_is_told_from_the_one_that_an_image_was_built_by() -> None:
    recipe = _recipe("postgres:18")
    assert recipe.fingerprint() == _recipe("postgres:18").fingerprint()
    changed = replace(recipe, changes=(*recipe.changes, "ENV A=B"))
    assert changed.fingerprint() != recipe.fingerprint()


def test_root_is_open_to_the_servers_user_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr" / "bin").mkdir(parents=True)
    root.chmod(0o700)
    _recipe("mysql:9").complete(root)
    assert root.stat().st_mode & 0o777 == 0o755
    assert (root / "usr/bin/docker-entrypoint.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert "mysql:x:998:998" in (root / "etc/passwd").read_text()
