"""Which branches of the protocol the schedules reach: `script/simulate --coverage`.

Measured by the coverage library in processes of their own, which import the protocol under it: two
run jobs, one the batches that Spark writes. What no schedule reaches is excused here by file,
function and line, with a reason, or is reported. So is an excuse that excuses nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_CORE = Path(__file__).parents[2] / "core"
PURE = (_CORE / "protocol", _CORE / "commit")
"""The rooms where decisions are made; no two of their files have one name."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "raise ValueError": "refuses an argument",
        "raise InvariantViolation": "what only a bug can bring",
        "return unreachable": "no member of a closed union is left",
        "case _:": "no member of a closed union is left, or an argument is refused",
        "assert_never": "no member of a closed union is left",
    }
)
"""By how a line begins, in every function."""

_EVENT_TIME = "the model has no event time"
_BY_HAND = "asked by `onceflow txn`, not by a job"

NOT_MODELLED: Mapping[str, str] = MappingProxyType(
    {
        "bootstrap.py": "savepoints that are made of DataFrames are not modelled",
        "by_hand.py": _BY_HAND,
        "logged_decisions.py": _BY_HAND,
        "loop.py": "asks the model's targets by its own clock, with the same queues and steps",
        "watermarks.py": _EVENT_TIME,
        "proof.py": "asked by the driver's page, which reads log and targets beside the job",
        "record_times.py": "measures latencies, and decides nothing",
    }
)
"""Files that no schedule runs."""


@dataclass(frozen=True)
class Excuse:
    """Why a function is not reached, or only these of its lines: by how they begin."""

    reason: str
    lines: tuple[str, ...] = ()


_NAMES = "names are made and read by sinks and people; the model has transactions as values"
_DAMAGED = "damaged storage is not modelled"
_GUARD = "an attempt that is over tells its coordinator nothing; this holds if it did"
_BLOCKERS = "whom sinks wait for is told to people, and decides nothing"
_STORAGE = "a savepoint begins where its log is"

