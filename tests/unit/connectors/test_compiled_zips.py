"""Spark's zips with compiled modules: what a worker imports from them, and what stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from onceflow.connectors.spark.compiled_zips import compile_zips
from onceflow.core.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    library = tmp_path / "spark" / "python" / "lib"
    library.mkdir(parents=True)
    with zipfile.ZipFile(library / "pyspark.zip", "w") as archive:
        archive.writestr("sample/__init__.py", "")
        archive.writestr("sample/words.txt", "first\n" * 100)
        archive.writestr("sample/reader.py", "ANSWER = 42\n")
        archive.writestr("sample/tests/test_reader.py", "import sample.reader\n")
    return tmp_path / "spark"


def _import_from(zip_path: Path) -> str:
    program = "from sample import reader; print(reader.ANSWER, reader.__file__)"
    return subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(zip_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_worker_imports_compiled_modules_from_the_zip(home: Path) -> None:
    zip_path = home / "python" / "lib" / "pyspark.zip"
    assert _import_from(zip_path) == f"42 {zip_path}/sample/reader.py"
    assert compile_zips(home) == [zip_path]
    assert _import_from(zip_path) == f"42 {zip_path}/sample/reader.pyc"
    with zipfile.ZipFile(zip_path) as archive:
        assert archive.read("sample/reader.py") == b"ANSWER = 42\n"
        assert "sample/tests/test_reader.pyc" not in archive.namelist()
    assert [path.name for path in zip_path.parent.iterdir()] == ["pyspark.zip"]


def test_a_second_call_changes_nothing_and_modules_of_another_python_are_replaced(
    home: Path,
) -> None:
    zip_path = home / "python" / "lib" / "pyspark.zip"
    compile_zips(home)
    before = zip_path.stat()
    assert compile_zips(home) == []
    assert zip_path.stat().st_ino == before.st_ino
    with zipfile.ZipFile(zip_path) as archive:
        sources = {name: archive.read(name) for name in archive.namelist()}
    sources["sample/reader.pyc"] = b"of another Python"
    with zipfile.ZipFile(zip_path, "w") as archive:
        for name, data in sources.items():
            archive.writestr(name, data)
    assert compile_zips(home) == [zip_path]
    assert _import_from(zip_path) == f"42 {zip_path}/sample/reader.pyc"


def test_a_directory_without_spark_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no Spark with Python"):
        compile_zips(tmp_path)
