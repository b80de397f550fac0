"""A RocksDB whose disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.small_disk import mount_small_disk

_WRITE_UNTIL_FULL = """
import random, shutil, sys
from pathlib import Path
from onceflow.core.errors import StateError
from onceflow.core.state.rocksdb.database import Database, DatabaseOptions

home, seed = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed)
database = Database(home / str(seed), DatabaseOptions(1 << 20, 1 << 20))
failures = []
for number in range(1000):
    keys = {b"\\0\\1\\3abc" + draw.randbytes(8) for _ in range(draw.choice([50, 500, 1500]))}
    try:
        database.write([(key, draw.randbytes(20)) for key in sorted(keys)])
        database.link_to(home / str(seed) / f"copy{number}")
    except StateError as error:
        failures.append(str(error))
        if len(failures) == 6:
            break
    shutil.rmtree(home / str(seed) / f"copy{number - 3}", ignore_errors=True)
database.close()
print(failures[-1])
"""


@pytest.mark.only_proof
def test_database_on_a_full_disk_fails_and_never_waits_for_room(tmp_path: Path) -> None:
    """In another process: RocksDB's own wait holds the interpreter, so no timeout would end it."""
    with mount_small_disk(tmp_path / "disk", "1500k"):
        for seed in range(4):
            written = subprocess.run(
                [sys.executable, "-c", _WRITE_UNTIL_FULL, str(tmp_path / "disk"), str(seed)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert "No space left on device" in written.stdout, written.stderr
            assert "RocksDBBackend(directory=…)" in written.stdout
