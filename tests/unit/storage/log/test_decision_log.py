from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.storage.storage_samples import decision, killed_at_each_step

from onceflow.core.errors import CheckpointCorrupt, Fenced, StateIncompatible, StorageError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.storage import DecisionLog, DecisionUnknown, FileSystemStorage, JobStorage
from onceflow.core.storage.filesystems.filesystem import CreateOutcome, CreationUnknown
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.record_codec import seal


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    return FileSystemStorage(str(tmp_path)).open("ledger")


def records(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "ledger/log").iterdir())


def record(root: Path, sequence: int) -> Path:
    return root / f"ledger/log/{sequence:012}.json"


# --- a job's life ---------------------------------------------------------------------------------


def test_reading_a_job_that_never_ran_is_empty_and_writes_nothing(
    storage: JobStorage, tmp_path: Path
) -> None:
    assert storage.log.read() == LogView()
    assert list(tmp_path.iterdir()) == []


def test_a_decision_is_read_by_everybody_once_appended(storage: JobStorage) -> None:
    log = storage.log.claim("driver")
    assert (log.attempt, log.view.completed, log.view.next_checkpoint) == (1, (), 1)
    log.append(decision(0, 1))
    log.append(decision(1, 1))
    assert log.view == storage.log.read()
    assert log.view.completed == (decision(0, 1), decision(1, 1))
    assert log.view.next_checkpoint == 2


def test_the_next_attempt_goes_on_from_the_last_decision(storage: JobStorage) -> None:
    first = storage.log.claim("driver")
    first.append(decision(0, 1))
    second = storage.log.claim("driver")
    assert (second.attempt, second.view.completed) == (2, (decision(0, 1),))
    second.append(decision(1, 2))
    assert storage.log.read().completed == (decision(0, 1), decision(1, 2))


def test_of_two_drivers_the_older_never_claims_again(storage: JobStorage, tmp_path: Path) -> None:
    """Also from one process: what tells drivers apart is drawn at their first claim."""
    older = storage.log.claim("driver")
    older.append(decision(0, 1))
    older = older.claim_again()
    older.check_owned()
    newer = storage.log.claim("driver")
    before = records(tmp_path)
    for ask in (older.check_owned, older.claim_again):
        with pytest.raises(Fenced, match=r"attempt 2 is fenced: attempt 3 \(driver [0-9a-f]{12}\)"):
            ask()
    assert records(tmp_path) == before
    assert newer.claim_again().attempt == 4


def test_an_append_that_is_repeated_changes_nothing(storage: JobStorage, tmp_path: Path) -> None:
    log = storage.log.claim("driver")
    log.append(decision(0, 1))
    before = records(tmp_path)
    log.append(decision(0, 1))
    assert records(tmp_path) == before


def test_a_decision_of_another_attempt_is_refused(storage: JobStorage) -> None:
    log = storage.log.claim("driver")
    with pytest.raises(Fenced, match="attempt 7 cannot decide"):
        log.append(decision(0, 7))


def test_a_checkpoint_below_the_last_decided_is_refused(storage: JobStorage) -> None:
    log = storage.log.claim("driver")
    log.append(decision(5, 1))
    with pytest.raises(CheckpointCorrupt, match="decides checkpoint 4"):
        log.append(decision(4, 1))
    assert storage.log.read() == log.view


def test_what_another_driver_claimed_meanwhile_is_seen_before_the_claim(
    storage: JobStorage, tmp_path: Path
) -> None:
    """A driver that leaves sinks behind is refused, though they came after it had looked."""
    storage.log.claim("driver", ["a", "b"])
    before = records(tmp_path)

    def check(view: LogView) -> None:
        if left := view.sinks - {"a"}:
            raise StateIncompatible(f"{sorted(left)} are left behind")

    with pytest.raises(StateIncompatible, match="'b'"):
        storage.log.claim("driver", ["a"], check=check)
    assert records(tmp_path) == before


def test_a_sink_that_is_settled_beside_an_append_is_gone_with_the_next(tmp_path: Path) -> None:
    files = Interrupted(str(tmp_path))
    log = DecisionLog(files, JobPaths("ledger")).claim("driver", ["old", "new"])
    files.meanwhile = lambda: log.settle(["old"])
    log.append(decision(0, 1))
    assert log.view.memory.sinks == ("new",)
    log.append(decision(1, 1))
    assert DecisionLog(files, JobPaths("ledger")).read().memory.sinks == ("new",)


