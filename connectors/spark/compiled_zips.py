"""The compilation of modules in an installed Spark's zips, so that its workers start sooner.

    python -m onceflow.connectors.spark.compiled_zips

Spark puts its Python code as zips in front of a worker's path. The zips hold sources only, and
Python keeps no compiled module beside a zip, so each worker that Spark does not fork compiles all
of them anew: a second of processor time, more than half of what it needs to start. The reader of a
stream is such a worker. Spark waits ten seconds for it and has no setting for that: under load
a query ends with "Python worker failed to connect back".

The modules lie beside their sources in the zip. A Python of another version ignores them. Run it
once for each installation, as a user who may write there; an upgrade of Spark brings new zips.

Source: `zipimport` of Python's library, which takes `.pyc` before `.py`; SPARK-45245.
"""

from __future__ import annotations

import py_compile
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from copy import copy
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from onceflow.connectors.spark.class_archive import spark_home
from onceflow.core.errors import ConfigError

_TESTS = "/tests/"
"""The part of a path in the names of test modules.

Workers do not import them; they are a third of the code.
"""


def compile_zips(home: Path) -> Sequence[Path]:
    """Add compiled modules to Spark's zips below `home`. Return the zips that lacked them.

    Runs where Spark is installed. Processes that are reading a zip keep the old one. After a crash
    a zip is either old or new. A second call changes nothing.

    Raises:
        ConfigError: `home` has no zips of Python code, or this user may not write there.
    """
    zips = sorted((home / "python" / "lib").glob("*.zip"))
    if not zips:
        raise ConfigError(f"{home} has no Spark with Python: python/lib has no zip")
    try:
        return [path for path in zips if _compile_zip(path)]
    except OSError as error:
        raise ConfigError(
            f"{home / 'python' / 'lib'} cannot be written: {error}. Run this as the user who"
            " installed Spark, or leave the zips as they are: workers then start later"
        ) from error


def _compile_zip(path: Path) -> bool:
    """Replace the zip with one that has compiled modules. Return False if it has them already."""
    with zipfile.ZipFile(path) as sources:
        entries = [entry for entry in sources.infolist() if not entry.filename.endswith(".pyc")]
        if all(_is_compiled(sources, entry.filename) for entry in entries):
            return False
        with tempfile.TemporaryDirectory(prefix=".compiled-", dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as target:
                for entry in entries:
                    content = sources.read(entry)
                    # Copy the entry: the target stores its own file offset in it.
                    target.writestr(copy(entry), content)
                    if _is_module(entry.filename):
                        compiled = _compile_module(content, entry.filename, scratch)
                        target.writestr(f"{entry.filename}c", compiled)
            fresh.chmod(path.stat().st_mode)
            fresh.replace(path)
    return True


def _is_module(name: str) -> bool:
    return name.endswith(".py") and _TESTS not in name


def _is_compiled(archive: zipfile.ZipFile, name: str) -> bool:
    """Return True if the zip has the file compiled for this Python, or the file is not a module."""
    if not _is_module(name):
        return True
    try:
        return archive.read(f"{name}c").startswith(MAGIC_NUMBER)
    except KeyError:
        return False


def _compile_module(source: bytes, name: str, scratch: str) -> bytes:
    """Return the compiled module. It is valid whatever the modification time of its source is."""
    module, compiled = Path(scratch) / "module.py", Path(scratch) / "module.pyc"
    module.write_bytes(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Spark's code
        py_compile.compile(
            str(module),
            cfile=str(compiled),
            dfile=name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    return compiled.read_bytes()


def main() -> int:
    """Compile the zips of the Spark that this Python would start, and print them."""
    try:
        changed = compile_zips(spark_home())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"compiled {path}\n" for path in changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