_SLOTS_DIE = "a slot of the model is killed; tests/unit/protocol/test_slot_loop.py has its end"
_IN_TIME = "what begins in the model begins in time"
_NO_HEARTBEATS = "slots of the model are never silent, and are as their driver"
EXCUSES: Mapping[str, Excuse] = MappingProxyType(
    {
        "attempt.py:AttemptLoop.wait_s": Excuse("drivers of the model wait as they are drawn to"),
        "attempt.py:AttemptLoop.completed": Excuse("the model asks the coordinator"),
        "attempt.py:AttemptLoop.on": Excuse(_GUARD, ("case Over", "self._keep_request")),
        "attempt.py:AttemptLoop.tick": Excuse(
            "the model says when all slots have left, and looks no more",
            ("case Leaving", "if not len(self._slots)", "self._close(", "case Over", "pass"),
        ),
        "attempt.py:AttemptLoop._hear": Excuse(
            f"{_NO_HEARTBEATS}; {_BLOCKERS}",
            (
                "self._end(error)",
                "if lost :=",
                "self._end(lost)",
                "case BlockersListed",
                "self._decide(fact)",
                "if self._coordinator",
                "self._coordinator.note_blockers",
                "if slot in self._slots",
            ),
        ),
        "attempt.py:AttemptLoop._admit": Excuse(
            _NO_HEARTBEATS, ("self._decide(DismissSlot", "self._end(refusal)")
        ),
        "attempt.py:AttemptLoop._hear_slot": Excuse(
            _NO_HEARTBEATS,
            (
                "self._decide(message)",
                "self._release(slot)",
                "case Hello",
                "text = ",
                "self._end(errors.MessageCorrupt",
            ),
        ),
        "attempt.py:AttemptLoop._on_recovered": Excuse(
            "slots are deployed after recovery", ("elif isinstance",)
        ),
        "attempt.py:AttemptLoop._check_recovery": Excuse(_IN_TIME, ("self._end(",)),
        "attempt.py:AttemptLoop._on_discovered": Excuse(
            "sources of the model lose no split", ("self._end(", "return")
        ),
        "attempt.py:AttemptLoop._begin_savepoint": Excuse(
            "users of the model wait for ever", ("if begun.stands",)
        ),
        "attempt.py:AttemptLoop._gather": Excuse(_IN_TIME, ("self._end(",)),
        "attempt.py:AttemptLoop._start": Excuse(_IN_TIME, ("self._end(",)),
        "attempt.py:AttemptLoop._too_late": Excuse(_IN_TIME),
        "attempt.py:AttemptLoop._hear_last_word": Excuse(
            _NO_HEARTBEATS, ("self._release(slot)", "self._decide(message)")
        ),
        "slot.py:SlotLoop.on": Excuse(
            _SLOTS_DIE, ("case _Closing", "self._hear_last", "case _Over", "pass")
        ),
        "slot.py:SlotLoop._hear": Excuse(
            f"{_SLOTS_DIE}; its parts talk to it by themselves",
            (
                "self._close(",
                "pass",
                "self._exit(",
                "case messages.PartFailed",
                "self._fail(",
                "case PartsClosed",
            ),
        ),
        "slot.py:SlotLoop._deploy": Excuse("slots are deployed once", ("self._fail(",)),
        "slot.py:SlotLoop._do_if_running": Excuse(
            "slots of the model restore at once", ("if isinstance",)
        ),
        "slot.py:SlotLoop._on_restored": Excuse(
            "what the model restores is whole", ("self._phase, self._leaves", "self._fail(")
        ),
        "slots.py:SlotRoster.hear": Excuse(_NO_HEARTBEATS, ("if slot in",)),
        "slots.py:slot_error": Excuse(
            "slots of the model fail as onceflow does", ("text = ", "return SlotFailed")
        ),
        "messages.py:Deploy.operator": Excuse("the model restores by itself"),
        "slot.py:SlotLoop.wait_s": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop.tick": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._beat": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._fail": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._close": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._close_parts": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._hear_last": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._on_restored_late": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._end": Excuse(_SLOTS_DIE),
        "slot.py:SlotLoop._exit": Excuse(_SLOTS_DIE),
        "slots.py:SlotRoster.find_refusal": Excuse(_NO_HEARTBEATS, ("return SettingsRefused",)),
        "slots.py:SlotRoster._find_address_refusal": Excuse(
            "slots of the model have no addresses",
            ("return SettingsRefused", "other = ", "is_elsewhere = ", "if slot != "),
        ),
        "slots.py:SlotRoster.find_lost": Excuse(_NO_HEARTBEATS),
        "decisions.py:Barrier.overtakes": Excuse("asked by the runtime's metrics"),
        "alignment.py:SourceBarriers.overtakes_at_s": Excuse("sources of the model poll"),
        "alignment.py:BarrierAlignment.on_announced": Excuse(
            "a barrier is announced after a newer one only while both have time left, and the"
            " coordinator triggers such checkpoints one at a time",
            ("return tuple(actions)",),
        ),
        "coordinator.py:CheckpointCoordinator.on_savepoint_end": Excuse(
            "savepoints are always written", ("return (*self._fail(",)
        ),
        "coordinator.py:CheckpointCoordinator.on_ack": Excuse(_GUARD, ("return ()",)),
        "coordinator.py:CheckpointCoordinator.on_logged": Excuse(_GUARD, ("return ()",)),
        "coordinator.py:CheckpointCoordinator.on_append_failure": Excuse(_GUARD, ("return ()",)),
        "coordinator.py:CheckpointCoordinator.note_blockers": Excuse(_BLOCKERS),
        "ids.py:TransactionId.__post_init__": Excuse(_NAMES),
        "ids.py:TransactionId.name": Excuse(_NAMES),
        "ids.py:TransactionId.parse": Excuse(_NAMES),
        "ids.py:sink_id_of": Excuse(_NAMES),
        "ids.py:_within": Excuse(_NAMES),
        "in_flight.py:InputQueues.waiting": Excuse("asked by the runtime's metrics"),
        "in_flight.py:InputQueues.is_open": Excuse("the model attaches every channel at once"),
        "in_flight.py:InputQueues.forget": Excuse(
            "only what is recorded is forgotten", ("if self._recording",)
        ),
        "rules.py:replay": Excuse(_DAMAGED, ("raise CheckpointCorrupt",)),
        "rules.py:apply": Excuse(_DAMAGED, ("raise CheckpointCorrupt",)),
        "rules.py:next_decision": Excuse("a fenced attempt of the model ends", ("raise Fenced",)),
        "rules.py:prunable": Excuse(
            "a job of the model prunes after its first decision", ("return view.orphans",)
        ),
        "planner.py:BatchMemory.as_decided": Excuse(
            "targets of batches never go back to an older copy"
        ),
        "queue.py:StepQueue._retry_or_give_up": Excuse(
            "no target of the model waits for a person", ("return StepFailed(kind",)
        ),
        "steps.py:PlannedSteps.outcome": Excuse(
            "older copies of the log are refused before anything is rolled back, and no abort of"
            " the model is lost",
            ('return StepFailed("committed"', "case Lost(", "return StepFailed("),
        ),
        "steps.py:to_committables": Excuse("asked for the words of an error"),
        "planner.py:judge_transaction": Excuse(
            "targets list their own sink's transactions, and no member of an enum is left",
            ("return Standing.FOREIGN", "case Coverage.FORGOTTEN"),
        ),
        "snapshots.py:begin_anew": Excuse("nobody deletes the model's state to begin anew"),
        "savepoint.py:is_restored": Excuse(_STORAGE, ("return bool(view.decided) and where",)),
        "savepoint.py:check_savepoint": Excuse(
            f"one job with one log, and no savepoint of DataFrames: {_STORAGE}",
            (
                "raise SavepointRefused",
                "return",
            ),
        ),
        "savepoint.py:check_targets": Excuse(
            "nobody goes back to storage that the job has left", ("raise SavepointRefused",)
        ),
        "savepoint.py:check_form": Excuse("the model has one state backend"),
        "target_records.py:newest_attempt": Excuse("attempts of the model are never claimed above"),
        "snapshots.py:paths_of": Excuse("the model asks for handles"),
        "splits.py:merge_discovered": Excuse("splits of the model have no event time"),
        "splits.py:describe_moved": Excuse("sources of the model lose no split"),
        "splits.py:default_max_parallelism": Excuse("once in a job's life, before it begins"),
        "splits.py:assign_splits": Excuse("refuses an argument", ("twice = ",)),
    }
)
"""By file and function."""