# --- pruning --------------------------------------------------------------------------------------


def test_pruning_keeps_the_decisions_from_a_checkpoint_on(
    storage: JobStorage, tmp_path: Path
) -> None:
    log = storage.log.claim("driver")
    for number in range(5):
        log.append(decision(number, 1))
    log.prune(CheckpointId(3))
    assert records(tmp_path) == ["000000000005.json", "000000000006.json", "pruned"]
    assert log.view.completed == (decision(3, 1), decision(4, 1))
    assert storage.log.read() == log.view
    log.prune(CheckpointId(3))
    log.append(decision(5, 1))
    assert storage.log.read() == log.view


def test_pruning_never_takes_the_last_decision(storage: JobStorage) -> None:
    log = storage.log.claim("driver")
    log.prune(CheckpointId(99))
    log.append(decision(0, 1))
    log.append(decision(1, 1))
    log.prune(CheckpointId(99))
    assert storage.log.read().completed == (decision(1, 1),)
    assert storage.log.claim("driver").view.completed == (decision(1, 1),)


def test_claims_between_pruned_decisions_go_with_them(storage: JobStorage, tmp_path: Path) -> None:
    for attempt in range(1, 5):
        storage.log.claim("driver").append(decision(attempt, attempt))
    log = storage.log.claim("driver")
    log.append(decision(5, 5))
    log.prune(CheckpointId(5))
    assert records(tmp_path) == ["000000000010.json", "pruned"]
    again = storage.log.claim("driver")
    assert again.attempt == 6


def test_pruning_clears_what_killed_drivers_left_and_not_what_live_ones_write(
    storage: JobStorage, tmp_path: Path
) -> None:
    log = storage.log.claim("driver")
    for number in range(4):
        log.append(decision(number, 1))
    old = tmp_path / f"ledger/log/.000000000002.json.{'a' * 32}.tmp"
    kept_number = tmp_path / f"ledger/log/.000000000005.json.{'a' * 32}.tmp"
    live = tmp_path / f"ledger/log/.000000000009.json.{'b' * 32}.tmp"
    old.write_text("{")
    kept_number.write_text("{")
    live.write_text("{")
    log.prune(CheckpointId(3))
    assert not old.exists()
    assert not kept_number.exists(), "that record stands, so its writer has ended or lost"
    assert live.exists()
    assert storage.log.read() == log.view


def test_a_log_pruned_by_many_attempts_stays_one_record_a_retained_decision(
    storage: JobStorage, tmp_path: Path
) -> None:
    for _ in range(4):
        log = storage.log.claim("driver")
        for _ in range(10):
            number = log.view.next_checkpoint
            log.append(decision(number, log.attempt))
            log.prune(CheckpointId(number - 1))
            assert len(records(tmp_path)) <= 3 + 1  # two decisions, a claim between, the marker


# --- identity -------------------------------------------------------------------------------------


def test_the_identity_is_made_once_for_ever(storage: JobStorage, tmp_path: Path) -> None:
    first = storage.log_id
    assert len(first) == 36
    storage.log.claim("driver")
    assert FileSystemStorage(str(tmp_path)).open("ledger").log_id == first
    assert FileSystemStorage(str(tmp_path)).open("other").log_id != first


