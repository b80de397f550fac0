"""Two and more drivers of one job: whatever the interleaving, one log.

What must hold (I5), checked from outside:
    a decision that was reported as appended is in the view of every later claim;
    so two drivers never both append a decision after the same one.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.unit.storage.stepping import Scheduler, SteppingFileSystem
from tests.unit.storage.storage_samples import decision, finish, start_python
from typing_extensions import override

from onceflow.core.errors import CheckpointError, Fenced, StorageError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.storage import ClaimedLog, DecisionLog, DecisionUnknown, FileSystemStorage
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.layout import JobPaths

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "20240229"))
ROUNDS = int(os.environ.get("ONCEFLOW_TEST_ROUNDS", "150"))


@dataclass
class History:
    """The answers that drivers got, by attempt."""

    claimed: dict[int, LogView] = field(default_factory=dict[int, LogView])
    appended: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Checkpoints reported as appended."""
    tried: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    def drive(
        self, log: DecisionLog, chance: random.Random, *, decisions: int, retained: int
    ) -> None:
        """Be a driver: claim, append a few decisions, prune after each, stop when fenced."""
        try:
            mine = log.claim("driver")
        except (Fenced, DecisionUnknown, StorageError):
            return
        assert mine.attempt not in self.claimed, f"attempt {mine.attempt} was claimed twice"
        self.claimed[mine.attempt] = mine.view
        self.appended[mine.attempt] = []
        self.tried[mine.attempt] = set()
        try:
            for _ in range(decisions):
                self.append(mine, retained)
                if chance.random() < 0.2:
                    mine.append(mine.view.completed[-1])  # asking twice changes nothing
        except (Fenced, DecisionUnknown):
            pass

    def append(self, mine: ClaimedLog, retained: int) -> None:
        checkpoint = mine.view.next_checkpoint
        self.tried[mine.attempt].add(checkpoint)
        completed = decision(checkpoint, mine.attempt)
        try:
            mine.append(completed)
        except DecisionUnknown:
            mine.append(completed)  # asking again may tell
        self.appended[mine.attempt].append(checkpoint)
        with suppress(StorageError):
            mine.prune(CheckpointId(max(0, checkpoint - retained + 1)))

    def check(self, last: LogView) -> None:
        views = {**self.claimed, last.attempt + 1: last}
        for attempt, view in views.items():
            known = view.completed[-1].checkpoint if view.completed else 0
            for older, appended in self.appended.items():
                if older < attempt:
                    assert all(checkpoint <= known for checkpoint in appended), (
                        f"attempt {attempt} began from checkpoint {known}, and attempt {older} had"
                        f" been told that it appended {appended}"
                    )
            for completed in view.completed:
                assert completed.checkpoint in self.tried[completed.attempt]
        everything = [c for appended in self.appended.values() for c in appended]
        assert len(everything) == len(set(everything)), "one checkpoint was decided twice"


def stepped_round(seed: int, retained: int, lost_replies: float) -> tuple[History, int]:
    """Let 2-4 drivers loose on one log; return what they were told and how much each wanted."""
    scheduler = Scheduler(seed)
    chance = random.Random(seed)
    history = History()
    fs = SteppingFileSystem(scheduler, lost_replies=lost_replies)
    log = DecisionLog.open(fs, JobPaths("ledger"))
    drivers, decisions = chance.randint(2, 4), chance.randint(1, 6)
    drive = partial(history.drive, log, chance, decisions=decisions, retained=retained)
    found: list[LogView] = []
    try:
        scheduler.run([drive] * drivers)
        scheduler.run([lambda: found.append(log.read())])
        history.check(found[0])
    except BaseException:
        print(f"replay with ONCEFLOW_TEST_SEED={seed}: {history.appended}")  # noqa: T201
        raise
    return history, decisions


