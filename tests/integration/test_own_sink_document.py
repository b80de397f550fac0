"""The code in docs/write-your-own-sink.md is what the example says, or it runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.core.protocol.committables import Aborted, AlreadyCommitted, Committed, Lost
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import WriterContext

_ROOT = Path(__file__).parents[2]
_SCHEMA = pa.schema([pa.field("id", pa.int64())])


def _blocks() -> list[str]:
    text = (_ROOT / "docs/write-your-own-sink.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _excerpts_and_programs() -> tuple[list[str], list[str]]:
    example = (_ROOT / "examples/own_sink.py").read_text(encoding="utf-8")
    excerpts = [block for block in _blocks() if block in example]
    return excerpts, [block for block in _blocks() if block not in example]


def test_every_step_of_the_document_is_in_the_example() -> None:
    """All but the program in two parts; a step that drifts from the example becomes a third."""
    excerpts, programs = _excerpts_and_programs()
    assert len(excerpts) == 5
    assert len(programs) == 2
    assert "class ArrowWriter" in programs[0]
    assert "class ArrowSink" in programs[1]


def test_output_in_the_document_is_what_the_program_prints() -> None:
    text = (_ROOT / "docs/write-your-own-sink.md").read_text(encoding="utf-8")
    program = (_ROOT / "examples/killed_job.py").read_text(encoding="utf-8")
    for words in ("finished after", "proofs kept, the last of checkpoint", "payments counted of"):
        assert words in text
        assert words in program


def test_program_of_the_document_keeps_its_rules(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for part in _excerpts_and_programs()[1]:
        exec(compile(textwrap.dedent(part), "write-your-own-sink.md", "exec"), names)
    for name in ("fresh", "prepared", "committed"):
        (tmp_path / name).mkdir()
    writer = names["ArrowWriter"](
        tmp_path,
        WriterContext("job", "own", "job.own", 0, 1, AttemptId(1), CheckpointId(1), _SCHEMA),
    )
    committer = names["ArrowCommitter"](tmp_path, "job.own")
    assert writer.pre_commit(CheckpointId(1)) == ()
    found: list[Any] = []
    for checkpoint in (2, 3, 4):
        writer.write(pa.RecordBatch.from_pylist([{"id": checkpoint}], _SCHEMA))
        found += writer.pre_commit(CheckpointId(checkpoint))
    writer.close()
    assert sorted(str(one.transaction) for one in committer.in_doubt()) == [
        "job.own/1/2/0/0",
        "job.own/1/3/0/0",
        "job.own/1/4/0/0",
    ]
    assert list(names["ArrowCommitter"](tmp_path, "job.o").in_doubt()) == []
    assert list((tmp_path / "committed").iterdir()) == []
    assert committer.commit(found[0]) == Committed()
    assert committer.commit(found[0]) == AlreadyCommitted()
    assert committer.abort(found[0]) == AlreadyCommitted()
    assert committer.abort(found[1]) == Aborted()
    assert isinstance(committer.commit(found[1]), Lost)
    (path,) = (tmp_path / "committed").iterdir()
    with pa.ipc.open_file(str(path)) as file:
        assert file.read_all().to_pylist() == [{"id": 2}]