@dataclass
class Report:
    """The coverage of the measured files."""

    unreached: list[str] = field(default_factory=list[str])
    used: set[str] = field(default_factory=set[str])
    """The excuses that were needed, as `file:function: line`."""

    def needless(self, excuses: Mapping[str, Excuse]) -> list[str]:
        """Return what of `excuses` excuses nothing."""
        return [
            f"{name}: the excuse {text!r} excuses nothing: schedules reach it"
            for name, excuse in excuses.items()
            for text in excuse.lines or ("",)
            if f"{name}: {text}" not in self.used
        ]


def unreached(schedules: int, seed: int) -> list[str]:
    """Return the lines and branches that no schedule reached, and excuses that excuse nothing.

    Besides those that are drawn, the schedules run by which broken variants were caught.
    """
    with tempfile.TemporaryDirectory() as directory:
        data, sources = f"--data-file={directory}/data", ",".join(map(str, PURE))
        drawn = ["--schedules", str(schedules), "--seed", str(seed)]
        for kind in (drawn, ["--batches", *drawn], ["--rare"]):
            run = ["run", "--branch", "--append", f"--source={sources}", data]
            _coverage(*run, "-m", "tests.simulation", *kind)
        file = Path(directory) / "report.json"
        _coverage("json", data, "-q", "-o", str(file))
        files: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["files"]
    whole = Report()
    for path, measured in sorted(files.items()):
        if Path(path).name in NOT_MODELLED:
            continue
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        report = judge(Path(path).name, lines, measured["functions"], EXCUSES)
        whole.unreached += report.unreached
        whole.used |= report.used
    return [*whole.unreached, *whole.needless(EXCUSES)]


def judge(
    file: str,
    lines: Sequence[str],
    functions: Mapping[str, Mapping[str, Sequence[Any]]],
    excuses: Mapping[str, Excuse],
) -> Report:
    """Return what `functions`, as the coverage library measured them, leave of a file's `lines`."""
    report = Report()

    def is_excused(name: str, number: int) -> bool:
        line = lines[number - 1]
        if any(line.startswith(begin) for begin in REASONS):
            return True
        if name not in excuses:
            return False
        needed = [text for text in excuses[name].lines or ("",) if line.startswith(text)]
        report.used.update(f"{name}: {text}" for text in needed)
        return bool(needed)

    for function, counts in functions.items():
        name = f"{file}:{function}"
        missing = [int(number) for number in counts["missing_lines"]]
        for number in missing:
            if not is_excused(name, number):
                report.unreached.append(f"{name}:{number} never runs: {lines[number - 1]}")
        for begin, end in counts["missing_branches"]:
            # A line that never runs is told already, whichever way leads there.
            if begin in missing or end in missing or is_excused(name, begin):
                continue
            way = f"goes to {lines[end - 1]}" if end > 0 else "leaves the function"
            report.unreached.append(f"{name}:{begin} never {way}: {lines[begin - 1]}")
    return report


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], check=True, stdout=sys.stderr)
