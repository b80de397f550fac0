"""The code in docs/write-your-own-sink.md is that of the examples, which keep its rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from examples.rename_sink import RenameCommitter, RenameSink

from onceflow.connectors import CommitterContext, Fenced
from onceflow.core.protocol.committables import Aborted, AlreadyCommitted, Committed, Lost
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import WriterContext

_ROOT = Path(__file__).parents[2]
_SCHEMA = pa.schema([pa.field("id", pa.int64())])


def test_every_step_of_the_document_is_in_an_example() -> None:
    text = (_ROOT / "docs/write-your-own-sink.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    own = (_ROOT / "examples/own_sink.py").read_text(encoding="utf-8")
    rename = (_ROOT / "examples/rename_sink.py").read_text(encoding="utf-8")
    assert [block in own for block in blocks] == [True] * 5 + [False]
    assert blocks[-1] in rename


def test_output_in_the_document_is_what_the_program_prints() -> None:
    text = (_ROOT / "docs/write-your-own-sink.md").read_text(encoding="utf-8")
    program = (_ROOT / "examples/killed_job.py").read_text(encoding="utf-8")
    for words in ("finished after", "proofs kept, the last of checkpoint", "payments counted of"):
        assert words in text
        assert words in program


def test_the_sink_that_renames_keeps_the_rules(tmp_path: Path) -> None:
    sink = RenameSink(str(tmp_path))
    context = CommitterContext("job", "own", "job.own", AttemptId(1), "log")
    sink.open(context, _SCHEMA)
    with pytest.raises(Fenced, match="attempt 1 of job.own: 1 has begun"):
        sink.open(context, _SCHEMA)
    with pytest.raises(Fenced, match="belongs to the job of log log"):
        sink.open(CommitterContext("job", "own", "job.own", AttemptId(2), "other"), _SCHEMA)
    writer = sink.writer(
        WriterContext("job", "own", "job.own", 0, 1, AttemptId(1), CheckpointId(1), _SCHEMA)
    )
    committer = sink.committer(context)
    assert writer.pre_commit(CheckpointId(1)) == ()
    committables: list[Any] = []
    for checkpoint in (2, 3, 4):
        writer.write(pa.RecordBatch.from_pylist([{"id": checkpoint}], _SCHEMA))
        committables += writer.pre_commit(CheckpointId(checkpoint))
    writer.close()
    assert sorted(str(in_doubt.transaction) for in_doubt in committer.in_doubt()) == [
        "job.own/1/2/0/0",
        "job.own/1/3/0/0",
        "job.own/1/4/0/0",
    ]
    assert list(RenameCommitter(tmp_path, "job.o").in_doubt()) == []
    assert list((tmp_path / "committed").iterdir()) == []
    assert committer.commit(committables[0]) == Committed()
    assert committer.commit(committables[0]) == AlreadyCommitted()
    assert committer.abort(committables[0]) == AlreadyCommitted()
    assert committer.abort(committables[1]) == Aborted()
    assert isinstance(committer.commit(committables[1]), Lost)
    (path,) = (tmp_path / "committed").iterdir()
    with pa.ipc.open_file(str(path)) as file:
        assert file.read_all().to_pylist() == [{"id": 2}]