def test_a_log_without_its_identity_is_refused(storage: JobStorage, tmp_path: Path) -> None:
    storage.log.claim("driver")
    (tmp_path / "ledger/meta.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"meta\.json is gone"):
        _ = storage.log_id
    with pytest.raises(CheckpointCorrupt, match=r"meta\.json is gone"):
        storage.log.claim("driver")


def test_a_damaged_identity_is_refused(storage: JobStorage, tmp_path: Path) -> None:
    _ = storage.log_id
    meta = tmp_path / "ledger/meta.json"
    meta.write_bytes(meta.read_bytes().replace(b"-", b"_", 1))
    with pytest.raises(CheckpointCorrupt, match=r"meta\.json is damaged.*restore it"):
        _ = storage.log_id


# --- damage ---------------------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": flip,
    "first byte": lambda data: b"[" + data[1:],
    "last byte": lambda data: data[:-1] + b" ",
    "cut short": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "empty": lambda _: b"",
    "zeros": lambda data: bytes(len(data)),
    "longer": lambda data: data + data,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_a_damaged_record_is_refused_by_its_file_wherever_it_stands(
    storage: JobStorage, tmp_path: Path, damage: str, sequence: int
) -> None:
    log = storage.log.claim("driver")
    for number in range(3):
        log.append(decision(number, 1))
    path = record(tmp_path, sequence)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for use in (storage.log.read, lambda: storage.log.claim("driver")):
        with pytest.raises(CheckpointCorrupt, match="damaged") as raised:
            use()
        assert str(path) in str(raised.value)
        assert "backup" in str(raised.value)
    if sequence == 4:
        with pytest.raises(CheckpointCorrupt, match="damaged"):
            log.append(decision(3, 1))


def test_an_operator_may_give_up_a_damaged_last_decision(
    storage: JobStorage, tmp_path: Path
) -> None:
    """The test does what the error advises."""
    log = storage.log.claim("driver")
    for number in range(3):
        log.append(decision(number, 1))
    record(tmp_path, 4).write_bytes(b"")
    record(tmp_path, 4).rename(tmp_path / "moved away")
    assert storage.log.claim("driver").view.completed == (decision(0, 1), decision(1, 1))


def test_a_record_of_a_later_format_is_refused(storage: JobStorage, tmp_path: Path) -> None:
    storage.log.claim("driver")
    record(tmp_path, 2).write_bytes(seal(b'{"format":99,"kind":"new"}')[0])
    with pytest.raises(StateIncompatible, match="record format 99"):
        storage.log.read()


def test_a_renamed_record_is_refused(storage: JobStorage, tmp_path: Path) -> None:
    log = storage.log.claim("driver")
    log.append(decision(0, 1))
    record(tmp_path, 2).rename(record(tmp_path, 3))
    with pytest.raises(CheckpointCorrupt, match="holds record 2, so the file was renamed"):
        storage.log.read()


def test_a_log_that_lost_its_decisions_never_starts_over(
    storage: JobStorage, tmp_path: Path
) -> None:
    log = storage.log.claim("driver")
    log.append(decision(0, 1))
    log.append(decision(1, 1))
    log.prune(CheckpointId(1))
    record(tmp_path, 3).unlink()
    for use in (storage.log.read, lambda: storage.log.claim("driver")):
        with pytest.raises(
            CheckpointCorrupt, match="Starting over would lose rows or write them twice"
        ):
            use()


def test_a_log_that_was_cut_below_its_last_decision_is_refused_by_its_directory(
    storage: JobStorage, tmp_path: Path
) -> None:
    for _ in range(2):
        storage.log.claim("driver")
    record(tmp_path, 1).unlink()
    for use in (storage.log.read, lambda: storage.log.claim("driver")):
        with pytest.raises(CheckpointCorrupt, match=f"{tmp_path}/ledger/log: .*write them twice"):
            use()


def test_other_files_in_the_directory_are_left_alone(storage: JobStorage, tmp_path: Path) -> None:
    log = storage.log.claim("driver")
    notes = tmp_path / "ledger/log/README"
    notes.write_text("do not delete")
    log.append(decision(0, 1))
    log.append(decision(1, 1))
    log.prune(CheckpointId(1))
    assert storage.log.read() == log.view
    assert notes.exists()


# --- unknown outcomes -----------------------------------------------------------------------------


class Interrupted(LocalFileSystem):
    """Does something else once while a record is created."""

    meanwhile: Callable[[], None] | None = None

    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            meanwhile()
        return super().create_if_absent(path, data)


class Unreliable(LocalFileSystem):
    """Loses the reply of the next creations of records, before or after they are done."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.losses: list[str] = []
        self.unreadable = False

    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        loss = self.losses.pop(0) if self.losses else "none"
        if loss == "done":
            super().create_if_absent(path, data)
        if loss == "full":
            raise StorageError("disk full")
        if loss != "none":
            raise CreationUnknown("the reply is lost")
        return super().create_if_absent(path, data)

    def list(self, directory: str) -> tuple[str, ...]:
        if self.unreadable:
            raise StorageError("cannot list")
        return super().list(directory)


@pytest.mark.parametrize("losses", [["done"], ["not done"], ["done", "done"], ["not done", "done"]])
def test_a_decision_whose_reply_was_lost_is_found_and_stands(
    tmp_path: Path, losses: list[str]
) -> None:
    fs = Unreliable(str(tmp_path))
    log = DecisionLog.open(fs, JobPaths("ledger")).claim("driver")
    fs.losses = list(losses)
    log.append(decision(0, 1))
    log.append(decision(1, 1))
    assert DecisionLog.open(fs, JobPaths("ledger")).read().completed == (
        decision(0, 1),
        decision(1, 1),
    )


@pytest.mark.parametrize(
    "losses", [["done"] * 3, ["not done"] * 3, ["done", "full"], ["not done", "full"]]
)
def test_a_decision_that_cannot_be_found_out_is_an_error_that_is_neither_yes_nor_no(
    tmp_path: Path, losses: list[str]
) -> None:
    fs = Unreliable(str(tmp_path))
    log = DecisionLog.open(fs, JobPaths("ledger")).claim("driver")
    fs.losses = [*losses, *(["full"] * (3 - len(losses)))]
    with pytest.raises(
        DecisionUnknown, match=r"it is not known whether record 2 of attempt 1"
    ) as got:
        log.append(decision(0, 1))
    assert not isinstance(got.value, StorageError), "a StorageError means: surely not appended"
    fs.losses = []
    log.append(decision(0, 1))  # asked again when storage is back, it is found or made
    assert DecisionLog.open(fs, JobPaths("ledger")).read().completed == (decision(0, 1),)


@pytest.mark.parametrize("reached", ["done", "not done"])
def test_a_driver_claims_again_after_a_claim_whose_reply_was_lost(
    tmp_path: Path, reached: str
) -> None:
    fs = Unreliable(str(tmp_path))
    log = DecisionLog.open(fs, JobPaths("ledger")).claim("driver")
    fs.losses = [reached, "full", "full"]
    with pytest.raises(DecisionUnknown):
        log.claim_again()
    fs.losses = []
    assert log.claim_again().attempt == (3 if reached == "done" else 2)
    with pytest.raises(Fenced):
        DecisionLog.open(fs, JobPaths("ledger")).claim("another")
        log.claim_again()


def test_a_decision_that_surely_was_not_appended_is_a_storage_error(tmp_path: Path) -> None:
    fs = Unreliable(str(tmp_path))
    log = DecisionLog.open(fs, JobPaths("ledger")).claim("driver")
    fs.losses = ["full"]
    with pytest.raises(StorageError, match="disk full"):
        log.append(decision(0, 1))
    assert DecisionLog.open(fs, JobPaths("ledger")).read().completed == ()
    log.append(decision(1, 1))


def test_a_decision_that_cannot_be_verified_after_it_was_written_is_unknown(tmp_path: Path) -> None:
    fs = Unreliable(str(tmp_path))
    log = DecisionLog.open(fs, JobPaths("ledger")).claim("driver")
    fs.unreadable = True
    with pytest.raises(DecisionUnknown, match="cannot list"):
        log.append(decision(0, 1))
    fs.unreadable = False
    log.append(decision(0, 1))
    assert log.view == DecisionLog.open(fs, JobPaths("ledger")).read()


# --- crashes --------------------------------------------------------------------------------------

APPEND_AND_DIE = """
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileSystemStorage
from tests.unit.storage.storage_samples import decision

def prepare(root):
    log = FileSystemStorage(root).open("ledger").log.claim("driver")
    log.append(decision(0, log.attempt))
    log.append(decision(1, log.attempt))
    def run():
        log.append(decision(2, log.attempt))
        log.prune(CheckpointId(2))
    return run

killed_at_each_step(prepare, ("open", "write", "fsync", "link", "unlink", "listdir"))
"""


def test_a_driver_killed_at_any_step_of_append_and_prune_leaves_a_log_to_go_on_from(
    tmp_path: Path,
) -> None:
    """Kills a real process before and after each system call of an append and a prune."""
    ends: set[int] = set()
    statuses = killed_at_each_step(APPEND_AND_DIE, tmp_path)
    for step, status in enumerate(statuses, start=1):
        root = tmp_path / str(step)
        log = FileSystemStorage(str(root)).open("ledger").log
        view = log.read()
        last = view.completed[-1]
        assert last.checkpoint in {1, 2}
        assert last == decision(last.checkpoint, 1)
        ends.add(last.checkpoint)
        successor = log.claim("next driver")
        assert (successor.attempt, successor.view.completed[-1]) == (2, last)
        successor.append(decision(3, 2))
        successor.prune(CheckpointId(3))
        assert [name for name in records(root) if not name.startswith(".")] == [
            f"{successor.view.last_sequence:012}.json",
            "pruned",
        ]
        assert status != 0 or last.checkpoint == 2
    assert ends == {1, 2}
    assert len(statuses) > 20, "the driver was hardly ever killed"