@pytest.mark.parametrize("lost_replies", [0.0, 0.15])
@pytest.mark.parametrize("retained", [1, 3])
def test_whatever_the_interleaving_an_appended_decision_is_seen_by_every_later_claim(
    retained: int, lost_replies: float
) -> None:
    """Steps drivers through every file system call in seeded orders; replay by the seed."""
    appended = fenced = 0
    for seed in range(SEED, SEED + ROUNDS):
        history, decisions = stepped_round(seed, retained, lost_replies)
        appended += sum(map(len, history.appended.values()))
        fenced += sum(len(mine) < decisions for mine in history.appended.values())
    assert appended > ROUNDS, "the drivers hardly ever got to append"
    assert fenced > ROUNDS // 2, "the drivers hardly ever met"


def drive_twice(log: DecisionLog, history: History, start: threading.Barrier, seed: int) -> None:
    chance = random.Random(seed)
    start.wait()
    for _ in range(2):
        history.drive(log, chance, decisions=chance.randint(1, 4), retained=1)


def test_threads_on_a_real_disk_agree_on_one_log(tmp_path: Path) -> None:
    for seed in range(SEED, SEED + 15):
        history = History()
        log = DecisionLog.open(LocalFileSystem(str(tmp_path / str(seed))), JobPaths("ledger"))
        start = threading.Barrier(4)
        threads = [
            threading.Thread(target=drive_twice, args=(log, history, start, seed + number))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        history.check(log.read())
        assert history.claimed


DRIVER = """
import json, sys
from onceflow.core.errors import Fenced
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileSystemStorage
from tests.unit.storage.storage_samples import decision
log = FileSystemStorage(sys.argv[1]).open("ledger").log
print("ready", flush=True)
sys.stdin.readline()
told = []
for _ in range(6):
    mine = log.claim("driver")
    view, appended = mine.view, []
    began = view.completed[-1].checkpoint if view.completed else 0
    try:
        for _ in range(5):
            checkpoint = mine.view.next_checkpoint
            mine.append(decision(checkpoint, mine.attempt))
            appended.append(checkpoint)
            mine.prune(CheckpointId(checkpoint))
    except Fenced:
        pass
    told.append([mine.attempt, began, appended])
print(json.dumps(told))
"""


def test_processes_on_a_real_disk_agree_on_one_log(tmp_path: Path) -> None:
    processes = [start_python(DRIVER, str(tmp_path)) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told: list[tuple[int, int, list[int]]] = []
    for process in processes:
        code, out, err = finish(process)
        assert code == 0, err
        told += json.loads(out)
    attempts = sorted(attempt for attempt, _, _ in told)
    assert len(attempts) == len(set(attempts)) == 18
    for attempt, began, _ in told:
        for older, _, appended in told:
            if older < attempt:
                assert max(appended, default=0) <= began, told
    everything = [checkpoint for _, _, appended in told for checkpoint in appended]
    assert len(everything) == len(set(everything))
    last = FileSystemStorage(str(tmp_path)).open("ledger").log.read()
    assert last.completed[-1].checkpoint >= max(everything)


# --- drivers that were stopped for a long time ----------------------------------------------------


class Stopping(LocalFileSystem):
    """Stops its owner, once, right before it creates a record, while `meanwhile` happens."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.meanwhile: list[Callable[[], None]] = []

    def create_if_absent(self, path: str, data: bytes):  # type: ignore[no-untyped-def]
        if path.endswith(".json") and "/log/" in path and self.meanwhile:
            self.meanwhile.pop()()
        return super().create_if_absent(path, data)


def log_on(fs: CreatesAtomically) -> DecisionLog:
    return DecisionLog.open(fs, JobPaths("ledger"))


def take_over(root: Path, decisions: int) -> None:
    """Be the next attempt, for so long that nothing of the earlier ones is left in the log."""
    mine = log_on(LocalFileSystem(str(root))).claim("second driver")
    for _ in range(decisions):
        checkpoint = mine.view.next_checkpoint
        mine.append(decision(checkpoint, mine.attempt))
        mine.prune(checkpoint)


@pytest.mark.parametrize("decisions", [0, 1, 2, 7])
@pytest.mark.parametrize("records_before", [0, 1, 4])
def test_a_driver_that_wakes_up_after_its_number_was_pruned_is_fenced(
    tmp_path: Path, decisions: int, records_before: int
) -> None:
    fs = Stopping(str(tmp_path))
    mine = log_on(fs).claim("first driver")
    for number in range(records_before):
        mine.append(decision(number, mine.attempt))
    fs.meanwhile.append(lambda: take_over(tmp_path, decisions))
    with pytest.raises(Fenced) as raised:
        mine.append(decision(99, mine.attempt))
    assert "attempt 1 is fenced" in str(raised.value)
    assert "Attempt 2 (" in str(raised.value)
    assert "stop one of them" in str(raised.value)
    view = log_on(fs).read()
    assert 99 not in [completed.checkpoint for completed in view.completed]
    assert view.orphans == (), "the driver leaves no orphan behind"
    assert view.attempt == 2
    with pytest.raises(Fenced, match="attempt 1 is fenced"):
        mine.append(decision(100, mine.attempt))
    assert log_on(fs).read() == view
    assert log_on(fs).claim("third driver").attempt == 3


@pytest.mark.parametrize("decisions", [1, 3])
def test_a_driver_stopped_in_its_very_first_claim_starts_no_second_log(
    tmp_path: Path, decisions: int
) -> None:
    """Its record would be number 1, which has no predecessor to tell by."""
    fs = Stopping(str(tmp_path))
    fs.meanwhile.append(lambda: take_over(tmp_path, decisions))
    mine = log_on(fs).claim("first driver")
    assert mine.attempt == 2
    assert [completed.attempt for completed in mine.view.completed] == [1]
    assert mine.view.next_checkpoint == decisions + 1
    assert log_on(fs).read() == mine.view


def test_a_driver_stopped_before_number_one_does_not_trust_a_listing(tmp_path: Path) -> None:
    """Even when the directory shows its orphan alone, as one that is being rewritten may."""

    class ShowsOrphanOnly(Stopping):
        @override
        def list(self, directory: str) -> tuple[str, ...]:
            names = super().list(directory)
            return names[:1] if directory.endswith("/log") and names[:1] == (ORPHAN,) else names

    orphan_first = ShowsOrphanOnly(str(tmp_path))
    orphan_first.meanwhile.append(lambda: take_over(tmp_path, 3))
    record_one = tmp_path / "ledger/log" / ORPHAN
    try:
        claimed: ClaimedLog | None = log_on(orphan_first).claim("first driver")
    except (Fenced, CheckpointError):
        claimed = None
    assert claimed is None or claimed.attempt > 1
    record_one.unlink(missing_ok=True)
    assert log_on(LocalFileSystem(str(tmp_path))).read().attempt >= 1


ORPHAN = "000000000001.json"


def test_the_name_of_the_new_owner_is_in_the_error_while_the_log_knows_it(tmp_path: Path) -> None:
    fs = Stopping(str(tmp_path))
    mine = log_on(fs).claim("first driver")
    fs.meanwhile.append(lambda: take_over(tmp_path, 0))
    with pytest.raises(Fenced, match=r"Attempt 2 \(second driver [0-9a-f]+\) owns the job"):
        mine.append(decision(1, mine.attempt))


def test_a_decision_that_landed_before_the_new_claim_is_said_to_count(tmp_path: Path) -> None:
    """Fenced between writing the decision and looking at the log: the new owner goes on from it."""

    class StoppedAfter(LocalFileSystem):
        meanwhile = False

        def create_if_absent(self, path: str, data: bytes):  # type: ignore[no-untyped-def]
            outcome = super().create_if_absent(path, data)
            if self.meanwhile:
                self.meanwhile = False
                take_over(tmp_path, 0)
            return outcome

    fs = StoppedAfter(str(tmp_path))
    mine = log_on(fs).claim("first driver")
    fs.meanwhile = True
    with pytest.raises(Fenced, match="this decision is part of it"):
        mine.append(decision(1, mine.attempt))
    assert log_on(fs).read().completed == (decision(1, 1),)


def test_two_drivers_that_call_themselves_the_same_are_two(tmp_path: Path) -> None:
    """Host name and process id can agree in two containers."""
    log = log_on(LocalFileSystem(str(tmp_path)))
    first, second = log.claim("container:1"), log.claim("container:1")
    assert (first.attempt, second.attempt) == (1, 2)
    with pytest.raises(Fenced):
        first.append(decision(1, 1))
