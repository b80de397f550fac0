"""Environments with other versions of Spark, each installed once into the cache."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def environment_of(version: str, extra: str = "") -> Path:
    """The Python of an environment with that Spark; what else is needed comes from ours."""
    cache = Path(os.environ.get("ONCEFLOW_CACHE", Path.home() / ".cache/onceflow"))
    environment = cache / f"spark-{version}"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    install = ["-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [python, *install, f"pyspark{extra}~={version}.0", "pandas"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"pyspark {version} cannot be installed: {done.stderr}"
    (site,) = environment.glob("lib/python*/site-packages")
    # Plain paths, after its own: our own pyspark comes later than its.
    (site / "dependencies.pth").write_text(f"{SOURCE}\n{sysconfig.get_path('purelib')}\n")
    return python
