"""Rows that wait in checkpoint storage when the job has ended are found, whatever the sink says."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from demo.driver import JOB
from demo.run import transactions_with_staged_rows

from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.staging import StagingArea
from onceflow.core.storage import FileSystemStorage


def _seal(area: StagingArea, transaction: TransactionId, *sizes: int) -> None:
    rows = area.open()
    for size in sizes:
        rows.write(pa.record_batch([pa.array(range(size))], names=["id"]), part="part")
    rows.seal(transaction)
    rows.close()


def test_only_transactions_that_hold_rows_count(tmp_path: Path) -> None:
    assert transactions_with_staged_rows(str(tmp_path)) == 0
    job = FileSystemStorage(str(tmp_path)).open(JOB)
    ledger, letters = job.staging("demo.ledger"), job.staging("demo.letters")
    one, other, mark, letter = (
        TransactionId("demo.ledger", 1, 1, 0, 0),
        TransactionId("demo.ledger", 2, 2, 1, 0),
        TransactionId("demo.ledger", 2, 3, 1, 0),
        TransactionId("demo.letters", 2, 3, 1, 0),
    )
    _seal(ledger, one, 3)
    _seal(ledger, other, 0, 2)
    _seal(ledger, mark, 0)
    _seal(letters, letter, 1)
    assert transactions_with_staged_rows(str(tmp_path)) == 3
    ledger.discard(one)
    assert transactions_with_staged_rows(str(tmp_path)) == 2
    ledger.discard(other)
    letters.discard(letter)
    assert transactions_with_staged_rows(str(tmp_path)) == 0
