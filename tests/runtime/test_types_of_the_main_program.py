"""Types that `__main__` defines, as in examples and notebooks, are state like any others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.directory_sink import DirectorySink

Run: TypeAlias = "subprocess.CompletedProcess[str]"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from dataclasses import dataclass, field
import msgspec
import pyarrow as pa
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from onceflow import (
    Checkpointing, KeyedFunction, LocalProcesses, NoRestart, Pipeline, ValueStateDescriptor
)

@dataclass
class Account:
    total: int
    {account}

class Limit(msgspec.Struct):
    most: int
    {limit}

    def raised(self):
        return Limit(self.most + 1)

class Keep(KeyedFunction):
    def output_schema(self, input_schema):
        return pa.schema([("id", pa.int64()), ("account", pa.string()), ("limit", pa.string())])

    def open(self, state):
        self.account = state.value_state(ValueStateDescriptor("account", Account))
        self.limit = state.value_state(ValueStateDescriptor("limit", Limit))

    def process(self, record):
        account = self.account.get() or Account(0)
        limit = self.limit.get() or Limit(100)
        self.account.set(Account(account.total + 1))
        self.limit.set(limit.raised())
        return {{"id": record["id"], "account": repr(account), "limit": repr(limit)}}

if __name__ == "__main__":
    directory, records = sys.argv[1], int(sys.argv[2])
    pipeline = Pipeline(
        LocalProcesses(), name="main", parallelism=1, restart=NoRestart(),
        checkpointing=Checkpointing(storage=directory + "/checkpoints", interval=60),
    )
    source = CountingSource(records, splits_count=1, accounts=1)
    kept = pipeline.read(source, uid="records").key_by("account").process(Keep(), uid="keep")
    kept.write(DirectorySink(directory + "/out"), uid="out")
    pipeline.run(60)
"""


def run(directory: Path, records: int, account: str, limit: str) -> Run:
    """Run the program with more fields of both classes, over so many records."""
    program = directory / "program.py"
    program.write_text(PROGRAM.format(account=account, limit=limit))
    return subprocess.run(
        [sys.executable, str(program), str(directory), str(records)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.only_proof
def test_a_dataclass_and_a_struct_of_the_main_program_keep_their_fields_and_are_never_filled(
    tmp_path: Path,
) -> None:
    first = run(tmp_path, 2, "", "")
    assert first.returncode == 0, first.stderr
    required = run(tmp_path, 3, "is_blocked: bool", "")
    assert required.returncode != 0
    assert "StateIncompatible" in required.stderr
    assert "is_blocked" in required.stderr
    grown = run(
        tmp_path,
        3,
        "names: list[str] = field(default_factory=list)",
        "names: list[str] = msgspec.field(default_factory=list)",
    )
    assert grown.returncode == 0, grown.stderr
    rows = sorted(
        (row["id"], row["account"], row["limit"])
        for row in DirectorySink(str(tmp_path / "out")).rows()
    )
    assert rows == [
        (0, "Account(total=0)", "Limit(most=100)"),
        (1, "Account(total=1)", "Limit(most=101)"),
        (2, "Account(total=2, names=[])", "Limit(most=102, names=[])"),
    ]
