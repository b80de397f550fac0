"""A server program is taken for what it says it is, and what is missing is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.servers import database_packages

from onceflow.integration.servers import ServerError, mysql_programs
from onceflow.integration.servers.mysql_programs import (
    DatabaseProgram,
    Flavor,
    Progress,
    add_finder,
    database_program,
)

_MYSQL = "mysqld  Ver 8.4.3 for Linux on x86_64 (MySQL Community Server - GPL)"
_MARIADB = "mysqld  Ver 11.8.2-MariaDB for osx10.20 on arm64 (Homebrew)"


def _program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing installed and no packages to be had."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONCEFLOW_MYSQLD", raising=False)
    monkeypatch.delenv("ONCEFLOW_MARIADBD", raising=False)
    monkeypatch.setattr(mysql_programs, "_FOLDERS", ())
    monkeypatch.setattr(mysql_programs, "_finders", [])
    return tmp_path


def test_program_on_path_is_told_apart_by_what_it_says(machine: Path) -> None:
    """Debian's mysqld is MariaDB; Homebrew's two exclude each other only when linked."""
    installed = _program(machine / "bin" / "mysqld", _MARIADB)
    program = database_program(Flavor.MARIADB)
    assert program.command == (str(installed), "--no-defaults")
    assert (program.flavor, program.version) == (Flavor.MARIADB, "11.8.2")
    with pytest.raises(
        ServerError, match=r"no MySQL found.*brew install mysql.*MYSQLD.*containers"
    ):
        database_program(Flavor.MYSQL)
    installed.unlink()
    _program(installed, _MYSQL)
    assert database_program(Flavor.MYSQL).version == "8.4.3"


def test_variable_wins_over_what_is_installed(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(machine / "bin" / "mysqld", _MYSQL)
    chosen = _program(machine / "elsewhere" / "mysqld", _MYSQL.replace("8.4.3", "9.1.0"))
    monkeypatch.setenv("ONCEFLOW_MYSQLD", str(chosen))
    assert database_program(Flavor.MYSQL).version == "9.1.0"


@pytest.mark.parametrize(
    ("says", "reason"), [(_MARIADB, "it is MariaDB"), ("hello", "no such server program")]
)
def test_variable_that_names_something_else_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    chosen = _program(machine / "mysqld", says)
    monkeypatch.setenv("ONCEFLOW_MYSQLD", str(chosen))
    with pytest.raises(ServerError, match=rf"ONCEFLOW_MYSQLD={chosen}.*MySQL.*{reason}"):
        database_program(Flavor.MYSQL)


def test_variable_that_names_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEFLOW_MARIADBD", "/no/such/mariadbd")
    with pytest.raises(ServerError, match="ONCEFLOW_MARIADBD=/no/such/mariadbd"):
        database_program(Flavor.MARIADB)


def test_scripts_of_an_installation_are_found_beside_its_program(machine: Path) -> None:
    binary = _program(machine / "keg" / "bin" / "mariadbd", _MARIADB)
    scripts = machine / "keg" / "share" / "mariadb"
    scripts.mkdir(parents=True)
    (scripts / "mariadb_system_tables.sql").touch()
    (machine / "bin").mkdir()
    (machine / "bin" / "mariadbd").symlink_to(binary)
    assert database_program(Flavor.MARIADB).share == scripts


def test_cache_without_a_working_program_says_what_to_delete(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_packages, "is_debian", lambda: True)
    database_packages.offer_packages()
    broken = machine / "cache" / "mysql-packages"
    loader = _program(broken / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "hello")
    assert loader.exists()
    with pytest.raises(ServerError, match=rf"{broken}.*delete it to fetch it again"):
        database_program(Flavor.MYSQL)


def test_a_finder_is_asked_only_for_what_is_not_installed(machine: Path) -> None:
    asked: list[Flavor] = []
    found = DatabaseProgram(Flavor.MYSQL, "9.9.9", ("mysqld",), machine)

    def find(flavor: Flavor, _: Progress) -> DatabaseProgram | None:
        asked.append(flavor)
        return found if flavor is Flavor.MYSQL else None

    add_finder(find)
    assert database_program(Flavor.MYSQL) is found
    with pytest.raises(ServerError, match="no MariaDB found"):
        database_program(Flavor.MARIADB)
    _program(machine / "bin" / "mysqld", _MYSQL)
    assert database_program(Flavor.MYSQL).version == "8.4.3"
    assert asked == [Flavor.MYSQL, Flavor.MARIADB]
